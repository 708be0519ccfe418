"""Sparse backward passes over the chosen (token, key) pairs alone, without atomics on floating-point numbers.

A program per token gathers its keys, writes the token's own gradient, and leaves what every pair adds to its
key as one bf16 row. The rows' places are known beforehand from an inverse index, which puts the pairs of a
key next to each other in the order of their tokens; a second kernel adds them up in fp32. So a key's sum has
one order, runs are bitwise equal, and the cost follows the pairs: a pair's row is written once and read once
(2,304 bytes for attention, 512 for the indexer), where atomics read and write 2,304 and 512 bytes of fp32.

The inverse index is a counting sort whose ranks come from bit counts: one bit per (key, token of the block),
set with an atomic or, which has no order.

Rounding a pair's share to bf16 is no coarser than what the products take: P and dS are bf16 already.
"""

# ruff: noqa: ANN001, ANN202  # the compiler types the arguments of Triton kernels
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

NOPE, ROPE = 512, 64
GROUP = 16  # heads that share a pass over the keys
ATTENTION = (64, 1, 4)  # keys of a step, stages, warps
INDEXER = (64, 2, 4)
ROWS = 4  # rows of 576 that are loaded together


@triton.jit
def _ones(x):
    x = x.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    x = x + (x >> 16)
    return (x & 0x3F).to(tl.int32)


