"""Save and resume everything, under any layout, from any layout.

    python checkpoint.py verify runs/NAME/ckpt/step_00001000      # not intact: exit code 1 and the damaged file
    python checkpoint.py list runs/NAME                           # every checkpoint of a run, oldest first

The lesson: a checkpoint must not know how the run was sharded. Every tensor is stored under its name and its full
shape, and each rank writes the boxes of it that it owns. A flat ZeRO shard is a range of the row-major flattening,
which is at most three boxes of a matrix (rest of a row, whole rows, start of a row); a tensor-parallel slice is one
box; a pipeline stage holds some of the names. Reading under another layout is intersecting boxes: read_boxes().

One checkpoint is one folder, complete or absent, in the format of torch.distributed.checkpoint (DCP), whose own tools
read it too:

    step_00001000/  __0_0.distcp ...   one file per rank: its boxes, one torch.save archive each
                    .metadata          DCP's index: name -> shape, dtype, boxes, and where each box lies
                    meta.json          everything that is no tensor: config, loss scaler, data fingerprint
                    checksums.json     size and SHA-256 of all the files above; written last, when all ranks are done

It is written as .tmp-step_00001000, flushed to disk, its sizes and index checked, and then renamed; `latest` is derived
from the folder names and checksums, never stored. Loading runs no code from a file. DCP would: it unpickles `.metadata`
freely, which here names nothing but stand-ins.
"""

import argparse
import hashlib
import io
import json
import math
import mmap
import os
import pickle
import re
import shutil
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import accumulate, islice
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.utils import _create_file_view

from support.flags import UserError, put, run_cli
from support.meter import at
from support.run import everywhere, make_group

FORMAT = 1
BACKGROUND = "checkpoint"  # name of the thread that writes
SHARD = r"__\d+_\d+\.distcp"  # a plain name: nothing outside the folder is read
ALIGN = 512  # bytes between boxes in the arena: any dtype may start there, and a DMA engine likes it


# --- pieces: which boxes of which named tensor this rank holds --------------------------------------------------------


@dataclass
class Piece:
    """The boxes that this rank holds of one named tensor, possibly none. shape: of the whole tensor; boxes: (offsets,
    tensor) pairs. They may be views into flat buffers, on any device. save() reads and load() fills them."""

    shape: tuple
    dtype: torch.dtype
    boxes: list[tuple[tuple, torch.Tensor]] = field(default_factory=list)


