"""ZeRO: data parallel training in which the ranks share out what they would otherwise all hold.

    torchrun --nproc_per_node=8 train_zero.py                       # stage 2
    torchrun --nproc_per_node=8 train_zero.py --stage 3 --model 6b --global-batch 64 --data DIR
    torchrun --nproc_per_node=2 train_zero.py --stage 2 --offload optimizer
    torchrun --nproc_per_node=2 train_zero.py --deepspeed examples/ds_zero2_offload.json
    python train_zero.py --stage 3 --explain                        # memory and collectives, then exit

What AdamW needs of a parameter, its fp32 master and two moments, is used once a step by one update; so each of N ranks
keeps and updates 1/N (stage 1). Then the sum of a gradient is needed only where the update happens (stage 2), and the
weights themselves only while their layer computes (stage 3). Everything is one flat buffer per unit (the embedding, each
block, norm and head), so that a collective has nothing to pack. One step:

    for each micro-batch:
        forward:   stage 3:  all_gather(weights of block i+1)        while block i computes
        backward:  stage 3:  all_gather(weights of block i-1)        while block i computes
                   stage 2, 3:  reduce_scatter(gradients of block i)    while block i-1 computes; shards are summed in fp32
    stage 0: all_reduce, stage 1: reduce_scatter(gradients), from inside the last micro-batch's backward
    all_reduce(loss, tokens, stop); all_reduce(squared norm); clip; AdamW on the shard
    stage 1, 2: all_gather(new weights of unit u)                    while unit u+1 updates

Bytes per parameter held, and handed to collectives per parameter and step, for bf16 compute and A micro-batches (each rank
sends (N-1)/N of what it hands over, twice that in an all_reduce):

                 weights  gradients  masters, moments    N = 1     2     8       all_reduce  reduce_scatter  all_gather
    stage 0         2         4           12              18    18    18            4
    stage 1         2         4           12/N            18    12     7.5                         4            2
    stage 2         2         4/N         12/N            18    10     4                           2 A          2
    stage 3         2/N       4/N         12/N            18     9     2.25                        2 A          4 A

(Stage 3 gathers a little less: the units at either end of a pass are still there at the start of the next, and the
embedding needs no weights in backward.) Stages 0 and 1 send what was summed over micro-batches, in fp32. Stages 2 and 3
send every micro-batch's gradient as it was computed, in bf16, and sum over ranks and micro-batches in fp32: nothing is lost.
On one host the reduce_scatter of stages 2 and 3 and the all_gather of stage 3 go by the GPUs' copy engines (peer_memory.py), so
that compute keeps every multiprocessor.

With --offload optimizer, masters and moments live in pinned host memory: gradient shards flow out behind backward, the
CPU's cores run AdamW unit by unit, new weights flow back while the next unit updates. Below stage 3 the update of a
unit waits for the next forward pass to reach it, so that the first units compute on the GPU while later ones update.

Papers: Rajbhandari et al., ZeRO (arXiv 1910.02054); Ren et al., ZeRO-Offload (2101.06840).
"""

import copy
import dataclasses
import math
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint import Checkpointer, Piece, host_memory
from data import Batches, val_batches
from model import GPT, IGNORE, activation_bytes, dropout_keys, flops_per_token, init_range, unit_shapes
from optim import FlatUnit, LossScaler, adamw_step, flat_unit, gradient_factor, lr_at
from peer_memory import PeerMemory, Transfer, choose_copy_engine
from support.flags import Config as SharedConfig
from support.meter import Meter, at, say
from support.resume import progress, resume, rng_state
from support.run import Run
from support.start import explain, run_script, say_if_stopped, start, stop_signal

