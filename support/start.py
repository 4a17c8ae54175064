"""How a run starts and ends: checks, run folder, banner, signals, exit codes.

A script's `main(cfg, group=None)` calls start(), which leaves nothing to fail later: device, ranks, agreement of the
flags, model, corpus and batch arithmetic are all checked before anything is built. run_script() is the outer frame: it
parses flags, catches signals, and turns whatever goes wrong into one report and an exit code.
"""

import copy
import dataclasses
import datetime
import errno
import faulthandler
import fcntl
import hashlib
import itertools
import json
import multiprocessing
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

import torch
import torch.distributed as dist

from model import check_config, flops_per_token, n_params, params
from support.defaults import fill
from support.flags import Config, UserError, any_text_prints, flag_name, parse_flags, print_help, put, users_error
from support.meter import running, say
from support.rendezvous import open_group, pick_device, recall, remember, restarted
from support.report import report
from support.run import GRACE, Run, destroy_groups, everywhere, make_group
from support.tokens import has_val, open_tokens
from support.watchdog import Watchdog

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
AT_ONCE = 0.5  # seconds within which a second signal is the first once more: some launchers deliver it twice

_numbers = itertools.count()  # main() may run many times in one process
_latest: Run | None = None  # what an error report can say about it
_signal = 0


# --- the start --------------------------------------------------------------------------------------------------------


def start(
    cfg: Config,
    script: str,
    group: dist.ProcessGroup | None = None,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    check: Callable[[Run], object] | None = None,
) -> Run:
    """Check everything and fill in every default; collective over `group` (the whole job when None).

    tp, pp, cp: as fill() takes them. check: a script's own refusals, called last. Raises UserError, the same on every
    rank, before anything is built or written.
    """
    global _latest
    cfg = copy.copy(cfg)  # not dataclasses.replace(): it forgets cfg.given
    device = pick_device(cfg)
    if not dist.is_initialized():
        open_group(device, min(max(cfg.hang_timeout, 1), 10**6))  # what is not allowed is refused below, in one voice
    world = group or dist.group.WORLD
    run = Run(cfg, dist.get_rank(world), dist.get_world_size(world), device, world=world, control=world)
    run.script, run.number = Path(script).stem, next(_numbers)
    fields = [f.name for f in dataclasses.fields(cfg)]
    everyones = run.everyone({name: repr(getattr(cfg, name)) for name in fields})
    if differing := [flag_name(name) for name in fields if len({theirs[name] for theirs in everyones}) > 1]:
        raise UserError(f"the ranks were started with different flags: {', '.join(differing)}")

    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        cfg.dtype = cfg.dtype or "float16"
    run = dataclasses.replace(run, **fill(cfg, run.world_size, tp, pp, cp, device.type))
    if device.type == "cuda":
        ranks = dist.get_process_group_ranks(world)
        run.control = make_group(
            ranks, [0] * len(ranks), "control", cfg.hang_timeout + GRACE, backend="gloo", control=world
        )
    set_up_torch(cfg, device)
    open_corpus(run)
    nccl = torch.cuda.nccl.version() if device.type == "cuda" else None
    mine = {"dtype": cfg.dtype, "model": run.model_cfg, "corpus": run.tokens.fingerprint, "torch": torch.__version__}
    mine |= {"val corpus": run.val_tokens and run.val_tokens.fingerprint, "NCCL": nccl, "code": code_hash()}
    found = run.everyone(mine)
    for key in mine:  # hosts with other files, other cards, another environment
        if len({str(theirs[key]) for theirs in found}) > 1:
            raise UserError(f"the ranks differ in {key}: {dict(enumerate(theirs[key] for theirs in found))}")
    if check:
        check(run)
    if not cfg.explain:
        open_run_folder(run)
        print_banner(run)
        run.watchdog = Watchdog(run) if run.world_size > 1 else None
    _latest = run
    return run


def set_up_torch(cfg: Config, device: torch.device) -> None:
    """Threads, and which kernels torch may choose."""
    here = os.environ.get("LOCAL_WORLD_SIZE")
    if os.environ.get("OMP_NUM_THREADS", "1") == "1":  # torchrun's own choice; any other is the user's
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(here or 1)))
    if cfg.compile:
        # what earlier runs of this process compiled counts against the variants that a block may have
        torch.compiler.reset()
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


