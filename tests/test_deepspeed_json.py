"""deepspeed_json.py: real files through the reader and through its command line."""

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT

import deepspeed_json
import train_zero
from deepspeed_json import RULES, USED, account, read_deepspeed
from support.flags import UserError

EXAMPLE = ROOT / "examples" / "ds_zero2_offload.json"
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@pytest.fixture
def read(tmp_path):
    """read(config or raw text, dp, given) -> (flags, notes)."""

    def call(config: dict | list | str, dp: int = 1, given: dict | None = None):
        path = tmp_path / "ds.json"
        path.write_text(config if isinstance(config, str) else json.dumps(config))
        return read_deepspeed(str(path), dp, given or {})

    return call


@pytest.fixture
def refused(read):
    """refused(config, dp, given) -> the one line of the error."""

    def call(config: dict | list | str, dp: int = 1, given: dict | None = None) -> str:
        with pytest.raises(UserError) as error:
            read(config, dp, given)
        assert "\n" not in str(error.value) and "ds.json" in str(error.value)
        return str(error.value)

    return call


# --- the file that must run as it is ----------------------------------------------------------------------------------


def test_example_as_given():
    config = json.loads(EXAMPLE.read_text())
    assert config == {
        "train_batch_size": 64,
        "gradient_accumulation_steps": 4,
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    }
    for dp, micro in ((1, 16), (2, 8), (4, 4)):
        flags, notes = read_deepspeed(str(EXAMPLE), dp)
        assert flags == {
            "global_batch": 64,
            "micro_batch": micro,
            "stage": 2,
            "offload": "optimizer",
            "dtype": "float16",
            "loss_scale": 0.0,
            "scale_power": 16,
            "scale_window": 1000,
            "scale_hysteresis": 2,
            "scale_min": 1.0,
        }
        assert any(re.match(r"zero_optimization.offload_optimizer.pin_memory ignored: .+", note) for note in notes)
    with pytest.raises(
        UserError, match="train_batch_size 64 is not a multiple of accumulation 4 x data-parallel ranks 3 = 12"
    ):
        read_deepspeed(str(EXAMPLE), 3)


def test_command_line(tmp_path):
    call = [sys.executable, "deepspeed_json.py", str(EXAMPLE), "--dp"]
    good = subprocess.run([*call, "2"], cwd=ROOT, capture_output=True, text=True)
    assert (
        good.returncode == 0
        and "--micro-batch 8" in good.stdout.splitlines()[0]
        and "pin_memory ignored" in good.stdout
    )
    bad = subprocess.run([*call, "3"], cwd=ROOT, capture_output=True, text=True)
    assert bad.returncode == 2 and bad.stderr.startswith("error: ") and bad.stderr.count("\n") == 1


def test_flags_are_fields_with_the_right_types(read):
    """Everything the reader can set, at once: names and types of train_zero's Config."""
    flags, _ = read(
        {
            "train_batch_size": 8,
            "gradient_clipping": 1,
            "communication_data_type": "bf16",
            "fp16": {"enabled": True, "min_loss_scale": 1},
            "zero_optimization": {"stage": 1},
            "optimizer": {"type": "Adam", "params": {"lr": 1, "betas": [0, 0.5]}},
        }
    )
    kinds = {field: type(value) for field, value in vars(train_zero.Config()).items()}
    assert flags.keys() <= kinds.keys() and len(flags) == 17
    # JSON's 1 may stand for 1.0 in betas; where a field is a count it is an int
    assert all(type(flags[f]) is kinds[f] or (kinds[f] is float and type(flags[f]) is int) for f in flags)


