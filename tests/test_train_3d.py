"""Tensor x pipeline x data parallel against one process of train_ddp.py: contract points 1 to 9 of train_3d.py.

Two stages, so that both have an end of the model; tied copies of the embedding on both. Who is where, by hand, on
2 x 2 x 2: rank = 4 replica + 2 stage + seat.
"""

import hashlib

import pytest
import torch
import torch.distributed as dist
from harness import add_val, assert_follows, final_weights, run_ranks, toy_files, train
from test_precision import NAME, runs, state
from test_resume import cut_at, load_save_go_on, same_tensors

import train_3d
from buckets import colours
from links import open_links
from model import ModelConfig
from support.flags import UserError
from support.run import Run
from train_tp import Team

LAYERS = 2  # and four parts when interleaved: every boundary there is
KINDS = {  # what one process computes
    "plain": {},
    "tied, dropout": {"tie": True, "dropout": 0.1},
    "short, tied, dropout": {"tie": True, "dropout": 0.1, "steps": 8},
    "masked": {"data": "masked", "steps": 8, "eval_every": 3},
    "masked, tied": {"data": "masked", "tie": True, "steps": 8, "eval_every": 3},
}
VARIANTS = {  # each begins with its kind
    "plain": {},
    "tied, dropout": {},
    "masked, zero 0, recompute": {"zero": 0, "recompute": "full"},
}
PIPELINES = {
    "masked, tied, gpipe, selective": {"schedule": "gpipe", "recompute": "selective", "stages": "1.5,0.5"},
    "short, tied, dropout, zero 0, no overlap": {"zero": 0, "overlap": False, "stages": "0.5,1.5"},
    "short, tied, dropout, interleaved, recompute": {"schedule": "interleaved", "recompute": "full"},
    "masked, tied, interleaved, zero 0": {"schedule": "interleaved", "zero": 0},
}


def files(folder):
    toy_files(folder, n_layer=LAYERS)
    add_val(folder, "masked")


def kind_of(name):
    return max((kind for kind in KINDS if name.startswith(kind)), key=len)


def flags(folder, variants, **more):
    found = {name: KINDS[kind_of(name)] | own | more for name, own in variants.items()}
    for own in found.values():
        own |= {"stages": "0.5,0.5,0.5,0.5"} if own.get("schedule") == "interleaved" else {}
    return {name: own | {"data": f"{folder}/{own.get('data', 'plain')}"} for name, own in found.items()}


def watched(rank, folder, variants):
    """train(), and by variant what the rank holds: hashes by bucket after every update."""
    states = {}

    def watch(real):
        class Watched(real):
            def __init__(self, *args):
                super().__init__(*args)
                check_memory(self)

            def adamw_step(self, *args):
                super().adamw_step(*args)
                held = {}
                for unit, b in self.buckets.items():
                    kept = [b.weights] if self.shared else [b.weights, b.master, b.exp_avg, b.exp_avg_sq]
                    held[unit] = hashlib.sha256(b"".join(t.numpy().tobytes() for t in kept)).hexdigest()
                states.setdefault(self.run.out, []).append(held)

        return Watched

    train_3d.Zero1, train_3d.DataParallel = watch(train_3d.Zero1), watch(train_3d.DataParallel)
    rows = train(rank, "train_3d", folder, variants)
    return {name: (rows[name], states[f"{folder}/{name}"]) for name in variants}


def check_memory(strategy):
    """Every term of the prediction that is a buffer of the strategy's is its size."""
    buckets = strategy.buckets.values()
    weights = [b.weights for b in buckets if b.weights is not b.master]
    there = {
        "master weights": [b.master for b in buckets],
        "moments": [t for b in buckets for t in (b.exp_avg, b.exp_avg_sq)],
        "gradients": [b.grad for b in buckets],
        "compute weights": weights,
    }
    there |= {"gradient buffers": strategy.received} if strategy.shared else {}
    memory, _ = train_3d.predict(strategy.run)
    assert {term: sum(t.nbytes for t in tensors) for term, tensors in there.items()} == {t: memory[t] for t in there}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """train_ddp in one process, the whole batch in one micro-batch -> kind: (rows, final state)."""
    folder = tmp_path_factory.mktemp("one")
    files(folder)
    kinds = flags(folder, dict.fromkeys(KINDS, {}), micro_batch=12)
    rows = run_ranks(1, train, "train_ddp", str(folder), kinds, timeout=200)[0]
    return {kind: (rows[kind], final_weights(folder / kind)) for kind in KINDS}


