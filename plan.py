"""Which layout fits, how fast it will be, and why the others are not it: before renting anything.

    python plan.py --model 6b --gpus 8 --gpu-mem 80 --global-batch 64    # on a laptop, in seconds
    python plan.py --model 6b --gpu h100 --gpus 8 --nodes 2 --link link.json --tokens 100e9 --mtbf 200
    python plan.py --model 7b --gpus 4 --gpu-mem 24 --dtype fp16 --host-mem 128
    python plan.py --model 124m --try              # the cards found here; then three steps of what is recommended

Memory and bytes on the wire are the scripts' own predict(), asked for every layout: there is no second model of them.
Time is what one card needs for its share of the work, and what communication adds:

    micro-batch = products / rate + attention / rate + bytes between them / memory bandwidth + launches
    pipeline:     micro-batches of the slowest stage x (1 + (p - 1) / (m v))         m micro-batches, v chunks a stage
    transfer    = alpha + bytes / beta for each;  hidden behind compute it still takes a share of its time from it, since
                  it needs memory bandwidth (copy engines) or multiprocessors (NCCL); what finds nothing to hide
                  behind is waited for
    update      = bytes of AdamW / bandwidth of the card's memory, or of the host's under --offload

The constants were measured on H200s (CARD, below). Another card's rates are these times the ratio of the two data
sheets, and labelled as estimates.
"""

import dataclasses
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import train_3d
import train_ddp
import train_pipe
import train_tp
import train_zero
from model import activation_parts, flops_per_token, n_params
from ring_allreduce import fit_link
from support.defaults import fill
from support.flags import UserError, flag_name, parse_flags, print_help, run_cli
from support.meter import BF16_PEAK
from support.report import memory_there, smallest_change
from support.run import Run


@dataclass
class Config:
    """plan.py's flags; the comment behind a field is its --help text."""

    model: str = "6b"  # a size (see model.py) or a JSON file
    seq_len: int = 0  # tokens per sequence [the size's]
    vocab_size: int = 0  # token ids the model knows [the size's]
    dtype: Literal["", "float64", "float32", "bfloat16", "float16"] = ""  # of compute [bfloat16]
    global_batch: int = 0  # sequences per step over all ranks [by size]
    micro_batch: int = 0  # sequences per pass [the fastest of 1, 2, 4, 8, 16, 32, 64 that fits]
    recompute: Literal["", "none", "selective", "full"] = ""  # [the fastest that fits]
    gpus: int = 0  # cards of one host [those found here]
    nodes: int = 1  # hosts
    gpu: str = ""  # kind of card, as in h100 [the one found here]
    gpu_mem: float = 0.0  # GB of a card as it is sold: 80 [the kind's]
    host_mem: float = 0.0  # GB of a host's memory [not checked, or this host's where the cards are found here]
    link: str = ""  # between hosts: the file that ring_allreduce.py writes, run across them
    tokens: float = 0.0  # length of the run, as in 100e9: days and GPU hours, on one host and on two
    mtbf: float = 0.0  # hours between failures of one host: how often to save
    try_here: bool = False  # --try: run three steps of the recommended layout, print predicted beside measured


# --- what was measured ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Card:
    """Rates of one card; as written here, of an H200. Rows are those of docs/results."""

    products: float = 690e12  # FLOP/s of matrix products       6b-h200x2: single 4 x 16
    attention: float = 310e12  # FLOP/s, causal                  6b-h200x2: single 4 x 16, its trace in docs/LOG.md
    memory: float = 4.2e12  # bytes/s                            6b-h200x2: AdamW's 49 ms, in docs/LOG.md
    passes: float = 5.5  # over what a pass keeps                6b-h200x2: single 4 x 16; 124m-h200: single 64 x 8
    launch: float = 0.3e-3  # seconds per block and pass         124m-h200: single 16 x 4
    alpha: float = 63e-6  # seconds per collective               ring-h200x2: backend_s
    beta: float = 331e9  # bytes/s between cards of a host       ring-h200x2: backend_s
    nccl: float = 0.85  # of a hidden second, taken from compute 6b-h200x2: tp 16 x 4
    copies: float = 0.4  # the same by copy engines             6b-h200x2: zero3
    handover: float = 1.5e-3  # of a pipeline's message          6b-h200x2: pipe interleaved
    posted: float = 1.12  # compute beside NCCL's receives       6b-h200x2: pipe 1f1b, NCCL
    host: float = 110e9  # bytes/s of a host's memory            6b-h200x2: zero2-offload
    to_host: float = 52e9  # bytes/s of a card to its host       docs/LOG.md, 2026-11-30
    peer: bool = True  # whether cards of a host reach each other's memory: copy engines


