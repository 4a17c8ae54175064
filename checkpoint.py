"""Save and resume everything, under any layout, from any layout.

    python checkpoint.py verify runs/NAME/ckpt/step_00001000      # exit code 1 and the damaged file's name if it is not intact
    python checkpoint.py list runs/NAME                           # every checkpoint of a run, oldest first

The lesson: a checkpoint must not know how the run was sharded. Every tensor is stored under its name and its full shape, and each rank
writes the boxes of it that it owns. A flat ZeRO shard is a range of the row-major flattening, which is at most three boxes of a matrix
(rest of a row, whole rows, start of a row); a tensor-parallel slice is one box; a pipeline stage holds some of the names. Reading under
another layout is then box intersection, which torch.distributed.checkpoint (DCP) already does, so its own tools read these files too.

One checkpoint is one folder, and it is complete or absent:

    step_00001000/  __0_0.distcp ...   one file per rank: its boxes, one torch.save archive each
                    .metadata          DCP's index: name -> shape, dtype, boxes, and where each box lies
                    meta.json          everything that is no tensor: config, loss scaler, data fingerprint
                    checksums.json     size and SHA-256 of all the files above; written last, by rank 0, when all ranks are done

It is written as .tmp-step_00001000, flushed to disk, read back and then renamed; `latest` is derived from the folder names and checksums,
never stored. Loading runs no code from a file: DCP unpickles `.metadata` freely, so that file goes through an allow-list here.
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
import threading
import time
import traceback
import uuid
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.planner import LoadPlan, TensorWriteData, WriteItem, WriteItemType

from flags import UserError, run_cli
from meter import at

FORMAT = 1
ALIGN = 512  # bytes between boxes in the arena: any dtype may start there, and a DMA engine likes it


# ---- Pieces: which boxes of which named tensor this rank holds ----


@dataclass
class Piece:
    """The part of one named tensor that this rank holds. shape: of the whole tensor; boxes: (offsets, tensor) pairs, possibly none. The
    tensors have the box's sizes and this dtype; they may be views into flat buffers, on any device. save() reads and load() fills them."""

    shape: tuple
    dtype: torch.dtype
    boxes: list[tuple[tuple, torch.Tensor]] = field(default_factory=list)


def boxes_of_range(shape: tuple, start: int, stop: int) -> list[tuple[tuple, tuple, int]]:
    """Elements [start, stop) of the row-major flattening of `shape`, cut into boxes: (offsets, sizes, flat_start) in order, each of them
    elements [flat_start, flat_start + prod(sizes)) of the flattening. At most 1 box in 1-D, 3 in 2-D, 2n - 1 in n-D."""
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"range [{start}, {stop}) is not inside the {math.prod(shape)} elements of shape {tuple(shape)}")
    if start == stop:
        return []
    if not shape:
        return [((), (), 0)]
    row = math.prod(shape[1:])

    def within_row(i: int, a: int, b: int) -> list:
        return [((i, *o), (1, *s), i * row + f) for o, s, f in boxes_of_range(shape[1:], a - i * row, b - i * row)]

    first, last = -(-start // row), stop // row  # whole rows are [first, last)
    if first > last:
        return within_row(last, start, stop)
    head = within_row(first - 1, start, first * row) if start < first * row else []
    body = [((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]), first * row)] if first < last else []
    tail = within_row(last, last * row, stop) if last * row < stop else []
    return head + body + tail


def flat_piece(shape: tuple, start: int, flat: torch.Tensor) -> Piece:
    """flat: 1-D, elements [start, start + flat.numel()) of the flattened tensor (padding cut off): what a ZeRO shard holds of it."""
    boxes = boxes_of_range(shape, start, start + flat.numel())
    views = [(offsets, flat[f - start : f - start + math.prod(sizes)].view(sizes)) for offsets, sizes, f in boxes]
    return Piece(tuple(shape), flat.dtype, views)


