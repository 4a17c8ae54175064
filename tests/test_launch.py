"""How a run starts and ends: flags, refusals, ranks that do not come, errors, signals, exit codes. All of it real."""

import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import ROOT, TOY, final_weights, run_ranks, toy_files, train
from torch.distributed.run import get_args_parser

import checkpoint
import train_3d
import train_cp
import train_ddp
import train_pipe
import train_tp
import train_zero
from support import rendezvous
from support.flags import ELSEWHERE, Config, UserError, accumulation, field_help, parse_flags, print_help
from support.run import Run, everywhere
from support.start import one_prepares

SCRIPTS = {m.__name__: m for m in (train_ddp, train_zero, train_tp, train_pipe, train_3d, train_cp)}
RAW = 50257  # the vocabulary of a bare .bin file
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    toy_files(folder)
    return folder


def words(toy, out, **more) -> list[str]:
    """A small run on the CPU as command-line words."""
    flags = dict(
        model=toy / "toy.json",
        data=toy / "plain",
        out=out,
        device="cpu",
        global_batch=12,
        micro_batch=3,
        steps=4,
        workers=0,
    )
    flags |= dict(eval_every=0, save_every=50, log_every=1, hang_timeout=60) | more
    return [word for key, value in flags.items() for word in (f"--{key.replace('_', '-')}", str(value))]


