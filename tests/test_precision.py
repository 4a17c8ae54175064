"""Number formats and skipped steps: fp16 loss scaling, one rank's NaN, sums in fp32, which stages share their bits."""

import contextlib
import importlib
import io
import json

import pytest
import torch
from harness import assert_follows, final_weights, run_ranks, toy_files, train

from model import GPT
from optim import LossScaler, lr_at
from support import prepare
from support.flags import DTYPES, UserError
from support.meter import peak_flops
from train_zero import Config

NAME = "blocks.1.wq.weight"  # the parameter whose gradient is spoilt; on two pipeline stages it is rank 1's


def spoil(rank: int, bad_rank: int, steps: set[int] | None, value: float) -> None:
    """A GPT of this process gets `value` into one element of a gradient, in these steps (None: all) on one rank."""
    set_param = GPT.set_param

    def faulty(self, name, tensor):
        param, passes = set_param(self, name, tensor), [0]

        def hook(grad):
            passes[0] += 1
            if steps is None or passes[0] - 1 in steps:
                grad = grad.clone()
                grad.view(-1)[3] = value
            return grad

        if name == NAME and rank == bad_rank:
            param.register_hook(hook)
        return param

    GPT.set_param = faulty


def runs(rank, folder, variants, fault=None):
    """{name: (script, flags)} -> by name the rows, what was printed, and the message of the UserError it ended with."""
    if fault:
        spoil(rank, *fault)
    found = {}
    for name, (script, flags) in variants.items():
        config = importlib.import_module(script).Config
        for key in [key for key in flags if key not in config.__dataclass_fields__]:  # --scale-... are train_zero's
            assert hasattr(config, key)
            setattr(config, key, flags.pop(key))
        screen, error, rows = io.StringIO(), None, []
        with contextlib.redirect_stdout(screen):
            try:
                rows = train(rank, script, folder, {name: flags})[name]
            except UserError as problem:
                error = str(problem)
        found[name] = rows, screen.getvalue(), error
    return found


def everywhere(**flags):
    """The same flags for every strategy on 2 ranks, the global batch of 12 in one pass."""
    more = {"train_ddp": {"micro_batch": 6}, "train_zero": {"micro_batch": 6, "stage": 3}}
    more |= {"train_tp": {"micro_batch": 12}, "train_pipe": {"micro_batch": 12}}
    more |= {"train_3d": {"micro_batch": 12, "tp": 1, "pp": 2}}
    return {script: (script, flags | own) for script, own in more.items()}


def state(folder, name, step):
    """Every tensor of one checkpoint."""
    path = folder / name / "ckpt" / f"step_{step:08d}"
    alone = folder / f"{name}-{step}" / "ckpt"  # final_weights() looks for the newest
    alone.mkdir(parents=True)
    (alone / path.name).symlink_to(path)
    return final_weights(alone.parent)


# --- one rank's overflow is everyone's --------------------------------------------------------------------------------


def test_nan_in_one_gradient_of_one_rank(tmp_path):
    """C8: at step 7 all skip, nothing moves, and no NaN is ever saved; in every strategy."""
    toy_files(tmp_path)
    variants = everywhere(dtype="float32", steps=9, save_every=1, keep_last=20)
    results = run_ranks(2, runs, str(tmp_path), variants, (1, {7}, float("nan")), timeout=200)
    for script in variants:
        for rows, _, _ in (result[script] for result in results):
            assert [r["skipped"] for r in rows] == [s == 7 for s in range(9)]
            assert rows[7]["grad_norm"] is None and rows[8]["lr"] == rows[7]["lr"] != rows[6]["lr"]
        before, after, later = (state(tmp_path, script, s) for s in (7, 8, 9))
        for name, tensor in before.items():
            assert torch.equal(tensor, after[name]), f"{script}: {name} moved in the skipped step"
            assert later[name].isfinite().all(), f"{script}: {name}"
        assert not torch.equal(after[NAME], later[NAME])
        assert f"gradient not finite in {NAME}" in results[0][script][1]
    assert f"{NAME} on rank 1" in results[0]["train_ddp"][1]


