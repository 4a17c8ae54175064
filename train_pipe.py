"""Pipeline parallel training: the model is cut into stages, a rank holds one, and micro-batches stream through them.

    torchrun --nproc_per_node=4 train_pipe.py                            # 4 stages, 1F1B
    torchrun --nproc_per_node=4 train_pipe.py --pp 2                     # 2 stages, 2 data-parallel replicas of the pipeline
    torchrun --nproc_per_node=2 train_pipe.py --model 6b --global-batch 64 --micro-batch 4 --data DIR
    torchrun --nproc_per_node=2 train_pipe.py --schedule interleaved --chunks 4 --model 6b --global-batch 64 --data DIR
    python train_pipe.py --draw --pp 4 --global-batch 8 --micro-batch 1  # the schedules as timelines, then exit
    torchrun --nproc_per_node=2 train_pipe.py --stages 3,1 --explain     # blocks per stage by hand; memory and sends, then exit

    gpipe: 4 stages, 4 micro-batches, idle 42.9% of the time
      stage 0  F0F1F2F3 . . . . . . . . .B0--B1--B2--B3--  holds 4
      stage 1   .F0F1F2F3 . . . . . .B0--B1--B2--B3-- . .  holds 4
      stage 2   . .F0F1F2F3 . . .B0--B1--B2--B3-- . . . .  holds 4
      stage 3   . . .F0F1F2F3B0--B1--B2--B3-- . . . . . .  holds 4

    1f1b: 4 stages, 4 micro-batches, idle 42.9% of the time
      stage 0  F0F1F2F3 . . . . . .B0-- .B1-- .B2-- .B3--  holds 4
      stage 1   .F0F1F2 . . . .B0--F3B1-- .B2-- .B3-- . .  holds 3
      stage 2   . .F0F1 . .B0--F2B1--F3B2-- .B3-- . . . .  holds 2
      stage 3   . . .F0B0--F1B1--F2B2--F3B3-- . . . . . .  holds 1

    interleaved: 4 stages, 4 micro-batches, idle 27.3% of the time
      stage 0  F0F1F2F3G0G1G2G3 . . . . . .C0-- .C1-- .C2-- .C3--B0--B1--B2--B3--  holds 8/2
      stage 1   .F0F1F2F3G0G1G2G3 . . .C0-- .C1-- .C2-- .C3--B0--B1--B2--B3-- . .  holds 8/2
      stage 2   . .F0F1F2F3G0G1G2 .C0--G3C1-- .C2-- .C3--B0--B1--B2--B3-- . . . .  holds 7/2
      stage 3   . . .F0F1F2F3G0C0--G1C1--G2C2--G3C3--B0--B1--B2--B3-- . . . . . .  holds 5/2

F is a forward pass, B-- a backward pass, twice as long. The pipe fills and drains: (p-1)/(m+p-1) of the time is idle for
p stages and m micro-batches, in GPipe as in 1F1B. These differ in memory: a stage keeps a micro-batch's activations from its
F to its B, GPipe all m of them, 1F1B at most p - stage. Interleaved, a stage holds v parts from all over the model (G and C
are the second ones): filling takes a v-th of the time, so (p-1)/(v m+p-1) is idle, for v p - 1 boundaries instead of p - 1
and, on the first stage, (p-1)/v micro-batches more in memory. One step of a stage:

    for F or B, micro-batch (and chunk) in schedule:
        F:  h = recv(previous stage);  out = blocks(h);  isend(out, next stage)         (first: tokens, last: the loss)
        B:  g = recv(next stage);      out.backward(g);  isend(h.grad, previous stage)
            in the last one:  all_reduce(bucket of block i) over the stage's replicas     while backward goes on
    tied embedding:  all_reduce(its gradient) between first and last stage, which both hold it
    all_reduce(loss sum, token count, stop flag);  all_reduce(squared norm);  clip;  AdamW on the stage's weights

Bytes over each boundary: B T C x 2 in bf16, per micro-batch and direction: 67 MB for 4 sequences of the 6b model, against
a quarter of a second of compute on each of two stages. They are hidden: a send is waited for only at the next one, and comes
into a buffer that is ready before it is needed: on GPUs of one host by copy engine into one of two slots (peer_memory.py), else
into a receive posted before the micro-batch before is computed. Bytes of state per rank: 18 per parameter of its stage.
The price is the bubble, and the slowest stage: the head weighs about a block, so the last stage gets fewer of them; a cut
may go through a block, between attention and MLP.

Papers: Huang et al., GPipe (arXiv 1811.06965); Narayanan et al., Megatron-LM (2104.04473), whose PipeDream-Flush is 1F1B.
"""

