"""A DeepSpeed configuration file -> the flags of train_zero.py, each of its keys accounted for.

    torchrun --nproc_per_node=2 train_zero.py --deepspeed examples/ds_zero2_offload.json
    python deepspeed_json.py examples/ds_zero2_offload.json --dp 2      # the flags it becomes, the keys ignored and why

A key is in one of the three lists below: used, ignored, refused; for an unknown one the nearest name is told. "auto",
which Hugging Face's Trainer fills in, means our default; null means absent; a key that begins with _ is a comment.
Where the file is silent, precision and stage are DeepSpeed's (float32, stage 0, no offload), as are the other fields of
a section that is there; anything else is left to the flags. A flag beside the file may add to it, not contradict it.

The lesson is the batch triangle, train_batch_size = micro-batch x accumulation x data-parallel ranks: any two give the
third, one alone means accumulation 1, accumulation alone says nothing. Keys: https://www.deepspeed.ai/docs/config-json/
"""

import argparse
import difflib
import json
from pathlib import Path

from support.flags import UserError, flag_name, run_cli

AUTO = "auto"
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
ADAM, ZERO = "optimizer.params.", "zero_optimization."

KINDS = {  # kind -> (what is allowed, test); type() and not isinstance(): true is no number
    "count": ("a whole number, 1 or more", lambda v: type(v) is int and v >= 1),
    "number": ("a number, 0 or more", lambda v: type(v) in (int, float) and 0 <= v < 1e300),
    "positive": ("a number above 0", lambda v: type(v) in (int, float) and 0 < v < 1e300),
    "betas": ("two numbers", lambda v: type(v) is list and [type(beta) in (int, float) for beta in v] == [True, True]),
    "section": ("an object {...}", lambda v: type(v) is dict),
    "any": ("any", lambda v: True),
}
USED = {  # key -> (kind, or the values allowed; the flag it becomes; DeepSpeed's default where its section is there)
    BATCH[0]: ("count", "global_batch", None),
    BATCH[1]: ("count", "micro_batch", None),
    BATCH[2]: ("count", "", None),  # with either of them gives the other
    "gradient_clipping": ("number", "clip", None),
    "communication_data_type": ('"fp32" or "bf16"', "wire", None),  # sums in fp16 overflow
    ZERO + "stage": ("0 or 1 or 2 or 3", "stage", 0),
    ZERO + "offload_optimizer.device": ('"none" or "cpu"', "offload", "none"),
    "bf16.enabled": ("true or false", "", None),  # this and the next are --dtype
    "fp16.enabled": ("true or false", "", None),
    "fp16.loss_scale": ("number", "loss_scale", 0.0),
    "fp16.initial_scale_power": ("count", "scale_power", 16),
    "fp16.loss_scale_window": ("count", "scale_window", 1000),
    "fp16.hysteresis": ("count", "scale_hysteresis", 2),
    "fp16.min_loss_scale": ("positive", "scale_min", 1.0),
    "optimizer.type": ('"AdamW" or "Adam" or "adamw" or "adam"', "", None),
    ADAM + "lr": ("positive", "lr", 1e-3),
    ADAM + "betas": ("betas", "beta1 beta2", [0.9, 0.999]),
    ADAM + "eps": ("positive", "eps", 1e-8),
    ADAM + "weight_decay": ("number", "weight_decay", 0.0),
}
# No number depends on it: reason | keys, behind their section
IGNORED = """
there is one AdamW, sums are in float32 | zero_allow_untested_optimizer zero_force_ds_cpu_optimizer prescale_gradients
    gradient_predivide_factor sparse_gradients fp16. auto_cast optimizer.params. torch_adam fused
see log.jsonl, --recompute, --save-every, --compile, --explain | steps_per_print wall_clock_breakdown memory_breakdown
    dump_state flops_profiler wandb tensorboard csv_monitor comms_logger activation_checkpointing checkpoint compile
    autotuning
checkpoints hold float32 for any layout; export.py | zero_optimization. load_from_fp32_weights elastic_checkpoint
    stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save
a block is a bucket, sent while another computes | zero_optimization. reduce_bucket_size allgather_bucket_size
    overlap_comm contiguous_gradients reduce_scatter allgather_partitions round_robin_gradients sub_group_size
    stage3_prefetch_bucket_size stage3_max_live_parameters stage3_max_reuse_distance stage3_param_persistence_threshold
concerns what is not here | pipeline aio dataloader_drop_last zero_optimization. ignore_unused_parameters
host memory is pinned | zero_optimization.offload_param. pin_memory
    zero_optimization.offload_optimizer. pin_memory buffer_count fast_init
"""
# Refused but for the values that change nothing: reason | keys | values
OFF = 'false or {} or {"enabled": false}'
REFUSED = f"""
there is nothing like it here | torch_autocast elasticity curriculum_learning data_efficiency compression_training
    sparse_attention progressive_layer_drop | {OFF}
use bf16 or fp16 | amp | {OFF}
train_tp.py splits layers | tensor_parallel | {OFF}
the schedule is --steps, --warmup-steps and --min-lr | scheduler | {OFF}
weights stay on the GPU; stage 3 shards them | zero_optimization.offload_param. device | "none"
write "offload_optimizer": {{"device": "cpu"}} | zero_optimization. cpu_offload | false
all of the optimizer state moves | zero_optimization.offload_optimizer. ratio | 1 or 1.0
weights are sharded over all ranks | zero_optimization. zero_hpz_partition_size | 0 or 1
AdamW corrects the bias and keeps decay out of the loss | optimizer.params. bias_correction adam_w_mode | true
masters, moments and sums are float32, nothing is quantized | fp16. fp16_master_weights_and_grads
    consecutive_hysteresis zero_optimization. zero_quantized_weights zero_quantized_gradients | false
"""
RULES = {key: ("", kind) for key, (kind, _, _) in USED.items()}  # key -> (why, kind or the values allowed)
for line in (IGNORED + REFUSED[1:]).replace("\n    ", " ").strip().splitlines():
    why, words, kind = (line + " | any").split(" | ")[:3]
    section = ""
    for word in words.split():
        section = word if word.endswith(".") else section
        if word != section:
            RULES[section + word] = why, kind
