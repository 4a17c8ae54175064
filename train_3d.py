"""Tensor x pipeline x data parallel in one run: for the model that no single form fits.

    torchrun --nproc_per_node=8 train_3d.py                                        # 2 x 2 x 2
    torchrun --nproc_per_node=8 train_3d.py --tp 4 --pp 2 --model 13b --data DIR   # 1 replica of 2 stages of 4 ranks
    torchrun --nproc_per_node=8 train_3d.py --schedule interleaved --chunks 4 --zero 0
    torchrun --nproc_per_node=4 train_3d.py --explain          # map of ranks, memory, bytes; then exit

    replica 0:  stage 0  ranks 0 1   ==>   stage 1  ranks 2 3
    replica 1:  stage 0  ranks 4 5   ==>   stage 1  ranks 6 7

Neighbouring ranks form a team, which divides each matrix and moves the most bytes; replicas move the least: outermost.

Each axis pays with another coin. Tensor parallel divides weights, activations and every product, and exchanges
activations in each block. A pipeline divides layers, sends one activation per boundary, and idles while it fills and
drains. Data parallel divides the batch and exchanges gradients once a step. So reach for them in this order: data
parallel with ZeRO while it fits; a pipeline when the layers do not; tensor parallel, inside a host, when one layer or
one sequence does not.

Nothing here is new: a stage is a part of train_tp.py's model, between train_pipe.py's links, in train_zero.py's
buckets. What has to be agreed is where a part ends. A tensor parallel region leaves a summand on each rank, which
reduce_scatter adds up and all_gather spreads for the next region. The boundary lies between these two: the message is a
rank's own pieces of the residual, (B, T/tp, C), so a boundary costs each rank 1/tp of its bytes and no rank sends a
thing twice.

One step of a rank (replica, stage, seat):

    for F or B, micro-batch (and chunk) in schedule:                                          axis
        F:  x = recv(previous stage);   norm, all_gather;                                     pipeline, team
            for each half of a block:   compute;  reduce_scatter, add, norm, all_gather       team
            the last reduce_scatter, add;  isend(x, next stage)                               team, pipeline
        B:  the same in reverse; in the last micro-batch  exchange(gradients of block i)      replicas
    norms: exchange over team and replicas;  tied embedding: all_reduce(share) of first and last stage
    all_reduce(facts);  clip;  AdamW on the share;  all_gather(new weights of block i)        all; replicas

Bytes handed over per rank and step, A micro-batches of B T tokens, P parameters, bf16:
    team      A (layers / pp) x 8 x 2 B T C, forward and backward          each rank sends (tp-1)/tp of it
    pipeline  A x 2 x 2 B T C / tp for each boundary of its stage
    replicas  (4 + 2) P / (tp pp), gradients in fp32 and weights in bf16   each rank sends (dp-1)/dp of it
Bytes held per parameter of the stage's slices: 2 + 4 + 12 / dp.

When not to: on one host of eight H200s 6b is faster under ZeRO. By what was measured on two (docs/results), of one
GPU's rate ZeRO-2 keeps 99 % and TP 2 keeps 92 %; with 8 micro-batches (global batch 64, micro-batch 4, two replicas)
two stages idle 1/(8+1) = 11 % of the time, so 2 x 2 x 2 keeps about 0.92 x 0.89 = 82 %.

Papers: Narayanan et al., Megatron-LM (arXiv 2104.04473); Korthikanti et al., sequence parallelism (2205.05198).
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

import train_pipe
from buckets import held_by
from checkpoint import Checkpointer
from data import Batches, evaluate
from links import open_links
from model import activation_parts, dropout_keys, flops_per_token
from optim import LossScaler, gradient_factor, lr_at
from support.flags import UserError
from support.meter import Meter, at, say
from support.rendezvous import job_size
from support.resume import check_replicas, progress, resume, rng_state
from support.run import Place, Run
from support.start import end, explain, run_script, start, stop_asked
from train_ddp import DataParallel, state_bytes
from train_pipe import Stage, flow, layout, message_shape, receive_buffers, schedule, stage_clock
from train_tp import build_model, check_layout, part_traffic
from train_zero import Zero1, share_bytes
from transport import all_reduce


@dataclass
class Config(train_pipe.Config):
    tp: int = 0  # ranks that divide each matrix among them [2, if that divides the ranks]
    pp: int = 0  # pipeline stages; what remains is data parallel [2, if that divides the remaining ranks]
    zero: Literal[0, 1] = 1  # 1: replicas share masters and moments out; 0: each keeps all


# --- the idea: who is where -------------------------------------------------------------------------------------------


def default_layout(cfg: Config, world_size: int) -> tuple[int, int]:
    """tp and pp: as asked, else 2 where that divides."""
    tp = cfg.tp or (1 if world_size % 2 else 2)
    pp = cfg.pp or (1 if world_size // max(tp, 1) % 2 else 2)
    return tp, pp


def rank_map(run: Run) -> str:
    """Which rank is where, a line per replica."""
    lines = []
    for replica in range(run.dp):
        teams = [[run.rank_of(Place(replica, s, seat)) for seat in range(run.tp)] for s in range(run.pp)]
        stages = (f"stage {s}  ranks {' '.join(map(str, team))}" for s, team in enumerate(teams))
        lines.append(f"replica {replica}:  " + "   ==>   ".join(stages))
    return "\n".join(lines)


# --- what it costs ----------------------------------------------------------------------------------------------------


def predict(run: Run) -> tuple[dict[str, int], list[tuple[str, str, int]]]:
    """Bytes held by term, and messages and collectives of one step as (operation, what, payload bytes)."""
    cfg, m, tp, last = run.cfg, run.model_cfg, run.tp, 2 * run.model_cfg.n_layer
    parts = layout(run)[run.place().stage]
    held = held_by(run, parts)
    block, ends, again = activation_parts(m, cfg.micro_batch, run.dtype.itemsize, cfg.recompute, bool(cfg.compile))
    gathered = cfg.micro_batch * m.seq_len * m.n_embd * run.dtype.itemsize * (tp - 1) // tp  # a region's input

    def kept(part: range) -> int:
        ending = part.stop == last
        return (len(part) * block // 2 + ends * ending) // tp + (len(part) + ending) * gathered

    count, alive, messages = flow(run, kept)
    if cfg.zero:
        memory, sums, weights = share_bytes(run, held, stage=1)
    else:
        (memory, sums), weights = state_bytes(run, held), []
    memory |= {
        f"activations of {count / len(parts):g} micro-batches": alive + again // tp,
        "receive buffers": receive_buffers(run, messages),
    }
    team = [
        each
        for part in parts
        for forward, backward in [part_traffic(run, part)]
        for each in forward + sum(backward, [])
    ]
    return memory, [*messages, *team * run.accum, *sums, ("all_reduce", "facts", 40), *weights]


# --- the run ----------------------------------------------------------------------------------------------------------


def check(run: Run) -> None:
    """Raises UserError, before anything is built, for a layout or a link that cannot be had."""
    check_layout(run)
    train_pipe.check(run)
    if run.cfg.zero and run.cfg.allreduce != "torch":
        raise UserError(f"--allreduce {run.cfg.allreduce}: --zero 1 reduces by exchange; allowed with --zero 0")


def main(cfg: Config, group: dist.ProcessGroup | None = None) -> list[dict]:
    """Train as cfg says on the ranks of `group` (all, when None); returns the rows of the log."""
    tp, pp = default_layout(cfg, job_size(group))
    run = start(cfg, __file__, group, tp=tp, pp=pp, check=check)
    cfg = run.cfg
    memory, traffic = predict(run)
    say(f"gradients travel in {str(run.wire_dtype)[6:]}, {cfg.schedule}, ZeRO-{cfg.zero}")
    say(rank_map(run))
    if cfg.explain:
        return explain(run, memory, traffic)

    model = build_model(run)
    mine = run.place().stage
    parts = layout(run)[mine]
    chunks = len(parts)
    strategy = (Zero1 if cfg.zero else DataParallel)(model, run, held_by(run, parts))
    stage = Stage(model, run, parts, open_links(run, message_shape(run), wraps=chunks > 1))
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
