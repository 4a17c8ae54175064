"""A DeepSpeed configuration file -> the flags of train_zero.py, each of its keys accounted for.

    torchrun --nproc_per_node=2 train_zero.py --deepspeed examples/ds_zero2_offload.json
    python deepspeed_json.py examples/ds_zero2_offload.json --dp 2       # the flags it becomes, the keys ignored and why

A key is used, or ignored because it changes how fast the same numbers come (said, with the reason), or refused because
the run would be another one, or unknown (the nearest name is told). "auto", which Hugging Face's Trainer fills in, means
our default; null means absent. JSON is strict: no comments, no trailing comma, no key twice, 8.0 is not a count.

What the file does not say: precision and stage are as there (float32, stage 0, no offload); a section that is there
brings DeepSpeed's defaults for its other fields (fp16: hysteresis 2; AdamW: betas 0.9, 0.999, no decay); anything else is
left to the flags. A flag beside the file may add to it, not contradict it.

The lesson is the batch triangle, train_batch_size = micro-batch x accumulation x data-parallel ranks: any two give the
third, one alone means accumulation 1, accumulation alone says nothing. Ranks are the data-parallel ones, not all.

Keys: https://www.deepspeed.ai/docs/config-json/
"""

import argparse
import difflib
import json
from pathlib import Path

from support.flags import UserError, run_cli

AUTO = "auto"
USE = object()

KINDS = {  # kind -> (what is allowed, test); type() and not isinstance(): true is no number
    "count": ("a whole number, 1 or more", lambda v: type(v) is int and v >= 1),
    "integer": ("a whole number", lambda v: type(v) is int),
    "power": ("a whole number from 0 to 126", lambda v: type(v) is int and 0 <= v <= 126),
    "size": ("a whole number (5e8 is one)", lambda v: type(v) in (int, float) and v >= 0 and v % 1 == 0),
    "number": ("a number, 0 or more", lambda v: type(v) in (int, float) and 0 <= v < 1e300),
    "positive": ("a number above 0", lambda v: type(v) in (int, float) and 0 < v < 1e300),
    "betas": (
        "two numbers from 0 to below 1",
        lambda v: type(v) is list and len(v) == 2 and all(type(b) in (int, float) and 0 <= b < 1 for b in v),
    ),
    "switch": ("true or false", lambda v: type(v) is bool),
    "text": ("a text", lambda v: type(v) is str),
    "section": ("an object {...}", lambda v: type(v) is dict),
    "any": ("anything", lambda v: True),
    "off": ("false, {} or enabled: false", lambda v: not v or type(v) is dict and v.get("enabled") is False),
}

UNITS = "one block is one bucket here, its buffer needs no packing"
TWO_BLOCKS = "two block buffers are used in turn, the next block is gathered while one computes"
PINNED = "with a GPU the host buffers are always pinned"
NVME = "concerns NVMe, which is not used"
LOG = "log.jsonl in the run folder has every step"
FP32 = "masters, moments and gradient sums are float32 here"
SAME_SUM = "gradients are summed in float32 and divided once: the same number"

