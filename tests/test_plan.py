"""plan.py against every row of docs/results, and against answers that can be had by hand."""

import json
import math
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest
from harness import ROOT, toy_files

import train_3d
import train_cp
import train_ddp
import train_pipe
import train_tp
import train_zero
from cost import FOUND, Machine, machine, transfers
from plan import BARELY, FITS, Config, best, build, kinds, machine_of, plan, try_here
from ring_allreduce import fit_link
from support.flags import UserError, parse_flags

SCRIPTS = {"train_ddp": train_ddp, "train_zero": train_zero, "train_tp": train_tp, "train_pipe": train_pipe}
SCRIPTS["train_3d"] = train_3d
NOT_PREDICTED = {  # part of strategy or note -> why
    "peer:": "another framework",
    "zero2, NCCL fp32 reduce_scatter": "gradients have travelled in bf16 since",
    "zero3, NCCL": "gradients have travelled in bf16 since",
    "tp, copy engines": "removed again",
    "3d pp 2": "measured before a stage whose matrices nobody shares had its blocks compiled whole (7cfdff2)",
    "NCCL_MAX_P2P_NCHANNELS": "a setting that plan.py does not know",
    "4,961 tok/s": "time: the host's memory gave AdamW 59 GB/s where others gave 100 (docs/LOG.md)",
}


def results() -> list[dict]:
    """Every row of docs/results but the links'."""
    found = []
    for path in sorted((ROOT / "docs/results").glob("*.json")):
        rows = json.loads(path.read_text())
        found += [{"file": path.stem, **row} for row in rows] if isinstance(rows, list) else []
    return found


def reason(row: dict) -> str:
    words = row.get("strategy", "") + row.get("note", "")
    return next((why for part, why in NOT_PREDICTED.items() if part in words), "")


def layout_of(row: dict):
    """What plan.py makes of the command that made a row."""
    command = shlex.split(row.get("command", "python train_zero.py"))
    at = next(i for i, word in enumerate(command) if word.endswith(".py"))
    script, ranks = SCRIPTS[command[at][:-3]], row.get("ranks", row["gpus"])
    cfg = parse_flags(script.Config, command[at + 1 :])
    flags = {key: getattr(cfg, key) for key in cfg.given}
    flags |= {key: row[key] for key in ("model", "micro_batch", "stage") if key in row}
    flags.setdefault("global_batch", row["micro_batch"] * ranks)
    if flags.pop("deepspeed", ""):
        flags |= {"stage": 2, "offload": "optimizer", "dtype": "float16"}  # as the file says
    if script in (train_tp, train_pipe):
        flags.setdefault("tp" if script is train_tp else "pp", ranks)
    return build("", script, flags, Machine(gpus=ranks, peer="NCCL" not in row.get("strategy", "")))


def test_every_row_of_docs_results():
    """Memory and time within 10 %, and layouts of one visit that differ by more than 1.5 % in the right order."""
    print(f"\n{'file':16s}{'model':6s}{'what':42s}{'GB':>7s}{'pred.':>8s}{'':8s}{'tok/s/GPU':>10s}{'pred.':>9s}")
    visits: dict[tuple, list] = {}
    for row in results():
        what, why = row.get("strategy") or f"stage {row.get('stage', row.get('schedule'))}", reason(row)
        what += f" {row['gpus']} x {row['micro_batch']}"
        if why and not why.startswith("time"):
            print(f"{row['file']:16s}{row['model']:6s}{what:42s} not predicted: {why}")
            continue
        layout, gb, rate = layout_of(row), row.get("peak_gb", row.get("measured_gb")), row.get("tok_s_gpu")
        line = f"{row['file']:16s}{row['model']:6s}{what:42s}{gb:7.1f}{layout.gb:8.1f}{layout.gb / gb - 1:+8.1%}"
        assert abs(layout.gb / gb - 1) < 0.1, line
        if rate:
            ours = layout.rate / layout.run.world_size
            line += f"{rate:10,.0f}{ours:9,.0f}{ours / rate - 1:+8.1%} {why}"
            assert why or abs(ours / rate - 1) < 0.1, line
            visits.setdefault((row["file"], row.get("visit"), row["model"]), []).append((rate, ours, what))
        print(line)
    for rows in visits.values():
        for rate, ours, what in rows:
            for other, theirs, which in rows:
                assert not (rate > 1.015 * other and ours < theirs), f"{what} was faster than {which}"


