"""Two hosts, made of network namespaces and a cable between them: trains, goes on, and says who or what is gone."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from harness import ROOT, final_weights, toy_files
from test_launch import begin, end, words

ADDRESS = {"A": "10.77.0.1", "B": "10.77.0.2"}


def may_make_hosts() -> bool:
    try:
        call = ["unshare", "-n", "-m", "-u", "ip", "link", "add", "cable0", "type", "veth", "peer", "name", "cable1"]
        return subprocess.run(call, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


pytestmark = [pytest.mark.soak, pytest.mark.skipif(not may_make_hosts(), reason="network namespaces need root")]


class Hosts:
    """A and B: a network, a name and mounts of their own, the same files."""

    def __init__(self, folder: Path):
        self.folder, self.names = folder, {host: f"{folder.name[:20]}-{os.getpid()}-{host}" for host in ADDRESS}
        lines = [f"{address} host{host}" for host, address in ADDRESS.items()]
        (folder / "etc-hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        for name in self.names.values():
            self.ip("netns", "add", name)
        ends = [("name", "cable", "netns", name) for name in self.names.values()]
        self.ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for host, address in ADDRESS.items():
            self.ip("-n", self.names[host], "addr", "add", f"{address}/24", "dev", "cable")
            for link in ("lo", "cable"):
                self.ip("-n", self.names[host], "link", "set", link, "up")

    def ip(self, *words: str) -> str:
        return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout

    def begin(self, host: str, call: list[str], before: str = "", env: dict = {}) -> subprocess.Popen:  # noqa: B006
        """Start a command there, with its screen in a file screen-HOST; before: shell commands as that host's root."""
        setup = f"hostname host{host}; mount --bind {self.folder}/etc-hosts /etc/hosts; {before}"
        env = os.environ | {"OMP_NUM_THREADS": "1"} | env
        with open(self.folder / f"screen-{host}", "w") as screen:
            there = ["ip", "netns", "exec", self.names[host], "unshare", "-u", "bash", "-c", f'{setup} exec "$@"', "-"]
            return subprocess.Popen([*there, *call], stdout=screen, stderr=screen, env=env, cwd=self.folder)

    def job(self, *flags: str) -> dict[str, subprocess.Popen]:
        """One torchrun on each host."""
        call = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes=2",
            "--nproc_per_node=1",
            "--rdzv_backend=c10d",
        ]
        call += [f"--rdzv_endpoint={ADDRESS['A']}:29500", str(ROOT / "train_ddp.py"), *flags]
        return {host: self.begin(host, call) for host in ADDRESS}

    def screen(self, host: str) -> str:
        return (self.folder / f"screen-{host}").read_text()

    def wait(self, what, seconds: float = 90) -> None:
        began = time.time()
        while not what():
            assert time.time() - began < seconds, [self.screen(host)[-3000:] for host in ADDRESS]
            time.sleep(0.05)

    def kill(self, host: str) -> None:
        """Everything that runs there, at once: the power is gone."""
        for pid in self.ip("netns", "pids", self.names[host]).split():
            subprocess.run(["kill", "-9", pid], capture_output=True)


@pytest.fixture
def hosts(tmp_path):
    toy_files(tmp_path)
    made = Hosts(tmp_path)
    yield made
    for host, name in made.names.items():
        made.kill(host)
        made.ip("netns", "del", name)  # the cable goes with them


def rows(run: Path) -> int:
    return len((run / "log.jsonl").read_text().splitlines()) if (run / "log.jsonl").exists() else 0


def test_a_host_dies_and_the_job_goes_on(hosts, tmp_path):
    """The other one names it within seconds; the same commands again end with the bits of one undisturbed host."""
    out = tmp_path / "run"
    flags = words(tmp_path, out, steps=80, save_every=5, dropout=0.1)
    jobs = hosts.job(*flags)
    hosts.wait(lambda: rows(out) > 12)
    hosts.kill("B")
    assert jobs["A"].wait(timeout=30) == 1 and rows(out) < 80
    assert "rank 1 on hostB gives no more signs of life, when it was in" in hosts.screen("A"), hosts.screen("A")
    jobs = hosts.job(*flags)
    assert [job.wait(timeout=200) for job in jobs.values()] == [0, 0], hosts.screen("A")
    assert f"resume: going on from {out}/ckpt/step_" in hosts.screen("A")
    code, _, err = end(begin(2, ROOT / "train_ddp.py", *words(tmp_path, tmp_path / "one", steps=80, dropout=0.1)))
    assert code == 0, err
    assert [json.loads(line)["step"] for line in (out / "log.jsonl").read_text().splitlines()] == list(range(80))
    ours, theirs = final_weights(out), final_weights(tmp_path / "one")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_first_host_dies(hosts, tmp_path):
    """It held the job's store, so nobody can be asked."""
    jobs = hosts.job(*words(tmp_path, tmp_path / "run", steps=100_000))
    hosts.wait(lambda: rows(tmp_path / "run") > 5)
    hosts.kill("A")
    assert jobs["B"].wait(timeout=60) == 1
    assert "hostA, which holds the job's store, does not answer: it or the network" in hosts.screen("B")


def test_the_cable_is_cut(hosts, tmp_path):
    """Nothing is closed, packets only stop: each side says what it sees. B's torchrun waits for its store, for ever."""
    jobs = hosts.job(*words(tmp_path, tmp_path / "run", steps=100_000, hang_timeout=10))
    hosts.wait(lambda: rows(tmp_path / "run") > 5)
    hosts.ip("-n", hosts.names["A"], "link", "set", "cable", "down")
    assert jobs["A"].wait(timeout=60) == 1
    assert "hang: rank 1 gives no sign of life since" in hosts.screen("A"), hosts.screen("A")
    hosts.wait(lambda: "which holds the job's store, does not answer: it or the network" in hosts.screen("B"), 60)


def test_who_does_not_come_and_what_is_not_shared(hosts, tmp_path):
    """A port on which nobody listens, an address that nobody has, a host that is missing, a folder of one's own."""
    flags = words(tmp_path, tmp_path / "run", hang_timeout=15)
    call = [sys.executable, str(ROOT / "train_ddp.py"), *flags]

    def by_hand(rank: int, address: str) -> dict[str, str]:
        return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": "29500"}

    for address in (ADDRESS["A"], "10.77.0.9"):
        job = hosts.begin("B", call, env=by_hand(1, address))
        assert job.wait(timeout=60) == 2
        assert f"error: no answer from {address}:29500 (MASTER_ADDR:MASTER_PORT) within 15 s" in hosts.screen("B")
    assert hosts.begin("A", call, env=by_hand(0, ADDRESS["A"])).wait(timeout=60) == 2
    assert "1 of 2 ranks arrived within 15 s, missing: [1]" in hosts.screen("A")
    assert not (tmp_path / "run").exists()
    (tmp_path / "disk").mkdir()
    call[call.index("--out") + 1] = f"{tmp_path}/disk/run"
    jobs = [
        hosts.begin("A", call, env=by_hand(0, ADDRESS["A"])),
        hosts.begin("B", call, f"mount -t tmpfs tmpfs {tmp_path}/disk;", by_hand(1, ADDRESS["A"])),
    ]
    assert [job.wait(timeout=60) for job in jobs] == [2, 2], (hosts.screen("A"), hosts.screen("B"))
    said = f"ranks [1] do not see what rank 0 wrote into {tmp_path}/disk/run/ckpt: all ranks must share this folder"
    assert said in hosts.screen("A") + hosts.screen("B") and not list((tmp_path / "disk").iterdir())
