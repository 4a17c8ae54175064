"""ZeRO against one process and against itself: contract points 1-9 of train_zero.py at every stage."""

import dataclasses
import json
import re
import time

import pytest
import torch
from harness import ROOT, assert_follows, final_weights, run_ranks, toy_files, train

import train_ddp
import train_pipe
import train_zero
from model import SIZES, n_params
from support.flags import UserError
from support.meter import Meter, at
from support.run import Run

KINDS = {
    "plain": {},
    "tied, dropout": {"tie": True, "dropout": 0.1, "steps": 8},
    "accum": {"micro_batch": 1, "steps": 8},
    "masked": {"data": "masked", "steps": 8},
    "recompute": {"recompute": "full", "dropout": 0.1, "steps": 8},
}


def stages(folder, world_size):
    """Kinds at every stage (all of them at 2 and 3 ranks), plus the other ways of running it."""
    found = {}
    for kind, flags in KINDS.items() if world_size in (2, 3) else [(k, KINDS[k]) for k in ("plain", "tied, dropout")]:
        for stage in (0, 1, 2, 3):
            found[f"{kind}, stage {stage}"] = {"stage": stage} | flags
    for stage in (1, 2, 3):
        found[f"accum, stage {stage}, offload"] = {"stage": stage, "offload": "optimizer", "steps": 8}
    found["accum, stage 3, no overlap"] = {"stage": 3, "overlap": False, "steps": 8}
    found["accum, stage 1, no overlap"] = {"stage": 1, "overlap": False, "steps": 8}
    for flags in found.values():
        flags["data"] = f"{folder}/{flags.get('data', 'plain')}"
        flags["global_batch"] = 14 if world_size == 7 else 12
        flags |= {"steps": 10} if world_size == 7 else {}
        share = flags["global_batch"] // world_size
        flags.setdefault("micro_batch", share // 2 if share % 2 == 0 else 1)  # else two micro-batches a step
    return found


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """train_ddp in one process, the whole batch in one micro-batch; by global batch."""
    results = {}
    for batch in (12, 14):
        folder = tmp_path_factory.mktemp("one")
        toy_files(folder)
        flags = {
            k: v | {"data": f"{folder}/{v.get('data', 'plain')}", "micro_batch": batch, "global_batch": batch}
            for k, v in KINDS.items()
        }
        for flag in flags.values():
            flag |= {"steps": 10} if batch == 14 else {}
        rows = run_ranks(1, train, "train_ddp", str(folder), flags, timeout=300)[0]
        results[batch] = {name: (rows[name], final_weights(folder / name)) for name in flags}
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_parity(world_size, reference, tmp_path):
    toy_files(tmp_path)
    flags = stages(tmp_path, world_size)
    results = run_ranks(world_size, train, "train_zero", str(tmp_path), flags, timeout=400)
    for name in flags:
        rows, weights = reference[flags[name]["global_batch"]][name.split(", stage")[0]]
        assert_follows(results[0][name], rows, final_weights(tmp_path / name), weights, 1e-9)
        for other in results[1:]:
            assert [(r["loss"], r["grad_norm"]) for r in other[name]] == [
                (r["loss"], r["grad_norm"]) for r in results[0][name]
            ]


def plan(stage, world_size, accum):
    """predict() for 6b in bf16 on so many ranks: per-parameter bytes held, and handed over by collective."""
    cfg = train_zero.Config(stage=stage, micro_batch=1, dtype="bfloat16")
    run = Run(cfg, 0, world_size, torch.device("cpu"), torch.bfloat16, accum=accum, model_cfg=SIZES["6b"])
    memory, traffic = train_zero.predict(run)
    P = n_params(run.model_cfg)
    held = sum(memory[term] for term in ("compute weights", "gradients", "master weights", "moments")) / P
    return held, {op: sum(size for o, _, size in traffic if o == op) / P for op, _, _ in traffic}


TABLE = {  # stage: bytes held on 1, 2 and 8 ranks, then what is handed over, by collective, as the docstring writes it
    0: ([18, 18, 18], {"all_reduce": "4"}),
    1: ([18, 12, 7.5], {"exchange": "4", "all_gather": "2"}),
    2: ([18, 10, 4], {"exchange": "2 A", "all_gather": "2"}),
    3: ([18, 9, 2.25], {"exchange": "2 A", "all_gather": "4 A"}),
}


@pytest.mark.parametrize("stage", TABLE)
def test_docstring_table(stage):
    """The table in the docstring is what the formulas behind the printed predictions say."""
    held, handed = TABLE[stage]
    accum = 16
    line = re.search(rf"^ +stage {stage} .*", train_zero.__doc__, re.M)[0]
    numbers = line.split()
    for world_size, expected in zip((1, 2, 8), held):
        assert plan(stage, world_size, accum)[0] == pytest.approx(expected, rel=1e-3)
        assert f"{expected:g}" in numbers
    for op, expected in handed.items():
        factor = float(expected.split()[0]) * (accum if "A" in expected else 1)
        assert plan(stage, 8, accum)[1][op] == pytest.approx(
            factor, rel=0.07
        )  # 0.07: what stage 3 need not gather again
        assert re.search(rf"\s{expected}(\s|$)", line)


def test_measured_memory_is_what_the_formulas_say():
    """docs/results/memory-h200.json: its predictions are today's formulas', and within 10 % of what GPUs measured."""
    for row in json.loads((ROOT / "docs/results/memory-h200.json").read_text()):
        pipe = "schedule" in row
        module = train_pipe if pipe else train_zero if row["stage"] else train_ddp
        flags = {k: row[k] for k in ("micro_batch", "stage", "offload", "schedule", "chunks", "seq_len") if row.get(k)}
        cfg = module.Config(dtype="bfloat16", compile=True, **flags)
        model = dataclasses.replace(SIZES[row["model"]], **{k: row[k] for k in ("seq_len", "vocab_size") if k in row})
        ranks, facts = row.get("ranks", row["gpus"]), {"accum": row.get("accum", 1), "copy_engine": pipe}
        run = Run(cfg, 0, ranks, torch.device("cpu"), torch.bfloat16, model_cfg=model, pp=ranks if pipe else 1, **facts)
        predicted = sum(module.predict(run)[0].values()) / 1e9
        assert predicted == pytest.approx(row["predicted_gb"], abs=0.006), row
        assert predicted == pytest.approx(row["measured_gb"], rel=0.1), row


def test_an_update_within_an_evaluation_is_the_optimizers_time():
    """With offload an update waits for the next forward pass, which may be an evaluation's: still part of the step."""
    run = Run(train_zero.Config(steps=1), 0, 1, torch.device("cpu"))
    with Meter(run, 1) as meter:
        with at("eval"), at("optimizer"):
            time.sleep(0.05)
        row = meter.log(0, 1.0, 1.0, 0.0, 1, 1.0, False)
    assert row["optimizer_ms"] >= 50 and row["step_ms"] >= 50 and row["eval_ms"] < 50


def refusal(rank, folder):
    try:
        train(rank, "train_zero", folder, {"refused": {"copy_engine": True}})
    except UserError as error:
        return str(error)


def test_copy_engine_is_refused_without_gpus(tmp_path):
    """On every rank, and before the run folder is made."""
    toy_files(tmp_path)
    assert all("two or more GPUs" in text for text in run_ranks(2, refusal, str(tmp_path)))
    assert not (tmp_path / "refused").exists()
