"""A Llama-style GPT, and everything about it that is arithmetic.

RMSNorm, rotary positions, SwiGLU, grouped-query attention, no biases. The attention core and the MLP core are plain
functions of their weights that read head counts from the weight shapes, so a tensor-parallel rank runs the very same
code on its slices. Here too: initial weights by name, dropout by name, and the parameter, FLOP and activation counts
that the training scripts print beside what they measure.

    python model.py             # the named sizes: parameters, FLOPs per token, bytes of training state

Papers: Llama 2 (arXiv 2307.09288), RoPE (2104.09864), SwiGLU (2002.05202), GQA (2305.13245), RMSNorm (1910.07467).
"""

import dataclasses
import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from support.flags import UserError

IGNORE = -1  # a target with this id does not count in the loss


@dataclass(frozen=True)
class ModelConfig:
    n_layer: int
    n_head: int
    n_kv_head: int
    n_embd: int
    n_ff: int  # width inside SwiGLU
    vocab_size: int  # 0: the data's
    seq_len: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tie: bool = False  # output head shares the embedding's weights
    dropout: float = 0.0  # on the embedding and on what each half of a block adds; never inside attention

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head


SIZES = {  # layers, heads, kv heads, width, SwiGLU, vocabulary, sequence
    "tiny": ModelConfig(4, 4, 2, 128, 352, 0, 128),
    "124m": ModelConfig(12, 12, 12, 768, 2048, 50304, 1024, tie=True),
    "350m": ModelConfig(24, 16, 16, 1024, 2736, 50304, 1024, tie=True),
    "1b": ModelConfig(16, 32, 8, 2048, 8192, 50304, 2048),
    "3b": ModelConfig(28, 24, 8, 3072, 8192, 50304, 2048),
    "6b": ModelConfig(32, 32, 8, 4096, 11008, 50304, 2048),
    "7b": ModelConfig(32, 32, 32, 4096, 11008, 32000, 4096),  # Llama-2-7B
    "13b": ModelConfig(40, 40, 40, 5120, 13824, 32000, 4096),  # Llama-2-13B
}


def load_config(name: str) -> ModelConfig:
    """A named size, or a JSON file: our own fields, or a Hugging Face Llama config.json.

    Raises UserError for an unknown name, a field that is missing, and a feature of the file that this model lacks.
    """
    if name in SIZES:
        return SIZES[name]
    if not os.path.isfile(name):
        raise UserError(f"--model {name}: neither a size ({', '.join(SIZES)}) nor a JSON file")
    try:
        with open(name, encoding="utf-8-sig") as file:
            spec = json.load(file)
    except ValueError as error:
        raise UserError(f"--model {name}: not JSON ({error})") from None
    if not isinstance(spec, dict):
        raise UserError(f"--model {name}: holds a {type(spec).__name__}, expected an object with the model's fields")
    if spec.get("model_type", "llama") != "llama" or {"dim", "n_layers"} <= spec.keys():
        found = f"model_type is {spec['model_type']!r}" if "model_type" in spec else "this is Meta's own params.json"
        raise UserError(f"--model {name}: {found}; only Hugging Face's config.json of a Llama is read")
    if "hidden_size" in spec:
        spec = _from_hf(name, spec)
    fields = {f.name: f for f in dataclasses.fields(ModelConfig)}
    unknown = [key for key in spec if key not in fields]
    missing = [key for key, f in fields.items() if f.default is dataclasses.MISSING and key not in spec]
    if unknown or missing:
        found = f"unknown fields {unknown}, missing fields {missing}"
        raise UserError(f"--model {name}: {found}; the fields are {list(fields)}; only our own and Llama's are read")
    return ModelConfig(**{key: expect(name, key, value, fields[key].type) for key, value in spec.items()})


def expect(name: str, key: str, value: object, kind: type) -> object:
    """The value as its field's kind: a whole number is a float too, a bool is neither. UserError if it is another."""
    if isinstance(value, bool) != (kind is bool) or not isinstance(value, (int, float) if kind is float else kind):
        found = "missing" if value is None else repr(value)
        raise UserError(f"--model {name}: {key} is {found}, expected {kind.__name__}")
    return kind(value)


FROM_HF = {  # Hugging Face's name of a field, where it is another
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "n_embd": "hidden_size",
    "n_ff": "intermediate_size",
    "seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tie": "tie_word_embeddings",
}


