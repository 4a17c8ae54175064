"""Context parallel against one process: contract points 1-9 of train_cp.py, and the ring by itself."""

import dataclasses
import importlib
import math

import pytest
import torch
import torch.distributed as dist
from harness import add_val, assert_follows, final_weights, run_ranks, stored, toy_files, train
from proof import save_again

import train_cp
from model import SIZES, causal
from support.flags import UserError
from support.resume import resume
from support.run import Run

KINDS = {  # what one process computes
    "plain": {},
    "tied, dropout": {"tie": True, "dropout": 0.1, "steps": 8},
    "masked": {"data": "masked", "steps": 8, "eval_every": 3},
    "thirds": {"seq_len": 24, "steps": 8},  # 32 has no six pieces
}
VARIANTS = {  # ranks -> variants, each beginning with its kind
    2: {
        "plain": {"stage": 1},
        "plain, stage 3, offload": {"stage": 3, "offload": "optimizer", "steps": 12},
        "tied, dropout": {"stage": 2},
        "tied, dropout, full, offload": {"stage": 1, "recompute": "full", "offload": "optimizer"},
        "tied, dropout, selective": {"stage": 3, "recompute": "selective"},
        "tied, dropout, full": {"stage": 3, "recompute": "full"},
        "masked": {"stage": 3, "overlap": False},
    },
    3: {"thirds": {"stage": 2}, "thirds, stage 3": {"recompute": "selective"}},
    4: {
        "plain": {},
        "tied, dropout": {"stage": 1},
        "masked, 2 x 2": {"cp": 2},
        "tied, dropout, 2 x 2, offload": {"cp": 2, "stage": 2, "offload": "optimizer"},
    },
}


def kind_of(name):
    return max((kind for kind in KINDS if name.startswith(kind)), key=len)


def flags(folder, variants, **more):
    found = {name: KINDS[kind_of(name)] | own | more for name, own in variants.items()}
    return {name: own | {"data": f"{folder}/{own.get('data', 'plain')}"} for name, own in found.items()}


def files(folder):
    toy_files(folder)
    add_val(folder, "masked")


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """train_ddp in one process -> kind: (rows, final state)."""
    folder = tmp_path_factory.mktemp("one")
    files(folder)
    rows = run_ranks(1, train, "train_ddp", str(folder), flags(folder, dict.fromkeys(KINDS, {}), micro_batch=6))[0]
    return {kind: (rows[kind], final_weights(folder / kind)) for kind in KINDS}


@pytest.mark.parametrize("ranks", VARIANTS)
def test_parity(ranks, reference, tmp_path):
    """Losses, norms, every tensor and the validation loss; harness.train compares bytes and calls with prediction."""
    files(tmp_path)
    variants = flags(tmp_path, VARIANTS[ranks], micro_batch=3)
    results = run_ranks(ranks, train, "train_cp", str(tmp_path), variants, timeout=200)
    for name in variants:
        rows, weights = reference[kind_of(name)]
        assert_follows(results[0][name], rows, final_weights(tmp_path / name), weights, 1e-9)
        val = [r["val_loss"] for r in rows if "val_loss" in r]
        for result in results:
            assert [r["loss"] for r in result[name]] == [r["loss"] for r in results[0][name]]
            assert [r["val_loss"] for r in result[name] if "val_loss" in r] == pytest.approx(val, rel=1e-9)
        assert len(val) == (3 if "masked" in name else 0)


@pytest.mark.soak
def test_blocks_are_compiled_with_the_ring_in_them(reference, tmp_path):
    """fullgraph: the ring is one opaque operator."""
    files(tmp_path)
    flag = flags(tmp_path, {"tied, dropout": {"stage": 3, "compile": True}}, micro_batch=3)
    rows = run_ranks(2, train, "train_cp", str(tmp_path), flag, timeout=400)[0]["tied, dropout"]
    expected, weights = reference["tied, dropout"]
    assert_follows(rows, expected, final_weights(tmp_path / "tied, dropout"), weights, 1e-9)


def there_and_back(rank, folder):
    """Each script's checkpoint of a first step is loaded by another, saved at once, and gone on from."""
    layouts = {"train_ddp": {}, "train_zero": {"stage": 3}, "train_cp": {"stage": 2}}
    usual = {"tie": True, "dropout": 0.1, "micro_batch": 3, "steps": 2, "save_every": 1, "keep_last": 9}
    for script, own in layouts.items():
        train(rank, script, folder, {script: usual | own})
    for source, script in CROSSINGS:
        module = importlib.import_module(script)
        module.resume = save_again
        more = {"resume": f"{folder}/{source}/ckpt/step_00000001"}
        train(rank, script, folder, {f"{source} to {script}": usual | layouts[script] | more})
        module.resume = resume


