"""Sparse attention over the chosen keys, with its gradient: one function, three ways to compute it."""

# ruff: noqa: ANN401  # torch.autograd.Function has no public context type
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv32.dsa import blocked, gpu, tiling
from dsv32.dsa.plan import Bounds, blocks, bounds_of_indices, even_step, row_step
from dsv32.dsa.settings import Settings, decline


class SparseAttention(torch.autograd.Function):
    """out, lse = SparseAttention.apply(q, kv, indices, scale, d_v, settings, bounds).

    q [sq, H, D], kv [sk, D] (values are the first d_v channels), indices int32 [sq, topk] with -1 for an
    empty slot, no key twice in a row. out [sq, H, d_v]; lse [sq, H], no gradient. bounds may be None. Source:
    DeepSeek-V3.2 report, section 2.1, equation 2, in the absorbed (MQA) form of appendix A.
    """

    @staticmethod
    def forward(  # noqa: D102  # the class says it
        ctx: Any,
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        scale: float,
        d_v: int,
        settings: Settings,
        bounds: Bounds | None,
    ) -> tuple[Tensor, Tensor]:
        q, kv = q.contiguous(), kv.contiguous()
        reason = _why_torch(q, kv, d_v, settings)
        ctx.fused = reason is None
        if reason is None:
            out, lse = gpu.forward(q, kv, indices, scale)
        else:
            if q.is_cuda and settings.path != "torch":
                decline(settings, "sparse attention", reason)
            out, lse = blocked.attention_forward(
                q, kv, kv[:, :d_v], _chosen(indices, kv), scale, settings.byte_budget
            )
        ctx.save_for_backward(q, kv, indices, out, lse)
        ctx.scale, ctx.settings, ctx.bounds = scale, settings, bounds
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _dlse: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        q, kv, indices, out, lse = ctx.saved_tensors
        dq, dkv = attention_backward(
            q, kv, indices, out, lse, dout, ctx.scale, ctx.settings, ctx.bounds, ctx.fused
        )
        return dq, dkv, None, None, None, None, None


def attend(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    scale: float,
    d_v: int,
    settings: Settings,
    bounds: Bounds | None,
) -> tuple[Tensor, Tensor]:
    """`SparseAttention.apply`, typed: (out [sq, H, d_v], lse [sq, H])."""
    out, lse = SparseAttention.apply(q, kv, indices, scale, d_v, settings, bounds)  # type: ignore[no-untyped-call]
    return out, lse


