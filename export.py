"""To and from Hugging Face Llama: the same tensors under other names.

    python export.py to-hf runs/NAME llama/                       # the newest checkpoint of a run, or a step_... folder
    python export.py to-hf runs/NAME/ckpt/step_00001000 llama/ --dtype bfloat16
    torchrun --nproc_per_node=8 train_zero.py --model llama/config.json --init-from llama/      # and back

The folder loads with transformers.AutoModelForCausalLM.from_pretrained and gives the same logits. Needs the
safetensors package.

The lesson: a model on disk is a list of names and shapes, and every silent failure of loading is a name that was
skipped. So both directions go by one table, and both stop unless the names and shapes found are exactly those the
configuration asks for: a ZeRO-3 placeholder of size 0, a wrapper's prefix or a forgotten head cannot pass. Nothing is
permuted: model.py pairs rotary channels (i, i + hd/2) as Hugging Face does, not (2i, 2i + 1) as Meta's original files
do.
"""

import argparse
import dataclasses
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import tiktoken
import torch
from torch import Tensor

from checkpoint import Piece, describe, find_checkpoint, read_boxes, read_index, read_meta, verify, whole_piece
from model import FROM_HF, ModelConfig, load_config, params
from support.flags import UserError, run_cli
from support.prepare import load_tokenizer, new_folder
from support.tokens import sniff

