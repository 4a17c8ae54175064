"""The pipeline: its schedules and cuts without processes, then train_pipe.py against one process of train_ddp.py."""

import hashlib
import itertools
import json
import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from harness import ROOT, add_val, assert_follows, final_weights, run_ranks, toy_files, train

import train_ddp
import train_pipe
from buckets import held_by
from model import SIZES, ModelConfig, flops_per_token, params
from support.flags import Config, UserError
from support.run import Run
from support.timeline import draw, most_in_flight, timeline
from train_pipe import cut, schedule

LAYERS = 7  # divides by none of 2, 3, 4 stages
LAYOUTS = [(name, p, m, 1) for name in ("gpipe", "1f1b") for p in range(1, 9) for m in range(1, 17)]
LAYOUTS += [("interleaved", p, m, chunks) for p in range(2, 9) for m in range(p, 17, p) for chunks in (2, 3, 4)]


# --- without processes ------------------------------------------------------------------------------------------------


def test_schedule():
    for name, stages, m, chunks in LAYOUTS:
        orders = [schedule(name, stage, stages, m, chunks) for stage in range(stages)]
        for stage, order in enumerate(orders):
            assert sorted(order) == [(op, number) for op in "BF" for number in range(m * chunks)]
            at = {step: i for i, step in enumerate(order)}
            for chunk in range(chunks):
                for op in "FB":  # the order in which gradients are summed
                    places = [at[op, chunk * m + micro] for micro in range(m)]
                    assert places == sorted(places)
            assert all(at["F", number] < at["B", number] for number in range(m * chunks))
            most = {"gpipe": m, "1f1b": min(stages - stage, m)}
            most["interleaved"] = min(2 * (stages - stage - 1) + (chunks - 1) * stages + 1, m * chunks)
            assert most_in_flight(order) == most[name]
        rows = timeline(schedule, name, stages, m, chunks)
        assert [[step[1:] for step in row] for row in rows] == orders
        starts = {
            (op, n // m * stages + s, n % m): start for s, row in enumerate(rows) for start, op, n in row
        }  # by part of the model
        for (op, part, micro), start in starts.items():
            if op == "F" and part:
                assert start >= starts["F", part - 1, micro] + 1
            if op == "B" and part + 1 < stages * chunks:
                assert start >= starts["B", part + 1, micro] + 2
        assert max(starts.values()) + 2 == 3 * (m * chunks + stages - 1)  # idle (p-1)/(chunks m+p-1)


def test_timeline_finds_a_deadlock(monkeypatch):
    monkeypatch.setattr(
        train_pipe, "schedule", lambda name, s, *sizes: [("F", 0), ("B", 0)] if s else [("B", 0), ("F", 0)]
    )
    with pytest.raises(ValueError, match="every stage waits"):
        timeline(train_pipe.schedule, "1f1b", 2, 1)


def test_no_deadlock_and_no_mix_up_on_the_links():
    """A link knows only the order of its messages; isend waits for the one before, and that until its receiver posts.

    A receive is posted when the message before has been taken; the first with its recv(), or early: an activation,
    but not to stage 0.
    """
    for name, stages, m, chunks in LAYOUTS:
        programs, sent, taken = [], {}, {}
        for s in range(stages):
            program = []
            for op, number in schedule(name, s, stages, m, chunks):
                part, step = number // m * stages + s, 1 if op == "F" else -1
                if 0 <= part - step < stages * chunks:
                    program.append(("take", (op, (s - step) % stages), (part, number % m)))
                if 0 <= part + step < stages * chunks:
                    program.append(("put", (op, s), (part + step, number % m)))
            programs.append(program)
        moved = True
        while moved:
            moved = False
            for program in programs:
                while program:
                    what, link, message = program[0]
                    put, took = sent.setdefault(link, []), taken.setdefault(link, [])
                    early = link[0] == "F" and (link[1] + 1) % stages > 0
                    asked = any(other and other[0][:2] == ("take", link) for other in programs)
                    posted = len(took) + 1 if took or early or asked else 0
                    if not (len(put) > len(took) if what == "take" else posted >= len(put)):
                        break
                    (took if what == "take" else put).append(message)
                    program.pop(0)
                    moved = True
        assert not any(programs) and sent == taken, (name, stages, m, chunks)


def config(n_layer, vocab_size=61, **more):
    return ModelConfig(n_layer, 4, 2, 32, 88, vocab_size, 32, **more)


def test_cut_is_the_best_of_all():
    for n_layer, vocab_size in itertools.product(range(1, 6), (1, 400, 2000)):
        cfg = config(n_layer, vocab_size)
        head = 6 * vocab_size * 32
        mlp = 18 * 32 * 88
        attention = (flops_per_token(cfg) - head) / n_layer - mlp
        cost = [attention, mlp] * n_layer
        cost[-1] += head
        for stages in range(1, n_layer + 1):
            parts = cut(cfg, stages)
            assert [i for part in parts for i in part] == list(range(2 * n_layer)) and all(len(part) for part in parts)
            slowest = {
                ends: max(sum(cost[a:b]) for a, b in itertools.pairwise((0, *ends, 2 * n_layer)))
                for ends in itertools.combinations(range(1, 2 * n_layer), stages - 1)
            }
            assert slowest[tuple(part.stop for part in parts[:-1])] == pytest.approx(min(slowest.values()), rel=1e-9)


def test_chunks_leave_every_stage_its_share():
    for n_layer, stages, chunks in itertools.product((4, 8, 11, 32), (2, 3, 4), (2, 3, 4)):
        if stages * chunks > n_layer:
            continue
        whole, parts = cut(config(n_layer), stages), cut(config(n_layer), stages, chunks)
        assert [i for part in parts for i in part] == list(range(2 * n_layer)) and all(len(part) for part in parts)
        assert [sum(len(part) for part in parts[s::stages]) for s in range(stages)] == [len(part) for part in whole]


def test_cut_of_6b():
    sizes = {stages: [len(part) / 2 for part in cut(SIZES["6b"], stages)] for stages in (1, 2, 4, 8)}
    assert sizes == {1: [32], 2: [16.5, 15.5], 4: [8, 8.5, 8.5, 7], 8: [4.5, 4.5, 4, 4, 4, 4, 4, 3]}
    assert [len(part) / 2 for part in cut(SIZES["6b"], 2, 4)] == [4, 4, 4, 4, 4, 4, 4.5, 3.5]


@pytest.mark.parametrize("tie", [False, True])
def test_every_parameter_has_its_stage(tie):
    cfg = config(LAYERS, tie=tie)
    for stages in range(1, LAYERS + 1):
        run = Run(Config(), 0, stages, torch.device("cpu"), pp=stages, model_cfg=cfg)
        held = [held_by(run, [part]) for part in cut(cfg, stages)]
        for name in params(cfg):
            where = [s for s, units in enumerate(held) if any(name in what.slices for what in units.values())]
            assert (
                where == ([0, stages - 1] if tie and name == "tok_emb.weight" and stages > 1 else where[:1]) and where
            )


@pytest.mark.parametrize(
    "by_hand", ["7", "3,3", "4,4", "7,0", "8,-1", "a,b", "3;4", "3,3,1", "4,3,", "3.2,3.8", "4.5,3"]
)
def test_wrong_cut_is_refused(by_hand):
    assert [len(part) / 2 for part in cut(config(LAYERS), 2, 1, "4,3")] == [4, 3]
    assert [len(part) / 2 for part in cut(config(LAYERS), 2, 1, "3.5,3.5")] == [3.5, 3.5]
    with pytest.raises(UserError, match=f"--stages {by_hand}: expected 2 numbers of blocks, .* sum 7"):
        cut(config(LAYERS), 2, 1, by_hand)
    with pytest.raises(UserError, match="8 parts and the model has 7 blocks"):
        cut(config(LAYERS), 8)


def command(*flags):
    call = [sys.executable, "train_pipe.py", "--device", "cpu", *flags]
    return subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_command_line(tmp_path):
    toy_files(tmp_path)
    done = command("--draw", "--pp", "3", "--global-batch", "12", "--micro-batch", "2")
    drawings = [draw(schedule, *args) for args in (("gpipe", 3, 6), ("1f1b", 3, 6), ("interleaved", 3, 6, 2))]
    assert done.returncode == 0 and done.stdout == "".join(f"{drawing}\n" for drawing in drawings)
    done = command("--draw", "--global-batch", "2", "--micro-batch", "4")
    assert (done.returncode, done.stderr) == (
        2,
        "error: --draw of 4 stages, 0 micro-batches, 2 chunks: allowed is 1 or more\n",
    )
    done = command(
        "--pp", "2", "--model", f"{tmp_path}/toy.json", "--data", f"{tmp_path}/plain", "--out", f"{tmp_path}/run"
    )
    assert (done.returncode, done.stderr) == (2, "error: tp*pp=2 does not divide the world of 1 ranks\n")


# --- with processes ---------------------------------------------------------------------------------------------------

VARIANTS = {
    "plain": {"micro_batch": 3},
    "tied, dropout": {"tie": True, "dropout": 0.1, "micro_batch": 2, "stages": "by hand", "steps": 8},
    "tied, masked": {"tie": True, "data": "masked", "micro_batch": 6, "eval_every": 4},
    "gpipe": {
        "schedule": "gpipe",
        "data": "masked",
        "dropout": 0.1,
        "micro_batch": 3,
        "recompute": "full",
        "steps": 8,
    },
    "no overlap": {"overlap": False, "micro_batch": 6, "steps": 10},
    "tied, interleaved": {"schedule": "interleaved", "data": "masked", "tie": True, "dropout": 0.1, "eval_every": 4},
}
COUNTS = [f"{name} {m}" for m in range(1, 9) for name in ("gpipe", "1f1b")]  # micro-batches, fewer than stages too


def files(folder):
    toy_files(folder, n_layer=LAYERS)
    add_val(folder, "masked")


def flags(folder, pp, dp, reference=False):
    hand = {1: "7", 2: "2.5,4.5", 3: "1,1.5,4.5", 4: "4,1,1,1"}[pp]
    found = {name: dict(more) for name, more in VARIANTS.items()}
    if reference or pp > 2:
        found |= {
            c: {"schedule": c.split()[0], "global_batch": 2 * int(c.split()[1]), "micro_batch": 2, "steps": 2}
            for c in COUNTS
        }
    for name, more in found.items():
        more["data"] = f"{folder}/{more.get('data', 'plain')}"
        if name in COUNTS:
            more |= {"save_every": 0, "data": f"{folder}/masked", "tie": True}
        if more.get("stages"):
            more["stages"] = hand
        if reference:
            more |= {"micro_batch": more.get("global_batch", 12), "overlap": True, "recompute": "none"}
            more = {k: v for k, v in more.items() if k not in ("schedule", "stages")}
            found[name] = more
        else:
            more["pp"] = pp
            if name == "tied, interleaved":  # 6 parts, or 8 that do not fit: then 4 and one by one
                more |= {"chunks": {2: 3, 3: 2}.get(pp, 1), "micro_batch": 3 if pp == 2 else 2}
    return found


def digests(buckets):
    """Unit -> hash of everything an update touches."""
    return {
        unit: hashlib.sha256(
            b"".join(t.numpy().tobytes() for t in (b.master, b.exp_avg, b.exp_avg_sq, b.weights))
        ).hexdigest()
        for unit, b in buckets.items()
    }


def watched(rank, folder, variants):
    """train() of train_pipe, and by variant: the state's digests after every update, predicted and counted traffic."""
    states, traffic = {}, {}

    class Watched(train_pipe.DataParallel):
        def adamw_step(self, *args):
            super().adamw_step(*args)
            states.setdefault(self.run.out, []).append(digests(self.buckets))

    class Meter(train_pipe.Meter):
        def summary(self, memory, predicted):
            traffic[self.run.out] = self.compare(predicted)
            super().summary(memory, predicted)

    real, train_pipe.DataParallel, train_pipe.Meter = (train_pipe.DataParallel, train_pipe.Meter), Watched, Meter
    rows = train(rank, "train_pipe", folder, variants)
    train_pipe.DataParallel, train_pipe.Meter = real
    return {name: (rows[name], states[f"{folder}/{name}"], traffic[f"{folder}/{name}"]) for name in variants}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """train_ddp in one process, the whole batch in one micro-batch."""
    folder = tmp_path_factory.mktemp("one")
    files(folder)
    rows = run_ranks(1, train, "train_ddp", str(folder), flags(folder, 1, 1, reference=True), timeout=300)[0]
    return rows, {name: final_weights(folder / name) for name in VARIANTS}


@pytest.mark.parametrize("pp, dp", [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2)])
def test_parity(pp, dp, reference, tmp_path):
    files(tmp_path)
    results = run_ranks(pp * dp, watched, str(tmp_path), flags(tmp_path, pp, dp), timeout=300)
    rows, weights = reference
    for name in VARIANTS:
        assert_follows(results[0][name][0], rows[name], final_weights(tmp_path / name), weights[name], 1e-9)
    counts = COUNTS if pp > 2 else []
    for name in counts:
        assert_follows(results[0][name][0], rows[name], {}, {}, 1e-9)
    for m in sorted({int(name.split()[1]) for name in counts}):  # both schedules add in the same order
        assert [r[f"gpipe {m}"][1] for r in results] == [r[f"1f1b {m}"][1] for r in results]
    for name in ("tied, masked", "tied, interleaved"):
        val = {r["step"]: r["val_loss"] for r in rows[name] if "val_loss" in r}
        assert len(val) == 3
        for result in results:
            assert {r["step"]: r["val_loss"] for r in result[name][0] if "val_loss" in r} == pytest.approx(
                val, rel=1e-9
            )
    for name in (*VARIANTS, *counts):
        for result in results:  # one loss and one norm, the same bits on every rank
            assert [(r["loss"], r["grad_norm"]) for r in result[name][0]] == [
                (r["loss"], r["grad_norm"]) for r in results[0][name][0]
            ]
            assert all(predicted == counted for predicted, counted in result[name][2].values()) and result[name][2]
        steps = [[state for state in result[name][1]] for result in results]
        for states in zip(*steps):
            for stage in range(pp):  # replicas of a stage, bit for bit
                assert len({json.dumps(states[r]) for r in range(stage, pp * dp, pp)}) == 1
            if "tied" in name and pp > 1:  # and both copies of a tied embedding
                assert states[0]["embed"] == states[pp - 1]["embed"]