# --- the batch triangle -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dp", [1, 2, 3])
def test_batch_triangle_every_subset(read, refused, dp):
    full = dict(zip(BATCH, (2 * 4 * dp, 2, 4)))
    for size in range(4):
        for keys in itertools.combinations(BATCH, size):
            config = {key: full[key] for key in keys}
            if keys == (BATCH[2],):
                assert "alone makes no batch" in refused(config, dp)
                continue
            flags, _ = read(config, dp)
            if len(keys) >= 2:
                expected = {"global_batch": 8 * dp, "micro_batch": 2}
            elif keys == (BATCH[0],):
                expected = {"global_batch": 8 * dp, "micro_batch": 8}  # accumulation 1, as there
            elif keys == (BATCH[1],):
                expected = {"global_batch": 2 * dp, "micro_batch": 2}
            else:
                expected = {}
            assert {k: v for k, v in flags.items() if "batch" in k} == expected, keys


def test_batch_triangle_contradictions(read, refused):
    three = dict(zip(BATCH, (16, 2, 4)))
    assert "train_batch_size 16 != micro 2 x accumulation 4 x data-parallel ranks 1 = 8" in refused(three, 1)
    assert read(three, 2)[0]["micro_batch"] == 2
    assert "train_batch_size 10 is not a multiple of data-parallel ranks 3 = 3" in refused({BATCH[0]: 10}, 3)
    assert "train_batch_size 10 is not a multiple of micro 4 x data-parallel ranks 1 = 4" in refused(
        {BATCH[0]: 10, BATCH[1]: 4}, 1
    )
    for key, bad in itertools.product(BATCH, (0, -4, 8.0, "8", True, [8], 1e2)):
        assert f"{key} is {json.dumps(bad)}; allowed is a whole number, 1 or more" in refused({key: bad})


def test_batch_triangle_auto_and_flags(read, refused):
    auto = dict.fromkeys(BATCH, "auto")
    assert "global_batch" not in read(auto, 2)[0]
    flags, notes = read(auto | {BATCH[0]: 64}, 2)
    assert flags["global_batch"] == 64 and "micro_batch" not in flags  # ours to choose, not accumulation 1
    assert "train_micro_batch_size_per_gpu is auto: our default" in notes
    # a flag completes what the file leaves open, and may not contradict it
    assert read({BATCH[2]: 4}, 2, {"global_batch": 64})[0]["micro_batch"] == 8
    assert read({BATCH[0]: 64}, 2, {"micro_batch": 8})[0]["micro_batch"] == 8
    assert "train_batch_size 64 != micro 4 x accumulation 4 x data-parallel ranks 2 = 32" in refused(
        {BATCH[0]: 64, BATCH[2]: 4}, 2, {"micro_batch": 4}
    )
    assert "train_batch_size means --global-batch 64, the command line says 32" in refused(
        {BATCH[0]: 64}, 2, {"global_batch": 32}
    )


# --- precision --------------------------------------------------------------------------------------------------------


def test_precision(read, refused):
    on, off = {"enabled": True}, {"enabled": False}
    for config, dtype in (
        ({}, "float32"),
        ({"fp16": on}, "float16"),
        ({"bf16": on}, "bfloat16"),
        ({"fp16": off, "bf16": on}, "bfloat16"),
        ({"fp16": off, "bf16": off}, "float32"),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}, None),
        ({"fp16": {"enabled": "auto"}, "bf16": on}, "bfloat16"),
    ):
        assert read(config)[0].get("dtype") == dtype, config
    assert "both true" in refused({"fp16": on, "bf16": on})
    assert read({}, given={"dtype": "bfloat16"})[0]["dtype"] == "bfloat16"  # the file says nothing
    assert "fp16.enabled means --dtype float16, the command line says bfloat16" in refused(
        {"fp16": on}, given={"dtype": "bfloat16"}
    )
    assert "fp16.enabled means --dtype float32" in refused({"fp16": off}, given={"dtype": "float16"})


