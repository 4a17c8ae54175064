"""Text and token ids of many formats -> token files (`python data.py prepare`).

    python data.py prepare --out corpus/ --tokenizer gpt2 --val 0.005 book.txt folder/ docs.jsonl.gz table.parquet
    python data.py prepare --out corpus/ --vocab-size 128256 ids.jsonl tokens.npy     # ids of any other tokenizer

Inputs by suffix: .jsonl .ndjson .json (a {"text": ...} or {"ids": [...], "mask": [...]} per line), .parquet (a text
column), .npy and .bin (token ids); any other file that is named, and those with a suffix of TEXT in a folder, is one
document of UTF-8 text. Lines and text may be compressed (.gz, .bz2, .xz). Folders are read in sorted order, with those
below; hidden files are left out, and so is what is not understood there: both are counted. Token files with "val" in
their name go to the val split.

Text is encoded as ordinary text (an "<|endoftext|>" in it is no end mark), each document followed by one end-of-text
id. Ready-made ids bring their own end marks. Documents that are empty or blank are left out and counted.

The result is a folder: train.bin and val.bin, headerless little-endian uint16 (uint32 above 65,536 ids), cut into
train-00000.bin ... above 1 GiB, train.mask beside where targets are masked, and meta.json, which says what it is.
Memory is bounded, whatever the size of the input.
"""

import bz2
import codecs
import fcntl
import functools
import gzip
import hashlib
import json
import lzma
import os
import re
import shutil
import sys
import sysconfig
import tempfile
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, BinaryIO, NamedTuple

import numpy as np
import tiktoken

from checkpoint import fsync
from support.flags import UserError
from support.tokens import FORMAT, in_split, raw_shard, read_meta, sniff

os.umask(UMASK := os.umask(0))  # the only way to read it; mkdtemp makes folders that nobody else may read
SHARD_BYTES = 1 << 30
PIECE = 1 << 18  # characters one thread encodes at a time: about 50 ms of work, small enough to bound memory
TEXT = tuple(".txt .text .md .rst .tex .py .c .h .cc .cpp .cu .js .ts .java .go .rs .sh .html".split())
LINES, IDS = (".jsonl", ".ndjson", ".json"), (".npy", ".bin")
PACKED = {"gzip": gzip.open, "bzip2": bz2.open, "xz": lzma.open}  # as tokens.sniff names them

# Where a long document may be cut so that every tiktoken pattern gives the same tokens as for the whole: before a space
# that follows a non-space, or after a letter or digit that white space or CJK punctuation follows. No pattern matches
# across either, and each starts afresh there. Text without such a border in 8192 characters is cut where it stands.
BORDER = re.compile(r"\S(?= )|[^\W_](?=[\s\u3001\u3002\uff01\uff0c\uff1f])")


def load_tokenizer(name: str) -> tiktoken.Encoding:
    """A tiktoken encoding by name, or "bytes": 256 byte tokens and <|endoftext|> = 256, which needs no network."""
    if name == "bytes":
        ranks, special = {bytes([i]): i for i in range(256)}, {"<|endoftext|>": 256}
        return tiktoken.Encoding(name, pat_str=r"[\s\S]{1,64}", mergeable_ranks=ranks, special_tokens=special)
    known = tiktoken.list_encoding_names()
    if name not in known:
        raise UserError(f"unknown tokenizer {name!r}: tiktoken has {', '.join(sorted(known))}, and there is bytes")
    try:
        return tiktoken.get_encoding(name)
    except Exception as error:  # requests' own errors, a wrong hash, an unwritable cache: all the same to the user
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:150]
        hint = "set TIKTOKEN_CACHE_DIR to a folder that a machine with a network has filled, or use --tokenizer bytes"
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
            if not isinstance(row, bytes):
                row = {field: row.as_py()}
            else:  # a blank line is an empty document
                row = json.loads(row.decode().removeprefix("\ufeff")) if row.strip() else {field: ""}
            document = row if isinstance(row, dict) else {}
            if "ids" in document:
                ids = check_ids(np.asarray(row["ids"]), 0, vocab_size)
                mask = None if row.get("mask") is None else np.asarray(row["mask"])
                if mask is not None and (mask.shape != ids.shape or not np.isin(mask, (0, 1)).all()):
                    raise ValueError(f'"mask" must be a 0 or 1 for each of the {len(ids)} ids')
                yield Piece(ids, where, mask)
            elif isinstance(document.get(field), str):
                yield from cut([row[field]], where)
            else:
                found = {key: type(value).__name__ for key, value in document.items()} or f"a {type(row).__name__}"
                other = next((f"; --text-field {key} takes that" for key in document if found[key] == "str"), "")
                other = other or HOW_TO_SPLIT.format(path) * (number == 1 and not isinstance(row, dict | str))
                raise ValueError(f'wanted {{"{field}": string}} or {{"ids": [...]}}, found {found}{other}')
        except UnicodeDecodeError as error:
            bad(f"{where}: invalid UTF-8 at its byte {error.start} ({error.object[error.start : error.end].hex(' ')})")
        except (ValueError, RecursionError) as error:
            indented = isinstance(row, bytes) and row.strip() in (b"{", b"[", b"[{")
            bad(f"{where}: {error}" + HOW_TO_SPLIT.format(path) * indented)


