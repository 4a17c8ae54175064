"""Stopping and going on: the bits of never having stopped, in any layout; what keeps two runs from mixing."""

import importlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from harness import ROOT, final_weights, run_ranks, toy_files, train

import checkpoint
from data import hash_sum, stream_windows
from support import prepare
from support.flags import UserError
from support.resume import progress, resume, rng_state

# of 12 sequences; the corpus has 40 windows: 3 1/3 steps an epoch, an epoch edge inside step 3, at the start of step 10
STEPS = 20


def rows_of(rows):
    return [(r["step"], r["loss"], r["grad_norm"], r["lr"]) for r in rows]


def same_tensors(a, b, what=""):
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name]), f"{what}: {name}"


def refusals(rank, script, folder, variants):
    """By name the UserError a variant ends with, None if it runs."""
    found = {}
    for name, flags in variants.items():
        try:
            train(rank, script, folder, {name: flags})
            found[name] = None
        except UserError as error:
            found[name] = str(error)
    return found


def cut_at(folder, name, step, copy):
    """A run folder as a job that died after saving `step` leaves it."""
    (folder / copy / "ckpt").mkdir(parents=True)
    shutil.copytree(folder / name / "ckpt" / f"step_{step:08d}", folder / copy / "ckpt" / f"step_{step:08d}")


# --- the same layout --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size, script, stage", [(2, "train_zero", 2), (1, "train_ddp", None)])
def test_10_and_10_is_20(world_size, script, stage, tmp_path):
    """Bit-equal losses, norms and weights with dropout, stopped inside an epoch, at its edge and in later ones."""
    toy_files(tmp_path)
    flags = dict(dtype="float32", dropout=0.1, micro_batch=3, steps=STEPS, keep_last=STEPS)
    flags |= {"stage": stage} if stage is not None else {}
    straight = run_ranks(
        world_size,
        train,
        script,
        str(tmp_path),
        {"straight": flags | {"save_every": 1}, "workers": flags | {"workers": 2}},
        timeout=200,
    )
    stops = (3, 7, 10, 13)
    for step in stops:
        cut_at(tmp_path, "straight", step, f"from {step}")
    again = {f"from {step}": flags | {"workers": 2 if step in (7, 10) else 0} for step in stops}
    resumed = run_ranks(world_size, train, script, str(tmp_path), again, timeout=200)
    weights = final_weights(tmp_path / "straight")
    for rank in range(world_size):
        rows = rows_of(straight[rank]["straight"])
        assert rows_of(straight[rank]["workers"]) == rows
        for step in stops:
            assert rows_of(resumed[rank][f"from {step}"]) == rows[step:]
    for step in stops:
        same_tensors(final_weights(tmp_path / f"from {step}"), weights, f"stopped at {step}")


def test_the_loss_scale_goes_on(tmp_path):
    """float16: the factor and the count of good steps behind it are the checkpoint's, not the first step's."""
    toy_files(tmp_path)
    flags = dict(dtype="float16", scale_power=4, scale_window=2, micro_batch=12, steps=8, save_every=3, keep_last=8)
    rows = run_ranks(1, train, "train_zero", str(tmp_path), {"straight": flags}, timeout=100)[0]["straight"]
    assert [r["loss_scale"] for r in rows] == [16, 16, 16, 32, 32, 64, 64, 128]
    cut_at(tmp_path, "straight", 3, "on")
    resumed = run_ranks(1, train, "train_zero", str(tmp_path), {"on": flags}, timeout=100)[0]["on"]
    assert [r["loss_scale"] for r in resumed] == [r["loss_scale"] for r in rows[3:]]


# --- other layouts ----------------------------------------------------------------------------------------------------


