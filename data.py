"""Token files -> batches: which sample is in which step, and who reads it.

    python data.py prepare --out corpus/ --tokenizer gpt2 --val 0.005 book.txt folder/     # make token files: see prepare.py
    python data.py show corpus/ --step 412 --world 8 [--text]                              # what did the ranks see?

The lesson: samplers that draw at random per rank need seeds, state, padding and luck. Here the samples of step k are a
function of (seed, k) alone, the ranks only split them. Overlap cannot happen and there is no sampler state to save.

Read are folders that prepare.py has made, and nanoGPT's train.bin and llm.c's .bin files as they stand.
"""

import argparse
import atexit
import functools
import hashlib
import json
import os
import pickle
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from support.flags import UserError, accumulation, run_cli
from support.meter import at

FORMAT = 1  # of a prepared folder
LLMC = {
    20240520: (1, "uint16", "gpt2", 50257),
    20240801: (7, "uint32", "llama-3", 128256),
}  # magic -> version, contents


# ---------------------------------------------------------------------------------------------------- reading tokens


class Shard(NamedTuple):
    path: str
    offset: int  # bytes of header
    n_tokens: int
    mask: str | None  # uint8 file, one byte per token, 1 = train on it


@functools.lru_cache(maxsize=256)  # a mapping holds a descriptor, a big corpus has more shards than `ulimit -n` allows
def mapped(path: str, dtype: str, offset: int, count: int) -> np.ndarray:
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,))


