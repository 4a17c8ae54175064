"""The step clock that adds up to 100 %, the ledger of bytes, and the log.

One marker serves every instrument:

    with at("all_reduce", "block.7", bucket.nbytes):
        work = dist.all_reduce(bucket, async_op=True)

It charges the time inside to communication, counts the bytes handed over, and under --check-collectives compares with
the other ranks what each is about to call. With no meter running it does nothing.

The clock is a list of marks; a mark says to what the time from here on belongs, so the parts of a step sum to the step.
On a GPU the marks are events on the compute stream: "communication" is then the time the stream stood waiting, not the
time a transfer took; what ran behind compute costs nothing and is not shown.
"""

import json
import math
import os
import re
import time
from collections import Counter, defaultdict
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from support.flags import UserError, put
from support.run import GRACE, Run, make_group

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "exchange", "send", "recv")
PARTS = {  # operation -> part of the step's time
    **dict.fromkeys((*COLLECTIVES, "wait"), "communication"),
    "data": "data",
    **dict.fromkeys(("forward", "backward"), "compute"),
    **{part: part for part in ("bubble", "optimizer", "checkpoint", "eval", "other")},
}
BF16_PEAK = {  # dense bf16 FLOP/s by the maker's data sheet, looked up by a part of the device's name, first match
    "B200": 2250e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "RTX A6000": 155e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}

_meter: "Meter | None" = None


@contextmanager
def at(op: str, what: str = "", nbytes: int = 0):
    """Mark what runs inside. op: a key of PARTS; what: the unit; nbytes: the payload handed to a collective."""
    meter = _meter
    if meter is None:
        yield
        return
    meter._enter(op, what, nbytes)
    try:
        yield
    finally:
        meter._leave()


def activity() -> tuple[int, int, str, str, int] | None:
    """For the watchdog: a number that changes as long as the loop moves, the step, the innermost marker's operation and
    unit, and how many collectives there were; None outside a loop."""
    return _meter and (_meter.marked, _meter.step, *_meter.doing, _meter.sequence)


def running() -> bool:
    """Whether a training loop is under way in this process."""
    return _meter is not None


