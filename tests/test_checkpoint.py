"""checkpoint.py: boxes, any layout to any layout, complete or absent, damage, hostile files. Real ranks and files."""

import dataclasses
import hashlib
import json
import math
import multiprocessing as mp
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import ROOT, run_ranks
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import checkpoint
from checkpoint import (
    Checkpointer,
    boxes_of_range,
    describe,
    flat_piece,
    read_meta,
    slice_piece,
    steps,
    verify,
    whole_piece,
)
from support.flags import UserError


def full(step: int = 0) -> dict[str, torch.Tensor]:
    """What a run holds at `step`; three dtypes, 0-D to 3-D, NaN, infinity and -0.0 among the values."""
    g = torch.Generator().manual_seed(step)
    tensors = {
        "tok_emb.weight": torch.randn(11, 8, generator=g),
        "blocks.0.wq.weight": torch.randn(6, 4, generator=g).bfloat16(),
        "blocks.1.wq.weight": torch.randn(6, 4, generator=g, dtype=torch.float64),
        "blocks.1.cube": torch.randn(4, 2, 2, generator=g),
        "norm.weight": torch.randn(8, generator=g),
        "scale": torch.tensor(0.1 + step, dtype=torch.float64),
    }
    tensors["tok_emb.weight"].view(-1)[:4] = torch.tensor([math.nan, math.inf, -0.0, -math.inf])
    return tensors


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return a.contiguous().view(-1).view(torch.uint8).equal(b.contiguous().view(-1).view(torch.uint8))


def flat_layout(tensors: dict, rank: int, world_size: int) -> dict:
    """One flat buffer over all elements of a tensor, cut in equal parts; norm and scale replicated."""
    pieces = {}
    for name, t in tensors.items():
        a, b = t.numel() * rank // world_size, t.numel() * (rank + 1) // world_size
        pieces[name] = whole_piece(t) if t.dim() < 2 else flat_piece(tuple(t.shape), a, t.reshape(-1)[a:b])
    return pieces


def half_layout(tensors: dict, rank: int, dim: int) -> dict:
    """Tensor parallelism on 2 ranks: rows (dim 0) or columns (dim -1) of what has two dimensions."""
    pieces = {}
    for name, t in tensors.items():
        if t.dim() < 2:
            pieces[name] = whole_piece(t)
        else:
            a, b = t.shape[dim] * rank // 2, t.shape[dim] * (rank + 1) // 2
            offsets = [0] * t.dim()
            offsets[dim] = a
            pieces[name] = slice_piece(tuple(t.shape), tuple(offsets), t.narrow(dim, a, b - a))
    return pieces


def stage_layout(tensors: dict, rank: int) -> dict:
    """Pipeline stages on 2 ranks; the norm is on both, as a tied tensor is."""
    first = ["tok_emb.weight", "blocks.0.wq.weight"]
    return {n: whole_piece(t) for n, t in tensors.items() if n == "norm.weight" or (n in first) == (rank == 0)}


def held_equal(pieces: dict, reference: dict) -> bool:
    """Every box of the pieces holds the reference's bits at its place."""
    parts = [(name, offsets, t) for name, piece in pieces.items() for offsets, t in piece.boxes]
    return bool(parts) and all(
        same_bits(t, reference[name][tuple(slice(o, o + s) for o, s in zip(offsets, t.shape, strict=True))])
        for name, offsets, t in parts
    )


def zeros(tensors: dict) -> dict:
    return {name: torch.zeros_like(t) for name, t in tensors.items()}


def refused(work, *args) -> str:
    try:
        work(*args)
    except UserError as e:
        return str(e)
    raise AssertionError(f"{work} was not refused")


# ---- boxes ----


@pytest.mark.parametrize("shape", [(), (5,), (1, 5), (4, 1), (3, 4), (2, 3, 4), (2, 1, 3, 2), (3, 2, 2, 2)])
def test_boxes_of_every_range_of_small_shapes(shape):
    n = math.prod(shape)
    numbers = torch.arange(n).reshape(shape)
    for start, stop in ((a, b) for a, b in product(range(n + 1), repeat=2) if a <= b):
        boxes = boxes_of_range(shape, start, stop)
        got = [
            numbers[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] for offsets, sizes, _ in boxes
        ]
        flat = torch.cat([g.reshape(-1) for g in got]) if got else torch.arange(0)
        assert flat.equal(torch.arange(start, stop))  # each element once, in order
        assert all(int(g.reshape(-1)[0]) == flat_start for g, (_, _, flat_start) in zip(got, boxes, strict=True))
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
    with pytest.raises(ValueError, match="not inside"):
        boxes_of_range(shape, 0, n + 1)