def _from_hf(name: str, hf: dict) -> dict:
    """Fields of a Hugging Face Llama config; what it asks for beyond this model is refused by name."""
    hf = {key: value for key, value in hf.items() if value is not None}  # null stands for the default
    scaling, parameters = (expect(name, key, hf.get(key, {}), dict) for key in ("rope_scaling", "rope_parameters"))
    defaults = {"num_key_value_heads": hf.get("num_attention_heads"), "max_position_embeddings": 2048}
    defaults |= {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}
    defaults |= {"rope_theta": parameters.get("rope_theta", 10000.0)}  # where transformers 5 keeps it
    spec = {}
    for field in dataclasses.fields(ModelConfig):
        key = FROM_HF.get(field.name, field.name)
        if field.name != "dropout":
            spec[field.name] = expect(name, key, (defaults | hf).get(key), field.type)
    cannot = {
        "hidden_act": hf.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(hf.get("attention_bias")),
        "mlp_bias": bool(hf.get("mlp_bias")),
        "rope_scaling": scaling.get("rope_type", scaling.get("type", "default")) != "default",
        "rope_parameters": parameters.get("rope_type", "default") != "default",
        "head_dim": "head_dim" in hf
        and expect(name, "head_dim", hf["head_dim"], int) * spec["n_head"] != spec["n_embd"],
        "attention_dropout": bool(hf.get("attention_dropout")),
    }
    for key, refused in cannot.items():
        if refused:
            raise UserError(f"--model {name}: {key} = {hf.get(key)!r} is not something this model can do")
    return spec


def check_config(cfg: ModelConfig) -> None:
    """Raises UserError where the numbers cannot make a model."""
    for key in ("n_layer", "n_head", "n_kv_head", "n_embd", "n_ff", "vocab_size", "seq_len"):
        if getattr(cfg, key) < 1:
            raise UserError(f"model: {key} = {getattr(cfg, key)}, allowed is 1 or more")
    if cfg.n_embd % cfg.n_head or cfg.head_dim % 2:
        raise UserError(
            f"model: n_embd = {cfg.n_embd} over n_head = {cfg.n_head} must give an even whole head size (rotary pairs)"
        )
    if cfg.n_head % cfg.n_kv_head:
        raise UserError(f"model: n_head = {cfg.n_head} is not a multiple of n_kv_head = {cfg.n_kv_head}")
    for key in ("rope_theta", "norm_eps"):
        if not 0 < getattr(cfg, key) < math.inf:
            raise UserError(f"model: {key} = {getattr(cfg, key)}, allowed is more than 0")
    if not 0 <= cfg.dropout < 1:
        raise UserError(f"--dropout {cfg.dropout}: allowed is 0 <= dropout < 1")


# --- random numbers by name -------------------------------------------------------------------------------------------
# Counter-based: element i of a tensor is a hash of (seed, name, i). A rank makes just its piece, on any device, and one
# process or eight, ZeRO or pipeline, hold the same model.


def _mix(z: Tensor) -> Tensor:
    """splitmix64's finaliser on int64 (wraps; the masks make the shifts logical). Steele et al., OOPSLA 2014."""
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