def slice_piece(shape: tuple, offsets: tuple, tensor: torch.Tensor) -> Piece:
    """tensor: the box at `offsets`, such as a column (C/tp) or row slice under tensor parallelism."""
    return Piece(tuple(shape), tensor.dtype, [(tuple(offsets), tensor)])


def whole_piece(tensor: torch.Tensor) -> Piece:
    """A tensor held whole; several ranks may hold it, one of them writes it."""
    return slice_piece(tuple(tensor.shape), (0,) * tensor.dim(), tensor)


class _Boxes(torch.Tensor):
    """A Piece as DCP sees it: a tensor of the full shape without storage, that answers DCP's three questions about its parts."""

    @staticmethod
    def __new__(cls, piece: Piece):
        wrapper = torch.Tensor._make_wrapper_subclass(cls, piece.shape, dtype=piece.dtype)
        wrapper.boxes = {torch.Size(offsets): t.detach() for offsets, t in piece.boxes}
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(f"{func} on a tensor of which only some boxes are here")

    def __create_chunk_list__(self) -> list:
        return [dcp_metadata.ChunkStorageMetadata(offsets, t.size()) for offsets, t in self.boxes.items()]

    def __create_write_items__(self, fqn: str, _: object) -> list:
        properties = dcp_metadata.TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                dcp_metadata.MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: dcp_metadata.MetadataIndex) -> torch.Tensor:
        return self.boxes[index.offset]


# ---- Files: written with their checksum, read without running what they hold ----


class _HashedFile:
    """Hashes what is written to `file` (no second read of 73 GB). After a failed write it goes on counting and drops the bytes: an error
    raised through torch's C++ archive writer loses its reason, and the count is the size the message owes the user."""

    def __init__(self, file: io.RawIOBase):
        self.file, self.nbytes, self.sha, self.error = file, 0, hashlib.sha256(), None

    def write(self, data) -> int:
        view = memoryview(data).cast("B")
        size = len(view)
        self.sha.update(view)
        self.nbytes += size
        while view and self.error is None:
            try:
                view = view[self.file.write(view) :]
            except OSError as e:
                self.error = e
        return size

    def tell(self) -> int:
        return self.nbytes

    def flush(self) -> None:
        pass

    close = flush  # DCP closes some of its files and not others; create_stream closes all


class _HashingFileSystem(FileSystem):
    def __init__(self):
        self.sums = {}  # file name -> [bytes, sha256]

    @contextmanager
    def create_stream(self, path: str | Path, mode: str) -> Iterator[_HashedFile]:
        path = Path(path)
        with open(path, "wb", buffering=0) as file:
            out = _HashedFile(file)
            yield out
            try:
                os.fsync(file.fileno())
            except OSError as e:
                out.error = out.error or e
        if out.error:
            free = shutil.disk_usage(path.parent).free
            raise UserError(f"cannot write {path}: {out.error.strerror}; this file needs {out.nbytes} bytes, {free} bytes are free")
        self.sums[path.name.removesuffix(".tmp")] = [out.nbytes, out.sha.hexdigest()]


class _Writer(dcp.FileSystemWriter):
    def __init__(self, path: Path):
        # copy_ahead 0: the boxes are in host memory already, DCP must not start a CUDA pipeline; sync_files: create_stream does it
        super().__init__(path, sync_files=False, per_thread_copy_ahead=0)
        self.fs = _HashingFileSystem()

    def storage_meta(self) -> dcp_metadata.StorageMeta:
        return dcp_metadata.StorageMeta()  # DCP would record the temporary folder here, as a pickled Path


