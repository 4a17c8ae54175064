"""Every training script repeats the loop on purpose: what must stay the same is the same, what differs is the idea."""

import difflib
import functools
import gc
import importlib
import re

import pytest
import torch
import torch.distributed as dist
from harness import ROOT, run_ranks, toy_files, train

import train_ddp
from model import GPT

SCRIPTS = ["train_ddp", "train_zero", "train_tp", "train_pipe", "train_3d", "train_cp"]


def the_run(script: str) -> list[str]:
    """main() of a script, line by line."""
    return (ROOT / f"{script}.py").read_text().split("# --- the run ---")[1].split("\ndef main(")[1].splitlines()


def step_end(lines: list[str]) -> list[str]:
    """From the facts of a step on: what every script does alike."""
    start = next(i for i, line in enumerate(lines) if "facts[2], facts[3]" in line)
    # a pipeline's forward pass is its stage's
    return [re.sub(r"evaluate\(run, stage\)", "evaluate(run, strategy)", line) for line in lines[start:]]


@pytest.mark.parametrize("script", SCRIPTS[1:])
def test_a_step_ends_alike(script):
    """Facts, norm, update, evaluation, log, save, end: the same text in every script."""
    reference, ours = step_end(the_run("train_ddp")), step_end(the_run(script))
    assert len(reference) > 25
    assert not "\n".join(difflib.unified_diff(reference, ours, "train_ddp.py", f"{script}.py", lineterm=""))


@pytest.mark.parametrize(
    "script, lines", [("train_zero", 16), ("train_cp", 10), ("train_tp", 6), ("train_pipe", 60), ("train_3d", 60)]
)
def test_the_diff_of_two_runs_is_the_lesson(script, lines):
    """`diff train_ddp.py train_zero.py` below "the run": layout, strategy and its forward pass, nothing else."""
    changed = [d for d in difflib.ndiff(the_run("train_ddp"), the_run(script)) if d[0] in "+-"]
    assert 0 < len(changed) <= lines, "\n".join(changed)


@pytest.mark.parametrize("script", SCRIPTS)
def test_idea_and_run_are_told_apart(script):
    """Each script has the headings in this order, and the loop behind the last one."""
    text = (ROOT / f"{script}.py").read_text()
    idea, run, loop = (
        text.find("# --- the idea"), text.find("# --- the run ---"), text.find("for step in range(first, cfg.steps)")
    )  # fmt: skip
    assert 0 < idea < run < loop


def models_left(rank, script, folder):
    """Models with storage that are alive when main() has returned."""
    more = {"train_zero": {"stage": 3}, "train_pipe": {"schedule": "interleaved"}, "train_3d": {"tp": 1, "pp": 2}}
    more = more.get(script, {})
    train(rank, script, folder, {f"{script}{i}": {"steps": 2, "save_every": 0} | more for i in range(2)})
    gc.collect()
    return sum(isinstance(o, GPT) and not o.norm.weight.is_meta for o in gc.get_objects())


@pytest.mark.parametrize("script", SCRIPTS)
def test_main_leaves_nothing_behind(script, tmp_path):
    """main(cfg) can be called again: the memory of a run is free when it is over."""
    toy_files(tmp_path, n_layer=4)
    assert run_ranks(2, models_left, script, str(tmp_path)) == [0, 0]


def compiled(rank, folder):
    torch._dynamo.config.recompile_limit = 1
    torch.nn.Module.compile = functools.partialmethod(
        torch.nn.Module.compile, backend="eager"
    )  # traced, but no code is generated
    torch.compile = functools.partial(torch.compile, backend="eager")
    flags = {"compile": True, "steps": 1, "save_every": 0}
    return train(rank, "train_ddp", folder, {f"of {T}": flags | {"seq_len": T} for T in (16, 32)})


def test_each_run_compiles_for_itself(tmp_path):
    """main(cfg) again: what one run compiled counts not against the next one's limit, nor makes its shapes dynamic."""
    toy_files(tmp_path)
    assert [len(rows) for rows in run_ranks(1, compiled, str(tmp_path))[0].values()] == [1, 1]


def alone_then_together(rank, folder):
    """Two runs on rank 0 alone, one on rank 1, then one on both."""
    groups = [dist.new_group([0]), dist.new_group([1])]
    flags = dict(
        model=f"{folder}/toy.json",
        data=f"{folder}/plain",
        device="cpu",
        global_batch=12,
        micro_batch=3,
        steps=1,
        eval_every=0,
    )
    for i in range(2 - rank):
        train_ddp.main(train_ddp.Config(**flags, out=f"{folder}/{rank}{i}"), groups[rank])
    return len(train_ddp.main(train_ddp.Config(**flags, out=f"{folder}/both")))


def test_runs_on_parts_then_on_all(tmp_path):
    toy_files(tmp_path)
    assert run_ranks(2, alone_then_together, str(tmp_path)) == [1, 1]


def two_ways(rank, script, folder, together):
    """Losses of two runs of two ranks, seeds 0 and 1: at once in the halves of a job of four, or in turn."""
    module = importlib.import_module(script)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])] if together else [None, None]
    found = {}
    for seed in [rank // 2] if together else [0, 1]:
        flags = dict(
            model=f"{folder}/toy.json",
            data=f"{folder}/plain",
            device="cpu",
            dtype="float64",
            global_batch=12,
            micro_batch=3,
        )
        flags |= dict(
            steps=5, workers=0, eval_every=0, save_every=0, tie=True, seed=seed, out=f"{folder}/{together}{seed}"
        )
        found[seed] = [row["loss"] for row in module.main(module.Config(**flags), groups[seed])]
    return found


@pytest.mark.parametrize("script", SCRIPTS)
def test_two_runs_in_one_job(script, tmp_path):
    """main(cfg, group) on parts of a job: each run is what it would be alone."""
    toy_files(tmp_path, n_layer=4)
    alone = run_ranks(2, two_ways, script, str(tmp_path), False)[0]
    assert run_ranks(4, two_ways, script, str(tmp_path), True) == [{seed: alone[seed]} for seed in (0, 0, 1, 1)]
