"""Defects put into Megatron's DSA on purpose: a comparison that does not notice them proves nothing."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from megatron.core.transformer.experimental_attention_variant import dsa, dsa_layout, dsa_masking
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """A defect: other functions in place of Megatron's or another setting, and the layouts it shows in."""

    name: str
    layouts: tuple[str, ...] = ("sbhd", "thd")
    settings: dict[str, Any] = field(default_factory=dict)
    replaced: tuple[tuple[Any, str, Any], ...] = ()

    def __str__(self) -> str:
        return self.name.replace(" ", "-")

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Put the functions in for the duration of a with block."""
        with contextlib.ExitStack() as stack:
            for owner, name, function in self.replaced:
                stack.enter_context(mock.patch.object(owner, name, function))
            yield


def _contiguous(seq_len: int, cp_size: int, cp_rank: int, device: torch.device) -> Tensor:
    rows = seq_len // cp_size
    return torch.arange(cp_rank * rows, (cp_rank + 1) * rows, device=device)


def _contiguous_packed(
    cu_seqlens: Tensor, cp_size: int, cp_rank: int, device: torch.device, output_size: int, **_: Any
) -> Tensor:
    return _contiguous(output_size * cp_size, cp_size, cp_rank, device)


def _identity_order(sq: int, cp_size: int, device: torch.device) -> Tensor:
    return torch.arange(sq * cp_size, device=device)


_packed_order = dsa_layout.build_packed_allgather_cp_query_positions_and_key_reorder


def _identity_order_packed(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    positions, order = _packed_order(*args, **kwargs)
    return positions, torch.arange(order.numel(), device=order.device)


_bounds = dsa_masking.generate_varlen_mask_params_for_positions


def _no_boundary(cu_seqlens: Tensor, query_positions: Tensor) -> tuple[Tensor, Tensor]:
    starts, ends = _bounds(cu_seqlens, query_positions)
    return torch.zeros_like(starts), ends


_mask = dsa_masking.build_dsattention_forward_mask


def _one_token_ahead(*, skv: int, **kwargs: Any) -> Any:
    mask, bounds, plain = _mask(skv=skv, **kwargs)
    starts, ends, keys = bounds
    return mask, (starts, (ends + 1).clamp(max=skv), keys), plain


MUTATIONS = [
    Mutation(
        name="contiguous instead of zigzag positions",
        replaced=(
            (dsa_layout, "build_zigzag_cp_local_positions", _contiguous),
            (dsa_layout, "build_packed_allgather_cp_local_positions", _contiguous_packed),
        ),
    ),
    Mutation(
        name="gathered keys left in rank order",
        replaced=(
            (dsa_layout, "build_zigzag_allgather_cp_key_reorder", _identity_order),
            (dsa_layout, "build_packed_allgather_cp_query_positions_and_key_reorder", _identity_order_packed),
        ),
    ),
    Mutation(
        name="gather without reduce-scatter in the backward",
        replaced=(
            (
                dsa,
                "gather_from_sequence_parallel_region",
                functools.partial(
                    dsa.gather_from_sequence_parallel_region, tensor_parallel_output_grad=False
                ),
            ),
        ),
    ),
    Mutation(
        name="attention across sequence boundaries",
        layouts=("thd",),
        replaced=((dsa_masking, "generate_varlen_mask_params_for_positions", _no_boundary),),
    ),
    Mutation(
        name="one token ahead visible",
        replaced=((dsa_masking, "build_dsattention_forward_mask", _one_token_ahead),),
    ),
    Mutation(name="top-k off by one", settings={"dsa_indexer_topk": 17}),
    Mutation(name="indexer without relu", settings={"dsa_indexer_scoring_relu": False}),
    Mutation(name="indexer rope interleaved", settings={"dsa_indexer_rope_interleaved": True}),
    Mutation(name="other rope base", settings={"rotary_base": 9000}),
    Mutation(
        name="target not normalised",
        replaced=((dsa.dsa_indexer_loss, "normalize_indexer_target", lambda target: target),),
    ),
]
