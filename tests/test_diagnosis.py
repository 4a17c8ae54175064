"""A run that misbehaves says what is wrong: replicas that drift, ranks that start unlike, who slows the others down."""

import importlib
import re
import subprocess
import time

import pytest
import torch
import torch.distributed as dist
from harness import copy_of_tree, run_ranks, toy_files, train

import transport
from data import Batches
from model import GPT
from support import meter, start
from support.flags import Config, UserError
from support.meter import PARTS, advice
from support.run import Run

SCRIPTS = {  # what holds replicas -> ranks, the bucket in which one bit is flipped on rank 1, who holds it
    "ddp": (2, "train_ddp", {}, "block.1", [0, 1]),
    "zero 1": (2, "train_zero", {"stage": 1}, "head", [0, 1]),
    "zero 2, offload": (2, "train_zero", {"stage": 2, "offload": "optimizer"}, "embed", [0, 1]),
    "context parallel": (2, "train_cp", {"stage": 2}, "block.0", [0, 1]),
    "norms of tp": (2, "train_tp", {}, "norms", [0, 1]),
    "a stage's replicas": (4, "train_pipe", {"pp": 2, "micro_batch": 3}, "block.1", [1, 3]),
    "tied ends": (2, "train_pipe", {"tie": True}, "embed", [0, 1]),
    "3d, tied ends": (4, "train_3d", {"tp": 2, "pp": 2, "tie": True}, "embed", [1, 3]),
}


def saved_or_not(rank, folder, names):
    """What each script says to a bit that flips on rank 1 after the second update, before the save that follows it."""
    said = {}
    for name in names:
        _, script, flags, unit, _ = SCRIPTS[name]
        module = importlib.import_module(script)
        check = module.check_replicas

        def flip(run, strategy, unit=unit, check=check):
            strategy.catch_up()  # with offload the update is still due
            if run.rank == 1:
                bucket = strategy.buckets[unit]
                kept = bucket.weights if strategy.shared else bucket.master
                kept.view(torch.int64)[3] ^= 1
            check(run, strategy)

        module.check_replicas = flip
        try:
            train(rank, script, folder, {name: {"micro_batch": 6, "steps": 4, "save_every": 2} | flags})
        except UserError as error:
            said[name] = str(error)
        module.check_replicas = check
    return said


@pytest.mark.parametrize("ranks", [2, 4])
def test_one_flipped_bit_reaches_no_checkpoint(ranks, tmp_path):
    """All ranks end with the same words, also those of a stage that holds another part: none is left waiting.

    The undisturbed saves of every other test are the other half: there no rank differs.
    """
    toy_files(tmp_path)
    names = [name for name, (n, *_) in SCRIPTS.items() if n == ranks]
    for said in run_ranks(ranks, saved_or_not, str(tmp_path), names, timeout=100):
        for name in names:
            *_, unit, holders = SCRIPTS[name]
            other, first = [r for r in holders if (r == 1) != (holders[0] == 1)], holders[0]
            assert said[name] == f"{unit}: ranks {other} do not hold the same weights as rank {first}; nothing is saved"
            assert not list((tmp_path / name / "ckpt").glob("step*"))


def unlike(rank, folder):
    """What start says when rank 1 has another torch, or other sources."""
    said = []
    for target, name, value in ((torch, "__version__", "1.0"), (start, "code_hash", lambda: "of a fork")):
        real = getattr(target, name)
        if rank == 1:
            setattr(target, name, value)
        with pytest.raises(UserError) as error:
            train(rank, "train_ddp", folder, {"unlike": {"micro_batch": 6}})
        said.append(str(error.value))
        setattr(target, name, real)
    return said


def test_ranks_that_start_unlike_are_refused(tmp_path):
    toy_files(tmp_path)
    for torches, codes in run_ranks(2, unlike, str(tmp_path)):
        assert f"the ranks differ in torch: {{0: '{torch.__version__}', 1: '1.0'}}" == torches
        assert "the ranks differ in code: " in codes and "of a fork" in codes
    assert not (tmp_path / "unlike").exists()


def delayed(rank, folder):
    """Rows and advice of runs in which something is slow: a disk, a rank, a link."""
    found = {}

    def rows_of(name, **flags):
        flags = {"micro_batch": 6, "steps": 6, "save_every": 0} | flags
        rows = train(rank, "train_ddp", folder, {name: flags})[name]
        split, every = {part: sum(r[f"{part}_ms"] for r in rows[2:]) for part in {*PARTS.values()}}, [None, None]
        dist.all_gather_object(every, split)
        found[name] = rows, advice(every, Run(Config(micro_batch=6, seq_len=32), rank, 2, torch.device("cpu")))

    def slow(name, target, attribute, seconds, who, **flags):
        real = getattr(target, attribute)

        def later(*args, **kwargs):
            if rank in who:
                time.sleep(seconds)
            return real(*args, **kwargs)

        setattr(target, attribute, later)
        rows_of(name, **flags)
        setattr(target, attribute, real)

    class Disk:  # a loader whose batches come late, inside the marker of data
        def __init__(self, iterator):
            self.iterator, self._workers = iterator, []

        def __next__(self):
            time.sleep(0.1 * (rank == 1))
            return next(self.iterator)

    init = Batches.__init__

    def from_a_slow_disk(self, *args):
        init(self, *args)
        self.iterator = Disk(self.iterator)

    Batches.__init__ = from_a_slow_disk
    rows_of("disk")
    Batches.__init__ = init
    slow("rank", GPT, "embed", 0.1, (1,))
    slow("link", transport.dist, "all_reduce", 0.05, (0, 1), overlap=False)
    return found