import dataclasses
import math
import os
import re
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

import train_ddp
from checkpoint import Checkpointer
from data import Batches, val_batches
from model import GPT, IGNORE, ModelConfig, activation_bytes, block_half, dropout_keys, flops_per_token, unit_shapes
from optim import LossScaler, gradient_factor, lr_at
from peer_memory import PeerMemory, Transfer, choose_copy_engine
from support.flags import UserError
from support.meter import Meter, at, say
from support.resume import progress, resume, rng_state
from support.run import Run
from support.start import explain, run_script, say_if_stopped, start, stop_signal
from train_ddp import DataParallel


@dataclass
class Config(train_ddp.Config):
    pp: int = 0  # pipeline stages; the remaining ranks are data parallel [all ranks]
    schedule: Literal["1f1b", "gpipe", "interleaved"] = "1f1b"  # order of forward and backward passes
    chunks: int = 2  # interleaved: parts of the model a stage holds; the bubble shrinks, sends grow by it
    stages: str = (
        ""  # blocks per stage (interleaved: per part), as in 5,5,4,4 or 16.5,15.5 [equal work, the head counted]
    )
    copy_engine: bool | None = None  # send by copy engines instead of NCCL's kernels [if all GPUs are on one host]
    draw: bool = False  # draw the schedules as timelines, then exit


# --- the idea ---------------------------------------------------------------------------------------------------------


def schedule(name: str, stage: int, stages: int, micro_batches: int, chunks: int = 1) -> list[tuple[str, int]]:
    """What a stage does in one step, in order: ("F" | "B", micro-batch) pairs. Pure, so it can be proved without processes.

    Micro-batches come in the same order in all schedules and both passes: sums of gradients are bit-equal, and a link needs
    no tags. Interleaved: micro-batch i in the stage's chunk c is the number c * micro_batches + i; stages divides micro_batches.
    """
    n = micro_batches * chunks
    # forwards before the alternation begins; interleaved, the first micro-batches return from the last chunk so much later
    warmup = (
        n
        if name == "gpipe"
        else stages - stage - 1
        if chunks == 1
        else 2 * (stages - stage - 1) + (chunks - 1) * stages
    )
    warmup = min(warmup, n)

    def number(k: int, backward: bool) -> int:
        """Of the k-th pass: as many micro-batches as there are stages go through one chunk, then through the next."""
        turn, k = divmod(k, stages * chunks) if chunks > 1 else (0, k)
        chunk, micro = divmod(k, stages) if chunks > 1 else (0, k)
        return (chunks - 1 - chunk if backward else chunk) * micro_batches + turn * stages + micro

    order = [("F", number(k, False)) for k in range(warmup)]
    for k in range(warmup, n):  # one forward, one backward: the oldest activations go before new ones come
        order += [("F", number(k, False)), ("B", number(k - warmup, True))]
    return order + [("B", number(k, True)) for k in range(n - warmup, n)]


def most_in_flight(order: list[tuple[str, int]]) -> int:
    """Forward passes of which a stage holds the activations at once, at most."""
    return max(accumulate(1 if op == "F" else -1 for op, _ in order))


def timeline(name: str, stages: int, micro_batches: int, chunks: int = 1) -> list[list[tuple[int, str, int]]]:
    """By stage, (start, "F" | "B", number as in schedule) when a forward takes 1 and a backward 2 units of time.

    Raises ValueError when every unfinished stage waits for another: the schedule is a deadlock.
    """
    orders = [schedule(name, s, stages, micro_batches, chunks) for s in range(stages)]
    rows: list[list[tuple[int, str, int]]] = [[] for _ in orders]
    free = [0] * stages  # when a stage has finished what it has started
    end: dict[tuple[str, int, int], int] = {}  # of (pass, part of the model, micro-batch)
    while any(len(row) < len(order) for row, order in zip(rows, orders)):
        before = len(end)
        for s, (row, order) in enumerate(zip(rows, orders)):
            if len(row) == len(order):
                continue
            op, number = order[len(row)]
            chunk, micro = divmod(number, micro_batches)
            part = chunk * stages + s
            source = part - 1 if op == "F" else part + 1
            if 0 <= source < stages * chunks and (op, source, micro) not in end:
                continue
            start = max(free[s], end.get((op, source, micro), 0))
            free[s] = end[op, part, micro] = start + (1 if op == "F" else 2)
            row.append((start, op, number))
        if len(end) == before:
            raise ValueError(f"{name}, {stages} stages, {micro_batches} micro-batches: every stage waits for another")
    return rows


