"""What an update is: the learning rate, AdamW over a flat buffer, the loss scale, and when a step is skipped.

Nothing here communicates. A strategy brings gradients that are already the same number everywhere (or a shard of it)
and one norm; what follows from them is decided by the same arithmetic on every rank.

Papers: AdamW (arXiv 1711.05101), cosine schedule (1608.03983), mixed precision with loss scaling (1710.03740).
"""

import math

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from support.flags import UserError
from support.meter import say


def lr_at(update: int, cfg) -> float:
    """Learning rate of update 0, 1, ...: linear warm-up to cfg.lr, cosine to cfg.min_lr at cfg.steps, then min_lr."""
    if update < cfg.warmup_steps:
        return cfg.lr * (update + 1) / cfg.warmup_steps
    if update >= cfg.steps:
        return cfg.min_lr
    done = (update - cfg.warmup_steps) / max(1, cfg.steps - cfg.warmup_steps)
    return cfg.min_lr + 0.5 * (1 + math.cos(math.pi * done)) * (cfg.lr - cfg.min_lr)


def adamw_step(
    master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, decay: int, update: int, lr: float, cfg
) -> None:
    """One AdamW update in place of 1-D buffers of equal length, float32 or float64; elements [0, decay) are decayed.

    update: how many updates these moments have seen. torch's fused kernel, on CPU and CUDA (foreach differs from it in
    the last bit). On a CPU the few elements behind a slice's last whole vector can differ in the last bit from the same
    ones in a whole. Reads 16 and writes 12 bytes per fp32 parameter.
    """
    decay = min(max(decay, 0), master.numel())
    for part, weight_decay in ((slice(0, decay), cfg.weight_decay), (slice(decay, None), 0.0)):
        if master[part].numel():
            count = torch.full((), float(update), device=master.device)
            torch_adamw(
                [master[part]],
                [grad[part]],
                [exp_avg[part]],
                [exp_avg_sq[part]],
                [],
                [count],
                fused=True,
                amsgrad=False,
                maximize=False,
                lr=lr,
                beta1=cfg.beta1,
                beta2=cfg.beta2,
                eps=cfg.eps,
                weight_decay=weight_decay,
            )


def gradient_factor(norm: float, clip: float) -> float:
    """What clipping multiplies a gradient of this norm with; clip 0: never clipped."""
    return min(1.0, clip / (norm + 1e-6)) if clip > 0 else 1.0


class LossScaler:
    """The factor on the loss that keeps float16 gradients above underflow; 1 and constant in every other dtype.

    Starts at 2^16, halves when a gradient overflowed (the first `hysteresis` - 1 overflows are let pass), doubles at
    good steps window + 1, 2 window + 1, ... in a row, as DeepSpeed does (torch's GradScaler: at window, 2 window, ...).
    In every dtype, a step whose gradient is not finite is skipped on all ranks; `patience` such steps in a row that
    lowering the scale cannot cure end the run.
    """

    patience = 8

    def __init__(self, cfg):
        self.dynamic = cfg.dtype == "float16" and not cfg.loss_scale
        self.scale = 2.0**cfg.scale_power if self.dynamic else cfg.loss_scale if cfg.dtype == "float16" else 1.0
        self.minimum, self.window, self.hysteresis = cfg.scale_min, cfg.scale_window, cfg.scale_hysteresis
        self.good, self.left, self.stuck = 0, cfg.scale_hysteresis, 0

    def update(self, finite: bool, culprit: str) -> None:
        """Once per step with the ranks' common verdict.

        Raises UserError naming `culprit` when overflow does not end.
        """
        if finite:
            self.good, self.stuck = self.good + 1, 0
            if self.dynamic and self.good > 1 and (self.good - 1) % self.window == 0:
                self.scale, self.left = self.scale * 2, self.hysteresis
            return
        self.good = 0
        say(f"gradient not finite in {culprit} at loss scale {self.scale:g}: all ranks skip this step")
        if self.dynamic and self.scale > self.minimum:
            if self.left <= 1:
                self.scale = max(self.scale / 2, self.minimum)
            self.left = max(1, self.left - 1)
            return
        self.stuck += 1
        if self.stuck >= self.patience:
            raise UserError(
                f"the gradient was not finite in {self.stuck} steps in a row at loss scale {self.scale:g}, the last "
                f"one in {culprit}; none of these steps changed the weights (try a lower --lr, a longer "
                "--warmup-steps, or --dtype bfloat16)"
            )

    def state(self) -> dict:
        return {"dynamic": self.dynamic, "scale": self.scale, "good": self.good, "left": self.left, "stuck": self.stuck}

    def load(self, state: dict) -> None:
        if self.dynamic and state["dynamic"]:  # from a run in another dtype there is no scale to go on with
            self.scale, self.good, self.left, self.stuck = (state[k] for k in ("scale", "good", "left", "stuck"))