RULES |= {key.rpartition(".")[0]: ("", "section") for key in RULES if "." in key}


def load(path: str) -> dict:
    """The file's object. Raises UserError."""

    def once(pairs: list) -> dict:
        names = [name for name, _ in pairs]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"{twice[0]} is there twice")
        return dict(pairs)

    try:
        tree = json.loads(Path(path).read_text(encoding="utf-8-sig"), object_pairs_hook=once)
        if type(tree) is not dict:
            raise ValueError(f"found {json.dumps(tree):.60}")
    except (OSError, ValueError, RecursionError) as error:  # ValueError: also what is not JSON, or not UTF-8
        allowed = "allowed is a JSON object {...}, without comments or a comma at the end"
        raise UserError(f"{path}: {error}; {allowed}") from None
    return tree


def account(path: str, tree: dict, section: str = "") -> tuple[dict[str, object], list[str]]:
    """Check every key -> (path of a key in USED: its value, or "auto"; a line for each key that sets no flag)."""
    used, notes = {}, []
    for name in sorted(tree, key="params".__eq__):  # params last: a type that is refused explains them
        key, value = section + name, tree[name]
        if key not in RULES and not name.startswith("_"):
            here = {n.removeprefix(section): n for n in RULES if n.rpartition(".")[0] == section.rstrip(".")}
            known = {n.rpartition(".")[2]: n for n in RULES} | here
            near = difflib.get_close_matches(name, known, 1, 0.75)
            hint = f"did you mean {known[near[0]]}?" if near else f"allowed there are {', '.join(here)}"
            raise UserError(f"{path}: unknown key {key}; {hint}")
        why, kind = RULES.get(key, ("it is a comment", "any"))
        allowed, test = KINDS.get(kind, (kind, lambda v, kind=kind: json.dumps(v) in kind.split(" or ")))
        if value == AUTO and kind not in ("section", "any"):
            notes.append(f"{key} is auto: our default")
        elif value is not None and not test(value):
            raise UserError(f"{path}: {key} is {json.dumps(value):.60}; allowed is {allowed}{why and ': ' + why}")
        elif why:
            notes.append(f"{key} ignored: {why}")
        elif kind == "section":
            inner = account(path, value or {}, f"{key}.")
            used, notes = used | inner[0], notes + inner[1]
        if key in USED and value is not None:
            used[key] = float(value) if kind in ("number", "positive") and value != AUTO else value
    return used, notes


