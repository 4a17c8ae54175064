"""Forks of the model that go wrong are refused by name; what model.py describes is right everywhere.

A parameter whose gradient does not come would be updated with the one of another step, and replicas would drift apart;
so a run in which that happens ends with its name. Where a new parameter works and how it is cut stands in model.py.
"""

import importlib
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from harness import ROOT, assert_follows, final_weights, run_ranks, toy_files, train

from model import GPT, Halves, Linear
from support.flags import UserError
from support.start import run_script

FORMS = {  # each on two ranks
    "ddp": ("train_ddp", {}),
    "zero 1": ("train_zero", {"stage": 1}),
    "zero 2": ("train_zero", {"stage": 2}),
    "zero 3": ("train_zero", {"stage": 3}),
    "tp": ("train_tp", {}),
    "3d, dp": ("train_3d", {"tp": 1, "pp": 1}),
    "3d, tp": ("train_3d", {"tp": 2, "pp": 1}),
    "3d, pp": ("train_3d", {"tp": 1, "pp": 2}),
    "pipe": ("train_pipe", {}),
}
STAGES = ("3d, pp", "pipe")  # here the ranks do different things, and only one sees what is wrong


def add(make):
    """Give the halves of every block (cfg, layer) more modules: make() returns them by name."""
    init = Halves.__init__

    def more(self, cfg, layer, recompute):
        init(self, cfg, layer, recompute)
        for name, module in make(cfg, layer).items():
            setattr(self, name, module)

    Halves.__init__ = more


# --- forks that go wrong ----------------------------------------------------------------------------------------------


def skipped():
    """The last block's MLP is left out of every second forward pass."""
    mlp, passes = Halves.mlp, itertools.count()

    def sometimes(self, x):
        return 0 * x if self.layer == 1 and next(passes) % 2 else mlp(self, x)

    Halves.mlp = sometimes


def frozen():
    """requires_grad is taken away once everything is built."""
    set_buffers = GPT.set_buffers

    def and_freeze(self, dtype, device):
        set_buffers(self, dtype, device)
        self.blocks[1].wq.weight.requires_grad_(False)

    GPT.set_buffers = and_freeze


def unused():
    """A matrix of the last block that no forward pass touches."""
    add(lambda cfg, layer: {"extra": Linear(cfg.n_embd, cfg.n_embd, "mlp", cut=0)} if layer == 1 else {})


NAMES = {
    skipped: "blocks.1.w_down.weight, blocks.1.w_gate.weight, blocks.1.w_up.weight",
    frozen: "blocks.1.wq.weight",
    unused: "blocks.1.extra.weight",
}
SAID = "every parameter must be used in every forward pass and need a gradient"
FLAGS = {"global_batch": 6, "micro_batch": 1, "steps": 3}


def ends_of(rank, folder, fork, forms, flags=FLAGS):
    """By form the UserError that its run ended with, None if it came through."""
    fork()
    ends = dict.fromkeys(forms)
    for name in forms:
        script, more = FORMS[name]
        try:
            train(rank, script, folder, {name: flags | more})
        except UserError as error:
            ends[name] = str(error)
    return ends


@pytest.mark.parametrize("fork", NAMES, ids=lambda fork: fork.__name__)
def test_a_gradient_that_does_not_come_ends_the_run(fork, tmp_path):
    toy_files(tmp_path)
    for ends in run_ranks(2, ends_of, str(tmp_path), fork, [name for name in FORMS if name not in STAGES]):
        for name, text in ends.items():
            assert text and text.startswith(f"{NAMES[fork]} ") and SAID in text, (name, text)


@pytest.mark.parametrize("fork", NAMES, ids=lambda fork: fork.__name__)
def test_it_ends_in_the_same_step(fork, tmp_path):
    """The run has one step, and only its last pass lacks a gradient: there is none after it that would notice."""
    toy_files(tmp_path)
    flags = {"global_batch": 4 if fork is skipped else 2, "micro_batch": 1, "steps": 1}
    forms = [name for name in FORMS if name not in (*STAGES, "tp", "3d, tp")]
    for ends in run_ranks(2, ends_of, str(tmp_path), fork, forms, flags):
        for name, text in ends.items():
            assert text and text.startswith(f"{NAMES[fork]} ") and SAID in text, (name, text)


