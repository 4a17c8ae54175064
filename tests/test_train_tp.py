"""Tensor parallel training against one process: contract points 1-9 of train_tp.py, and what only it can get wrong."""

import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import assert_follows, final_weights, run_ranks, toy_files, train

import train_ddp
import train_tp
from buckets import held_by
from checkpoint import Checkpointer
from model import SIZES, ModelConfig
from optim import LossScaler
from support import prepare
from support.flags import UserError
from support.meter import COLLECTIVES, Meter
from support.resume import progress, resume
from support.run import Run
from support.start import start

HEADS = dict(n_head=8, n_kv_head=4)  # 4 KV heads: grouped queries also at tp = 4; 61 words: padded to 64
KINDS = {
    "plain": {},
    "tied, dropout": {"tie": True, "dropout": 0.1, "steps": 8},
    "short": {"steps": 8},
    "short, tied, dropout": {"tie": True, "dropout": 0.1, "steps": 8},
    "masked": {"data": "masked", "steps": 8},
    "norms dominate": {"steps": 10},
    "evaluated": {"data": "both", "steps": 6, "eval_every": 3},
}
TWO = {
    "plain": {"micro_batch": 6},
    "short, no overlap": {"micro_batch": 6, "overlap": False},
    "tied, dropout": {"micro_batch": 3},  # halves of 2 and 1
    "short, tied, dropout, full": {"micro_batch": 12, "recompute": "full"},
    "masked, selective": {"micro_batch": 4, "recompute": "selective"},
    "norms dominate, one sequence": {"micro_batch": 1},
    "evaluated": {"micro_batch": 3},
}
FOUR = {
    "short, tp 4": {"micro_batch": 12},
    "short, 2 x 2": {"tp": 2, "micro_batch": 6},
    "tied, dropout, tp 4": {"micro_batch": 12},
    "tied, dropout, 2 x 2": {"tp": 2, "micro_batch": 3},
    "masked, 2 x 2": {"tp": 2, "micro_batch": 6},
    "norms dominate, tp 4": {"micro_batch": 12},
    "norms dominate, 2 x 2, no overlap": {"tp": 2, "micro_batch": 3, "overlap": False},
    "norms dominate, tp 1": {"tp": 1, "micro_batch": 3},
    "evaluated, 2 x 2": {"tp": 2, "micro_batch": 3},
}


def files(folder):
    """toy_files, and both/: 30 documents, some of them for validation."""
    toy_files(folder, **HEADS)
    draw = np.random.default_rng(1)
    lines = (json.dumps({"ids": draw.integers(0, 61, 40).tolist()}) + "\n" for _ in range(30))
    (folder / "both.jsonl").write_text("".join(lines))
    prepare.prepare(str(folder / "both"), [str(folder / "both.jsonl")], vocab_size=61, val=0.3)


def kind_of(name):
    return max((k for k in KINDS if name.startswith(k)), key=len)


def flags_of(folder, variants):
    found = {name: KINDS[kind_of(name)] | flags for name, flags in variants.items()}
    return {name: flags | {"data": f"{folder}/{flags.get('data', 'plain')}"} for name, flags in found.items()}


# --- observers: the classes under test, with what they did written down -----------------------------------------------

seen: dict = {}


def small_norms(state):
    """Scale what the norms put out, so that their gradient is most of the whole."""
    for b in state.buckets.values():
        for name in b.slices:
            if name.endswith("norm.weight"):
                b.view(b.master, name).mul_(0.02)
    state.masters_changed()


class Reference(train_ddp.DataParallel):
    def __init__(self, model, run):
        super().__init__(model, run)
        if "norms dominate" in run.out:
            small_norms(self)