def resumed(rank, folder, out, source, steps, kind):
    """The state as it is right after loading `source`, of this rank; then training goes on to `steps` in `out`."""
    loaded = {}
    module = {"ddp": train_ddp, "pipe": train_pipe}[kind]
    real = module.DataParallel

    class Loaded(real):
        def masters_changed(self):
            super().masters_changed()
            for key, piece in self.pieces().items():
                (offsets, box) = piece.boxes[0]
                assert len(piece.boxes) == 1 and not any(offsets) and box.shape == piece.shape
                loaded[key] = box.clone()

    module.DataParallel = Loaded
    more = {"resume": source} if source else {}
    rows = train(
        rank, f"train_{kind}", folder, {out: {"tie": True, "micro_batch": 3, "steps": steps, "min_lr": 1e-3} | more}
    )[out]
    module.DataParallel = real
    return loaded, rows


def chain(rank, folder, runs, part):
    """The runs one after the other; with `part`, in a group of the first ranks of this job, the rest looks on."""
    group = dist.new_group(list(range(part))) if part else None
    if part and rank >= part:
        return []
    results = []
    for kind, out, source, steps, more in runs:
        module = {"ddp": train_ddp, "pipe": train_pipe}[kind]
        flags_ = dict(
            model=f"{folder}/toy.json", data=f"{folder}/plain", out=f"{folder}/{out}", device="cpu", dtype="float64",
            global_batch=12, micro_batch=3, steps=steps, lr=1e-3, min_lr=1e-3, warmup_steps=5, clip=0.1, workers=0,
            eval_every=0, save_every=1000, log_every=1000, tie=True, resume=source or "auto",
        )  # fmt: skip
        results.append(module.main(module.Config(**flags_ | more), group))
    return results


