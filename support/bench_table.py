"""Behind bench.sh: which cells there are, the row of a finished one, why one failed, the table, the picture.

    python -m support.bench_table table docs/results/scaling-6b-64-nvidia-h200.json
    python -m support.bench_table picture docs/results/scaling-6b-64-nvidia-h200.json docs/scaling.png
    python -m support.bench_table compute-only --model 6b --global-batch 64 --steps 8    # forward, backward, no update

A cell's figure is the median over its steps after the first WARM_UP, which compile and fill caches; its spread is the
fastest and the slowest of them. "vs one GPU" is tokens/s/GPU divided by that of one GPU. Where the model does not fit
one GPU there are two such figures, each unfair in its own way: one GPU that never updates (too fast a baseline), and
one with its optimizer state in host memory (too slow). "per added GPU" is what each GPU beyond the strategy's
count before it brought, as a share of what one GPU does alone. Shares of time are the first rank's.
"""

import json
import math
import os
import re
import shlex
import statistics
import sys
import zlib
from pathlib import Path

from support.flags import Config, UserError, run_cli

WARM_UP = 3
BASELINES = {"single": "one GPU", "compute-only": "one GPU, compute only", "zero2-offload": "one GPU with offload"}
TIERS = ("zero2 ddp zero3", "tp pipe 3d cp", "zero1 zero2-offload")  # most important first
SCRIPTS = {
    "single": "train_ddp.py",
    "ddp": "train_ddp.py",
    "zero1": "train_zero.py --stage 1",
    "zero2": "train_zero.py --stage 2",
    "zero3": "train_zero.py --stage 3",
    "zero2-offload": "train_zero.py --stage 2 --offload optimizer",
    "tp": "train_tp.py",
    "pipe": "train_pipe.py",
    "3d": "train_3d.py --tp 2 --pp 2",
    "cp": "train_cp.py",
    "compute-only": "-m support.bench_table compute-only",
}
STEPS = "--steps 8 --eval-every 0 --save-every 0 --log-every 1 --lr 1e-5"  # so low that the losses stay together


def plan(flags: list[str]) -> None:
    """What bench.sh is to do: a line "rows file, picture, logs", then by cell "action, strategy, GPUs, command".

    Tabs between. Actions: run; kept, it has its row; spare, run it if the model does not fit one GPU. Raises UserError.
    """
    import torch

    cards = torch.cuda.device_count()
    hardware = torch.cuda.get_device_name() if cards else "cpu"
    default = {"MODEL": "6b" if cards else "tiny", "GPUS": " ".join(str(n) for n in (1, 2, 4, 8) if n <= (cards or 2))}
    default |= {"GLOBAL_BATCH": "64", "MICRO": "", "OUT": "runs/bench", "STRATEGIES": " ".join(TIERS)}
    model, gpus, batch, micro, out, wanted = (os.environ.get(key) or value for key, value in default.items())
    wanted = wanted.split()
    if unknown := [name for name in wanted if name not in SCRIPTS]:
        raise UserError(f"STRATEGIES has {unknown[0]}; allowed are {' '.join(SCRIPTS)}")
    if bad := [n for n in gpus.split() if not re.fullmatch("[1-9][0-9]*", n) or cards and int(n) > cards]:
        raise UserError(f"GPUS has {bad[0]}; allowed are whole numbers" + f" up to {cards}" * (cards > 0))
    if bad := [word for word in micro.split() if not re.fullmatch(f"(({'|'.join(SCRIPTS)})=)?[1-9][0-9]*", word)]:
        raise UserError(f"MICRO has {bad[0]}; allowed are 4 or STRATEGY=4")
    micro = {name: n for name, _, n in (word.rpartition("=") for word in micro.split())}
    for name in [name for name in wanted if SCRIPTS[name][0] != "-" and not Path(SCRIPTS[name].split()[0]).exists()]:
        print(f"left out  {name}: there is no {SCRIPTS[name].split()[0]} here", file=sys.stderr)
        wanted.remove(name)
    counts = sorted({int(n) for n in gpus.split()}, reverse=True)
    cells = [(name, 1) for name in BASELINES if 1 in counts]  # what efficiency is measured against comes first
    cells += [(name, n) for tier in TIERS for n in counts for name in tier.split() if name in wanted and n > 1]

    results = Path("docs/results" if cards else out)
    path = f"scaling-{Path(model).stem}-{batch}-{hardware.lower().replace(' ', '-')}"
    path = results / (path + f"-{zlib.crc32(shlex.join(flags).encode())}" * bool(flags) + ".json")
    for folder in (results, Path(out)):
        folder.mkdir(parents=True, exist_ok=True)
    print(path, "docs/scaling.png" if cards else results / "scaling.png", f"{out}/{Path(model).stem}", sep="\t")
    if not cards:
        print("no GPU: these figures mean nothing about speed, they only show that every cell runs", file=sys.stderr)
    done = [row["command"] for row in read_rows(path)]
    for name, n in cells:
        if name == "3d" and n < 4:
            print(f"left out  3d on {n}: it needs 4 or more", file=sys.stderr)
            continue
        words = [*SCRIPTS[name].split(), "--model", model, "--global-batch", batch]
        if size := micro.get(name, micro.get("")):
            words += ["--micro-batch", size]
        words += ["--device", "cuda" if cards else "cpu", *STEPS.split(), *flags]
        command = ("python " if n == 1 else f"torchrun --nproc_per_node={n} ") + shlex.join(words)
        action = "kept" if command in done else "run" if name in [*wanted, "single"] else "spare"
        print(action, name, n, command, sep="\t")


