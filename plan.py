"""Which layout fits, how fast it will be, and why the others are not it: before anything is rented.

    python plan.py --model 6b --gpus 8 --gpu-mem 80 --global-batch 64        # on a laptop, in seconds
    python plan.py --model 6b --gpu h100 --gpus 8 --nodes 2 --link link.json --tokens 100e9 --mtbf 500
    python plan.py --model 124m --try     # the cards found here, and three steps of what is recommended

Memory and bytes on the wire are the scripts' own predict(); time is cost.py's. A card of 80 GB has 98.5 % of 80 GiB.
"""

import dataclasses
import json
import math
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

import torch

import train_3d
import train_cp
import train_ddp
import train_pipe
import train_tp
import train_zero
from buckets import held_by
from cost import Machine, machine, step_seconds
from model import flops_per_token, load_config, n_params
from offload import HOST_TENSORS
from support.defaults import fill
from support.flags import UserError, flag_name, parse_flags, print_help, run_cli
from support.meter import BF16_PEAK
from support.report import memory_there, smallest_change
from support.run import Run

FITS, BARELY = 0.9, 0.97  # of the card's memory, by prediction: it has to hold a CUDA context too
CLOSE = 0.03  # in speed: machines of one kind differ by as much


@dataclasses.dataclass
class Config:
    """plan.py's flags; the comment behind a field is its --help text."""

    model: str = "6b"  # a size (see model.py) or a JSON file
    seq_len: int = 0  # tokens per sequence [the size's]
    dtype: Literal["", "float64", "float32", "bfloat16", "float16"] = ""  # of compute [bfloat16]
    global_batch: int = 0  # sequences per step over all ranks [by size]
    gpus: int = 0  # cards of one host [those found here, else 1]
    gpu: str = ""  # kind of card, as in h100 [the one found here; with --gpu-mem the one sold with so much]
    gpu_mem: float = 0.0  # GB of a card as it is sold, as in 80 [the kind's]
    nodes: int = 1  # hosts
    host_mem: float = math.inf  # GB of a host's memory [this host's, where the cards are found here; else not checked]
    link: str = ""  # between hosts: what ring_allreduce.py wrote, run across them [50 GB/s, not measured]
    tokens: float = 0.0  # length of the run, as in 100e9: days and GPU hours
    mtbf: float = 0.0  # hours between failures of one host: how often to save
    try_here: bool = False  # --try: run three steps of the recommended layout, print predicted beside measured


def machine_of(cfg: Config) -> Machine:
    """What the flags say, else what is found here. Raises UserError."""
    if cfg.gpu or cfg.gpu_mem:
        return machine(cfg.gpu, cfg.gpu_mem, max(cfg.gpus, 1), cfg.nodes, cfg.link)
    if not torch.cuda.is_available():
        raise UserError("no card is found here: say which, as in --gpu h100 --gpus 8 or --gpu-mem 80")
    cfg.host_mem = min(cfg.host_mem, memory_there(torch.device("cpu")) / 1e9)
    box = machine(torch.cuda.get_device_name(), 0, cfg.gpus or torch.cuda.device_count(), cfg.nodes, cfg.link)
    return dataclasses.replace(box, room=memory_there(torch.device("cuda")))


@dataclasses.dataclass
class Layout:
    """One way to run the model."""

    name: str
    script: str
    flags: dict
    run: Run  # of the fullest rank
    memory: dict[str, int]  # bytes by term
    host: int  # bytes of host memory, of all ranks of a host
    seconds: dict[str, float]  # of a step, by part
    sent: float  # bytes that this rank sends in a step
    full: float = 0.0  # the share of the card, or of the host, that it fills

    @property
    def gb(self) -> float:
        return sum(self.memory.values()) / 1e9

    @property
    def rate(self) -> float:
        """Tokens per second of all cards."""
        return self.run.cfg.global_batch * self.run.cfg.seq_len / sum(self.seconds.values())

    def command(self, box: Machine) -> list[str]:
        nodes = [f"--nnodes={box.nodes}", "--rdzv_backend=c10d", "--rdzv_endpoint=HOST:29500"] * (box.nodes > 1)
        launch = ["torchrun", *nodes, f"--nproc_per_node={box.gpus}"] if self.run.world_size > 1 else ["python"]
        return [*launch, f"{self.script}.py", *(f"{flag_name(k)}={v}" for k, v in self.flags.items())]


def build(name: str, script, flags: dict, box: Machine) -> Layout:
    """Ask the script. Raises UserError where it would."""
    cfg, world = script.Config(**flags), box.gpus * box.nodes
    run = Run(cfg, 0, world, torch.device("cuda"), **fill(cfg, world, *(flags.get(x, 1) for x in ("tp", "pp", "cp"))))
    run.copy_engine = (flags.get("stage", 0) >= 2 or run.pp > 1) and world > 1 and box.nodes == 1 and box.peer
    train_tp.check_layout(run)
    train_cp.check_length(run)
    ranks = [dataclasses.replace(run, rank=stage * run.tp) for stage in range(run.pp)]
    run, (memory, traffic) = max(((r, script.predict(r)) for r in ranks), key=lambda found: sum(found[1][0].values()))
    shares = HOST_TENSORS * run.master_dtype.itemsize * sum(train_zero.shares(run, held_by(run)))
    host = shares * box.gpus * ("offload" in flags)
    return Layout(name, script.__name__, flags, run, memory, host, *step_seconds(run, traffic, box))


