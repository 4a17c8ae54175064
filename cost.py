"""How long a step takes: the constants of one card, and what communication adds to them.

    micro-batch   products / rate + attention / rate + passes over what is kept / bandwidth + launches, for each block
    pipeline      micro-batches of the slowest stage x (1 + (p-1) / (v m))             m micro-batches, v chunks
    transfer      alpha + bytes / beta. Hidden behind compute it takes a share of its time from it, for it needs memory
                  bandwidth (copy engines) or multiprocessors (NCCL); what finds nothing to hide behind is waited for
    update        AdamW's bytes / bandwidth of the card's memory, or under --offload of the host's

Measured on H200s, and there within 10 % of every row of docs/results (tests/test_plan.py prints them). Another card's
rates are these times the ratio of the two data sheets: estimates.
"""

import dataclasses
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import train_pipe
import train_tp
from model import activation_parts, n_params
from ring_allreduce import fit_link
from support.flags import UserError
from support.meter import BF16_PEAK
from support.run import Run


@dataclass(frozen=True)
class Machine:
    """Rates, as written here of an H200, each with its row of docs/results; and how many cards there are."""

    products: float = 690e12  # FLOP/s of matrix products          6b-h200x2: single 4 x 16
    attention: float = 310e12  # FLOP/s, causal                    the same, split by the trace in docs/LOG.md
    far: float = 590e12  # ... to keys over 2,048 tokens back      a guess: gives 560e12 in all at 32,768
    memory: float = 4.2e12  # bytes/s                              the same: AdamW's 49 ms
    passes: float = 5.5  # over what a block keeps                 124m-h200: single, micro-batch 64
    launch: float = 0.3e-3  # seconds per block and micro-batch    124m-h200: single 16 x 4
    alpha: float = 63e-6  # seconds per collective                 ring-h200x2: backend_s
    beta: float = 330e9  # bytes/s each way to the next card       ring-h200x2: backend_s
    nccl: float = 0.85  # share of a hidden second lost            6b-h200x2: tp 16 x 4
    copies: float = 0.4  # the same, by copy engines               6b-h200x2: zero3
    handover: float = 1.5e-3  # seconds per message of a pipeline  6b-h200x2: pipe interleaved
    posted: float = 0.12  # of compute, beside NCCL's receives     6b-h200x2: pipe 1f1b, NCCL
    host: float = 110e9  # bytes/s of a host's memory              6b-h200x2: zero2-offload
    to_host: float = 52e9  # bytes/s from card to host             docs/LOG.md, 2026-11-30
    net_alpha: float = 63e-6  # the same between hosts; --link measures them
    net_beta: float = 50e9
    peer: bool = True  # cards of a host reach each other's memory: copy engines
    kind: str = "H200"
    room: float = 141 * 0.985 * 2**30  # bytes that a card has
    gpus: int = 1
    nodes: int = 1


FOUND = 0.985 * 2**30  # bytes that torch finds per GB that a card is sold with
SHEETS = {  # by data sheet: GB as sold, memory TB/s, GB/s each way to another card (by PCIe: 32)
    "B200": (181, 8.0, 900),
    "H200": (141, 4.8, 450),
    "H100": (80, 3.35, 450),
    "A100": (80, 2.04, 300),
    "RTX A6000": (48, 0.768, 32),
    "L40S": (45, 0.864, 32),
    "RTX 4090": (24, 1.008, 32),
    "RTX 3090": (24, 0.936, 32),
}


