"""Token files and their readers: prepared folders (prepare.py), nanoGPT's train.bin and llm.c's .bin as they stand."""

import functools
import hashlib
import json
import os
import re
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch

from support.flags import UserError

FORMAT = 1  # of a prepared folder
LLMC = {20240520: (1, "uint16", "gpt2", 50257), 20240801: (7, "uint32", "llama-3", 128256)}  # magic -> version, kind
MAGIC = {  # how a file begins: what it is, and what to do with it
    b"\x1f\x8b\x08": ("gzip", "gunzip it"),
    b"BZh": ("bzip2", "bunzip2 it"),
    b"\xfd7zXZ\0": ("xz", "unxz it"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd it"),
    b"PK\x03\x04": ("zip", "unzip it"),
    b"7z\xbc\xaf": ("7z", "unpack it"),
    b"%PDF": ("PDF", "make text of it, as pdftotext does"),
    b"\x93NUMPY": (".npy", "prepare it with --vocab-size, under a name that ends in .npy"),
    b"PAR1": ("parquet", "prepare it, under a name that ends in .parquet"),
    b"ARROW1": ("Arrow", ARROW := "save it as parquet: Dataset.to_parquet of Hugging Face's datasets"),
    b"\xff\xff\xff\xff": ("Arrow", ARROW),  # a stream, as save_to_disk writes it
    b"version https://git-lfs": ("a Git LFS pointer", "fetch the file itself: git lfs pull"),
    b"\xff\xfe": ("UTF-16", "convert it: iconv -f UTF-16 -t UTF-8"),
    b"\xfe\xff": ("UTF-16", "convert it: iconv -f UTF-16 -t UTF-8"),
    b"\0\5\x16\7": ("macOS's notes on a file", "leave it out"),
}


def sniff(path: str | Path, *expected: str, file: BinaryIO | None = None) -> str:
    """What a file is by its first bytes, "" if that is not known; UserError if it is known and not as `expected`.

    file: what was opened, to be read from its beginning, where that is more than `path`.
    """
    if file is None:
        with open(path, "rb") as file:
            return sniff(path, *expected, file=file)
    begin = file.peek(512)
    kind, advice = next((known for magic, known in MAGIC.items() if begin.startswith(magic)), ("", ""))
    if begin[257:262] == b"ustar":
        kind, advice = "tar", "unpack it"
    if kind and kind not in expected:
        raise UserError(f"{path} is {kind}: {advice}")
    return kind


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
        """x, y: int64 (T,): tokens [w*T, w*T+T) and the token after each, -1 where masked.

        UserError names an id that a model with this vocabulary lacks.
        """
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
            found = f"{shard.path}: token {position} is id {ids[i]}, the model's vocabulary is {vocab_size}"
            raise UserError(f"{found}; --vocab-size {ids[i] + 1} or more, or prepare it with the model's tokenizer")
        return ids[:-1], np.where(mask[1:], ids[1:], -1)

    def batch(self, windows: np.ndarray, T: int, vocab_size: int | None) -> list[torch.Tensor]:
        """[x, y], int64 (B, T), of some windows."""
        rows = [self.window(int(w), T, vocab_size) for w in windows]
        return [torch.from_numpy(np.stack(column)) for column in zip(*rows)]


def guess_dtype(path: Path) -> str:
    """Of a headerless file "uint32", which has its high halves, all tiny, at every second place, or "uint16"."""
    halves = np.fromfile(path, "<u2", 4096)
    low, high = halves[: len(halves) // 2 * 2].reshape(-1, 2).T
    return "uint32" if len(high) >= 8 and high.max() < 16 <= low.max() else "uint16"


def raw_shard(path: Path, dtype: str = "uint16") -> tuple[Shard, tuple[str, str, int]]:
    """An llm.c file by its header, or a headerless one of this dtype: the shard and its (dtype, tokenizer, vocab_size).

    UserError also for a file that looks like something else.
    """
    sniff(path)
    size, header, begin = path.stat().st_size, np.fromfile(path, "<i4", 256), np.fromfile(path, "u1", 4096)
    if len(header) and header[0] in LLMC:
        version, *kind = LLMC[header[0]]
        if len(header) < 256 or header[1] != version:
            found = f"version {header[1]}" if len(header) == 256 else f"a header of {size} bytes, not 1024"
            raise UserError(f"{path}: llm.c file with {found}; of this kind version {version} is read")
        held = (size - 1024) / np.dtype(kind[0]).itemsize
        if held != header[2]:
            raise UserError(f"{path}: header says {header[2]} tokens, file holds {held:g} ({size} bytes, {kind[0]})")
        return Shard(str(path), 1024, int(held), None), tuple(kind)
    valid = begin.tobytes().decode(errors="ignore").encode()  # but for a character that is cut at its end
    if len(begin) >= 64 and begin.min() >= 9 and len(valid) > len(begin) - 4:
        raise UserError(f"{path} is text, no token file: `python data.py prepare --out DIR` makes one of it")
    n, rest = divmod(size, np.dtype(dtype).itemsize)
    if rest:
        raise UserError(f"{path}: {size} bytes is not a whole number of {dtype} tokens: cut short, or no token file")
    if dtype == "uint16" and guess_dtype(path) == "uint32":
        found = f"{path}: read as uint16 every second token is under 16: this looks like uint32"
        raise UserError(f"{found}; `python data.py prepare --out DIR --vocab-size N {path}` reads it")
    return Shard(str(path), 0, n, None), (dtype, "gpt2", 50257)


def in_split(split: str, name: str) -> bool:
    """Whether a file is of this split by its name; not the val of retrieval.bin."""
    words = {"train": "train", "val": "val|valid|validation", "test": "test"}[split]
    return re.search(rf"(?<![a-z])({words})(?![a-z])", os.path.basename(name).lower()) is not None


def split_files(path: Path, split: str) -> list[Path]:
    """The .bin files of a split: of a folder those with its name in theirs; for one train file its val file beside."""
    if path.is_file() and path.suffix != ".bin":
        raise UserError(f"{path} is no token file (.bin): `python data.py prepare --out DIR {path}` makes one of it")
    if path.is_dir():
        return sorted(p for p in path.glob("*.bin") if in_split(split, p.name))
    other = path.with_name(path.name.replace("train", split))
    return [other] if other.exists() and (split == "train" or other != path) else []


def read_meta(path: str) -> tuple[Path, dict | None]:
    """The folder that `path` is, or is a file of, and its meta.json: None if it has none."""
    folder = Path(path).parent if os.path.isfile(path) else Path(path)
    if not os.path.lexists(folder / "meta.json"):  # a link that leads nowhere is an error
        return folder, None
    try:
        meta = json.loads((folder / "meta.json").read_text())
        if meta["format"] != FORMAT:
            raise ValueError(f"format {meta['format']}, this version reads {FORMAT}")
        _ = [meta[name] for name in ("dtype", "tokenizer", "vocab_size", "splits", "key")]
    except (ValueError, KeyError, TypeError) as error:
        advice = "remove that folder and prepare it again"
        raise UserError(f"{folder}/meta.json is not usable ({error!r}): {advice}") from None
    return folder, meta


def open_tokens(path: str, split: str = "train") -> Tokens:
    """Open a prepared folder, a nanoGPT folder, an llm.c file or folder, or one .bin file; UserError if it is none."""
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
            there = f"holds {sorted(os.listdir(path))[:5]}" if os.path.lexists(path) else "is no file or folder"
            raise UserError(f"{path} {there}; wanted meta.json or *{split}*.bin (see python data.py prepare --help)")
        shards, kinds = zip(*map(raw_shard, files))
        if len(set(kinds)) > 1:
            raise UserError(f"{path}: files of different kinds for one split: {sorted(set(kinds))}")
        kind = kinds[0]
        if files[0].with_name("meta.pkl").exists():  # nanoGPT's characters: a pickle is not opened; see --vocab-size
            kind = kind[0], "characters", kind[2]
    shards = [s for s in shards if s.n_tokens]
    if not shards:
        raise UserError(f"{path}: 0 tokens in its {split} files")
    return Tokens(shards, *kind)


def has_val(path: str) -> bool:
    """Whether open_tokens(path, "val") has something to open."""
    _, meta = read_meta(path)
    return bool(meta["splits"]["val"]["shards"] if meta else split_files(Path(path), "val"))
