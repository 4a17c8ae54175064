"""Hugging Face folders: the same logits in transformers, the same bits back, and nothing loaded that does not fit."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import ROOT, final_weights, logits_of, run_ranks, toy_files, train
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

import export
from checkpoint import Piece, flat_piece, slice_piece, whole_piece
from export import find_checkpoint, hf_name, load_hf, to_hf
from model import load_config, params
from sample import load_model
from support.flags import UserError

KINDS = {"untied": {}, "tied": {"tie": True}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Run folders untied/ and tied/ of two ranks, their exports with -hf behind. lr: norms are not all ones then."""
    folder = tmp_path_factory.mktemp("runs")
    toy_files(folder, rope_theta=500000.0, norm_eps=1e-6)  # not transformers' defaults
    flags = {name: kind | dict(dtype="float32", steps=3, lr=3e-2, warmup_steps=0) for name, kind in KINDS.items()}
    run_ranks(2, train, "train_ddp", str(folder), flags)
    for name in KINDS:
        to_hf(find_checkpoint(folder / name), folder / f"{name}-hf", "float32")
    yield folder


def masters(run: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in final_weights(run).items() if not name.startswith("exp_avg")}


def empty_like(weights: dict[str, torch.Tensor]) -> dict[str, Piece]:
    return {name: whole_piece(torch.full_like(tensor, torch.nan)) for name, tensor in weights.items()}


