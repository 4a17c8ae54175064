"""Runs on parts of a job follow each other in one process, each as if it were alone."""

import pytest
import torch.distributed as dist
from harness import run_ranks, toy_files, train

RUNS = {  # by name: script, its flags, the job's ranks that it runs on
    "tp": ("train_tp", {"micro_batch": 6}, [0, 1]),
    "pipe": ("train_pipe", {"micro_batch": 3}, [2, 3]),
    "zero 3": ("train_zero", {"stage": 3, "micro_batch": 2}, [0, 1, 2]),
    "3d, 2x1x1": ("train_3d", {"tp": 2, "pp": 1, "micro_batch": 6}, [1, 2]),
    "zero 2": ("train_zero", {"stage": 2, "micro_batch": 3}, [0, 3]),
    "3d, 2x2x1": ("train_3d", {"tp": 2, "pp": 2, "micro_batch": 3, "tie": True}, [0, 1, 2, 3]),
    "3d, 1x2x1": ("train_3d", {"tp": 1, "pp": 2, "micro_batch": 3, "tie": True}, [0, 1]),
    "pipe, tied": ("train_pipe", {"micro_batch": 6, "tie": True}, [1, 2]),
    "ddp": ("train_ddp", {"micro_batch": 2}, [0, 1, 2]),
    "tp x dp": ("train_tp", {"tp": 2, "micro_batch": 3}, [0, 1, 2, 3]),
    "pipe, reversed": ("train_pipe", {"micro_batch": 3}, [3, 2]),
    "zero 1": ("train_zero", {"stage": 1, "micro_batch": 6}, [1, 2]),
    "pipe x dp": ("train_pipe", {"pp": 2, "micro_batch": 3, "tie": True}, [0, 1, 2, 3]),
}
ROUNDS = [  # what runs at the same time; after all of them once more
    ["tp", "pipe"],
    ["zero 3"],
    ["3d, 2x1x1", "zero 2"],
    ["3d, 2x2x1"],
    ["3d, 1x2x1", "pipe, reversed"],
    ["pipe, tied"],
    ["ddp"],
    ["tp x dp"],
    ["zero 1"],
    ["pipe x dp"],
]


def values(rows):
    return [(r["loss"], r["grad_norm"]) for r in rows]


def alone(rank, folder, names):
    return {n: values(train(rank, RUNS[n][0], folder, {n: {"steps": 3} | RUNS[n][1]})[n]) for n in names}


def all_in_turn(rank, folder):
    """What this rank's runs logged, twice each; nobody waits for the runs of others."""
    found = {}
    for turn in range(2):
        groups = {name: dist.new_group(ranks, sort_ranks=False) for name, (_, _, ranks) in RUNS.items()}
        for name in [name for together in ROUNDS for name in together]:
            script, flags, ranks = RUNS[name]
            if rank in ranks:
                out = f"{name}, turn {turn}"
                rows = train(rank, script, folder, {out: {"steps": 3} | flags}, groups[name])[out]
                found[name, turn] = values(rows)
    return found


@pytest.mark.soak
def test_each_gives_what_it_gives_alone(tmp_path):
    """Four ranks, thirteen runs on six sets of them, two at a time, twice: the bits of a job of their own."""
    assert sorted(name for together in ROUNDS for name in together) == sorted(RUNS)
    toy_files(tmp_path)
    expected = {}
    for size in {len(ranks) for _, _, ranks in RUNS.values()}:
        names = [name for name, (_, _, ranks) in RUNS.items() if len(ranks) == size]
        (tmp_path / str(size)).mkdir()
        toy_files(tmp_path / str(size))
        expected |= run_ranks(size, alone, f"{tmp_path}/{size}", names)[0]
    for rank, found in enumerate(run_ranks(4, all_in_turn, str(tmp_path), timeout=100)):
        for (name, _), rows in found.items():
            assert rows == expected[name], (rank, name)
        assert len(found) == 2 * sum(rank in ranks for _, _, ranks in RUNS.values())
