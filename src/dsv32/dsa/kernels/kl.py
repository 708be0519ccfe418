"""KL(target || softmax(logits)) of each row with its gradient, in one launch of three passes."""

# ruff: noqa: ANN001, ANN202  # the compiler types the arguments of Triton kernels
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv32.dsa.kernels.indexer import padded


@triton.jit
def _kl(
    target,
    logits,
    idx,
    starts,
    ends,
    row_ok,
    factor,
    per_row,
    di,
    rows,
    width,
    columns,
    key_lo,
    target_stride,
    logits_stride,
    idx_stride,
    di_stride,
    SPARSE: tl.constexpr,
    ROWS: tl.constexpr,
    FACTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target += row * target_stride
    logits += row * logits_stride
    di += row * di_stride
    # Rows past the last one exist only in di, which holds whole tiles: they see nothing and write zeros.
    real = row < rows
    if SPARSE:
        idx += row * idx_stride
        lo = 0
        hi = width
    else:
        lo = tl.load(starts + row, mask=real, other=0) - key_lo
        hi = tl.minimum(tl.load(ends + row, mask=real, other=0) - key_lo, tl.where(real, width, 0))
    on = real
    if ROWS:
        on = tl.load(row_ok + row, mask=real, other=0) != 0
    scale = 1.0
    if FACTOR:
        scale = tl.load(factor).to(tl.float32)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    for i in range(0, width, BLOCK):
        c = i + tl.arange(0, BLOCK)
        ok = (c < width) & (c >= lo) & (c < hi)
        if SPARSE:
            ok = ok & (tl.load(idx + c, mask=ok, other=-1) >= 0)
        top = tl.maximum(top, tl.load(logits + c, mask=ok, other=float("-inf")))
        mass += tl.load(target + c, mask=ok, other=0.0)
    high = tl.max(top, 0)
    high = tl.where(high == float("-inf"), 0.0, high)
    norm = 1.0 / tl.maximum(tl.sum(mass, 0), 1e-10)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(0, width, BLOCK):
        c = i + tl.arange(0, BLOCK)
        ok = (c < width) & (c >= lo) & (c < hi)
        if SPARSE:
            ok = ok & (tl.load(idx + c, mask=ok, other=-1) >= 0)
        total += tl.where(ok, tl.exp(tl.load(logits + c, mask=ok, other=float("-inf")) - high), 0.0)
    denom = tl.sum(total, 0)
    denom = tl.where(denom > 0, denom, 1.0)
    log_denom = tl.log(denom) + high
    kl = tl.zeros([BLOCK], tl.float32)
    for i in range(0, columns, BLOCK):
        c = i + tl.arange(0, BLOCK)
        ok = (c < width) & (c >= lo) & (c < hi)
        if SPARSE:
            ok = ok & (tl.load(idx + c, mask=ok, other=-1) >= 0)
        ok = ok & on
        t = tl.load(target + c, mask=ok, other=0.0) * norm
        logp = tl.load(logits + c, mask=ok, other=0.0) - log_denom
        kl += tl.where(ok, t * (tl.log(tl.maximum(t, 1e-10)) - logp), 0.0)
        predict = tl.where(ok, tl.exp(logp), 0.0)
        if SPARSE:
            tl.store(target + c, tl.where(ok, t, 0.0), mask=c < width)
            tl.store(di + c, predict, mask=c < width)
        else:
            tl.store(di + c, tl.where(ok, predict - t, 0.0) * scale, mask=c < columns)
    tl.store(per_row + row, tl.sum(kl, 0), mask=real)


def sparse(target: Tensor, logits: Tensor, indices: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    """(KL fp32 [sq], softmax(logits) fp32 [sq, topk]) over the slots with an index.

    rows: bool [sq], those that count. target is normalised in place, and both are 0 in slots that do not
    count: d(KL)/d(logits) is their difference.
    """
    return _run(target, logits, indices, None, None, 0, rows, None)


def dense(
    target: Tensor,
    logits: Tensor,
    starts: Tensor,
    ends: Tensor,
    key_lo: int,
    rows: Tensor | None,
    factor: Tensor,
) -> tuple[Tensor, Tensor]:
    """(KL fp32 [rows], factor * d(KL)/d(logits) fp32) over keys starts[i] <= key_lo + column < ends[i].

    The gradient holds whole tiles (`indexer.padded`) with zeros wherever a key does not count.
    """
    return _run(target, logits, None, starts, ends, key_lo, rows, factor)


def _run(
    target: Tensor,
    logits: Tensor,
    indices: Tensor | None,
    starts: Tensor | None,
    ends: Tensor | None,
    key_lo: int,
    rows: Tensor | None,
    factor: Tensor | None,
) -> tuple[Tensor, Tensor]:
    count, width = target.shape
    per_row = torch.empty(count, dtype=torch.float32, device=target.device)
    if indices is None:
        di = padded(count, width, target.device)
    else:
        di = torch.empty(count, width, dtype=torch.float32, device=target.device)
    if count:
        block = min(4096, triton.next_power_of_2(max(width, 16)))
        none = per_row
        row_ok = rows.to(torch.uint8).contiguous() if rows is not None else none
        _kl[(di.size(0),)](
            target,
            logits,
            indices if indices is not None else none,
            starts if starts is not None else none,
            ends if ends is not None else none,
            row_ok,
            factor if factor is not None else none,
            per_row,
            di,
            count,
            width,
            di.size(1),
            key_lo,
            target.stride(0),
            logits.stride(0),
            indices.stride(0) if indices is not None else 0,
            di.stride(0),
            SPARSE=indices is not None,
            ROWS=rows is not None,
            FACTOR=factor is not None,
            BLOCK=block,
            num_warps=8,
        )
    return per_row, di