# section -> (keys, kind, rule); rule: USE, a text (ignored, because), or (refused because, the values that can be honoured)
SECTIONS: dict[str, list[tuple[str, str, object]]] = {
    "": [
        ("train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps", "count", USE),
        ("gradient_clipping", "number", USE),
        ("communication_data_type", "text", ("gradients travel in fp32 or bf16: fp16 sums overflow", "fp32", "bf16")),
        ("optimizer scheduler fp16 bf16 bfloat16 zero_optimization data_types", "section", None),
        ("gradient_allreduce_op", "text", ("the loss is the mean over the global batch", "mean")),
        ("managed_gradient_accumulation", "switch", ("the training loop is the script's", True)),
        ("prescale_gradients", "switch", SAME_SUM),
        ("gradient_predivide_factor", "positive", SAME_SUM),
        ("sparse_gradients", "switch", "the embedding's gradient travels dense: the same number"),
        ("zero_allow_untested_optimizer zero_force_ds_cpu_optimizer", "switch", "there is one AdamW, on either device"),
        ("steps_per_print", "size", "the screen has a line every --log-every steps"),
        ("wall_clock_breakdown memory_breakdown dump_state", "switch", "time and memory of each step are in log.jsonl"),
        (
            "flops_profiler timers",
            "section",
            "MFU and the split of each step are in log.jsonl; --profile writes a trace",
        ),
        ("tensorboard wandb csv_monitor comet monitor_config", "section", LOG),
        ("comms_logger", "section", "calls and bytes are counted always and printed at the end"),
        ("log_level", "any", "there are no levels"),
        ("activation_checkpointing", "section", "says how to recompute, not whether: --recompute none|selective|full"),
        ("aio", "section", NVME),
        (
            "checkpoint nebula datastates_ckpt",
            "section",
            "checkpoints fit any layout and are written behind training: --save-every",
        ),
        ("compile", "section", "blocks are compiled one by one on a GPU: --compile, --no-compile"),
        ("autotuning", "section", "--explain says what fits"),
        ("pipeline", "any", "train_pipe.py is the pipeline"),
        ("dataloader_drop_last", "switch", "the stream of samples runs on over the end of an epoch"),
        ("vocabulary_size", "count", "--vocab-size, or the data's"),
        ("disable_allgather graph_harvesting use_data_before_expert_parallelism", "switch", "changes no number"),
        (
            "seq_parallel_communication_data_type seq_parallel_comm_data_type",
            "text",
            "no sequence parallelism of that kind",
        ),
        ("amp torch_autocast", "off", "use bf16 or fp16: weights are kept in that dtype, with float32 masters"),
        ("tensor_parallel", "off", "train_tp.py splits layers"),
        ("elasticity", "off", "the batch stays what it is on any number of ranks; any checkpoint resumes on any"),
        ("curriculum_learning data_efficiency", "off", "the order of samples is a function of seed and step"),
        (
            "compression_training quantize_training weight_quantization sparse_attention",
            "off",
            "the model is dense, in full precision",
        ),
        ("progressive_layer_drop eigenvalue hybrid_engine expert_parallel", "off", "there is nothing like it here"),
    ],
    "optimizer": [
        ("type", "text", ("AdamW is the optimizer", "Adam", "AdamW", "adam", "adamw")),
        ("params", "section", None),
        ("legacy_fusion", "switch", "there is one AdamW"),
    ],
    "optimizer.params": [
        ("lr eps", "positive", USE),
        ("betas", "betas", USE),
        ("weight_decay", "number", USE),
        ("adam_w_mode", "switch", USE),
        ("bias_correction", "switch", ("AdamW corrects the bias", True)),
        ("amsgrad maximize", "switch", ("AdamW is the optimizer", False)),
        ("max_grad_norm", "number", ("write gradient_clipping, beside optimizer", 0)),
        ("torch_adam fused foreach capturable differentiable set_grad_none", "switch", "torch's fused AdamW always"),
    ],
    "scheduler": [
        ("type", "text", ("the schedule is a linear warm-up, then cosine or constant", "WarmupCosineLR", "WarmupLR")),
        ("params", "section", None),
    ],
    "scheduler.params": [
        ("warmup_max_lr", "positive", USE),
        ("warmup_num_steps total_num_steps", "count", USE),
        ("cos_min_ratio", "number", USE),
        ("warmup_type", "text", USE),
        ("warmup_min_lr warmup_min_ratio", "number", ("warm-up starts at 0", 0)),
        ("last_batch_iteration", "integer", ("the step comes from the checkpoint", -1)),
    ],
    "fp16": [
        ("enabled", "switch", USE),
        ("loss_scale", "number", USE),
        ("initial_scale_power", "power", USE),
        ("loss_scale_window hysteresis", "count", USE),
        ("min_loss_scale", "positive", USE),
        ("consecutive_hysteresis", "switch", ("hysteresis is refilled when the scale doubles", False)),
        ("fp16_master_weights_and_grads", "switch", (FP32, False)),
        ("auto_cast fused_mode", "switch", "the inputs are token ids"),
    ],
    "bf16": [
        ("enabled", "switch", USE),
        ("bf16_master_weights_and_grads bf16_optimizer_states", "switch", (FP32, False)),
        ("immediate_grad_update", "switch", "gradients are added in float32 as backward makes them"),
        ("check_grad_overflow", "switch", "a gradient that is not finite is found in every dtype"),
    ],
    "zero_optimization": [
        ("stage", "integer", ("these are the stages", 0, 1, 2, 3)),
        ("offload_optimizer offload_param", "section", None),
        ("cpu_offload", "switch", USE),
        ("cpu_offload_param", "switch", ("weights stay on the GPU; stage 3 shards them", False)),
        ("cpu_offload_use_pin_memory", "switch", PINNED),
        ("reduce_bucket_size allgather_bucket_size", "size", UNITS),
        ("contiguous_gradients reduce_scatter allgather_partitions use_multi_rank_bucket_allreduce", "switch", UNITS),
        ("round_robin_gradients legacy_stage1", "switch", UNITS),
        ("overlap_comm", "switch", "transfers run behind backward unless --no-overlap"),
        ("sub_group_size", "size", "the update goes unit by unit"),
        ("prefetch_bucket_size max_live_parameters max_reuse_distance param_persistence_threshold", "size", TWO_BLOCKS),
        ("stage3_prefetch_bucket_size stage3_max_live_parameters stage3_max_reuse_distance", "size", TWO_BLOCKS),
        ("stage3_param_persistence_threshold stage3_model_persistence_threshold", "size", TWO_BLOCKS),
        (
            "model_persistence_threshold stage3_module_granularity_threshold stage3_partition_stream_chunk_size",
            "size",
            TWO_BLOCKS,
        ),
        (
            "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential memory_efficient_linear",
            "switch",
            TWO_BLOCKS,
        ),
        (
            "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save",
            "switch",
            "export.py gathers",
        ),
        ("gather_16bit_weights_on_model_save", "switch", "export.py gathers"),
        (
            "load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint",
            "switch",
            "checkpoints hold float32 masters",
        ),
        ("ignore_unused_parameters override_module_apply", "switch", "every parameter is used, every step"),
        ("log_trace_cache_warnings enable_sanity_checks", "switch", "--check-collectives compares the ranks' calls"),
        ("zero_hpz_partition_size", "size", ("weights are sharded over all ranks", 0, 1)),
        (
            "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients",
            "switch",
            ("nothing is quantized", False),
        ),
        ("mics_shard_size", "integer", ("weights are sharded over all ranks", -1)),
        (
            "mics_hierarchical_params_gather save_muon_momentum_buffer_in_memory parameter_alignment",
            "switch",
            "changes no number",
        ),
        ("zeropp_loco_param zenflow", "off", "each update uses the whole gradient of its step"),
        ("leaf_module", "section", "the model's blocks are the leaves"),
    ],
    "zero_optimization.offload_optimizer": [
        ("device", "text", ("optimizer state goes to host memory or stays", "none", "cpu")),
        ("ratio", "number", ("all of the optimizer state moves", 1)),
        ("pin_memory", "switch", PINNED),
        ("nvme_path", "text", NVME),
        ("buffer_count buffer_size", "size", NVME),
        (
            "fast_init pipeline pipeline_read pipeline_write",
            "switch",
            "gradients and weights flow while other units update",
        ),
        ("super_offload convert_grad_on_cpu", "switch", "gradients and weights flow while other units update"),
        ("cpuadam_cores_perc", "number", "the update uses the rank's share of the cores"),
    ],
    "zero_optimization.offload_param": [
        ("device", "text", ("weights stay on the GPU; stage 3 shards them", "none")),
        ("pin_memory", "switch", PINNED),
        ("nvme_path", "text", NVME),
        ("buffer_count buffer_size max_in_cpu", "size", NVME),
    ],
    "data_types": [
        ("grad_accum_dtype", "text", (FP32, "fp32")),
        ("param_dtype buffer_dtype", "text", ("fp16 and bf16 say it", "fp32")),
    ],
}
RULES = {
    f"{s}.{key}".lstrip("."): (kind, rule)
    for s, rows in SECTIONS.items()
    for keys, kind, rule in rows
    for key in keys.split()
}