def kinds(world: int) -> list[tuple[str, object, dict]]:
    """Name, script and flags of every form of parallelism on so many ranks, the simple ones first."""
    sizes = [n for n in range(1, world + 1) if world % n == 0]
    orders = [{"schedule": "1f1b"}, {"schedule": "gpipe"}, *({"schedule": "interleaved", "chunks": v} for v in (2, 4))]
    found = [("DDP" if world > 1 else "one card", train_ddp, {})]
    found += [(f"ZeRO-{stage}", train_zero, {"stage": stage}) for stage in (1, 2, 3) if world > 1]
    for tp, pp in sorted(((tp, pp) for tp in sizes for pp in sizes if 1 < tp * pp <= world), key=max):
        for order in orders if pp > 1 else [{}]:
            how = " ".join(map(str, order.values()))
            name = " ".join([f"TP {tp}"] * (tp > 1) + [f"PP {pp} {how}"] * (pp > 1))
            if min(tp, pp) == 1:
                found.append((name, train_tp, {"tp": tp}) if tp > 1 else (name, train_pipe, {"pp": pp, **order}))
            if (min(tp, pp) > 1 or tp * pp < world) and how != "gpipe":
                found.append((f"{name} ZeRO-1", train_3d, {"tp": tp, "pp": pp, **order}))
    found += [(f"CP {n} ZeRO-3", train_cp, {"cp": n, "stage": 3}) for n in sizes if n > 1]
    return found + [(f"ZeRO-{s} offload", train_zero, {"stage": s, "offload": "optimizer"}) for s in (1, 2, 3)]


def best(kind: tuple, cfg: Config, box: Machine) -> Layout | None:
    """Of a form the fastest that fills no more than 90 % of the card, else the smallest. None: not legal here."""
    (name, script, flags), found = kind, []
    given = {key: getattr(cfg, key) for key in ("model", "seq_len", "dtype", "global_batch") if getattr(cfg, key)}
    given |= {} if load_config(cfg.model).vocab_size else {"vocab_size": 257}  # bytes, as in tiny's own corpus
    for micro in (1, 2, 4, 8, 16, 32, 64):
        for again in ("none", "selective", "full"):
            more = {"micro_batch": micro} | ({} if again == "none" else {"recompute": again})
            try:
                found.append(build(name, script, {**given, **flags, **more}, box))
            except UserError:
                break
            found[-1].full = max(found[-1].gb * 1e9 / box.room, found[-1].host / 1e9 / cfg.host_mem)
            if found[-1].full <= FITS:
                break  # to compute more again is slower
        if found and found[-1].full > FITS:
            break  # neither do larger micro-batches
    return max(found, key=lambda x: (x.full <= FITS, x.rate if x.full <= FITS else -x.full, -x.gb), default=None)


def plan(cfg: Config, box: Machine) -> tuple[list[Layout], Layout | None]:
    """Every layout, fastest first, those that do not fit last; and the simplest of the fastest that fit, if any."""
    layouts = [x for kind in kinds(box.gpus * box.nodes) if (x := best(kind, cfg, box))]
    if not layouts:
        raise UserError(f"no layout of {box.gpus * box.nodes} cards divides this model and batch")
    limit = FITS if min(x.full for x in layouts) <= FITS else BARELY
    fastest = max((x.rate for x in layouts if x.full <= limit), default=0)
    close = [x for x in layouts if x.full <= limit and x.rate >= (1 - CLOSE) * fastest]
    take = min(close, key=lambda x: x.run.cfg.recompute != "none", default=None)  # the first without it, if any
    return sorted(layouts, key=lambda x: (x.full > BARELY, -x.rate)), take


# --- what is printed --------------------------------------------------------------------------------------------------


