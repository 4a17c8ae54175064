"""ZeRO: data parallel training in which the ranks share out what they would otherwise all hold.

    torchrun --nproc_per_node=8 train_zero.py                       # stage 2
    torchrun --nproc_per_node=8 train_zero.py --stage 3 --model 6b --global-batch 64 --data DIR
    torchrun --nproc_per_node=2 train_zero.py --stage 2 --offload optimizer
    torchrun --nproc_per_node=2 train_zero.py --deepspeed examples/ds_zero2_offload.json
    python train_zero.py --stage 3 --explain                        # memory and collectives, then exit

What AdamW needs of a parameter, its fp32 master and two moments, is used once a step by one update; so each of N ranks
keeps and updates 1/N (stage 1). Then the sum of a gradient is needed only where the update happens (stage 2), and the
weights themselves only while their layer computes (stage 3). Everything lies in flat buckets (the embedding, each
block, norm and head), so that a transfer has nothing to pack. One step:

    for each micro-batch:
        forward:   stage 3:  all_gather(weights of block i+1)      while block i computes
        backward:  stage 3:  all_gather(weights of block i-1)      while block i computes
                   stage 2, 3:  exchange(gradients of block i)     while block i-1 computes
    stage 1: exchange(gradients of block i), from inside the last micro-batch's backward
    all_reduce(facts);  clip;  AdamW on the share
    stage 1, 2: all_gather(new weights of block i)                 while block i+1 updates

An exchange is an all_to_all: rank r gets everyone's piece r and adds the pieces in fp32, in the order of the ranks.
Stage 1 sends what was summed over micro-batches, in fp32; stages 2 and 3 send every micro-batch's gradient as it was
computed, in bf16: that loses nothing against a reduce_scatter in fp32, at half its bytes. Bytes per parameter held, and
handed to transfers per parameter and step, for bf16 compute and A micro-batches (each rank sends (N-1)/N of what it
hands over, twice that in an all_reduce; stage 0 is train_ddp.py's class):

                 weights  gradients  masters, moments    N = 1     2     8       all_reduce  exchange  all_gather
    stage 0         2         4           12              18    18    18            4
    stage 1         2         4           12/N            18    12     7.5                       4         2
    stage 2         2         4/N         12/N            18    10     4                         2 A       2
    stage 3         2/N       4/N         12/N            18     9     2.25                      2 A       4 A

(Stage 3 gathers a little less: the units at either end of a pass are still there at the start of the next, and the
embedding needs no weights in backward.) On one host stages 2 and 3 go by the GPUs' copy engines (transport.py), so that
compute keeps every multiprocessor. With --offload optimizer, masters and moments live in host memory (offload.py).

Paper: Rajbhandari et al., ZeRO (arXiv 1910.02054).
"""

import copy
import dataclasses
import math
import os
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

import train_ddp
from buckets import Bucket, Held, copies, held_by, padded
from checkpoint import Checkpointer
from data import Batches, evaluate
from model import GPT, activation_bytes, dropout_keys, flops_per_token
from offload import HOST_TENSORS, Offload, OnDevice
from optim import LossScaler, gradient_factor, lr_at
from support.flags import UserError
from support.meter import Meter, at, say
from support.rendezvous import job_size
from support.resume import check_replicas, progress, resume, rng_state
from support.run import Run
from support.start import end, explain, run_script, start, stop_asked
from train_ddp import DataParallel
from transport import Collectives, all_reduce, choose_copy_engine, open_transport


@dataclass
class Config(train_ddp.Config):
    stage: Literal[0, 1, 2, 3] = 2  # 1: optimizer state shared out, 2: and gradients, 3: and weights; 0: nothing
    offload: Literal["none", "optimizer"] = "none"  # optimizer: masters and moments in host memory, updated by the CPU
    copy_engine: bool | None = None  # stage 2, 3: copy engines instead of NCCL's kernels [if all GPUs are on one host]
    deepspeed: str = ""  # a DeepSpeed configuration file to take these settings from
    scale_power: int = 16  # float16: the dynamic factor starts at 2 to this
    scale_window: int = 1000  # float16: good steps before the factor doubles
    scale_hysteresis: int = 1  # float16: overflows before it halves
    scale_min: float = 1.0  # float16: never below this


# --- the idea: stage 1, masters and moments shared out ----------------------------------------------------------------


