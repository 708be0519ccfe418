"""Distributed checkpoints: written under another name first, readable under any parallel layout."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from dsv32.training.errors import TrainingError

if TYPE_CHECKING:
    from pathlib import Path

    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    from dsv32.training.settings import TrainSettings
    from dsv32.training.step import Trainer

_NAME = re.compile(r"^step-(\d{6})$")
_ABOUT = "run.json"


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """Where a run goes on."""

    step: int  # steps already done
    samples: int  # samples already seen


def folder_of(out: Path, step: int) -> Path:
    """The checkpoint's folder after ``step`` steps."""
    return out / f"step-{step:06d}"


def latest(out: Path) -> Path | None:
    """The newest complete checkpoint below ``out``."""
    found = [path for path in out.glob("step-*") if _NAME.match(path.name) and (path / _ABOUT).is_file()]
    return max(found, default=None, key=lambda path: path.name)


def about(folder: Path) -> dict[str, Any]:
    """The settings and progress that a checkpoint was written with.

    Raises:
        TrainingError: the folder holds no complete checkpoint.
    """
    if not (folder / _ABOUT).is_file():
        raise TrainingError(
            f"{folder} holds no complete checkpoint ({_ABOUT} is missing)",
            "give a step-… folder that a finished save wrote",
        )
    written: dict[str, Any] = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
    return written


#: The distributed optimizer's state by parameter rather than by buffer, so that another layout can read it.
_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
}


def _state(trainer: Trainer, *, optimizer: bool, loading: bool) -> dict[str, Any]:
    # By number: what is stored is named by layer, so another layout finds it whatever its chunks are.
    model = {
        str(number): chunk.sharded_state_dict(metadata=_METADATA)
        for number, chunk in enumerate(trainer.plain_chunks)
    }
    state: dict[str, Any] = {"model": model}
    if optimizer:
        state["optimizer"] = trainer.optimizer.sharded_state_dict(
            model, is_loading=loading, metadata=_METADATA
        )
    return state


def save(
    *,
    trainer: Trainer,
    scheduler: OptimizerParamScheduler,
    settings: TrainSettings,
    progress: Resumed,
) -> Path:
    """Write a checkpoint; collective.  A save that is killed leaves the older ones as they were."""
    final = folder_of(settings.out, progress.step)
    partial = final.with_name(f".{final.name}.partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    state = _state(trainer, optimizer=True, loading=False)
    state["scheduler"] = scheduler.state_dict()
    dist_checkpointing.save(state, str(partial))
    dist.barrier()
    if dist.get_rank() == 0:
        written = {"step": progress.step, "samples": progress.samples, "settings": settings.record()}
        (partial / _ABOUT).write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
    dist.barrier()
    return final


def load(
    folder: Path,
    *,
    trainer: Trainer,
    scheduler: OptimizerParamScheduler | None,
    weights_only: bool = False,
) -> Resumed:
    """Read a checkpoint into the model and, unless ``weights_only``, the optimizer and schedule; collective.

    Raises:
        TrainingError: no complete checkpoint, or one of another model.
    """
    written = about(folder)
    state = _state(trainer, optimizer=not weights_only, loading=True)
    if not weights_only:
        state["scheduler"] = {}
    try:
        loaded = dist_checkpointing.load(state, str(folder))
    except (CheckpointingException, CheckpointException, KeyError) as error:
        found = isinstance(error, CheckpointException)  # torch's, which holds those of the ranks
        reason = next(iter(error.failures.values()))[0] if found else error
        settings = written["settings"]
        ranks = " ".join(f"--{name} {degree}" for name, degree in settings["parallel"].items())
        raise TrainingError(
            # Megatron appends the names of all tensors there are.
            f"{folder} does not fit this model: {str(reason).splitlines()[0][:200]}",
            f"it was written by --size {settings['size']} {ranks}",
        ) from error
    for number, chunk in enumerate(trainer.plain_chunks):
        chunk.load_state_dict(loaded["model"][str(number)])
    if weights_only:
        trainer.optimizer.reload_model_params()
        return Resumed(step=0, samples=0)
    trainer.optimizer.load_state_dict(loaded["optimizer"])
    if scheduler is not None:
        scheduler.load_state_dict(loaded["scheduler"])
    return Resumed(step=written["step"], samples=written["samples"])
