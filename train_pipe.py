"""Pipeline parallel training: the model is cut into stages, a rank holds one, and micro-batches stream through them.

    torchrun --nproc_per_node=4 train_pipe.py                           # 4 stages, 1F1B
    torchrun --nproc_per_node=4 train_pipe.py --pp 2                    # 2 stages, 2 data-parallel replicas
    torchrun --nproc_per_node=2 train_pipe.py --model 6b --global-batch 64 --micro-batch 4 --data DIR
    torchrun --nproc_per_node=2 train_pipe.py --schedule interleaved --chunks 4 --model 6b --global-batch 64 --data DIR
    python train_pipe.py --draw --pp 4 --global-batch 8 --micro-batch 1 # the schedules as timelines, then exit
    torchrun --nproc_per_node=2 train_pipe.py --stages 3,1 --explain    # blocks per stage by hand, then exit

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

F is a forward pass, B-- a backward pass, twice as long. The pipe fills and drains: (p-1)/(m+p-1) of the time is idle
for p stages and m micro-batches, in GPipe as in 1F1B. These differ in memory: a stage keeps a micro-batch's activations
from its F to its B, GPipe all m of them, 1F1B at most p - stage. Interleaved, a stage holds v parts from all over the
model (G and C are the second ones): filling takes a v-th of the time, so (p-1)/(v m+p-1) is idle, for v p - 1
boundaries instead of p - 1 and, on the first stage, (p-1)/v micro-batches more in memory. One step of a stage:

    for F or B, micro-batch (and chunk) in schedule:
        F:  h = recv(previous stage);  out = blocks(h);  isend(out, next stage)         (first: tokens, last: the loss)
        B:  g = recv(next stage);      out.backward(g);  isend(h.grad, previous stage)
            in the last one:  all_reduce(bucket of block i) over the stage's replicas     while backward goes on
    tied embedding:  all_reduce(its gradient) between first and last stage, which both hold it
    all_reduce(facts);  clip;  AdamW on the stage's weights

Bytes over each boundary: B T C x 2 in bf16, per micro-batch and direction: 67 MB for 4 sequences of the 6b model,
against a quarter of a second of compute on each of two stages. They are hidden: a send is waited for only at the next
one, and comes into a buffer that is ready before it is needed: on GPUs of one host by copy engine into one of two slots
(links.py), else into a receive posted before the micro-batch before is computed. Bytes of state per rank: 18 per
parameter of its stage. The price is the bubble, and the slowest stage: the head weighs about a block, so the last stage
gets fewer of them; a cut may go through a block, between attention and MLP.

Papers: Huang et al., GPipe (arXiv 1811.06965); Narayanan et al., Megatron-LM (2104.04473), whose PipeDream-Flush is
1F1B.
"""

import dataclasses
import functools
import math
import re
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

import train_ddp
from buckets import held_by
from checkpoint import Checkpointer
from data import Batches, evaluate
from links import Links, open_links
from model import GPT, ModelConfig, activation_parts, dropout_keys, flops_per_token
from optim import LossScaler, gradient_factor, lr_at
from support.flags import UserError
from support.meter import Meter, at, say
from support.resume import check_replicas, progress, resume, rng_state
from support.run import Place, Run
from support.start import end, explain, run_script, start, stop_asked
from support.timeline import draw_all, most_in_flight
from train_ddp import DataParallel, state_bytes
from transport import all_reduce, choose_copy_engine


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


# --- the idea: who does what when -------------------------------------------------------------------------------------


def schedule(name: str, stage: int, stages: int, micro_batches: int, chunks: int = 1) -> list[tuple[str, int]]:
    """What a stage does in one step, in order: ("F" | "B", number) pairs. Pure, so it can be proved without processes.

    Micro-batches come in the same order in all schedules and both passes: sums of gradients are bit-equal, and a link
    needs no tags. Interleaved: micro-batch i in the stage's chunk c is the number c * micro_batches + i; stages divides
    micro_batches.
    """
    n = micro_batches * chunks
    if name == "gpipe":  # forwards before the alternation begins
        warmup = n
    elif chunks == 1:
        warmup = min(n, stages - stage - 1)
    else:  # the first micro-batches return from the last chunk so much later
        warmup = min(n, 2 * (stages - stage - 1) + (chunks - 1) * stages)

    def number(k: int, backward: bool) -> int:
        """Of the k-th pass: as many micro-batches as there are stages go through one chunk, then through the next."""
        turn, k = divmod(k, stages * chunks) if chunks > 1 else (0, k)
        chunk, micro = divmod(k, stages) if chunks > 1 else (0, k)
        return (chunks - 1 - chunk if backward else chunk) * micro_batches + turn * stages + micro

    order = [("F", number(k, False)) for k in range(warmup)]
    for k in range(warmup, n):  # one forward, one backward: the oldest activations go before new ones come
        order += [("F", number(k, False)), ("B", number(k - warmup, True))]
    return order + [("B", number(k, True)) for k in range(n - warmup, n)]