class _Reader(dcp.FileSystemReader):
    def __init__(self, path: Path, metadata: dcp_metadata.Metadata):
        super().__init__(path)
        self.metadata = metadata

    def read_metadata(self) -> dcp_metadata.Metadata:  # no **kwargs: DCP would fall back to other files, by its own free unpickling
        return self.metadata

    def read_data(self, plan: LoadPlan, planner) -> torch.futures.Future:
        by_file = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            try:
                super().read_data(LoadPlan(items), planner)  # tensors only, so torch.load(weights_only=True)
            except Exception as e:
                reason = str(e).strip().split("\n")[0]
                raise UserError(f"{self.path / name} is refused, it is not the plain tensors its index names: {reason}") from e
        done = torch.futures.Future()
        done.set_result(None)
        return done


# What DCP's index is made of; byte entries, so that they can be refused by name. Calling any of these, with whatever arguments, builds a
# plain record and does nothing else.
_RECORDS = "Metadata MetadataIndex StorageMeta TensorStorageMetadata TensorProperties ChunkStorageMetadata BytesStorageMetadata"
_INDEX_CLASSES = {(dcp_metadata.__name__, name): getattr(dcp_metadata, name) for name in (*_RECORDS.split(), "_MEM_FORMAT_ENCODING")} | {
    (c.__module__, c.__qualname__): c for c in (_StorageInfo, torch.Size, torch.serialization._get_layout)
}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in _INDEX_CLASSES:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no index of tensors needs")
        return _INDEX_CLASSES[module, name]


def _read_index(path: Path) -> dcp_metadata.Metadata:
    """DCP's index of a checkpoint. UserError if it holds anything but tensors whose boxes fill them and lie in this folder's files."""
    try:
        with open(path / ".metadata", "rb") as f:
            index = _IndexUnpickler(f).load()
        stored = {(i.fqn, i.offset): s for i, s in index.storage_data.items()}
        for name, tensor in index.state_dict_metadata.items():
            if not isinstance(tensor, dcp_metadata.TensorStorageMetadata):
                raise TypeError(f"entry {name!r} is a pickled object, only tensors are read")
            for chunk in tensor.chunks:
                place = stored[name, chunk.offsets]
                if not re.fullmatch(r"__\d+_\d+\.distcp", place.relative_path) or getattr(place, "transform_descriptors", None):
                    raise ValueError(f"entry {name!r} lies in {place.relative_path!r}, only plain __RANK_0.distcp files are read")
            if sum(math.prod(chunk.sizes) for chunk in tensor.chunks) != math.prod(tensor.size):
                raise ValueError(f"the boxes of {name!r} do not fill its shape {tuple(tensor.size)}")
    except Exception as e:  # a hostile or damaged pickle may raise anything
        raise UserError(f"{path / '.metadata'} is refused: {e}") from e
    return index


def describe(path: str | Path) -> dict[str, Piece]:
    """Name -> Piece without boxes, for every tensor of a checkpoint but the RNG states: what is in it. To load some of the names only, lay
    your own pieces over these: load(path, describe(path) | mine)."""
    tensors = _read_index(Path(path)).state_dict_metadata
    return {name: Piece(tuple(t.size), t.properties.dtype) for name, t in tensors.items() if not name.startswith("rng.")}


def _read_json(file: Path) -> dict:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as e:
        raise UserError(f"{file} is not readable as JSON: {getattr(e, 'strerror', None) or e}") from None


def _manifest(path: Path) -> dict:
    if not (path / "checksums.json").is_file():
        raise UserError(f"{path} is no complete checkpoint, checksums.json is missing")
    manifest = _read_json(path / "checksums.json")
    files = manifest.get("files") if isinstance(manifest, dict) and manifest.get("format") == FORMAT else None
    if not isinstance(files, dict) or not all(isinstance(entry, list) and len(entry) == 2 for entry in files.values()):
        raise UserError(f"{path / 'checksums.json'} is no list of checksums of format {FORMAT}")
    return manifest


def read_meta(path: str | Path) -> dict:
    """What save() was given as meta, and "step". UserError if path is no checkpoint."""
    _manifest(Path(path))
    return _read_json(Path(path) / "meta.json")


