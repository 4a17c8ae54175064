"""The independent reference: Hugging Face's Llama in float64, torch's optimizer, torch's clipping, torch's mean loss.

Parity among our own scripts cannot see a mistake that all of them share. So from the product comes only what a run
starts from, initial weights by name and the windows of a step; how a loss becomes an update is written here again, as
a user of torch would write it, in one process and without accumulation.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from data import stream_windows
from model import ModelConfig, init_values
from support.tokens import open_tokens

# The run that harness.train() asks for, and what it leaves to the scripts' defaults.
SEED, GLOBAL_BATCH = 1337, 12
LR, MIN_LR, WARMUP, CLIP, WEIGHT_DECAY, BETAS, EPS = 1e-3, 1e-4, 5, 0.1, 0.1, (0.9, 0.95), 1e-8
LAYER = {
    "attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
    "wq": "self_attn.q_proj", "wk": "self_attn.k_proj", "wv": "self_attn.v_proj", "wo": "self_attn.o_proj",
    "w_gate": "mlp.gate_proj", "w_up": "mlp.up_proj", "w_down": "mlp.down_proj",
}  # fmt: skip
ENDS = {"tok_emb": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}


class Rotary(torch.nn.Module):
    """Hugging Face's rotary angles, whose own module rounds them to float32 whatever the model's dtype."""

    def __init__(self, head_dim: int, theta: float):
        super().__init__()
        self.frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """position_ids (1, T) -> cos and sin (1, T, head_dim)"""
        angle = torch.cat([position_ids[..., None] * self.frequency] * 2, -1)
        return angle.cos(), angle.sin()


def llama(cfg: ModelConfig) -> LlamaForCausalLM:
    """Hugging Face's model in float64, without the two places in which it computes in float32."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=cfg.vocab_size,
            hidden_size=cfg.n_embd,
            intermediate_size=cfg.n_ff,
            num_hidden_layers=cfg.n_layer,
            num_attention_heads=cfg.n_head,
            num_key_value_heads=cfg.n_kv_head,
            max_position_embeddings=cfg.seq_len,
            tie_word_embeddings=cfg.tie,
            use_cache=False,
            attn_implementation="sdpa",  # the other one takes its softmax in float32
        )
    ).double()
    for name, _ in list(model.named_modules()):
        if name.endswith("norm"):
            model.set_submodule(name, torch.nn.RMSNorm(cfg.n_embd, cfg.norm_eps, dtype=torch.float64))
    model.model.rotary_emb = Rotary(cfg.n_embd // cfg.n_head, cfg.rope_theta)
    return model


def parameters(model: LlamaForCausalLM, cfg: ModelConfig) -> dict[str, torch.nn.Parameter]:
    """The product's name of a parameter -> Hugging Face's parameter; a tied head is the embedding."""
    names = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in ENDS.items() if not (cfg.tie and ours == "head")}
    for i in range(cfg.n_layer):
        names |= {f"blocks.{i}.{ours}.weight": f"model.layers.{i}.{theirs}.weight" for ours, theirs in LAYER.items()}
    theirs = dict(model.named_parameters())
    assert sorted(names.values()) == sorted(theirs)
    return {ours: theirs[name] for ours, name in names.items()}


def untrained(cfg: ModelConfig) -> tuple[LlamaForCausalLM, dict[str, torch.nn.Parameter], torch.optim.AdamW]:
    """A model with the product's initial weights, its parameters by the product's names, and their optimizer."""
    model = llama(cfg)
    params = parameters(model, cfg)
    for name, param in params.items():
        init_values(param.data.view(-1), name, 0, cfg, SEED)
    groups = [
        {"params": [p for p in params.values() if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in params.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return model, params, torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up over WARMUP steps, then the half cosine from LR to MIN_LR that would end at step `steps`."""
    if step < WARMUP:
        return LR * (step + 1) / WARMUP
    return MIN_LR + (LR - MIN_LR) * (1 + math.cos(math.pi * (step - WARMUP) / (steps - WARMUP))) / 2


def count_by_hand(logits: Callable[[Tensor], Tensor], tokens, T: int) -> float:
    """Mean loss over all validation targets that count, one window and one target after the other."""
    total, targets = 0.0, 0
    for w in range(tokens.n_windows(T)):
        x, y = tokens.batch(np.array([w]), T, None)
        log_p = logits(x)[0].log_softmax(-1)
        for t, target in enumerate(y[0].tolist()):
            if target != -1:
                total, targets = total - log_p[t, target].item(), targets + 1
    return total / targets


def reference(
    model_json: Path, data: str, steps: int, tie: bool = False, eval_every: int = 0
) -> tuple[list[dict], dict[str, Tensor]]:
    """Train in one process -> a row per step (step, loss, grad_norm; val_loss where evaluated), and the final state.

    The state has a checkpoint's names: weights, exp_avg.NAME, exp_avg_sq.NAME.
    """
    cfg, tokens = ModelConfig(**json.loads(model_json.read_text()) | {"tie": tie}), open_tokens(data)
    model, params, optimizer = untrained(cfg)
    rows = []
    for step in range(steps):
        windows = stream_windows(SEED, step * GLOBAL_BATCH, GLOBAL_BATCH, tokens.n_windows(cfg.seq_len))
        x, y = tokens.batch(windows, cfg.seq_len, None)
        loss = F.cross_entropy(model(x).logits.flatten(0, 1), y.flatten(), ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        optimizer.step()
        rows.append({"step": step, "loss": loss.item(), "grad_norm": norm.item()})
        if eval_every and ((step + 1) % eval_every == 0 or step + 1 == steps):
            with torch.no_grad():
                rows[-1]["val_loss"] = count_by_hand(lambda x: model(x).logits, open_tokens(data, "val"), cfg.seq_len)
    state = {name: p.detach() for name, p in params.items()}
    for moment in ("exp_avg", "exp_avg_sq"):
        state |= {f"{moment}.{name}": optimizer.state[p][moment] for name, p in params.items()}
    return rows, state