def begin(ranks: int, script, *flags: str, env: dict = {}, **options) -> subprocess.Popen:  # noqa: B006
    """Start a script, by torchrun unless ranks is 0."""
    call = [*TORCHRUN, "--standalone", f"--nproc_per_node={ranks}"] if ranks else [sys.executable]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | env
    if not ranks:
        env["LOCAL_WORLD_SIZE"] = "8"  # one thread, as torchrun's ranks have here
    return subprocess.Popen(
        [*call, str(script), *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, **options
    )


def end(job: subprocess.Popen, timeout: float = 60) -> tuple[int, str, str]:
    try:
        out, err = job.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        job.send_signal(signal.SIGTERM)
        raise
    return job.returncode, out, err


# --- flags ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_has_help(script, capsys):
    module = SCRIPTS[script]
    names = [f.name for f in dataclasses.fields(module.Config)]
    assert not [name for name in names if not field_help(module.Config).get(name, "").strip()]
    print_help(module.Config, module.__doc__)
    shown = re.findall(r"^  --([\w-]+) +(\S.*)$", capsys.readouterr().out, re.M)
    assert [name for name, _ in shown] == [name.replace("_", "-") for name in names]
    assert "fp32, bf16, fp16" in dict(shown)["dtype"]  # this field is broken over three lines


@pytest.mark.parametrize("script", SCRIPTS)
def test_torchrun_hands_every_flag_on(script):
    """torchrun's parser takes what may begin an option of its own, even behind the script's name."""
    for field in dataclasses.fields(SCRIPTS[script].Config):
        for flag in (f"--{field.name.replace('_', '-')}", f"--no-{field.name.replace('_', '-')}"):
            seen = get_args_parser().parse_args(["--standalone", f"{script}.py", flag, "1"])
            assert seen.training_script_args == [flag, "1"]
            options = [o for action in get_args_parser()._actions for o in action.option_strings]
            assert not [o for o in options if o.startswith(flag)], flag


def test_ways_to_write_a_flag():
    for line in (
        "--micro-batch 4 --compile",
        "--micro-batch=4 --compile",
        "--micro_batch 4 --compile",
        "--micro_batch=4 --compile",
    ):
        cfg = parse_flags(train_zero.Config, line.split())
        assert cfg == train_zero.Config(micro_batch=4, compile=True) and cfg.given == {"micro_batch", "compile"}
    assert parse_flags(train_zero.Config, ["--no-overlap"]).overlap is False
    assert parse_flags(train_zero.Config, ["--stage", "2"]).given == {"stage"}  # though 2 is the default
    assert parse_flags(train_zero.Config, []).given == frozenset()
    for short, name in (("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16"), ("float64", "float64")):
        assert parse_flags(train_ddp.Config, ["--dtype", short]).dtype == name


@pytest.mark.parametrize(
    "line, message",
    [
        ("--micro-bach 4", "unknown flag --micro-bach: did you mean --micro-batch?"),
        ("--qqq 4", "unknown flag --qqq: see --help"),
        ("micro-batch 4", "unexpected argument 'micro-batch'"),
        ("--steps", "--steps needs a value"),
        ("--steps ten", "--steps ten: expected a whole number"),
        ("--steps 1.5", "--steps 1.5: expected a whole number"),
        ("--lr fast", "--lr fast: expected a number"),
        ("--lr nan", "--lr nan: expected a number"),
        ("--dtype int8", "--dtype int8: allowed are float64, float32, bfloat16, float16"),
        ("--stage 4", "--stage 4: allowed are 0, 1, 2, 3"),
        ("--compile=yes", "--compile takes no value; write --compile or --no-compile"),
        ("--no-steps 4", "--no-steps: steps is not an on/off flag"),
    ],
)
def test_a_wrong_flag(line, message):
    with pytest.raises(UserError) as error:
        parse_flags(train_zero.Config, line.split())
    assert message in str(error.value)


def test_names_from_elsewhere():
    names = {f"--{f.name.replace('_', '-')}" for module in SCRIPTS.values() for f in dataclasses.fields(module.Config)}
    for name, here in ELSEWHERE.items():
        with pytest.raises(UserError, match=f"unknown flag --{name}: here it is {re.escape(here)}"):
            parse_flags(train_ddp.Config, [f"--{name.replace('-', '_')}", "1"])
        assert set(re.findall(r"--[a-z-]+", here)) <= names, name  # what is recommended exists


def refusals(rank, script, folder, variants):
    """By name the UserError a variant ends with, None if it runs; a flag that is a list has a value per rank."""
    found = {}
    for name, flags in variants.items():
        try:
            train(rank, script, folder, {name: {k: v[rank] if isinstance(v, list) else v for k, v in flags.items()}})
            found[name] = None
        except UserError as error:
            found[name] = str(error)
    return found


def test_refusals_before_anything_is_built(tmp_path):
    """B5, B6, A6, A8, I8, H21: the same words on both ranks, and no run folder left behind."""
    toy_files(tmp_path)
    for name, content in (("empty", b""), ("byte", b"x"), ("odd", b"\1" * 99), ("none", bytes(64)), ("one", bytes(66))):
        (tmp_path / f"{name}.bin").write_bytes(content)
    (tmp_path / "nothing").mkdir()
    (tmp_path / "halfhf.json").write_text(
        json.dumps({"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4})
    )
    (tmp_path / "rope.json").write_text(json.dumps(TOY | {"rope_theta": -1}))
    (tmp_path / "blocked").write_text("a file")
    bins = {k: {"data": f"{tmp_path}/{k}.bin", "vocab_size": RAW} for k in ("empty", "byte", "odd", "none")}
    two, near, use = "2 data-parallel ranks", "nearest that are:", "use --vocab-size 61 or more"
    flags = "the ranks were started with different flags"
    window = "one window of seq_len 2000 needs 2001"
    cases = {
        "13": ({"global_batch": 13}, f"13 is not a multiple of --micro-batch 1 x {two} = 2; {near} 12 or 14"),
        "micro": ({"micro_batch": 4}, f"12 is not a multiple of --micro-batch 4 x {two} = 8; {near} 8 or 16"),
        "negative batch": ({"global_batch": -4}, "both must be 1 or more"),
        "negative steps": ({"steps": -1}, "--steps -1: allowed is 0 or more"),
        "keep": ({"keep_last": 0}, "--keep-last 0: allowed is 1 or more"),
        "beta": ({"beta1": 1.0}, "--beta1 1.0: allowed is 0 or more, less than 1"),
        "lr": ({"lr": float("inf")}, "--lr inf: allowed is 0 or more, less than inf"),
        "hysteresis": ({"scale_hysteresis": 0}, "--scale-hysteresis 0: allowed is 1 or more"),
        "least scale": ({"scale_min": 0.0}, "--scale-min 0.0: allowed is"),
        "window": ({"scale_window": 0}, "--scale-window 0: allowed is 1 or more"),
        "dropout": ({"dropout": 1.0}, "--dropout 1.0: allowed is 0 <= dropout < 1"),
        "differ": ({"lr": [1e-3, 2e-3], "micro_batch": [1, 2]}, f"{flags}: --micro-batch, --lr"),
        "model": ({"model": "gigantic"}, "--model gigantic: neither a size"),
        "rope": ({"model": f"{tmp_path}/rope.json"}, "rope_theta = -1.0, allowed is more than 0"),
        "half a config": ({"model": f"{tmp_path}/halfhf.json"}, "num_hidden_layers is missing"),
        "vocabulary": ({"vocab_size": 60}, f"has a vocabulary of 61 (ids), the model knows 60 ids; {use}"),
        "no such data": ({"data": f"{tmp_path}/nowhere"}, f"{tmp_path}/nowhere"),
        "nothing": ({"data": f"{tmp_path}/nothing"}, f"{tmp_path}/nothing"),
        "long": ({"seq_len": 2000}, f"plain/train.bin (2562 bytes): 1281 tokens of uint16; {window}"),
        "blocked": ({"out": f"{tmp_path}/blocked/run"}, "cannot write there"),
    } | {k: (flags, f"{tmp_path}/{k}.bin") for k, flags in bins.items()}  # fmt: skip
    variants = {name: flags | {"steps": flags.get("steps", 2)} for name, (flags, _) in cases.items()}
    variants["one window"] = {"data": f"{tmp_path}/one.bin", "vocab_size": RAW, "steps": 2}
    before = set(os.listdir(tmp_path))
    for found in run_ranks(2, refusals, "train_zero", str(tmp_path), variants, timeout=100):
        for name, (_, message) in cases.items():
            assert found[name] and message in found[name], (name, found[name])
            assert "\n" not in found[name]
        assert found["one window"] is None
    assert set(os.listdir(tmp_path)) - before == {"one window"}


@pytest.mark.parametrize(
    "script, flags, message", [("train_tp", {"tp": 2}, "n_kv_head=1"), ("train_pipe", {"pp": 2}, "")]
)
def test_a_layout_is_refused_before_the_run_folder(script, flags, message, tmp_path):
    toy_files(tmp_path, n_layer=1, n_kv_head=1)
    variants = {
        "layout": flags | {"stages": "7,7"} if script == "train_pipe" else flags,
        "world": {k: 3 for k in flags},
    }
    for found in run_ranks(2, refusals, script, str(tmp_path), variants, timeout=60):
        assert found["layout"] and message in found["layout"]
        assert found["world"] == "tp*pp=3 does not divide the world of 2 ranks"
    assert not (tmp_path / "layout").exists()


@pytest.mark.parametrize(
    "batch, micro, ranks, near",
    [(8, 1, 3, "6 or 9"), (16, 2, 6, "12 or 24"), (5, 5, 2, "10"), (1024, 1, 384, "768 or 1152")],
)
def test_nearest_batches(batch, micro, ranks, near):
    """B6, B14: the values named are multiples, and nothing between them is."""
    with pytest.raises(UserError, match=f"nearest that are: {near}$"):
        accumulation(batch, micro, ranks)
    for value in near.split(" or "):
        assert accumulation(int(value), micro, ranks) * micro * ranks == int(value)


def test_short_validation_split(tmp_path):
    """A validation split without one window is a refusal, not a NaN at the first evaluation."""
    ids = np.arange(1281, dtype=np.uint16) % 61
    toy_files(tmp_path)
    (tmp_path / "both").mkdir()
    ids.tofile(tmp_path / "both/train.bin")
    ids[:20].tofile(tmp_path / "both/val.bin")
    flags = {"data": f"{tmp_path}/both", "vocab_size": RAW, "steps": 1}
    found = run_ranks(
        1, refusals, "train_ddp", str(tmp_path), {"eval": flags | {"eval_every": 5}, "none": flags}, timeout=60
    )[0]
    assert "both/val.bin (40 bytes): 20 tokens of uint16; one window of seq_len 32 needs 33" in found["eval"]
    assert found["none"] is None


# --- the command line as a user sees it -------------------------------------------------------------------------------


def test_one_line_and_exit_code_2(toy, tmp_path):
    """One process: an error line and nothing else; two: the line once, and once more as torchrun's root cause."""
    zeros = [
        begin(0, ROOT / f"{script}.py", *words(toy, tmp_path / "run", **{key: 0}))
        for script, key in (("train_ddp", "lr"), ("train_zero", "steps"))
    ]
    assert [end(job)[::2] for job in zeros] == [
        (2, f"error: --{key} 0: allowed is more than 0\n") for key in ("lr", "steps")
    ]
    code, out, err = end(begin(0, ROOT / "train_ddp.py", *words(toy, tmp_path / "run", micro_batch=5)))
    assert (
        code == 2
        and out == ""
        and err.startswith("error: --global-batch 12 is not a multiple")
        and err.count("\n") == 1
    )
    jobs = [
        begin(2, ROOT / "train_ddp.py", *flags)
        for flags in (["--learning-rate", "1"], words(toy, tmp_path / "run", micro_batch=5))
    ]
    for job, message in zip(
        jobs, ("unknown flag --learning-rate: here it is --lr", "--global-batch 12 is not a multiple")
    ):
        code, out, err = end(job)
        assert code != 0 and len(re.findall(rf"^rank \d: error: {message}", err, re.M)) == 1, err
        assert re.search(rf"Root Cause.*traceback : {message}", err, re.S), err
        assert err.count(message) <= 3 and "support/" not in err  # no traceback of ours
    assert not (tmp_path / "run").exists()


def test_help_explain_and_finished_runs_exit_with_0(toy, tmp_path):
    """I6: two jobs at a time on one machine."""
    jobs = [begin(0, ROOT / f"{script}.py", "--help") for script in SCRIPTS]
    for script, job in zip(SCRIPTS, jobs):
        code, out, _ = end(job)
        assert code == 0 and out.startswith(SCRIPTS[script].__doc__.strip()[:40]) and "--micro-batch" in out
    explained = begin(2, ROOT / "train_zero.py", *words(toy, tmp_path / "none"), "--explain")
    finished = begin(2, ROOT / "train_zero.py", *words(toy, tmp_path / "run"))
    for job in (explained, finished):
        code, out, err = end(job)
        assert code == 0, err
        assert "exchange" in out
    assert not (tmp_path / "none").exists() and len((tmp_path / "run/log.jsonl").read_text().splitlines()) == 4


@pytest.mark.soak
def test_25_finished_runs(toy, tmp_path):
    for i in range(25):
        code, _, err = end(begin(2 + i % 2, ROOT / "train_ddp.py", *words(toy, tmp_path / f"run{i}", micro_batch=2)))
        assert code == 0, (i, err)


def test_ranks_described_by_hand(toy, tmp_path):
    """I6, I7: who is missing, who came twice, which variable is wrong; each within seconds."""
    script = ROOT / "train_ddp.py"
    flags = words(toy, tmp_path / "run", hang_timeout=12)
    busy = socket.create_server(("127.0.0.1", 0))
    with socket.create_server(("127.0.0.1", 0)) as probe, socket.create_server(("127.0.0.1", 0)) as other:
        free, free2 = probe.getsockname()[1], other.getsockname()[1]

    def environment(rank, size, port):
        return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    began = time.time()
    missing = [begin(0, script, *flags, env=environment(rank, 3, free)) for rank in (0, 1)]
    for job in missing:
        code, _, err = end(job)
        assert code == 2 and "error: 2 of 3 ranks arrived within 12 s, missing: [2]" in err, err
    endless = words(
        toy, tmp_path / "going", hang_timeout=60, steps=1_000_000
    )  # however late the third process comes, the run still goes
    twice = [begin(0, script, *endless, env=environment(rank, 2, free2)) for rank in (0, 1, 1)]
    while not (ended := [job for job in twice if job.poll() is not None]) and time.time() - began < 80:
        time.sleep(0.05)
    for job in set(twice) - set(ended):
        job.send_signal(signal.SIGTERM)
    ends = [end(job) for job in twice]
    assert [code for code, _, _ in ends].count(2) == 1, ends
    assert any(code == 2 and "two processes came as RANK=1" in err for code, _, err in ends), ends
    wrong = {
        "MASTER_PORT": (environment(0, 2, "abc"), "invalid literal for int() with base 10: 'abc'"),
        "range": (environment(3, 2, free), "RANK=3 is outside WORLD_SIZE=2"),
        "busy": (environment(0, 2, busy.getsockname()[1]), f"port {busy.getsockname()[1]} is in use: another run?"),
        "half": ({"RANK": "0", "WORLD_SIZE": "2"}, "must all be set, as torchrun does ('MASTER_PORT')"),
    }
    jobs = {name: begin(0, script, *flags, env=env) for name, (env, _) in wrong.items()}
    for name, job in jobs.items():
        code, _, err = end(job)
        assert code == 2 and wrong[name][1] in err and err.count("\n") == 1, (name, err)
    assert time.time() - began < 90 and not (tmp_path / "run").exists()


# --- when one rank fails ----------------------------------------------------------------------------------------------

FAULTS = {  # what breaks on rank 1 -> script, code put in front of it
    "data": ("train_ddp", "import data; target, name = data.Batches, 'next'"),
    "forward": ("train_zero", "import train_zero; target, name = train_zero.Zero1, '__call__'"),
    "optimizer": ("train_zero", "import buckets; target, name = buckets, 'adamw_step'"),
    "checkpoint": ("train_ddp", "import train_ddp; target, name = train_ddp, 'rng_state'"),
    "eval": ("train_ddp", "import data; target, name = data, 'val_batches'"),
}
FORK = """
import os
import {script}
{find}
works, calls = getattr(target, name), 0

def breaks(*args, **kwargs):
    global calls
    calls += 1
    if os.environ["RANK"] == "1" and (calls == 3 or name in ("rng_state", "val_batches")):
        raise ValueError("out of luck")
    return works(*args, **kwargs)

setattr(target, name, breaks)
from support.start import run_script
run_script({script}.main, {script}.predict, {script}.Config, "")
"""


@pytest.mark.parametrize("fault", FAULTS)
def test_the_first_error_is_the_visible_one(fault, tmp_path):
    """I1: rank 1 alone raises; the job ends in seconds, with its traceback and no talk of closed connections."""
    toy_files(tmp_path)
    (tmp_path / "both").mkdir()
    ids = np.arange(1281, dtype=np.uint16) % 61
    for split in ("train", "val"):
        ids.tofile(tmp_path / f"both/{split}.bin")
    script, find = FAULTS[fault]
    (tmp_path / "fork.py").write_text(FORK.format(script=script, find=find))
    began = time.time()
    flags = words(
        tmp_path, tmp_path / "run", data=tmp_path / "both", steps=50, save_every=3, eval_every=3, vocab_size=RAW
    )
    code, _, err = end(begin(2, tmp_path / "fork.py", *flags))
    assert code != 0 and time.time() - began < 30, (
        err
    )  # far from --hang-timeout 60, and from torchrun's 30 s of patience
    assert re.search(r"^rank 1: Traceback", err, re.M) and err.count("ValueError: out of luck") >= 2
    assert re.search(r"Root Cause.*rank +: 1 .*traceback : ValueError: out of luck", err, re.S), err
    assert "closed by peer" not in err
    ours = [line for line in err.splitlines() if line.startswith("rank 0")]
    assert ours in ([], ["rank 0 stopped because rank 1 failed: ValueError: out of luck"]), ours


def test_an_id_outside_the_vocabulary(tmp_path):
    """A24: found by the rank that reads it, in mid-run: file, position, id, vocabulary; all ranks end."""
    toy_files(tmp_path)
    ids = np.arange(1281, dtype=np.uint16) % 61
    ids[700] = RAW
    ids.tofile(tmp_path / "train.bin")
    began = time.time()
    flags = words(tmp_path, tmp_path / "run", data=tmp_path / "train.bin", vocab_size=RAW, steps=50)
    code, _, err = end(begin(2, ROOT / "train_zero.py", *flags))
    assert code != 0 and time.time() - began < 30
    line = next(line for line in err.splitlines() if re.match(r"rank \d: error: ", line))
    assert (
        "train.bin" in line
        and "700" in line
        and str(RAW) in line
        and "Traceback (most" not in err.split("torchrun")[0].split(line)[0]
    )


ALIVE_AT_EXIT = """
import atexit
import os
import {script}
from pathlib import Path
from support.start import run_script

def alive():  # one write: two ranks share the screen
    threads = " ".join(p.read_text().strip() for p in Path("/proc/self/task").glob("*/comm"))
    os.write(1, ("alive: " + threads + "\\n").encode())

atexit.register(alive)
run_script({script}.main, {script}.predict, {script}.Config, "")
"""


@pytest.mark.parametrize("script", ["train_ddp", "train_pipe"])
def test_no_group_outlives_a_clean_end(script, toy, tmp_path):
    """Threads of gloo that are left when Python ends can abort it: once in some sixty runs they did."""
    (tmp_path / "fork.py").write_text(ALIVE_AT_EXIT.format(script=script))
    flags = words(toy, tmp_path / "run", workers=1, save_every=2, micro_batch=6)
    code, out, err = end(begin(2, tmp_path / "fork.py", *flags))
    alive = [line for line in out.splitlines() if line.startswith("alive:")]
    assert code == 0 and len(alive) == 2 and "gloo" not in "".join(alive), (alive, err)


OUT_OF_MEMORY = """
import resource
import train_zero
from pathlib import Path
resume = train_zero.resume

def with_little_memory(*args):
    done = resume(*args)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + 300_000_000, resource.RLIM_INFINITY))
    return done

train_zero.resume = with_little_memory
train_zero.run_script(train_zero.main, train_zero.predict, train_zero.Config, "")
"""


def test_out_of_memory_says_what_helps(toy, tmp_path):
    (tmp_path / "little.py").write_text(OUT_OF_MEMORY)
    flags = words(
        toy, tmp_path / "run", global_batch=64, micro_batch=64, seq_len=2000, data=toy / "long.bin", vocab_size=RAW
    )
    (np.arange(2000 * 80) % 61).astype(np.uint16).tofile(toy / "long.bin")
    code, _, err = end(begin(0, tmp_path / "little.py", *flags))
    last = err.splitlines()[-1]
    assert code == 1 and re.match(
        r"error: rank 0 is out of memory: [\d.]+ GB predicted, the device has [\d.]+ GB; ", last
    ), err
    assert re.search(r"smallest change that helps: --micro-batch (32|16|8|4|2|1)$", last)


def swapped(rank, folder, variants):
    """Rank 1 sends its buckets in the opposite order."""
    if rank == 1:
        made = train_ddp.DataParallel.__init__

        def backwards(self, *args):
            made(self, *args)
            self.buckets = dict(reversed(self.buckets.items()))

        train_ddp.DataParallel.__init__ = backwards
    return refusals(rank, "train_ddp", folder, variants)


def test_check_collectives(tmp_path):
    """I3: two swapped all-reduces of equal size sum garbage without a word; --check-collectives names both sides."""
    toy_files(tmp_path)
    flags = dict(steps=2, overlap=False, micro_batch=6, check_collectives=True)
    good = run_ranks(2, refusals, "train_ddp", str(tmp_path), {"good": flags}, timeout=60)
    assert good == [{"good": None}] * 2
    for found in run_ranks(2, swapped, str(tmp_path), {"bad": flags}, timeout=60):
        assert re.search(
            r"different collectives: rank 0: #1 all_reduce head .* bytes; rank 1: #1 all_reduce embed", found["bad"]
        ), found


# --- signals ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def straight(toy):
    """A run of 30 steps that nobody disturbs, by number of ranks (0: without torchrun)."""
    found = {}
    for ranks in (0, 2):
        code, _, err = end(begin(ranks, ROOT / "train_zero.py", *long(toy, toy / f"straight{ranks}")))
        assert code == 0, err
        found[ranks] = [json.loads(line) for line in (toy / f"straight{ranks}/log.jsonl").read_text().splitlines()]
    return found


def long(toy, out) -> list[str]:
    return words(toy, out, steps=30, micro_batch=1, dropout=0.1, workers=1)


@pytest.mark.parametrize("ranks, number", [(0, signal.SIGINT), (2, signal.SIGTERM)])
def test_a_signal_saves_and_the_same_command_goes_on(ranks, number, straight, toy, tmp_path):
    job = begin(ranks, ROOT / "train_zero.py", *long(toy, tmp_path / "run"))
    log = tmp_path / "run/log.jsonl"
    while not log.exists() or len(log.read_text().splitlines()) < 5:
        assert job.poll() is None
        time.sleep(0.01)
    began = time.time()
    job.send_signal(number)
    code, out, err = end(job)
    assert time.time() - began < 15 and code == (1 if ranks else 128 + number), err
    last = out.splitlines()[-1]
    assert re.fullmatch(
        r"stopped by a signal after step \d+; the same command with --out .* --resume auto goes on from there", last
    ), out
    assert "support/" not in err  # torchrun has a traceback of its own
    stopped = len(log.read_text().splitlines())
    assert 5 <= stopped < 30
    code, out, err = end(begin(ranks, ROOT / "train_zero.py", *long(toy, tmp_path / "run")))
    assert code == 0 and f"at step {stopped}" in out, err
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(r["step"], r["loss"], r["grad_norm"]) for r in rows] == [
        (r["step"], r["loss"], r["grad_norm"]) for r in straight[ranks]
    ]
    ours, theirs = final_weights(tmp_path / "run"), final_weights(toy / f"straight{ranks}")
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


def test_ctrl_c_that_ends_tee_too_saves_all_the_same(toy, tmp_path):
    job = begin(0, ROOT / "train_ddp.py", *words(toy, tmp_path / "run", steps=100_000))
    while not (tmp_path / "run/log.jsonl").exists():
        assert job.poll() is None
        time.sleep(0.01)
    job.stdout.close()  # nobody reads what it prints from here on
    time.sleep(0.1)
    job.send_signal(signal.SIGINT)
    assert job.wait(timeout=30) == 128 + signal.SIGINT
    (saved,) = (tmp_path / "run/ckpt").glob("step_*")
    assert int(saved.name[5:]) == len((tmp_path / "run/log.jsonl").read_text().splitlines())


SLOW_SAVE = """
import os
import time
import checkpoint
import optim
import train_ddp
from support.start import run_script

write = checkpoint._write_boxes

def slowly(path, pieces):
    if os.environ["SLOW"] in str(path):
        print("saving", flush=True)
        time.sleep(float(os.environ["SECONDS"]))
    return write(path, pieces)

forward, calls = train_ddp.GPT.forward, 0

def diverging(self, *args):
    global calls
    calls += 1
    loss, targets = forward(self, *args)
    return loss * (float("nan") if calls > int(os.environ["FINITE"]) else 1), targets

checkpoint._write_boxes = slowly
train_ddp.GPT.forward = diverging
optim.LossScaler.patience = 2
run_script(train_ddp.main, train_ddp.predict, train_ddp.Config, "")
"""


def begin_slow(toy, folder, ranks: int, step: int, seconds: float, finite: int = 1 << 30) -> subprocess.Popen:
    """A run whose save of `step` takes some seconds, and whose loss is finite for so many steps."""
    (folder / "slow.py").write_text(SLOW_SAVE)
    flags = dict(save_every=3, steps=100_000, micro_batch=12 // max(1, ranks))  # a pass a step
    env = {"SLOW": f"step_{step:08d}", "SECONDS": str(seconds), "FINITE": str(finite)}
    return begin(ranks, folder / "slow.py", *words(toy, folder / "run", **flags), env=env)


@pytest.mark.parametrize("ranks, number", [(0, signal.SIGTERM), (2, signal.SIGINT)])
def test_a_second_signal_ends_at_once(ranks, number, toy, tmp_path):
    """The run stands in the last save, of a minute: a temporary folder stays, the checkpoint before is intact."""
    job = begin_slow(toy, tmp_path, ranks, step=6, seconds=60)
    for line in job.stdout:
        if line == "saving\n":
            break
    job.send_signal(number)
    for line in job.stdout:  # by a thread of its own: the loop waits for the save
        if "a second signal ends it at once" in line:
            break
    time.sleep(1)
    assert job.poll() is None
    began = time.time()
    job.send_signal(number)
    code, _, err = end(job)
    assert time.time() - began < 10 and code == (1 if ranks else 128 + number), err
    assert sorted(path.name for path in (tmp_path / "run/ckpt").iterdir()) == [".tmp-step_00000006", "step_00000003"]
    assert checkpoint.verify(tmp_path / "run/ckpt/step_00000003") == []
    rows = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(len(rows))) and len(rows) >= 6
    code, out, err = end(begin(0, ROOT / "train_ddp.py", *words(toy, tmp_path / "run", steps=6, save_every=3)))
    assert code == 0 and "at step 3" in out, err
    assert not list((tmp_path / "run/ckpt").glob(".tmp*"))


def test_one_signal_delivered_twice_is_one(toy, tmp_path):
    """As timeout(1) does: to the process, and to the group it is in."""
    job = begin(0, ROOT / "train_ddp.py", *words(toy, tmp_path / "run", steps=100_000))
    while not (tmp_path / "run/log.jsonl").exists():
        assert job.poll() is None
        time.sleep(0.01)
    job.send_signal(signal.SIGTERM)
    time.sleep(0.01)
    job.send_signal(signal.SIGTERM)
    code, out, err = end(job)
    assert code == 128 + signal.SIGTERM and "stopped by a signal after step" in out, err
    assert list((tmp_path / "run/ckpt").glob("step_*"))


def strict(text: str) -> dict:
    """JSON has no NaN and no Infinity, though Python reads them."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("ranks", [0, 2])
def test_an_error_of_all_ranks_lets_a_save_finish(ranks, toy, tmp_path):
    """The loss is not finite while step 3 is being saved; all ranks raise the same, the checkpoint is there."""
    code, _, err = end(begin_slow(toy, tmp_path, ranks, step=3, seconds=4, finite=3))
    assert code == (1 if ranks else 2) and "the gradient was not finite in 2 steps in a row" in err, err
    assert [path.name for path in (tmp_path / "run/ckpt").iterdir()] == ["step_00000003"]
    assert checkpoint.verify(tmp_path / "run/ckpt/step_00000003") == []
    rows = [strict(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert [(row["loss"] is None, row["grad_norm"] is None) for row in rows] == [(False, False)] * 3 + [(True, True)]


MINE = os.fsdecode(b"runs/lat\xe9")  # a store takes only what is UTF-8


def notes(rank):
    """What a run finds of its own, what another run of this process and another command of this job find of it."""
    rendezvous._job = dist.HashStore()
    run = Run(Config(), 0, 1, torch.device("cpu"))
    sys.argv = [*sys.argv, "--out", MINE]
    rendezvous.remember(run, "folder", MINE)
    found = [rendezvous.recall(run, "folder"), rendezvous.recall(dataclasses.replace(run, number=1), "folder")]
    sys.argv = [*sys.argv, "--another"]
    return [*found, rendezvous.recall(run, "folder")]


def test_a_note_is_found_by_the_run_that_left_it():
    assert run_ranks(1, notes) == [[MINE, None, None]]


def shared_work(rank, folder):
    """What a run of the last two of three ranks gets of work that its first does, and of what fails there."""
    group = dist.new_group([1, 2], backend="gloo")
    if rank == 0:
        return None

    def work():
        Path(folder, f"made-by-{rank}").write_text("")
        return rank

    found = everywhere(work, group, rank == 1)
    seen = sorted(path.name for path in Path(folder).iterdir())
    for error in (UserError("no room"), ZeroDivisionError("a fault")):

        def fail(error=error):
            raise error

        try:
            everywhere(fail, group, rank == 1)
        except (UserError, RuntimeError) as raised:
            found.append((type(raised), str(raised).splitlines()[-1]))
    return found, seen


def test_what_one_rank_does_for_others_fails_on_all(tmp_path):
    _, *both = run_ranks(3, shared_work, str(tmp_path))
    errors = [(UserError, "rank 0: no room"), (RuntimeError, "ZeroDivisionError: a fault")]
    assert both == [([1, None, *errors], ["made-by-1"])] * 2


def prepared_by(rank, folder):
    """Who prepares, and what the others get, in a job of three whose last two ranks make up the run."""
    group = dist.new_group([1, 2], backend="gloo")
    if rank == 0:
        return None
    run = Run(Config(data="here"), rank - 1, 2, torch.device("cpu"), world=group, control=group)
    one_prepares(run, lambda: Path(folder, f"made-by-{rank}").write_text(""))
    seen = sorted(path.name for path in Path(folder).iterdir())

    def fail():
        raise UserError("no room")

    try:
        one_prepares(dataclasses.replace(run, number=1), fail)
    except UserError as error:
        return seen, str(error)


def test_the_first_rank_of_a_run_prepares_for_the_others(tmp_path):
    """Also where the run is a part of the job without the host's first rank; its error becomes theirs."""
    _, first, second = run_ranks(3, prepared_by, str(tmp_path))
    assert first == (["made-by-1"], "no room")
    assert second == (["made-by-1"], "rank 0 could not prepare the corpus: no room")


def test_a_signal_before_the_loop_ends_at_once(toy, tmp_path):
    """While a rank waits for others there is nothing to save."""
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    with socket.create_server(("127.0.0.1", 0)) as probe:
        env["MASTER_PORT"] = str(probe.getsockname()[1])
    job = begin(0, ROOT / "train_ddp.py", *words(toy, tmp_path / "run"), env=env)
    while True:  # until it listens for the other rank
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", int(env["MASTER_PORT"]))) == 0:
                break
        assert job.poll() is None
        time.sleep(0.05)
    began = time.time()
    job.send_signal(signal.SIGTERM)
    assert end(job)[0] == 128 + signal.SIGTERM and time.time() - began < 5


def test_the_banner_names_the_run(toy, tmp_path):
    """A new folder runs/SCRIPT-DATE when none is given, named in the output; config.json says what ran."""
    flags = words(toy, "X")
    flags = flags[: flags.index("--out")] + flags[flags.index("--out") + 2 :]
    code, out, err = end(begin(0, ROOT / "train_ddp.py", *flags, cwd=tmp_path))
    assert code == 0, err
    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"train_ddp-\d{8}-\d{6}", folder.name) and f"run folder runs/{folder.name}" in out
    facts = json.loads((folder / "config.json").read_text())
    assert facts["command"] == " ".join(["train_ddp.py", *flags]) and facts["torch"] == torch.__version__
    assert "batch: 384 tokens a step = 3 sequences x 32 tokens x 4 micro-batches x 1 data-parallel ranks" in out


def test_the_first_command_as_it_stands(tmp_path):
    """`torchrun --nproc_per_node=8 train_zero.py`, on any machine and with no data of one's own."""
    call = [*TORCHRUN, "--nproc_per_node=8", str(ROOT / "train_zero.py"), "--steps", "2", "--device", "cpu"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, timeout=180, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "8 x CPU" in done.stdout and "step     1/2" in done.stdout and "DIFFERENT" not in done.stdout, done.stdout
