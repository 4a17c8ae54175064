"""From the flags that were given to the run that follows: every default that is arithmetic, and what is out of range.

Pure: no process group, no GPU is touched, so that plan.py can ask for many layouts of many ranks in one process.
"""

import dataclasses
import math

import torch

from model import SIZES, load_config
from support.flags import Config, UserError, accumulation, flag_name

BY_SIZE = {  # global batch, micro-batch, steps, lr, warm-up
    "tiny": (24, 6, 600, 4e-3, 50),
    "124m": (512, 16, 5000, 6e-4, 200),
    "350m": (512, 8, 10000, 3e-4, 500),
    "1b": (256, 4, 20000, 3e-4, 500),
    "3b": (256, 4, 20000, 3e-4, 1000),
    "6b": (256, 4, 20000, 3e-4, 1000),
    "7b": (256, 2, 20000, 3e-4, 1000),
    "13b": (256, 1, 20000, 2e-4, 1000),
}
LEAST = {  # smallest value allowed
    **dict.fromkeys(("steps", "lr", "min_lr", "weight_decay", "beta1", "beta2", "eps", "clip", "workers"), 0),
    **dict.fromkeys(("save_every", "eval_every", "eval_windows", "loss_scale", "scale_power"), 0),
    **dict.fromkeys(("log_every", "keep_last", "hang_timeout", "scale_window", "scale_hysteresis"), 1),
    "scale_min": 2.0**-24,
}
BELOW = {"beta1": 1, "beta2": 1, "scale_power": 128, "workers": 1025, "hang_timeout": 10**6}  # others: infinity


def fill(cfg: Config, world_size: int, tp: int = 1, pp: int = 1, cp: int = 1, device_kind: str = "cuda") -> dict:
    """Fill in the defaults of cfg, in place -> fields of the Run that follows: model_cfg, dtype, tp, pp, cp, accum.

    tp, pp, cp: over how many ranks a matrix, the layers, a sequence are shared out; 0: over all that are left.
    device_kind: "cpu" or "cuda". A model without a vocabulary of its own keeps vocab_size 0: the corpus has it.
    Raises UserError.
    """
    refuse_zeros(cfg)
    cfg.model = cfg.model or ("tiny" if device_kind == "cpu" else "124m")
    cfg.dtype = cfg.dtype or ("float32" if device_kind == "cpu" else "bfloat16")
    model_cfg = load_config(cfg.model)
    nearest = min(BY_SIZE, key=lambda size: abs(SIZES[size].n_embd - model_cfg.n_embd))
    batch, micro, steps, lr, warmup = BY_SIZE[cfg.model if cfg.model in SIZES else nearest]

    tp, pp, cp = share_out(world_size, tp, pp, cp)
    dp = world_size // (tp * pp * cp)
    cfg.global_batch = cfg.global_batch or batch
    if not cfg.micro_batch:
        share = cfg.global_batch // dp
        cfg.micro_batch = max((m for m in range(1, min(micro, share) + 1) if share % m == 0), default=1)
    accum = accumulation(cfg.global_batch, cfg.micro_batch, dp)
    cfg.steps, cfg.lr = cfg.steps or steps, cfg.lr or lr
    cfg.min_lr = cfg.lr / 10 if cfg.min_lr < 0 else cfg.min_lr
    cfg.warmup_steps = min(warmup, cfg.steps // 10) if cfg.warmup_steps < 0 else cfg.warmup_steps
    cfg.workers = int(device_kind == "cuda") if cfg.workers is None else cfg.workers
    cfg.compile = device_kind == "cuda" if cfg.compile is None else cfg.compile
    check_ranges(cfg)

    model_cfg = dataclasses.replace(
        model_cfg,
        seq_len=cfg.seq_len or model_cfg.seq_len,
        vocab_size=cfg.vocab_size or model_cfg.vocab_size,
        tie=model_cfg.tie if cfg.tie is None else cfg.tie,
        dropout=model_cfg.dropout if cfg.dropout is None else cfg.dropout,
    )
    cfg.seq_len, cfg.vocab_size, cfg.tie = model_cfg.seq_len, model_cfg.vocab_size, model_cfg.tie
    return dict(model_cfg=model_cfg, dtype=getattr(torch, cfg.dtype), tp=tp, pp=pp, cp=cp, accum=accum)


def share_out(world_size: int, tp: int, pp: int, cp: int) -> tuple[int, int, int]:
    """tp, pp, cp with every 0 replaced by the ranks that are left, the first one's by all of them. Raises UserError."""
    sizes = [tp, pp, cp]
    for i, size in enumerate(sizes):
        sizes[i] = size or max(1, world_size // math.prod(filter(None, sizes)))
    product = math.prod(sizes)
    if min(sizes) < 0 or world_size % product:
        what = "tp*pp*cp" if cp != 1 else "tp*pp"
        raise UserError(f"{what}={product} does not divide the world of {world_size} ranks")
    return sizes[0], sizes[1], sizes[2]


def refuse_zeros(cfg: Config) -> None:
    """What stands for "by size" when a flag is not given is no value to give. Raises UserError."""
    for key in ("steps", "lr", "global_batch", "micro_batch", "seq_len", "vocab_size"):
        if key in cfg.given and not getattr(cfg, key):
            raise UserError(f"{flag_name(key)} 0: allowed is more than 0")
    for key in ("min_lr", "warmup_steps"):  # -1 stands for it here
        if key in cfg.given and getattr(cfg, key) < 0:
            raise UserError(f"{flag_name(key)} {getattr(cfg, key)}: allowed is 0 or more")


def check_ranges(cfg: Config) -> None:
    """Raises UserError for a number outside its range."""
    for key, least in LEAST.items():
        given, limit = getattr(cfg, key), BELOW.get(key, math.inf)
        if not least <= given < limit:
            below = f", less than {limit}" if given >= limit else ""
            raise UserError(f"{flag_name(key)} {given}: allowed is {least} or more{below}")