HOW_TO_SPLIT = "; one object per line is read: jq -c '.[]' {} >lines.jsonl (of {{\"data\": [...]}}: jq -c '.data[]')"


def parquet_column(path: str, file: BinaryIO, field: str) -> Iterator:
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{path}: parquet needs pyarrow (pip install pyarrow)") from None
    table = pyarrow.parquet.ParquetFile(file)
    if field not in table.schema_arrow.names:
        text = next((c.name for c in table.schema_arrow if str(c.type) in ("string", "large_string")), "NAME")
        found = f"no column {field!r}, there are {table.schema_arrow.names}"
        raise UserError(f"{path}: {found}; --text-field {text} takes another")
    for batch in table.iter_batches(batch_size=1024, columns=[field]):
        yield from batch.column(0)


def read_ids(path: str, file: BinaryIO, vocab_size: int | None) -> Iterator[Piece]:
    try:
        if path.lower().endswith(".npy"):
            ids = np.lib.format.open_memmap(path, mode="r")
        else:
            try:
                shard, (dtype, *_) = raw_shard(Path(path), "uint32" if (vocab_size or 0) > 1 << 16 else "")
            except UserError as error:
                if "looks like uint32" not in str(error):
                    raise
                shard, (dtype, *_) = raw_shard(Path(path), "uint32")
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
    """Files to read in order, and how many in the folders were left, by suffix. A file that is named is always read."""
    text, binary = (*TEXT, *LINES), (".parquet", *(IDS if with_ids else ()))
    files, left = [], Counter()

    def unreadable(error: OSError) -> None:
        raise UserError(f"{error.filename}: {error.strerror}")

    for name in inputs:
        if not os.path.isdir(name):
            if not os.path.isfile(name):
                raise UserError(f"{name}: no such file or folder")
            files.append(name)
            continue
        for folder, folders, names in os.walk(name, onerror=unreadable):
            hidden = [n for n in (*folders, *names) if n.startswith(".") or n == "__MACOSX"]
            left["hidden"] += len(hidden)
            folders[:], names = sorted({*folders} - {*hidden}), {*names} - {*hidden}
            links = [f for f in folders if os.path.islink(os.path.join(folder, f))]
            left["link to a folder"] += len(links)  # not followed: it may lead back
            for path in (os.path.join(folder, n) for n in sorted(names)):
                if path.lower().endswith(".json") and not holds_lines(path):
                    left[".json that is no data"] += 1
                elif path.lower().endswith(binary) or unpacked(path).endswith(text):
                    files += [path] if os.path.isfile(path) else []  # no dead links, no pipes
                else:
                    left[Path(path).suffix.lower() or "no suffix"] += 1
    files = list({os.path.realpath(file): file for file in files}.values())  # a document named twice is one
    left = +left
    if not files:
        wanted = f"wanted {' '.join(text)} (also .gz .bz2 .xz) {' '.join(binary)}"
        raise UserError(f"no files in {', '.join(inputs)}: {wanted}, found {dict(left)}")
    return files, left


def unpacked(path: str) -> str:
    """In lower case, without the suffix of a compression."""
    return re.sub(r"\.(gz|bz2|xz)$", "", path.lower())


def holds_lines(path: str) -> bool:
    """Whether a .json file begins with an object on a line of its own; dataset_info.json and the like do not."""
    with open(path, "rb") as file:
        begin = file.readline(1 << 20).strip()
    return not begin or (begin.startswith(b"{") and begin.endswith(b"}"))


