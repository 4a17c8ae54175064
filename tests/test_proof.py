"""The smallest useful part of `make proof`; `make soak` has each of its rows."""

import pytest
from proof import TO_AND_FROM, all_layouts, run_proof


def proved(names, ends, steps):
    follows, goes_on, fine = run_proof(names, ends, steps)
    assert fine, "\n".join(["", *follows, *goes_on])


def test_strategies_follow_plain_torch():
    """Those that have the least in common."""
    proved(["ZeRO-3, 2", "TP 2", "1f1b, 2", "3D, TP 2 x PP 2 x DP 1"], [], 4)


@pytest.mark.soak
def test_goes_on():
    proved([], ["ZeRO-3, offload, 2", "TP 2"], 4)


@pytest.mark.soak
@pytest.mark.parametrize("name", all_layouts())
def test_row(name):
    proved([name], [], 6)


@pytest.mark.soak
@pytest.mark.parametrize("source", TO_AND_FROM)
def test_column(source):
    """To three ranks of DDP, and back."""
    proved([], [source, TO_AND_FROM[1]], 4)
