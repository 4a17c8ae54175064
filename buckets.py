"""What a rank holds of the model, and the flat buffers in which it holds it.

The parameters that travel together (a block's, say) lie one behind the other in one flat bucket and are views of it. So
a collective has nothing to pack, the optimizer runs one kernel, and a rank's share of a bucket is a range of its
elements, wherever the matrices in it begin and end. Of a parameter a rank holds a box: all of it (data parallel), its
rows or columns (tensor parallel), or nothing (another pipeline stage's). From these two ideas, box and range, follows
everything that the strategies have in common: initial values, gradients, moments, checkpoints.

    block.3, two tensor parallel ranks, each bucket in two ZeRO shares:

    parameter (16 x 8)   wq            wo                bucket of rank 0       | padding
                        [rows 0-7 ]   [columns 0-3 |  ]  [wq rows 0-7 | wo columns 0-3 | ..]
                        [rows 8-15]                      [   share of replica 0   |   share of replica 1   ]

held_by() says what this rank has; it needs no processes, so predictions come from it too. Bucket is the buffers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint import Piece, flat_piece
from model import Param, init_values, params
from optim import adamw_step
from support.flags import UserError
from support.run import Place, Run


@dataclass(frozen=True)
class Slice:
    """A rank's part of a parameter: the box of `sizes` at `offsets`, in a buffer of `shape` with padding rows last."""

    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]

    def init(self, out: Tensor, first: int, name: str, run: Run) -> None:
        """Initial values of elements [first, first + len(out)) of the flattened buffer; padding is and stays zero."""
        real = max(0, min(out.numel(), math.prod(self.sizes) - first))
        out[real:].zero_()
        if self.sizes[1:] == self.whole[1:]:  # whole rows: one range of the flattened parameter
            start = self.offsets[0] * math.prod(self.whole[1:])
            init_values(out[:real], name, start + first, run.model_cfg, run.cfg.seed)
            return
        (top, left), width, full = self.offsets, self.sizes[1], self.whole[1]
        init_values(
            out[:real], name, first, run.model_cfg, run.cfg.seed, lambda i: (i // width + top) * full + i % width + left
        )

    def piece(self, flat: Tensor, first: int) -> Piece:
        """Elements [first, first + len(flat)) of the flattened buffer as boxes of the parameter (a matrix: 3)."""
        real = max(0, min(flat.numel(), math.prod(self.sizes) - first))
        boxes = flat_piece(self.sizes, first, flat[:real]).boxes if real else []
        moved = [(tuple(a + b for a, b in zip(at, self.offsets)), box) for at, box in boxes]
        return Piece(self.whole, flat.dtype, moved)


def slice_of(param: Param, run: Run) -> Slice:
    """This rank's slice of a parameter: its rows or columns where tensor parallel ranks share it out, else all."""
    whole = param.shape
    if param.cut is None or run.tp == 1:
        return Slice(whole, (0,) * len(whole), whole, whole)
    n = -(-whole[param.cut] // run.tp)
    if param.unit in ("embed", "head"):  # a vocabulary need not divide; 8s: tensor cores want 16 bytes of bf16
        n = -(-n // 8) * 8
    first = min(run.place().seat * n, whole[param.cut])
    count = min(n, whole[param.cut] - first)

    def replace(values: tuple[int, ...], value: int) -> tuple[int, ...]:
        return (*values[: param.cut], value, *values[param.cut + 1 :])

    return Slice(whole, replace((0,) * len(whole), first), replace(whole, count), replace(whole, n))


@dataclass(frozen=True)
class Held:
    """What a rank holds in one bucket."""

    slices: dict[str, Slice]
    holders: str = "replicas"  # which ranks hold the same, a key of colours()
    twin: bool = False  # first and last pipeline stage hold a tied embedding, and sum its gradient once more
    owner: bool = True  # the second of the twins counts in no norm


def colours(run: Run) -> dict[str, Callable[[Place], object]]:
    """Groups of ranks, by what they have in common; a group is the ranks to which its function gives one value."""
    found: dict[str, Callable[[Place], object]] = {"replicas": lambda p: (p.stage, p.seat if run.tp > 1 else 0)}
    if run.tp > 1:  # norms are whole on every tensor parallel rank, and their gradient is a sum over all
        found["norms"] = lambda p: p.stage
    if run.pp > 1 and run.model_cfg.tie:
        found["twins"] = lambda p: (p.replica, p.seat, p.stage in (0, run.pp - 1))
    return found


def copies(run: Run, what: Held) -> int:
    """How many ranks hold the same as this one in a bucket."""
    colour = colours(run)[what.holders]
    return sum(colour(run.place(rank)) == colour(run.place()) for rank in range(run.world_size))


def held_by(run: Run, parts: list[range] | None = None) -> dict[str, Held]:
    """What this rank holds of the model, by bucket, in the order of the forward pass.

    parts: the halves of blocks that its pipeline stage has (GPT.forward_part), by chunk; None: the whole model. Under
    tensor parallel the norms, whose gradient is summed over other ranks than the matrices', have a bucket of their own;
    a chunk has one, since a bucket that two chunks shared would seem complete after the first.
    """
    last = 2 * run.model_cfg.n_layer
    parts = parts or [range(last)]
    found: dict[str, Held] = {}
    for chunk, part in enumerate(parts):
        begins, ends = part.start == 0, part.stop == last
        twin = run.pp > 1 and run.model_cfg.tie
        norms = "norms" if len(parts) == 1 else f"norms.{chunk}"
        units = ["embed", norms]  # backward completes buckets in the reverse of this order
        here: dict[str, dict[str, Slice]] = {}
        for name, param in params(run.model_cfg).items():
            embedding = param.half < 0 and (begins or ends and twin)
            if embedding or param.half in part or param.half == last and ends:
                unit = norms if run.tp > 1 and param.cut is None else param.unit
                here.setdefault(unit, {})[name] = slice_of(param, run)
        for unit in sorted(here, key=lambda u: units.index(u) if u in units else len(units)):  # stable
            tied = unit == "embed" and twin
            found[unit] = Held(here[unit], "norms" if unit == norms else "replicas", tied, not tied or begins)
    return found


class Bucket:
    """One unit's state in flat buffers of `padded` elements, of which this rank may keep a share only.

    The matrices come first, then the norms: the elements that weight decay touches end at `decay`. The share is
    elements [first, first + size): master, exp_avg and exp_avg_sq (size,) in float32 or better. A strategy adds weights
    (padded,) in the compute dtype, of which the parameters are views, with shard, this rank's share of them; grad, in
    which it sums; grad_shard, which AdamW reads; and owned, the part of the sum that this rank counts in the norm.
    """

    def __init__(self, number: int, name: str, what: Held, run: Run, group: dist.ProcessGroup, shared: bool):
        self.number, self.name, self.group, self.owner, self.twin = number, name, group, what.owner, what.twin
        self.holders = what.holders
        # stable: matrices first, else as given
        self.slices = dict(sorted(what.slices.items(), key=lambda item: len(item[1].whole) < 2))
        self.start: dict[str, int] = {}
        self.numel = self.decay = 0
        for param, part in self.slices.items():
            self.start[param] = self.numel
            self.numel += math.prod(part.shape)
            self.decay = self.numel if len(part.whole) >= 2 else self.decay
        self.n, self.index = dist.get_world_size(group), dist.get_rank(group)
        self.padded = padded(what, self.n if shared else 1)
        size = self.padded // self.n if shared else self.padded
        self.first = self.index * size if shared else 0
        self.master = torch.zeros(size, dtype=run.master_dtype, device=run.device)
        for param, part, inside, at in self.parts(self.master):
            part.init(inside, at, param, run)  # of the share only: no rank makes the whole
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.weights = self.shard = self.master  # in float32 and float64 it can be what the model computes with
        self.grad = self.grad_shard = self.owned = self.master
        self.missing = set(self.slices)  # whose gradient of this pass is not in yet
        self.passes = 0  # backward passes of this step that are complete
        self.work = None  # a transfer of its gradient, to be waited for
        self.norms: dict[str, Tensor] = {}  # of gradients of this rank, before any sum: to say who brought a NaN

    @property
    def mine(self) -> slice:
        """This rank's share of a buffer of `padded` elements."""
        return slice(self.first, self.first + self.master.numel())

    def view(self, flat: Tensor, name: str) -> Tensor:
        """Parameter `name` in a buffer of `padded` elements."""
        shape, a = self.slices[name].shape, self.start[name]
        return flat[a : a + math.prod(shape)].view(shape)

    def parts(self, share: Tensor) -> list[tuple[str, Slice, Tensor, int]]:
        """Per parameter: name, slice, its elements in `share` (like the share), where in the parameter they begin."""
        found = []
        for name, part in self.slices.items():
            start = self.start[name]
            a = min(max(start, self.first), self.mine.stop)
            b = max(a, min(start + math.prod(part.shape), self.mine.stop))
            found.append((name, part, share[a - self.first : b - self.first], a - start))
        return found

    def gradient_came(self, name: str) -> bool:
        """A parameter's gradient has come; whether it was the last of this pass."""
        if name not in self.missing:
            self.complain("came to the end of a pass without a gradient")
        self.missing.discard(name)
        if self.missing:
            return False
        self.missing = set(self.slices)
        self.passes += 1
        return True

    def check_passes(self, expected: int) -> None:
        """At the end of a step. UserError names the parameters that did not take part in each pass."""
        if self.passes != expected or len(self.missing) < len(self.slices):
            self.complain(f"had a gradient in {self.passes} of the step's {expected} passes")
        self.passes = 0

    def complain(self, what: str) -> None:
        raise UserError(
            f"{', '.join(sorted(self.missing))} {what}: every parameter must be used in every forward pass and need a "
            "gradient (frozen, skipped or unused ones would be updated with the gradient of another step)"
        )

    def note_norms(self, grad: Tensor, add: bool = False) -> None:
        """Before the ranks' gradients are mixed. add: to those of the micro-batches before."""
        wide = torch.promote_types(grad.dtype, torch.float32)  # fp16 squares overflow
        norms = torch._foreach_norm([self.view(grad, name) for name in self.slices], 2, wide)
        self.norms = {name: norm + self.norms.get(name, 0) if add else norm for name, norm in zip(self.slices, norms)}

    def square(self) -> Tensor:
        """Of the summed gradient's norm, over the elements that this rank owns: over all ranks each counts once."""
        if not self.owner:
            return torch.zeros((), dtype=torch.float64, device=self.owned.device)
        return torch.linalg.vector_norm(self.owned).double().square()

    def adamw(self, update: int, lr: float, factor: float, cfg) -> None:
        """Update the share with gradients times `factor`, and make its new compute weights."""
        if factor != 1:
            self.grad_shard.mul_(factor)
        state = self.master, self.grad_shard, self.exp_avg, self.exp_avg_sq
        adamw_step(*state, self.decay - self.first, update, lr, cfg)
        if self.shard is not self.master:
            self.shard.copy_(self.master)

    def pieces(self) -> dict[str, Piece]:
        """The share's training state by name, for checkpoint.py."""
        found = {}
        for prefix, flat in (("", self.master), ("exp_avg.", self.exp_avg), ("exp_avg_sq.", self.exp_avg_sq)):
            found |= {prefix + name: part.piece(inside, at) for name, part, inside, at in self.parts(flat)}
        return found


def padded(what: Held, shares: int) -> int:
    """Elements of a bucket, rounded up so that it divides into equal shares; the padding belongs to no parameter."""
    return -(-sum(math.prod(part.shape) for part in what.slices.values()) // shares) * shares


def holders(run: Run) -> dict[str, dist.ProcessGroup | None]:
    """The groups of colours(), each made by all ranks in one order."""
    groups = {}
    for what, colour in colours(run).items():
        whole = len({colour(run.place(rank)) for rank in range(run.world_size)}) == 1
        groups[what] = run.world if whole else run.group(what, colour)
    return groups
