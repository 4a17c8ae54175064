"""Tensor parallel training: each matrix is divided among the ranks, which work on the same batch at the same time.

    torchrun --nproc_per_node=2 train_tp.py                    # --tp 2: all ranks
    torchrun --nproc_per_node=8 train_tp.py --tp 2 --model 6b --micro-batch 8 --global-batch 64 --data DIR   # 2 x 4 data parallel
    torchrun --nproc_per_node=2 train_tp.py --no-overlap       # whole micro-batches, every collective waited for
    torchrun --nproc_per_node=2 train_tp.py --explain          # memory, collectives and batch arithmetic, then exit

A pair of matrices with something elementwise between them needs no communication inside: A is cut by columns, B by rows,

    Z = f(X A) B,   A = [A_1 | A_2],   B = [B_1]    =>    X A = [X A_1 | X A_2],   Z = f(X A_1) B_1 + f(X A_2) B_2
                                           [B_2]

and rank r makes only its summand Z_r = f(X A_r) B_r. In attention A is wq, wk, wv and the columns are heads; in SwiGLU A is
w_gate, w_up; B is wo, w_down. X must be whole on each rank, Z is a sum over the ranks. What lies between such regions
(residual, dropout, norm) works on each token by itself, so there every rank keeps T/tp of the tokens: the sum arrives by
reduce_scatter, the next region's X by all_gather. Each is the other's derivative, so backward is the same picture:

    forward    Z_r --reduce_scatter--> z --> x = x + z, n = norm(x)  --all_gather--> X      ReduceScatter is g-bar, AllGather g
    backward  dZ_r <---all_gather----- dz <-- dx = dx + norm'(dn)   <-reduce_scatter- dX     of the sequence-parallel paper

One step:

    for each micro-batch, in two halves A and B that take turns:
        embed rows of the own vocabulary;                                  reduce_scatter, norm, all_gather
        for each attention and each MLP:  A computes while B has its       reduce_scatter, add, norm, all_gather
        logits of the own vocabulary;                                      all_gather(2 numbers per token) -> loss
        backward: the same in reverse, again B beside A;      dp > 1:      all_reduce(bucket of block i) in the last one
    all_reduce(gradients of the norms: every rank saw its tokens only)
    all_reduce(loss sum, token count, stop flag);  all_gather(squared norm);  clip;  AdamW on the own slices

Bytes per parameter and rank: (master 4 + moments 8 + gradient 4 + bf16 weight 2) / tp. Bytes handed to collectives per block and
micro-batch: forward 4 B T C x 2 (bf16), backward the same; each rank sends (tp - 1)/tp of it. Unlike data parallel's this
grows with the batch and comes between the layers, hence the halves; on CPU they take turns too, but nothing is hidden.

Papers: Shoeybi et al., Megatron-LM (arXiv 1909.08053); Korthikanti et al., sequence parallelism (2205.05198).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import model as gpt
import train_ddp
from checkpoint import Checkpointer, Piece, slice_piece, whole_piece
from data import Batches, val_batches
from model import (
    GPT,
    IGNORE,
    activation_bytes,
    dropout,
    dropout_keys,
    flops_per_token,
    init_range,
    param_shapes,
    unit_shapes,
)
from optim import LossScaler, gradient_factor, lr_at
from support.flags import UserError
from support.meter import Meter, at, say
from support.resume import progress, resume, rng_state
from support.run import Run
from support.start import explain, run_script, say_if_stopped, start, stop_signal
from train_ddp import Bucket, DataParallel, bucket_bytes

# torch 2.13 renamed the two; 2.11 has the old names only
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass
class Config(train_ddp.Config):
    tp: int = 0  # ranks that divide each matrix among them; the rest is data parallel [all ranks]


# --- the ranks --------------------------------------------------------------------------------------------------------


@dataclass
class Team:
    """The `size` ranks that divide each matrix among them, and the stream on which they exchange activations."""

    size: int
    rank: int
    group: dist.ProcessGroup
    stream: torch.cuda.Stream | None  # None: the compute stream, so that nothing overlaps

    def beside(self, fn: Callable, *args) -> tuple:
        """Run fn(*args) behind everything queued for compute, but beside what is queued next -> its result, the event of its end.

        Memory that crosses over needs no record_stream: this stream waits for compute before it reuses anything, and
        what compute handed over must be kept by the caller until compute has waited for the event.
        """
        if self.stream is None:
            return fn(*args), None
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            return fn(*args), self.stream.record_event()


def make_groups(run: Run) -> tuple[Team, dist.ProcessGroup]:
    """Collective over the run's ranks -> the team of this rank, and the group of the ranks that hold the same slices."""
    tp = run.world_size // run.dp
    beside = run.device.type == "cuda" and run.cfg.overlap
    # high priority: the few blocks of a collective go in front of the thousands of a matrix product
    stream = torch.cuda.Stream(run.device, priority=-1) if beside else None
    # a team is neighbours: the fastest links, and the most bytes
    team = Team(tp, run.rank % tp, run.group("team", lambda place: place[:2]), stream)
    return team, run.group("replicas", lambda place: place[1:])