def complete_batch(path: str, used: dict[str, object], dp: int, given: dict[str, object]) -> dict[str, int]:
    """Solve train_batch_size = micro-batch x accumulation x dp for what is missing; {} leaves it to the flags."""
    train, micro, accum = (None if used.get(key) == AUTO else used.get(key) for key in BATCH)
    if not (train or micro or accum):
        return {}
    train, micro = train or given.get("global_batch"), micro or given.get("micro_batch")
    if not (train or micro):
        raise UserError(f"{path}: {BATCH[2]} alone makes no batch; add {BATCH[0]} or {BATCH[1]}")
    if not accum and not (train and micro) and AUTO in (used.get(key) for key in BATCH):
        return {}  # what is "auto" is ours to choose
    per_step = (micro or 1) * (accum or 1) * dp
    train = train or per_step
    if train % per_step or (micro and accum and train != per_step):
        factors = {"micro": micro, "accumulation": accum, "data-parallel ranks": dp}
        product = " x ".join(f"{name} {value}" for name, value in factors.items() if value)
        verdict = "!=" if micro and accum else "is not a multiple of"
        raise UserError(f"{path}: {BATCH[0]} {train} {verdict} {product} = {per_step}; change one of these")
    return {"global_batch": train, "micro_batch": micro or train // per_step}


def read_deepspeed(path: str, dp: int, given: dict[str, object] | None = None) -> tuple[dict[str, object], list[str]]:
    """Flags that a DeepSpeed configuration file stands for.

    dp: data-parallel ranks. given: flags of the command line (field of train_zero.Config -> value). Returns the flags
    the file sets and a line for each key that sets none. Raises UserError for what is refused or contradicts `given`.
    """
    given = given or {}
    used, notes = account(path, load(path))
    there = {key.partition(".")[0] for key in used} | {"zero_optimization"}
    if "optimizer" in there and "optimizer.type" not in used:
        raise UserError(f"{path}: optimizer.type is missing; allowed is {USED['optimizer.type'][0]}")
    said = {}  # flag -> (value, the key that says so; "" where it is DeepSpeed's default)
    fp16, bf16 = (used.get(f"{name}.enabled", False) for name in ("fp16", "bf16"))
    if fp16 is bf16 is True:
        raise UserError(f"{path}: fp16.enabled and bf16.enabled are both true; allowed is one of them")
    if True in (fp16, bf16):
        said["dtype"] = ("float16", "fp16.enabled") if fp16 is True else ("bfloat16", "bf16.enabled")
    elif AUTO not in (fp16, bf16):
        switch = "fp16.enabled" if given.get("dtype") == "float16" else "bf16.enabled"
        said["dtype"] = ("float32", switch if switch in used else "")
    if fp16 is False:
        notes += [f"{key} ignored: fp16 is not enabled" for key in used if key.startswith("fp16.") and USED[key][1]]
        there.discard("fp16")
    for key, (_, flags, default) in USED.items():
        value = used.get(key, default)
        if key.partition(".")[0] in there and value not in (None, AUTO):
            for flag, v in zip(flags.split(), value if type(value) is list else [value]):
                said[flag] = ("optimizer" if v == "cpu" else v, key if key in used else "")
    for flag, value in complete_batch(path, used, dp, given).items():
        said.setdefault(flag, (value, "its batch"))
    for flag, (value, key) in said.items():
        if key and given.get(flag, value) != value:
            ours = f"{flag_name(flag)} {value}"
            raise UserError(f"{path}: {key} means {ours}, the command line says {given[flag]}; leave out one of them")
    notes += [f"{key} is not in the file: left to the flags" for key in {"gradient_clipping", "optimizer"} - there]
    return {flag: given.get(flag, value) for flag, (value, _) in said.items()}, notes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--dp", type=int, default=1, help="data-parallel ranks (default 1)")
    args = parser.parse_args()
    if args.dp < 1:
        raise UserError(f"--dp {args.dp}: allowed is 1 or more")
    flags, notes = read_deepspeed(args.file, args.dp)
    print(" ".join(f"{flag_name(flag)} {value}" for flag, value in flags.items()), *notes, sep="\n")


if __name__ == "__main__":
    run_cli(main)
