"""Text and token ids of many formats -> token files (`python data.py prepare`).

    python data.py prepare --out corpus/ --tokenizer gpt2 --val 0.005 book.txt folder/ docs.jsonl.gz table.parquet
    python data.py prepare --out corpus/ --vocab-size 128256 ids.jsonl tokens.npy     # ids of any other tokenizer

Inputs by suffix: .jsonl .ndjson .json (a {"text": ...} or {"ids": [...], "mask": [...]} per line), .parquet (a text
column), .npy and .bin (token ids); any other file that is named, and those with a suffix of TEXT in a folder, is one
document of UTF-8 text. Lines and text may be compressed (.gz, .bz2, .xz). Folders are read in sorted order, with those
below; hidden files are left out, and so is what is not understood there: both are counted. Where some files have
"train" in their name, those with "val" or "validation" in theirs are the val split.

Text is encoded as ordinary text (an "<|endoftext|>" in it is no end mark), each document followed by one end-of-text
id. Ready-made ids bring their own end marks. Documents that are empty or blank are left out and counted.

The result is a folder: train.bin and val.bin, headerless little-endian uint16 (uint32 above 65,536 ids), train.mask
beside where targets are masked, and meta.json, which says what it is. Memory is bounded, whatever the size of the
input.
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
import secrets
import shutil
import sys
import sysconfig
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import tiktoken

from checkpoint import fsync
from support.flags import UserError
from support.tokens import FORMAT, guess_dtype, in_split, mapped, raw_shard, read_meta, sniff

PIECE = 1 << 18  # characters one thread encodes at a time: about 50 ms of work, small enough to bound memory
TEXT = tuple(".txt .text .md .rst .tex .py .c .h .cc .cpp .cu .js .ts .java .go .rs .sh .html".split())
LINES, IDS = (".jsonl", ".ndjson", ".json"), (".npy", ".bin")
PACKED = {"gzip": gzip.open, "bzip2": bz2.open, "xz": lzma.open}  # as sniff() names them
DAMAGE = (EOFError, OSError, ValueError, NotImplementedError, zlib.error, lzma.LZMAError)  # theirs, and pyarrow's
SPLIT = "one object per line is read: jq -c . FILE for indented ones, '.[]' for an array, '.data[]' for {data: [...]}"

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
    val: bool = False  # it is of the val split by its file's name


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
                texts = " or ".join(key for key in document if found[key] == "str")
                other = f"--text-field {texts} takes that" if texts else SPLIT
                raise ValueError(f'wanted {{"{field}": string}} or {{"ids": [...]}}, found {found}; {other}')
        except UnicodeDecodeError as error:
            bad(f"{where}: invalid UTF-8 at its byte {error.start} ({error.object[error.start : error.end].hex(' ')})")
        except (ValueError, RecursionError) as error:
            bad(f"{where}: {error}" + f"; {SPLIT}" * isinstance(error, json.JSONDecodeError))


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


def read_ids(path: str, vocab_size: int | None) -> Iterator[Piece]:
    try:
        if path.lower().endswith(".npy"):
            sniff(path, ".npy")
            ids = np.lib.format.open_memmap(path, mode="r")
        else:
            dtype = "uint32" if (vocab_size or 0) > 1 << 16 else guess_dtype(Path(path))
            shard, (dtype, *_) = raw_shard(Path(path), dtype)
            ids = mapped(path, dtype, shard.offset, shard.n_tokens)
        for a in range(0, max(1, ids.size), PIECE):
            yield Piece(check_ids(np.asarray(ids)[a : a + PIECE], a, vocab_size), path, last=a + PIECE >= len(ids))
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


def find_files(inputs: list[str], field: str, with_ids: bool) -> tuple[list[str], Counter]:
    """Files to read in order, and how many in the folders were left, by suffix. A file that is named is always read."""
    wanted, files, left = (*TEXT, *LINES, ".parquet", *(IDS if with_ids else ())), [], Counter()

    def unreadable(error: OSError) -> None:
        raise error

    for name in inputs:
        if not os.path.isdir(name):
            files.append(name)
            continue
        for folder, folders, names in os.walk(name, onerror=unreadable):
            hidden = {n for n in (*folders, *names) if n.startswith(".") or n == "__MACOSX"}
            folders[:] = sorted({*folders} - hidden)
            links = [f for f in folders if os.path.islink(os.path.join(folder, f))]
            left += {"hidden": len(hidden), "link to a folder": len(links)}  # not followed: it may lead back
            for path in (os.path.join(folder, n) for n in sorted({*names} - hidden)):
                if not unpacked(path).endswith(wanted):
                    left[Path(path).suffix.lower() or "no suffix"] += 1
                elif path.lower().endswith(".json") and not holds_rows(path, field):
                    left[f'.json that has no {{"{field}": ...}} per line'] += 1
                else:
                    files.append(path)
    if not files:
        raise UserError(f"no files in {', '.join(inputs)}: wanted {' '.join(wanted)}, found {dict(left)}")
    return list({os.path.realpath(file): file for file in files}.values()), left  # one that is named twice is one


def unpacked(path: str) -> str:
    """In lower case, without the suffix of a compression."""
    return re.sub(r"\.(gz|bz2|xz)$", "", path.lower())


def holds_rows(path: str, field: str) -> bool:
    """Whether a .json file begins with an object on a line of its own that can be read: dataset_info.json does not."""
    with open(path, "rb") as file, suppress(ValueError, RecursionError):
        row = json.loads(file.readline(1 << 26).decode("utf-8-sig"))
        return isinstance(row, dict) and (field in row or "ids" in row)
    return False


def read_file(path: str, raw: BinaryIO, field: str, vocab_size: int | None, bad: Bad) -> Iterator[Piece]:
    name = path.lower()
    if name.endswith(IDS):
        return read_ids(path, vocab_size)
    if name.endswith(".parquet"):
        sniff(path, "parquet", file=raw)
        return read_rows(path, parquet_column(path, raw, field), field, vocab_size, bad)
    kind = sniff(path, *PACKED, file=raw)  # compressed by its bytes, whatever its name says
    file = PACKED[kind](raw) if kind else raw
    sniff(path, file=file)
    if b"\0" in file.peek(512):  # not one bad byte that could be skipped
        raise UserError(f"{path} is binary, wanted is UTF-8 text")
    if unpacked(name).endswith(LINES):
        return read_rows(path, file, field, vocab_size, bad)
    return cut(decode(path, file, bad), path)


def read_files(files: list[str], field: str, vocab_size: int | None, bad: Bad) -> Iterator[Piece]:
    """All pieces of all files in order. Reports the bytes read, as they lie on the disk, at most once a second."""
    total, before = sum(map(os.path.getsize, files)), 0
    begun = said = time.monotonic()
    by_name = any(in_split("train", path) for path in files)
    for path in files:
        last, val = True, by_name and in_split("val", path)
        with open(path, "rb") as raw:
            try:
                for piece in read_file(path, raw, field, vocab_size, bad):
                    yield piece._replace(val=True) if val else piece
                    last, now = piece.last, time.monotonic()
                    if now - said >= 1:
                        said, done = now, before + raw.tell()
                        left = (now - begun) * (total / max(done, 1) - 1)
                        print(f"{done / 1e6:.1f} of {total / 1e6:.1f} MB, {left:.0f} s left", file=sys.stderr)
            except DAMAGE as error:
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
            split = "val" if piece.val or (n - 1) * val // 1 > (n - 2) * val // 1 else "train"
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


def in_order(function: Callable, items: Iterable) -> Iterator:
    """function(item) of each item, by one thread per core; few are begun before they are asked for: bounded memory.

    Threads, not processes: tiktoken drops the GIL, text is not copied, and a small input does not wait for spawns.
    """
    pending, threads = deque(), os.cpu_count()
    with ThreadPoolExecutor(threads) as pool:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > 2 * threads:
                yield pending.popleft().result()
        for future in pending:
            yield future.result()


def append(folder: Path, about: dict, ids: np.ndarray, mask: np.ndarray) -> None:
    """Append tokens to a split's file; and to its mask, once there is a masked target: all before it count."""
    if not len(ids):
        return  # a split without documents has no file
    if not about["mask"] and not mask.all():
        about["mask"] = about["file"].replace(".bin", ".mask")
        with open(folder / about["mask"], "wb") as file:
            for a in range(0, about["tokens"], PIECE):
                file.write(b"\1" * min(PIECE, about["tokens"] - a))
    for name, values in ((about["file"], ids), (about["mask"], mask)):
        if name:
            with open(folder / name, "ab") as file:
                file.write(values)
    about["tokens"] += len(ids)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill. When the block ends, all of it is on the disk and is called `folder`; an error leaves nothing.

    What killed processes have left beside it goes: told by locks, not by process ids, which two containers may share.
    """
    if folder.is_symlink() and folder.stat():  # which says so of a link that leads nowhere
        folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    for old in {file.parent for file in folder.parent.glob(f"{folder.name}.tmp-*/*.*")}:  # locked before it had files
        with suppress(OSError), open(old / "lock", "r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(old)
    temporary = folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(4)}")
    temporary.mkdir()
    with open(temporary / "lock", "w") as lock:
        with suppress(OSError):  # no locks here: then nobody can take it for dead either
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield temporary
            (temporary / "lock").unlink()
            for path in (*temporary.iterdir(), temporary):
                fsync(path)
            temporary.rename(folder)
            fsync(folder.parent)
        except OSError as error:
            raise UserError(f"{error.filename or f'cannot write {folder}'}: {error.strerror or error}") from None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def up_to_date(folder: Path, key: dict) -> bool:
    """Whether `folder` is a corpus made from these sources with these options; UserError if it holds anything else."""
    meta = read_meta(str(folder))[1] if folder.is_dir() else None
    if meta is None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is no prepared corpus: choose another --out")
    differ = [name for name in key if meta and meta["key"].get(name) != key[name]]
    if differ:
        was = [f"{name} was {meta['key'].get(name)}, now {key[name]}" for name in differ if name != "sources"]
        what = "; ".join(was + ["the sources are others now"] * ("sources" in differ))
        raise UserError(f"{folder} was prepared otherwise ({what}): remove it or choose another --out")
    return meta is not None


def prepare(
    out: str, inputs: list[str], tokenizer: str | None = None, val: float = 0.0, on_error: str = "stop",
    vocab_size: int | None = None, text_field: str = "text",
) -> None:  # fmt: skip
    """Make the token folder `out`; nothing appears under that name before all of it is written and flushed.

    val: share of the documents for the val split, evenly spread: the second document and then every (1/val)-th.
    on_error "skip": bad lines and documents are counted and listed in meta.json, bad bytes of a text become U+FFFD.
    A folder made from the same inputs with the same options is left alone, one made otherwise is refused.
    """
    folder = Path(out).absolute()
    files, left = find_files(inputs, text_field, vocab_size is not None)
    if any(in_split("train", file) for file in files):  # then a test split is none to train on
        data = (*LINES, ".parquet", *IDS)
        test = {f for f in files if in_split("test", f) and unpacked(f).endswith(data) and f not in inputs}
        files, left = [file for file in files if file not in test], left + Counter({"test split": len(test)})
    files = [f for f in files if folder not in Path(f).absolute().parents]  # not what was made of them
    key = {"tokenizer": tokenizer, "val": val, "on_error": on_error, "vocab_size": vocab_size, "text_field": text_field}
    key["sources"] = {os.path.abspath(f): [os.path.getsize(f), os.stat(f).st_mtime_ns] for f in files}
    if up_to_date(folder, key):
        print(f"{out} is up to date", file=sys.stderr)
        return
    if not 0 <= val < 1 or (vocab_size is not None and vocab_size < 1):
        raise UserError(f"--val {val}, --vocab-size {vocab_size}: allowed are 0 <= val < 1, and 1 or more")
    encoding = load_tokenizer(tokenizer or "bytes")
    vocab = vocab_size or encoding.n_vocab
    dtype = "uint16" if vocab <= 1 << 16 else "uint32"
    splits = {name: {"file": f"{name}.bin", "mask": None, "tokens": 0, "documents": 0} for name in ("train", "val")}
    skipped, seen = [], Counter()  # the first 1000 messages

    def bad(message: str) -> None:
        if on_error == "stop":
            raise UserError(f"{message} (--on-error skip goes on without it)")
        seen["skipped"] += 1
        if len(skipped) < 1000:
            skipped.append(message)

    work = functools.partial(encode, encoding=encoding, vocab_size=vocab, dtype=dtype, bad=bad)
    todo = batches(read_files(files, text_field, vocab_size, bad), val, seen)
    try:
        with new_folder(folder) as temporary:
            for split, ids, mask, documents in in_order(work, todo):
                append(temporary, splits[split], ids, mask)
                splits[split]["documents"] += documents
            if not splits["train"]["tokens"]:
                count = f"{len(files)} files, {seen['empty']} empty documents, {seen['skipped']} skipped {skipped[:1]}"
                raise UserError(f"nothing for the train split in {', '.join(inputs[:5])}: {count}")
            for about in splits.values():
                about["shards"] = [dict(about)] if about["tokens"] else []
            meta = {"format": FORMAT, "vocab_size": vocab, "dtype": dtype, "splits": splits, "key": key}
            meta["tokenizer"] = tokenizer or ("bytes" if seen["text"] else "ids")
            meta["eot"] = None if meta["tokenizer"] == "ids" else encoding.eot_token
            meta |= {"empty": seen["empty"], "left_out": left, "skipped": seen["skipped"], "skipped_first": skipped}
            (temporary / "meta.json").write_text(json.dumps(meta, indent=1))
    except UserError:
        if not up_to_date(folder, key):  # else made by another process meanwhile
            raise
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