def check_layout(run: Run) -> None:
    """Raises UserError, the same on every rank, unless tp divides what is cut. KV heads are never replicated."""
    tp, m = run.world_size // run.dp, run.model_cfg
    cut = {"n_head": m.n_head, "n_kv_head": m.n_kv_head, "n_ff": m.n_ff, "seq_len": m.seq_len}
    for field, n in cut.items():
        if n % tp:
            fit = [str(k) for k in range(1, m.n_kv_head + 1) if all(v % k == 0 for v in cut.values())]
            raise UserError(f"{field}={n} is not divisible by tp={tp}, valid for this model: --tp {', '.join(fit)}")


# --- the idea: slices -------------------------------------------------------------------------------------------------


class ColumnParallelLinear(nn.Linear):
    """Y = X A with A = [A_1 | A_2 | ...]: rank r holds the columns A_r, stored as rows of weight (out/tp, in), and makes Y_r.

    X is whole on every rank. dX = sum over r of dY_r A_r^T: a sum over ranks, which reduce_scatter makes in backward.
    """

    cut = 0


class RowParallelLinear(nn.Linear):
    """Y = X A = sum over r of X_r A_r: rank r holds rows A_r, stored as columns of weight (out, in/tp), and makes its summand of Y.

    X_r is what a ColumnParallelLinear made here. dX_r = dY A_r^T needs dY whole on every rank: all_gather in backward.
    """

    cut = 1


def own_rows(ids: Tensor, lowest: int, rows: int, vocab_size: int, team: Team) -> tuple[Tensor, Tensor]:
    """Which ids this rank's `rows` rows of the vocabulary hold, and the row of each; any row for those of other ranks.

    An id outside [lowest, vocab_size) gets the row `rows`, which does not exist: whoever indexes with it fails, as one
    process would, instead of taking the zeros that stand for "another rank has it".
    """
    away = ids - team.rank * rows
    own = (away >= 0) & (away < rows)
    return own, torch.where((ids >= lowest) & (ids < vocab_size), away % rows, rows)


