"""The ring and the central way against torch's own all_reduce, and both halves' plans without any process."""

import hashlib
import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from harness import ROOT, run_ranks

import ring_allreduce
from ring_allreduce import (
    DTYPES,
    FLOATS,
    PIECE_BYTES,
    central_all_reduce,
    extra_bytes,
    fit_link,
    ring_all_reduce,
    ring_plan,
)
from support.flags import UserError

OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def numbers(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Different on every rank; integers over their whole range, so that sums overflow."""
    rng = torch.Generator().manual_seed(1000 * rank + numel)
    if dtype in FLOATS:
        return torch.randn(numel, generator=rng, dtype=torch.complex128 if dtype.is_complex else torch.float64).to(
            dtype
        )
    info = torch.iinfo(torch.uint8 if dtype == torch.bool else dtype)
    return (
        torch.randint(info.min, info.max, (numel,), generator=rng, dtype=torch.int64)
        .remainder_(2 if dtype == torch.bool else 2**62)
        .to(dtype)
    )


def check(x: torch.Tensor, expected: torch.Tensor, what: tuple, seen: list) -> None:
    """Equal to torch's result, integers in every bit; the bits go into seen, to be the same on all ranks."""
    if x.dtype in FLOATS:
        eps = torch.finfo(x.dtype).eps
        torch.testing.assert_close(x, expected, rtol=8 * eps, atol=32 * eps, msg=lambda m: f"{what}: {m}")
    else:
        assert torch.equal(x, expected), what
    seen.append((what, hashlib.sha256(x.contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()))


def allowed(dtype: torch.dtype, op: str) -> bool:
    return not (op == "avg" and dtype not in FLOATS) and not (op in ("max", "min") and dtype.is_complex)


def all_cases(rank: int, N: int) -> list:
    seen = []
    ways = {"ring": ring_all_reduce, "central": central_all_reduce}
    ways |= {
        f"ring {n}": lambda x, op, both=both: ring_all_reduce(x, op, both_ways=both)
        for n, both in (("one way", False), ("both", True))
    }
    cases = [
        (N + 1, dtype, op)
        for dtype in DTYPES
        for op in OPS
        if allowed(dtype, op) and (N < 5 or op == "sum" or dtype == torch.float32)
    ]
    cases += [
        (numel, dtype, "sum")
        for numel in (0, 1, N - 1, N, 1000, 1_000_003)
        for dtype in (torch.float32, torch.bfloat16, torch.int32)
    ]
    for k, (numel, dtype, op) in enumerate(cases):
        source = numbers(rank, numel, dtype)
        expected = source.clone()
        dist.all_reduce(expected, op=OPS[op])
        for name in (list(ways)[k % 4], list(ways)[(k + 1) % 4]):  # two of the four ways in turn
            x = source.clone()
            ways[name](x, op)
            check(x, expected, (name, N, numel, dtype, op), seen)

    source = numbers(rank, 7 * 12, torch.float32).view(7, 12)
    for name, way in ways.items():
        for view in (lambda t: t.t(), lambda t: t[:, ::2], lambda t: t[3:5], lambda t: t[2, 2]):
            x = source.clone()
            way(view(x), "sum")
            dense = view(source).clone(memory_format=torch.contiguous_format)
            dist.all_reduce(dense)
            check(view(x), dense, (name, "strides", N), seen)
            view(x).copy_(view(source))
            assert torch.equal(x, source), "something beside the view was touched"
    for _ in range(100 if N < 5 else 20):  # 7 ranks on 2 cores take 20 ms a call
        x = torch.full((5,), float(rank))
        ring_all_reduce(x)
        assert x.tolist() == [N * (N - 1) / 2] * 5

    leaf = torch.ones(3, requires_grad=True)
    ring_all_reduce(leaf)
    assert leaf.tolist() == [N] * 3 and leaf.grad_fn is None
    # several pieces per chunk, of unequal chunks, for both directions
    pieces = PIECE_BYTES["cpu"]
    PIECE_BYTES["cpu"] = 4 * 1000
    for numel in (N * 5000 + 1, 9999):
        for both in (False, True):
            x, expected = numbers(rank, numel, torch.float32), numbers(rank, numel, torch.float32)
            sent = ring_all_reduce(x, both_ways=both)
            dist.all_reduce(expected)
            check(x, expected, ("pieces", numel, both), seen)
            # 2(N-1) of the N chunks: all but the next one in the scatter, all but the one after that in the gather
            chunks = [4 * c.numel() for c in x.tensor_split(N)]
            if not both:
                assert sent == 2 * sum(chunks) - chunks[(rank + 1) % N] - chunks[(rank + 2) % N]
            total = torch.tensor(sent)
            dist.all_reduce(total)
            assert total == 2 * (N - 1) * 4 * numel, "together the ranks send every chunk 2(N-1) times"
    PIECE_BYTES["cpu"] = pieces
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(N * 100, dtype=dtype)
        assert ring_all_reduce(x) == 2 * (N - 1) * x.nbytes // N
        assert central_all_reduce(x) == x.nbytes * ((N - 1) if rank == 0 else 1)
    assert ring_all_reduce(torch.ones(N * 100, dtype=torch.bfloat16), fp32_partials=True) == (N - 1) * 100 * 6

    if N == 5:  # two groups at once, ranks in no order, without rank 4
        groups = [dist.new_group([3, 1, 0]), dist.new_group([2])]
        for way in (ring_all_reduce, central_all_reduce):
            x = torch.full((10,), float(rank + 1))
            if rank < 4:
                way(x, "sum", groups[rank == 2])
            assert x.tolist() == [{2: 3.0, 4: 5.0}.get(rank, 7.0)] * 10, (way, rank, x)
        seen.append("sub-groups")

    # refused before any communication: if a rank had sent anything, the all-reduce behind would get it
    wrong = [(d, "sum") for d in (torch.int16, torch.uint16, torch.uint32, torch.float8_e4m3fn)]
    wrong += [(torch.int32, "avg"), (torch.bool, "avg"), (torch.complex64, "max")]
    for way in (ring_all_reduce, central_all_reduce):
        for dtype, op in wrong:
            with pytest.raises(TypeError, match=str(dtype)):
                way(torch.ones(4).to(dtype), op)
        with pytest.raises(ValueError, match="sum, avg, max, min"):
            way(torch.ones(4), "mean")
        x = torch.tensor([float(rank)])
        way(x, "max")
        assert x.item() == N - 1
    return seen


@pytest.mark.parametrize("N", [1, 2, 3, 5, 7])
def test_equals_torch(N: int) -> None:
    first, *others = run_ranks(N, all_cases, N, timeout=180)
    assert len(first) > 50
    for rank, other in enumerate(others, 1):
        assert other == first, (
            f"rank {rank} holds other bits than rank 0: {[a[0] for a, b in zip(other, first, strict=True) if a != b]}"
        )


def narrow_sums(rank: int) -> list:
    seen = []
    # 1 + 7 x 2^-9: each term is half of bf16's last place at 1, so adding one by one in bf16 stays at 1
    exact = torch.full((64,), 1 + 7 * 2**-9)
    for both in (False, True):
        x = torch.full((64,), 1.0 if rank == 0 else 2**-9).bfloat16()
        ring_all_reduce(x, fp32_partials=True, both_ways=both)
        assert torch.equal(x, exact.bfloat16()), x
    x = torch.full((64,), 1.0 if rank == 0 else 2**-9).bfloat16()
    ring_all_reduce(x)
    assert not torch.equal(x, exact.bfloat16()), "bf16 partial sums should show their rounding here"
    for dtype in (torch.bfloat16, torch.float16):
        for op in ("sum", "avg"):
            x, exact = numbers(rank, 10_001, dtype), numbers(rank, 10_001, dtype).double()
            ring_all_reduce(x, op, fp32_partials=True)
            dist.all_reduce(exact, op=OPS[op])
            nearest = exact.to(dtype).view(torch.int16).int()
            apart = (x.view(torch.int16).int() - nearest).abs()[exact.abs() > torch.finfo(dtype).eps]
            assert apart.max() <= 1, f"{dtype} {op}: {apart.max()} ulp"
            check(x, exact.to(dtype), (dtype, op, "fp32 partials"), seen)
    x = torch.full((9,), 60000.0, dtype=torch.float16)
    ring_all_reduce(x, "avg", fp32_partials=True)
    assert x.tolist() == [60000.0] * 9, "the average fits fp16 though the sum does not"
    return seen


def test_narrow_dtypes_on_8_ranks() -> None:
    first, *others = run_ranks(8, narrow_sums, timeout=180)
    assert all(other == first for other in others), "the ranks' bits differ"


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("N", [1, 2, 3, 4, 7, 8])
def test_plans(N: int, both: bool) -> None:
    """Played on sets: who was added to which chunk. Each contribution counts once, each send meets its receive."""
    scatter = [ring_plan(r, N, both) for r in range(N)]
    gather = [ring_plan(r, N, both, gather=True) for r in range(N)]
    held = [[[r] for _ in range(N)] for r in range(N)]  # held[rank][chunk] -> ranks summed in it
    for plans, adds in ((scatter, True), (gather, False)):
        assert len({len(plan) for plan in plans}) == 1 and len(plans[0]) == (N // 2 if both else N - 1)
        assert all(sum(len(hops) for hops in plan) == N - 1 for plan in plans)
        for step in range(len(plans[0])):
            before = [[list(c) for c in rank] for rank in held]
            sends = sorted((r, to, c) for r in range(N) for to, c, _, _ in plans[r][step])
            assert sends == sorted((source, r, c) for r in range(N) for _, _, source, c in plans[r][step])
            for source, to, c in sends:
                held[to][c] = (held[to][c] if adds else []) + before[source][c]
        if adds:
            assert all(sorted(held[r][(r + 1) % N]) == list(range(N)) for r in range(N))
    assert all(sorted(chunk) == list(range(N)) for rank in held for chunk in rank)
    if not both:
        assert scatter[0] == [[(1, -s % N, N - 1, (-s - 1) % N)] for s in range(N - 1)]


def scratch_made(rank: int, N: int) -> list[tuple[int, int]]:
    """Bytes of receive buffers that one call made, and what extra_bytes says it would."""
    found = []
    for numel, dtype in (
        (1000, torch.float32),
        (1_000_003, torch.float64),
        (40_000_000 // N, torch.float32),
        (5000, torch.bfloat16),
    ):
        ring_allreduce.SCRATCH.clear()
        partials = dtype == torch.bfloat16
        ring_all_reduce(torch.ones(numel, dtype=dtype), fp32_partials=partials)
        made = sum(t.nbytes for t in ring_allreduce.SCRATCH.values()) + (4 * numel if partials else 0)
        found.append((made, extra_bytes("ring", numel, dtype.itemsize, N, "cpu", partials)))
    return found


@pytest.mark.parametrize("N", [1, 2, 3])
def test_memory_of_the_ring_is_predicted(N: int) -> None:
    for found in run_ranks(N, scratch_made, N):
        assert [made for made, _ in found] == [predicted for _, predicted in found] and (found[2][0] > 0) == (N > 1)


def test_fit_finds_the_link() -> None:
    alpha, beta, N = 20e-6, 3e9, 5
    size = [1e4, 1e6, 6.4e7]
    found = fit_link(size, [2 * (N - 1) * alpha + 2 * (N - 1) / N * s / beta for s in size], N)
    assert found == pytest.approx((alpha, beta, 0), rel=1e-6, abs=1e-9)
    with pytest.raises(UserError, match="--sizes"):
        fit_link(size, [2e-3, 1e-3, 1e-3], N)


def run(*args: str, launcher: tuple = ()) -> subprocess.CompletedProcess:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, *launcher, str(ROOT / "ring_allreduce.py"), *args],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_script(tmp_path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3")
    done = run("--sizes", "0.01,32", "--device", "cpu", "--out", str(tmp_path / "link.json"), launcher=launcher)
    assert done.returncode == 0, done.stderr
    assert "on 8 ranks" in done.stdout and "on 64 ranks" in done.stdout
    link = json.loads((tmp_path / "link.json").read_text())
    assert link["world"] == 3 and link["backend"] == "gloo" and link["alpha_s"] >= 0 and link["beta_bytes_s"] > 0
    assert [row["bytes"] for row in link["rows"]] == [10_000, 32_000_000]
    assert all(row[f"{way}_s"] > 0 for row in link["rows"] for way in ("central", "ring", "both_ways", "backend"))


@pytest.mark.parametrize(
    "args, words",
    [
        ((), "nobody to talk to"),
        (("--sizes", "4"), "two or more"),
        (("--sizes", "1,x"), "two or more"),
        (("--dtype", "int16"), "bfloat16"),
        (("--out", "/no/such/folder/link.json"), "/no/such/folder"),
    ],
)
def test_script_says_what_is_wrong(args: tuple, words: str) -> None:
    done = run(*args)
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, done
