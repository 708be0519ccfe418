"""One tile product, three epilogues: attention over all keys of a block as matrix products with full tiles.

Rows are (token, head) pairs, row = token * H + head, so that 16 local heads of 8 tokens fill a 128-row tile:
at 16 heads a one-token tile is three quarters empty, and gathering keys per token is bound by L2 (1,152 bytes
a key). Where a good share of the keys is chosen, computing all of them in full tiles and masking is faster,
needs no atomics and is deterministic. `docs/dsa-kernels.md` has the figures.

  statistics:  per tile the row maximum and the sum of exponentials (log-sum-exp over all valid keys)
  target:      sum over heads of exp(s - lse): the indexer's KL target
  gradients:   P = exp(s - lse) and dS = P * (dP - delta) * scale, bf16, which plain matrix products turn into
               dQ = dS K and dKV = P^T dO + dS^T Q

Source of the formulas: FlashAttention-2 (arXiv 2307.08691), section 3.1, equations for P, dP, dS with
delta = rowsum(O * dO).
"""

# ruff: noqa: ANN001, ANN202  # the compiler types the arguments of Triton kernels
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2E = 1.4426950408889634
NOPE, ROPE = 512, 64
BK = 64
STATISTICS, TARGET, GRADIENTS = 0, 1, 2
# (rows, columns, stages, warps) of a tile by mode, from the sweep in docs/dsa-kernels.md.
SHAPES = {STATISTICS: (128, 128, 3, 8), TARGET: (128, 128, 3, 4), GRADIENTS: (64, 128, 3, 4)}


