"""What bench.sh measured: a row per cell, the table, the picture; and the pass that only computes.

    python bench_table.py table docs/results/scaling-6b-64-nvidia-h200.json               # the table
    python bench_table.py picture docs/results/scaling-6b-64-nvidia-h200.json docs/scaling.png
    python bench_table.py compute-only --model 6b --global-batch 64 --steps 8 # one GPU, forward and backward, nothing kept

A cell's figure is the median over its steps after the first WARM_UP, which compile and fill caches; its spread is the
fastest and the slowest of them. Efficiency is tokens/s/GPU divided by that of one GPU. Where the model does not fit one
GPU there are two such figures, each unfair in its own way: one GPU with its optimizer state in host memory (too slow a
baseline), and one GPU that computes but never updates (too fast). Shares: of the time of the first rank, what the GPU
stood waiting for a transfer, and for data.
"""

import json
import statistics
import sys
from pathlib import Path

WARM_UP = 3
BASELINES = {"single": "one GPU", "zero2-offload": "one GPU with offload", "compute-only": "one GPU, compute only"}


def read_rows(path: str) -> list[dict]:
    return json.loads(Path(path).read_text()) if Path(path).exists() else []


def add_row(path: str, strategy: str, gpus: int, out: str, command: str) -> None:
    """Add the row of the finished run in folder `out`, replacing the same command's older one."""
    facts = json.loads(Path(out, "config.json").read_text())
    cfg = facts["config"]
    steps = [json.loads(line) for line in Path(out, "log.jsonl").read_text().splitlines()]
    rows = steps[WARM_UP:] or sys.exit(f"{out}/log.jsonl has {len(steps)} steps, more than {WARM_UP} are needed")
    ms = [row["step_ms"] for row in rows]
    model_parallel = 1
    for key in ("tp", "pp"):
        model_parallel *= (cfg[key] or gpus) if key in cfg else 1  # 0: all ranks
    row = {
        "model": cfg["model"],
        "strategy": strategy,
        "gpus": gpus,
        "global_batch": cfg["global_batch"],
        "seq_len": cfg["seq_len"],
        "micro_batch": cfg["micro_batch"],
        "accum": cfg["global_batch"] * model_parallel // (cfg["micro_batch"] * gpus),
        "dtype": cfg["dtype"],
        "tok_s": rows[0]["tokens"] / statistics.median(ms) * 1e3,
        "tok_s_gpu": rows[0]["tokens"] / statistics.median(ms) * 1e3 / gpus,
        "mfu": statistics.median(row["mfu"] for row in rows) if rows[0]["mfu"] else None,
        "peak_gb": max(row["peak_gb"] for row in steps),
        "step_ms": statistics.median(ms),
        "step_ms_min": min(ms),
        "step_ms_max": max(ms),
        "exposed_comm": sum(row["communication_ms"] for row in rows) / sum(ms),
        "bubble": sum(row["bubble_ms"] for row in rows) / sum(ms),
        "data_wait": sum(row["data_ms"] for row in rows) / sum(ms),
        "final_loss": steps[-1]["loss"],
        "steps": len(steps),
        **{key: facts[key] for key in ("hardware", "torch", "commit", "date")},
        "command": command,
    }
    kept = [other for other in read_rows(path) if other["command"] != command]
    temporary = Path(path).with_suffix(".tmp")
    temporary.write_text("[\n" + ",\n".join(json.dumps(r) for r in [*kept, row]) + "\n]\n")
    temporary.replace(path)  # a run that is killed leaves the old file whole