def draw(name: str, stages: int, micro_batches: int, chunks: int = 1) -> str:
    """The timeline as text: a unit of time is 2 characters, a forward F3, a backward B3-- of micro-batch 3 (10 is a).

    In a stage's further chunks they are G3, H3, ... and C3--, D3--, ...
    """
    rows = timeline(name, stages, micro_batches, chunks)
    units = rows[0][-1][0] + 2  # the first stage's last backward ends the step
    lines = []
    for s, row in enumerate(rows):
        line = [" ."] * units
        for begin, op, number in row:
            chunk, micro = divmod(number, micro_batches)
            label = ("FGHI" if op == "F" else "BCDE")[chunk % 4] + "0123456789abcdefghijklmnopqrstuvwxyz"[micro % 36]
            line[begin : begin + (1 if op == "F" else 2)] = [label] if op == "F" else [label, "--"]
        held = most_in_flight(schedule(name, s, stages, micro_batches, chunks))
        lines.append(f"  stage {s}  {''.join(line)}  holds {held}" + f"/{chunks}" * (chunks > 1))
    idle = 1 - 3 * micro_batches * chunks / units
    return "\n".join([f"{name}: {stages} stages, {micro_batches} micro-batches, idle {idle:.1%} of the time", *lines])


def draw_all(stages: int, micro_batches: int, chunks: int) -> None:
    """--draw. Raises UserError where there is nothing to draw."""
    if min(stages, micro_batches, chunks) < 1:
        raise UserError(
            f"--draw of {stages} stages, {micro_batches} micro-batches, {chunks} chunks: allowed is 1 or more"
        )
    if int(os.environ.get("RANK", 0)) == 0:
        for name, parts in (("gpipe", 1), ("1f1b", 1), ("interleaved", chunks)):
            fits = parts == 1 or micro_batches % stages == 0
            print(
                draw(name, stages, micro_batches, parts)
                if fits
                else f"interleaved: micro-batches must be a multiple of {stages}"
            )


def cut(model_cfg: ModelConfig, stages: int, chunks: int = 1, by_hand: str = "") -> list[range]:
    """What each part of the model has, in halves of blocks: 2 i is the attention of block i, 2 i + 1 its MLP.

    Stages are made equal in FLOPs, in which the head is more than a block of 6b and five of 124m, and the embedding nothing.
    Part c * stages + s of the result is chunk c of stage s. Raises UserError.
    """
    n, parts = 2 * model_cfg.n_layer, stages * chunks
    if by_hand:
        sizes = [round(2 * float(b)) if re.fullmatch(r"\d+(\.[05])?", b) else 0 for b in by_hand.split(",")]
        if len(sizes) != parts or min(sizes) < 1 or sum(sizes) != n:
            raise UserError(
                f"--stages {by_hand}: expected {parts} numbers of blocks, whole or with .5, with the sum {model_cfg.n_layer} (the model's)"
            )
    elif parts > model_cfg.n_layer:
        raise UserError(
            f"--pp (times --chunks) makes {parts} parts and the model has {model_cfg.n_layer} blocks; "
            f"allowed is 1 to {model_cfg.n_layer} parts"
        )
    else:
        head = 6 * model_cfg.vocab_size * model_cfg.n_embd
        block, mlp = (flops_per_token(model_cfg) - head) / model_cfg.n_layer, 18 * model_cfg.n_embd * model_cfg.n_ff
        cost = list(
            accumulate([0, *[1 - mlp / block, mlp / block] * model_cfg.n_layer])
        )  # of the first k halves, in blocks
        cost[n] += head / block
        # the best ends of s stages that hold the first e halves, for each e; a high power: the slowest counts, then evenness
        best = {e: (cost[e] ** 32, [e]) for e in range(chunks, n + 1)}
        for _ in range(stages - 1):
            best = {
                e: min((best[a][0] + (cost[e] - cost[a]) ** 32, [*best[a][1], e]) for a in best if a <= e - chunks)
                for e in range(min(best) + chunks, n + 1)
            }
        sizes = [0] * parts
        for s, (a, b) in enumerate(pairwise([0, *best[n][1]])):
            end = 0
            for c in range(chunks):  # whole blocks, as far as they go
                share = 2 * round((b - a) * (c + 1) / chunks / 2)
                before, end = end, min(max(share, end + 1), b - a - (chunks - 1 - c)) if c < chunks - 1 else b - a
                sizes[c * stages + s] = end - before
    return [range(a, b) for a, b in pairwise([0, *accumulate(sizes)])]