@pytest.mark.parametrize("offsets, sizes", [((2, 0), (3, 4)), ((-1, 0), (2, 4)), ((0, 4), (4, 0))])
def test_a_slice_outside_its_tensor(offsets, sizes):
    with pytest.raises(ValueError, match="is no part of"):
        slice_piece((4, 4), offsets, torch.zeros(sizes))


@pytest.mark.parametrize(
    "shape, boxes, fill",
    [
        ((4,), [((0,), (2,)), ((2,), (2,))], True),
        ((4,), [((0,), (2,)), ((1,), (2,))], False),  # as many elements, one twice and one not at all
        ((4,), [((0,), (3,)), ((3,), (2,))], False),
        ((4,), [((-1,), (4,))], False),
        ((2, 2), [((0, 0), (2, 1)), ((0, 1), (2, 1))], True),
        ((2, 2), [((0, 0), (2, 1)), ((0, 0), (1, 2))], False),
        ((), [((), ())], True),
        ((0, 3), [], True),
    ],
)
def test_boxes_fill_a_tensor(shape, boxes, fill):
    assert checkpoint._fill(boxes, shape) is fill


def test_what_several_ranks_hold_is_written_by_one_of_them_evenly():
    whole = checkpoint._layout(flat_layout({f"w{i}": torch.zeros(40 + i) for i in range(20)}, 0, 1))
    shares = checkpoint._share_out([whole] * 4)
    assert sorted(name for share in shares for name, _ in share) == sorted(whole)
    sizes = [sum(whole[name][0][0] for name, _ in share) for share in shares]
    assert max(sizes) - min(sizes) <= 60


# ---- any layout to any layout ----


def _save_thirds(rank: int, folder: str) -> None:
    saver = Checkpointer(folder)
    saver.save(7, flat_layout(full(), rank, 3), {"config": {"lr": 0.1}}, rng=torch.full((16,), rank, dtype=torch.uint8))
    saver.wait()


def _load_on_two(rank: int, folder: str, other: str) -> dict:
    reader, reference = Checkpointer(folder), full()
    path = reader.latest()
    facts = {"path": path}
    for name, layout in {
        "columns": lambda t: half_layout(t, rank, -1),
        "rows": lambda t: half_layout(t, rank, 0),
        "whole": lambda t: flat_layout(t, 0, 1),
        "flat halves": lambda t: flat_layout(t, rank, 2),
        "stages": lambda t: stage_layout(t, rank),
    }.items():
        pieces = layout(zeros(reference))
        facts["meta"] = reader.load(path, pieces)
        facts[name] = held_equal(pieces, reference)

    # some names only: the rest laid under as pieces without boxes
    some = {"norm.weight": whole_piece(torch.zeros(8))}
    reader.load(path, describe(path) | some)
    facts["some"] = held_equal(some, reference)

    # strict: rank 1 alone asks for something that does not fit, both are told
    def load(change: dict, drop: str = "") -> None:
        pieces = flat_layout(zeros(reference), 0, 1)
        if drop:
            del pieces[drop]
        reader.load(path, pieces | (change if rank == 1 else {}))

    facts["missing"] = refused(load, {"blocks.9.wq.weight": whole_piece(torch.zeros(2))})
    facts["left over"] = refused(load, {}, "norm.weight")
    facts["shape"] = refused(load, {"scale": whole_piece(torch.zeros(3, dtype=torch.float64))})
    facts["dtype"] = refused(load, {"norm.weight": whole_piece(torch.zeros(8).half())})

    # saved again under another layout, non-contiguous columns; RNG states come back to the rank that had them
    saver = Checkpointer(other)
    saver.save(8, half_layout(reference, rank, -1), {}, rng=torch.full((16,), 40 + rank, dtype=torch.uint8))
    saver.wait()
    facts["rng"] = saver.load(steps(other)[-1], half_layout(zeros(reference), rank, 0))["rng"].tolist()
    return facts


