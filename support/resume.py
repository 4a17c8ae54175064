"""Going on: from a run's own checkpoint, or with the weights of another."""

import dataclasses
from pathlib import Path

import torch

from buckets import colours
from checkpoint import Checkpointer, describe, find_checkpoint, read_meta, steps
from model import n_params
from support.flags import UserError, flag_name
from support.meter import say
from support.rendezvous import recall
from support.run import Run
from support.start import own_folder


def progress(run: Run, updates: int, scaler) -> dict:
    """What a checkpoint holds beside tensors and the number of steps: how many were not skipped, and whose they are."""
    return {
        "updates": updates,
        "scaler": scaler.state(),
        "stream_offset": run.samples_before(0),  # not 0 once the global batch has been another
        "config": dataclasses.asdict(run.cfg),
        "model": dataclasses.asdict(run.model_cfg),
        "data": run.tokens.fingerprint,
        "tokenizer": run.tokens.tokenizer,
        "world_size": run.world_size,
        "script": run.script,
        "torch": torch.__version__,
    }


def check_replicas(run: Run, strategy) -> None:
    """Collective: what several ranks hold must have the same bits, or no checkpoint is written of it.

    strategy: has buckets, and alike, which a fork whose replicas go their own ways sets to False. Raises UserError
    naming bucket and ranks: a card or its memory is damaged, or a change of the code updates replicas unlike. Sums the
    bits of whole masters, or of whole compute weights where masters are shared.
    """
    strategy.catch_up()
    if not strategy.alike:
        return
    alike, place, mine = colours(run), run.place(), {}
    for unit, bucket in strategy.buckets.items():
        whole = bucket.weights if strategy.shared else bucket.master
        if whole.numel() == bucket.padded and getattr(run.cfg, "stage", 0) < 3:  # else they are there for a while only
            bits = whole.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[whole.itemsize])
            # a tied embedding is the same on both ends of the pipeline, too
            colour = place.seat * (run.tp > 1) if bucket.twin else alike[bucket.holders](place)
            mine[unit, colour] = int(bits.sum(dtype=torch.int64))
    everyones = run.everyone(mine)
    # every rank looks at all, also at what it has no part in: all go on, or all end with the same words
    for what in dict.fromkeys(key for theirs in everyones for key in theirs):
        sums = {rank: theirs[what] for rank, theirs in enumerate(everyones) if what in theirs}
        first = min(sums)
        if other := [rank for rank in sums if sums[rank] != sums[first]]:
            raise UserError(f"{what[0]}: ranks {other} do not hold the same weights as rank {first}; nothing is saved")


def rng_state(run: Run) -> torch.Tensor:
    """torch's generator states of this rank as bytes: nothing here draws from them, a fork may."""
    states = [torch.get_rng_state()] + ([torch.cuda.get_rng_state(run.device)] if run.device.type == "cuda" else [])
    return torch.cat([state.cpu() for state in states])


def resume(run: Run, saver: Checkpointer, strategy, scaler) -> tuple[int, int]:
    """Collective: load the checkpoint or the weights that this run begins with -> (first step, updates so far).

    strategy: has pieces() and masters_changed(). A flag that differs from the checkpoint's wins and is printed, old ->
    new; another model or corpus is refused (UserError): --init-from starts a new run from the weights.
    """
    cfg = run.cfg
    pieces = strategy.pieces()
    if cfg.save_every:
        saver.check_space(3 * run.master_dtype.itemsize * n_params(run.model_cfg))
    path = choose_checkpoint(run, saver)
    if path is None:
        if cfg.init_from:
            init_from(run, saver, strategy, pieces)
        own_folder(run)
        return 0, 0
    saved = read_meta(path)
    check_same(run, path, saved)
    meta = saver.load(path, pieces)
    saver.protect(path)
    strategy.masters_changed()
    run.first_step = saved["step"]
    run.consumed = saved.get("stream_offset", 0) + saved["step"] * saved["config"]["global_batch"]
    scaler.load(saved["scaler"])
    if "rng" in meta:
        size = torch.get_rng_state().numel()
        torch.set_rng_state(meta["rng"][:size])
        if run.device.type == "cuda" and meta["rng"].numel() > size:
            torch.cuda.set_rng_state(meta["rng"][size:], run.device)
    elif saved["world_size"] == run.world_size:
        say("resume: the checkpoint has no RNG states (nothing here uses them)")
    for key, old in saved["config"].items():
        new = getattr(cfg, key, old)  # a flag of another script is no change
        if old != new and key not in ("out", "resume", "data", "device"):
            say(f"resume: {flag_name(key)} {old} -> {new}")
    own_folder(run)
    say(f"resume: going on from {path} at step {saved['step']}")
    if saved["step"] >= cfg.steps:
        say(f"resume: {saved['step']} steps are done and --steps is {cfg.steps}: nothing left to do")
    return saved["step"], saved["updates"]


