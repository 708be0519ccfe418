"""Indexer scores under any row bounds, and the gradient of the scores from a dense block of d(loss)/d(score).

scores:    keys on one side, tokens on the other, heads in a loop, so the weighted sum over heads stays in
           registers. Column c of a row is key starts[row] + c: packed sequences and context-parallel chunks
           are scored without a padded rectangle, and the row's valid scores are a prefix, which is what the
           top-k kernel wants.
gradient:  G = dI * w * 1[q.k > 0];  dq = G k,  dk = G^T q,  dw = sum_j dI * relu(q.k). One kernel walks keys
           for a tile of (token, head) rows, the other walks rows for a tile of keys; no atomics, so bitwise
           equal runs.
"""

# ruff: noqa: ANN001, ANN202  # the compiler types the arguments of Triton kernels
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

SCORES, SCORES_FP8 = (128, 64, 3, 4), (64, 128, 3, 4)  # tokens and keys of a tile, stages, warps
# Gradient of q: heads that share a tile of dI, keys in a tile, rows in a tile, stages, warps.
GQ_HEADS, GQ_KEYS, GQ_ROWS, GQ_STAGES, GQ_WARPS = 64, 64, 64, 3, 4
# Gradient of k: keys in a tile, stages, warps; tokens that are skipped together where they see no key of the
# tile.
GK_KEYS, GK_STAGES, GK_WARPS, GROUP = 64, 3, 4, 64


@triton.jit
def _quantise(x, values, scales, rows, R: tl.constexpr, D: tl.constexpr):
    r = tl.program_id(0) * R + tl.arange(0, R)
    where = r.to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :]
    ok = r < rows
    v = tl.load(x + where, mask=ok[:, None], other=0.0).to(tl.float32)
    bits = (tl.maximum(tl.max(tl.abs(v), 1), 1e-4) * (1 / 448)).to(tl.int32, bitcast=True)
    # The exponent of the power of two at or above; dividing by it is a product with its exact inverse.
    exponent = (bits >> 23) + tl.where((bits & 0x7FFFFF) != 0, 1, 0)
    v *= ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    tl.store(values + where, v.to(values.dtype.element_ty), mask=ok[:, None])
    tl.store(scales + r, (exponent << 23).to(tl.float32, bitcast=True), mask=ok)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """`streaming.quantise` of contiguous x [..., 128] in one pass: (e4m3 as x, fp32 scales [...])."""
    if x.size(-1) != 128 or not x.is_contiguous():
        raise ValueError(f"quantise needs contiguous rows of 128 channels, got {tuple(x.shape)}")
    values = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scales = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    rows = scales.numel()
    if rows:
        _quantise[(triton.cdiv(rows, 32),)](x, values, scales, rows, R=32, D=128, num_warps=4)
    return values, scales


@triton.jit
def _scores(
    q,
    k,
    w,
    k_scale,
    starts,
    ends,
    out,
    rows,
    width,
    keys,
    w_stride,
    out_stride,
    HI: tl.constexpr,
    RELU: tl.constexpr,
    SCALED: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    D: tl.constexpr,
):
    # q is [rows, HI * D] here and w is transposed, [HI, rows].
    pid_n = tl.program_id(0)
    pid_t = tl.program_id(1)
    t = pid_t * BT + tl.arange(0, BT)
    ok_t = t < rows
    st = tl.load(starts + t, mask=ok_t, other=0x3FFFFFFF)
    en = tl.load(ends + t, mask=ok_t, other=0)
    # Tiles walk absolute keys from the first one of their rows; a row's column is key - start.
    first = tl.min(st, 0) + pid_n * BN
    n = first + tl.arange(0, BN)
    if first < tl.max(en, 0):
        kt = k.load([first, 0])
        acc = tl.zeros([BT, BN], dtype=tl.float32)
        for h in range(HI):
            s = tl.dot(q.load([pid_t * BT, h * D]), kt.T)
            if RELU:
                s = tl.maximum(s, 0.0)
            acc += s * tl.load(w + h * w_stride + t, mask=ok_t, other=0.0)[:, None]
        if SCALED:
            acc *= tl.load(k_scale + n, mask=n < keys, other=0.0)[None, :]
        col = n[None, :] - st[:, None]
        ok = ok_t[:, None] & (n[None, :] < en[:, None]) & (col >= 0) & (col < width)
        tl.store(out + t.to(tl.int64)[:, None] * out_stride + col, acc, mask=ok)