def name_key(*parts: object) -> int:
    """A 64-bit key for a name; the same in every process and on every machine."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def random_normal(key: int, index: Tensor) -> Tensor:
    """Elements `index` (n,) int64 of the stream `key`: mean 0, variance 1, float64 (n,).

    Sum of the four 16-bit quarters of one hash (Irwin-Hall, bounded at 3.46 sigma): integers until the last scaling, so
    CPU and GPU agree to the bit and float32 is the rounded float64.
    """
    h = _mix(index * -0x61C8864680B583EB + key)
    total = (h & 0xFFFF) + ((h >> 16) & 0xFFFF) + ((h >> 32) & 0xFFFF) + ((h >> 48) & 0xFFFF)
    sigma = math.sqrt(4 * (65536**2 - 1) / 12)
    return (total - 2 * 65535).double() / sigma


def init_std(name: str, cfg: ModelConfig) -> float | None:
    """Standard deviation of a weight's initial values, GPT-2's rule; None: all ones."""
    if name.endswith("norm.weight"):
        return None
    if name.endswith("bias"):
        return 0.0
    return 0.02 / math.sqrt(2 * cfg.n_layer) if name.endswith(("wo.weight", "w_down.weight")) else 0.02


def init_values(
    out: Tensor, name: str, start: int, cfg: ModelConfig, seed: int, where: Callable[[Tensor], Tensor] = lambda i: i
) -> None:
    """Fill `out` (1-D, any dtype, any device) with elements where(start), where(start + 1), ... of flattened `name`."""
    std = init_std(name, cfg)
    if std is None:
        out.fill_(1)
        return
    key = name_key(seed, name)
    for a in range(0, out.numel(), 1 << 24):  # in pieces: the hash needs 8 bytes and more per element
        piece = out[a : a + (1 << 24)]
        index = torch.arange(start + a, start + a + piece.numel(), device=out.device)
        piece.copy_(random_normal(key, where(index)) * std)


def dropout_keys(seed: int, step: int, sample: Tensor) -> Tensor:
    """One key per sequence from (seed, step, sample): (B,) int64 -> (B,) int64."""
    return _mix(sample + name_key(seed, "dropout", step))


def dropout(x: Tensor, p: float, keys: Tensor | None, layer: Tensor, site: int, t: Tensor | int = 0) -> Tensor:
    """Zero elements with probability p, by a hash of (key of the sequence, layer, site, position, channel).

    x (B, T, C); t: the position of its first token in the sequence, or of each (T,): so the mask is the same however it
    is sharded.
    """
    if p == 0 or keys is None:
        return x
    B, T, C = x.shape
    key = _mix(keys + (layer * 4 + site))  # (B,)
    t = torch.arange(t, t + T, device=x.device) if isinstance(t, int) else t
    c = torch.arange(C, device=x.device)
    h = _mix(key[:, None, None] + (t[:, None] * C + c) * -0x61C8864680B583EB)  # (B, T, C)
    keep = (h & 0xFFFFFF) >= int(p * (1 << 24))
    return x * keep / (1 - p)


# --- the network ------------------------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    def __init__(self, n: int, eps: float, half: str):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n))
        self.eps, self.half, self.cut = eps, half, None

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)  # sums in float32 or better inside


class Linear(nn.Linear):
    """x A^T without bias. half: where it works; cut: the axis of A, (out, in), that tensor parallel ranks share out.

    cut 0, the columns of A^T: each rank makes its channels of the output. cut 1, the rows: each makes a summand of it.
    """

    def __init__(self, n_in: int, n_out: int, half: str, cut: int):
        super().__init__(n_in, n_out, bias=False)
        self.half, self.cut = half, cut


class Embedding(nn.Embedding):
    half, cut = "embed", 0


def rotary_table(cfg: ModelConfig, dtype: torch.dtype, device: torch.device, length: int = 0) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles, each (T, head_dim / 2), in float32 or better; T is `length` or cfg.seq_len."""
    pairs = torch.arange(0, cfg.head_dim, 2, device=device, dtype=torch.float64) / cfg.head_dim
    positions = torch.arange(length or cfg.seq_len, device=device, dtype=torch.float64)
    angle = torch.outer(positions, cfg.rope_theta**-pairs)
    dtype = torch.promote_types(dtype, torch.float32)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + head_dim/2) of each head, as Hugging Face's Llama pairs them. x (B, H, T, hd)."""
    a, b = x.to(cos.dtype).chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention to all positions up to one's own. q (B, H, T, hd), k and v (B, KV, T, hd) -> (B, H, T, hd)."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


# Attention to a part of the keys, from which train_cp.py merges the whole. Forward gives beside its output, (B, H, t,
# hd), the logarithm of the sum of exponentials, (B, H, t). Backward takes both of the whole, each contiguous, and gives
# what this part adds to the gradients of q, k and v. All take grouped heads.
aten = torch.ops.aten


def cpu_part(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)


def cpu_part_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool):
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, causal)


def flash_part(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]


def flash_part_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool):
    # the seed is of dropout inside attention, which there is none of
    seed, lengths = torch.zeros(2, dtype=torch.int64, device=q.device), (q.shape[2], k.shape[2])
    backward = aten._scaled_dot_product_flash_attention_backward
    return backward(grad, q, k, v, out, lse, None, None, *lengths, 0.0, causal, seed, seed)