def load(path: str) -> dict:
    """The file as nested dicts. Raises UserError with line and column, or the path of a key that is there twice."""

    def constant(name: str) -> None:
        raise UserError(f"{path}: {name} is not a JSON number")

    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        tree = json.loads(
            text, object_pairs_hook=tuple, parse_constant=constant
        )  # a tuple is an object: dicts forget repeated keys
    except json.JSONDecodeError as error:
        rest, before = text[error.pos :].lstrip(), text[: error.pos].rstrip()
        if not text.strip():
            raise UserError(f"{path}: empty; a JSON object is expected") from None
        comma = rest[:1] in ("}", "]") and before.endswith(",") or rest[:1] == ","
        hint = (
            "a comment, JSON has none"
            if rest[:1] in ("/", "#")
            else "a comma with nothing behind it"
            if comma
            else error.msg
        )
        raise UserError(f"{path}, line {error.lineno}, column {error.colno}: not JSON ({hint})") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path}: not a JSON text ({type(error).__name__})") from None
    if type(tree) is not tuple:
        raise UserError(f"{path}: found {_shown(tree)}; a JSON object {{...}} is expected")

    def as_dict(node: object, at: str) -> object:
        if type(node) is list:
            return [as_dict(item, at) for item in node]
        if type(node) is not tuple:
            return node
        found = {}
        for key, value in node:
            if key in found:
                raise UserError(f"{path}: {at}{key} is there twice; which one counts?")
            found[key] = as_dict(value, f"{at}{key}.")
        return found

    return as_dict(tree, "")  # type: ignore[return-value]


