"""Every flag of the training scripts, and what to say about a wrong one.

The flags are the fields of a dataclass, a comment per field is its help text. No configuration files, nothing executed:
`--micro-batch 4`, `--micro-batch=4`, `--compile`, `--no-compile`.
"""

import dataclasses
import difflib
import inspect
import os
import re
import signal
import sys
import typing
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO


class UserError(Exception):
    """Something the user can put right: shown as one line, exit code 2."""


@dataclass
class Config:
    """The flags all training scripts share; a script's own Config adds its few. The comment of a field is its help."""

    model: str = ""  # a size, or a JSON file: ours or a Hugging Face Llama config [tiny on CPU, 124m on GPU]
    vocab_size: int = 0  # token ids the model knows [the size's; tiny: the data's]
    seq_len: int = 0  # tokens per sequence [the size's]
    global_batch: int = 0  # sequences per step over all ranks; accumulation follows from it [by size]
    micro_batch: int = 0  # sequences per forward and backward pass of one rank [the size's, lowered until it divides]
    steps: int = 0  # optimizer steps of the whole run [by size]
    lr: float = 0.0  # peak learning rate [by size]
    min_lr: float = -1.0  # where the cosine ends [lr / 10]
    warmup_steps: int = -1  # steps of linear warm-up [by size]
    weight_decay: float = 0.1  # on matrices and embeddings; norms are not decayed
    beta1: float = 0.9  # AdamW's average of gradients
    beta2: float = 0.95  # AdamW's average of squared gradients
    eps: float = 1e-8  # AdamW's guard against division by zero
    clip: float = 1.0  # largest global gradient norm; 0: no clipping
    dropout: float | None = None  # probability of zeroing a channel of what is added to the residual [the model's]
    dtype: Literal["", "float64", "float32", "bfloat16", "float16"] = (
        ""  # of compute; fp32, bf16, fp16 are understood [bfloat16 where the GPU has it, else float16; float32 on CPU]
    )
    loss_scale: float = 0.0  # float16: constant factor on the loss; 0: dynamic
    seed: int = 1337  # of weights, order of the data and dropout
    data: str = ""  # prepared folder or token file (see data.py) [the Python standard library's sources]
    workers: int | None = None  # loader processes per rank; 0: load in the training process [1 on GPU, 0 on CPU]
    out: str = ""  # run folder: config, log, checkpoints [runs/SCRIPT-DATE]
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: CUDA if there is a GPU
    save_every: int = 500  # steps between checkpoints, one more at the end; 0: none at all
    keep_last: int = 2  # newest checkpoints kept
    eval_every: int = 200  # steps between evaluations, one more at the end; 0: none at all
    eval_windows: int = 256  # validation sequences scored, the same first ones each time; 0: all
    resume: str = "auto"  # auto: go on from the newest checkpoint in a given --out; never; or a checkpoint's path
    init_from: str = ""  # start a new run from the weights of a checkpoint or a Hugging Face Llama folder
    recompute: Literal["none", "selective", "full"] = "none"  # activation checkpointing: again in backward, not kept
    compile: bool | None = None  # torch.compile each block [on GPU only]
    hang_timeout: int = 600  # seconds a rank may wait for another before the job ends
    log_every: int = 10  # steps between lines on the screen; log.jsonl has every step
    check_collectives: bool = False  # debug: before each collective, compare across ranks what is called (slow)
    deterministic: bool = False  # bit-equal repeats on a GPU, slower
    tie: bool | None = None  # share the embedding with the output head [the size's]
    wire: Literal["fp32", "bf16"] = "fp32"  # dtype in which gradients travel (ZeRO-2 and 3: the compute dtype)
    overlap: bool = True  # communicate while there is compute to hide it behind; off: wait at once, but for pipelines
    profile: bool = False  # write a torch profiler trace of the fifth step into the run folder
    explain: bool = False  # print memory, collectives and batch arithmetic of this run, then exit

    # No annotation, so no flags: the names of those on the command line, set by parse_flags; and how the factor on a
    # float16 loss moves, which train_zero.py makes into flags
    given = frozenset()
    scale_power, scale_window, scale_hysteresis, scale_min = 16, 1000, 1, 1.0


OTHER_NAMES = {  # what does it here -> what other tools call it
    "--global-batch (accumulation follows from it and --micro-batch)": "gradient-accumulation-steps",
    "--global-batch (sequences per step over all ranks) and --micro-batch (per pass)": "batch-size",
    "--global-batch": "train-batch-size global-batch-size",
    "--micro-batch": "per-device-train-batch-size micro-batch-size",
    "--dtype bfloat16": "bf16",
    "--dtype float16": "fp16",
    "--dtype": "mixed-precision",
    "--recompute full": "gradient-checkpointing activation-checkpointing",
    "--workers": "num-workers",
    "--lr": "learning-rate",
    "--steps": "max-steps max-iters train-iters",
    "--seq-len": "block-size seq-length",
    "--clip": "grad-clip max-grad-norm clip-grad",
    "--warmup-steps": "warmup-iters",
    "--out": "output-dir",
    "--data": "dataset data-path",
    "--save-every": "save-interval",
    "--eval-every": "eval-interval",
    "--log-every": "log-interval",
    "--stage (train_zero.py)": "zero-stage",
    "--deepspeed (train_zero.py)": "deepspeed-config",
    "--tp (train_tp.py)": "tensor-model-parallel-size",
    "--pp (train_pipe.py)": "pipeline-model-parallel-size",
    "--resume": "resume-from-checkpoint",
    "nothing: torchrun sets LOCAL_RANK": "local-rank",
}
ELSEWHERE = {name: here for here, names in OTHER_NAMES.items() for name in names.split()}
DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


