"""Token files -> batches: which sample is in which step, who reads it, and the proof that it was read.

    python data.py prepare --out corpus/ --tokenizer gpt2 --val 0.005 book.txt folder/     # make token files
    python data.py show corpus/ --step 412 --world 8 [--text]                              # what did the ranks see?
    python data.py show corpus/ --rate 1b --world 8 --seq-len 2048          # is one loader worker as fast as its card?

The lesson: samplers that draw at random per rank need seeds, state, padding and luck. Here the samples of step k are a
function of (seed, k) alone, the ranks only split them. Overlap cannot happen and there is no sampler state to save.
What a function says can be checked: each rank sums a hash of the windows it has read, the sums of all ranks are added
with the loss, and every rank knows what must come out. A worker that repeats a batch, a resume that is off by one, a
rank that reads its neighbour's share end the run in that very step.

Read are folders that `prepare` has made (support/prepare.py), and nanoGPT's train.bin and llm.c's .bin files as they
stand (support/tokens.py).
"""

import argparse
import atexit
import dataclasses
import math
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from model import flops_per_token, load_config
from support.flags import Config, UserError, accumulation, run_cli
from support.meter import BF16_PEAK, at
from support.run import Run
from support.tokens import open_tokens

BUSY = 0.6  # of a card's peak: a little more than the best of docs/results has reached

# --- the order of the samples -----------------------------------------------------------------------------------------