class Zero1(DataParallel):
    """Each holder of a bucket sums, updates and then sends one share of it. Works over any `held`.

    Offload needs a model that says which weights it is about to use, as GPT does.
    """

    shared = True
    open_transport = Collectives
    updates_may_wait = True  # until the next forward pass comes to a bucket: offload.py

    def __init__(self, model: torch.nn.Module, run: Run, held: dict[str, Held] | None = None, offload: bool = False):
        held = held or held_by(run)
        self.transport, self.wire = self.open_transport(run), self.wire_dtype(run)
        self.optimizer = (Offload if offload else OnDevice)(run, self, shares(run, held))
        self.allocate(run, held)
        compiled = run.cfg.compile and run.device.type == "cuda"
        self.add = torch.compile(add_in_order, dynamic=True) if compiled else add_in_order
        super().__init__(model, run, held)
        model.use, model.leave = self.use, self.leave
        self.masters_changed()

    @staticmethod
    def wire_dtype(run: Run) -> torch.dtype:
        """In which gradients travel."""
        return run.wire_dtype

    def allocate(self, run: Run, held: dict[str, Held]) -> None:
        """Buffers that buckets use in turn, even and odd ones: of each kind one per bucket would cost 24 GB on 6b."""
        self.received = [torch.empty(longest_sent(run, held), dtype=self.wire, device=run.device) for _ in range(2)]
        self.sent: list[Bucket | None] = [None, None]  # whose gradient is on its way

    def add_buffers(self, bucket: Bucket) -> None:
        """Whole weights, of which the shard is a view; whole gradients, summed over micro-batches."""
        bucket.slot, bucket.gathering = bucket.number % 2, None
        bucket.weights = torch.empty(bucket.padded, dtype=self.run.dtype, device=self.run.device)
        bucket.shard = bucket.weights[bucket.mine]
        bucket.grad = torch.zeros(bucket.padded, dtype=self.run.master_dtype, device=self.run.device)
        bucket.grad_shard = bucket.owned = bucket.grad[bucket.mine]
        self.optimizer.adopt(bucket)

    def use(self, unit: str) -> None:
        """The forward pass is about to compute with this unit's weights; with offload their update may still be due."""
        self.optimizer.before_use(self.buckets[unit])
        self.wait_for_weights(self.buckets[unit])

    def leave(self, h: Tensor, unit: str) -> Tensor:
        """The forward pass comes out of a block."""
        return h

    def reduce(self, bucket: Bucket) -> None:
        """Start summing a bucket over its holders, each to get its share of the sum."""
        bucket.note_norms(bucket.grad)
        full = bucket.grad.to(self.wire) if bucket.n > 1 else bucket.grad
        self.exchange(bucket, full, overwrite=True, final=True)

    def exchange(self, bucket: Bucket, full: Tensor, overwrite: bool, final: bool) -> None:
        """Send piece r of `full` (padded,) to holder r. overwrite: else what comes is added; final: the step's last."""
        self.take_in(bucket.slot)
        bucket.full, bucket.overwrite, bucket.final = full, overwrite, final
        if bucket.n > 1:
            received = self.received[bucket.slot][: bucket.padded]
            bucket.work = self.transport.exchange(received, full, bucket.group, bucket.name)
        self.sent[bucket.slot] = bucket
        if not self.cfg.overlap:
            self.take_in(bucket.slot)

    def take_in(self, slot: int) -> None:
        """Add up, in the order of the ranks, what has come in this slot; its buffers are then free again."""
        bucket, self.sent[slot] = self.sent[slot], None
        if bucket is None:
            return
        received = bucket.full if bucket.n == 1 else self.received[slot][: bucket.padded]
        if bucket.work is not None:
            with at("wait", bucket.name):
                bucket.work.wait()
        if received is not bucket.grad:
            self.add(bucket.grad_shard, received.view(bucket.n, -1), bucket.overwrite)
        bucket.full = bucket.work = None
        if bucket.final:
            self.optimizer.gradient_done(bucket)

    def wait(self, bucket: Bucket) -> None:
        self.take_in(bucket.slot)

    def adamw_step(self, update: int, lr: float, factor: float) -> None:
        """AdamW on this rank's shares, with gradients times `factor`; publish() sends the new weights of each."""
        if self.optimizer.step(update, lr, factor):
            self.published()

    def publish(self, bucket: Bucket) -> None:
        """The shard has new weights: start sending them to all holders."""
        if bucket.n > 1:
            bucket.gathering = self.transport.all_gather(bucket.weights, bucket.shard, bucket.group, bucket.name)
        if not self.cfg.overlap:
            self.wait_for_weights(bucket)

    def wait_for_weights(self, bucket: Bucket) -> None:
        """Wait for weights under way: on a GPU the compute stream waits, not the host."""
        if bucket.gathering is not None:
            with at("wait", bucket.name):
                bucket.gathering.wait()
            bucket.gathering = None

    def published(self) -> None:
        """All updates are made: their weights are there, on every rank."""
        for bucket in self.buckets.values():
            self.wait_for_weights(bucket)

    def masters_changed(self) -> None:
        """After a load: bring the compute weights up to date."""
        for bucket in self.buckets.values():
            self.optimizer.load(bucket)
            self.publish(bucket)
        self.published()

    def catch_up(self) -> None:
        """Make updates that are still due."""
        if self.optimizer.catch_up():
            self.published()


