"""Data parallel training: every rank holds the whole model, sees its share of the batch, and the gradients are summed.

    python train_ddp.py                                    # one process: the one-GPU script
    torchrun --nproc_per_node=8 train_ddp.py               # 8 GPUs (or 8 CPU processes: gloo, model tiny)
    torchrun --nproc_per_node=2 train_ddp.py --model 6b --global-batch 64 --data DIR
    torchrun --nproc_per_node=2 train_ddp.py --allreduce ring     # train on the ring of ring_allreduce.py
    python train_ddp.py --explain                          # memory, collectives and batch arithmetic, then exit
    python train_ddp.py --help                             # every flag

One step:

    for each micro-batch:  loss = forward(x, y);  backward -> gradients of a block are added to its flat fp32 bucket
        in the last one:   all_reduce(bucket of block i)     while backward goes on with block i-1, i-2, ...
    all_reduce(loss sum, token count, stop flag)             3 numbers
    norm = |all buckets|;  clip;  AdamW on the fp32 masters;  masters -> bf16 weights

The idea is in the second line: a block's gradients are final as soon as backward has passed the block, so their transfer
can run behind the rest of backward; only the first unit's, the embedding's, has nothing left to hide behind.

Bytes per parameter: master 4 + moments 8 + gradient 4 + bf16 weight 2 = 18 (and 2 for --wire bf16). Bytes sent per rank and step: every
bucket once, in a ring 2 (N-1)/N x 4 P (fp32 wire) or 2 (N-1)/N x 2 P (--wire bf16). All ranks end with the same bits, since each
sum is made once and copied, so the N updates that follow are the same update.

Paper: Li et al., PyTorch Distributed, VLDB 2020 (arXiv 2006.15704).
"""

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint import Checkpointer, Piece
from data import Batches, val_batches
from model import GPT, IGNORE, activation_bytes, dropout_keys, flops_per_token, init_range, unit_shapes
from optim import FlatUnit, LossScaler, adamw_step, flat_unit, gradient_factor, lr_at
from ring_allreduce import central_all_reduce, extra_bytes, ring_all_reduce
from support.flags import Config as SharedConfig
from support.meter import Meter, at, say
from support.resume import progress, resume, rng_state
from support.run import Run
from support.start import explain, run_script, say_if_stopped, start, stop_signal


@dataclass
class Config(SharedConfig):
    allreduce: Literal["torch", "ring", "central"] = (
        "torch"  # the backend's, or one of ring_allreduce.py, without overlap
    )


# --- the idea ---------------------------------------------------------------------------------------------------------


def init_whole(out: Tensor, name: str, run: Run) -> None:
    """Initial values of the whole parameter `name`; train_tp.py makes its slices instead."""
    init_range(out.flatten(), name, 0, run.model_cfg, run.cfg.seed)


class Bucket:
    """One unit's weights, optimizer state and gradients as flat buffers; the unit's parameters are views of `weights`."""

    def __init__(self, unit: FlatUnit, run: Run, init: Callable[[Tensor, str, Run], None]):
        self.unit = unit
        self.master = torch.empty(unit.padded, dtype=run.master_dtype, device=run.device)
        for name in unit.shapes:
            init(unit.view(self.master, name), name, run)
        # in float32 and float64 the master is what the model computes with
        self.weights = self.master if run.dtype == run.master_dtype else self.master.to(run.dtype)
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.grad = torch.zeros_like(self.master)  # sum over micro-batches, then over ranks
        self.arrived = 0  # parameters whose gradient of this micro-batch is in
        self.local_norms: list[Tensor] = []  # of each parameter's gradient here, before the sum over ranks
        self.work: dist.Work | None = None
        self.wire: Tensor = self.grad

    def note_norms(self) -> None:
        """Before the ranks' gradients are mixed: whose was not finite? For culprit()."""
        self.local_norms = [torch.linalg.vector_norm(self.unit.view(self.grad, name)) for name in self.unit.shapes]


