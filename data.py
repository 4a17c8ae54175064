"""Corpus -> token files, and token files -> batches.

    python data.py prepare --out corpus/ --tokenizer gpt2 --val 0.005 book.txt folder/ docs.jsonl.gz table.parquet
    python data.py prepare --out corpus/ --vocab-size 128256 ids.jsonl tokens.npy     # ids of any other tokenizer
    python data.py show corpus/ --step 412 --world 8 [--text]                         # what did the ranks see?

Inputs by suffix: .jsonl .ndjson .json (a {"text": ...} or {"ids": [...], "mask": [...]} per line), .parquet (a text
column), .npy and .bin (token ids); any other file that is named, and those with a suffix of TEXT in a folder, is one
document of UTF-8 text. Lines and text may be compressed (.gz). Folders are read in sorted order, with those below; what
is not understood there is counted.

Text is encoded as ordinary text (an "<|endoftext|>" in it stays ten-odd plain tokens), each document followed by one
end-of-text id. Ready-made ids are stored as they are: they bring their own end marks. Documents that are empty or blank
are left out and counted.

The result is a folder: train.bin and val.bin, headerless little-endian uint16 (uint32 above 65,536 ids), cut into
train-00000.bin ... above 1 GiB, train.mask beside where targets are masked, and meta.json, which says what it is.
nanoGPT's train.bin and llm.c's .bin files are read as they stand.

The lesson: samplers that draw at random per rank need seeds, state, padding and luck. Here the samples of step k are a
function of (seed, k) alone, the ranks only split them. Overlap cannot happen and there is no sampler state to save.
"""

import argparse
import atexit
import codecs
import functools
import gzip
import hashlib
import json
import os
import pickle
import re
import shutil
import signal
import socket
import sys
import sysconfig
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import tiktoken
import torch

from flags import UserError, accumulation, run_cli
from meter import at

FORMAT = 1
SHARD_BYTES = 1 << 30
PIECE = 1 << 18  # characters one thread encodes at a time: about 50 ms of work, small enough to bound memory
LLMC = {20240520: (1, "uint16", "gpt2", 50257), 20240801: (7, "uint32", "llama-3", 128256)}  # magic -> version, contents
TEXT = tuple(".txt .text .md .rst .tex .py .c .h .cc .cpp .cu .js .ts .java .go .rs .sh .html".split())
LINES, IDS = (".jsonl", ".ndjson", ".json"), (".npy", ".bin")

# Where a long document may be cut so that every tiktoken pattern gives the same tokens as for the whole: before a space
# that follows a non-space, or after a letter or digit that white space or CJK punctuation follows. No pattern matches
# across either, and each starts afresh there. Text without such a border in 8192 characters is cut where it stands.
BORDER = re.compile(r"\S(?= )|[^\W_](?=[\s\u3001\u3002\uff01\uff0c\uff1f])")


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
    fingerprint (16 hex digits that change with the content).
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
        raise UserError(f"{path}: read as uint16 every second token is under 16: this looks like uint32, which needs meta.json")
    return Shard(str(path), 0, n, None), (dtype, "gpt2", 50257)


def split_files(path: Path, split: str) -> list[Path]:
    """The .bin files of a split: of a folder those with its name in theirs; for one train file its val file beside."""
    if path.is_file() and path.suffix != ".bin":
        raise UserError(f"{path} is no token file (.bin): `python data.py prepare --out DIR {path}` makes one of it")
    if path.is_dir():
        return sorted(p for p in path.glob("*.bin") if split in p.name)
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
        raise UserError(f"{folder}/meta.json is not usable ({error!r}): prepare the corpus again") from None
    return folder, meta


