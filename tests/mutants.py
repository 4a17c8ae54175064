"""Is each fault seen? Small faults, one at a time, in a copy of the tree, and the test that should turn red.

    python tests/mutants.py              # `make mutants`: all of them; writes its table into docs/PROOF.md
    python tests/mutants.py padding      # those whose name holds this word; writes nothing

Every test is first run on the tree as it is, where it must be green. Exit code 1 if a fault is not seen.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from harness import copy_of_tree
from proof import origin, write_section


class Mutant(NamedTuple):
    """A fault: what stands in a file, what is put there, and the test that should see it."""

    name: str
    file: str
    right: str
    wrong: str
    test: str


ONE, ROW, COLUMN = (
    "tests/test_reference.py::test_one_process_follows_the_reference[{}]".format,
    "tests/test_proof.py::test_row[{}]".format,
    "tests/test_proof.py::test_goes_on".format,
)
MUTANTS = [
    Mutant("clipping off by a millionth", "train_ddp.py",
           "math.sqrt(square) * to_mean,", "math.sqrt(square) * to_mean * 1.000001,", ONE("plain")),
    Mutant("accumulation overwritten", "train_ddp.py",
           "into.copy_(param.grad) if bucket.passes == 0 else into.add_(param.grad)", "into.copy_(param.grad)",
           ONE("accumulated")),
    Mutant("the mean divides by masked targets too", "train_ddp.py",
           "to_mean = nominal / max(n_valid, 1) / scale", "to_mean = 1 / scale", ONE("masked")),
    Mutant("decay on norms", "optim.py", "(slice(decay, None), 0.0)", "(slice(decay, None), cfg.weight_decay)",
           ONE("plain")),
    Mutant("cosine too long by the warm-up", "optim.py", "max(1, cfg.steps - cfg.warmup_steps)", "cfg.steps",
           ONE("plain")),
    Mutant("evaluation counts its fillers", "data.py", "y[filler] = -1", "pass",
           ONE("masked, tied, accumulated, evaluated")),
    Mutant("a window read twice", "data.py", "(self.run.place().replica * self.accum + micro) * cfg.micro_batch",
           "self.run.place().replica * self.accum * cfg.micro_batch", ONE("accumulated")),
    Mutant("an all_reduce left out", "train_ddp.py", "if bucket.n == 1:\n            return",
           'if bucket.n == 1 or bucket.name == "block.1":\n            return', ROW("DDP, all_reduce torch, 2")),
    Mutant("a chunk not sent round the ring", "ring_allreduce.py",
           "sent += ring_all_gather(flat, group, both_ways)", "pass", ROW("DDP, all_reduce ring, 2")),
    Mutant("a shard dropped", "train_zero.py", "for piece in pieces[1:]:", "for piece in pieces[2:]:",
           ROW("ZeRO-2, 3")),
    Mutant("an all_gather of ZeRO left out", "train_zero.py",
           "        if bucket.n > 1:\n            bucket.gathering",
           '        if bucket.n > 1 and bucket.name != "block.1":\n            bucket.gathering', ROW("ZeRO-1, 2")),
    Mutant("ZeRO-3 waits for weights one block late", "train_zero.py",
           "UseInBackward.apply(h, self, self.units.index(unit))",
           "UseInBackward.apply(h, self, self.units.index(unit) - 1)", ROW("ZeRO-3, 2")),
    Mutant("ZeRO-3: a tied embedding without a place of its own", "train_zero.py",
           "return 2 if tied and i == 0 else i % 2", "return i % 2", ROW("ZeRO-3, 2")),
    Mutant("offload forgets the clipping", "offload.py", "grad.mul_(factor)", "pass", ROW("ZeRO-2, offload, 2")),
    Mutant("padding of the vocabulary counted", "train_tp.py", "logits[..., :real]", "logits", ROW("TP 2")),
    Mutant("norms summed over the wrong group", "buckets.py", 'found["norms"] = lambda p: p.stage',
           'found["norms"] = lambda p: (p.stage, p.replica)', ROW("TP 2 x DP 2")),
    Mutant("matrices summed over slices", "buckets.py", "lambda p: (p.stage, p.seat if run.tp > 1 else 0)",
           "lambda p: (p.stage, 0)", ROW("TP 2")),
    Mutant("tied gradient once", "train_ddp.py", "if bucket.twin:", "if bucket.twin and not self.run.pp:",
           ROW("1f1b, 2")),
    Mutant("tied weight twice in the norm", "buckets.py", "tied, not tied or begins)", "tied, True)",
           ROW("1f1b, 2")),
    Mutant("the gradients of others' keys thrown away", "train_cp.py", "grad_kv += arrived()", "arrived()",
           ROW("CP 2, ZeRO-1")),
    Mutant("parts of a softmax added without their weights", "train_cp.py",
           ".mul_(old).addcmul_(part, new)", ".add_(part)", ROW("CP 2, ZeRO-1")),
    Mutant("3D: the loss's gradient divided by the stages too", "train_3d.py",
           "torch.full_like(out, scale / nominal)", "torch.full_like(out, scale / nominal / run.pp)",
           ROW("3D, TP 1 x PP 2 x DP 2")),
    Mutant("dropout at the wrong position", "train_tp.py", "keys[b : b + 1], layer, site, i * t)",
           "keys[b : b + 1], layer, site, 0)", COLUMN()),
    Mutant("moments swapped at load", "support/resume.py", "meta = saver.load(path, pieces)",
           'other = {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}\n'
           "    swapped = {(a, *b): p for n, p in pieces.items() for a, *b in [n.split('.', 1)]}\n"
           "    meta = saver.load(path, {'.'.join((other.get(n[0], n[0]), *n[1:])): p for n, p in swapped.items()})",
           COLUMN()),
    Mutant("updates counted from 0 again", "support/resume.py", 'return saved["step"], saved["updates"]',
           'return saved["step"], 0', COLUMN()),
    Mutant("scaler not restored", "support/resume.py", '    scaler.load(saved["scaler"])\n', "",
           "tests/test_resume.py::test_the_loss_scale_goes_on"),
]  # fmt: skip


def run_test(tree: Path, test: str) -> tuple[bool, str]:
    """Whether a test is green in a tree; else the line that says why not."""
    call = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test]
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}  # a mutant must not run another's bytecode
    done = subprocess.run(call, cwd=tree, capture_output=True, text=True, timeout=900, env=env)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{test} did not run:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
    said = re.findall(r"^E +(.*\w.*)", done.stdout, re.M)
    telling = r"OUT OF BOUNDS|\*\*NO\*\*|\w+Error: \S"
    said = [line for line in said if not re.search(r"error-\d+ \(first of", line)]  # the harness, before the error
    why = next((line for line in said if re.search(telling, line)), said[-1] if said else "")
    return done.returncode == 0, " ".join(why.replace("|", " ").replace("**", "").split())[:150]


def apply(mutant: Mutant, tree: Path) -> None:
    """Put the fault into the tree's file, where what it replaces must stand once."""
    path = tree / mutant.file
    text = path.read_text()
    if text.count(mutant.right) != 1:
        raise SystemExit(
            f"{mutant.name}: {mutant.file} has {text.count(mutant.right)} times {mutant.right!r}, not once"
        )
    path.write_text(text.replace(mutant.right, mutant.wrong))


def main() -> None:
    chosen = [m for m in MUTANTS if all(word in m.name for word in sys.argv[1:])]
    lines = ["| fault | file | test | seen | what it said |", "|---|---|---|---|---|"]
    start, survivors, green = time.time(), 0, {}
    for mutant in chosen:
        with tempfile.TemporaryDirectory() as folder:
            tree = copy_of_tree(Path(folder, "tree"))
            if mutant.test not in green:
                green[mutant.test], why = run_test(tree, mutant.test)
                if not green[mutant.test]:
                    raise SystemExit(f"{mutant.test} is red without any fault: {why}")
            apply(mutant, tree)
            survived, why = run_test(tree, mutant.test)
        survivors += survived
        test = mutant.test.removeprefix("tests/").replace("|", "/")
        lines.append(f"| {mutant.name} | {mutant.file} | `{test}` | {'**NO**' if survived else 'yes'} | {why} |")
        print(lines[-1], flush=True)
    if len(chosen) == len(MUTANTS):
        about = origin("make mutants", time.time() - start)
        write_section("Every fault is seen", [about, "", f"{len(chosen)} faults, {survivors} not seen.", "", *lines])
    sys.exit(1 if survivors else 0)


if __name__ == "__main__":
    main()
