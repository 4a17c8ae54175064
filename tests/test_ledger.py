"""The ledger counts where bytes move: against what torch was really asked to gather, and with a gather left out."""

import contextlib
import importlib
import io

from harness import add_val, run_ranks, toy_files
from test_precision import spoil

import transport
from support.meter import Meter, running

BAD_STEP = 3  # between two evaluations
FORMS = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 1, offload": {"stage": 1, "offload": "optimizer"},
    "stage 2, offload": {"stage": 2, "offload": "optimizer"},
    "stage 3, offload": {"stage": 3, "offload": "optimizer"},
}


def ledger_of(folder, name, flags):
    """One run in float16 with evaluations and checkpoints -> what compare() says at its end, its screen, its rows."""
    found, screen = {}, io.StringIO()
    summary = Meter.summary

    def keep(self, memory, traffic):
        found.update(self.compare(traffic))
        summary(self, memory, traffic)

    module = importlib.import_module("train_zero")
    module.Config.scale_power = 10
    usual = dict(
        model=f"{folder}/toy.json", data=f"{folder}/plain", out=f"{folder}/{name}", device="cpu", dtype="float16",
        global_batch=12, micro_batch=6, steps=7, lr=1e-3, warmup_steps=2, workers=0, eval_every=2, save_every=3,
    )  # fmt: skip
    Meter.summary = keep
    try:
        with contextlib.redirect_stdout(screen):
            rows = module.main(module.Config(**usual | flags))
    finally:
        Meter.summary = summary
    return found, screen.getvalue(), rows


def counted(rank, folder):
    """By form the run, and calls and bytes of torch's all_gather while its Meter was on."""
    spoil(rank, 1, {BAD_STEP}, float("inf"))
    gather, calls, found = transport.all_gather_single, [], {}

    def watched(full, shard, **more):
        calls.append(full.nbytes)
        return gather(full, shard, **more)

    enter = Meter.__enter__
    Meter.__enter__ = lambda self: calls.clear() or enter(self)  # what loads and builds comes before
    transport.all_gather_single = watched
    for name, flags in FORMS.items():
        run = ledger_of(folder, name, flags)
        found[name] = *run, (len(calls), sum(calls))
    return found


def test_deferred_updates_are_counted_where_they_are_made(tmp_path):
    """A step is skipped, evaluations and checkpoints come between an update and the pass that makes it."""
    toy_files(tmp_path)
    add_val(tmp_path, "plain")
    results = run_ranks(2, counted, str(tmp_path), timeout=100)
    for name, (ledger, _, rows, real) in [item for found in results for item in found.items()]:
        assert [r["skipped"] for r in rows] == [step == BAD_STEP for step in range(7)]
        assert sum("val_loss" in r for r in rows) == 4
        assert all(predicted == there for predicted, there in ledger.values()), (name, ledger)
        assert {"all_gather", "exchange", "all_reduce"} == ledger.keys()
        if FORMS[name]["stage"] < 3:  # there evaluation gathers too
            assert ledger["all_gather"][1] == real and real[0] == 6 * 4  # updates, buckets
    for _, screen, _, _ in results[0].values():
        assert screen.count(": equal") == 3 and "DIFFERENT" not in screen


def one_gather_less(rank, folder):
    """The same where block 1's weights are gathered once, and then not any more."""
    gather, passed = transport.Collectives.all_gather, []

    def all_but_one(self, full, shard, group, what):
        if what == "block.1" and running():
            passed.append(what)
            if len(passed) > 1:
                return None
        return gather(self, full, shard, group, what)

    transport.Collectives.all_gather = all_but_one
    found = {}
    for name, flags in FORMS.items():
        passed.clear()
        found[name] = ledger_of(folder, name, flags | {"save_every": 0})  # a save would compare the replicas
    return found


def test_a_gather_that_is_deleted_is_seen(tmp_path):
    toy_files(tmp_path)
    add_val(tmp_path, "plain")
    results = run_ranks(2, one_gather_less, str(tmp_path), timeout=100)
    for name in FORMS:
        for ledger, _, _ in (found[name] for found in results):
            (calls, size), (less_calls, less_size) = ledger["all_gather"]
            assert less_calls < calls and less_size < size, name
            assert ledger["exchange"][0] == ledger["exchange"][1]
        lines = [line for line in results[0][name][1].splitlines() if "all_gather" in line]
        assert len(lines) == 1 and lines[0].endswith("DIFFERENT"), (name, results[0][name][1])