class _NoCode(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        raise pickle.UnpicklingError(f"it asks to run {module}.{name}, only plain dicts are read")


def open_tokens(path: str, split: str = "train") -> Tokens:
    """Open a prepared folder, a nanoGPT folder, an llm.c file or folder, or one .bin file. UserError says what is wrong."""
    folder, meta = read_meta(path)
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
        self.tokens, self.shape, self.vocab_size, self.device = tokens, (micro_batch, seq_len), vocab_size, torch.device(device)
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
            for worker in self.workers:  # one that is stuck would be waited for at exit, for ever: deaf to SIGTERM, it has nothing to lose
                worker.kill()


def val_batches(
    tokens: Tokens, *, seq_len: int, micro_batch: int, rank: int, world_size: int, limit: int, vocab_size: int | None = None
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


# ------------------------------------------------------------------------------------------------- corpus -> token files


def load_tokenizer(name: str) -> tiktoken.Encoding:
    """A tiktoken encoding by name, or "bytes": 256 byte tokens and <|endoftext|> = 256, which needs no network."""
    if name == "bytes":
        ranks = {bytes([i]): i for i in range(256)}
        return tiktoken.Encoding("bytes", pat_str=r"[\s\S]{1,64}", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 256})
    known = tiktoken.list_encoding_names()
    if name not in known:
        raise UserError(f"unknown tokenizer {name!r}: tiktoken has {', '.join(sorted(known))}, and there is bytes")
    try:
        return tiktoken.get_encoding(name)
    except Exception as error:  # requests' own errors, a wrong hash, an unwritable cache: all the same to the user
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:150]
        hint = "set TIKTOKEN_CACHE_DIR to a folder that holds it, or use --tokenizer bytes"
        raise UserError(f"tokenizer {name}: the vocabulary could not be downloaded ({reason}): {hint}") from None


def encode_text(encoding: tiktoken.Encoding, text: str) -> np.ndarray:
    """encode_ordinary as an array. Through encode_to_numpy: the Python list would cost a third of the time."""
    if encoding.name == "bytes":
        return np.frombuffer(text.encode(), np.uint8)  # the same ids as the encoding gives, 100 times as fast
    return encoding.encode_to_numpy(text, allowed_special=set(), disallowed_special=())


class Piece(NamedTuple):
    """A document, or a part of a long one, in reading order."""

    payload: str | np.ndarray  # text, or ready-made ids
    where: str  # for messages: file and line
    mask: np.ndarray | None = None  # for ids; 1: train on it
    first: bool = True  # here the document begins
    last: bool = True  # here it ends


Bad = Callable[[str], None]  # what to do with a data error: raise, or count and go on


def border(text: str, limit: int) -> int:
    """Where to cut text: the last safe place before `limit` (see BORDER), `limit` itself if there is none near."""
    return max((m.end() for m in BORDER.finditer(text, max(0, limit - 8192), limit)), default=limit)


def cut(blocks: Iterable[str], where: str) -> Iterator[Piece]:
    """One text document, which may come in blocks, in pieces of about PIECE characters."""
    text, first = "", True
    for block in blocks:
        text, start = text + block, 0
        while len(text) - start > 2 * PIECE:
            stop = border(text, start + PIECE)
            yield Piece(text[start:stop], where, None, first, False)
            start, first = stop, False
        text = text[start:]
    yield Piece(text, where, None, first)


def decode(path: str, file: BinaryIO, bad: Bad) -> Iterator[str]:
    """The text of a file in blocks. A character on a block's edge waits for its other half."""
    pending, at_byte, block = b"", 0, b"\n"
    while block:
        block = file.read(PIECE)
        data = pending + block
        try:
            text, used = codecs.utf_8_decode(data, "strict", not block)
        except UnicodeDecodeError as error:
            bad(f"{path}: byte {at_byte + error.start}: invalid UTF-8 ({data[error.start : error.end].hex(' ')})")
            text, used = codecs.utf_8_decode(data, "replace", not block)  # skipping: the bytes become U+FFFD
        yield text if at_byte else text.removeprefix("\ufeff")
        pending, at_byte = data[used:], at_byte + used


