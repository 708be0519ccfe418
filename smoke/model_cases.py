"""A tiny DeepSeek-V3.2 with the same weights and the same tokens under every parallel layout."""

from __future__ import annotations

import logging
import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
from choices import Choices, Recorder
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor

from dsv32 import cpu
from dsv32.mcore.full_state import gather_full, load_full
from dsv32.training.batch import Batch, packed_batch, padded_batch
from dsv32.training.model import Parallel, build_model, megatron_config
from dsv32.training.sizes import TINY
from dsv32.training.step import Trainer

#: Rows of a microbatch of each layout, and its sequences: tokens of the documents to pack, one of two tokens.
SBHD_BATCH, SBHD_ROWS, THD_ROWS, DOCUMENTS = 2, 64, 128, (30, 9, 2, 50)
MICROBATCHES = 2


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A training run: how ranks share the work, the layout of rows, and other settings of Megatron's."""

    name: str
    parallel: Parallel = field(default_factory=Parallel)
    thd: bool = False
    dtype: torch.dtype = torch.float32
    sparse: bool = True
    rounded_weights: bool = False  # to bf16, so that an fp32 model has the weights of a bf16 one
    optimizer: str = "sgd"
    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    te: bool = False  # Transformer Engine's layers rather than plain torch
    settings: dict[str, Any] = field(default_factory=dict)
    microbatches: int = MICROBATCHES

    @property
    def ranks(self) -> int:
        degrees = self.parallel
        return max(degrees.tp * degrees.cp * degrees.pp, degrees.ep)

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a layout gave: reports of each step, and gradients of step 0 by global name."""

    lm_loss: list[float]
    indexer_loss: list[float]
    mtp_loss: list[float]
    grad_norm: list[float]
    choices: list[Choices]
    gradients: dict[str, Tensor]


def weight(name: str, shape: tuple[int, ...]) -> Tensor:
    """A parameter's value by its global name, large enough that selection and routing depend on tokens."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    value = torch.randn(*shape, generator=generator)
    if len(shape) == 1:
        return 0.1 * value if name.endswith("bias") else 1 + 0.1 * value
    return value / shape[-1] ** 0.5


def rounded_weight(name: str, shape: tuple[int, ...]) -> Tensor:
    """``weight``, rounded to bf16."""
    return weight(name, shape).bfloat16().float()


def start(layout: Layout) -> None:
    """Set this rank up for a layout; the process group exists."""
    logging.disable(logging.WARNING)
    if not torch.cuda.is_available():
        cpu.install()
    layout.parallel.initialize()
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)


def make_trainer(layout: Layout, device: torch.device, *, learning_rate: float = 0.1) -> Trainer:
    """The model of a layout with the weights of ``weight``.

    SGD has no state and no epsilon.  Adam's first update is the gradient's sign, which a rounding can turn
    where the gradient is 0; an epsilon far above the rounding keeps it smooth.
    """
    config = megatron_config(
        size=TINY,
        parallel=layout.parallel,
        dtype=layout.dtype,
        local=not layout.te,
        sparse=layout.sparse,
        settings=layout.settings,
    )
    rows = THD_ROWS if layout.thd else SBHD_ROWS
    chunks = build_model(config=config, vocabulary=TINY.vocabulary, sequence_length=rows)
    load_full(chunks, rounded_weight if layout.rounded_weights else weight)
    optimizer = OptimizerConfig(
        optimizer=layout.optimizer,
        adam_eps=1e-3,
        lr=learning_rate if layout.optimizer == "sgd" else learning_rate / 10,
        weight_decay=0.0,
        sgd_momentum=0.0,
        clip_grad=1.0,
        bf16=layout.dtype == torch.bfloat16,
        params_dtype=layout.dtype,
        use_distributed_optimizer=layout.distributed_optimizer,
    )
    return Trainer(
        chunks=[chunk.to(device) for chunk in chunks],
        optimizer=optimizer,
        overlap_grad_reduce=layout.overlap_grad_reduce,
    )


def make_batches(layout: Layout, device: torch.device) -> list[Batch]:
    """This rank's share of the microbatches of one global batch."""
    generator = torch.Generator().manual_seed(3)
    cut: dict[str, Any] = {
        "cp_size": layout.parallel.cp,
        "cp_rank": parallel_state.get_context_parallel_rank(),
        "device": device,
    }
    batches = []
    for _ in range(layout.microbatches):
        if layout.thd:
            documents = [torch.randint(0, 256, (count,), generator=generator) for count in DOCUMENTS]
            batches.append(packed_batch(documents, rows=THD_ROWS, multiple=8, **cut))
        else:
            sequences = torch.randint(0, 256, (SBHD_BATCH, SBHD_ROWS + 1), generator=generator)
            batches.append(padded_batch(sequences, **cut))
    dp_size, dp_rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    return batches[dp_rank::dp_size]


def train(rank: int, device: torch.device, layout: Layout, steps: int = 3) -> Run:
    """Train on one rank of a layout; the result is that of the whole layout."""
    start(layout)
    trainer = make_trainer(layout, device)
    batches = make_batches(layout, device)
    rows = THD_ROWS if layout.thd else SBHD_ROWS
    recorder = Recorder(trainer.plain_chunks, layers=TINY.layers, experts=TINY.experts)
    lm_loss, indexer_loss, mtp_loss, grad_norm, choices = [], [], [], [], []
    gradients: dict[str, Tensor] = {}
    for step in range(steps):
        result = trainer.step(batches, sequence_length=rows)
        lm_loss.append(result.lm_loss)
        indexer_loss.append(result.indexer_loss)
        mtp_loss.append(result.mtp_loss)
        grad_norm.append(result.grad_norm)
        choices.append(recorder.take())
        if step == 0 and not layout.distributed_optimizer:
            gradients = gather_full(trainer.plain_chunks, lambda parameter: parameter.main_grad.float())
    return Run(
        lm_loss=lm_loss,
        mtp_loss=mtp_loss,
        indexer_loss=indexer_loss,
        grad_norm=grad_norm,
        choices=choices,
        gradients=gradients,
    )