def test_scaler_fields(read, refused):
    fields = {
        "loss_scale_window": 50,
        "hysteresis": 3,
        "min_loss_scale": 0.25,
        "initial_scale_power": 12,
        "loss_scale": 0,
    }
    flags, notes = read({"fp16": {"enabled": True, **fields}})
    assert [flags[f"scale_{f}"] for f in ("window", "hysteresis", "min", "power")] == [50, 3, 0.25, 12]
    flags, notes = read({"fp16": {"enabled": False, **fields}})
    assert not any(flag.startswith(("scale_", "loss_scale")) for flag in flags)
    assert sum("fp16 is not enabled" in note for note in notes) == len(fields)
    assert (
        read({"fp16": {"enabled": True}}, given={"scale_hysteresis": 1})[0]["scale_hysteresis"] == 1
    )  # a default gives way
    assert "fp16.hysteresis" in refused({"fp16": {"enabled": True, "hysteresis": 2}}, given={"scale_hysteresis": 1})
    assert "consecutive_hysteresis is true; allowed is false" in refused({"fp16": {"consecutive_hysteresis": True}})


# --- ZeRO, optimizer, schedule ----------------------------------------------------------------------------------------


def test_zero_and_offload(read, refused):
    def zero(**fields):
        return {"zero_optimization": fields}

    assert (read({})[0]["stage"], read({})[0]["offload"]) == (0, "none")
    for stage in range(4):
        assert read(zero(stage=stage))[0]["stage"] == stage
    for bad in ("2", 4, -1, 2.0, True, [2]):
        assert f"zero_optimization.stage is {json.dumps(bad)}; allowed is 0 or 1 or 2 or 3" in refused(zero(stage=bad))
    assert "zero_optimization is true; allowed is an object" in refused({"zero_optimization": True})
    assert read(zero(stage=1, offload_optimizer={"device": "none"}))[0]["offload"] == "none"
    assert read(zero(stage=1, offload_optimizer=None))[0]["offload"] == "none"
    assert 'allowed is false: write "offload_optimizer": {"device": "cpu"}' in refused(zero(stage=1, cpu_offload=True))
    assert read(zero(stage=1, cpu_offload=False))[0]["offload"] == "none"
    assert 'device is "nvme"; allowed is "none" or "cpu"' in refused(
        zero(stage=3, offload_optimizer={"device": "nvme"})
    )
    assert 'offload_param.device is "cpu"; allowed is "none"' in refused(zero(stage=3, offload_param={"device": "cpu"}))
    assert "means --stage 3, the command line says 2" in refused(zero(stage=3), given={"stage": 2})
    assert "means --offload optimizer" in refused(zero(offload_optimizer={"device": "cpu"}), given={"offload": "none"})
    flags, notes = read(
        zero(stage=3, reduce_bucket_size=5e8, stage3_max_live_parameters=1e9, sub_group_size="auto", overlap_comm=False)
    )
    assert {n.split()[0].split(".")[1] for n in notes if n.startswith("zero_opt")} == {
        "reduce_bucket_size",
        "stage3_max_live_parameters",
        "sub_group_size",
        "overlap_comm",
    }


def test_optimizer(read, refused):
    def adam(kind="AdamW", **params):
        return {"optimizer": {"type": kind, "params": params}}

    flags, _ = read(adam(lr=3e-4, betas=[0.8, 0.95], eps=1e-6, weight_decay=0.05))
    assert [flags[f] for f in ("lr", "beta1", "beta2", "eps", "weight_decay")] == [3e-4, 0.8, 0.95, 1e-6, 0.05]
    flags, _ = read(adam())
    assert [flags[f] for f in ("lr", "beta1", "beta2", "eps", "weight_decay")] == [
        1e-3,
        0.9,
        0.999,
        1e-8,
        0.0,
    ]  # DeepSpeed's own
    flags, _ = read(adam(lr="auto", betas="auto", eps="auto", weight_decay="auto"))
    assert not flags.keys() & {"lr", "beta1", "beta2", "eps", "weight_decay"}
    assert "lr" not in read({})[0]
    assert (
        read(adam("Adam", torch_adam=True, weight_decay=0.1))[0]["weight_decay"] == 0.1
    )  # adam_w_mode is true unless said
    assert "adam_w_mode is false" in refused(adam("Adam", adam_w_mode=False, weight_decay=0.1))
    assert 'optimizer.type is "OneBitAdam"; allowed is "AdamW"' in refused(
        {"optimizer": {"params": {"freeze_step": 3}, "type": "OneBitAdam"}}
    )
    assert "optimizer.type is missing" in refused({"optimizer": {"params": {"lr": 1e-3}}})
    assert "betas is [0.9]; allowed is two numbers" in refused(adam(betas=[0.9]))
    for bad in (0, -1, "1e-3", True):
        assert "optimizer.params.lr is" in refused(adam(lr=bad))
    assert "optimizer.params.lr means --lr 0.0003, the command line says 0.1" in refused(
        adam(lr=3e-4), given={"lr": 0.1}
    )
    assert read(adam(), given={"lr": 0.1})[0]["lr"] == 0.1