def open_corpus(run: Run) -> None:
    """Open the tokens, and give the model their vocabulary where it has none of its own. Raises UserError."""
    cfg = run.cfg
    if not cfg.data:
        from support.prepare import ensure_corpus, stdlib_corpus  # here: it loads tokenizers

        cfg.data = stdlib_corpus()
        one_prepares(run, lambda: ensure_corpus(cfg.data))
    tokens = run.tokens = open_tokens(cfg.data)
    if cfg.eval_every and has_val(cfg.data):
        run.val_tokens = open_tokens(cfg.data, "val")
    elif cfg.eval_every and "eval_every" in cfg.given:
        raise UserError(f"--eval-every {cfg.eval_every}: {cfg.data} has no val split; prepare it with --val 0.005")
    cfg.vocab_size = cfg.vocab_size or tokens.vocab_size
    run.model_cfg = dataclasses.replace(run.model_cfg, vocab_size=cfg.vocab_size)
    check_config(run.model_cfg)
    params(run.model_cfg)  # refuses one that model.py does not describe
    if tokens.vocab_size and tokens.vocab_size > cfg.vocab_size:
        found = f"{cfg.data} has a vocabulary of {tokens.vocab_size} ({tokens.tokenizer})"
        known = f"the model knows {cfg.vocab_size} ids"
        raise UserError(f"{found}, {known}; use --vocab-size {tokens.vocab_size} or more")
    tokens.n_windows(cfg.seq_len)  # UserError if there is none, here as below
    if run.val_tokens:
        try:
            run.val_tokens.n_windows(cfg.seq_len)
        except UserError as error:
            raise UserError(f"{error}; --eval-every 0 trains without validation") from None


def one_prepares(run: Run, prepare: Callable[[], None]) -> None:
    """The run's first rank on each host runs prepare(), the others wait as long as it works; its error becomes theirs.

    They do not wait in a collective, nor in store.wait(): these have a time limit.
    """
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
    while not store.check([key]):
        time.sleep(0.1)
        tenths += 1
        if tenths % 300 == 0:
            put(f"rank {run.rank}: waiting for the first rank of this host to prepare {run.cfg.data}")
    if message := store.get(key).decode():
        raise UserError(message)


# --- the run folder ---------------------------------------------------------------------------------------------------


def open_run_folder(run: Run) -> None:
    """Choose and create the run folder on rank 0, name it to all, write what will be config.json. Raises UserError."""

    def choose() -> str:
        if not run.cfg.out and restarted():
            forgot = "torchrun has started this job again, and its store forgot the run's folder"
            raise UserError(f"{forgot}: --out names one that stays")
        try:
            out = Path(run.cfg.out or recall(run, "folder") or new_folder(run.script))
            run.new_folder = not out.exists() or not run.cfg.out
            out.mkdir(parents=True, exist_ok=True)
            refuse_foreign(out)
            own(run, out)
            (out / ".config.json").write_text(json.dumps(facts(run), indent=1))  # see own_folder()
        except OSError as problem:
            raise UserError(f"--out {run.cfg.out or 'runs/'}: cannot write there: {users_error(problem)}") from None
        remember(run, "folder", str(out))
        return str(out)

    run.out = everywhere(choose, run.control, run.rank == 0)[0]


def refuse_foreign(out: Path) -> None:
    """Raises UserError if what a run would overwrite or append to in this folder is not a run's."""
    try:
        config, log = out / "config.json", out / "log.jsonl"
        if config.exists() and not {"config", "model", "command"} <= json.loads(config.read_text()).keys():
            raise ValueError("config.json is not a run's")
        with open(log) if log.exists() else nullcontext("") as lines:
            if (line := next(iter(lines), "")).endswith("\n") and not {"step", "loss"} <= json.loads(line).keys():
                raise ValueError("log.jsonl is not a run's")
    except (ValueError, AttributeError) as problem:
        raise UserError(f"--out {out} holds something else ({problem}): give a folder of its own") from None


def own(run: Run, out: Path) -> None:
    """Lock the folder as long as this process lives: the kernel lets go of it whatever ends the process.

    By fcntl.lockf, whose locks loader workers do not inherit: one of them may outlive a rank that was killed.
    """
    run.lock = open(out / "lock", "a+")
    try:
        fcntl.lockf(run.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as problem:
        if problem.errno not in (errno.EACCES, errno.EAGAIN):
            say(f"warning: {out} is on a file system without locks ({problem.strerror}): let no second run use it")
            return
        run.lock.seek(0)
        raise UserError(f"--out {out} is in use by another run: {run.lock.read() or 'it has just begun'}") from None
    run.lock.truncate(0)
    run.lock.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}")
    run.lock.flush()


def abandon(run: Run) -> None:
    """A run that was refused leaves no new folder, and another's as it was."""
    out = Path(run.out or ".nowhere")
    if run.rank == 0 and (out / ".config.json").exists():  # it has not begun: see own_folder()
        (out / ".config.json").unlink()
        if run.new_folder and not list(out.glob("ckpt/*")):
            (out / "lock").unlink(missing_ok=True)
            for folder in (out / "ckpt", out):
                with suppress(OSError):
                    folder.rmdir()