@pytest.mark.parametrize("tp, pp, dp", [(1, 1, 1), (2, 1, 2), (1, 2, 2), (2, 2, 1), (2, 1, 3), (2, 2, 2)])
def test_parity(tp, pp, dp, reference, tmp_path, capsys):
    """Losses, norms, every tensor and the validation loss; replicas and tied copies hold the same bits."""
    files(tmp_path)
    chosen = VARIANTS | (PIPELINES if pp > 1 else {})
    if tp * pp * dp == 8:  # on two cores
        chosen = {name: own for name, own in chosen.items() if kind_of(name) == name or "interleaved" in name}
    variants = flags(tmp_path, chosen, tp=tp, pp=pp, micro_batch=6 // dp)
    results = run_ranks(tp * pp * dp, watched, str(tmp_path), variants, timeout=400)
    screen = capsys.readouterr().out
    for name in variants:
        rows, weights = reference[kind_of(name)]
        assert_follows(results[0][name][0], rows, final_weights(tmp_path / name), weights, 1e-9)
        for ours, _ in (result[name] for result in results):
            assert [(r["loss"], r["grad_norm"]) for r in ours] == [
                (r["loss"], r["grad_norm"]) for r in results[0][name][0]
            ]
            val, expected = ([r["val_loss"] for r in some if "val_loss" in r] for some in (ours, rows))
            assert val == pytest.approx(expected, rel=1e-9) and len(val) == (3 if "masked" in name else 0)
        for states in zip(*(result[name][1] for result in results)):
            for rank, held in enumerate(states):
                stage, seat = rank // tp % pp, rank % tp
                assert held == states[stage * tp + seat]  # the first replica's
                for unit in held if tp > 1 else ():  # norms are whole on each rank of a team, matrices are slices
                    assert (held[unit] == states[stage * tp + 1 - seat][unit]) == unit.startswith("norms")
                if "tied" in name and pp > 1:
                    assert held["embed"] == states[seat]["embed"] == states[(pp - 1) * tp + seat]["embed"]
        assert len(results[0][name][1]) == len(rows)
    if (tp, pp, dp) == (2, 2, 2):
        assert "replica 0:  stage 0  ranks 0 1   ==>   stage 1  ranks 2 3\n" in screen
        assert "replica 1:  stage 0  ranks 4 5   ==>   stage 1  ranks 6 7\n" in screen


# --- who is where -----------------------------------------------------------------------------------------------------

GROUPS = {  # (tp, pp) on 8 ranks -> what for: the ranks of each group
    (2, 2): {
        "replicas": [{0, 4}, {1, 5}, {2, 6}, {3, 7}],
        "norms": [{0, 1, 4, 5}, {2, 3, 6, 7}],
        "twins": [{0, 2}, {1, 3}, {4, 6}, {5, 7}],
        "team": [{0, 1}, {2, 3}, {4, 5}, {6, 7}],
        "from_previous": [{0, 2}, {1, 3}, {4, 6}, {5, 7}],  # two stages are each other's neighbours on both sides
        "to_previous": [{0, 2}, {1, 3}, {4, 6}, {5, 7}],
        "from_next": [{0, 2}, {1, 3}, {4, 6}, {5, 7}],
        "to_next": [{0, 2}, {1, 3}, {4, 6}, {5, 7}],
    },
    (2, 4): {
        "replicas": [{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}],
        "norms": [{0, 1}, {2, 3}, {4, 5}, {6, 7}],
        "twins": [{0, 6}, {1, 7}, {2, 4}, {3, 5}],  # the stages between hold no copy and do not use their group
        "team": [{0, 1}, {2, 3}, {4, 5}, {6, 7}],
        "from_previous": [{0, 6}, {1, 7}, {0, 2}, {1, 3}, {2, 4}, {3, 5}, {4, 6}, {5, 7}],
        "to_previous": [{0, 6}, {1, 7}, {0, 2}, {1, 3}, {2, 4}, {3, 5}, {4, 6}, {5, 7}],
        "from_next": [{0, 2}, {1, 3}, {2, 4}, {3, 5}, {4, 6}, {5, 7}, {0, 6}, {1, 7}],
        "to_next": [{0, 2}, {1, 3}, {2, 4}, {3, 5}, {4, 6}, {5, 7}, {0, 6}, {1, 7}],
    },
    (1, 2): {
        "replicas": [{0, 2, 4, 6}, {1, 3, 5, 7}],
        "twins": [{0, 1}, {2, 3}, {4, 5}, {6, 7}],
        "team": [{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}],
    },
}


def sums(rank, layouts):
    """Of 2 ** rank over each group that this rank is in, by layout and use."""
    found = {}
    for tp, pp in layouts:
        cfg = train_3d.Config(micro_batch=1, seq_len=8, hang_timeout=60)
        model_cfg = ModelConfig(LAYERS, 4, 2, 8, 8, 61, 8, tie=True)
        run = Run(cfg, rank, 8, torch.device("cpu"), dtype=torch.float64, tp=tp, pp=pp, model_cfg=model_cfg)
        groups = {what: run.group(what, colour) for what, colour in colours(run).items()}
        groups["team"] = Team(run).group
        links = open_links(run, train_3d.message_shape(run), wraps=True)
        groups |= {what: link.group for what, link in links._asdict().items()}
        totals = {what: torch.tensor(2**rank) for what in groups}
        # all started before one is waited for: what one stage receives from, the other sends to
        for work in [dist.all_reduce(totals[what], group=group, async_op=True) for what, group in groups.items()]:
            work.wait()
        found |= {(tp, pp, what): total.item() for what, total in totals.items()}
    return found


def test_groups():
    """Every axis' group has the members that are written down above."""
    results = run_ranks(8, sums, list(GROUPS), timeout=100)
    for (tp, pp), groups in GROUPS.items():
        for what, sets in groups.items():
            for rank, found in enumerate(results):
                index = rank if len(sets) == 8 else next(i for i, members in enumerate(sets) if rank in members)
                assert found[tp, pp, what] == sum(2**member for member in sets[index]), (tp, pp, what, rank)
    assert not any((1, 2, "norms") in found for found in results)


def test_default_layout():
    default = {n: train_3d.default_layout(train_3d.Config(), n) for n in (1, 2, 3, 4, 6, 8)}
    assert default == {1: (1, 1), 2: (2, 1), 3: (1, 1), 4: (2, 2), 6: (2, 1), 8: (2, 2)}
    assert train_3d.default_layout(train_3d.Config(tp=4), 8) == (4, 2)
    assert train_3d.default_layout(train_3d.Config(pp=4), 8) == (2, 4)


def refusals(rank, folder, cases):
    found = {}
    for name, more in cases.items():
        try:
            train(rank, "train_3d", folder, {name: {"micro_batch": 3} | more})
        except UserError as error:
            found[name] = str(error)
    return found


def test_refused_before_there_is_a_run_folder(tmp_path):
    """What cannot be laid out: the same words on every rank, and nothing is written."""
    toy_files(tmp_path, n_layer=LAYERS)
    cases = {
        "tp*pp=3 does not divide the world of 4 ranks": {"tp": 3, "pp": 1},
        "tp*pp=8 does not divide the world of 4 ranks": {"tp": 4, "pp": 2},
        "n_kv_head=2 is not divisible by tp=4, valid for this model: --tp 1, 2": {"tp": 4, "pp": 1},
        "--stages 1.5,2: expected 2 numbers of blocks, whole or with .5, with the sum 2": {"stages": "1.5,2"},
        "--schedule interleaved with --chunks 2 and 1 micro-batches": {"schedule": "interleaved", "micro_batch": 12},
    }
    results = run_ranks(4, refusals, str(tmp_path), {f"run {i}": more for i, more in enumerate(cases.values())})
    for i, text in enumerate(cases):
        assert all(found[f"run {i}"].startswith(text) for found in results), [found[f"run {i}"] for found in results]
    assert not list(tmp_path.glob("run *"))


# --- all or none, any layout to any -----------------------------------------------------------------------------------


def test_overflow_on_one_rank_skips_on_all(tmp_path):
    """fp16, 2 x 2 x 2: an inf in a gradient of rank 3 alone (replica 0, stage 1, seat 1) in step 3."""
    toy_files(tmp_path, n_layer=LAYERS)
    usual = dict(dtype="float16", tp=2, pp=2, micro_batch=6, steps=6, save_every=1, keep_last=9, scale_power=10)
    variants = {f"zero {zero}": ("train_3d", usual | {"zero": zero}) for zero in (0, 1)}
    results = run_ranks(8, runs, str(tmp_path), variants, (3, {3}, float("inf")), timeout=200)
    for name in variants:
        for rows, _, error in (result[name] for result in results):
            assert error is None and [r["skipped"] for r in rows] == [step == 3 for step in range(6)]
            assert [r["loss_scale"] for r in rows] == [1024.0] * 4 + [512.0] * 2
            assert rows[4]["lr"] == rows[3]["lr"] != rows[2]["lr"]
        before, after, later = (state(tmp_path, name, step) for step in (3, 4, 5))
        same_tensors(before, after, name)
        assert not torch.equal(after[NAME], later[NAME])
        assert f"{NAME} on rank 3" in results[0][name][1]


def test_any_layout_to_any_layout(tmp_path):
    """From one process through every script and back into 3D between them: bit-equal, and the next losses follow."""
    toy_files(tmp_path, n_layer=LAYERS)
    shared = dict(steps=10, save_every=5, keep_last=9, tie=True, dropout=0.1)
    one = {"straight": shared | {"micro_batch": 12}}
    straight = run_ranks(1, train, "train_ddp", str(tmp_path), one, timeout=100)[0]["straight"]
    cut_at(tmp_path, "straight", 5, "first")
    saved = final_weights(tmp_path / "first")
    chain = {
        "3d, 2x2x1": ("train_3d", {"tp": 2, "pp": 2}),
        "zero 3": ("train_zero", {"stage": 3}),
        "3d, 1x2x2": ("train_3d", {"tp": 1, "pp": 2, "stages": "1.5,0.5"}),
        "tp": ("train_tp", {"tp": 2}),
        "3d, 2x1x2": ("train_3d", {"tp": 2, "pp": 1}),
        "pipe": ("train_pipe", {"pp": 4, "stages": "0.5,0.5,0.5,0.5"}),
        "3d, interleaved": ("train_3d", {"schedule": "interleaved", "stages": "0.5,0.5,0.5,0.5", "zero": 0}),
        "ddp": ("train_ddp", {}),
    }
    variants, before = {}, "first"
    for name, (script, more) in chain.items():
        resume = f"{tmp_path}/{before}/ckpt/step_00000005"
        variants[name] = (script, shared | more | {"micro_batch": 3, "resume": resume})
        before = name
    results = run_ranks(4, load_save_go_on, str(tmp_path), variants, timeout=300)
    for name in chain:
        same_tensors(final_weights(tmp_path / name), saved, name)
        assert_follows(results[0][name], straight[5:], {}, {}, 1e-9)


def test_resume_is_bit_equal(tmp_path):
    """5 + 5 steps are 10, in the same layout."""
    toy_files(tmp_path, n_layer=LAYERS)
    usual = dict(tp=2, pp=2, micro_batch=3, dropout=0.1, tie=True, steps=10, save_every=5)
    both = {"whole": usual, "half": usual | {"resume": f"{tmp_path}/whole/ckpt/step_00000005"}}
    rows = run_ranks(4, train, "train_3d", str(tmp_path), both, timeout=100)[0]
    values = {name: [(r["step"], r["loss"], r["grad_norm"]) for r in rows[name][-5:]] for name in both}
    assert values["whole"] == values["half"] and len(rows["half"]) == 5
    same_tensors(final_weights(tmp_path / "whole"), final_weights(tmp_path / "half"), "resumed")
