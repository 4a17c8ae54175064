"""support/timeline.py: the drawings of train_pipe.py's schedules, and a schedule that is none."""

import pytest

import train_pipe
from support.flags import UserError
from support.timeline import draw, draw_all, most_in_flight, timeline
from train_pipe import schedule


def test_drawings_are_those_of_the_docstring():
    for name, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2)):
        assert draw(schedule, name, 4, 4, chunks).replace("\n", "\n    ") in train_pipe.__doc__


def test_draw():
    assert draw(schedule, "1f1b", 2, 2).splitlines() == [
        "1f1b: 2 stages, 2 micro-batches, idle 33.3% of the time",
        "  stage 0  F0F1 . .B0-- .B1--  holds 2",
        "  stage 1   .F0B0--F1B1-- . .  holds 1",
    ]
    assert "FaFb" in draw(schedule, "gpipe", 1, 12)  # micro-batches 10 and 11


def test_draw_all():
    three = [draw(schedule, "gpipe", 3, 6), draw(schedule, "1f1b", 3, 6), draw(schedule, "interleaved", 3, 6, 2)]
    assert draw_all(schedule, 3, 6, 2) == "\n".join(three)
    assert draw_all(schedule, 3, 4, 2).endswith("\ninterleaved: micro-batches must be a multiple of 3")
    assert "interleaved: 3 stages, 4 micro-batches" in draw_all(schedule, 3, 4, 1)
    for sizes in ((0, 4, 2), (4, 0, 2), (4, 4, 0)):
        with pytest.raises(UserError, match="--draw of . stages, . micro-batches, . chunks: allowed is 1 or more"):
            draw_all(schedule, *sizes)


@pytest.mark.parametrize("name, chunks", [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)])
@pytest.mark.parametrize("stages, micro_batches", [(1, 3), (2, 2), (3, 6), (4, 8)])
def test_timeline_keeps_order_and_dependencies(name, chunks, stages, micro_batches):
    rows = timeline(schedule, name, stages, micro_batches, chunks)
    assert [[(op, number) for _, op, number in row] for row in rows] == [
        schedule(name, s, stages, micro_batches, chunks) for s in range(stages)
    ]
    starts = {}
    for s, row in enumerate(rows):
        for (start, op, _), (following, _, _) in zip(row, row[1:]):
            assert following >= start + (1 if op == "F" else 2)
        for start, op, number in row:
            chunk, micro = divmod(number, micro_batches)
            starts[op, chunk * stages + s, micro] = start
    for (op, part, micro), start in starts.items():
        if op == "F" and part:
            assert start >= starts["F", part - 1, micro] + 1
        if op == "B" and part + 1 < stages * chunks:
            assert start >= starts["B", part + 1, micro] + 2
    assert max(starts.values()) + 2 == 3 * (micro_batches * chunks + stages - 1)  # idle (p-1) / (v m + p-1)


def test_deadlock():
    def backward_first(name, stage, *sizes):
        return [("F", 0), ("B", 0)] if stage else [("B", 0), ("F", 0)]

    with pytest.raises(ValueError, match="upside down, 2 stages, 1 micro-batches: every stage waits for another"):
        timeline(backward_first, "upside down", 2, 1)


def test_most_in_flight():
    assert most_in_flight([("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), ("B", 2)]) == 2
