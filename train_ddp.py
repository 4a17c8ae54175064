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
    all_reduce(facts)                                        5 numbers: loss sum, targets, stop, samples, squared norm
    clip by the norm;  AdamW on the fp32 masters;  masters -> bf16 weights

The idea is in the second line: a block's gradients are final as soon as backward has passed the block, so their
transfer can run behind the rest of backward; only the first unit's, the embedding's, has nothing left to hide behind.

Bytes per parameter: master 4 + moments 8 + gradient 4 + bf16 weight 2 = 18 (and 2 for --wire bf16). Bytes sent per rank
and step: every bucket once, in a ring 2 (N-1)/N x 4 P (fp32 wire) or 2 (N-1)/N x 2 P (--wire bf16). All ranks end with
the same bits, since each sum is made once and copied, so the N updates that follow are the same update.

Paper: Li et al., PyTorch Distributed, VLDB 2020 (arXiv 2006.15704).
"""

import math
import weakref
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

import support.flags
from buckets import Bucket, Held, copies, held_by, holders, padded
from checkpoint import Checkpointer, Piece
from data import Batches, evaluate
from model import GPT, activation_bytes, dropout_keys, flops_per_token
from optim import LossScaler, gradient_factor, lr_at
from ring_allreduce import central_all_reduce, extra_bytes, ring_all_reduce
from support.meter import Meter, at, say
from support.resume import check_replicas, progress, resume, rng_state
from support.run import Run
from support.start import end, explain, run_script, start, stop_asked
from transport import all_reduce


@dataclass
class Config(support.flags.Config):
    allreduce: Literal["torch", "ring", "central"] = "torch"  # the backend's, or ring_allreduce.py's, without overlap


# --- the idea ---------------------------------------------------------------------------------------------------------


class DataParallel:
    """Sums gradients over the ranks that hold the same parameters, bucket by bucket, while backward runs.

    held: what this rank holds of the model (buckets.py): by default all of it, and so do all ranks.
    """

    shared = False  # whether a rank keeps only a share of a bucket's masters and moments
    alike = True  # whether ranks that hold the same hold the same bits, which each save compares

    def __init__(self, model: torch.nn.Module, run: Run, held: dict[str, Held] | None = None):
        self.model, self.run, self.cfg = model, run, run.cfg
        self.groups = holders(run)
        self.buckets: dict[str, Bucket] = {}
        me = weakref.proxy(self)  # hooks that held more than a weak reference would keep all this alive after main()
        for i, (unit, what) in enumerate((held or held_by(run)).items()):
            bucket = self.buckets[unit] = Bucket(i, unit, what, run, self.groups[what.holders], self.shared)
            self.add_buffers(bucket)
            for name in what.slices:
                param = model.set_param(name, bucket.view(bucket.weights, name).data)
                # fires when backward has finished this parameter's gradient: for a tied weight, after both its uses
                param.register_post_accumulate_grad_hook(lambda p, b=bucket, n=name: me.grad_ready(b, n, p))

    def add_buffers(self, bucket: Bucket) -> None:
        """Compute weights and gradients, whole."""
        if self.run.dtype != bucket.master.dtype:
            bucket.weights = bucket.shard = bucket.master.to(self.run.dtype)
        bucket.grad = bucket.grad_shard = torch.zeros_like(bucket.master)  # sum over micro-batches, then over ranks
        bucket.owned = bucket.grad.tensor_split(bucket.n)[bucket.index]
        bucket.wire = bucket.grad

    def __call__(self, x: Tensor, y: Tensor, keys: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x, y (B, T) int64 -> summed loss, and how many targets it stands for; over all ranks each counts once."""
        return self.model(x, y, keys)

    def grad_ready(self, bucket: Bucket, name: str, param: torch.nn.Parameter) -> None:
        """Move one gradient into its bucket and, in the last micro-batch, send the bucket once it is complete."""
        into = bucket.view(bucket.grad, name)
        # bf16 gradient added in fp32; the first micro-batch overwrites, which saves clearing 4 bytes per parameter
        into.copy_(param.grad) if bucket.passes == 0 else into.add_(param.grad)
        param.grad = None  # so that the bf16 gradients of one block are alive, not of all
        if bucket.gradient_came(name) and bucket.passes == self.run.accum and self.cfg.overlap:
            self.reduce(bucket)

    def reduce(self, bucket: Bucket) -> None:
        """Start summing a bucket over its holders; finish() waits."""
        bucket.note_norms(bucket.grad)
        if bucket.n == 1:
            return
        bucket.wire = bucket.grad.to(self.run.wire_dtype)  # the bucket itself unless --wire narrows it
        if self.cfg.allreduce == "torch":
            bucket.work = all_reduce(bucket.wire, bucket.group, bucket.name, async_op=True)
            return
        with at("all_reduce", bucket.name, bucket.wire.nbytes):
            if self.cfg.allreduce == "ring":
                ring_all_reduce(bucket.wire, group=bucket.group, fp32_partials=bucket.wire is not bucket.grad)
            else:
                central_all_reduce(bucket.wire, group=bucket.group)

    def finish(self) -> Tensor:
        """Wait until every bucket holds the sum over its holders -> its squared norm, as far as this rank owns it."""
        for bucket in reversed(self.buckets.values()):  # the order in which backward completed them
            bucket.check_passes(self.run.accum)
            if not self.cfg.overlap:
                self.reduce(bucket)
            self.wait(bucket)
            if bucket.twin:
                # after the sum over the replicas: a + b has the same bits on both ends, whatever order that sum had
                all_reduce(bucket.grad_shard, self.groups["twins"], "tied embedding")
        return torch.stack([bucket.square() for bucket in self.buckets.values()]).sum()

    def wait(self, bucket: Bucket) -> None:
        """For the sum of one bucket: on a GPU the compute stream waits, not the host."""
        if bucket.work is not None:
            with at("wait", bucket.name):
                bucket.work.wait()
        if bucket.wire is not bucket.grad:
            bucket.grad.copy_(bucket.wire)
        bucket.work, bucket.wire = None, bucket.grad

    def culprit(self) -> str:
        """Collective: which parameter's gradient is not finite, and which rank brought it."""
        norms = ((name, norm) for bucket in self.buckets.values() for name, norm in bucket.norms.items())
        mine = next((name for name, norm in norms if not norm.isfinite()), None)
        found = [f"{name} on rank {rank}" for rank, name in enumerate(self.run.everyone(mine)) if name]
        return ", ".join(found) or "the sum over the ranks"

    def adamw_step(self, update: int, lr: float, factor: float) -> None:
        """AdamW on every rank alike, with gradients times `factor`."""
        for bucket in self.buckets.values():
            bucket.adamw(update, lr, factor, self.cfg)

    def pieces(self) -> dict[str, Piece]:
        """The training state by name, for checkpoint.py; what several ranks hold, one of them writes."""
        self.catch_up()
        return {name: piece for bucket in self.buckets.values() for name, piece in bucket.pieces().items()}

    def masters_changed(self) -> None:
        """After a load: bring the compute weights up to date."""
        for bucket in self.buckets.values():
            bucket.shard.copy_(bucket.master)

    def catch_up(self) -> None:
        """Make updates that are still due: none here, see offload.py."""