def scores(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    width: int,
    relu: bool = True,
    out: Tensor | None = None,
    k_scale: Tensor | None = None,
) -> Tensor:
    """fp32 [rows, width]; column c of row i is the score of key starts[i] + c.

    Columns past a row's keys are unwritten.

    q: bf16 [rows, Hi, 128] contiguous; k: bf16 [sk, 128]; weights: [rows, Hi]; starts, ends: int32 [rows];
    width: at least the largest ends - starts. q and k may be e4m3: k_scale fp32 [sk] then multiplies the
    columns, and the queries' scales belong into the weights.
    """
    rows, heads, dim = q.shape
    if dim != 128 or not (q.is_contiguous() and k.is_contiguous() and weights.is_contiguous()):
        raise ValueError(f"indexer scores need contiguous inputs of head dim 128, got {tuple(q.shape)}")
    if out is None:
        out = torch.empty(rows, width, dtype=torch.float32, device=q.device)
    # Rows of one tile may start at different keys (a packed boundary inside the tile): their union can be as
    # wide as all keys, so the grid covers sk; tiles past the last key of their rows leave at once.
    tokens, keys, stages, warps = SCORES if k_scale is None else SCORES_FP8
    w_t = weights.t().float().contiguous()
    q_tiles = TensorDescriptor.from_tensor(q.view(rows, heads * dim), [tokens, dim])
    k_tiles = TensorDescriptor.from_tensor(k, [keys, dim])
    grid = (triton.cdiv(k.size(0), keys), triton.cdiv(rows, tokens))
    _scores[grid](
        q_tiles,
        k_tiles,
        w_t,
        w_t if k_scale is None else k_scale,
        starts,
        ends,
        out,
        rows,
        width,
        k.size(0),
        w_t.stride(0),
        out.stride(0),
        heads,
        relu,
        k_scale is not None,
        BT=tokens,
        BN=keys,
        D=dim,
        num_warps=warps,
        num_stages=stages,
    )
    return out


@triton.jit
def _grad_q(
    q,
    k,
    w,
    di,
    starts,
    ends,
    dq,
    dw,
    rows,
    width,
    key_lo,
    HI: tl.constexpr,
    RELU: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
    BN: tl.constexpr,
    D: tl.constexpr,
):
    # A tile holds BT tokens of BH heads, head-major: the heads share one small tile of dI.
    pid_h = tl.program_id(0)
    pid_t = tl.program_id(1)
    r = tl.arange(0, BT * BH)
    tok = pid_t * BT + r % BT
    head = pid_h * BH + r // BT
    ok_r = tok < rows
    flat = tok.to(tl.int64) * HI + head
    d = tl.arange(0, D)
    st = tl.load(starts + tok, mask=ok_r, other=0x3FFFFFFF)
    en = tl.load(ends + tok, mask=ok_r, other=0)
    lo = tl.maximum(tl.min(st, 0) - key_lo, 0) // BN * BN
    hi = tl.minimum(tl.max(en, 0) - key_lo, width)
    qt = tl.load(q + flat[:, None] * D + d[None, :], mask=ok_r[:, None], other=0.0)
    wt = tl.load(w + flat, mask=ok_r, other=0.0).to(tl.float32)
    acc = tl.zeros([BT * BH, D], dtype=tl.float32)
    sum_w = tl.zeros([BT * BH], dtype=tl.float32)
    for j in range(lo, hi, BN):
        kt = k.load([key_lo + j, 0])
        g = di.load([pid_t * BT, j])
        g = tl.reshape(tl.broadcast_to(g[None, :, :], (BH, BT, BN)), (BH * BT, BN))
        s = tl.dot(qt, kt.T)
        if RELU:
            s = tl.maximum(s, 0.0)
            sum_w += tl.sum(g * s, 1)
            g = tl.where(s > 0, g, 0.0)
        else:
            sum_w += tl.sum(g * s, 1)
        acc = tl.dot(g.to(qt.dtype), kt, acc)
    acc = acc * wt[:, None]
    tl.store(dq + flat[:, None] * D + d[None, :], acc.to(dq.dtype.element_ty), mask=ok_r[:, None])
    tl.store(dw + flat, sum_w, mask=ok_r)


@triton.jit
def _grad_k(
    q,
    k,
    w,
    di,
    ends,
    dk,
    rows,
    width,
    key_lo,
    di_stride,
    span,
    HI: tl.constexpr,
    RELU: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    BN: tl.constexpr,
    D: tl.constexpr,
):
    # A step takes all heads of TOKENS tokens, consecutive rows of q and w; dI of a token is one column for
    # its heads.
    pid_n = tl.program_id(0)
    part = tl.program_id(1)
    n = pid_n * BN + tl.arange(0, BN)
    d = tl.arange(0, D)
    r = tl.arange(0, TOKENS * HI)
    kt = k.load([key_lo + pid_n * BN, 0])
    acc = tl.zeros([BN, D], dtype=tl.float32)
    first = part * span
    last = tl.minimum(first + span, rows)
    for t0 in range(first, last, GROUP):
        g = t0 + tl.arange(0, GROUP)
        seen = tl.max(tl.load(ends + g, mask=g < last, other=0), 0) - key_lo > pid_n * BN
        # di has whole tiles of rows, zero past the last one, so a group may run past the rows of this call.
        for t in range(t0, tl.where(seen, tl.minimum(t0 + GROUP, last), t0), TOKENS):
            qt = q.load([t * HI, 0])
            wt = tl.load(w + t * HI + r, mask=t * HI + r < rows * HI, other=0.0)
            tt = t + tl.arange(0, TOKENS)
            x = tl.load(di + tt.to(tl.int64)[None, :] * di_stride + n[:, None])
            x = tl.reshape(tl.broadcast_to(x[:, :, None], (BN, TOKENS, HI)), (BN, TOKENS * HI))
            s = tl.dot(kt, qt.T)
            x = x * wt[None, :]
            if RELU:
                x = tl.where(s > 0, x, 0.0)
            acc = tl.dot(x.to(qt.dtype), qt, acc)
    where = (part.to(tl.int64) * width + n)[:, None] * D + d[None, :]
    tl.store(dk + where, acc, mask=(n < width)[:, None])


