"""Pipeline schedules drawn: who computes what and when, if a forward pass takes 1 unit of time and a backward pass 2.

A schedule is a function (name, stage, stages, micro_batches, chunks) -> [("F" | "B", number), ...]: what a stage does
in one step, in order; number = chunk * micro_batches + micro-batch, a chunk being a part of the model the stage holds.
"""

from collections.abc import Callable
from itertools import accumulate

from support.flags import UserError

Schedule = Callable[[str, int, int, int, int], list[tuple[str, int]]]
LENGTH = {"F": 1, "B": 2}


def most_in_flight(order: list[tuple[str, int]]) -> int:
    """Forward passes of which a stage holds the activations at once, at most."""
    return max(accumulate(1 if op == "F" else -1 for op, _ in order))


def timeline(
    schedule: Schedule, name: str, stages: int, micro_batches: int, chunks: int = 1
) -> list[list[tuple[int, str, int]]]:
    """By stage, (start, "F" | "B", number as in the schedule) of each pass.

    Raises ValueError when every unfinished stage waits for another: the schedule is a deadlock.
    """
    orders = [schedule(name, s, stages, micro_batches, chunks) for s in range(stages)]
    rows: list[list[tuple[int, str, int]]] = [[] for _ in orders]
    free = [0] * stages  # when a stage has finished what it has started
    end: dict[tuple[str, int, int], int] = {}  # of (pass, part of the model, micro-batch)
    while any(len(row) < len(order) for row, order in zip(rows, orders)):
        before = len(end)
        for s, (row, order) in enumerate(zip(rows, orders)):
            if len(row) == len(order):
                continue
            op, number = order[len(row)]
            chunk, micro = divmod(number, micro_batches)
            part = chunk * stages + s
            source = part - 1 if op == "F" else part + 1
            if 0 <= source < stages * chunks and (op, source, micro) not in end:
                continue
            start = max(free[s], end.get((op, source, micro), 0))
            free[s] = end[op, part, micro] = start + LENGTH[op]
            row.append((start, op, number))
        if len(end) == before:
            raise ValueError(f"{name}, {stages} stages, {micro_batches} micro-batches: every stage waits for another")
    return rows


def draw(schedule: Schedule, name: str, stages: int, micro_batches: int, chunks: int = 1) -> str:
    """The timeline as text: a unit of time is 2 characters, a forward F3, a backward B3-- of micro-batch 3 (10 is a).

    In a stage's further chunks they are G3, H3, ... and C3--, D3--, ...
    """
    rows = timeline(schedule, name, stages, micro_batches, chunks)
    units = rows[0][-1][0] + LENGTH["B"]  # the first stage's last backward ends the step
    lines = []
    for s, row in enumerate(rows):
        line = [" ."] * units
        for start, op, number in row:
            chunk, micro = divmod(number, micro_batches)
            label = ("FGHI" if op == "F" else "BCDE")[chunk % 4] + "0123456789abcdefghijklmnopqrstuvwxyz"[micro % 36]
            line[start : start + LENGTH[op]] = [label, "--"][: LENGTH[op]]
        held = most_in_flight([(op, number) for _, op, number in row])
        lines.append(f"  stage {s}  {''.join(line)}  holds {held}" + f"/{chunks}" * (chunks > 1))
    idle = 1 - 3 * micro_batches * chunks / units
    return "\n".join([f"{name}: {stages} stages, {micro_batches} micro-batches, idle {idle:.1%} of the time", *lines])


def draw_all(schedule: Schedule, stages: int, micro_batches: int, chunks: int) -> str:
    """GPipe, 1F1B and interleaved below each other. Raises UserError where there is nothing to draw."""
    if min(stages, micro_batches, chunks) < 1:
        what = f"{stages} stages, {micro_batches} micro-batches, {chunks} chunks"
        raise UserError(f"--draw of {what}: allowed is 1 or more")
    drawings = [draw(schedule, name, stages, micro_batches) for name in ("gpipe", "1f1b")]
    if chunks == 1 or micro_batches % stages == 0:
        drawings.append(draw(schedule, "interleaved", stages, micro_batches, chunks))
    else:
        drawings.append(f"interleaved: micro-batches must be a multiple of {stages}")
    return "\n".join(drawings)
