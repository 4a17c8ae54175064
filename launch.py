"""How a run starts and ends: flags, process groups, start-up checks, signals, and the first error first.

A script's `main(cfg, group=None)` calls start(), which leaves nothing to fail later: device, ranks, agreement of the
flags, model, corpus and batch arithmetic are all checked before anything is built. `run_script(main, Config, __doc__)` is the
outer frame: it parses flags, opens the process group, and turns whatever goes wrong into one report, the first error
first, and an exit code.
"""

import copy
import dataclasses
import datetime
import faulthandler
import itertools
import json
import math
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# before torch reads them. At 95 % of the card, fragments are what does not fit; and streams share 8 queues by default, where a waiting
# receive must not hold up others
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import torch
import torch.distributed as dist

from checkpoint import describe, read_meta, steps
from support.tokens import Tokens, has_val, open_tokens
from export import find_checkpoint, load_hf
from support.flags import BY_SIZE, Config, UserError, accumulation, parse_flags, print_help
from support.meter import drop_rows, running, say
from model import SIZES, ModelConfig, check_config, flops_per_token, load_config, n_params
from support.prepare import ensure_corpus, stdlib_corpus

# torch 2.13 renamed the two; 2.11 has the old names only
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# --- the run ----------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What start() has found and checked; cfg has every default filled in."""

    cfg: Config
    rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype = torch.float32
    group: dist.ProcessGroup | None = None  # for tensors on the device; None: all ranks
    control: dist.ProcessGroup | None = None  # gloo, for Python objects
    model_cfg: ModelConfig | None = None
    tokens: Tokens | None = None
    val_tokens: Tokens | None = None
    dp: int = 1  # data-parallel size
    dp_rank: int = 0  # which share of the batch is this rank's
    accum: int = 1  # micro-batches per rank and step
    out: str | None = None  # run folder
    script: str = ""
    number: int = 0  # of runs that this process started before
    copy_engine: bool = False  # whether transfers go by copy engines (peer_memory.py)
    outside: int = 0  # bytes of GPU memory taken outside torch's allocator
    counts: bool = (
        True  # whether this rank's loss and token counts enter the sums: one rank of each model-parallel group
    )

    @property
    def master_dtype(self) -> torch.dtype:
        """Of master weights, moments and gradient accumulation: float32, or float64 for the proofs."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def wire_dtype(self) -> torch.dtype:
        """In which gradients summed over micro-batches travel: the masters', or bf16 on demand."""
        return torch.bfloat16 if self.cfg.wire == "bf16" and self.master_dtype == torch.float32 else self.master_dtype

    def everyone(self, value: object) -> list:
        """Every rank's value, by rank; collective over the control group."""
        values: list = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values


_job: dist.Store | None = (
    None  # torchrun's own, which outlives the ranks: what they remember when they are started again
)
_numbers = itertools.count()  # main() may run many times in one process
_run: Run | None = None  # the last one started: what an error report can say about it
_signal: int = 0


def stop_signal() -> int:
    """The signal that asked this process to stop, 0 if none; a loop makes it every rank's at the end of a step."""
    return _signal


def say_if_stopped(run: Run, stop: float, step: int) -> None:
    """The last line of a run that a signal ended after `step`."""
    saved = f"the same command with --out {run.out} --resume auto goes on from there"
    if stop:
        say(
            f"stopped by a signal after step {step}; {saved if run.cfg.save_every else 'without --save-every nothing was saved'}"
        )