def why_failed(log: str, code: str, limit: str) -> None:
    """One line about a run that ended with this code; if memory ran out, from what --explain printed (LOG.explain)."""
    import torch

    text, explained = Path(log).read_text(errors="replace"), Path(log + ".explain")
    # the first error is the cause
    error = re.search(r"^(rank \d+: )?(error: |[\w.]*(Error|Exception|Interrupt)\b).*", text, re.M)
    if explained.exists():
        gb = re.search(r"^memory of one rank, GB: ([\d.]+)", explained.read_text(errors="replace"), re.M)
        card = torch.cuda.get_device_properties(0).total_memory / 1e9 if torch.cuda.is_available() else 0
        print(f"out of memory: {gb[1] if gb else '?'} GB predicted, the card has {card:.1f} GB")
    elif code in ("124", "137"):
        print(f"it took more than LIMIT={limit} s")
    else:
        print(f"exit code {code}: {error[0][:200] if error else 'no error in its log'}")


def read_rows(path: str | Path) -> list[dict]:
    return json.loads(Path(path).read_text()) if Path(path).exists() else []


def add_row(path: str, strategy: str, gpus: int, out: str, command: str) -> None:
    """Add the row of the finished run in folder `out`, replacing the same command's older one."""
    facts = json.loads(Path(out, "config.json").read_text())
    cfg = facts["config"]
    steps = [json.loads(line) for line in Path(out, "log.jsonl").read_text().splitlines()]
    rows = steps[WARM_UP:] or sys.exit(f"{out}/log.jsonl has {len(steps)} steps, more than {WARM_UP} are needed")
    ms = [row["step_ms"] for row in rows]
    tok_s = rows[0]["tokens"] / statistics.median(ms) * 1e3
    model_parallel = math.prod((cfg[key] or gpus) for key in ("tp", "pp", "cp") if key in cfg)  # 0: all ranks
    row = {key: cfg[key] for key in ("model", "global_batch", "seq_len", "micro_batch", "dtype")}
    row |= {"strategy": strategy, "gpus": gpus, "command": command, "steps": len(steps)}
    row |= {
        "accum": cfg["global_batch"] * model_parallel // (cfg["micro_batch"] * gpus),
        "tok_s": tok_s,
        "tok_s_gpu": tok_s / gpus,
        "mfu": statistics.median(row["mfu"] for row in rows) if rows[0]["mfu"] else None,
        "peak_gb": max(row["peak_gb"] for row in steps),
        "step_ms": statistics.median(ms),
        "step_ms_min": min(ms),
        "step_ms_max": max(ms),
        "exposed_comm": sum(row["communication_ms"] for row in rows) / sum(ms),
        "bubble": sum(row["bubble_ms"] for row in rows) / sum(ms),
        "data_wait": sum(row["data_ms"] for row in rows) / sum(ms),
        "final_loss": steps[-1]["loss"],
    }
    row |= {key: facts[key] for key in ("hardware", "torch", "commit", "date")}
    kept = [other for other in read_rows(path) if other["command"] != command]
    temporary = Path(path).with_suffix(".tmp")
    temporary.write_text("[\n" + ",\n".join(json.dumps(r) for r in [*kept, row]) + "\n]\n")
    temporary.replace(path)  # a run that is killed leaves the old file whole


