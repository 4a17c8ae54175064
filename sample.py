"""Generate text from any checkpoint, of any layout, in one process.

    python sample.py runs/NAME --prompt "def main("                  # the newest checkpoint of a run
    python sample.py runs/NAME/ckpt/step_00001000 --tokens 500 --temperature 0
    python sample.py llama/ --prompt "12 7 9"                        # a Hugging Face folder, ids without a tokenizer

The lesson: a token's keys and values depend only on what came before it, so they are computed once and kept. One new
token then costs 2 FLOPs per weight and reads 2 x layers x KV heads x head size numbers per position kept; without the
cache it would cost the whole context again. Positions are rotated before they are kept, so a full context cannot just
drop its oldest token: its newer half is read again from position 0.
"""

import codecs
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from checkpoint import find_checkpoint, whole_piece
from export import load_hf, open_checkpoint, tokenizer_of
from model import GPT, check_config, load_config, params
from support.flags import UserError, parse_flags, print_help, run_cli
from support.prepare import encode_text, load_tokenizer
from support.rendezvous import pick_device


@dataclass
class Config:
    """sample.py's flags; the comment behind a field is its --help text."""

    prompt: str = ""  # text to go on from; ids and blanks where no tokenizer is known [the start of a document]
    tokens: int = 200  # at most so many new ones; an end-of-text ends it before
    temperature: float = 0.8  # of the softmax; 0: always the likeliest token
    top_k: int = 50  # draw among so many likeliest tokens; 0: among all
    seed: int = 1  # of the draws; same seed, same text
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: CUDA if there is a GPU
    dtype: Literal["", "float64", "float32", "bfloat16", "float16"] = (
        ""  # of weights and compute [bfloat16 on GPU; float32 on CPU]
    )


def load_model(path: Path, dtype: torch.dtype, device: torch.device) -> GPT:
    """The whole model of one of our checkpoints or of a Hugging Face folder. Host memory: one tensor beside it."""
    ours = (path / "meta.json").is_file()
    cfg, read = open_checkpoint(path) if ours else (load_config(str(path / "config.json")), None)
    check_config(cfg)
    model = GPT(cfg)
    for name, param in params(cfg).items():
        tensor = read(name).to(device, dtype) if ours else torch.empty(param.shape, dtype=dtype, device=device)
        model.set_param(name, tensor)
    if not ours:
        load_hf(path, {name: whole_piece(param.detach()) for name, param in model.named_parameters()}, cfg)
    model.set_buffers(dtype, device)
    return model


def new_cache(model: GPT) -> Tensor:
    """Keys and values of every layer, (n_layer, 2, KV, seq_len, hd); 2 x KV x hd numbers per layer and position."""
    cfg, like = model.cfg, model.tok_emb.weight
    return torch.zeros(cfg.n_layer, 2, cfg.n_kv_head, cfg.seq_len, cfg.head_dim, dtype=like.dtype, device=like.device)


@torch.no_grad()
def forward_cached(model: GPT, ids: list[int], cache: Tensor, past: int) -> Tensor:
    """Logits (V,) after the last of `ids`, at positions past .. past + T - 1, whose keys and values are cached."""
    T, end = len(ids), past + len(ids)
    cos, sin = model.cos[past:end], model.sin[past:end]
    seen = torch.ones(T, end, dtype=torch.bool, device=cache.device).tril(past)  # query t sees positions 0 .. past + t

    def core(keys: Tensor, values: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """In the place of model.causal: the new keys and values go into a layer's cache (KV, seq_len, hd)."""
        keys[:, past:end], values[:, past:end] = k[0], v[0]
        seen_keys, seen_values, grouped = keys[None, :, :end], values[None, :, :end], q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, seen_keys, seen_values, attn_mask=seen, enable_gqa=grouped)

    h = model.embed(torch.tensor([ids], device=cache.device))  # (1, T, C)
    for block, layer in zip(model.blocks, cache):
        h = h + block.attention(block.attn_norm(h), cos, sin, functools.partial(core, *layer))
        h = h + block.mlp(block.mlp_norm(h))
    return model.logits(h[:, -1])[0]


