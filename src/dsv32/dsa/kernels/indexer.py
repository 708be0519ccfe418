"""Indexer scores under any row bounds, and the gradient of the scores from a dense block of d(loss)/d(score).

scores:    keys on one side, tokens on the other, heads in a loop, so the weighted sum over heads stays in registers.
           Column c of a row is key starts[row] + c: packed sequences and context-parallel chunks are scored without
           a padded rectangle, and the row's valid scores are a prefix, which is what the top-k kernel wants.
gradient:  G = dI * w * 1[q.k > 0];  dq = G k,  dk = G^T q,  dw = sum_j dI * relu(q.k). One kernel walks keys for a
           tile of (token, head) rows, the other walks rows for a tile of keys; no atomics, so bitwise equal runs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _scores(
    q, k, w, starts, ends, out, rows, width, HI: tl.constexpr, RELU: tl.constexpr, out_stride,
    BT: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    pid_n = tl.program_id(0)
    pid_t = tl.program_id(1)
    t = pid_t * BT + tl.arange(0, BT)
    ok_t = t < rows
    st = tl.load(starts + t, mask=ok_t, other=0x3FFFFFFF)
    en = tl.load(ends + t, mask=ok_t, other=0)
    # Tiles walk absolute keys, aligned to the block's first key; a row's column is key - start.
    base = tl.min(st, 0)
    n = base + pid_n * BN + tl.arange(0, BN)
    if (pid_n * BN + base) < tl.max(en, 0):
        d = tl.arange(0, D)
        last = tl.max(en, 0)
        kt = tl.load(k + n.to(tl.int64)[None, :] * D + d[:, None], mask=(n < last)[None, :], other=0.0)
        q_ptr = q + t.to(tl.int64)[:, None] * (HI * D) + d[None, :]
        acc = tl.zeros([BT, BN], dtype=tl.float32)
        for h in range(HI):
            qt = tl.load(q_ptr + h * D, mask=ok_t[:, None], other=0.0)
            wt = tl.load(w + t * HI + h, mask=ok_t, other=0.0).to(tl.float32)
            s = tl.dot(qt, kt)
            if RELU:
                s = tl.maximum(s, 0.0)
            acc += s * wt[:, None]
        col = n[None, :] - st[:, None]
        ok = ok_t[:, None] & (n[None, :] < en[:, None]) & (col >= 0) & (col < width)
        tl.store(out + t.to(tl.int64)[:, None] * out_stride + col, acc, mask=ok)


def scores(q: Tensor, k: Tensor, weights: Tensor, starts: Tensor, ends: Tensor, width: int, relu: bool = True,
           out: Tensor | None = None) -> Tensor:  # fmt: skip
    """fp32 [rows, width]; column c of row i is the score of key starts[i] + c. Columns past a row's keys are unwritten.

    q: bf16 [rows, Hi, 128] contiguous; k: bf16 [sk, 128]; weights: [rows, Hi]; starts, ends: int32 [rows];
    width: at least the largest ends - starts.
    """
    rows, heads, dim = q.shape
    if dim != 128 or not (q.is_contiguous() and k.is_contiguous() and weights.is_contiguous()):
        raise ValueError(f"indexer scores need contiguous inputs of head dim 128, got {tuple(q.shape)}")
    if out is None:
        out = torch.empty(rows, width, dtype=torch.float32, device=q.device)
    # Rows of one tile may start at different keys (a packed boundary inside the tile): their union can be as wide
    # as all keys, so the grid covers sk; tiles past the last key of their rows leave at once.
    grid = (triton.cdiv(k.size(0), 128), triton.cdiv(rows, 128))
    _scores[grid](q, k, weights, starts, ends, out, rows, width, heads, relu, out.stride(0),
                  BT=128, BN=128, D=128, num_warps=8, num_stages=3)  # fmt: skip
    return out


@triton.jit
def _grad_q(
    q, k, w, di, starts, ends, dq, dw, rows, width, key_lo, di_stride, HI: tl.constexpr, RELU: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    r = pid * BM + tl.arange(0, BM)
    ok_r = r < rows
    tok = r // HI
    d = tl.arange(0, D)
    st = tl.load(starts + tok, mask=ok_r, other=0x3FFFFFFF)
    en = tl.load(ends + tok, mask=ok_r, other=0)
    lo = tl.maximum(tl.min(st, 0) - key_lo, 0) // BN * BN
    hi = tl.minimum(tl.max(en, 0) - key_lo, width)
    qt = tl.load(q + r.to(tl.int64)[:, None] * D + d[None, :], mask=ok_r[:, None], other=0.0)
    wt = tl.load(w + r, mask=ok_r, other=0.0).to(tl.float32)
    acc = tl.zeros([BM, D], dtype=tl.float32)
    sum_w = tl.zeros([BM], dtype=tl.float32)
    for j in range(lo, hi, BN):
        n = j + tl.arange(0, BN)
        kt = tl.load(k + (n + key_lo).to(tl.int64)[:, None] * D + d[None, :], mask=(n < hi)[:, None], other=0.0)
        g = tl.load(di + tok.to(tl.int64)[:, None] * di_stride + n[None, :], mask=ok_r[:, None] & (n < hi)[None, :],
                    other=0.0)  # fmt: skip
        s = tl.dot(qt, tl.trans(kt))
        if RELU:
            sum_w += tl.sum(g * tl.maximum(s, 0.0), 1)
            g = tl.where(s > 0, g, 0.0) * wt[:, None]
        else:
            sum_w += tl.sum(g * s, 1)
            g = g * wt[:, None]
        acc = tl.dot(g.to(kt.dtype), kt, acc)
    tl.store(dq + r.to(tl.int64)[:, None] * D + d[None, :], acc.to(dq.dtype.element_ty), mask=ok_r[:, None])
    tl.store(dw + r, sum_w.to(dw.dtype.element_ty), mask=ok_r)


@triton.jit
def _grad_k(
    q, k, w, di, starts, ends, dk, rows, width, key_lo, di_stride, span, HI: tl.constexpr, RELU: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    pid_n = tl.program_id(0)
    part = tl.program_id(1)
    n = pid_n * BN + tl.arange(0, BN)
    d = tl.arange(0, D)
    ok_n = n < width
    kt = tl.load(k + (n + key_lo).to(tl.int64)[:, None] * D + d[None, :], mask=ok_n[:, None], other=0.0)
    acc = tl.zeros([BN, D], dtype=tl.float32)
    first = part * span
    last = tl.minimum(first + span, rows)
    for i in range(first, last, BM):
        r = i + tl.arange(0, BM)
        ok_r = r < last
        tok = r // HI
        qt = tl.load(q + r.to(tl.int64)[:, None] * D + d[None, :], mask=ok_r[:, None], other=0.0)
        wt = tl.load(w + r, mask=ok_r, other=0.0).to(tl.float32)
        g = tl.load(di + tok.to(tl.int64)[None, :] * di_stride + n[:, None], mask=ok_r[None, :] & ok_n[:, None],
                    other=0.0)  # fmt: skip
        s = tl.dot(kt, tl.trans(qt))
        if RELU:
            g = tl.where(s > 0, g, 0.0)
        g = g * wt[None, :]
        acc = tl.dot(g.to(qt.dtype), qt, acc)
    where = (part.to(tl.int64) * width + n)[:, None] * D + d[None, :]
    tl.store(dk + where, acc, mask=ok_n[:, None])


def gradient(q: Tensor, k: Tensor, weights: Tensor, di: Tensor, starts: Tensor, ends: Tensor, key_lo: int,
             relu: bool = True) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq [rows, Hi, 128] as q, dw fp32 [rows, Hi], dk fp32 [width, 128] for keys key_lo ...).

    q: bf16 [rows, Hi, 128]; k: bf16 [sk, 128]; weights [rows, Hi]; di: fp32 [rows, width], d(loss)/d(score) of key
    key_lo + column, zero where a key does not count; starts, ends: int32 [rows], used only to skip empty tiles.
    """
    rows, heads, dim = q.shape
    width = di.size(1)
    if dim != 128 or di.stride(1) != 1 or not (q.is_contiguous() and k.is_contiguous() and weights.is_contiguous()):
        raise ValueError(f"indexer gradient needs contiguous inputs of head dim 128, got {tuple(q.shape)}")
    flat = rows * heads
    dq = torch.empty_like(q)
    dw = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    _grad_q[(triton.cdiv(flat, 128),)](
        q, k, weights, di, starts, ends, dq, dw, flat, width, key_lo, di.stride(0), heads, relu,
        BM=128, BN=128, D=128, num_warps=8, num_stages=2,
    )  # fmt: skip
    tiles = triton.cdiv(width, 128)
    # A few parts per key tile fill the multiprocessors; a fixed order of the final sum keeps runs bitwise equal.
    parts = max(1, min(triton.cdiv(flat, 128), triton.cdiv(1056, tiles)))
    span = triton.cdiv(triton.cdiv(flat, parts), 128) * 128
    parts = triton.cdiv(flat, span)
    dk = torch.empty(parts, width, dim, dtype=torch.float32, device=q.device)
    _grad_k[(tiles, parts)](
        q, k, weights, di, starts, ends, dk, flat, width, key_lo, di.stride(0), span, heads, relu,
        BM=128, BN=128, D=128, num_warps=8, num_stages=2,
    )  # fmt: skip
    return dq, dw, dk.sum(0)
