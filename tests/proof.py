"""The proof: every layout trains the model that one process of plain torch trains, and goes on from every other's save.

    python tests/proof.py            # `make proof`: all layouts, 50 steps, any to any; writes docs/PROOF.md
    python tests/proof.py --quick    # a few layouts and steps, any to any of four; writes nothing

On CPU in float64, with clipping active, in one set of 8 processes of which groups of 1, 2, 3, 4 and 8 train in turn.
Each run also compares the bytes and calls it counted with those it predicted. Exit code 1 if anything is out of bounds.
"""

import argparse
import contextlib
import datetime
import importlib
import importlib.metadata
import io
import os
import platform
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from harness import ROOT, final_weights, run_ranks, stored, toy_files, train
from reference import CLIP, reference

from support.resume import progress, resume, rng_state
from support.start import git_commit

BOUND = 1e-9
MODEL = dict(n_layer=6, n_head=8, n_kv_head=4)  # 6 blocks: three stages of two chunks; 4 KV heads: tp 4
KINDS = {"plain": {}, "tied, masked": {"data": "masked", "tie": True}}  # what the reference trains, too


class Layout(NamedTuple):
    """How many ranks train, which script they run, and the flags that make the layout."""

    ranks: int
    script: str
    flags: dict


def all_layouts() -> dict[str, Layout]:
    """Every strategy at every size that is proved. 12 sequences a step in at least two passes of each rank."""
    found = {"one process": Layout(1, "train_ddp", {"micro_batch": 3})}
    for n in (2, 3):
        for how in ("torch", "ring", "central"):
            found[f"DDP, all_reduce {how}, {n}"] = Layout(n, "train_ddp", {"allreduce": how, "micro_batch": 2})
    for stage in (1, 2, 3):
        for offload in ("none", "optimizer"):
            for n in (2, 3):
                name = f"ZeRO-{stage}{', offload' * (offload != 'none')}, {n}"
                found[name] = Layout(n, "train_zero", {"stage": stage, "offload": offload, "micro_batch": 2})
    for cp, dp, stage in ((2, 1, 1), (2, 2, 2), (4, 1, 3)):
        flags = {"cp": cp, "stage": stage, "micro_batch": 3}
        found[f"CP {cp}" + f" x DP {dp}" * (dp > 1) + f", ZeRO-{stage}"] = Layout(cp * dp, "train_cp", flags)
    for tp, dp in ((2, 1), (4, 1), (2, 2)):
        found[f"TP {tp}" + f" x DP {dp}" * (dp > 1)] = Layout(tp * dp, "train_tp", {"tp": tp, "micro_batch": 3})
    for schedule in ("gpipe", "1f1b", "interleaved"):
        for n in (2, 3):
            found[f"{schedule}, {n}"] = Layout(n, "train_pipe", {"schedule": schedule, "micro_batch": 2})
    for tp, pp, dp in ((2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2)):
        flags = {"tp": tp, "pp": pp, "micro_batch": 3}
        found[f"3D, TP {tp} x PP {pp} x DP {dp}"] = Layout(tp * pp * dp, "train_3d", flags)
    name = "3D, TP 2 x PP 2 x DP 2, interleaved, no ZeRO"
    found[name] = Layout(8, "train_3d", {"schedule": "interleaved", "zero": 0, "micro_batch": 1})
    return found


TO_AND_FROM = [
    "one process", "DDP, all_reduce ring, 3", "ZeRO-1, 3", "ZeRO-2, 2", "ZeRO-2, offload, 3", "ZeRO-3, 3",
    "ZeRO-3, offload, 2", "TP 4", "TP 2 x DP 2", "gpipe, 2", "1f1b, 3", "interleaved, 3", "3D, TP 2 x PP 2 x DP 2",
    "CP 2 x DP 2, ZeRO-2",
]  # fmt: skip
QUICK = ["DDP, all_reduce torch, 3", "ZeRO-3, 3", "CP 4, ZeRO-3", "TP 2", "interleaved, 2", "3D, TP 2 x PP 2 x DP 2"]


# --- in the processes -------------------------------------------------------------------------------------------------


def largest(values: Iterable[float]) -> float:
    """NaN if there is one, which max() may pass over."""
    return float(torch.tensor([*values], dtype=torch.float64).max())


def apart(a: dict, b: dict, relative: bool = False) -> float:
    """Largest difference of any element of two sets of tensors; relative: to the largest element of its tensor."""
    scale = {name: b[name].abs().max() if relative else 1 for name in b}
    return largest(float((a[name] - b[name]).abs().max() / scale[name]) for name in a.keys() | b.keys())


def rows_apart(rows: list[dict], others: list[dict], key: str) -> float:
    return largest(abs(a[key] - b[key]) for a, b in zip(rows, others, strict=True))


