"""Who holds the others up? Every rank tells the job's store what it is doing.

When nothing moves, one sentence says why.

A thread of each rank writes a beat to the store, a few times per --hang-timeout: which step, which operation (the
markers of support/meter.py), how many collectives so far, and how long nothing has moved. A rank that has not moved
for --hang-timeout seconds reads everyone's beats. Most ranks of a hang are innocent: they wait in a collective. Guilty
is a rank whose beats have stopped (frozen, killed, gone), else one that is not waiting (it loads data, saves,
computes), else one that waits in another collective than most, or has called fewer. The verdict goes to the store,
every living rank writes its stacks into the run's hang/ folder and ends; a frozen one on this host is killed, for
torchrun would wait for it.
"""

import faulthandler
import json
import os
import signal
import socket
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from support.meter import COLLECTIVES, activity
from support.report import accuse
from support.run import Run, waiting

WAITING = (*COLLECTIVES, "wait", "bubble")
WORDS = {
    "start": "the start",
    "data": "data loading",
    "checkpoint": "saving a checkpoint",
    "eval": "evaluation",
    "other": "Python code",
}


@dataclass
class Beat:
    """What a rank says of itself."""

    number: int  # of this beat; one that stays the same is a rank without a sign of life
    step: int
    op: str  # the marker it is in
    what: str
    calls: int  # collectives so far
    still: float  # seconds since it moved
    pid: int
    host: str

    @property
    def place(self) -> str:
        return f"{self.op} {self.what}".strip() if self.op in WAITING else WORDS.get(self.op, self.op)


def ranks_in_words(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def judge(beats: dict[int, Beat], silent: dict[int, float]) -> tuple[int, str]:
    """The guilty rank and the sentence. beats: the last one of every rank; silent: seconds without a beat, by rank."""
    waiting = [rank for rank, b in beats.items() if rank not in silent and b.op in WAITING]
    busy = [rank for rank in beats if rank not in silent and rank not in waiting]
    places = Counter(beats[rank].place for rank in waiting)
    common = places.most_common(1)[0][0] if places else ""
    others = f"; {ranks_in_words(waiting)} {'waits' if len(waiting) == 1 else 'wait'} for it in {common}" * bool(
        waiting
    )
    if silent:
        rank = max(silent, key=lambda r: silent[r])
        b = beats[rank]
        return (
            rank,
            f"rank {rank} gives no sign of life since {silent[rank]:.0f} s, when it was in {b.place} of step {b.step}"
            + others,
        )
    if busy:
        rank = max(busy, key=lambda r: beats[r].still)
        b = beats[rank]
        return rank, f"rank {rank} is in {b.place} of step {b.step} since {b.still:.0f} s" + others
    rank = min(waiting, key=lambda r: (beats[r].calls, -places[beats[r].place], r))  # who has called fewest is behind
    there = "; ".join(f"rank {r}: {b.place}, its collective number {b.calls}" for r, b in sorted(beats.items()))
    return rank, f"the ranks wait for each other in step {beats[rank].step}: {there}"


class Watchdog:
    """Watches a run from start() to the end of main(), in a daemon thread with a store client of its own."""

    def __init__(self, run: Run):
        self.run, self.limit = run, run.cfg.hang_timeout
        self.every = min(1.0, self.limit / 10)  # seconds between beats
        # a client of its own: a set() beside another thread's wait() on one client takes seconds
        store = dist.distributed_c10d._get_default_store().clone()
        self.store = dist.PrefixStore(f"watchdog/{run.number}/{min(dist.get_process_group_ranks(run.world))}", store)
        self.seen: dict[int, tuple[int, float]] = {}  # of each rank, the number of its last beat and when it changed
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.watch, name="watchdog", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """The run has ended."""
        self.over.set()
        self.thread.join()

    def watch(self) -> None:
        number, moved, last, woke = 0, time.monotonic(), None, time.monotonic()
        me = os.getpid(), socket.gethostname()
        while number == 0 or not self.over.wait(self.every):
            now = time.monotonic()
            state = activity()
            if state != last or state is None or now - woke > 5 * self.every + 2:  # or this whole process was paused
                moved, last = now, state
            woke, number = now, number + 1
            _, step, op, what, calls = state or (0, 0, "start", "", 0)
            if op == "checkpoint" and waiting():  # its part of the save is done
                op, what = "wait", "the save"
            beat = Beat(number, step, op, what, calls, now - moved, *me)
            try:
                self.store.set(f"beat/{self.run.rank}", json.dumps(asdict(beat)))
                if self.store.check(["verdict"]):
                    self.end(json.loads(self.store.get("verdict")))
                if now - moved > self.limit / 2:
                    self.look(now - moved)
            except RuntimeError:
                return  # the store went with its host: torchrun ends this rank

    def look(self, still: float) -> None:
        """Nothing moves here: read the others' beats, and after --hang-timeout judge."""
        beats, silent, now = self.beats(), {}, time.monotonic()
        if len(beats) < self.run.world_size:
            return
        for rank in beats:
            if self.seen.get(rank, (None,))[0] != beats[rank].number:
                self.seen[rank] = beats[rank].number, now
            if now - self.seen[rank][1] > 4 * self.every:
                silent[rank] = now - self.seen[rank][1]
            elif beats[rank].op == "start":
                return  # it has not begun its loop, or has ended it: what happens there has time limits of its own
        if still > self.limit:
            guilty, text = judge(beats, silent)
            frozen = [(b.host, b.pid) for rank, b in beats.items() if rank in silent]
            verdict = json.dumps([guilty, text, frozen])
            self.end(json.loads(self.store.compare_set("verdict", "", verdict)))

    def left(self) -> tuple[int, str] | None:
        """A rank that is gone, and what to say of it; for a rank whose connection was closed.

        On this host its process is gone; on another one no beat has come while this looked on.
        """
        beats = self.beats()
        for rank, b in beats.items():
            stat = Path(f"/proc/{b.pid}/stat")
            if b.host == socket.gethostname() and (not stat.exists() or stat.read_text().rsplit(") ")[1][0] == "Z"):
                where = f"{b.place} of step {b.step}"
                return rank, f"rank {rank} has left without an error; its last sign of life was in {where}"
        if {b.host for b in beats.values()} != {socket.gethostname()}:
            time.sleep(4 * self.every)
            for rank, b in self.beats().items():
                if rank in beats and b.number == beats[rank].number:
                    where = f"when it was in {b.place} of step {b.step}"
                    return rank, f"rank {rank} on {b.host} gives no more signs of life, {where}: host or network gone?"
        return None

    def beats(self) -> dict[int, Beat]:
        """The last beat of every rank that has had one."""
        ranks = [rank for rank in range(self.run.world_size) if self.store.check([f"beat/{rank}"])]
        return {rank: Beat(**json.loads(self.store.get(f"beat/{rank}"))) for rank in ranks}

    def end(self, verdict: list) -> None:
        """Leave this rank's stacks, kill who is frozen on this host, tell torchrun, and go."""
        guilty, text, frozen = verdict
        folder = Path(self.run.out, "hang")
        with suppress(OSError):  # a full disk does not keep a hang alive
            folder.mkdir(exist_ok=True)
            with open(folder / f"rank-{self.run.rank}.txt", "w") as file:
                faulthandler.dump_traceback(file)
        for host, pid in frozen:
            if host == socket.gethostname():
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        accuse(guilty, f"hang: {text}; all stacks: {folder}/")
        time.sleep(3 * self.every)  # the others see the verdict with their next beat, and before our connections close
        os._exit(1)