def _on_signal(number: int, frame: object) -> None:
    global _signal
    _signal = _signal or number
    if (
        not running()
    ):  # before the loop there is nothing to save: waiting for ranks or a corpus must not outlast a signal
        os._exit(128 + number)


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def pick_device(cfg: Config) -> torch.device:
    """Raises UserError when CUDA is asked for, or a card is there, and torch cannot use it."""
    if cfg.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        card = Path("/proc/driver/nvidia/version")
        if cfg.device == "auto" and not card.exists():
            return torch.device("cpu")
        driver = card.read_text().splitlines()[0] if card.exists() else "no NVIDIA driver found"
        wheel = (
            f"torch {torch.__version__} built for {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'CPU only'}"
        )
        raise UserError(
            f"CUDA does not work here: {driver}; {wheel}. Install a wheel that matches the driver, or use --device cpu"
        )
    local_rank, found = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if local_rank >= found:
        raise UserError(
            f"local rank {local_rank} has no GPU: {found} found; lower --nproc_per_node, or use --device cpu"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def open_group(device: torch.device, timeout_s: int) -> None:
    """Join the job's process group: torchrun's, one described by RANK and WORLD_SIZE by hand, or a group of one. Raises UserError saying
    which ranks did not come, or that two came under one number."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    bound = {"device_id": device} if device.type == "cuda" else {}
    timeout = datetime.timedelta(seconds=timeout_s)
    if "WORLD_SIZE" not in os.environ and "RANK" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **bound)
        return
    try:
        rank, size, port = (int(os.environ[key]) for key in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        host = os.environ["MASTER_ADDR"]
    except (KeyError, ValueError) as error:
        raise UserError(
            f"RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must all be set, as torchrun does ({error})"
        ) from None
    if not 0 < port < 1 << 16:
        raise UserError(f"MASTER_PORT={port}: allowed is 1 to 65535")
    if not 0 <= rank < size:
        raise UserError(f"RANK={rank} is outside WORLD_SIZE={size}")
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        tcp = dist.TCPStore(
            host, port, size, is_master=rank == 0 and not agent, timeout=timeout, wait_for_workers=False
        )
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        if "EADDRINUSE" in str(error) or "in use" in str(error):
            raise UserError(
                f"port {port} is in use: another run? Give torchrun --master_port another one, or --standalone"
            ) from None
        raise UserError(
            f"no answer from {host}:{port} (MASTER_ADDR:MASTER_PORT) within {timeout_s} s: {reason}"
        ) from None
    global _job
    store = dist.PrefixStore("nanoshard", tcp)
    _job = store if agent else None
    store = _meet(store, rank, size, timeout_s, used=agent)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout, **bound)


def _meet(store: dist.Store, rank: int, size: int, timeout_s: int, used: bool) -> dist.Store:
    """Wait until all ranks are here -> a part of the store that is theirs alone. used: it may hold what ranks before them left.

    torchrun starts ranks again at the same store, and counts the restarts of each host for itself (pytorch#147064). So each
    process registers under a random name; rank 0's is the attempt's name too, which it writes beside each name it finds.
    """
    deadline = time.time() + timeout_s + 2 * (rank == 0)  # the others may be later, and rank 0 holds the store
    twice = f"two processes came as RANK={rank}; each rank needs its own number"
    me = attempt = uuid.uuid4().hex if used else "all"
    if used and rank:
        store.set(f"here/{rank}", me)
        while not store.check([f"attempt of/{me}"]):
            if store.get(f"here/{rank}").decode() != me:
                raise UserError(twice)
            if time.time() > deadline:
                raise UserError(
                    f"rank 0 did not answer within {timeout_s} s: it did not come, or another process came as RANK={rank}"
                )
            time.sleep(0.05)
        attempt = store.get(f"attempt of/{me}").decode()
    ours = dist.PrefixStore(attempt, store)
    if ours.add(f"arrived/{rank}", 1) > 1:
        raise UserError(twice)
    everyone = [f"arrived/{r}" for r in range(size)]
    while not ours.check(everyone):
        late = time.time() > deadline
        if rank == 0 or late:
            missing = [r for r in range(size) if not ours.check([everyone[r]])]
            for r in missing if used and rank == 0 else []:
                if store.check([f"here/{r}"]):
                    store.set(f"attempt of/{store.get(f'here/{r}').decode()}", attempt)
            if late and missing:
                raise UserError(
                    f"{size - len(missing)} of {size} ranks arrived within {timeout_s} s, missing: {missing}"
                )
        time.sleep(0.05)
    return ours


def start(
    cfg: Config,
    script: str,
    group: dist.ProcessGroup | None = None,
    model_parallel: int = 1,
    check: Callable[[Run], object] | None = None,
) -> Run:
    """Check everything and fill in every default; collective over `group` (the whole job when None).

    model_parallel: neighbouring ranks that share one batch (tensor or pipeline parallel), 0: all; the others are data parallel.
    check: a script's own refusals, called last. Raises UserError, the same on every rank, before anything is built or written.
    """
    global _run
    cfg = copy.copy(cfg)  # not dataclasses.replace(): it forgets cfg.given
    device = pick_device(cfg)
    timeout_s = cfg.hang_timeout if cfg.hang_timeout > 0 else 60  # what is not allowed is refused below, in one voice
    if not dist.is_initialized():
        open_group(device, timeout_s)
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    control = group
    if device.type == "cuda":
        limit = datetime.timedelta(seconds=timeout_s)
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        control = dist.new_group(
            ranks, backend="gloo", timeout=limit, use_local_synchronization=world_size < dist.get_world_size()
        )
    run = Run(
        cfg, rank, world_size, device, group=group, control=control, script=Path(script).stem, number=next(_numbers)
    )

    everyones = run.everyone(cfg)
    differing = [
        f.name for f in dataclasses.fields(cfg) if len({repr(getattr(theirs, f.name)) for theirs in everyones}) > 1
    ]
    if differing:
        raise UserError(f"the ranks were started with different flags: {', '.join(map(_flag, differing))}")

    for key in (
        "steps",
        "lr",
        "global_batch",
        "micro_batch",
        "seq_len",
        "vocab_size",
    ):  # 0 stands for "by size" when none is given
        if key in cfg.given and not getattr(cfg, key):
            raise UserError(f"{_flag(key)} 0: allowed is more than 0")
    for key in ("min_lr", "warmup_steps"):  # and here -1
        if key in cfg.given and getattr(cfg, key) < 0:
            raise UserError(f"{_flag(key)} {getattr(cfg, key)}: allowed is 0 or more")
    cfg.model = cfg.model or ("tiny" if device.type == "cpu" else "124m")
    model_cfg = load_config(cfg.model)
    size = cfg.model if cfg.model in SIZES else min(BY_SIZE, key=lambda s: abs(SIZES[s].n_embd - model_cfg.n_embd))
    batch, micro, steps, lr, warmup = BY_SIZE[size]
    model_parallel = model_parallel or world_size
    if model_parallel < 0 or world_size % model_parallel:
        raise UserError(f"tp*pp={model_parallel} does not divide the world of {world_size} ranks")
    run.dp, run.dp_rank = world_size // model_parallel, rank // model_parallel
    cfg.global_batch = cfg.global_batch or batch
    if not cfg.micro_batch:
        share = cfg.global_batch // run.dp
        cfg.micro_batch = max((m for m in range(1, min(micro, share) + 1) if share % m == 0), default=1)
    run.accum = accumulation(cfg.global_batch, cfg.micro_batch, run.dp)
    cfg.steps, cfg.lr = cfg.steps or steps, cfg.lr or lr
    cfg.min_lr = cfg.lr / 10 if cfg.min_lr < 0 else cfg.min_lr
    cfg.warmup_steps = min(warmup, cfg.steps // 10) if cfg.warmup_steps < 0 else cfg.warmup_steps
    cfg.workers = int(device.type == "cuda") if cfg.workers is None else cfg.workers
    cfg.compile = device.type == "cuda" if cfg.compile is None else cfg.compile
    least = dict.fromkeys(
        ("steps", "lr", "weight_decay", "clip", "workers", "save_every", "eval_every", "eval_windows", "loss_scale"), 0
    )
    least |= dict.fromkeys(("beta1", "beta2", "eps", "scale_power", "min_lr"), 0) | {"scale_min": 2.0**-24}
    for key, value in (
        least | dict.fromkeys(("log_every", "keep_last", "hang_timeout", "scale_window", "scale_hysteresis"), 1)
    ).items():
        given, limit = getattr(cfg, key), {"beta1": 1, "beta2": 1, "scale_power": 128}.get(key, math.inf)
        if not value <= given < limit:
            raise UserError(
                f"{_flag(key)} {given}: allowed is {value} or more" + f", less than {limit}" * (given >= value)
            )
    best = (
        "float32"
        if device.type == "cpu"
        else "bfloat16"
        if torch.cuda.is_bf16_supported(including_emulation=False)
        else "float16"
    )
    cfg.dtype = cfg.dtype or best
    run.dtype = getattr(torch, cfg.dtype)
    _set_up_torch(cfg, device)

    if not cfg.data:
        cfg.data = stdlib_corpus()
        _one_prepares(run, lambda: ensure_corpus(cfg.data))
    run.tokens = open_tokens(cfg.data)
    run.val_tokens = open_tokens(cfg.data, "val") if has_val(cfg.data) else None
    run.model_cfg = dataclasses.replace(
        model_cfg,
        seq_len=cfg.seq_len or model_cfg.seq_len,
        vocab_size=cfg.vocab_size or model_cfg.vocab_size or run.tokens.vocab_size,
        tie=model_cfg.tie if cfg.tie is None else cfg.tie,
        dropout=model_cfg.dropout if cfg.dropout is None else cfg.dropout,
    )
    cfg.seq_len, cfg.vocab_size, cfg.tie = run.model_cfg.seq_len, run.model_cfg.vocab_size, run.model_cfg.tie
    check_config(run.model_cfg)
    if run.tokens.vocab_size and run.tokens.vocab_size > cfg.vocab_size:
        raise UserError(
            f"{cfg.data} has a vocabulary of {run.tokens.vocab_size} ({run.tokens.tokenizer}), the model knows {cfg.vocab_size} ids; "
            f"use --vocab-size {run.tokens.vocab_size} or more"
        )
    run.tokens.n_windows(cfg.seq_len)  # UserError if there is none, here as below
    if run.val_tokens and cfg.eval_every:
        try:
            run.val_tokens.n_windows(cfg.seq_len)
        except UserError as error:
            raise UserError(f"{error}; --eval-every 0 trains without validation") from None
    found = run.everyone(
        (cfg.dtype, run.model_cfg, run.tokens.fingerprint, run.val_tokens and run.val_tokens.fingerprint)
    )
    if any(theirs != found[0] for theirs in found):  # hosts with other files or other cards
        raise UserError(f"the ranks differ in dtype, model or corpus: {dict(enumerate(found))}")
    if check:
        check(run)
    if not cfg.explain:
        _open_run_folder(run)
        _banner(run)
    _run = run
    return run


def _set_up_torch(cfg: Config, device: torch.device) -> None:
    if (
        "LOCAL_WORLD_SIZE" in os.environ or "OMP_NUM_THREADS" not in os.environ
    ):  # torchrun leaves one thread per process
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    if cfg.compile:
        torch.compiler.reset()  # what earlier runs of this process compiled counts against the variants that a block may have
    if device.type == "cpu":
        return
    torch.set_float32_matmul_precision("highest" if cfg.deterministic else "high")  # TF32 for --dtype float32
    # cuDNN's attention is 1.7 times as fast as FlashAttention-2 on Hopper; its backward pass is not deterministic
    hopper = torch.cuda.get_device_capability(device) >= (9, 0)
    torch.backends.cuda.enable_cudnn_sdp(hopper and not cfg.deterministic)
    torch.backends.cuda.enable_flash_sdp(not hopper or cfg.deterministic)
    if cfg.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(cfg.deterministic)


def _one_prepares(run: Run, prepare: Callable[[], None]) -> None:
    """The run's first rank on each host runs prepare(), the others wait as long as it works: not in a collective, which has a limit. Its
    error becomes theirs."""
    store = dist.distributed_c10d._get_default_store()
    host = os.environ.get("GROUP_RANK", "0"), socket.gethostname()
    places = run.everyone((host, f"prepare/{dist.get_rank()}/{run.number}"))
    first, key = next((rank, key) for rank, (theirs, key) in enumerate(places) if theirs == host)
    if run.rank == first:
        try:
            prepare()
            store.set(key, "")
        except BaseException as error:
            store.set(key, f"rank {run.rank} could not prepare the corpus: {error}")
            raise
    tenths = 0
    while not store.check([key]):  # not store.wait: its time limit is the collectives'
        time.sleep(0.1)
        tenths += 1
        if tenths % 300 == 0:
            print(f"rank {run.rank}: waiting for the first rank of this host to prepare {run.cfg.data}", flush=True)
    if message := store.get(key).decode():
        raise UserError(message)


def _open_run_folder(run: Run) -> None:
    """Choose and create the run folder on rank 0, name it to all, write what will be config.json."""
    cfg, out, error = run.cfg, None, None
    if run.rank == 0:
        facts = {
            "config": dataclasses.asdict(cfg),
            "model": dataclasses.asdict(run.model_cfg),
            "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "world_size": run.world_size,
            "hardware": torch.cuda.get_device_name(run.device)
            if run.device.type == "cuda"
            else f"CPU, {os.cpu_count()} cores",
            "torch": torch.__version__,
            "python": sys.version.split()[0],
            "commit": git_commit(),
            "date": datetime.datetime.now().isoformat(timespec="seconds"),
            "data": {"path": cfg.data, "fingerprint": run.tokens.fingerprint, "tokenizer": run.tokens.tokenizer},
        }
        try:
            if not cfg.out and not _job and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):
                raise UserError(
                    "torchrun has started this job again, and its store forgot the run's folder: --out names one that stays"
                )
            out = Path(cfg.out or _recall(run, "folder") or _new_folder(run.script))
            out.mkdir(parents=True, exist_ok=True)
            (out / ".config.json").write_text(json.dumps(facts, indent=1))  # see own_folder()
            _remember(run, "folder", str(out))
        except UserError as problem:
            error = str(problem)
        except OSError as problem:
            error = f"--out {cfg.out or 'runs/'}: cannot write there ({problem.strerror})"
    error, out = run.everyone((error, out))[0]
    if error:
        raise UserError(error)
    run.out = str(out)


def _new_folder(script: str) -> Path:
    path = Path(f"runs/{script}-{time.strftime('%Y%m%d-%H%M%S')}")
    while True:
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:  # two jobs of one second
            path = path.with_name(path.name + "-2")


def _note(run: Run, what: str) -> str:
    """The key of a note that this run, of all that a job may hold, finds again when torchrun has started the ranks anew."""
    return f"{what}/{dist.get_rank()}/{run.number}/{shlex.join(sys.argv)}"


def _remember(run: Run, what: str, value: str) -> None:
    """On the run's rank 0: leave a note."""
    if _job:
        _job.set(_note(run, what), value)


def _recall(run: Run, what: str) -> str | None:
    return _job.get(_note(run, what)).decode() if _job and _job.check([_note(run, what)]) else None


def own_folder(run: Run) -> None:
    """The run has begun, the folder's config.json is its own from here on: a run that is refused leaves another's as it was."""
    if run.rank == 0:
        Path(run.out, ".config.json").replace(Path(run.out, "config.json"))
        _remember(run, "begun", run.out)


def git_commit() -> str | None:
    """Short hash of the checkout this file lies in, with + when it has changes; None outside git."""
    try:
        call = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=10", "--dirty=+"]
        return subprocess.run(call, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _banner(run: Run) -> None:
    cfg = run.cfg
    per_step = cfg.global_batch * cfg.seq_len
    windows = run.tokens.n_windows(cfg.seq_len)
    where = torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else "CPU"
    say(
        f"{run.script}: {run.world_size} x {where}, torch {torch.__version__}"
        + (f", run folder {run.out}" if run.out else "")
    )
    say(
        f"model {cfg.model}: {n_params(run.model_cfg):,} parameters, {flops_per_token(run.model_cfg) / 1e9:.3f} GFLOP per token, "
        f"compute in {cfg.dtype}, masters in {str(run.master_dtype)[6:]}"
    )
    say(
        f"batch: {per_step:,} tokens a step = {cfg.micro_batch} sequences x {cfg.seq_len} tokens x {run.accum} micro-batches x {run.dp} "
        f"data-parallel ranks; {cfg.steps} steps; lr {cfg.lr:g} to {cfg.min_lr:g}, warm-up {cfg.warmup_steps}"
    )
    say(
        f"data {cfg.data}: {run.tokens.n_tokens:,} tokens ({run.tokens.tokenizer}), {windows:,} windows, "
        f"{cfg.steps * cfg.global_batch / windows:.2f} epochs; each window once an epoch, the stream runs on over the edge"
    )


def subgroup(run: Run, colour: Callable[[int], object]) -> dist.ProcessGroup:
    """The group of the run's ranks that have this rank's colour; collective, and every rank is in exactly one.

    All ranks make all of the groups: NCCL splits them off the job's communicator, with every rank of it taking part. When
    the run is only a part of a job (gloo), the others are not here to do so; then torch names a group by how many groups
    its members are in, which must therefore be the same number for all.
    """
    ranks = dist.get_process_group_ranks(run.group or dist.group.WORLD)
    timeout = datetime.timedelta(seconds=run.cfg.hang_timeout)
    groups = {}
    for c in dict.fromkeys(map(colour, range(run.world_size))):
        members = [job_rank for rank, job_rank in enumerate(ranks) if colour(rank) == c]
        groups[c] = dist.new_group(
            members, timeout=timeout, use_local_synchronization=run.world_size < dist.get_world_size()
        )
    return groups[colour(run.rank)]


def explain(run: Run, memory: dict[str, int], traffic: list[tuple[str, str, int]]) -> None:
    """What --explain prints: batch arithmetic, the collectives of one step in the order of their first calls, predicted memory."""
    _banner(run)
    say(f"\ncollectives of one step, payload bytes: {sum(size for _, _, size in traffic):,}")
    for (op, what, size), calls in Counter(traffic).items():
        say(f"  {size:16,d}  {op} {what}" + (f"  x {calls}" if calls > 1 else ""))
    say(f"\nmemory of one rank, GB: {sum(memory.values()) / 1e9:.3f}")
    for term, size in memory.items():
        say(f"  {size / 1e9:10.3f}  {term}")


# --- state that goes on -----------------------------------------------------------------------------------------------


def progress(run: Run, updates: int, scaler) -> dict:
    """What a checkpoint holds beside tensors and the number of steps: how many of them were not skipped, and whose they are."""
    return {
        "updates": updates,
        "scaler": scaler.state(),
        "config": dataclasses.asdict(run.cfg),
        "model": dataclasses.asdict(run.model_cfg),
        "data": run.tokens.fingerprint,
        "tokenizer": run.tokens.tokenizer,
        "world_size": run.world_size,
        "script": run.script,
        "torch": torch.__version__,
    }


def rng_state(run: Run) -> torch.Tensor:
    """torch's generator states of this rank as bytes: nothing here draws from them, a fork may."""
    states = [torch.get_rng_state()] + ([torch.cuda.get_rng_state(run.device)] if run.device.type == "cuda" else [])
    return torch.cat([state.cpu() for state in states])


def resume(run: Run, saver, strategy, scaler) -> tuple[int, int]:
    """Collective: load the checkpoint this run goes on from, or the weights it starts from -> (first step, updates so far).

    strategy: has pieces() and masters_changed(). A flag that differs from the checkpoint's wins and is printed, old -> new;
    another model or corpus is refused (UserError): --init-from starts a new run from the weights.
    """
    cfg = run.cfg
    pieces = strategy.pieces()
    if cfg.save_every:
        saver.check_space(3 * run.master_dtype.itemsize * n_params(run.model_cfg))
    explicit = cfg.resume not in ("auto", "never")
    # torchrun has started us again, and before that we had begun: what is saved here is our own
    again = run.everyone(_recall(run, "begun") == run.out)[0]
    newest = saver.latest() if not explicit or again else None
    path = newest or (cfg.resume if explicit else None)
    if path is None:
        if run.everyone(steps(saver.folder))[0]:
            raise UserError(
                f"no checkpoint in {saver.folder} is intact (see above): repair or remove them, or give another --out"
            )
        if cfg.init_from:
            _init_from(run, saver, strategy, pieces)
        own_folder(run)
        return 0, 0
    if cfg.resume == "never" and not again:
        raise UserError(f"--resume never, but {run.out} holds {path}: a new run needs a folder of its own")
    if not Path(path).is_dir():
        raise UserError(f"--resume {path}: no such checkpoint; allowed are auto, never, or a step_... folder")
    saved = read_meta(path)
    if not {"step", "updates", "scaler", "config", "model", "data"} <= saved.keys():
        raise UserError(f"{path}: its meta.json is not one of a training run")
    if newest is None and (
        later := run.everyone([p.name for p in steps(saver.folder) if int(p.name[5:]) > saved["step"]])[0]
    ):
        raise UserError(
            f"--resume {path}: {saver.folder} holds later steps ({', '.join(later)}), from which a restart would go on; remove them or "
            "give another --out"
        )
    _same_model(run, path, saved)
    if saved["data"] != run.tokens.fingerprint:
        raise UserError(
            f"{path} was trained on another corpus (fingerprint {saved['data']}, {cfg.data} has {run.tokens.fingerprint}): its order of "
            "samples cannot go on; --init-from starts a new run from the weights"
        )
    meta = saver.load(path, pieces)
    saver.protect(path)
    strategy.masters_changed()
    scaler.load(saved["scaler"])
    if "rng" in meta:
        size = torch.get_rng_state().numel()
        torch.set_rng_state(meta["rng"][:size])
        if run.device.type == "cuda" and meta["rng"].numel() > size:
            torch.cuda.set_rng_state(meta["rng"][size:], run.device)
    elif saved["world_size"] == run.world_size:
        say("resume: the checkpoint has no RNG states (nothing here uses them)")
    for key, old in saved["config"].items():
        if old != getattr(cfg, key, old) and key not in (
            "out",
            "resume",
            "data",
            "device",
        ):  # a flag of another script is no change
            say(f"resume: {_flag(key)} {old} -> {getattr(cfg, key)}")
    own_folder(run)
    if cfg.log_samples:
        drop_rows(Path(run.out, f"samples-{run.rank}.jsonl"), saved["step"])
    say(f"resume: going on from {path} at step {saved['step']}")
    if saved["step"] >= cfg.steps:
        say(f"resume: {saved['step']} steps are done and --steps is {cfg.steps}: nothing left to do")
    return saved["step"], saved["updates"]


def _same_model(run: Run, path: str | Path, saved: dict) -> None:
    """Raises UserError naming the first field in which the checkpoint's model is another one."""
    for key, new in dataclasses.asdict(run.model_cfg).items():
        old = saved["model"].get(key)
        if old != new and key not in ("dropout", "seq_len"):  # no weight depends on these two
            raise UserError(f"{path} is of another model: {key} was {old}, is {new}")


def _init_from(run: Run, saver, strategy, pieces: dict) -> None:
    """Weights of another run (or of a Hugging Face Llama folder), everything else new."""
    path = find_checkpoint(run.cfg.init_from)
    weights = {name: piece for name, piece in pieces.items() if not name.startswith("exp_avg")}
    if (path / "meta.json").exists():
        _same_model(run, path, read_meta(path))
        saver.load(path, describe(path) | weights)
    else:
        load_hf(path, weights, run.model_cfg)
    strategy.masters_changed()
    say(f"weights from {path}, a new run from step 0")


def log_samples(run: Run, step: int, sample: torch.Tensor) -> None:
    """Under --log-samples: a line per micro-batch in samples-RANK.jsonl with the stream indices of its sequences."""
    if run.cfg.log_samples:
        with open(f"{run.out}/samples-{run.rank}.jsonl", "a") as file:
            file.write(json.dumps({"step": step, "sample": sample.tolist()}) + "\n")


# --- the frame --------------------------------------------------------------------------------------------------------


def run_script(main: Callable[[Config], list], config: type, doc: str) -> None:
    """Everything around main(cfg): flags, signals, and an end on which all ranks agree. Exit code 0 only if all finished."""
    argv = sys.argv[1:]
    if {"-h", "--help"} & set(argv):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # --help | head
        print_help(config, doc)
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _on_signal)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # `pkill -USR1 -f -- '-u .*train_'`: all stacks of every rank, while it hangs
    stopped = torch.zeros(1, dtype=torch.int32)
    cfg = None
    try:
        cfg = parse_flags(config, argv)
        main(cfg)
        if dist.is_initialized():
            stopped += _signal
            dist.all_reduce(
                stopped, op=dist.ReduceOp.MAX
            )  # and no rank takes the store away while another still needs it
            dist.destroy_process_group()
    except BaseException as error:
        _report(error, main, alike=cfg is None and "TORCHELASTIC_RUN_ID" in os.environ)
        os._exit(2 if isinstance(error, UserError) else 1)  # not destroy_process_group: it can hang while a peer waits
    if stopped:
        sys.exit(128 + int(stopped))


def _report(error: BaseException, main: Callable, alike: bool) -> None:
    """Print this rank's error, or, if it only follows from another rank's, one line that points there.

    alike: every rank has this error, before there is a store in which to say who was first: rank 0 prints it. torchrun shows
    the line once more, as the traceback of its root cause: the earliest that ranks left in their error files.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # torchrun sends it as soon as another rank is gone
    rank, several = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)) > 1
    if isinstance(error, UserError):
        summary, text = str(error), f"error: {error}"
    else:
        summary = traceback.format_exception_only(error)[0].split("\n")[0]
        text = "".join(traceback.format_exception(error)).rstrip()
    words = "can't allocate memory|CUDA driver error: out of memory"  # torch on a CPU, symmetric memory
    if isinstance(error, torch.OutOfMemoryError) or re.search(words, str(error)):
        summary = _out_of_memory(main.__globals__.get("predict"))
        text += f"\nerror: {summary}"
    first = [0 if alike else rank, summary]
    if dist.is_initialized() and several:
        try:
            store = dist.distributed_c10d._get_default_store()
            secondary = isinstance(error, dist.DistBackendError) or re.search(
                "Connection (closed by peer|reset)", str(error)
            )  # NCCL, gloo
            deadline = time.time() + (3 if secondary else 0)
            while not store.check(["first_error"]) and time.time() < deadline:
                time.sleep(0.05)  # the rank that closed the connection is about to say why
            first = json.loads(store.compare_set("first_error", "", json.dumps(first)))
        except (RuntimeError, ValueError):
            pass  # the store went with its host: then our own error is the best there is
    if first[0] == rank:
        print(f"rank {rank}: {text}" if several else text, file=sys.stderr, flush=True)
    elif first[1] != summary:
        summary = f"rank {rank} stopped because rank {first[0]} failed: {first[1]}"
        print(summary, file=sys.stderr, flush=True)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        follows = first[0] != rank  # torchrun compares whole seconds: one more puts these behind the first
        extra = {"py_callstack": summary, "timestamp": str(int(time.time()) + follows)}
        Path(path).write_text(json.dumps({"message": {"message": summary, "extraInfo": extra}}))
    if alike and rank:
        time.sleep(1)  # torchrun ends rank 0 when we end, perhaps before it gets here


def _out_of_memory(predict: Callable[[Run], tuple] | None) -> str:
    """The last line of a rank that ran out of memory: predicted beside there, and the smallest change that helps."""
    run = _run
    if run is None or predict is None:
        return "out of memory"
    cfg = run.cfg
    if run.device.type == "cuda":
        there = torch.cuda.get_device_properties(run.device).total_memory
    else:
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    predicted = sum(predict(run)[0].values())
    report = (
        f"rank {run.rank} is out of memory: {predicted / 1e9:.2f} GB predicted, the device has {there / 1e9:.2f} GB; "
    )
    changes = [{"micro_batch": m} for m in range(cfg.micro_batch - 1, 0, -1) if cfg.micro_batch % m == 0] + [
        {"recompute": "full"}
    ]
    if hasattr(cfg, "stage"):
        changes += [{"stage": stage} for stage in range(cfg.stage + 1, 4)] + [{"offload": "optimizer"}]
    for change in changes:  # in the order of what they cost in speed
        accum = cfg.global_batch // (change.get("micro_batch", cfg.micro_batch) * run.dp)
        other = dataclasses.replace(run, cfg=dataclasses.replace(cfg, **change), accum=accum)
        if sum(predict(other)[0].values()) < 0.9 * min(there, predicted):  # of predicted too: it did not fit
            return (
                report
                + "smallest change that helps: "
                + " ".join(f"{_flag(key)} {value}" for key, value in change.items())
            )
    return (
        report
        + "no single flag is enough: more GPUs, or --micro-batch 1 with --recompute full and train_zero.py --stage 3"
    )
