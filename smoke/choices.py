"""Records which experts and which tokens a training step chose, whoever holds which row.

Across layouts a rounding may, after an update, send a token to another expert or have it attend to another
token. That is no error, but it moves the loss far more than a rounding does, so a comparison has to know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.moe.router import TopKRouter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Choices:
    """One step's choices over all ranks, layers and microbatches."""

    experts: list[list[int]]  # tokens by layer and expert
    tokens: int  # sum over rows of a polynomial of the chosen tokens' positions; 0 where not recorded

    def flips(self, other: Choices) -> int:
        """Least number of (token, expert) choices that differ; -1 where only attended tokens differ."""
        moved = sum(
            abs(a - b)
            for mine, theirs in zip(self.experts, other.experts, strict=True)
            for a, b in zip(mine, theirs, strict=True)
        )
        if moved == 0 and self.tokens != other.tokens and self.tokens and other.tokens:
            return -1
        return moved // 2


class Recorder:
    """Counts from now on; for one model, of one or several chunks, in this process."""

    def __init__(self, chunks: Sequence[nn.Module], *, layers: int, experts: int) -> None:
        device = next(chunks[0].parameters()).device
        self._experts = torch.zeros(layers, experts, dtype=torch.int64, device=device)
        self._tokens = torch.zeros((), dtype=torch.int64, device=device)
        for module in (module for chunk in chunks for module in chunk.modules()):
            if isinstance(module, TopKRouter):
                module.register_forward_hook(self._see_router)
        attend = dsa._run_sparse_attention

        def see_selection(*, topk_indices: Tensor, **kwargs: Any) -> Tensor:
            # Tensor-parallel ranks all see every row; a recomputed forward runs twice, once without
            # gradients.
            if torch.is_grad_enabled() and parallel_state.get_tensor_model_parallel_rank() == 0:
                self._tokens += ((topk_indices.long() + 1).clamp_min(0) ** 2).sum()
            return attend(topk_indices=topk_indices, **kwargs)

        dsa._run_sparse_attention = see_selection

    def _see_router(self, router: nn.Module, _: Any, output: tuple[Tensor, Tensor]) -> None:
        if torch.is_grad_enabled():
            self._experts[router.layer_number - 1] += output[1].view(-1, self._experts.shape[1]).sum(0)

    def take(self) -> Choices:
        """What was chosen since the last call; collective over the world."""
        for counts in (self._experts, self._tokens):
            dist.all_reduce(counts)
        choices = Choices(experts=self._experts.tolist(), tokens=int(self._tokens))
        self._experts.zero_()
        self._tokens.zero_()
        return choices
