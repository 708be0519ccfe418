"""The training run: set up, resume, step, report, save."""

from __future__ import annotations

import logging
import math
import os
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from dsv32.mcore.packing import padded_length
from dsv32.training import checkpoint, text
from dsv32.training.errors import TrainingError
from dsv32.training.model import build_model, megatron_config
from dsv32.training.report import Report, StepLine, peak_memory_gib
from dsv32.training.samples import Samples
from dsv32.training.settings import DTYPES, TrainSettings
from dsv32.training.step import StepResult, Trainer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron.core.models.gpt import GPTModel

    from dsv32.training.batch import Batch

#: Megatron cuts embedding and output layer over tensor-parallel ranks; padding to a fixed multiple keeps a
#: checkpoint's shapes the same under each.
_VOCABULARY_MULTIPLE = 128
_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

#: The routers' biases are no parameters: what moves them is the balance of the experts, training or not.
_ROUTING_STAYS = {"moe_router_bias_update_rate": 0.0}


def freeze_all_but_indexer(chunks: Sequence[GPTModel]) -> int:
    """Leave gradients to the indexers alone (the dense warm-up); returns how many parameters they have."""
    trained = 0
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_(".indexer." in name)
            trained += parameter.numel() if parameter.requires_grad else 0
    return trained


def make_trainer(settings: TrainSettings, corpus: text.Corpus, device: torch.device) -> Trainer:
    """The model of a run with its optimizer, on this rank."""
    logging.getLogger("megatron").setLevel(logging.ERROR)  # a page of notices a rank, none about this run
    settings = _for_device(settings, device)
    config = megatron_config(
        size=settings.model_size,
        parallel=settings.parallel,
        dtype=DTYPES[settings.dtype],
        local=settings.layers == "local",
        indexer_loss=settings.indexer_loss,
        sparse=settings.stage == "sparse",
        settings={
            "dsa_kernel_backend": settings.kernels,
            "dsa_kernel_strict": settings.kernels_strict,
            "mtp_num_layers": settings.mtp or None,
            "mtp_loss_scaling_factor": settings.mtp_loss,
            **(_RECOMPUTE if settings.recompute else {}),
            **(_ROUTING_STAYS if settings.stage == "warmup" else {}),
        },
    )
    chunks = build_model(
        config=config,
        vocabulary=vocabulary(settings, corpus),
        sequence_length=settings.sequence_length,
    )
    for chunk in chunks:
        chunk.to(device)
    if settings.stage == "warmup":
        freeze_all_but_indexer(chunks)
    return Trainer(
        chunks=chunks,
        optimizer=OptimizerConfig(
            optimizer=settings.optimizer,
            lr=settings.learning_rate,
            min_lr=settings.learning_rate / 10,
            weight_decay=settings.weight_decay,
            adam_beta2=0.95,
            sgd_momentum=0.0,
            clip_grad=settings.clip,
            bf16=settings.dtype == "bf16",
            params_dtype=DTYPES[settings.dtype],
            use_distributed_optimizer=settings.distributed_optimizer,
        ),
    )


def _for_device(settings: TrainSettings, device: torch.device) -> TrainSettings:
    """The settings with every "auto" decided, and our kernels told to be as strict as Megatron is."""
    settings = settings.resolved(gpu=device.type == "cuda")
    settings.check_device(gpu=device.type == "cuda")
    if settings.kernels_strict and device.type == "cuda":
        os.environ["DSV32_DSA_STRICT"] = "1"  # hooks without a config read it; see dsv32.dsa.settings
    return settings


def vocabulary(settings: TrainSettings, corpus: text.Corpus) -> int:
    """Rows of embedding and output layer."""
    needed = max(settings.model_size.vocabulary, corpus.vocabulary)
    return padded_length(needed, multiple=_VOCABULARY_MULTIPLE)