@functools.cache  # plan.py asks for many layouts with the same cut
def cut(model_cfg: ModelConfig, stages: int, chunks: int = 1, by_hand: str = "") -> list[range]:
    """What each part of the model has, in halves of blocks: 2 i is the attention of block i, 2 i + 1 its MLP.

    Stages are made equal in FLOPs, in which the head is more than a block of 6b and five of 124m, and the embedding
    nothing. Part c * stages + s of the result is chunk c of stage s. Raises UserError.
    """
    n, parts = 2 * model_cfg.n_layer, stages * chunks
    if by_hand:
        sizes = [round(2 * float(b)) if re.fullmatch(r"\d+(\.[05])?", b) else 0 for b in by_hand.split(",")]
        if len(sizes) != parts or min(sizes) < 1 or sum(sizes) != n:
            raise UserError(
                f"--stages {by_hand}: expected {parts} numbers of blocks, whole or with .5, with the sum "
                f"{model_cfg.n_layer} (the model's)"
            )
    elif parts > model_cfg.n_layer:
        raise UserError(
            f"--pp (times --chunks) makes {parts} parts and the model has {model_cfg.n_layer} blocks; "
            f"allowed is 1 to {model_cfg.n_layer} parts"
        )
    else:
        head = 6 * model_cfg.vocab_size * model_cfg.n_embd
        block, mlp = (flops_per_token(model_cfg) - head) / model_cfg.n_layer, 18 * model_cfg.n_embd * model_cfg.n_ff
        halves = [1 - mlp / block, mlp / block] * model_cfg.n_layer
        cost = [*accumulate([0, *halves])]  # of the first k halves, in blocks
        cost[n] += head / block
        # for each e, the best ends of s stages that hold the first e halves; by a high power the slowest counts most
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


def layout(run: Run) -> list[list[range]]:
    """The parts of the model that each stage has, by stage and chunk. Raises UserError."""
    cfg = run.cfg
    if "chunks" in cfg.given and cfg.schedule != "interleaved":
        raise UserError(f"--chunks {cfg.chunks} is for --schedule interleaved, this is {cfg.schedule}")
    chunks = cfg.chunks if cfg.schedule == "interleaved" and run.pp > 1 else 1
    if chunks < 1 or chunks > 1 and run.accum % run.pp:
        raise UserError(
            f"--schedule interleaved with --chunks {cfg.chunks} and {run.accum} micro-batches: chunks must be 1 or "
            f"more and the number of micro-batches (--global-batch / --micro-batch / {run.dp}) a multiple of "
            f"--pp {run.pp}"
        )
    parts = cut(run.model_cfg, run.pp, chunks, cfg.stages)
    return [parts[s :: run.pp] for s in range(run.pp)]


# --- the idea: a stage ------------------------------------------------------------------------------------------------


def message_shape(run: Run) -> tuple[int, int, int]:
    """Of what crosses a boundary, either way, for every micro-batch the same: so there is nothing to announce.

    (B, T, C); under tensor parallel (train_3d.py) each rank sends its pieces of the residual, (B, T/tp, C).
    """
    return run.cfg.micro_batch, run.cfg.seq_len // run.tp, run.model_cfg.n_embd


