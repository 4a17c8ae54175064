"""One process of train_ddp.py is what torch and Hugging Face's Llama make of the same weights and tokens."""

import json

import numpy as np
import pytest
from harness import assert_follows, final_weights, run_ranks, toy_files, train
from reference import reference

from support import prepare

# name: what the reference is told, and what train_ddp.py is told besides
KINDS = {
    "plain": ({}, {"micro_batch": 12}),
    "tied": ({"tie": True}, {"micro_batch": 12}),
    "masked": ({"data": "masked"}, {"micro_batch": 12}),
    "accumulated": ({}, {"micro_batch": 1}),
    "masked, tied, accumulated, evaluated": (
        {"data": "evaluated", "tie": True, "eval_every": 20},
        {"micro_batch": 4, "eval_windows": 0},
    ),
}


def files(folder):
    """toy_files, and evaluated/: 40 masked documents, some of them for validation, in which 0 to 32 targets count."""
    toy_files(folder)
    draw = np.random.default_rng(2)
    with open(folder / "evaluated.jsonl", "w") as lines:
        for _ in range(40):
            ids, mask = draw.integers(0, 61, 70), draw.random(70) < draw.random()
            lines.write(json.dumps({"ids": ids.tolist(), "mask": mask.astype(int).tolist()}) + "\n")
    prepare.prepare(str(folder / "evaluated"), [str(folder / "evaluated.jsonl")], vocab_size=61, val=0.3)


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_follows_the_reference(kind, tmp_path):
    files(tmp_path)
    shared, more = KINDS[kind]
    data = f"{tmp_path}/{shared.get('data', 'plain')}"
    rows = run_ranks(
        1, train, "train_ddp", str(tmp_path), {kind: shared | more | {"data": data, "steps": 50}}, timeout=300
    )[0][kind]
    expected, state = reference(tmp_path / "toy.json", steps=50, **shared | {"data": data})
    assert sum(row["grad_norm"] > 0.1 for row in expected) > 25  # clipped
    assert_follows(rows, expected, final_weights(tmp_path / kind), state, 1e-9)
    evaluated = {row["step"]: row["val_loss"] for row in expected if "val_loss" in row}
    found = {row["step"]: row["val_loss"] for row in rows if "val_loss" in row}
    assert found == pytest.approx(evaluated, abs=1e-9)
    assert len(found) == (3 if "evaluated" in kind else 0)