@triton.jit
def _mark_bits(idx, bits, topk, keys, idx_stride, tokens, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    j = tl.load(idx + row * idx_stride + c, mask=c < topk, other=-1)
    token = (row % tokens).to(tl.int32)
    bit = tl.full([BLOCK], 1, tl.int32) << (token % 32)
    word = (row // tokens * keys + j) * WORDS + token // 32
    tl.atomic_or(bits + word, bit, mask=j >= 0, sem="relaxed")


@triton.jit
def _count_bits(bits, earlier, counts, total, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    found = tl.zeros([BLOCK], tl.int32)
    for i in tl.static_range(WORDS):
        tl.store(earlier + k * WORDS + i, found.to(tl.int16), mask=k < total)
        found += _ones(tl.load(bits + k * WORDS + i, mask=k < total, other=0))
    tl.store(counts + k, found, mask=k < total)


@triton.jit
def _place(
    idx,
    bits,
    earlier,
    offsets,
    place,
    topk,
    keys,
    idx_stride,
    tokens,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    j = tl.load(idx + row * idx_stride + c, mask=c < topk, other=-1)
    token = (row % tokens).to(tl.int32)
    block = row // tokens
    word = (block * keys + j) * WORDS + token // 32
    below = tl.load(bits + word, mask=j >= 0, other=0) & ((tl.full([BLOCK], 1, tl.int32) << (token % 32)) - 1)
    rank = tl.load(earlier + word, mask=j >= 0, other=0).to(tl.int32) + _ones(below)
    first = tl.load(offsets + block * (keys + 1) + j, mask=j >= 0, other=0)
    tl.store(place + row * topk + c, tl.where(j >= 0, first + rank, -1), mask=c < topk)


@dataclass(frozen=True, kw_only=True)
class Inverse:
    """Where the pairs of each block of `tokens` rows go.

    place: int32 [rows, topk], a pair's row in its block's buffer, -1 for an empty slot. offsets: int32
    [blocks, sk + 1]: key j's pairs of a block are rows offsets[j] to offsets[j + 1].
    """

    place: Tensor
    offsets: Tensor


def inverse(indices: Tensor, sk: int, tokens: int) -> Inverse:
    """The inverse index of int32 [rows, topk] indices (-1 empty, no key twice in a row)."""
    rows, topk = indices.shape
    blocks = triton.cdiv(rows, tokens)
    words = triton.cdiv(tokens, 32)
    device = indices.device
    bits = torch.zeros(blocks * sk * words, dtype=torch.int32, device=device)
    earlier = torch.empty(bits.shape, dtype=torch.int16, device=device)
    counts = torch.empty(blocks, sk, dtype=torch.int32, device=device)
    place = torch.empty(rows, topk, dtype=torch.int32, device=device)
    width = triton.next_power_of_2(topk)
    _mark_bits[(rows,)](
        indices, bits, topk, sk, indices.stride(0), tokens, WORDS=words, BLOCK=width, num_warps=4
    )
    _count_bits[(triton.cdiv(blocks * sk, 256),)](bits, earlier, counts, blocks * sk, WORDS=words, BLOCK=256)
    offsets = torch.zeros(blocks, sk + 1, dtype=torch.int32, device=device)
    torch.cumsum(counts, 1, dtype=torch.int32, out=offsets[:, 1:])
    _place[(rows,)](
        indices, bits, earlier, offsets, place, topk, sk, indices.stride(0), tokens, WORDS=words, BLOCK=width,
        num_warps=4,
    )  # fmt: skip
    return Inverse(place=place, offsets=offsets)


def walk(
    indices: Tensor, sk: int, dim: int, dtype: torch.dtype, budget: int
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """(rows, place, offsets, part) of each block; part, one buffer for all, is within the budget.

    The inverse index is made for as many blocks at a time as an eighth of the budget has room for.
    """
    rows, topk = indices.shape
    size = torch.finfo(dtype).bits // 8
    # Offsets into part are 32-bit.
    pairs = min(budget // (dim * size), (1 << 31) // dim - 1)
    tokens = max(32, pairs // max(topk, 1) // 32 * 32)
    tokens = min(tokens, triton.cdiv(rows, 32) * 32)
    part = torch.empty(min(tokens, rows) * topk, dim, dtype=dtype, device=indices.device)
    many = max(1, budget // 8 // (sk * (tokens // 8 + 8)))
    for lo in range(0, rows, many * tokens):
        found = inverse(indices[lo : lo + many * tokens], sk, tokens)
        for i in range(found.offsets.size(0)):
            block = slice(lo + i * tokens, min(lo + (i + 1) * tokens, rows))
            yield block, found.place[block.start - lo : block.stop - lo], found.offsets[i], part


@triton.jit
def _add_up(part, offsets, total, D: tl.constexpr, TAIL: tl.constexpr, R: tl.constexpr):
    key = tl.program_id(0).to(tl.int64)
    lo = tl.load(offsets + key)
    hi = tl.load(offsets + key + 1)
    if lo < hi:
        d = tl.arange(0, D)
        acc = tl.zeros([D], tl.float32)
        if TAIL > 0:
            e = D + tl.arange(0, TAIL)
            rest = tl.zeros([TAIL], tl.float32)
        for i in range(lo, hi, R):
            r = i + tl.arange(0, R)
            at = part + r.to(tl.int64)[:, None] * (D + TAIL)
            acc += tl.sum(tl.load(at + d[None, :], mask=(r < hi)[:, None], other=0.0).to(tl.float32), 0)
            if TAIL > 0:
                rest += tl.sum(tl.load(at + e[None, :], mask=(r < hi)[:, None], other=0.0).to(tl.float32), 0)
        total += key * (D + TAIL)
        tl.store(total + d, tl.load(total + d) + acc)
        if TAIL > 0:
            tl.store(total + e, tl.load(total + e) + rest)


def add_up(part: Tensor, offsets: Tensor, total: Tensor) -> None:
    """total[j] += part's rows offsets[j] to offsets[j + 1]; part bf16 [n, D], total fp32 [sk, D]."""
    dim = part.size(1)
    main = 1 << (dim.bit_length() - 1)
    # One warp: a lane adds its own columns, and no sum crosses threads of a row of 512.
    rows = ROWS if main >= 512 else 8
    _add_up[(total.size(0),)](part, offsets, total, D=main, TAIL=dim - main, R=rows, num_warps=1)


@triton.jit
def _attention(
    q,
    do,
    kv,
    idx,
    place,
    length,
    lse2,
    delta,
    dq,
    part,
    head,
    topk,
    idx_stride,
    scale,
    HEADS: tl.constexpr,
    H: tl.constexpr,
    BN: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    h = head + tl.arange(0, H)
    d = tl.arange(0, 128)
    r = tl.arange(0, 64)
    qp = q + (t * HEADS + h)[:, None] * 576
    dp_ = do + (t * HEADS + h)[:, None] * 512 + d[None, :]
    q0, q1 = tl.load(qp + d[None, :]), tl.load(qp + 128 + d[None, :])
    q2, q3 = tl.load(qp + 256 + d[None, :]), tl.load(qp + 384 + d[None, :])
    qr = tl.load(qp + 512 + r[None, :])
    o0, o1, o2, o3 = tl.load(dp_), tl.load(dp_ + 128), tl.load(dp_ + 256), tl.load(dp_ + 384)
    base = tl.load(lse2 + t * HEADS + h)
    dl = tl.load(delta + t * HEADS + h)
    n = tl.load(length + t)
    idx += t * idx_stride
    place += t * topk
    a0 = tl.zeros([128, H], tl.float32)
    a1 = tl.zeros([128, H], tl.float32)
    a2 = tl.zeros([128, H], tl.float32)
    a3 = tl.zeros([128, H], tl.float32)
    ar = tl.zeros([64, H], tl.float32)
    for c in range(0, n, BN):
        slot = c + tl.arange(0, BN)
        j = tl.load(idx + slot, mask=slot < n, other=-1)
        kp = kv + tl.maximum(j, 0)[:, None] * 576
        k0, k1 = tl.load(kp + d[None, :]), tl.load(kp + 128 + d[None, :])
        k2, k3 = tl.load(kp + 256 + d[None, :]), tl.load(kp + 384 + d[None, :])
        kr = tl.load(kp + 512 + r[None, :])
        s = tl.dot(k0, q0.T)
        s = tl.dot(k1, q1.T, s)
        s = tl.dot(k2, q2.T, s)
        s = tl.dot(k3, q3.T, s)
        s = tl.dot(kr, qr.T, s)
        dp = tl.dot(k0, o0.T)
        dp = tl.dot(k1, o1.T, dp)
        dp = tl.dot(k2, o2.T, dp)
        dp = tl.dot(k3, o3.T, dp)
        p = tl.where((j >= 0)[:, None], tl.exp2(s * (scale * 1.4426950408889634) - base[None, :]), 0.0)
        ds = (p * (dp - dl[None, :]) * scale).to(q.dtype.element_ty)
        p = p.to(q.dtype.element_ty)
        a0 = tl.dot(k0.T, ds, a0)
        a1 = tl.dot(k1.T, ds, a1)
        a2 = tl.dot(k2.T, ds, a2)
        a3 = tl.dot(k3.T, ds, a3)
        ar = tl.dot(kr.T, ds, ar)
        to = tl.load(place + slot, mask=slot < n, other=-1)
        pp = part + to[:, None] * 576
        ok = (to >= 0)[:, None]
        tl.store(pp + d[None, :], tl.dot(p, o0, tl.dot(ds, q0)).to(part.dtype.element_ty), mask=ok)
        tl.store(pp + 128 + d[None, :], tl.dot(p, o1, tl.dot(ds, q1)).to(part.dtype.element_ty), mask=ok)
        tl.store(pp + 256 + d[None, :], tl.dot(p, o2, tl.dot(ds, q2)).to(part.dtype.element_ty), mask=ok)
        tl.store(pp + 384 + d[None, :], tl.dot(p, o3, tl.dot(ds, q3)).to(part.dtype.element_ty), mask=ok)
        tl.store(pp + 512 + r[None, :], tl.dot(ds, qr).to(part.dtype.element_ty), mask=ok)
    out = dq + (t * HEADS + h)[None, :] * 576
    tl.store(out + d[:, None], a0.to(dq.dtype.element_ty))
    tl.store(out + 128 + d[:, None], a1.to(dq.dtype.element_ty))
    tl.store(out + 256 + d[:, None], a2.to(dq.dtype.element_ty))
    tl.store(out + 384 + d[:, None], a3.to(dq.dtype.element_ty))
    tl.store(out + 512 + r[:, None], ar.to(dq.dtype.element_ty))


def attention(
    q: Tensor,
    kv: Tensor,
    dout: Tensor,
    indices: Tensor,
    place: Tensor,
    length: Tensor,
    lse2: Tensor,
    delta: Tensor,
    scale: float,
    head: int,
    dq: Tensor,
    part: Tensor,
) -> None:
    """Gradients of GROUP heads from `head` on: their dq, and every pair's share of dkv at its place in part.

    q, dq: bf16 [rows, H, 576]; kv bf16 [sk, 576]; dout bf16 [rows, H, 512]; indices, place: int32 [rows,
    topk]; length int32 [rows], slots to visit; lse2 (base 2, finite) and delta: fp32 [rows, H]; part: bf16
    [pairs, 576].
    """
    rows, heads, dim = q.shape
    if dim != NOPE + ROPE or heads % GROUP or not all(t.is_contiguous() for t in (q, kv, dout, dq, part)):
        raise ValueError(
            f"needs contiguous tensors of head dim 576 and heads in groups of {GROUP}: {tuple(q.shape)}"
        )
    keys, stages, warps = ATTENTION
    _attention[(rows,)](
        q, dout, kv, indices, place, length, lse2, delta, dq, part, head, indices.size(1), indices.stride(0),
        scale, HEADS=heads, H=GROUP, BN=keys, num_stages=stages, num_warps=warps,
    )  # fmt: skip


@triton.jit
def _indexer(
    q,
    k,
    w,
    di,
    idx,
    place,
    length,
    factor,
    dq,
    dw,
    part,
    topk,
    idx_stride,
    di_stride,
    HI: tl.constexpr,
    RELU: tl.constexpr,
    BN: tl.constexpr,
    D: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HI)
    d = tl.arange(0, D)
    qt = tl.load(q + (t * HI + h)[:, None] * D + d[None, :])
    wt = tl.load(w + t * HI + h).to(tl.float32)
    f = tl.load(factor).to(tl.float32)
    n = tl.load(length + t)
    idx += t * idx_stride
    di += t * di_stride
    place += t * topk
    acc = tl.zeros([D, HI], tl.float32)
    sum_w = tl.zeros([HI], tl.float32)
    for c in range(0, n, BN):
        slot = c + tl.arange(0, BN)
        j = tl.load(idx + slot, mask=slot < n, other=-1)
        kt = tl.load(k + tl.maximum(j, 0)[:, None] * D + d[None, :])
        g = tl.where(j >= 0, tl.load(di + slot, mask=slot < n, other=0.0) * f, 0.0)[:, None]
        s = tl.dot(kt, qt.T)
        if RELU:
            s = tl.maximum(s, 0.0)
            sum_w += tl.sum(g * s, 0)
            x = tl.where(s > 0, g * wt[None, :], 0.0).to(q.dtype.element_ty)
        else:
            sum_w += tl.sum(g * s, 0)
            x = (g * wt[None, :]).to(q.dtype.element_ty)
        acc = tl.dot(kt.T, x, acc)
        to = tl.load(place + slot, mask=slot < n, other=-1)
        share = tl.dot(x, qt).to(part.dtype.element_ty)
        tl.store(part + to[:, None] * D + d[None, :], share, mask=(to >= 0)[:, None])
    tl.store(dq + (t * HI + h)[None, :] * D + d[:, None], acc.to(dq.dtype.element_ty))
    tl.store(dw + t * HI + h, sum_w)


def indexer(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    di: Tensor,
    indices: Tensor,
    place: Tensor,
    length: Tensor,
    factor: Tensor,
    relu: bool,
    dq: Tensor,
    dw: Tensor,
    part: Tensor,
) -> None:
    """Gradients of sum(factor * di * scores) over the pairs: dq, dw, and every pair's share of dk in part.

    q, dq: bf16 [rows, Hi, 128], Hi a power of two from 16; k bf16 [sk, 128]; weights [rows, Hi]; di fp32
    [rows, topk] by slot; factor: fp32 scalar; dw fp32 [rows, Hi]; part bf16 [pairs, 128].
    """
    rows, heads, dim = q.shape
    if dim != 128 or heads < 16 or not all(t.is_contiguous() for t in (q, k, weights, dq, dw, part)):
        raise ValueError(f"needs contiguous tensors of head dim 128 and 16 heads or more: {tuple(q.shape)}")
    keys, stages, warps = INDEXER
    _indexer[(rows,)](
        q, k, weights, di, indices, place, length, factor, dq, dw, part, indices.size(1), indices.stride(0),
        di.stride(0), HI=heads, RELU=relu, BN=keys, D=dim, num_stages=stages, num_warps=warps,
    )  # fmt: skip