def read_rows(path: str, rows: Iterable, field: str, vocab_size: int | None, bad: Bad) -> Iterator[Piece]:
    """Documents from lines of JSON (bytes) or the values of a parquet column (pyarrow scalars)."""
    for number, row in enumerate(rows, 1):
        where = f"{path}:{number}"
        try:
            if isinstance(row, bytes):
                row = json.loads(row.decode().removeprefix("\ufeff")) if row.strip() else {field: ""}  # a blank line: empty
            else:
                row = {field: row.as_py()}
            if isinstance(row, dict) and "ids" in row:
                ids = check_ids(np.asarray(row["ids"]), 0, vocab_size)
                mask = None if row.get("mask") is None else np.asarray(row["mask"])
                if mask is not None and (mask.shape != ids.shape or not np.isin(mask, (0, 1)).all()):
                    raise ValueError(f'"mask" must be a 0 or 1 for each of the {len(ids)} ids')
                yield Piece(ids, where, mask)
            elif isinstance(row, dict) and isinstance(row.get(field), str):
                yield from cut([row[field]], where)
            else:
                found = {k: type(v).__name__ for k, v in row.items()} if isinstance(row, dict) else f"a {type(row).__name__}"
                raise ValueError(f'wanted {{"{field}": string}} or {{"ids": [...]}}, found {found}')
        except UnicodeDecodeError as error:
            bad(f"{where}: invalid UTF-8 at its byte {error.start} ({error.object[error.start : error.end].hex(' ')})")
        except (ValueError, RecursionError) as error:
            bad(f"{where}: {error}")


def parquet_column(path: str, file: BinaryIO, field: str) -> Iterator:
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{path}: parquet needs pyarrow (pip install pyarrow)") from None
    table = pyarrow.parquet.ParquetFile(file)
    if field not in table.schema_arrow.names:
        raise UserError(f"{path}: no column {field!r}, there are {table.schema_arrow.names}")
    for batch in table.iter_batches(batch_size=1024, columns=[field]):
        yield from batch.column(0)


def read_ids(path: str, file: BinaryIO, vocab_size: int | None) -> Iterator[Piece]:
    try:
        if path.lower().endswith(".npy"):
            ids = np.lib.format.open_memmap(path, mode="r")
        else:
            shard, (dtype, *_) = raw_shard(Path(path), "uint32" if (vocab_size or 0) > 1 << 16 else "uint16")
            ids = np.memmap(path, dtype, "r", shard.offset, (shard.n_tokens,)) if shard.n_tokens else np.empty(0, dtype)
        for a in range(0, max(1, ids.size), PIECE):
            part = check_ids(np.asarray(ids)[a : a + PIECE], a, vocab_size)
            file.seek(a * ids.itemsize)  # only for the progress
            yield Piece(part, path, last=a + PIECE >= len(ids))
    except (ValueError, EOFError, IndexError) as error:
        raise UserError(f"{path}: {error}") from None


def check_ids(ids: np.ndarray, start: int, vocab_size: int | None) -> np.ndarray:
    if vocab_size is None:
        raise ValueError("token ids need --vocab-size")
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"ids must be one list of whole numbers, found {ids.dtype} of shape {ids.shape}")
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        i = int(np.argmax((ids < 0) | (ids >= vocab_size)))
        raise ValueError(f"id {ids[i]} at position {start + i}, allowed are 0 to {vocab_size - 1} (--vocab-size)")
    return ids


def find_files(inputs: list[str], with_ids: bool) -> tuple[list[str], Counter]:
    """Files to read in order, and how many in the folders were left, by suffix. A file named outright is always read."""
    text, binary = (*TEXT, *LINES), (".parquet", *(IDS if with_ids else ()))
    files, left = [], Counter()
    for name in inputs:
        if os.path.isfile(name):
            files.append(name)
        elif not os.path.isdir(name):
            raise UserError(f"{name}: no such file or folder")
        for folder, folders, names in os.walk(name):  # a file has none
            folders.sort()
            for path in filter(os.path.isfile, (os.path.join(folder, n) for n in sorted(names))):  # no dead links, no pipes
                if path.lower().endswith(binary) or path.lower().removesuffix(".gz").endswith(text):
                    files.append(path)
                else:
                    left[Path(path).suffix.lower() or "no suffix"] += 1
    if not files:
        raise UserError(f"no files in {', '.join(inputs)}: wanted {' '.join(text)} (also .gz) {' '.join(binary)}, found {dict(left)}")
    return files, left