def facts(run: Run) -> dict:
    """What config.json holds: where a figure of this run comes from."""
    return {
        "config": dataclasses.asdict(run.cfg),
        "model": dataclasses.asdict(run.model_cfg),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "world_size": run.world_size,
        "hardware": hardware(run),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "commit": git_commit(),
        "code": code_hash(),
        "date": datetime.datetime.now().isoformat(timespec="seconds"),
        "data": {"path": run.cfg.data, "fingerprint": run.tokens.fingerprint, "tokenizer": run.tokens.tokenizer},
    }


def hardware(run: Run) -> str:
    cuda = run.device.type == "cuda"
    return torch.cuda.get_device_name(run.device) if cuda else f"CPU, {os.cpu_count()} cores"


def git_commit() -> str | None:
    """Short hash of the checkout this file lies in, with + when it has changes; None outside git."""
    try:
        call = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=10", "--dirty=+"]
        return subprocess.run(call, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def code_hash() -> str:
    """12 hex digits of this checkout's sources and of the script that was called."""
    root, script, digest = Path(__file__).parent.parent, Path(sys.argv[0]), hashlib.sha256()
    called = [script] if script.suffix == ".py" and script.is_file() else []
    for path in [*sorted(root.glob("*.py")), *sorted(root.glob("support/*.py")), *called]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def code_diff() -> str:
    """What this checkout has that its commit has not: the diff and untracked .py files, 1 MB at most; "" if nothing."""
    root = Path(__file__).parent.parent

    def git(*words: str) -> str:
        call = ["git", "-C", str(root), *words]
        return subprocess.run(call, capture_output=True, text=True, timeout=10, errors="replace").stdout

    try:
        text = git("diff", "HEAD", "--", "*.py", "*.sh")
        for name in git("ls-files", "--others", "--exclude-standard", "--", "*.py").splitlines():
            text += f"\n--- untracked: {name}\n{(root / name).read_text(errors='replace')}"
    except (OSError, subprocess.SubprocessError):
        return ""
    return text[:1_000_000]


def new_folder(script: str) -> Path:
    """runs/SCRIPT-DATE, which did not exist."""
    path = Path(f"runs/{script}-{time.strftime('%Y%m%d-%H%M%S')}")
    while True:
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            if not path.exists():  # runs/ itself is in the way
                raise
            path = path.with_name(path.name + "-2")  # two jobs of one second


def own_folder(run: Run) -> None:
    """The run has begun, config.json is its own from here on: one that is refused leaves another's as it was."""
    if run.rank == 0:
        Path(run.out, ".config.json").replace(Path(run.out, "config.json"))
        diff = Path(run.out, "code.diff")
        diff.unlink(missing_ok=True)
        if changes := code_diff():
            diff.write_text(changes)
        remember(run, "begun", run.out)


# --- what is printed --------------------------------------------------------------------------------------------------


def print_banner(run: Run) -> None:
    cfg = run.cfg
    windows = run.tokens.n_windows(cfg.seq_len)
    if run.device.type == "cpu" and cfg.dtype == "float16":
        say("warning: float16 on a CPU is about twenty times slower than float32; it is meant for GPUs")
    folder = f", run folder {run.out}" if run.out else ""
    say(f"{run.script}: {run.world_size} x {hardware(run)}, torch {torch.__version__}{folder}")
    say(
        f"model {cfg.model}: {n_params(run.model_cfg):,} parameters, {flops_per_token(run.model_cfg) / 1e9:.3f} GFLOP "
        f"per token, compute in {cfg.dtype}, masters in {str(run.master_dtype)[6:]}"
    )
    say(
        f"batch: {cfg.global_batch * cfg.seq_len:,} tokens a step = {cfg.micro_batch} sequences x {cfg.seq_len} tokens "
        f"x {run.accum} micro-batches x {run.dp} data-parallel ranks; {cfg.steps} steps; lr {cfg.lr:g} to "
        f"{cfg.min_lr:g}, warm-up {cfg.warmup_steps}"
    )
    say(
        f"data {cfg.data}: {run.tokens.n_tokens:,} tokens ({run.tokens.tokenizer}), {windows:,} windows, "
        f"{cfg.steps * cfg.global_batch / windows:.2f} epochs; each window once an epoch, the stream runs on over the "
        "edge"
    )


def explain(run: Run, memory: dict[str, int], traffic: list[tuple[str, str, int]]) -> list[dict]:
    """What --explain prints: batch arithmetic, a step's collectives in the order of their first calls, memory.

    Returns the rows of a log without steps.
    """
    print_banner(run)
    say(f"\ncollectives of one step, payload bytes: {sum(size for _, _, size in traffic):,}")
    for (op, what, size), calls in Counter(traffic).items():
        say(f"  {size:16,d}  {op} {what}" + (f"  x {calls}" if calls > 1 else ""))
    say(f"\nmemory of one rank, GB: {sum(memory.values()) / 1e9:.3f}")
    for term, size in memory.items():
        say(f"  {size / 1e9:10.3f}  {term}")
    return []


# --- signals ----------------------------------------------------------------------------------------------------------


def stop_asked(run: Run) -> float:
    """The signal that asked this process to stop, else half a one for a file STOP in the run folder, else 0.

    A loop makes it every rank's at the end of a step.
    """
    return _signal or 0.5 * (run.rank == 0 and Path(run.out, "STOP").exists())


def end(run: Run, stop: float, step: int) -> None:
    """The end of main(): nobody watches any more; the last line of a run that was stopped after `step`."""
    if run.watchdog:
        run.watchdog.close()
    if run.rank == 0:
        Path(run.out, "STOP").unlink(missing_ok=True)  # obeyed
        run.lock.close()  # the next run of this process, or of another, may own the folder
    if stop:
        saved = f"the same command with --out {run.out} --resume auto goes on from there"
        saved = saved if run.cfg.save_every else "without --save-every nothing was saved"
        say(f"stopped by {'a signal' if stop >= 1 else 'the file STOP'} after step {step}; {saved}")
        if _signal and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)):
            say("if the signal was not torchrun's own, --max_restarts starts the job again: signal torchrun to end it")