def cudnn_part(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
    return out, lse.squeeze(-1)


def cudnn_part_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool):
    seed, lengths = torch.zeros((), dtype=torch.int64, device=q.device), (q.shape[2], k.shape[2])
    backward = aten._scaled_dot_product_cudnn_attention_backward
    return backward(grad, q, k, v, out, lse[..., None], seed, seed, None, None, None, *lengths, 0.0, causal)


def fused_parts(device: torch.device, dtype: torch.dtype, deterministic: bool) -> tuple[Callable, Callable] | None:
    """Forward and backward by an operator of torch's, None where none takes this dtype; chosen as set_up_torch() does.

    cuDNN's are 1.7 times as fast as FlashAttention-2 on Hopper, their backward is not deterministic.
    """
    if device.type == "cpu":
        return cpu_part, cpu_part_backward
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    cudnn = torch.cuda.get_device_capability(device) >= (9, 0) and not deterministic
    return (cudnn_part, cudnn_part_backward) if cudnn else (flash_part, flash_part_backward)


SAVED = [  # what selective recomputation keeps; norms, rotations and SwiGLU's product are made again
    aten.mm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
]


def _selective():
    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in SAVED else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def recomputed(how: str, fn: Callable, *args):
    """fn(*args), of whose inside backward makes again what `how` says: "none", "selective" or "full"."""
    if how == "none" or not torch.is_grad_enabled():
        return fn(*args)
    more = {"context_fn": _selective} if how == "selective" else {}
    return checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=False, **more)  # no RNG: dropout is a hash


class Halves(nn.Module):
    """The parameters of a block and what its halves compute between norm and residual.

    Head counts come from the weights' shapes, so on slices of heads and of n_ff the same code makes this rank's summand
    of the result (train_tp.py). It has no forward: a block run on slices would add summands that nobody has summed.
    For the same reason nothing is added behind wo and w_down: a bias there would count once per tensor parallel rank.
    """

    def __init__(self, cfg: ModelConfig, layer: int, recompute: str):
        super().__init__()
        C, kv, ff, eps = cfg.n_embd, cfg.n_kv_head * cfg.head_dim, cfg.n_ff, cfg.norm_eps
        self.attn_norm = RMSNorm(C, eps, "attention")
        self.wq = Linear(C, C, "attention", cut=0)
        self.wk = Linear(C, kv, "attention", cut=0)
        self.wv = Linear(C, kv, "attention", cut=0)
        self.wo = Linear(C, C, "attention", cut=1)
        self.mlp_norm = RMSNorm(C, eps, "mlp")
        self.w_gate = Linear(C, ff, "mlp", cut=0)
        self.w_up = Linear(C, ff, "mlp", cut=0)
        self.w_down = Linear(ff, C, "mlp", cut=1)
        self.dropout, self.recompute = cfg.dropout, recompute
        # a tensor: as a Python int it would be a constant of the compiled block, one compilation per layer
        self.register_buffer("layer", torch.tensor(layer), persistent=False)

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor, core: Callable = causal) -> Tensor:
        """x, normed, (B, T, C) -> (B, T, C); cos, sin (T, hd/2); core: how queries meet keys (see causal)."""
        B, T, _ = x.shape
        hd = cos.shape[-1] * 2
        q, k, v = (w(x).view(B, T, -1, hd).transpose(1, 2) for w in (self.wq, self.wk, self.wv))  # (B, heads, T, hd)
        y = core(rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.wo(y.transpose(1, 2).reshape(B, T, -1))

    def mlp(self, x: Tensor) -> Tensor:
        """SwiGLU. x, normed, (B, T, C) -> (B, T, C)"""
        return self.w_down(F.silu(self.w_gate(x)) * self.w_up(x))


class Block(Halves):
    core = staticmethod(causal)
    positions: Tensor | int = 0  # of the tokens (T,) in their sequences, or of the first: dropout's hash takes them

    def body(self, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor | None, half: str) -> Tensor:
        if half != "mlp":
            attended = self.attention(self.attn_norm(x), cos, sin, self.core)
            x = x + dropout(attended, self.dropout, keys, self.layer, 0, self.positions)
        if half != "attention":
            x = x + dropout(self.mlp(self.mlp_norm(x)), self.dropout, keys, self.layer, 1, self.positions)
        return x

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor | None = None, half: str = "") -> Tensor:
        """x (B, T, C) -> (B, T, C); keys (B,) of dropout_keys, None: no dropout; half: "attention" or "mlp" alone."""
        return recomputed(self.recompute, self.body, x, cos, sin, keys, half)  # in here, so that it is compiled too