def test_float16_overflow_on_rank_1_only(tmp_path):
    """D1, D5: the scale halves once everywhere, lr and updates wait; a resumed run goes on with scale and count."""
    toy_files(tmp_path)
    flags = dict(dtype="float16", steps=9, save_every=5, keep_last=9, scale_window=3, scale_power=10)
    two = {script: everywhere(**flags)[script] for script in ("train_ddp", "train_zero")}
    results = run_ranks(2, runs, str(tmp_path), two, (1, {3}, float("inf")), timeout=200)
    again = {
        s: (s, own | {"resume": f"{tmp_path}/{s}/ckpt/step_00000005", "out": f"{tmp_path}/{s}-again"})
        for s, (_, own) in two.items()
    }
    continued = run_ranks(2, runs, str(tmp_path), again, timeout=100)[0]
    schedule = Config(lr=1e-3, min_lr=1e-4, warmup_steps=5, steps=9)
    for script in two:
        rows = results[0][script][0]
        assert [r["skipped"] for r in rows] == [s == 3 for s in range(9)]
        assert [r["loss_scale"] for r in rows] == [1024.0] * 4 + [512.0] * 4 + [
            1024.0
        ]  # doubled after the window and one more
        assert [r["lr"] for r in rows] == [lr_at(update, schedule) for update in (0, 1, 2, 3, 3, 4, 5, 6, 7)]
        shared = [
            [(r["loss"], r["grad_norm"], r["lr"], r["loss_scale"]) for r in result[script][0]] for result in results
        ]
        assert shared[0] == shared[1]
        assert [(r["loss"], r["grad_norm"], r["lr"], r["loss_scale"]) for r in continued[script][0]] == shared[0][5:]


def test_endless_overflow_ends_and_names_who(tmp_path):
    """D3: once the scale is at its minimum, 8 more overflows end the run, the same words on every rank."""
    toy_files(tmp_path)
    variants = everywhere(dtype="float16", steps=30, scale_power=2, save_every=0)
    results = run_ranks(2, runs, str(tmp_path), variants, (1, None, float("inf")), timeout=200)
    for script in variants:
        messages = [result[script][2] for result in results]
        assert messages[0] == messages[1] and "8 steps in a row at loss scale 1" in messages[0], messages
        assert f"{NAME} on rank 1" in messages[0], script
        assert results[0][script][1].count("all ranks skip this step") == 2 + 8  # 4 -> 2 -> 1, then 8


@pytest.mark.parametrize("window, hysteresis, minimum", [(1, 1, 1.0), (2, 1, 4.0), (3, 2, 1.0), (5, 3, 0.25)])
def test_scaler_follows_deepspeed(window, hysteresis, minimum):
    """The loss scale after each of 400 steps, against a restatement of the rule DeepSpeed documents and runs."""
    scaler = LossScaler(
        Config(dtype="float16", scale_power=6, scale_window=window, scale_hysteresis=hysteresis, scale_min=minimum)
    )
    scaler.patience = 10**6
    scale, last_overflow, left = 64.0, -1, hysteresis
    draw = torch.Generator().manual_seed(window)
    for step in range(400):
        overflow = bool(torch.rand(1, generator=draw) < 0.2)
        scaler.update(not overflow, "x")
        if overflow:
            if left == 1:
                scale = max(scale / 2, minimum)
            else:
                left -= 1
            last_overflow = step
        else:
            stable = step - last_overflow - 1
            if stable > 0 and stable % window == 0:
                scale, left = scale * 2, hysteresis
        assert scaler.scale == scale, step


def test_scaler_state_survives():
    """Every counter: a scaler loaded half way goes on as the one it was saved from."""
    cfg = Config(dtype="float16", scale_power=6, scale_window=3, scale_hysteresis=2)
    verdicts = [True, True, False, True, True, False, True, True, True, True, True, False, True] * 3
    one = LossScaler(cfg)
    for i, finite in enumerate(verdicts):
        other = LossScaler(cfg)
        other.load(json.loads(json.dumps(one.state())))
        for later in verdicts[i:]:
            other.update(later, "x")
        one.update(finite, "x")
        ahead = LossScaler(cfg)
        ahead.load(one.state())
        for later in verdicts[i + 1 :]:
            ahead.update(later, "x")
        assert ahead.state() == other.state()


def test_clip_comes_after_unscale(tmp_path):
    """C9: clip 0.1 always active; the scale changes nothing but what underflows in float16."""
    toy_files(tmp_path)
    flags = dict(dtype="float16", micro_batch=12, steps=8, save_every=0)
    scripts = ("train_ddp", "train_zero")
    variants = {
        f"{script} {power}": (script, flags | {"loss_scale": 2.0**power}) for script in scripts for power in (0, 8, 16)
    }
    results = run_ranks(1, runs, str(tmp_path), variants, timeout=100)[0]
    for script in scripts:
        for power in (0, 8):
            for ours, theirs in zip(results[f"{script} {power}"][0], results[f"{script} 16"][0]):
                assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.02)
                assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)


# --- what is summed in which format -----------------------------------------------------------------------------------