FILE_BYTES = 5_000_000_000  # of tensors in one file: what an export needs in host memory, and the size the hub asks for
OUTER = {"tok_emb": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
INNER = {
    "attn_norm": "input_layernorm",
    "wq": "self_attn.q_proj",
    "wk": "self_attn.k_proj",
    "wv": "self_attn.v_proj",
    "wo": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "w_gate": "mlp.gate_proj",
    "w_up": "mlp.up_proj",
    "w_down": "mlp.down_proj",
}
# name parts that say who held the model, not what is in it; a bare LlamaModel has none
WRAPPERS = ("model", "module", "_orig_mod")
# in safetensors' spelling: anything else is quantised, and a copy would not be the weight
FLOATS = ("F64", "F32", "F16", "BF16")


def hf_name(name: str) -> str:
    """blocks.3.wq.weight -> model.layers.3.self_attn.q_proj.weight"""
    *block, module, leaf = name.split(".")
    return f"model.layers.{block[1]}.{INNER[module]}.{leaf}" if block else f"{OUTER[module]}.{leaf}"


def _bare(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _safetensors():
    try:
        import safetensors.torch
    except ImportError:
        raise UserError("Hugging Face folders need the safetensors package: pip install safetensors") from None
    return safetensors


# --- reading ----------------------------------------------------------------------------------------------------------


def _files(path: Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder. UserError if there is none or one is missing."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{index} is no index of safetensors files ({error!r})") from None
    elif (path / "model.safetensors").is_file():
        names = ["model.safetensors"]
    elif pickles := [p.name for p in sorted(path.glob("*")) if p.suffix in (".bin", ".pt", ".pth")]:
        reason = "a pickle can run code while it loads; only safetensors are read"
        raise UserError(f"{path / pickles[0]} is refused: {reason}")
    else:
        found = sorted(os.listdir(path))[:8]
        raise UserError(f"{path} holds neither model.safetensors nor {index.name}, found {found}")
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not (path / name).is_file():
            raise UserError(f"{index} names the file {name!r}, which is not in {path}")
    return [path / name for name in names]


def load_hf(path: str | Path, pieces: dict[str, Piece], model_cfg: ModelConfig) -> None:
    """Fill the boxes of `pieces` (by our names, any float dtype, any device) in place from a Hugging Face Llama folder.

    Reads only what the boxes cover, but compares every name and shape of the folder with model_cfg first. Raises
    UserError, before anything is filled: another model; tensors missing, left over, wrong in shape or quantised, all in
    one line; pickles; damaged files.
    """
    path, safetensors = Path(path), _safetensors()
    there = load_config(str(path / "config.json"))
    free = ("seq_len", "dropout")  # no weight depends on them
    theirs, ours = dataclasses.asdict(there), dataclasses.asdict(model_cfg)
    if differ := [key for key in ours if key not in free and theirs[key] != ours[key]]:
        what = ", ".join(f"{key} is {theirs[key]} there, {ours[key]} here" for key in differ)
        raise UserError(f"{path} is another model: {what}; --model {path}/config.json takes all from there")

    files, found, problems = {}, {}, []
    for file in _files(path):
        sniff(file)
        try:
            files[file] = safetensors.safe_open(file, framework="pt")
        except (safetensors.SafetensorError, OSError) as error:
            raise UserError(f"{file} is damaged: {error}") from None
        for name in files[file].keys():  # noqa: SIM118 (no dict)
            if _bare(name) in found:
                problems.append(f"twice: {name}")
            found[_bare(name)] = (file, files[file].get_slice(name))
    for name in [n for n in found if n.endswith("rotary_emb.inv_freq")]:
        del found[name]  # Llama-2 era files carry the table that rope_theta gives
    wanted = {_bare(hf_name(name)): param.shape for name, param in params(model_cfg).items()}
    if model_cfg.tie and "lm_head.weight" in found:  # some writers store a tied head all the same
        head, embedding = found.pop("lm_head.weight")[1], found.get("embed_tokens.weight", (None, None))[1]
        if embedding is not None and not torch.equal(head[:], embedding[:]):
            problems.append("lm_head.weight differs from embed_tokens.weight, which config.json says are one")
    shapes = {name: tuple(tensor.get_shape()) for name, (_, tensor) in found.items()}
    problems += differences(wanted, shapes)
    for name in wanted.keys() & found.keys():
        if (dtype := found[name][1].get_dtype()) not in FLOATS:
            problems.append(f"{name} is {dtype}, allowed are {', '.join(FLOATS)}")
    if problems:
        raise UserError(f"{path}: {'; '.join(problems[:20])}")

    for name, piece in pieces.items():
        for offsets, box in piece.boxes:
            part = found[_bare(hf_name(name))][1][tuple(slice(o, o + n) for o, n in zip(offsets, box.shape))]
            box.copy_(part)  # into the box's dtype: bf16 files fill fp32 masters exactly


def differences(wanted: dict[str, tuple], found: dict[str, tuple]) -> list[str]:
    """What is wrong with the names and shapes that were found."""
    problems = []
    sides = {"missing": [n for n in wanted if n not in found], "left over": [n for n in found if n not in wanted]}
    for what, names in sides.items():
        if names:
            problems.append(f"{what}: {', '.join(names[:20])}" + f" and {len(names) - 20} more" * (len(names) > 20))
    shapes = [name for name in wanted if name in found and found[name] != wanted[name]]
    return problems + [f"{name} has shape {found[name]}, expected {wanted[name]}" for name in shapes]


def open_checkpoint(path: Path) -> tuple[ModelConfig, Callable[[str], Tensor]]:
    """Check one of our checkpoints, every byte and every weight's shape; returns its model and a reader of tensors.

    The reader gives one whole tensor by name, on the CPU in the dtype it was saved in. One process, whatever layout it
    was saved under. Raises UserError.
    """
    meta, saved = read_meta(path), describe(path)
    try:
        cfg = ModelConfig(**meta["model"])
    except (KeyError, TypeError) as error:
        raise UserError(f"{path / 'meta.json'}: no model of this version in it ({error})") from None
    shapes = {name: param.shape for name, param in params(cfg).items()}
    weights = {name: piece for name, piece in saved.items() if not name.startswith(("exp_avg.", "exp_avg_sq."))}
    if problems := differences(shapes, {name: piece.shape for name, piece in weights.items()}):
        raise UserError(f"{path} does not fit the model in its meta.json: {'; '.join(problems[:20])}")
    if problems := verify(path):
        raise UserError(f"{path} is not intact: {'; '.join(problems)}")
    index = read_index(path)

    def read(name: str) -> Tensor:
        tensor = torch.empty(saved[name].shape, dtype=saved[name].dtype)
        read_boxes(path, index, {name: whole_piece(tensor)})
        return tensor

    return cfg, read


def tokenizer_of(path: Path) -> str | None:
    """Tokenizer of a checkpoint's corpus, from its meta.json; of an export, from its config.json. None: unknown."""
    ours = (path / "meta.json").is_file()
    file, key = (path / "meta.json", "tokenizer") if ours else (path / "config.json", "tiktoken_encoding")
    try:
        name = json.loads(file.read_text())[key]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    known = ("bytes", *tiktoken.list_encoding_names())  # not "ids", "characters": nothing here can spell them
    return name if name in known else None


# --- writing ----------------------------------------------------------------------------------------------------------


def hf_config(cfg: ModelConfig, dtype: str, tokenizer: str | None) -> dict:
    """config.json of a Hugging Face Llama. One key is ours: tiktoken_encoding tells sample.py how to spell tokens."""
    end = None
    if tokenizer:
        try:
            end = load_tokenizer(tokenizer).eot_token
        except UserError as error:  # no network: the weights are right all the same
            print(f"note: end-of-text id unknown, {error}")
    sizes = {FROM_HF.get(name, name): value for name, value in dataclasses.asdict(cfg).items() if name != "dropout"}
    return sizes | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope_theta},  # where transformers 5 looks for it
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        # documents are separated by it; null, not left out: Llama's defaults 1 and 2 are ordinary tokens here
        "bos_token_id": end,
        "eos_token_id": end,
        "torch_dtype": dtype,
        "tiktoken_encoding": tokenizer,
    }