def test_any_layout_from_any_layout_bit_for_bit(tmp_path):
    run_ranks(3, _save_thirds, str(tmp_path / "a"))
    path = tmp_path / "a" / "step_00000007"
    for rank, facts in enumerate(run_ranks(2, _load_on_two, str(tmp_path / "a"), str(tmp_path / "b"))):
        assert facts["path"] == str(path)
        assert facts["meta"] == {"config": {"lr": 0.1}, "step": 7}  # and no rng: three ranks saved theirs
        assert all(facts[name] for name in ("columns", "rows", "whole", "flat halves", "stages", "some"))
        assert "not in the checkpoint: blocks.9.wq.weight" in facts["missing"]
        assert "in the checkpoint only: norm.weight" in facts["left over"]
        assert "scale is torch.float64 () there, torch.float64 (3,) here" in facts["shape"]
        assert "norm.weight is torch.float32 (8,) there, torch.float16 (8,) here" in facts["dtype"]
        assert facts["rng"] == [40 + rank] * 16
    reference = full()
    for folder in (path, tmp_path / "b" / "step_00000008"):
        dcp_to_torch_save(folder, tmp_path / "plain.pt")  # DCP's own tool reads both
        plain = torch.load(tmp_path / "plain.pt", weights_only=True)
        assert {n for n in plain if not n.startswith("rng.")} == set(reference)
        assert all(same_bits(plain[name], t) for name, t in reference.items())
    # a replicated tensor is stored once: three ranks wrote the model once, plus some 2 kB per box for its archive
    index = checkpoint.read_index(path)
    assert [len(index[n].boxes) for n in ("norm.weight", "scale")] == [1, 1]
    # what is read from the index is all that DCP's own reader finds in it
    dcp = FileSystemReader(path).read_metadata()
    assert index == {
        name: (t.size, t.properties.dtype, [
            (c.offsets, c.sizes, dcp.storage_data[dcp_metadata.MetadataIndex(name, c.offsets)]) for c in t.chunks
        ])
        for name, t in dcp.state_dict_metadata.items()
    }  # fmt: skip


# ---- complete or absent ----


def _slow_first_write(seconds: float) -> None:
    """Makes this process's disk slow: every file starts `seconds` late."""
    write = checkpoint._HashedFile.write

    def slow(self, data):
        if self.tell() == 0:
            time.sleep(seconds)
        return write(self, data)

    checkpoint._HashedFile.write = slow


def _faults(rank: int, folder: str) -> dict:
    facts = {}
    # ranks that do not share the folder
    facts["unshared"] = refused(Checkpointer, folder if rank == 0 else folder + "-elsewhere")

    # rotation: the newest two, and the protected
    saver = Checkpointer(folder, keep_last=2)
    for step in range(1, 6):
        saver.save(step, flat_layout(full(step), rank, 2), {})
        if step == 2:
            saver.wait()
            saver.protect(steps(folder)[0])
    saver.wait()
    facts["kept"] = [p.name for p in steps(folder)]
    saver.save(5, flat_layout(full(55), rank, 2), {})  # the same step again takes the old one's place
    saver.wait()
    pieces = flat_layout(zeros(full()), rank, 2)
    saver.load(saver.latest(), pieces)
    facts["again"] = held_equal(pieces, full(55)), [p.name for p in steps(folder)]

    # disk full on rank 1 only
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    big = full(6) | {"big": torch.ones(1000, 100)}
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    saver.save(6, flat_layout(big, rank, 2), {})
    facts["full"] = refused(saver.wait)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    facts["after full"] = sorted(os.listdir(folder)) if rank == 0 else facts["kept"]  # rank 0 is the one that clears up
    facts["space"] = refused(saver.check_space, 1 << 60)
    saver.check_space(1000)

    # meta that is no JSON, ranks at different steps, holes: told at once, on both ranks, and the next save works
    for name, step, meta, tensors in (
        ("not json", 7, {"x": object()} if rank else {}, flat_layout(full(), rank, 2)),
        ("steps", 7 + rank, {}, flat_layout(full(), rank, 2)),
        ("hole", 7, {}, {"w": flat_piece((4, 4), 0, torch.zeros(8))}),
    ):
        with pytest.raises((RuntimeError, ValueError)) as error:
            saver.save(step, tensors, meta)
        facts[name] = str(error.value)

    # a slow rank: not visible before it is whole; and the tensors change right after save()
    live = full(7)
    if rank == 1:
        _slow_first_write(1.5)
    started = time.time()
    saver.save(7, flat_layout(live, rank, 2), {})
    facts["blocked"] = time.time() - started
    for t in live.values():
        t.fill_(-1)
    while rank == 0 and steps(folder)[-1].name != "step_00000007":
        time.sleep(0.01)
    facts["visible after"] = time.time() - started if rank == 0 else math.inf
    facts["when visible"] = verify(steps(folder)[-1]) if rank == 0 else []
    saver.wait()
    pieces = flat_layout(zeros(live), rank, 2)
    saver.load(f"{folder}/step_00000007", pieces)
    facts[7] = held_equal(pieces, full(7))
    saver.save(8, flat_layout(live, rank, 2), {})
    started = time.time()
    saver.save(9, flat_layout(full(9), rank, 2), {})  # waits for 8, which must not get 9's values
    facts["second waited"] = time.time() - started
    saver.wait()
    for step, reference in ((8, live), (9, full(9))):
        pieces = flat_layout(zeros(reference), rank, 2)
        saver.load(f"{folder}/step_{step:08d}", pieces)
        facts[step] = held_equal(pieces, reference)
    saver.save(10, flat_layout(full(7), rank, 2), {})
    saver.wait()
    return facts