def follow(rank: int, folder: str, group: dist.ProcessGroup, name: str, layout: Layout, kind: str, steps: int) -> dict:
    """How far a run is from the reference: its rows on this rank, its final state on the group's first."""
    rows, state = torch.load(f"{folder}/reference {kind}")
    flags = layout.flags | KINDS[kind] | {"steps": steps, "data": f"{folder}/{KINDS[kind].get('data', 'plain')}"}
    out = f"{name} ({kind})"
    ours = train(rank, layout.script, folder, {out: flags}, group)[out]
    found = {"loss": rows_apart(ours, rows, "loss"), "norm": rows_apart(ours, rows, "grad_norm")}
    if dist.get_rank(group) == 0:
        final = final_weights(Path(folder, out))
        weights, moments = [], []
        for tensors in (final, state):
            moments.append({n: t for n, t in tensors.items() if n.startswith("exp_avg")})
            weights.append({n: t for n, t in tensors.items() if not n.startswith("exp_avg")})
        found |= {"weights": apart(*weights), "moments": apart(*moments, relative=True)}
    return found


SAVED = 5  # steps before the save that all layouts load, and after it
TIED = {"tie": True, "dropout": 0.1, "steps": 2 * SAVED, "save_every": SAVED, "keep_last": 9}


def save_again(run, saver, strategy, scaler) -> tuple[int, int]:
    """In the place of a script's resume(): what was loaded is saved under this layout before anything else happens."""
    done, updates = resume(run, saver, strategy, scaler)
    if done:
        saver.save(done, strategy.pieces(), progress(run, updates, scaler), rng=rng_state(run))
        saver.wait()
    return done, updates


def begin(rank: int, folder: str, group: dist.ProcessGroup, name: str, layout: Layout) -> list[float]:
    """Train on both sides of a save; the losses after it."""
    rows = train(rank, layout.script, folder, {f"from {name}": layout.flags | TIED}, group)[f"from {name}"]
    return [row["loss"] for row in rows[SAVED:]]


def go_on(rank: int, folder: str, group: dist.ProcessGroup, name: str, layout: Layout, source: str) -> dict:
    """Load what layout `source` has saved, save it again, and train on.

    The losses; on the group's first rank also the names of tensors of which any bit has changed.
    """
    saved, out = Path(folder, f"from {source}", "ckpt", f"step_{SAVED:08d}"), f"{source} to {name}"
    module = importlib.import_module(layout.script)
    module.resume = save_again
    rows = train(rank, layout.script, folder, {out: layout.flags | TIED | {"resume": str(saved)}}, group)[out]
    module.resume = resume
    found = {"losses": [row["loss"] for row in rows]}
    if dist.get_rank(group) == 0:
        a, b = stored(saved), stored(Path(folder, out, "ckpt", saved.name))
        found["changed"] = [n for n in a.keys() | b.keys() if n not in a or n not in b or not torch.equal(a[n], b[n])]
        shutil.rmtree(Path(folder, out))
    return found


def in_groups(rank: int, groups: dict[int, list], folder: str, tasks: list[tuple]) -> dict[tuple, dict]:
    """Deal tasks, (function, layout's name, *arguments) each, over the groups of their size; this rank's results."""
    found, layouts = {}, all_layouts()
    for n, of_n in groups.items():
        mine, queue = rank // n, [task for task in tasks if layouts[task[1]].ranks == n]
        for task in queue[mine :: len(of_n)] if mine < len(of_n) else []:
            function, name, *more = task
            found[task] = function(rank, folder, of_n[mine], name, layouts[name], *more)
            if dist.get_rank(of_n[mine]) == 0:
                with open(f"{folder}/done", "a") as file:
                    file.write(f"{function.__name__.replace('_', ' ')}: {', '.join(map(str, task[1:]))}\n")
    return found


def prove(rank: int, folder: str, names: list[str], ends: list[str], steps: int) -> list[dict[tuple, dict]]:
    """What each of the processes does: all runs against the reference, saves, loads of each save under each layout."""
    size = dist.get_world_size()
    groups = {
        n: [dist.new_group([*range(a, a + n)]) for a in range(0, size - n + 1, n)]
        for n in sorted({layout.ranks for layout in all_layouts().values()})
    }
    found = [in_groups(rank, groups, folder, [(follow, name, kind, steps) for name in names for kind in KINDS])]
    found.append(in_groups(rank, groups, folder, [(begin, name) for name in ends]))
    dist.barrier()  # what is loaded now was saved by others
    found.append(in_groups(rank, groups, folder, [(go_on, b, a) for a in ends for b in ends]))
    return found


# --- the tables -------------------------------------------------------------------------------------------------------


def of_all_ranks(results: list[dict]) -> dict[tuple, list[dict]]:
    """Task -> what its ranks have found."""
    return {task: [r[task] for r in results if task in r] for task in dict.fromkeys(t for r in results for t in r)}


def follow_table(results: list[dict], names: list[str]) -> tuple[list[str], bool]:
    """Lines of the first table: a layout's largest differences over ranks, steps and kinds."""
    lines = ["| layout | ranks | loss | gradient norm | weights | moments |", "|---|---|---|---|---|---|"]
    found, fine = of_all_ranks(results), True
    for name in names:
        of_ranks = [one for task, each in found.items() if task[1] == name for one in each]
        worst = [largest(one.get(key, 0.0) for one in of_ranks) for key in ("loss", "norm", "weights", "moments")]
        bad = not all(value <= BOUND for value in worst)
        fine = fine and not bad
        cells = " | ".join(f"{value:.1e}" for value in worst)
        lines.append(f"| {name}{' **OUT OF BOUNDS**' * bad} | {all_layouts()[name].ranks} | {cells} |")
    return lines, fine