def to_hf(path: Path, out: Path, dtype: str) -> int:
    """Write checkpoint `path` as Hugging Face Llama folder `out`, dtype "float32" or "bfloat16"; returns its bytes.

    Host memory for one file of FILE_BYTES and one tensor, whatever the model's size. `out` appears complete or not at
    all: what was written is first read back and compared with the model. Raises UserError.
    """
    safetensors = _safetensors()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty folder: choose another name")
    if not (path / "meta.json").is_file():
        raise UserError(f"{path} is no checkpoint (step_... folder) and no run folder with one")
    cfg, read = open_checkpoint(path)
    target = getattr(torch, dtype)
    files: list[list[str]] = [[]]
    nbytes, filled = 0, 0
    for name, param in params(cfg).items():
        size = math.prod(param.shape) * target.itemsize
        if files[-1] and filled + size > FILE_BYTES:
            files.append([])
            filled = 0
        files[-1].append(name)
        nbytes, filled = nbytes + size, filled + size

    with new_folder(out.absolute()) as temporary:
        if (free := shutil.disk_usage(temporary).free) < nbytes:
            raise UserError(f"{out} needs {nbytes} bytes, {free} bytes are free")
        config = temporary / "config.json"
        config.write_text(json.dumps(hf_config(cfg, dtype, tokenizer_of(path)), indent=1) + "\n")
        where = {}
        for i, names in enumerate(files):
            file = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else "model.safetensors"
            tensors = {hf_name(name): read(name).to(target) for name in names}
            metadata = {"format": "pt"}  # transformers refuses a file without it
            try:
                safetensors.torch.save_file(tensors, temporary / file, metadata)
            except safetensors.SafetensorError as error:  # the disk's, in other words
                raise OSError(f"{error}; it needs {nbytes} bytes") from None
            (temporary / file).chmod(config.stat().st_mode)  # safetensors lets nobody but the owner read
            where |= dict.fromkeys(tensors, file)
        if len(files) > 1:
            index = {"metadata": {"total_size": nbytes}, "weight_map": where}
            (temporary / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        load_hf(temporary, {}, cfg)
    return nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["to-hf"])
    parser.add_argument("checkpoint", help="a step_... folder, or a run folder: its newest one")
    parser.add_argument("out", type=Path, help="folder to make")
    keeps = "float32 keeps the masters bit for bit"
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help=keeps)
    args = parser.parse_args()
    path = find_checkpoint(args.checkpoint)
    nbytes = to_hf(path, args.out, args.dtype)
    print(f"{args.out}: {path} as Hugging Face Llama, {nbytes / 1e9:.3f} GB of {args.dtype}")


if __name__ == "__main__":
    run_cli(main)