def _damage(file: Path, nbytes: int, sha256: str) -> str | None:
    try:
        if file.stat().st_size != nbytes:
            return f"{file} has {file.stat().st_size} bytes, {nbytes} were written"
        sha = hashlib.sha256()
        with open(file, "rb", buffering=0) as f:
            while block := f.read(1 << 22):
                sha.update(block)
    except FileNotFoundError:
        return f"{file} is missing"
    except OSError as e:
        return f"{file} cannot be read: {e.strerror}"
    return None if sha.hexdigest() == sha256 else f"{file} is damaged, its SHA-256 is not the one it was written with"


def verify(path: str | Path, rank: int = 0, world_size: int = 1) -> list[str]:
    """The problems of a checkpoint, one line each with the file's name; empty = intact. Reads every byte (rank's share of the files)."""
    path = Path(path)
    try:
        files = sorted(_manifest(path)["files"].items())
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing and reading leave Python's lock
            found = list(pool.map(lambda item: _damage(path / item[0], *item[1]), files[rank::world_size]))
        found = [problem for problem in found if problem]
        if not found and rank == 0:
            _read_index(path)  # intact bytes may still be a hostile index
        return found
    except UserError as e:
        return [str(e)] if rank == 0 else []


def steps(folder: str | Path) -> list[Path]:
    """The checkpoints under `folder` by name, oldest first; not verified. Temporary and foreign names are left out."""
    found = Path(folder).glob("step_*")
    return sorted((p for p in found if re.fullmatch(r"step_\d+", p.name)), key=lambda p: int(p.name[5:]))


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _move_aside(path: Path, prefix: str) -> Path:
    aside = path.with_name(prefix + path.name)
    shutil.rmtree(aside, ignore_errors=True)
    return path.rename(aside)


# ---- The checkpointer ----