class Tokens:
    """A token corpus: windows of T tokens by index, memory-mapped, across shard edges. Pickles as paths only.

    n_tokens, vocab_size and tokenizer (GPT-2's for headerless files, which do not say), dtype ("uint16" or "uint32"),
    fingerprint (16 hex digits that change with the sizes and with 64 KiB of each file).
    """

    def __init__(self, shards: list[Shard], dtype: str, tokenizer: str, vocab_size: int):
        self.shards, self.dtype, self.tokenizer, self.vocab_size = shards, dtype, tokenizer, vocab_size
        self.starts = np.cumsum([0] + [s.n_tokens for s in shards])
        self.n_tokens = int(self.starts[-1])
        digest = hashlib.sha256(f"{dtype} {tokenizer}".encode())
        for path in [p for s in shards for p in (s.path, s.mask) if p]:
            size = os.path.getsize(path)
            digest.update(f" {size}".encode())
            with open(path, "rb") as f:  # 64 KiB a file: hashing all of 100 GB would take minutes at each start
                for place in range(16):
                    f.seek(max(0, size - 4096) * place // 15)
                    digest.update(f.read(4096))
        self.fingerprint = digest.hexdigest()[:16]

    def n_windows(self, T: int) -> int:
        """Windows of T tokens and their T next tokens: (n_tokens - 1) // T. UserError if there is none."""
        if T < 1:
            raise UserError(f"--seq-len {T}: allowed is 1 or more")
        if self.n_tokens < T + 1:
            files = ", ".join(f"{s.path} ({os.path.getsize(s.path)} bytes)" for s in self.shards[:3])
            raise UserError(f"{files}: {self.n_tokens} tokens of {self.dtype}; one window of seq_len {T} needs {T + 1}")
        return (self.n_tokens - 1) // T

    def locate(self, position: int) -> tuple[Shard, int]:
        """Token position in the corpus -> (shard, token position in it)."""
        i = int(np.searchsorted(self.starts, position, side="right")) - 1
        return self.shards[i], position - int(self.starts[i])

    def window(self, w: int, T: int, vocab_size: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """x, y: int64 (T,): tokens [w*T, w*T+T) and the token after each, -1 where masked. UserError names an id the model lacks."""
        ids, mask, filled = np.empty(T + 1, np.int64), np.ones(T + 1, bool), 0
        while filled <= T:  # more than once where the window lies across the edge of a shard
            shard, a = self.locate(w * T + filled)
            b = min(a + T + 1 - filled, shard.n_tokens)
            here = slice(filled, filled + b - a)
            ids[here] = mapped(shard.path, self.dtype, shard.offset, shard.n_tokens)[a:b]
            if shard.mask:
                mask[here] = mapped(shard.mask, "u1", 0, shard.n_tokens)[a:b]
            filled = here.stop
        if vocab_size is not None and ids.max() >= vocab_size:
            i = int(np.argmax(ids >= vocab_size))
            shard, position = self.locate(w * T + i)
            raise UserError(f"{shard.path}: token {position} is id {ids[i]}, the model's vocabulary is {vocab_size}")
        return ids[:-1], np.where(mask[1:], ids[1:], -1)

    def batch(self, windows: np.ndarray, T: int, vocab_size: int | None) -> list[torch.Tensor]:
        """[x, y], int64 (B, T), of some windows."""
        rows = [self.window(int(w), T, vocab_size) for w in windows]
        return [torch.from_numpy(np.stack(column)) for column in zip(*rows)]


def raw_shard(path: Path, dtype: str = "uint16") -> tuple[Shard, tuple[str, str, int]]:
    """An llm.c file by its header, or a headerless one of `dtype`: the shard and its (dtype, tokenizer, vocab_size)."""
    size, header = path.stat().st_size, np.fromfile(path, "<i4", 256)
    if len(header) and header[0] in LLMC:
        version, *kind = LLMC[header[0]]
        if len(header) < 256 or header[1] != version:
            found = f"version {header[1]}" if len(header) == 256 else f"a header of {size} bytes, not 1024"
            raise UserError(f"{path}: llm.c file with {found}; of this kind version {version} is read")
        held = (size - 1024) / np.dtype(kind[0]).itemsize
        if held != header[2]:
            raise UserError(f"{path}: header says {header[2]} tokens, file holds {held:g} ({size} bytes, {kind[0]})")
        return Shard(str(path), 1024, int(held), None), tuple(kind)
    n, rest = divmod(size, np.dtype(dtype).itemsize)
    if rest:
        raise UserError(f"{path}: {size} bytes is not a whole number of {dtype} tokens: cut short, or no token file")
    # a uint32 file read as uint16 has the high halves, all tiny, at every second place; 4096 tokens show it
    low, high = np.fromfile(path, dtype, 4096)[: n // 2 * 2].reshape(-1, 2).T
    if dtype == "uint16" and len(high) >= 8 and high.max() < 16 <= low.max():
        raise UserError(
            f"{path}: read as uint16 every second token is under 16: this looks like uint32, which needs meta.json"
        )
    return Shard(str(path), 0, n, None), (dtype, "gpt2", 50257)


def split_files(path: Path, split: str) -> list[Path]:
    """The .bin files of a split: of a folder those with its name in theirs; for one train file its val file beside."""
    if path.is_file() and path.suffix != ".bin":
        raise UserError(f"{path} is no token file (.bin): `python data.py prepare --out DIR {path}` makes one of it")
    if path.is_dir():
        return sorted(
            p for p in path.glob("*.bin") if re.search(rf"(?<![a-z]){split}(?![a-z])", p.name)
        )  # not the val of retrieval.bin
    other = path.with_name(path.name.replace("train", split))
    return [other] if other.exists() and (split == "train" or other != path) else []


def read_meta(path: str) -> tuple[Path, dict | None]:
    """The folder that `path` is, or is a file of, and its meta.json: None if it has none."""
    folder = Path(path).parent if os.path.isfile(path) else Path(path)
    if not (folder / "meta.json").exists():
        return folder, None
    try:
        meta = json.loads((folder / "meta.json").read_text())
        if meta["format"] != FORMAT:
            raise ValueError(f"format {meta['format']}, this version reads {FORMAT}")
        _ = [meta[name] for name in ("dtype", "tokenizer", "vocab_size", "splits", "key")]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder}/meta.json is not usable ({error!r}): remove that folder and prepare it again"
        ) from None
    return folder, meta


class _NoCode(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        raise pickle.UnpicklingError(f"it asks to run {module}.{name}, only plain dicts are read")


def open_tokens(path: str, split: str = "train") -> Tokens:
    """Open a prepared folder, a nanoGPT folder, an llm.c file or folder, or one .bin file. UserError says what is wrong."""
    folder, meta = read_meta(path)
    if meta and os.path.isfile(path):
        raise UserError(f"{path} is a part of {folder}, a prepared corpus: give the folder")
    if meta:
        shards, kind = [], (meta["dtype"], meta["tokenizer"], meta["vocab_size"])
        for s in meta["splits"][split]["shards"]:
            file, mask = (s[k] and str(folder / s[k]) for k in ("file", "mask"))
            for name, dtype in ((file, meta["dtype"]), (mask, "uint8")):
                size = os.path.getsize(name) if name and os.path.exists(name) else None
                if name and size != s["tokens"] * np.dtype(dtype).itemsize:
                    found = "is missing" if size is None else f"holds {size} bytes"
                    raise UserError(f"{name} {found}: meta.json says {s['tokens']} tokens of {dtype}")
            shards.append(Shard(file, 0, s["tokens"], mask))
    else:
        files = split_files(Path(path), split)
        if not files:
            there = f"holds {sorted(os.listdir(path))[:5]}" if os.path.isdir(path) else "is no file or folder"
            raise UserError(f"{path} {there}; wanted meta.json or *{split}*.bin (see python data.py prepare --help)")
        shards, kinds = zip(*map(raw_shard, files))
        if len(set(kinds)) > 1:
            raise UserError(f"{path}: files of different kinds for one split: {sorted(set(kinds))}")
        kind, extra = kinds[0], files[0].with_name("meta.pkl")
        if extra.exists():  # nanoGPT's character-level corpora
            try:
                with open(extra, "rb") as f:
                    kind = kind[0], "characters", int(_NoCode(f).load()["vocab_size"])
            except Exception as error:  # a damaged pickle may raise anything
                raise UserError(f"{extra} is refused: {error!r}") from None
    shards = [s for s in shards if s.n_tokens]
    if not shards:
        raise UserError(f"{path}: 0 tokens in its {split} files")
    return Tokens(shards, *kind)


def has_val(path: str) -> bool:
    """Whether open_tokens(path, "val") has something to open."""
    _, meta = read_meta(path)
    return bool(meta["splits"]["val"]["shards"] if meta else split_files(Path(path), "val"))


# ------------------------------------------------------------------------------------- the order of the samples (contract)


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

    def mix(v: np.ndarray) -> np.ndarray:  # splitmix64's finalizer: every bit depends on every bit
        v = (v ^ (v >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        v = (v ^ (v >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return v ^ (v >> np.uint64(31))

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


class Batches:
    """The micro-batches of one data-parallel rank, from (start_step, 0) up to step `steps`, which is not included.

    rank, world_size: of the data-parallel group. vocab_size: the model's. The position is the step number: workers read
    ahead, but nothing they do is counted.
    """

    def __init__(
        self, tokens: Tokens, *, seq_len: int, global_batch: int, micro_batch: int, rank: int, world_size: int, seed: int,
        start_step: int, steps: int, workers: int, device: torch.device | str, vocab_size: int
    ):  # fmt: skip
        self.tokens, self.shape, self.vocab_size, self.device = (
            tokens,
            (micro_batch, seq_len),
            vocab_size,
            torch.device(device),
        )
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.accum = accumulation(global_batch, micro_batch, world_size)
        loader = torch.utils.data.DataLoader(
            self,
            batch_size=None,
            sampler=range(start_step * self.accum, steps * self.accum),
            num_workers=workers,
            pin_memory=self.device.type == "cuda",
            multiprocessing_context="fork" if workers else None,
        )
        # Workers inherit this mask for life: torchrun and Ctrl-C signal the whole process group, and the rank still needs
        # its batches to finish the step and save.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        self.iterator = iter(loader)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        self.workers = self.iterator._workers if workers else []
        if workers:
            # the loader's SIGCHLD handler would raise in whatever line a dying worker interrupts; without it the death
            # is found where data is waited for, within 5 s
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        atexit.register(self.close)  # deaf to SIGTERM, they would keep an interpreter waiting that exits on an error

    def __getitem__(self, i: int) -> torch.Tensor | str:
        """Runs in the worker: the i-th micro-batch of this rank since step 0; or what is wrong with it.

        x, y and sample as one flat tensor: each tensor a worker hands over costs a connection, each transfer a call.
        """
        (B, T), (step, micro) = self.shape, divmod(i, self.accum)
        first = ((step * self.world_size + self.rank) * self.accum + micro) * B  # rank r owns the r-th n-th of a step
        try:
            windows = stream_windows(self.seed, first, B, self.tokens.n_windows(T))
            x, y = self.tokens.batch(windows, T, self.vocab_size)
        except UserError as error:
            return str(error)  # raised in a worker it would come back wrapped in a traceback
        return torch.cat([x.flatten(), y.flatten(), torch.arange(first, first + B)])

    def next(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x (B, T), y (B, T) with -1 = no target, sample (B,) stream positions; int64 on the device."""
        with at("data"):
            try:
                batch = next(self.iterator)
            except (RuntimeError, OSError, EOFError) as error:  # OSError, EOFError: it died while handing a tensor over
                for worker in self.workers:
                    worker.join(0.5)  # the dead one may not be buried yet
                dead = [worker.pid for worker in self.workers if not worker.is_alive()]
                if not dead:
                    raise
                message = f"loader worker with pid {dead} died (killed, or out of memory or /dev/shm): {error}"
                raise UserError(f"data-parallel rank {self.rank}: {message}") from None
            if isinstance(batch, str):
                raise UserError(batch)
            # pinned and non_blocking: the host does not wait, 16 bytes per token take microseconds of the stream
            flat, (B, T) = batch.to(self.device, non_blocking=True), self.shape
            x, y = flat[: 2 * B * T].view(2, B, T)
            return x, y, flat[2 * B * T :]

    def close(self) -> None:
        """End the workers."""
        atexit.unregister(self.close)
        if self.workers:
            self.iterator._shutdown_workers()
            for worker in (
                self.workers
            ):  # one that is stuck would be waited for at exit, for ever: deaf to SIGTERM, it has nothing to lose
                worker.kill()


def val_batches(
    tokens: Tokens,
    *,
    seq_len: int,
    micro_batch: int,
    rank: int,
    world_size: int,
    limit: int,
    vocab_size: int | None = None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The first `limit` windows (0: all) in order, each once over all ranks: x (B, T), y (B, T), sample (B,) on the CPU.

    Every rank yields the same number of batches. Rows that fill the last ones up have no target (-1) and sample -1.
    Read in this process: loader workers in evaluation cost BLOOM three hangs, and save milliseconds.
    """
    n = tokens.n_windows(seq_len)
    n = min(n, limit or n)
    stride = micro_batch * world_size
    for first in range(rank * micro_batch, -(-n // stride) * stride, stride):
        windows = np.arange(first, first + micro_batch)
        filler = torch.from_numpy(windows >= n)
        x, y = tokens.batch(np.minimum(windows, n - 1), seq_len, vocab_size)
        y[filler] = -1
        yield x, y, torch.from_numpy(windows).masked_fill(filler, -1)


# ----------------------------------------------------------------------------------------------------- command line


def show(
    path: str, step: int, world: int, global_batch: int, micro_batch: int, seq_len: int, seed: int, text: bool
) -> None:
    """Print which windows the loader of each data-parallel rank reads in a step, and check them."""
    if step < 0 or world < 1:
        raise UserError(f"--step {step}, --world {world}: allowed is 0 or more, 1 or more")
    tokens, samples = open_tokens(path), []
    n_windows = tokens.n_windows(seq_len)
    if text:
        from support.prepare import load_tokenizer

        encoding = load_tokenizer(tokens.tokenizer)
    for rank in range(world):
        loader = Batches(
            tokens, seq_len=seq_len, global_batch=global_batch, micro_batch=micro_batch, rank=rank, world_size=world, seed=seed,
            start_step=step, steps=step + 1, workers=0, device="cpu", vocab_size=1 << 32
        )  # fmt: skip
        x, _, mine = (torch.cat(parts) for parts in zip(*(loader.next() for _ in range(loader.accum))))
        windows = stream_windows(seed, int(mine[0]), len(mine), n_windows)
        samples += mine.tolist()
        print(f"rank {rank}: samples {mine[0]}-{mine[-1]}, windows {' '.join(map(str, windows))}")
        for w, ids in zip(windows, x) if text else ():
            shard, position = tokens.locate(int(w) * seq_len)
            print(f"--- window {w}: {shard.path}, token {position}\n{encoding.decode(ids.tolist())}")
    first, last = step * global_batch, (step + 1) * global_batch - 1
    if samples != list(range(first, last + 1)):
        raise UserError(f"the ranks read samples {samples}, not {first}-{last} once each")
    epochs = f"epoch {first // n_windows}" + (f"-{last // n_windows}" if last // n_windows > first // n_windows else "")
    print(f"disjoint: {len(samples)} samples, each read by one rank; {epochs} of {n_windows} windows")


def main() -> None:
    from support import prepare  # here: it reads ids with what is above

    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser("prepare", help="make token files", description=prepare.__doc__, formatter_class=raw)
    p.add_argument("inputs", nargs="+", metavar="INPUT", help="files and folders")
    p.add_argument("--out", required=True, help="folder to make")
    p.add_argument("--tokenizer", help="a tiktoken encoding, or bytes (the default)")
    p.add_argument(
        "--val", type=float, default=0.0, help="share of the documents for validation, such as 0.005 (default 0)"
    )
    p.add_argument(
        "--on-error", choices=("stop", "skip"), default="stop", help="what to do with bad lines, bytes and documents"
    )
    p.add_argument("--vocab-size", type=int, help="number of ids; needed for ready-made ids")
    p.add_argument("--workers", type=int, help="threads (default: one per core)")
    p.add_argument("--text-field", default="text", help="name of the text in JSON lines and parquet (default text)")
    p = commands.add_parser("show", help="print the samples of a step by rank")
    p.add_argument("path", metavar="DIR", help="a corpus, as for --data")
    p.add_argument("--step", type=int, required=True)
    p.add_argument("--world", type=int, required=True, help="data-parallel ranks")
    for name, default in (("--global-batch", 64), ("--micro-batch", 1), ("--seq-len", 128), ("--seed", 1337)):
        p.add_argument(name, type=int, default=default)
    p.add_argument("--text", action="store_true", help="the text behind each window too")
    args = vars(parser.parse_args())
    (prepare.prepare if args.pop("command") == "prepare" else show)(**args)


if __name__ == "__main__":
    run_cli(main)