def test_any_layout_goes_on_from_any(tmp_path):
    """H9: saved by one layout, loaded and saved by the next, through all: every tensor and the next losses stay."""
    toy_files(tmp_path)
    flags = dict(dtype="float32", steps=10, save_every=5, keep_last=9)
    straight = run_ranks(1, train, "train_ddp", str(tmp_path), {"straight": flags | {"micro_batch": 4}}, timeout=100)[
        0
    ]["straight"]
    cut_at(tmp_path, "straight", 5, "first")
    state = final_weights(tmp_path / "first")
    chain = {
        3: {
            "zero3x3": ("train_zero", {"stage": 3}),
            "ddp3": ("train_ddp", {}),
            "zero1x3": ("train_zero", {"stage": 1, "offload": "optimizer"}),
        },
        2: {
            "zero2x2": ("train_zero", {"stage": 2}),
            "zero3x2": ("train_zero", {"stage": 3, "offload": "optimizer"}),
            "tp2": ("train_tp", {}),
        },
        1: {"zero2x1": ("train_zero", {"stage": 2, "offload": "optimizer"}), "ddp1": ("train_ddp", {})},
    }
    chain[2] |= {"pp2": ("train_pipe", {}), "zero1x2": ("train_zero", {"stage": 1})}
    before = "first"
    for world_size, layouts in chain.items():
        variants = {}
        for name, (script, more) in layouts.items():
            # --steps 5: loads step 5 and has nothing left to do; then another 5 steps from the same state
            variants[name] = (script, flags | more | {"resume": f"{tmp_path}/{before}/ckpt/step_00000005"})
            before = name
        results = run_ranks(world_size, load_save_go_on, str(tmp_path), variants, timeout=200)
        for name in variants:
            same_tensors(final_weights(tmp_path / name), state, name)
            for ours, theirs in zip(results[0][name], straight[5:], strict=True):
                assert ours["step"] == theirs["step"]
                assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
                assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], abs=1e-5)


def load_save_go_on(rank, folder, variants):
    """Load a checkpoint into each layout, save it again as step 5 of run NAME; then go on from it as run "NAME on"."""
    found = {}
    for name, (script, flags) in variants.items():
        module = importlib.import_module(script)

        def resume_and_save(run, saver, strategy, scaler):
            done, updates = resume(run, saver, strategy, scaler)
            saver.save(done, strategy.pieces(), progress(run, updates, scaler), rng=rng_state(run))
            saver.wait()
            return run.cfg.steps, updates  # no steps

        module.resume = resume_and_save
        train(rank, script, folder, {name: flags})
        module.resume = resume
        going_on = {"resume": f"{folder}/{name}/ckpt/step_00000005"}
        found[name] = train(rank, script, folder, {f"{name} on": flags | going_on})[f"{name} on"]
    return found


# --- what may change and what not -------------------------------------------------------------------------------------


def other_batches(rank, folder):
    """Three steps of 12 samples, two of 6, two of 4: the rows."""
    found, base = [], dict(micro_batch=1, save_every=1, keep_last=9, lr=1e-3, min_lr=1e-3)
    for batch, steps in ((12, 3), (6, 5), (4, 7)):
        flags = base | {"global_batch": batch, "steps": steps}
        found += train(rank, "train_zero", folder, {"run": flags})["run"]
    return found


def test_another_batch_reads_on_where_the_stream_was(tmp_path):
    """The position is a number of samples, not of steps: none is read twice or left out."""
    toy_files(tmp_path)
    rows = run_ranks(2, other_batches, str(tmp_path), timeout=60)[0]
    assert [row["step"] for row in rows] == list(range(7))
    first = 0
    for row, batch in zip(rows, (12, 12, 12, 6, 6, 4, 4)):
        assert row["samples"] == hash_sum(stream_windows(1337, first, batch, 40)), row["step"]
        first += batch


