"""Sparse attention forward for 32 local heads or fewer: keys on the M side of the tensor cores, heads on the N side.

FlashMLA computes 64 heads at least, so at 16 heads three quarters of its tiles are empty. Here a tile of 64 gathered keys
is the full 64-row operand, and 16 heads are the columns: S^T = K Q^T and O^T += V^T P^T, with V the first 512 channels of
the same tile, read transposed from shared memory. Source of the streaming softmax: FlashAttention-2, arXiv 2307.08691.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

KEYS, STAGES, WARPS = 64, 3, 4


@triton.jit
def _forward(
    q, kv, idx, used, out, lse, scale, idx_stride, H: tl.constexpr, HB: tl.constexpr, BK: tl.constexpr,
    D: tl.constexpr, DR: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    count = tl.load(used + t)
    h = tl.arange(0, HB)
    d = tl.arange(0, D)
    dr = tl.arange(0, DR)
    head = t * H + h
    on = (h < H)[None, :]
    qn = tl.load(q + head[None, :] * (D + DR) + d[:, None], mask=on, other=0.0)
    qr = tl.load(q + head[None, :] * (D + DR) + D + dr[:, None], mask=on, other=0.0)
    acc = tl.zeros([D, HB], dtype=tl.float32)
    top = tl.full([HB], float("-inf"), tl.float32)
    total = tl.zeros([HB], dtype=tl.float32)
    factor = scale * 1.4426950408889634
    for j in range(0, count, BK):
        c = j + tl.arange(0, BK)
        key = tl.load(idx + t * idx_stride + c, mask=c < count, other=-1)
        # An empty slot reads key 0 and is masked: a load without a mask stays asynchronous.
        row = tl.maximum(key, 0).to(tl.int64) * (D + DR)
        kn = tl.load(kv + row[:, None] + d[None, :])
        kr = tl.load(kv + row[:, None] + D + dr[None, :])
        s = tl.dot(kn, qn)
        s = tl.dot(kr, qr, s)
        s = tl.where((key >= 0)[:, None], s * factor, float("-inf"))
        high = tl.maximum(top, tl.max(s, 0))
        safe = tl.where(high == float("-inf"), 0.0, high)
        shrink = tl.exp2(top - safe)
        p = tl.exp2(s - safe[None, :])
        total = total * shrink + tl.sum(p, 0)
        acc = acc * shrink[None, :]
        acc = tl.dot(tl.trans(kn), p.to(kn.dtype), acc)
        top = high
    some = total > 0
    acc = acc / tl.where(some, total, 1.0)[None, :]
    tl.store(out + head[None, :] * D + d[:, None], acc.to(out.dtype.element_ty), mask=on)
    tl.store(lse + head, tl.where(some, (top + tl.log2(total)) / 1.4426950408889634, float("-inf")), mask=h < H)


def forward(q: Tensor, kv: Tensor, indices: Tensor, used: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """out [sq, H, 512] as q and lse fp32 [sq, H] (natural, -inf without keys).

    q bf16 [sq, H, 576] with H <= 32, kv bf16 [sk, 576], both contiguous; indices int32 [sq, topk], -1 for empty;
    used int32 [sq]: slots up to the last valid one.
    """
    sq, heads, dim = q.shape
    if heads > 32 or dim != 576 or not (q.is_contiguous() and kv.is_contiguous() and indices.stride(1) == 1):
        raise ValueError(f"gather forward needs contiguous [sq, H <= 32, 576], got {tuple(q.shape)}")
    out = torch.empty(sq, heads, 512, dtype=q.dtype, device=q.device)
    lse = torch.empty(sq, heads, dtype=torch.float32, device=q.device)
    if sq:
        _forward[(sq,)](
            q, kv, indices, used, out, lse, scale, indices.stride(0), H=heads, HB=16 if heads <= 16 else 32, BK=KEYS,
            D=512, DR=64, num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
    return out, lse