def choose_checkpoint(run: Run, saver: Checkpointer) -> str | None:
    """Collective: the checkpoint that --resume means; None: a new run. Raises UserError where two runs would mix."""
    cfg = run.cfg
    explicit = cfg.resume not in ("auto", "never")
    # torchrun has started us again, and before that we had begun: what is saved here is our own
    again = run.everyone(recall(run, "begun") == run.out)[0]
    newest = saver.latest() if not explicit or again else None
    path = newest or (cfg.resume if explicit else None)
    if path is None:
        if run.everyone(steps(saver.folder))[0]:
            advice = "repair or remove them, or give another --out"
            raise UserError(f"no checkpoint in {saver.folder} is intact (see above): {advice}")
        return None
    if cfg.resume == "never" and not again:
        raise UserError(f"--resume never, but {run.out} holds {path}: a new run needs a folder of its own")
    if not Path(path).is_dir():
        raise UserError(f"--resume {path}: no such checkpoint; allowed are auto, never, or a step_... folder")
    saved = read_meta(path)
    if not {"step", "updates", "scaler", "config", "model", "data"} <= saved.keys():
        raise UserError(f"{path}: its meta.json is not one of a training run")
    later = run.everyone([p.name for p in steps(saver.folder) if int(p.name[5:]) > saved["step"]])[0]
    if newest is None and later:
        found = f"{saver.folder} holds later steps ({', '.join(later)}), from which a restart would go on"
        raise UserError(f"--resume {path}: {found}; --resume auto does, else remove them or give another --out")
    return path


def check_same(run: Run, path: str, saved: dict) -> None:
    """Raises UserError if the checkpoint is of another model or corpus."""
    check_same_model(run, path, saved)
    if saved["data"] != run.tokens.fingerprint:
        found = f"fingerprint {saved['data']}, {run.cfg.data} has {run.tokens.fingerprint}"
        advice = "its order of samples cannot go on; --init-from starts a new run from the weights"
        raise UserError(f"{path} was trained on another corpus ({found}): {advice}")


def check_same_model(run: Run, path: str | Path, saved: dict) -> None:
    """Raises UserError naming the first field in which the checkpoint's model is another one."""
    for key, new in dataclasses.asdict(run.model_cfg).items():
        old = saved["model"].get(key)
        if old != new and key not in ("dropout", "seq_len"):  # no weight depends on these two
            raise UserError(f"{path} is of another model: {key} was {old}, is {new}")


def init_from(run: Run, saver: Checkpointer, strategy, pieces: dict) -> None:
    """Weights of another run (or of a Hugging Face Llama folder), everything else new."""
    path = find_checkpoint(run.cfg.init_from)
    weights = {name: piece for name, piece in pieces.items() if not name.startswith("exp_avg")}
    if (path / "meta.json").exists():
        check_same_model(run, path, read_meta(path))
        saver.load(path, describe(path) | weights)
    else:
        from export import load_hf  # here: it loads tokenizers

        load_hf(path, weights, run.model_cfg)
    strategy.masters_changed()
    say(f"weights from {path}, a new run from step 0")