# --- each key accounted for -------------------------------------------------------------------------------------------


def test_misspelt_keys(refused):
    for config, near in (
        ({"zero_optimisation": {"stage": 2}}, "zero_optimization"),
        ({"train_micro_batch_size_per_device": 2}, "train_micro_batch_size_per_gpu"),
        ({"zero_optimization": {"Stage": 2}}, "zero_optimization.stage"),
        ({"zero_optimization": {"offload_optimiser": {}}}, "zero_optimization.offload_optimizer"),
        ({"fp16": {"enable": True}}, "fp16.enabled"),
        ({"overlap_comm": True}, "zero_optimization.overlap_comm"),
        ({"loss_scale_window": 100}, "fp16.loss_scale_window"),
        ({"optimizer": {"type": "Adam", "params": {"learning_rate": 1}}}, None),
    ):
        message = refused(config)
        assert "unknown key" in message
        assert f"did you mean {near}?" in message if near else "allowed there are lr, betas, eps" in message, message


def test_refused_and_off(read, refused):
    for key in (
        "amp",
        "torch_autocast",
        "elasticity",
        "curriculum_learning",
        "data_efficiency",
        "sparse_attention",
        "tensor_parallel",
    ):
        assert any(note.startswith(f"{key} ignored: ") for note in read({key: {"enabled": False}})[1])
        assert f"{key} is {{" in refused({key: {"enabled": True}})
    assert 'communication_data_type is "fp16"; allowed is "fp32" or "bf16"' in refused(
        {"communication_data_type": "fp16"}
    )
    assert (
        read({"communication_data_type": "bf16"})[0]["wire"] == "bf16"
        and "wire" not in read({"communication_data_type": None})[0]
    )
    assert "the schedule is --steps, --warmup-steps and --min-lr" in refused({"scheduler": {"type": "WarmupLR"}})


def test_every_key_in_use_makes_a_difference(read):
    """Two values of each key that the table calls used: other flags, or one of them refused."""
    two = {"count": (2, 4), "number": (0.0, 0.5), "positive": (0.25, 0.5)}
    two |= {"betas": ([0.1, 0.2], [0.3, 0.4])}
    for key, (kind, _, _) in USED.items():
        outcomes = []
        for value in two.get(kind) or [json.loads(kind.split(" or ")[0]), "something else"]:
            config = {"optimizer": {"type": "Adam", "params": {"weight_decay": 0.1}}}
            if key == BATCH[2]:
                config[BATCH[1]] = 1
            if key.startswith("fp16."):
                config["fp16"] = {"enabled": True}
            *parents, leaf = key.split(".")
            node = config
            for parent in parents:
                node = node.setdefault(parent, {})
            node[leaf] = value
            try:
                outcomes.append(read(config)[0])
            except UserError as error:
                outcomes.append(str(error))
        assert outcomes[0] != outcomes[1], key