@pytest.mark.soak
def test_any_layout_resumes_any(tmp_path):
    toy_files(tmp_path, n_layer=LAYERS)
    f = str(tmp_path)

    def ckpt(out, step):
        return f"{f}/{out}/ckpt/step_{step:08d}"

    one = run_ranks(1, chain, f, [("ddp", "one", None, 12, {}), ("ddp", "a", None, 4, {})], 0, timeout=60)[0]
    results = run_ranks(3, resumed, f, "b", ckpt("a", 4), 8, "pipe", timeout=60)  # DDP -> three stages
    saved = final_weights(tmp_path / "a")
    held = [loaded for loaded, _ in results]
    assert set().union(*held) == saved.keys()
    for name, tensor in [item for loaded in held for item in loaded.items()]:
        assert torch.equal(tensor, saved[name]), name
    assert_follows(results[0][1], one[0][4:8], {}, {}, 1e-9)
    # three stages -> two with two chunks each, on part of three; 3 + 3 steps on three stages are 6, bit for bit
    later = run_ranks(3, chain, f, [("pipe", "c", ckpt("b", 8), 12, {"schedule": "interleaved"})], 2, timeout=60)
    assert_follows(later[0][0], one[0][8:12], final_weights(tmp_path / "c"), final_weights(tmp_path / "one"), 1e-9)
    runs = [("pipe", "whole", None, 6, {}), ("pipe", "half", None, 3, {}), ("pipe", "half", None, 6, {})]
    run_ranks(3, chain, f, runs, 0, timeout=60)
    for name, tensor in final_weights(tmp_path / "whole").items():
        assert torch.equal(tensor, final_weights(tmp_path / "half")[name]), name
    back, rows = run_ranks(1, resumed, f, "d", ckpt("b", 8), 12, "ddp", timeout=60)[
        0
    ]  # and every tensor back into one process
    b = final_weights(tmp_path / "b")
    assert back.keys() == b.keys() and all(torch.equal(back[name], b[name]) for name in b)
    assert_follows(rows, one[0][8:12], {}, {}, 1e-9)