def per_added_gpu(row: dict, before: list[dict], one: float) -> float | None:
    """What each GPU of `row` beyond the largest count below it in `before` brought, as a share of `one` (tokens/s)."""
    if fewer := [r for r in before if r["gpus"] < row["gpus"]]:
        last = max(fewer, key=lambda r: (r["gpus"], r["tok_s"]))
        return (row["tok_s"] - last["tok_s"]) / (row["gpus"] - last["gpus"]) / one
    return None


def best_value(rows: list[dict], one: float) -> str:
    """The count up to which an added GPU brings half of one or more, if at each count the fastest strategy is taken."""
    fastest = {r["gpus"]: r for r in sorted(rows, key=lambda r: r["tok_s"]) if r["strategy"] != "compute-only"}
    taken: list[dict] = []
    for n in sorted(fastest):
        if taken and per_added_gpu(fastest[n], taken, one) < 0.5:
            break
        taken.append(fastest[n])
    strategy, n = (taken[-1]["strategy"], taken[-1]["gpus"]) if taken else ("none", 0)
    return f"best value: {n} GPUs ({strategy}): up to there an added GPU brings half of one or more"


def print_table(path: str) -> None:
    """Markdown. Exit code 1 when the final losses of the strategies disagree."""
    order = {"single": 0, "compute-only": 1}
    rows = sorted(read_rows(path), key=lambda r: (r["gpus"], order.get(r["strategy"], 2), r["strategy"]))
    if not rows:
        sys.exit(f"{path}: nothing measured yet")
    alone = sorted((r for r in rows if r["gpus"] == 1 and r["strategy"] in BASELINES), key=lambda r: r["tok_s"])
    one = {r["strategy"]: r["tok_s"] for r in alone}  # the best there is, if several micro-batches were tried
    one_gpu = one.get("single") or max(one.values(), default=None)
    baselines = ["single"] if "single" in one else list(one)
    lines = [["GPUs", "strategy", "micro x accum", "tok/s", "tok/s/GPU", *(f"vs {BASELINES[b]}" for b in baselines)]]
    lines[0] += ["per added GPU", "MFU", "peak GB", "step ms (min-max)", "exposed comm", "bubble", "data wait"]
    lines[0] += ["final loss"]
    for r in rows:
        before = [other for other in rows if other["strategy"] in (r["strategy"], "single")]
        added = per_added_gpu(r, before, one_gpu) if one_gpu else None
        lines.append([str(r["gpus"]), r["strategy"], f"{r['micro_batch']} x {r['accum']}", f"{r['tok_s']:,.0f}"])
        lines[-1] += [f"{r['tok_s_gpu']:,.0f}", *(f"{r['tok_s_gpu'] / one[name]:.1%}" for name in baselines)]
        lines[-1] += ["-" if share is None else f"{share:.1%}" for share in (added, r["mfu"])]
        lines[-1] += [f"{r['peak_gb']:.1f}", f"{r['step_ms']:.0f} ({r['step_ms_min']:.0f}-{r['step_ms_max']:.0f})"]
        lines[-1] += [f"{r[key]:.1%}" for key in ("exposed_comm", "bubble", "data_wait")]
        lines[-1] += [f"{r['final_loss']:.4f}" if r["strategy"] != "compute-only" else "-"]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    lines.insert(1, ["-" * width for width in widths])
    print("\n".join("| " + " | ".join(cell.rjust(width) for cell, width in zip(line, widths)) + " |" for line in lines))
    losses = [r["final_loss"] for r in rows if r["strategy"] != "compute-only"] or [0.0]
    # after a few steps rounding is all that separates the strategies
    apart, allowed = max(losses) - min(losses), 1e-4 if rows[0]["dtype"] in ("float32", "float64") else 2e-2
    if apart > allowed:
        sys.exit(f"FAILED  the final losses differ by {apart:.2g}, allowed is {allowed:g}: not the same training")
    print(f"final losses agree within {apart:.1g} (allowed {allowed:g})")
    batch = f"{rows[-1]['global_batch']} x {rows[-1]['seq_len']} tokens a step"
    print(f"{Path(rows[-1]['model']).stem}, {batch}; {rows[-1]['hardware']}")
    print(best_value(rows, one_gpu) if one_gpu else "best value: unknown, one GPU has no figure")


