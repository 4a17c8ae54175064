"""Copying to and from a neighbour's memory: transfers that take no multiprocessors.

NCCL moves data with kernels. Hidden behind compute they still slow it: while one is resident, the matrix products beside
it run with fewer multiprocessors, and the last wave of a product waits for all of them. GPUs of one host that can map
each other's memory (NVLink) have another way: the copy engines, which memcpy between devices uses, and which compute
hardly notices. What remains to be agreed is when a buffer may be read and when it may be written again: by barriers where
all ranks exchange (ZeRO), by signals where two do (pipeline).

Built on torch's symmetric memory: https://docs.pytorch.org/docs/main/distributed/symmetric_memory.html
"""

import socket

import torch
from torch import Tensor

from support.flags import UserError
from support.run import Run


def reachable(run: Run) -> bool:
    """Whether every rank's GPU can read every other's; collective over run.control."""
    if run.device.type != "cuda" or run.world_size == 1:
        return False
    places = run.everyone((socket.gethostname(), run.device.index))
    if len({host for host, _ in places}) > 1:
        return False
    others = [index for rank, (_, index) in enumerate(places) if rank != run.rank]
    return all(run.everyone(all(torch.cuda.can_device_access_peer(run.device.index, index) for index in others)))


def choose_copy_engine(run: Run, possible: bool) -> None:
    """Set run.copy_engine, before anything is built; collective over run.control. possible: the layout has a use for it.

    Raises UserError when --copy-engine asks for what cannot be had.
    """
    run.copy_engine = possible and run.cfg.copy_engine is not False and reachable(run)
    if run.cfg.copy_engine and not run.copy_engine:
        raise UserError(
            "--copy-engine is for ZeRO stages 2 and 3 and for pipelines, on two or more GPUs of one host that can read each other's memory"
        )


class Transfer:
    """A copy under way, to be waited for like a dist.Work: the current stream waits, not the host."""

    def __init__(self, stream: torch.cuda.Stream):
        self.done = stream.record_event()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.done)


class PeerMemory:
    """A buffer on every rank that all can read: `mine`, and `of[rank]`, 1-D tensors of `numel` elements; made by all at once.

    The memory lies outside torch's allocator; run.outside counts its bytes.
    """

    def __init__(self, numel: int, dtype: torch.dtype, run: Run):
        import torch.distributed._symmetric_memory as symmetric  # alpha in torch 2.11 to 2.13, and only needed on GPUs

        self.mine = symmetric.empty(numel, dtype=dtype, device=run.device)
        torch.cuda.synchronize(
            run.device
        )  # on every rank, before all meet: no signal of an earlier run is on its way any more
        try:
            self.handle = symmetric.rendezvous(self.mine, run.world)
        except RuntimeError as error:  # a container may forbid what the cards could do
            raise UserError(f"the GPUs cannot map each other's memory ({error}); use --no-copy-engine") from None
        self.handle.get_signal_pad(run.rank).zero_()  # but some may have come that nobody took
        torch.cuda.synchronize(run.device)
        run.everyone(None)
        self.rank = run.rank
        self.of: list[Tensor] = [self.handle.get_buffer(rank, (numel,), dtype) for rank in range(run.world_size)]
        self.stream = torch.cuda.Stream(run.device)
        self.timeout_ms = 1000 * run.cfg.hang_timeout
        run.outside += self.mine.nbytes

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
            ):  # each rank begins elsewhere: no link is first for all
                to.copy_(source, non_blocking=True)
            if not settled:
                self.barrier()
            return Transfer(self.stream)
