"""Runs a function on several ranks of a real process group: gloo on CPU, NCCL where there are GPUs enough."""

from __future__ import annotations

import os
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dsv32 import cpu
from dsv32.mcore.layer_spec import why_no_te

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

cpu.prepare()  # for the ranks, which inherit the environment

#: A rank that waits longer than this for another has lost it; the whole suite takes less.
TIMEOUT = timedelta(seconds=240)
#: Imported once in the fork server, so that a rank starts in milliseconds rather than in the 5 s of these
#: imports.
_PRELOAD = [
    "torch",
    "dsv32.without_gpu",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.gpt.experimental_attention_variant_module_specs",
]


def fits(world_size: int) -> bool:
    """Whether this machine has the ranks: a GPU each where there are GPUs, else processes on the CPU."""
    return not torch.cuda.is_available() or torch.cuda.device_count() >= world_size


def skip_unless_fits(world_size: int) -> None:
    """Skip the test that needs more GPUs than there are, naming how many are missing.

    Megatron under gloo needs ``dsv32.cpu``, which stays off where there is a GPU.
    """
    if not fits(world_size):
        here = torch.cuda.device_count()
        pytest.skip(
            f"{world_size} ranks over NCCL need {world_size} GPUs, {world_size - here} more than here"
        )


def no_te() -> str | None:
    """Why Transformer Engine's layers cannot run here, or None."""
    return (
        why_no_te() if torch.cuda.is_available() else "no CUDA device, which Transformer Engine's layers need"
    )


def run_ranks(world_size: int, work: Callable[..., Any], *args: Any, cpu: bool = False) -> list[Any]:
    """Call ``work(rank, device, *args)`` on ``world_size`` ranks and return what each returned, by rank.

    ``work`` must be a module-level function and return something that ``torch.save`` takes.  Ranks are fresh
    processes, so what a test changes in modules there does not leak into the next.  ``cpu`` keeps to gloo and
    CPU even where there are GPUs, which the ranks then do not see.  With fewer GPUs than ranks the test is
    skipped.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank raised; carries its traceback.
    """
    if not cpu:
        skip_unless_fits(world_size)
    # A fork server that has imported a library which opens the GPU cannot serve ranks that use it.
    gpu = torch.cuda.is_available() and not cpu
    method = "spawn" if gpu else "forkserver"
    if not gpu:
        mp.get_context(method).set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _rank, args=(world_size, folder, gpu, (work, args)), nprocs=world_size, start_method=method
        )
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(world_size)]


def _rank(
    rank: int, world_size: int, folder: str, gpu: bool, call: tuple[Callable[..., Any], tuple[Any, ...]]
) -> None:
    work, args = call
    if not gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before CUDA's first use in this process
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
        # fp32 parity is measured in fp32: TF32 keeps 10 bits of mantissa.
        torch.backends.cuda.matmul.allow_tf32 = False
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "nccl" if gpu else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world_size,
        timeout=TIMEOUT,
    )
    try:
        torch.save(work(rank, device, *args), Path(folder, f"{rank}.pt"))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def groups_of(size: int) -> dist.ProcessGroup:
    """Cut the world into consecutive groups of ``size`` ranks and return this rank's; collective."""
    mine = None
    for first in range(0, dist.get_world_size(), size):
        members = list(range(first, first + size))
        group = dist.new_group(members)
        if dist.get_rank() in members:
            mine = group
    assert mine is not None, f"world of {dist.get_world_size()} ranks does not divide by {size}"
    return mine


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """max|got - wanted| / max|wanted|, in fp64."""
    assert got.shape == wanted.shape, f"shapes differ: {tuple(got.shape)} and {tuple(wanted.shape)}"
    scale = wanted.double().abs().max().item()
    error = (got.double() - wanted.double()).abs().max().item()
    assert scale > 0, "the reference is all zero: nothing was compared"
    return error / scale


def worst(got: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> tuple[float, str]:
    """The largest relative error among results of the same names, and its name."""
    assert got.keys() == wanted.keys()
    return max((relative_error(got[name], wanted[name]), name) for name in wanted)