# --- flags ------------------------------------------------------------------------------------------------------------


def flag_name(field: str) -> str:
    """micro_batch -> --micro-batch"""
    return "--" + field.replace("_", "-")


def field_help(cls: type) -> dict[str, str]:
    """Field name -> the comment behind it in the source of the dataclass and its bases."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            # [^#]: a field may be broken over several lines
            found |= dict(re.findall(r"^    (\w+): [^#]*?  # (.*)$", inspect.getsource(base), re.M))
    return found


def parse_flags(cls: type, argv: list[str]):
    """`--micro-batch 4`, `--micro-batch=4`, `--compile`, `--no-compile` -> an instance of the Config dataclass `cls`.

    Its attribute `given` names the fields that were set, to tell --stage 2 from a default of 2. Raises UserError for
    unknown names (with the nearest, or what does it here), and for values of the wrong kind.
    """
    fields = {flag_name(f.name)[2:]: f for f in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    values: dict[str, object] = {}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise UserError(f"unexpected argument {word!r}: flags look like --micro-batch 4")
        name, equals, value = word[2:].partition("=")
        name = name.replace("_", "-")
        field = fields.get(name) or (fields.get(name[3:]) if name.startswith("no-") else None)
        if field is None:
            here = ELSEWHERE.get(name)
            near = difflib.get_close_matches(name, fields, 1, 0.6)
            hint = f"here it is {here}" if here else f"did you mean --{near[0]}?" if near else "see --help"
            raise UserError(f"unknown flag --{name}: {hint}")
        if hints[field.name] in (bool, bool | None):
            if equals:
                on = flag_name(field.name)
                raise UserError(f"--{name} takes no value; write {on} or --no-{on[2:]}")
            values[field.name] = not name.startswith("no-") or name in fields
            continue
        if name not in fields:
            raise UserError(f"--{name}: {name[3:]} is not an on/off flag")
        if not equals:
            if not rest:
                raise UserError(f"--{name} needs a value")
            value = rest.pop(0)
        values[field.name] = _value(name, value, hints[field.name])
    cfg = cls(**values)
    cfg.given = frozenset(values)
    return cfg


def _value(name: str, text: str, kind: object) -> object:
    if typing.get_origin(kind) is Literal:
        text = DTYPES.get(text, text) if name == "dtype" else text
        allowed = [a for a in typing.get_args(kind) if a != ""]
        if text not in map(str, allowed):
            raise UserError(f"--{name} {text}: allowed are {', '.join(map(str, allowed))}")
        return next(a for a in allowed if str(a) == text)
    kind = {float | None: float, int | None: int}.get(kind, kind)
    try:
        value = kind(text)  # type: ignore[operator]
        if value != value:
            raise ValueError("nan")
    except ValueError:
        raise UserError(f"--{name} {text}: expected {'a whole number' if kind is int else 'a number'}") from None
    return value


def print_help(cls: type, doc: str) -> None:
    print((doc or "").strip() + "\n\nFlags (default in brackets where it depends on the size or the machine):")
    texts = field_help(cls)
    for f in dataclasses.fields(cls):
        default = "" if f.default in ("", None) or texts[f.name].endswith("]") else f"  (default {f.default})"
        print(f"  {flag_name(f.name):22s} {texts[f.name]}{default}")


def accumulation(global_batch: int, micro_batch: int, dp: int) -> int:
    """Micro-batches per rank and step. Raises UserError with the nearest batches that divide."""
    if global_batch < 1 or micro_batch < 1:
        raise UserError(f"--global-batch {global_batch}, --micro-batch {micro_batch}: both must be 1 or more")
    per_pass = micro_batch * dp
    if global_batch % per_pass:
        below, above = global_batch // per_pass * per_pass, -(-global_batch // per_pass) * per_pass
        near = " or ".join(str(v) for v in (below, above) if v)
        raise UserError(
            f"--global-batch {global_batch} is not a multiple of --micro-batch {micro_batch} x {dp} data-parallel "
            f"ranks = {per_pass}; nearest that are: {near}"
        )
    return global_batch // per_pass


def users_error(error: BaseException) -> BaseException:
    """An OSError that names a file becomes the one line of a UserError; any other error stays what it is."""
    if not isinstance(error, OSError) or not error.filename or not error.strerror:
        return error
    path = Path(os.fsdecode(error.filename))
    dead = next((p for p in (path, *path.parents) if p.is_symlink() and not p.exists()), None)
    link = f" ({dead} is a link to {os.readlink(dead)}, which is not there)" if dead else ""
    return UserError(f"{path}: {error.strerror}{link}")


def any_text_prints() -> None:
    """A name that the screen's encoding lacks is printed escaped; it is no reason to lose a run."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed by the shell (>&-)
        stream.reconfigure(errors="backslashreplace")


def put(text: str, stream: TextIO | None = None) -> None:
    """A line on stdout, or on `stream`. Where it cannot be written, that is said once on the other one and no more.

    A disk that is full, or a `tee` that Ctrl-C has ended too, is no reason to lose a run or its exit code.
    """
    stream = stream or sys.stdout
    try:
        print(text, file=stream, flush=True)
    except OSError as problem:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        other = sys.stderr if stream is sys.stdout else sys.stdout
        with suppress(OSError):
            print(f"warning: nothing more is printed: {problem}", file=other, flush=True)


def run_cli(main: Callable[[], None]) -> None:
    """Frame of a command-line tool: a user's error is one line, exit code 2; Ctrl-C a quiet 130; `| head` ends it."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    any_text_prints()
    try:
        main()
    except (UserError, OSError) as error:
        if not isinstance(error := users_error(error), UserError):
            raise
        put(f"error: {error}", sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
