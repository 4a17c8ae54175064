"""Context parallel training: one long sequence over several ranks, which pass keys and values round; ZeRO for the rest.

    torchrun --nproc_per_node=2 train_cp.py --model 6b --seq-len 32768 --global-batch 4 --micro-batch 1 --data DIR
    torchrun --nproc_per_node=8 train_cp.py --cp 4         # 4 ranks share a sequence, twice
    torchrun --nproc_per_node=2 train_cp.py --explain      # memory, collectives and batch arithmetic, then exit

Everything in a transformer but attention works on each token by itself. So each of N ranks keeps T/N tokens of a
sequence, and only keys and values travel (with grouped heads they are small). A rank attends to one part of them after
the other and merges what it gets. That is exact: besides its output out_i a part gives for each query one number, the
logarithm lse_i of the sum of its exponentials, and from these the whole softmax follows,

    lse = log(sum_i exp(lse_i)),    out = sum_i exp(lse_i - lse) out_i

Backward needs no more of the other parts: exp(q k - lse) is the whole softmax's weight of this key whoever else was in
the sum, and the correction by the row sum of grad_out * out is the whole row's. So a part's gradient is computed from
the common out and lse and that part's keys alone.

Causal attention would leave the first rank idle: the last tokens have the most to look at. So rank r takes the r-th of
2 N pieces from either end (N = 3; x: needed, d: up to the diagonal):

    keys of rank     0 1 2 2 1 0
    rank 0 queries   d                   In turn s each rank meets the keys of the one s places before it. If that is
    rank 1           x d                 an earlier rank, all queries need its first piece and none the second; if a
    rank 2           x x d               later one, the second piece of queries needs both. Half a square either way:
    rank 2           x x x d             a turn costs all ranks the same, and nothing is computed to be masked.
    rank 1           x x x x d
    rank 0           x x x x x d

One step:

    for each micro-batch, in each block:
        forward    for s = 1 .. N-1:  send(keys and values to rank r+s)         while attention to those of r-s+1 runs
        backward   the same again; and after each turn  send(their gradients back home), added in the order of the turns
    exchange, all_gather of gradients and weights over all ranks: train_zero.py's, for which the ranks of a ring are
    replicas that saw other tokens;  all_reduce(facts);  clip;  AdamW on the share

Bytes per block, micro-batch and rank: 3 (N-1) S, S being keys and values of the own tokens: B T/N x 2 KV heads x head
size x 2 in bf16, 4,096 per token for 6b; attention hides them from about 1,500 tokens per rank on (estimate). Full
recomputation sends keys once more. Direct sends, not a relay: the same bytes, and gradients come home in one hop. GPUs
of one host move them by their copy engines (transport.py).

Papers: Liu et al., Ring Attention (arXiv 2310.01889); Dao, FlashAttention-2 (2307.08691). Zigzag:
github.com/zhuzilin/ring-flash-attention.
"""

import dataclasses
import math
import weakref
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

import model as gpt
import train_zero
from checkpoint import Checkpointer
from data import Batches, evaluate
from model import GPT, Block, dropout_keys, flops_per_token, fused_parts
from optim import LossScaler, gradient_factor, lr_at
from support.flags import UserError
from support.meter import Meter, at, say
from support.resume import check_replicas, progress, resume, rng_state
from support.run import Run
from support.start import end, explain, run_script, start, stop_asked
from train_zero import Zero1, Zero2, Zero3
from transport import PeerSwaps, Swaps, all_reduce


@dataclass
class Config(train_zero.Config):
    stage: Literal[1, 2, 3] = 3  # ZeRO, over all ranks: 1: optimizer state shared out, 2: and gradients, 3: and weights
    cp: int = 0  # ranks that share a sequence; the rest is data parallel [all]
    copy_engine: bool | None = (
        None  # for keys and values, and at stage 2 and 3 for ZeRO's [if all GPUs are on one host]
    )


# --- the idea: attention to a part of the keys ------------------------------------------------------------------------


def plain(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """q (B, H, t, hd), k and v (B, KV, u, hd) -> out (B, H, t, hd) and lse (B, H, t). Exact; needs all t x u scores."""
    scores = _scores(q, k, causal)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp() @ _widen(v, q), lse


def plain_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool):
    """Gradients of q, k, v; grad, out and lse are the whole softmax's, of which k and v may be a part."""
    weights = (_scores(q, k, causal) - lse[..., None]).exp()
    towards = grad @ _widen(v, q).mT - (grad * out).sum(-1, keepdim=True)
    of_scores = weights * towards / math.sqrt(q.shape[-1])
    narrow = (*k.shape[:2], -1, *k.shape[2:])  # query heads of one key head lie side by side
    grad_k, grad_v = ((w.mT @ x).view(narrow).sum(2) for w, x in ((of_scores, q), (weights, grad)))
    return of_scores @ _widen(k, q), grad_k, grad_v