SHEETS = {  # kind of card -> GB as sold, memory TB/s, GB/s each way to another card (over PCIe: 32), by data sheet
    "B200": (181, 8.0, 900),
    "H200": (141, 4.8, 450),
    "H100": (80, 3.35, 450),
    "A100": (80, 2.04, 300),
    "L40S": (45, 0.864, 32),
    "RTX A6000": (48, 0.768, 32),
    "RTX 4090": (24, 1.008, 32),
    "RTX 3090": (24, 0.936, 32),
}


def card_of(kind: str) -> tuple[str, Card]:
    """The kind of card that a name has in it, and its rates. Raises UserError."""
    found = next((k for k in SHEETS if k.lower().replace("rtx ", "") in kind.lower()), None)
    if found is None:
        raise UserError(f"--gpu {kind}: nothing is known of this card's rates; allowed are {', '.join(SHEETS)}")
    (_, memory, link), (_, memory_h, link_h), card = SHEETS[found], SHEETS["H200"], Card()
    faster, peer = BF16_PEAK[found] / BF16_PEAK["H200"], link > 32
    rates = dict(products=card.products * faster, attention=card.attention * faster)
    rates |= dict(memory=card.memory * memory / memory_h, beta=card.beta * link / link_h, peer=peer)
    return found, dataclasses.replace(card, **rates)


# --- one layout: time -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hosts:
    """How ranks lie on hosts, and what was measured between these: seconds per message, bytes/s of a ring."""

    nodes: int = 1
    gpus: int = 1  # of one host
    alpha: float = 63e-6
    beta: float = 50e9


def pass_seconds(run: Run, card: Card) -> tuple[float, float]:
    """Forward and backward of one micro-batch: of a block, and of the head, on this rank."""
    m, cfg, tp = run.model_cfg, run.cfg, run.tp
    tokens, kv = cfg.micro_batch * m.seq_len, m.n_kv_head * m.head_dim
    kept, ends, _ = activation_parts(m, cfg.micro_batch, run.dtype.itemsize, "none", True)
    products = 6 * tokens * m.n_embd * (2 * m.n_embd + 2 * kv + 3 * m.n_ff) / card.products / tp
    attention = 6 * tokens * m.seq_len * m.n_embd / card.attention / tp
    between = card.passes * kept / card.memory / tp + card.launch
    again = {"none": 0, "selective": between / 3, "full": (products + attention + between) / 3}[cfg.recompute]
    head = 6 * tokens * m.n_embd * m.vocab_size / card.products / tp + card.passes * ends / card.memory / tp
    return products + attention + between + again, head