def machine(kind: str, gpu_mem: float = 0, gpus: int = 1, nodes: int = 1, link: str = "") -> Machine:
    """Of the kind of card that a name has in it, or of the kind sold with about so many GB. Raises UserError.

    link: a file of ring_allreduce.py, run across hosts.
    """
    kind = kind or min(SHEETS, key=lambda known: abs(SHEETS[known][0] - gpu_mem))
    found = next((known for known in SHEETS if known.split()[-1].lower() in kind.lower()), None)
    if not found:
        raise UserError(f"--gpu {kind}: no rates are known of it; allowed are {', '.join(SHEETS)}")
    sold, memory, beside = (ours / h200 for ours, h200 in zip(SHEETS[found], SHEETS["H200"]))
    box, faster = Machine(kind=found, gpus=gpus, nodes=nodes), BF16_PEAK[found] / BF16_PEAK["H200"]
    rates = dict(products=box.products * faster, attention=box.attention * faster, far=box.far * faster)
    rates |= dict(memory=box.memory * memory, beta=box.beta * beside, peer=SHEETS[found][2] > 32)
    rates |= dict(room=gpu_mem * FOUND or box.room * sold)
    if link:
        try:
            measured = json.loads(Path(link).read_text())
            table = [[row[key] for row in measured["rows"]] for key in ("bytes", "backend_s")]
            rates["net_alpha"], rates["net_beta"], _ = fit_link(*table, measured["world"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"--link {link}: not a file that ring_allreduce.py writes ({error!r})") from None
    return dataclasses.replace(box, **rates)


# --- a step -----------------------------------------------------------------------------------------------------------


def pass_seconds(run: Run, box: Machine) -> tuple[float, float]:
    """Forward and backward of one micro-batch through a block, and through the head, on this rank."""
    m, ways, C = run.model_cfg, run.tp * run.cp, run.model_cfg.n_embd
    tokens = run.cfg.micro_batch * run.cfg.seq_len / ways
    kept, ends, _ = activation_parts(m, run.cfg.micro_batch, run.dtype.itemsize, "none", True)
    matrices = 6 * tokens * C * (2 * C + 2 * m.n_kv_head * m.head_dim + 3 * m.n_ff) / box.products
    near = min(m.seq_len, 2048)
    matrices += 6 * tokens * C * (near / box.attention + (m.seq_len - near) / box.far)
    between = box.passes * kept / ways / box.memory + box.launch
    again = {"none": 0, "selective": between, "full": matrices + between}[run.cfg.recompute] / 3
    head = 6 * tokens * C * m.vocab_size / box.products + box.passes * ends / ways / box.memory
    return matrices + between + again, head


def transfers(run: Run, traffic: list, parts: list[range], box: Machine) -> tuple[Counter, float]:
    """Seconds that this rank's transfers of a step need, by kind, and the bytes it sends."""
    team: set[tuple] = set()  # what tensor parallel ranks exchange among themselves
    for part in parts if run.tp > 1 else []:
        forward, backward = train_tp.part_traffic(run, part)
        team.update(forward, *backward)
    replica, several, took, sent = run.tp * run.pp * run.cp, box.nodes > 1, Counter(), 0.0
    holders = run.dp * run.cp  # of the same weights
    for (op, what, size), n in Counter(traffic).items():
        of_team = (op, what, size) in team
        ranks = run.tp if of_team else run.world_size if what == "facts" else holders
        if op in ("send", "recv"):
            crosses, moved = several and replica > box.gpus, size
            beside = run.tp * min(run.cp, box.gpus)  # in a turn of a ring all cards of a host may send to the next one
        else:  # groups of a host that cross to the next one at once; what goes from all to all crosses from all
            crosses = several and (box.gpus % run.tp > 0 if of_team else ranks > 1)
            beside = max(1, box.gpus // run.tp) if of_team else min(replica, box.gpus)
            beside *= max(1, box.gpus // replica) if op == "exchange" else 1
            moved = (1 + (op == "all_reduce")) * size * (ranks - 1) / ranks
        beta = min(box.beta, box.net_beta / beside) if crosses else box.beta
        kind = op if op in ("send", "recv") else "team" if of_team else "weights" if op == "all_gather" else "gradients"
        took[kind] += n * (moved > 0) * (box.alpha + box.net_alpha * crosses + moved / beta)
        sent += n * moved * (op != "recv")
    took["messages"] = sum(n for (op, *_), n in Counter(traffic).items() if op == "recv")
    return took, sent


def step_seconds(run: Run, traffic: list, box: Machine) -> tuple[dict[str, float], float]:
    """Seconds of one step by part, and the bytes that this rank sends in it."""
    stage, offload = getattr(run.cfg, "stage", 0), getattr(run.cfg, "offload", "none") != "none"
    block, head = pass_seconds(run, box)
    last, held = 2 * run.model_cfg.n_layer, n_params(run.model_cfg) / run.tp / run.pp
    stages = train_pipe.layout(run) if run.pp > 1 else [[range(last)]]
    micro = max(sum(len(p) for p in parts) * block / 2 + head * (parts[-1].stop == last) for parts in stages)
    micro += 10 * held / box.memory  # gradients read in bf16 and added in fp32
    compute, bubble = run.accum * micro, (run.pp - 1) / len(stages[0]) * micro
    share = held / (run.dp * run.cp) if stage or getattr(run.cfg, "zero", 0) else held
    update = 34 * share / box.memory
    if offload:  # a host's CPUs update the shares of all its cards, when the last gradients have arrived
        update = 36 * share * min(box.gpus, run.world_size) / box.host + 4 * share / run.accum / box.to_host

    took, sent = transfers(run, traffic, stages[run.place().stage], box)

    def lost(seconds: float, behind: float, engine: bool) -> float:
        return (box.copies if engine else box.nccl) * min(seconds, behind) + max(0.0, seconds - behind)

    each, engine = stage >= 2, run.copy_engine and run.pp == 1
    wait = lost(took["team"], compute * (run.cfg.micro_batch > 1), False)  # a half's behind the other half
    wait += lost(took["gradients"], (run.accum if each else 1) * micro * 2 / 3, engine)
    wait += lost(took["weights"], compute if stage == 3 else update, engine)
    wait += max(0.0, took["recv"] - compute)
    if run.cp > 1:  # keys go behind attention
        wait += lost(took["send"], compute, engine)
    if run.pp > 1:
        wait += took["messages"] * box.handover if run.copy_engine else box.posted * compute
    return {"compute": compute, "bubble": bubble, "communication": wait, "update": update}, sent
