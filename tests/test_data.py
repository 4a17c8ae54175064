"""data.py against hand counts, an independent reader, real files, real processes and real signals."""

import bz2
import fcntl
import gzip
import json
import lzma
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import torch
import torch.distributed as dist
from harness import ROOT, run_ranks

import data
from model import load_config
from support import prepare
from support.flags import Config, UserError, users_error
from support.run import Run
from support.tokens import Tokens, has_val, open_tokens

EOT = 256  # of the bytes tokenizer
# Encodings of our own, found by tiktoken's plug-in mechanism: 256 bytes and every pair of bytes, so that ids pass
# 65,536 and a word cut in the wrong place gives other pairs; under the three patterns in use, and one that panics.
PLUGIN = r'''
RANKS = {bytes([i]): i for i in range(256)}
pairs = [bytes([a, b]) for a in range(256) for b in range(256)]
for pair in sorted(pairs, key=lambda p: p.isalpha()):
    RANKS[pair] = len(RANKS)
GPT2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
CL100K = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|"""
    r"""\s++$|\s*[\r\n]|\s+(?!\S)|\s"""
)
O200K = "|".join([
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    r"""\p{N}{1,3}""", r""" ?[^\s\p{L}\p{N}]+[\r\n/]*""", r"""\s*[\r\n]+""", r"""\s+(?!\S)""", r"""\s+""",
])
def make(name, pattern):
    special = {"<|endoftext|>": len(RANKS), "<|fim_prefix|>": len(RANKS) + 1}
    return lambda: dict(name=name, pat_str=pattern, mergeable_ranks=RANKS, special_tokens=special)
PATTERNS = {"pairs_gpt2": GPT2, "pairs_cl100k": CL100K, "pairs_o200k": O200K, "panics": r"(x+x+)+(?=y)|[\s\S]"}
ENCODING_CONSTRUCTORS = {name: make(name, pattern) for name, pattern in PATTERNS.items()}
'''


@pytest.fixture(scope="module", autouse=True)
def plugin(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "tiktoken_ext").mkdir()
    (folder / "tiktoken_ext" / "pairs.py").write_text(PLUGIN)
    sys.path.append(str(folder))
    tiktoken.registry.ENCODING_CONSTRUCTORS = None  # another test may have listed the encodings already
    yield
    sys.path.remove(str(folder))


def write(folder: Path, **files) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def lines(*rows) -> bytes:
    return b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in rows)


def made(tmp_path: Path, inputs, out: str = "out", **options) -> tuple[list[int], dict]:
    """Prepare and read back with numpy alone: (train ids, meta.json)."""
    inputs = [str(i) for i in (inputs if isinstance(inputs, list) else [inputs])]
    prepare.prepare(str(tmp_path / out), inputs, **options)
    meta = json.loads((tmp_path / out / "meta.json").read_text())
    ids = [np.fromfile(tmp_path / out / s["file"], meta["dtype"]) for s in meta["splits"]["train"]["shards"]]
    return np.concatenate(ids).tolist(), meta


def cli(*args, **env) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "data.py"), *map(str, args)]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=60)


def refuses(match: str):
    return pytest.raises(UserError, match=match)


def file_of(tmp_path: Path, ids, name: str = "train.bin", dtype: str = "uint16") -> str:
    np.asarray(ids, dtype).tofile(tmp_path / name)
    return str(tmp_path / name)


def llmc(
    tmp_path: Path,
    ids,
    n: int | None = None,
    magic: int = 20240520,
    version: int = 1,
    name: str = "x_train_0.bin",
    dtype="uint16",
) -> str:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids) if n is None else n
    (tmp_path / name).write_bytes(header.tobytes() + np.asarray(ids, dtype).tobytes())
    return str(tmp_path / name)


# ------------------------------------------------------------------------------------------- A3-A6: token files


def test_ids_over_65535_round_trip_and_are_refused_when_too_large(tmp_path):
    folder = write(tmp_path / "in", a__jsonl=lines({"ids": [1, 70000, 65535]}, {"ids": [65536, 2]}))
    ids, meta = made(tmp_path, folder, vocab_size=70001)
    assert ids == [1, 70000, 65535, 65536, 2] and meta["dtype"] == "uint32" and meta["tokenizer"] == "ids"
    x, y = open_tokens(str(tmp_path / "out")).window(0, 4)
    assert x.tolist() == [1, 70000, 65535, 65536] and y.tolist() == [70000, 65535, 65536, 2] and x.dtype == np.int64
    with refuses(r"a.jsonl:1: id 70000 at position 1, allowed are 0 to 49999"):
        made(tmp_path, folder, "out2", vocab_size=50000)
    with refuses("need --vocab-size"):
        made(tmp_path, folder, "out2")
    assert not (tmp_path / "out2").exists()
    text = "abc, Zz\n"  # a tokenizer with ids above 65,535
    ids, meta = made(tmp_path, write(tmp_path / "t", a__txt=text) / "a.txt", "out3", tokenizer="pairs_gpt2")
    encoding = tiktoken.get_encoding("pairs_gpt2")
    assert (
        ids == encoding.encode_ordinary(text) + [encoding.eot_token] and meta["dtype"] == "uint32" and max(ids) > 65535
    )
    with refuses("a.txt: text, but --vocab-size 1000 is less than pairs_gpt2's 65794 ids"):
        made(tmp_path, tmp_path / "t", "out4", tokenizer="pairs_gpt2", vocab_size=1000)


@pytest.mark.parametrize("bad", [[1, -1], [1, 2.5], ["a"], "ab", [[1], [2]], [[1], 2], [2**70], [True], {"a": 1}])
def test_ids_of_wrong_kind(tmp_path, bad):
    with refuses("a.jsonl:2: "):
        made(tmp_path, write(tmp_path, a__jsonl=lines({"ids": [1]}, {"ids": bad})) / "a.jsonl", vocab_size=100)


def test_npy_and_bin_inputs_and_their_range(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(300000, dtype=np.int32) % 1000)
    np.asarray([5, 6, 7], np.uint16).tofile(tmp_path / "b.bin")
    ids, _ = made(tmp_path, [tmp_path / "a.npy", tmp_path / "b.bin", llmc(tmp_path, [8, 9])], vocab_size=1000)
    assert ids == [i % 1000 for i in range(300000)] + [5, 6, 7, 8, 9]
    with refuses(r"a.npy: id 999 at position 999, allowed are 0 to 998"):
        made(tmp_path, tmp_path / "a.npy", "out2", vocab_size=999)
    np.save(tmp_path / "c.npy", np.zeros((2, 2)))
    with refuses(r"c.npy: .* of shape \(2, 2\)"):
        made(tmp_path, tmp_path / "c.npy", "out2", vocab_size=999)


def test_uint32_taken_for_uint16_and_the_reverse(tmp_path):
    path = file_of(tmp_path, np.arange(1000, 1100), dtype="uint32")
    with refuses("uint16.*looks like uint32"):
        open_tokens(path)
    assert open_tokens(file_of(tmp_path, np.arange(1000, 1100))).n_tokens == 100
    folder = write(tmp_path / "in", a__jsonl=lines({"ids": list(range(1000, 1100))}))
    made(tmp_path, folder, vocab_size=70000)
    np.arange(1000, 1100, dtype=np.uint16).tofile(tmp_path / "out" / "train.bin")
    with refuses("train.bin holds 200 bytes: meta.json says 100 tokens of uint32"):
        open_tokens(str(tmp_path / "out"))