def assert_filled(pieces: dict[str, Piece], weights: dict[str, torch.Tensor]) -> None:
    for name, piece in pieces.items():
        assert torch.equal(piece.boxes[0][1], weights[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_equal_logits_in_transformers(runs, kind):
    ours = load_model(find_checkpoint(runs / kind), torch.float32, torch.device("cpu"))
    assert all(not torch.equal(w, torch.ones_like(w)) for name, w in masters(runs / kind).items() if "norm" in name)
    theirs = LlamaForCausalLM.from_pretrained(runs / f"{kind}-hf", dtype=torch.float32)
    x = torch.randint(61, (3, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(theirs(x).logits, logits_of(ours, x), rtol=0, atol=1e-5)
    assert theirs.config.eos_token_id is None  # not Llama's 2, an ordinary token here
    assert load_config(str(runs / f"{kind}-hf/config.json")) == ours.cfg


def test_back_through_init_from_is_bit_equal(runs):
    # an update at lr 1e-30 is below the last bit of every weight
    common = dict(dtype="float32", steps=1, lr=1e-30, warmup_steps=0)
    again = {
        f"{name}-again": common | dict(model=f"{runs}/{name}-hf/config.json", init_from=f"{runs}/{name}-hf")
        for name in KINDS
    }
    run_ranks(2, train, "train_ddp", str(runs), again)
    for name in KINDS:
        before, after = masters(runs / name), masters(runs / f"{name}-again")
        assert before.keys() == after.keys() and ("head.weight" in before) == (name == "untied")
        assert all(torch.equal(before[n], after[n]) for n in before)


def test_boxes_of_any_layout(runs):
    """What a ZeRO shard, a tensor-parallel rank and a pipeline stage ask for, in float64."""
    weights, cfg = masters(runs / "untied"), load_config(str(runs / "untied-hf/config.json"))
    wq, gate = weights["blocks.1.wq.weight"].double(), weights["blocks.1.w_gate.weight"].double()
    pieces = {
        "blocks.1.wq.weight": flat_piece((32, 32), 17, torch.zeros(555, dtype=torch.float64)),
        "blocks.1.w_gate.weight": slice_piece((88, 32), (44, 8), torch.zeros(44, 16, dtype=torch.float64)),
        "norm.weight": flat_piece((32,), 5, torch.zeros(9, dtype=torch.float64)),
        "head.weight": Piece((61, 32), torch.float64),
    }
    load_hf(runs / "untied-hf", pieces, cfg)
    assert len(pieces["blocks.1.wq.weight"].boxes) == 3
    assert torch.equal(
        torch.cat([t.flatten() for _, t in pieces["blocks.1.wq.weight"].boxes]), wq.flatten()[17 : 17 + 555]
    )
    assert torch.equal(pieces["blocks.1.w_gate.weight"].boxes[0][1], gate[44:, 8:24])
    assert torch.equal(pieces["norm.weight"].boxes[0][1], weights["norm.weight"].double()[5:14])


def test_several_files(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "FILE_BYTES", 20_000)
    nbytes = to_hf(find_checkpoint(runs / "untied"), tmp_path / "hf", "float32")
    files, weights = sorted((tmp_path / "hf").glob("*.safetensors")), masters(runs / "untied")
    assert [f.name for f in files] == [
        f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
    ] and len(files) > 3
    assert all(sum(t.nbytes for t in load_file(f).values()) <= 20_000 for f in files)
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == nbytes == sum(t.nbytes for t in weights.values())
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).state_dict()
    assert all(torch.equal(theirs[hf_name(name)], tensor) for name, tensor in weights.items())
    pieces, cfg = empty_like(weights), load_config(str(tmp_path / "hf/config.json"))
    load_hf(tmp_path / "hf", pieces, cfg)
    assert_filled(pieces, weights)

    for name in ("../" + files[0].name, "gone.safetensors"):
        bad = index["weight_map"] | {"lm_head.weight": name}
        (tmp_path / "hf/model.safetensors.index.json").write_text(json.dumps({"weight_map": bad}))
        with pytest.raises(UserError, match=f"index.json names the file '{name}'"):
            load_hf(tmp_path / "hf", pieces, cfg)


def damage(hf: Path, tensors: dict[str, torch.Tensor], name: str) -> None:
    """Make the folder `hf` bad in the way `name`."""
    if name == "missing, left over":
        tensors["model.layers.7.mlp.up_proj.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    elif name == "shape":
        tensors["model.norm.weight"] = torch.zeros(0)
    elif name == "quantised":
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)
    elif name == "twice":
        tensors["module.lm_head.weight"] = tensors["lm_head.weight"].clone()
    elif name == "other model":  # the shapes of all weights stay as they are
        config = json.loads((hf / "config.json").read_text()) | {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
        }
        (hf / "config.json").write_text(json.dumps(config))
    save_file(tensors, hf / "model.safetensors")
    if name == "cut short":
        (hf / "model.safetensors").write_bytes((hf / "model.safetensors").read_bytes()[:-1])
    elif name == "pointer":
        (hf / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    elif name == "nothing":
        (hf / "model.safetensors").unlink()


@pytest.mark.parametrize(
    "name, message",
    {
        "missing, left over": r"missing: layers.1.mlp.up_proj.weight; left over: layers.7.mlp.up_proj.weight$",
        "shape": r": norm.weight has shape \(0,\), expected \(32,\)",
        "quantised": r"lm_head.weight is I8, allowed are F64",
        "twice": r"twice: module.lm_head.weight",
        "other model": r"n_head is 2 there, 4 here, n_kv_head is 1 there, 2 here",
        "cut short": r"model.safetensors is damaged",
        "pointer": r"model.safetensors is a Git LFS pointer: fetch the file itself: git lfs pull",
        "nothing": r"holds neither model.safetensors nor",
    }.items(),
)
def test_refused(runs, tmp_path, name, message):
    cfg, weights = load_config(str(runs / "untied-hf/config.json")), masters(runs / "untied")
    hf = shutil.copytree(runs / "untied-hf", tmp_path / "hf")
    damage(hf, load_file(hf / "model.safetensors"), name)
    pieces = empty_like(weights)
    with pytest.raises(UserError, match=message) as caught:
        load_hf(hf, pieces, cfg)
    assert "\n" not in str(caught.value)
    assert all(piece.boxes[0][1].isnan().all() for piece in pieces.values())  # nothing was filled before the check


class Attack:
    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def test_pickles_are_refused_unread(runs, tmp_path):
    shutil.copy(runs / "untied-hf/config.json", tmp_path)
    torch.save({"lm_head.weight": Attack(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="pytorch_model.bin is refused.*only safetensors"):
        load_hf(tmp_path, {}, load_config(str(tmp_path / "config.json")))
    assert not (tmp_path / "ran").exists()
    torch.load(tmp_path / "pytorch_model.bin", weights_only=False)
    assert (tmp_path / "ran").exists()  # the file is as bad as it should be


def test_names_and_heads_that_other_writers_use(runs, tmp_path):
    cfg, weights = load_config(str(runs / "tied-hf/config.json")), masters(runs / "tied")
    tensors = load_file(runs / "tied-hf/model.safetensors")
    assert "lm_head.weight" not in tensors
    shutil.copy(runs / "tied-hf/config.json", tmp_path)
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    for renamed in (
        {name.removeprefix("model."): t for name, t in tensors.items()},
        {
            name.replace("model.", "module._orig_mod.model.").replace("layers.1.", "layers.1._orig_mod."): t
            for name, t in tensors.items()
        },
        tensors | table | head,
    ):
        save_file(renamed, tmp_path / "model.safetensors")
        pieces = empty_like(weights)
        load_hf(tmp_path, pieces, cfg)
        assert_filled(pieces, weights)
    save_file(tensors | {"lm_head.weight": head["lm_head.weight"] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="lm_head.weight differs"):
        load_hf(tmp_path, empty_like(weights), cfg)


def test_nothing_is_published_from_a_bad_checkpoint(runs, tmp_path):
    good = find_checkpoint(runs / "untied")
    out = tmp_path / "out" / "hf"
    placeholder = shutil.copytree(
        good, tmp_path / "placeholder"
    )  # the model that meta.json promises is wider than what was saved
    meta = json.loads((good / "meta.json").read_text())
    (placeholder / "meta.json").write_text(json.dumps(meta | {"model": meta["model"] | {"n_ff": 96, "n_layer": 3}}))
    with pytest.raises(UserError, match=r"missing: blocks.2.*w_gate.weight has shape \(88, 32\), expected \(96, 32\)"):
        to_hf(placeholder, out, "float32")
    flipped = shutil.copytree(good, tmp_path / "flipped")
    data = bytearray((flipped / "__1_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (flipped / "__1_0.distcp").write_bytes(data)
    with pytest.raises(UserError, match="__1_0.distcp is damaged"):
        to_hf(flipped, out, "float32")
    assert not out.parent.exists()
    out.mkdir(parents=True)
    (out / "mine").touch()
    with pytest.raises(UserError, match="exists and is not an empty folder"):
        to_hf(good, out, "float32")
    assert [p.name for p in out.parent.iterdir()] == ["hf"] and [p.name for p in out.iterdir()] == ["mine"]


def test_command_line(runs, tmp_path):
    call = [sys.executable, str(ROOT / "export.py"), "to-hf"]
    done = subprocess.run(
        [*call, str(runs / "tied"), str(tmp_path / "hf"), "--dtype", "bfloat16"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and "step_00000003 as Hugging Face Llama, 0.000 GB of bfloat16" in done.stdout, (
        done.stderr
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]
    tensors, weights = load_file(tmp_path / "hf/model.safetensors"), masters(runs / "tied")
    assert tensors.keys() == {hf_name(name) for name in params(load_config(str(tmp_path / "hf/config.json")))}
    assert all(torch.equal(tensors[hf_name(name)], tensor.bfloat16()) for name, tensor in weights.items())
    assert LlamaForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto").dtype == torch.bfloat16
    done = subprocess.run([*call, str(runs), str(tmp_path / "other")], capture_output=True, text=True, timeout=120)
    assert (
        done.returncode == 2
        and done.stderr.startswith(f"error: {runs} is no run folder")
        and done.stderr.count("\n") == 1
    )
    # a disk that takes no more than 50 kB of a file
    small = ["bash", "-c", 'ulimit -f 50 && exec "$@"', "-", *call, str(runs / "tied"), str(tmp_path / "full")]
    done = subprocess.run(small, capture_output=True, text=True, timeout=120)
    assert (
        done.returncode == 2
        and done.stderr.startswith(f"error: cannot write {tmp_path}/full: ")
        and done.stderr.count("\n") == 1
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]