def attend_all(q: Tensor, kv: Tensor, scale: float, d_v: int, settings: Settings, bounds: Bounds) -> Tensor:
    """Attention to every key within the bounds, [sq, H, d_v], a block of rows at a time.

    The indices of a block are a quarter of the byte budget. Where q or kv takes a gradient, backward keeps
    those of all blocks; in the dense warm-up neither does.
    """
    sq, sk = q.size(0), kv.size(0)
    step = even_step(sq, row_step(sq, sk * 4, settings.byte_budget // 4), 1)
    outs = []
    for block in blocks(bounds, step):
        part = bounds.rows(block.lo, block.hi)
        slot = torch.arange(max(block.width, 1), dtype=torch.int32, device=q.device)
        indices = (part.starts[:, None] + slot).masked_fill(slot >= part.lengths()[:, None], -1)
        outs.append(attend(q[block.lo : block.hi], kv, indices, scale, d_v, settings, part)[0])
    return torch.cat(outs)


def attention_backward(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    scale: float,
    settings: Settings,
    bounds: Bounds | None = None,
    fused: bool = True,
    way: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(dq, dkv). way forces `tiles`, `pairs`, `atomics` or `torch`; None chooses by the estimated time."""
    if way is None:
        way = choose_backward(q, kv, indices, settings) if fused else "torch"
    if way == "torch":
        d_v, chosen = out.size(-1), _chosen(indices, kv)
        dq, dkv, dv = blocked.attention_backward(
            q, kv, kv[:, :d_v], out, lse, dout, chosen, scale, settings.byte_budget
        )
        dkv[:, :d_v] += dv
        return dq.to(q.dtype), dkv.to(kv.dtype)
    if way == "atomics":
        return gpu.backward(q, kv, indices, out, lse, dout, scale)
    if way == "pairs":
        return pairs_backward(q, kv, indices, out, lse, dout, scale, settings)
    return tiles_backward(q, kv, indices, out, lse, dout, scale, settings, bounds)


def _chosen(indices: Tensor, kv: Tensor) -> tiling.Chosen:
    """The keys that indices name are those that a row may see."""
    bounds = Bounds(
        starts=torch.zeros_like(indices[:, 0]), ends=torch.full_like(indices[:, 0], kv.size(0)), sk=kv.size(0)
    )
    return tiling.Chosen(visible=tiling.Visible(bounds=bounds), indices=indices)


# Picoseconds of an H200 per (row, visible key, head) of full tiles, and per (row, chosen key) of the atomic
# kernel at up to 64 heads and of the pairs' kernels for 16 heads. Measured: docs/dsa-kernels.md.
TILE_PS, ATOMIC_PS, PAIR_PS = 11.0, 800.0, 1650.0


def choose_backward(q: Tensor, kv: Tensor, indices: Tensor, settings: Settings) -> str:
    """The way that should be fastest; deterministic mode leaves `atomics` out, the others always are."""
    sq, heads, _ = q.shape
    sk, topk = kv.size(0), indices.size(1)
    costs = {
        "tiles": TILE_PS * (sk - min(sq, sk) / 2) * max(8, heads),
        "pairs": PAIR_PS * topk * -(-heads // 16),
    }
    if not settings.deterministic and gpu.cudnn_dsa() is not None:
        costs["atomics"] = ATOMIC_PS * topk * max(1.0, heads / 64)
    return min(costs, key=lambda way: costs[way])


def pairs_backward(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    scale: float,
    settings: Settings,
) -> tuple[Tensor, Tensor]:
    """Deterministic backward over the chosen pairs alone, 16 heads at a time."""
    from dsv32.dsa.kernels import pairs, tiles

    heads, sk = q.size(1), kv.size(0)
    full = -(-heads // pairs.GROUP) * pairs.GROUP
    if full != heads:
        q, out, dout = (gpu.pad_heads(t, full) for t in (q, out, dout))
        lse = torch.nn.functional.pad(lse, (0, full - heads))
    dout = dout.contiguous()
    delta, lse2 = tiles.row_dot(out.contiguous(), dout), tiles.base2(lse)
    dq = torch.empty_like(q)
    dkv = torch.zeros(kv.shape, dtype=torch.float32, device=q.device)
    length = tiles.used(indices)
    for rows, place, offsets, part in pairs.walk(indices, sk, kv.size(1), kv.dtype, settings.byte_budget):
        for head in range(0, full, pairs.GROUP):
            pairs.attention(
                q[rows], kv, dout[rows], indices[rows], place, length[rows], lse2[rows], delta[rows], scale,
                head, dq[rows], part,
            )  # fmt: skip
            pairs.add_up(part, offsets, dkv)
    return dq[:, :heads], dkv.to(kv.dtype)


def tiles_backward(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    scale: float,
    settings: Settings,
    bounds: Bounds | None,
) -> tuple[Tensor, Tensor]:
    """Deterministic backward by full tiles: P and dS of a block, then three plain matrix products."""
    from dsv32.dsa.kernels import tiles

    sq, heads, dim = q.shape
    sk, d_v = kv.size(0), out.size(-1)
    full = max(8, 1 << (heads - 1).bit_length())
    if full != heads:
        q, out, dout = (gpu.pad_heads(t, full) for t in (q, out, dout))
        lse = torch.nn.functional.pad(lse, (0, full - heads))
    dout = dout.contiguous()
    bounds = bounds if bounds is not None else bounds_of_indices(indices, sk)
    delta, lse2 = tiles.row_dot(out.contiguous(), dout), tiles.base2(lse)
    dq = torch.empty_like(q)
    dkv = torch.zeros(sk, dim, dtype=torch.float32, device=q.device)
    step = even_step(sq, row_step(sq, full * sk * 4, settings.byte_budget, 16), 16)
    # The widest blocks first: they keep the device busy while the host issues the other blocks' launches.
    for block in reversed(blocks(bounds, step)):
        rows = slice(block.lo, block.hi)
        if block.width == 0:
            dq[rows] = 0
            continue
        keep = tiles.mark(indices[rows], block.key_lo, block.width)
        p, ds = tiles.gradients(
            q[rows],
            kv,
            lse2[rows],
            delta[rows],
            dout[rows],
            bounds.starts[rows],
            bounds.ends[rows],
            block.key_lo,
            block.width,
            scale,
            keep,
        )
        keys = slice(block.key_lo, block.key_hi)
        torch.mm(ds, kv[keys], out=dq[rows].view(-1, dim))
        add_product(dkv[keys], ds, q[rows].view(-1, dim))
        add_product(dkv[keys, :d_v], p, dout[rows].view(-1, d_v))
    return dq[:, :heads], dkv.to(kv.dtype)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a^T b of bf16 matrices in fp32: roundings of each block's share to bf16 would add up."""
    torch.addmm(total, a.t(), b, out_dtype=torch.float32, out=total)


def _why_torch(q: Tensor, kv: Tensor, d_v: int, settings: Settings) -> str | None:
    if settings.path == "torch":
        return "DSV32_DSA_PATH=torch"
    reason = gpu.why_not(q, kv)
    if reason is not None:
        return reason
    if gpu.flash_mla() is None:
        return "flash_mla (sgl-flash-mla) is not importable"
    if q.size(-1) != 576 or d_v != 512:
        return f"head dim {q.size(-1)} with values {d_v}, the kernels have 576 with 512"
    if q.size(1) > 128:
        return f"{q.size(1)} local heads, at most 128"
    return None
