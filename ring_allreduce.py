"""All-reduce built from sends and receives: the ring, and the central way it replaced.

Every rank holds n numbers and wants the sum over ranks. Central: all send everything to rank 0, which adds and sends
the result back, so one link carries 2(N-1) n numbers. Ring: cut the numbers into N chunks and let each chunk's partial
sum walk over the ranks, all chunks at once; then let the finished chunks walk on until everyone has seen them. Every
link is busy all the time and carries 2(N-1)/N n numbers, however many ranks there are.

    3 ranks, chunks 0 1 2, one way round; * marks a finished sum
                    rank 0           rank 1           rank 2
    reduce-scatter  0 -> rank 1      1 -> rank 2      2 -> rank 0     step s: send chunk (r - s) % N,
                    2+2 -> rank 1    0+0 -> rank 2    1+1 -> rank 0           receive (r - s - 1) % N and add
                    owns 1*          owns 2*          owns 0*
    all-gather      1* -> rank 1     2* -> rank 2     0* -> rank 0    step s: send chunk (r + 1 - s) % N,
                    0* -> rank 1     1* -> rank 2     2* -> rank 0            receive (r - s) % N

Links carry data both ways at once. So a chunk's sum can also approach its owner from both sides, and leave it on both
sides: as many bytes in half as many steps. That pays where steps cost more than bytes, so small messages go that way
(with 2 ranks the two plans are one).

Bytes sent per rank: 2(N-1)/N x size (exactly, when N divides the number of elements). Time: t = alpha 2(N-1) +
2(N-1)/N size / beta, with alpha the seconds one message costs and beta the bytes/s of one link; central:
2(N-1) (alpha + size / beta). A chunk is summed on one rank and copied to the others: all ranks hold the same bits.

Run as a script it times both ways beside the backend's own all-reduce, checks every result, and fits alpha and beta:

    torchrun --nproc_per_node=2 ring_allreduce.py                       # NCCL when there is a GPU per rank, else gloo
    torchrun --nproc_per_node=4 ring_allreduce.py --sizes 1,16,256 --dtype bfloat16 --out link.json

Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009; Thakur, Rabenseifner &
Gropp, "Optimization of collective communication operations in MPICH", 2005 (the alpha-beta model).
"""

import json
import math
import os
import platform
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from support.flags import UserError, parse_flags, print_help, run_cli
from support.meter import at, say
from support.rendezvous import open_group, pick_device
from support.run import destroy_groups

REDUCE = {"sum": torch.add, "avg": torch.add, "max": torch.maximum, "min": torch.minimum}
# What gloo and NCCL both reduce themselves: the ring stands in for them, so it refuses what they refuse (int16, ...).
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex128, torch.complex64)
DTYPES = FLOATS + (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)

# A chunk travels in pieces, so that adding one overlaps with the transfer of the next AHEAD. CPU: so big that threads
# wake rarely, so small that a piece is still in cache when it is added. GPU: NCCL needs tens of MB in flight.
PIECE_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
AHEAD = 2
BOTH_WAYS_BYTES = 16 << 20  # above it one way was as fast or faster (3 and 4 gloo ranks): bytes count there, not steps
SCRATCH = {}  # (device, dtype) -> receive buffer, kept between calls: a fresh one's pages would be faulted in each time

Plan = list[list[tuple[int, int, int, int]]]