def make_scheduler(settings: TrainSettings, trainer: Trainer) -> OptimizerParamScheduler:
    """Linear warm-up, then a cosine to a tenth; constant weight decay."""
    return OptimizerParamScheduler(
        trainer.optimizer,
        init_lr=0.0,
        max_lr=settings.learning_rate,
        min_lr=settings.learning_rate / 10,
        lr_warmup_steps=min(settings.warmup_steps, settings.steps - 1),
        lr_decay_steps=settings.steps,
        lr_decay_style="cosine",
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=settings.steps,
        wd_incr_style="constant",
    )


def train(device: torch.device, settings: TrainSettings) -> list[StepResult]:
    """Train on this rank; the process group is initialised, and every rank calls this.

    Returns:
        What each step of this call gave.

    Raises:
        TrainingError: settings that cannot run (before any work), or a loss that is not finite.
    """
    settings.check(world_size=dist.get_world_size())
    settings = _for_device(settings, device)
    corpus = text.load(settings.data)
    samples = Samples(
        corpus=corpus,
        rows=settings.sequence_length,
        thd=settings.layout == "thd",
        multiple=settings.row_multiple,
        seed=settings.seed,
    )
    source = settings.load or checkpoint.latest(settings.out)
    stage = checkpoint.about(source)["settings"]["stage"] if source else settings.stage

    settings.parallel.initialize()
    torch.manual_seed(settings.seed)
    model_parallel_cuda_manual_seed(settings.seed)
    trainer = make_trainer(settings, corpus, device)
    scheduler = make_scheduler(settings, trainer)
    resumed = checkpoint.Resumed(step=0, samples=0)
    if source is not None:
        resumed = checkpoint.load(
            source, trainer=trainer, scheduler=scheduler, weights_only=stage != settings.stage
        )

    results: list[StepResult] = []
    speaking = dist.get_rank() == 0
    report = Report(out=settings.out, steps=settings.steps, done=resumed.step, speaking=speaking)
    with report:
        if source is not None:
            report.say(f"from {source}, after {resumed.step} steps of stage {settings.stage}")
        seen = resumed.samples
        for step in range(resumed.step + 1, settings.steps + 1):
            began = time.monotonic()
            scheduler.step(increment=1)
            batches = _batches(settings, samples, seen, device)
            result = trainer.step(batches, sequence_length=settings.sequence_length)
            seen += settings.global_batch
            results.append(result)
            _refuse_nan(result, step)
            report.step(
                StepLine(
                    step=step,
                    lm_loss=result.lm_loss,
                    indexer_loss=result.indexer_loss,
                    mtp_loss=result.mtp_loss,
                    grad_norm=result.grad_norm,
                    learning_rate=trainer.optimizer.param_groups[0]["lr"],
                    tokens_per_second=result.tokens / (time.monotonic() - began),
                    memory_gib=peak_memory_gib(),
                )
            )
            if step == settings.steps or (settings.save_every and step % settings.save_every == 0):
                progress = checkpoint.Resumed(step=step, samples=seen)
                folder = checkpoint.save(
                    trainer=trainer, scheduler=scheduler, settings=settings, progress=progress
                )
                report.say(f"saved {folder}")
    return results


def _batches(settings: TrainSettings, samples: Samples, seen: int, device: torch.device) -> list[Batch]:
    """This rank's microbatches of the step that begins after ``seen`` samples."""
    size, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    mine = range(seen + rank, seen + settings.global_batch, size)
    return [
        samples.batch(
            list(mine[first : first + settings.micro_batch]),
            cp_size=settings.parallel.cp,
            cp_rank=parallel_state.get_context_parallel_rank(),
            device=device,
        )
        for first in range(0, len(mine), settings.micro_batch)
    ]


def _refuse_nan(result: StepResult, step: int) -> None:
    bad = [
        name
        for name, value in (
            ("lm loss", result.lm_loss),
            ("indexer loss", result.indexer_loss),
            ("mtp loss", result.mtp_loss),
            ("gradient norm", result.grad_norm),
        )
        if not math.isfinite(value)
    ]
    if bad or result.skipped:
        raise TrainingError(
            f"step {step}: {' and '.join(bad) or 'a gradient'} not finite",
            "resume from the last checkpoint with a smaller --learning-rate, or look at that step's data",
        )
