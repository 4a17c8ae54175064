"""Real processes for the tests: every multi-rank test runs on gloo ranks of its own, nothing is imitated."""

import importlib
import json
import os
import pickle
import shutil
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from support import meter, prepare
from support.run import destroy_groups

# ranks are forked from a process that has imported these, which no rank then has to do again: half of a short test's
# time
CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch.distributed.checkpoint", "torch._dynamo", "torch.optim.adamw", "tiktoken", "numpy"]
)


def _rank_main(rank: int, world_size: int, fn, args: tuple, folder: str, timeout: float) -> None:
    for stream, fd in ((sys.stdout, 1), (sys.stderr, 2)):  # the process it is forked from has those of an earlier test
        stream.flush()
        os.dup2(os.open(f"{folder}/printed-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), fd)
    torch.set_num_threads(1)  # as torchrun does: two cores, several ranks
    os.environ.update(  # LOCAL_WORLD_SIZE 8: one thread each
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="8"
    )
    store = dist.FileStore(f"{folder}/store", world_size)
    try:
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
        )
        result = fn(rank, *args)
    except BaseException:
        Path(folder, f"error-{rank}").write_text(f"{time.time()}\n{traceback.format_exc()}")
        os._exit(1)  # not destroy_process_group: it can hang while a peer waits
    Path(folder, f"result-{rank}").write_bytes(pickle.dumps(result))
    destroy_groups()


def run_ranks(world_size: int, fn, *args, timeout: float = 60) -> list:
    """Run the module-level function fn(rank, *args) on `world_size` gloo processes; their results by rank.

    The first rank that failed is reported with its traceback; ranks still running after `timeout` seconds are a hang.
    """
    with tempfile.TemporaryDirectory() as folder:
        procs = [
            CONTEXT.Process(target=_rank_main, args=(r, world_size, fn, args, folder, timeout))
            for r in range(world_size)
        ]
        for proc in procs:
            proc.start()
        end = time.time() + timeout
        while any(p.is_alive() for p in procs) and time.time() < end and not any(p.exitcode for p in procs):
            time.sleep(0.02)
        failed = [r for r, p in enumerate(procs) if p.exitcode]
        hung = [r for r, p in enumerate(procs) if p.is_alive()] if not failed else []
        for proc in procs:
            if proc.is_alive():
                proc.kill()
            proc.join()
        for printed in sorted(Path(folder).glob("printed-*")):
            print(printed.read_text(), end="")
        errors = sorted(Path(folder).glob("error-*"), key=lambda f: float(f.read_text().split("\n", 1)[0]))
        if errors:
            raise AssertionError(f"{errors[0].name} (first of {len(errors)}):\n{errors[0].read_text()}")
        if hung or failed:
            raise AssertionError(
                f"ranks {hung} still running after {timeout} s" if hung else f"ranks {failed} died without a traceback"
            )
        return [pickle.loads(Path(folder, f"result-{r}").read_bytes()) for r in range(world_size)]


def copy_of_tree(folder: Path) -> Path:
    """A copy of this checkout to be changed: without version control, environment, corpora and runs."""
    left = shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__", "runs", "corpus", "docs")
    return Path(shutil.copytree(ROOT, folder, ignore=left, symlinks=True))


# --- training runs ----------------------------------------------------------------------------------------------------

TOY = dict(n_layer=2, n_head=4, n_kv_head=2, n_embd=32, n_ff=88, vocab_size=61, seq_len=32)


def toy_files(folder: Path, **model) -> None:
    """toy.json (a model), plain/ and masked/ (corpora of 61 ids.

    In masked, 3 to 32 targets of a window count, in one window none).
    """
    (folder / "toy.json").write_text(json.dumps(TOY | model))
    draw = np.random.default_rng(0)
    ids = (
        np.cumsum(draw.integers(0, 7, 40 * 32 + 1)) % 61
    ).tolist()  # next id depends on this one: there is something to learn
    mask = np.ones(len(ids), int)
    for w in range(40):
        mask[w * 32 + 1 : w * 32 + 33][draw.permutation(32)[: draw.integers(0, 30) if w else 32]] = 0
    for name, line in (("plain", {"ids": ids}), ("masked", {"ids": ids, "mask": mask.tolist()})):
        (folder / f"{name}.jsonl").write_text(json.dumps(line) + "\n")
        prepare.prepare(str(folder / name), [str(folder / f"{name}.jsonl")], vocab_size=61)


def add_val(folder: Path, corpus: str) -> None:
    """Give a corpus of toy_files() a validation split, whose windows are few and do not divide among the ranks."""
    lines = [json.dumps({"ids": [i % 7 for i in range(n)]}) + "\n" for n in (100, 400)]
    (folder / "val.jsonl").write_text("".join(lines))
    prepare.prepare(str(folder / "val"), [str(folder / "val.jsonl")], vocab_size=61, val=0.5)
    meta, val = (json.loads((folder / name / "meta.json").read_text()) for name in (corpus, "val"))
    for file in (folder / "val").glob("val*.bin"):
        os.link(file, folder / corpus / file.name)
    meta["splits"]["val"] = val["splits"]["val"]
    (folder / corpus / "meta.json").write_text(json.dumps(meta))


def checked_summary(self, memory: dict, predicted: list, summary=meter.Meter.summary) -> None:
    """Meter.summary(), and in every run of every test the bytes and calls that were counted are those predicted."""
    for op, (expected, counted) in self.compare(predicted).items():
        assert counted == expected, f"{op}: {counted} calls and bytes, predicted {expected}"
    summary(self, memory, predicted)


def train(
    rank: int, script: str, folder: str, variants: dict[str, dict], group: dist.ProcessGroup | None = None
) -> dict[str, list[dict]]:
    """Log rows of script.main for each named set of flags, one after the other in the same processes.

    Run folders folder/NAME. group: the ranks that train; None: all.
    """
    module = importlib.import_module(script)
    meter.Meter.summary = checked_summary
    rows = {}
    for name, flags in variants.items():
        base = dict(
            model=f"{folder}/toy.json", data=f"{folder}/plain", out=f"{folder}/{name}", device="cpu", dtype="float64",
            global_batch=12, micro_batch=1, steps=12, lr=1e-3, warmup_steps=5, clip=0.1, workers=0, eval_every=0,
            save_every=1000, log_every=1000,
        )  # fmt: skip
        rows[name] = module.main(module.Config(**base | flags), group)
    return rows


@torch.no_grad()
def logits_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The whole model's logits, (B, T) -> (B, T, V); in training it only gives its loss."""
    h = model.embed(x)
    for block in model.blocks:
        h = block(h, model.cos[: x.shape[1]], model.sin[: x.shape[1]])
    return model.logits(h)


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the newest checkpoint of a run folder, whole."""
    return stored(max(Path(folder, "ckpt").glob("step_*")))


def stored(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, as torch's own reader finds them."""
    index = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    state = {n: torch.empty(t.size, dtype=t.properties.dtype) for n, t in index.items() if not n.startswith("rng")}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def assert_follows(
    rows: list[dict], reference: list[dict], weights: dict, reference_weights: dict, tolerance: float
) -> None:
    """Losses, gradient norms and every tensor of the final state agree."""
    assert [r["step"] for r in rows] == [r["step"] for r in reference]
    for ours, theirs in zip(rows, reference):
        for key in ("loss", "grad_norm"):
            assert abs(ours[key] - theirs[key]) <= tolerance * max(1, abs(theirs[key])), (
                key,
                ours["step"],
                ours[key],
                theirs[key],
            )
    assert weights.keys() == reference_weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(
            tensor, reference_weights[name], rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