def read_files(files: list[str], field: str, vocab_size: int | None, bad: Bad) -> Iterator[Piece]:
    """All pieces of all files in order. Reports the bytes read (compressed ones where compressed), at most once a second."""
    total, before = sum(map(os.path.getsize, files)), 0
    begun = said = time.monotonic()
    for path in files:
        name, last = path.lower(), True
        with open(path, "rb") as raw:
            file = gzip.GzipFile(fileobj=raw) if name.endswith(".gz") else raw
            if name.endswith(IDS):
                pieces = read_ids(path, raw, vocab_size)
            elif name.endswith(".parquet"):
                pieces = read_rows(path, parquet_column(path, raw, field), field, vocab_size, bad)
            elif name.removesuffix(".gz").endswith(LINES):
                pieces = read_rows(path, file, field, vocab_size, bad)
            else:
                pieces = cut(decode(path, file, bad), path)
            try:
                for piece in pieces:
                    yield piece
                    last, now = piece.last, time.monotonic()
                    if now - said >= 1:
                        said, done = now, before + raw.tell()
                        rate = max(1, done / (now - begun))
                        left = f"{rate / 1e6:.1f} MB/s, {(total - done) / rate:.0f} s left"
                        print(f"{done / 1e6:.1f} of {total / 1e6:.1f} MB, {left}", file=sys.stderr, flush=True)
            except (EOFError, zlib.error, gzip.BadGzipFile, ValueError, NotImplementedError) as error:  # the last two: pyarrow's
                bad(f"{path}: damaged file: {' '.join(str(error).split())}")
                if not last:  # the document that broke off still gets its end mark
                    yield Piece("", path, first=False)
        before += os.path.getsize(path)


def batches(pieces: Iterator[Piece], val: float, seen: Counter) -> Iterator[tuple[str, list[Piece]]]:
    """Lists of about PIECE characters or ids, each with its split. Counts documents, empty ones left out, into `seen`."""
    waiting, size, split, first = {"train": [], "val": []}, Counter(), "train", True
    for piece in pieces:
        kind = "text" if isinstance(piece.payload, str) else "ids"
        if first:
            if piece.last and (len(piece.payload) == 0 or (kind == "text" and piece.payload.isspace())):
                seen["empty"] += 1
                continue
            n = seen["text"] + seen["ids"]
            # the floor steps up at the second document first: a small corpus, too, has something to validate on
            split = "val" if (n - 1) * val // 1 > (n - 2) * val // 1 else "train"
            seen[kind] += 1
        first = piece.last
        waiting[split].append(piece)
        size[split] += len(piece.payload)
        if size[split] >= PIECE:
            yield split, waiting[split]
            waiting[split], size[split] = [], 0
    yield from waiting.items()


def encode(batch: tuple[str, list[Piece]], encoding: tiktoken.Encoding, vocab_size: int, dtype: str, bad: Bad) -> tuple:
    """Runs in a thread, tiktoken works without the GIL: split, ids, mask, number of documents."""
    split, pieces = batch
    eot = np.array([encoding.eot_token]).astype(dtype)  # a vocabulary too small for it is refused below
    ids, masks, documents = [np.empty(0, dtype)], [np.empty(0, np.uint8)], 0
    for piece in pieces:
        new = piece.payload
        if isinstance(new, str):
            if encoding.n_vocab > vocab_size:
                raise UserError(f"{piece.where}: text, but --vocab-size {vocab_size} is less than {encoding.name}'s {encoding.n_vocab} ids")
            try:
                new = encode_text(encoding, new)
            except BaseException as error:  # tiktoken's Rust panics derive from BaseException alone; no Ctrl-C comes to a thread
                bad(f"{piece.where}: the tokenizer cannot encode this ({type(error).__name__}: {str(error)[:120]})")
                if piece.first:
                    continue
                new = np.empty(0, dtype)  # of a long document the pieces before are written: it still gets its end mark
            new = np.concatenate([new, eot]) if piece.last else new
        ids.append(new)
        masks.append(np.ones(len(new), np.uint8) if piece.mask is None else piece.mask)
        documents += piece.last
    ids, mask = (np.concatenate(a, dtype=t, casting="unsafe") for a, t in ((ids, dtype), (masks, np.uint8)))
    return split, ids, mask, documents


def in_order(pool: ThreadPoolExecutor, function: Callable, items: Iterable, ahead: int) -> Iterator:
    """function(item) of each item. Only `ahead` are begun before they are asked for, unlike pool.map: that bounds the memory."""
    pending = deque()
    for item in items:
        pending.append(pool.submit(function, item))
        if len(pending) > ahead:
            yield pending.popleft().result()
    for future in pending:
        yield future.result()