def generate(model: GPT, prompt: list[int], cfg: Config, allowed: Tensor, end: int | None) -> Iterator[int]:
    """Up to cfg.tokens new ids after `prompt`, one id or more, drawn among `allowed` (1-D int64). Stops at `end`."""
    draws = torch.Generator().manual_seed(cfg.seed)  # on the CPU: GPUs draw other numbers
    cache, context = new_cache(model), model.cfg.seq_len
    ids, new, past = list(prompt), list(prompt), 0
    for _ in range(cfg.tokens):
        if past + len(new) > context:
            new, past = ids[-max(1, context // 2) :], 0
        logits = forward_cached(model, new, cache, past).double().cpu()[allowed]
        past += len(new)
        if not logits.isfinite().all():
            reason = "broken weights, or --dtype float16 overflows"
            raise UserError(f"the logits after {len(ids)} tokens are not finite: {reason}")
        if cfg.temperature:
            top, places = logits.topk(min(cfg.top_k or len(logits), len(logits)))
            place = places[torch.multinomial(((top - top[0]) / cfg.temperature).softmax(0), 1, generator=draws)]
        else:
            place = logits.argmax()
        new = [int(allowed[place])]
        if new[0] == end:
            return
        ids += new
        yield new[0]


def main() -> None:
    words = sys.argv[1:]
    if not words or any(word in ("-h", "--help") for word in words):
        print_help(Config, __doc__)
        return
    if words[0].startswith("-"):
        raise UserError(f"{words[0]} comes too early: python sample.py CHECKPOINT_OR_RUN_FOLDER, then flags")
    cfg = parse_flags(Config, words[1:])
    for key in ("tokens", "temperature", "top_k", "seed"):
        if getattr(cfg, key) < 0:
            raise UserError(f"--{key.replace('_', '-')} {getattr(cfg, key)}: allowed is 0 or more")
    if cfg.seed >= 1 << 63:
        raise UserError(f"--seed {cfg.seed}: allowed is less than 2**63")
    cfg.prompt = cfg.prompt.encode(errors="surrogateescape").decode(errors="replace")  # bytes that are no UTF-8
    path = find_checkpoint(words[0])
    name = tokenizer_of(path)
    encoding = load_tokenizer(name) if name else None
    device = pick_device(cfg)
    dtype = getattr(torch, cfg.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    model = load_model(path, dtype, device)
    V = model.cfg.vocab_size

    if encoding is None:
        try:
            prompt = [int(word) for word in cfg.prompt.split()]
        except ValueError:
            prompt = []
        if not prompt or not all(0 <= i < V for i in prompt):
            allowed = f"--prompt takes ids from 0 to {V - 1}, such as --prompt '1 2 3'"
            raise UserError(f"no tokenizer is known for {path}: {allowed}")
        for token in generate(model, prompt, cfg, torch.arange(V), None):
            print(token, end=" ", flush=True)
        print()
        return
    prompt = encode_text(encoding, cfg.prompt).tolist() or [encoding.eot_token]
    # what training text can hold: ordinary tokens and the end-of-text; no padding of the vocabulary, no unused special
    known = {encoding.encode_single_token(token) for token in encoding.token_byte_values()} | {encoding.eot_token}
    allowed = torch.tensor(sorted(token for token in known if token < V))
    if max(prompt) >= V:
        raise UserError(f"--prompt has the token {max(prompt)} of {name}, the model knows ids below {V}")
    sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character must not end the run
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")  # a character may take several tokens
    print(cfg.prompt, end="", flush=True)
    for token in generate(model, prompt, cfg, allowed, encoding.eot_token):
        print(utf8.decode(encoding.decode_single_token_bytes(token)), end="", flush=True)
    print(utf8.decode(b"", final=True))


if __name__ == "__main__":
    run_cli(main)