def read_files(files: list[str], field: str, vocab_size: int | None, bad: Bad) -> Iterator[Piece]:
    """All pieces of all files in order. Reports the bytes read, as they lie on the disk, at most once a second."""
    total, before = sum(map(os.path.getsize, files)), 0
    begun = said = time.monotonic()
    for path in files:
        name, last = path.lower(), True
        kind = sniff(path, *(PACKED if unpacked(name) != name else ()), ".npy" if name.endswith(".npy") else "parquet")
        with open(path, "rb") as raw:
            file = PACKED[kind](raw) if kind in PACKED else raw
            if name.endswith(IDS):
                pieces = read_ids(path, raw, vocab_size)
            elif name.endswith(".parquet"):
                pieces = read_rows(path, parquet_column(path, raw, field), field, vocab_size, bad)
            elif unpacked(name).endswith(LINES):
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
            except (
                EOFError,
                zlib.error,
                lzma.LZMAError,
                OSError,
                ValueError,
                NotImplementedError,
            ) as error:  # gzip's, pyarrow's
                if isinstance(error, OSError) and error.errno:  # the disk's
                    raise UserError(f"{path}: {error.strerror}") from None
                bad(f"{path}: damaged file: {' '.join(str(error).split())}")
                if not last:  # the document that broke off still gets its end mark
                    yield Piece("", path, first=False)
        before += os.path.getsize(path)


def batches(pieces: Iterator[Piece], val: float, seen: Counter) -> Iterator[tuple[str, list[Piece]]]:
    """Lists of about PIECE characters or ids, each with its split. Counts documents, also empty ones, in `seen`."""
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
            if piece.where.endswith(IDS) and in_split("val", piece.where):
                split = "val"
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
    ids, masks, documents = [np.empty(0, dtype)], [np.empty(0, np.uint8)], 0
    for piece in pieces:
        new = piece.payload
        if isinstance(new, str):
            if encoding.n_vocab > vocab_size:
                known = f"{encoding.name}'s {encoding.n_vocab} ids"
                raise UserError(f"{piece.where}: text, but --vocab-size {vocab_size} is less than {known}")
            try:
                new = encode_text(encoding, new)
            except BaseException as error:  # Rust panics derive from this alone; no Ctrl-C comes to a thread
                bad(f"{piece.where}: the tokenizer cannot encode this ({type(error).__name__}: {str(error)[:120]})")
                if piece.first:
                    continue
                new = []  # of a long document the pieces before are written: it still gets its end mark
            new = np.append(new, encoding.eot_token) if piece.last else new
        ids.append(new)
        masks.append(np.ones(len(new), np.uint8) if piece.mask is None else piece.mask)
        documents += piece.last
    ids, mask = (np.concatenate(a, dtype=t, casting="unsafe") for a, t in ((ids, dtype), (masks, np.uint8)))
    return split, ids, mask, documents


def in_order(pool: ThreadPoolExecutor, function: Callable, items: Iterable, ahead: int) -> Iterator:
    """function(item) of each item. Unlike pool.map only `ahead` are begun before they are asked for: bounded memory."""
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


def up_to_date(folder: Path, key: dict) -> bool:
    """Whether `folder` is a corpus made from these sources with these options; UserError if it holds anything else."""
    old = read_meta(str(folder))[1] if folder.is_dir() else None
    if old is None:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{folder} exists and is no prepared corpus: choose another --out")
        return False
    was, now = ({**k, **k["sources"], "sources": None} for k in (old["key"], key))
    names = [k for k in sorted({*was, *now}, reverse=True) if was.get(k) != now.get(k)]  # options before paths
    if names:
        found = "; ".join(f"{k} was {was.get(k, 'absent')}, now {now.get(k, 'absent')}" for k in names[:5])
        advice = "remove it or choose another --out"
        raise UserError(f"{folder} was prepared otherwise, {len(names)} differences ({found}): {advice}")
    return True