def add_in_order(shard: Tensor, pieces: Tensor, overwrite: bool) -> None:
    """shard (S,) becomes, or grows by, the sum of pieces (N, S) in the order of the rows, in shard's dtype."""
    total = pieces[0].to(shard.dtype)
    for piece in pieces[1:]:
        total = total + piece
    shard.copy_(total if overwrite else shard + total)


# --- the idea: stage 2, gradients too ---------------------------------------------------------------------------------


class Zero2(Zero1):
    """Gradients leave in every micro-batch; whole ones are alive of two buckets at most."""

    open_transport = staticmethod(open_transport)
    watch = False  # after a gradient that was not finite: look at each rank's own, to name the culprit

    @staticmethod
    def wire_dtype(run: Run) -> torch.dtype:
        """As computed: the sums over ranks and micro-batches are made in fp32 where they arrive."""
        return run.wire_dtype if run.wire_dtype != run.master_dtype and run.world_size > 1 else run.dtype

    def allocate(self, run: Run, held: dict[str, Held]) -> None:
        super().allocate(run, held)
        if any(copies(run, what) != run.world_size for what in held.values()):
            raise ValueError("stages 2 and 3 share every bucket out over all ranks")
        longest = max(padded(what, run.world_size) for what in held.values())
        self.full = self.transport.empty(2 * longest, self.wire).split(longest)

    def add_buffers(self, bucket: Bucket) -> None:
        """Whole weights, of gradients the share."""
        super().add_buffers(bucket)
        bucket.grad = bucket.grad_shard = bucket.owned = torch.zeros_like(bucket.shard, dtype=self.run.master_dtype)

    def grad_ready(self, bucket: Bucket, name: str, param: torch.nn.Parameter) -> None:
        """Move one gradient into a full buffer and send that once it is complete."""
        full = self.full[bucket.slot][: bucket.padded]
        if len(bucket.missing) == len(bucket.slices):  # the first of this pass
            self.take_in(bucket.slot)
            full[bucket.numel :].zero_()
        bucket.view(full, name).copy_(param.grad)
        param.grad = None
        first = bucket.passes == 0
        if bucket.gradient_came(name):
            if self.watch:
                bucket.note_norms(full, add=not first)
            self.exchange(bucket, full, overwrite=first, final=bucket.passes == self.run.accum)

    def reduce(self, bucket: Bucket) -> None:
        """Nothing is left for the end of a step: all has been sent."""

    def culprit(self) -> str:
        """Collective: which parameter's gradient is not finite; from the second such step on, which rank brought it."""
        shares = [(name, t) for b in self.buckets.values() for name, _, t, _ in b.parts(b.grad_shard)]
        mine = next((name for name, t in shares if not t.isfinite().all()), None)
        by_rank, self.watch = super().culprit(), True
        by_name = next((name for name in self.run.everyone(mine) if name), by_rank)
        return by_rank if " on rank " in by_rank else by_name

    def adamw_step(self, update: int, lr: float, factor: float) -> None:
        self.watch = False
        super().adamw_step(update, lr, factor)


# --- the idea: stage 3, weights too -----------------------------------------------------------------------------------