def mix(v: np.ndarray) -> np.ndarray:
    """splitmix64's finalizer, uint64: every bit of the result depends on every bit of v."""
    v = (v ^ (v >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    v = (v ^ (v >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return v ^ (v >> np.uint64(31))


def stream_windows(seed: int, start: int, count: int, n_windows: int) -> np.ndarray:
    """Stream positions [start, start + count) -> corpus windows, int64 (count,).

    The stream is one permutation of all windows after another, a new one each epoch. A permutation is a Feistel network
    over the next even power of two, walked along its cycle until it falls below n_windows (Black & Rogaway, "Ciphers
    with arbitrary finite domains", 2002): any position in O(1), no memory, where a shuffled index costs 8 bytes a
    window on every rank and must be made anew each epoch.
    """
    s = np.arange(start, start + count, dtype=np.uint64)
    epoch, i = s // np.uint64(n_windows), s % np.uint64(n_windows)
    half = np.uint64(max(3, ((n_windows - 1).bit_length() + 1) // 2))  # bits of each half of the network
    low = (np.uint64(1) << half) - np.uint64(1)

    key = mix(mix(np.full(count, seed % (1 << 64), np.uint64)) + epoch)
    walking = np.arange(count)
    while len(walking):
        left, right = i[walking] >> half, i[walking] & low
        for r in range(1, 7):
            noise = mix(key[walking] + right + np.uint64(r * 0x9E3779B97F4A7C15 % (1 << 64)))
            left, right = right, left ^ (noise & low)
        i[walking] = left << half | right
        walking = walking[i[walking] >= n_windows]
    return i.astype(np.int64)


def hash_sum(windows: np.ndarray) -> int:
    """Sum of a 32-bit hash of each window's number, modulo 2^32: 2 million ranks' sums still add up in float64."""
    v = windows.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)  # mix(0) is 0: window 0 would not count
    return int((mix(v) >> np.uint64(32)).sum()) % (1 << 32)


# --- what a rank reads ------------------------------------------------------------------------------------------------


class Batches:
    """The micro-batches of one rank of `run`, from the first of first_step up to step cfg.steps, which is not included.

    Ranks of the same replica read the same. The position is the step number: workers read ahead, but nothing they do is
    counted.
    """

    def __init__(self, run: Run, first_step: int):
        self.run, cfg = run, run.cfg
        self.accum = accumulation(cfg.global_batch, cfg.micro_batch, run.dp)
        self.n_windows = run.tokens.n_windows(cfg.seq_len)
        self.read = self.proved = 0  # hash sums of what was handed out since the last proof(), and before it
        loader = torch.utils.data.DataLoader(
            self,
            batch_size=None,
            sampler=range(first_step * self.accum, cfg.steps * self.accum),
            num_workers=cfg.workers,
            pin_memory=run.device.type == "cuda",
            timeout=max(1, cfg.hang_timeout * 4 // 5) if cfg.workers else 0,  # the watchdog knows less of it
            multiprocessing_context="fork" if cfg.workers else None,
        )
        # Workers inherit this mask for life: torchrun and Ctrl-C signal the whole process group, and the rank still
        # needs its batches to finish the step and save.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
        self.workers = []
        try:
            self.iterator = iter(loader)
        except OSError as error:
            raise self.no_batch("loader workers could not be started", error) from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        self.workers = self.iterator._workers if cfg.workers else []
        if cfg.workers:
            # the loader's SIGCHLD handler would raise in whatever line a dying worker interrupts; without it the death
            # is found where data is waited for, within 5 s
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        atexit.register(self.close)  # deaf to SIGTERM, they would keep an interpreter waiting that exits on an error

    def __getitem__(self, i: int) -> Tensor | str:
        """Runs in the worker: the i-th micro-batch of this rank since step 0; or what is wrong with it.

        x, y, sample and hash sum as one flat tensor: each tensor a worker hands over costs a connection, each transfer
        a call.
        """
        cfg, (step, micro) = self.run.cfg, divmod(i, self.accum)
        first = self.run.samples_before(step)  # replica r reads the r-th of the equal shares of a step
        first += (self.run.place().replica * self.accum + micro) * cfg.micro_batch
        try:
            windows = stream_windows(cfg.seed, first, cfg.micro_batch, self.n_windows)
            x, y = self.run.tokens.batch(windows, cfg.seq_len, cfg.vocab_size)
        except UserError as error:
            return str(error)  # raised in a worker it would come back wrapped in a traceback
        sample = torch.arange(first, first + cfg.micro_batch)
        return torch.cat([x.flatten(), y.flatten(), sample, torch.tensor([hash_sum(windows)])])

    def next(self) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, T), y (B, T) with -1 = no target, sample (B,) stream positions; int64 on the device."""
        with at("data"):
            try:
                batch = next(self.iterator)
            except (RuntimeError, OSError, EOFError) as error:  # OSError, EOFError: it died while handing a tensor over
                for worker in self.workers:
                    worker.join(0.5)  # the dead one may not be buried yet
                if not self.workers:
                    raise
                dead = [worker.pid for worker in self.workers if not worker.is_alive()]
                what = f"loader worker with pid {dead} died" if dead else "no batch came from the loader's workers"
                raise self.no_batch(what, error) from None
            if isinstance(batch, str):
                raise UserError(batch)
            self.read += int(batch[-1])  # before it leaves the host: no wait for the device
            # pinned and non_blocking: the host does not wait, 16 bytes per token take microseconds of the stream
            B, T, flat = self.run.cfg.micro_batch, self.run.cfg.seq_len, batch.to(self.run.device, non_blocking=True)
            x, y = flat[: 2 * B * T].view(2, B, T)
            return x, y, flat[2 * B * T : -1]

    def no_batch(self, what: str, error: Exception) -> UserError:
        """What is wrong with the workers, and the usual cause: in a container /dev/shm may be tiny."""
        free = f"/dev/shm, which they hand batches over in, has {shutil.disk_usage('/dev/shm').free} bytes free"
        reason = (str(error).strip() or repr(error)).splitlines()[-1]  # EOFError says nothing
        return UserError(f"rank {self.run.rank}: {what} ({reason}); {free}; --workers 0 loads without them")

    def proof(self) -> int:
        """Hash sum, modulo 2^32, of the windows that next() has handed out since the last call."""
        self.proved, self.read = self.read % (1 << 32), 0
        return self.proved

    def check(self, step: int, total: float) -> int:
        """Compare the sum of all ranks' proof() with what step `step` must give.

        Returns the hash sum of the step's batch, which is the same under every layout. If total is not that times the
        ranks that read each sample, which all ranks see alike, they tell their own sums: UserError names who misread.
        """
        run, cfg = self.run, self.run.cfg

        def right_sum(first: int, count: int) -> int:
            return hash_sum(stream_windows(cfg.seed, run.samples_before(step) + first, count, self.n_windows))

        batch = right_sum(0, cfg.global_batch)
        found, right = int(total) % (1 << 32), batch * run.pp * run.tp * run.cp % (1 << 32)
        if found != right:
            names = ("global_batch", "micro_batch", "seq_len", "seed")
            flags = " ".join(f"--{name.replace('_', '-')} {getattr(cfg, name)}" for name in names)
            flags += f" --offset {run.samples_before(0)}" * (run.samples_before(0) != 0)
            show = f"python data.py show {shlex.quote(cfg.data)} --step {step} --world {run.dp} {flags}"
            share = cfg.global_batch // run.dp
            rights = [right_sum(run.place(rank).replica * share, share) for rank in range(run.world_size)]
            wrong = [rank for rank, read in enumerate(run.everyone(self.proved)) if read != rights[rank]]
            what = f"ranks {wrong} did not read their windows" if wrong else "all read theirs, but their sum went wrong"
            raise UserError(f"step {step}: {what}: the hashes sum to {found}, not {right}; who reads what: {show}")
        return batch

    def close(self) -> None:
        """End the workers."""
        atexit.unregister(self.close)
        if self.workers:
            self.iterator._shutdown_workers()
            for worker in self.workers:
                worker.kill()  # deaf to SIGTERM, one that is stuck would be waited for at exit, for ever


# --- validation -------------------------------------------------------------------------------------------------------


def val_batches(run: Run) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The first cfg.eval_windows validation windows (0: all) in order, each once over all replicas.

    x (B, T) and y (B, T) on the device, window (B,) on the CPU, int64. Every rank yields the same number of batches.
    Rows that fill the last ones up have no target (-1) and window -1. Read in this process: loader workers in
    evaluation cost BLOOM three hangs, and save milliseconds.
    """
    cfg, (replica, _, _) = run.cfg, run.place()
    n = run.val_tokens.n_windows(cfg.seq_len)
    n = min(n, cfg.eval_windows or n)
    stride = cfg.micro_batch * run.dp
    for first in range(replica * cfg.micro_batch, -(-n // stride) * stride, stride):
        windows = np.arange(first, first + cfg.micro_batch)
        filler = torch.from_numpy(windows >= n)
        x, y = run.val_tokens.batch(np.minimum(windows, n - 1), cfg.seq_len, cfg.vocab_size)
        y[filler] = -1
        yield x.to(run.device), y.to(run.device), torch.from_numpy(windows).masked_fill(filler, -1)


@torch.no_grad()
def evaluate(run: Run, strategy: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> float:
    """Mean loss over the validation windows, each counted once however many ranks score them. Collective over the run.

    strategy(x, y) returns two scalar tensors, the summed loss and the number of targets it stands for: summed over all
    ranks of the run they must be the whole batch's. A rank that stands for none returns zeros.
    """
    total = torch.zeros(2, dtype=torch.float64, device=run.device)
    for x, y, _ in val_batches(run):
        loss, targets = strategy(x, y)
        total += torch.stack([loss.double(), targets.double()])
    with at("all_reduce", "validation loss", total.nbytes):
        dist.all_reduce(total, group=run.world)
    return (total[0] / total[1]).item()


# --- command line -----------------------------------------------------------------------------------------------------


def show(path: str, step: int, world: int, offset: int, text: bool, rate: str | None, **flags: int) -> None:
    """Print which windows the loader of each data-parallel rank reads in a step, and check them.

    offset: samples by which the stream is ahead of step x global_batch, in a run whose batch was another before.
    text: what is written there, too. rate: a model; nothing of the above, but see print_rate().
    """
    if step < 0 or world < 1:
        raise UserError(f"--step {step}, --world {world}: allowed is 0 or more, 1 or more")
    if (begin := step * flags["global_batch"] + offset) < 0:
        raise UserError(f"--offset {offset}: step {step} begins at sample {begin}, allowed is 0 or more")
    cfg = Config(data=path, steps=step + 1, workers=0, vocab_size=1 << 32, **flags)
    tokens, samples = open_tokens(path), []
    if rate:
        return print_rate(Run(cfg, 0, world, torch.device("cpu"), tokens=tokens), rate)
    if text:
        from support.prepare import load_tokenizer

        encoding = load_tokenizer(tokens.tokenizer)
    for rank in range(world):
        run = Run(cfg, rank, world, torch.device("cpu"), tokens=tokens, consumed=offset)
        loader = Batches(run, step)
        x, _, mine = (torch.cat(parts) for parts in zip(*(loader.next() for _ in range(loader.accum))))
        windows = stream_windows(cfg.seed, int(mine[0]), len(mine), loader.n_windows)
        samples += mine.tolist()
        if loader.proof() != hash_sum(windows):
            raise UserError(f"rank {rank} did not read the windows {' '.join(map(str, windows))}")
        print(f"rank {rank}: samples {mine[0]}-{mine[-1]}, windows {' '.join(map(str, windows))}")
        for w, ids in zip(windows, x) if text else ():
            shard, position = tokens.locate(int(w) * cfg.seq_len)
            print(f"--- window {w}: {shard.path}, token {position}\n{encoding.decode(ids.tolist())}")
    first, last = run.samples_before(step), run.samples_before(step + 1) - 1
    if samples != list(range(first, last + 1)):
        raise UserError(f"the ranks read samples {samples}, not {first}-{last} once each")
    a, b = first // loader.n_windows, last // loader.n_windows
    epochs = f"epoch {a}" + (f"-{b}" if b > a else "")
    print(f"disjoint: {len(samples)} samples, each read by one rank; {epochs} of {loader.n_windows} windows")


def print_rate(run: Run, model: str) -> None:
    """Print the tokens/s that one loader worker reads, and beside it what cards can consume of them with this model."""
    run.cfg.steps, run.cfg.workers = 1 << 40, 1
    loader, tokens = Batches(run, 0), 0
    loader.next()  # it has begun
    begun = time.monotonic()
    while (seconds := time.monotonic() - begun) < 2:
        tokens += loader.next()[0].numel()
    loader.close()
    print(f"one loader worker reads {tokens / seconds:,.0f} tokens/s, by {run.cfg.micro_batch} x {run.cfg.seq_len}")
    m = load_config(model)
    m = dataclasses.replace(m, seq_len=run.cfg.seq_len, vocab_size=m.vocab_size or run.tokens.vocab_size)
    for card in ("B200", "H200", "A100", "L40S", "RTX 4090"):
        most = BUSY * BF16_PEAK[card] / flops_per_token(m)
        need = math.ceil(most * seconds / tokens)
        print(f"{model} on {run.world_size} x {card}: {most * run.world_size:,.0f} tokens/s at most; --workers {need}")


def main() -> None:
    from support import prepare  # training does without it

    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser("prepare", help="make token files", description=prepare.__doc__, formatter_class=raw)
    p.add_argument("inputs", nargs="+", metavar="INPUT", help="files and folders")
    p.add_argument("--out", required=True, help="folder to make")
    p.add_argument("--tokenizer", help="a tiktoken encoding, or bytes (the default)")
    p.add_argument("--val", type=float, default=0.0, help="share of documents for validation, as 0.005 (default 0)")
    p.add_argument("--on-error", choices=("stop", "skip"), default="stop", help="at bad lines, bytes and documents")
    p.add_argument("--vocab-size", type=int, help="number of ids; needed for ready-made ids")
    p.add_argument("--text-field", default="text", help="name of the text in JSON lines and parquet (default text)")
    p = commands.add_parser("show", help="print the samples of a step by rank")
    p.add_argument("path", metavar="DIR", help="a corpus, as for --data")
    p.add_argument("--world", type=int, default=1, help="data-parallel ranks (default 1)")
    flags = {"step": 0, "global-batch": 64, "micro-batch": 1, "seq-len": 128, "seed": 1337, "offset": 0}
    for name, default in flags.items():
        p.add_argument(f"--{name}", type=int, default=default)
    p.add_argument("--text", action="store_true", help="the text behind each window too")
    what = "instead: how fast a loader worker is, and how fast cards with a model (124m unless named) are"
    p.add_argument("--rate", nargs="?", const="124m", metavar="MODEL", help=what)
    args = vars(parser.parse_args())
    (prepare.prepare if args.pop("command") == "prepare" else show)(**args)


if __name__ == "__main__":
    run_cli(main)
