"""A run as one rank sees it: who am I, and who are the others."""

import datetime
import gc
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from support.flags import Config, UserError

GRACE = 15  # seconds that collectives wait longer than --hang-timeout: the watchdog speaks first, and names who


class Place(NamedTuple):
    """Where a rank stands. Ranks that differ in `seat` only are neighbours: they have the most to tell each other."""

    replica: int  # which copy of the model, and so which share of the batch
    stage: int  # which part of the layers, under pipeline parallel
    seat: int  # which slice of each matrix (tensor parallel), or of the sequence (context parallel)


@dataclass
class Run:
    """What start() has found and checked; cfg has every default filled in."""

    cfg: Config
    rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype = torch.float32  # of compute
    world: dist.ProcessGroup | None = None  # all ranks of the run, for tensors on the device; None: of the job
    control: dist.ProcessGroup | None = None  # the same ranks over gloo, for Python objects
    pp: int = 1  # pipeline stages
    tp: int = 1  # ranks that share out each matrix
    cp: int = 1  # ranks that share out each sequence
    accum: int = 1  # micro-batches per rank and step
    first_step: int = 0  # with which this run begins, and how many samples the steps before it have consumed
    consumed: int = 0
    model_cfg: Any = None  # model.ModelConfig
    tokens: Any = None  # data.Tokens, and the validation split's
    val_tokens: Any = None
    out: str | None = None  # run folder
    new_folder: bool = False  # which this run has made
    lock: Any = None  # the open file whose lock makes the folder this run's
    script: str = ""
    number: int = 0  # of runs that this process started before
    copy_engine: bool = False  # whether transfers go by copy engines (transport.py)
    watchdog: Any = None  # support.watchdog.Watchdog
    outside: int = 0  # bytes of GPU memory taken outside torch's allocator

    @property
    def dp(self) -> int:
        """Data-parallel size: into how many shares a batch is dealt."""
        return self.world_size // (self.pp * self.tp * self.cp)

    def place(self, rank: int | None = None) -> Place:
        """Of this rank, or of another one."""
        rest, seat = divmod(self.rank if rank is None else rank, self.tp * self.cp)
        return Place(*divmod(rest, self.pp), seat)

    def samples_before(self, step: int) -> int:
        """Samples that the steps before `step` consume: its position in the stream, whatever the batch was before."""
        return self.consumed + (step - self.first_step) * self.cfg.global_batch

    def rank_of(self, place: Place) -> int:
        """The rank that stands there."""
        return (place.replica * self.pp + place.stage) * self.tp * self.cp + place.seat

    @property
    def master_dtype(self) -> torch.dtype:
        """Of master weights, moments and gradient accumulation: float32, or float64 for the proofs."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def wire_dtype(self) -> torch.dtype:
        """In which gradients summed over micro-batches travel: the masters', or bf16 on demand."""
        return torch.bfloat16 if self.cfg.wire == "bf16" and self.master_dtype == torch.float32 else self.master_dtype

    def everyone(self, value: object) -> list:
        """Every rank's value, by rank; collective over the control group."""
        if self.world_size == 1:
            return [value]
        values: list = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def group(self, what: str, colour: Callable[[Place], object]) -> dist.ProcessGroup:
        """The ranks whose place has the same colour as this rank's, in a group of their own for this use (`what`).

        Collective over the run. NCCL connects at a group's first call, in which its ranks wait for each other: so each
        new group speaks here at once, and all ranks meet their groups in one order.
        """
        colours = [colour(self.place(rank)) for rank in range(self.world_size)]
        ranks = dist.get_process_group_ranks(self.world or dist.group.WORLD)
        group = make_group(ranks, colours, what, self.cfg.hang_timeout + GRACE, control=self.control)
        if self.device.type == "cuda":
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)
        return group


def everywhere(work: Callable, group: dist.ProcessGroup | None, here: bool = True) -> list:
    """Run work() on the ranks of `group` that are `here` -> all results by rank (None from the others); collective.

    An error on any rank is raised on all: a UserError unless one of them is neither that nor an OSError.
    """
    result, error, is_users = None, None, True
    if here:
        try:
            result = work()
        except Exception as e:  # raised again below, on every rank
            is_users = isinstance(e, (UserError, OSError))
            error = f"rank {dist.get_rank(group)}: {e if is_users else traceback.format_exc()}"
    global _waiting
    found: list = [None] * dist.get_world_size(group)
    _waiting += 1
    try:
        dist.all_gather_object(found, (result, error, is_users), group=group)
    finally:
        _waiting -= 1
    if errors := [error for _, error, _ in found if error]:
        raise (UserError if all(users for _, _, users in found) else RuntimeError)("; ".join(errors))
    return [result for result, _, _ in found]


def waiting() -> bool:
    """Whether this process has done its part of an everywhere(), in whichever thread, and the other ranks have not."""
    return _waiting > 0


_waiting = 0
_made: dict[tuple, dist.ProcessGroup] = {}


def destroy_groups() -> None:
    """The end of a job, in one order on all ranks: the latest group first, the world last.

    gloo's threads end with the last reference to their group. Those that live on until Python ends may want its lock
    then, and abort the process.
    """
    while _made:
        dist.destroy_process_group(_made.popitem()[1])
    dist.destroy_process_group()
    gc.collect()  # a loader and its iterator refer to each other, and to the run with its groups


def make_group(
    ranks: list[int],
    colours: list[object],
    what: str,
    timeout_s: int,
    backend: str | None = None,
    control: dist.ProcessGroup | None = None,
) -> dist.ProcessGroup:
    """The group of those of `ranks` that have this rank's colour; collective over them.

    ranks: the job's numbers of a run's ranks.

    A later run of the same ranks gets the same group again. Destroyed and made anew it would meet its own old addresses
    in the job's store, for torch names a group by its members and by how many groups a member is in. So that this
    number is the same for all, ranks of a run that is only a part of the job first fill up with groups of one.
    """
    key = (dist.group.WORLD, *ranks, *map(str, colours), what, timeout_s, backend)
    if key in _made:
        return _made[key]
    timeout = datetime.timedelta(seconds=timeout_s)
    part = len(ranks) < dist.get_world_size()
    if part:
        named = dist.distributed_c10d._world.pg_names
        most = max(everywhere(lambda: len(named), control))
        while len(named) < most:
            dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    for colour in dict.fromkeys(colours):  # all ranks make all groups: NCCL splits them off the job's communicator
        members = [rank for rank, theirs in zip(ranks, colours) if theirs == colour]
        group = dist.new_group(members, timeout=timeout, backend=backend, use_local_synchronization=part)
        if dist.get_rank() in members:
            _made[key] = group
    return _made[key]