class Zero3(Zero2):
    """Weights are gathered round each block into two buffers used in turn: one computes, one arrives."""

    updates_may_wait = False  # the others fetch this rank's shards when they like

    def allocate(self, run: Run, held: dict[str, Held]) -> None:
        self.units, sizes = list(held), shares(run, held)
        self.shards = dict(zip(held, self.transport.empty(sum(sizes), run.dtype).split(sizes)))
        self.weight_buffers = [torch.empty(n, dtype=run.dtype, device=run.device) for n in buffer_lengths(run, held)]
        self.there: list[int | None] = [None] * 3  # which unit's weights are in each of them
        super().allocate(run, held)

    def add_buffers(self, bucket: Bucket) -> None:
        """Of weights and gradients the share; whole weights in a place that others use too."""
        super().add_buffers(bucket)
        buffer = buffer_of(bucket.number, self.run.model_cfg.tie)
        bucket.shard, bucket.weights = self.shards[bucket.name], self.weight_buffers[buffer][: bucket.padded]

    def use(self, unit: str) -> None:
        """Forward: wait for this unit's weights; while it computes, the next unit's come."""
        i = self.units.index(unit)
        if i == 0 and self.buckets[unit].passes == 0:
            self.there = [None] * 3  # every step gathers alike, also after an evaluation
        self.have(i, ahead=i + 1 if i + 1 < len(self.units) else None)

    def leave(self, h: Tensor, unit: str) -> Tensor:
        """Backward will come in here: then this block's weights are waited for, and those of the one before come."""
        return UseInBackward.apply(h, self, self.units.index(unit))

    def have(self, i: int, ahead: int | None) -> None:
        """Wait for the weights of unit i, and have those of unit `ahead` come meanwhile."""
        self.all_gather(i)
        self.wait_for_weights(self.buckets[self.units[i]])
        if self.cfg.overlap and ahead is not None:
            self.all_gather(ahead)

    def all_gather(self, i: int) -> None:
        """Start bringing unit i to its buffer unless it is there, over a unit whose compute is queued before."""
        buffer, bucket = buffer_of(i, self.run.model_cfg.tie), self.buckets[self.units[i]]
        if self.there[buffer] != i:
            bucket.gathering = self.transport.all_gather(bucket.weights, bucket.shard, bucket.group, bucket.name)
            self.there[buffer] = i

    def finish(self) -> Tensor:
        """As before; and what the places hold is about to be the weights of the step before."""
        self.there = [None] * 3
        return super().finish()

    def publish(self, bucket: Bucket) -> None:
        """Others fetch the shard when they need it."""

    def published(self) -> None:
        """All shards are written, on every rank."""
        self.transport.settle()


class UseInBackward(torch.autograd.Function):
    """Identity on block i's output. In backward it runs just before the block: its weights are waited for."""

    @staticmethod
    def forward(ctx, h: Tensor, zero: Zero3, i: int) -> Tensor:
        ctx.zero, ctx.i = zero, i
        return h.view_as(h)

    @staticmethod
    def backward(ctx, grad: Tensor):
        # Backward does not need the embedding; fetch it for the next micro-batch, unless this is the last one.
        last = ctx.zero.buckets["embed"].passes + 1 == ctx.zero.run.accum
        ctx.zero.have(ctx.i, ahead=ctx.i - 1 if ctx.i > 1 or not last else None)
        return grad, None, None


def buffer_of(i: int, tied: bool) -> int:
    """Which place unit i takes: one of two in turn, a tied embedding its own, for both ends of a pass need it."""
    return 2 if tied and i == 0 else i % 2


# --- what it costs ----------------------------------------------------------------------------------------------------


