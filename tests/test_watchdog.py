"""Hangs: one sentence names the guilty rank, where it is and who waits; the innocent are not blamed. Real processes."""

import re
import signal
import subprocess
import time

import pytest
from test_launch import begin, end, words
from test_train_tp import files

from support.watchdog import Beat, judge

FORK = """
import os, signal, sys, time
import data, train_zero, transport, checkpoint
from support.start import run_script

bad = os.environ["RANK"] == "1"
calls = 0

def on_call(target, name, before):
    real = getattr(target, name)
    def wrapped(*args, **kwargs):
        global calls
        calls += 1
        if bad and (skip := before(*args, **kwargs)):
            return skip
        return real(*args, **kwargs)
    setattr(target, name, wrapped)

{fault}
run_script(train_zero.main, train_zero.predict, train_zero.Config, "")
"""
CASES = {  # what rank 1 does a second or two after the start -> code, what the sentence must say, flags
    "frozen": (
        "on_call(data.Batches, 'next', lambda *a: calls == 120 and os.kill(os.getpid(), signal.SIGSTOP))",
        r"hang: rank 1 gives no sign of life since \d+ s, when it was in .* of step \d+; ranks? 0.* wait",
        {},
    ),
    "asleep in data loading": (
        "import numpy; real = data.Batches.next\n"
        "class Slow:\n    def __next__(self): time.sleep(1000)\n"
        "on_call(data.Batches, 'next', lambda self: calls == 120 and setattr(self, 'iterator', Slow()))",
        r"hang: rank 1 is in data loading of step \d+ since \d+ s; rank 0 waits for it in .*",
        {},
    ),
    "a collective skipped": (
        "on_call(train_zero, 'all_reduce', lambda *a, **k: calls == 3)",
        # it has gone on to compare the proofs of its data
        r"hang: rank 1 is in Python code of step \d+ since \d+ s; rank 0 waits for it in all_reduce facts",
        {"stage": 1},
    ),
    "one more evaluation": (
        "def again(run, strategy):\n"
        "    if run.rank == 1 and calls == 1: real_evaluate(run, strategy)\n"
        "real_evaluate = train_zero.evaluate\n"
        "on_call(train_zero, 'evaluate', again)",
        r"hang: the ranks wait for each other in step \d+: rank 0: .*; rank 1: .*validation loss",
        {"eval_every": 2},
    ),
    "stuck in a save": (
        "on_call(checkpoint.Checkpointer, '_stage', lambda *a: time.sleep(1000))",
        r"hang: rank 1 is in saving a checkpoint of step \d since",
        {"save_every": 2},
    ),
}


def start_case(name, folder):
    fault, sentence, flags = CASES[name]
    script = folder / f"{name.replace(' ', '_')}.py"
    script.write_text(FORK.format(fault=fault))
    more = dict(steps=100_000, hang_timeout=12, micro_batch=2, data=folder / "both") | flags
    return begin(2, script, *words(folder, folder / name, **more))


def test_hangs_name_the_guilty(tmp_path):
    """All cases at once: within --hang-timeout + 5 s the sentence, stacks of the living, and the end of the job."""
    files(tmp_path)
    began = time.time()
    jobs = {name: start_case(name, tmp_path) for name in CASES}
    for name, job in jobs.items():
        code, out, err = end(job, timeout=120)
        assert code != 0, name
        assert re.search(CASES[name][1], err), (name, err[-3000:])
        cause = err.split("Root Cause")[1]  # torchrun's summary: the sentence, or the frozen rank that was killed
        assert re.search(r"rank +: 1 (.*\n)*.*SIGKILL" if name == "frozen" else r"hang: ", cause), (name, cause)
        stacks = sorted(f.name for f in (tmp_path / name / "hang").iterdir())
        assert stacks == (["rank-0.txt"] if name == "frozen" else ["rank-0.txt", "rank-1.txt"]), name
        assert "Thread" in (tmp_path / name / "hang/rank-0.txt").read_text()
    assert time.time() - began < 120  # on two busy cores: each needs 12 s, and as long to start


def test_a_rank_that_leaves_is_named(tmp_path):
    """It exits with 0: the one that notices the closed connection is not blamed."""
    files(tmp_path)
    CASES["leaves"] = "on_call(data.Batches, 'next', lambda *a: calls == 120 and os._exit(0))", "", {}
    code, out, err = end(start_case("leaves", tmp_path), timeout=60)
    assert code != 0 and re.search(
        r"rank 1 has left without an error; its last sign of life was in .* of step \d+", err
    ), err


@pytest.mark.soak
def test_no_false_alarm(tmp_path):
    """A slow step, and a whole job that stands still for longer than --hang-timeout: a laptop that was closed."""
    files(tmp_path)
    CASES["slow"] = "on_call(data.Batches, 'next', lambda *a: calls == 120 and time.sleep(8))", "", {}
    slow = start_case("slow", tmp_path)
    CASES["paused"] = "", "", {}
    paused = start_case("paused", tmp_path)
    log = tmp_path / "paused/log.jsonl"
    while not log.exists() or len(log.read_text().splitlines()) < 5:
        time.sleep(0.1)
    ranks = subprocess.run(["pgrep", "-f", str(tmp_path / "paused.py")], capture_output=True, text=True).stdout.split()
    for number in (signal.SIGSTOP, signal.SIGCONT):
        subprocess.run(["kill", f"-{number}", *ranks], check=True)
        time.sleep(16 if number == signal.SIGSTOP else 0)
    before = len(log.read_text().splitlines())
    time.sleep(14)
    assert len(log.read_text().splitlines()) > before and slow.poll() is None and paused.poll() is None
    for job in (slow, paused):
        job.send_signal(signal.SIGTERM)
        _, out, err = end(job)
        assert "hang" not in err and "stopped by a signal" in out, err


def beat(op, what="", step=4, calls=10, still=20.0):
    return Beat(1, step, op, what, calls, still, 1, "host")


@pytest.mark.parametrize(
    "beats, silent, guilty, sentence",
    [
        (
            {0: beat("exchange", "block.7"), 1: beat("data", still=615), 2: beat("exchange", "block.7")}, {}, 1,
            "rank 1 is in data loading of step 4 since 615 s; ranks 0, 2 wait for it in exchange block.7",
        ),
        (
            {0: beat("wait", "facts"), 1: beat("backward")}, {1: 12.0}, 1,
            "rank 1 gives no sign of life since 12 s, when it was in backward of step 4; "
            "rank 0 waits for it in wait facts",
        ),
        (
            {0: beat("wait", "facts", calls=12), 1: beat("all_gather", "head", calls=11)}, {}, 1,
            "the ranks wait for each other in step 4: rank 0: wait facts, its collective number 12; "
            "rank 1: all_gather head, its collective number 11",
        ),
    ],
)  # fmt: skip
def test_judge(beats, silent, guilty, sentence):
    assert judge(beats, silent) == (guilty, sentence)