def _widen(k: Tensor, q: Tensor) -> Tensor:
    return k.repeat_interleave(q.shape[1] // k.shape[1], 1)


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    scores = q @ _widen(k, q).mT / math.sqrt(q.shape[-1])
    return scores + torch.full_like(scores[0, 0], -math.inf).triu(1) if causal else scores


# --- the idea: the ring -----------------------------------------------------------------------------------------------


class Ring:
    """Causal attention of the own tokens to all tokens of the sequence, over the ranks that share it.

    q (B, H, t, hd), k and v (B, KV, t, hd) are the own two pieces, one behind the other.
    """

    def __init__(self, run: Run):
        self.group = run.group("ring", lambda place: place[:2])
        self.n, self.rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        engine = run.copy_engine and self.n > 1
        self.swap = PeerSwaps(self.group, run, n_keys_and_values(run), run.dtype) if engine else Swaps(self.group)
        fused = fused_parts(run.device, run.dtype, run.cfg.deterministic)
        self.forward_part, self.backward_part = fused or (plain, plain_backward)

    def turns(self, k: Tensor, v: Tensor):
        """For s = 0 .. N-1: s, the keys and values of the rank s before, which of the own queries and of these take
        part, whether causally. The next turn's are under way meanwhile."""
        mine, half = torch.stack([k, v]), k.shape[2] // 2
        everything, first, second = slice(None), slice(half), slice(half, None)
        coming = self.swap(mine, 1, "keys and values") if self.n > 1 else None
        yield 0, mine, everything, everything
        for s in range(1, self.n):
            theirs = coming()
            coming = self.swap(mine, s + 1, "keys and values") if s + 1 < self.n else None
            earlier = s <= self.rank
            yield s, theirs, everything if earlier else second, first if earlier else everything

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """-> out (B, H, t, hd), and lse (B, H, t), both of the whole softmax."""
        out, lse = (torch.empty_like(x, dtype=torch.promote_types(q.dtype, torch.float32)) for x in (q, q[..., 0]))
        for s, theirs, rows, columns in self.turns(k, v):
            part, part_lse = self.forward_part(q[:, :, rows], *theirs[..., columns, :], s == 0)
            if s == 0:
                out[:], lse[:] = part, part_lse
                continue
            merged = torch.logaddexp(lse[:, :, rows], part_lse)
            old, new = (lse[:, :, rows] - merged).exp()[..., None], (part_lse - merged).exp()[..., None]
            out[:, :, rows].mul_(old).addcmul_(part, new)  # in place: these passes over memory are what merging costs
            lse[:, :, rows] = merged
        return out.to(q.dtype), lse

    def attend_backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor):
        """-> gradients of q, k, v. Those of other ranks' keys go home and are added there in the order of the turns."""
        grad_q, home = torch.empty_like(q, dtype=torch.promote_types(q.dtype, torch.float32)), []
        for s, theirs, rows, columns in self.turns(k, v):
            ours = (t[:, :, rows].contiguous() for t in (out, lse))  # an lse that is a view is read wrongly
            dq, *dkv = self.backward_part(grad[:, :, rows], q[:, :, rows], *theirs[..., columns, :], *ours, s == 0)
            if s == 0:
                grad_q[:], grad_kv = dq, torch.stack(dkv).to(grad_q.dtype)
                continue
            grad_q[:, :, rows] += dq
            full = torch.zeros_like(theirs)
            full[..., columns, :] = torch.stack(dkv)
            home.append((full, self.swap(full, -s, "their gradients")))
        for _, arrived in home:  # full is kept until it has been sent
            grad_kv += arrived()
        grad_k, grad_v = grad_kv.to(q.dtype)
        return grad_q.to(q.dtype), grad_k.clone(), grad_v.clone()  # an operator's outputs may not alias


# One opaque operator: a block that is compiled holds the ring as one step, and selective recomputation can keep it. It
# takes tensors and numbers, so the ring is named by the number of its run.
rings: weakref.WeakValueDictionary[int, Ring] = weakref.WeakValueDictionary()


@torch.library.custom_op("nanoshard::ring_attention", mutates_args=())
def ring_attention(q: Tensor, k: Tensor, v: Tensor, ring: int) -> tuple[Tensor, Tensor]:
    return rings[ring].attend(q, k, v)


@torch.library.custom_op("nanoshard::ring_attention_backward", mutates_args=())
def ring_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ring: int
) -> tuple[Tensor, Tensor, Tensor]:
    return rings[ring].attend_backward(grad, q, k, v, out, lse)