def account(path: str, tree: dict) -> tuple[dict[str, object], list[str]]:
    """Check every key against RULES -> (key path -> value of those in use, a line for each that is not and why)."""
    used: dict[str, object] = {}
    notes: list[str] = []

    def walk(section: str, node: dict) -> None:
        for name, value in sorted(
            node.items(), key=lambda item: item[0] != "type"
        ):  # a type nobody can honour explains its params
            key = f"{section}.{name}".lstrip(".")
            if key not in RULES:
                raise UserError(f"{path}: unknown key {key}; {_nearest(section, name)}")
            kind, rule = RULES[key]
            allowed, test = KINDS[kind]
            if type(rule) is tuple:
                allowed = f"{' or '.join(map(_shown, rule[1:]))}: {rule[0]}"
            if value is None:
                continue
            if value == AUTO and kind not in ("section", "off"):
                used[key] = AUTO
                notes.append(f"{key} is auto: our default")
                continue
            if not test(value):
                because = f": {rule}" if kind == "off" else ""
                raise UserError(f"{path}: {key} is {_shown(value)}; allowed is {allowed}{because}")
            if kind == "section" and rule is None:
                walk("bf16" if key == "bfloat16" else key, value)  # the older name
            elif kind == "off":
                notes.append(f"{key} is off, as here")
            elif isinstance(rule, str):
                notes.append(f"{key} ignored: {rule}")
            elif rule is USE or value in rule[1:]:
                used[key] = float(value) if kind in ("number", "positive") else value
            else:
                raise UserError(f"{path}: {key} is {_shown(value)}; allowed is {allowed}")

    walk("", tree)
    return used, notes


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _nearest(section: str, name: str) -> str:
    here = {key.rpartition(".")[2]: key for key in RULES if key.rpartition(".")[0] == section}
    anywhere = {key.rpartition(".")[2]: key for key in RULES}
    for names, cutoff in ((here, 0.7), (anywhere, 0.8)):
        if near := difflib.get_close_matches(name, names, 1, cutoff):
            return f"did you mean {names[near[0]]}?"
    return f"allowed there are {', '.join(here)}"


# --- what the keys mean together --------------------------------------------------------------------------------------