def print_table(path: str) -> None:
    """Markdown. Exit code 1 when the final losses of the strategies disagree."""
    order = {"single": 0, "compute-only": 1}
    rows = sorted(read_rows(path), key=lambda r: (r["gpus"], order.get(r["strategy"], 2), r["strategy"]))
    if not rows:
        sys.exit(f"{path}: nothing measured yet")
    one: dict[str, float] = {}  # the best there is, if several micro-batches were tried
    for r in rows:
        if r["gpus"] == 1 and r["strategy"] in BASELINES:
            one[r["strategy"]] = max(r["tok_s_gpu"], one.get(r["strategy"], 0))
    baselines = ["single"] if "single" in one else list(one)
    against = [f"vs {BASELINES[name]}" for name in baselines]
    head = ["GPUs", "strategy", "micro x accum", "tok/s", "tok/s/GPU", *against, "MFU", "peak GB", "step ms (min-max)"]
    lines = [head + ["exposed comm", "bubble", "data wait", "final loss"]]
    for r in rows:
        lines.append(
            [
                str(r["gpus"]),
                r["strategy"],
                f"{r['micro_batch']} x {r['accum']}",
                f"{r['tok_s']:,.0f}",
                f"{r['tok_s_gpu']:,.0f}",
            ]
            + [f"{r['tok_s_gpu'] / one[name]:.1%}" for name in baselines]
            + [f"{r['mfu']:.1%}" if r["mfu"] else "-", f"{r['peak_gb']:.1f}"]
            + [f"{r['step_ms']:.0f} ({r['step_ms_min']:.0f}-{r['step_ms_max']:.0f})"]
            + [f"{r[key]:.1%}" for key in ("exposed_comm", "bubble", "data_wait")]
            + [f"{r['final_loss']:.4f}" if r["strategy"] != "compute-only" else "-"]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    lines.insert(1, ["-" * width for width in widths])
    print("\n".join("| " + " | ".join(cell.rjust(width) for cell, width in zip(line, widths)) + " |" for line in lines))
    losses = [r["final_loss"] for r in rows if r["strategy"] != "compute-only"]
    # after a few steps rounding is all that separates the strategies
    allowed = 1e-4 if rows[0]["dtype"] in ("float32", "float64") else 2e-2
    if losses and max(losses) - min(losses) > allowed:
        sys.exit(
            f"FAILED  the final losses differ by {max(losses) - min(losses):.2g}, allowed is {allowed:g}: not the same training"
        )
    print(f"final losses agree within {max(losses, default=0) - min(losses, default=0):.1g} (allowed {allowed:g})")
    print(
        f"{Path(rows[-1]['model']).stem}, {rows[-1]['global_batch']} x {rows[-1]['seq_len']} tokens a step; {rows[-1]['hardware']}"
    )


def draw(path: str, picture: str) -> None:
    """Tokens/s over GPUs, a line per strategy, and the straight line of the best one-GPU figure."""
    try:
        import matplotlib
    except ImportError:
        sys.exit("no picture: it needs matplotlib (pip install matplotlib)")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = sorted(read_rows(path), key=lambda r: r["gpus"])
    figure, axes = pyplot.subplots(figsize=(7, 5))
    for strategy in dict.fromkeys(r["strategy"] for r in rows):
        mine = [r for r in rows if r["strategy"] == strategy]
        axes.plot([r["gpus"] for r in mine], [r["tok_s"] for r in mine], "o-", label=strategy)
    counts = sorted({r["gpus"] for r in rows})
    axes.set_xticks(counts)
    best = next((r for name in BASELINES for r in rows if r["strategy"] == name and r["gpus"] == 1), None)
    if best:
        axes.plot(counts, [best["tok_s"] * n for n in counts], "k--", lw=1, label=f"{BASELINES[best['strategy']]} x N")
    axes.set(
        xlabel="GPUs",
        ylabel="tokens/s",
        title=f"{Path(rows[-1]['model']).stem}, {rows[-1]['hardware']}",
        ylim=(0, None),
    )
    axes.legend()
    figure.savefig(picture, dpi=120, bbox_inches="tight")


def compute_only(cfg, group=None) -> list[dict]:
    """Forward and backward of the whole model on one GPU, gradients dropped: 4 bytes per parameter in bf16 instead of 18."""
    import torch

    from model import GPT, flops_per_token, init_range, param_shapes
    from support.flags import UserError
    from support.meter import Meter, at
    from support.start import own_folder, start

    if cfg.explain:
        raise UserError("compute-only has nothing to explain: --explain is for the training scripts")
    run = start(cfg, __file__, group)
    own_folder(run)
    cfg = run.cfg
    model = GPT(run.model_cfg, cfg.recompute)
    for name, shape in param_shapes(run.model_cfg).items():
        weight = torch.empty(shape, dtype=run.dtype, device=run.device)
        init_range(weight.view(-1), name, 0, run.model_cfg, cfg.seed)
        model.set_param(name, weight)
    model.set_buffers(run.dtype, run.device)
    if cfg.compile:
        model.compile_blocks()
    x = (
        torch.arange(cfg.micro_batch * cfg.seq_len, device=run.device).view(cfg.micro_batch, cfg.seq_len)
        % cfg.vocab_size
    )
    with Meter(run, flops_per_token(run.model_cfg)) as meter:
        for step in range(cfg.steps):
            for _ in range(run.accum):
                with at("forward"):
                    loss = model(x, x) / x.numel()
                with at("backward"):
                    loss.backward()
                model.zero_grad(set_to_none=True)
            meter.log(step, loss.item(), 0.0, 0.0, cfg.global_batch * cfg.seq_len, 1.0, False)
    return meter.rows


def main() -> None:
    match sys.argv[1:]:
        case ["compute-only", *_]:
            from support.flags import Config
            from support.start import run_script

            del sys.argv[1]
            run_script(compute_only, None, Config, __doc__)
        case ["row", path, strategy, gpus, out, command]:
            add_row(path, strategy, int(gpus), out, command)
        case ["has", path, command]:
            sys.exit(command not in [row["command"] for row in read_rows(path)])
        case ["table", path]:
            print_table(path)
        case ["picture", path, picture]:
            draw(path, picture)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
