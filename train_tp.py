"""Tensor parallel training: each matrix is divided among the ranks, which work on the same batch at the same time.

    torchrun --nproc_per_node=2 train_tp.py                     # --tp 2: all ranks
    torchrun --nproc_per_node=8 train_tp.py --tp 2 --model 6b --micro-batch 8 --global-batch 64 --data DIR  # 4 replicas
    torchrun --nproc_per_node=2 train_tp.py --no-overlap        # whole micro-batches, every collective waited for
    torchrun --nproc_per_node=2 train_tp.py --explain           # memory, collectives and batch arithmetic, then exit

A pair of matrices with something elementwise between them needs no communication inside: A is cut by columns, B by
rows,

    Z = f(X A) B,   A = [A_1 | A_2],   B = [B_1]    =>    X A = [X A_1 | X A_2],   Z = f(X A_1) B_1 + f(X A_2) B_2
                                           [B_2]

and rank r makes only its summand Z_r = f(X A_r) B_r. In attention A is wq, wk, wv and the columns are heads; in SwiGLU
A is w_gate, w_up; B is wo, w_down. X must be whole on each rank, Z is a sum over the ranks. What lies between such
regions (residual, dropout, norm) works on each token by itself, so there every rank keeps T/tp of the tokens: the sum
arrives by reduce_scatter, the next region's X by all_gather. Each is the other's derivative, so backward is the same
picture:

    forward    Z_r --reduce_scatter--> z --> x = x + z, n = norm(x)  --all_gather--> X
    backward  dZ_r <---all_gather----- dz <-- dx = dx + norm'(dn)   <-reduce_scatter- dX

The sequence-parallel paper calls the all_gather g and the reduce_scatter g-bar.

One step:

    for each micro-batch, in two halves A and B that take turns:
        embed rows of the own vocabulary;                                  reduce_scatter, norm, all_gather
        for each attention and each MLP:  A computes while B has its       reduce_scatter, add, norm, all_gather
        logits of the own vocabulary;                                      all_gather(2 numbers per token) -> loss
        backward: the same in reverse, again B beside A;      dp > 1:      all_reduce(bucket of block i) in the last one
    all_reduce(gradients of the norms: every rank saw its tokens only)
    all_reduce(facts);  clip;  AdamW on the own slices

Bytes per parameter and rank: (master 4 + moments 8 + gradient 4 + bf16 weight 2) / tp. Bytes handed to collectives per
block and micro-batch: forward 4 B T C x 2 (bf16), backward the same; each rank sends (tp - 1)/tp of it. Unlike data
parallel's this grows with the batch and comes between the layers, hence the halves; on CPU they take turns too, but
nothing is hidden.

Papers: Shoeybi et al., Megatron-LM (arXiv 1909.08053); Korthikanti et al., sequence parallelism (2205.05198).
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import model as gpt
import train_ddp
from buckets import held_by
from checkpoint import Checkpointer
from data import Batches, evaluate
from model import GPT, IGNORE, Halves, activation_bytes, dropout, dropout_keys, flops_per_token, params, recomputed
from optim import LossScaler, gradient_factor, lr_at
from support.flags import UserError
from support.meter import Meter, at, say
from support.resume import check_replicas, progress, resume, rng_state
from support.run import Run
from support.start import end, explain, run_script, start, stop_asked
from train_ddp import DataParallel, state_bytes
from transport import all_gather_single, all_reduce, reduce_scatter_single


@dataclass
class Config(train_ddp.Config):
    tp: int = 0  # ranks that divide each matrix among them; the rest is data parallel [all ranks]


# --- the ranks --------------------------------------------------------------------------------------------------------


class Team:
    """The `size` ranks that divide each matrix among them, and the stream on which they exchange activations."""

    def __init__(self, run: Run):
        self.size, self.rank = run.tp, run.place().seat
        self.group = run.group("team", lambda p: (p.replica, p.stage))
        # high priority: the few blocks of a collective go in front of the thousands of a matrix product
        beside = run.device.type == "cuda" and run.cfg.overlap
        self.stream = torch.cuda.Stream(run.device, priority=-1) if beside else None  # None: nothing overlaps

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What is called in here runs behind everything queued for compute, but beside what is queued next.

        Memory of this stream is reused only after waiting for compute, so it needs no record_stream. Keep the inputs
        referenced until compute has caught up.
        """
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield

    def event(self) -> torch.cuda.Event | None:
        """When what was called beside so far is done."""
        return None if self.stream is None else self.stream.record_event()

    def catch_up(self, what: str, event: torch.cuda.Event | None = None) -> None:
        """Compute waits for the event, or for everything called beside."""
        if self.stream is not None:
            with at("wait", what):
                torch.cuda.current_stream().wait_event(event or self.event())