class DataParallel:
    """Sums gradients over the ranks of `group`, bucket by bucket, while backward runs.

    units: what is held here of the parameters, by unit and name, and init makes its initial values; group: the ranks that hold
    the same. By default the whole model, and all ranks.
    """

    def __init__(
        self,
        model: GPT,
        run: Run,
        units: dict | None = None,
        group: dist.ProcessGroup | None = None,
        init: Callable = init_whole,
    ):
        self.run, self.cfg, self.group = run, run.cfg, group or run.world
        me = weakref.proxy(
            self
        )  # the garbage collector does not see into hooks: held by them, all of this would outlive the run
        self.buckets: dict[str, Bucket] = {}
        for unit, shapes in (units or unit_shapes(run.model_cfg)).items():
            bucket = self.buckets[unit] = Bucket(flat_unit(unit, shapes), run, init)
            for name in shapes:
                param = model.set_param(name, bucket.unit.view(bucket.weights, name))
                # fires when backward has finished this parameter's gradient: for a tied weight, after both its uses
                param.register_post_accumulate_grad_hook(lambda p, b=bucket, n=name: me.grad_ready(b, n, p))
        self.first_micro = self.last_micro = True

    def grad_ready(self, bucket: Bucket, name: str, param: torch.nn.Parameter) -> None:
        """Move one gradient into its bucket and, in the last micro-batch, send the bucket once it is complete."""
        into = bucket.unit.view(bucket.grad, name)
        # bf16 gradient added in fp32; the first micro-batch overwrites, which saves clearing 4 bytes per parameter
        into.copy_(param.grad) if self.first_micro else into.add_(param.grad)
        param.grad = None  # so that the bf16 gradients of one block are alive, not of all
        bucket.arrived += 1
        if bucket.arrived == len(bucket.unit.shapes):
            bucket.arrived = 0
            if self.last_micro and self.cfg.overlap:
                self.all_reduce(bucket)

    def holders(self, bucket: Bucket) -> dist.ProcessGroup | None:
        """The ranks that hold the same parameters as this bucket."""
        return self.group

    def all_reduce(self, bucket: Bucket) -> None:
        """Start summing a bucket over its holders; finish() waits."""
        bucket.note_norms()
        group = self.holders(bucket)
        if dist.get_world_size(group) == 1:
            return
        bucket.wire = bucket.grad.to(self.run.wire_dtype)  # the bucket itself unless --wire narrows it
        with at("all_reduce", bucket.unit.name, bucket.wire.nbytes):
            if self.cfg.allreduce == "torch":
                bucket.work = dist.all_reduce(bucket.wire, group=group, async_op=True)
            elif self.cfg.allreduce == "ring":
                ring_all_reduce(bucket.wire, group=group, fp32_partials=bucket.wire is not bucket.grad)
            else:
                central_all_reduce(bucket.wire, group=group)

    def finish(self) -> None:
        """Wait until every bucket holds the sum over all ranks."""
        for bucket in reversed(self.buckets.values()):  # the order in which backward completed them
            if not self.cfg.overlap:
                self.all_reduce(bucket)
            if bucket.work is not None:
                with at("wait", bucket.unit.name):
                    bucket.work.wait()  # on a GPU: the compute stream waits, not the host
            if bucket.wire is not bucket.grad:
                bucket.grad.copy_(bucket.wire)
            bucket.work, bucket.wire = None, bucket.grad

    def grad_norm(self) -> float:
        """Norm of the summed gradient; the buckets are bit-equal on all ranks, so the norm is, with nothing to send."""
        norms = [torch.linalg.vector_norm(bucket.grad) for bucket in self.buckets.values()]
        return torch.linalg.vector_norm(torch.stack(norms).double()).item()

    def culprit(self) -> str:
        """Collective: which parameter's gradient is not finite, and which rank brought it."""
        norms = (
            (name, norm) for b in self.buckets.values() for name, norm in zip(b.unit.shapes, b.local_norms, strict=True)
        )
        mine = next((name for name, norm in norms if not norm.isfinite()), None)
        found = [f"{name} on rank {rank}" for rank, name in enumerate(self.run.everyone(mine)) if name]
        return ", ".join(found) or "the sum over the ranks"

    def adamw_step(self, update: int, lr: float, factor: float) -> None:
        """AdamW on every rank alike, with gradients times `factor`."""
        for bucket in self.buckets.values():
            if factor != 1:
                bucket.grad.mul_(factor)
            adamw_step(
                bucket.master, bucket.grad, bucket.exp_avg, bucket.exp_avg_sq, bucket.unit.decay, update, lr, self.cfg
            )
            if bucket.weights is not bucket.master:
                bucket.weights.copy_(bucket.master)

    def pieces(self) -> dict[str, Piece]:
        """The training state by name, for checkpoint.py: all of it on every rank, which then writes its share."""
        found: dict[str, Piece] = {}
        for b in self.buckets.values():
            for prefix, flat in (("", b.master), ("exp_avg.", b.exp_avg), ("exp_avg_sq.", b.exp_avg_sq)):
                found |= b.unit.pieces(prefix, flat)
        return found

    def masters_changed(self) -> None:
        """After a load: bring the compute weights up to date."""
        for bucket in self.buckets.values():
            bucket.weights.copy_(bucket.master)