class GPT(nn.Module):
    """The whole model, built without memory: a script gives each parameter its storage through set_param."""

    block = Block
    positions: Tensor | int = 0  # as Block's

    def __init__(self, cfg: ModelConfig, recompute: str = "none"):
        super().__init__()
        self.cfg = cfg
        with torch.device("meta"):
            self.tok_emb = Embedding(cfg.vocab_size, cfg.n_embd)
            self.blocks = nn.ModuleList(self.block(cfg, i, recompute) for i in range(cfg.n_layer))
            self.norm = RMSNorm(cfg.n_embd, cfg.norm_eps, "head")
            self.head = Linear(cfg.n_embd, cfg.vocab_size, "head", cut=0)
        if cfg.tie:
            self.head.weight = self.tok_emb.weight

    def set_param(self, name: str, data: Tensor) -> nn.Parameter:
        """Make `data` (a view of a flat buffer, say) parameter `name`'s storage; a tied head follows the embedding."""
        module, leaf = name.rsplit(".", 1)
        param = nn.Parameter(data)
        setattr(self.get_submodule(module), leaf, param)
        if self.cfg.tie and name == "tok_emb.weight":
            self.head.weight = param
        return param

    def set_buffers(self, dtype: torch.dtype, device: torch.device) -> None:
        """Rotary tables and layer numbers, once the device is known."""
        self.cos, self.sin = rotary_table(self.cfg, dtype, device)
        for i, block in enumerate(self.blocks):
            block.layer = torch.tensor(i, device=device)
        self.embed_layer = torch.tensor(self.cfg.n_layer, device=device)  # its number in dropout's hash

    def embed(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """x (B, T) int64 -> (B, T, C)"""
        h = self.tok_emb(x)
        return dropout(h, self.cfg.dropout, keys, self.embed_layer, 0, self.positions) if self.cfg.dropout else h

    def logits(self, h: Tensor) -> Tensor:
        """h (B, T, C) -> (B, T, V)"""
        return self.head(self.norm(h))

    def loss_sum(self, h: Tensor, y: Tensor) -> Tensor:
        """Sum of the cross-entropies over the targets that count, a float32 scalar or better. h (B, T, C), y (B, T)."""
        logits = self.logits(h)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
        return F.cross_entropy(logits, y.flatten(), ignore_index=IGNORE, reduction="sum")

    def use(self, unit: str) -> None:
        """The forward pass comes to a unit's weights; train_zero.py has them arrive here."""

    def leave(self, h: Tensor, unit: str) -> Tensor:
        """It comes out of a block: where backward will come in."""
        return h

    def forward_part(
        self, x: Tensor, y: Tensor, keys: Tensor | None = None, part: range | None = None, h: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x, y (B, T) int64 -> summed loss and number of targets that count, both scalars.

        part: the halves of blocks to run, 2 i being the attention of block i and 2 i + 1 its MLP; None: the whole
        model. A part that is not the first begins with h (B, T, C), which the part before returned in the place of the
        loss.
        """
        cos, sin, last = self.cos[: x.shape[1]], self.sin[: x.shape[1]], 2 * self.cfg.n_layer
        part = range(last) if part is None else part
        if part.start == 0:
            self.use("embed")
            h = self.embed(x, keys)
        for i, half in blocks_of(part):
            self.use(f"block.{i}")
            h = self.leave(self.blocks[i](h, cos, sin, keys, half), f"block.{i}")
        if part.stop == last:
            self.use("head")
        return (self.loss_sum(h, y) if part.stop == last else h), (y != IGNORE).sum()

    forward = forward_part

    def compile_blocks(self) -> None:
        """Compile each block by itself (one compilation serves all, they differ in weights only); and the loss."""
        for block in self.blocks:
            block.compile(fullgraph=True)
        self.loss_sum = torch.compile(self.loss_sum)


def blocks_of(part: range) -> Iterator[tuple[int, str]]:
    """The blocks of a part (see forward_part) in order, with which half is in it: "attention", "mlp", "" for both."""
    for i in range(part.start // 2, (part.stop + 1) // 2):
        yield i, "mlp" if 2 * i not in part else "attention" if 2 * i + 1 not in part else ""


# --- counts -----------------------------------------------------------------------------------------------------------


class Param(NamedTuple):
    """What must be known of a parameter wherever the model is divided."""

    shape: tuple[int, ...]
    unit: str  # the portion that travels together: "embed", "block.3", "head" (with the last norm)
    half: int  # its place in forward_part's count: -1 is the embedding, 2 n_layer the head
    cut: int | None  # the axis that tensor parallel ranks share out
    # None: whole on every rank, and the gradient a summand, since each rank sees only its tokens or its heads


@functools.cache
def params(cfg: ModelConfig) -> dict[str, Param]:
    """All parameters by name, in the order of the forward pass; a tied head is not listed twice. Raises UserError."""
    model, found = GPT(cfg), {}
    for name, tensor in model.named_parameters():
        parts, module = name.split("."), model.get_submodule(name.rsplit(".", 1)[0])
        half = getattr(module, "half", None)
        half = half if isinstance(half, str) else None  # torch has a method of this name
        halves = ("attention", "mlp") if parts[0] == "blocks" else ("embed", "head")
        if half not in halves or not hasattr(module, "cut"):
            raise UserError(
                f"{name}: its module's `half` is {half!r} and its `cut` {getattr(module, 'cut', 'missing')}; "
                f"model.py must say where a parameter works, {' or '.join(halves)} here, and how it is cut"
            )
        layer = int(parts[1]) if parts[0] == "blocks" else 0
        place = {"embed": -1, "attention": 2 * layer, "mlp": 2 * layer + 1, "head": 2 * cfg.n_layer}[half]
        unit = f"block.{layer}" if parts[0] == "blocks" else half
        found[name] = Param(tuple(tensor.shape), unit, place, module.cut)
    return found


def n_params(cfg: ModelConfig) -> int:
    return sum(math.prod(p.shape) for p in params(cfg).values())


def flops_per_token(cfg: ModelConfig) -> int:
    """Forward and backward: 2 + 4 per multiplying weight, and causal attention's two products; nothing twice."""
    matrices = [p for p in params(cfg).values() if len(p.shape) == 2 and p.unit != "embed"]
    multiplying = sum(math.prod(p.shape) for p in matrices) + cfg.tie * cfg.vocab_size * cfg.n_embd
    return 6 * multiplying + 6 * cfg.n_layer * cfg.seq_len * cfg.n_embd


def activation_parts(
    cfg: ModelConfig, micro_batch: int, itemsize: int, recompute: str = "none", compiled: bool = False
) -> tuple[int, int, int]:
    """Bytes that one micro-batch keeps for its backward pass: in each block, at the ends; and in a block made again.

    compiled: the loss's gradient is written over the logits; else there is a float copy of them too.
    """
    C, kv, ff, tokens = cfg.n_embd, cfg.n_kv_head * cfg.head_dim, cfg.n_ff, micro_batch * cfg.seq_len
    # inputs of both norms, both normed inputs, q, k, v after rotation, attention's output; gate, up and their product
    whole = (6 * C + 2 * kv + 3 * ff) * itemsize + 4 * cfg.n_head
    block = {"none": whole, "selective": (3 * C + 2 * kv + 2 * ff + 2 * C) * itemsize, "full": C * itemsize}[recompute]
    logits = cfg.vocab_size * (itemsize if compiled else itemsize + 4)
    return tokens * block, tokens * (logits + 2 * C * itemsize), tokens * whole * (recompute != "none")


def activation_bytes(
    cfg: ModelConfig, micro_batch: int, itemsize: int, recompute: str = "none", compiled: bool = False
) -> int:
    """The same of the whole model."""
    block, ends, again = activation_parts(cfg, micro_batch, itemsize, recompute, compiled)
    return cfg.n_layer * block + ends + again


if __name__ == "__main__":
    print(f"{'size':6s}{'parameters':>16s}{'GFLOP/token':>13s}{'GB of fp32 weights + AdamW moments':>37s}")
    for size, config in SIZES.items():
        config = dataclasses.replace(config, vocab_size=config.vocab_size or 257)
        print(
            f"{size:6s}{n_params(config):16,d}{flops_per_token(config) / 1e9:13.3f}{12 * n_params(config) / 1e9:37.1f}"
        )
