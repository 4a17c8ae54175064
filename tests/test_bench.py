"""bench.sh on real runs: order, resuming, a cell that fails, a signal; bench_table.py on rows."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from harness import ROOT, toy_files

from support import bench_table


def start(folder, results="out", flags=(), **settings):
    """./bench.sh in a process of its own, on the toy model and corpus in `folder`."""
    defaults = dict(MODEL=f"{folder}/toy.json", GLOBAL_BATCH="8", OUT=f"{folder}/{results}", PYTHON=sys.executable)
    threads = dict(OMP_NUM_THREADS="1", LOCAL_WORLD_SIZE="8", CUDA_VISIBLE_DEVICES="")
    command = ["./bench.sh", "--data", f"{folder}/plain", "--workers", "0", *flags]
    env = {**os.environ, **threads, **defaults, **settings}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process) -> tuple[int, str]:
    text, _ = process.communicate(timeout=200)
    return process.returncode, text


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """One, two and three processes; three do not divide the batch of 8."""
    folder = tmp_path_factory.mktemp("bench")
    toy_files(folder)
    code, text = finish(start(folder, GPUS="1 2 3", STRATEGIES="ddp", MICRO="ddp=2 4 zero2=1"))
    return folder, code, text


def rows_file(out):
    """The one file of rows in `out`: named after model, batch, hardware and a number that stands for the flags."""
    (file,) = out.glob("scaling-toy-8-cpu-*.json")
    return file


def cells(text: str) -> list[tuple[str, str]]:
    """(outcome, cell) in order."""
    lines = [line.split() for line in text.splitlines()]
    return [
        (w[0], f"{w[1]} {w[3]}".rstrip(":"))
        for w in lines
        if w and w[0] in ("measured", "kept", "FAILED") and w[2] == "on"
    ]


def test_failing_cell_does_not_stop_the_others(first):
    folder, code, text = first
    assert cells(text) == [("measured", "single 1"), ("FAILED", "ddp 3"), ("measured", "ddp 2")], text
    assert code == 1
    assert "--global-batch 8 is not a multiple of --micro-batch" in text  # the cause, not torchrun's own report
    assert "these figures mean nothing" in text
    assert "final losses agree" in text


def test_rows_are_those_of_the_logs(first):
    folder, _, text = first
    rows = json.loads(rows_file(folder / "out").read_text())
    assert [(r["strategy"], r["gpus"]) for r in rows] == [("single", 1), ("ddp", 2)]
    wanted = "model strategy gpus micro_batch accum tok_s_gpu mfu peak_gb hardware torch commit date command".split()
    for row in rows:
        assert {*wanted, "exposed_comm", "data_wait"} <= row.keys() and row["steps"] == 8
        out = folder / "out" / f"toy-{row['strategy']}-{row['gpus']}"
        steps = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        ms = sorted(s["step_ms"] for s in steps[3:])
        assert (row["step_ms_min"], row["step_ms"], row["step_ms_max"]) == (ms[0], ms[2], ms[4])
        assert row["tok_s"] == pytest.approx(8 * 32 / ms[2] * 1e3) and row["tok_s_gpu"] == pytest.approx(
            row["tok_s"] / row["gpus"]
        )
        assert row["final_loss"] == steps[-1]["loss"]
        assert row["micro_batch"] == {"single": 4, "ddp": 2}[row["strategy"]]  # MICRO="ddp=2 4 zero2=1"
        assert row["micro_batch"] * row["accum"] * row["gpus"] == row["global_batch"] == 8
        assert 0 < row["exposed_comm"] + row["data_wait"] < 1
        assert row["command"].startswith(
            "python train_ddp.py" if row["gpus"] == 1 else "torchrun --nproc_per_node=2 train_ddp.py"
        )
    assert (folder / "out" / "scaling.png").read_bytes()[:4] == b"\x89PNG"


def test_second_call_measures_nothing_again(first):
    folder, _, _ = first
    shutil.copytree(folder / "out", folder / "again")
    file = rows_file(folder / "again")
    before = file.read_bytes(), (folder / "again" / "toy-ddp-2" / "log.jsonl").stat().st_mtime_ns
    code, text = finish(start(folder, "again", GPUS="2 1", STRATEGIES="ddp", MICRO="4 ddp=2"))
    assert cells(text) == [("kept", "single 1"), ("kept", "ddp 2")] and code == 0, text
    assert before == (file.read_bytes(), (folder / "again" / "toy-ddp-2" / "log.jsonl").stat().st_mtime_ns)


def test_signal_ends_the_cell_and_prints_the_table(first):
    folder, _, _ = first
    shutil.copytree(folder / "out", folder / "stopped")
    process = start(
        folder, "stopped", GPUS="2 1", STRATEGIES="ddp zero2", MICRO="1"
    )  # another command: nothing is kept
    log = folder / "stopped" / "toy-single-1.txt"
    log.unlink()
    while not log.exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    began = time.time()
    code, text = finish(process)
    assert code == 1 and time.time() - began < 60
    assert "stopped by a signal" in text and "| final loss |" in text  # of what was measured before
    left = subprocess.run(["pgrep", "-f", f"{folder}/stopped/toy-"], capture_output=True, text=True).stdout
    assert not left, "a run outlives the script"


def test_flags_have_a_file_of_their_own(first):
    folder, _, _ = first
    shutil.copytree(folder / "out", folder / "flags")
    code, text = finish(start(folder, "flags", GPUS="1", STRATEGIES="single", flags=("--seed", "7")))
    assert code == 0 and cells(text) == [("measured", "single 1")], text
    assert len(list((folder / "flags").glob("scaling-toy-8-cpu-*.json"))) == 2


def test_time_limit_is_reported(first):
    folder, _, _ = first
    code, text = finish(start(folder, "slow", GPUS="2", STRATEGIES="ddp", LIMIT="1"))
    assert code == 1 and "FAILED    ddp on 2: it took more than LIMIT=1 s" in text and "nothing measured yet" in text


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(STRATEGIES="zero4"), "STRATEGIES has zero4"),
        (dict(GPUS="two"), "GPUS has two"),
        (dict(MICRO="4 pip=2"), "MICRO has pip=2"),
    ],
)
def test_wrong_settings(first, settings, message):
    code, text = finish(start(first[0], "wrong", **settings))
    assert code == 2 and f"error: {message}; allowed are" in text


# --- the table --------------------------------------------------------------------------------------------------------


def row(strategy: str, gpus: int, tok_s: float, **more) -> dict:
    return {
        **dict(model="6b", strategy=strategy, gpus=gpus, global_batch=64, seq_len=2048, micro_batch=4, accum=2),
        **dict(dtype="bfloat16", tok_s=tok_s, tok_s_gpu=tok_s / gpus, mfu=0.5, peak_gb=90.0, final_loss=9.5, steps=8),
        **dict(step_ms=100.0, step_ms_min=99.0, step_ms_max=101.0, exposed_comm=0.1, bubble=0.0, data_wait=0.0),
        **dict(hardware="H", torch="2", commit="c", date="d", command="x"),
        **more,
    }


def table(tmp_path, capsys, rows: list[dict]) -> str:
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    bench_table.print_table(str(tmp_path / "rows.json"))
    return capsys.readouterr().out


def test_efficiency_against_one_gpu(tmp_path, capsys):
    text = table(tmp_path, capsys, [row("zero2", 8, 72_000), row("single", 1, 10_000)])
    assert "vs one GPU |" in text and "90.0%" in next(line for line in text.splitlines() if " zero2 " in line)


def test_two_baselines_when_the_model_does_not_fit(tmp_path, capsys):
    rows = [row("zero2", 8, 72_000), row("zero2-offload", 1, 6_000), row("compute-only", 1, 12_000, final_loss=1.0)]
    text = table(tmp_path, capsys, rows)  # the compute-only pass trains nothing: its loss is no disagreement
    assert "vs one GPU with offload" in text and "vs one GPU, compute only" in text
    line = next(line for line in text.splitlines() if " zero2 " in line)
    assert "150.0%" in line and "75.0%" in line


def test_per_added_gpu_and_best_value(tmp_path, capsys):
    """1 -> 2 GPUs brings 9,000 tokens/s; 2 -> 4 brings 12,000 by two GPUs; 4 -> 8 brings 8,000 by four."""
    rows = [row("single", 1, 10_000), row("ddp", 2, 19_000), row("ddp", 4, 31_000), row("ddp", 8, 39_000)]
    rows += [row("zero2", 4, 30_000, micro_batch=2), row("zero2", 4, 18_000), row("zero2", 8, 38_000)]
    text = table(tmp_path, capsys, rows)
    column = [name.strip() for name in text.splitlines()[0].split("|")].index("per added GPU")
    shares = [
        (line.split("|")[2].strip(), line.split("|")[column].strip()) for line in text.splitlines()[2 : 2 + len(rows)]
    ]
    assert shares == [
        ("single", "-"), ("ddp", "90.0%"), ("ddp", "60.0%"), ("zero2", "66.7%"), ("zero2", "26.7%"), ("ddp", "20.0%"),
        ("zero2", "20.0%"),  # over the better of its two rows on four
    ]  # fmt: skip
    assert text.splitlines()[-1].startswith("best value: 4 GPUs (ddp)")
    assert table(tmp_path, capsys, rows[:3]).splitlines()[-1].startswith("best value: 4 GPUs")
    assert "best value: unknown" in table(tmp_path, capsys, rows[1:3])


def test_cells(tmp_path, monkeypatch, capsys):
    """What is left out, and in which order the rest comes; a fresh folder with two of the scripts in it."""
    monkeypatch.chdir(tmp_path)
    for name, value in dict(GPUS="1 2 4", STRATEGIES="ddp 3d cp", CUDA_VISIBLE_DEVICES="", OUT="out").items():
        monkeypatch.setenv(name, value)
    for script in ("train_ddp.py", "train_3d.py"):  # and no train_cp.py
        (tmp_path / script).touch()
    bench_table.plan(["--data", "a folder"])
    said = capsys.readouterr()
    files, *lines = [line.split("\t") for line in said.out.splitlines()]
    assert files == ["out/scaling-tiny-64-cpu-" + files[0].split("-")[-1], "out/scaling.png", "out/tiny"]
    assert [line[:3] for line in lines] == [
        ["run", "single", "1"], ["spare", "compute-only", "1"], ["spare", "zero2-offload", "1"],
        ["run", "ddp", "4"], ["run", "ddp", "2"], ["run", "3d", "4"],
    ]  # fmt: skip
    assert lines[-1][3].startswith(
        "torchrun --nproc_per_node=4 train_3d.py --tp 2 --pp 2 --model tiny --global-batch 64"
    )
    assert lines[-1][3].endswith("--data 'a folder'")
    assert "left out  cp: there is no train_cp.py here\n" in said.err and said.err.count("left out") == 2
    assert "left out  3d on 2: it needs 4 or more\n" in said.err


@pytest.mark.soak
def test_model_that_does_not_fit_one_gpu(first):
    """The run that fails here has a micro-batch that does not divide; the two baselines take its place."""
    code, text = finish(start(first[0], "spare", GPUS="1", STRATEGIES="single", MICRO="single=3"))
    assert cells(text) == [("FAILED", "single 1"), ("measured", "compute-only 1"), ("measured", "zero2-offload 1")], (
        text
    )
    assert code == 1 and "vs one GPU with offload" in text


def test_out_of_memory_is_said_with_the_prediction(tmp_path, capsys):
    (tmp_path / "log").write_text("step 0\nrank 0: torch.OutOfMemoryError: CUDA out of memory. Tried ...\n")
    (tmp_path / "log.explain").write_text("traffic ...\n\nmemory of one rank, GB: 144.400\n")
    bench_table.why_failed(str(tmp_path / "log"), "1", "300")
    assert capsys.readouterr().out.startswith("out of memory: 144.400 GB predicted, the card has")
    (tmp_path / "log.explain").unlink()
    bench_table.why_failed(str(tmp_path / "log"), "1", "300")
    assert capsys.readouterr().out.startswith("exit code 1: rank 0: torch.OutOfMemoryError: CUDA out of memory")


def test_losses_that_disagree_are_a_failure(tmp_path, capsys):
    with pytest.raises(SystemExit, match="final losses differ by 0.1"):
        table(tmp_path, capsys, [row("zero2", 8, 72_000), row("single", 1, 10_000, final_loss=9.6)])
    with pytest.raises(SystemExit, match="allowed is 0.0001"):
        rows = [row("zero2", 8, 72_000, dtype="float32"), row("single", 1, 10_000, dtype="float32", final_loss=9.501)]
        table(tmp_path, capsys, rows)


def test_model_parallel_accumulation(first, tmp_path):
    """Ranks that share a batch do not divide it: accum of a run with tp, in a run folder made from a real one."""
    source = first[0] / "out" / "toy-ddp-2"
    facts = json.loads((source / "config.json").read_text())
    for tp, accum in ((0, 2), (2, 2), (1, 1)):  # 0: all ranks
        out = tmp_path / f"tp{tp}"
        shutil.copytree(source, out)
        facts["config"] |= {"tp": tp, "micro_batch": 4}
        (out / "config.json").write_text(json.dumps(facts))
        bench_table.add_row(str(tmp_path / "rows.json"), "tp", 2, str(out), f"command {tp}")
        assert bench_table.read_rows(str(tmp_path / "rows.json"))[-1]["accum"] == accum