def keep(ctx, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.ring = inputs
    ctx.save_for_backward(*tensors, *output)


def back(ctx, grad: Tensor, grad_lse: Tensor) -> tuple:
    return *ring_attention_backward(grad.contiguous(), *ctx.saved_tensors, ctx.ring), None


def shapes(q: Tensor, k: Tensor, v: Tensor, ring: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


ring_attention.register_fake(shapes)
ring_attention.register_autograd(back, setup_context=keep)
ring_attention_backward.register_fake(lambda grad, q, k, v, *rest: tuple(map(torch.empty_like, (q, k, v))))
gpt.SAVED.append(torch.ops.nanoshard.ring_attention.default)  # selective recomputation sends no keys again


# --- the model on its part of the sequence ----------------------------------------------------------------------------


def own_positions(T: int, cp: int, seat: int) -> Tensor:
    """Which tokens of a sequence of T this rank has: the seat-th piece from either end of 2 cp. (T/cp,) int64."""
    pieces = torch.arange(T).tensor_split(2 * cp)  # alone a rank has all, also of an odd length
    return torch.cat([pieces[seat], pieces[2 * cp - 1 - seat]])


class RingBlock(Block):
    """A block on the own tokens: attention by the ring, dropout's hash at their positions in the sequence."""

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring_attention(q.contiguous(), k.contiguous(), v.contiguous(), self.ring)[0]


class ContextParallelGPT(GPT):
    """GPT on this rank's tokens of each sequence; its loss and its targets are theirs alone."""

    block = RingBlock

    def __init__(self, run: Run):
        super().__init__(run.model_cfg, run.cfg.recompute)
        self.run, self.ring = run, Ring(run)
        rings[run.number] = self.ring

    def set_buffers(self, dtype: torch.dtype, device: torch.device) -> None:
        super().set_buffers(dtype, device)
        self.positions = own_positions(self.cfg.seq_len, self.run.cp, self.run.place().seat).to(device)
        self.cos, self.sin = self.cos[self.positions], self.sin[self.positions]
        for block in self.blocks:
            block.positions, block.ring = self.positions, self.run.number

    def forward(self, x: Tensor, y: Tensor, keys: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x, y (B, T), the whole sequences, of which this rank takes its part -> its summed loss, its targets."""
        return self.forward_part(x[:, self.positions], y[:, self.positions], keys)


# --- what it costs ----------------------------------------------------------------------------------------------------


def n_keys_and_values(run: Run) -> int:
    """Elements that a rank sends at once: keys and values of its tokens of a micro-batch, in one block."""
    m = run.model_cfg
    return 2 * run.cfg.micro_batch * m.seq_len // run.cp * m.n_kv_head * m.head_dim


def predict(run: Run) -> tuple[dict[str, int], list[tuple[str, str, int]]]:
    """Bytes held by term, and the collectives of one step as (operation, unit, payload bytes)."""
    m, cfg, own = run.model_cfg, run.cfg, run.model_cfg.seq_len // run.cp
    memory, traffic = train_zero.predict(dataclasses.replace(run, model_cfg=dataclasses.replace(m, seq_len=own)))
    S = n_keys_and_values(run) * run.dtype.itemsize
    # in backward's last turn; by copy engines they lie in two places more
    memory["keys and values on their way"] = (2 * run.cp + 1 + 2 * run.copy_engine) * S if run.cp > 1 else S
    memory["attention's sums"] = 2 * cfg.micro_batch * own * m.n_embd * run.master_dtype.itemsize
    times = (run.cp - 1) * m.n_layer * run.accum
    keys = ("send", "keys and values", S)
    return memory, [keys] * times * (2 + (cfg.recompute == "full")) + [("send", "their gradients", S)] * times + traffic


# --- the run ----------------------------------------------------------------------------------------------------------


def check_length(run: Run) -> None:
    """Raises UserError for a sequence that the ranks cannot share."""
    T, pieces = run.model_cfg.seq_len, 2 * run.cp if run.cp > 1 else 1
    if T % pieces:
        near = " or ".join(str(n) for n in (T // pieces * pieces, -(-T // pieces) * pieces) if n)
        raise UserError(
            f"--seq-len {T} does not divide into 2 x {run.cp} pieces (--cp {run.cp}); nearest that do: {near}"
        )


def check(run: Run) -> None:
    """Raises UserError, before anything is built."""
    check_length(run)
    if run.cfg.deepspeed:
        raise UserError("--deepspeed: a DeepSpeed file describes what train_zero.py does, not context parallelism")
    train_zero.check(run)


def main(cfg: Config, group: dist.ProcessGroup | None = None) -> list[dict]:
    """Train as cfg says on the ranks of `group` (all, when None); returns the rows of the log."""
    run = start(cfg, __file__, group, cp=cfg.cp, check=check)
    cfg = run.cfg
    memory, traffic = predict(run)
    say(f"{run.cp} ranks share a sequence, {run.model_cfg.seq_len // run.cp} tokens each; {run.dp} such rings")
    if cfg.explain:
        return explain(run, memory, traffic)

    model = ContextParallelGPT(run)
    strategy = {1: Zero1, 2: Zero2, 3: Zero3}[cfg.stage](model, run, offload=cfg.offload != "none")
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
                    (loss * (scale / nominal)).backward()  # gradients leave from in here, at stage 2 and 3 each time
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