class Observed(train_tp.DataParallel):
    def __init__(self, model, run, held):
        super().__init__(model, run, held)
        self.digests, self.steps = [], 0
        seen["digests"] = self.digests
        seen["layout"] = (run.place().replica, run.place().seat)
        if "norms dominate" in run.out:
            small_norms(self)
        seen["first"] = self.digest("block.0")

    def digest(self, unit):
        b = self.buckets[unit]
        return hashlib.sha256(b"".join(t.numpy().tobytes() for t in (b.master, b.exp_avg, b.exp_avg_sq))).hexdigest()

    def grad_ready(self, bucket, name, param):
        if "not finite" in self.run.out and self.run.rank == 1 and self.steps == 2 and name == "blocks.1.wk.weight":
            param.grad[0, 0] = float("inf")
        super().grad_ready(bucket, name, param)

    def finish(self):
        square = super().finish()
        self.steps += 1
        return square

    def adamw_step(self, *args):
        super().adamw_step(*args)
        self.digests.append([self.digest(unit) for unit in self.buckets])


class ObservedMeter(Meter):
    calls_made: list = []

    def _enter(self, op, what, nbytes):
        if op in COLLECTIVES and "eval" not in self.stack:  # evaluation is not part of a step
            self.calls_made.append((op, what, nbytes))
        super()._enter(op, what, nbytes)

    def log(self, *args, **more):
        seen["calls"], self.calls_made = self.calls_made, []
        return super().log(*args, **more)

    def summary(self, memory, traffic):
        seen["predicted"] = traffic
        super().summary(memory, traffic)


def observed(rank, folder, variants):
    train_tp.DataParallel, train_tp.Meter = Observed, ObservedMeter
    result = {}
    for name, flags in variants.items():
        rows = train(rank, "train_tp", folder, {name: flags})[name]
        assert seen["calls"] == seen["predicted"], name  # every collective of a step, in order, with its bytes
        result[name] = rows, *(seen[k] for k in ("layout", "first", "digests"))
    return result


def reference_run(rank, folder, variants):
    train_ddp.DataParallel = Reference
    return train(rank, "train_ddp", folder, variants)


# --- tests ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """train_ddp in one process, the whole batch in one micro-batch -> kind: (rows, final state), and the folder."""
    folder = tmp_path_factory.mktemp("one")
    files(folder)
    rows = run_ranks(
        1, reference_run, str(folder), flags_of(folder, {k: {"micro_batch": 12} for k in KINDS}), timeout=200
    )[0]
    return {kind: (rows[kind], final_weights(folder / kind)) for kind in KINDS} | {"folder": folder}


@pytest.mark.parametrize("world_size, variants", [(2, TWO), (4, FOUR)])
def test_parity(world_size, variants, reference, tmp_path):
    files(tmp_path)
    results = run_ranks(world_size, observed, str(tmp_path), flags_of(tmp_path, variants), timeout=400)
    for name in variants:
        rows, weights = reference[kind_of(name)]
        assert_follows(results[0][name][0], rows, final_weights(tmp_path / name), weights, 1e-9)
        ours, theirs = ([r["val_loss"] for r in some if "val_loss" in r] for some in (results[0][name][0], rows))
        assert ours == pytest.approx(theirs, abs=1e-9, rel=0) and len(ours) == (
            2 if name.startswith("evaluated") else 0
        )
        ranks = [result[name] for result in results]
        first_slices = {team_rank: first for _, (_, team_rank), first, _ in ranks}
        assert len(set(first_slices.values())) == len(first_slices)  # no two ranks of a team begin with the same slice
        units = len(ranks[0][3][0])
        for rank_rows, (_, team_rank), first, digests in ranks:
            # one loss and one norm everywhere, the same bits; and so the norms and their moments, after every update
            assert [(r["loss"], r["grad_norm"]) for r in rank_rows] == [
                (r["loss"], r["grad_norm"]) for r in ranks[0][0]
            ]
            assert [d[1] for d in digests] == [d[1] for d in ranks[0][3]] and len(digests) == len(rows)
            # replicas hold the same slices, bit for bit
            assert first == first_slices[team_rank]
            twin = next(d for _, (_, t), _, d in ranks if t == team_rank)
            assert digests == twin and units == len(digests[0])