def check_layout(run: Run) -> None:
    """Raises UserError, the same on every rank, unless tp divides what is cut. KV heads are never replicated."""
    tp, m = run.tp, run.model_cfg
    cut = {"n_head": m.n_head, "n_kv_head": m.n_kv_head, "n_ff": m.n_ff, "seq_len": m.seq_len}
    cut |= {n: p.shape[p.cut] for n, p in params(m).items() if p.cut is not None and p.unit not in ("embed", "head")}
    for field, n in cut.items():
        if n % tp:
            fit = [str(k) for k in range(1, m.n_kv_head + 1) if all(v % k == 0 for v in cut.values())]
            raise UserError(f"{field}={n} is not divisible by tp={tp}, valid for this model: --tp {', '.join(fit)}")


# --- the idea: the vocabulary -----------------------------------------------------------------------------------------
# Rows of the embedding and of the head are words; each rank has V/tp of them, padded to equal shares of whole 8s.


def own_rows(ids: Tensor, lowest: int, rows: int, vocab_size: int, team: Team) -> tuple[Tensor, Tensor]:
    """Which ids this rank's `rows` rows of the vocabulary hold, and the row of each; any row for those of other ranks.

    An id outside [lowest, vocab_size) gets the row `rows`, which does not exist: whoever indexes with it fails, as one
    process would, instead of taking the zeros that stand for "another rank has it".
    """
    away = ids - team.rank * rows
    own = (away >= 0) & (away < rows)
    return own, torch.where((ids >= lowest) & (ids < vocab_size), away % rows, rows)


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
    """Sum of the cross-entropies over the targets that count; each rank has the logits (B, T, V/tp) of its words.

    log Z = log sum over r of exp(log Z_r): two numbers per token and rank travel instead of V/tp logits. All ranks add
    the same numbers in the same order and get the same bits. Backward writes over the logits, 2 bytes each, not 2 + 4 +
    4.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, y: Tensor, model: "TensorParallelGPT") -> Tensor:
        team, mine = model.team, model.own_stats(logits, y, model.cfg.vocab_size, model.team)
        stats = mine.new_empty(team.size, *mine.shape)  # (tp, 2, B, T)
        with team.beside(), at("all_gather", "loss", stats.nbytes):  # one communicator, one order: the same stream
            all_gather_single(stats.view(-1, *y.shape), mine, group=team.group)
        team.catch_up("loss")
        log_z = stats[:, 0].logsumexp(0)
        ctx.save_for_backward(logits, y, log_z)
        ctx.model = model
        loss = torch.where(y != IGNORE, log_z - stats[:, 1].sum(0), 0).sum()
        return loss if team.rank == 0 else loss * 0  # over all ranks it counts once; backward is the same on each

    @staticmethod
    def backward(ctx, scale: Tensor):
        logits, y, log_z = ctx.saved_tensors
        ctx.model.logits_to_grad(logits, y, log_z, scale, ctx.model.cfg.vocab_size, ctx.model.team)
        return logits, None, None


# --- the idea: between the regions ------------------------------------------------------------------------------------
# A part of the micro-batch has B sequences, each cut into tp pieces of T/tp tokens; rank r keeps pieces r B to
# (r + 1) B - 1 of these B tp, in the order in which they lie in (B, T, C). Any share would do where tokens do not meet;
# with this one the collectives read and write (B, T, C) as it is, without a transposed copy.


def dropout_pieces(x: Tensor, p: float, keys: Tensor | None, layer: Tensor, site: int, rank: int, tp: int) -> Tensor:
    """model.dropout on this rank's pieces (B, T/tp, C), each at its place in its sequence.

    The mask one process would draw.
    """
    if p == 0 or keys is None:
        return x
    B, t, _ = x.shape
    where = [divmod(rank * B + j, tp) for j in range(B)]  # piece -> (sequence, which piece of it)
    return torch.cat([dropout(x[j : j + 1], p, keys[b : b + 1], layer, site, i * t) for j, (b, i) in enumerate(where)])


def all_gather(x: Tensor, team: Team, what: str) -> Tensor:
    """g: (B, T/tp, C) on each rank -> (B, T, C) on all. Its derivative is reduce_scatter."""
    B, t, C = x.shape
    whole = x.new_empty(B, t * team.size, C)
    with at("all_gather", what, whole.nbytes):
        all_gather_single(whole.view(-1, t, C), x.contiguous(), group=team.group)
    return whole


def reduce_scatter(x: Tensor, team: Team, what: str) -> Tensor:
    """g-bar: a summand (B, T, C) on each rank -> its pieces (B, T/tp, C) of the sum. Its derivative is all_gather."""
    B, T, C = x.shape
    pieces = x.new_empty(B, T // team.size, C)
    with at("reduce_scatter", what, x.nbytes):
        reduce_scatter_single(pieces, x.contiguous().view(-1, T // team.size, C), group=team.group)
    return pieces


def add_norm(x: Tensor | None, z: Tensor | None, weight: Tensor | None, eps: float, *drop) -> tuple:
    """x + dropout(z) and its RMSNorm, all (B, T/tp, C).

    x None: no residual yet. z None: nothing to add. weight None: no norm.
    """
    if z is not None:
        z = dropout_pieces(z, *drop)
        x = z if x is None else x + z
    return x, None if weight is None else F.rms_norm(x, weight.shape, weight, eps)


def add_norm_backward(dx: Tensor, dn: Tensor | None, x: Tensor, weight: Tensor | None, eps: float, *drop) -> tuple:
    """Gradients of z, x and weight from those of add_norm's two results; x is its first result, all that must be kept.

    Written out so that it can run on a stream of our choice; dropout is linear, so its derivative is itself.
    """
    dweight = None
    if dn is not None:
        wide = torch.promote_types(x.dtype, torch.float32)
        h, g = x.to(wide), dn.to(wide)
        r = (h.square().mean(-1, keepdim=True) + eps).rsqrt()
        gw = g * weight
        dx = (dx.to(wide) + r * (gw - h * (r.square() * (gw * h).mean(-1, keepdim=True)))).to(x.dtype)
        dweight = (g * h * r).sum((0, 1)).to(weight.dtype)
    return dropout_pieces(dx, *drop), dx, dweight


class Junction:
    """What lies between regions k and k + 1 for one part of the micro-batch, started beside the other part's compute.

    Its front belongs to the region before (reduce_scatter, residual), its back to the one behind (norm, all_gather). A
    pipeline boundary cuts there: the stage before has a junction that is only front, and sends the residual's pieces;
    the stage behind has the same junction as only back.
    """

    def __init__(self, model: "TensorParallelGPT", k: int, keys: Tensor | None, front: bool, back: bool):
        self.model, self.team, (self.before, self.after) = model, model.team, model.regions[k : k + 2]
        self.weight, self.front = model.norms[k].weight if back else None, front
        block, site = divmod(k - 1, 2)  # the half of a block whose output arrives; k = 0: the embedding's
        layer, site = (model.blocks[block].layer, site) if k else (model.embed_layer, 0)
        p = model.cfg.dropout if front else 0.0
        self.drop = (model.norm.eps, p, keys, layer, site, self.team.rank, self.team.size)

    def wait(self) -> None:
        """Compute waits for what was started last."""
        self.team.catch_up(self.after, self.done)
        self.inputs = self.done = None


class Leave(torch.autograd.Function):
    """Forward starts the junction; backward, run after the other part's compute, takes what Enter's has started.

    partial: the region's summand (B, T, C), None where the junction is only back; x: the residual (B, T/tp, C), None
    behind the embedding -> the new residual, and the next region's input (B, T, C), None where it is only front.
    """

    @staticmethod
    def forward(ctx, junction: Junction, partial: Tensor | None, x: Tensor | None, weight: Tensor | None):
        ctx.junction, ctx.first, team = junction, x is None, junction.team
        junction.inputs = partial, x  # compute's allocator must not reuse them while the other stream reads
        with team.beside():
            z = None if partial is None else reduce_scatter(partial, team, junction.before)
            x, n = junction.model.add_norm(x, z, weight, *junction.drop)
            whole = None if n is None else all_gather(n, team, junction.after)
        junction.done = team.event()
        junction.x = x.detach()  # as returned it would hold the graph that holds this object
        return x.view_as(x) if partial is None else x, whole

    @staticmethod
    def backward(ctx, *_):  # ignore these arguments; the real gradients are in junction.grads
        junction = ctx.junction
        junction.wait()
        (dpartial, dx, dweight), junction.grads, junction.x = junction.grads, None, None
        return None, dpartial, None if ctx.first else dx, dweight


class Enter(torch.autograd.Function):
    """Forward waits for the junction; backward starts it the other way round."""

    @staticmethod
    def forward(ctx, junction: Junction, x: Tensor, whole: Tensor | None):
        junction.wait()
        ctx.junction = junction
        return x.view_as(x), None if whole is None else whole.view_as(whole)

    @staticmethod
    def backward(ctx, dx: Tensor, dwhole: Tensor | None):
        junction, team = ctx.junction, ctx.junction.team
        weight = None if junction.weight is None else junction.weight.detach()
        junction.inputs = dx, dwhole
        with team.beside():
            dn = None if dwhole is None else reduce_scatter(dwhole, team, junction.after)
            dz, dx, dweight = junction.model.add_norm_backward(dx, dn, junction.x, weight, *junction.drop)
            junction.grads = all_gather(dz, team, junction.before) if junction.front else None, dx, dweight
        junction.done = team.event()
        return None, dx, dwhole


# --- the idea: the whole ----------------------------------------------------------------------------------------------


def attention_core(block: Halves, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x, normed, (B, T, C) -> this rank's summand. Recomputed from its gathered input: no collective runs twice."""
    return recomputed(block.recompute, block.attention, x, cos, sin)