def complete_batch(path: str, used: dict[str, object], dp: int, given: dict[str, object]) -> dict[str, int]:
    """Solve train_batch_size = micro-batch x accumulation x dp for what is missing; {} when the file says nothing."""
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    if all(used.get(key, AUTO) == AUTO for key in keys):
        return {}
    train, micro, accum = (None if used.get(key) == AUTO else used.get(key) for key in keys)
    train, micro = train or given.get("global_batch"), micro or given.get("micro_batch")
    if not train and not micro:
        raise UserError(
            f"{path}: {keys[2]} alone makes no batch; add {keys[0]} or {keys[1]} (or --global-batch, --micro-batch)"
        )
    if not accum and not (train and micro) and AUTO in (used.get(key) for key in keys):  # the rest is ours to choose
        return {"global_batch": train} if train else {"micro_batch": micro}
    per_step = (micro or 1) * (accum or 1) * dp
    train = train or per_step
    if train % per_step or (micro and accum and train != per_step):
        factors = (
            [f"micro {micro}"] * bool(micro) + [f"accumulation {accum}"] * bool(accum) + [f"data-parallel ranks {dp}"]
        )
        verdict = "!=" if micro and accum else "is not a multiple of"
        raise UserError(
            f"{path}: {keys[0]} {train} {verdict} {' x '.join(factors)} = {per_step}; change one of {', '.join(keys)}"
        )
    micro = micro or train // per_step
    return {"global_batch": train, "micro_batch": micro}


Said = dict[str, tuple[object, str]]  # flag -> (value, the key that says so; "" where it is DeepSpeed's default)


def take(said: Said, used: dict[str, object], flag: str, key: str, default: object = None) -> None:
    """The key's value, or what DeepSpeed takes where it is absent; a key that is "auto" leaves the flag alone."""
    value = used.get(key, default)
    if value not in (None, AUTO):
        said[flag] = (value, key if key in used else "")


def precision(path: str, used: dict[str, object], given: dict[str, object], said: Said, notes: list[str]) -> None:
    fp16, bf16 = used.get("fp16.enabled", False), used.get("bf16.enabled", False)
    if fp16 is True and bf16 is True:
        raise UserError(f"{path}: fp16.enabled and bf16.enabled are both true; allowed is one of them")
    if True in (fp16, bf16):
        said["dtype"] = ("float16", "fp16.enabled") if fp16 is True else ("bfloat16", "bf16.enabled")
    elif AUTO not in (fp16, bf16):
        wanted = {"float16": "fp16.enabled", "bfloat16": "bf16.enabled"}.get(given.get("dtype"), "")
        said["dtype"] = (
            "float32",
            wanted if wanted in used else "",
        )  # a switch that is there and off contradicts the flag
    if fp16 is False:
        notes += [
            f"{key} ignored: fp16 is not enabled" for key in used if key.startswith("fp16.") and key != "fp16.enabled"
        ]
        return
    take(said, used, "loss_scale", "fp16.loss_scale", 0.0)
    take(said, used, "scale_power", "fp16.initial_scale_power", 16)
    take(said, used, "scale_window", "fp16.loss_scale_window", 1000)
    take(said, used, "scale_hysteresis", "fp16.hysteresis", 2)
    take(said, used, "scale_min", "fp16.min_loss_scale", 1.0)


def optimizer(path: str, used: dict[str, object], said: Said) -> None:
    params = "optimizer.params."
    for i, beta in enumerate(used.get(params + "betas", ()) if used.get(params + "betas") != AUTO else (AUTO, AUTO)):
        used[f"{params}betas[{i}]"] = beta
    take(said, used, "lr", params + "lr", 1e-3)
    take(said, used, "beta1", params + "betas[0]", 0.9)
    take(said, used, "beta2", params + "betas[1]", 0.999)
    take(said, used, "eps", params + "eps", 1e-8)
    take(said, used, "weight_decay", params + "weight_decay", 0.0)
    plain = used["optimizer.type"] in ("Adam", "adam") and used.get(params + "adam_w_mode") is False
    if plain and said.get("weight_decay", (1.0,))[0]:
        raise UserError(
            f"{path}: {params}adam_w_mode is false; allowed is true, or weight_decay 0: decay is AdamW's, not a term of the loss"
        )


