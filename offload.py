"""Masters and moments: beside the weights, or in host memory, where the CPU makes the updates.

Of the 18 bytes that mixed precision keeps per parameter, AdamW alone needs 12, once a step. Moved to host memory they
cost no GPU memory, and 2 + 4 bytes per parameter over PCIe instead: gradients flow out behind backward, all cores of
the CPU run AdamW bucket by bucket, new bf16 weights flow back. The CPU is the slow part. Below ZeRO stage 3 a bucket's
update therefore waits until the next forward pass comes to it (before_use): the GPU computes the first blocks while the
CPU still updates later ones. At stage 3 other ranks fetch this one's shards, so all updates are made first.

Paper: Ren et al., ZeRO-Offload (arXiv 2101.06840).
"""

import weakref

import torch
from torch import Tensor

from buckets import Bucket
from checkpoint import host_memory
from optim import adamw_step
from support.meter import at
from support.run import Run

HOST_TENSORS = 4  # in host memory, per element of a share: master, two moments, gradient
PIECE = 1 << 20  # elements that stay in the CPU's cache from the scaling of the gradient to the rounding of the weights


class OnDevice:
    """Masters and moments lie beside the weights and updates are made at once."""

    def __init__(self, run: Run, strategy, shares: list[int]):
        """strategy: has buckets and publish(bucket), to be called when a bucket's shard has new weights.

        shares: elements of this rank's share of each bucket.
        """
        self.run, self.cfg, self.strategy = run, run.cfg, weakref.proxy(strategy)

    def adopt(self, bucket: Bucket) -> None:
        """A bucket has been built."""

    def gradient_done(self, bucket: Bucket) -> None:
        """The gradient of its share is final, on the current stream."""

    def before_use(self, bucket: Bucket) -> None:
        """A forward pass is about to compute with its weights."""

    def step(self, update: int, lr: float, factor: float) -> bool:
        """AdamW on all shares, with gradients times `factor` -> whether it is made."""
        for bucket in self.strategy.buckets.values():
            bucket.adamw(update, lr, factor, self.cfg)
            self.strategy.publish(bucket)
        return True

    def catch_up(self) -> bool:
        """Make updates that are still due, before a checkpoint and at the end -> whether there were any."""
        return False

    def load(self, bucket: Bucket) -> None:
        """Its masters have been filled: bring the shard up to date."""
        bucket.shard.copy_(bucket.master)


class Offload(OnDevice):
    """Masters and moments lie in host memory, page-locked where there is a GPU."""

    def __init__(self, run: Run, strategy, shares: list[int]):
        super().__init__(run, strategy, shares)
        self.cuda = run.device.type == "cuda"
        self.waits = run.cfg.overlap and strategy.updates_may_wait
        nbytes = HOST_TENSORS * run.master_dtype.itemsize * sum(shares)
        self.host = host_memory(nbytes, self.cuda)  # locked while this lives
        self.free = self.host.view(run.master_dtype)
        self.home_grad: dict[str, Tensor] = {}
        # of buckets whose update is still to be made: step()'s arguments
        self.due: dict[str, tuple[int, float, float]] = {}
        if self.cuda:
            if torch.get_num_threads() > 4:  # an update waits for its slowest thread: others load data, drive the GPU
                torch.set_num_threads(torch.get_num_threads() - 2)
            self.stream = torch.cuda.Stream()
            self.copied: dict[str, torch.cuda.Event] = {}
            # new weights leave through two page-locked buffers in turn: half the bytes of the masters over PCIe
            self.outbox = [torch.empty(max(shares), dtype=run.dtype, pin_memory=True) for _ in range(2)]
            self.sent = [torch.cuda.Event() for _ in range(2)]
            self.turn = 0

    def take(self, like: Tensor) -> Tensor:
        """The next piece of host memory, as long as `like`."""
        piece, self.free = self.free[: like.numel()], self.free[like.numel() :]
        return piece

    def adopt(self, bucket: Bucket) -> None:
        """Move what it keeps to the host at once: the GPU never holds two buckets' masters."""
        master = bucket.master
        bucket.master, bucket.exp_avg, bucket.exp_avg_sq = (self.take(master) for _ in range(3))
        bucket.master.copy_(master)
        self.home_grad[bucket.name] = self.take(master)

    def gradient_done(self, bucket: Bucket) -> None:
        """Send it home, behind whatever backward computes next."""
        home = self.home_grad[bucket.name]
        if not self.cuda:
            home.copy_(bucket.grad_shard)
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            home.copy_(bucket.grad_shard, non_blocking=True)
            self.copied.setdefault(bucket.name, torch.cuda.Event()).record()

    def step(self, update: int, lr: float, factor: float) -> bool:
        """Below stage 3 with overlap only note what to do: before_use() does it when forward reaches the bucket."""
        if self.due:
            raise RuntimeError(f"updates nobody came for: {', '.join(self.due)}; the model must call use()")
        self.due = dict.fromkeys(self.strategy.buckets, (update, lr, factor))
        return not self.waits and self.catch_up()

    def catch_up(self) -> bool:
        due = bool(self.due)
        for bucket in self.strategy.buckets.values():
            self.before_use(bucket)
        return due

    def before_use(self, bucket: Bucket) -> None:
        if bucket.name not in self.due:
            return
        update, lr, factor = self.due.pop(bucket.name)
        with at("optimizer"):
            if self.cuda:
                self.copied[bucket.name].synchronize()
            out = self.next_outbox(bucket)
            for a in range(0, len(bucket.master), PIECE):
                buffers = bucket.master, self.home_grad[bucket.name], bucket.exp_avg, bucket.exp_avg_sq
                master, grad, m, v = (t[a : a + PIECE] for t in buffers)
                if factor != 1:
                    grad.mul_(factor)
                adamw_step(master, grad, m, v, bucket.decay - bucket.first - a, update, lr, self.cfg)
                out[a : a + PIECE].copy_(master)
            self.send(bucket, out)
            self.strategy.publish(bucket)

    def load(self, bucket: Bucket) -> None:
        out = self.next_outbox(bucket)
        out.copy_(bucket.master)
        self.send(bucket, out)

    def next_outbox(self, bucket: Bucket) -> Tensor:
        """Where new weights are made; without a GPU in the shard itself."""
        if not self.cuda:
            return bucket.shard
        self.turn = 1 - self.turn
        self.sent[self.turn].synchronize()  # the bucket before last has left it
        return self.outbox[self.turn][: len(bucket.master)]

    def send(self, bucket: Bucket, out: Tensor) -> None:
        if out is not bucket.shard:
            bucket.shard.copy_(out, non_blocking=True)
            self.sent[self.turn].record()