def blocks_of(part: range) -> Iterator[tuple[int, str]]:
    """The blocks of a part in order, as (block, "" | "attention" | "mlp"): the whole, or which half of it."""
    for i in range(part.start // 2, (part.stop + 1) // 2):
        yield i, "mlp" if 2 * i not in part else "attention" if 2 * i + 1 not in part else ""


def stage_units(model_cfg: ModelConfig, parts: list[range]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Parameters of the stage with these parts, by unit in the order of the forward pass; a tied embedding is on both ends."""
    first, last = parts[0].start == 0, parts[-1].stop == 2 * model_cfg.n_layer
    units = unit_shapes(model_cfg)
    held = {"embed": units["embed"]} if first else {}
    for i, half in (block for part in parts for block in blocks_of(part)):
        held[f"block.{i}"] = {n: shape for n, shape in units[f"block.{i}"].items() if half in ("", block_half(n))}
    if last:
        held["head"] = units["head"]
        if model_cfg.tie and not first:
            held["embed"] = units["embed"]
    return held


def layout(run: Run) -> tuple[int, int, int, list[list[range]]]:
    """Number of stages, this rank's stage, chunks per stage, and the parts of every stage by chunk. Raises UserError."""
    cfg, pp = run.cfg, run.world_size // run.dp
    chunks = cfg.chunks if cfg.schedule == "interleaved" and pp > 1 else 1
    if chunks < 1 or chunks > 1 and run.accum % pp:
        raise UserError(
            f"--schedule interleaved with --chunks {cfg.chunks} and {run.accum} micro-batches: chunks must be 1 or more and the number "
            f"of micro-batches (--global-batch / --micro-batch / {run.dp}) a multiple of --pp {pp}"
        )
    parts = cut(run.model_cfg, pp, chunks, cfg.stages)
    return pp, run.rank % pp, chunks, [parts[s::pp] for s in range(pp)]


def message_shape(run: Run) -> tuple[int, int, int]:
    """(B, T, C) of what crosses a boundary, either way: the same for every micro-batch, so there is nothing to announce."""
    return run.cfg.micro_batch, run.cfg.seq_len, run.model_cfg.n_embd


class Link:
    """One direction between two neighbouring stages: a group of two for it alone.

    So messages arrive in the order in which they were sent, and a receive that is posted early holds up nothing else: on
    NCCL it would block every send that shares its communicator.
    """

    def __init__(self, group: dist.ProcessGroup, what: str, run: Run):
        self.group, self.what, self.peer = group, what, 1 - dist.get_rank(group)
        self.empty = lambda: torch.empty(message_shape(run), dtype=run.dtype, device=run.device)
        self.coming = 0
        self.posted: tuple[Tensor, dist.Work] | None = None
        self.sent: tuple[Tensor, dist.Work] | None = None

    def expect(self, messages: int, early: bool) -> None:
        """So many will be received from now on. early: start the first; else with its recv()."""
        self.coming = messages
        if early:
            self.post()

    def post(self) -> None:
        """Start receiving one message, which then arrives while this rank computes."""
        buffer = self.empty()  # a new one each time: the last one is the input that its backward pass still needs
        with at("recv", self.what, buffer.nbytes):
            self.posted = buffer, dist.irecv(buffer, group=self.group, group_src=self.peer)

    def recv(self) -> Tensor:
        """Wait for the message that was posted, and post the next. (B, T, C) in the compute dtype."""
        if self.posted is None:
            self.post()
        buffer, work = self.posted
        with at("bubble", self.what):
            work.wait()
        self.coming -= 1
        self.posted = None
        if self.coming:
            self.post()
        return buffer

    def isend(self, tensor: Tensor) -> None:
        """Start sending; the tensor is kept and must stay unchanged until the next isend, which waits for this one.

        That wait is no bubble: the peer has had its receive posted since it took the message before, if there was one.
        """
        if self.sent:
            with at("wait", self.what):
                self.sent[1].wait()
        with at("send", self.what, tensor.nbytes):
            self.sent = tensor, dist.isend(tensor, group=self.group, group_dst=self.peer)


class PeerLink:
    """The same between GPUs that reach each other's memory: the sender's copy engine writes into one of two slots here.

    A receive that NCCL has posted is a kernel that waits on multiprocessors which compute could use (compute took 13 % longer).
    Here the receiver looks for the signal when it needs the message, copies it out of the slot and signals back that the
    slot is free; beside compute, one thread block waits if a sender is two messages ahead. Even messages go through slot 0.
    """

    def __init__(self, memory: PeerMemory, what: str, peer: int, run: Run):
        self.memory, self.what, self.peer, self.number = memory, what, peer, 0
        self.shape = message_shape(run)
        self.base = 0 if what == "activation" else 2  # which two of the receiver's four slots
        self.stream = torch.cuda.Stream(run.device)
        self.sent: tuple[Tensor, Transfer] | None = None

    def expect(self, messages: int, early: bool) -> None:
        """Nothing to post: the sender writes when it likes."""

    def next_slot(self, rank: int) -> tuple[Tensor, int, int]:
        """Where the next message lies on its receiver, and the channels of the signals that it is full and free again."""
        i, self.number = self.base + self.number % 2, self.number + 1
        return self.memory.of[rank].view(4, *self.shape)[i], i, 4 + i

    def recv(self) -> Tensor:
        """(B, T, C) in the compute dtype, once it is there: the compute stream waits, not the host."""
        slot, full, free = self.next_slot(self.memory.rank)
        with at("recv", self.what, slot.nbytes):
            with at("bubble", self.what):
                self.memory.wait(self.peer, full)
            message = slot.clone()
            self.memory.signal(self.peer, free)
        return message

    def isend(self, tensor: Tensor) -> None:
        """Start sending; the tensor is kept and must stay unchanged until the next isend, which waits for this one."""
        if self.sent:
            with at("wait", self.what):
                self.sent[1].wait()
        slot, full, free = self.next_slot(self.peer)
        with at("send", self.what, tensor.nbytes):
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                if self.number > 2:  # the first two found both slots free
                    self.memory.wait(self.peer, free)
                slot.copy_(tensor, non_blocking=True)
                self.memory.signal(self.peer, full)
                self.sent = tensor, Transfer(self.stream)


class Pipeline(DataParallel):
    """This rank's stage: its part of the model, the links to its neighbours, its weights and their sums over the replicas."""

    def __init__(self, model: GPT, run: Run):
        cfg, self.model = run.model_cfg, model
        pp, stage, chunks, parts = layout(run)
        self.parts = parts[stage]
        run.counts = stage == pp - 1  # it has the loss
        super().__init__(
            model, run, stage_units(cfg, self.parts), run.group("replicas", lambda p: p.stage) if pp > 1 else None
        )
        self.connect(stage, pp, chunks)
        self.twin, self.is_copy = (
            None,
            False,
        )  # the group of the two ranks that hold a tied embedding, and whether here is the second
        if cfg.tie and pp > 1:
            ends = run.group("ends", lambda p: (p.replica, p.stage in (0, pp - 1)))
            self.twin, self.is_copy = ends if stage in (0, pp - 1) else None, stage == pp - 1

    def connect(self, stage: int, pp: int, chunks: int) -> None:
        """The links to both neighbours; interleaved, the last stage's next is the first. Collective."""
        run, wraps = self.run, chunks > 1
        memory = PeerMemory(4 * math.prod(message_shape(run)), run.dtype, run) if run.copy_engine else None
        pairs = {}
        for ends in [] if memory else [(s, (s + 1) % pp) for s in range(pp if wraps else pp - 1)]:
            for what in ("activation", "gradient"):
                pairs[what, ends] = run.group(f"{what} {ends}", lambda p, ends=ends: (p.replica, p.stage in ends))
        self.shake_hands(pairs, stage)

        def link(what: str, ends: tuple[int, int]) -> Link | PeerLink:
            peer = run.rank - stage + (ends[1] if stage == ends[0] else ends[0])
            return PeerLink(memory, what, peer, run) if memory else Link(pairs[what, ends], what, run)

        before, behind = ((stage - 1) % pp, stage), (stage, (stage + 1) % pp)
        if stage > 0 or wraps:
            self.from_previous, self.to_previous = link("activation", before), link("gradient", before)
        if stage < pp - 1 or wraps:
            self.to_next, self.from_next = link("activation", behind), link("gradient", behind)

    def shake_hands(self, pairs: dict[tuple[str, tuple[int, int]], dist.ProcessGroup], stage: int) -> None:
        """One message over each link, in one order for all: NCCL sets a connection up at its first message and both sides
        wait in there; two neighbours that began with different links would wait for each other."""
        token = torch.zeros(1, device=self.run.device)
        for (what, ends), group in pairs.items():
            if stage in ends:
                sends = (stage == ends[0]) == (what == "activation")
                other = 1 - dist.get_rank(group)
                (
                    dist.isend(token, group=group, group_dst=other)
                    if sends
                    else dist.irecv(token, group=group, group_src=other)
                ).wait()

    def warm_up(self) -> None:
        """Run every part forward and backward before there are messages: compiling, and loading a kernel, may wait for the GPU,
        the GPU for a receive that is posted, and the neighbour who should send waits likewise for us."""
        cfg, run = self.run.cfg, self.run
        ids = torch.zeros(cfg.micro_batch, cfg.seq_len, dtype=torch.int64, device=run.device)
        keys = dropout_keys(cfg.seed, 0, ids[:, 0]) if run.model_cfg.dropout else None
        self.last_micro = False
        for number in range(2 * len(self.parts)):
            chunk, self.first_micro = (
                number % len(self.parts),
                number < len(self.parts),
            )  # gradients are copied, then added
            h = torch.zeros(cfg.micro_batch, cfg.seq_len, run.model_cfg.n_embd, dtype=run.dtype, device=run.device)
            with torch.no_grad():
                self.forward(chunk, h, ids, ids, keys=None)  # as evaluation does
            out = self.forward(chunk, h.requires_grad_(), ids, ids, keys)
            out.backward(torch.zeros_like(out))

    def is_first(self, chunk: int) -> bool:
        """Whether this chunk begins with the embedding; the others receive their input."""
        return self.parts[chunk].start == 0

    def is_last(self, chunk: int) -> bool:
        """Whether this chunk ends with the loss; the others send their output."""
        return self.parts[chunk].stop == 2 * self.run.model_cfg.n_layer

    def expect(self, micro_batches: int) -> None:
        """Start the first receives of a step."""
        inputs = sum(not self.is_first(c) for c in range(len(self.parts)))
        gradients = sum(not self.is_last(c) for c in range(len(self.parts)))
        if inputs:
            self.from_previous.expect(inputs * micro_batches, early=self.parts[0].start > 0)
        if gradients:
            # not early: it answers to what this stage has yet to send, and until then anything that waits for the GPU would wait for it
            self.from_next.expect(gradients * micro_batches, early=False)

    def forward(self, chunk: int, h: Tensor | None, x: Tensor, y: Tensor, keys: Tensor | None) -> Tensor:
        """h (B, T, C) from the part before (the first takes x (B, T)) -> (B, T, C), in the last part the summed loss."""
        h = self.model.embed(x, keys) if self.is_first(chunk) else h
        for i, half in blocks_of(self.parts[chunk]):
            h = self.model.blocks[i](h, self.model.cos, self.model.sin, keys, half)
        return self.model.loss_sum(h, y) if self.is_last(chunk) else h

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Summed loss of one batch without backward: on the last stage, 0 elsewhere. What evaluate() calls."""
        for chunk in range(len(self.parts)):
            h = None
            if not self.is_first(chunk):
                self.from_previous.expect(1, early=False)
                h = self.from_previous.recv()
            out = self.forward(chunk, h, x, y, None)
            if not self.is_last(chunk):
                self.to_next.isend(out)
        return out if self.run.counts else out.new_zeros(())

    def finish(self) -> None:
        """Wait until every bucket holds the sum over the replicas, and a tied embedding's that over both of its uses too."""
        super().finish()
        if self.twin:
            # after the sum over the replicas, not before: a + b has the same bits on both ends, whatever order that one had
            grad = self.buckets["embed"].grad
            with at("all_reduce", "tied embedding", grad.nbytes):
                dist.all_reduce(grad, group=self.twin)

    def grad_norm(self) -> float:
        """Norm over all stages, every parameter once: of the first replica only, and a tied embedding on the first stage only."""
        mine = [
            b
            for unit, b in self.buckets.items()
            if self.run.place().replica == 0 and not (self.is_copy and unit == "embed")
        ]
        square = torch.zeros((), dtype=torch.float64, device=self.run.device)
        for bucket in mine:
            square += torch.linalg.vector_norm(bucket.grad).double().square()
        # over all ranks and not by replica: one sum, so that all clip by the same bits
        with at("all_reduce", "squared norm", square.nbytes):
            dist.all_reduce(square, group=self.run.world)
        return square.sqrt().item()


def predict(run: Run) -> tuple[dict[str, int], list[tuple[str, str, int]]]:
    """Bytes this rank holds by term, and its sends, receives and collectives of one step as (operation, what, payload bytes)."""
    cfg, model_cfg, compute = run.cfg, run.model_cfg, run.dtype.itemsize
    pp, stage, chunks, stages = layout(run)
    parts, order = stages[stage], schedule(cfg.schedule, stage, pp, run.accum, chunks)
    boundary = math.prod(message_shape(run)) * compute

    def activations(halves: int, recompute: str = cfg.recompute) -> int:
        part = dataclasses.replace(model_cfg, n_layer=halves / 2)
        return int(activation_bytes(part, cfg.micro_batch, compute, recompute, cfg.compile))

    kept, traffic = [], []
    for op, number in order:
        part = parts[number // run.accum]
        first, last = part.start == 0, part.stop == 2 * model_cfg.n_layer
        size = (
            activations(len(part)) - activations(0) + (activations(0, "none") if last else boundary)
        )  # logits, or the output
        kept.append(size if op == "F" else -size)
        came, goes, what = (first, last, "activation") if op == "F" else (last, first, "gradient")
        traffic += [("recv", what, boundary)] * (not came) + [("send", what, boundary)] * (not goes)
    memory, sent = train_ddp.bucket_bytes(run, stage_units(model_cfg, parts))
    memory |= {
        f"activations of {most_in_flight(order) / chunks:g} micro-batches": max(accumulate(kept))
        + activations(0)
        - activations(0, "none"),  # the block that is made again
        # slots for two messages each way, or one posted receive each
        "receive buffers": boundary
        * (4 if run.copy_engine else len({what for op, what, _ in traffic if op == "recv"})),
    }
    traffic += [("all_reduce", unit, size) for unit, size in reversed(sent.items()) if run.dp > 1]
    if model_cfg.tie and pp > 1 and stage in (0, pp - 1):
        traffic.append(
            ("all_reduce", "tied embedding", run.master_dtype.itemsize * model_cfg.vocab_size * model_cfg.n_embd)
        )
    return memory, [*traffic, ("all_reduce", "loss, tokens, stop", 24), ("all_reduce", "squared norm", 8)]


def blocks(parts: list[range]) -> str:
    """How many blocks a stage's parts have, as in 4+4.5."""
    return "+".join(f"{len(part) / 2:g}" for part in parts)


@contextmanager
def stage_clock(run: Run, meter: Meter) -> Iterator[None]:
    """When the run inside is over, print each stage's compute time and bubble beside (p-1)/(m+p-1); collective."""
    yield
    rows = meter.rows[min(2, len(meter.rows) - 1) :]  # the first steps compile and warm up
    pp, _, chunks, stages = layout(run)
    if not rows or pp == 1:
        return
    compute = statistics.median(r["compute_ms"] for r in rows)
    idle = statistics.median(r["bubble_ms"] / r["step_ms"] for r in rows)
    everyone = run.everyone((compute, idle))
    by_stage = [
        [statistics.mean(column) for column in zip(*everyone[s::pp])] for s in range(pp)
    ]  # mean over the replicas
    for s, (parts, (ms, share)) in enumerate(zip(stages, by_stage)):
        say(f"stage {s}: {blocks(parts)} blocks, compute {ms:.1f} ms a step, bubble {share:.1%}")
    slowest, mean = max(ms for ms, _ in by_stage), statistics.mean(ms for ms, _ in by_stage)
    say(
        f"stages: the slowest computes {slowest / mean:.3f} x the mean; bubble {statistics.mean(share for _, share in by_stage):.1%} "
        f"measured, (p-1)/(m+p-1) = {(pp - 1) / (run.accum * chunks + pp - 1):.1%}"
        + f" (m: {run.accum} x {chunks} chunks)"
        * (chunks > 1)
    )


# --- the run ----------------------------------------------------------------------------------------------------------


def check(run: Run) -> None:
    """Raises UserError, before anything is built, for a cut or a link that cannot be had."""
    layout(run)
    if run.cfg.check_collectives and run.dp < run.world_size:
        raise UserError(
            "--check-collectives compares what all ranks call, stages call different things; allowed with --pp 1"
        )
    choose_copy_engine(run, run.dp < run.world_size)


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
    if cfg.draw:
        draw_all(
            cfg.pp or 4, cfg.global_batch // cfg.micro_batch if cfg.global_batch and cfg.micro_batch else 8, cfg.chunks
        )
        return []
    run = start(cfg, __file__, group, pp=cfg.pp, check=check)
    cfg = run.cfg
    pp, stage, chunks, stages = layout(run)
    memory, traffic = predict(run)
    say(f"gradients travel in {str(run.wire_dtype)[6:]}, {cfg.schedule}")
    for s, parts in enumerate(stages):
        held = sum(predict(dataclasses.replace(run, rank=s))[0].values())
        say(f"stage {s}: {blocks(parts)} blocks, {held / 1e9:.3f} GB predicted")
    if cfg.explain:
        return explain(run, memory, traffic)

    model = GPT(run.model_cfg, cfg.recompute)
    pipe = Pipeline(model, run)
    model.set_buffers(run.dtype, run.device)
    if cfg.compile:
        model.compile_blocks()
    if run.device.type == "cuda":
        pipe.warm_up()
    order = schedule(cfg.schedule, stage, pp, run.accum, chunks)

    # [same in every train_*.py
    scaler = LossScaler(cfg)
    saver = Checkpointer(f"{run.out}/ckpt", group=run.control, keep_last=cfg.keep_last)
    first, updates = resume(run, saver, pipe, scaler)
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

    with Meter(run, flops_per_token(run.model_cfg)) as meter, stage_clock(run, meter):
        for step in range(first, cfg.steps):
            facts = torch.zeros(3, dtype=torch.float64, device=run.device)  # loss sum, targets that count, stop
            scale = scaler.scale
            micros = {}  # micro-batch -> tokens, targets and dropout keys, from its first chunk's forward to its last one's
            in_flight = {}  # number -> input and output of a chunk, from its forward to its backward pass
            pipe.expect(run.accum)
            for op, number in order:
                chunk, micro = divmod(number, run.accum)
                if op == "F":
                    if chunk == 0:
                        x, y, sample = batches.next()  # by every stage: the seed says which, so no tokens are sent
                        micros[micro] = x, y, dropout_keys(cfg.seed, step, sample) if run.model_cfg.dropout else None
                    x, y, keys = micros.pop(micro) if chunk == chunks - 1 else micros[micro]
                    h = None if pipe.is_first(chunk) else pipe.from_previous.recv().requires_grad_()
                    with at("forward"):
                        out = pipe.forward(chunk, h, x, y, keys)
                    if pipe.is_last(
                        chunk
                    ):  # out is the loss, a sum: what it must be divided by is known once all have counted
                        facts[:2] += torch.stack([out.detach().double(), (y != IGNORE).sum().double()])
                    else:
                        pipe.to_next.isend(out.detach())
                    in_flight[number] = h, out
                else:
                    h, out = in_flight.pop(number)
                    pipe.first_micro, pipe.last_micro = micro == 0, micro == run.accum - 1
                    grad = torch.full_like(out, scale / nominal) if pipe.is_last(chunk) else pipe.from_next.recv()
                    with at("backward"):
                        out.backward(grad)  # buckets leave from in here, in the last micro-batch
                    if not pipe.is_first(chunk):
                        pipe.to_previous.isend(h.grad)
            pipe.finish()

            # [same in every train_*.py
            facts[2] = stop_signal()
            with at("all_reduce", "loss, tokens, stop", facts.nbytes):
                dist.all_reduce(facts, group=run.world)
            loss_sum, n_valid, stop = facts.tolist()
            to_mean = nominal / max(n_valid, 1) / scale  # from what backward made to the gradient of the mean loss
            lr = lr_at(updates, cfg)
            # same]

            with at("optimizer"):
                norm = pipe.grad_norm() * to_mean
                finite = math.isfinite(norm)
                scaler.update(finite, "" if finite else pipe.culprit())
                if finite:  # else all ranks skip: they hold the same norm
                    pipe.adamw_step(updates, lr, gradient_factor(norm, cfg.clip) * to_mean)
                    updates += 1

            # [same in every train_*.py
            done = step + 1
            more = {}
            if cfg.eval_every and run.val_tokens and (done % cfg.eval_every == 0 or done == cfg.steps):
                with at("eval"):
                    more["val_loss"] = evaluate(run, pipe)
            meter.log(
                step, loss_sum / max(n_valid, 1), norm if finite else None, lr, nominal, scale, not finite, **more
            )
            if cfg.save_every and (done % cfg.save_every == 0 or done == cfg.steps or stop):
                saver.save(done, pipe.pieces(), progress(run, updates, scaler), rng=rng_state(run))
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
