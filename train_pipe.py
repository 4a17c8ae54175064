"""Pipeline parallel training: the model is cut into stages, a rank holds one, and micro-batches stream through them.

    torchrun --nproc_per_node=4 train_pipe.py                            # 4 stages, 1F1B
    torchrun --nproc_per_node=4 train_pipe.py --pp 2                     # 2 stages, 2 data-parallel replicas of the pipeline
    torchrun --nproc_per_node=2 train_pipe.py --model 6b --global-batch 64 --micro-batch 4 --data DIR
    python train_pipe.py --draw --pp 4 --global-batch 8 --micro-batch 1  # the schedules as timelines, then exit
    torchrun --nproc_per_node=4 train_pipe.py --stages 5,5,4,4           # blocks per stage by hand; --explain: memory, sends

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

Both idle the same, (p-1)/(m+p-1) of the time for p stages and m micro-batches: while the pipe fills and while it drains.
What differs is memory: a stage keeps a micro-batch's activations from its F to its B, GPipe all m of them, 1F1B at most
p - stage. One step of a stage:

    for F or B, micro-batch in schedule:
        F:  h = recv(previous stage);  out = blocks(h);  isend(out, next stage)         (first: tokens, last: the loss)
        B:  g = recv(next stage);      out.backward(g);  isend(h.grad, previous stage)
            in the last one:  all_reduce(bucket of block i) over the stage's replicas     while backward goes on
    tied embedding:  all_reduce(its gradient) between first and last stage, which both hold it
    all_reduce(loss sum, token count, stop flag);  all_reduce(squared norm);  clip;  AdamW on the stage's weights

Bytes over each boundary: B T C x 2 in bf16, per micro-batch and direction: 67 MB for 4 sequences of the 6b model, against
a quarter of a second of compute on each of two stages. They are hidden: the receive of the next micro-batch is posted before
this one is computed, and a send is waited for only at the next one. Bytes of state per rank: 18 per parameter of its stage.
The price is the bubble, and the slowest stage: the head weighs about a block, so the last stage gets fewer of them.

Papers: Huang et al., GPipe (arXiv 1811.06965); Narayanan et al., Megatron-LM (2104.04473), whose PipeDream-Flush is 1F1B.
"""

import dataclasses
import datetime
import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

import launch
import train_ddp
from checkpoint import Checkpointer
from data import Batches, val_batches
from flags import UserError
from launch import Run
from meter import Meter, at, say
from model import GPT, IGNORE, ModelConfig, activation_bytes, dropout_keys, flops_per_token, param_shapes, unit_names
from optim import LossScaler, gradient_factor, lr_at
from train_ddp import DataParallel


@dataclass
class Config(train_ddp.Config):
    pp: int = 0  # pipeline stages; the remaining ranks are data parallel [all ranks]
    schedule: Literal["1f1b", "gpipe"] = "1f1b"  # order of forward and backward passes
    stages: str = ""  # blocks per stage, as in 5,5,4,4 [equal work, the head counted]
    draw: bool = False  # draw the schedules as timelines, then exit


# --- the idea ---------------------------------------------------------------------------------------------------------


