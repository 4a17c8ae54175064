"""Nothing is lost: one owner per folder, ends by STOP and SIGHUP, full disks, other launchers, names people have."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from harness import ROOT, run_ranks, toy_files
from test_launch import begin, end, words

import train_ddp
from checkpoint import Checkpointer, steps, whole_piece
from model import ModelConfig
from support import rendezvous, start
from support.defaults import check_ranges
from support.flags import Config, UserError, parse_flags, users_error
from support.meter import Meter
from support.run import Run


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    toy_files(folder)
    return folder


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def wait_for(log: Path, rows: int) -> None:
    began = time.time()
    while not log.exists() or len(log.read_text().splitlines()) < rows:
        assert time.time() - began < 60
        time.sleep(0.05)


def test_one_owner_and_three_ends(toy, tmp_path):
    """The same command twice: one refusal that names the owner. Under nohup SIGHUP is nothing; STOP ends the run after
    the step, exit code 0; the next owner goes on from there, and SIGHUP saves as SIGTERM does."""
    out = tmp_path / "run"
    flags = words(toy, out, steps=100_000)
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what nohup does: the child inherits it
    nohup = begin(0, ROOT / "train_ddp.py", *flags)
    signal.signal(signal.SIGHUP, ignored)
    wait_for(out / "log.jsonl", 3)
    code, _, err = end(begin(0, ROOT / "train_ddp.py", *flags))
    assert code == 2 and f"in use by another run: process {nohup.pid} on " in err and err.count("\n") == 1, err
    nohup.send_signal(signal.SIGHUP)
    rows = len((out / "log.jsonl").read_text().splitlines())
    wait_for(out / "log.jsonl", rows + 3)
    (out / "STOP").touch()
    code, said, err = end(nohup)
    assert code == 0 and "stopped by the file STOP after step" in said and not (out / "STOP").exists(), said + err
    saved = int(steps(out / "ckpt")[-1].name[5:])

    job = begin(0, ROOT / "train_ddp.py", *flags)
    wait_for(out / "log.jsonl", saved + 3)
    job.send_signal(signal.SIGHUP)
    code, said, err = end(job)
    assert code == 128 + signal.SIGHUP and f"going on from {out}/ckpt/step_{saved:08d}" in said, said + err
    found = [json.loads(line)["step"] for line in (out / "log.jsonl").read_text().splitlines()]
    assert found == list(range(found[-1] + 1)) and int(steps(out / "ckpt")[-1].name[5:]) == found[-1] + 1


def test_a_full_screen_and_a_refusal(toy, tmp_path):
    """> /dev/full: one warning, and the run goes on; a name that no encoding has; a refused run leaves no folder.

    An error keeps its exit code on a screen that takes nothing; a closed one, and seconds beyond what a clock counts.
    """
    strange = os.fsdecode(os.fsencode(str(tmp_path)) + b"/lat\xe9")
    with open("/dev/full", "w") as full:
        call = [sys.executable, str(ROOT / "train_ddp.py")]
        jobs = [
            subprocess.Popen(call + words(toy, strange), stdout=full, stderr=subprocess.PIPE, text=True),
            subprocess.Popen(
                call + words(toy, tmp_path / "new", init_from=tmp_path / "none"), stderr=subprocess.PIPE, text=True
            ),
            subprocess.Popen(call + words(toy, tmp_path / "dumb", resume="nowhere"), stdout=full, stderr=full),
        ]
        alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
        late = words(toy, tmp_path / "late", hang_timeout=99999999999999)
        closed = ["bash", "-c", 'exec "$@" >&-', "-", *call, *late]
        jobs.append(subprocess.Popen(closed, stderr=subprocess.PIPE, text=True, env=os.environ | alone))
        (_, err), (_, refused), _, (_, late) = (job.communicate(timeout=60) for job in jobs)
    assert jobs[0].returncode == 0 and err.count("warning: nothing more is printed") == 1, err
    assert len(Path(strange, "log.jsonl").read_text().splitlines()) == 4 and steps(Path(strange, "ckpt"))
    assert jobs[1].returncode == 2 and "is no run folder" in refused and not (tmp_path / "new").exists(), refused
    assert jobs[2].returncode == 2 and not (tmp_path / "dumb").exists()
    assert jobs[3].returncode == 2
    assert late == "error: --hang-timeout 99999999999999: allowed is 1 or more, less than 1000000\n"


def test_a_log_that_cannot_be_written(tmp_path, capsys):
    """Once it is said; the rows after it are trained all the same."""
    run = Run(Config(hang_timeout=1), 0, 1, torch.device("cpu"), out=str(tmp_path))
    with Meter(run, 1) as meter:
        meter.file = open("/dev/full", "ab", buffering=0)
        meter._write({"step": 0})
        meter._write({"step": 1})
    assert capsys.readouterr().out.count("log.jsonl gets no more rows, training goes on") == 1


@pytest.mark.parametrize(
    "name, content, refused",
    [
        ("config.json", '{"n_layer": 2}', "config.json is not a run's"),
        ("config.json", '{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}', "is not a run's"),
        ("config.json", "[1]", "holds something else"),
        ("log.jsonl", '{"event": "started"}\n', "log.jsonl is not a run's"),
        ("log.jsonl", "2026-11-30 started\n", "holds something else"),
        ("config.json", '{"config": {}, "model": {}, "command": ""}', ""),
        ("log.jsonl", '{"step": 0, "loss": 1.0}\n', ""),
        ("log.jsonl", '{"st', ""),  # cut short by a crash
        ("book.txt", "a book", ""),
    ],
)
def test_somebody_elses_folder_is_refused(name, content, refused, tmp_path):
    (tmp_path / name).write_text(content)
    if refused:
        with pytest.raises(UserError, match=refused):
            start.refuse_foreign(tmp_path)
    else:
        start.refuse_foreign(tmp_path)


@pytest.mark.parametrize("size, rank", rendezvous.LAUNCHERS.items())
def test_another_launcher_is_refused(size, rank, monkeypatch):
    """Each of its processes would train alone. Torchrun inside such a job sets WORLD_SIZE and does not come here."""
    monkeypatch.setenv(size, "2")
    rendezvous.refuse_launchers()  # a shell inside an allocation
    monkeypatch.setenv(rank, "0")
    with pytest.raises(UserError, match=f"{size}=2, but without torchrun .* examples/slurm.sh"):
        rendezvous.refuse_launchers()
    monkeypatch.setenv(size, "1")
    rendezvous.refuse_launchers()


def test_a_wrong_interface_is_named(monkeypatch):
    for name, value in dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="1").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    with pytest.raises(UserError, match="GLOO_SOCKET_IFNAME=eth9: there is no eth9 here, but .*lo"):
        rendezvous.open_group(torch.device("cpu"), 5)


def test_a_number_of_hosts_that_may_change_is_refused(toy, tmp_path):
    call = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--rdzv_backend=c10d", "--nproc_per_node=1"]
    call += ["--rdzv_endpoint=localhost:0", "--rdzv_conf=last_call_timeout=1", str(ROOT / "train_ddp.py")]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*call, *words(toy, tmp_path / "run")], capture_output=True, text=True, timeout=100, env=env)
    assert done.returncode != 0 and "error: --nnodes=1:2: a fixed number of hosts is wanted" in done.stderr, done.stderr


def test_an_error_with_a_file_name_is_one_line(tmp_path):
    (tmp_path / "runs").symlink_to("/none/here")
    for path, said in (
        (tmp_path / "runs/x", r"runs is a link to /none/here, which is not there"),
        (tmp_path / "missing", "missing: No such file or directory$"),
    ):
        with pytest.raises(OSError) as caught:
            path.read_text()
        assert isinstance(error := users_error(caught.value), UserError)
        with pytest.raises(UserError, match=said):
            raise error
    plain = OSError(errno.EPIPE, "Broken pipe")
    assert users_error(plain) is plain  # names no file: a fault of the program keeps its traceback


@pytest.mark.parametrize("flags", [["--hang-timeout", "99999999999999"], ["--workers", "100000"]])
def test_numbers_out_of_range(flags):
    cfg = parse_flags(Config, flags)
    cfg.workers, cfg.min_lr = cfg.workers or 0, 0.0
    with pytest.raises(UserError, match=f"{flags[0]} {flags[1]}: allowed is .* less than"):
        check_ranges(cfg)


def evaluation_asked_for(rank, folder):
    """What is said to --eval-every on a corpus without a val split; and not to the default, which trains."""
    flags = ["--model", f"{folder}/toy.json", "--data", f"{folder}/plain", "--device", "cpu", "--global-batch", "12"]
    flags += ["--steps", "1", "--save-every", "0", "--out", f"{folder}/run"]
    with pytest.raises(UserError, match="--eval-every 5: .*plain has no val split; prepare it with --val"):
        train_ddp.main(parse_flags(train_ddp.Config, [*flags, "--eval-every", "5"]))
    return len(train_ddp.main(parse_flags(train_ddp.Config, flags)))


def test_an_evaluation_that_cannot_be_had_is_refused(tmp_path):
    toy_files(tmp_path)
    assert run_ranks(1, evaluation_asked_for, str(tmp_path)) == [1]


def saves(rank, folder):
    """Five saves with keep_last 1, the third and fourth in steps whose gradient was not finite."""
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "0.0001"
    saver, there = Checkpointer(folder, keep_last=1), []
    for step in range(1, 6):
        saver.save(step, {"w": whole_piece(torch.ones(3))}, {}, rotate=step not in (3, 4))
        saver.wait()
        there.append([int(path.name[5:]) for path in steps(folder)])
    saver.close()
    return there


def test_bad_steps_rotate_nothing_away(tmp_path, capsys):
    """And a save that takes longer than torchrun waits is said once, with what to set."""
    assert run_ranks(1, saves, str(tmp_path)) == [[[1], [2], [2, 3], [2, 3, 4], [5]]]
    said = capsys.readouterr().out
    assert said.count("warning: a save takes 0 s and torchrun kills 0 s after a signal") == 1
    assert "set TORCH_ELASTIC_SHUTDOWN_TIMEOUT=31 (Slurm: --signal=TERM@31)" in said


def in_a_mount_of_its_own(command: str, **options) -> subprocess.Popen:
    call = ["unshare", "-m", "bash", "-c", command]
    env = os.environ | {"PYTHONPATH": str(ROOT), "LOCAL_WORLD_SIZE": "8"}
    return subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, **options)


def may_mount() -> bool:
    call = ["unshare", "-m", "bash", "-c", "mount -t tmpfs tmpfs /mnt"]
    try:
        return subprocess.run(call, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not may_mount(), reason="mounting needs root")
def test_full_shared_memory_and_a_busy_leftover(toy, tmp_path):
    """/dev/shm is named when loader workers find it full; a leftover that cannot be removed is in nobody's way."""
    script = f"exec {sys.executable} {ROOT}/train_ddp.py "
    full = " ".join(words(toy, tmp_path / "full", workers=2, seq_len=32, hang_timeout=10))
    busy = tmp_path / "busy/ckpt/.tmp-step_00000008/mount"
    busy.mkdir(parents=True)
    jobs = [
        in_a_mount_of_its_own(f"mount -t tmpfs -o size=4k tmpfs /dev/shm; {script}{full}"),
        in_a_mount_of_its_own(f"mount -t tmpfs tmpfs {busy}; {script}{' '.join(words(toy, tmp_path / 'busy'))}"),
    ]
    (code, _, err), (fine, _, warned) = map(end, jobs)
    assert code == 2 and "/dev/shm, which they hand batches over in, has " in err and "--workers 0" in err, err
    assert fine == 0 and f"warning: {busy.parent} cannot be removed" in warned, warned