class Checkpointer:
    """Saves into and loads from `folder`. Every method but protect() is collective over `group` (default: all ranks), which must share the
    folder: that is checked here. One background save runs at a time; call wait() before the process group is destroyed."""

    def __init__(self, folder: str | Path, *, group: dist.ProcessGroup | None = None, keep_last: int = 2, background: bool = True):
        if keep_last < 1:
            raise UserError(f"--keep-last {keep_last}: at least 1 checkpoint must be kept")
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        # its own gloo group: the background thread's collectives must not interleave with the training's, and NCCL cannot send objects
        self.group = dist.new_group(ranks, backend="gloo", timeout=timedelta(minutes=30), use_local_synchronization=True)
        self.rank, self.world_size = dist.get_rank(self.group), len(ranks)
        self.folder, self.keep_last, self.background = Path(folder), keep_last, background
        self.protected, self.damaged, self.intact = set(), set(), set()
        self.thread, self.error, self.arena = None, None, None
        self._check_shared()

    def _everywhere(self, work: Callable, only_rank: int | None = None) -> list:
        """Runs work() on every rank (or one) and returns all results by rank; an error on any rank is raised on all of them."""
        result, errors, is_users = None, [], True
        if only_rank in (None, self.rank):
            try:
                result = work()
            except CheckpointException as e:  # DCP's, a BaseException: the same on all ranks, says what went wrong on which
                is_users = all(isinstance(f, (UserError, OSError)) for f, _ in e.failures.values())
                errors = [f"rank {rank}: {f if is_users else repr(f)}" for rank, (f, _) in e.failures.items()]
            except Exception as e:  # noqa: BLE001 - raised again below, on every rank
                is_users = isinstance(e, (UserError, OSError))
                errors = [f"rank {self.rank}: {e if is_users else traceback.format_exc()}"]
        everyone = [None] * self.world_size
        dist.all_gather_object(everyone, (result, errors, is_users), group=self.group)
        messages = dict.fromkeys(message for _, errors, _ in everyone for message in errors)  # each once, in order
        if messages:
            raise (UserError if all(u for _, _, u in everyone) else RuntimeError)("; ".join(messages))
        return [result for result, _, _ in everyone]

    def _check_shared(self) -> None:
        """Ranks on machines without a common file system would each save a part, and nobody would know before the resume."""
        nonce = self.folder / f".nonce-{uuid.uuid4().hex}"

        def write() -> str:
            self.folder.mkdir(parents=True, exist_ok=True)
            nonce.write_text(nonce.name)
            return nonce.name

        nonce = self.folder / self._everywhere(write, only_rank=0)[0]
        blind = [rank for rank, seen in enumerate(self._everywhere(nonce.is_file)) if not seen]
        self._everywhere(nonce.unlink, only_rank=0)
        if blind:
            raise UserError(f"ranks {blind} do not see what rank 0 wrote into {self.folder}: all ranks must share this folder")

    def check_space(self, nbytes: int) -> None:
        """UserError if a checkpoint of nbytes (the whole of it) does not fit on the folder's disk."""
        free = self._everywhere(lambda: shutil.disk_usage(self.folder).free, only_rank=0)[0]
        if free < nbytes:
            raise UserError(f"a checkpoint needs {nbytes} bytes, {free} bytes are free on the disk of {self.folder}")
        if self.rank == 0 and free < nbytes * (self.keep_last + 1):  # the new one is complete before an old one goes
            need = f"{self.keep_last} kept and one being written need {nbytes * (self.keep_last + 1)} bytes"
            print(f"warning: {self.folder} has {free} bytes free; {need}", file=sys.stderr, flush=True)

    def protect(self, path: str | Path) -> None:
        """Rotation never removes this one: the checkpoint resumed from, or the best."""
        self.protected.add(Path(path).resolve())

    # -- save --

    def save(self, step: int, tensors: dict[str, Piece], meta: dict, *, rng: torch.Tensor | None = None) -> None:
        """Saves step_{step}: tensors as pieces, meta as JSON, rng (1-D uint8, this rank's RNG state) for load() by the same rank. Returns
        when everything is copied to host memory: the caller may change its tensors then, writing goes on in a thread (background=True).
        What several ranks hold is copied and written by one, so a replicated run costs each rank 1/world_size of it in host memory.

        UserError, on all ranks, if this save (background=False) or the one before could not be written: nothing older is touched then.
        """
        self.wait()
        if rng is not None:
            tensors = tensors | {f"rng.{self.rank}": whole_piece(rng)}
        with at("checkpoint", f"stage step {step}"):
            everyone = self._everywhere(lambda: (step, json.dumps(meta | {"step": step}, indent=1), _layout(tensors)))
            if len({s for s, _, _ in everyone}) > 1:
                raise RuntimeError(f"the ranks save different steps: {[s for s, _, _ in everyone]}")
            mine = _share_out([layout for _, _, layout in everyone])[self.rank]
            state = {}
            self._everywhere(lambda: state.update(self._stage(tensors, mine)))  # one host out of memory: all must know
        # daemon: when another rank dies, this thread sits in a collective for up to the group's time-out and must not hold up the exit
        self.thread = threading.Thread(target=self._write, args=(step, everyone[0][1], state), name="checkpoint", daemon=True)
        self.thread.start()
        if not self.background:
            self.wait()

    def wait(self) -> None:
        """Joins the running save. Its error, if any rank had one, is raised here on every rank."""
        if self.thread is not None:
            with at("checkpoint", "wait for the save"):
                self.thread.join()
        self.thread, error, self.error = None, self.error, None
        if error is not None:
            raise error

    def _stage(self, tensors: dict[str, Piece], mine: set) -> dict[str, torch.Tensor]:
        """Copies the boxes named in `mine` into the arena, which is allocated once and used again by every save."""
        boxes = [(name, offsets, t) for name, piece in tensors.items() for offsets, t in piece.boxes if (name, tuple(offsets)) in mine]
        starts = [0]
        for _, _, t in boxes:
            starts.append(starts[-1] + -(-t.nbytes // ALIGN) * ALIGN)
        on_gpu = any(t.is_cuda for _, _, t in boxes)
        if self.arena is None or self.arena.numel() < starts[-1]:
            self.arena = None  # free the old one first
            self.arena = host_memory(starts[-1], on_gpu)
        staged = {}
        for (name, offsets, t), start in zip(boxes, starts):
            # frombuffer and not a slice: each box becomes a storage of its own, else DCP clones it once more before writing
            copy = torch.frombuffer(self.arena.numpy(), dtype=t.dtype, count=t.numel(), offset=start).view(t.shape)
            copy.copy_(t.detach(), non_blocking=True)
            staged.setdefault(name, []).append((offsets, copy))
        if on_gpu:
            torch.cuda.synchronize()  # the next optimizer step overwrites what is being copied
        return {name: _Boxes(Piece(tensors[name].shape, tensors[name].dtype, parts)) for name, parts in staged.items()}

    def _write(self, step: int, meta: str, state: dict[str, torch.Tensor]) -> None:
        """The background thread, the same collectives on every rank: open the folder, write, publish. Leaves an error in self.error."""
        final = self.folder / f"step_{step:08d}"
        tmp = self.folder / f".tmp-{final.name}"
        try:
            self._everywhere(lambda: (shutil.rmtree(tmp, ignore_errors=True), tmp.mkdir()), only_rank=0)
            writer = _Writer(tmp)
            everyone = self._everywhere(lambda: (dcp.save(state, storage_writer=writer, process_group=self.group), writer.fs.sums)[1])
            sums = {name: s for sums in everyone for name, s in sums.items()}
            self._everywhere(lambda: self._publish(tmp, final, step, meta, sums), only_rank=0)
        except BaseException as e:  # noqa: BLE001 - raised again by wait()
            self.error = e
            if self.rank == 0:
                shutil.rmtree(tmp, ignore_errors=True)

    def _publish(self, tmp: Path, final: Path, step: int, meta: str, sums: dict) -> None:
        """Rank 0, when all ranks have flushed their files: the last files, a look at what is there, the rename, rotation."""
        files = _HashingFileSystem()
        with files.create_stream(tmp / "meta.json", "wb") as f:
            f.write(meta.encode())
        manifest = {"format": FORMAT, "step": step, "world_size": self.world_size, "torch": torch.__version__, "files": sums | files.sums}
        with files.create_stream(tmp / "checksums.json", "wb") as f:
            f.write(json.dumps(manifest, indent=1).encode())
        _read_index(tmp)
        for name, (nbytes, _) in manifest["files"].items():
            if (tmp / name).stat().st_size != nbytes:  # stat through this machine's eyes: a rank may have written elsewhere
                raise UserError(f"{tmp / name} has {(tmp / name).stat().st_size} bytes, {nbytes} were written")
        _fsync(tmp)
        if final.exists():  # a damaged one, or a step trained again; _tidy puts it back if the power goes between the two renames
            _move_aside(final, ".old-")
        tmp.rename(final)
        _fsync(self.folder)
        shutil.rmtree(self.folder / f".old-{final.name}", ignore_errors=True)
        self.damaged.discard(final.resolve())
        sound = [p for p in steps(self.folder) if (p / "checksums.json").is_file() and p.resolve() not in self.damaged]
        for path in sound[: -self.keep_last]:
            if path != final and path.resolve() not in self.protected:
                shutil.rmtree(_move_aside(path, ".tmp-"), ignore_errors=True)  # half-removed it must not look like a checkpoint

    # -- load --

    def _tidy(self) -> list[str]:
        """Rank 0, at the start: removes what a killed save left behind. Returns the names of the step folders."""
        for old in self.folder.glob(".old-step_*"):
            if not (self.folder / old.name.removeprefix(".old-")).exists():
                old.rename(self.folder / old.name.removeprefix(".old-"))
        for left in [*self.folder.glob(".old-step_*"), *self.folder.glob(".tmp-step_*")]:
            shutil.rmtree(left)
        return [path.name for path in steps(self.folder)]

    def _verify(self, path: Path) -> list[str]:
        """verify() with the files dealt out to the ranks."""
        return [problem for found in self._everywhere(lambda: verify(path, self.rank, self.world_size)) for problem in found]

    def latest(self) -> str | None:
        """The newest complete and intact checkpoint, None if there is none. Every byte of it is checked, by all ranks together. Newer ones
        that are damaged are named in a warning. What a killed save left is removed: to be called by the run that owns the folder only."""
        self.wait()
        for name in reversed(self._everywhere(self._tidy, only_rank=0)[0]):
            path = self.folder / name
            problems = self._verify(path)
            if not problems:
                self.intact.add(path.resolve())
                return str(path)
            self.damaged.add(path.resolve())
            if self.rank == 0:
                print(f"warning: {path} is not used: {'; '.join(problems)}", file=sys.stderr, flush=True)
        return None

    def load(self, path: str | Path, tensors: dict[str, Piece]) -> dict:
        """Fills the boxes of `tensors` in place from a checkpoint of any layout, bit for bit, and returns its meta; meta["rng"] is this
        rank's RNG state (1-D uint8) if as many ranks saved one. The names of all ranks together must be those of the checkpoint.

        UserError, on all ranks: damaged or hostile files by name; names missing or left over, other shapes, other dtypes.
        """
        self.wait()
        path = Path(path)
        with at("checkpoint", f"load {path.name}"):
            problems = [] if path.resolve() in self.intact else self._verify(path)
            if problems:
                others = [p.name for p in steps(path.parent) if p != path]
                raise UserError(f"{path} is not intact: {'; '.join(problems)}; others beside it: {', '.join(others) or 'none'}")
            opened = []
            self._everywhere(lambda: opened.append(_read_index(path)))  # append: a result would travel to every rank
            index = opened[0]
            problems = _misfits(index, self._everywhere(lambda: _layout(tensors)))
            if problems:
                raise UserError(f"{path} does not fit this run: {'; '.join(problems)}")
            meta = read_meta(path)
            wanted = {name: _Boxes(piece) for name, piece in tensors.items() if piece.boxes}
            rng = index.state_dict_metadata.get(f"rng.{self.rank}")
            if rng is not None and _manifest(path).get("world_size") == self.world_size:
                meta["rng"] = torch.empty(rng.size, dtype=torch.uint8)
                wanted[f"rng.{self.rank}"] = _Boxes(whole_piece(meta["rng"]))
            planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            self._everywhere(lambda: dcp.load(wanted, storage_reader=_Reader(path, index), planner=planner, process_group=self.group))
        return meta


def host_memory(nbytes: int, page_locked: bool) -> torch.Tensor:
    """1-D uint8 of zeros, page-locked as long as this very tensor lives (not: a view of it).

    By cudaHostRegister, not by pin_memory=True, which rounds up to a power of two: 73 GB would take 137.
    """
    if not page_locked or not nbytes:
        return torch.zeros(nbytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, nbytes)
    memory.madvise(mmap.MADV_DONTFORK)  # locked pages cannot be shared: each loader worker's fork would copy all of them
    memory.madvise(mmap.MADV_HUGEPAGE)
    arena = torch.frombuffer(memory, dtype=torch.uint8).zero_()  # by all threads; locking would bring the pages in one by one
    cudart = torch.cuda.cudart()
    torch.cuda.check_error(cudart.cudaHostRegister(arena.data_ptr(), nbytes, 0))
    weakref.finalize(arena, cudart.cudaHostUnregister, arena.data_ptr())
    return arena


def _layout(tensors: dict[str, Piece]) -> dict[str, tuple]:
    """What a rank tells the others: name -> (shape, dtype, [(offsets, sizes)])."""
    for name, piece in tensors.items():
        for offsets, t in piece.boxes:
            if t.dtype != piece.dtype or not t.numel() or any(o + s > n for o, s, n in zip(offsets, t.shape, piece.shape, strict=True)):
                raise ValueError(f"{name}: a box {t.dtype} {tuple(t.shape)} at {offsets} is no part of {piece.dtype} {piece.shape}")
    return {n: (tuple(p.shape), p.dtype, [(tuple(o), tuple(t.shape)) for o, t in p.boxes]) for n, p in tensors.items()}


def _share_out(layouts: list[dict[str, tuple]]) -> list[set]:
    """Which boxes, as (name, offsets), each rank writes: what several hold goes to the one with least to write. The same on every rank."""
    shapes, holders, filled = {}, {}, {}
    for rank, layout in enumerate(layouts):
        for name, (shape, dtype, boxes) in layout.items():
            if shapes.setdefault(name, (shape, dtype)) != (shape, dtype):
                raise ValueError(f"{name}: {dtype} {shape} on rank {rank}, {shapes[name]} on a rank before it")
            for offsets, sizes in boxes:
                holders.setdefault((name, offsets, sizes), []).append(rank)
    for name, _, sizes in holders:
        filled[name] = filled.get(name, 0) + math.prod(sizes)
    for name, (shape, _) in shapes.items():
        if filled.get(name, 0) != math.prod(shape):
            raise ValueError(
                f"{name}: the boxes of all ranks hold {filled.get(name, 0)} elements, its shape {shape} has {math.prod(shape)}"
            )
    nbytes, shares = [0] * len(layouts), [set() for _ in layouts]
    for (name, offsets, sizes), ranks in holders.items():
        rank = min(ranks, key=lambda r: nbytes[r])
        nbytes[rank] += math.prod(sizes) * shapes[name][1].itemsize
        shares[rank].add((name, offsets))
    return shares


def _misfits(index: dcp_metadata.Metadata, layouts: list[dict[str, tuple]]) -> list[str]:
    saved = {n: (tuple(t.size), t.properties.dtype) for n, t in index.state_dict_metadata.items() if not n.startswith("rng.")}
    here = {name: (shape, dtype) for layout in layouts for name, (shape, dtype, _) in layout.items()}
    problems = []
    for what, names in (("not in the checkpoint", here.keys() - saved.keys()), ("in the checkpoint only", saved.keys() - here.keys())):
        if names:
            problems.append(f"{what}: {', '.join(sorted(names)[:20])}" + (f" and {len(names) - 20} more" if len(names) > 20 else ""))
    differ = [name for name in sorted(here.keys() & saved.keys()) if here[name] != saved[name]]
    return problems + [f"{n} is {saved[n][1]} {saved[n][0]} there, {here[n][1]} {here[n][0]} here" for n in differ[:20]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["verify", "list"])
    parser.add_argument("path", type=Path, help="verify: a step_* folder; list: a run folder or its ckpt folder")
    args = parser.parse_args()
    if args.command == "verify":
        started = time.time()
        problems = verify(args.path)
        if problems:
            print("\n".join(problems))
            sys.exit(1)
        nbytes = sum(size for size, _ in _manifest(args.path)["files"].values())
        print(f"{args.path} is intact: {nbytes / 1e9:.3f} GB read at {nbytes / 1e9 / (time.time() - started):.2f} GB/s")
        return
    folder = args.path / "ckpt" if (args.path / "ckpt").is_dir() else args.path
    for path in steps(folder):
        size = sum(f.stat().st_size for f in path.iterdir()) / 1e9
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime))
        print(f"{path}  {size:.3f} GB  {saved}  {'complete' if (path / 'checksums.json').is_file() else 'incomplete'}")
    if not steps(folder):
        raise UserError(f"no step_* folder in {folder}")


if __name__ == "__main__":
    run_cli(main)
