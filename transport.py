"""Moving data between ranks: collectives and messages, or the GPUs' copy engines where these reach each other's memory.

NCCL moves data with kernels. Hidden behind compute they still slow it: while one is resident, the matrix products
beside it run with fewer multiprocessors, and the last wave of a product waits for all of them. GPUs of one host that
can map each other's memory (NVLink) have another way: the copy engines, which memcpy between devices uses, and which
compute hardly notices. What remains to be agreed is when a buffer may be read and when it may be written again: by
barriers where all ranks exchange (ZeRO), by signals where two do (pipeline).

Everything here counts the bytes it is handed (support/meter.py). The strategies do not know which way they go:

    Collectives | CopyEngines   all_gather, exchange    what ZeRO needs
    Link | PeerLink (links.py)  isend, recv             what a pipeline needs, one direction between two stages
    Swaps | PeerSwaps           swap                    what a ring needs, with each of its ranks in turn

An exchange is an all_to_all: rank r gets everyone's piece r and adds the pieces itself, in fp32 and in the order of the
ranks, which makes a reduce_scatter of bf16 gradients that loses nothing, and gives the same bits every time.

Copy engines are built on torch's symmetric memory: https://docs.pytorch.org/docs/main/distributed/symmetric_memory.html
"""

import socket
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from support.flags import UserError
from support.meter import at
from support.run import GRACE, Run

# torch 2.13 renamed the two; 2.11 has the old names only
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce(x: Tensor, group: dist.ProcessGroup | None, what: str, async_op: bool = False) -> dist.Work | None:
    """x becomes the sum over the group's ranks."""
    with at("all_reduce", what, x.nbytes):
        return dist.all_reduce(x, group=group, async_op=async_op)


class Collectives:
    """Any number of hosts, any group."""

    def __init__(self, run: Run):
        self.run = run

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory that others may read: a shard that is gathered, a full buffer that is exchanged. 1-D."""
        return torch.zeros(numel, dtype=dtype, device=self.run.device)

    def all_gather(self, full: Tensor, shard: Tensor, group: dist.ProcessGroup, what: str):
        """Start: full becomes the shards of all ranks. -> to be waited for, like a dist.Work."""
        with at("all_gather", what, full.nbytes):
            return all_gather_single(full, shard, group=group, async_op=True)

    def exchange(self, received: Tensor, full: Tensor, group: dist.ProcessGroup, what: str):
        """Start: piece r of received becomes rank r's piece of full that is for this rank. -> to be waited for."""
        with at("exchange", what, full.nbytes):
            return dist.all_to_all_single(received, full, group=group, async_op=True)

    def settle(self) -> None:
        """All shards are written and may be read, on every rank. A collective sees to that itself."""


class Transfer:
    """A copy under way, to be waited for like a dist.Work: the current stream waits, not the host."""

    def __init__(self, stream: torch.cuda.Stream):
        self.done = stream.record_event()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.done)


class CopyEngines(Collectives):
    """The same by copy engines, for all ranks of a run on one host, between tensors made by empty().

    Anything else goes by the collectives above.
    """

    def __init__(self, run: Run):
        super().__init__(run)
        self.memories: dict[int, PeerMemory] = {}

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        memory = PeerMemory(numel, dtype, self.run)
        self.memories[memory.mine.untyped_storage().data_ptr()] = memory
        return memory.mine

    def all_gather(self, full: Tensor, shard: Tensor, group: dist.ProcessGroup, what: str):
        memory = self.memories.get(shard.untyped_storage().data_ptr())
        if memory is None or dist.get_world_size(group) < self.run.world_size:
            return super().all_gather(full, shard, group, what)
        with at("all_gather", what, full.nbytes):  # shards change between settle() calls only: read at any time
            shards = memory.pieces(shard.storage_offset(), shard.numel())
            return memory.fetch(list(zip(full.chunk(len(shards)), shards)), settled=True)

    def exchange(self, received: Tensor, full: Tensor, group: dist.ProcessGroup, what: str):
        memory, size = self.memories.get(full.untyped_storage().data_ptr()), full.numel() // self.run.world_size
        if memory is None or dist.get_world_size(group) < self.run.world_size:
            return super().exchange(received, full, group, what)
        with at("exchange", what, full.nbytes):
            pieces = memory.pieces(full.storage_offset() + self.run.rank * size, size)
            return memory.fetch(list(zip(received.chunk(len(pieces)), pieces)), settled=False)

    def settle(self) -> None:
        """A barrier on the current stream."""
        next(iter(self.memories.values())).barrier()


