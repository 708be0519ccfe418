"""One microbatch, cut for a context-parallel rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsv32.mcore.packing import packed_params, padded_length, zigzag_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron.core.packed_seq_params import PackedSeqParams


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What one rank feeds the model: int64 [b, s] tokens, labels and positions, fp32 [b, s] loss mask.

    ``packed`` is set for thd, where b is 1 and s counts the rows of all sequences on this rank.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    positions: Tensor
    packed: PackedSeqParams | None = None


def padded_batch(sequences: Tensor, *, cp_size: int, cp_rank: int, device: torch.device) -> Batch:
    """Cut int64 [b, s + 1] sequences of equal length: row t predicts token t + 1 (sbhd).

    Raises:
        ValueError: s is not a multiple of ``2 * cp_size``.
    """
    length = sequences.shape[1] - 1
    rows = zigzag_rows([length], cp_size=cp_size, cp_rank=cp_rank)
    positions = torch.arange(length).expand(sequences.shape[0], -1)
    return Batch(
        tokens=sequences[:, :-1][:, rows].to(device),
        labels=sequences[:, 1:][:, rows].to(device),
        loss_mask=torch.ones(sequences.shape[0], len(rows), device=device),
        positions=positions[:, rows].to(device),
    )


def packed_batch(
    documents: Sequence[Tensor],
    *,
    rows: int,
    multiple: int,
    cp_size: int,
    cp_rank: int,
    device: torch.device,
) -> Batch:
    """Pack documents into ``rows`` rows (thd): no token sees or predicts one of another document.

    A document of n + 1 tokens makes n rows, padded to ``multiple``; what remains of ``rows`` is padding of
    the last document.  Padding has no loss, neither of the model nor of the indexer.

    Args:
        documents: int64 [n + 1] each, n at least 1.
        rows: rows of the whole batch, before context parallelism cuts it.
        multiple: rows of a document are a multiple of it; at least ``2 * cp_size`` under context parallelism.
        cp_size: number of context-parallel ranks.
        cp_rank: this rank.
        device: where the batch shall live.

    Raises:
        ValueError: the documents take more than ``rows`` rows.
    """
    lengths = [len(document) - 1 for document in documents]
    padded = [padded_length(length, multiple=multiple) for length in lengths]
    if sum(padded) > rows:
        raise ValueError(f"documents of {lengths} tokens take {sum(padded)} rows, more than {rows}")
    padded[-1] += rows - sum(padded)
    tokens, labels, positions = (torch.zeros(rows, dtype=torch.int64) for _ in range(3))
    loss_mask = torch.zeros(rows)
    start = 0
    for document, length, room in zip(documents, lengths, padded, strict=True):
        tokens[start : start + length] = document[:-1]
        labels[start : start + length] = document[1:]
        positions[start : start + room] = torch.arange(room)
        loss_mask[start : start + length] = 1
        start += room
    local = zigzag_rows(padded, cp_size=cp_size, cp_rank=cp_rank)
    packed = packed_params(lengths, padded_lengths=padded, cp_size=cp_size, cp_rank=cp_rank, device=device)
    return Batch(
        tokens=tokens[None, local].to(device),
        labels=labels[None, local].to(device),
        loss_mask=loss_mask[None, local].to(device),
        positions=positions[None, local].to(device),
        packed=packed,
    )