def ring_plan(rank: int, N: int, both_ways: bool = False, gather: bool = False) -> Plan:
    """Per step, the hops of this rank: (to rank, chunk sent, from rank, chunk received, and added unless gather).

    Reduce-scatter: chunk c ends whole on rank c - 1; its sum starts `right` ranks to the left of that owner and `left`
    to its right, so right + left = N - 1 ranks join it on the way. One way, right = N - 1: at step s rank r sends chunk
    r - s. All-gather: the same walk, begun with the chunk that each rank owns.
    """
    right, left = (N // 2, (N - 1) // 2) if both_ways else (N - 1, 0)
    # the chunks sent first, to the right and to the left
    a, b = (rank + 1, rank + 1) if gather else (rank + 1 + right, rank + 1 - left)
    to_right = [((rank + 1) % N, (a - s) % N, (rank - 1) % N, (a - 1 - s) % N) for s in range(right)]
    to_left = [((rank - 1) % N, (b + s) % N, (rank + 1) % N, (b + 1 + s) % N) for s in range(left)]
    return [[to_right[s], *to_left[s : s + 1]] for s in range(right)]


def _pieces(longest: int, itemsize: int, kind: str) -> tuple[int, int, int]:
    """For chunks of at most `longest` elements: elements of a piece, pieces of a chunk, how many come in ahead."""
    piece = min(longest, PIECE_BYTES[kind] // itemsize)
    n_pieces = math.ceil(longest / piece)
    # piece p of a step sends what piece p received one step before: less than a step
    return piece, n_pieces, min(AHEAD, n_pieces - 1)


def extra_bytes(way: str, numel: int, itemsize: int, N: int, kind: str, fp32_partials: bool = False) -> int:
    """Memory that way "ring" or "central" needs beside a tensor of numel elements on N ranks, kind "cpu" or "cuda"."""
    if way == "central":
        return numel * itemsize * (N > 1)  # on the group's rank 0
    lanes = 2 if N > 2 and numel * itemsize <= BOTH_WAYS_BYTES else 1
    wide = 4 if fp32_partials else itemsize
    piece, _, ahead = _pieces(max(1, -(-numel // N)), wide, kind)
    return (ahead + 1) * lanes * piece * wide * (N > 1) + numel * wide * fp32_partials


def _walk(flat: Tensor, plan: Plan, group: dist.ProcessGroup, reduce: Callable | None) -> int:
    """Carry out a plan on the N chunks of flat. Returns the bytes sent.

    What arrives is reduced into its chunk, or stored there (reduce None). Every piece is one batch, in one order on all
    ranks, empty ones too: NCCL wants each rank of a group in its first batch.
    """
    if not plan:
        return 0
    chunks = flat.tensor_split(group.size())  # the first numel % N chunks hold one element more
    longest = max(1, chunks[0].numel())
    # a gather has nothing to overlap: whole chunks
    piece, n_pieces, ahead = _pieces(longest, flat.element_size(), flat.device.type) if reduce else (longest, 1, 0)
    if reduce:
        scratch = _scratch(flat, ahead + 1, len(plan[0]), piece)
    schedule = [(hops, p) for hops in plan for p in range(n_pieces)]
    in_flight = deque()
    sent = 0
    for i in range(len(schedule) + ahead):
        if i < len(schedule):
            hops, p = schedule[i]
            ops, arrivals, nbytes = [], [], 0
            for lane, (to, send_chunk, source, recv_chunk) in enumerate(hops):
                outgoing, target = (chunks[c][p * piece : (p + 1) * piece] for c in (send_chunk, recv_chunk))
                # all-gather: straight into place
                incoming = scratch[i % (ahead + 1), lane, : target.numel()] if reduce else target
                # The receive first: gloo starts a transfer only once the other side has said where it may land.
                ops.append(dist.P2POp(dist.irecv, incoming, dist.get_global_rank(group, source), group))
                ops.append(dist.P2POp(dist.isend, outgoing, dist.get_global_rank(group, to), group))
                arrivals.append((target, incoming))
                nbytes += outgoing.nbytes
            with at("send", "chunk " + ", ".join(str(hop[1]) for hop in hops), nbytes):
                in_flight.append((hops, arrivals, dist.batch_isend_irecv(ops)))
            sent += nbytes
        if i >= ahead:
            hops, arrivals, works = in_flight.popleft()
            with at("wait", "chunk " + ", ".join(str(hop[3]) for hop in hops)):
                for work in works:
                    work.wait()
            for target, incoming in arrivals if reduce else ():
                reduce(target, incoming, out=target)
    return sent


def _scratch(like: Tensor, *shape: int) -> Tensor:
    key, numel = (like.device, like.dtype), math.prod(shape)
    if key not in SCRATCH or SCRATCH[key].numel() < numel:
        SCRATCH[key] = like.new_empty(numel)
    return SCRATCH[key][:numel].view(shape)


def ring_reduce_scatter(
    flat: Tensor, op: str = "sum", group: dist.ProcessGroup | None = None, both_ways: bool = False
) -> tuple[Tensor, int]:
    """flat (n,), contiguous: afterwards chunk (r + 1) % N of flat.tensor_split(N) is whole on rank r.

    Its other chunks hold partial sums. Returns (the whole chunk, a view of flat; bytes this rank sent: (N-1)/N x size).
    Sums in ring order, in flat's dtype.
    """
    group = group or dist.group.WORLD
    rank, N = group.rank(), group.size()
    sent = _walk(flat, ring_plan(rank, N, both_ways), group, REDUCE[op])
    whole = flat.tensor_split(N)[(rank + 1) % N]
    if op == "avg":
        whole.div_(N)  # once, by the owner, so that the copies are equal in every bit
    return whole, sent


def ring_all_gather(flat: Tensor, group: dist.ProcessGroup | None = None, both_ways: bool = False) -> int:
    """flat (n,), contiguous, chunk (r + 1) % N right on rank r: then everywhere. Returns bytes sent, (N-1)/N x size."""
    group = group or dist.group.WORLD
    return _walk(flat, ring_plan(group.rank(), group.size(), both_ways, gather=True), group, None)


def _flatten(x: Tensor, op: str) -> tuple[Tensor, Tensor]:
    """x with real elements, and that as one contiguous line: the same memory where x is contiguous.

    Refuses here, on every rank before any byte moves: an error halfway leaves the peers waiting and the group unusable.
    """
    if op not in REDUCE:
        raise ValueError(f"all-reduce op {op!r}: allowed are {', '.join(REDUCE)}")
    if x.dtype not in DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise TypeError(f"all-reduce of {x.dtype}: allowed are {names}")
    if op == "avg" and x.dtype not in FLOATS:
        why = "an average needs a floating-point dtype"
        raise TypeError(f"all-reduce avg of {x.dtype}: {why}; allowed are sum, max, min")
    if op in ("max", "min") and x.is_complex():
        raise TypeError(f"all-reduce {op} of {x.dtype}: complex numbers have no order; allowed are sum, avg")
    real = torch.view_as_real(x) if x.is_complex() else x
    return real, real.contiguous().view(-1)


@torch.no_grad()
def ring_all_reduce(
    x: Tensor,
    op: str = "sum",
    group: dist.ProcessGroup | None = None,
    fp32_partials: bool = False,
    both_ways: bool | None = None,
) -> int:
    """All-reduce x in place over the ranks of group: op sum, avg, max or min; any shape and strides, one numel.

    fp32_partials: partial sums of bf16 and fp16 are added, and travel, in fp32; the owner rounds once: within 1 ulp of
    the exact sum. Costs 4 bytes of memory per element, and 6 (N-1)/N bytes on the wire, not 4. Without it every hop
    rounds: an error that grows with N. both_ways: see above; None: up to BOTH_WAYS_BYTES. Returns the bytes this rank
    sent. Raises TypeError, before any communication, for dtypes and ops that gloo and NCCL do not reduce either. One
    caller at a time per device: calls share the receive buffer.
    """
    real, flat = _flatten(x, op)
    both_ways = flat.nbytes <= BOTH_WAYS_BYTES if both_ways is None else both_ways
    wide = flat.float() if fp32_partials and x.dtype in (torch.bfloat16, torch.float16) else flat
    whole, sent = ring_reduce_scatter(wide, op, group, both_ways)
    if wide is not flat:
        flat[whole.storage_offset() :][: whole.numel()] = whole  # the one rounding
    sent += ring_all_gather(flat, group, both_ways)
    if not real.is_contiguous():
        real.copy_(flat.view(real.shape))
    return sent


@torch.no_grad()
def central_all_reduce(x: Tensor, op: str = "sum", group: dist.ProcessGroup | None = None) -> int:
    """The same by way of the group's rank 0: it receives N-1 tensors, adds them up, and sends the result N-1 times.

    Its one link carries 2(N-1) x size while the others idle, and it needs one more tensor. Returns the bytes sent.
    """
    real, flat = _flatten(x, op)
    group = group or dist.group.WORLD
    root, *others = dist.get_process_group_ranks(group)
    if group.rank() == 0:
        incoming = torch.empty_like(flat)
        for rank in others:
            dist.recv(incoming, rank, group)
            REDUCE[op](flat, incoming, out=flat)
        if op == "avg":
            flat.div_(group.size())
        for rank in others:
            with at("send", f"result to rank {rank}", flat.nbytes):
                dist.send(flat, rank, group)
    else:
        with at("send", f"all to rank {root}", flat.nbytes):
            dist.send(flat, root, group)
        dist.recv(flat, root, group)
    if not real.is_contiguous():
        real.copy_(flat.view(real.shape))
    return flat.nbytes * (len(others) if group.rank() == 0 else 1)


def benchmark(numel: int, dtype: torch.dtype, device: torch.device, reps: int) -> dict[str, float]:
    """Median seconds of the slowest rank for each way to all-reduce numel random numbers; checks each result."""
    ways = {
        "central": central_all_reduce,
        "ring": lambda x: ring_all_reduce(x, both_ways=False),
        "backend": dist.all_reduce,
    }
    if dist.get_world_size() > 2:
        ways["both ways"] = lambda x: ring_all_reduce(x, both_ways=True)
    source = torch.randn(numel, device=device).to(dtype)
    x, expected = source.clone(), source.clone()
    dist.all_reduce(expected)
    allowed = 8 * dist.get_world_size() * torch.finfo(dtype).eps * expected.abs().max()
    seconds = torch.zeros(reps, len(ways), dtype=torch.float64, device=device)
    # round -1, overwritten by the last, warms up connections, scratch and page tables
    for rep in range(-1, reps):
        # in turn: drift and load hit all alike
        for k, (name, way) in sorted(enumerate(ways.items()), reverse=rep % 2 == 0):
            x.copy_(source)
            dist.barrier()
            if device.type == "cuda":
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                way(x)
                end.record()
                end.synchronize()
                seconds[rep, k] = start.elapsed_time(end) / 1e3
            else:
                start = time.perf_counter()
                way(x)
                seconds[rep, k] = time.perf_counter() - start
            off = (x - expected).abs().max()
            if not off <= allowed:
                me = f"{name}: rank {dist.get_rank()}"
                raise RuntimeError(f"{me} is {off} off the backend's all-reduce, allowed {allowed}")
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return dict(zip(ways, seconds.median(dim=0).values.tolist(), strict=True))


def fit_link(size: list[float], seconds: list[float], N: int) -> tuple[float, float, float]:
    """Least squares of t = alpha 2(N-1) + 2(N-1)/N size / beta, every size weighing alike.

    size (bytes) and seconds per message -> (alpha s, beta bytes/s, largest relative residual). Raises UserError when
    larger was not slower.
    """
    A = 2 * (N - 1) * np.stack([np.ones(len(size)), np.array(size) / N], axis=1) / np.array(seconds)[:, None]
    alpha, per_byte = np.linalg.lstsq(A, np.ones(len(size)), rcond=None)[0]
    if per_byte <= 0:
        raise UserError(f"{max(size):.0f} bytes took no longer than {min(size):.0f}: give --sizes further apart")
    alpha = max(alpha, 0.0)
    return float(alpha), float(1 / per_byte), float(np.abs(A @ [alpha, per_byte] - 1).max())


@dataclass
class Config:
    sizes: str = "0.01,0.1,1,4,16,64"  # message sizes in MB of 10^6 bytes, two or more
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"  # of the numbers summed
    device: Literal["auto", "cpu", "cuda"] = "auto"  # gloo on cpu, NCCL on cuda
    out: str = "link.json"  # file for alpha, beta and the table


def main() -> None:
    if "--help" in sys.argv:
        return print_help(Config, __doc__)
    cfg = parse_flags(Config, sys.argv[1:])
    try:
        sizes = sorted({float(size) for size in cfg.sizes.split(",")})
    except ValueError:
        sizes = []
    if len(sizes) < 2 or not 0 < sizes[0] < sizes[-1] < math.inf:
        raise UserError(f"--sizes {cfg.sizes}: allowed are two or more different numbers of MB, as in 1,4,16,64")
    if not Path(cfg.out).absolute().parent.is_dir():
        raise UserError(f"--out {cfg.out}: there is no folder {Path(cfg.out).absolute().parent}")
    if int(os.environ.get("WORLD_SIZE", 1)) < 2:
        raise UserError("one process has nobody to talk to; launch: torchrun --nproc_per_node=2 ring_allreduce.py")
    device = pick_device(cfg)
    open_group(device, timeout_s=120)
    N, dtype = dist.get_world_size(), getattr(torch, cfg.dtype)
    backend = "nccl" if device.type == "cuda" else "gloo"
    cpu = f"{platform.machine()} CPU, {os.cpu_count()} cores"
    name = torch.cuda.get_device_name() if device.type == "cuda" else cpu
    unit = "median ms of the slowest rank (bus bandwidth in GB/s)"
    say(f"{N} ranks, {backend}, {name}, torch {torch.__version__}, {cfg.dtype}; {unit}")
    rows = []
    for size in sizes:
        numel = max(1, round(size * 1e6 / dtype.itemsize))
        seconds = benchmark(numel, dtype, device, reps=11 if size < 256 else 5)
        rows.append({"bytes": numel * dtype.itemsize} | {f"{way.replace(' ', '_')}_s": t for way, t in seconds.items()})
        bus = 2 * (N - 1) / N * rows[-1]["bytes"] / 1e9
        say(f"{size:8g} MB   " + "   ".join(f"{way} {t * 1e3:8.3f} ({bus / t:6.2f})" for way, t in seconds.items()))

    alpha, beta, residual = fit_link([row["bytes"] for row in rows], [row["ring_s"] for row in rows], N)
    say("ring: t = alpha 2(N-1) + 2(N-1)/N size / beta; central: t = 2(N-1) (alpha + size / beta)")
    say(f"alpha {alpha * 1e6:.1f} us, beta {beta / 1e9:.2f} GB/s; the ring's times are within {residual:.0%} of that")
    for ranks in (8, 64):
        parts = (rows[-1]["bytes"] / ranks, rows[-1]["bytes"])
        ring, central = (2e3 * (ranks - 1) * (alpha + part / beta) for part in parts)
        say(f"{sizes[-1]:g} MB on {ranks} ranks over such links: ring {ring:.1f} ms, central {central:.1f} ms")
    if dist.get_rank() == 0:
        link = {"backend": backend, "device": name, "world": N, "dtype": cfg.dtype}
        link |= {"alpha_s": alpha, "beta_bytes_s": beta, "residual": residual, "torch": torch.__version__}
        link |= {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "rows": rows}
        Path(cfg.out).write_text(json.dumps(link, indent=1) + "\n")
        say(f"written to {cfg.out}")
    destroy_groups()


if __name__ == "__main__":
    run_cli(main)