@triton.jit
def _tile(
    q,
    do,
    kv,
    out_p,
    out_ds,
    lse2,
    delta,
    keep,
    starts,
    ends,
    out_a,
    out_b,
    rows,
    width,
    key_lo,
    scale,
    keep_stride,
    out_stride,
    H: tl.constexpr,
    MODE: tl.constexpr,
    KEEP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STEPS: tl.constexpr,
):
    pid_n = tl.program_id(0)
    pid_m = tl.program_id(1)
    r = pid_m * BM + tl.arange(0, BM)
    n = pid_n * BN + tl.arange(0, BN)
    row_ok = r < rows
    tok = r // H
    st = tl.load(starts + tok, mask=row_ok, other=0x7FFFFFFF) - key_lo
    en = tl.load(ends + tok, mask=row_ok, other=0) - key_lo
    live = (tl.max(en, 0) > pid_n * BN) & (tl.min(st, 0) < pid_n * BN + BN)
    s = tl.zeros([BM, BN], dtype=tl.float32)
    steps = tl.where(live, STEPS, 0)
    if MODE == 2:
        # dO has 512 channels beside K's 576: its last slice lies outside and reads as zeros, which costs one
        # product of seventeen and spares the loop a special case.
        dp = tl.zeros([BM, BN], dtype=tl.float32)
        for i in range(steps):
            kt = kv.load([key_lo + pid_n * BN, i * BK]).T
            s = tl.dot(q.load([pid_m * BM, i * BK]), kt, s)
            dp = tl.dot(do.load([pid_m * BM, i * BK]), kt, dp)
    else:
        for i in range(steps):
            s = tl.dot(q.load([pid_m * BM, i * BK]), kv.load([key_lo + pid_n * BN, i * BK]).T, s)
    if KEEP:
        # keep has whole tiles of rows and columns and is 0 outside a row's bounds, so no other test is
        # needed.
        ok = tl.load(keep + tok.to(tl.int64)[:, None] * keep_stride + n[None, :]) != 0
    else:
        ok = (n[None, :] >= st[:, None]) & (n[None, :] < tl.minimum(en, width)[:, None])
    s2 = s * (scale * 1.4426950408889634)
    if MODE == 0:
        s2 = tl.where(ok, s2, float("-inf"))
        m = tl.max(s2, 1)
        safe = tl.where(m == float("-inf"), 0.0, m)
        total = tl.sum(tl.exp2(s2 - safe[:, None]), 1)
        where = r.to(tl.int64) * out_stride + pid_n
        tl.store(out_a + where, m, mask=row_ok)
        tl.store(out_b + where, total, mask=row_ok)
    elif (MODE == 2) | live:  # nobody reads the target of a tile outside all bounds
        base = tl.load(lse2 + r, mask=row_ok, other=float("inf"))
        p = tl.where(ok, tl.exp2(s2 - base[:, None]), 0.0)
        if MODE == 1:
            summed = tl.sum(tl.reshape(p, (BM // H, H, BN)), 1)
            t = pid_m * (BM // H) + tl.arange(0, BM // H)
            where = t.to(tl.int64)[:, None] * out_stride + n[None, :]
            tl.store(out_a + where, summed, mask=(t * H < rows)[:, None] & (n < width)[None, :])
        else:
            dl = tl.load(delta + r, mask=row_ok, other=0.0)
            ds = p * (dp - dl[:, None]) * scale
            out_p.store([pid_m * BM, pid_n * BN], p.to(out_p.dtype))
            out_ds.store([pid_m * BM, pid_n * BN], ds.to(out_ds.dtype))


@triton.jit
def _mark(idx, keep, key_lo, width, idx_stride, keep_stride, topk, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    j = tl.load(idx + row * idx_stride + c, mask=c < topk, other=-1)
    local = j - key_lo
    tl.store(keep + row * keep_stride + local, 1, mask=(j >= 0) & (local >= 0) & (local < width))


def mark(indices: Tensor, key_lo: int, width: int) -> Tensor:
    """uint8, 1 where key key_lo + column is among the row's indices (int32 [rows, topk], -1 empty).

    Padded with zeros to whole tiles: [rows + 15, a multiple of 256].
    """
    rows, topk = indices.shape
    keep = torch.zeros(rows + 15, triton.cdiv(width, 256) * 256, dtype=torch.uint8, device=indices.device)
    if rows and topk and width:
        block = triton.next_power_of_2(topk)
        _mark[(rows,)](
            indices, keep, key_lo, width, indices.stride(0), keep.stride(0), topk, BLOCK=block, num_warps=4
        )
    return keep


@triton.jit
def _pick(dense, idx, out, key_lo, width, dense_stride, idx_stride, out_stride, topk, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    j = tl.load(idx + row * idx_stride + c, mask=c < topk, other=-1)
    ok = (j >= key_lo) & (j - key_lo < width)
    value = tl.load(dense + row * dense_stride + (j - key_lo), mask=ok, other=0.0)
    tl.store(out + row * out_stride + c, value, mask=ok)


@triton.jit
def _used(idx, out, idx_stride, topk, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    j = tl.load(idx + row * idx_stride + c, mask=c < topk, other=-1)
    tl.store(out + row, tl.max(tl.where(j >= 0, c + 1, 0), 0))


def used(indices: Tensor) -> Tensor:
    """Slots of each row up to its last valid index, int32 [rows]: what a kernel has to visit."""
    rows, topk = indices.shape
    out = torch.empty(rows, dtype=torch.int32, device=indices.device)
    if rows:
        _used[(rows,)](indices, out, indices.stride(0), topk, BLOCK=triton.next_power_of_2(topk), num_warps=4)
    return out


@triton.jit
def _within(idx, out, length, key_lo, key_hi, idx_stride, out_stride, topk, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    j = tl.load(idx + row * idx_stride + c, mask=c < topk, other=-1)
    ok = (j >= key_lo) & (j < key_hi)
    slot = tl.cumsum(ok.to(tl.int32), 0) - 1
    count = tl.sum(ok.to(tl.int32), 0)
    tl.store(out + row * out_stride + slot, j - key_lo, mask=ok)
    tl.store(out + row * out_stride + c, -1, mask=(c >= count) & (c < topk))
    tl.store(length + row, count)


def within(indices: Tensor, key_lo: int, key_hi: int, out: Tensor) -> Tensor:
    """Write each row's indices of [key_lo, key_hi), less key_lo and packed to the front, to out.

    Returns their counts, int32 [rows].
    """
    rows, topk = indices.shape
    length = torch.empty(rows, dtype=torch.int32, device=indices.device)
    if rows:
        _within[(rows,)](
            indices,
            out,
            length,
            key_lo,
            key_hi,
            indices.stride(0),
            out.stride(0),
            topk,
            BLOCK=triton.next_power_of_2(topk),
            num_warps=4,
        )
    return length


def pick(dense: Tensor, indices: Tensor, key_lo: int, out: Tensor) -> None:
    """out[i, c] = dense[i, indices[i, c] - key_lo] where that key is in the block.

    Other slots stay as they are.
    """
    rows, topk = indices.shape
    if rows and topk:
        block = triton.next_power_of_2(topk)
        _pick[(rows,)](
            dense,
            indices,
            out,
            key_lo,
            dense.size(1),
            dense.stride(0),
            indices.stride(0),
            out.stride(0),
            topk,
            BLOCK=block,
            num_warps=4,
        )


def _launch(
    mode: int,
    query: Tensor,
    kv: Tensor,
    starts: Tensor,
    ends: Tensor,
    key_lo: int,
    width: int,
    scale: float,
    out_a: Tensor,
    out_b: Tensor,
    out_stride: int,
    lse2: Tensor | None = None,
    delta: Tensor | None = None,
    dout: Tensor | None = None,
    keep: Tensor | None = None,
) -> None:
    tokens, heads, dim = query.shape
    if dim != NOPE + ROPE or kv.shape[-1] != dim or heads not in (8, 16, 32, 64, 128):
        raise ValueError(
            f"tiles need head dim 576 and 8 to 128 heads (power of two), got {tuple(query.shape)}"
        )
    if not (query.is_contiguous() and kv.is_contiguous() and (dout is None or dout.is_contiguous())):
        raise ValueError("tiles need contiguous query, kv and dout")
    rows = tokens * heads
    bm, columns, stages, warps = SHAPES[mode]
    bm = max(bm, heads) if mode == TARGET else bm  # a target tile holds whole tokens
    grid = (triton.cdiv(width, columns), triton.cdiv(rows, bm))
    q_tiles = TensorDescriptor.from_tensor(query.view(rows, dim), [bm, BK])
    k_tiles = TensorDescriptor.from_tensor(kv, [columns, BK])
    do_tiles = q_tiles if dout is None else TensorDescriptor.from_tensor(dout.view(rows, NOPE), [bm, BK])
    p_tiles, ds_tiles = q_tiles, q_tiles
    if mode == GRADIENTS:
        p_tiles, ds_tiles = (TensorDescriptor.from_tensor(t, [bm, columns]) for t in (out_a, out_b))
    _tile[grid](
        q_tiles,
        do_tiles,
        k_tiles,
        p_tiles,
        ds_tiles,
        lse2 if lse2 is not None else starts,
        delta if delta is not None else starts,
        keep if keep is not None else starts,
        starts,
        ends,
        out_a,
        out_b,
        rows,
        width,
        key_lo,
        scale,
        keep.stride(0) if keep is not None else 0,
        out_stride,
        H=heads,
        MODE=mode,
        KEEP=keep is not None,
        BM=bm,
        BN=columns,
        BK=BK,
        STEPS=dim // BK,
        num_warps=warps,
        num_stages=stages,
    )


def statistics(
    query: Tensor, kv: Tensor, starts: Tensor, ends: Tensor, key_lo: int, width: int, scale: float
) -> Tensor:
    """Natural log-sum-exp over each row's valid keys in [key_lo, key_lo + width): fp32 [tokens, H].

    query: bf16 [tokens, H, 576]; kv: bf16 [sk, 576]; starts, ends: int32 [tokens]. -inf for a row without
    keys.
    """
    tokens, heads, _ = query.shape
    tiles = triton.cdiv(width, SHAPES[STATISTICS][1])
    m = torch.empty(tokens * heads, tiles, dtype=torch.float32, device=query.device)
    total = torch.empty_like(m)
    _launch(STATISTICS, query, kv, starts, ends, key_lo, width, scale, m, total, tiles)
    top = m.amax(1, keepdim=True)
    safe = torch.where(torch.isinf(top), torch.zeros_like(top), top)
    lse2 = safe + (total * torch.exp2(m - safe)).sum(1, keepdim=True).log2()
    return (lse2 / LOG2E).view(tokens, heads)


def target(
    query: Tensor,
    kv: Tensor,
    lse2: Tensor,
    starts: Tensor,
    ends: Tensor,
    key_lo: int,
    width: int,
    scale: float,
    keep: Tensor | None = None,
) -> Tensor:
    """Sum over heads of exp(s - lse) at each valid (and kept) key: fp32 [tokens, width].

    Columns outside a row's bounds are 0 or not written.

    lse2: `base2(lse)`, [tokens, H]; +inf for a head that must add nothing.
    """
    tokens = query.size(0)
    out = torch.empty(tokens, width, dtype=torch.float32, device=query.device)
    _launch(TARGET, query, kv, starts, ends, key_lo, width, scale, out, out, width, lse2=lse2, keep=keep)
    return out


def gradients(
    query: Tensor,
    kv: Tensor,
    lse2: Tensor,
    delta: Tensor,
    dout: Tensor,
    starts: Tensor,
    ends: Tensor,
    key_lo: int,
    width: int,
    scale: float,
    keep: Tensor,
) -> tuple[Tensor, Tensor]:
    """P and dS in the type of query, [tokens * H, width]; zero where a key is not kept.

    lse2: `base2(lse)`; delta fp32 [tokens, H]; keep from `mark`.
    """
    rows = query.size(0) * query.size(1)
    # Rows start 128 bytes apart at least, or the matrix products that follow leave their aligned kernels.
    stride = triton.cdiv(width, 64) * 64
    p = torch.empty(rows, stride, dtype=query.dtype, device=query.device)
    ds = torch.empty_like(p)
    _launch(
        GRADIENTS,
        query,
        kv,
        starts,
        ends,
        key_lo,
        width,
        scale,
        p,
        ds,
        stride,
        lse2=lse2,
        delta=delta,
        dout=dout,
        keep=keep,
    )
    return p[:, :width], ds[:, :width]


@triton.jit
def _add_four(a, b, c, d, before, out, count, N: tl.constexpr, BEFORE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = i < count
    total = tl.load(a + i, mask=ok, other=0.0).to(tl.float32)
    if N > 1:
        total += tl.load(b + i, mask=ok, other=0.0).to(tl.float32)
    if N > 2:
        total += tl.load(c + i, mask=ok, other=0.0).to(tl.float32)
    if N > 3:
        total += tl.load(d + i, mask=ok, other=0.0).to(tl.float32)
    if BEFORE:
        total += tl.load(before + i, mask=ok, other=0.0)
    tl.store(out + i, total.to(out.dtype.element_ty), mask=ok)


def add_up(shares: list[Tensor], before: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The sum of one to four contiguous tensors of one shape, and of before (fp32) where given, in dtype."""
    out = torch.empty(shares[0].shape, dtype=dtype, device=shares[0].device)
    four = [*shares, *shares[:1] * (4 - len(shares))]
    if not all(t.is_contiguous() for t in four):
        raise ValueError("add_up needs contiguous tensors")
    if out.numel():
        _add_four[(triton.cdiv(out.numel(), 2048),)](
            *four,
            out if before is None else before,
            out,
            out.numel(),
            N=len(shares),
            BEFORE=before is not None,
            BLOCK=2048,
            num_warps=4,
        )
    return out


@triton.jit
def _row_dot(a, b, out, rows, D: tl.constexpr, R: tl.constexpr):
    r = tl.program_id(0) * R + tl.arange(0, R)
    where = r.to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :]
    ok = (r < rows)[:, None]
    x = tl.load(a + where, mask=ok, other=0.0).to(tl.float32)
    y = tl.load(b + where, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + r, tl.sum(x * y, 1), mask=r < rows)


def row_dot(a: Tensor, b: Tensor) -> Tensor:
    """delta = rowsum(a * b) in fp32 over the last dimension (a power of two) of contiguous a, b."""
    out = torch.empty(a.shape[:-1], dtype=torch.float32, device=a.device)
    rows = out.numel()
    if rows:
        _row_dot[(triton.cdiv(rows, 16),)](a, b, out, rows, D=a.size(-1), R=16, num_warps=4)
    return out


def base2(lse: Tensor) -> Tensor:
    """lse in base 2 with 0 for -inf: a row without keys has no valid entry, and exp(-inf - 0) is 0."""
    return torch.where(lse == float("-inf"), torch.zeros_like(lse), lse * LOG2E).contiguous()