def show(layouts: list[Layout], take: Layout | None, cfg: Config, box: Machine) -> None:
    """The table, why the others are not it, and the command. Raises UserError if none fits."""
    run, world = layouts[0].run, box.gpus * box.nodes
    mfu = flops_per_token(run.model_cfg) / BF16_PEAK[box.kind]  # of one token per second
    alone = best(kinds(1)[0], cfg, dataclasses.replace(box, gpus=1, nodes=1, room=math.inf)).rate
    guess = "" if box.kind == "H200" and world <= 2 else "; times are estimates: measured were one and two H200s"
    print(f"{cfg.model}, {run.cfg.global_batch} x {run.cfg.seq_len} tokens a step, {world} x {box.kind}{guess}")
    columns = "GB sent  s/step      tok/s     each   MFU  efficiency"
    print(f"{'layout':31s}micro  recompute    GB of {box.room / 1e9:.1f}  {columns}")
    for x in layouts:
        each = x.rate / world
        row = f"{x.name:31s}{x.run.cfg.micro_batch:5d}  {x.run.cfg.recompute:9s}{x.gb:6.1f}"
        if x.full <= BARELY:
            row += f" {'barely' if x.full > FITS else 'fits':8s} {x.sent / 1e9:7.1f} {sum(x.seconds.values()):7.2f}"
            row += f" {x.rate:9,.0f} {each:8,.0f} {each * mfu:6.1%} {each / alone:5.0%}"
        else:
            change = smallest_change(sys.modules[x.script].predict, x.run, box.room) or {}
            helps = " ".join(f"{flag_name(key)} {value}" for key, value in change.items()) or "no single flag"
            needs = x.memory if x.gb * 1e9 > BARELY * box.room else {"host memory": x.host}
            term = max(needs, key=needs.get)
            row += f" does not fit: {term} {needs[term] / 1e9:.1f}" + f"; {helps} would do" * (needs is x.memory)
        print(row + f"  host {x.host / 1e9:.0f} GB" * (x.host > 0))
    if take is None:
        raise UserError("nothing fits: the table says what is too large; more cards or larger ones, or host memory")
    if far := [x for x in layouts if x.run.tp > box.gpus]:
        print(f"TP across hosts is at best {far[0].name}: {far[0].rate:,.0f} tok/s, by what the link carries")
    print(f"\ntake {take.name}: the simplest of those within {CLOSE:.0%} of the fastest that fits")
    print("  GB: " + ", ".join(f"{term} {size / 1e9:.1f}" for term, size in take.memory.items() if size))
    print("  s:  " + ", ".join(f"{part} {seconds:.3f}" for part, seconds in take.seconds.items()))
    print("  " + shlex.join(take.command(box)))


def second_host(cfg: Config, box: Machine) -> None:
    """Is the link wide enough, is the run long enough, how often to save (Young/Daly): on one host, and on two."""
    for nodes in (1, 2):
        here = dataclasses.replace(box, nodes=nodes)
        if (take := plan(cfg, here)[1]) is None:
            continue  # of one host, when the two have been asked for
        step, facts = sum(take.seconds.values()), [f"{take.name}, {take.rate:,.0f} tok/s"]
        if nodes > 1:
            endless = dataclasses.replace(here, net_beta=math.inf, net_alpha=0)
            ideal = build(take.name, sys.modules[take.script], take.flags, endless).seconds
            lost, how = 1 - sum(ideal.values()) / step, "measured" if cfg.link else "assumed, see --link"
            verdict = f"the link is {'wide enough' if lost < 0.1 else 'too narrow'} and costs {lost:.0%} of a step"
            facts.append(f"{verdict}, {box.net_beta / 1e9:.1f} GB/s {how}; a rank sends {take.sent / 1e9:.1f} GB")
        if cfg.tokens:
            hours = cfg.tokens / take.rate / 3600
            facts.append(f"{cfg.tokens:g} tokens take {hours / 24:.1f} days, {hours * nodes * box.gpus:,.0f} GPU hours")
        if cfg.mtbf:  # a save stops training while masters and moments go to host memory; the disk comes behind
            save = 12 * n_params(take.run.model_cfg) / (nodes * box.gpus) / box.to_host
            every = math.sqrt(2 * save * cfg.mtbf * 3600 / nodes)
            facts.append(f"a save takes {save:.1f} s: --save-every {every / step:.0f}, one in {every / 60:.0f} min")
        print(f"{nodes} x {box.gpus} cards: " + "; ".join(facts))


def try_here(take: Layout, box: Machine, *more: str) -> dict:
    """Run three steps of it on this machine -> the last row of its log. Raises UserError when it fails."""
    flags = take.command(box)[-len(take.flags) :]
    with tempfile.TemporaryDirectory() as out:
        call = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={box.gpus}"]
        call += [f"{take.script}.py", *flags, f"--out={out}", "--steps=3", "--eval-every=0", "--save-every=0", *more]
        if code := subprocess.run(call, cwd=Path(__file__).parent).returncode:
            raise UserError(f"--try: {take.name} ended with exit code {code}, see above")
        return json.loads(Path(out, "log.jsonl").read_text().splitlines()[-1])


def main() -> None:
    words = ["--try-here" if word == "--try" else word for word in sys.argv[1:]]  # try is a word of Python's
    if {"-h", "--help"} & set(words):
        return print_help(Config, __doc__)
    cfg = parse_flags(Config, words)
    box = machine_of(cfg)
    layouts, take = plan(cfg, box)
    show(layouts, take, cfg, box)
    if box.nodes > 1 or cfg.tokens or cfg.mtbf:
        second_host(cfg, box)
    if cfg.try_here:
        row = try_here(take, box)
        print(f"predicted {take.rate:,.0f} tok/s and {take.gb:.1f} GB on the fullest rank; ", end="")
        print(f"measured {row['tok_s']:,.0f} tok/s and {row['peak_gb']:.1f} GB on rank 0")


if __name__ == "__main__":
    run_cli(main)