def test_rotation_disk_full_slow_rank_and_background_saves(tmp_path):
    folder = tmp_path / "ckpt"
    for facts in run_ranks(2, _faults, str(folder)):
        assert "ranks [1] do not see" in facts["unshared"]
        assert facts["kept"] == ["step_00000001", "step_00000004", "step_00000005"]
        assert facts["again"] == (True, facts["kept"])
        assert "rank 1" in facts["full"]
        assert "__1_0.distcp: File too large; this file needs 2" in facts["full"]  # 200 kB and the rest
        assert "bytes are free" in facts["full"]
        assert facts["after full"] == facts["kept"]  # nothing half-written, nothing lost
        assert f"needs {1 << 60} bytes" in facts["space"]
        assert "not JSON serializable" in facts["not json"]
        assert "different steps: [7, 8]" in facts["steps"]
        assert "w: the boxes of all ranks do not make up its shape" in facts["hole"]
        assert facts["blocked"] < 1
        assert facts["visible after"] > 1.4  # as rank 0 saw it
        assert facts["when visible"] == []
        assert facts["second waited"] > 1
        assert (facts[7], facts[8], facts[9]) == (True, True, True)
    assert [p.name for p in steps(folder)] == ["step_00000001", "step_00000009", "step_00000010"]


def _killed_in(line: int) -> Callable:
    """A tracer that kills its process when the thread that saves reaches the line-th line of checkpoint.py and of
    shutil, counting each once."""
    seen, files = set(), (checkpoint.__file__, shutil.__file__)

    def trace(frame, event, arg):
        if frame.f_code.co_filename not in files or threading.current_thread().name != checkpoint.BACKGROUND:
            return None
        seen.add((frame.f_code.co_filename, frame.f_lineno))
        if len(seen) == line:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    return trace


def _saving_rank(rank: int, folder: str, store: str, expected: str | None, victim: int = -1, line: int = 0) -> None:
    """Resumes, checks what it resumed from, then saves every step until it is killed; a victim at a line of a save."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    saver = Checkpointer(folder, keep_last=2)
    path = saver.latest()
    step = 0
    if path:
        pieces = flat_layout(zeros(full()), rank, 2)
        step = saver.load(path, pieces)["step"]
        if not held_equal(pieces, full(step)):
            os._exit(3)
    if path != expected or list(Path(folder).glob(".*-step_*")):
        os._exit(4)
    Path(store + f".ready{rank}").touch()
    if rank == victim:
        threading.settrace(_killed_in(line))
    while True:
        step += 1
        saver.save(step, flat_layout(full(step), rank, 2), {})
        if line:
            saver.wait()
            Path(store + f".saved{rank}").touch()


def _kill_loop(folder: Path, rounds: int) -> list[int]:
    """Kills both ranks, or only rank 1, in the middle of saving, `rounds` times; returns the newest step after each."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.checkpoint", "test_checkpoint"])
    newest, rng = [], random.Random(0)
    for i in range(rounds):
        store = str(folder.parent / f"store{i}")
        before = steps(folder)
        ranks = [
            context.Process(target=_saving_rank, args=(r, str(folder), store, str(before[-1]) if before else None))
            for r in range(2)
        ]
        for p in ranks:
            p.start()
        end = time.time() + 40
        while not all(os.path.exists(f"{store}.ready{r}") for r in range(2)):
            assert all(p.is_alive() for p in ranks), (
                f"round {i}: exit codes {[p.exitcode for p in ranks]} (3: wrong values, 4: wrong checkpoint)"
            )
            assert time.time() < end, "start-up hangs"
            time.sleep(0.005)
        time.sleep(rng.uniform(0.05, 0.6))
        if i % 3 != 2:
            ranks[0].kill()
        ranks[1].kill()
        time.sleep(0.3)
        ranks[0].kill()  # with rank 1 alone dead it was in a collective, or had ended by itself
        for p in ranks:
            p.join()
        assert all(verify(p) == [] for p in steps(folder)), f"round {i}"
        newest.append(int(steps(folder)[-1].name[5:]) if steps(folder) else 0)
    return newest