def test_one_rank_not_finite_all_skip(tmp_path):
    toy_files(tmp_path, **HEADS)
    results = run_ranks(2, observed, str(tmp_path), {"not finite": {"micro_batch": 12, "steps": 5}}, timeout=100)
    for rows, _, _, digests in (r["not finite"] for r in results):
        assert [r["skipped"] for r in rows] == [False, False, True, False, False]
        assert len(digests) == 4  # nobody updated


def relay(rank, folder, source):
    """Load a checkpoint under one layout and save it again at once, load that under the next, ..."""
    layouts = {"tp 4": train_tp.Config(tp=4), "2 x 2": train_tp.Config(tp=2), "ddp": train_ddp.Config()}
    for out, cfg in layouts.items():
        flags = dict(
            model=f"{folder}/toy.json",
            data=f"{folder}/plain",
            device="cpu",
            dtype="float64",
            global_batch=12,
            micro_batch=3,
        )
        cfg = dataclasses.replace(cfg, out=f"{folder}/{out}", steps=50, resume=source, **flags)
        if isinstance(cfg, train_tp.Config):
            run = start(cfg, "train_tp", tp=cfg.tp)
            model = train_tp.TensorParallelGPT(run.model_cfg, train_tp.Team(run))
            state = train_tp.DataParallel(model, run, held_by(run))
        else:
            run = start(cfg, "train_ddp")
            state = train_ddp.DataParallel(train_ddp.GPT(run.model_cfg), run)
        saver, scaler = Checkpointer(f"{run.out}/ckpt", group=run.control), LossScaler(run.cfg)
        step, updates = resume(run, saver, state, scaler)
        saver.save(step, state.pieces(), progress(run, updates, scaler))
        saver.wait()
        source = f"{run.out}/ckpt/{Path(source).name}"


def test_any_layout_to_any_layout(reference, tmp_path):
    """One process -> tp 4 -> 2 x 2 -> data parallel: every weight and moment bit-equal, 61 words and not 64."""
    toy_files(tmp_path, **HEADS)
    source, weights = max((reference["folder"] / "plain/ckpt").glob("step_*")), reference["plain"][1]
    run_ranks(4, relay, str(tmp_path), str(source), timeout=100)
    for out in ("tp 4", "2 x 2", "ddp"):
        loaded = final_weights(tmp_path / out)
        assert loaded.keys() == weights.keys() and loaded["head.weight"].shape == (61, 32)
        for name, tensor in weights.items():
            assert torch.equal(loaded[name], tensor), (out, name)


def halves(rank, folder):
    flags = {"micro_batch": 6, "dropout": 0.1, "save_every": 5, "steps": 10}
    straight = train(rank, "train_tp", folder, {"straight": flags})["straight"]
    resumed = train(rank, "train_tp", folder, {"resumed": flags | {"resume": f"{folder}/straight/ckpt/step_{5:08d}"}})[
        "resumed"
    ]
    return straight, resumed


def test_resume_is_bit_equal(tmp_path):
    toy_files(tmp_path, **HEADS)
    straight, resumed = run_ranks(2, halves, str(tmp_path), timeout=100)[0]
    assert [(r["step"], r["loss"], r["grad_norm"]) for r in straight[5:]] == [
        (r["step"], r["loss"], r["grad_norm"]) for r in resumed
    ]
    a, b = final_weights(tmp_path / "straight"), final_weights(tmp_path / "resumed")
    assert all(torch.equal(a[name], b[name]) for name in a)