def shares(run: Run, held: dict[str, Held]) -> list[int]:
    """Elements of this rank's share of each bucket."""
    return [padded(what, copies(run, what)) // copies(run, what) for what in held.values()]


def longest_sent(run: Run, held: dict[str, Held]) -> int:
    """Elements of the longest bucket that several ranks hold."""
    return max([padded(what, n) for what in held.values() if (n := copies(run, what)) > 1], default=0)


def buffer_lengths(run: Run, held: dict[str, Held]) -> list[int]:
    """Stage 3: elements of the three places."""
    sizes, tied = [padded(what, run.world_size) for what in held.values()], run.model_cfg.tie
    return [max(sizes[tied:])] * 2 + [sizes[0] if tied else 0]


def gather_order(units: int, accum: int, tied: bool, overlap: bool) -> list[int]:
    """Stage 3: the units gathered in one step, in order. One that its place still holds from the pass before is not."""
    there, order = {}, []
    for micro in range(accum):
        backward = list(range(units - 2, 0, -1)) + ([0] if overlap and micro < accum - 1 else [])
        for i in [*range(units), *backward]:
            if there.get(buffer_of(i, tied)) != i:
                order.append(i)
            there[buffer_of(i, tied)] = i
    return order


def share_bytes(run: Run, held: dict[str, Held], stage: int) -> tuple[dict[str, int], list, list]:
    """Shared-out buckets: bytes held by term; what the gradients of one pass send; what new weights send."""
    master, compute = run.master_dtype.itemsize, run.dtype.itemsize
    wire = (Zero2 if stage > 1 else Zero1).wire_dtype(run).itemsize
    n = {unit: copies(run, what) for unit, what in held.items()}
    size = {unit: padded(held[unit], n[unit]) for unit in held}
    whole, mine, longest = sum(size.values()), sum(shares(run, held)), longest_sent(run, held)
    memory = {
        "master weights": master * mine,
        "moments": 2 * master * mine,
        "gradients": master * (mine if stage > 1 else whole),
        "compute weights": compute * (mine if stage == 3 else whole),
        "weight buffers": compute * sum(buffer_lengths(run, held)) if stage == 3 else 0,
        # of two buckets: as they are received, and as they are sent (stage 1: only if --wire narrows them)
        "gradient buffers": 2 * wire * (longest + (max(size.values()) if stage > 1 else longest * (wire != master))),
        "gradients in passing": compute * max(size.values()),
    }
    gradients = [("exchange", unit, wire * size[unit]) for unit in reversed(held) if n[unit] > 1]
    gradients += [("all_reduce", "tied embedding", master * size[unit] // n[unit]) for unit in held if held[unit].twin]
    return memory, gradients, [("all_gather", unit, compute * size[unit]) for unit in held if n[unit] > 1]


def predict(run: Run) -> tuple[dict[str, int], list[tuple[str, str, int]]]:
    """Bytes held by term, and the collectives of one step in order as (operation, unit, payload bytes)."""
    cfg, held, compute = run.cfg, held_by(run), run.dtype.itemsize
    if cfg.stage == 0:
        return train_ddp.predict(run)
    memory, gradients, weights = share_bytes(run, held, cfg.stage)
    if cfg.offload == "optimizer":
        memory |= {"master weights": 0, "moments": 0}
    memory["activations"] = activation_bytes(run.model_cfg, cfg.micro_batch, compute, cfg.recompute, cfg.compile)
    if cfg.stage == 1:
        return memory, [*gradients, ("all_reduce", "facts", 40), *weights]
    if cfg.stage == 2:
        return memory, [*gradients * run.accum, ("all_reduce", "facts", 40), *weights]
    units, order = list(held), gather_order(len(held), run.accum, run.model_cfg.tie, cfg.overlap)
    gathers = [("all_gather", units[i], compute * padded(held[units[i]], run.world_size)) for i in order]
    return memory, [*gathers, *gradients * run.accum, ("all_reduce", "facts", 40)]


# --- the run ----------------------------------------------------------------------------------------------------------


def from_deepspeed(cfg: Config, group: dist.ProcessGroup | None) -> Config:
    """cfg with what the file of --deepspeed says; what is ignored in it is printed."""
    if not cfg.deepspeed:
        return cfg
    from deepspeed_json import read_deepspeed

    fields = dataclasses.fields(cfg)
    given = {f.name: getattr(cfg, f.name) for f in fields if f.name in cfg.given or getattr(cfg, f.name) != f.default}
    values, lines = read_deepspeed(cfg.deepspeed, job_size(group), given)
    if int(os.environ.get("RANK", 0)) == 0:
        print("\n".join(lines), flush=True)
    cfg = copy.copy(cfg)  # not dataclasses.replace(): it forgets cfg.given
    vars(cfg).update(values)
    return cfg


def check(run: Run) -> None:
    """Raises UserError, before anything is built, for what a stage cannot do."""
    cfg = run.cfg
    if cfg.stage == 0 and cfg.offload != "none":
        raise UserError("--stage 0 shares nothing out, so there is nothing to --offload; allowed with --stage 1, 2, 3")
    if cfg.stage > 0 and cfg.allreduce != "torch":
        raise UserError(f"--allreduce {cfg.allreduce}: stages 1 to 3 reduce by exchange; allowed with --stage 0")
    choose_copy_engine(run, cfg.stage >= 2 or run.cp > 1)


def main(cfg: Config, group: dist.ProcessGroup | None = None) -> list[dict]:
    """Train as cfg says on the ranks of `group` (all, when None); returns the rows of the log."""
    run = start(from_deepspeed(cfg, group), __file__, group, check=check)
    cfg = run.cfg
    memory, traffic = predict(run)
    wire = (Zero2 if cfg.stage > 1 else Zero1).wire_dtype(run)
    say(f"gradients travel in {str(wire)[6:]}, summed in {str(run.master_dtype)[6:]}")
    if cfg.offload == "optimizer":
        host = HOST_TENSORS * run.master_dtype.itemsize * sum(shares(run, held_by(run))) / 1e9
        say(f"host memory: {host:.3f} GB for each rank's masters, moments and gradients")
    if cfg.explain:
        return explain(run, memory, traffic)

    model = GPT(run.model_cfg, cfg.recompute)
    sharing = {1: Zero1, 2: Zero2, 3: Zero3}
    strategy = sharing[cfg.stage](model, run, offload=cfg.offload != "none") if cfg.stage else DataParallel(model, run)
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
                    (loss * (scale / nominal)).backward()  # gradients leave from in here, at stage 2 and 3 each time
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
