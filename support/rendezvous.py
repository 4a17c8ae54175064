"""From nothing to a process group in which all ranks have met; what they note down for their next start."""

import datetime
import json
import os
import re
import socket
import sys
import time
import uuid
from pathlib import Path

import torch
import torch.distributed as dist

from support.flags import UserError
from support.run import GRACE, Run

LAUNCHERS = {  # the variable with the number of processes, and the one with this process's number
    "SLURM_NTASKS": "SLURM_PROCID",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
    "MV2_COMM_WORLD_SIZE": "MV2_COMM_WORLD_RANK",
}

_job: dist.Store | None = None  # torchrun's own, which outlives the ranks


def pick_device(cfg) -> torch.device:
    """By cfg.device. Raises UserError when CUDA is asked for, or a card is there, and torch cannot use it."""
    if cfg.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        card = Path("/proc/driver/nvidia/version")
        if cfg.device == "auto" and not card.exists():
            return torch.device("cpu")
        driver = card.read_text().splitlines()[0] if card.exists() else "no NVIDIA driver found"
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
        found = f"{driver}; torch {torch.__version__} built for {built}"
        raise UserError(f"CUDA does not work here: {found}. Install a wheel for this driver, or use --device cpu")
    local_rank, found = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if local_rank >= found:
        advice = "lower --nproc_per_node, or use --device cpu"
        raise UserError(f"local rank {local_rank} has no GPU: {found} found; {advice}")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def job_size(group: dist.ProcessGroup | None) -> int:
    """Ranks of `group` (the whole job when None), also before the job has met."""
    return dist.get_world_size(group) if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def open_group(device: torch.device, timeout_s: int) -> None:
    """Join the job's process group: torchrun's, one described by RANK and WORLD_SIZE by hand, or a group of one.

    Raises UserError saying which ranks did not come, or that two came under one number.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    bound = {"device_id": device} if device.type == "cuda" else {}
    if "WORLD_SIZE" not in os.environ and "RANK" not in os.environ:
        refuse_launchers()
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # alone: it does not matter what the network is called
        try:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **bound)
        except RuntimeError as error:
            if "Unable to find address" not in str(error):
                raise
            raise UserError("even one process needs the loopback interface: `ip link set lo up`") from None
        return
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    there = [name for _, name in socket.if_nameindex()]
    if wrong := [name for name in interface.split(",") if name and name not in there]:
        raise UserError(f"GLOO_SOCKET_IFNAME={interface}: there is no {wrong[0]} here, but {', '.join(there)}")
    try:
        rank, size, port = (int(os.environ[key]) for key in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        host = os.environ["MASTER_ADDR"]
    except (KeyError, ValueError) as error:
        names = "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        raise UserError(f"{names} must all be set, as torchrun does ({error})") from None
    if not 0 < port < 1 << 16:
        raise UserError(f"MASTER_PORT={port}: allowed is 1 to 65535")
    if not 0 <= rank < size:
        raise UserError(f"RANK={rank} is outside WORLD_SIZE={size}")
    launcher = Path(f"/proc/{os.getppid()}/cmdline")
    words = launcher.read_bytes().replace(b"\0", b" ").decode(errors="replace") if launcher.exists() else ""
    if (hosts := re.search(r"--nnodes[ =](\d+):(\d+)", words)) and hosts[1] != hosts[2]:
        raise UserError(f"--nnodes={hosts[1]}:{hosts[2]}: a fixed number of hosts is wanted, as in --nnodes={hosts[2]}")
    global _job
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    tcp = _connect(host, port, size, rank == 0 and not agent, timeout_s)
    store = dist.PrefixStore("nanoshard", tcp)
    _job = store if agent else None
    store = _meet(store, rank, size, timeout_s, used=agent)
    timeout = datetime.timedelta(seconds=timeout_s + GRACE)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout, **bound)


def refuse_launchers() -> None:
    """Raises UserError if another launcher has started several of us, each of which would train alone."""
    for size, rank in LAUNCHERS.items():
        if rank in os.environ and int(os.environ.get(size, 1)) > 1:
            found = f"{size}={os.environ[size]}, but without torchrun each process would train a model of its own"
            raise UserError(f"{found}: start one torchrun on each host, as examples/slurm.sh does")


def _connect(host: str, port: int, size: int, is_master: bool, timeout_s: int) -> dist.Store:
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        return dist.TCPStore(host, port, size, is_master=is_master, timeout=timeout, wait_for_workers=False)
    except RuntimeError as error:
        if "EADDRINUSE" in str(error) or "in use" in str(error):
            advice = "Give torchrun --master_port another one, or --standalone"
            raise UserError(f"port {port} is in use: another run? {advice}") from None
        address, reason = f"{host}:{port} (MASTER_ADDR:MASTER_PORT)", str(error).splitlines()[0]
        raise UserError(f"no answer from {address} within {timeout_s} s: {reason}") from None


def _meet(store: dist.Store, rank: int, size: int, timeout_s: int, used: bool) -> dist.Store:
    """Wait until all ranks are here -> a part of the store that is theirs alone.

    used: the store may hold what ranks before them left. torchrun starts ranks again at the same store, and counts the
    restarts of each host for itself (pytorch#147064). So each process registers under a random name; rank 0's is the
    attempt's name too, which it writes beside each name it finds.
    """
    deadline = time.monotonic() + timeout_s + 2 * (rank == 0)  # the others may be later, and rank 0 holds the store
    twice = f"two processes came as RANK={rank}; each rank needs its own number"
    me = attempt = uuid.uuid4().hex if used else "all"
    if used and rank:
        store.set(f"here/{rank}", me)
        while not store.check([f"attempt of/{me}"]):
            if store.get(f"here/{rank}").decode() != me:
                raise UserError(twice)
            if time.monotonic() > deadline:
                silent = f"rank 0 did not answer within {timeout_s} s"
                raise UserError(f"{silent}: it did not come, or another process came as RANK={rank}")
            time.sleep(0.05)
        attempt = store.get(f"attempt of/{me}").decode()
    ours = dist.PrefixStore(attempt, store)
    if ours.add(f"arrived/{rank}", 1) > 1:
        raise UserError(twice)
    everyone = [f"arrived/{r}" for r in range(size)]
    while not ours.check(everyone):
        late = time.monotonic() > deadline
        if rank == 0 or late:
            missing = [r for r in range(size) if not ours.check([everyone[r]])]
            for r in missing if used and rank == 0 else []:
                if store.check([f"here/{r}"]):
                    store.set(f"attempt of/{store.get(f'here/{r}').decode()}", attempt)
            if late and missing:
                here = f"{size - len(missing)} of {size} ranks arrived"
                raise UserError(f"{here} within {timeout_s} s, missing: {missing}")
        time.sleep(0.05)
    return ours


def restarted() -> bool:
    """Whether torchrun has started this job again at a store that forgot what its ranks had noted."""
    return not _job and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0


def remember(run: Run, what: str, value: str) -> None:
    """On the run's rank 0: note something down, which recall() finds when torchrun has started the ranks anew."""
    if _job:
        _job.set(_note(run, what), json.dumps(value))


def recall(run: Run, what: str) -> str | None:
    """On the run's rank 0: what this run, of all that a job may hold, had noted; None if nothing."""
    return json.loads(_job.get(_note(run, what))) if _job and _job.check([_note(run, what)]) else None


def _note(run: Run, what: str) -> str:
    # json: a store takes only UTF-8, which a file name need not be
    return f"{what}/{dist.get_rank()}/{run.number}/{json.dumps(sys.argv)}"
