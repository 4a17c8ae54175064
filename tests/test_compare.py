"""compare.py on real runs: which field parts first, and so what is at fault."""

import subprocess
import sys

import pytest
from harness import ROOT, run_ranks, toy_files, train

import train_ddp
from buckets import Bucket


def runs(rank, folder):
    base = {"steps": 6, "micro_batch": 6, "save_every": 0}
    train(rank, "train_ddp", folder, {"one": base, "again": base, "other batch": base | {"micro_batch": 3}})
    train(rank, "train_ddp", folder, {"seed": base | {"seed": 1}, "lr": base | {"lr": 2e-3}})
    square, adamw = Bucket.square, Bucket.adamw
    Bucket.square = lambda self: square(self) * 1.001
    train(rank, "train_ddp", folder, {"norm": base})
    Bucket.square = square

    def skips_block_1(self, *args):
        if self.name != "block.1":
            adamw(self, *args)

    Bucket.adamw = skips_block_1
    train(rank, "train_ddp", folder, {"update": base})
    Bucket.adamw = adamw
    loss_sum = train_ddp.GPT.loss_sum
    train_ddp.GPT.loss_sum = lambda self, h, y: loss_sum(self, h * 1.0001, y) * 1.0001
    train(rank, "train_ddp", folder, {"forward": base})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    toy_files(folder)
    run_ranks(2, runs, str(folder), timeout=120)
    return folder


def compare(*words):
    call = [sys.executable, str(ROOT / "compare.py"), *map(str, words)]
    return subprocess.run(call, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "other, said",
    [
        ("seed", r"step 0: samples"),
        ("lr", r"step 0: lr"),
        ("norm", r"step 0: grad_norm"),
        ("forward", r"step 0: loss"),
        ("update", "step 1: loss"),
    ],
)
def test_the_first_difference(folder, other, said):
    done = compare(folder / "one", folder / other)
    assert done.returncode == 1 and said in done.stdout, done.stdout + done.stderr
    assert ("the update of step 0" in done.stdout) == (other == "update")


def test_no_difference(folder):
    """The same run twice; and another micro-batch, within the tolerance of float64."""
    for other in ("again", "other batch"):
        done = compare(folder / "one", folder / other)
        assert done.returncode == 0 and "no difference beyond 1e-09" in done.stdout, done.stdout + done.stderr
    assert "--micro-batch: 6 | 3" in done.stdout


def test_picture_and_refusals(folder, tmp_path):
    done = compare(*(folder / name for name in ("one", "lr", "seed")), "--plot", tmp_path / "losses.png")
    assert done.returncode == 0 and (tmp_path / "losses.png").read_bytes()[1:4] == b"PNG", done.stderr
    done = compare(folder / "one", folder)
    assert done.returncode == 2 and done.stderr.startswith(f"error: {folder} is no run folder"), done.stderr
    assert compare(folder / "one").returncode == 2