def any_table(begun: list[dict], gone_on: list[dict], ends: list[str]) -> tuple[list[str], bool]:
    """Lines of the second table: from the row's layout to the column's."""
    straight, found, fine = of_all_ranks(begun), of_all_ranks(gone_on), True
    lines = [
        "| saved under | " + " | ".join(str(i + 1) for i in range(len(ends))) + " |",
        "|---" * (len(ends) + 1) + "|",
    ]
    for i, a in enumerate(ends):
        cells = []
        for b in ends:
            of_ranks = found[go_on, b, a]
            changed = [name for one in of_ranks for name in one.get("changed", ())]
            expected = straight[begin, a][0]
            worst = largest(abs(x - y) for one in of_ranks for x, y in zip(one["losses"], expected, strict=True))
            fine = fine and not changed and worst <= BOUND
            wide = "" if worst <= BOUND else " **OUT OF BOUNDS**"
            cells.append(("**NO** " if changed else "yes ") + f"{worst:.0e}{wide}")
        lines.append(f"| {i + 1} {a} | " + " | ".join(cells) + " |")
    return lines, fine


def write_section(title: str, lines: list[str]) -> None:
    """Put a section into docs/PROOF.md, in the place of the one of the same title; others stay."""
    path = ROOT / "docs" / "PROOF.md"
    text = path.read_text() if path.exists() else "# The proof\n\nWritten by `make proof` and `make mutants`.\n"
    section = f"\n## {title}\n\n" + "\n".join(lines) + "\n"
    found = re.search(rf"\n## {re.escape(title)}\n.*?(?=\n## |\Z)", text, re.S)
    path.write_text(text[: found.start()] + section + text[found.end() :] if found else text + section)


def origin(command: str, seconds: float) -> str:
    """Where a table comes from: command, date, commit, time, cores, versions."""
    cores, transformers = len(os.sched_getaffinity(0)), importlib.metadata.version("transformers")
    return (
        f"`{command}`, {datetime.date.today()}, commit {git_commit()}, {seconds / 60:.1f} minutes on {cores} cores; "
        f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers}."
    )


def watch(path: Path, ended: threading.Event) -> None:
    """Print the lines of a growing file: the processes' own output is caught."""
    path.touch()
    with open(path) as file:
        while not ended.wait(1):
            sys.stderr.write(file.read())


def run_proof(names: list[str], ends: list[str], steps: int) -> tuple[list[str], list[str], bool]:
    """Both tables, and whether all is within bounds."""
    torch.set_num_threads(1)  # of the reference: small matrices
    size = max(all_layouts()[name].ranks for name in names + ends)
    with tempfile.TemporaryDirectory() as folder:
        toy_files(Path(folder), **MODEL)
        for kind, flags in KINDS.items():
            data = f"{folder}/{flags.get('data', 'plain')}"
            rows, state = reference(Path(folder, "toy.json"), data, steps, flags.get("tie", False))
            assert any(row["grad_norm"] > CLIP for row in rows), "nothing was clipped"
            torch.save((rows, state), f"{folder}/reference {kind}")
        ended = threading.Event()
        threading.Thread(target=watch, args=(Path(folder, "done"), ended), daemon=True).start()
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                results = run_ranks(size, prove, folder, names, ends, steps, timeout=3600)
        finally:
            ended.set()
    first, begun, gone_on = zip(*results)
    (follows, right), (goes_on, equal) = follow_table(first, names), any_table(begun, gone_on, ends)
    return follows, goes_on, right and equal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few layouts and steps; writes nothing")
    quick = parser.parse_args().quick
    names, ends, steps = (QUICK, QUICK[1:], 6) if quick else (list(all_layouts()), TO_AND_FROM, 50)
    start = time.time()
    follows, goes_on, fine = run_proof(names, ends, steps)
    print("\n".join([*follows, "", *goes_on]))
    if not quick:
        about = origin("make proof", time.time() - start)
        write_section("Every layout trains the same model", [about, "", FOLLOWS.format(steps=steps), "", *follows])
        write_section("Any layout goes on from any", [about, "", GOES_ON, "", *goes_on])
    sys.exit(0 if fine else 1)


FOLLOWS = f"""Largest difference from one process of plain torch (tests/reference.py) in {{steps}} steps on CPU in
float64, clipped at {CLIP}, over all steps and ranks, of two runs: plain, and tied with masked targets. Moments relative
to the largest of their tensor. Allowed: {BOUND:g}."""
GOES_ON = f"""Saved under the row's layout after {SAVED} steps (tied, dropout), loaded under the column's, saved
again: is every tensor bit-equal? Then the largest difference of the next {SAVED} losses from the row's own run's."""

if __name__ == "__main__":
    main()
