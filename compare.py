"""Two runs: the first step at which they part, and what is therefore at fault. Several: their curves in one picture.

    python compare.py runs/A runs/B                         # exit code 1 if they differ
    python compare.py runs/A runs/B --plot losses.png       # loss curves, and where each step's time went

It runs nothing again: everything is in the runs' log.jsonl and config.json. A step's facts depend on each other in one
order, so the first that differs tells where to look:

    samples      other windows were read: data (corpus, seed, batch or position)
    lr           the same data, another schedule: flags
    loss         the same data, another forward pass: in the first step initial weights, dropout or arithmetic; later,
                 if loss and norm were equal in the step before, the update: optimizer, clipping, replicas that drift
    grad_norm    the same loss, another gradient: the backward pass, or a sum over ranks

Losses of two layouts are never equal in every bit. Within --tolerance they count as equal: by default 1e-9 of their
size in float64, 1e-5 in float32 (over the first ten steps; later it is chaos), 2e-2 in bf16 and fp16.
"""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

from support.flags import UserError, parse_flags, print_help, run_cli

TOLERANCE = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-2}
ORDER = {  # field -> what is at fault when it is the first to differ
    "samples": "data: the ranks read other windows. Look at corpus, seed, batch and position (`python data.py show`)",
    "lr": "flags: the same data under another schedule",
    "loss": "arithmetic of the forward pass, or the weights it began with",
    "grad_norm": "communication or arithmetic of the backward pass: the loss was the same, its gradient is not",
}


@dataclass
class Config:
    """compare.py's flags; the comment behind a field is its --help text."""

    tolerance: float = 0.0  # relative difference that still counts as equal [by the runs' dtype]
    plot: str = ""  # write a picture here: losses over steps, and the parts of the step time


def read_run(folder: str) -> tuple[dict, dict[int, dict]]:
    """config.json, and the rows of log.jsonl by step. Raises UserError."""
    path = Path(folder)
    try:
        facts = json.loads((path / "config.json").read_text())
        rows = [json.loads(line) for line in (path / "log.jsonl").read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} is no run folder: {error}") from None
    if not rows:
        raise UserError(f"{folder}/log.jsonl has no steps")
    return facts, {row["step"]: row for row in rows}


def differ(a: object, b: object, tolerance: float) -> bool:
    """Whether two logged numbers are not the same. None: it was not finite."""
    if a is None or b is None or tolerance == 0:
        return a != b
    return abs(a - b) > tolerance * max(abs(a), abs(b))


def first_difference(a: dict[int, dict], b: dict[int, dict], tolerance: float) -> tuple[int, str, str] | None:
    """Step, field and verdict of the first difference in the steps that both have; None: there is none."""
    before = None
    for step in sorted(a.keys() & b.keys()):
        for field, verdict in ORDER.items():
            exact = field in ("samples", "lr")
            if differ(a[step].get(field), b[step].get(field), 0 if exact else tolerance):
                if field == "loss" and before is not None:
                    verdict = (
                        f"the update of step {before}: loss and norm were the same there. Optimizer, clipping, or "
                        "replicas that are not the same any more"
                    )
                return step, field, verdict
        before = step
    return None


def compare(names: list[str], runs: list[tuple[dict, dict[int, dict]]], tolerance: float) -> bool:
    """Print what differs between two runs; whether their steps do."""
    (facts_a, a), (facts_b, b) = runs
    for key in ("commit", "code", "torch", "hardware", "world_size", "command"):
        if facts_a.get(key) != facts_b.get(key):
            print(f"{key}: {facts_a.get(key)} | {facts_b.get(key)}")
    flags_a, flags_b = facts_a["config"], facts_b["config"]
    for key in sorted(flags_a.keys() & flags_b.keys() - {"out"}):
        if flags_a[key] != flags_b[key]:
            print(f"--{key.replace('_', '-')}: {flags_a[key]} | {flags_b[key]}")
    both = sorted(a.keys() & b.keys())
    if not both:
        raise UserError(f"{' and '.join(names)} have no step in common: {min(a)}-{max(a)} and {min(b)}-{max(b)}")
    found = first_difference(a, b, tolerance)
    spread = max(
        (abs(a[s]["loss"] - b[s]["loss"]) for s in both if None not in (a[s]["loss"], b[s]["loss"])), default=0
    )
    print(f"{len(both)} steps in common ({both[0]} to {both[-1]}); largest difference of the loss {spread:.3g}")
    if found is None:
        print(f"no difference beyond {tolerance:g}")
        return False
    step, field, verdict = found
    print(f"step {step}: {field} {a[step].get(field)} | {b[step].get(field)}\n{verdict}")
    return True


def picture(names: list[str], runs: list[tuple[dict, dict[int, dict]]], path: str) -> None:
    """Losses over steps, and the mean step's parts in milliseconds."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        raise UserError("--plot needs matplotlib: pip install matplotlib") from None
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    bottoms = [0.0] * len(runs)
    for name, (_, rows) in zip(names, runs):
        losses = [math.nan if row["loss"] is None else row["loss"] for row in rows.values()]
        left.plot(list(rows), losses, label=Path(name).name, linewidth=1)
    first = next(iter(runs[0][1].values()))
    for part in (key for key in first if key.endswith("_ms") and key != "step_ms"):
        warm = [list(rows.values())[min(2, len(rows) - 1) :] for _, rows in runs]
        means = [sum(row.get(part, 0) for row in rows) / len(rows) for rows in warm]
        right.bar([Path(name).name for name in names], means, bottom=bottoms, label=part.removesuffix("_ms"))
        bottoms = [a + b for a, b in zip(bottoms, means)]
    left.set(xlabel="step", ylabel="loss")
    right.set(ylabel="ms per step")
    left.legend()
    right.legend(fontsize="small")
    figure.savefig(path, dpi=120, bbox_inches="tight")
    print(f"picture: {path}")


def main() -> None:
    words = sys.argv[1:]
    folders = []
    while words and not words[0].startswith("--"):
        folders.append(words.pop(0))
    if not folders or "--help" in words:
        return print_help(Config, __doc__)
    cfg = parse_flags(Config, words)
    runs = [read_run(folder) for folder in folders]
    if cfg.plot:
        picture(folders, runs, cfg.plot)
    if len(runs) == 2:
        tolerance = cfg.tolerance or max(TOLERANCE[facts["config"]["dtype"]] for facts, _ in runs)
        sys.exit(compare(folders, runs, tolerance))
    if not cfg.plot:
        raise UserError(f"{len(folders)} run folder(s): two are compared, --plot FILE draws any number")


if __name__ == "__main__":
    run_cli(main)