def wire_seconds(op: str, size: int, ranks: int, beside: int, card: Card, hosts: Hosts) -> tuple[float, float]:
    """A collective over `ranks` ranks, `beside` groups of a host at once -> bytes that a rank sends; seconds.

    Beside 0: all of the ranks are on one host.
    """
    sent = (2 if op == "all_reduce" else 1) * (ranks - 1) / ranks * size
    alpha, beta = card.alpha * (2 if op == "all_reduce" else 1), card.beta
    if beside:  # a ring crosses to the next host once; what goes from all to all crosses from every rank
        here = max(1, hosts.gpus // beside)
        share = beside * (here if op == "exchange" else 1)
        alpha, beta = alpha + hosts.alpha, min(card.beta, hosts.beta / share)
    return sent, alpha + sent / beta


def step_seconds(run: Run, traffic: list[tuple[str, str, int]], card: Card, hosts: Hosts) -> tuple[dict, float]:
    """Seconds of one step by part, of the slowest rank; and bytes that this rank sends.

    Parts: compute, bubble, communication (time taken from compute, or waited for), update.
    """
    cfg, m, stage = run.cfg, run.model_cfg, getattr(run.cfg, "stage", 0)
    block, head = pass_seconds(run, card)
    stages = train_pipe.layout(run) if run.pp > 1 else [[range(2 * m.n_layer)]]
    v, last = len(stages[0]), 2 * m.n_layer
    slowest = max(sum(len(p) for p in parts) * block / 2 + head * (parts[-1].stop == last) for parts in stages)
    held = n_params(m) / run.tp / run.pp
    slowest += 10 * held / card.memory  # a micro-batch's gradients: read in bf16, added in fp32
    compute, bubble = run.accum * slowest, slowest * (run.pp - 1) / v

    # who sends what: the team of tensor parallel ranks, replicas, neighbours in the pipeline
    parts = stages[run.place().stage]
    passes = [train_tp.part_traffic(run, part) for part in parts] if run.tp > 1 else []
    team = Counter(each for forward, backward in passes for each in forward + sum(backward, []))
    team = Counter({each: n * run.accum for each, n in team.items()})
    rest = Counter(traffic) - team
    rank, crossing = run.tp * run.pp, hosts.nodes > 1
    wide = (hosts.gpus // run.tp or 1) if crossing and (run.tp > hosts.gpus or hosts.gpus % run.tp) else 0
    seconds, sent = Counter(), 0.0
    for (op, what, size), n in [*team.items(), *rest.items()]:
        if op in ("send", "recv"):
            # a boundary between hosts is crossed by a whole team
            beta = hosts.beta / run.tp if crossing and rank > hosts.gpus else card.beta
            seconds["messages"] += n * size / beta * (op == "recv")
            sent += n * size * (op == "send")
            continue
        ours = (op, what, size) in team
        ranks = run.tp if ours else run.world_size if what == "facts" else run.dp
        if ranks > 1:
            beside = wide if ours else min(hosts.gpus, rank) if crossing else 0
            each, took = wire_seconds(op, size, ranks, beside, card, hosts)
            kind = "team" if ours else "weights" if op == "all_gather" else "gradients"
            seconds[kind] += n * took
            sent += n * each

    offloaded = getattr(cfg, "offload", "none") != "none"
    share = held / run.dp if stage or getattr(cfg, "zero", 0) else held
    update = 34 * share / card.memory
    if offloaded:  # the CPUs of a host update the shares of all its cards
        update = 36 * share * min(hosts.gpus, run.world_size) / card.host
        update += 4 * share / run.accum / card.to_host  # the last gradients have no compute to leave behind
    copied = card.copies if run.copy_engine else card.nccl

    def cost(took: float, under: float, each: float) -> float:
        return each * min(took, under) + max(0.0, took - under)

    halves = cfg.micro_batch > 1  # each hides the other's collectives
    lost = cost(seconds["team"], compute * halves, card.nccl)
    every_pass, backward = stage >= 2, 2 / 3 * slowest
    lost += cost(seconds["gradients"], backward * (run.accum if every_pass else 1), copied if every_pass else card.nccl)
    lost += cost(seconds["weights"], compute if stage == 3 else update, copied)
    if run.pp > 1:
        messages = sum(n for (op, _, _), n in rest.items() if op == "recv")
        lost += max(0.0, seconds["messages"] - compute)
        lost += messages * card.handover if run.copy_engine else compute * (card.posted - 1)
    return {"compute": compute, "bubble": bubble, "communication": lost, "update": update}, sent


# --- every layout -----------------------------------------------------------------------------------------------------


@dataclass
class Layout:
    """One way to run the model, with what it needs of the fullest rank and how long a step takes."""

    name: str
    script: str
    flags: dict
    run: Run  # of the fullest rank
    memory: dict[str, int]
    host: int  # bytes of host memory, of all ranks of a host
    seconds: dict[str, float]
    sent: float  # bytes by this rank and step
    fits: str = ""  # "yes", "barely": above 90 % of the card, "no"

    @property
    def bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def rate(self) -> float:
        """Tokens per second of all cards."""
        return self.run.cfg.global_batch * self.run.model_cfg.seq_len / sum(self.seconds.values())

    def command(self, hosts: Hosts) -> str:
        nodes = f"--nnodes={hosts.nodes} --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 " if hosts.nodes > 1 else ""
        launch = f"torchrun {nodes}--nproc_per_node={hosts.gpus}" if self.run.world_size > 1 else "python"
        return f"{launch} {self.script}.py " + " ".join(f"{flag_name(k)} {v}" for k, v in self.flags.items())


def kinds(world: int) -> list[tuple[str, object, dict]]:
    """Name, script and flags of every form of parallelism on so many ranks, the simple ones first."""
    sizes = [n for n in range(2, world + 1) if world % n == 0]
    orders = [{"schedule": "1f1b"}, *({"schedule": "interleaved", "chunks": chunks} for chunks in (2, 4))]
    found = [("DDP" if world > 1 else "one card", train_ddp, {})]
    found += [(f"ZeRO-{s}", train_zero, {"stage": s}) for s in (1, 2, 3) if world > 1]
    for pp in sizes:
        for order in [*orders, {"schedule": "gpipe"}]:
            found.append((f"PP {pp} {' '.join(map(str, order.values()))}", train_pipe, {"pp": pp, **order}))
    found += [(f"TP {tp}", train_tp, {"tp": tp}) for tp in sizes]
    for tp, pp in [(tp, pp) for tp in [1, *sizes] for pp in [1, *sizes] if tp * pp > 1 and world % (tp * pp) == 0]:
        if min(tp, pp) > 1 or tp * pp < world:  # else it is one of those above
            for order in orders if pp > 1 else orders[:1]:
                more = {"tp": tp, "pp": pp, **order}
                found.append((f"TP {tp} x PP {pp} {' '.join(map(str, order.values()))} x ZeRO-1", train_3d, more))
    offload = {"offload": "optimizer"}
    return found + [(f"ZeRO-{s}, offload", train_zero, {"stage": s, **offload}) for s in (1, 2, 3)]


def build(name: str, script, flags: dict, world: int, card: Card, hosts: Hosts) -> Layout:
    """Ask the script. Raises UserError where it would."""
    cfg = script.Config(**flags)
    run = Run(cfg, 0, world, torch.device("cuda"))
    run = dataclasses.replace(run, **fill(cfg, world, flags.get("tp", 1), flags.get("pp", 1)))
    run.copy_engine = (flags.get("stage", 0) >= 2 or run.pp > 1) and world > 1 and hosts.nodes == 1 and card.peer
    if run.tp > 1:
        train_tp.check_layout(run)
    ranks = [dataclasses.replace(run, rank=stage * run.tp) for stage in range(run.pp)]
    run, (memory, traffic) = max(((r, script.predict(r)) for r in ranks), key=lambda found: sum(found[1][0].values()))
    host = train_zero.host_bytes(run) * min(hosts.gpus, world) if flags.get("offload") else 0
    return Layout(name, script.__name__, flags, run, memory, host, *step_seconds(run, traffic, card, hosts))


def best(name: str, script, flags: dict, cfg: Config, card: Card, hosts: Hosts, there: float) -> Layout | None:
    """Of a form the fastest micro-batch and recomputation that fit, else the smallest; None: not legal here."""
    found, world = [], hosts.nodes * hosts.gpus
    for micro in [cfg.micro_batch] if cfg.micro_batch else [1, 2, 4, 8, 16, 32, 64]:
        for again in [cfg.recompute] if cfg.recompute else ["none", "selective", "full"]:
            given = {key: getattr(cfg, key) for key in ("model", "seq_len", "vocab_size", "dtype", "global_batch")}
            more = {"micro_batch": micro} | ({"recompute": again} if again != "none" else {})
            given = {key: value for key, value in given.items() if value}
            try:
                layout = build(name, script, {**flags, **given, **more}, world, card, hosts)
            except UserError:
                continue
            parts = [(layout.bytes, there)] + ([(layout.host, cfg.host_mem * 1e9)] if cfg.host_mem else [])
            full = max(needs / has for needs, has in parts)
            layout.fits = "yes" if full <= 0.9 else "barely" if full <= 0.97 else "no"
            found.append(layout)
    order = {"yes": 2, "barely": 1, "no": 0}
    return max(found, key=lambda x: (order[x.fits], x.rate if x.fits != "no" else -x.bytes), default=None)