def mlp_core(block: Halves, x: Tensor) -> Tensor:
    return recomputed(block.recompute, block.mlp, x)


class TensorParallelGPT(GPT):
    """GPT on slices, its attention and MLP unchanged; with `halves`, parts of a micro-batch take turns."""

    block = Halves

    def __init__(self, cfg: gpt.ModelConfig, team: Team, recompute: str = "none", halves: bool = True):
        super().__init__(cfg, recompute)
        self.team, self.n_parts, self.regions = team, 2 if halves else 1, regions(cfg)
        self.norms = [norm for block in self.blocks for norm in (block.attn_norm, block.mlp_norm)] + [self.norm]
        self.attention, self.mlp = attention_core, mlp_core
        self.add_norm, self.add_norm_backward = add_norm, add_norm_backward
        self.own_stats, self.logits_to_grad = own_stats, logits_to_grad

    def compile_blocks(self) -> None:
        """Compile what computes; the collectives stay between, eager."""
        # not with dropout: inductor folds the pieces' positions into the hash's constants, past 64 bits
        pointwise = () if self.cfg.dropout else ("add_norm", "add_norm_backward")
        for name in ("attention", "mlp", "own_stats", "logits_to_grad", *pointwise):
            setattr(self, name, torch.compile(getattr(self, name), fullgraph=True))

    def embed_summand(self, ids: Tensor) -> Tensor:
        """ids (B, T) -> this rank's summand (B, T, C): the embeddings of its own words."""
        table = self.tok_emb.weight  # (V/tp, C)
        own, row = own_rows(ids, 0, len(table), self.cfg.vocab_size, self.team)
        return F.embedding(row, table) * own[..., None]

    def core(self, half: int, whole: Tensor) -> Tensor:
        """Attention (even) or MLP (odd) of block half // 2 on (B, T, C) -> this rank's summand (B, T, C)."""
        block, T = self.blocks[half // 2], whole.shape[1]
        return self.mlp(block, whole) if half % 2 else self.attention(block, whole, self.cos[:T], self.sin[:T])

    def forward_part(
        self, x: Tensor, y: Tensor, keys: Tensor | None = None, part: range | None = None, h: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As GPT's, with this rank's pieces of the residual, (B, T/tp, C), between parts.

        Loss and targets are counted by the team's first rank, so that over all ranks each counts once; backward begins
        on all of them.

        Autograd runs later calls first, so backward takes turns between the parts of the micro-batch as this loop does.
        """
        last = 2 * self.cfg.n_layer
        part = range(last) if part is None else part
        key_parts = [None] * self.n_parts if keys is None else keys.chunk(self.n_parts)

        def junction(p: int, k: int, front: bool = True) -> Junction:
            return Junction(self, k, key_parts[p], front, back=k < part.stop or part.stop == last)

        under_way = []  # of each part, its junction and what that returns
        for p, ids in enumerate(x.chunk(self.n_parts)):
            j = junction(p, part.start, front=part.start == 0)
            if part.start == 0:
                under_way.append((j, *Leave.apply(j, self.embed_summand(ids), None, j.weight)))
            else:  # the front was another stage's
                under_way.append((j, *Leave.apply(j, None, h.chunk(self.n_parts)[p], j.weight)))
        for half in part:
            for p, arriving in enumerate(under_way):
                residual, whole = Enter.apply(*arriving)
                j = junction(p, half + 1)
                under_way[p] = j, *Leave.apply(j, self.core(half, whole), residual, j.weight)
        done = []
        for arriving, targets in zip(under_way, y.chunk(self.n_parts)):
            residual, whole = Enter.apply(*arriving)
            loss = whole is not None
            done.append(VocabParallelCrossEntropy.apply(self.head(whole), targets, self) if loss else residual)
        targets = (y != IGNORE).sum() * (self.team.rank == 0)
        return torch.stack(done).sum() if part.stop == last else torch.cat(done), targets

    forward = forward_part


def build_model(run: Run) -> GPT:
    """Where nobody shares the matrices the plain model, whose blocks are compiled whole."""
    if run.tp == 1:
        return GPT(run.model_cfg, run.cfg.recompute)
    return TensorParallelGPT(run.model_cfg, Team(run), run.cfg.recompute, run.cfg.overlap)


def regions(cfg: gpt.ModelConfig) -> list[str]:
    """Names of the parallel regions in order; between two neighbours lies a junction."""
    return ["embed", *(f"block.{i} {half}" for i in range(cfg.n_layer) for half in ("attention", "mlp")), "head"]


# --- what it costs ----------------------------------------------------------------------------------------------------


def part_sizes(run: Run) -> list[int]:
    """Sequences in each part of a micro-batch."""
    B = run.cfg.micro_batch
    return [-(-B // 2), B // 2] if run.cfg.overlap and B > 1 else [B]


def part_traffic(run: Run, part: range) -> tuple[list[tuple[str, str, int]], list[list[tuple[str, str, int]]]]:
    """What the team's collectives carry when a part of the model goes forward, and backward, there by junction."""
    m, last, names = run.model_cfg, 2 * run.model_cfg.n_layer, regions(run.model_cfg)
    token = m.seq_len * m.n_embd * run.dtype.itemsize
    forward, backward = [], []
    for k in range(part.start, part.stop + 1) if run.tp > 1 else ():
        front, back = k > part.start or k == 0, k < part.stop or k == last
        for B in part_sizes(run):
            forward += [("reduce_scatter", names[k], B * token)] * front
            forward += [("all_gather", names[k + 1], B * token)] * back
        for B in part_sizes(run):  # backward begins with the last part
            there = [("reduce_scatter", names[k + 1], B * token)] * back + [("all_gather", names[k], B * token)] * front
            backward.insert(0, there)
    if part.stop == last and run.tp > 1:  # two numbers per token
        stats = run.tp * 2 * m.seq_len * run.master_dtype.itemsize
        forward += [("all_gather", "loss", B * stats) for B in part_sizes(run)]
    return forward, backward


def predict(run: Run) -> tuple[dict[str, int], list[tuple[str, str, int]]]:
    """Bytes held by term, and the collectives of one step in order as (operation, unit, payload bytes)."""
    if run.tp == 1:
        return train_ddp.predict(run)
    m, cfg, compute, last = run.model_cfg, run.cfg, run.dtype.itemsize, 2 * run.model_cfg.n_layer
    memory, sums = state_bytes(run, held_by(run))
    kept = activation_bytes(m, cfg.micro_batch, compute, cfg.recompute, cfg.compile)
    gathered = (last + 1) * cfg.micro_batch * m.seq_len * m.n_embd * compute  # kept, not gathered again
    memory |= {"activations": kept // run.tp, "gathered inputs": gathered * (run.tp - 1) // run.tp}

    forward, backward = part_traffic(run, range(last))
    n, traffic = len(part_sizes(run)), (forward + sum(backward, [])) * (run.accum - 1) + forward
    unsent = {unit: ("all_reduce", unit, size) for _, unit, size in sums}  # in the order of backward
    for i, there in enumerate(backward):  # of the last micro-batch: a bucket leaves when its block is through
        k, first_part = last - i // n, i % n == n - 1
        unit = "head" if k == last else f"block.{k // 2}" if k % 2 == 0 else None
        if cfg.overlap and first_part and unit in unsent:
            traffic.append(unsent.pop(unit))
        traffic += there
    return memory, [*traffic, *unsent.values(), ("all_reduce", "facts", 40)]


# --- the run ----------------------------------------------------------------------------------------------------------


def main(cfg: Config, group: dist.ProcessGroup | None = None) -> list[dict]:
    """Train as cfg says on the ranks of `group` (all, when None); returns the rows of the log."""
    run = start(cfg, __file__, group, tp=cfg.tp, check=check_layout)
    cfg = run.cfg
    memory, traffic = predict(run)
    say(f"gradients travel in {str(run.wire_dtype)[6:]}")
    if cfg.explain:
        return explain(run, memory, traffic)

    model = build_model(run)
    strategy = DataParallel(model, run, held_by(run))
    model.set_buffers(run.dtype, run.device)
    if cfg.compile:
        model.compile_blocks()

    scaler = LossScaler(cfg)
    saver = Checkpointer(f"{run.out}/ckpt", group=run.control, keep_last=cfg.keep_last)
    first, updates = resume(run, saver, strategy, scaler)
    batches = Batches(run, first)
    nominal = cfg.global_batch * cfg.seq_len  # targets of a step if none is masked
    step = stop = 0

    with Meter(run, flops_per_token(run.model_cfg), first) as meter:
        for step in range(first, cfg.steps):
            facts = torch.zeros(5, dtype=torch.float64, device=run.device)
            scale = scaler.scale
            for _ in range(run.accum):
                x, y, sample = batches.next()
                keys = dropout_keys(cfg.seed, step, sample) if run.model_cfg.dropout else None
                with at("forward"):
                    loss, targets = strategy(x, y, keys)  # sums: divided once all ranks have counted
                with at("backward"):
                    (loss * (scale / nominal)).backward()  # buckets leave from in here, in the last micro-batch
                facts[:2] += torch.stack([loss.detach().double(), targets.double()])

            facts[2], facts[3], facts[4] = stop_asked(run), batches.proof(), strategy.finish()
            all_reduce(facts, run.world, "facts")
            with at("wait", "facts"):
                loss_sum, n_valid, stop, samples, square = facts.tolist()
            samples = batches.check(step, samples)  # the data proves itself, or the run ends here
            to_mean = nominal / max(n_valid, 1) / scale  # what backward left, times this, is the mean loss's gradient
            norm, lr = math.sqrt(square) * to_mean, lr_at(updates, cfg)
            finite = math.isfinite(norm)
            with at("optimizer"):
                scaler.update(finite, "" if finite else strategy.culprit())
                if finite:  # else all ranks skip: they hold the same norm
                    strategy.adamw_step(updates, lr, gradient_factor(norm, cfg.clip) * to_mean)
                    updates += 1

            done, more = step + 1, {"samples": samples}
            if run.val_tokens and not stop and (done % cfg.eval_every == 0 or done == cfg.steps):
                with at("eval"):
                    more["val_loss"] = evaluate(run, strategy)
            meter.log(
                step, loss_sum / max(n_valid, 1), norm if finite else None, lr, nominal, scale, not finite, **more
            )
            if cfg.save_every and (done % cfg.save_every == 0 or done == cfg.steps or stop):
                check_replicas(run, strategy)
                saver.save(done, strategy.pieces(), progress(run, updates, scaler), rng=rng_state(run), rotate=finite)
            if stop:
                break
        strategy.catch_up()
        saver.close()
        batches.close()
        meter.summary(memory, traffic)
        end(run, stop, step)
    return meter.rows


if __name__ == "__main__":
    run_script(main, predict, Config, __doc__)