def test_float16_on_a_cpu_is_warned_about(capsys):
    cfg = Config(model="x", dtype="float16", global_batch=1, micro_batch=1, seq_len=8, steps=1, lr=1.0, min_lr=0.1)
    shape = ModelConfig(1, 2, 2, 8, 8, 61, 8)

    class Corpus:
        n_tokens, tokenizer = 9, "ids"

        def n_windows(self, T):
            return 1

    start.print_banner(Run(cfg, 0, 1, torch.device("cpu"), torch.float16, model_cfg=shape, tokens=Corpus()))
    assert "warning: float16 on a CPU is about twenty times slower than float32" in capsys.readouterr().out


SRUN = """#!/bin/bash
# a stand-in: one task on each of two hosts, here both this one
shift  # --kill-on-bad-exit
for node in 0 1; do SLURM_PROCID=$node "$@" & pids="$pids $!"; done
for pid in $pids; do wait $pid || exit 1; done
"""


@pytest.mark.soak
def test_the_slurm_script(toy, tmp_path):
    """examples/slurm.sh against stand-ins for srun and scontrol: two torchruns meet, and train as one job."""
    (tmp_path / "bin").mkdir()
    commands = {"srun": SRUN, "scontrol": "#!/bin/bash\necho localhost; echo localhost\n"}
    commands["torchrun"] = f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n'
    for name, text in commands.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "h[1-2]"}
    job |= {"SLURM_GPUS_ON_NODE": "1", "PORT": str(free_port()), "SCRIPT": str(ROOT / "train_zero.py")}
    env = os.environ | job | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    call = [ROOT / "examples/slurm.sh", *words(toy, tmp_path / "run")]
    done = subprocess.run(call, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "2 x CPU" in done.stdout and "step     3/4" in done.stdout, done.stderr[-3000:]