# torch 2.13 renamed the two; 2.11 has the old names only
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass
class Config(SharedConfig):
    stage: Literal[0, 1, 2, 3] = (
        2  # 1: optimizer state sharded, 2: and gradients, 3: and weights; 0: nothing, for comparison
    )
    offload: Literal["none", "optimizer"] = "none"  # optimizer: masters and moments in host memory, updated by the CPU
    copy_engine: bool | None = (
        None  # stage 2, 3: move data by copy engines instead of NCCL's kernels [if all GPUs are on one host]
    )
    deepspeed: str = ""  # a DeepSpeed configuration file to take these settings from
    scale_power: int = 16  # float16: the dynamic factor starts at 2 to this
    scale_window: int = 1000  # float16: good steps before the factor doubles
    scale_hysteresis: int = 1  # float16: overflows before it halves
    scale_min: float = 1.0  # float16: never below this


# --- the idea ---------------------------------------------------------------------------------------------------------


class Unit:
    """One unit's flat buffers. This rank's shard is elements [first, first + len(master)), all of it at stage 0.

    Stage 1, 2: `weights` is whole and the shard a view of it. Stage 3: `weights` is a view of a buffer that units take in
    turn, filled from the shard when needed. Stage 0, 1: `grad` is whole, summed over micro-batches. Stage 2, 3: `grad` is
    the shard, summed over micro-batches and ranks.
    """

    def __init__(self, flat: FlatUnit, index: int, stage: int, buffer: Tensor | None, shard: Tensor | None, run: Run):
        self.flat, self.index = flat, index
        n = run.world_size if stage else 1
        size = flat.padded // n
        self.first = run.rank * size if stage else 0
        self.mine = slice(self.first, self.first + size)
        self.master = torch.zeros(size, dtype=run.master_dtype, device=run.device)
        for name in flat.shapes:  # only this rank's elements are ever made
            a, b = flat.overlap(name, self.first, size)
            init_range(
                self.master[a - self.first : b - self.first], name, a - flat.start[name], run.model_cfg, run.cfg.seed
            )
        if stage == 3:
            self.weights, self.shard = buffer[: flat.padded], shard
        else:
            self.weights = torch.empty(flat.padded, dtype=run.dtype, device=run.device)
            self.shard = self.weights[self.mine]
        self.grad = torch.zeros(flat.padded if stage < 2 else size, dtype=run.master_dtype, device=run.device)
        self.grad_shard = self.grad[self.mine] if stage < 2 else self.grad
        self.home_grad = self.grad_shard  # where AdamW reads it
        self.arrived = 0  # parameters whose gradient of this micro-batch is in
        self.gathering: dist.Work | Transfer | None = None
        self.due: tuple[int, float, float] | None = (
            None  # an update not made yet: its number, learning rate, gradient factor
        )
        self.copied: torch.cuda.Event | None = None

    def to_host(self, take: Callable[[Tensor], Tensor]) -> None:
        """Move masters to pinned host memory; `take` cuts a tensor from the host arena."""
        master, self.master = self.master, take(self.master)
        self.master.copy_(master)
        self.home_grad = take(self.grad_shard)