def state_bytes(run: Run, held: dict[str, Held]) -> tuple[dict[str, int], list[tuple[str, str, int]]]:
    """Bytes that whole buckets take, by term, and what is sent of them, as predict() gives both."""
    master, compute, wire = run.master_dtype.itemsize, run.dtype.itemsize, run.wire_dtype.itemsize
    sizes = {unit: padded(what, 1) for unit, what in held.items()}
    sent = {unit: wire * sizes[unit] for unit in held if copies(run, held[unit]) > 1}
    P, largest = sum(sizes.values()), max(sizes.values())
    memory = {
        "master weights": master * P,
        "moments": 2 * master * P,
        "gradients": master * P,
        "compute weights": 0 if compute == master else compute * P,
        "gradients in passing": compute * largest,
        "gradients on the wire": sum(sent.values()) if wire != master else 0,
    }
    if run.cfg.allreduce != "torch" and sent:
        way, kind, narrow = run.cfg.allreduce, run.device.type, wire != master
        extra = [extra_bytes(way, sizes[u], wire, copies(run, held[u]), kind, narrow) for u in sent]
        memory["reduction buffers"] = max(extra)
    twins = [("all_reduce", "tied embedding", master * sizes[unit]) for unit in held if held[unit].twin]
    return memory, [("all_reduce", unit, size) for unit, size in reversed(sent.items())] + twins