class VocabParallelEmbedding(nn.Embedding):
    """Rank r holds rows of the vocabulary, weight (V/tp, C), and looks up its own; the sum over ranks is the embedding."""

    cut = 0

    def __init__(self, vocab_size: int, n_embd: int, team: Team):
        # padded to equal shares, each of whole 16-byte units of bf16 logits, which tensor cores want
        super().__init__(-(-vocab_size // (8 * team.size)) * 8, n_embd)
        self.vocab_size, self.team = vocab_size, team

    def forward(self, ids: Tensor) -> Tensor:
        """ids (B, T) int64 -> this rank's summand (B, T, C)"""
        own, row = own_rows(ids, 0, self.num_embeddings, self.vocab_size, self.team)
        return super().forward(row) * own[..., None]


# --- the idea: between the slices -------------------------------------------------------------------------------------
# A part of the micro-batch has B sequences, each cut into tp pieces of T/tp tokens; rank r keeps pieces r B ... r B + B - 1
# of these B tp, in the order in which they lie in (B, T, C). Any share would do where tokens do not meet; with this one
# the collectives read and write (B, T, C) as it is, without a transposed copy.


def all_gather(x: Tensor, team: Team, what: str) -> Tensor:
    """g: (B, T/tp, C) on each rank -> (B, T, C) on all. Its derivative is reduce_scatter."""
    B, t, C = x.shape
    whole = x.new_empty(B, t * team.size, C)
    with at("all_gather", what, whole.nbytes):
        all_gather_single(whole.view(-1, t, C), x.contiguous(), group=team.group)
    return whole


def reduce_scatter(x: Tensor, team: Team, what: str) -> Tensor:
    """g-bar: a summand (B, T, C) on each rank -> this rank's pieces (B, T/tp, C) of the sum. Its derivative is all_gather."""
    B, T, C = x.shape
    pieces = x.new_empty(B, T // team.size, C)
    with at("reduce_scatter", what, x.nbytes):
        reduce_scatter_single(pieces, x.contiguous().view(-1, T // team.size, C), group=team.group)
    return pieces


def dropout_pieces(x: Tensor, p: float, keys: Tensor | None, layer: Tensor, site: int, rank: int, tp: int) -> Tensor:
    """model.dropout on this rank's pieces (B, T/tp, C), each at its place in its sequence: the mask one process would draw."""
    if p == 0 or keys is None:
        return x
    B, t, _ = x.shape
    where = [divmod(rank * B + j, tp) for j in range(B)]  # piece -> (sequence, which piece of it)
    return torch.cat([dropout(x[j : j + 1], p, keys[b : b + 1], layer, site, i * t) for j, (b, i) in enumerate(where)])


def add_norm(x: Tensor | None, z: Tensor, weight: Tensor, eps: float, *drop) -> tuple[Tensor, Tensor]:
    """x + dropout(z) and its RMSNorm, all (B, T/tp, C); x None: there is no residual yet."""
    z = dropout_pieces(z, *drop)
    x = z if x is None else x + z
    return x, F.rms_norm(x, weight.shape, weight, eps)


def add_norm_backward(
    dx: Tensor, dn: Tensor, x: Tensor, weight: Tensor, eps: float, *drop
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of z, x and weight from those of add_norm's two results; x is its first result, all that must be kept.

    Written out so that it can run on a stream of our choice; dropout is linear, so its derivative is itself.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    h, g = x.to(wide), dn.to(wide)
    r = (h.square().mean(-1, keepdim=True) + eps).rsqrt()
    gw = g * weight
    dx = (dx.to(wide) + r * (gw - h * (r.square() * (gw * h).mean(-1, keepdim=True)))).to(x.dtype)
    return dropout_pieces(dx, *drop), dx, (g * h * r).sum((0, 1)).to(weight.dtype)


class Junction:
    """What lies between two parallel regions for one part of the micro-batch, forward and backward, beside the other's compute."""

    def __init__(self, model: "TensorParallelGPT", index: int, keys: Tensor | None):
        self.model, self.team, (self.before, self.after) = model, model.team, model.regions[index : index + 2]
        block, site = divmod(index - 1, 2)  # the half of a block whose output arrives; index 0: the embedding's
        self.norm = model.norms[index]
        layer, site = (model.blocks[block].layer, site) if index else (model.embed_layer, 0)
        self.drop = (model.cfg.dropout, keys, layer, site, self.team.rank, self.team.size)

    def leave(self, partial: Tensor, x: Tensor | None) -> None:
        """End of a region: its summand (B, T, C) and the residual (B, T/tp, C) set off."""
        self.results = Leave.apply(self, partial, x, self.norm.weight)

    def enter(self) -> tuple[Tensor, Tensor]:
        """Start of the next region -> residual (B, T/tp, C), input (B, T, C)."""
        results, self.results = self.results, None
        return Enter.apply(self, *results)

    def forward(self, partial: Tensor, x: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        z = reduce_scatter(partial, self.team, self.before)
        x, n = self.model.add_norm(x, z, weight, self.norm.eps, *self.drop)
        self.x = x.detach()  # as returned it would hold the graph that holds this object
        return x, all_gather(n, self.team, self.after)

    def backward(self, dx: Tensor, dwhole: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dn = reduce_scatter(dwhole, self.team, self.after)
        dz, dx, dweight = self.model.add_norm_backward(dx, dn, self.x, weight, self.norm.eps, *self.drop)
        return all_gather(dz, self.team, self.before), dx, dweight

    def start(self, fn: Callable, *tensors: Tensor | None) -> tuple:
        self.kept = tensors  # compute's allocator must not reuse them while the other stream reads
        result, self.done = self.team.beside(fn, *tensors)
        return result

    def wait(self) -> None:
        if self.done is not None:
            with at("wait", self.after):
                torch.cuda.current_stream().wait_event(self.done)
        self.kept = self.done = None


class Leave(torch.autograd.Function):
    """Forward starts the junction; backward, run after the other part's compute, takes what Enter's has started."""

    @staticmethod
    def forward(ctx, junction: Junction, partial: Tensor, x: Tensor | None, weight: Tensor):
        ctx.junction, ctx.first = junction, x is None
        return junction.start(junction.forward, partial, x, weight)

    @staticmethod
    def backward(ctx, *_):  # the gradients handed from Enter to here are only what makes autograd come by
        junction = ctx.junction
        junction.wait()
        (dpartial, dx, dweight), junction.grads, junction.x = junction.grads, None, None
        return None, dpartial, None if ctx.first else dx, dweight


class Enter(torch.autograd.Function):
    """Forward waits for the junction; backward starts it the other way round."""

    @staticmethod
    def forward(ctx, junction: Junction, x: Tensor, whole: Tensor):
        junction.wait()
        ctx.junction = junction
        return x.view_as(x), whole.view_as(whole)

    @staticmethod
    def backward(ctx, dx: Tensor, dwhole: Tensor):
        junction = ctx.junction
        junction.grads = junction.start(junction.backward, dx, dwhole, junction.norm.weight.detach())
        return None, dx, dwhole


# --- the idea: the loss -----------------------------------------------------------------------------------------------


def own_stats(logits: Tensor, y: Tensor, vocab_size: int, team: Team) -> Tensor:
    """(2, B, T): log of this rank's part of the softmax's denominator; the target's logit, 0 if another rank has it."""
    rows = logits.shape[-1]
    real = min(max(vocab_size - team.rank * rows, 0), rows)  # without the padding, which is no word
    own, column = own_rows(y, IGNORE, rows, vocab_size, team)
    wide = torch.promote_types(logits.dtype, torch.float32)
    target = logits.gather(-1, column[..., None])[..., 0].to(wide)
    return torch.stack([logits[..., :real].to(wide).logsumexp(-1), torch.where(own, target, 0)])


def logits_to_grad(logits: Tensor, y: Tensor, log_z: Tensor, scale: Tensor, vocab_size: int, team: Team) -> None:
    """Overwrite the logits with scale x (softmax - one-hot), 0 where no target counts and in the padding."""
    rows = logits.shape[-1]
    word = team.rank * rows + torch.arange(rows, device=logits.device)
    grad = (logits.to(log_z.dtype) - log_z[..., None]).exp() - (word == y[..., None]).to(log_z.dtype)
    logits.copy_(torch.where((word < vocab_size) & (y != IGNORE)[..., None], grad * scale, 0))


class VocabParallelCrossEntropy(torch.autograd.Function):
    """Sum of the cross-entropies over the targets that count, from logits (B, T, V/tp) of which each rank has its words.

    log Z = log sum over r of exp(log Z_r): two numbers per token and rank travel instead of V/tp logits. All ranks add the
    same numbers in the same order and get the same bits. Backward writes over the logits, 2 bytes each, not 2 + 4 + 4.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, y: Tensor, model: "TensorParallelGPT") -> Tensor:
        team, mine = model.team, model.own_stats(logits, y, model.cfg.vocab_size, model.team)
        stats = mine.new_empty(team.size, *mine.shape)  # (tp, 2, B, T)
        with at("all_gather", "loss", stats.nbytes):
            # on the stream of the other collectives: one communicator, one order
            _, done = team.beside(lambda: all_gather_single(stats.view(-1, *y.shape), mine, group=team.group))
        if done is not None:
            with at("wait", "loss"):
                torch.cuda.current_stream().wait_event(done)
        log_z = stats[:, 0].logsumexp(0)
        ctx.save_for_backward(logits, y, log_z)
        ctx.model = model
        return torch.where(y != IGNORE, log_z - stats[:, 1].sum(0), 0).sum()

    @staticmethod
    def backward(ctx, scale: Tensor):
        logits, y, log_z = ctx.saved_tensors
        ctx.model.logits_to_grad(logits, y, log_z, scale, ctx.model.cfg.vocab_size, ctx.model.team)
        return logits, None, None


# --- the idea: the whole ----------------------------------------------------------------------------------------------


class TensorParallelGPT(GPT):
    """GPT on slices, its attention and MLP unchanged. Built without memory, as GPT is; the loss is the same on all ranks."""

    def __init__(self, cfg: gpt.ModelConfig, team: Team, recompute: str = "none", halves: bool = True):
        super().__init__(cfg)
        self.team, self.halves, self.regions, C = team, halves, regions(cfg), cfg.n_embd
        q, kv, ff = (n // team.size for n in (C, cfg.n_kv_head * cfg.head_dim, cfg.n_ff))
        with torch.device("meta"):
            self.tok_emb = VocabParallelEmbedding(cfg.vocab_size, C, team)
            self.head = ColumnParallelLinear(C, self.tok_emb.num_embeddings, bias=False)
            for block in self.blocks:
                block.wq, block.wk, block.wv = (ColumnParallelLinear(C, n, bias=False) for n in (q, kv, kv))
                block.w_gate, block.w_up = (ColumnParallelLinear(C, ff, bias=False) for _ in range(2))
                block.wo, block.w_down = RowParallelLinear(q, C, bias=False), RowParallelLinear(ff, C, bias=False)
        self.norms = [norm for block in self.blocks for norm in (block.attn_norm, block.mlp_norm)] + [self.norm]
        how = {"context_fn": gpt._selective} if recompute == "selective" else {}

        def again(core: Callable) -> Callable:
            """Recompute a core in backward from its gathered input: no collective runs twice, no residual is kept twice."""
            return lambda *args: checkpoint(core, *args, use_reentrant=False, preserve_rng_state=False, **how)

        self.attention, self.mlp = (c if recompute == "none" else again(c) for c in (gpt.attention, gpt.mlp))
        self.add_norm, self.add_norm_backward = add_norm, add_norm_backward
        self.own_stats, self.logits_to_grad = own_stats, logits_to_grad

    def compile_blocks(self) -> None:
        """Compile what computes; the collectives stay between, eager."""
        # with dropout not: inductor folds the pieces' positions into the hash's constants, past 64 bits
        pointwise = () if self.cfg.dropout else ("add_norm", "add_norm_backward")
        for name in ("attention", "mlp", "own_stats", "logits_to_grad", *pointwise):
            setattr(self, name, torch.compile(getattr(self, name), fullgraph=True))

    def core(self, index: int, whole: Tensor) -> Tensor:
        """Attention (even index) or MLP (odd) of block index // 2 on (B, T, C) -> this rank's summand (B, T, C)."""
        b, T = self.blocks[index // 2], whole.shape[1]
        if index % 2:
            return self.mlp(whole, b.w_gate.weight, b.w_up.weight, b.w_down.weight)
        return self.attention(whole, b.wq.weight, b.wk.weight, b.wv.weight, b.wo.weight, self.cos[:T], self.sin[:T])

    def forward(self, x: Tensor, y: Tensor, keys: Tensor | None = None) -> Tensor:
        """x, y (B, T) int64 -> summed loss (scalar).

        Autograd runs later calls first, so backward takes turns between the halves as this loop does.
        """
        n = 2 if self.halves else 1
        key_parts = [None] * n if keys is None else keys.chunk(n)
        parts = list(zip(x.chunk(n), key_parts))  # one part if there is one sequence
        junctions = [Junction(self, 0, k) for _, k in parts]
        for junction, (ids, _) in zip(junctions, parts):
            junction.leave(self.tok_emb(ids), None)
        for index in range(2 * self.cfg.n_layer):
            for p, (_, k) in enumerate(parts):
                residual, whole = junctions[p].enter()
                junctions[p] = Junction(self, index + 1, k)
                junctions[p].leave(self.core(index, whole), residual)
        losses = []
        for junction, targets in zip(junctions, y.chunk(n)):
            logits = self.head(junction.enter()[1])  # (B, T, V/tp)
            losses.append(VocabParallelCrossEntropy.apply(logits, targets, self))
        return torch.stack(losses).sum()


def regions(cfg: gpt.ModelConfig) -> list[str]:
    """Names of the parallel regions in order; between two neighbours lies a junction."""
    return ["embed", *(f"block.{i} {half}" for i in range(cfg.n_layer) for half in ("attention", "mlp")), "head"]


@dataclass(frozen=True)
class Slice:
    """A rank's part of one parameter: `count` rows (cut 0) or columns (cut 1) from `first` on, in a buffer of `shape`, padding last."""

    whole: tuple[int, ...]
    shape: tuple[int, ...]
    cut: int | None  # None: every rank has all of it
    first: int
    count: int

    def real(self, held: Tensor) -> Tensor:
        """What the model has of a tensor of `shape`: not the padding."""
        return held if self.cut is None else held.narrow(self.cut, 0, self.count)

    def init(self, out: Tensor, name: str, run: Run) -> None:
        """Fill out (of `shape`) with its part of the parameter's initial values."""
        if self.cut == 1:  # every row's part lies apart: made whole and cut, one matrix at a time
            whole = torch.empty(self.whole, dtype=out.dtype, device=out.device)
            init_range(whole.flatten(), name, 0, run.model_cfg, run.cfg.seed)
            out.copy_(whole.narrow(1, self.first, self.count))
            return
        out.zero_()  # padding: its gradient is zero, so zero it stays
        init_range(self.real(out).flatten(), name, self.first * math.prod(self.whole[1:]), run.model_cfg, run.cfg.seed)

    def piece(self, held: Tensor) -> Piece:
        if self.cut is None:
            return whole_piece(held)
        offsets = (self.first, 0) if self.cut == 0 else (0, self.first)
        return slice_piece(self.whole, offsets, self.real(held)) if self.count else Piece(self.whole, held.dtype)


def slices(model: TensorParallelGPT) -> dict[str, Slice]:
    """What this rank holds, by parameter."""
    found = {}
    for name, whole in param_shapes(model.cfg).items():
        shape = tuple(model.get_parameter(name).shape)
        cut = getattr(model.get_submodule(name.rsplit(".", 1)[0]), "cut", None)
        first = 0 if cut is None else model.team.rank * shape[cut]
        count = whole[0] if cut is None else min(max(whole[cut] - first, 0), shape[cut])
        found[name] = Slice(whole, shape, cut, first, count)
    return found


def slice_shapes(parts: dict[str, Slice], cfg: gpt.ModelConfig) -> dict[str, dict[str, tuple[int, ...]]]:
    """What is held by bucket: model.unit_shapes, but the norms, whose gradients are summed over all ranks, in one of their own."""
    units = {
        unit: {n: parts[n].shape for n in names if parts[n].cut is not None} for unit, names in unit_shapes(cfg).items()
    }
    norms = {name: part.shape for name, part in parts.items() if part.cut is None}
    ordered = {
        "embed": units.pop("embed"),
        "norms": norms,
    } | units  # backward completes them in the reverse of this order
    return {unit: shapes for unit, shapes in ordered.items() if shapes}


class TensorParallel(DataParallel):
    """train_ddp's buckets, of slices: summed over the ranks that hold the same slice, and the norms' over all."""

    def __init__(self, model: TensorParallelGPT, run: Run, group: dist.ProcessGroup):
        self.team, self.slices = model.team, slices(model)
        held = slice_shapes(self.slices, run.model_cfg)
        super().__init__(model, run, held, group, lambda out, name, run: self.slices[name].init(out, name, run))

    def holders(self, bucket: Bucket) -> dist.ProcessGroup | None:
        """The replicas of this slice; of the norms all ranks: in two sums, over team and replicas, copies could differ in the last bit."""
        return self.run.world if bucket.unit.name == "norms" else self.group

    def grad_norm(self) -> float:
        """Norm of the summed gradient: each slice once, the norms once. Gathered and added here, so all ranks get the same bits."""
        counted = [b.grad for unit, b in self.buckets.items() if unit != "norms" or self.team.rank == 0]
        mine = torch.stack([torch.linalg.vector_norm(g) for g in counted]).double().square().sum()
        squares = mine.new_empty(self.team.size)
        with at("all_gather", "squared norm", squares.nbytes):
            all_gather_single(squares, mine[None], group=self.team.group)
        return squares.sum().sqrt().item()

    def pieces(self) -> dict[str, Piece]:
        """The training state by name, for checkpoint.py: this rank's slices without padding, and the norms."""
        found: dict[str, Piece] = {}
        for b in self.buckets.values():
            for prefix, flat in (("", b.master), ("exp_avg.", b.exp_avg), ("exp_avg_sq.", b.exp_avg_sq)):
                found |= {prefix + name: self.slices[name].piece(b.unit.view(flat, name)) for name in b.unit.shapes}
        return found


def predict(run: Run) -> tuple[dict[str, int], list[tuple[str, str, int]]]:
    """Bytes held by term, and the collectives of one step in order as (operation, unit, payload bytes)."""
    m, cfg, tp, dp = run.model_cfg, run.cfg, run.world_size // run.dp, run.dp
    master, compute = run.master_dtype.itemsize, run.dtype.itemsize
    parts = slices(TensorParallelGPT(m, Team(tp, run.rank % tp, None, None)))
    memory, sent = bucket_bytes(run, slice_shapes(parts, m))
    tokens = cfg.micro_batch * m.seq_len
    memory |= {
        "activations": activation_bytes(m, cfg.micro_batch, compute, cfg.recompute, cfg.compile) // tp,
        "gathered inputs": (2 * m.n_layer + 1)
        * tokens
        * m.n_embd
        * compute
        * (tp - 1)
        // tp,  # kept, not gathered again
    }

    halves = (
        [-(-cfg.micro_batch // 2), cfg.micro_batch // 2] if cfg.overlap and cfg.micro_batch > 1 else [cfg.micro_batch]
    )
    names, last = regions(m), 2 * m.n_layer
    reduces = {
        u: [("all_reduce", u, s)] if (run.world_size if u == "norms" else dp) > 1 else [] for u, s in sent.items()
    }
    traffic: list[tuple[str, str, int]] = []
    for micro in range(run.accum):
        sending = cfg.overlap and micro == run.accum - 1
        for k in range(last + 1):
            for B in halves:
                size = B * m.seq_len * m.n_embd * compute
                traffic += [("reduce_scatter", names[k], size), ("all_gather", names[k + 1], size)]
        traffic += [("all_gather", "loss", tp * 2 * B * m.seq_len * master) for B in halves]
        for k in reversed(range(last + 1)):
            for h, B in reversed(list(enumerate(halves))):
                if sending and h == 0 and k % 2 == 0:  # the first half goes last: a bucket is complete
                    traffic += reduces.get("head" if k == last else f"block.{k // 2}", [])
                size = B * m.seq_len * m.n_embd * compute
                traffic += [("reduce_scatter", names[k + 1], size), ("all_gather", names[k], size)]
        if sending:
            traffic += reduces["norms"] + reduces["embed"]
    if not cfg.overlap:
        traffic += [r for unit in reversed(reduces) for r in reduces[unit]]
    return memory, [*traffic, ("all_reduce", "loss, tokens, stop", 24), ("all_gather", "squared norm", 8 * tp)]


# --- the run ----------------------------------------------------------------------------------------------------------


# [same in every train_*.py
@torch.no_grad()
def evaluate(run: Run, model: GPT) -> float:
    """Mean loss over the validation windows, each counted once however many ranks score them."""
    cfg, total = run.cfg, torch.zeros(2, dtype=torch.float64, device=run.device)
    batches = val_batches(
        run.val_tokens,
        seq_len=cfg.seq_len,
        micro_batch=cfg.micro_batch,
        rank=run.place().replica,
        world_size=run.dp,
        limit=cfg.eval_windows,
        vocab_size=cfg.vocab_size,
    )
    for x, y, _ in batches:
        x, y = x.to(run.device), y.to(run.device)
        total += run.counts * torch.stack([model(x, y).double(), (y != IGNORE).sum().double()])
    dist.all_reduce(total, group=run.world)
    return (total[0] / total[1]).item()


# same]


def main(cfg: Config, group: dist.ProcessGroup | None = None) -> list[dict]:
    """Train as cfg says on the ranks of `group` (all, when None); returns the rows of the log."""
    run = start(cfg, __file__, group, tp=cfg.tp, check=check_layout)
    cfg = run.cfg
    memory, traffic = predict(run)
    say(f"gradients travel in {str(run.wire_dtype)[6:]}")
    if cfg.explain:
        return explain(run, memory, traffic)

    team, replicas = make_groups(run)
    run.counts = team.rank == 0  # the loss is the same number on every rank of a team
    model = TensorParallelGPT(run.model_cfg, team, cfg.recompute, cfg.overlap)
    tp = TensorParallel(model, run, replicas)
    model.set_buffers(run.dtype, run.device)
    if cfg.compile:
        model.compile_blocks()

    # [same in every train_*.py
    scaler = LossScaler(cfg)
    saver = Checkpointer(f"{run.out}/ckpt", group=run.control, keep_last=cfg.keep_last)
    first, updates = resume(run, saver, tp, scaler)
    batches = Batches(
        run.tokens,
        seq_len=cfg.seq_len,
        global_batch=cfg.global_batch,
        micro_batch=cfg.micro_batch,
        rank=run.place().replica,
        world_size=run.dp,
        seed=cfg.seed,
        start_step=first,
        steps=cfg.steps,
        workers=cfg.workers,
        device=run.device,
        vocab_size=cfg.vocab_size,
    )
    nominal = cfg.global_batch * cfg.seq_len  # targets of a step if none is masked
    step = stop = 0
    # same]

    with Meter(run, flops_per_token(run.model_cfg)) as meter:
        for step in range(first, cfg.steps):
            facts = torch.zeros(3, dtype=torch.float64, device=run.device)  # loss sum, targets that count, stop
            scale = scaler.scale
            for micro in range(run.accum):
                x, y, sample = batches.next()
                tp.first_micro, tp.last_micro = micro == 0, micro == run.accum - 1
                with at("forward"):
                    keys = dropout_keys(cfg.seed, step, sample) if run.model_cfg.dropout else None
                    loss = model(x, y, keys)  # a sum: what it must be divided by is known once all ranks have counted
                with at("backward"):
                    (loss * (scale / nominal)).backward()  # buckets leave from in here, in the last micro-batch
                facts[:2] += run.counts * torch.stack([loss.detach().double(), (y != IGNORE).sum().double()])
            tp.finish()

            # [same in every train_*.py
            facts[2] = stop_signal()
            with at("all_reduce", "loss, tokens, stop", facts.nbytes):
                dist.all_reduce(facts, group=run.world)
            loss_sum, n_valid, stop = facts.tolist()
            to_mean = nominal / max(n_valid, 1) / scale  # from what backward made to the gradient of the mean loss
            lr = lr_at(updates, cfg)
            # same]

            with at("optimizer"):
                norm = tp.grad_norm() * to_mean
                finite = math.isfinite(norm)
                scaler.update(finite, "" if finite else tp.culprit())
                if finite:  # else all ranks skip: they hold the same norm
                    tp.adamw_step(updates, lr, gradient_factor(norm, cfg.clip) * to_mean)
                    updates += 1

            # [same in every train_*.py
            done = step + 1
            more = {}
            if cfg.eval_every and run.val_tokens and (done % cfg.eval_every == 0 or done == cfg.steps):
                with at("eval"):
                    more["val_loss"] = evaluate(run, model)
            meter.log(
                step, loss_sum / max(n_valid, 1), norm if finite else None, lr, nominal, scale, not finite, **more
            )
            if cfg.save_every and (done % cfg.save_every == 0 or done == cfg.steps or stop):
                saver.save(done, tp.pieces(), progress(run, updates, scaler), rng=rng_state(run))
            if stop:
                break
        saver.wait()
        batches.close()
        meter.summary(memory, traffic)
        say_if_stopped(run, stop, step)
    return meter.rows
    # same]


if __name__ == "__main__":
    run_script(main, predict, Config, __doc__)