def test_killed_in_the_middle_of_saving(tmp_path):
    newest = _kill_loop(tmp_path / "ckpt", 5)
    assert newest == sorted(newest)
    assert newest[-1] > 3


@pytest.mark.soak
def test_killed_in_the_middle_of_saving_40_times(tmp_path):
    newest = _kill_loop(tmp_path / "ckpt", 40)
    assert newest == sorted(newest)
    assert newest[-1] > 40


@pytest.mark.soak
@pytest.mark.parametrize("victim", [0, 1])
def test_killed_at_every_line_of_a_save(victim, tmp_path):
    """Rank 0, which publishes, or another one dies; the checkpoints there are intact, and the next start goes on."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.checkpoint", "test_checkpoint"])
    folder, line, survived = tmp_path / "ckpt", 0, False
    newest = [0]
    while not survived:
        line += 1
        store, before = str(tmp_path / f"store{line}"), steps(folder)
        args = str(folder), store, str(before[-1]) if before else None, victim, line
        ranks = [context.Process(target=_saving_rank, args=(r, *args)) for r in range(2)]
        for p in ranks:
            p.start()
        began = time.time()
        while ranks[victim].is_alive() and not (survived := os.path.exists(f"{store}.saved{victim}")):
            assert time.time() - began < 60, line
            time.sleep(0.01)
        for p in ranks:
            p.kill()
            p.join()
        assert survived or ranks[victim].exitcode == -signal.SIGKILL, (line, ranks[victim].exitcode)
        assert all(verify(path) == [] for path in steps(folder)), line
        newest.append(int(steps(folder)[-1].name[5:]) if steps(folder) else 0)
    assert newest == sorted(newest) and line > (60 if victim == 0 else 25), (line, newest)


# ---- damage ----


def _save_two_steps(rank: int, folder: str) -> None:
    saver = Checkpointer(folder)
    for step in (1, 2):
        saver.save(step, flat_layout(full(step), rank, 2), {"step": step})
    saver.wait()


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("two_steps") / "ckpt"
    run_ranks(2, _save_two_steps, str(folder))
    return folder


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def _swap(a: Path, b: Path) -> None:
    rest = a.with_name("rest")
    a.rename(rest), b.rename(a), rest.rename(b)


# damage to step 2 -> the file that must be named
DAMAGE = {
    "flip 0": (lambda s: _flip(s / "__0_0.distcp"), "__0_0.distcp"),
    "flip 1": (lambda s: _flip(s / "__1_0.distcp"), "__1_0.distcp"),
    "flip index": (lambda s: _flip(s / ".metadata"), ".metadata"),
    "flip meta": (lambda s: _flip(s / "meta.json"), "meta.json"),
    "truncate": (lambda s: os.truncate(s / "__1_0.distcp", 3000), "__1_0.distcp"),
    "swap": (lambda s: _swap(s / "__0_0.distcp", s / "__1_0.distcp"), "__0_0.distcp"),
    "other step": (lambda s: shutil.copy(s.parent / "step_00000001" / "__1_0.distcp", s), "__1_0.distcp"),
    "no shard": (lambda s: (s / "__1_0.distcp").unlink(), "__1_0.distcp is missing"),
    "no index": (lambda s: (s / ".metadata").unlink(), ".metadata is missing"),
    "no checksums": (lambda s: (s / "checksums.json").unlink(), "checksums.json is missing"),
    "empty checksums": (lambda s: (s / "checksums.json").write_text(""), "checksums.json"),
    "list as checksums": (lambda s: (s / "checksums.json").write_text("[1]"), "checksums.json"),
    "other format": (lambda s: (s / "checksums.json").write_text('{"format": 2, "files": {}}'), "checksums.json"),
    "empty folder": (lambda s: (shutil.rmtree(s), s.mkdir()), "checksums.json is missing"),
}


def _resume_from_damaged(rank: int, root: str) -> dict:
    facts = {}
    for name in DAMAGE:
        saver = Checkpointer(f"{root}/{name}")
        facts[name] = (
            saver.latest(),
            refused(saver.load, f"{root}/{name}/step_00000002", flat_layout(zeros(full()), rank, 2)),
        )
        if name == "flip 0":  # a damaged one does not count among the two that rotation keeps
            saver.save(3, flat_layout(full(3), rank, 2), {})
            saver.wait()
            facts["rotated"] = [p.name for p in steps(f"{root}/{name}")]
    facts["put back"] = Checkpointer(f"{root}/renames").latest()
    return facts


def test_damage_is_named_and_the_one_before_is_used(two_steps, tmp_path):
    for name, (damage, _) in DAMAGE.items():
        shutil.copytree(two_steps, tmp_path / name)
        damage(tmp_path / name / "step_00000002")
        (tmp_path / name / "latest").write_text("step_00000999")  # nobody reads it
        (tmp_path / name / ".tmp-step_00000003").mkdir()
        shutil.copytree(two_steps / "step_00000002", tmp_path / name / ".tmp-step_00000004")
    # killed between the two renames that replace a step by itself
    shutil.copytree(two_steps, tmp_path / "renames")
    (tmp_path / "renames" / "step_00000002").rename(tmp_path / "renames" / ".old-step_00000002")
    for facts in run_ranks(2, _resume_from_damaged, str(tmp_path)):
        assert facts["put back"] == f"{tmp_path}/renames/step_00000002"
        assert sorted(os.listdir(tmp_path / "renames")) == ["step_00000001", "step_00000002"]
        for name, (_, culprit) in DAMAGE.items():
            path, refusal = facts[name]
            assert path == f"{tmp_path}/{name}/step_00000001", name
            assert culprit in refusal, name
            assert "others beside it: step_00000001" in refusal
            assert any(culprit in problem for problem in verify(tmp_path / name / "step_00000002"))
            assert verify(tmp_path / name / "step_00000001") == []
            assert not list((tmp_path / name).glob(".tmp-*"))
        assert facts["rotated"] == ["step_00000001", "step_00000002", "step_00000003"]
    # two problems, two lines: both swapped files are named
    assert len(verify(tmp_path / "swap" / "step_00000002")) == 2


def test_command_line(two_steps, tmp_path):
    shutil.copytree(two_steps, tmp_path / "ckpt")
    good, bad = steps(tmp_path / "ckpt")
    _flip(bad / "__1_0.distcp")
    wanted = {
        ("verify", good): (0, "is intact"),
        ("verify", bad): (1, "__1_0.distcp is damaged"),
        ("list", tmp_path): (0, "step_00000002"),
        ("list", tmp_path / "nowhere"): (2, "no step_* folder"),
    }
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    runs = [subprocess.Popen([sys.executable, "checkpoint.py", *map(str, args)], cwd=ROOT, **pipe) for args in wanted]
    for run, (code, text) in zip(runs, wanted.values(), strict=True):
        out, err = run.communicate(timeout=60)
        assert (run.returncode, text in (err if code == 2 else out)) == (code, True), out + err
        assert (out + err).count("\n") == (2 if text == "step_00000002" else 1)


def _close(rank: int, folder: str) -> dict:
    """Two runs after each other on ranks 0 and 1 of a job of three; rank 2 takes no part."""
    control = dist.new_group([0, 1], backend="gloo")
    if rank == 2:
        return {}
    facts = {}
    saver = Checkpointer(folder, group=control)
    if rank == 1:
        _slow_first_write(1)
    saver.save(1, flat_layout(full(1), rank, 2), {})
    saver.close()
    facts["closed"] = verify(steps(folder)[-1]), saver.thread, saver.arena
    again = Checkpointer(folder, group=control)
    facts["same group"] = again.group is saver.group
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    again.save(2, flat_layout(full(2) | {"big": torch.ones(1000, 100)}, rank, 2), {})
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    facts["error"] = refused(again.close)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    facts["after it"] = again.arena, [path.name for path in steps(folder)]
    again.close()
    return facts


def test_close_waits_and_tells_and_a_later_run_has_the_same_group(tmp_path):
    first, second, _ = run_ranks(3, _close, str(tmp_path / "ckpt"))
    for facts in (first, second):
        assert facts["closed"] == ([], None, None) and facts["same group"]
        assert "File too large" in facts["error"] and facts["after it"] == (None, ["step_00000001"])


# ---- hostile files ----


class Bomb:
    def __init__(self, marker: Path):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def _reseal(path: Path) -> None:
    """Gives every file the checksum it now has: the attacker's files are intact."""
    manifest = json.loads((path / "checksums.json").read_text())
    for name in manifest["files"]:
        data = (path / name).read_bytes()
        manifest["files"][name] = [len(data), hashlib.sha256(data).hexdigest()]
    (path / "checksums.json").write_text(json.dumps(manifest))


