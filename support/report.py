"""When a run fails: the first error first, and what helps when memory ran out."""

import dataclasses
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from checkpoint import finish_saves
from support.flags import UserError, flag_name, put
from support.run import Run

NO_MEMORY = "can't allocate memory|CUDA driver error: out of memory"  # torch on a CPU, symmetric memory
GONE = "Connection (closed by peer|reset)|Timed out waiting"  # gloo


def report(error: BaseException, predict: Callable | None, alike: bool, run: Run | None = None) -> None:
    """Print this rank's error, or, if it only follows from another rank's, one line that points there.

    Then wait for a save under way, unless another rank is gone, without which it cannot be completed.

    predict: the script's. alike: every rank has this error, before there is a store in which to say who was first:
    rank 0 prints it. run: the last one that was started, if any. torchrun shows the line once more, as the traceback of
    its root cause: the earliest that ranks left in their error files.
    """
    rank, several = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)) > 1
    if several:  # torchrun sends it as soon as another rank is gone
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    if isinstance(error, UserError):
        summary, text = str(error), f"error: {error}"
    else:
        summary = traceback.format_exception_only(error)[0].split("\n")[0]
        text = "".join(traceback.format_exception(error)).rstrip()
    if isinstance(error, torch.OutOfMemoryError) or re.search(NO_MEMORY, str(error)):
        summary = out_of_memory(predict, run)
        text += f"\nerror: {summary}"
    follows = isinstance(error, dist.DistBackendError) or re.search(GONE, str(error)) is not None
    first = [0 if alike else rank, summary]
    if dist.is_initialized() and several:
        found: list = []
        asking = threading.Thread(target=lambda: found.append(first_error(first, follows, run)), daemon=True)
        asking.start()
        asking.join(15)  # behind a cut link the store does not even refuse to answer
        if found and found[0]:
            first = found[0]
        elif follows:
            host = os.environ.get("MASTER_ADDR")
            first = [rank, f"{host}, which holds the job's store, does not answer: it or the network to it is gone"]
    if first[0] == rank and first[1] != summary:  # the watchdog has said what this rank did
        summary, text = first[1], f"error: {first[1]}"
    if first[0] == rank:
        put(f"rank {rank}: {text}" if several else text, sys.stderr)
    elif first[1] != summary:
        summary = f"rank {rank} stopped because rank {first[0]} failed: {first[1]}"
        put(summary, sys.stderr)
    leave_error(summary, follows=first[0] != rank)
    if alike and rank:
        time.sleep(1)  # torchrun ends rank 0 when we end, perhaps before it gets here
    if run is not None and not follows:
        finish_saves(run.cfg.hang_timeout)


def first_error(mine: list, follows: bool, run: Run | None) -> list | None:
    """[rank, summary] of the job's first error: `mine` if no other rank had one before; None without the store.

    follows: mine only says that another rank is gone, which may be about to say why, or may be found to have left.
    """
    try:
        store = dist.distributed_c10d._get_default_store()
        deadline = time.monotonic() + (3 if follows else 0)
        while not store.check(["first_error"]) and time.monotonic() < deadline:
            time.sleep(0.05)
        if follows and not store.check(["first_error"]) and run and run.watchdog and (left := run.watchdog.left()):
            mine = left
        return json.loads(store.compare_set("first_error", "", json.dumps(mine)))[:2]
    except (RuntimeError, ValueError):
        return None  # it went with its host


def accuse(guilty: int, summary: str) -> None:
    """The watchdog's verdict: the first error is rank `guilty`'s, whoever found it; printed by one rank only."""
    rank = int(os.environ.get("RANK", 0))
    store = dist.distributed_c10d._get_default_store().clone()
    mine = json.dumps([guilty, summary, rank])
    if store.compare_set("first_error", "", mine).decode() == mine:
        put(f"error: {summary}", sys.stderr)
    leave_error(summary, follows=rank != guilty)


def leave_error(summary: str, follows: bool) -> None:
    """For torchrun, which shows the earliest error as the root cause and compares whole seconds.

    A killed rank gets the second in which torchrun notices, which may be the next: what follows is dated two later.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": summary, "timestamp": str(int(time.time()) + 2 * follows)}
        Path(path).write_text(json.dumps({"message": {"message": summary, "extraInfo": extra}}))


def out_of_memory(predict: Callable | None, run: Run | None) -> str:
    """The last line of a rank that ran out of memory: predicted beside there, and the smallest change that helps."""
    if run is None or predict is None:
        return "out of memory"
    predicted, there = sum(predict(run)[0].values()), memory_there(run.device)
    change = smallest_change(predict, run)
    if change:
        advice = "smallest change that helps: " + " ".join(f"{flag_name(key)} {value}" for key, value in change.items())
    else:
        least = "--micro-batch 1 with --recompute full and train_zero.py --stage 3"
        advice = f"no single flag is enough: more GPUs, or {least}"
    sizes = f"{predicted / 1e9:.2f} GB predicted, the device has {there / 1e9:.2f} GB"
    return f"rank {run.rank} is out of memory: {sizes}; {advice}"


def memory_there(device: torch.device) -> int:
    """Bytes of the card, or of this host."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def smallest_change(predict: Callable, run: Run, there: float | None = None) -> dict[str, object] | None:
    """The flag, with its value, that costs least speed of those with which `run` fits by prediction; None if none does.

    there: bytes that a rank may use [those of run.device]. A tenth of them is left alone, and the change must also save
    a tenth of what was predicted: that did not fit.
    """
    cfg = run.cfg
    limit = 0.9 * min(memory_there(run.device) if there is None else there, sum(predict(run)[0].values()))
    changes: list[dict] = [{"micro_batch": m} for m in range(cfg.micro_batch - 1, 0, -1) if cfg.micro_batch % m == 0]
    changes.append({"recompute": "full"})
    if hasattr(cfg, "stage"):
        changes += [{"stage": stage} for stage in range(cfg.stage + 1, 4)] + [{"offload": "optimizer"}]
    for change in changes:  # in the order of what they cost in speed
        accum = cfg.global_batch // (change.get("micro_batch", cfg.micro_batch) * run.dp)
        other = dataclasses.replace(run, cfg=dataclasses.replace(cfg, **change), accum=accum)
        if sum(predict(other)[0].values()) < limit:
            return change
    return None