def draw(path: str, picture: str) -> None:
    """Tokens/s over GPUs, a line per strategy, and the straight line of the best one-GPU figure."""
    try:
        import matplotlib
    except ImportError:
        sys.exit("no picture: it needs matplotlib (pip install matplotlib)")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = sorted(read_rows(path), key=lambda r: r["gpus"])
    figure, axes = pyplot.subplots(figsize=(7, 5))
    for strategy in dict.fromkeys(r["strategy"] for r in rows):
        mine = [r for r in rows if r["strategy"] == strategy]
        axes.plot([r["gpus"] for r in mine], [r["tok_s"] for r in mine], "o-", label=strategy)
    counts = sorted({r["gpus"] for r in rows})
    if best := next((r for name in BASELINES for r in rows if r["strategy"] == name and r["gpus"] == 1), None):
        axes.plot(counts, [best["tok_s"] * n for n in counts], "k--", lw=1, label=f"{BASELINES[best['strategy']]} x N")
    title = f"{Path(rows[-1]['model']).stem}, {rows[-1]['hardware']}"
    axes.set(xlabel="GPUs", ylabel="tokens/s", title=title, ylim=(0, None), xticks=counts)
    axes.legend()
    figure.savefig(picture, dpi=120, bbox_inches="tight")


def compute_only(cfg, group=None) -> list[dict]:
    """Forward and backward on one GPU, gradients dropped: 4 bytes per parameter in bf16 instead of 18."""
    import torch

    from model import GPT, flops_per_token, init_values, params
    from support.meter import Meter, at
    from support.start import own_folder, start

    if cfg.explain:
        raise UserError("compute-only has nothing to explain: --explain is for the training scripts")
    run = start(cfg, __file__, group)
    own_folder(run)
    cfg = run.cfg
    model = GPT(run.model_cfg, cfg.recompute)
    for name, param in params(run.model_cfg).items():
        weight = torch.empty(param.shape, dtype=run.dtype, device=run.device)
        init_values(weight.view(-1), name, 0, run.model_cfg, cfg.seed)
        model.set_param(name, weight)
    model.set_buffers(run.dtype, run.device)
    if cfg.compile:
        model.compile_blocks()
    shape = (cfg.micro_batch, cfg.seq_len)
    x = torch.arange(math.prod(shape), device=run.device).view(shape) % cfg.vocab_size
    with Meter(run, flops_per_token(run.model_cfg)) as meter:
        for step in range(cfg.steps):
            for _ in range(run.accum):
                with at("forward"):
                    loss = model(x, x)[0] / x.numel()
                with at("backward"):
                    loss.backward()
                model.zero_grad(set_to_none=True)
            meter.log(step, loss.item(), 0.0, 0.0, cfg.global_batch * cfg.seq_len, 1.0, False)
    return meter.rows


def main() -> None:
    match sys.argv[1:]:
        case ["compute-only", *_]:
            from support.start import run_script

            del sys.argv[1]
            run_script(compute_only, None, Config, __doc__)
        case ["plan", *flags]:
            plan(flags)
        case ["row", path, strategy, gpus, out, command]:
            add_row(path, strategy, int(gpus), out, command)
        case ["why", log, code, limit]:
            why_failed(log, code, limit)
        case ["table", path]:
            print_table(path)
        case ["picture", path, picture]:
            draw(path, picture)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    run_cli(main)