def test_delays_land_in_their_part_and_the_slow_rank_is_named(tmp_path):
    toy_files(tmp_path)
    results = run_ranks(2, delayed, str(tmp_path), timeout=100)
    for rank, found in enumerate(results):
        for rows, _ in found.values():
            for row in rows:
                parts = sum(row[f"{part}_ms"] for part in {*PARTS.values()})
                assert parts == pytest.approx(row["step_ms"] + row["eval_ms"] + row["checkpoint_ms"], rel=0.02)
        rows = {name: found[name][0][-1] for name in found}
        assert (rows["disk"]["data_ms"] > 100) == (rank == 1)
        assert (rows["rank"]["compute_ms"] > 100) == (rank == 1)
        assert rows["link"]["communication_ms"] > 0.3 * rows["link"]["step_ms"]
    said = {name: results[0][name][1] for name in results[0]}
    assert said["disk"][0].startswith("rank 1 waits for data ") and "--workers" in said["disk"][0]
    assert [line for line in said["rank"] if line.startswith("rank 1 works longer ")] and "data" not in said["rank"][0]
    assert "waits for communication" in said["link"][0] and "ring_allreduce.py" in said["link"][0]


def test_advice_comes_in_one_order():
    """Data, communication, imbalance, small batch; and a good run gets none."""
    good = dict.fromkeys(PARTS.values(), 0.0) | {"compute": 95.0, "communication": 5.0}
    run = Run(Config(micro_batch=1, seq_len=1024), 0, 2, torch.device("cuda"))
    assert advice([good | {"communication": 90.0, "data": 20.0}] * 2, run)[0].startswith("rank 1 waits for data")
    assert [line.split(":")[0] for line in advice([good | {"communication": 90.0, "bubble": 80.0}] * 2, run)] == [
        "rank 1 waits for communication 34% of the time", "rank 1 is idle 30% of the time",
        "a pass has 1024 tokens of a rank, and a GPU wants some thousands",
    ]  # fmt: skip
    run.cfg.micro_batch = 4
    assert advice([good] * 2, run) == []


def checked(rank, folder):
    """--check-collectives in a pipeline of two replicas: quiet when all is well, then rank 3 swaps two reductions."""
    flags = {"pp": 2, "micro_batch": 3, "steps": 2, "save_every": 0, "check_collectives": True}
    train(rank, "train_pipe", folder, {"well": flags})
    real = transport.all_reduce
    module = importlib.import_module("train_ddp")
    module.all_reduce = lambda x, group, what, **more: real(x, group, what + " of a fork" * (rank == 3), **more)
    try:
        train(rank, "train_pipe", folder, {"swapped": flags | {"hang_timeout": 20}})
    except (UserError, RuntimeError) as error:  # the first stage only notices that the last has gone
        return str(error)


def test_collectives_are_compared_within_a_stage(tmp_path):
    """Ranks 1 and 3 hold the last stage; 0 and 2, the first, call other things and are not compared with them."""
    toy_files(tmp_path)
    said = run_ranks(4, checked, str(tmp_path), timeout=100)
    for rank in (1, 3):
        assert re.search("the ranks call different collectives: rank 1: .*; rank 3: .* of a fork ", said[rank]), said


def test_a_checkout_with_changes_leaves_its_diff(tmp_path, monkeypatch):
    """code_hash() changes with any source; code_diff() is empty in a clean checkout, else it has what changed."""
    assert start.code_hash() == start.code_hash() and len(start.code_hash()) == 12
    tree = copy_of_tree(tmp_path / "tree")
    git = ["git", "-C", str(tree), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "clean"]):
        subprocess.run([*git, *words], check=True, capture_output=True)
    monkeypatch.setattr(start, "__file__", str(tree / "support/start.py"))
    clean = start.code_hash()
    assert start.code_diff() == ""
    (tree / "optim.py").write_text((tree / "optim.py").read_text() + "\n# a fork's\n")
    (tree / "new.py").write_text("print('new')\n")
    assert "+# a fork's" in start.code_diff() and "untracked: new.py\nprint('new')" in start.code_diff()
    assert start.code_hash() != clean


def test_the_summary_has_the_advice(tmp_path, capsys):
    """As printed at the end of a run: rank 0's lines, of all ranks' clocks."""
    run = Run(Config(log_every=1, steps=9), 0, 1, torch.device("cpu"))
    with meter.Meter(run, 1) as clock:
        for step in range(6):
            with meter.at("data"):
                time.sleep(0.01)
            clock.log(step, 1.0, 1.0, 1.0, 1, 1.0, False)
        clock.summary({}, [])
    assert "warning: rank 0 waits for data 9" in capsys.readouterr().out