@triton.jit
def _scatter(
    idx, values, factor, out, key_lo, width, idx_stride, values_stride, out_stride, topk, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    j = tl.load(idx + row * idx_stride + c, mask=c < topk, other=-1) - key_lo
    value = tl.load(values + row * values_stride + c, mask=c < topk, other=0.0) * tl.load(factor)
    tl.store(out + row * out_stride + j, value, mask=(j >= 0) & (j < width) & (c < topk))


def spread(values: Tensor, indices: Tensor, factor: Tensor, key_lo: int, width: int) -> Tensor:
    """factor * values [rows, topk] at their keys, in a zeroed `padded` block of `width` keys from key_lo."""
    rows, topk = indices.shape
    out = padded(rows, width, values.device).zero_()
    block = triton.next_power_of_2(topk)
    _scatter[(rows,)](
        indices,
        values,
        factor,
        out,
        key_lo,
        width,
        indices.stride(0),
        values.stride(0),
        out.stride(0),
        topk,
        BLOCK=block,
        num_warps=4,
    )
    return out


def padded(rows: int, width: int, device: torch.device) -> Tensor:
    """Uninitialised fp32 block for d(loss)/d(score), [rows, width] in whole tiles; zero its border."""
    return torch.empty(
        triton.cdiv(rows, 128) * 128, triton.cdiv(width, 128) * 128, dtype=torch.float32, device=device
    )


def gradient(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    di: Tensor,
    starts: Tensor,
    ends: Tensor,
    key_lo: int,
    width: int,
    relu: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq [rows, Hi, 128] as q, dw fp32 [rows, Hi], dk fp32 [width, 128] for keys key_lo ...).

    q: bf16 [rows, Hi, 128]; k: bf16 [sk, 128]; weights [rows, Hi]; di: fp32 from `padded(rows, width)`,
    d(loss)/d(score) of key key_lo + column, zero where a key does not count and in the border; starts, ends:
    int32 [rows], used only to skip empty tiles.
    """
    rows, heads, dim = q.shape
    if dim != 128 or not (
        q.is_contiguous() and k.is_contiguous() and weights.is_contiguous() and di.is_contiguous()
    ):
        raise ValueError(f"indexer gradient needs contiguous inputs of head dim 128, got {tuple(q.shape)}")
    if di.size(0) < rows or di.size(0) % 128 or di.size(1) < width or di.size(1) % 128:
        raise ValueError(f"di {tuple(di.shape)} does not hold whole tiles of [{rows}, {width}]")
    dq = torch.empty_like(q)
    dw = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    bh = min(GQ_HEADS, heads)
    bt = GQ_ROWS // bh
    di_tiles = TensorDescriptor.from_tensor(di, [bt, GQ_KEYS])
    _grad_q[(heads // bh, triton.cdiv(rows, bt))](
        q,
        TensorDescriptor.from_tensor(k, [GQ_KEYS, dim]),
        weights,
        di_tiles,
        starts,
        ends,
        dq,
        dw,
        rows,
        width,
        key_lo,
        heads,
        relu,
        BT=bt,
        BH=bh,
        BN=GQ_KEYS,
        D=dim,
        num_warps=GQ_WARPS,
        num_stages=GQ_STAGES,
    )
    tiles = triton.cdiv(width, GK_KEYS)
    # A few parts per key tile fill the multiprocessors; a fixed order of the final sum keeps runs bitwise
    # equal.
    parts = max(1, min(triton.cdiv(rows, GROUP), triton.cdiv(1056, tiles)))
    span = triton.cdiv(triton.cdiv(rows, parts), GROUP) * GROUP
    parts = triton.cdiv(rows, span)
    dk = torch.empty(parts, width, dim, dtype=torch.float32, device=q.device)
    tokens = max(1, 64 // heads)
    q_tiles = TensorDescriptor.from_tensor(q.view(rows * heads, dim), [tokens * heads, dim])
    _grad_k[(tiles, parts)](
        q_tiles,
        TensorDescriptor.from_tensor(k, [GK_KEYS, dim]),
        weights.float(),
        di,
        ends,
        dk,
        rows,
        width,
        key_lo,
        di.stride(0),
        span,
        heads,
        relu,
        TOKENS=tokens,
        GROUP=GROUP,
        BN=GK_KEYS,
        D=dim,
        num_warps=GK_WARPS,
        num_stages=GK_STAGES,
    )
    return dq, dw, dk.sum(0)