def gradients_of_a_step(rank, folder, variants):
    """By variant, the first step's gradients of NAME: each micro-batch's as computed, and the sum before its update."""
    import train_ddp

    made, summed = [], []
    set_param = GPT.set_param

    def watched(self, name, tensor):
        param = set_param(self, name, tensor)
        if name == NAME:
            param.register_hook(lambda grad: made.append(grad.clone()))
        return param

    GPT.set_param = watched
    finish = train_ddp.DataParallel.finish

    def watched_finish(self):
        square, bucket = finish(self), self.buckets["block.1"]
        if self.shared:  # this rank's share of the sum, which lies as its share of the masters does
            piece = next(part.piece(t, at) for n, part, t, at in bucket.parts(bucket.grad_shard) if n == NAME)
            assert [offsets for offsets, _ in piece.boxes] == [offsets for offsets, _ in self.pieces()[NAME].boxes]
            summed.append([(offsets, box.clone()) for offsets, box in piece.boxes])
        else:
            summed.append(bucket.view(bucket.grad, NAME).clone())
        return square

    train_ddp.DataParallel.finish = watched_finish
    found = {}
    for name, (script, flags) in variants.items():
        made.clear()
        train(rank, script, folder, {name: flags})
        found[name] = list(made), summed.pop()
    return found


def test_bf16_gradients_are_added_in_fp32(tmp_path):
    """D7: 16 micro-batches on 2 ranks, to the last bit. In bf16 the sum would be another."""
    toy_files(tmp_path)
    flags = dict(dtype="bfloat16", global_batch=32, micro_batch=1, steps=1, save_every=0)
    variants = {"ddp": ("train_ddp", flags)} | {f"zero {s}": ("train_zero", flags | {"stage": s}) for s in (1, 2, 3)}
    zeroth, first = run_ranks(2, gradients_of_a_step, str(tmp_path), variants, timeout=100)
    for name in variants:
        (made0, sum0), (made1, sum1) = zeroth[name], first[name]
        assert len(made0) == 16 and made0[0].dtype == torch.bfloat16
        sums = []
        for dtype in (torch.float32, torch.bfloat16):
            if name in ("ddp", "zero 1"):  # each rank over its micro-batches, then over the ranks
                sums.append(sum(t.to(dtype) for t in made0) + sum(t.to(dtype) for t in made1))
            else:  # every micro-batch over the ranks
                sums.append(sum(a.to(dtype) + b.to(dtype) for a, b in zip(made0, made1)))
        expected, in_bf16 = sums
        assert not torch.equal(in_bf16.float(), expected)
        if name == "ddp":
            assert torch.equal(sum0, expected) and torch.equal(sum1, expected)
            continue
        for (row, column), box in sum0 + sum1:
            assert torch.equal(box, expected[row : row + box.shape[0], column : column + box.shape[1]]), name
        assert sum(box.numel() for _, box in sum0 + sum1) == expected.numel()


def test_where_nothing_travels_nothing_is_rounded(tmp_path):
    """--wire bf16 on one process, and where each rank is the only one to hold its part: the bits of an fp32 wire."""
    toy_files(tmp_path, n_layer=4)
    flags = dict(dtype="float32", micro_batch=3, steps=3, save_every=0)
    kinds = {"ddp": ("train_ddp", flags)} | {f"zero {s}": ("train_zero", flags | {"stage": s}) for s in (0, 1, 2)}
    for ranks, scripts in ((1, kinds), (2, {"pipe": ("train_pipe", flags)})):
        variants = {
            f"{kind} {wire}": (script, own | {"wire": wire})
            for kind, (script, own) in scripts.items()
            for wire in ("fp32", "bf16")
        }
        results = run_ranks(ranks, runs, str(tmp_path), variants, timeout=100)[0]
        for kind in scripts:
            assert [[r["grad_norm"] for r in results[f"{kind} {wire}"][0]] for wire in ("fp32", "bf16")] == [
                [r["grad_norm"] for r in results[f"{kind} fp32"][0]]
            ] * 2, kind


def test_bf16_wire(tmp_path):
    """--wire bf16: losses stay within 1e-3 of fp32's over 20 steps, and the banner says which it is."""
    toy_files(tmp_path)
    flags = dict(dtype="float32", micro_batch=3, steps=20, save_every=0)
    kinds = {"ddp": ("train_ddp", flags)} | {f"zero {s}": ("train_zero", flags | {"stage": s}) for s in (1, 2)}
    variants = {
        f"{kind} {wire}": (script, own | {"wire": wire})
        for kind, (script, own) in kinds.items()
        for wire in ("fp32", "bf16")
    }
    results = run_ranks(2, runs, str(tmp_path), variants, timeout=100)[0]
    for name, (_, screen, _) in results.items():
        assert f"gradients travel in {DTYPES[name[-4:]]}" in screen
    gaps = {
        k: max(abs(a["loss"] - b["loss"]) for a, b in zip(results[f"{k} fp32"][0], results[f"{k} bf16"][0]))
        for k in kinds
    }
    assert all(0 < gap < 1e-3 for gap in gaps.values()), gaps