def schedule(name: str, stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    """What a stage does in one step, in order: ("F" | "B", micro-batch) pairs. Pure, so it can be proved without processes.

    Micro-batches come in the same order in both schedules and both passes: sums of gradients are bit-equal, and a link
    needs no tags.
    """
    warmup = micro_batches if name == "gpipe" else min(stages - stage - 1, micro_batches)  # forwards before the first backward
    order = [("F", micro) for micro in range(warmup)]
    for micro in range(warmup, micro_batches):  # one forward, one backward: the oldest activations go before new ones come
        order += [("F", micro), ("B", micro - warmup)]
    return order + [("B", micro) for micro in range(micro_batches - warmup, micro_batches)]


def most_in_flight(order: list[tuple[str, int]]) -> int:
    """Micro-batches whose activations a stage holds at once, at most."""
    held = [sum(1 if op == "F" else -1 for op, _ in order[: i + 1]) for i in range(len(order))]
    return max(held)


def timeline(name: str, stages: int, micro_batches: int) -> list[list[tuple[int, str, int]]]:
    """By stage, (start, "F" | "B", micro-batch) when a forward takes 1 and a backward 2 units of time.

    Raises ValueError when every unfinished stage waits for another: the schedule is a deadlock.
    """
    orders = [schedule(name, s, stages, micro_batches) for s in range(stages)]
    rows: list[list[tuple[int, str, int]]] = [[] for _ in orders]
    end: dict[tuple[int, str, int], int] = {}
    while any(len(row) < len(order) for row, order in zip(rows, orders)):
        before = len(end)
        for s, (row, order) in enumerate(zip(rows, orders)):
            if len(row) == len(order):
                continue
            op, micro = order[len(row)]
            neighbour = s - 1 if op == "F" else s + 1
            if 0 <= neighbour < stages and (neighbour, op, micro) not in end:
                continue
            free = end[s, row[-1][1], row[-1][2]] if row else 0
            start = max(free, end.get((neighbour, op, micro), 0))
            row.append((start, op, micro))
            end[s, op, micro] = start + (1 if op == "F" else 2)
        if len(end) == before:
            raise ValueError(f"{name}, {stages} stages, {micro_batches} micro-batches: every stage waits for another")
    return rows


def draw(name: str, stages: int, micro_batches: int) -> str:
    """The timeline as text: a unit of time is 2 characters, a forward F3, a backward B3-- of micro-batch 3 (10 is a)."""
    rows = timeline(name, stages, micro_batches)
    units = rows[0][-1][0] + 2  # the first stage's last backward ends the step
    lines = []
    for s, row in enumerate(rows):
        line = [" ."] * units
        for start, op, micro in row:
            digit = "0123456789abcdefghijklmnopqrstuvwxyz"[micro % 36]
            line[start : start + (1 if op == "F" else 2)] = [f"F{digit}"] if op == "F" else [f"B{digit}", "--"]
        held = most_in_flight(schedule(name, s, stages, micro_batches))
        lines.append(f"  stage {s}  {''.join(line)}  holds {held}")
    idle = 1 - 3 * micro_batches / units
    return "\n".join([f"{name}: {stages} stages, {micro_batches} micro-batches, idle {idle:.1%} of the time", *lines])


def cut(model_cfg: ModelConfig, stages: int, by_hand: str = "") -> list[range]:
    """The blocks of each stage, contiguous, with the costliest stage as cheap as whole blocks allow. Raises UserError.

    Costs in FLOPs: a block is 1, the head 6 V C over a block's (1.15 in 6b, 2 and more in small models), the embedding 0.
    """
    n_layer = model_cfg.n_layer
    if by_hand:
        counts = [int(n) if n.isdecimal() else 0 for n in by_hand.split(",")]
        if len(counts) != stages or min(counts) < 1 or sum(counts) != n_layer:
            raise UserError(
                f"--stages {by_hand}: expected {stages} whole numbers of 1 or more, with the sum {n_layer} (blocks of the model)"
            )
    elif stages > n_layer:
        raise UserError(f"--pp {stages}: every stage needs a block and the model has {n_layer}; allowed is 1 to {n_layer}")
    else:
        head = 6 * model_cfg.vocab_size * model_cfg.n_embd
        head /= (flops_per_token(model_cfg) - head) / n_layer
        # all stages but the last are alike: only the last one's number of blocks is open
        last = n_layer
        if stages > 1:
            last = min(range(1, n_layer - stages + 2), key=lambda n: max(math.ceil((n_layer - n) / (stages - 1)), n + head))
        # what does not divide goes to later stages: 1F1B keeps fewer micro-batches there
        counts = [(n_layer - last + s) // (stages - 1) for s in range(stages - 1)] + [last]
    ends = [sum(counts[: s + 1]) for s in range(stages)]
    return [range(end - n, end) for end, n in zip(ends, counts)]


def stage_units(model_cfg: ModelConfig, blocks: range) -> dict[str, list[str]]:
    """Parameters of the stage with these blocks, by unit in the order of the forward pass; a tied embedding is on both ends."""
    first, last = blocks.start == 0, blocks.stop == model_cfg.n_layer
    held = ["embed"] * first + [f"block.{i}" for i in blocks] + ["head"] * last + ["embed"] * (last and not first and model_cfg.tie)
    units = unit_names(model_cfg)
    return {unit: units[unit] for unit in held}


def subgroup(run: Run, colour: Callable[[int], object]) -> dist.ProcessGroup:
    """The group of the run's ranks that have this rank's colour; collective, and every rank is in exactly one.

    All ranks make all of the groups: NCCL splits them off the job's communicator, with every rank of it taking part. When
    the run is only a part of a job (gloo), the others are not here to do so; then torch names a group by how many groups
    its members are in, which must therefore be the same number for all.
    """
    ranks = dist.get_process_group_ranks(run.group or dist.group.WORLD)
    timeout = datetime.timedelta(seconds=run.cfg.hang_timeout)
    groups = {}
    for c in dict.fromkeys(map(colour, range(run.world_size))):
        members = [job_rank for rank, job_rank in enumerate(ranks) if colour(rank) == c]
        groups[c] = dist.new_group(members, timeout=timeout, use_local_synchronization=run.group is not None)
    return groups[colour(run.rank)]


class Link:
    """One direction between two neighbouring stages: a group of two for it alone.

    So messages arrive in the order in which they were sent, and a receive that is posted early holds up nothing else: on
    NCCL it would block every send that shares its communicator.
    """

    def __init__(self, group: dist.ProcessGroup, what: str, run: Run):
        self.group, self.what, self.peer = group, what, 1 - dist.get_rank(group)
        shape = (run.cfg.micro_batch, run.cfg.seq_len, run.model_cfg.n_embd)  # the same for every micro-batch: nothing to announce
        self.empty = lambda: torch.empty(shape, dtype=run.dtype, device=run.device)
        self.coming = 0
        self.posted: tuple[Tensor, dist.Work] | None = None
        self.sent: tuple[Tensor, dist.Work] | None = None

    def expect(self, messages: int) -> None:
        """So many will be received from now on; starts the first."""
        self.coming = messages
        self.post()

    def post(self) -> None:
        """Start receiving one message, which then arrives while this rank computes."""
        buffer = self.empty()  # a new one each time: the last one is the input that its backward pass still needs
        with at("recv", self.what, buffer.nbytes):
            self.posted = buffer, dist.irecv(buffer, group=self.group, group_src=self.peer)

    def recv(self) -> Tensor:
        """Wait for the message that was posted, and post the next. (B, T, C) in the compute dtype."""
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

        That wait is no bubble: by then the peer has had its receive posted since it took the message before.
        """
        if self.sent:
            with at("wait", self.what):
                self.sent[1].wait()
        with at("send", self.what, tensor.nbytes):
            self.sent = tensor, dist.isend(tensor, group=self.group, group_dst=self.peer)


class Pipeline(DataParallel):
    """This rank's stage: its part of the model, the links to its neighbours, its weights and their sums over the replicas."""

    def __init__(self, model: GPT, run: Run):
        cfg, pp = run.model_cfg, run.world_size // run.dp
        self.model, stage = model, run.rank % pp
        self.blocks = cut(cfg, pp, run.cfg.stages)[stage]
        self.first, self.last = stage == 0, stage == pp - 1
        run.counts = self.last
        super().__init__(model, run, stage_units(cfg, self.blocks), subgroup(run, lambda r: r % pp) if pp > 1 else None)
        # links 0-1, 2-3, ... come from one partition of the ranks, 1-2, 3-4, ... from another; a stage left over has a group alone
        pairs = {}
        for parity in range(min(2, pp - 1)):
            for what in ("activation", "gradient"):
                pairs[parity, what] = subgroup(run, lambda r, odd=parity: (r // pp, (r % pp + odd) // 2))
        if not self.first:
            self.from_previous = Link(pairs[(stage - 1) % 2, "activation"], "activation", run)
            self.to_previous = Link(pairs[(stage - 1) % 2, "gradient"], "gradient", run)
        if not self.last:
            self.to_next = Link(pairs[stage % 2, "activation"], "activation", run)
            self.from_next = Link(pairs[stage % 2, "gradient"], "gradient", run)
        self.twin = None  # the group of the two ranks that hold a tied embedding
        if cfg.tie and pp > 1:
            ends = subgroup(run, lambda r: (r // pp, r % pp in (0, pp - 1)))
            self.twin = ends if self.first or self.last else None

    def expect(self, micro_batches: int) -> None:
        """Start the first receive of a step from either side."""
        if not self.first:
            self.from_previous.expect(micro_batches)
        if not self.last:
            self.from_next.expect(micro_batches)

    def forward(self, h: Tensor | None, x: Tensor, y: Tensor, keys: Tensor | None) -> Tensor:
        """h (B, T, C) from the previous stage (the first takes x (B, T)) -> (B, T, C), on the last stage the summed loss."""
        h = self.model.embed(x, keys) if self.first else h
        for i in self.blocks:  # their numbers in the whole model: dropout masks depend on them
            h = self.model.blocks[i](h, self.model.cos, self.model.sin, keys)
        return self.model.loss_sum(h, y) if self.last else h

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Summed loss of one batch without backward: on the last stage, 0 elsewhere. What evaluate() calls."""
        h = None
        if not self.first:
            self.from_previous.expect(1)
            h = self.from_previous.recv()
        out = self.forward(h, x, y, None)
        if self.last:
            return out
        self.to_next.isend(out)
        return out.new_zeros(())

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
        mine = [b for unit, b in self.buckets.items() if self.run.dp_rank == 0 and not (self.twin and self.last and unit == "embed")]
        square = torch.zeros((), dtype=torch.float64, device=self.run.device)
        for bucket in mine:
            square += torch.linalg.vector_norm(bucket.grad).double().square()
        # over all ranks and not by replica: one sum, so that all clip by the same bits
        with at("all_reduce", "squared norm", square.nbytes):
            dist.all_reduce(square, group=self.run.group)
        return square.sqrt().item()


def predict(run: Run) -> tuple[dict[str, int], list[tuple[str, str, int]]]:
    """Bytes this rank holds by term, and its sends, receives and collectives of one step as (operation, what, payload bytes)."""
    cfg, model_cfg, pp = run.cfg, run.model_cfg, run.world_size // run.dp
    stage, master, compute = run.rank % pp, run.master_dtype.itemsize, run.dtype.itemsize
    first, last = stage == 0, stage == pp - 1
    blocks = cut(model_cfg, pp, cfg.stages)[stage]
    order = schedule(cfg.schedule, stage, pp, run.accum)
    shapes = param_shapes(model_cfg)
    sizes = {unit: sum(math.prod(shapes[n]) for n in names) for unit, names in stage_units(model_cfg, blocks).items()}
    P, wire = sum(sizes.values()), 2 if cfg.wire == "bf16" and master == 4 else master
    boundary = cfg.micro_batch * cfg.seq_len * model_cfg.n_embd * compute

    def activations(n_layer: int) -> int:
        return activation_bytes(dataclasses.replace(model_cfg, n_layer=n_layer), cfg.micro_batch, compute, cfg.recompute)

    kept = activations(len(blocks)) - (0 if last else activations(0))
    memory = {
        "master weights": master * P,
        "moments": 2 * master * P,
        "gradients": master * P,
        "compute weights": 0 if compute == master else compute * P,
        f"activations of {most_in_flight(order)} micro-batches": most_in_flight(order) * (kept + (0 if last else boundary)),
        "receive buffers": boundary * (2 - first - last),
        "gradients in passing": compute * max(sizes.values()),
    }
    traffic = []
    for op, _ in order:
        came, goes, what = (first, last, "activation") if op == "F" else (last, first, "gradient")
        traffic += [("recv", what, boundary)] * (not came) + [("send", what, boundary)] * (not goes)
    traffic += [("all_reduce", unit, wire * size) for unit, size in reversed(sizes.items())]
    if model_cfg.tie and pp > 1 and (first or last):
        traffic.append(("all_reduce", "tied embedding", master * sizes["embed"]))
    return memory, [*traffic, ("all_reduce", "loss, tokens, stop", 24), ("all_reduce", "squared norm", 8)]


@contextmanager
def stage_clock(run: Run, meter: Meter) -> Iterator[None]:
    """When the run inside is over, print each stage's compute time and bubble beside (p-1)/(m+p-1); collective."""
    yield
    rows = meter.rows[min(2, len(meter.rows) - 1) :]  # the first steps compile and warm up
    pp = run.world_size // run.dp
    if not rows or pp == 1:
        return
    compute = statistics.median(r["compute_ms"] for r in rows)
    idle = statistics.median(r["bubble_ms"] / r["step_ms"] for r in rows)
    everyone = run.everyone((compute, idle))
    by_stage = [[statistics.mean(column) for column in zip(*everyone[s::pp])] for s in range(pp)]  # mean over the replicas
    for s, (blocks, (ms, share)) in enumerate(zip(cut(run.model_cfg, pp, run.cfg.stages), by_stage)):
        say(f"stage {s}: {len(blocks)} blocks, compute {ms:.1f} ms a step, bubble {share:.1%}")
    slowest, mean = max(ms for ms, _ in by_stage), statistics.mean(ms for ms, _ in by_stage)
    say(
        f"stages: the slowest computes {slowest / mean:.3f} x the mean; bubble {statistics.mean(share for _, share in by_stage):.1%} "
        f"measured, (p-1)/(m+p-1) = {(pp - 1) / (run.accum + pp - 1):.1%}"
    )


# --- the run ----------------------------------------------------------------------------------------------------------


# [same in every train_*.py
@torch.no_grad()
def evaluate(run: Run, model: GPT) -> float:
    """Mean loss over the validation windows, each counted once however many ranks score them."""
    cfg, total = run.cfg, torch.zeros(2, dtype=torch.float64, device=run.device)
    batches = val_batches(
        run.val_tokens, seq_len=cfg.seq_len, micro_batch=cfg.micro_batch, rank=run.dp_rank, world_size=run.dp, limit=cfg.eval_windows
    )
    for x, y, _ in batches:
        x, y = x.to(run.device), y.to(run.device)
        total += run.counts * torch.stack([model(x, y).double(), (y != IGNORE).sum().double()])
    dist.all_reduce(total, group=run.group)
    return (total[0] / total[1]).item()


# same]


def main(cfg: Config, group: dist.ProcessGroup | None = None) -> list[dict]:
    """Train as cfg says on the ranks of `group` (all, when None); returns the rows of the log."""
    if cfg.draw:
        micro_batches = cfg.global_batch // cfg.micro_batch if cfg.global_batch and cfg.micro_batch else 8
        for name in ("gpipe", "1f1b"):
            print(draw(name, cfg.pp or 4, micro_batches))
        return []
    run = launch.start(cfg, __file__, group, model_parallel=cfg.pp)
    cfg = run.cfg
    cfg.pp = run.world_size // run.dp
    if cfg.check_collectives and cfg.pp > 1:
        raise UserError("--check-collectives compares what all ranks call, stages call different things; allowed with --pp 1")
    memory, traffic = predict(run)
    if cfg.explain:
        launch.explain(run, memory, traffic)
        return []

    model = GPT(run.model_cfg, cfg.recompute)
    pipe = Pipeline(model, run)
    model.set_buffers(run.dtype, run.device)
    if cfg.compile:
        model.compile_blocks()
    say(f"stages: {', '.join(str(len(blocks)) for blocks in cut(run.model_cfg, cfg.pp, cfg.stages))} blocks, {cfg.schedule}")
    order = schedule(cfg.schedule, run.rank % cfg.pp, cfg.pp, run.accum)

    # [same in every train_*.py
    scaler = LossScaler(cfg)
    saver = Checkpointer(f"{run.out}/ckpt", group=run.control, keep_last=cfg.keep_last)
    start, updates = launch.resume(run, saver, pipe, scaler)
    batches = Batches(
        run.tokens,
        seq_len=cfg.seq_len,
        global_batch=cfg.global_batch,
        micro_batch=cfg.micro_batch,
        rank=run.dp_rank,
        world_size=run.dp,
        seed=cfg.seed,
        start_step=start,
        steps=cfg.steps,
        workers=cfg.workers,
        device=run.device,
        vocab_size=cfg.vocab_size,
    )
    nominal = cfg.global_batch * cfg.seq_len  # targets of a step if none is masked
    # same]

    with Meter(run, flops_per_token(run.model_cfg)) as meter, stage_clock(run, meter):
        for step in range(start, cfg.steps):
            facts = torch.zeros(3, dtype=torch.float64, device=run.device)  # loss sum, targets that count, stop
            scale = scaler.scale
            in_flight = {}  # micro-batch -> input and output of this stage, from its forward to its backward pass
            pipe.expect(run.accum)
            for op, micro in order:
                if op == "F":
                    x, y, sample = batches.next()  # by every stage: the seed says which, so no tokens are sent
                    launch.log_samples(run, step, sample)
                    h = None if pipe.first else pipe.from_previous.recv().requires_grad_()
                    with at("forward"):
                        keys = dropout_keys(cfg.seed, step, sample) if run.model_cfg.dropout else None
                        out = pipe.forward(h, x, y, keys)
                    if pipe.last:  # out is the loss, a sum: what it must be divided by is known once all have counted
                        facts[:2] += torch.stack([out.detach().double(), (y != IGNORE).sum().double()])
                    else:
                        pipe.to_next.isend(out.detach())
                    in_flight[micro] = h, out
                else:
                    h, out = in_flight.pop(micro)
                    pipe.first_micro, pipe.last_micro = micro == 0, micro == run.accum - 1
                    grad = torch.full_like(out, scale / nominal) if pipe.last else pipe.from_next.recv()
                    with at("backward"):
                        out.backward(grad)  # buckets leave from in here, in the last micro-batch
                    if not pipe.first:
                        pipe.to_previous.isend(h.grad)
            pipe.finish()

            # [same in every train_*.py
            facts[2] = launch.stop_signal()
            with at("all_reduce", "loss, tokens, stop", facts.nbytes):
                dist.all_reduce(facts, group=run.group)
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
            meter.log(step, loss_sum / max(n_valid, 1), norm if finite else None, lr, nominal, scale, not finite, **more)
            if cfg.save_every and (done % cfg.save_every == 0 or done == cfg.steps or stop):
                saver.save(done, pipe.pieces(), launch.progress(run, done, updates, scaler), rng=launch.rng_state(run))
            if stop:
                say(f"stopped by a signal after step {step}; the same command with --out {run.out} goes on from there")
                break
        saver.wait()
        batches.close()
        meter.summary(memory, traffic)
    return meter.rows
    # same]


if __name__ == "__main__":
    launch.run_script(main, Config, __doc__)
