"""The GPU paths, on a single GPU: two processes share it. Skipped where there is none.

Copy engines and signals are the real ones; collectives, which NCCL refuses on one card, go through host memory.

    python tests/test_one_card.py FOLDER                                      # what the test runs: one, the reference
    torchrun --standalone --nproc_per_node=2 tests/test_one_card.py FOLDER    # two processes, every form
"""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import toy_files

DEVICE = "cuda"
FORMS = {
    "ddp": ("train_ddp", {}),
    "zero 1": ("train_zero", {"stage": 1}),
    "zero 2": ("train_zero", {"stage": 2}),
    "zero 3": ("train_zero", {"stage": 3}),
    "zero 2, offload": ("train_zero", {"stage": 2, "offload": "optimizer"}),
    "zero 3, offload": ("train_zero", {"stage": 3, "offload": "optimizer"}),
    "zero 2, collectives": ("train_zero", {"stage": 2, "copy_engine": False}),
    "zero 3, collectives": ("train_zero", {"stage": 3, "copy_engine": False}),
    "tp": ("train_tp", {}),
    "1f1b": ("train_pipe", {}),
    "gpipe": ("train_pipe", {"schedule": "gpipe"}),
    "interleaved": ("train_pipe", {"schedule": "interleaved", "chunks": 2}),
    "1f1b, collectives": ("train_pipe", {"copy_engine": False}),
    "3d, tp 2": ("train_3d", {"tp": 2, "pp": 1}),
    "3d, pp 2": ("train_3d", {"tp": 1, "pp": 2}),
    "3d, pp 2, interleaved": ("train_3d", {"tp": 1, "pp": 2, "schedule": "interleaved"}),
    "3d, dp 2": ("train_3d", {"tp": 1, "pp": 1}),
    "3d, dp 2, replicated": ("train_3d", {"tp": 1, "pp": 1, "zero": 0}),
    "cp": ("train_cp", {}),
    "cp, zero 1": ("train_cp", {"stage": 1}),
    "cp, collectives": ("train_cp", {"copy_engine": False}),
    "cp, zero 1, selective": ("train_cp", {"stage": 1, "recompute": "selective"}),
}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_every_form_on_one_card(tmp_path):
    """float64, tied and not, dropout, clipping: losses and norms within 1e-9 of one process, as on CPUs."""
    toy_files(tmp_path, n_layer=4)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    for launcher in ([], torchrun):
        done = subprocess.run(
            [sys.executable, *launcher, __file__, str(tmp_path)], capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    one, two = (json.loads((tmp_path / f"rows-{n}.json").read_text()) for n in (1, 2))
    assert len(two) == 2 * len(FORMS)
    for name, rows in two.items():
        expected = one["tied, ddp" if name.startswith("tied") else "ddp"]
        assert [v for row in rows for v in row] == pytest.approx([v for row in expected for v in row], rel=1e-9), name


def share_the_card() -> None:
    """Make two ranks of a job use GPU 0: no NCCL, but its collectives' names over gloo and host memory."""
    os.environ |= {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "LOCAL_RANK": "0"}
    init, isend, irecv = dist.init_process_group, dist.isend, dist.irecv
    dist.init_process_group = lambda backend, device_id=None, **more: init("cpu:gloo,cuda:gloo", **more)
    torch.cuda.can_device_access_peer = lambda a, b: True

    class Done:
        def wait(self) -> None:
            """Nothing to wait for."""

    class Receive:
        def __init__(self, tensor: torch.Tensor, **more):
            self.tensor, self.host = tensor, torch.empty_like(tensor, device="cpu")
            self.work = irecv(self.host, **more)

        def wait(self) -> None:
            self.work.wait()
            self.tensor.copy_(self.host)

    def through_host(collective):
        def call(*tensors, async_op=False, **more):
            hosts = [t.cpu() for t in tensors]
            collective(*hosts, **more)
            for tensor, host in zip(tensors, hosts):
                tensor.copy_(host)
            return Done() if async_op else None

        return call

    for name in ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"):
        setattr(dist, name, through_host(getattr(dist, name)))
    for new in ("all_gather_single", "reduce_scatter_single"):  # torch 2.13's names
        if hasattr(dist, new):
            setattr(dist, new, through_host(getattr(dist, new)))
    sent = []  # a message must live until it has arrived
    dist.isend = lambda tensor, **more: isend(sent.append(tensor.cpu()) or sent[-1], **more)
    dist.irecv = Receive

    def started(op, tensor: torch.Tensor, group: dist.ProcessGroup, group_peer: int):
        return op(tensor, group=group, **{"group_src" if op is Receive else "group_dst": group_peer})

    dist.P2POp, dist.batch_isend_irecv = started, list


def main(folder: str) -> None:
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        share_the_card()
    found = {}
    for tied in ("", "tied, "):
        for name, (script, more) in (FORMS if ranks > 1 else {"ddp": FORMS["ddp"]}).items():
            flags = dict(
                model=f"{folder}/toy.json", data=f"{folder}/plain", out=f"{folder}/{tied}{name}{ranks}", device=DEVICE,
                dtype="float64", global_batch=12, micro_batch=3, steps=8, lr=1e-3, warmup_steps=2, clip=0.1,
                dropout=0.1, tie=bool(tied), workers=0, eval_every=0, save_every=0, compile=False, hang_timeout=60
            )  # fmt: skip
            module = importlib.import_module(script)
            rows = module.main(module.Config(**flags | more))
            found[tied + name] = [(row["loss"], row["grad_norm"]) for row in rows]
    if int(os.environ.get("RANK", 0)) == 0:
        Path(folder, f"rows-{ranks}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # not destroy_process_group: it can hang while a peer waits


if __name__ == "__main__":
    main(sys.argv[1])