# --- which bits are equal ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    toy_files(folder)
    flags = dict(dtype="float32", micro_batch=12, steps=10)
    rows = run_ranks(1, train, "train_ddp", str(folder), {"one": flags}, timeout=100)[0]["one"]
    return rows, final_weights(folder / "one")


@pytest.mark.parametrize("world_size", [2, 3])
def test_float32(world_size, one_process, tmp_path):
    """10 steps within 1e-5 of one process; stages 2 and 3 bit-equal, 1 too without accumulation; offload or not."""
    toy_files(tmp_path)
    whole = dict(dtype="float32", micro_batch=12 // world_size, steps=10)
    parts = whole | {"micro_batch": 2}
    zero = {
        f"{kind} {stage} {offload}": ("train_zero", flags | {"stage": stage, "offload": offload})
        for kind, flags in (("whole", whole), ("parts", parts))
        for stage in (1, 2, 3)
        for offload in ("none", "optimizer")
    }
    ddp = {"ddp": ("train_ddp", whole), "ddp parts": ("train_ddp", parts)}
    rows = {
        name: result[0]
        for name, result in run_ranks(world_size, runs, str(tmp_path), zero | ddp, timeout=200)[0].items()
    }
    weights = {name: final_weights(tmp_path / name) for name in rows}
    for name in rows:
        assert_follows(rows[name], one_process[0], weights[name], one_process[1], 1e-5)
    for kind in ("whole", "parts"):
        reference = f"{kind} 2 none"
        for name in [n for n in zero if n.startswith(kind) and not n.startswith("parts 1")]:
            assert [(r["loss"], r["grad_norm"]) for r in rows[name]] == [
                (r["loss"], r["grad_norm"]) for r in rows[reference]
            ], name
            for tensor, value in weights[name].items():
                assert torch.equal(value, weights[reference][tensor]), (name, tensor)
    for tensor, value in weights["parts 1 optimizer"].items():
        assert torch.equal(value, weights["parts 1 none"][tensor]), tensor


# --- weight decay -----------------------------------------------------------------------------------------------------


def test_weight_decay_hits_the_matrices(tmp_path):
    """G1: with zero gradients a step shrinks every 2-D tensor by lr * weight decay, and nothing else, everywhere."""
    toy_files(tmp_path)
    ids = {"ids": [i % 61 for i in range(12 * 32 + 1)], "mask": [0] * (12 * 32 + 1)}
    (tmp_path / "unmarked.jsonl").write_text(json.dumps(ids) + "\n")
    prepare.prepare(str(tmp_path / "none"), [str(tmp_path / "unmarked.jsonl")], vocab_size=61)
    step = dict(data=f"{tmp_path}/none", micro_batch=6, steps=1, lr=1e-3, warmup_steps=0, weight_decay=10.0)
    variants = {"ddp": ("train_ddp", step), "tp": ("train_tp", step), "pipe": ("train_pipe", step)}
    variants |= {f"zero {s}": ("train_zero", step | {"stage": s}) for s in (0, 1, 2, 3)}
    variants["offload"] = ("train_zero", step | {"offload": "optimizer"})
    run_ranks(2, runs, str(tmp_path), variants | {"initial": ("train_ddp", step | {"weight_decay": 0.0})}, timeout=100)
    initial = final_weights(tmp_path / "initial")
    for name in variants:
        for tensor, value in final_weights(tmp_path / name).items():
            if tensor.startswith("exp_avg"):
                assert not value.any()
            else:
                shrunk = initial[tensor] * (1 - 1e-3 * 10.0 * (value.dim() >= 2))
                torch.testing.assert_close(
                    value, shrunk, rtol=1e-15, atol=0, msg=lambda m, n=name, t=tensor: f"{n}, {t}: {m}"
                )


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA H200", 989e12), ("NVIDIA GH200 480GB", 989e12), ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H200 NVL", None), ("NVIDIA GB200", None), ("NVIDIA GeForce RTX 3090 Ti", None), ("Tesla T4", None),
    ],
)  # fmt: skip
def test_no_mfu_rather_than_a_wrong_one(name, peak):
    assert peak_flops(name) == peak