def test_llmc_header(tmp_path):
    tokens = open_tokens(llmc(tmp_path, [50256, 1, 2, 3, 4]))
    assert tokens.n_tokens == 5 and tokens.window(0, 4)[0].tolist() == [50256, 1, 2, 3] and tokens.tokenizer == "gpt2"
    llmc(tmp_path, [7, 8], name="x_train_1.bin")
    llmc(tmp_path, [9] * 3, name="x_val_0.bin")
    folder = open_tokens(str(tmp_path))
    assert folder.n_tokens == 7 and folder.window(0, 6)[1].tolist() == [1, 2, 3, 4, 7, 8]  # over the files' edge
    assert has_val(str(tmp_path)) and open_tokens(str(tmp_path), "val").n_tokens == 3
    for n in (4, 6):
        with refuses(f"header says {n} tokens, file holds 5"):
            open_tokens(llmc(tmp_path, [1, 2, 3, 4, 5], n=n))
    with refuses("version 2"):
        open_tokens(llmc(tmp_path, [1, 2], version=2))
    big = open_tokens(llmc(tmp_path, [100000, 5], magic=20240801, version=7, dtype="uint32"))
    assert big.window(0, 1)[0].tolist() == [100000] and big.dtype == "uint32"
    Path(llmc(tmp_path, [])).write_bytes(np.asarray([20240520, 1, 0], "<i4").tobytes())
    with refuses("a header of 12 bytes"):
        open_tokens(str(tmp_path / "x_train_0.bin"))


@pytest.mark.parametrize(
    "size, match",
    [(0, "0 tokens"), (1, "1 bytes is not a whole number of uint16"), (67, "67 bytes is not"), (64, "32 tokens")],
)
def test_empty_odd_and_short_files(tmp_path, size, match):
    (tmp_path / "train.bin").write_bytes((np.arange(40, dtype=np.uint16) + 20).tobytes()[:size])
    with refuses(match) as error:
        open_tokens(str(tmp_path)).n_windows(32)
    assert "\n" not in str(error.value) and "train.bin" in str(error.value) or size == 0


def test_exactly_one_window(tmp_path):
    tokens = open_tokens(file_of(tmp_path, range(33)))
    assert tokens.n_windows(32) == 1 and tokens.n_windows(11) == 2  # the last token of the file has no next one
    x, y = tokens.window(0, 32)
    assert x.tolist() == list(range(32)) and y.tolist() == list(range(1, 33))


def test_nanogpt_folder(tmp_path):
    file_of(tmp_path, range(40))
    assert not has_val(str(tmp_path))
    file_of(tmp_path, [3, 2, 1], "val.bin")
    assert has_val(str(tmp_path)) and has_val(str(tmp_path / "train.bin"))
    assert (
        open_tokens(str(tmp_path), "val").n_tokens == 3
        and open_tokens(str(tmp_path / "train.bin"), "val").n_tokens == 3
    )
    (tmp_path / "meta.pkl").write_bytes(b"a pickle could run code: it is not opened")
    assert open_tokens(str(tmp_path)).tokenizer == "characters"  # nothing here can spell them
    (tmp_path / "book.txt").write_text("a text is no token file" * 100)
    with refuses("prepare --out DIR"):
        open_tokens(str(tmp_path / "book.txt"))


def test_fingerprint_follows_the_content(tmp_path):
    path = file_of(tmp_path, range(1000))
    first = open_tokens(path).fingerprint
    os.utime(path, (1, 1))
    assert open_tokens(path).fingerprint == first  # a copy on another machine is the same corpus
    file_of(tmp_path, [*range(999), 7])
    assert open_tokens(path).fingerprint != first


# ---------------------------------------------------------------------------------------- A8-A13: documents


def test_nothing_to_read_is_one_line_and_exit_2(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x.tmp").write_text("a")
    run = cli("prepare", "--out", tmp_path / "out", tmp_path / "in")
    assert run.returncode == 2 and len(run.stderr.splitlines()) == 1
    assert str(tmp_path / "in") in run.stderr and ".jsonl" in run.stderr and "'.tmp': 1" in run.stderr
    with refuses(r"in holds \['x.tmp'\]; wanted"):
        open_tokens(str(tmp_path / "in"))
    with pytest.raises(FileNotFoundError, match="/nope'"):  # one line, by run_cli
        made(tmp_path, tmp_path / "nope")
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "in" / "a.parquet")
    with refuses("nothing for the train split.*1 files, 0 empty"):
        made(tmp_path, tmp_path / "in")
    assert sorted(os.listdir(tmp_path)) == ["in"]


def test_parquet_and_gzip_hold_the_same_documents(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = [f"document {i} \u00e9\u4e2d" * (i % 5 + 1) for i in range(3000)]
    pq.write_table(pa.table({"body": texts, "n": range(3000)}), tmp_path / "a.parquet", row_group_size=700)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines(*({"body": t} for t in texts))))
    want = [i for t in texts for i in (*t.encode(), EOT)]
    assert made(tmp_path, tmp_path / "a.parquet", "p", text_field="body")[0] == want
    assert made(tmp_path, tmp_path / "a.jsonl.gz", "g", text_field="body")[0] == want
    with refuses(r"no column 'text', there are \['body', 'n'\]"):
        made(tmp_path, tmp_path / "a.parquet", "q")
    for name in ("a.jsonl.gz", "a.parquet"):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-20])
        with refuses(f"{name}: damaged file: ") as error:
            made(tmp_path, tmp_path / name, "h", text_field="body")
        assert "\n" not in str(error.value) and not (tmp_path / "h").exists()
    pq.write_table(pa.table({"body": texts}), tmp_path / "b.parquet", compression="snappy")
    content = bytearray((tmp_path / "b.parquet").read_bytes())
    content[200:400] = bytes(200)
    (tmp_path / "b.parquet").write_bytes(content)
    with refuses("b.parquet: damaged file: "):
        made(tmp_path, tmp_path / "b.parquet", "h", text_field="body")
    ids, meta = made(
        tmp_path,
        [tmp_path / "b.parquet", write(tmp_path, c__txt="c") / "c.txt"],
        "h",
        text_field="body",
        on_error="skip",
    )
    assert ids[-2:] == [ord("c"), EOT] and meta["skipped"] == 1


def test_nothing_is_read_twice_or_left_out_in_silence(tmp_path):
    source = write(tmp_path / "in", a__txt="a")
    write(tmp_path / "in" / "sub", b__txt="b")
    (source / "round").symlink_to(source)
    killed = write(tmp_path / "out.tmp-abc", lock="", train__bin="of a preparation that was killed")
    alive = write(tmp_path / "out.tmp-def", lock="", train__bin="of another container, whose process ids are ours")
    held = open(alive / "lock")
    fcntl.flock(held, fcntl.LOCK_EX)
    ids, meta = made(tmp_path, [source, source / "a.txt"])
    assert ids == [ord("a"), EOT, ord("b"), EOT] and meta["left_out"] == {"link to a folder": 1} and not killed.exists()
    assert (alive / "train.bin").exists() and sorted(os.listdir(tmp_path / "out")) == ["meta.json", "train.bin"]
    for _ in range(2):  # the second finds it up to date: what was made is not read
        made(tmp_path, source, "in/made")


