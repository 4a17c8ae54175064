"""Data parallel training against one process: contract points 1-6, 8 and 9 of train_ddp.py."""

import pytest
from harness import assert_follows, final_weights, run_ranks, toy_files, train

VARIANTS = {
    "plain": {},
    "micro": {"micro_batch": 1, "steps": 8},
    "tied, dropout": {"tie": True, "dropout": 0.1, "steps": 8},
    "masked": {"data": "{folder}/masked", "micro_batch": "share", "steps": 8},
    "ring": {"allreduce": "ring", "steps": 8},
    "central": {"allreduce": "central", "steps": 8},
    "no overlap": {"overlap": False, "steps": 8},
    "recompute": {"recompute": "full", "dropout": 0.1, "steps": 8},
    "selective": {"recompute": "selective", "steps": 8},
}


def variants(folder, world_size):
    """VARIANTS with folder filled in; a rank's share of the batch is two micro-batches, or one where asked for."""
    share = 12 // world_size
    filled = {"{folder}/masked": f"{folder}/masked", "share": share}
    usual = {"micro_batch": share // 2 if share % 2 == 0 else 1}
    return {
        name: usual | {flag: filled.get(value, value) for flag, value in flags.items()}
        for name, flags in VARIANTS.items()
    }


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """One process, one micro-batch of the whole global batch."""
    folder = tmp_path_factory.mktemp("one")
    toy_files(folder)
    flags = {
        k: v | {"micro_batch": 12, "allreduce": "torch", "overlap": True, "recompute": "none"}
        for k, v in variants(folder, 1).items()
    }
    rows = run_ranks(1, train, "train_ddp", str(folder), flags, timeout=300)[0]
    return {name: (rows[name], final_weights(folder / name)) for name in flags}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_parity(world_size, reference, tmp_path):
    toy_files(tmp_path)
    results = run_ranks(world_size, train, "train_ddp", str(tmp_path), variants(tmp_path, world_size), timeout=300)
    for name, (rows, weights) in reference.items():
        assert_follows(results[0][name], rows, final_weights(tmp_path / name), weights, 1e-9)
        for other in results[1:]:  # one loss and one norm, the same bits on every rank
            assert [(r["loss"], r["grad_norm"]) for r in other[name]] == [
                (r["loss"], r["grad_norm"]) for r in results[0][name]
            ]