class Swaps:
    """Between ranks that sit in a ring; each calls alike, with a tensor of the same shape."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.n, self.rank = group, dist.get_world_size(group), dist.get_rank(group)

    def __call__(self, mine: Tensor, there: int, what: str) -> Callable[[], Tensor]:
        """Start sending `mine` to the rank `there` places on -> a function: waits for what comes from as far before.

        Until then `mine` is kept as it is.
        """
        received = torch.empty_like(mine)
        with at("send", what, mine.nbytes):  # both at once: neither waits for the other to receive first
            ends = (dist.isend, mine, self.rank + there), (dist.irecv, received, self.rank - there)
            ops = [dist.P2POp(op, t, group=self.group, group_peer=peer % self.n) for op, t, peer in ends]
            works = dist.batch_isend_irecv(ops)

        def arrived() -> Tensor:
            with at("wait", what):
                for work in works:
                    work.wait()
            return received

        return arrived


class PeerSwaps(Swaps):
    """The same by copy engines: the sender lays out what the receiver then fetches, in two places used in turn.

    numel: of a tensor. All ranks of the run make this at once, and call alike in all its rings.
    """

    def __init__(self, group: dist.ProcessGroup, run: Run, numel: int, dtype: torch.dtype):
        super().__init__(group)
        self.memory, self.fetched, self.place = PeerMemory(2 * numel, dtype, run), [None, None], 0
        world = dist.get_process_group_ranks(run.world or dist.group.WORLD)
        self.sources = [self.memory.of[world.index(rank)].split(numel) for rank in dist.get_process_group_ranks(group)]

    def __call__(self, mine: Tensor, there: int, what: str) -> Callable[[], Tensor]:
        received, self.place = torch.empty_like(mine), 1 - self.place
        with at("send", what, mine.nbytes):
            if before := self.fetched[self.place]:
                before.wait()  # behind its barrier all have read what lies here
            self.sources[self.rank][self.place].copy_(mine.view(-1))
            source = self.sources[(self.rank - there) % self.n][self.place]
            fetched = self.fetched[self.place] = self.memory.fetch([(received.view(-1), source)], settled=False)

        def arrived() -> Tensor:
            with at("wait", what):
                fetched.wait()
            return received

        return arrived


def open_transport(run: Run) -> Collectives | CopyEngines:
    """What run.copy_engine says."""
    return CopyEngines(run) if run.copy_engine else Collectives(run)


def choose_copy_engine(run: Run, possible: bool) -> None:
    """Set run.copy_engine, before anything is built; collective over run.control.

    possible: whether the layout has a use for it. Raises UserError when --copy-engine asks for what cannot be had.
    """
    run.copy_engine = possible and run.cfg.copy_engine is not False and reachable(run)
    if run.cfg.copy_engine and not run.copy_engine:
        raise UserError(
            "--copy-engine is for ZeRO stages 2 and 3, pipelines and rings, on two or more GPUs of one host that can "
            "read each other's memory"
        )


def reachable(run: Run) -> bool:
    """Whether every rank's GPU can read every other's; collective over run.control."""
    if run.device.type != "cuda" or run.world_size == 1:
        return False
    places = run.everyone((socket.gethostname(), run.device.index))
    if len({host for host, _ in places}) > 1:
        return False
    others = [index for rank, (_, index) in enumerate(places) if rank != run.rank]
    return all(run.everyone(all(torch.cuda.can_device_access_peer(run.device.index, index) for index in others)))


class PeerMemory:
    """A buffer on every rank that all can read: `mine`, and `of[rank]`, 1-D of `numel` elements; made by all at once.

    The memory lies outside torch's allocator; run.outside counts its bytes.
    """

    def __init__(self, numel: int, dtype: torch.dtype, run: Run):
        import torch.distributed._symmetric_memory as symmetric  # alpha in torch 2.11 to 2.13, and only needed on GPUs

        self.mine = symmetric.empty(numel, dtype=dtype, device=run.device)
        torch.cuda.synchronize(run.device)  # on every rank before all meet: no signal of an earlier run is on its way
        try:
            self.handle = symmetric.rendezvous(self.mine, run.world or dist.group.WORLD)
        except RuntimeError as error:  # a container may forbid what the cards could do
            raise UserError(f"the GPUs cannot map each other's memory ({error}); use --no-copy-engine") from None
        self.handle.get_signal_pad(run.rank).zero_()  # but some may have come that nobody took
        torch.cuda.synchronize(run.device)
        run.everyone(None)
        self.rank = run.rank
        self.of: list[Tensor] = [self.handle.get_buffer(rank, (numel,), dtype) for rank in range(run.world_size)]
        self.stream = torch.cuda.Stream(run.device)
        self.timeout_ms = 1000 * (run.cfg.hang_timeout + GRACE)
        run.outside += self.mine.nbytes

    def pieces(self, start: int, size: int) -> list[Tensor]:
        """Elements [start, start + size) of everyone's memory."""
        return [memory[start : start + size] for memory in self.of]

    def barrier(self) -> None:
        """On the current stream: go on when every rank has come here. One thread block waits."""
        self.handle.barrier(channel=0, timeout_ms=self.timeout_ms)  # by default it would wait for ever

    def signal(self, rank: int, channel: int) -> None:
        """On the current stream: tell `rank`, once it has taken this channel's last signal."""
        self.handle.put_signal(rank, channel=channel, timeout_ms=self.timeout_ms)

    def wait(self, rank: int, channel: int) -> None:
        """On the current stream: take the signal of `rank`, when it has come. One thread block waits."""
        self.handle.wait_signal(rank, channel=channel, timeout_ms=self.timeout_ms)

    def fetch(self, copies: list[tuple[Tensor, Tensor]], settled: bool) -> Transfer:
        """Start copying what lies on each rank, (to, from) by rank, behind everything queued on the current stream.

        settled: the peers' memory holds what is wanted and nobody is about to write it. Otherwise there is a barrier
        before (every rank has written) and one after (every rank has read, its buffer may be written again).
        """
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            if not settled:
                self.barrier()
            for to, source in (
                copies[self.rank :] + copies[: self.rank]
            ):  # each begins elsewhere: no link is first for all
                to.copy_(source, non_blocking=True)
            if not settled:
                self.barrier()
            return Transfer(self.stream)