class Zero:
    """Stages 0 to 3 over run.world, around a model whose parameters are views of the units' flat weights."""

    def __init__(self, model: GPT, run: Run):
        self.model, self.run, self.cfg, self.stage = model, run, run.cfg, run.cfg.stage
        self.cuda = run.device.type == "cuda"
        flats = flat_units(run)
        self.longest = max(flat.padded for flat in flats)
        self.wire_dtype = wire_dtype(run)

        def shared(numel: int, dtype: torch.dtype) -> tuple[PeerMemory | None, Tensor]:
            memory = PeerMemory(numel, dtype, run) if run.copy_engine else None
            return memory, memory.mine if memory else torch.zeros(numel, dtype=dtype, device=run.device)

        self.shards: PeerMemory | None = None  # of the weights at stage 3; fulls: of whole gradients at stages 2 and 3
        self.fulls: PeerMemory | None = None
        buffers: list[Tensor | None] = [None] * 3
        shards = [None] * len(flats)
        if self.stage == 3:
            sizes = [flat.padded // run.world_size for flat in flats]
            self.shards, flat_shards = shared(sum(sizes), run.dtype)
            shards = flat_shards.split(sizes)
            buffers = [
                torch.empty(n, dtype=run.dtype, device=run.device) for n in buffer_lengths(flats, run.model_cfg.tie)
            ]
        self.units: list[Unit] = []
        self.moments: list[tuple[Tensor, Tensor]] = []
        me = weakref.proxy(
            self
        )  # the garbage collector does not see into hooks: held by them, all of this would outlive the run
        take = self.open_host() if self.cfg.offload == "optimizer" else None
        for i, flat in enumerate(flats):
            unit = Unit(flat, i, self.stage, buffers[buffer_of(i, run.model_cfg.tie)], shards[i], run)
            if take:  # at once: the GPU never holds two units' masters
                unit.to_host(take)
            zeros = take or torch.zeros_like
            self.moments.append((zeros(unit.master), zeros(unit.master)))
            self.units.append(unit)
            for name in unit.flat.shapes:
                # .data: a version counter of its own, for a buffer refilled between forward and backward is no error here
                param = model.set_param(name, unit.flat.view(unit.weights, name).data)
                # fires when backward has finished this parameter's gradient: for a tied weight, after both its uses
                param.register_post_accumulate_grad_hook(lambda p, u=unit, n=name: me.grad_ready(u, n, p))
        self.held: list[int | None] = [None] * 3  # stage 3: which unit's weights each buffer holds
        if self.stage >= 2:  # full-size gradients of two units are alive, taken in turn
            self.fulls, full = shared(2 * self.longest, self.wire_dtype)
            self.full = full.split(self.longest)
        if self.stage and run.world_size > 1:
            self.received = [torch.empty(self.longest, dtype=self.wire_dtype, device=run.device) for _ in range(2)]
        self.under_way: list[UnderWay | None] = [None, None]
        self.first_micro = self.last_micro = True
        self.later = self.cfg.offload == "optimizer" and self.cfg.overlap and self.stage < 3
        # later: adamw_step() notes updates as due; the next forward pass's use() makes each, publish() sends it, arrive() waits for it
        self.watch = False  # after a gradient that was not finite: look at each rank's own, to name the culprit
        self.suspects: list[str] = []
        self.add = torch.compile(add_in_order, dynamic=True) if self.cuda and self.cfg.compile else add_in_order
        self.masters_changed()

    # -- weights come --

    def __call__(self, x: Tensor, y: Tensor, keys: Tensor | None = None) -> Tensor:
        """GPT.forward, with each unit's weights there in time. x, y (B, T) int64 -> summed loss (scalar)."""
        model, last = self.model, len(self.units) - 1
        cos, sin = model.cos[: x.shape[1]], model.sin[: x.shape[1]]
        if self.first_micro:
            self.held = [None] * 3  # every step gathers alike, also after an evaluation
        self.use(0, ahead=1)
        h = model.embed(x, keys)
        for i, block in enumerate(model.blocks, 1):
            self.use(i, ahead=i + 1)
            h = block(h, cos, sin, keys)
            if self.stage == 3:
                h = UseInBackward.apply(h, self, i)
        self.use(last, ahead=None)
        return model.loss_sum(h, y)

    def use(self, i: int, ahead: int | None) -> None:
        """Wait for the weights of unit i, which is about to compute; at stage 3 have those of unit `ahead` come meanwhile."""
        if self.stage == 3:
            self.all_gather(i)
        else:
            self.update(self.units[i])
        self.arrive(i)
        if self.stage == 3 and self.cfg.overlap and ahead is not None:
            self.all_gather(ahead)

    def all_gather(self, i: int) -> None:
        """Start bringing unit i into its buffer, over unit i-2 or i+2, whose compute is queued before; nothing if it is there."""
        unit, buffer = self.units[i], buffer_of(i, self.run.model_cfg.tie)
        if self.held[buffer] != i:
            with at("all_gather", unit.flat.name, unit.weights.nbytes):
                if self.shards is None:
                    unit.gathering = all_gather_single(unit.weights, unit.shard, group=self.run.world, async_op=True)
                else:  # shards do not change within a step: each rank reads the others' when it likes
                    a = unit.shard.storage_offset()
                    theirs = [memory[a : a + len(unit.shard)] for memory in self.shards.of]
                    unit.gathering = self.shards.fetch(list(zip(unit.weights.chunk(len(theirs)), theirs)), settled=True)
            self.held[buffer] = i

    def arrive(self, i: int) -> None:
        unit = self.units[i]
        if unit.gathering is not None:
            with at("wait", unit.flat.name):
                unit.gathering.wait()  # on a GPU: the compute stream waits, not the host
            unit.gathering = None

    # -- gradients leave --

    def grad_ready(self, unit: Unit, name: str, param: torch.nn.Parameter) -> None:
        """Move one gradient into its unit's flat buffer and send the buffer once it is complete."""
        if self.stage < 2:
            into = unit.flat.view(unit.grad, name)
            into.copy_(param.grad) if self.first_micro else into.add_(param.grad)
        else:
            full = self.full[unit.index % 2]
            if unit.arrived == 0:
                self.settle(unit.index % 2)
                full[unit.flat.numel : unit.flat.padded].zero_()
            unit.flat.view(full, name).copy_(param.grad)
        if self.watch and not param.grad.isfinite().all():
            self.suspects.append(name)
        param.grad = None
        unit.arrived += 1
        if unit.arrived == len(unit.flat.shapes):
            unit.arrived = 0
            if self.stage >= 2 or self.last_micro and self.cfg.overlap:
                self.reduce(unit)

    def reduce(self, unit: Unit) -> None:
        """Start summing a unit's gradient over the ranks, each to get its shard of the sum (stage 0: all of it).

        The reduce-scatter is an exchange: rank r gets everyone's piece r as it was computed, in bf16, and settle() adds
        the pieces in fp32. The sum is that of an fp32 reduce-scatter at half its bytes, and in the order of the ranks.
        """
        slot, n, group = unit.index % 2, self.run.world_size, self.run.world
        if self.stage < 2:
            self.settle(slot)
            full = unit.grad.to(self.wire_dtype)  # the same tensor unless --wire narrows it
        else:
            full = self.full[slot][: unit.flat.padded]
        received = self.received[slot][: unit.flat.padded] if self.stage and n > 1 else full
        if n == 1:
            work = None
        elif self.stage == 0:
            with at("all_reduce", unit.flat.name, full.nbytes):
                work = dist.all_reduce(full, group=group, async_op=True)
        else:
            with at("reduce_scatter", unit.flat.name, full.nbytes):
                if self.fulls is None:
                    work = dist.all_to_all_single(received, full, group=group, async_op=True)
                else:
                    a = full.storage_offset() + unit.first
                    theirs = [memory[a : a + len(unit.grad)] for memory in self.fulls.of]
                    work = self.fulls.fetch(list(zip(received.chunk(n), theirs)), settled=False)
        self.under_way[slot] = UnderWay(unit, work, full, received, self.first_micro or self.stage < 2, self.last_micro)
        if not self.cfg.overlap:
            self.settle(slot)

    def settle(self, slot: int) -> None:
        """Take in the sum that is under way in this slot; its buffers are free again."""
        if self.under_way[slot] is None:
            return
        now, self.under_way[slot] = self.under_way[slot], None
        if now.work is not None:
            with at("wait", now.unit.flat.name):
                now.work.wait()
        if now.received is not now.unit.grad:
            self.add(now.unit.grad_shard, now.received.view(self.run.world_size if self.stage else 1, -1), now.first)
        if now.last:
            self.copy_out(now.unit)

    def finish(self) -> None:
        """Wait until every shard holds the sum over all ranks."""
        if self.stage < 2 and not self.cfg.overlap:
            for unit in reversed(self.units):  # the order in which backward completed them
                self.reduce(unit)
        self.settle(0)
        self.settle(1)
        self.held = [None] * 3  # the weights in the buffers are about to be of the step before

    def grad_norm(self) -> float:
        """Norm of the summed gradient: each shard's squares once (padding is zero), summed over the ranks."""
        norms = torch.stack([torch.linalg.vector_norm(u.grad_shard) for u in self.units])
        squares = norms.double().square().sum()
        if self.stage:
            with at("all_reduce", "squared norm", squares.nbytes):
                dist.all_reduce(squares, group=self.run.world)
        return squares.sqrt().item()

    def culprit(self) -> str:
        """Collective: which parameter's gradient is not finite; from the second such step on, which rank brought it too."""
        shards = (
            (p, t)
            for u in self.units
            for p, piece in u.flat.pieces("", u.grad_shard, u.first).items()
            for _, t in piece.boxes
        )
        mine = next((name for name, t in shards if not t.isfinite().all()), None)
        everyone = self.run.everyone((mine, self.suspects[:1]))
        self.watch, self.suspects = True, []
        found = [f"{name} on rank {rank}" for rank, (_, suspects) in enumerate(everyone) for name in suspects]
        return ", ".join(found) or next((name for name, _ in everyone if name), "the sum over the ranks")

    # -- the update --

    def adamw_step(self, update: int, lr: float, factor: float) -> None:
        """AdamW on this rank's shards, with gradients times `factor`, and the new weights to everyone.

        With masters on the host a unit's update can wait until the next forward pass needs its weights: it then computes on
        the CPU while the GPU is still at the unit before. At stage 3 others fetch the shards, so all must be there.
        """
        self.watch = False
        for unit in self.units:
            unit.due = update, lr, factor
        if not self.later:
            self.catch_up()
        elif self.stage:
            for unit in self.units:
                with at("all_gather", unit.flat.name, unit.weights.nbytes):
                    pass  # counted here, in the step it belongs to

    def catch_up(self) -> None:
        """Make all updates that are due."""
        for unit in self.units:
            self.update(unit)
        self.all_published()

    def update(self, unit: Unit) -> None:
        """AdamW on one unit, if it is due."""
        if unit.due is None:
            return
        (update, lr, factor), unit.due = unit.due, None
        with at("optimizer"):
            if unit.copied is not None:
                unit.copied.synchronize()  # its gradient has reached the host
            # on the CPU in pieces that stay in cache from the scaling to the rounding; on the GPU in one
            size = 1 << 20 if self.cfg.offload == "optimizer" else len(unit.master)
            made = self.outbox(unit)
            for a in range(0, len(unit.master), size):
                master, grad, m, v = (t[a : a + size] for t in (unit.master, unit.home_grad, *self.moments[unit.index]))
                if factor != 1:
                    grad.mul_(factor)
                adamw_step(master, grad, m, v, unit.flat.decay - unit.first - a, update, lr, self.cfg)
                made[a : a + size].copy_(master)
            self.publish(unit, made)

    def outbox(self, unit: Unit) -> Tensor:
        """Where a unit's new compute weights are made: in its shard, with offload in a pinned buffer, half the bytes over PCIe."""
        if not (self.cfg.offload == "optimizer" and self.cuda):
            return unit.shard
        self.sent[unit.index % 2].synchronize()  # the unit before last has left the buffer
        return self.staging[unit.index % 2][: len(unit.master)]

    def publish(self, unit: Unit, made: Tensor) -> None:
        """New compute weights to the shard, and at stages 1 and 2 from there to all ranks."""
        if made is not unit.shard:
            unit.shard.copy_(made, non_blocking=True)
            self.sent[unit.index % 2].record()
        if self.stage in (1, 2):
            with at("optimizer") if self.later else at("all_gather", unit.flat.name, unit.weights.nbytes):
                unit.gathering = all_gather_single(unit.weights, unit.shard, group=self.run.world, async_op=True)
            if not self.cfg.overlap:
                self.arrive(unit.index)

    def masters_changed(self) -> None:
        """After a load: bring the compute weights up to date."""
        for unit in self.units:
            made = self.outbox(unit)
            made.copy_(unit.master)
            self.publish(unit, made)
        self.all_published()

    def all_published(self) -> None:
        """After the last unit's: the new weights are there (stage 1, 2) or ready to be gathered (stage 3) on every rank."""
        if self.stage < 3:
            for unit in self.units:
                self.arrive(unit.index)
        if self.shards is not None:
            self.shards.barrier()

    # -- offload --

    def open_host(self) -> Callable[[Tensor], Tensor]:
        """One pinned arena for masters, moments and arriving gradient shards -> what cuts the next piece, as long as a tensor, from it.

        bf16 weights go back to the GPU through two staging buffers.
        """
        run = self.run
        self.host = host_memory(host_bytes(run), self.cuda)  # kept: it is locked as long as this lives
        arena, end = self.host.view(run.master_dtype), 0

        def take(like: Tensor) -> Tensor:
            nonlocal end
            end += len(like)
            return arena[end - len(like) : end]

        if self.cuda:
            if (
                torch.get_num_threads() > 4
            ):  # an update waits for its slowest thread: leave cores to those that load data and drive the GPU
                torch.set_num_threads(torch.get_num_threads() - 2)
            longest = self.longest // (run.world_size if self.stage else 1)
            self.staging = [torch.empty(longest, dtype=run.dtype, pin_memory=True) for _ in range(2)]
            self.sent = [torch.cuda.Event() for _ in range(2)]
            self.stream = torch.cuda.Stream()
        return take

    def copy_out(self, unit: Unit) -> None:
        """Send a finished gradient shard to the host, behind whatever backward computes next."""
        if unit.home_grad is unit.grad_shard:
            return
        if not self.cuda:
            unit.home_grad.copy_(unit.grad_shard)
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            unit.home_grad.copy_(unit.grad_shard, non_blocking=True)
            unit.copied = unit.copied or torch.cuda.Event()
            unit.copied.record()

    def pieces(self) -> dict[str, Piece]:
        """The training state by name, for checkpoint.py: this rank's shards, as boxes of the named tensors."""
        self.catch_up()
        found: dict[str, Piece] = {}
        for u, (exp_avg, exp_avg_sq) in zip(self.units, self.moments, strict=True):
            for prefix, shard in (("", u.master), ("exp_avg.", exp_avg), ("exp_avg_sq.", exp_avg_sq)):
                found |= u.flat.pieces(prefix, shard, u.first)
        return found


@dataclass
class UnderWay:
    """A unit's gradient on its way: `full` of this rank, `received` from all."""

    unit: Unit
    work: dist.Work | Transfer | None
    full: Tensor
    received: Tensor
    first: bool  # of the first micro-batch: overwrites the shard, else is added
    last: bool


def add_in_order(shard: Tensor, pieces: Tensor, overwrite: bool) -> None:
    """shard (S,) fp32 (=|+=) the sum of pieces (N, S), added in fp32 in the order of the rows. One pass when compiled."""
    total = pieces[0].to(shard.dtype)
    for piece in pieces[1:]:
        total = total + piece
    shard.copy_(total if overwrite else shard + total)


class UseInBackward(torch.autograd.Function):
    """Identity on block i's output. In backward it runs just before the block: its weights are waited for, the next called."""

    @staticmethod
    def forward(ctx, h: Tensor, zero: Zero, i: int) -> Tensor:
        ctx.zero, ctx.i = zero, i
        return h.view_as(h)

    @staticmethod
    def backward(ctx, grad: Tensor):
        # the embedding needs no weights in backward: called for the next micro-batch, if there is one before they change
        ahead = ctx.i - 1 if ctx.i > 1 or not ctx.zero.last_micro else None
        ctx.zero.use(ctx.i, ahead)
        return grad, None, None


def flat_units(run: Run) -> list[FlatUnit]:
    """The units in the order of forward, padded so that every rank's shard has the same length (at stage 0 too: one layout for all)."""
    return [flat_unit(unit, shapes, run.world_size) for unit, shapes in unit_shapes(run.model_cfg).items()]


def wire_dtype(run: Run) -> torch.dtype:
    """In which gradients travel: as summed over the micro-batches (stage 0, 1), as computed (2, 3), or bf16 on demand."""
    if run.world_size == 1 or run.wire_dtype == run.master_dtype:
        return run.dtype if run.cfg.stage >= 2 else run.master_dtype
    return run.wire_dtype


def buffer_of(i: int, tied: bool) -> int:
    """Stage 3: which buffer unit i takes: one of two in turn, a tied embedding its own, for both ends of a pass need it."""
    return 2 if tied and i == 0 else i % 2


def buffer_lengths(flats: list[FlatUnit], tied: bool) -> list[int]:
    """Stage 3: elements of the three buffers."""
    longest = max(flat.padded for flat in flats[tied:])
    return [longest, longest, flats[0].padded if tied else 0]


def gather_order(units: int, accum: int, tied: bool, overlap: bool) -> list[int]:
    """Stage 3: the units gathered in one step, in order. A unit that its buffer still holds from the pass before is not."""
    held, order = {}, []
    forward = list(range(units))
    for micro in range(accum):
        backward = list(range(units - 2, 0, -1)) + ([0] if overlap and micro < accum - 1 else [])
        for i in forward + backward:
            buffer = buffer_of(i, tied)
            if held.get(buffer) != i:
                order.append(i)
            held[buffer] = i
    return order


def host_bytes(run: Run) -> int:
    """Of a rank's masters, two moments and gradients, when they are in host memory."""
    return (
        4
        * run.master_dtype.itemsize
        * sum(u.padded for u in flat_units(run))
        // (run.world_size if run.cfg.stage else 1)
    )


def predict(run: Run) -> tuple[dict[str, int], list[tuple[str, str, int]]]:
    """Bytes held by term, and the collectives of one step in order as (operation, unit, payload bytes)."""
    cfg, n, master, compute = run.cfg, run.world_size, run.master_dtype.itemsize, run.dtype.itemsize
    wire = wire_dtype(run).itemsize
    units = flat_units(run)
    P, longest, home = (
        sum(u.padded for u in units),
        max(u.padded for u in units),
        0 if cfg.offload == "optimizer" else 1,
    )
    shard = P // n if cfg.stage else P
    memory = {
        "master weights": home * master * shard,
        "moments": home * 2 * master * shard,
        "gradients": master * (shard if cfg.stage >= 2 else P),
        "compute weights": compute * (shard if cfg.stage == 3 else P),
        "weight buffers": compute * sum(buffer_lengths(units, run.model_cfg.tie)) if cfg.stage == 3 else 0,
        # two units' gradients as they are sent (stage 0 and 1: only if --wire narrows them) and as they are received
        "gradient buffers": 2 * wire * longest * ((cfg.stage >= 2 or wire != master) + (cfg.stage >= 1 and n > 1)),
        "activations": activation_bytes(run.model_cfg, cfg.micro_batch, compute, cfg.recompute, cfg.compile),
        "gradients in passing": compute * longest,
    }
    traffic: list[tuple[str, str, int]] = []
    if cfg.stage == 3:
        order = gather_order(len(units), run.accum, run.model_cfg.tie, cfg.overlap)
        traffic += [("all_gather", units[i].name, compute * units[i].padded) for i in order]
    op = "reduce_scatter" if cfg.stage else "all_reduce"
    times = 0 if n == 1 else run.accum if cfg.stage >= 2 else 1
    traffic += times * [(op, u.name, wire * u.padded) for u in reversed(units)]
    traffic += [("all_reduce", "loss, tokens, stop", 24)] + ([("all_reduce", "squared norm", 8)] if cfg.stage else [])
    if cfg.stage in (1, 2):
        traffic += [("all_gather", u.name, compute * u.padded) for u in units]
    return memory, traffic


# --- the run ----------------------------------------------------------------------------------------------------------


def from_deepspeed(cfg: Config, group: dist.ProcessGroup | None) -> Config:
    """cfg with what the file of --deepspeed says; what is ignored in it is printed."""
    if not cfg.deepspeed:
        return cfg
    from deepspeed_json import read_deepspeed

    world_size = dist.get_world_size(group) if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
    given = {
        f.name: getattr(cfg, f.name)
        for f in dataclasses.fields(cfg)
        if f.name in cfg.given or getattr(cfg, f.name) != f.default
    }
    values, lines = read_deepspeed(cfg.deepspeed, world_size, given)
    if int(os.environ.get("RANK", 0)) == 0:
        print("\n".join(lines), flush=True)
    cfg = copy.copy(cfg)  # not dataclasses.replace(): it forgets cfg.given
    vars(cfg).update(values)
    return cfg


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
    run = start(
        from_deepspeed(cfg, group), __file__, group, check=lambda run: choose_copy_engine(run, run.cfg.stage >= 2)
    )
    cfg = run.cfg
    memory, traffic = predict(run)
    say(f"gradients travel in {str(wire_dtype(run))[6:]}, summed in {str(run.master_dtype)[6:]}")
    if cfg.offload == "optimizer":
        host, here = host_bytes(run) / 1e9, int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        say(
            f"host memory: {host:.3f} GB a rank for masters, moments and gradients, {here * host:.3f} GB for this host's ranks"
        )
    if cfg.offload == "optimizer" and run.device.type == "cuda":
        without = dataclasses.replace(run, cfg=dataclasses.replace(cfg, offload="none"))
        needed, card = sum(predict(without)[0].values()), torch.cuda.get_device_properties(run.device).total_memory
        if needed < 0.95 * card:
            say(
                f"without --offload a rank would need {needed / 1e9:.1f} of the card's {card / 1e9:.1f} GB: it fits, and is faster"
            )
    if cfg.explain:
        return explain(run, memory, traffic)

    run.counts = True
    model = GPT(run.model_cfg, cfg.recompute)
    zero = Zero(model, run)
    model.set_buffers(run.dtype, run.device)
    if cfg.compile:
        model.compile_blocks()

    # [same in every train_*.py
    scaler = LossScaler(cfg)
    saver = Checkpointer(f"{run.out}/ckpt", group=run.control, keep_last=cfg.keep_last)
    first, updates = resume(run, saver, zero, scaler)
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
                zero.first_micro, zero.last_micro = micro == 0, micro == run.accum - 1
                with at("forward"):
                    keys = dropout_keys(cfg.seed, step, sample) if run.model_cfg.dropout else None
                    loss = zero(x, y, keys)  # a sum: what it must be divided by is known once all ranks have counted
                with at("backward"):
                    (
                        loss * (scale / nominal)
                    ).backward()  # gradients leave from in here: every time (stage 2, 3) or the last time
                facts[:2] += torch.stack([loss.detach().double(), (y != IGNORE).sum().double()])
            zero.finish()

            # [same in every train_*.py
            facts[2] = stop_signal()
            with at("all_reduce", "loss, tokens, stop", facts.nbytes):
                dist.all_reduce(facts, group=run.world)
            loss_sum, n_valid, stop = facts.tolist()
            to_mean = nominal / max(n_valid, 1) / scale  # from what backward made to the gradient of the mean loss
            lr = lr_at(updates, cfg)
            # same]

            with at("optimizer"):
                norm = zero.grad_norm() * to_mean
                finite = math.isfinite(norm)
                scaler.update(finite, "" if finite else zero.culprit())
                if finite:  # else all ranks skip: they hold the same norm
                    zero.adamw_step(updates, lr, gradient_factor(norm, cfg.clip) * to_mean)
                    updates += 1

            # [same in every train_*.py
            done = step + 1
            more = {}
            if cfg.eval_every and run.val_tokens and (done % cfg.eval_every == 0 or done == cfg.steps):
                with at("eval"):
                    more["val_loss"] = evaluate(run, zero)
            meter.log(
                step, loss_sum / max(n_valid, 1), norm if finite else None, lr, nominal, scale, not finite, **more
            )
            if cfg.save_every and (done % cfg.save_every == 0 or done == cfg.steps or stop):
                saver.save(done, zero.pieces(), progress(run, updates, scaler), rng=rng_state(run))
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