def predict(run: Run) -> tuple[dict[str, int], list[tuple[str, str, int]]]:
    """Bytes held by term, and the collectives of one step in order as (operation, unit, payload bytes)."""
    cfg, compute = run.cfg, run.dtype.itemsize
    memory, traffic = state_bytes(run, held_by(run))
    memory["activations"] = activation_bytes(run.model_cfg, cfg.micro_batch, compute, cfg.recompute, cfg.compile)
    return memory, [*traffic, ("all_reduce", "facts", 40)]


# --- the run ----------------------------------------------------------------------------------------------------------


def main(cfg: Config, group: dist.ProcessGroup | None = None) -> list[dict]:
    """Train as cfg says on the ranks of `group` (all, when None); returns the rows of the log."""
    run = start(cfg, __file__, group)
    cfg = run.cfg
    memory, traffic = predict(run)
    say(f"gradients travel in {str(run.wire_dtype)[6:]}")
    if cfg.explain:
        return explain(run, memory, traffic)

    model = GPT(run.model_cfg, cfg.recompute)
    strategy = DataParallel(model, run)
    model.set_buffers(run.dtype, run.device)
    if cfg.compile:
        model.compile_blocks()

    scaler = LossScaler(cfg)
    saver = Checkpointer(f"{run.out}/ckpt", group=run.control, keep_last=cfg.keep_last)
    first, updates = resume(run, saver, strategy, scaler)
    batches = Batches(run, first)
    nominal = cfg.global_batch * cfg.seq_len  # targets of a step if none is masked
    step = stop = 0

    with Meter(run, flops_per_token(run.model_cfg), first) as meter:
        for step in range(first, cfg.steps):
            facts = torch.zeros(5, dtype=torch.float64, device=run.device)
            scale = scaler.scale
            for _ in range(run.accum):
                x, y, sample = batches.next()
                keys = dropout_keys(cfg.seed, step, sample) if run.model_cfg.dropout else None
                with at("forward"):
                    loss, targets = strategy(x, y, keys)  # sums: divided once all ranks have counted
                with at("backward"):
                    (loss * (scale / nominal)).backward()  # buckets leave from in here, in the last micro-batch
                facts[:2] += torch.stack([loss.detach().double(), targets.double()])

            facts[2], facts[3], facts[4] = stop_asked(run), batches.proof(), strategy.finish()
            all_reduce(facts, run.world, "facts")
            with at("wait", "facts"):
                loss_sum, n_valid, stop, samples, square = facts.tolist()
            samples = batches.check(step, samples)  # the data proves itself, or the run ends here
            to_mean = nominal / max(n_valid, 1) / scale  # what backward left, times this, is the mean loss's gradient
            norm, lr = math.sqrt(square) * to_mean, lr_at(updates, cfg)
            finite = math.isfinite(norm)
            with at("optimizer"):
                scaler.update(finite, "" if finite else strategy.culprit())
                if finite:  # else all ranks skip: they hold the same norm
                    strategy.adamw_step(updates, lr, gradient_factor(norm, cfg.clip) * to_mean)
                    updates += 1

            done, more = step + 1, {"samples": samples}
            if run.val_tokens and not stop and (done % cfg.eval_every == 0 or done == cfg.steps):
                with at("eval"):
                    more["val_loss"] = evaluate(run, strategy)
            meter.log(
                step, loss_sum / max(n_valid, 1), norm if finite else None, lr, nominal, scale, not finite, **more
            )
            if cfg.save_every and (done % cfg.save_every == 0 or done == cfg.steps or stop):
                check_replicas(run, strategy)
                saver.save(done, strategy.pieces(), progress(run, updates, scaler), rng=rng_state(run), rotate=finite)
            if stop:
                break
        strategy.catch_up()
        saver.close()
        batches.close()
        meter.summary(memory, traffic)
        end(run, stop, step)
    return meter.rows


if __name__ == "__main__":
    run_script(main, predict, Config, __doc__)
