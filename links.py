"""Messages between neighbouring pipeline stages: activations forward, gradients back.

A link is one direction over one boundary. Both ends know from the schedule which message comes next and what shape it
has, so nothing is announced. A message is on its way while both ends compute: isend() returns at once, and what recv()
returns was received, or written into a slot here by the sender's copy engine, before it was asked for.
"""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from support.meter import at
from support.run import Run
from transport import PeerMemory, Transfer


class Link:
    """One direction between two neighbouring stages: a group of two for it alone.

    So messages arrive in the order in which they were sent, and a receive that is posted early holds up nothing else:
    on NCCL it would block every send that shares its communicator.
    """

    sent: tuple | None = None  # the last message sent, and what to wait for

    def __init__(self, group: dist.ProcessGroup, what: str, shape: tuple[int, ...], run: Run):
        self.group, self.what, self.peer = group, what, 1 - dist.get_rank(group)
        self.empty = lambda: torch.empty(shape, dtype=run.dtype, device=run.device)
        self.coming = 0
        self.posted: tuple[Tensor, dist.Work] | None = None

    def shake_hands(self, sends: bool) -> None:
        """One message: NCCL connects a pair at its first one and both sides wait in there, so that two neighbours which
        began with different links would wait for each other. All ranks come here in one order."""
        token = self.empty().view(-1)[:1]
        if sends:
            dist.isend(token, group=self.group, group_dst=self.peer).wait()
        else:
            dist.irecv(token, group=self.group, group_src=self.peer).wait()

    def expect(self, messages: int, early: bool) -> None:
        """So many will be received from now on. early: start the first; else with its recv()."""
        self.coming = messages
        if early:
            self.post()

    def post(self) -> None:
        """Start receiving one message, which then arrives while this rank computes."""
        buffer = self.empty()  # a new one each time: the last one is the input that its backward pass still needs
        with at("recv", self.what, buffer.nbytes):
            self.posted = buffer, dist.irecv(buffer, group=self.group, group_src=self.peer)

    def recv(self) -> Tensor:
        """Wait for the message that was posted, and post the next. Of the link's shape, in the compute dtype."""
        if self.posted is None:
            self.post()
        buffer, work = self.posted
        with at("bubble", self.what):
            work.wait()
        self.coming -= 1
        self.posted = None
        if self.coming:
            self.post()
        return buffer

    def isend(self, tensor: Tensor) -> None:
        """Start sending; the tensor is kept and must stay unchanged until the next isend, which waits for this one.

        That wait is no bubble: the peer has had its receive posted since it took the message before, if there was one.
        """
        if self.sent:
            with at("wait", self.what):
                self.sent[1].wait()
        with at("send", self.what, tensor.nbytes):
            self.sent = tensor, self.start(tensor)

    def start(self, tensor: Tensor):
        return dist.isend(tensor, group=self.group, group_dst=self.peer)


class PeerLink(Link):
    """The same between GPUs that reach each other's memory: the sender's copy engine writes into one of two slots here.

    A receive that NCCL has posted is a kernel that waits on multiprocessors which compute could use (compute took 13 %
    longer). Here the receiver looks for the signal when it needs the message, copies it out of the slot and signals
    back that the slot is free; beside compute, one thread block waits if a sender is two messages ahead. Even messages
    go through slot 0.
    """

    def __init__(self, memory: PeerMemory, what: str, shape: tuple[int, ...], peer: int, run: Run):
        self.memory, self.what, self.shape, self.peer, self.number = memory, what, shape, peer, 0
        self.base = 0 if what == "activation" else 2  # which two of the receiver's four slots
        self.stream = torch.cuda.Stream(run.device)

    def expect(self, messages: int, early: bool) -> None:
        """Nothing to post: the sender writes when it likes."""

    def next_slot(self, rank: int) -> tuple[Tensor, int, int]:
        """Where the next message lies on its receiver, and the channels of its signals "full" and "free again"."""
        i, self.number = self.base + self.number % 2, self.number + 1
        return self.memory.of[rank].view(4, *self.shape)[i], i, 4 + i

    def recv(self) -> Tensor:
        """The message, once it is there: the compute stream waits, not the host."""
        slot, full, free = self.next_slot(self.memory.rank)
        with at("recv", self.what, slot.nbytes):
            with at("bubble", self.what):
                self.memory.wait(self.peer, full)
            message = slot.clone()
            self.memory.signal(self.peer, free)
        return message

    def start(self, tensor: Tensor) -> Transfer:
        slot, full, free = self.next_slot(self.peer)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            if self.number > 2:  # the first two found both slots free
                self.memory.wait(self.peer, free)
            slot.copy_(tensor, non_blocking=True)
            self.memory.signal(self.peer, full)
            return Transfer(self.stream)


class Links(NamedTuple):
    """A rank's links; None where it has no such neighbour."""

    from_previous: Link | None  # activations
    to_previous: Link | None  # gradients
    from_next: Link | None  # gradients
    to_next: Link | None  # activations


def open_links(run: Run, shape: tuple[int, ...], wraps: bool) -> Links:
    """Between this rank's stage and its neighbours, for messages of `shape`. Collective over the run.

    wraps: the last stage's next is the first one (interleaved). With two stages both neighbours are then the same rank.
    """
    stage, pp = run.place().stage, run.pp
    memory = PeerMemory(4 * math.prod(shape), run.dtype, run) if run.copy_engine else None
    links: dict[tuple[str, int], Link] = {}
    for a in range(pp if wraps else pp - 1):  # the boundary between stages a and b
        b = (a + 1) % pp
        for what in ("activation", "gradient"):
            if memory is not None:
                if stage in (a, b):
                    peer = run.rank_of(run.place()._replace(stage=b if stage == a else a))
                    links[what, a] = PeerLink(memory, what, shape, peer, run)
                continue
            group = run.group(f"{what} over boundary {a}", lambda p, ends=(a, b): (p.replica, p.seat, p.stage in ends))
            if stage in (a, b):
                links[what, a] = Link(group, what, shape, run)
                links[what, a].shake_hands(sends=(stage == a) == (what == "activation"))
    before = (stage - 1) % pp
    return Links(*(links.get(key) for key in (
        ("activation", before), ("gradient", before), ("gradient", stage), ("activation", stage)
    )))  # fmt: skip