def test_changed_flags_and_refusals(tmp_path, capfd):
    """H12, H14, H21: a change is printed old -> new and takes effect; another corpus or model is refused by name."""
    toy_files(tmp_path)
    (tmp_path / "other.jsonl").write_text(json.dumps({"ids": [(7 * i) % 61 for i in range(40 * 32 + 1)]}) + "\n")
    prepare.prepare(str(tmp_path / "other"), [str(tmp_path / "other.jsonl")], vocab_size=61)
    toy = json.loads((tmp_path / "toy.json").read_text())
    (tmp_path / "deep.json").write_text(json.dumps(toy | {"n_layer": 3}))
    (tmp_path / "short.json").write_text(json.dumps(toy | {"n_layer": 1}))
    flags = dict(micro_batch=12, steps=6, save_every=3, keep_last=9)
    train_here = {"run": flags}
    run_ranks(1, train, "train_ddp", str(tmp_path), train_here, timeout=60)
    path = f"{tmp_path}/run/ckpt/step_00000003"
    capfd.readouterr()
    variants = {
        "lr": flags | {"resume": path, "lr": 5e-4, "weight_decay": 0.0, "clip": 0.5},
        "longer": flags | {"resume": path, "steps": 8},
        "shorter": flags | {"resume": path, "steps": 2},
        "corpus": flags | {"resume": path, "data": f"{tmp_path}/other"},
        "model": flags | {"resume": path, "model": f"{tmp_path}/deep.json"},
        "vocab": flags | {"resume": path, "vocab_size": 64},
        "nowhere": flags | {"resume": f"{tmp_path}/run/ckpt/step_00000099"},
        "weights": flags | {"init_from": path, "data": f"{tmp_path}/other", "steps": 1},
        "weights of a run": flags | {"init_from": f"{tmp_path}/run", "steps": 1},
        "other weights": flags | {"init_from": path, "model": f"{tmp_path}/short.json"},
        "no weights": flags | {"init_from": f"{tmp_path}/not-there"},
        "data's weights": flags | {"init_from": f"{tmp_path}/plain"},
    }
    variants |= {"run": flags | {"resume": path}}  # back to an older step of the same folder: two branches in one
    variants = {"never": flags | {"resume": "never", "out": f"{tmp_path}/run"}} | variants
    before = (tmp_path / "run/config.json").read_text()
    found = run_ranks(1, refusals, "train_ddp", str(tmp_path), variants, timeout=100)[0]
    assert (tmp_path / "run/config.json").read_text() == before  # what was refused has changed nothing
    screen = capfd.readouterr().out
    allowed = {name for name, error in found.items() if error is None}
    assert allowed == {"lr", "longer", "shorter", "weights", "weights of a run"}, found
    for line in (
        "--lr 0.001 -> 0.0005",
        "--weight-decay 0.1 -> 0.0",
        "--clip 0.1 -> 0.5",
        "--steps 6 -> 8",
        "--steps 6 -> 2",
    ):
        assert f"resume: {line}" in screen
    assert "3 steps are done and --steps is 2: nothing left to do" in screen
    assert (
        "fingerprint" in found["corpus"] and f"{tmp_path}/other" in found["corpus"] and "--init-from" in found["corpus"]
    )
    assert "n_layer was 2, is 3" in found["model"] and "vocab_size was 61, is 64" in found["vocab"]
    assert "step_00000099: no such checkpoint" in found["nowhere"]
    assert "needs a folder of its own" in found["never"] and "holds later steps (step_00000006)" in found["run"]
    assert "n_layer was 2, is 1" in found["other weights"]
    assert (
        "no run folder, no checkpoint" in found["no weights"] and "is no complete checkpoint" in found["data's weights"]
    )
    log = {
        name: [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        for name in allowed - {"shorter"}
    }
    assert [r["step"] for r in log["longer"]] == [3, 4, 5, 6, 7]
    assert log["longer"][-1]["lr"] == pytest.approx(3.25e-4)  # two thirds down the cosine to 8 steps, 1e-3 to 1e-4
    assert [r["step"] for r in log["weights"]] == [0] and [r["step"] for r in log["lr"]] == [3, 4, 5]
    assert log["lr"][0]["lr"] == pytest.approx(5e-4 * 4 / 5)  # warm-up of 5, fourth update
    meta = json.loads((tmp_path / "lr/ckpt/step_00000006/meta.json").read_text())
    assert meta["updates"] == 6 and meta["tokenizer"] == "ids"


def test_learning_rate_never_rises_again():
    """H14: beyond --steps, which a resumed run may have lowered, the rate is --min-lr."""
    from optim import lr_at
    from support.flags import Config

    cfg = Config(lr=1e-3, min_lr=1e-4, warmup_steps=5, steps=20)
    rates = [lr_at(update, cfg) for update in range(60)]
    assert rates[4] == 1e-3 and all(a >= b for a, b in zip(rates[4:], rates[5:])) and set(rates[20:]) == {1e-4}


# --- killed -----------------------------------------------------------------------------------------------------------


def test_kill_9_of_a_rank_then_restart(tmp_path):
    """I12, I9: ranks killed twice under --max-restarts; the job goes on to the same bits, no step twice."""
    toy_files(tmp_path)
    flags = {
        "--model": f"{tmp_path}/toy.json", "--data": f"{tmp_path}/plain", "--device": "cpu", "--global-batch": "12",
        "--micro-batch": "1", "--steps": "40", "--workers": "0", "--save-every": "5", "--keep-last": "3",
        "--eval-every": "0", "--dropout": "0.1", "--stage": "2",
    }  # fmt: skip
    words = [word for pair in flags.items() for word in pair]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    call = [*torchrun, str(ROOT / "train_zero.py"), *words, "--out", str(tmp_path / "whole")]
    subprocess.run(call, check=True, capture_output=True, timeout=120, env=env)
    call = [*torchrun, "--max_restarts=2", str(ROOT / "train_zero.py"), *words, "--out", str(tmp_path / "killed")]
    log = tmp_path / "killed" / "log.jsonl"
    with open(tmp_path / "screen", "w") as screen:
        job = subprocess.Popen(call, stdout=screen, stderr=screen, env=env)
        try:
            for victim, at_step in ((1, 7), (0, 21)):
                while not log.exists() or len(log.read_text().splitlines()) <= at_step:
                    assert job.poll() is None, (tmp_path / "screen").read_text()
                    time.sleep(0.02)
                os.kill(ranks_of(job.pid)[victim], signal.SIGKILL)
                while len(ranks_of(job.pid)) == 2:
                    time.sleep(0.02)
            assert job.wait(timeout=120) == 0, (tmp_path / "screen").read_text()
        finally:
            job.kill()
    assert "resume: going on from" in (tmp_path / "screen").read_text()
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    whole = [json.loads(line) for line in (tmp_path / "whole/log.jsonl").read_text().splitlines()]
    assert rows_of(rows) == rows_of(whole) and len(rows) == 40
    same_tensors(final_weights(tmp_path / "killed"), final_weights(tmp_path / "whole"))


ANYWHERE = {  # script -> ranks, flags
    "train_ddp": (2, {}),
    "train_zero": (2, {"--stage": "3", "--offload": "optimizer"}),
    "train_tp": (2, {}),
    "train_pipe": (2, {}),
    "train_cp": (2, {}),
    "train_3d": (4, {"--tp": "2", "--pp": "2"}),
}


@pytest.mark.soak
@pytest.mark.parametrize("script", ANYWHERE)
def test_killed_anywhere(script, tmp_path):
    """H1, I12: five times one rank or all are killed, at any moment from the start on; the job ends with the same bits.

    A save is being written while the steps behind it are trained: so up to two intervals are trained again.
    """
    toy_files(tmp_path)
    ranks, more = ANYWHERE[script]
    flags = {
        "--model": f"{tmp_path}/toy.json", "--data": f"{tmp_path}/plain", "--device": "cpu", "--global-batch": "12",
        "--micro-batch": "1", "--steps": "40", "--workers": "1", "--save-every": "2", "--keep-last": "2",
        "--eval-every": "0", "--dropout": "0.1", "--hang-timeout": "60",
    }  # fmt: skip
    words = [str(ROOT / f"{script}.py"), *[word for pair in (flags | more).items() for word in pair]]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    whole, out = tmp_path / "whole", tmp_path / "killed"
    subprocess.run([*torchrun, *words, "--out", str(whole)], check=True, capture_output=True, timeout=300, env=env)
    draw, log = random.Random(script), out / "log.jsonl"
    with open(tmp_path / "screen", "w") as screen:
        call = [*torchrun, "--max_restarts=5", *words, "--out", str(out)]
        job = subprocess.Popen(call, stdout=screen, stderr=screen, env=env)
        try:
            for kill in range(5):
                # every second time a while after the loop has begun, else at any moment of the start
                rows = log.read_text().count("\n") if log.exists() else 0
                wanted = draw.randrange(1, 8) if kill % 2 else 0
                while wanted and (not log.exists() or log.read_text().count("\n") == rows):
                    assert job.poll() is None, (tmp_path / "screen").read_text()
                    time.sleep(0.01)
                time.sleep(draw.uniform(0, 1) if wanted else draw.uniform(1, 6))
                found = ranks_of(job.pid)
                for pid in found if draw.random() < 0.4 else draw.sample(found, min(1, len(found))):
                    os.kill(pid, signal.SIGKILL)
                while job.poll() is None and set(found) & set(ranks_of(job.pid)):
                    time.sleep(0.02)
            assert job.wait(timeout=300) == 0, (tmp_path / "screen").read_text()
        finally:
            job.kill()
    rows, straight = ([json.loads(line) for line in (f / "log.jsonl").read_text().splitlines()] for f in (out, whole))
    assert rows_of(rows) == rows_of(straight) and len(rows) == 40
    same_tensors(final_weights(out), final_weights(whole))
    assert not list(out.glob("ckpt/.*")) and all(
        checkpoint.verify(path) == [] for path in checkpoint.steps(out / "ckpt")
    )


@pytest.mark.soak
def test_restart_over_two_hosts(tmp_path):
    """I9: only the host whose rank died counts the restart; both go on in their folder, also under --resume never."""
    toy_files(tmp_path)
    flags = {
        "--model": f"{tmp_path}/toy.json", "--data": f"{tmp_path}/plain", "--device": "cpu", "--global-batch": "12",
        "--steps": "60", "--workers": "0", "--save-every": "5",
        "--eval-every": "0", "--hang-timeout": "60", "--resume": "never",
    }  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as probe:
        meeting = f"localhost:{probe.getsockname()[1]}"
    host = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc_per_node=1",
        "--max_restarts=1",
        "--rdzv_backend=c10d",
    ]
    call = [
        *host,
        f"--rdzv_endpoint={meeting}",
        str(ROOT / "train_ddp.py"),
        *[word for pair in flags.items() for word in pair],
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    screen = tmp_path / "screen"
    with open(screen, "w") as file:
        hosts = [subprocess.Popen(call, stdout=file, stderr=file, env=env, cwd=tmp_path) for _ in range(2)]
        try:
            while not (logs := list(tmp_path.glob("runs/*/log.jsonl"))) or len(logs[0].read_text().splitlines()) <= 12:
                assert not any(job.poll() for job in hosts), screen.read_text()
                time.sleep(0.02)
            subprocess.run(["pkill", "-KILL", "-P", str(hosts[1].pid)], check=True)
            assert [job.wait(timeout=120) for job in hosts] == [0, 0], screen.read_text()
        finally:
            for job in hosts:
                job.kill()
    (folder,) = tmp_path.glob("runs/*")
    assert "step_00000010 at step 10" in screen.read_text()
    assert [json.loads(line)["step"] for line in (folder / "log.jsonl").read_text().splitlines()] == list(range(60))
    # a run that was refused is no run to go on with, however often torchrun starts it
    call = [*host[:3], "--standalone", "--max_restarts=1", *call[-1 - 2 * len(flags) :], "--out", str(folder)]
    refused = subprocess.run(call, capture_output=True, text=True, timeout=120, env=env)
    assert refused.returncode == 1 and refused.stderr.count(f"--resume never, but {folder} holds") >= 2, refused.stderr


def ranks_of(parent: int) -> list[int]:
    """Process ids of torchrun's ranks, by rank."""
    found = {}
    for pid in subprocess.run(["pgrep", "-P", str(parent)], capture_output=True, text=True).stdout.split():
        try:
            with open(f"/proc/{pid}/environ") as file:
                env = dict(pair.partition("=")[::2] for pair in file.read().split("\0"))
        except OSError:
            continue
        if "RANK" in env:
            found[int(env["RANK"])] = int(pid)
    return [found[rank] for rank in sorted(found)]
