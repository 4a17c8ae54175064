"""The loop is repeated in every training script on purpose: what must stay the same is the same, what differs is the idea."""

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

SCRIPTS = {
    "train_ddp": "ddp",
    "train_zero": "zero",
    "train_tp": "tp",
    "train_pipe": "pipe",
}  # script -> its strategy object
# evaluate() gets the strategy where the model's own forward is not enough
CALLS = r"\b(ddp|zero|tp|pipe)(?=\.|, scaler\))|(?<=evaluate\(run, )\w+(?=\))"


def same_blocks(script: str) -> list[list[str]]:
    """The lines between the marker comments, with the strategy object's name normalised."""
    text = (ROOT / f"{script}.py").read_text()
    blocks = re.findall(r"^ *# \[same in every train_\*\.py\n(.*?)^ *# same\]$", text, re.M | re.S)
    assert text.count("# [same in every train_*.py") == text.count("# same]") == len(blocks), (
        f"{script}: a marker has no partner"
    )
    return [re.sub(CALLS, "strategy", block).splitlines() for block in blocks]


@pytest.mark.parametrize("script", [s for s in SCRIPTS if s != "train_ddp"])
def test_marked_blocks_are_the_same(script):
    reference, ours = same_blocks("train_ddp"), same_blocks(script)
    assert len(ours) == len(reference) == 4
    for number, (a, b) in enumerate(zip(reference, ours)):
        difference = "\n".join(difflib.unified_diff(a, b, "train_ddp.py", f"{script}.py", lineterm=""))
        assert not difference, f"block {number}:\n{difference}"


def test_the_run_of_ddp_and_zero_differs_in_a_few_lines():
    """`diff train_ddp.py train_zero.py` is the lesson: below "the run" only names, the forward call and --deepspeed differ."""
    ours = {}
    for script, name in (("train_ddp", "ddp"), ("train_zero", "zero")):
        loop = (ROOT / f"{script}.py").read_text().split("# --- the run ---")[1]
        ours[script] = re.sub(rf"\b{name}\b", "strategy", loop).splitlines()
    changed = [line for line in difflib.ndiff(ours["train_ddp"], ours["train_zero"]) if line[0] in "+-"]
    assert len(changed) < 40, "\n".join(changed)


@pytest.mark.parametrize("script", SCRIPTS)
def test_idea_and_run_are_told_apart(script):
    """Each script has the two headings, in this order, and a marked loop behind the second."""
    text = (ROOT / f"{script}.py").read_text()
    idea, run, loop = (
        text.find("# --- the idea"),
        text.find("# --- the run ---"),
        text.find("for step in range(first, cfg.steps)"),
    )
    assert 0 < idea < run < loop


def models_left(rank, script, folder):
    """Models with storage that are alive when main() has returned."""
    more = {"stage": 3} if script == "train_zero" else {"schedule": "interleaved"} if script == "train_pipe" else {}
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
    """main(cfg) can be called again: what one run compiled does not count against the next one's limit, nor make its shapes dynamic."""
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
    """Losses of two runs of two ranks, seeds 0 and 1: at once in the halves of a job of four, or one after the other."""
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