def test_constants_of_the_link_are_those_of_their_row():
    link = json.loads((ROOT / "docs/results/ring-h200x2.json").read_text())
    large = [row for row in link["rows"] if row["bytes"] >= 16e6]
    alpha, beta, _ = fit_link([r["bytes"] for r in large], [r["backend_s"] for r in large], link["world"])
    assert Machine().beta == pytest.approx(beta, rel=0.1) and Machine().alpha == pytest.approx(alpha, rel=0.3)


def fit(name: str, **flags):
    """The best of one form, as `plan.py` with these flags finds it."""
    cfg = Config(**flags)
    box = machine_of(cfg)
    return best(next(kind for kind in kinds(box.gpus) if kind[0] == name), cfg, box)


def test_7b_in_fp16_on_four_cards_of_24_gb():
    flags = dict(model="7b", gpus=4, gpu_mem=24, dtype="float16", host_mem=128, global_batch=16)
    stage2, offloaded, stage3 = (fit(name, **flags) for name in ("ZeRO-2", "ZeRO-2 offload", "ZeRO-3 offload"))
    assert stage2.full > 1 and stage2.gb > 40  # by hand: 2 + 16/4 bytes of 6.74 G parameters alone
    assert FITS < offloaded.full <= BARELY and offloaded.run.cfg.recompute == "full"
    assert stage3.full <= FITS and stage3.host == pytest.approx(107.8e9, rel=0.01)  # 16 bytes per parameter
    assert fit("ZeRO-3 offload", **flags | {"host_mem": 96}).full > 1  # the host's memory counts
    _, take = plan(Config(**flags), machine_of(Config(**flags)))
    assert take.name == "ZeRO-3 offload"


@pytest.mark.parametrize(
    "memory, name", [(24, None), (80, "ZeRO-1 offload"), (141, "one card")]
)  # of 6b's 18 bytes per parameter 110 GB are on a card without offload, 36 with it
def test_6b_on_one_card(memory, name):
    cfg = Config(model="6b", gpus=1, gpu_mem=memory, global_batch=64)
    _, take = plan(cfg, machine_of(cfg))
    assert (take and take.name) == name


def test_13b_on_four_cards_of_24_gb():
    """By hand: gradients 13 and weights 6.5 GB of stage 3 leave 5 for a sequence of 4096 and the buffers."""
    assert fit("ZeRO-3 offload", model="13b", gpus=4, gpu_mem=24, global_batch=32).full > 1
    assert fit("ZeRO-3 offload", model="13b", gpus=8, gpu_mem=24, global_batch=32).full <= FITS


@pytest.mark.parametrize("gpu", ["rtx 3090", "RTX 4090", "NVIDIA L40S", "a100", "NVIDIA H100 80GB HBM3", "B200"])
def test_124m_anywhere(gpu):
    cfg = Config(model="124m", gpus=1, gpu=gpu)
    layouts, take = plan(cfg, machine_of(cfg))
    assert take.name == "one card" and take.run.cfg.micro_batch >= 16
    faster = machine(gpu).products / Machine().products
    assert take.rate < 600_000 * max(faster, 1)