def poisoned(rank, folder):
    """A gradient of the middle stage is not finite in step 2: digests after each step, and the log."""
    states = []

    class Poisoned(train_pipe.DataParallel):
        def finish(self):
            square = super().finish()
            states.append(digests(self.buckets))
            return square

        def grad_ready(self, bucket, name, param):
            if len(states) == 2 and name == "blocks.2.wq.weight" and bucket.passes + 1 == self.run.accum:
                param.grad[0, 0] = float("nan")
            super().grad_ready(bucket, name, param)

    train_pipe.DataParallel = Poisoned
    more = {"nan": {"steps": 6, "micro_batch": 3, "overlap": False}}
    return train(rank, "train_pipe", folder, more)["nan"], states


def test_all_stages_skip_a_bad_gradient(tmp_path):
    toy_files(tmp_path, n_layer=LAYERS)
    for rows, states in run_ranks(3, poisoned, str(tmp_path), timeout=60):
        assert [r["step"] for r in rows if r["skipped"]] == [2]
        assert [r["step"] for r in rows if r["grad_norm"] is None] == [2]
        assert [a != b for a, b in zip(states, states[1:])] == [True, True, False, True, True]


BROKEN = """
import train_pipe
from support.start import run_script

class Stage(train_pipe.Stage):
    calls = 0
    def forward(self, chunk, *args):
        self.calls += 1
        if not self.is_first(chunk) and not self.is_last(chunk) and self.calls == 6:
            raise RuntimeError("the middle stage is out of luck")
        return super().forward(chunk, *args)

train_pipe.Stage = Stage
run_script(train_pipe.main, train_pipe.predict, train_pipe.Config, "")
"""


def test_an_error_on_the_middle_stage_ends_the_job(tmp_path):
    toy_files(tmp_path, n_layer=LAYERS)
    (tmp_path / "broken.py").write_text(BROKEN)
    call = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3",
        str(tmp_path / "broken.py"), "--device", "cpu", "--model", f"{tmp_path}/toy.json",
        "--data", f"{tmp_path}/plain", "--out", f"{tmp_path}/run", "--global-batch", "12",
        "--micro-batch", "3", "--steps", "20", "--workers", "0", "--hang-timeout", "60",
    ]  # fmt: skip
    began = time.time()
    done = subprocess.run(call, capture_output=True, text=True, timeout=100, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode != 0 and time.time() - began < 50  # far from --hang-timeout
    assert "RuntimeError: the middle stage is out of luck" in done.stderr
    for rank in (0, 2):
        assert (
            f"rank {rank} stopped because rank 1 failed: RuntimeError: the middle stage is out of luck" in done.stderr
        )