def append(folder: Path, split: str, meta: dict, ids: np.ndarray, mask: np.ndarray) -> None:
    """Append tokens to the files of a split, of SHARD_BYTES each, and note them in its part of meta.json."""
    room, shards = SHARD_BYTES // ids.itemsize, meta["shards"]
    meta["tokens"] += len(ids)
    while len(ids):
        if not shards or shards[-1]["tokens"] == room:
            shards.append({"file": f"{split}-{len(shards):05d}.bin", "mask": None, "tokens": 0})
        shard = shards[-1]
        n = min(len(ids), room - shard["tokens"])
        if not shard["mask"] and not mask[:n].all():  # the first masked target of this shard: all before it count
            shard["mask"] = shard["file"].replace(".bin", ".mask")
            (folder / shard["mask"]).write_bytes(np.ones(shard["tokens"], np.uint8))
        for name, values in ((shard["file"], ids), (shard["mask"], mask)):
            if name:
                with open(folder / name, "ab") as f:
                    f.write(values[:n])
        shard["tokens"] += n
        ids, mask = ids[n:], mask[n:]


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def prepare(
    out: str, inputs: list[str], tokenizer: str | None = None, val: float = 0.0, on_error: str = "stop", vocab_size: int | None = None,
    workers: int | None = None, text_field: str = "text", replace: bool = False
) -> None:  # fmt: skip
    """Make the token folder `out`; nothing appears under that name before all of it is written and flushed.

    val: share of the documents for the val split, evenly spread: the second document and then every (1/val)-th.
    on_error "skip": bad lines and documents are counted and listed in meta.json, bad bytes of a text become U+FFFD.
    A folder made from the same inputs with the same options is left alone, one made otherwise is refused (or made anew).
    """
    folder = Path(out)
    files, left = find_files(inputs, vocab_size is not None)
    key = {"tokenizer": tokenizer, "val": val, "on_error": on_error, "vocab_size": vocab_size, "text_field": text_field}
    key["sources"] = {os.path.abspath(f): [os.path.getsize(f), os.stat(f).st_mtime_ns] for f in files}
    if folder.is_dir() and (old := read_meta(out)[1]):
        was, now = ({**k, **k["sources"], "sources": None} for k in (old["key"], key))
        names = [k for k in sorted({*was, *now}, reverse=True) if was.get(k) != now.get(k)]  # reverse: options before paths
        differs = "; ".join(f"{k} was {was.get(k, 'absent')}, now {now.get(k, 'absent')}" for k in names[:5])
        if names and not replace:
            raise UserError(f"{out} was prepared otherwise, {len(names)} differences ({differs}): remove it or choose another --out")
        if not names:
            if not replace:
                print(f"{out} is up to date", file=sys.stderr)
            return
        print(f"{out} is made anew ({differs})", file=sys.stderr)
        shutil.rmtree(out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{out} exists and is no prepared corpus: choose another --out")
    if not 0 <= val < 1:
        raise UserError(f"--val {val}: a share of the documents, 0 <= val < 1")
    if min(1 if n is None else n for n in (workers, vocab_size)) < 1:
        raise UserError(f"--workers {workers}, --vocab-size {vocab_size}: both must be 1 or more")
    encoding = load_tokenizer(tokenizer or "bytes")
    vocab = vocab_size or encoding.n_vocab
    dtype = "uint16" if vocab <= 1 << 16 else "uint32"
    splits = {split: {"tokens": 0, "documents": 0, "shards": []} for split in ("train", "val")}
    skipped, seen = [], Counter()  # the first 1000 messages

    def bad(message: str) -> None:
        if on_error == "stop":
            raise UserError(f"{message} (--on-error skip goes on without it)")
        seen["skipped"] += 1
        if len(skipped) < 1000:
            skipped.append(message)

    temporary = Path(f"{out.rstrip('/')}.tmp-{socket.gethostname()}-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    # threads, not processes: tiktoken drops the GIL, text need not be copied, and a small input does not wait for spawns
    workers = workers or os.cpu_count()
    pool = ThreadPoolExecutor(workers)
    try:
        temporary.mkdir(parents=True)
        pieces = read_files(files, text_field, vocab_size, bad)
        work = functools.partial(encode, encoding=encoding, vocab_size=vocab, dtype=dtype, bad=bad)
        for split, ids, mask, documents in in_order(pool, work, batches(pieces, val, seen), 2 * workers):
            append(temporary, split, splits[split], ids, mask)
            splits[split]["documents"] += documents
        if not splits["train"]["tokens"]:
            count = f"{len(files)} files, {seen['empty']} empty documents, {seen['skipped']} skipped {skipped[:1]}"
            raise UserError(f"nothing for the train split in {', '.join(inputs[:5])}: {count}")
        for shard in (s["shards"][0] for s in splits.values() if len(s["shards"]) == 1):  # the usual name, which nanoGPT reads too
            for kind in ("file", "mask"):
                if name := shard[kind]:
                    shard[kind] = (temporary / name).rename(temporary / name.replace("-00000", "")).name
        meta = {"format": FORMAT, "tokenizer": tokenizer or ("bytes" if seen["text"] else "ids"), "vocab_size": vocab}
        meta |= {"eot": encoding.eot_token if tokenizer or seen["text"] else None, "dtype": dtype, "splits": splits}
        meta |= {"empty": seen["empty"], "left_out": dict(left), "skipped": seen["skipped"], "skipped_first": skipped, "key": key}
        (temporary / "meta.json").write_text(json.dumps(meta, indent=1))
        for path in (*temporary.iterdir(), temporary):
            flush(path)
        try:
            os.rename(temporary, folder)
        except OSError:
            if (read_meta(out)[1] or {}).get("key") != key:  # another process made the same corpus meanwhile
                raise
        flush(folder.parent)
    except OSError as error:
        raise UserError(f"{error.filename or temporary}: {error.strerror or error}") from None
    finally:
        pool.shutdown(cancel_futures=True)
        shutil.rmtree(temporary, ignore_errors=True)
    counts = [f"{name} {s['tokens']:,} tokens in {s['documents']:,} documents" for name, s in splits.items()]
    print(f"{out}: {', '.join(counts)}; {vocab} ids, {dtype}", file=sys.stderr)
    if seen["empty"] or skipped or left:
        counts = f"{seen['empty']} empty documents, {seen['skipped']} skipped, files by suffix {dict(left)}"
        print(f"left out: {counts}", *skipped[:20], sep="\nskipped: ", file=sys.stderr)
    if val and not splits["val"]["tokens"]:
        print("no val split: it is made of whole documents, and there is only one", file=sys.stderr)


def ensure_corpus(path: str) -> None:
    """The default corpus at `path`: the Python standard library's own sources as bytes. One made of others is replaced."""
    library = sysconfig.get_paths()["stdlib"]
    files = [f for f in find_files([library], False)[0] if f.endswith(".py") and "-packages" not in f[len(library) :]]
    # skip: the library's tests hold files that are no UTF-8 on purpose
    prepare(path, files, val=0.005, on_error="skip", replace=True)


# ----------------------------------------------------------------------------------------------------- command line


def show(path: str, step: int, world: int, global_batch: int, micro_batch: int, seq_len: int, seed: int, text: bool) -> None:
    """Print which windows the loader of each data-parallel rank reads in a step, and check them."""
    if step < 0 or world < 1:
        raise UserError(f"--step {step}, --world {world}: allowed is 0 or more, 1 or more")
    tokens, samples = open_tokens(path), []
    n_windows = tokens.n_windows(seq_len)
    encoding = load_tokenizer(tokens.tokenizer) if text else None
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser("prepare", help="make token files")
    p.add_argument("inputs", nargs="+", metavar="INPUT", help="files and folders")
    p.add_argument("--out", required=True, help="folder to make")
    p.add_argument("--tokenizer", help="a tiktoken encoding, or bytes (the default)")
    p.add_argument("--val", type=float, default=0.0, help="share of the documents for validation, such as 0.005 (default 0)")
    p.add_argument("--on-error", choices=("stop", "skip"), default="stop", help="what to do with bad lines, bytes and documents")
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
    (prepare if args.pop("command") == "prepare" else show)(**args)


if __name__ == "__main__":
    run_cli(main)
