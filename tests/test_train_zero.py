"""ZeRO against one process and against itself: contract points 1-9 of train_zero.py at every stage."""

import pytest
from harness import assert_follows, final_weights, run_ranks, toy_files, train

KINDS = {
    "plain": {},
    "accum": {"micro_batch": 3},
    "tied, dropout": {"tie": True, "dropout": 0.1},
    "masked": {"data": "masked"},
    "recompute": {"recompute": "full", "dropout": 0.1},
}


def stages(folder, world_size, **more):
    """Every kind at every stage, plus the other ways of running it."""
    found = {}
    for kind, flags in KINDS.items():
        for stage in (0, 1, 2, 3):
            found[f"{kind}, stage {stage}"] = {"stage": stage} | flags
    for stage in (1, 2, 3):
        found[f"plain, stage {stage}, offload"] = {"stage": stage, "offload": "optimizer"}
    found["plain, stage 3, no overlap"] = {"stage": 3, "overlap": False}
    found["plain, stage 1, no overlap"] = {"stage": 1, "overlap": False}
    for flags in found.values():
        flags.update(more)
        flags["data"] = f"{folder}/{flags.get('data', 'plain')}"
        flags["global_batch"] = 14 if world_size == 7 else 12
        if 12 // world_size % flags.get("micro_batch", 1):
            flags["micro_batch"] = 1
    return found


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """train_ddp in one process, the whole batch in one micro-batch; by global batch."""
    results = {}
    for batch in (12, 14):
        folder = tmp_path_factory.mktemp("one")
        toy_files(folder)
        flags = {k: v | {"data": f"{folder}/{v.get('data', 'plain')}", "micro_batch": batch, "global_batch": batch} for k, v in KINDS.items()}
        rows = run_ranks(1, train, "train_ddp", str(folder), flags, timeout=300)[0]
        results[batch] = {name: (rows[name], final_weights(folder / name)) for name in flags}
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_parity(world_size, reference, tmp_path):
    toy_files(tmp_path)
    flags = stages(tmp_path, world_size)
    results = run_ranks(world_size, train, "train_zero", str(tmp_path), flags, timeout=400)
    for name in flags:
        rows, weights = reference[flags[name]["global_batch"]][name.split(", stage")[0]]
        assert_follows(results[0][name], rows, final_weights(tmp_path / name), weights, 1e-9)
        for other in results[1:]:
            assert [(r["loss"], r["grad_norm"]) for r in other[name]] == [(r["loss"], r["grad_norm"]) for r in results[0][name]]