def scheduler(path: str, used: dict[str, object], given: dict[str, object], said: Said, notes: list[str]) -> None:
    """Both end in lr_at: WarmupLR is its cosine with min_lr = lr."""
    kind, params = used["scheduler.type"], "scheduler.params."
    foreign = (
        ("warmup_max_lr", "warmup_min_lr")
        if kind == "WarmupCosineLR"
        else ("total_num_steps", "cos_min_ratio", "warmup_min_ratio")
    )
    for name in foreign:
        if params + name in used:
            raise UserError(f"{path}: {params}{name} is no parameter of {kind}")
    shape = used.get(params + "warmup_type", "log")
    if shape not in ("linear", AUTO):
        default = "" if params + "warmup_type" in used else ", as it is there when absent"
        raise UserError(f'{path}: {params}warmup_type is "{shape}"{default}; allowed is "linear"')
    take(said, used, "warmup_steps", params + "warmup_num_steps", 1000)
    take(said, used, "steps", params + "total_num_steps")
    take(said, used, "lr", params + "warmup_max_lr")  # it beats optimizer.params.lr there too
    lr = given.get("lr") or said.get("lr", (None,))[0]
    ratio = used.get(params + "cos_min_ratio", 1e-4) if kind == "WarmupCosineLR" else 1.0
    if ratio != AUTO:
        if lr is None:
            raise UserError(
                f"{path}: scheduler.type {kind} ends at a fraction of the peak, which is missing; give --lr"
            )
        said["min_lr"] = (lr * ratio, "scheduler.type")
    notes.append(
        "scheduler: the same curve, but for a warm-up that is two steps ahead: the first update has a learning rate above 0"
    )


def read_deepspeed(path: str, dp: int, given: dict[str, object] = {}) -> tuple[dict[str, object], list[str]]:  # noqa: B006
    """Flags that a DeepSpeed configuration file stands for.

    dp: data-parallel ranks. given: flags set on the command line (field of train_zero.Config -> value). Returns the flags
    the file sets and a line for each key that sets none. Raises UserError for what cannot be honoured or contradicts `given`.
    """
    used, notes = account(path, load(path))
    said: Said = {flag: (value, "its batch") for flag, value in complete_batch(path, used, dp, given).items()}
    take(said, used, "clip", "gradient_clipping")
    take(said, used, "wire", "communication_data_type")
    zero = "zero_optimization."
    take(said, used, "stage", zero + "stage", 0)
    if used.get(zero + "cpu_offload") is True:  # the older way to say it
        if used.setdefault(zero + "offload_optimizer.device", "cpu") != "cpu":
            raise UserError(
                f"{path}: zero_optimization.cpu_offload is true and offload_optimizer.device is not cpu: which of them?"
            )
    take(said, used, "offload", zero + "offload_optimizer.device", "none")
    if "offload" in said:
        said["offload"] = ("optimizer" if said["offload"][0] == "cpu" else "none", said["offload"][1])
    precision(path, used, given, said, notes)
    for section in ("optimizer", "scheduler"):
        if f"{section}.type" not in used and any(key.startswith(f"{section}.") for key in used):
            raise UserError(
                f"{path}: {section}.type is missing; allowed is {' or '.join(RULES[f'{section}.type'][1][1:3])}"
            )
    if "optimizer.type" in used:
        optimizer(path, used, said)
    if "scheduler.type" in used:
        scheduler(path, used, given, said, notes)
    for key, ours in (
        ("gradient_clipping", "--clip (there: no clipping)"),
        ("optimizer", "--lr, --beta1, --beta2, --eps, --weight-decay"),
        ("scheduler", "--warmup-steps, --min-lr (there: a constant learning rate)"),
    ):
        if not any(name == key or name.startswith(f"{key}.") for name in used):
            notes.append(f"{key} is not in the file: left to {ours}")
    for flag, (value, key) in said.items():
        if key and flag in given and given[flag] != value:
            raise UserError(
                f"{path}: {key} means --{flag.replace('_', '-')} {value}, the command line says {given[flag]}; leave out one of them"
            )
    return {flag: given.get(flag, value) for flag, (value, _) in said.items()}, notes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--dp", type=int, default=1, help="data-parallel ranks (default 1)")
    args = parser.parse_args()
    if args.dp < 1:
        raise UserError(f"--dp {args.dp}: allowed is 1 or more")
    flags, notes = read_deepspeed(args.file, args.dp)
    print(" ".join(f"--{flag.replace('_', '-')} {value}" for flag, value in flags.items()))
    print("\n".join(notes))


if __name__ == "__main__":
    run_cli(main)