def bucket_bytes(run: Run, units: dict[str, dict[str, tuple[int, ...]]]) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes that the buckets of these parameters take, by term; and the bytes each of them sends, where several ranks hold it."""
    master, compute, wire = run.master_dtype.itemsize, run.dtype.itemsize, run.wire_dtype.itemsize
    sizes = {unit: sum(map(math.prod, shapes.values())) for unit, shapes in units.items()}
    P = sum(sizes.values())
    memory = {
        "master weights": master * P,
        "moments": 2 * master * P,
        "gradients": master * P,
        "compute weights": 0 if compute == master else compute * P,
        "gradients in passing": compute * max(sizes.values()),
        "gradients on the wire": wire * P if wire != master and run.dp > 1 else 0,
    }
    if run.cfg.allreduce != "torch" and run.dp > 1:
        largest = max(sizes.values())
        memory["reduction buffers"] = extra_bytes(
            run.cfg.allreduce, largest, wire, run.dp, run.device.type, wire != master
        )
    return memory, {unit: wire * size for unit, size in sizes.items()}


def predict(run: Run) -> tuple[dict[str, int], list[tuple[str, str, int]]]:
    """Bytes held by term, and the collectives of one step in order as (operation, unit, payload bytes)."""
    memory, sent = bucket_bytes(run, unit_shapes(run.model_cfg))
    memory["activations"] = activation_bytes(
        run.model_cfg, run.cfg.micro_batch, run.dtype.itemsize, run.cfg.recompute, run.cfg.compile
    )
    traffic = [("all_reduce", unit, size) for unit, size in reversed(sent.items()) if run.dp > 1]
    return memory, [*traffic, ("all_reduce", "loss, tokens, stop", 24)]


# --- the run ----------------------------------------------------------------------------------------------------------


# [same in every train_*.py
@torch.no_grad()
def evaluate(run: Run, model: GPT) -> float:
    """Mean loss over the validation windows, each counted once however many ranks score them."""
    cfg, total = run.cfg, torch.zeros(2, dtype=torch.float64, device=run.device)
    batches = val_batches(
        run.val_tokens,
        seq_len=cfg.seq_len,
        micro_batch=cfg.micro_batch,
        rank=run.place().replica,
        world_size=run.dp,
        limit=cfg.eval_windows,
        vocab_size=cfg.vocab_size,
    )
    for x, y, _ in batches:
        x, y = x.to(run.device), y.to(run.device)
        total += run.counts * torch.stack([model(x, y).double(), (y != IGNORE).sum().double()])
    dist.all_reduce(total, group=run.world)
    return (total[0] / total[1]).item()


# same]


def main(cfg: Config, group: dist.ProcessGroup | None = None) -> list[dict]:
    """Train as cfg says on the ranks of `group` (all, when None); returns the rows of the log."""
    run = start(cfg, __file__, group)
    cfg = run.cfg
    memory, traffic = predict(run)
    say(f"gradients travel in {str(run.wire_dtype)[6:]}")
    if cfg.explain:
        return explain(run, memory, traffic)

    run.counts = True
    model = GPT(run.model_cfg, cfg.recompute)
    ddp = DataParallel(model, run)
    model.set_buffers(run.dtype, run.device)
    if cfg.compile:
        model.compile_blocks()

    # [same in every train_*.py
    scaler = LossScaler(cfg)
    saver = Checkpointer(f"{run.out}/ckpt", group=run.control, keep_last=cfg.keep_last)
    first, updates = resume(run, saver, ddp, scaler)
    batches = Batches(
        run.tokens,
        seq_len=cfg.seq_len,
        global_batch=cfg.global_batch,
        micro_batch=cfg.micro_batch,
        rank=run.place().replica,
        world_size=run.dp,
        seed=cfg.seed,
        start_step=first,
        steps=cfg.steps,
        workers=cfg.workers,
        device=run.device,
        vocab_size=cfg.vocab_size,
    )
    nominal = cfg.global_batch * cfg.seq_len  # targets of a step if none is masked
    step = stop = 0
    # same]

    with Meter(run, flops_per_token(run.model_cfg)) as meter:
        for step in range(first, cfg.steps):
            facts = torch.zeros(3, dtype=torch.float64, device=run.device)  # loss sum, targets that count, stop
            scale = scaler.scale
            for micro in range(run.accum):
                x, y, sample = batches.next()
                ddp.first_micro, ddp.last_micro = micro == 0, micro == run.accum - 1
                with at("forward"):
                    keys = dropout_keys(cfg.seed, step, sample) if run.model_cfg.dropout else None
                    loss = model(x, y, keys)  # a sum: what it must be divided by is known once all ranks have counted
                with at("backward"):
                    (loss * (scale / nominal)).backward()  # buckets leave from in here, in the last micro-batch
                facts[:2] += torch.stack([loss.detach().double(), (y != IGNORE).sum().double()])
            ddp.finish()

            # [same in every train_*.py
            facts[2] = stop_signal()
            with at("all_reduce", "loss, tokens, stop", facts.nbytes):
                dist.all_reduce(facts, group=run.world)
            loss_sum, n_valid, stop = facts.tolist()
            to_mean = nominal / max(n_valid, 1) / scale  # from what backward made to the gradient of the mean loss
            lr = lr_at(updates, cfg)
            # same]

            with at("optimizer"):
                norm = ddp.grad_norm() * to_mean
                finite = math.isfinite(norm)
                scaler.update(finite, "" if finite else ddp.culprit())
                if finite:  # else all ranks skip: they hold the same norm
                    ddp.adamw_step(updates, lr, gradient_factor(norm, cfg.clip) * to_mean)
                    updates += 1

            # [same in every train_*.py
            done = step + 1
            more = {}
            if cfg.eval_every and run.val_tokens and (done % cfg.eval_every == 0 or done == cfg.steps):
                with at("eval"):
                    more["val_loss"] = evaluate(run, model)
            meter.log(
                step, loss_sum / max(n_valid, 1), norm if finite else None, lr, nominal, scale, not finite, **more
            )
            if cfg.save_every and (done % cfg.save_every == 0 or done == cfg.steps or stop):
                saver.save(done, ddp.pieces(), progress(run, updates, scaler), rng=rng_state(run))
            if stop:
                break
        saver.wait()
        batches.close()
        meter.summary(memory, traffic)
        say_if_stopped(run, stop, step)
    return meter.rows
    # same]


if __name__ == "__main__":
    run_script(main, predict, Config, __doc__)