def _plant(path: Path, where: str, marker: Path) -> None:
    index = pickle.loads((path / ".metadata").read_bytes())
    if where == "index is the bomb":
        (path / ".metadata").write_bytes(pickle.dumps(Bomb(marker)))
    elif where == "index holds the bomb":
        index.planner_data = {"a": Bomb(marker)}
        (path / ".metadata").write_bytes(pickle.dumps(index))
    elif where == "index names a byte entry":
        index.state_dict_metadata["extra_state"] = dcp_metadata.BytesStorageMetadata()
        (path / ".metadata").write_bytes(pickle.dumps(index))
    elif where == "index points elsewhere":
        place = index.storage_data[dcp_metadata.MetadataIndex("norm.weight", (0,))]
        place.relative_path = "../" + place.relative_path
        (path / ".metadata").write_bytes(pickle.dumps(index))
    elif where == "index names a box twice":  # the first half, so that the numbers of elements add up
        norm = index.state_dict_metadata["norm.weight"]
        half = dataclasses.replace(norm.chunks[0], sizes=torch.Size([norm.size[0] // 2]))
        norm.chunks = [half, half]
        (path / ".metadata").write_bytes(pickle.dumps(index))
    elif where == "rank index":  # DCP reads it when .metadata fails
        (path / ".metadata").write_bytes(b"")
        (path / "__0.metadata").write_bytes(pickle.dumps(Bomb(marker)))
    elif where == "shard":
        place = index.storage_data[dcp_metadata.MetadataIndex("norm.weight", (0,))]
        file = path / place.relative_path
        torch.save(Bomb(marker), path / "bomb.pt")
        place.offset, place.length = file.stat().st_size, (path / "bomb.pt").stat().st_size
        file.write_bytes(file.read_bytes() + (path / "bomb.pt").read_bytes())
        (path / ".metadata").write_bytes(pickle.dumps(index))
    elif where == "checksums point elsewhere":
        manifest = json.loads((path / "checksums.json").read_text())
        manifest["files"]["../step_00000001/meta.json"] = manifest["files"].pop("meta.json")
        (path / "checksums.json").write_text(json.dumps(manifest))
    else:
        (path / where).write_bytes(pickle.dumps(Bomb(marker)))
    if where != "checksums.json":
        _reseal(path)


HOSTILE = {
    "index is the bomb": ".metadata is refused: it asks for posix.mkdir",
    "index holds the bomb": ".metadata is refused: it asks for posix.mkdir",
    "index names a byte entry": ".metadata is refused: entry 'extra_state' is a pickled object",
    "index points elsewhere": ".metadata is refused: entry 'norm.weight' lies in '../__",
    "index names a box twice": ".metadata is refused: the boxes of 'norm.weight' do not fill its shape",
    "rank index": ".metadata is refused",
    "shard": ".distcp is refused",
    "meta.json": "meta.json is not readable as JSON",
    "checksums.json": "checksums.json is not readable as JSON",
    "checksums point elsewhere": "checksums.json lists '../step_00000001/meta.json'",
}


def _load_hostile(rank: int, root: str) -> dict:
    messages = {}
    for where in HOSTILE:
        reader = Checkpointer(f"{root}/{where}")
        pieces = flat_layout(zeros(full()), 0, 1)
        messages[where] = refused(reader.load, f"{root}/{where}/step_00000002", pieces)
        if where != "shard" and where != "meta.json":  # those two are found when they are read
            assert reader.latest().endswith("step_00000001")
    return messages


def test_no_file_of_a_checkpoint_can_run_anything(two_steps, tmp_path):
    marker = tmp_path / "it ran"
    with open(tmp_path / "bomb", "wb") as f:
        pickle.dump(Bomb(marker), f)
    pickle.loads((tmp_path / "bomb").read_bytes())
    assert marker.is_dir()  # the bomb works
    marker.rmdir()
    for where in HOSTILE:
        shutil.copytree(two_steps, tmp_path / where)
        _plant(tmp_path / where / "step_00000002", where, marker)
    (messages,) = run_ranks(1, _load_hostile, str(tmp_path))
    for where, expected in HOSTILE.items():
        assert expected in messages[where]
        assert "step_00000002" in messages[where]
    for where in ("meta.json", "checksums.json"):
        with pytest.raises(UserError, match=where):
            read_meta(tmp_path / where / "step_00000002")
    assert not marker.exists()


def _global(name: str) -> bytes:
    """Pickle opcodes that push a global: STACK_GLOBAL."""
    return b"".join(b"\x8c" + bytes([len(part)]) + part.encode() for part in name.rsplit(".", 1)) + b"\x93"


DCP = "torch.distributed.checkpoint."
PLANTED = {b"}\x8c\x07planted\x88s": "a dict", b"N}\x8c\x07planted\x88s\x86": "(None, slots)"}  # what BUILD sets
TARGETS = {
    "a class": _global(DCP + "metadata.Metadata"),
    "a class's base for frozen records": _global(DCP + "metadata.MetadataIndex"),
    "an enum": _global(DCP + "metadata._MEM_FORMAT_ENCODING"),
    "a function": _global("torch.serialization._get_layout"),
    "torch.Size": _global("torch.Size"),
    "a dtype": _global("torch.float32"),
    "a layout": _global("torch.serialization._get_layout") + b"\x8c\rtorch.strided\x85R",
    "a member of an enum": _global(DCP + "metadata._MEM_FORMAT_ENCODING") + b"K\x00\x85R",
}
OWNERS = [dcp_metadata.Metadata, dcp_metadata.MetadataIndex, dcp_metadata._MEM_FORMAT_ENCODING, torch.Size]
OWNERS += [torch.serialization._get_layout, torch.float32, torch.strided, dcp_metadata._MEM_FORMAT_ENCODING(0)]


@pytest.mark.parametrize("state", PLANTED, ids=PLANTED.values())
@pytest.mark.parametrize("target", TARGETS)
def test_an_index_sets_no_attribute_outside_of_itself(two_steps, tmp_path, target, state):
    """The attack hides in a part of a sound index that nobody reads; all that it names is on the allow-list."""
    shutil.copytree(two_steps / "step_00000002", tmp_path / "step")
    whole = (tmp_path / "step" / ".metadata").read_bytes()
    assert whole[:2] == b"\x80\x04" and checkpoint.read_index(tmp_path / "step")
    frame = whole[2:] if whole[2:3] != b"\x95" else whole[11:]
    attack = b"\x80\x04" + TARGETS[target] + state + b"b0" + frame  # BUILD, POP, then the index itself
    (tmp_path / "step" / ".metadata").write_bytes(attack)
    try:
        index = checkpoint.read_index(tmp_path / "step")
    except UserError as error:
        assert ".metadata is refused: " in str(error)
    else:  # what can have a state of its own may be given one
        assert target in ("a layout", "a member of an enum") and index == checkpoint.read_index(
            two_steps / "step_00000002"
        )
    assert not any(hasattr(owner, "planted") for owner in OWNERS)


def test_the_attack_on_attributes_works_on_an_unpickler_that_only_lists_classes():
    attack = b"\x80\x04" + TARGETS["a function"] + next(iter(PLANTED)) + b"b."
    pickle.loads(attack)
    assert torch.serialization._get_layout.planted
    del torch.serialization._get_layout.planted
    attack = b"\x80\x04" + TARGETS["a class"] + list(PLANTED)[1] + b"b."
    pickle.loads(attack)
    assert dcp_metadata.Metadata.planted
    del dcp_metadata.Metadata.planted