def catch_signals() -> None:
    """From here on the first signal asks for a stop after the step; a second one ends the process at once.

    SIGHUP stays ignored where it was (nohup), unless torchrun will pass it on: then it kills 30 s later.

    Python calls a handler between two instructions of the main thread, which may be waiting for another rank. So the
    handlers do nothing, and a thread that has nothing else to do reads the numbers from a pipe.
    """
    numbers, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    by_torchrun = "SIGHUP" * ("TORCHELASTIC_RUN_ID" in os.environ)  # unless it is told which to handle
    passed_on = "SIGHUP" in os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", by_torchrun)
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN or passed_on:
            signal.signal(number, lambda number, frame: None)
    threading.Thread(target=obey_signals, args=(numbers,), name="signals", daemon=True).start()


def obey_signals(numbers: int) -> None:
    """The thread's work. A save that is cut off leaves a temporary folder, which the next run removes."""
    global _signal
    first = 0.0
    while True:
        number = os.read(numbers, 1)[0]
        if number not in SIGNALS:
            continue
        # before the loop there is nothing to save: waiting for ranks or a corpus must not outlast a signal
        if not running() or _signal and time.monotonic() - first > AT_ONCE:
            os._exit(128 + number)
        if not _signal:
            _signal, first = number, time.monotonic()
            say(f"{signal.Signals(number).name}: the run stops after this step; a second signal ends it at once")


# --- the frame --------------------------------------------------------------------------------------------------------


def run_script(main: Callable[[Config], list], predict: Callable | None, config: type, doc: str) -> None:
    """Everything around main(cfg): flags, signals, an end on which all ranks agree. Exit code 0 only if all finished.

    predict: the script's, for the report of a rank that is out of memory.
    """
    global _latest
    argv = sys.argv[1:]
    if {"-h", "--help"} & set(argv):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # --help | head
        print_help(config, doc)
        return
    catch_signals()
    any_text_prints()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # `pkill -USR1 -f -- '-u .*train_'`: all stacks of every rank, while it hangs
    stopped = torch.zeros(1, dtype=torch.int32)
    cfg = None
    try:
        cfg = parse_flags(config, argv)
        main(cfg)
        if dist.is_initialized():
            stopped += _signal
            # and no rank takes the store away while another still needs it
            dist.all_reduce(stopped, op=dist.ReduceOp.MAX)
            _latest = None  # it holds groups
            destroy_groups()
    except BaseException as error:
        error = users_error(error)
        for worker in multiprocessing.active_children():
            worker.kill()  # else loader workers hold this rank's sockets, and the others wait for it
        if _latest:
            abandon(_latest)
        report(error, predict, alike=cfg is None and "TORCHELASTIC_RUN_ID" in os.environ, run=_latest)
        os._exit(2 if isinstance(error, UserError) else 1)  # not destroy_process_group: it can hang while a peer waits
    if stopped:
        sys.exit(128 + int(stopped))
