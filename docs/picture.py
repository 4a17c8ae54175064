"""The README's picture: the losses of all forms lie on each other; tokens/s/GPU, ours beside the frameworks'.

    python docs/picture.py docs/front.png

Left: the runs of docs/results/curves-124m. Right: docs/results/6b-h200x2.json, rows of two GPUs: of every form
the newest (at a global batch of 64), of every framework the best (named peer:...).
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

RESULTS = Path(__file__).parent / "results"
RUNS = {"single": "one GPU", "zero3": "ZeRO-3, two GPUs", "tp2": "TP 2", "pp2": "PP 2"}
BARS = {  # ours -> the framework's row beside it
    "ddp": ("DDP", "peer:ddp", "torch DDP"),
    "zero1": ("ZeRO-1", "peer:deepspeed zero1", "DeepSpeed"),
    "zero2": ("ZeRO-2", "peer:deepspeed zero2", "DeepSpeed"),
    "zero3": ("ZeRO-3", "peer:fsdp2", "torch FSDP2"),
    "pipe 1f1b": ("1F1B", "peer:pipelining 1F1B", "torch pipelining, no optimizer"),
    "tp": ("TP 2", "peer:tp async", "torch async TP, no optimizer"),
}


def main(picture: str) -> None:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.2))
    for name, label in RUNS.items():
        rows = [json.loads(line) for line in (RESULTS / "curves-124m" / name / "log.jsonl").read_text().splitlines()]
        left.plot([r["step"] for r in rows], [r["loss"] for r in rows], lw=1, alpha=0.7, label=label)
    left.set(xlabel="step", ylabel="loss, nats per token", title="124m, bf16, real text: one curve, four layouts")
    left.legend()

    rows = [r for r in json.loads((RESULTS / "6b-h200x2.json").read_text()) if r["gpus"] == 2]
    newest = {r["strategy"]: r for r in rows}
    best = {r["strategy"]: r for r in sorted(rows, key=lambda r: r["tok_s_gpu"])}
    for y, (ours, (label, theirs, name)) in enumerate(BARS.items()):
        for row, at, colour, ink, words in (
            (newest[ours], y - 0.2, "C0", "white", label),
            (best[theirs], y + 0.2, "0.75", "black", name),
        ):
            right.barh(at, row["tok_s_gpu"], height=0.38, color=colour)
            right.text(200, at, f"{words}  {row['tok_s_gpu']:,}", va="center", color=ink, fontsize=8)
    right.set(xlabel="tokens/s per GPU", title="6b on two H200: nanoshard, and the frameworks (grey)", yticks=[])
    right.invert_yaxis()
    figure.savefig(picture, dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    main(*sys.argv[1:] or ["docs/front.png"])
