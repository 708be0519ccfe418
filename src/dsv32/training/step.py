"""Forward, loss and one optimizer step by Megatron's own schedules, data parallelism and optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import MegatronOptimizer

    from dsv32.training.batch import Batch


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step reports; means over all tokens of the global batch."""

    lm_loss: float  # nats a token
    indexer_loss: float  # KL nats a token, times its coefficient, mean over layers
    grad_norm: float
    tokens: int
    mtp_loss: float  # nats a token, mean over the depths of multi-token prediction; 0 without
    skipped: bool  # the optimizer found a gradient that is not finite


def loss_func(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum the losses of this rank's tokens; Megatron divides by the global number of them.

    The number of tokens must be a tensor: Megatron's schedule clamps it and sums it over ranks.

    Args:
        loss_mask: [b, s], 1 where a row has a loss.
        losses: [b, s], nats.

    Returns:
        sum of losses (scalar); int32 number of tokens (scalar); both together for reporting.
    """
    total = (losses.float() * loss_mask).sum()
    tokens = loss_mask.sum().to(torch.int32)
    return total, tokens, {"lm loss": torch.stack((total.detach(), tokens.float()))}


def forward_step(
    batches: Iterator[Batch], model: torch.nn.Module
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]]:
    """Run one microbatch through this stage, as Megatron's schedules want it."""
    batch = next(batches)
    output = model(
        input_ids=batch.tokens,
        position_ids=batch.positions,
        attention_mask=None,
        labels=batch.labels,
        loss_mask=batch.loss_mask,
        packed_seq_params=batch.packed,
    )
    return output, lambda losses: loss_func(batch.loss_mask, losses)


class Trainer:
    """A model under Megatron's data parallelism with its optimizer.

    ``chunks`` are this pipeline stage's parts of the model, each wrapped for data parallelism and, in bf16,
    for its precision; ``plain_chunks`` are the same without a wrapper.
    """

    def __init__(
        self,
        *,
        chunks: Sequence[GPTModel],
        optimizer: OptimizerConfig,
        overlap_grad_reduce: bool = False,
    ) -> None:
        config = chunks[0].config
        self.config = config
        self.plain_chunks = list(chunks)
        self.chunks = [
            DistributedDataParallel(
                config=config,
                ddp_config=DistributedDataParallelConfig(
                    grad_reduce_in_fp32=True,
                    overlap_grad_reduce=overlap_grad_reduce,
                    use_distributed_optimizer=optimizer.use_distributed_optimizer,
                ),
                module=Float16Module(config, chunk) if config.bf16 else chunk,
            )
            for chunk in chunks
        ]
        for chunk in self.chunks:
            chunk.broadcast_params()
        self.optimizer: MegatronOptimizer = get_megatron_optimizer(optimizer, self.chunks)
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss

    @property
    def plain_model(self) -> GPTModel:
        """The one chunk of a stage that is not interleaved.

        Raises:
            ValueError: the stage holds several.
        """
        (chunk,) = self.plain_chunks
        return chunk

    @property
    def _device(self) -> torch.device:
        return next(self.chunks[0].parameters()).device

    def accumulate(self, batches: Sequence[Batch], *, sequence_length: int) -> list[dict[str, Tensor]]:
        """Forward and backward of one global batch, gradients summed over ranks; no update.

        Args:
            batches: this rank's microbatches, all of one shape.
            sequence_length: rows of a microbatch before context parallelism cuts it.
        """
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        DSAIndexerLossLoggingHelper.clean_loss_in_tracker()
        MTPLossLoggingHelper.tracker.clear()
        schedule = get_forward_backward_func()
        return schedule(  # type: ignore[no-any-return]
            forward_step_func=forward_step,
            # Each chunk sees every microbatch, at its own time.
            data_iterator=[iter(batches) for _ in self.chunks] if len(self.chunks) > 1 else iter(batches),
            model=self.chunks,
            num_microbatches=len(batches),
            seq_length=sequence_length,
            micro_batch_size=batches[0].tokens.shape[0],
            forward_only=False,
        )

    def step(self, batches: Sequence[Batch], *, sequence_length: int) -> StepResult:
        """One training step; the result is the same on every rank."""
        reported = self.accumulate(batches, sequence_length=sequence_length)
        indexer_loss = self._indexer_loss()
        succeeded, grad_norm, _ = self.optimizer.step()
        total = self._sum_over_ranks(reported)
        tokens = max(int(total[1].item()), 1)
        return StepResult(
            lm_loss=total[0].item() / tokens,
            indexer_loss=indexer_loss / tokens,
            grad_norm=float(grad_norm or 0.0),
            tokens=tokens,
            mtp_loss=self._mtp_loss(len(batches)),
            skipped=not succeeded,
        )

    def _sum_over_ranks(self, reported: list[dict[str, Tensor]]) -> Tensor:
        """[sum of losses, tokens] over microbatches and ranks; every pipeline stage gets it."""
        total = torch.zeros(2, dtype=torch.float64, device=self._device)
        for report in reported:  # empty on all stages but the last
            total += report["lm loss"].double()
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        dist.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
        return total

    def _mtp_loss(self, microbatches: int) -> float:
        """Mean over depths, microbatches and ranks of the loss a token; collective."""
        depths = self.config.mtp_num_layers or 0
        if not depths:
            return 0.0
        # Stages but the last have seen none.
        found = MTPLossLoggingHelper.tracker.get("loss_values", torch.zeros(depths, device=self._device))
        total = found.double().sum()
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        dist.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
        ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        return float(total.item()) / (depths * microbatches * ranks)

    def _indexer_loss(self) -> float:
        """Sum over the global batch's rows of the KL loss, mean over layers; collective."""
        helper = DSAIndexerLossLoggingHelper
        layers = self.config.num_layers + (self.config.mtp_num_layers or 0)
        helper.reduce_loss_in_tracker(layers)
        values = helper.tracker["values"].double()
        # Megatron averages over data-parallel ranks; with per-token loss the sum is wanted.
        values = values * parallel_state.get_data_parallel_world_size(with_context_parallel=False)
        count = max(int((values != 0).sum().item()), 1)
        return float(values.sum().item()) / count