def test_a_file_of_a_prepared_folder_is_not_the_folder(tmp_path):
    made(tmp_path, write(tmp_path / "in", a__txt="a" * 99, b__txt="b" * 99), val=0.5)
    with refuses("val.bin is a part of .*out, a prepared corpus: give the folder"):
        open_tokens(str(tmp_path / "out" / "val.bin"))
    np.arange(99, dtype=np.uint16).tofile(write(tmp_path / "raw") / "retrieval_train_000.bin")
    assert not has_val(str(tmp_path / "raw")) and open_tokens(str(tmp_path / "raw")).n_tokens == 99


def test_what_is_left_of_a_damaged_file_is_kept_on_request(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "PIECE", 500)
    noise = (
        np.random.default_rng(0).integers(97, 123, 100_000).astype(np.uint8).tobytes()
    )  # hard to compress: the cut loses little
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(noise)[:-10_000])
    ids, meta = made(tmp_path, [tmp_path / "a.txt.gz", write(tmp_path, b__txt="next") / "b.txt"], on_error="skip")
    end = ids.index(EOT)
    assert 50_000 < end < 100_000 and bytes(ids[:end]) == noise[:end] and ids[end + 1 :] == [*b"next", EOT]
    assert meta["skipped"] == 1 and meta["splits"]["train"]["documents"] == 2


@pytest.mark.parametrize("at", [0, 1, 2])
def test_empty_documents_are_counted(tmp_path, at):
    rows = [{"text": "ab"}, {"text": "c"}]
    rows[at:at] = [{"text": ""}, {"text": " \n\t "}]
    ids, meta = made(tmp_path, write(tmp_path, a__jsonl=lines(*rows)) / "a.jsonl")
    assert ids == [97, 98, EOT, 99, EOT] and meta["empty"] == 2 and meta["splits"]["train"]["documents"] == 2


BAD_ROWS = [
    ({"txt": "x"}, "found {'txt': 'str'}"),
    ({"text": None}, "found {'text': 'NoneType'}"),
    ({"text": 5}, "found {'text': 'int'}"),
    ([1], "found a list"),
    (b'{"text": "a"', "delimiter"),
    (b'{"text":"a"}{"text":"b"}', "Extra data"),
    (b'{"text": "\xff"}', "invalid UTF-8 at its byte 10 .ff"),
    (b'{"text": "\\ud800"}', "surrogate"),
    (b"[" * 100000, "recursion"),
]


@pytest.mark.parametrize("row, match", BAD_ROWS)
def test_bad_line_stops_before_anything_is_published_or_is_skipped(tmp_path, row, match):
    folder = write(
        tmp_path / "in",
        a__jsonl=b"\xef\xbb\xbf" + lines({"text": "a"}, row, b"", {"text": "b"})[:-1].replace(b"\n", b"\r\n", 1),
    )
    with refuses(f"a.jsonl:2: .*{match}") as error:
        made(tmp_path, folder)
    assert "\n" not in str(error.value) and os.listdir(tmp_path) == ["in"]
    ids, meta = made(tmp_path, folder, on_error="skip")
    assert (
        ids == [97, EOT, 98, EOT]
        and meta["skipped"] == 1
        and "a.jsonl:2" in meta["skipped_first"][0]
        and meta["empty"] == 1
    )


def test_invalid_utf8_has_its_offset_and_a_cut_character_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "PIECE", 4096)
    for name, damage, where in (
        ("ff", b"\xff\xfe", 6000),
        ("surrogate", b"\xed\xa0\x80", 4095),
        ("overlong", b"\xc0\xaf", 4096),
        ("cut", b"\xe4\xb8", 8998),
    ):
        text = (b"word " * 2000)[:where] + damage + (b"" if name == "cut" else b"more")
        folder = write(tmp_path / name, a__txt=text)
        with refuses(f"a.txt: byte {where}: invalid UTF-8"):
            made(tmp_path, folder)
        ids, meta = made(tmp_path, folder, "out-" + name, on_error="skip")
        assert bytes(ids[:-1]).decode() == text.decode(errors="replace") and meta["skipped"] == 1
    for edge in range(4090, 4100):
        text = "x" * edge + "\U0001f600 and so on " * 1000
        ids, _ = made(tmp_path, write(tmp_path / f"in{edge}", a__txt=text), f"emoji{edge}", tokenizer="pairs_gpt2")
        assert ids[:-1] == tiktoken.get_encoding("pairs_gpt2").encode_ordinary(text)


def test_special_tokens_in_the_text_are_text(tmp_path):
    text = "a <|endoftext|> b <|fim_prefix|>"
    encoding = tiktoken.get_encoding("pairs_gpt2")
    ids, _ = made(
        tmp_path, write(tmp_path, a__jsonl=lines({"text": text}, {"text": text})) / "a.jsonl", tokenizer="pairs_gpt2"
    )
    assert ids.count(encoding.eot_token) == 2 and max(ids) == encoding.eot_token
    assert encoding.decode(ids[: ids.index(encoding.eot_token)]) == text
    assert prepare.encode_text(prepare.load_tokenizer("bytes"), text).tolist() == prepare.load_tokenizer(
        "bytes"
    ).encode_ordinary(text)


PROSE = (
    "Don't you'll SHE'S  two  spaces,\n\n\tindented;\r\n  x=1;\r\ny = [1234567, 'a b'] // note\n// next   \n \n "
    "e\u0301a\u0301 \u0438 \u0432\u043e\u0442 \u043e\u043d, \u0434\u043e\u043c. 3.14159 \u00a0nbsp\u2003wide"
    "\u3000\u4e2d\u6587\uff0c\u6807"
    "\u70b9\u3002\n\u3000\u3000"
    "\u7b2c\u4e8c\u6bb5\u3002\u300c\u5f15\u7528\u300d\uff01\n'tis o'clock's\n'S /path/\n/ \x1c \x85 end\n"
)


