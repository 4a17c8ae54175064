"""A fork is a patch of one file: the three of tests/forks/ are applied to a copy of the tree and train there.

An architecture (QK-norm) and an optimizer (Lion) must hold in every strategy without a word about it; a rule of when
to communicate must do what one process finds that plays all its ranks.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import ROOT, TOY, assert_follows, copy_of_tree, final_weights, run_ranks, toy_files, train
from reference import CLIP, GLOBAL_BATCH, SEED, learning_rate, untrained

import train_ddp
from data import stream_windows
from model import ModelConfig
from support.tokens import open_tokens

LAYOUTS = {
    "DDP": ("train_ddp", {"micro_batch": 3}),
    "ZeRO-3": ("train_zero", {"stage": 3, "micro_batch": 3}),
    "ZeRO-2, offload": ("train_zero", {"stage": 2, "offload": "optimizer", "micro_batch": 3}),
    "CP 2": ("train_cp", {"micro_batch": 3}),
    "TP 2": ("train_tp", {"micro_batch": 6}),
    "PP 2": ("train_pipe", {"micro_batch": 3}),
    "3D, 2 x 2": ("train_3d", {"tp": 2, "pp": 2, "micro_batch": 6}),
}


@pytest.mark.parametrize("name", ["qk_norm", pytest.param("lion", marks=pytest.mark.soak), "every_second_step"])
def test_a_fork_is_one_patch_of_one_file(name, tmp_path):
    """What each must do is below; here it is applied to a copy of the tree, and this file is run there."""
    patch = ROOT / "tests" / "forks" / f"{name}.patch"
    text = patch.read_text()
    assert len(text.splitlines()) <= 30 and text.count("\n+++ ") == 1  # one file
    tree = copy_of_tree(tmp_path / "tree")
    subprocess.run(["git", "apply", patch], cwd=tree, check=True)
    call = [sys.executable, "tests/test_forks.py", name, str(tmp_path)]
    done = subprocess.run(call, cwd=tree, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


# --- what runs in the copy --------------------------------------------------------------------------------------------


def all_layouts(rank: int, folder: str) -> dict[str, list[dict]]:
    """Rows by layout; two ranks at a time but for the last layout, which takes four."""
    pairs, rows = [dist.new_group([0, 1]), dist.new_group([2, 3])], {}
    for i, (name, (script, flags)) in enumerate(LAYOUTS.items()):
        group = None if script == "train_3d" else pairs[i % 2]
        if group is None or rank // 2 == i % 2:
            flags = flags | {"steps": 5, "tie": True, "data": f"{folder}/masked"}
            rows |= train(rank, script, folder, {name: flags}, group)
    return rows


def parity(folder: Path, patch: str) -> None:
    toy_files(folder)
    rows = {}
    for of_rank in run_ranks(4, all_layouts, str(folder), timeout=400):
        rows |= of_rank
    state = final_weights(folder / "DDP")
    for name in LAYOUTS:
        assert_follows(rows[name], rows["DDP"], final_weights(folder / name), state, 1e-9)
    if patch == "qk_norm":
        assert state["blocks.1.q_norm.weight"].ne(1).all() and state["exp_avg_sq.blocks.1.k_norm.weight"].ne(0).all()
    else:
        assert not any(tensor.any() for name, tensor in state.items() if name.startswith("exp_avg_sq"))


def played_by_one(folder: Path, ranks: int, steps: int) -> tuple[list[dict], list[dict]]:
    """What `ranks` ranks do that sum gradients in steps 0, 2, ... and go by their own in between, in one process.

    Rows (step, loss, grad_norm), and each rank's final weights.
    """
    cfg, tokens, rows = ModelConfig(**TOY), open_tokens(f"{folder}/plain"), []
    played = [untrained(cfg) for _ in range(ranks)]
    for step in range(steps):
        windows = stream_windows(SEED, step * GLOBAL_BATCH, GLOBAL_BATCH, tokens.n_windows(cfg.seq_len))
        losses, gradients = [], []
        for (model, params, _), share in zip(played, np.split(windows, ranks)):
            x, y = tokens.batch(share, cfg.seq_len, None)
            losses.append(F.cross_entropy(model(x).logits.flatten(0, 1), y.flatten()))
            gradients.append(torch.autograd.grad(losses[-1], list(params.values())))  # of the mean over its share
        if step % 2 == 0:
            gradients = [[sum(of_ranks) / ranks for of_ranks in zip(*gradients)]] * ranks
        norm = (sum(g.square().sum() for own in gradients for g in own) / ranks) ** 0.5
        for (_, params, optimizer), own in zip(played, gradients):
            for param, g in zip(params.values(), own):
                param.grad = g * min(1.0, CLIP / (norm + 1e-6))
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps)
            optimizer.step()
        rows.append({"step": step, "loss": sum(losses).item() / ranks, "grad_norm": norm.item()})
    return rows, [{name: p.detach() for name, p in params.items()} for _, params, _ in played]


def every_second_step(rank: int, folder: str) -> list[dict]:
    """Not by harness.train(): it holds every step's bytes against predict(), which knows one kind of step."""
    cfg = train_ddp.Config(
        model=f"{folder}/toy.json", data=f"{folder}/plain", out=f"{folder}/out", device="cpu", dtype="float64",
        global_batch=GLOBAL_BATCH, micro_batch=2, steps=8, lr=1e-3, warmup_steps=5, clip=CLIP, workers=0, eval_every=0,
    )  # fmt: skip
    return train_ddp.main(cfg)


def simulated(folder: Path) -> None:
    toy_files(folder)
    expected, replicas = played_by_one(folder, 3, 8)
    for rows in run_ranks(3, every_second_step, str(folder), timeout=200):
        assert_follows(rows, expected, {}, {}, 1e-9)
    for name, tensor in final_weights(folder / "out").items():
        if not name.startswith("exp_avg"):  # of each tensor one of the ranks has written its own
            assert min(float((tensor - weights[name]).abs().max()) for weights in replicas) < 1e-9, name
    assert max(float((a - b).abs().max()) for a, b in zip(*(w.values() for w in replicas[:2]))) > 1e-6  # they differ


if __name__ == "__main__":
    patch, folder = sys.argv[1], Path(sys.argv[2])
    simulated(folder) if patch == "every_second_step" else parity(folder, patch)
