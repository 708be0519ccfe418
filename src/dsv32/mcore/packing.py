"""Which rows a context-parallel rank holds, and the packed-sequence parameters that say so.

Megatron's context parallelism cuts every sequence into ``2 * cp_size`` chunks and gives rank ``r`` the chunks
``r`` and ``2 * cp_size - 1 - r`` ("zigzag"), so that causal attention costs every rank the same.  In a packed
batch (thd) this holds for each sequence on its own, after padding to a multiple of ``2 * cp_size``.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence


def padded_length(length: int, *, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``length`` [tokens]."""
    return -(-length // multiple) * multiple


def zigzag_rows(lengths: Sequence[int], *, cp_size: int, cp_rank: int) -> Tensor:
    """Rows of the whole batch that one context-parallel rank holds, in its own order.

    Args:
        lengths: padded length of each sequence, each a multiple of ``2 * cp_size`` unless ``cp_size`` is 1.
        cp_size: number of context-parallel ranks.
        cp_rank: the rank asked for.

    Returns:
        int64 [sum(lengths) / cp_size], indices into the packed batch.

    Raises:
        ValueError: a length does not divide into ``2 * cp_size`` chunks.
    """
    if cp_size == 1:
        return torch.arange(sum(lengths))
    chunks = 2 * cp_size
    rows: list[Tensor] = []
    start = 0
    for length in lengths:
        if length % chunks:
            raise ValueError(
                f"sequence of {length} rows with cp_size {cp_size}: pad it to a multiple of {chunks}"
            )
        step = length // chunks
        for chunk in (cp_rank, chunks - 1 - cp_rank):
            rows.append(torch.arange(start + chunk * step, start + (chunk + 1) * step))
        start += length
    return torch.cat(rows)


def cumulative(lengths: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Cumulative lengths from 0, int32 [len(lengths) + 1], as Megatron's ``cu_seqlens`` wants them."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def real_rows(lengths: Sequence[int], padded_lengths: Sequence[int]) -> Tensor:
    """Which rows of a padded packed batch are tokens: bool [sum(padded_lengths)], False for padding.

    Raises:
        ValueError: the two do not describe the same sequences, or one is longer than its padded length.
    """
    if len(lengths) != len(padded_lengths) or any(
        length > room for length, room in zip(lengths, padded_lengths, strict=True)
    ):
        raise ValueError(f"lengths {list(lengths)} do not fit the padded lengths {list(padded_lengths)}")
    return torch.cat(
        [torch.arange(room) < length for length, room in zip(lengths, padded_lengths, strict=True)]
    )


def packed_params(
    lengths: Sequence[int],
    *,
    padded_lengths: Sequence[int] | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
    device: torch.device | str = "cpu",
) -> PackedSeqParams:
    """Packed-sequence parameters (thd) of one context-parallel rank.

    Padding stands at the end of each sequence.  It takes part in attention, where being last it disturbs no
    token, but not in the indexer's loss.

    Args:
        lengths: number of tokens of each sequence of the whole batch.
        padded_lengths: rows each sequence takes, multiples of ``2 * cp_size``; default: no padding.
        cp_size: number of context-parallel ranks.
        cp_rank: the rank that the parameters are for.
        device: where the tensors shall live.
    """
    padded = lengths if padded_lengths is None else padded_lengths
    mask = None
    if list(lengths) != list(padded):
        rows = zigzag_rows(padded, cp_size=cp_size, cp_rank=cp_rank)
        mask = real_rows(lengths, padded)[rows].to(device)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cumulative(lengths, device),
        cu_seqlens_kv=cumulative(lengths, device),
        cu_seqlens_q_padded=cumulative(padded, device),
        cu_seqlens_kv_padded=cumulative(padded, device),
        max_seqlen_q=max(padded),
        max_seqlen_kv=max(padded),
        real_token_mask_q=mask,
    )