def test_no_other_key_falls_silent():
    """Set to something of its kind, a key in no use leaves a line that names it, or is refused by name."""
    for key, (why, kind) in RULES.items():
        if key in USED or kind == "section":
            continue
        allowed = [7] if kind == "any" else map(json.loads, kind.split(" or "))
        for value in [*allowed, "something else"]:
            *parents, leaf = key.split(".")
            config = {leaf: value}
            for parent in reversed(parents):
                config = {parent: config}
            if value == "something else" and kind != "any":
                with pytest.raises(UserError, match=re.escape(f"{key} is ") + ".*allowed is .*" + re.escape(why)):
                    account("ds.json", config)
            else:
                used, notes = account("ds.json", config)
                assert not used and f"{key} ignored: {why}" in notes, key


def test_syntax_and_shape(refused, tmp_path):
    assert "Expecting value: line 1" in refused("") and "allowed is a JSON object" in refused(" \n")
    assert "found [1]; allowed is a JSON object" in refused([1])
    assert "found 3" in refused("3")
    comma = refused('{\n  "fp16": {"enabled": true,}\n}')
    assert "line 2 column" in comma and "without comments or a comma at the end" in comma
    assert "line 2 column 3" in refused('{\n  // batch\n  "train_batch_size": 8\n}')
    assert "line 2 column 3" in refused('{\n  # batch\n  "train_batch_size": 8\n}')
    assert "line 1" in refused('{"train_batch_size": 1_000}')
    assert "train_batch_size is there twice" in refused('{"train_batch_size": 8, "train_batch_size": 16}')
    assert "stage is there twice" in refused('{"zero_optimization": {"stage": 1, "stage": 2}}')
    assert "gradient_clipping is NaN" in refused('{"gradient_clipping": NaN}')
    assert "gradient_clipping is Infinity" in refused('{"gradient_clipping": 1e999}')
    assert "recursion" in refused("[" * 200000)
    with pytest.raises(UserError, match="No such file"):
        read_deepspeed(str(tmp_path / "missing.json"), 1)
    with pytest.raises(UserError, match="Is a directory"):
        read_deepspeed(str(tmp_path), 1)
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(UserError, match="latin.json: 'utf-8' codec"):
        read_deepspeed(str(tmp_path / "latin.json"), 1)
    (tmp_path / "bom.json").write_bytes(b"\xef\xbb\xbf" + EXAMPLE.read_bytes())
    assert read_deepspeed(str(tmp_path / "bom.json"), 2)[0]["micro_batch"] == 8


def test_hugging_face_file(read):
    """A file as Hugging Face's Trainer wants it, everything "auto": our defaults, each named."""
    config = {
        "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "none"},
            "reduce_bucket_size": "auto",
            "sub_group_size": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "gradient_clipping": "auto",
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
        **dict.fromkeys(BATCH, "auto"),
    }
    flags, notes = read(config, 2)
    assert flags == {
        "stage": 3,
        "offload": "optimizer",
        **{"loss_scale": 0.0, "scale_power": 16, "scale_window": 1000, "scale_hysteresis": 2, "scale_min": 1.0},
    }
    assert sum(note.endswith("is auto: our default") for note in notes) == 10
    assert not any("gradient_clipping is not in the file" in note for note in notes)


def test_auto_for_a_key_that_is_not_used(read):
    flags, notes = read({"fp16": {"enabled": False, "consecutive_hysteresis": "auto", "hysteresis": "auto"}})
    assert flags["dtype"] == "float32" and "fp16.consecutive_hysteresis is auto: our default" in notes


def test_module_docstring_names_a_file_that_exists():
    for path in re.findall(r"examples/\S+\.json", deepspeed_json.__doc__):
        assert Path(ROOT, path).exists()


def test_a_key_that_is_a_comment(read):
    _, notes = read({"_read_the_docs": "https://...", "zero_optimization": {"stage": 2, "_why": "it fits"}})
    comments = {note for note in notes if "comment" in note}
    assert comments == {f"{key} ignored: it is a comment" for key in ("_read_the_docs", "zero_optimization._why")}