def temporary_for(folder: Path) -> tuple[Path, IO]:
    """A new folder beside `folder`, locked as long as this process lives. Those that nobody holds any more go.

    By locks, not by process ids: two containers have the same ones.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    for old in folder.parent.glob(f"{folder.name}.tmp-*/lock"):
        with open(old, "a") as lock, suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(old.parent, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))
    temporary.chmod(0o777 & ~UMASK)
    lock = open(temporary / "lock", "a")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return temporary, lock


def prepare(
    out: str, inputs: list[str], tokenizer: str | None = None, val: float = 0.0, on_error: str = "stop",
    vocab_size: int | None = None, workers: int | None = None, text_field: str = "text",
) -> None:  # fmt: skip
    """Make the token folder `out`; nothing appears under that name before all of it is written and flushed.

    val: share of the documents for the val split, evenly spread: the second document and then every (1/val)-th.
    on_error "skip": bad lines and documents are counted and listed in meta.json, bad bytes of a text become U+FFFD.
    A folder made from the same inputs with the same options is left alone, one made otherwise is refused.
    """
    folder, temporary, lock = Path(out).absolute(), None, None
    files, left = find_files(inputs, vocab_size is not None)
    files = [f for f in files if folder not in Path(f).absolute().parents]  # not what was made of them
    key = {"tokenizer": tokenizer, "val": val, "on_error": on_error, "vocab_size": vocab_size, "text_field": text_field}
    key["sources"] = {os.path.abspath(f): [os.path.getsize(f), os.stat(f).st_mtime_ns] for f in files}
    if up_to_date(folder, key):
        print(f"{out} is up to date", file=sys.stderr)
        return
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

    # threads, not processes: tiktoken drops the GIL, text is not copied, and a small input does not wait for spawns
    workers = workers or os.cpu_count()
    pool = ThreadPoolExecutor(workers)
    try:
        temporary, lock = temporary_for(folder)
        pieces = read_files(files, text_field, vocab_size, bad)
        work = functools.partial(encode, encoding=encoding, vocab_size=vocab, dtype=dtype, bad=bad)
        for split, ids, mask, documents in in_order(pool, work, batches(pieces, val, seen), 2 * workers):
            append(temporary, split, splits[split], ids, mask)
            splits[split]["documents"] += documents
        if not splits["train"]["tokens"]:
            count = f"{len(files)} files, {seen['empty']} empty documents, {seen['skipped']} skipped {skipped[:1]}"
            raise UserError(f"nothing for the train split in {', '.join(inputs[:5])}: {count}")
        for shard in (s["shards"][0] for s in splits.values() if len(s["shards"]) == 1):
            for kind in ("file", "mask"):
                if name := shard[kind]:  # the usual name, which nanoGPT reads too
                    shard[kind] = (temporary / name).rename(temporary / name.replace("-00000", "")).name
        meta = {"format": FORMAT, "tokenizer": tokenizer or ("bytes" if seen["text"] else "ids"), "vocab_size": vocab}
        meta |= {"eot": encoding.eot_token if tokenizer or seen["text"] else None, "dtype": dtype, "splits": splits}
        meta |= {"empty": seen["empty"], "left_out": dict(left), "skipped": seen["skipped"], "skipped_first": skipped}
        (temporary / "meta.json").write_text(json.dumps(meta | {"key": key}, indent=1))
        (temporary / "lock").unlink()
        for path in (*temporary.iterdir(), temporary):
            fsync(path)
        try:
            os.rename(temporary, folder)
        except OSError:
            if not up_to_date(folder, key):  # made by another process meanwhile
                raise
        fsync(folder.parent)
    except OSError as error:
        raise UserError(f"{error.filename or temporary}: {error.strerror or error}") from None
    finally:
        pool.shutdown(cancel_futures=True)
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)
            lock.close()
    counts = [f"{name} {s['tokens']:,} tokens in {s['documents']:,} documents" for name, s in splits.items()]
    print(f"{out}: {', '.join(counts)}; {vocab} ids, {dtype}", file=sys.stderr)
    if seen["empty"] or skipped or left:
        counts = f"{seen['empty']} empty documents, {seen['skipped']} skipped, files by suffix {dict(left)}"
        print(f"left out: {counts}", *skipped[:20], sep="\nskipped: ", file=sys.stderr)


def stdlib_corpus() -> str:
    """Where the default corpus is: the Python library's own sources as bytes, in a folder for each state of them."""
    state = json.dumps([(f, os.path.getsize(f), os.stat(f).st_mtime_ns) for f in _stdlib()])
    return f"corpus/stdlib-{hashlib.sha256(state.encode()).hexdigest()[:8]}"


def ensure_corpus(path: str) -> None:
    """Make the default corpus at `path`, unless it is there."""
    if not (Path(path) / "meta.json").exists():
        # skip: the library's tests hold files that are no UTF-8 on purpose
        prepare(path, _stdlib(), val=0.005, on_error="skip")


def _stdlib() -> list[str]:
    found = []
    for folder, folders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        folders[:] = sorted(f for f in folders if not f.endswith("-packages"))  # what is installed there may be large
        found += [os.path.join(folder, name) for name in sorted(names) if name.endswith(".py")]
    return found