CROSSINGS = [(a, "train_cp") for a in ("train_ddp", "train_zero")] + [
    ("train_cp", b) for b in ("train_ddp", "train_zero")
]


def test_checkpoints_there_and_back(tmp_path):
    """Bit-equal when saved again; a step later as close as the layouts are."""
    toy_files(tmp_path)
    run_ranks(2, there_and_back, str(tmp_path), timeout=200)
    for source, script in CROSSINGS:
        for step, bound in ((1, 0), (2, 1e-12)):
            saved, again = (
                stored(tmp_path / name / "ckpt" / f"step_{step:08d}") for name in (source, f"{source} to {script}")
            )
            assert saved.keys() == again.keys()
            for name, tensor in again.items():
                torch.testing.assert_close(tensor, saved[name], rtol=0, atol=bound)


def rings_alone(rank):
    """For each cp this rank has part in: ring_alone()."""
    groups = {cp: dist.new_group([*range(cp)]) for cp in (1, 2, 3, 4)}
    return {cp: ring_alone(rank, cp, group) for cp, group in groups.items() if rank < cp}


def ring_alone(rank, cp, group):
    T, draw = 8 * cp, torch.Generator().manual_seed(1)
    q, k, v, grad = (torch.randn(2, heads, T, 8, dtype=torch.float64, generator=draw) for heads in (8, 2, 2, 8))
    whole = [t.requires_grad_() for t in (q, k, v)]
    expected = causal(*whole)
    gradients = torch.autograd.grad(expected, whole, grad)
    run = Run(train_cp.Config(hang_timeout=60), rank, cp, torch.device("cpu"), torch.float64, group, group, cp=cp)
    ring, own, worst = train_cp.Ring(run), train_cp.own_positions(T, cp, rank), 0.0
    mine = [t.detach()[:, :, own] for t in (q, k, v)]
    fused = ring.forward_part, ring.backward_part
    for ring.forward_part, ring.backward_part in (fused, (train_cp.plain, train_cp.plain_backward)):
        out, lse = ring.attend(*mine)
        found = [out, *ring.attend_backward(grad[:, :, own], *mine, out, lse)]
        assert all(t.is_contiguous() for t in (lse, *found))  # as the operator promises the compiler
        for a, b in zip(found, [expected.detach(), *gradients]):
            worst = max(worst, float((a - b[:, :, own]).abs().max()))
    return worst


def test_the_ring_is_whole_attention():
    """With torch's operator, and with the plain softmax that serves float32 and float64 on GPUs."""
    results = run_ranks(4, rings_alone)
    assert [len(found) for found in results] == [4, 3, 2, 1]
    assert max(worst for found in results for worst in found.values()) < 1e-14


def test_every_turn_costs_all_ranks_the_same():
    """Pairs of a query and a key that a turn computes, by rank; over all turns they are exactly the causal ones."""
    for cp in (2, 3, 5, 8):
        T, met = 4 * cp, []
        for s in range(cp):
            costs = set()
            for rank in range(cp):
                ours, theirs = (train_cp.own_positions(T, cp, r).tolist() for r in (rank, (rank - s) % cp))
                pairs = [(query, key) for query in ours for key in theirs if key <= query]
                costs.add(len(pairs))
                met += pairs
            assert len(costs) == 1
        assert sorted(met) == [(query, key) for query in range(T) for key in range(query + 1)]


def test_lengths_that_do_not_divide_are_refused():
    run = Run(train_cp.Config(), 0, 3, torch.device("cpu"), cp=3, model_cfg=dataclasses.replace(SIZES["6b"]))
    with pytest.raises(UserError, match=r"--seq-len 2048 .*2 x 3 pieces .*nearest that do: 2046 or 2052"):
        train_cp.check_length(run)
    train_cp.check_length(dataclasses.replace(run, cp=1, model_cfg=dataclasses.replace(SIZES["6b"], seq_len=2047)))
    assert train_cp.own_positions(7, 1, 0).tolist() == list(range(7))


def test_docstring_bytes():
    """3 (N-1) S, S being 4,096 bytes per own token of 6b in bf16; and what full recomputation adds."""
    for recompute, times in (("none", 3), ("full", 4)):
        cfg = train_cp.Config(micro_batch=1, dtype="bfloat16", recompute=recompute)
        run = Run(cfg, 0, 4, torch.device("cpu"), torch.bfloat16, cp=4, accum=1, model_cfg=SIZES["6b"])
        sent = sum(size for op, _, size in train_cp.predict(run)[1] if op == "send")
        assert sent == math.prod((times, 3, 4096, 2048 // 4, 32))