class Stage:
    """This rank's parts of the model, one or several chunks, between the links to its neighbours."""

    def __init__(self, model: GPT, run: Run, parts: list[range], links: Links):
        self.model, self.run, self.parts = model, run, parts
        self.from_previous, self.to_previous, self.from_next, self.to_next = links

    def is_first(self, chunk: int) -> bool:
        """Whether this chunk begins with the embedding; the others receive their input."""
        return self.parts[chunk].start == 0

    def is_last(self, chunk: int) -> bool:
        """Whether this chunk ends with the loss; the others send their output."""
        return self.parts[chunk].stop == 2 * self.run.model_cfg.n_layer

    def forward(
        self, chunk: int, h: Tensor | None, x: Tensor, y: Tensor, keys: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """h, of message_shape, from the part before (the first takes x (B, T)) -> the same, in the last part the summed
        loss; and the number of targets."""
        return self.model.forward_part(x, y, keys, self.parts[chunk], h)

    def expect(self, micro_batches: int) -> None:
        """Start the first receives of a step."""
        inputs = sum(not self.is_first(c) for c in range(len(self.parts)))
        gradients = sum(not self.is_last(c) for c in range(len(self.parts)))
        if inputs:
            self.from_previous.expect(inputs * micro_batches, early=self.parts[0].start > 0)
        if gradients:
            # not early: it answers to what this stage has yet to send, and a posted receive keeps the GPU busy
            self.from_next.expect(gradients * micro_batches, early=False)

    def __call__(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Summed loss and targets of one batch without backward, for evaluate(): on the last stage; 0 elsewhere."""
        for chunk in range(len(self.parts)):
            h = None
            if not self.is_first(chunk):
                self.from_previous.expect(1, early=False)
                h = self.from_previous.recv()
            out, targets = self.forward(chunk, h, x, y)
            if self.is_last(chunk):
                return out, targets
            self.to_next.isend(out)
        return out.new_zeros(()), targets * 0

    def warm_up(self, strategy: DataParallel) -> None:
        """Run every part forward and backward before there are messages.

        Compiling can block until the GPU is idle, and a posted receive keeps it busy. If both neighbours block, neither
        sends.
        """
        cfg, run = self.run.cfg, self.run
        ids = torch.zeros(cfg.micro_batch, cfg.seq_len, dtype=torch.int64, device=run.device)
        keys = dropout_keys(cfg.seed, 0, ids[:, 0]) if run.model_cfg.dropout else None
        for bucket in strategy.buckets.values():
            bucket.passes = -2  # those to come here are not of a step
        for chunk in [*range(len(self.parts)), *range(len(self.parts))]:
            h = torch.zeros(message_shape(run), dtype=run.dtype, device=run.device)
            with torch.no_grad():
                self.forward(chunk, h, ids, ids)  # as evaluation does
            out, _ = self.forward(chunk, h.requires_grad_(), ids, ids, keys)
            out.backward(torch.zeros_like(out))


# --- what it costs ----------------------------------------------------------------------------------------------------


def flow(run: Run, kept: Callable[[range], int]) -> tuple[int, int, list[tuple[str, str, int]]]:
    """What goes through this stage in a step: micro-batches in flight and activation bytes at most, and its messages.

    kept: bytes that one forward pass of a part keeps for its backward pass.
    """
    stages, boundary = layout(run), math.prod(message_shape(run)) * run.dtype.itemsize
    stage = run.place().stage
    order = schedule(run.cfg.schedule, stage, run.pp, run.accum, len(stages[stage]))
    alive, messages = [], []
    for op, number in order:
        part = stages[stage][number // run.accum]
        first, last = part.start == 0, part.stop == 2 * run.model_cfg.n_layer
        size = kept(part) + boundary * (not last)  # and the output, until it is sent
        alive.append(size if op == "F" else -size)
        came, goes, what = (first, last, "activation") if op == "F" else (last, first, "gradient")
        messages += [("recv", what, boundary)] * (not came) + [("send", what, boundary)] * (not goes)
    return most_in_flight(order), max(accumulate(alive)), messages


def receive_buffers(run: Run, messages: list[tuple[str, str, int]]) -> int:
    """Bytes: slots for two messages each way, or one posted receive each."""
    boundary = math.prod(message_shape(run)) * run.dtype.itemsize
    return boundary * (4 if run.copy_engine else len({what for op, what, _ in messages if op == "recv"}))


def predict(run: Run) -> tuple[dict[str, int], list[tuple[str, str, int]]]:
    """Bytes held by term, and messages and collectives of one step as (operation, what, payload bytes)."""
    cfg, m, parts = run.cfg, run.model_cfg, layout(run)[run.place().stage]
    block, ends, again = activation_parts(m, cfg.micro_batch, run.dtype.itemsize, cfg.recompute, bool(cfg.compile))
    last = 2 * m.n_layer
    count, alive, messages = flow(run, lambda part: len(part) * block // 2 + ends * (part.stop == last))
    memory, sums = state_bytes(run, held_by(run, parts))
    memory |= {
        f"activations of {count / len(parts):g} micro-batches": alive + again,
        "receive buffers": receive_buffers(run, messages),
    }
    return memory, [*messages, *sums, ("all_reduce", "facts", 40)]


def blocks(parts: list[range]) -> str:
    """How many blocks a stage's parts have, as in 4+4.5."""
    return "+".join(f"{len(part) / 2:g}" for part in parts)


@contextmanager
def stage_clock(run: Run, meter: Meter) -> Iterator[None]:
    """When the run inside is over, print each stage's compute time and bubble beside (p-1)/(m+p-1); collective."""
    yield
    rows = meter.rows[min(2, len(meter.rows) - 1) :]  # the first steps compile and warm up
    if not rows or run.pp == 1:
        return
    ms, idle = (
        statistics.median(values) for values in zip(*((r["compute_ms"], r["bubble_ms"] / r["step_ms"]) for r in rows))
    )
    everyone = run.everyone((run.place().stage, ms, idle))
    means, stages = [], layout(run)
    for s, parts in enumerate(stages):
        means.append([statistics.mean(column) for column in zip(*(found[1:] for found in everyone if found[0] == s))])
        say(f"stage {s}: {blocks(parts)} blocks, compute {means[s][0]:.1f} ms a step, bubble {means[s][1]:.1%}")
    compute, bubble = zip(*means)
    slowest, m, p = max(compute) / statistics.mean(compute), run.accum * len(stages[0]), run.pp
    say(
        f"stages: the slowest computes {slowest:.3f} x the mean; bubble {statistics.mean(bubble):.1%} measured, "
        f"(p-1)/(m+p-1) = {(p - 1) / (m + p - 1):.1%}"
        + f" (m: {run.accum} x {m // run.accum} chunks)"
        * (m > run.accum)
    )


# --- the run ----------------------------------------------------------------------------------------------------------


def check(run: Run) -> None:
    """Raises UserError, before anything is built, for a cut or a link that cannot be had."""
    layout(run)
    choose_copy_engine(run, run.pp > 1)


def main(cfg: Config, group: dist.ProcessGroup | None = None) -> list[dict]:
    """Train as cfg says on the ranks of `group` (all, when None); returns the rows of the log."""
    if cfg.draw:
        micro_batches = cfg.global_batch // cfg.micro_batch if cfg.global_batch and cfg.micro_batch else 8
        say(draw_all(schedule, cfg.pp or 4, micro_batches, cfg.chunks))
        return []
    run = start(cfg, __file__, group, pp=cfg.pp, check=check)
    cfg = run.cfg
    memory, traffic = predict(run)
    say(f"gradients travel in {str(run.wire_dtype)[6:]}, {cfg.schedule}")
    stages, mine = layout(run), run.place().stage
    for s, parts in enumerate(stages):
        needed = sum(predict(dataclasses.replace(run, rank=run.rank_of(Place(0, s, 0))))[0].values())
        say(f"stage {s}: {blocks(parts)} blocks, {needed / 1e9:.3f} GB predicted")
    if cfg.explain:
        return explain(run, memory, traffic)

    model = GPT(run.model_cfg, cfg.recompute)
    strategy = DataParallel(model, run, held_by(run, stages[mine]))
    chunks = len(stages[mine])
    stage = Stage(model, run, stages[mine], open_links(run, message_shape(run), wraps=chunks > 1))
    model.set_buffers(run.dtype, run.device)
    if cfg.compile:
        model.compile_blocks()
    if run.device.type == "cuda":
        stage.warm_up(strategy)
    order = schedule(cfg.schedule, mine, run.pp, run.accum, chunks)

    scaler = LossScaler(cfg)
    saver = Checkpointer(f"{run.out}/ckpt", group=run.control, keep_last=cfg.keep_last)
    first, updates = resume(run, saver, strategy, scaler)
    batches = Batches(run, first)
    nominal = cfg.global_batch * cfg.seq_len  # targets of a step if none is masked
    step = stop = 0

    with Meter(run, flops_per_token(run.model_cfg), first) as meter, stage_clock(run, meter):
        for step in range(first, cfg.steps):
            facts = torch.zeros(5, dtype=torch.float64, device=run.device)
            scale = scaler.scale
            micros = {}  # micro-batch -> tokens, targets, dropout keys, from its first forward to its last
            in_flight = {}  # number -> input and output of a chunk, from its forward to its backward pass
            stage.expect(run.accum)
            for op, number in order:
                chunk, micro = divmod(number, run.accum)
                if op == "F":
                    if chunk == 0:
                        x, y, sample = batches.next()  # by every stage: the seed says which, so no tokens are sent
                        micros[micro] = x, y, dropout_keys(cfg.seed, step, sample) if run.model_cfg.dropout else None
                    x, y, keys = micros.pop(micro) if chunk == chunks - 1 else micros[micro]
                    h = None if stage.is_first(chunk) else stage.from_previous.recv().requires_grad_()
                    with at("forward"):
                        out, targets = stage.forward(chunk, h, x, y, keys)
                    if stage.is_last(chunk):  # out is the loss, a sum: divided once all ranks have counted
                        facts[:2] += torch.stack([out.detach().double(), targets.double()])
                    else:
                        stage.to_next.isend(out.detach())
                    in_flight[number] = h, out
                else:
                    h, out = in_flight.pop(number)
                    grad = torch.full_like(out, scale / nominal) if stage.is_last(chunk) else stage.from_next.recv()
                    with at("backward"):
                        out.backward(grad)  # buckets leave from in here, in the last micro-batch
                    if not stage.is_first(chunk):
                        stage.to_previous.isend(h.grad)

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
                    more["val_loss"] = evaluate(run, stage)
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