def test_long_sequences_are_offered_context_parallel():
    """At 32k on two H200s it is the fastest; a length that two cards cannot share has no such row; and on two hosts
    all eight cards of one may send to the other in a turn: their ring waits longer than one of a card on each host."""
    flags = dict(model="6b", gpu="h200", gpus=2, seq_len=32768, global_batch=4)
    layouts, _ = plan(Config(**flags), machine_of(Config(**flags)))
    assert layouts[0].name == "CP 2 ZeRO-3"
    flags["seq_len"] = 2047
    layouts, _ = plan(Config(**flags), machine_of(Config(**flags)))
    assert layouts and not [x.name for x in layouts if x.name.startswith("CP")]
    flags = {"model": "6b", "seq_len": 65536, "global_batch": 4, "micro_batch": 1, "stage": 3, "cp": 16}
    took = []
    for gpus in (8, 1):
        box = Machine(gpus=gpus, nodes=16 // gpus, net_beta=5e9)
        run = build("", train_cp, flags, box).run
        took.append(transfers(run, train_cp.predict(run)[1], [], box)[0]["send"])
    assert took[0] > 7 * took[1]


def test_a_narrow_link_costs_tensor_parallel_most(tmp_path):
    """By its numbers: 1 GB/s between hosts, and TP over it loses more than data parallel over it."""
    rows = [{"bytes": n, "backend_s": 1e-4 + n / 1e9} for n in (10**6, 10**8, 10**9)]
    (tmp_path / "link.json").write_text(json.dumps({"world": 2, "rows": rows}))
    cfg = Config(model="6b", gpu="h100", gpus=4, nodes=2, global_batch=256, link=f"{tmp_path}/link.json")
    box = machine_of(cfg)
    assert box.net_beta == pytest.approx(1e9, rel=0.01)
    tp, zero = (next(kind for kind in kinds(8) if kind[0] == name) for name in ("TP 8", "ZeRO-1"))
    assert best(tp, cfg, box).rate < 0.2 * best(zero, cfg, box).rate
    assert best(tp, cfg, replace(box, net_beta=math.inf, net_alpha=0)).rate > 3 * best(tp, cfg, box).rate


def run_cli(*flags: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "plan.py", *flags], cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_the_table_the_reasons_and_the_command():
    done = run_cli("--model=6b", "--gpus=2", "--gpu-mem=80", "--global-batch=64", "--tokens=100e9", "--mtbf=500")
    assert done.returncode == 0, done.stderr
    ddp = next(line for line in done.stdout.splitlines() if line.startswith("DDP"))
    assert "does not fit: moments 48.7" in ddp
    assert "torchrun --nproc_per_node=2 train_" in done.stdout and "estimates" in done.stdout
    assert "GPU hours" in done.stdout and "2 x 2 cards" in done.stdout and "--save-every" in done.stdout


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--gpu", "tpu"], "--gpu tpu: no rates are known of it; allowed are B200, H200"),
        (["--model", "8b", "--gpu-mem", "80"], "--model 8b: neither a size"),
        (["--gpu-mem", "80", "--link", "README.md"], "--link README.md: not a file that ring_allreduce.py writes"),
        (
            ["--model", "13b", "--gpu-mem", "24", "--global-batch", "4"],
            "nothing fits: the table says what is too large",
        ),
        (["--gpus", "7", "--gpu-mem", "80", "--global-batch", "1", "--model", "tiny"], "no layout of 7 cards"),
    ],
)
def test_refusals(flags, said):
    done = run_cli(*flags)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_three_steps_here(tmp_path):
    """On two CPU processes; the layout is the plan's, the device is not."""
    toy_files(tmp_path)
    flags = dict(model=f"{tmp_path}/toy.json", data=f"{tmp_path}/plain", global_batch=4, micro_batch=1, dtype="float32")
    box = Machine(gpus=2)
    row = try_here(build("ZeRO-2", train_zero, flags | {"stage": 2}, box), box, "--device=cpu")
    assert row["step"] == 2 and row["tok_s"] > 0
    with pytest.raises(UserError, match="--try: DDP ended with exit code"):
        try_here(build("DDP", train_ddp, flags, box), box, "--device=cpu", "--data=/nowhere")


def test_a_card_has_what_torch_finds():
    """In GiB, read off error messages of torch: not the GB of its name."""
    for kind, gib in (("H200", 139.8), ("H100", 79.1), ("4090", 23.6)):
        assert machine(kind).room == pytest.approx(gib * 2**30, rel=0.01)
    assert machine_of(Config(gpu_mem=40)).room == 40 * FOUND