def say(text: str) -> None:
    """A line on the screen, from rank 0 only."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        put(text)


def peak_flops(name: str) -> float | None:
    """bf16 peak of the GPU of this name; None for hardware the table does not know: no MFU rather than a wrong one."""
    variant = r"\b(?! (?:NVL|PCIe|Ti|D|Laptop))"  # whole words: an H200 NVL or a GB200 is another card
    return next((peak for part, peak in BF16_PEAK.items() if re.search(rf"\b{part}{variant}", name)), None)


class Meter:
    """Measures a run while it is entered; log() closes a step and returns its row, summary() closes the run."""

    def __init__(self, run: Run, flops_per_token: int, first_step: int = 0):
        self.run, self.flops_per_token, self.step = run, flops_per_token, first_step
        self.cuda = run.device.type == "cuda"
        self.peak = peak_flops(torch.cuda.get_device_name(run.device)) if self.cuda else None
        self.rows: list[dict] = []
        self.updates = 0  # steps that were not skipped
        # the ledger, (operation, "calls" or "bytes"): of the run, and of this step, which counts if it is not skipped
        self.traffic: Counter[tuple[str, str]] = Counter()
        self.step_traffic: Counter[tuple[str, str]] = Counter()
        self.sequence = 0  # collectives so far
        self.marked, self.doing = 0, ("other", "")
        self.file = self.profiler = None
        if run.cfg.check_collectives:
            ranks = dist.get_process_group_ranks(run.world or dist.group.WORLD)
            stages = [run.place(rank).stage for rank in range(run.world_size)]
            self.checks = make_group(ranks, stages, "check", run.cfg.hang_timeout + GRACE, "gloo", run.control)
        self.lost_log = False  # it could not be written

    def __enter__(self) -> "Meter":
        global _meter
        self.outer, _meter = _meter, self
        self.stream = torch.cuda.current_stream(self.run.device) if self.cuda else None
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.run.device)
        self.stack = ["other"]  # the operations we are in, outermost first
        self.pool: list[torch.cuda.Event] = []
        self.marks: list[tuple[str, object]] = []
        self._mark("other")
        if self.run.cfg.profile:
            plan = torch.profiler.schedule(wait=3, warmup=1, active=1, repeat=1)  # the fifth step: compiled and warm
            self.profiler = torch.profiler.profile(schedule=plan, on_trace_ready=self._trace)
            self.profiler.start()
        return self

    def __exit__(self, *exc) -> None:
        global _meter
        _meter = self.outer
        if self.profiler:
            self.profiler.stop()
        if self.file:
            self.file.close()

    def _mark(self, part: str) -> None:
        if self.cuda:
            now = self.pool.pop() if self.pool else torch.cuda.Event(enable_timing=True)
            now.record(self.stream)
        else:
            now = time.perf_counter()
        self.marks.append((part, now))

    def _enter(self, op: str, what: str, nbytes: int) -> None:
        self.marked, self.doing = self.marked + 1, (op, what)
        # with offload, updates are made in any forward pass, an evaluation's too
        updating = "optimizer" in (op, *self.stack)
        if "eval" in self.stack and not updating:
            op = "eval"  # what evaluation sends is not part of a step
        # what a collective of ours sends is not handed over once more
        if op in COLLECTIVES and not any(outer in COLLECTIVES for outer in self.stack):
            ledger = self.traffic if updating else self.step_traffic
            self.sequence += 1
            ledger[op, "calls"] += 1
            ledger[op, "bytes"] += nbytes
            if self.run.cfg.check_collectives:
                self._agree(op, what, nbytes)
        self.stack.append(op)
        self._mark(PARTS[op])

    def _leave(self) -> None:
        self.stack.pop()
        self.marked, self.doing = self.marked + 1, (self.stack[-1], "")
        self._mark(PARTS[self.stack[-1]])

    def _agree(self, op: str, what: str, nbytes: int) -> None:
        """Ranks tell what they are about to call; the first that differs is the bug, before it sums garbage.

        All ranks that should call the same: those of a pipeline stage.
        """
        run, all_of_them = self.run, [None] * dist.get_world_size(self.checks)
        dist.all_gather_object(all_of_them, (run.rank, self.sequence, op, what, nbytes), group=self.checks)
        if len({call[1:] for call in all_of_them}) > 1:
            calls = "; ".join(f"rank {r}: #{n} {op} {what} {size} bytes" for r, n, op, what, size in all_of_them)
            raise UserError(f"the ranks call different collectives: {calls}")

    def _parts(self) -> dict[str, float]:
        """Seconds by part since the last call; they sum to the whole by construction."""
        self._mark(PARTS[self.stack[-1]])
        if self.cuda:
            torch.cuda.synchronize(self.run.device)
        parts: dict[str, float] = defaultdict(float)
        for (part, a), (_, b) in zip(self.marks, self.marks[1:], strict=False):
            parts[part] += a.elapsed_time(b) / 1e3 if self.cuda else b - a
        self.pool += [mark for _, mark in self.marks[:-1]] if self.cuda else []
        self.marks = self.marks[-1:]
        return parts

    def peak_bytes(self) -> int:
        """Peak memory of this rank so far: the allocator's on a GPU, the process's resident set on a CPU."""
        if self.cuda:
            return torch.cuda.max_memory_allocated(self.run.device) + self.run.outside
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def log(
        self, step: int, loss: float, norm: float | None, lr: float, tokens: int, scale: float, skipped: bool, **more
    ) -> dict:
        """Close a step: its row goes to log.jsonl (all digits, null for what is not finite), at times to the screen.

        norm None: not finite, the step was skipped. tokens: sequence positions of the global batch.
        """
        self.step = step + 1
        parts = self._parts()
        seconds = sum(parts.values())
        if not skipped:
            self.updates += 1
            self.traffic += self.step_traffic
        self.step_traffic.clear()
        # a step that also evaluated or saved is not a slower step: those seconds stand beside, not in the rate
        training = seconds - parts["eval"] - parts["checkpoint"]
        rate = tokens / training
        mfu = rate / self.run.world_size * self.flops_per_token / self.peak if self.peak else None
        row = {"step": step, "loss": loss, "grad_norm": norm, "lr": lr, "tokens": tokens, "tok_s": rate}
        row |= {"tok_s_gpu": rate / self.run.world_size, "step_ms": training * 1e3, "mfu": mfu}
        row |= {"peak_gb": self.peak_bytes() / 1e9, "loss_scale": scale, "skipped": skipped}
        row |= {f"{part}_ms": parts[part] * 1e3 for part in dict.fromkeys(PARTS.values())} | more
        self.rows.append(row)
        if self.profiler:
            self.profiler.step()
        if self.run.rank == 0:
            self._write(row)
            if step % self.run.cfg.log_every == 0 or step + 1 == self.run.cfg.steps or skipped or "val_loss" in more:
                self._print(row)
        return row

    def _trace(self, profiler: torch.profiler.profile) -> None:
        """--profile: one step for chrome://tracing, and the kernels that took longest."""
        folder = Path(self.run.out, "trace")
        folder.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"rank-{self.run.rank}.json.gz"))
        order = "self_device_time_total" if self.cuda else "self_cpu_time_total"
        say(profiler.key_averages().table(sort_by=order, row_limit=16, max_name_column_width=100))

    def _write(self, row: dict) -> None:
        if self.run.out is None or self.lost_log:
            return
        # JSON knows no NaN and no Infinity
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        try:
            if self.file is None:
                path = Path(self.run.out, "log.jsonl")
                drop_rows(path, row["step"])
                self.file = open(path, "ab", buffering=0)  # a killed run loses no row
            self.file.write((json.dumps(finite, allow_nan=False) + "\n").encode())
        except OSError as problem:
            self.lost_log = True
            say(f"warning: log.jsonl gets no more rows, training goes on: {problem}")

    def _print(self, row: dict) -> None:
        recent = sorted(r["step_ms"] for r in self.rows[-20:])
        left = int((self.run.cfg.steps - 1 - row["step"]) * recent[len(recent) // 2] / 1e3)
        norm = "norm not finite: skipped" if row["grad_norm"] is None else f"norm {row['grad_norm']:.3f}"
        words = [f"step {row['step']:5d}/{self.run.cfg.steps}  loss {row['loss']:.4f}  {norm}  lr {row['lr']:.2e}"]
        words += [f"{row['tok_s']:,.0f} tok/s  {row['step_ms']:.0f} ms"]
        words += [f"mfu {row['mfu']:.1%}"] if row["mfu"] is not None else []
        words += [f"{row['peak_gb']:.1f} GB"]
        if len(self.rows) > 1:  # the first step compiles
            words += [f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} left"]
        words += [f"val {row['val_loss']:.4f}"] if "val_loss" in row else []
        say("  ".join(words))

    def compare(self, predicted: list[tuple[str, str, int]]) -> dict[str, tuple[tuple[int, int], tuple[int, int]]]:
        """Operation -> (calls, bytes) of all updates so far, as predicted and as counted where the bytes moved.

        predicted: the transfers of one step, (operation, unit, payload bytes) each.
        """
        found = {}
        for op in dict.fromkeys([op for op, _, _ in predicted] + [op for op, _ in self.traffic]):
            sizes = [size for o, _, size in predicted if o == op]
            expected = self.updates * len(sizes), self.updates * sum(sizes)
            found[op] = expected, (self.traffic[op, "calls"], self.traffic[op, "bytes"])
        return found

    def summary(self, memory: dict[str, int], traffic: list[tuple[str, str, int]]) -> None:
        """The closing lines: where the time went, and predicted beside measured.

        memory: predicted bytes by term; traffic: as compare() takes it.
        """
        differs = any(expected != counted for expected, counted in self.compare(traffic).values())
        rows = self.rows[min(2, len(self.rows) - 1) :]  # the first steps compile and warm up
        split = {part: sum(r[f"{part}_ms"] for r in rows) for part in dict.fromkeys(PARTS.values())}
        everyones = self.run.everyone((differs, self.peak_bytes(), split))
        ranks, splits = [(differs, peak) for differs, peak, _ in everyones], [split for *_, split in everyones]
        if not rows or self.run.rank:
            return
        shares = {part: ms / sum(split.values()) for part, ms in split.items()}
        say("time: " + ", ".join(f"{part} {share:.1%}" for part, share in shares.items() if share >= 0.0005))
        for line in advice(splits, self.run) if len(rows) > 2 else []:
            say(f"warning: {line}")
        rates = sorted(r["tok_s_gpu"] for r in rows)
        say(f"rate: median {rates[len(rates) // 2]:,.0f} tok/s per process, {rates[0]:,.0f} to {rates[-1]:,.0f}")
        n = self.updates
        for op, (expected, counted) in self.compare(traffic).items() if n else ():
            calls, size = (number // n for number in expected)
            verdict = "equal" if expected == counted else "DIFFERENT"
            found = f"in {n} steps {counted[0]} calls, {counted[1]:,} bytes: {verdict}"
            say(f"{op}: {calls} calls, {size:,} bytes a step predicted; {found}")
        if wrong := [rank for rank, (differs, _) in enumerate(ranks) if differs]:
            say(f"DIFFERENT from what was predicted: calls or bytes of ranks {wrong}")
        terms = ", ".join(f"{term} {size / 1e9:.3f}" for term, size in memory.items())
        say(f"memory: {terms} = {sum(memory.values()) / 1e9:.3f} GB predicted")
        kind = "allocator's peak" if self.cuda else "peak resident set, which holds Python and torch too"
        largest = max(range(len(ranks)), key=lambda rank: ranks[rank][1])
        if largest:
            kind += f"; largest: {ranks[largest][1] / 1e9:.3f} GB on rank {largest}"
        say(f"memory: {self.peak_bytes() / 1e9:.3f} GB measured ({kind})")


def advice(splits: list[dict[str, float]], run: Run) -> list[str]:
    """What makes a step slow and what to change, in the order in which to look at it.

    splits: time by part of every rank, in any unit. A rank that others wait for is seen by its own work: the waiting is
    theirs, and stands in their communication.
    """
    found, cfg = [], run.cfg

    def worst(part: str) -> tuple[float, int]:
        return max((split[part] / max(sum(split.values()), 1e-9), rank) for rank, split in enumerate(splits))

    share, rank = worst("data")
    if share > 0.05:
        found.append(f"rank {rank} waits for data {share:.0%} of the time: more --workers, or a faster disk")
    own = [sum(split[part] for part in ("compute", "data", "optimizer", "other")) for split in splits]
    slowest, median = max(range(len(own)), key=lambda r: own[r]), sorted(own)[len(own) // 2 - (len(own) % 2 == 0)]
    more = (own[slowest] - median) / max(sum(splits[slowest].values()), 1e-9)  # of a step: so long the others wait
    uneven = more > 0.1
    share, rank = worst("communication")
    if share > 0.3 and not uneven:
        change = (
            "a larger --micro-batch or --global-batch, --wire bf16, a lower --stage; ring_allreduce.py measures links"
        )
        found.append(f"rank {rank} waits for communication {share:.0%} of the time: {change}")
    if uneven:
        change = "--stages moves blocks" if run.pp > 1 else "a throttled or shared card, or a slow disk there?"
        found.append(f"rank {slowest} works longer than the others, who wait {more:.0%} of a step for it: {change}")
    share, rank = worst("bubble")
    if share > 0.2:
        found.append(f"rank {rank} is idle {share:.0%} of the time: more micro-batches a step, at least 4 per stage")
    tokens = cfg.micro_batch * cfg.seq_len // (run.tp * run.cp)
    if run.device.type == "cuda" and tokens < 2048:
        found.append(f"a pass has {tokens} tokens of a rank, and a GPU wants some thousands: a larger --micro-batch")
    return found


def drop_rows(path: Path, step: int) -> None:
    """Drop the rows from `step` on: of a run that ended before it saved them, they will be written again."""

    def step_of(line: str) -> float:
        try:
            return json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            return math.inf  # a line cut short by a crash goes

    if path.exists():
        kept = [line for line in path.read_text().splitlines() if step_of(line) < step]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(line + "\n" for line in kept))
        os.replace(temporary, path)