def refusals(rank, folder):
    def message(fn):
        try:
            fn()
        except (UserError, IndexError, RuntimeError) as error:
            return str(error)

    base = dict(data=f"{folder}/plain", device="cpu", global_batch=12, micro_batch=3, steps=1, workers=0)
    cases = {
        "heads": (dict(n_head=6, n_kv_head=6, n_embd=36), {}),
        "kv heads": (dict(n_head=8, n_kv_head=2), {}),
        "swiglu": (dict(n_ff=90), {}),
        "sequence": (dict(seq_len=30), {}),
        "world": ({}, {"tp": 3}),
        "negative": ({}, {"tp": -2}),
    }
    found = {}
    for name, (model, flags) in cases.items():
        toy_files_once(rank, folder, name, HEADS | model)
        cfg = train_tp.Config(model=f"{folder}/{name}/toy.json", out=f"{folder}/{name}/run", **base | flags)
        found[name] = message(lambda cfg=cfg: train_tp.main(cfg))
    found["sub-group"] = sub_group(rank, folder)

    # a token id that no rank has: an error as in one process, not a zero vector
    run = Run(train_tp.Config(), rank, 4, torch.device("cpu"), tp=4, model_cfg=ModelConfig(1, 4, 4, 8, 8, 61, 8))
    team = train_tp.Team(run)
    model = train_tp.TensorParallelGPT(run.model_cfg, team)
    train_tp.DataParallel(model, run, held_by(run))
    table = model.embed_summand
    logits = torch.zeros(1, 2, 16)
    for bad in (61, 63, 64, 1000, -1):
        found[f"input {bad}"] = message(lambda bad=bad: table(torch.tensor([[3, bad]])))
    for bad in (61, 63, 1000, -2):
        found[f"target {bad}"] = message(lambda bad=bad: train_tp.own_stats(logits, torch.tensor([[3, bad]]), 61, team))
    assert table(torch.tensor([[3, 60]])).shape == (1, 2, 8)
    return found


def toy_files_once(rank, folder, name, model):
    if rank == 0:
        Path(folder, name).mkdir()
        toy_files(Path(folder, name), **model)
    dist.barrier()


def sub_group(rank, folder):
    """main() on ranks 0 and 1 of 4."""
    group = dist.new_group([0, 1])
    if rank < 2:
        flags = dict(
            model=f"{folder}/world/toy.json",
            data=f"{folder}/plain",
            out=f"{folder}/sub",
            device="cpu",
            dtype="float64",
            workers=0,
        )
        cfg = train_tp.Config(global_batch=12, micro_batch=6, steps=2, lr=1e-3, warmup_steps=5, clip=0.1, **flags)
        return [(r["loss"], r["grad_norm"]) for r in train_tp.main(cfg, group)]


def test_refusals(reference, tmp_path):
    toy_files(tmp_path, **HEADS)
    results = run_ranks(4, refusals, str(tmp_path), timeout=100)
    assert results[0]["heads"] == "n_head=6 is not divisible by tp=4, valid for this model: --tp 1, 2"
    assert results[0]["kv heads"] == "n_kv_head=2 is not divisible by tp=4, valid for this model: --tp 1, 2"
    assert results[0]["swiglu"] == "n_ff=90 is not divisible by tp=4, valid for this model: --tp 1, 2"
    assert results[0]["sequence"] == "seq_len=30 is not divisible by tp=4, valid for this model: --tp 1, 2"
    assert results[0]["world"] == "tp*pp=3 does not divide the world of 4 ranks"
    assert "tp*pp=-2" in results[0]["negative"]
    for name, text in results[0].items():
        if name == "sub-group":
            continue
        assert text and all(r[name] == text for r in results), (
            name,
            [r[name] for r in results],
        )  # the same on every rank
    rows = [(r["loss"], r["grad_norm"]) for r in reference["plain"][0][:2]]
    torch.testing.assert_close(torch.tensor(results[0]["sub-group"]), torch.tensor(rows), rtol=0, atol=1e-9)
    assert results[0]["sub-group"] == results[1]["sub-group"] and results[2]["sub-group"] is None


def test_largest_models_divide():
    """The sizes that need tensor parallelism can be cut by 2, 4 and 8."""
    for size in ("1b", "6b", "7b"):
        m = SIZES[size]
        assert all(n % 8 == 0 for n in (m.n_head, m.n_kv_head, m.n_ff, m.seq_len)), size
