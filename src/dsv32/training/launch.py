"""Joining ranks: under torchrun, or as processes that a run starts itself on one host."""

from __future__ import annotations

import os
import sys
import tempfile
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dsv32.torchrun import without_libuv
from dsv32.training.errors import TrainingError

if TYPE_CHECKING:
    from collections.abc import Callable

#: A rank waits this long for another: a first step compiles kernels, and a lost rank should not hold a night.
_TIMEOUT = timedelta(minutes=10)


def ranks_given() -> int | None:
    """World size if a launcher such as torchrun started this process, else None."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else None


def on_ranks(count: int, work: Callable[..., Any], *args: Any) -> None:  # noqa: ANN401
    """Call ``work(device, *args)`` on every rank: of the launcher, or of ``count`` processes started here.

    ``work`` is a module-level function.  A ``TrainingError`` on a rank is said once and ends every rank
    with exit status 2.
    """
    if ranks_given() is not None:
        _rank(int(os.environ["RANK"]), None, None, work, args)
        return
    with tempfile.TemporaryDirectory(prefix="dsv32-") as folder:
        if count == 1:
            _rank(0, 1, folder, work, args)
            return
        try:
            mp.start_processes(_rank, args=(count, folder, work, args), nprocs=count, start_method="spawn")
        except mp.ProcessExitedException as error:
            sys.exit(error.exit_code)


def _rank(
    rank: int, count: int | None, folder: str | None, work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    else:
        from dsv32 import cpu

        cpu.install()
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // (count or ranks_given() or 1)))
    backend = "nccl" if gpu else "gloo"
    if count is None:
        without_libuv()
        dist.init_process_group(backend, timeout=_TIMEOUT)
    else:
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=count,
            timeout=_TIMEOUT,
        )
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    try:
        work(device, *args)
    except TrainingError as error:
        if rank == 0:
            say(error)
        sys.exit(2)
    finally:
        dist.destroy_process_group()


def say(error: TrainingError) -> None:
    """Two lines on stderr: what happened, and what to do."""
    sys.stderr.write(f"error: {error.what}\n  {error.hint}\n")
    sys.stderr.flush()
