"""Corpus -> token files, and token files -> batches.

    python data.py prepare --out corpus/ --tokenizer gpt2 --val 0.005 book.txt folder/ docs.jsonl.gz table.parquet
    python data.py prepare --out corpus/ --vocab-size 128256 ids.jsonl tokens.npy     # ids of any other tokenizer
    python data.py show corpus/ --step 412 --world 8 [--text]                         # what did the ranks see?

Inputs by suffix: .jsonl .ndjson .json (a {"text": ...} or {"ids": [...], "mask": [...]} per line), .parquet (a text
column), .npy and .bin (token ids); any other file that is named, and those with a suffix of TEXT in a folder, is one
document of UTF-8 text. Lines and text may be compressed (.gz). A folder is read in sorted order with all folders below
it; what is not understood there is counted.

A text document is encoded as ordinary text (an "<|endoftext|>" written in it stays ten-odd plain tokens) and followed
by one end-of-text id. Ready-made ids are stored as they are: they bring their own end marks. Empty documents (nothing
or only blanks) are left out and counted.

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
import math
import os
import pickle
import re
import shutil
import signal
import sys
import sysconfig
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import tiktoken
import torch

from flags import UserError, run_cli
from meter import at

FORMAT = 1
SHARD_BYTES = 1 << 30
PIECE = 1 << 18  # characters one thread encodes at a time: about 50 ms of work, small enough to bound memory
LLMC = {(20240520, 1): ("gpt2", 50257, "uint16"), (20240801, 7): ("llama-3", 128256, "uint32")}  # magic, version of the header
TEXT = (
    ".txt",
    ".text",
    ".md",
    ".rst",
    ".tex",
    ".py",
    ".c",
    ".h",
    ".cc",
    ".cpp",
    ".cu",
    ".js",
    ".ts",
    ".java",
    ".go",
    ".rs",
    ".sh",
    ".html",
)
LINES = (".jsonl", ".ndjson", ".json")

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
        if self.n_tokens < T + 1:
            files = ", ".join(f"{s.path} ({os.path.getsize(s.path)} bytes)" for s in self.shards[:3])
            raise UserError(f"{files}: {self.n_tokens} tokens of {self.dtype}; one window of seq_len {T} needs {T + 1}")
        return (self.n_tokens - 1) // T

    def locate(self, position: int) -> tuple[str, int]:
        """Token position in the corpus -> (file, token position in this file)."""
        i = int(np.searchsorted(self.starts, position, side="right")) - 1
        return self.shards[i].path, position - int(self.starts[i])

    def window(self, w: int, T: int) -> tuple[np.ndarray, np.ndarray]:
        """x, y: int64 (T,): tokens [w*T, w*T+T) and the token after each, -1 where the target is masked."""
        start, stop = w * T, w * T + T + 1
        ids, mask = np.empty(T + 1, np.int64), np.ones(T + 1, bool)
        i = int(np.searchsorted(self.starts, start, side="right")) - 1
        while i < len(self.shards) and self.starts[i] < stop:
            shard, base = self.shards[i], int(self.starts[i])
            a, b = max(start, base), min(stop, base + shard.n_tokens)
            ids[a - start : b - start] = mapped(shard.path, self.dtype, shard.offset, shard.n_tokens)[a - base : b - base]
            if shard.mask:
                mask[a - start : b - start] = mapped(shard.mask, "u1", 0, shard.n_tokens)[a - base : b - base]
            i += 1
        return ids[:-1], np.where(mask[1:], ids[1:], -1)


def raw_shard(path: Path, dtype: str = "uint16") -> tuple[Shard, str, str, int]:
    """An llm.c file by its header, or a headerless one of `dtype`: (shard, dtype, tokenizer, vocab_size)."""
    size = path.stat().st_size
    header = np.fromfile(path, "<i4", 256)
    if len(header) and header[0] in {magic for magic, _ in LLMC}:
        known = LLMC.get((int(header[0]), int(header[1]))) if len(header) == 256 else None
        if known is None:
            found = f"magic {header[0]}, version {header[1]}" if len(header) == 256 else f"a header of {size} bytes, not 1024"
            raise UserError(f"{path}: llm.c file with {found}; readable are (magic, version) {sorted(LLMC)}")
        tokenizer, vocab_size, dtype = known
        width, n = np.dtype(dtype).itemsize, int(header[2])
        if size != 1024 + n * width:
            raise UserError(f"{path}: header says {n} tokens, file holds {(size - 1024) / width:g} ({size} bytes, {dtype})")
        return Shard(str(path), 1024, n, None), dtype, tokenizer, vocab_size
    width = np.dtype(dtype).itemsize
    if size % width:
        raise UserError(f"{path}: {size} bytes is not a whole number of {dtype} tokens: cut short, or no token file")
    if size:
        # a uint32 file read as uint16 has the high halves, all tiny, at every second place; 4096 tokens show it
        low, high = np.fromfile(path, dtype, 4096)[: size // width // 2 * 2].reshape(-1, 2).T
        if width == 2 and len(high) >= 8 and high.max() < 16 <= low.max():
            raise UserError(f"{path}: read as uint16 every second token is under 16: this looks like uint32, which needs meta.json")
    return Shard(str(path), 0, size // width, None), dtype, "gpt2", 50257


def split_files(path: Path, split: str) -> list[Path]:
    """The .bin files of a split: of a folder those with its name in theirs; for one train file its val file beside."""
    if path.is_dir():
        return sorted(p for p in path.glob("*.bin") if split in p.name)
    if split == "train":
        return [path] if path.exists() else []
    other = path.with_name(path.name.replace("train", split))
    return [other] if other != path and other.exists() else []


def read_meta(folder: Path) -> dict:
    try:
        meta = json.loads((folder / "meta.json").read_text())
        if meta["format"] != FORMAT:
            raise UserError(f"{folder}/meta.json: format {meta['format']}, this version reads {FORMAT}: prepare it again")
        return meta
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder}/meta.json is damaged ({error!r}): prepare the corpus again") from None


class _NoCode(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        raise UserError(f"meta.pkl asks to run {module}.{name}: only plain dicts are read")


def prepared_folder(path: str) -> Path | None:
    """The folder with meta.json that `path` is, or is a file of."""
    folder = Path(path).parent if os.path.isfile(path) else Path(path)
    return folder if (folder / "meta.json").exists() else None


def open_tokens(path: str, split: str = "train") -> Tokens:
    """Open a prepared folder, a nanoGPT folder, an llm.c file or folder, or one .bin file. UserError says what is wrong."""
    folder, shards = prepared_folder(path), []
    if folder:
        meta = read_meta(folder)
        dtype, tokenizer, vocab_size = meta["dtype"], meta["tokenizer"], meta["vocab_size"]
        for s in meta["splits"][split]["shards"]:
            for name, kind in ((s["file"], dtype), (s["mask"], "uint8")):
                size = os.path.getsize(folder / name) if name and (folder / name).exists() else None
                if name and size != s["tokens"] * np.dtype(kind).itemsize:
                    found = "is missing" if size is None else f"holds {size} bytes"
                    raise UserError(f"{folder / name} {found}: meta.json says {s['tokens']} tokens of {kind}")
            shards.append(Shard(str(folder / s["file"]), 0, s["tokens"], s["mask"] and str(folder / s["mask"])))
    else:
        files = split_files(Path(path), split)
        if not files:
            there = f"holds {sorted(os.listdir(path))[:5]}" if os.path.isdir(path) else "is no file or folder"
            raise UserError(f"{path} {there}; wanted meta.json or *{split}*.bin (see python data.py prepare --help)")
        found = [raw_shard(file) for file in files]
        kinds = sorted({f[1:] for f in found})
        if len(kinds) > 1:
            raise UserError(f"{path}: files of different kinds for one split: {kinds}")
        shards, (dtype, tokenizer, vocab_size) = [f[0] for f in found], kinds[0]
        extra = files[0].with_name("meta.pkl")  # nanoGPT's character-level corpora
        if extra.exists():
            with open(extra, "rb") as f:
                tokenizer, vocab_size = "characters", int(_NoCode(f).load()["vocab_size"])
    shards = [s for s in shards if s.n_tokens]
    if not shards:
        raise UserError(f"{path}: 0 tokens in its {split} files")
    return Tokens(shards, dtype, tokenizer, vocab_size)


def has_val(path: str) -> bool:
    """Whether open_tokens(path, "val") has something to open."""
    folder = prepared_folder(path)
    return bool(read_meta(folder)["splits"]["val"]["shards"] if folder else split_files(Path(path), "val"))


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


def rank_rows(step: int, micro: int, *, global_batch: int, micro_batch: int, rank: int, world_size: int) -> np.ndarray:
    """Stream positions of micro-batch `micro` of `rank` in `step`: int64 (micro_batch,). Rank r owns the r-th n-th of a step."""
    first = step * global_batch + rank * (global_batch // world_size) + micro * micro_batch
    return np.arange(first, first + micro_batch)


def read_rows(tokens: Tokens, windows: np.ndarray, T: int, vocab_size: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows -> x, y int64 (B, T). An id the model has no row for is a UserError that says where it stands."""
    x, y = (np.stack(rows) for rows in zip(*(tokens.window(int(w), T) for w in windows), strict=True))
    if vocab_size is not None and max(x.max(), y.max()) >= vocab_size:
        b, t = np.argwhere(np.maximum(x, y) >= vocab_size)[0]
        after = int(x[b, t] < vocab_size)
        file, position = tokens.locate(int(windows[b]) * T + int(t) + after)
        raise UserError(f"{file}: token {position} is id {max(x[b, t], y[b, t])}, the model's vocabulary is {vocab_size}")
    return torch.from_numpy(x), torch.from_numpy(y)