@pytest.mark.parametrize("name", ["pairs_gpt2", "pairs_cl100k", "pairs_o200k"])
def test_a_border_never_changes_tokens(name):
    encoding, cuts = tiktoken.get_encoding(name), 0
    for text in (PROSE * 2, Path(json.__file__).read_text(), "\u4e2d\u6587\uff0c\u6807\u70b9" * 20):
        whole = encoding.encode_ordinary(text)
        for limit in range(1, len(text), max(1, len(text) // 400)):
            cut = prepare.border(text, limit)
            if cut < limit or prepare.BORDER.match(text, limit - 1):
                cuts += 1
                assert encoding.encode_ordinary(text[:cut]) + encoding.encode_ordinary(text[cut:]) == whole, repr(
                    text[cut - 9 : cut + 9]
                )
    assert cuts > 500


def test_long_documents_give_the_tokens_of_the_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "PIECE", 500)
    encoding = tiktoken.get_encoding("pairs_cl100k")
    want = encoding.encode_ordinary(PROSE * 50) + [encoding.eot_token]
    folder = write(tmp_path / "in", a__txt=PROSE * 50, b__jsonl=lines({"text": PROSE * 50}))
    assert made(tmp_path, folder, tokenizer="pairs_cl100k")[0] == want * 2


def test_repetitive_documents_finish(tmp_path):
    start = time.time()
    texts = ["^" * 1_000_000, "a" * 200_000, " " * 500_000 + "x", "\n" * 500_000 + "x"]
    folder = write(tmp_path / "in", a__jsonl=lines(*({"text": t} for t in texts)))
    ids, meta = made(tmp_path, folder, tokenizer="pairs_cl100k")
    encoding = tiktoken.get_encoding("pairs_cl100k")
    ends = [i for i, t in enumerate(ids) if t == encoding.eot_token]
    assert [encoding.decode(ids[a + 1 : b]) == t for a, b, t in zip([-1, *ends], ends, texts, strict=False)] == [
        True
    ] * 4
    assert time.time() - start < 30


@pytest.mark.soak
def test_one_line_of_100_mb_in_bounded_memory(tmp_path):
    words = b"the quick brown fox jumps over the lazy dog " * (100_000_000 // 44)
    write(tmp_path, a__txt=words, b__jsonl=b'{"text": "' + words + b'"}\n')
    code = (
        "import os, resource, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r}); sys.path.append({sys.path[-1]!r}); os.chdir({str(tmp_path)!r})\n"
        "from support.prepare import prepare\n"
        "prepare('out', ['a.txt', 'b.jsonl'], tokenizer='pairs_gpt2')\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and int(run.stdout) * 1024 < 2e9, run.stderr + run.stdout
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    assert meta["splits"]["train"]["documents"] == 2


def test_a_panic_of_the_tokenizer_is_a_data_error(tmp_path):
    folder = write(tmp_path / "in", a__jsonl=lines({"text": "fine"}, {"text": "x" * 64}, {"text": "too"}))
    with refuses("a.jsonl:2: the tokenizer cannot encode this "):
        made(tmp_path, folder, tokenizer="panics")
    assert os.listdir(tmp_path) == ["in"]
    ids, meta = made(tmp_path, folder, tokenizer="panics", on_error="skip")
    assert tiktoken.get_encoding("panics").decode(ids) == "fine<|endoftext|>too<|endoftext|>" and meta["skipped"] == 1


# ------------------------------------------------------------------------ A22, A26, masks, shards, splits, publishing


def test_stale_corpus_is_refused_with_what_differs(tmp_path, capsys):
    source = write(tmp_path / "in", a__txt="abc", b__txt="def")
    made(tmp_path, source)
    made(tmp_path, source)
    assert "up to date" in capsys.readouterr().err
    before = (tmp_path / "out" / "train.bin").read_bytes()
    for options, match in (
        ({"tokenizer": "pairs_gpt2"}, "tokenizer was None, now pairs_gpt2"),
        ({"val": 0.5}, "val was 0.0, now 0.5"),
    ):
        with refuses(match):
            made(tmp_path, source, **options)
    (source / "a.txt").write_text("abd")
    with refuses("prepared otherwise .the sources are others now.: remove it or choose another"):
        made(tmp_path, source)
    assert (tmp_path / "out" / "train.bin").read_bytes() == before
    write(tmp_path / "mine", thesis__tex="x")
    with refuses("exists and is no prepared corpus"):
        made(tmp_path, source, "mine")


def test_the_default_corpus_is_made_once_for_each_state_of_the_library(tmp_path, capsys, monkeypatch):
    path = str(tmp_path / "corpus" / "stdlib")
    start = time.time()
    prepare.ensure_corpus(path)
    assert time.time() - start < 20 and has_val(path)
    tokens, made = open_tokens(path), os.stat(f"{path}/train.bin").st_mtime_ns
    assert tokens.n_tokens > 1_000_000 and tokens.vocab_size == 257
    capsys.readouterr()
    prepare.ensure_corpus(path)
    assert os.stat(f"{path}/train.bin").st_mtime_ns == made and not capsys.readouterr().err
    copy = str(tmp_path / "two" / "stdlib")
    call = [sys.executable, "-c", f"from support import prepare; prepare.ensure_corpus({copy!r})"]
    both = [
        subprocess.Popen(call, cwd=ROOT, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]  # two jobs that start together
    assert [(job.communicate(timeout=60)[1], job.returncode)[1] for job in both] == [0, 0]
    assert open_tokens(copy).fingerprint == tokens.fingerprint and os.listdir(tmp_path / "two") == ["stdlib"]
    name = prepare.stdlib_corpus()
    assert re.fullmatch("corpus/stdlib-[0-9a-f]{8}", name) and prepare.stdlib_corpus() == name
    monkeypatch.setattr(prepare, "_stdlib", lambda: [str(write(tmp_path, a__py="print()") / "a.py")])
    assert prepare.stdlib_corpus() != name


def test_no_network_and_no_cache(tmp_path):
    write(tmp_path, a__txt="abc")
    proxy = "http://127.0.0.1:9"  # nothing listens there: the download fails at once, whatever this machine can reach
    run = cli(
        "prepare",
        "--out",
        tmp_path / "out",
        "--tokenizer",
        "gpt2",
        tmp_path / "a.txt",
        TIKTOKEN_CACHE_DIR=str(tmp_path),
        HTTPS_PROXY=proxy,
        https_proxy=proxy,
    )
    assert run.returncode == 2 and len(run.stderr.splitlines()) == 1, run.stderr
    assert "TIKTOKEN_CACHE_DIR" in run.stderr and "--tokenizer bytes" in run.stderr and not (tmp_path / "out").exists()
    run = cli("prepare", f"--out={tmp_path / 'out'}", tmp_path / "a.txt", https_proxy=proxy)
    assert run.returncode == 0 and np.fromfile(tmp_path / "out" / "train.bin", "uint16").tolist() == [97, 98, 99, EOT]
    with refuses("unknown tokenizer 'gpt5'"):
        prepare.load_tokenizer("gpt5")


def test_masks_shards_and_windows_across_edges(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "PIECE", 20)  # the mask begins in the third portion
    rng = np.random.default_rng(0)
    ids, mask = rng.integers(0, 500, 95), rng.integers(0, 2, 95)
    rows = [
        {"ids": ids[:40].tolist()},
        *({"ids": ids[a : a + 5].tolist(), "mask": mask[a : a + 5].tolist()} for a in range(40, 95, 5)),
    ]
    got, meta = made(tmp_path, write(tmp_path, a__jsonl=lines(*rows)) / "a.jsonl", vocab_size=500)
    assert got == ids.tolist() and meta["splits"]["train"]["shards"][0]["mask"] == "train.mask"
    tokens, mask[:40] = open_tokens(str(tmp_path / "out")), 1
    assert tokens.n_windows(13) == 7
    for w in range(7):
        x, y = tokens.window(w, 13)
        assert x.tolist() == ids[w * 13 : w * 13 + 13].tolist()
        assert y.tolist() == np.where(mask, ids, -1)[w * 13 + 1 : w * 13 + 14].tolist()
    (tmp_path / "out" / "train.mask").unlink()
    with refuses("train.mask is missing"):
        open_tokens(str(tmp_path / "out"))
    with refuses('a.jsonl:1: "mask" must be'):
        made(tmp_path, write(tmp_path / "m", a__jsonl=lines({"ids": [1, 2], "mask": [1]})), "out2", vocab_size=500)


def test_val_split_is_by_document(tmp_path):
    folder = write(tmp_path / "in", a__jsonl=lines(*({"text": chr(97 + i % 26) * 3} for i in range(1000))))
    ids, meta = made(tmp_path, folder, val=0.005)
    assert meta["splits"]["val"]["documents"] == 5 and meta["splits"]["train"]["documents"] == 995
    val = np.fromfile(tmp_path / "out" / "val.bin", "uint16").tolist()
    assert val == [i for d in (1, 201, 401, 601, 801) for i in (*[97 + d % 26] * 3, EOT)] and len(ids) == 995 * 4


def test_a_killed_preparation_publishes_nothing(tmp_path):
    write(tmp_path, a__txt=b"some words " * 20_000_000)
    command = [
        sys.executable,
        str(ROOT / "data.py"),
        "prepare",
        "--out",
        str(tmp_path / "out"),
        str(tmp_path / "a.txt"),
    ]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while not list(tmp_path.glob("out.tmp-*/train.bin")):
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL and not (tmp_path / "out").exists()


# ------------------------------------------------------------------- contract 2, A15-A17, A19, A20, A24, I11: batches


def corpus(tmp_path: Path, n_tokens: int = 1001) -> Tokens:
    return open_tokens(file_of(tmp_path, np.random.default_rng(0).integers(0, 250, n_tokens)))


def made_run(tokens: Tokens, rank: int = 0, world_size: int = 1, **flags) -> Run:
    """A run of data-parallel ranks, one of which we are; `tokens` to train on and to validate on."""
    common = dict(global_batch=12, micro_batch=2, seq_len=10, seed=5, steps=6, workers=0, vocab_size=250, data="corpus")
    cfg = Config(**common | flags)
    return Run(cfg, rank, world_size, torch.device("cpu"), tokens=tokens, val_tokens=tokens)


def stream(tokens: Tokens, rank: int = 0, world_size: int = 1, start_step: int = 0, **flags) -> list:
    """[(x, y, sample) as lists] of all micro-batches."""
    run = made_run(tokens, rank, world_size, **flags)
    batches = data.Batches(run, start_step)
    got = [[t.tolist() for t in batches.next()] for _ in range((run.cfg.steps - start_step) * batches.accum)]
    batches.close()
    return got


def rows(batches: list) -> list:
    return [row for batch in batches for row in zip(*batch, strict=True)]


@pytest.mark.parametrize("n", [1, 2, 3, 10, 63, 64, 65, 1000, 4097])
def test_each_epoch_is_a_permutation_of_its_own(n):
    order = data.stream_windows(3, 0, 4 * n, n).reshape(4, n)
    assert (np.sort(order) == np.arange(n)).all()
    assert (
        data.stream_windows(3, n // 2, 2 * n, n) == order.ravel()[n // 2 : n // 2 + 2 * n]
    ).all()  # any start, over edges
    if n >= 10:
        other = data.stream_windows(4, 0, n, n)
        assert all(
            (a != b).any()
            for a, b in ((order[0], order[1]), (order[1], order[2]), (order[0], other), (order[0], np.arange(n)))
        )
    if n >= 1000:  # as unrelated as random permutations: about one window in the same place, neighbours no nearer
        assert (order[0] == order[1]).sum() < 12
        assert abs(np.abs(np.diff(order[0])).mean() / n - 1 / 3) < 0.03


def test_layout_and_workers_do_not_change_the_stream(tmp_path):
    tokens = corpus(tmp_path)
    want = rows(stream(tokens))
    n_windows = tokens.n_windows(10)
    windows = data.stream_windows(5, 0, 72, n_windows)
    for k, (x, y, sample) in enumerate(want):  # an independent reading of the file
        ids = np.fromfile(tmp_path / "train.bin", "uint16")[windows[k] * 10 :][:11].tolist()
        assert sample == k and x == ids[:-1] and y == ids[1:]
    for world_size, micro_batch in ((2, 2), (3, 2), (2, 1), (1, 6)):
        ranks = [rows(stream(tokens, r, world_size, micro_batch=micro_batch)) for r in range(world_size)]
        per = 12 // world_size
        assert [row for step in range(6) for rank in ranks for row in rank[step * per : step * per + per]] == want
    assert rows(stream(tokens, workers=2)) == want
    assert rows(stream(tokens, 1, 2, workers=4)) == rows(stream(tokens, 1, 2))
    with refuses("global-batch 12 is not a multiple of --micro-batch 2 x 5 data-parallel ranks"):
        stream(tokens, 0, 5)


def test_resuming_at_any_step_continues_the_same_stream(tmp_path):
    tokens = corpus(tmp_path)
    for rank, world_size in ((0, 1), (1, 2), (2, 3)):
        whole = stream(tokens, rank, world_size, steps=20)
        per = len(whole) // 20
        for stop in (3, 7, 10, 13):
            assert (
                stream(tokens, rank, world_size, start_step=stop, steps=20, workers=2 if stop == 7 else 0)
                == whole[stop * per :]
            )


def test_ranks_read_the_same_number_of_batches_of_19_windows(tmp_path):
    tokens = corpus(tmp_path, 191)
    assert tokens.n_windows(10) == 19
    for world_size in (2, 3):
        got = [rows(stream(tokens, r, world_size, steps=3, global_batch=6, micro_batch=1)) for r in range(world_size)]
        assert [len(g) for g in got] == [18 // world_size] * world_size
        assert sorted(row[2] for g in got for row in g) == list(range(18))


def hash32(window: int) -> int:
    """The upper half of splitmix64's first number for this seed, by its definition."""
    v = (window + 0x9E3779B97F4A7C15) % 2**64
    v = (v ^ v >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    v = (v ^ v >> 27) * 0x94D049BB133111EB % 2**64
    return (v ^ v >> 31) >> 32


def read_step(batches: data.Batches) -> int:
    for _ in range(batches.accum):
        batches.next()
    return batches.proof()


@pytest.mark.parametrize(
    "world_size, parts, workers",
    [(1, {}, 0), (2, {}, 1), (3, {}, 0), (4, {"pp": 2}, 0), (6, {"tp": 3}, 0), (8, {"pp": 2, "tp": 2, "cp": 2}, 0)],
)
def test_the_proof_of_a_step_is_the_same_under_every_layout(tmp_path, world_size, parts, workers):
    tokens = corpus(tmp_path)
    windows = [np.fromfile(tmp_path / "train.bin", "uint16")[w * 10 :][:10].tolist() for w in range(100)]
    ranks = []
    for rank in range(world_size):
        run = made_run(tokens, rank, world_size, steps=9, workers=workers)
        vars(run).update(parts)
        ranks.append(data.Batches(run, 3))
    for step in range(3, 9):
        rows_read = [row for _ in range(ranks[0].accum) for batches in ranks for row in batches.next()[0].tolist()]
        total = float(sum(batches.proof() for batches in ranks))
        # which windows these are is found out from the tokens
        copies = world_size // ranks[0].run.dp
        assert total % 2**32 == sum(hash32(windows.index(row)) for row in rows_read) % 2**32
        assert {batches.check(step, total) * copies % 2**32 for batches in ranks} == {total % 2**32}
        assert [batches.proof() for batches in ranks] == [0] * world_size
    for batches in ranks:
        batches.close()


class Repeats(data.Batches):
    """Every second micro-batch is the one before it again, as of a loader that hands out a buffer twice."""

    def __getitem__(self, i: int) -> torch.Tensor | str:
        return super().__getitem__(i - i % 2)


def faulty(kind: str, tokens: Tokens, rank: int, step: int, **flags) -> data.Batches:
    """What rank 1 of 2 reads with; rank 0 is sound."""
    run = made_run(tokens, rank, 2, **flags)
    if rank == 1 and kind == "its neighbour's share":
        run.rank = 0
    if rank == 1 and kind == "another seed":
        run.cfg.seed += 1
    return (Repeats if rank and kind == "a batch twice" else data.Batches)(
        run, step + (rank == 1 and kind == "one step on")
    )


def test_every_window_counts_in_the_proof():
    """Number 0 too, which the mixer alone maps to 0; and one that stands in for another is seen."""
    hashes = [data.hash_sum(np.array([w])) for w in range(20_000)]
    assert hashes == [hash32(w) for w in range(20_000)] and min(hashes) > 0
    assert len(set(hashes)) >= 19_999  # 32 bits: less than one pair in twenty is expected
    assert data.hash_sum(np.arange(20_000)) == sum(hashes) % 2**32


def prove(rank: int, path: str, kind: str) -> tuple[str, float]:
    """Three steps on real ranks, in each of which the sum travels as the scripts send it."""
    batches = faulty(kind, open_tokens(path), rank, 0, workers=1, data=path)
    try:
        for step in range(3):
            facts = torch.zeros(2, dtype=torch.float64)
            facts[1] = read_step(batches) + (rank == 1 and kind == "the sum")
            dist.all_reduce(facts)
            batches.check(step, facts[1].item())
    except UserError as error:
        return str(error), facts[1].item()
    finally:
        batches.close()
    return "all read", 0.0


def test_what_was_read_as_it_should_goes_on(tmp_path):
    path = file_of(tmp_path, np.random.default_rng(0).integers(0, 250, 1001))
    assert run_ranks(2, prove, path, "nothing") == [("all read", 0.0)] * 2


@pytest.mark.parametrize("kind", ["a batch twice", "its neighbour's share", "another seed", "one step on", "the sum"])
def test_what_was_not_read_as_it_should_ends_the_run(tmp_path, kind):
    """In the same step on all ranks, naming the rank; and the command that the message names works."""
    path = file_of(tmp_path, np.random.default_rng(0).integers(0, 250, 1001))
    (message, total), (other, _) = run_ranks(2, prove, path, kind)
    blame = "all read theirs, but their sum went wrong" if kind == "the sum" else "ranks [1] did not read their windows"
    right = sum(hash32(int(w)) for w in data.stream_windows(5, 0, 12, 100)) % 2**32
    assert message.startswith(f"step 0: {blame}: the hashes sum to {int(total) % 2**32}, not {right}; ")
    assert "\n" not in message and other.startswith("step 0: ")
    if kind != "another seed":  # there each has its own idea of what is right
        assert other == message
    shown = cli(*shlex.split(message.partition("python data.py ")[2]))
    assert shown.returncode == 0 and "rank 1: samples 6-11, windows " in shown.stdout, shown.stderr


def test_validation_scores_each_window_once(tmp_path):
    tokens = open_tokens(file_of(tmp_path, np.arange(10 * 8 + 1 + 3) % 200))
    for world_size in (1, 2, 3, 4):
        for limit, n in ((0, 10), (7, 7), (99, 10)):
            ranks = [
                list(data.val_batches(made_run(tokens, r, world_size, seq_len=8, eval_windows=limit)))
                for r in range(world_size)
            ]
            assert len({len(batches) for batches in ranks}) == 1
            flat = [(x, y, s) for batches in ranks for batch in batches for x, y, s in zip(*batch, strict=True)]
            assert sorted(int(s) for _, _, s in flat if s >= 0) == list(range(n))
            for x, y, s in flat:
                assert (
                    x.shape == (8,) and (y == -1).all() if s < 0 else (y == (s * 8 + 1 + torch.arange(8)) % 200).all()
                )


def val_loss(rank: int, path: str, pp: int, tp: int) -> tuple[float, list[int]]:
    """evaluate() of a model without weights, whose loss of a target is the target; and the targets of each batch."""
    run = made_run(open_tokens(path), rank, dist.get_world_size(), seq_len=8, eval_windows=0)
    run.pp, run.tp = pp, tp
    seen = []

    def strategy(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert x.dtype == y.dtype == torch.int64 and x.shape == y.shape == (2, 8) and not torch.is_grad_enabled()
        _, stage, seat = run.place()
        stands = stage == pp - 1 and seat == 0  # the others of this replica have seen the same batch
        seen.append(int((y >= 0).sum()))
        dist.all_reduce(torch.zeros(1))  # a rank with a batch more or less hangs here
        return stands * y[y >= 0].sum().float(), stands * (y >= 0).sum()

    return data.evaluate(run, strategy), seen


@pytest.mark.parametrize("world_size, pp, tp", [(1, 1, 1), (3, 1, 1), (2, 1, 2), (3, 3, 1), (4, 2, 1)])
def test_validation_is_the_mean_over_each_window_once_whoever_scores_it(tmp_path, world_size, pp, tp):
    path = file_of(tmp_path, np.arange(84) % 200)  # 10 windows of 8, whose targets are 1 to 80
    results = run_ranks(world_size, val_loss, path, pp, tp)
    assert [loss for loss, _ in results] == [sum(range(1, 81)) / 80] * world_size
    assert sum(sum(seen) for _, seen in results) == 80 * pp * tp


@pytest.mark.parametrize("workers", [0, 1])
def test_token_beyond_the_model_is_named(tmp_path, workers):
    ids = np.arange(101) % 250
    ids[57] = 250
    tokens = open_tokens(file_of(tmp_path, ids))
    with refuses("train.bin: token 57 is id 250, the model's vocabulary is 250") as error:
        stream(tokens, workers=workers, global_batch=10, steps=1)
    assert "\n" not in str(error.value)
    with refuses("token 57 is id 250"):
        list(data.val_batches(made_run(tokens, eval_windows=0)))
    ids[57], ids[100] = 0, 300  # a target only, never an input
    with refuses("token 100 is id 300"):
        stream(open_tokens(file_of(tmp_path, ids, "b_train.bin")), workers=workers, global_batch=10, steps=1)


def lose_a_worker(rank: int, path: str) -> str:
    batches = data.Batches(made_run(open_tokens(path), rank, 2, global_batch=8, steps=10**6, workers=2), 0)
    batches.next()
    pids = [w.pid for w in batches.iterator._workers]
    for pid in pids:  # what torchrun does on Ctrl-C or a time limit: all of the group get it, the workers go on
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
    for _ in range(20):
        batches.next()
    if rank == 0:
        batches.close()
        return "finished"
    os.kill(pids[1], signal.SIGKILL)
    start = time.time()
    try:
        while time.time() - start < 30:
            batches.next()
    except UserError as error:
        batches.close()
        return f"{error} | killed {pids[1]} | {time.time() - start:.1f}"
    return "never noticed"


def test_killed_worker_is_named_and_signals_do_not_kill_one(tmp_path):
    path = file_of(tmp_path, np.arange(10001) % 250)
    first, second = run_ranks(2, lose_a_worker, path)
    message, killed, seconds = second.split(" | ")
    assert first == "finished" and message.startswith("rank 1: ") and killed.removeprefix("killed ") in message, second
    assert float(seconds) < 15


def test_an_error_without_words_has_its_name(tmp_path):
    """A worker that dies while it hands a batch over leaves an EOFError."""
    loader = data.Batches.__new__(data.Batches)
    loader.run = Run(Config(), 3, 4, torch.device("cpu"))
    said = str(loader.no_batch("loader worker with pid [7] died", EOFError()))
    assert said.startswith("rank 3: loader worker with pid [7] died (EOFError()); /dev/shm, ")


def test_a_failing_script_does_not_wait_for_its_workers(tmp_path):
    path = file_of(tmp_path, np.arange(1001) % 250)
    code = (
        f"import sys; sys.path[:0] = {str(ROOT)!r}, {str(ROOT / 'tests')!r}; from test_data import *\n"
        f"batches = data.Batches(made_run(open_tokens({path!r}), steps=99, workers=2), 0)\n"
        "batches.next()\nraise RuntimeError('own')"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=40)
    assert run.returncode == 1 and "RuntimeError: own" in run.stderr


def test_reading_holds_no_memory_and_no_descriptors(tmp_path):
    np.zeros(50_000_000, np.uint16).tofile(tmp_path / "train.bin")
    tokens = open_tokens(str(tmp_path))
    n = tokens.n_windows(256)

    def anonymous() -> int:
        return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024

    before, descriptors = anonymous(), len(os.listdir("/proc/self/fd"))
    for w in data.stream_windows(0, 0, 5000, n):
        tokens.window(int(w), 256)
    assert anonymous() - before < 10e6 and len(os.listdir("/proc/self/fd")) <= descriptors + 1  # the mapping's own


def test_show_proves_the_ranks_disjoint(tmp_path):
    folder = write(tmp_path / "in", a__txt="In the beginning was the word, and so on and on. " * 40)
    made(tmp_path, folder)
    run = cli(
        "show", tmp_path / "out", "--step", 3, "--world", 4, "--global-batch", 8, "--seq-len", 16, "--seed", 9, "--text"
    )
    assert run.returncode == 0, run.stderr
    n = open_tokens(str(tmp_path / "out")).n_windows(16)
    windows = data.stream_windows(9, 24, 8, n)
    for r in range(4):
        assert (
            f"rank {r}: samples {24 + 2 * r}-{25 + 2 * r}, windows {windows[2 * r]} {windows[2 * r + 1]}" in run.stdout
        )
    text = "In the beginning was the word, and so on and on. " * 40
    assert (
        f"token {windows[0] * 16}\n{text[windows[0] * 16 :][:16]}\n" in run.stdout
        and "disjoint: 8 samples" in run.stdout
    )


def test_the_rate_of_a_worker_beside_that_of_cards(tmp_path, capsys):
    tokens = corpus(tmp_path, 100_000)
    data.print_rate(made_run(tokens, 0, 4, global_batch=64, seq_len=512), "124m")
    first, *cards = capsys.readouterr().out.splitlines()
    read = int(re.fullmatch(r"one loader worker reads ([\d,]+) tokens/s, by 2 x 512", first)[1].replace(",", ""))
    begun = time.monotonic()
    for _ in range(200):
        tokens.batch(np.arange(2), 512, None)
    assert read < 200 * 1024 / (time.monotonic() - begun) * 3  # what it reads by itself, without handing it over
    wanted = 0.6 * 989e12 / (6 * 123_568_128 + 6 * 12 * 512 * 768)  # the head is tied: counted once; norms do not count
    assert f"124m on 4 x H200: {4 * wanted:,.0f} tokens/s at most; --workers {-(-wanted // read):.0f}" in cards


def test_a_reader_that_stops_ends_it_quietly(tmp_path):
    """`... | head -1`: no traceback about a broken pipe."""
    folder = write(tmp_path / "in", a__txt="In the beginning was the word, and so on and on. " * 4000)
    made(tmp_path, folder)
    flags = f"--world 2000 --global-batch 4000 --micro-batch 1 --seq-len 16 {tmp_path / 'out'}"
    run = subprocess.run(
        f"{sys.executable} data.py show --step 3 {flags} | head -1",
        shell=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.stdout.startswith("rank 0: samples ") and run.stdout.count("\n") == 1 and not run.stderr


def test_progress_is_at_most_one_line_a_second(tmp_path, capsys):
    write(tmp_path, a__jsonl=lines(*[{"text": "some words"}] * 2500))
    start = time.monotonic()
    for _ in prepare.read_files([str(tmp_path / "a.jsonl")], "text", None, pytest.fail):
        time.sleep(0.001)
    printed = capsys.readouterr().err.splitlines()
    assert 1 <= len(printed) <= time.monotonic() - start and all(
        re.fullmatch(r"[\d.]+ of 0.1 MB, \d+ s left", line) for line in printed
    )


# --- what people really have ------------------------------------------------------------------------------------------

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
ZSTD = bytes.fromhex("28b52ffd") + b"....."
TAR = b"a.txt".ljust(257, b"\0") + b"ustar".ljust(255, b"\0") + b"a text".ljust(512, b"\0")


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("d.jsonl.zst", ZSTD, "is zstd: unzstd it"),
        ("d.jsonl", ZSTD, "is zstd: unzstd it"),
        ("d.parquet", ZSTD, "is zstd: unzstd it"),
        ("d.zip", b"PK\3\4....", "is zip: unzip it"),
        ("d.npy.gz", gzip.compress(b"\x93NUMPY", mtime=0), "is .npy: prepare it with --vocab-size"),
        ("d.npy", gzip.compress(b"\x93NUMPY", mtime=0), "is gzip: gunzip it"),
        ("d.tar.gz", gzip.compress(TAR, mtime=0), "is tar: unpack it"),
        ("d.7z", b"7z\xbc\xaf\x27\x1c", "is 7z: unpack it"),
        ("d.pdf", b"%PDF-1.7\n", "is PDF: make text of it"),
        ("d.txt", "a text".encode("utf-16"), "is UTF-16: convert it: iconv"),
        ("d.txt", "a text".encode("utf-16le"), "is binary, wanted is UTF-8 text"),
        ("d.txt", LFS, "is a Git LFS pointer: fetch the file itself: git lfs pull"),
        ("d.parquet", LFS, "is a Git LFS pointer"),
        ("data.arrow", b"ARROW1....", "is Arrow: save it as parquet"),
        ("data.arrow", b"\xff\xff\xff\xff\xc8\3\0\0", "is Arrow: save it as parquet"),  # as Hugging Face writes it
    ],
)
@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_other_formats_are_named(name, content, said, on_error, tmp_path):
    """Under --on-error skip too: a corpus of U+FFFD is no corpus."""
    (tmp_path / name).write_bytes(content)
    with refuses(f"{name} {said}"):
        prepare.prepare(str(tmp_path / "out"), [str(tmp_path / name)], on_error=on_error, vocab_size=257)
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize(
    "content, said",
    [
        (gzip.compress(bytes(99), mtime=0), "is gzip"),
        (b"PK\3\4....", "is zip"),
        (b"\x93NUMPY..", "is .npy: prepare it with --vocab-size"),
        (b"PAR1....", "is parquet"),
        (LFS, "git lfs pull"),
        (b"Once upon a time there was a file of text under a name it should not have.\n", "is text, no token file"),
        ("\u0416\u0438\u043b\u0438-\u0431\u044b\u043b\u0438. ".encode() * 400, "is text, no token file"),  # cut at 4096
    ],
)
def test_another_file_called_train_bin(content, said, tmp_path):
    (tmp_path / "train.bin").write_bytes(content)
    with refuses(f"train.bin {said}" if "is " in said else said):
        open_tokens(str(tmp_path))


@pytest.mark.parametrize("suffix, pack", [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)])
def test_what_the_standard_library_unpacks_is_read(suffix, pack, tmp_path):
    """In a folder by its name, and what is packed without saying so."""
    folder = write(tmp_path / "in", c__jsonl=pack(b'{"text": "c"}\n'))
    (folder / f"a.jsonl{suffix}").write_bytes(pack(b'{"text": "a"}\n'))
    (folder / f"b.txt{suffix}").write_bytes(pack(b"b"))
    assert made(tmp_path, folder)[0] == [ord("a"), EOT, ord("b"), EOT, ord("c"), EOT]


def test_what_lies_beside_the_data_is_left_out_and_counted(tmp_path):
    """macOS's and Jupyter's copies, descriptions of a dataset and of a package, also those of one line."""
    source = write(tmp_path / "in", a__jsonl='{"text": "a"}\n', b__json='{"text": "b"}\n', c__json='{"ids": [99]}\n')
    for name in ("__MACOSX", ".ipynb_checkpoints"):
        write(source / name, a__jsonl='{"text": "twice"}\n')
    (source / "._a.jsonl").write_bytes(b"\0\5\x16\7\xfe")
    write(source, dataset_info__json='{\n  "features": {}\n}\n', state__json='{"split": "x"}', package__json="[" * 9999)
    (source / "data.arrow").write_bytes(b"ARROW1")
    ids, meta = made(tmp_path, source, vocab_size=257)
    assert ids == [ord("a"), EOT, ord("b"), EOT, 99]
    assert meta["left_out"] == {"hidden": 3, '.json that has no {"text": ...} per line': 3, ".arrow": 1}


@pytest.mark.parametrize(
    "text, said",
    [
        ('[{"text": "a"}]\n', "a.json:1: .*found a list; one object per line is read: .*'.\\[\\]'"),
        ('[\n  {"text": "a"}\n]\n', "a.json:1: .*one object per line is read: .*'.\\[\\]'"),
        ('{"data": [{"text": "a"}]}\n', "a.json:1: .*found {'data': 'list'}; one object.*'.data\\[\\]'"),
        ('{\n  "data": []\n}\n', "a.json:1: .*one object per line is read: jq -c . FILE"),
        ('{"content": "y"}\n', "a.json:1: wanted .*; --text-field content takes that"),
    ],
)
def test_json_of_another_form_says_how_to_make_it_ours(text, said, tmp_path):
    (tmp_path / "a.json").write_text(text)
    with refuses(said):
        prepare.prepare(str(tmp_path / "out"), [str(tmp_path / "a.json")])


@pytest.mark.parametrize(
    "names, val",
    [
        (["x_train_1.npy", "x_val_0.npy", "retrieval.npy"], 1),
        (["tale-train.txt", "tale-valid.txt"], 1),
        (["train.jsonl", "Validation.jsonl", "val.jsonl"], 2),
        (["main.py", "val.py"], 0),  # where nothing is called train, val is a word like another
    ],
)
def test_files_are_split_by_name(names, val, tmp_path):
    folder = write(tmp_path / "in")
    for name in names:
        if name.endswith(".npy"):
            np.save(folder / name, np.array([1]))
        else:
            (folder / name).write_text('{"text": "a"}' if name.endswith(".jsonl") else "a")
    _, meta = made(tmp_path, folder, vocab_size=257)
    assert {k: v["documents"] for k, v in meta["splits"].items()} == {"train": len(names) - val, "val": val}


def test_a_test_split_is_not_trained_on(tmp_path):
    source = write(tmp_path / "in", train_0__jsonl='{"text": "a"}', test_0__jsonl='{"text": "b"}', test_0__txt="c")
    ids, meta = made(tmp_path, source)
    assert ids == [ord("c"), EOT, ord("a"), EOT] and meta["left_out"] == {"test split": 1}
    ids, _ = made(tmp_path, [source / "train_0.jsonl", source / "test_0.jsonl"], "named")  # is always read
    assert ids == [ord("a"), EOT, ord("b"), EOT]


def test_a_bin_of_int32_has_a_way_in(tmp_path):
    """The refusal names a command, and the command works."""
    np.arange(100, dtype="<i4").tofile(tmp_path / "train.bin")
    with refuses("looks like uint32; `python data.py prepare --out DIR --vocab-size N .*train.bin` reads it"):
        open_tokens(str(tmp_path))
    prepare.prepare(str(tmp_path / "out"), [str(tmp_path / "train.bin")], vocab_size=100)
    assert open_tokens(str(tmp_path / "out")).window(0, 99)[1].tolist() == list(range(1, 100))


@pytest.mark.parametrize("where", ["train.bin", "meta.json", "data", "input", "input in a folder", "out"])
def test_a_link_that_leads_nowhere_is_named_with_its_target(where, tmp_path):
    """By the tools' frame, from the error's file name."""
    source = write(tmp_path / "in", a__txt="a")
    out, lost = tmp_path / "out", Path("/none")
    links = {"input": tmp_path / "x.txt", "input in a folder": source / "b.txt", "out": out, "data": tmp_path / "data"}
    if where in ("train.bin", "meta.json"):
        file_of(tmp_path, range(99))
        (tmp_path / where).unlink(missing_ok=True)
    link = links.get(where, tmp_path / where)
    link.symlink_to(lost)
    with pytest.raises(OSError) as error:
        if where in ("train.bin", "meta.json", "data"):
            open_tokens(str(link if where == "data" else tmp_path))
        else:
            prepare.prepare(str(out), [str(link if where == "input" else source)])
    assert (
        str(users_error(error.value))
        == f"{link}: No such file or directory ({link} is a link to /none, which is not there)"
    )


LLAMA = dict(num_hidden_layers=2, num_attention_heads=4, hidden_size=64, intermediate_size=96, vocab_size=61)


@pytest.mark.parametrize(
    "spec, said",
    [
        ({"rope_theta": "auto"}, "rope_theta is 'auto', expected float"),
        ({"rope_theta": [1]}, "rope_theta is .1., expected float"),
        ({"max_position_embeddings": 64.0}, "max_position_embeddings is 64.0, expected int"),
        ({"num_attention_heads": 4.0}, "num_attention_heads is 4.0, expected int"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing, expected int"),
        ({"vocab_size": True}, "vocab_size is True, expected int"),
        ({"head_dim": "16"}, "head_dim is '16', expected int"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', expected dict"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta is 'x', expected float"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, expected bool"),
        ({"rms_norm_eps": True}, "rms_norm_eps is True, expected float"),
        ({"model_type": "mllama"}, "model_type is 'mllama'; only Hugging Face's config.json of a Llama is read"),
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; only"),
        ({"dim": 64, "n_layers": 2}, "Meta's own params.json; only"),
    ],
)
def test_config_values_of_another_kind(spec, said, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | spec))
    with refuses(said):
        load_config(str(path))


def test_a_config_with_null_and_a_bom(tmp_path):
    """null is the default, as there."""
    path = tmp_path / "config.json"
    nulls = dict.fromkeys(("max_position_embeddings", "rope_theta", "rope_scaling", "head_dim", "num_key_value_heads"))
    path.write_text(json.dumps(LLAMA | nulls), encoding="utf-8-sig")
    cfg = load_config(str(path))
    assert (cfg.seq_len, cfg.rope_theta, cfg.n_kv_head, cfg.head_dim) == (2048, 10000.0, 4, 16)