def boxes_of_range(shape: tuple, start: int, stop: int) -> list[tuple[tuple, tuple, int]]:
    """Elements [start, stop) of the row-major flattening of `shape` as boxes (offsets, sizes, flat_start), in order.

    Each is elements [flat_start, flat_start + prod(sizes)). At most 1 box in 1-D, 3 in 2-D, 2n - 1 in n-D.
    """
    n = math.prod(shape)
    if not 0 <= start <= stop <= n:
        raise ValueError(f"range [{start}, {stop}) is not inside the {n} elements of shape {tuple(shape)}")
    if not shape:
        return [((), (), 0)] * (stop - start)
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    boxes = []
    while start < stop:
        # the outermost dimension in which a whole index begins here and fits, then as many indices of it as do
        d = next(d for d, stride in enumerate(strides) if start % stride == 0 and stop - start >= stride)
        offsets = tuple(start // stride % size for stride, size in zip(strides, shape))
        count = min((stop - start) // strides[d], shape[d] - offsets[d])
        boxes.append((offsets, (*[1] * d, count, *shape[d + 1 :]), start))
        start += count * strides[d]
    return boxes


def flat_piece(shape: tuple, start: int, flat: torch.Tensor) -> Piece:
    """What a ZeRO shard holds of a tensor. flat: 1-D, its elements [start, start + flat.numel()), padding cut off."""
    boxes = boxes_of_range(shape, start, start + flat.numel())
    views = [(offsets, flat[f - start : f - start + math.prod(sizes)].view(sizes)) for offsets, sizes, f in boxes]
    return Piece(tuple(shape), flat.dtype, views)


def slice_piece(shape: tuple, offsets: tuple, tensor: torch.Tensor) -> Piece:
    """tensor: the box at `offsets`, such as a column (C/tp) or row slice under tensor parallelism."""
    if not all(0 <= o < o + s <= n for o, s, n in zip(offsets, tensor.shape, shape, strict=True)):
        raise ValueError(f"a box {tuple(tensor.shape)} at {tuple(offsets)} is no part of {tuple(shape)}")
    return Piece(tuple(shape), tensor.dtype, [(tuple(offsets), tensor)])


def whole_piece(tensor: torch.Tensor) -> Piece:
    """A tensor held whole; several ranks may hold it, one of them writes it."""
    return slice_piece(tuple(tensor.shape), (0,) * tensor.dim(), tensor)


def _layout(pieces: dict[str, Piece]) -> dict[str, tuple]:
    """What a rank tells the others: name -> (shape, dtype, [(offsets, sizes)])."""
    return {n: (tuple(p.shape), p.dtype, [(tuple(o), tuple(t.shape)) for o, t in p.boxes]) for n, p in pieces.items()}


def _fill(boxes: Iterable[tuple[tuple[int, ...], tuple[int, ...]]], shape: tuple[int, ...]) -> bool:
    """Whether boxes, (offsets, sizes) each, cover a tensor of `shape`, every element once."""
    boxes = sorted((tuple(o), tuple(s)) for o, s in boxes if math.prod(s))
    for i, (offsets, sizes) in enumerate(boxes):
        if not all(0 <= o and o + s <= n for o, s, n in zip(offsets, sizes, shape, strict=True)):
            return False
        for others, extent in islice(boxes, i + 1, None):
            if not shape or others[0] >= offsets[0] + sizes[0]:  # sorted by this: those behind it do not overlap either
                break
            if all(o < p + t and p < o + s for o, s, p, t in zip(offsets, sizes, others, extent)):
                return False
    return sum(math.prod(sizes) for _, sizes in boxes) == math.prod(shape)


def _share_out(layouts: list[dict[str, tuple]]) -> list[set]:
    """Which boxes, as (name, offsets), each rank writes; the same on every rank.

    What several hold goes to the one that has least to write. ValueError where ranks disagree or boxes leave a hole.
    """
    kinds, holders = {}, {}
    for rank, layout in enumerate(layouts):
        for name, (shape, dtype, boxes) in layout.items():
            if kinds.setdefault(name, (shape, dtype)) != (shape, dtype):
                raise ValueError(f"{name}: {dtype} {shape} on rank {rank}, {kinds[name]} on a rank before it")
            for offsets, sizes in boxes:
                holders.setdefault((name, offsets, sizes), []).append(rank)
    found, nbytes, shares = {name: [] for name in kinds}, [0] * len(layouts), [set() for _ in layouts]
    for (name, offsets, sizes), ranks in holders.items():
        rank = min(ranks, key=lambda r: nbytes[r])
        nbytes[rank] += math.prod(sizes) * kinds[name][1].itemsize
        shares[rank].add((name, offsets))
        found[name].append((offsets, sizes))
    for name, (shape, _) in kinds.items():
        if not _fill(found[name], shape):
            raise ValueError(f"{name}: the boxes of all ranks do not make up its shape {shape}: {found[name]}")
    return shares


def _misfits(saved: dict[str, Piece], layouts: list[dict[str, tuple]]) -> list[str]:
    """Why pieces of these layouts cannot be filled from what was saved."""
    there = {name: (piece.shape, piece.dtype) for name, piece in saved.items()}
    here = {name: (shape, dtype) for layout in layouts for name, (shape, dtype, _) in layout.items()}
    problems = [f"not in the checkpoint: {n}" for n in sorted(here.keys() - there.keys())]
    problems += [f"in the checkpoint only: {n}" for n in sorted(there.keys() - here.keys())]
    differ = [n for n in sorted(here.keys() & there.keys()) if here[n] != there[n]]
    problems += [f"{n} is {there[n][1]} {there[n][0]} there, {here[n][1]} {here[n][0]} here" for n in differ]
    return problems[:20] + ([f"and {len(problems) - 20} more"] if len(problems) > 20 else [])


# --- files: written with their checksum, read without running what they hold ------------------------------------------


class _HashedFile(io.FileIO):
    """Hashes what is written on its way to the disk: no second read of 73 GB. Unbuffered: a loader worker that is
    forked meanwhile has no bytes of it to write again."""

    def __init__(self, path: Path):
        super().__init__(path, "w")
        self.sha = hashlib.sha256()

    def write(self, data) -> int:
        self.sha.update(data)
        view = memoryview(data).cast("B")
        while view:  # Linux writes 2 GB at most at a time
            view = view[super().write(view) :]
        return len(data)


@contextmanager
def _writing(path: Path, nbytes: int, sums: dict[str, list]) -> Iterator[_HashedFile]:
    """A new file, on the disk when the block ends, then in sums: name -> [bytes, sha256]. UserError if that fails."""
    try:
        with _HashedFile(path) as file:
            yield file
            os.fsync(file.fileno())
            sums[path.name] = [file.tell(), file.sha.hexdigest()]
    except (OSError, RuntimeError) as e:
        reason = e if isinstance(e, OSError) else e.__context__  # torch's archive writer ends with an error of its own
        if not isinstance(reason, OSError):
            raise
        free = shutil.disk_usage(path.parent).free
        room = f"this file needs {nbytes} bytes, {free} bytes are free"
        raise UserError(f"cannot write {path}: {reason.strerror}; {room}") from None


def _write_boxes(path: Path, pieces: dict[str, Piece]) -> tuple[dict[str, list], list[tuple]]:
    """Writes the boxes of `pieces`, in host memory. Returns its checksum, and what the index says of each box."""
    sums, placed = {}, []
    with _writing(path, sum(t.nbytes for piece in pieces.values() for _, t in piece.boxes), sums) as file:
        for name, piece in pieces.items():
            for offsets, t in piece.boxes:
                start = file.tell()
                torch.save(t, file)
                place = _StorageInfo(path.name, start, file.tell() - start)
                placed.append((name, piece.shape, piece.dtype, offsets, t.shape, place))
    return sums, placed


def _make_index(placed: list[tuple]) -> dcp.Metadata:
    """DCP's index of the boxes that all ranks have written."""
    index = dcp.Metadata({}, planner_data={}, storage_data={}, storage_meta=dcp.StorageMeta())
    for name, shape, dtype, offsets, sizes, place in placed:
        empty = dcp.TensorStorageMetadata(dcp.TensorProperties(dtype), torch.Size(shape), [])
        chunk = dcp.ChunkStorageMetadata(torch.Size(offsets), sizes)
        index.state_dict_metadata.setdefault(name, empty).chunks.append(chunk)
        index.planner_data[name] = (name,)
        index.storage_data[dcp.MetadataIndex(name, offsets)] = place
    return index


_DTYPES = {name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
_NAMES = {"torch.Size", "torch.serialization._get_layout", *(f"torch.{name}" for name in _DTYPES)}
_NAMES |= {f"{cls.__module__}.{cls.__qualname__}" for cls in (
    dcp.Metadata, dcp.MetadataIndex, dcp.StorageMeta, dcp.TensorStorageMetadata, dcp.TensorProperties,
    dcp.ChunkStorageMetadata, dcp._MEM_FORMAT_ENCODING, _StorageInfo, dcp.BytesStorageMetadata,
)}  # fmt: skip


class _Record:
    """Stands for whatever an index names, its `kind`: keeps what it is called with and its state, and does nothing."""

    def __new__(cls, *args):
        self = super().__new__(cls)
        self.args = args
        return self

    def __setstate__(self, state: object) -> None:
        self.state = state


class _IndexUnpickler(pickle.Unpickler):
    """Reads DCP's index without handing it one object that lives outside of this call.

    An allow-list of classes would not do: a pickle can set attributes on all it is given (BUILD), so on a class or a
    function of torch's, for the whole process, with nothing called that is not allowed. Here it is given classes made
    for it, and on these BUILD fails as well: it finds __setstate__, which wants an instance.
    """

    def find_class(self, module: str, name: str) -> type:
        if f"{module}.{name}" not in _NAMES:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no index of tensors needs")
        return type(name, (_Record,), {"kind": name})


def _state(record: object, kind: str) -> dict:
    """The fields of a record of this kind, and of no other."""
    if not isinstance(record, _Record) or record.kind != kind:
        raise TypeError(f"{type(record).__name__} where {kind} should be")
    return record.state


class Stored(NamedTuple):
    """A tensor in a checkpoint: shape and dtype of the whole, and its boxes as (offsets, sizes, where it lies)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: list[tuple[tuple[int, ...], tuple[int, ...], _StorageInfo]]


def read_index(path: Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint by name, from DCP's index.

    UserError if it holds anything but tensors whose boxes fill them and lie in this folder's files.
    """

    def size(record: _Record) -> tuple[int, ...]:
        return tuple(torch.Size(*record.args))

    try:
        with open(path / ".metadata", "rb") as f:
            root = _state(_IndexUnpickler(f).load(), "Metadata")
        for name, entry in root["state_dict_metadata"].items():
            if not isinstance(name, str) or getattr(entry, "kind", "") != "TensorStorageMetadata":
                raise TypeError(f"entry {name!r} is a pickled object, only tensors are read")
        places = {}
        for key, record in root["storage_data"].items():
            key, place = _state(key, "MetadataIndex"), _state(record, "_StorageInfo")
            name, file = key["fqn"], place["relative_path"]
            if not re.fullmatch(SHARD, file):
                raise ValueError(f"entry {name!r} lies in {file!r}, only plain __RANK_0.distcp files are read")
            places[name, size(key["offset"])] = _StorageInfo(file, place["offset"], place["length"])
        index = {}
        for name, entry in root["state_dict_metadata"].items():
            properties, chunks = _state(entry.state["properties"], "TensorProperties"), entry.state["chunks"]
            chunks = [_state(chunk, "ChunkStorageMetadata") for chunk in chunks]
            boxes = [(size(chunk["offsets"]), size(chunk["sizes"])) for chunk in chunks]
            shape = size(entry.state["size"])
            if not _fill(boxes, shape):
                raise ValueError(f"the boxes of {name!r} do not fill its shape {shape}")
            boxes = [(offsets, sizes, places[name, offsets]) for offsets, sizes in boxes]
            index[name] = Stored(shape, _DTYPES[properties[0].kind], boxes)
    except Exception as e:  # a hostile or damaged pickle may raise anything
        raise UserError(f"{path / '.metadata'} is refused: {e}") from e
    return index


def read_boxes(path: Path, index: dict[str, Stored], pieces: dict[str, Piece]) -> None:
    """Fills the boxes of `pieces` with what they share with the stored ones. UserError if those are no tensors."""
    for name, piece in pieces.items():
        for start, sizes, place in index[name].boxes:
            stored = None
            for offsets, t in piece.boxes:
                spans = [(max(a, b), min(a + m, b + n)) for a, m, b, n in zip(offsets, t.shape, start, sizes)]
                if all(low < high for low, high in spans):
                    if stored is None:
                        stored = _read_box(path, place, sizes, piece.dtype)
                    ours = tuple(slice(low - o, high - o) for (low, high), o in zip(spans, offsets))
                    theirs = tuple(slice(low - o, high - o) for (low, high), o in zip(spans, start))
                    t.detach()[ours].copy_(stored[theirs])


def _read_box(path: Path, place: _StorageInfo, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    file = path / place.relative_path
    try:
        with open(file, "rb") as f:
            tensor = torch.load(_create_file_view(f, place.offset, place.length), map_location="cpu", weights_only=True)
        if (tensor.shape, tensor.dtype) != (sizes, dtype):
            raise ValueError(f"{tensor.dtype} {tuple(tensor.shape)} where {dtype} {sizes} should be")
        return tensor
    except Exception as e:  # a hostile archive may raise anything
        reason = str(e).strip().split("\n")[0]
        raise UserError(f"{file} is refused, it is not the plain tensors its index names: {reason}") from e


def describe(path: str | Path) -> dict[str, Piece]:
    """Name -> Piece without boxes, for every tensor of a checkpoint but the RNG states: what is in it.

    To load some of the names only, lay your own pieces over these: load(path, describe(path) | mine).
    """
    tensors = read_index(Path(path)).items()
    return {name: Piece(t.shape, t.dtype) for name, t in tensors if not name.startswith("rng.")}


def _read_json(file: Path) -> dict:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as e:
        raise UserError(f"{file} is not readable as JSON: {e}") from None
    if not isinstance(found, dict):
        raise UserError(f"{file} holds {str(found)[:40]}, expected an object")
    return found


def _manifest(path: Path) -> dict:
    if not (path / "checksums.json").is_file():
        inside = f"; did you mean {newest[-1]}?" if (newest := steps(path / "ckpt") or steps(path)) else ""
        raise UserError(f"{path} is no complete checkpoint, checksums.json is missing{inside}")
    manifest = _read_json(path / "checksums.json")
    files = manifest.get("files") if manifest.get("format") == FORMAT else None
    if not isinstance(files, dict) or not all(isinstance(entry, list) and len(entry) == 2 for entry in files.values()):
        raise UserError(f"{path / 'checksums.json'} is no list of checksums of format {FORMAT}")
    if foreign := [name for name in files if not re.fullmatch(rf"{SHARD}|\.metadata|meta\.json", name)]:
        raise UserError(f"{path / 'checksums.json'} lists {foreign[0]!r}, which is no file of a checkpoint")
    return manifest


def read_meta(path: str | Path) -> dict:
    """What save() was given as meta, and "step". UserError if path is no checkpoint."""
    _manifest(Path(path))
    return _read_json(Path(path) / "meta.json")


def _damage(file: Path, nbytes: int, sha256: str) -> str | None:
    sha = hashlib.sha256()
    try:
        with open(file, "rb", buffering=0) as f:
            while block := f.read(1 << 22):
                sha.update(block)
            size = f.tell()
    except OSError as e:
        return f"{file} is missing or cannot be read: {e.strerror}"
    if (size, sha.hexdigest()) != (nbytes, sha256):
        return f"{file} is damaged: these {size} bytes have not the SHA-256 of the {nbytes} that were written"


def verify(path: str | Path, rank: int = 0, world_size: int = 1) -> list[str]:
    """The problems of a checkpoint, each naming its file; empty = intact. Reads every byte of rank's share of files."""
    path = Path(path)
    try:
        files = sorted(_manifest(path)["files"].items())[rank::world_size]
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing and reading leave Python's lock
            problems = [p for p in pool.map(lambda file: _damage(path / file[0], *file[1]), files) if p]
        if not problems and rank == 0:
            read_index(path)  # intact bytes may still be a hostile index
        return problems
    except UserError as e:
        return [str(e)] if rank == 0 else []


def steps(folder: str | Path) -> list[Path]:
    """The checkpoints under `folder` by name, oldest first; not verified. Temporary and foreign names are left out."""
    found = Path(folder).glob("step_*")
    return sorted((p for p in found if re.fullmatch(r"step_\d+", p.name) and p.is_dir()), key=lambda p: int(p.name[5:]))


def find_checkpoint(path: str | Path) -> Path:
    """A checkpoint or Hugging Face folder as it is; of a run folder its newest complete checkpoint.

    Raises UserError if it is none of these.
    """
    path = Path(path)
    if (path / "ckpt").is_dir():
        complete = [step for step in steps(path / "ckpt") if (step / "checksums.json").is_file()]
        if not complete:
            raise UserError(f"{path}/ckpt holds no complete checkpoint")
        return complete[-1]
    if not (path / "meta.json").is_file() and not (path / "config.json").is_file():
        raise UserError(f"{path} is no run folder, no checkpoint (step_... folder) and no Hugging Face Llama folder")
    return path


def fsync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def _move_aside(path: Path, prefix: str) -> Path:
    aside = path.with_name(prefix + path.name)
    shutil.rmtree(aside, ignore_errors=True)
    return path.rename(aside)


# --- the checkpointer -------------------------------------------------------------------------------------------------


def finish_saves(timeout_s: float) -> None:
    """Wait up to timeout_s seconds for a save under way: before a process exits that will not call close()."""
    for thread in threading.enumerate():
        if thread.name == BACKGROUND:
            thread.join(timeout_s)


class Checkpointer:
    """Saves into and loads from `folder`; one save runs in the background at a time, close() ends the last one.

    Every method but protect() is collective over `group` (default: all ranks), which must share the folder: that is
    checked here. Checkpointers of the same ranks speak over one group: close one before another is used.
    """

    def __init__(self, folder: str | Path, *, group: dist.ProcessGroup | None = None, keep_last: int = 2):
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        # its own gloo group: the background thread's collectives must not interleave with the training's, and NCCL
        # cannot send objects
        self.group = make_group(ranks, [0] * len(ranks), "checkpoint", 1800, backend="gloo", control=group)
        self.rank, self.world_size = dist.get_rank(self.group), len(ranks)
        self.folder, self.keep_last = Path(folder), keep_last
        self.protected, self.damaged, self.intact = set(), set(), set()
        self.thread, self.error, self.arena = None, None, None
        self.said_slow = False

        # ranks on machines without a common file system would each save a part, and nobody would know before the resume
        self._everywhere(lambda: self.folder.mkdir(parents=True, exist_ok=True), only_rank=0)
        name, *_ = self._everywhere(lambda: tempfile.mkdtemp(dir=self.folder, prefix=".nonce-"), only_rank=0)
        nonce = self.folder / Path(name).name
        blind = [rank for rank, seen in enumerate(self._everywhere(nonce.is_dir)) if not seen]
        self._everywhere(nonce.rmdir, only_rank=0)
        if blind:
            reason = "all ranks must share this folder"
            raise UserError(f"ranks {blind} do not see what rank 0 wrote into {self.folder}: {reason}")

    def _everywhere(self, work: Callable, only_rank: int | None = None) -> list:
        """everywhere() over this checkpointer's group, or on one rank of it."""
        return everywhere(work, self.group, only_rank in (None, self.rank))

    def check_space(self, nbytes: int) -> None:
        """UserError if a checkpoint of nbytes (the whole of it) does not fit on the folder's disk."""
        free = self._everywhere(lambda: shutil.disk_usage(self.folder).free, only_rank=0)[0]
        if free < nbytes:
            raise UserError(f"a checkpoint needs {nbytes} bytes, {free} bytes are free on the disk of {self.folder}")
        if self.rank == 0 and free < nbytes * (self.keep_last + 1):  # the new one is complete before an old one goes
            need = f"{self.keep_last} kept and one being written need {nbytes * (self.keep_last + 1)} bytes"
            put(f"warning: {self.folder} has {free} bytes free; {need}", sys.stderr)

    def protect(self, path: str | Path) -> None:
        """Rotation never removes this one: the checkpoint resumed from, or the best."""
        self.protected.add(Path(path).resolve())

    # save

    def save(
        self, step: int, tensors: dict[str, Piece], meta: dict, *, rng: torch.Tensor | None = None, rotate: bool = True
    ) -> None:
        """Saves step_{step}: tensors as pieces, meta as JSON, rng (1-D uint8) for load() by the same rank.

        rotate: whether older ones may go; not in a step whose gradient was not finite, from which there is no way on.

        Returns when everything is copied to host memory, writing goes on in a thread. What several ranks hold is copied
        and written by one, so that a replicated run costs each rank 1/world_size of it. UserError, on all ranks, if the
        save before could not be written.
        """
        self.wait()
        if rng is not None:
            tensors = tensors | {f"rng.{self.rank}": whole_piece(rng)}
        with at("checkpoint", f"stage step {step}"):
            everyone = self._everywhere(lambda: (step, json.dumps(meta | {"step": step}, indent=1), _layout(tensors)))
            if len({s for s, _, _ in everyone}) > 1:
                raise RuntimeError(f"the ranks save different steps: {[s for s, _, _ in everyone]}")
            mine = _share_out([layout for _, _, layout in everyone])[self.rank]
            staged = {}
            self._everywhere(lambda: staged.update(self._stage(tensors, mine)))  # one host out of memory: all must know
        args = (step, everyone[0][1], staged, rotate)
        # daemon: when another rank dies, this thread sits in a collective for up to the group's time-out and must not
        # hold up the exit
        self.thread = threading.Thread(target=self._write, args=args, name=BACKGROUND, daemon=True)
        self.thread.start()

    def wait(self) -> None:
        """Joins the running save. Its error, if any rank had one, is raised here on every rank."""
        if self.thread is not None:
            with at("checkpoint", "wait for the save"):
                self.thread.join()
        self.thread, error, self.error = None, self.error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """The end of the run: wait(), and the staging memory is given back."""
        try:
            self.wait()
        finally:
            self.arena = None

    def _stage(self, tensors: dict[str, Piece], mine: set) -> dict[str, Piece]:
        """Copies the boxes named in `mine` into the arena, which is allocated once and used again by every save."""
        boxes = [(name, offsets, t) for name, piece in tensors.items() for offsets, t in piece.boxes]
        boxes = [box for box in boxes if (box[0], tuple(box[1])) in mine]
        starts = [0, *accumulate(-(-t.nbytes // ALIGN) * ALIGN for _, _, t in boxes)]
        on_gpu = any(t.is_cuda for _, _, t in boxes)
        if self.arena is None or self.arena.numel() < starts[-1]:
            self.arena = None  # free the old one first
            self.arena = host_memory(starts[-1], on_gpu)
        staged = {name: Piece(tensors[name].shape, tensors[name].dtype) for name, _, _ in boxes}
        for (name, offsets, t), start in zip(boxes, starts):
            # frombuffer, not a slice: a box must be a storage of its own, or torch.save writes the whole arena
            copy = torch.frombuffer(self.arena.numpy(), dtype=t.dtype, count=t.numel(), offset=start).view(t.shape)
            copy.copy_(t.detach(), non_blocking=True)
            staged[name].boxes.append((offsets, copy))
        if on_gpu:
            torch.cuda.synchronize()  # the next optimizer step overwrites what is being copied
        return staged

    def _write(self, step: int, meta: str, staged: dict[str, Piece], rotate: bool) -> None:
        """The background thread, with the same collectives on every rank: open the folder, write, publish."""
        tmp, begun = self.folder / f".tmp-step_{step:08d}", time.monotonic()
        try:
            self._everywhere(lambda: (shutil.rmtree(tmp, ignore_errors=True), tmp.mkdir()), only_rank=0)
            written = self._everywhere(lambda: _write_boxes(tmp / f"__{self.rank}_0.distcp", staged))
            self._everywhere(lambda: self._publish(tmp, step, meta, written, rotate), only_rank=0)
            self._say_if_slow(time.monotonic() - begun)
        except Exception as e:  # raised again by wait()
            self.error = e
            if self.rank == 0:
                shutil.rmtree(tmp, ignore_errors=True)

    def _say_if_slow(self, seconds: float) -> None:
        """Once: torchrun gives ranks half a minute from the signal to their end, in which a save has to fit."""
        allowed = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30))
        if self.rank == 0 and not self.said_slow and 1.5 * seconds > allowed:
            self.said_slow, wanted = True, math.ceil(2 * seconds) + 30
            found = f"a save takes {seconds:.0f} s and torchrun kills {allowed:.0f} s after a signal, so it could lose"
            advice = f"set TORCH_ELASTIC_SHUTDOWN_TIMEOUT={wanted} (Slurm: --signal=TERM@{wanted})"
            put(f"warning: {found} steps: {advice}", sys.stderr)

    def _publish(self, tmp: Path, step: int, meta: str, written: list[tuple], rotate: bool) -> None:
        """Rank 0, when all ranks have flushed their files: the last files, a look at all, the rename, rotation."""
        files = {name: entry for sums, _ in written for name, entry in sums.items()}

        def write(name: str, content: bytes) -> None:
            with _writing(tmp / name, len(content), files) as file:
                file.write(content)

        write(".metadata", pickle.dumps(_make_index([box for _, boxes in written for box in boxes])))
        write("meta.json", meta.encode())
        manifest = {"format": FORMAT, "step": step, "world_size": self.world_size, "torch": torch.__version__}
        manifest["files"] = files
        write("checksums.json", json.dumps(manifest, indent=1).encode())
        read_index(tmp)
        for name, (nbytes, _) in files.items():
            found = (tmp / name).stat().st_size  # through this machine's eyes: a rank may have written elsewhere
            if found != nbytes:
                raise UserError(f"{tmp / name} has {found} bytes, {nbytes} were written")
        fsync(tmp)
        final = self.folder / tmp.name.removeprefix(".tmp-")
        if final.exists():  # damaged, or trained again; _tidy puts it back if the power goes between the two renames
            _move_aside(final, ".old-")
        tmp.rename(final)
        fsync(self.folder)
        shutil.rmtree(self.folder / f".old-{final.name}", ignore_errors=True)
        self.damaged.discard(final.resolve())
        sound = [p for p in steps(self.folder) if (p / "checksums.json").is_file() and p.resolve() not in self.damaged]
        for path in sound[: -self.keep_last] if rotate else []:
            if path != final and path.resolve() not in self.protected:
                aside = _move_aside(path, ".tmp-")  # half-removed it must not look like a checkpoint
                shutil.rmtree(aside, ignore_errors=True)

    # load

    def _tidy(self) -> list[str]:
        """Rank 0, at the start: removes what a killed save left behind. Returns the names of the step folders."""
        for old in self.folder.glob(".old-step_*"):
            if not (self.folder / old.name.removeprefix(".old-")).exists():
                old.rename(self.folder / old.name.removeprefix(".old-"))
        for left in [*self.folder.glob(".old-step_*"), *self.folder.glob(".tmp-step_*")]:
            try:
                shutil.rmtree(left)
            except OSError as problem:  # busy, or a mount: it is in nobody's way
                put(f"warning: {left} cannot be removed ({problem})", sys.stderr)
        return [path.name for path in steps(self.folder)]

    def _problems(self, path: Path) -> list[str]:
        """verify() with the files dealt out to the ranks; once for each checkpoint found intact."""
        if path.resolve() in self.intact:
            return []
        problems = [p for found in self._everywhere(lambda: verify(path, self.rank, self.world_size)) for p in found]
        (self.damaged if problems else self.intact).add(path.resolve())
        return problems

    def latest(self) -> str | None:
        """The newest complete and intact checkpoint, None if there is none.

        Every byte of it is checked, by all ranks together; newer ones that are damaged are named in a warning. What a
        killed save left is removed: to be called by the run that owns the folder only.
        """
        self.wait()
        for name in reversed(self._everywhere(self._tidy, only_rank=0)[0]):
            path = self.folder / name
            problems = self._problems(path)
            if not problems:
                return str(path)
            if self.rank == 0:
                put(f"warning: {path} is not used: {'; '.join(problems)}", sys.stderr)
        return None

    def load(self, path: str | Path, tensors: dict[str, Piece]) -> dict:
        """Fills the boxes of `tensors` in place from a checkpoint of any layout, bit for bit, and returns its meta.

        meta["rng"] is this rank's RNG state (1-D uint8) if as many ranks saved one. The names of all ranks together
        must be those of the checkpoint. UserError, on all ranks: damaged or hostile files by name; names missing or
        left over, other shapes, other dtypes.
        """
        self.wait()
        path = Path(path)
        with at("checkpoint", f"load {path.name}"):
            if problems := self._problems(path):
                others = ", ".join(p.name for p in steps(path.parent) if p != path) or "none"
                raise UserError(f"{path} is not intact: {'; '.join(problems)}; others beside it: {others}")
            index, meta = read_index(path), read_meta(path)  # verified: what is refused here is refused on every rank
            if problems := _misfits(describe(path), self._everywhere(lambda: _layout(tensors))):
                raise UserError(f"{path} does not fit this run: {'; '.join(problems)}")
            rng = index.get(f"rng.{self.rank}")
            if rng is not None and _manifest(path).get("world_size") == self.world_size:
                meta["rng"] = torch.empty(rng.shape, dtype=torch.uint8)
                tensors = tensors | {f"rng.{self.rank}": whole_piece(meta["rng"])}
            self._everywhere(lambda: read_boxes(path, index, tensors))
        return meta


def host_memory(nbytes: int, page_locked: bool) -> torch.Tensor:
    """1-D uint8 of zeros, page-locked as long as this very tensor lives (not: a view of it).

    By cudaHostRegister, not by pin_memory=True, which rounds up to a power of two: 73 GB would take 137.
    """
    if not page_locked or not nbytes:
        return torch.zeros(nbytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)  # locked pages are not shared: each loader worker's fork would copy all of them
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    # zeroed by all threads; locking would bring the pages in one by one
    arena = torch.frombuffer(memory, dtype=torch.uint8).zero_()
    cudart = torch.cuda.cudart()
    torch.cuda.check_error(cudart.cudaHostRegister(arena.data_ptr(), nbytes, 0))
    weakref.finalize(arena, cudart.cudaHostUnregister, arena.data_ptr())
    return arena


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["verify", "list"])
    parser.add_argument("path", type=Path, help="verify: a step_* folder; list: a run folder or its ckpt folder")
    args = parser.parse_args()
    if args.command == "verify":
        started = time.time()
        if problems := verify(args.path):
            print("\n".join(problems))
            sys.exit(1)
        nbytes = sum(size for size, _ in _manifest(args.path)["files"].values())
        print(f"{args.path} is intact: {nbytes / 1e9:.3f} GB read at {nbytes / 1e9 / (time.time() - started):.2f} GB/s")
        return
    folder = args.path / "ckpt" if (args.path / "ckpt").is_dir() else args.path
    if not steps(folder):
        raise UserError(f"no step_* folder in {folder}")
    for path in steps(folder):
        size = sum(f.stat().st_size for f in path.iterdir()) / 1e9
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime))
        print(f"{path}  {size:.3f} GB  {saved}  {'complete' if (path / 'checksums.json').is_file() else 'incomplete'}")


if __name__ == "__main__":
    run_cli(main)