def read_micro(tokens: Tokens, T: int, seed: int, n_windows: int, accum: int, vocab_size: int, layout: dict, i: int) -> torch.Tensor | str:
    """Runs in the worker: the i-th micro-batch of a rank since step 0; or what is wrong with it.

    x, y and sample as one flat tensor: each tensor a worker hands over costs a connection, each transfer a call.
    """
    sample = rank_rows(i // accum, i % accum, **layout)
    windows = stream_windows(seed, int(sample[0]), len(sample), n_windows)
    try:
        x, y = read_rows(tokens, windows, T, vocab_size)
        return torch.cat([x.flatten(), y.flatten(), torch.from_numpy(sample)])
    except UserError as error:
        return str(error)  # raised in a worker it would come back wrapped in a traceback


def ignore_signals(worker: int) -> None:
    # torchrun and Ctrl-C signal the whole process group; the rank still needs its batches to finish the step and save
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class Batches:
    """The micro-batches of one data-parallel rank, from (start_step, 0) up to step `steps`, which is not included.

    rank, world_size: of the data-parallel group. vocab_size: the model's. The position is the step number: workers read
    ahead, but nothing they do is counted.
    """

    def __init__(
        self, tokens: Tokens, *, seq_len: int, global_batch: int, micro_batch: int, rank: int, world_size: int, seed: int,
        start_step: int, steps: int, workers: int, device: torch.device | str, vocab_size: int
    ):  # fmt: skip
        if global_batch % (world_size * micro_batch):
            raise UserError(f"global batch {global_batch} is not a multiple of {world_size} ranks x micro-batch {micro_batch}")
        accum = global_batch // world_size // micro_batch
        layout = {"global_batch": global_batch, "micro_batch": micro_batch, "rank": rank, "world_size": world_size}
        self.rank, self.device, self.shape = rank, torch.device(device), (micro_batch, seq_len)
        loader = torch.utils.data.DataLoader(
            range(start_step * accum, steps * accum),  # number of the micro-batch among all of this rank's
            batch_size=None,
            collate_fn=functools.partial(read_micro, tokens, seq_len, seed, tokens.n_windows(seq_len), accum, vocab_size, layout),
            num_workers=workers,
            pin_memory=self.device.type == "cuda",
            persistent_workers=workers > 0,
            worker_init_fn=ignore_signals,
        )
        # blocked while the workers start, which inherit that: they are safe from their first instruction on
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        self.iterator = iter(loader)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        if workers:
            # the loader's SIGCHLD handler would raise in whatever line a dying worker interrupts; without it the death
            # is found where data is waited for, within 5 s
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        atexit.register(self.close)  # workers ignore SIGTERM: an interpreter that exits on an error would wait for them

    def next(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x (B, T), y (B, T) with -1 = no target, sample (B,) stream positions; int64 on the device."""
        with at("data"):
            try:
                batch = next(self.iterator)
            except (RuntimeError, OSError, EOFError) as error:  # OSError, EOFError: it died while handing a tensor over
                workers = getattr(self.iterator, "_workers", [])
                for worker in workers:
                    worker.join(0.5)  # the dead one may not be buried yet
                dead = [worker.pid for worker in workers if not worker.is_alive()]
                if not dead:
                    raise
                raise UserError(
                    f"data-parallel rank {self.rank}: loader worker with pid {dead} died (killed, or out of memory or /dev/shm): {error}"
                ) from None
            if isinstance(batch, str):
                raise UserError(batch)
            # pinned and non_blocking: the host does not wait, 16 bytes per token take microseconds of the stream
            flat, n = batch.to(self.device, non_blocking=True), self.shape[0] * self.shape[1]
            return flat[:n].view(self.shape), flat[n : 2 * n].view(self.shape), flat[2 * n :]

    def close(self) -> None:
        """End the workers."""
        atexit.unregister(self.close)
        if hasattr(self.iterator, "_shutdown_workers"):
            self.iterator._shutdown_workers()


def val_batches(
    tokens: Tokens, *, seq_len: int, micro_batch: int, rank: int, world_size: int, limit: int, vocab_size: int | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The first `limit` windows (0: all) in order, each once over all ranks: x (B, T), y (B, T), sample (B,) on the CPU.

    Every rank yields the same number of batches. Rows that fill the last ones up have no target (-1) and sample -1.
    Read in this process: loader workers in evaluation cost BLOOM three hangs, and save milliseconds.
    """
    n = tokens.n_windows(seq_len)
    n = min(n, limit) if limit else n
    stride = micro_batch * world_size
    for first in range(rank * micro_batch, -(-n // stride) * stride, stride):
        windows = np.arange(first, first + micro_batch)
        filler = torch.from_numpy(windows >= n)
        x, y = read_rows(tokens, np.minimum(windows, n - 1), seq_len, vocab_size)
        y[filler] = -1
        yield x, y, torch.from_numpy(windows).masked_fill(filler, -1)


# ------------------------------------------------------------------------------------------------------- tokenizers


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
        reason = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}" if str(error) else type(error).__name__
        raise UserError(
            f"tokenizer {name}: the vocabulary could not be downloaded ({reason}): set TIKTOKEN_CACHE_DIR to a folder that holds it, "
            "or use --tokenizer bytes"
        ) from None


def encode_text(encoding: tiktoken.Encoding, text: str) -> np.ndarray:
    """encode_ordinary as an array. Through encode_to_numpy: the Python list would cost a third of the time."""
    if encoding.name == "bytes":
        return np.frombuffer(text.encode(), np.uint8)  # the same ids as the encoding gives, 100 times as fast
    return encoding.encode_to_numpy(text, allowed_special=set(), disallowed_special=())


# ------------------------------------------------------------------------------------------------- corpus -> token files


class Piece(NamedTuple):
    """A document, or a part of a long one, in reading order."""

    payload: str | np.ndarray  # text, or ready-made ids
    mask: np.ndarray | None
    first: bool
    last: bool
    where: str  # for messages: file and line


Bad = Callable[[str], None]  # what to do with a data error: raise, or count and go on


def border(text: str, limit: int) -> int:
    """Where to cut text: the last safe place before `limit` (see BORDER), `limit` itself if there is none near."""
    return max((m.end() for m in BORDER.finditer(text, max(0, limit - 8192), limit)), default=limit)


def read_text(path: str, file: BinaryIO, bad: Bad) -> Iterator[Piece]:
    """One document in pieces. Bytes are decoded as they come; a character on a block's edge waits for its other half."""
    pending, at_byte, text, first, block = b"", 0, "", True, b"\n"
    while block:
        block = file.read(PIECE)
        data = pending + block
        try:
            decoded, used = codecs.utf_8_decode(data, "strict", not block)
        except UnicodeDecodeError as error:
            bad(f"{path}: byte {at_byte + error.start}: invalid UTF-8 ({data[error.start : error.end].hex(' ')})")
            decoded, used = codecs.utf_8_decode(data, "replace", not block)  # skipping: the bytes become U+FFFD
        pending, text = data[used:], text + (decoded if at_byte else decoded.removeprefix("\ufeff"))
        at_byte += used
        if block and len(text) > PIECE:
            cut = border(text, len(text) - 1)
            yield Piece(text[:cut], None, first, False, path)
            text, first = text[cut:], False
    yield Piece(text, None, first, True, path)


def read_lines(path: str, file: BinaryIO, field: str, vocab_size: int | None, bad: Bad) -> Iterator[Piece]:
    start = 0
    for number, line in enumerate(file, 1):
        where = f"{path}:{number}"
        try:
            row = json.loads(line.decode().removeprefix("\ufeff")) if line.strip() else {field: ""}  # a blank line: empty
            if isinstance(row, dict) and "ids" in row:
                ids = check_ids(np.asarray(row["ids"]), where, 0, vocab_size)
                mask = np.asarray(row["mask"]) if row.get("mask") is not None else None
                if mask is not None and (mask.shape != ids.shape or not np.isin(mask, (0, 1)).all()):
                    raise ValueError(f'"mask" must be a 0 or 1 for each of the {len(ids)} ids')
                yield Piece(ids, mask, True, True, where)
            elif isinstance(row, dict) and isinstance(row.get(field), str):
                yield Piece(row[field], None, True, True, where)
            else:
                found = f"{field!r} is {type(row[field]).__name__}" if isinstance(row, dict) and field in row else "no such field"
                has = f"fields {list(row)}" if isinstance(row, dict) else f"a {type(row).__name__}"
                raise ValueError(f'{found}; wanted {{"{field}": string}} or {{"ids": [...]}}, the line has {has}')
        except UnicodeDecodeError as error:
            bad(f"{where}: byte {start + error.start} of the file: invalid UTF-8 ({line[error.start : error.end].hex(' ')})")
        except (ValueError, RecursionError, UserError) as error:
            bad(f"{where}: {error}" if not isinstance(error, UserError) else str(error))
        start += len(line)


def read_parquet(path: str, field: str, bad: Bad) -> Iterator[Piece]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{path}: parquet needs pyarrow (pip install pyarrow)") from None
    row = 0
    try:
        table = pyarrow.parquet.ParquetFile(path, memory_map=True)
        if field not in table.schema_arrow.names:
            raise UserError(f"{path}: no column {field!r}, there are {table.schema_arrow.names}")
        for batch in table.iter_batches(batch_size=1024, columns=[field]):
            for value in batch.column(0):
                text = value.as_py()
                if isinstance(text, str):
                    yield Piece(text, None, True, True, f"{path} row {row}")
                else:
                    bad(f"{path} row {row}: {field!r} is {type(text).__name__}, wanted a string")
                row += 1
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        bad(f"{path} row {row}: {str(error).splitlines()[0]}")


def read_ids(path: str, vocab_size: int | None) -> Iterator[Piece]:
    if path.endswith(".npy"):
        try:
            ids = np.load(path, mmap_mode="r", allow_pickle=False)
        except ValueError as error:
            raise UserError(f"{path}: {error}") from None
    else:
        shard, dtype, _, _ = raw_shard(Path(path), "uint32" if (vocab_size or 0) > 1 << 16 else "uint16")
        ids = np.memmap(path, dtype, "r", shard.offset, (shard.n_tokens,)) if shard.n_tokens else np.empty(0, dtype)
    if ids.ndim != 1:
        raise UserError(f"{path}: array of shape {ids.shape}, wanted one row of ids")
    for a in range(0, max(1, len(ids)), PIECE):
        part = check_ids(np.asarray(ids[a : a + PIECE]), path, a, vocab_size)
        yield Piece(part, None, a == 0, a + PIECE >= len(ids), path)


def check_ids(ids: np.ndarray, where: str, start: int, vocab_size: int | None) -> np.ndarray:
    if vocab_size is None:
        raise UserError(f"{where}: token ids need --vocab-size")
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise UserError(f"{where}: ids must be one list of whole numbers, found {ids.dtype} of shape {ids.shape}")
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        i = int(np.argmax((ids < 0) | (ids >= vocab_size)))
        raise UserError(f"{where}: id {ids[i]} at position {start + i}, allowed are 0 to {vocab_size - 1} (--vocab-size)")
    return ids


def suffix_of(path: str) -> str:
    return Path(path.removesuffix(".gz")).suffix.lower()


def find_files(inputs: list[str], with_ids: bool) -> tuple[list[str], Counter]:
    """Files to read in order, and how many in the folders were left, by suffix. A file named outright is always read."""
    wanted = (*TEXT, *LINES, ".parquet", *((".npy", ".bin") if with_ids else ()))
    files, left = [], Counter()
    for name in inputs:
        if os.path.isfile(name):
            files.append(name)
        elif os.path.isdir(name):
            for folder, folders, names in os.walk(name):
                folders.sort()
                for path in (os.path.join(folder, n) for n in sorted(names)):
                    if suffix_of(path) in wanted:
                        files.append(path)
                    else:
                        left[suffix_of(path) or "no suffix"] += 1
        else:
            raise UserError(f"{name}: no such file or folder")
    if not files:
        raise UserError(f"no file to read in {', '.join(inputs)}: wanted {' '.join(wanted)} (text and lines also .gz), found {dict(left)}")
    return files, left


def encode_batch(pieces: list[tuple[str, Piece]], encoding: tiktoken.Encoding, dtype: str) -> tuple[dict, list[str]]:
    """Runs in a thread (tiktoken works without the GIL): {split: (ids, mask or None, documents)} and the data errors."""
    parts, errors = {}, []
    for split, piece in pieces:
        ids, masks, documents = parts.setdefault(split, ([], [], []))
        if isinstance(piece.payload, str):
            try:
                new = encode_text(encoding, piece.payload)
            except BaseException as error:  # tiktoken's Rust panics derive from BaseException alone
                if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                    raise
                errors.append(f"{piece.where}: the tokenizer cannot encode this ({type(error).__name__}: {str(error)[:120]})")
                if piece.first and piece.last:
                    continue
                new = np.empty(0, dtype)
            new = np.append(new, encoding.eot_token) if piece.last else new
        else:
            new = piece.payload
        ids.append(new.astype(dtype))
        masks.append(piece.mask)
        documents.append(piece.last)
    result = {}
    for split, (ids, masks, documents) in parts.items():
        mask = None
        if any(m is not None for m in masks):
            mask = np.concatenate([np.ones(len(i), np.uint8) if m is None else m.astype(np.uint8) for i, m in zip(ids, masks, strict=True)])
        result[split] = np.concatenate(ids) if ids else np.empty(0, dtype), mask, sum(documents)
    return result, errors


class ShardWriter:
    """Appends the tokens of one split to SHARD_BYTES-sized files in a folder."""

    def __init__(self, folder: Path, split: str, dtype: str):
        self.folder, self.split, self.dtype = folder, split, dtype
        self.shards, self.documents, self.file, self.mask = [], 0, None, None

    def write(self, ids: np.ndarray, mask: np.ndarray | None, documents: int) -> None:
        self.documents += documents
        room = SHARD_BYTES // np.dtype(self.dtype).itemsize
        while len(ids):
            if self.file is None:
                self.shards.append({"file": f"{self.split}-{len(self.shards):05d}.bin", "mask": None, "tokens": 0})
                self.file = open(self.folder / self.shards[-1]["file"], "wb")
            shard = self.shards[-1]
            n = min(len(ids), room - shard["tokens"])
            if mask is not None and self.mask is None:  # the first masked target of this shard: all before it count
                shard["mask"] = shard["file"].replace(".bin", ".mask")
                self.mask = open(self.folder / shard["mask"], "wb")
                self.mask.write(np.ones(shard["tokens"], np.uint8))
            self.file.write(ids[:n])
            if self.mask is not None:
                self.mask.write(np.ones(n, np.uint8) if mask is None else mask[:n])
            shard["tokens"] += n
            ids, mask = ids[n:], None if mask is None else mask[n:]
            if shard["tokens"] == room:
                self.flush()

    def flush(self) -> None:
        for file in (self.file, self.mask):
            if file is not None:
                file.flush()
                os.fsync(file.fileno())
                file.close()
        self.file = self.mask = None

    def finish(self) -> dict:
        self.flush()
        if len(self.shards) == 1:  # the usual name, which nanoGPT reads too
            for key in ("file", "mask"):
                if name := self.shards[0][key]:
                    self.shards[0][key] = name.replace("-00000", "")
                    os.rename(self.folder / name, self.folder / self.shards[0][key])
        return {"tokens": sum(s["tokens"] for s in self.shards), "documents": self.documents, "shards": self.shards}


def read_files(files: list[str], field: str, vocab_size: int | None, bad: Bad) -> Iterator[tuple[Piece, int]]:
    """All pieces of all files in order, each with the bytes read so far (compressed ones where compressed)."""
    before = 0
    for path in files:
        suffix, open_document = suffix_of(path), False
        with open(path, "rb") as raw:
            file = gzip.GzipFile(fileobj=raw) if path.endswith(".gz") else raw
            if suffix in (".npy", ".bin"):
                reader = read_ids(path, vocab_size)
            elif suffix == ".parquet":
                reader = read_parquet(path, field, bad)
            elif suffix in LINES:
                reader = read_lines(path, file, field, vocab_size, bad)
            else:
                reader = read_text(path, file, bad)
            try:
                for piece in reader:
                    open_document = not piece.last
                    yield piece, before + raw.tell()
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                bad(f"{path}: damaged gzip file: {error}")
                if open_document:
                    yield Piece("", None, False, True, path), before
        before += os.path.getsize(path)


def split_documents(pieces: Iterator[tuple[Piece, int]], val: float, seen: Counter) -> Iterator[tuple[str, Piece, int]]:
    """Give each document its split, leave out empty ones, cut long ones. Counts into `seen`."""
    documents, split = 0, "train"
    for piece, done in pieces:
        text = piece.payload if isinstance(piece.payload, str) else None
        if piece.first:
            if piece.last and (len(piece.payload) == 0 or (text is not None and text.isspace())):
                seen["empty"] += 1
                continue
            # the floor steps up at the second document first: a small corpus, too, has something to validate on
            split = "val" if val and math.floor((documents - 1) * val) > math.floor((documents - 2) * val) else "train"
            documents += 1
        seen["text" if text is not None else "ids"] += piece.first
        start, first = 0, piece.first
        while text is not None and len(text) - start > 2 * PIECE:
            stop = border(text, start + PIECE)
            yield split, piece._replace(payload=text[start:stop], first=first, last=False), done
            start, first = stop, False
        yield split, piece._replace(payload=text[start:], first=first) if start else piece, done


def differences(old: dict, new: dict) -> list[str]:
    """What two cache keys differ in, in words."""
    words = [f"{k} was {old.get(k)}, now {new[k]}" for k in new if k != "sources" and old.get(k) != new[k]]
    was, now = old.get("sources", {}), new["sources"]
    for verb, paths in (
        ("changed", [f for f in now if f in was and was[f] != now[f]]),
        ("is new", now.keys() - was),
        ("is gone", was.keys() - now),
    ):
        if paths:
            words.append(f"{min(paths)} {verb}" + (f" and {len(paths) - 1} more" if len(paths) > 1 else ""))
    return words


def progress(total: int) -> Callable[[int], None]:
    """A function to call with the bytes done: at most one line a second on stderr, with rate and time left."""
    start = last = time.monotonic()

    def report(done: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= 1:
            last, rate = now, done / (now - start)
            left = f"{(total - done) / rate:.0f} s left" if rate else "..."
            print(f"{done / 1e6:.1f} of {total / 1e6:.1f} MB, {rate / 1e6:.1f} MB/s, {left}", file=sys.stderr, flush=True)

    return report


def prepare(
    out: str,
    inputs: list[str],
    tokenizer: str | None = None,
    val: float = 0.0,
    on_error: str = "stop",
    vocab_size: int | None = None,
    workers: int | None = None,
    text_field: str = "text",
) -> None:
    """Make the token folder `out`; nothing appears under that name before all of it is written and flushed.

    val: share of the documents for the val split, evenly spread: the second document and then every (1/val)-th.
    on_error "skip": bad lines and documents are counted and listed in meta.json, bad bytes of a text become U+FFFD.
    A folder made from the same inputs with the same options is left alone, one made otherwise is refused.
    """
    folder = Path(out)
    files, left = find_files(inputs, vocab_size is not None)
    sources = {os.path.abspath(f): [os.path.getsize(f), os.stat(f).st_mtime_ns] for f in files}
    key = {"tokenizer": tokenizer, "val": val, "on_error": on_error, "vocab_size": vocab_size, "text_field": text_field, "sources": sources}
    if (folder / "meta.json").exists():
        differs = differences(read_meta(folder)["key"], key)
        if differs:
            raise UserError(f"{out} was prepared otherwise ({'; '.join(differs)}): remove it or choose another --out")
        print(f"{out} is up to date", file=sys.stderr)
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{out} exists and is no prepared corpus: choose another --out")
    if not 0 <= val < 1:
        raise UserError(f"--val {val}: a share of the documents, 0 <= val < 1")
    encoding = load_tokenizer(tokenizer or "bytes")
    vocab = vocab_size or encoding.n_vocab
    dtype = "uint16" if vocab <= 1 << 16 else "uint32"
    skipped, seen = [], Counter()

    def bad(message: str) -> None:
        if on_error == "stop":
            raise UserError(f"{message} (--on-error skip goes on without it)")
        skipped.append(message)

    def batches() -> Iterator[tuple[list[tuple[str, Piece]], int]]:
        batch, size, done = [], 0, 0
        for split, piece, done in split_documents(read_files(files, text_field, vocab_size, bad), val, seen):
            if isinstance(piece.payload, str) and encoding.n_vocab > vocab:
                raise UserError(f"{piece.where}: text, but --vocab-size {vocab} is less than {encoding.name}'s {encoding.n_vocab} ids")
            batch.append((split, piece))
            size += len(piece.payload)
            if size >= PIECE:
                yield batch, done
                batch, size = [], 0
        yield batch, done

    temporary = Path(f"{out.rstrip('/')}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    # threads, not processes: tiktoken drops the GIL, text need not be copied, and a small input does not wait for spawns
    workers = workers or os.cpu_count()
    pool = ThreadPoolExecutor(workers)
    try:
        temporary.mkdir(parents=True)
        writers = {split: ShardWriter(temporary, split, dtype) for split in ("train", "val")}
        report, pending = progress(sum(size for size, _ in sources.values())), deque()

        def write_oldest() -> None:
            future, done = pending.popleft()
            parts, errors = future.result()
            for error in errors:
                bad(error)
            for split, part in parts.items():
                writers[split].write(*part)
            report(done)

        for batch, done in batches():
            pending.append((pool.submit(encode_batch, batch, encoding, dtype), done))
            if len(pending) > 2 * workers:  # what bounds the memory
                write_oldest()
        while pending:
            write_oldest()
        splits = {split: writer.finish() for split, writer in writers.items()}
        if not splits["train"]["tokens"]:
            count = f"{len(files)} files, {seen['empty']} empty documents, {len(skipped)} skipped {skipped[:1]}"
            raise UserError(f"nothing for the train split in {', '.join(inputs[:5])}: {count}")
        meta = {
            "format": FORMAT,
            "tokenizer": tokenizer or ("bytes" if seen["text"] else "ids"),
            "vocab_size": vocab,
            "eot": encoding.eot_token if tokenizer or seen["text"] else None,
            "dtype": dtype,
            "splits": splits,
            "empty": seen["empty"],
            "left_out": dict(left),
            "skipped": len(skipped),
            "skipped_first": skipped[:1000],
            "key": key,
        }
        with open(temporary / "meta.json", "w") as f:
            json.dump(meta, f, indent=1)
            f.flush()
            os.fsync(f.fileno())
        os.rename(temporary, folder)
        parent = os.open(folder.parent, os.O_RDONLY)
        os.fsync(parent)  # the rename itself
        os.close(parent)
    except OSError as error:
        raise UserError(f"{error.filename or temporary}: {error.strerror or error}") from None
    finally:
        pool.shutdown(cancel_futures=True)
        shutil.rmtree(temporary, ignore_errors=True)
    counts = [f"{name} {s['tokens']:,} tokens in {s['documents']:,} documents" for name, s in splits.items()]
    print(f"{out}: {', '.join(counts)}; {vocab} ids, {dtype}", file=sys.stderr)
    if seen["empty"] or skipped or left:
        print(f"left out: {seen['empty']} empty documents, {len(skipped)} skipped, files by suffix {dict(left)}", file=sys.stderr)
        for message in skipped[:20]:
            print(f"skipped: {message}", file=sys.stderr)
    if val and not splits["val"]["tokens"]:
        print("no val split: it is made of whole documents, and there is only one", file=sys.stderr)


def ensure_corpus(path: str) -> None:
    """The default corpus at `path`: the Python standard library's own sources as bytes. One made of others is replaced."""
    library = sysconfig.get_paths()["stdlib"]
    files = [f for f in find_files([library], False)[0] if f.endswith(".py") and "-packages" not in f[len(library) :]]
    options = {"val": 0.005, "on_error": "skip"}  # the library's tests hold files that are no UTF-8 on purpose
    if Path(path, "meta.json").exists():
        key = read_meta(Path(path))["key"]
        sources = {os.path.abspath(f): [os.path.getsize(f), os.stat(f).st_mtime_ns] for f in files}
        if not differences(key, {**key, **options, "tokenizer": None, "sources": sources}):
            return
        print(f"{path} is of another Python: made anew", file=sys.stderr)
        shutil.rmtree(path)
    prepare(path, files, **options)


# ----------------------------------------------------------------------------------------------------- command line


def show(path: str, step: int, world: int, global_batch: int, micro_batch: int, seq_len: int, seed: int, text: bool) -> None:
    """Print which windows each data-parallel rank reads in a step, computed as the loader does, and check them."""
    tokens = open_tokens(path)
    if global_batch % (world * micro_batch):
        raise UserError(f"--global-batch {global_batch} is not a multiple of --micro-batch {micro_batch} x --world {world}")
    n_windows, samples = tokens.n_windows(seq_len), []
    encoding = load_tokenizer(tokens.tokenizer) if text else None
    for rank in range(world):
        layout = {"global_batch": global_batch, "micro_batch": micro_batch, "rank": rank, "world_size": world}
        mine = [rank_rows(step, m, **layout) for m in range(global_batch // world // micro_batch)]
        samples += [int(s) for micro in mine for s in micro]
        windows = np.concatenate([stream_windows(seed, int(micro[0]), len(micro), n_windows) for micro in mine])
        print(f"rank {rank}: samples {mine[0][0]}-{mine[-1][-1]}, windows {' '.join(map(str, windows))}")
        for w in windows if text else ():
            file, position = tokens.locate(int(w) * seq_len)
            print(f"--- window {w}: {file}, token {position}")
            print(encoding.decode(tokens.window(int(w), seq_len)[0].tolist()))
    wanted = list(range(step * global_batch, (step + 1) * global_batch))
    if samples != wanted:
        raise UserError(f"the ranks read samples {samples}, not {wanted[0]}-{wanted[-1]} once each")
    epochs = f"epoch {wanted[0] // n_windows}" + (f"-{wanted[-1] // n_windows}" if wanted[-1] // n_windows > wanted[0] // n_windows else "")
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
    p.add_argument("--global-batch", type=int, default=64)
    p.add_argument("--micro-batch", type=int, default=1)
    p.add_argument("--seq-len", type=int, default=128)
    p.add_argument("--seed", type=int, default=1337)
    p.add_argument("--text", action="store_true", help="the text behind each window too")
    args = vars(parser.parse_args())
    (prepare if args.pop("command") == "prepare" else show)(**args)


if __name__ == "__main__":
    run_cli(main)