@pytest.mark.parametrize(
    "name, fork",
    [
        pytest.param(name, fork, id=f"{name}-{fork.__name__}", marks=[pytest.mark.soak] * ((i + j) % 2))
        for i, name in enumerate(STAGES)
        for j, fork in enumerate(NAMES)
    ],
)
def test_the_stages_that_do_not_see_it_end_too(name, fork, tmp_path):
    """From the command line: both ranks name the parameter, and the exit code is not 0."""
    toy_files(tmp_path)
    script, more = FORMS[name]
    flags = {"model": tmp_path / "toy.json", "data": tmp_path / "plain", "out": tmp_path / "run", "device": "cpu"}
    flags |= {"workers": 0, "hang_timeout": 60} | FLAGS | more
    words = [str(word) for key, value in flags.items() for word in (f"--{key.replace('_', '-')}", value)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    call = [*torchrun, __file__, fork.__name__, script, *words]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(call, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode != 0
    assert f"rank 1: error: {NAMES[fork]} " in done.stderr, done.stderr
    assert f"rank 0 stopped because rank 1 failed: {NAMES[fork]} " in done.stderr, done.stderr


# --- forks that model.py does not describe ----------------------------------------------------------------------------


def no_half():
    add(lambda cfg, layer: {"extra": torch.nn.Linear(cfg.n_embd, cfg.n_embd, bias=False)})


def no_cut():
    def half_only(cfg, layer):
        module = torch.nn.Linear(cfg.n_embd, cfg.n_embd, bias=False)
        module.half = "mlp"
        return {"extra": module}

    add(half_only)


def no_block():
    """A parameter of the whole model, which belongs to no unit."""
    init = GPT.__init__

    def more(self, cfg, recompute="none"):
        init(self, cfg, recompute)
        with torch.device("meta"):
            self.extra = Linear(cfg.n_embd, cfg.n_embd, "mlp", cut=0)

    GPT.__init__ = more


def odd():
    add(lambda cfg, layer: {"extra": Linear(cfg.n_embd, 33, "mlp", cut=0)})


@pytest.mark.parametrize(
    "fork, text",
    [
        (no_half, "blocks.0.extra.weight: its module's `half` is None and its `cut` missing"),
        (no_cut, "blocks.0.extra.weight: its module's `half` is 'mlp' and its `cut` missing"),
        (no_block, "extra.weight: its module's `half` is 'mlp' and its `cut` 0"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_unknown_parameter_is_refused_by_name(fork, text, tmp_path):
    """Under every strategy, on every rank, before there is a run folder."""
    toy_files(tmp_path)
    for ends in run_ranks(2, ends_of, str(tmp_path), fork, list(FORMS)):
        assert all(end and end.startswith(text) and "model.py must say" in end for end in ends.values()), ends
    assert not [name for name in FORMS if (tmp_path / name).exists()]


def test_a_matrix_that_does_not_divide_is_refused_by_name(tmp_path):
    toy_files(tmp_path)
    for ends in run_ranks(2, ends_of, str(tmp_path), odd, ["tp", "3d, tp"]):
        for text in ends.values():
            assert text == "blocks.0.extra.weight=33 is not divisible by tp=2, valid for this model: --tp 1"
    assert not (tmp_path / "tp").exists()


# --- a fork that is described -----------------------------------------------------------------------------------------


def richer():
    """SwiGLU with a third input: one more column-parallel matrix in every block."""
    add(lambda cfg, layer: {"w_plus": Linear(cfg.n_embd, cfg.n_ff, "mlp", cut=0)})
    Halves.mlp = lambda self, x: self.w_down(F.silu(self.w_gate(x)) * self.w_up(x) + self.w_plus(x))


def forked(rank, folder, forms):
    richer()
    found = {}
    for name in forms:
        script, more = FORMS[name]
        found |= train(rank, script, folder, {name: {"micro_batch": 3, "steps": 8} | more})
    return found


def test_what_model_py_describes_is_right_everywhere(tmp_path):
    """Every strategy on two ranks follows one process of the same fork: losses, norms, every tensor."""
    for folder in ("one", "two"):
        Path(tmp_path, folder).mkdir()
        toy_files(tmp_path / folder)
    expected = run_ranks(1, forked, f"{tmp_path}/one", ["ddp"])[0]["ddp"]
    weights = final_weights(tmp_path / "one/ddp")
    assert weights["exp_avg_sq.blocks.0.w_plus.weight"].any()
    results = run_ranks(2, forked, f"{tmp_path}/two", list(FORMS), timeout=100)
    for name in FORMS:
        assert_follows(results[0][name], expected, final_weights(tmp_path / "two" / name), weights, 1e-9)


if __name__ == "__main__":
    fork, script = sys.argv[1:3]
    del sys.argv[1:3]
    globals()[fork]()
    module = importlib.import_module(script)
    run_script(module.main, module.predict, module.Config, "")
