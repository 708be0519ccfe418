"""The operations in plain PyTorch, block by block, on any device and in any floating type.

Each function works on one block of rows and materialises nothing larger than that block; callers choose the
block by a byte budget. This is what runs without a GPU, and what the kernels are compared with where fp64 is
too slow. Arithmetic is fp32, or fp64 where an input is fp64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv32.dsa.plan import row_step


def wide(*tensors: Tensor) -> torch.dtype:
    """The accumulation type for these inputs."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


E4M3_MAX = 448.0
FP8_BLOCK = 128


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3 values as x, fp32 scales [..., blocks]): x is about values * scale, one scale for 128 channels.

    A scale is the power of two at or above amax / 448 (`scale_fmt` ue8m0 of DeepSeek-V3.2's inference
    configuration), with amax at least 1e-4. So a rounded value times its scale is exact in bf16. A last
    dimension that is no multiple of 128 has a shorter last block.
    """
    dim = x.size(-1)
    blocks = -(-dim // FP8_BLOCK)
    padded = torch.nn.functional.pad(x.float(), (0, blocks * FP8_BLOCK - dim)).unflatten(
        -1, (blocks, FP8_BLOCK)
    )
    high = padded.abs().amax(-1).clamp_min(1e-4) * torch.tensor(1 / E4M3_MAX, device=x.device)
    mantissa, exponent = torch.frexp(high)
    scale = torch.ldexp(torch.ones_like(high), exponent - (mantissa == 0.5).int())
    values = (padded / scale[..., None]).to(torch.float8_e4m3fn)
    return values.flatten(-2)[..., :dim], scale


def through_fp8(x: Tensor) -> Tensor:
    """What x becomes when rounded to fp8 by `quantise`, in x's own type, where it is exact."""
    values, scale = quantise(x)
    return (values.float() * scale.repeat_interleave(FP8_BLOCK, -1)[..., : x.size(-1)]).to(x.dtype)


def block_scores(q: Tensor, k: Tensor, weights: Tensor, relu: bool) -> Tensor:
    """[rows, width] = sum_h weights * relu(q . k). q [rows, Hi, D], k [width, D], weights [rows, Hi]."""
    acc = wide(q, k)
    dots = torch.einsum("qhd,kd->qhk", q.to(acc), k.to(acc))
    dots = dots.relu() if relu else dots
    return torch.einsum("qhk,qh->qk", dots, weights.to(acc))


def block_topk(
    scores: Tensor, starts: Tensor, ends: Tensor, key_lo: int, count: int
) -> tuple[Tensor, Tensor]:
    """The `count` best valid keys of each row: (int32 indices, their scores).

    Indices ascend, with -1 (and a score of -inf) in the empty slots at the end. scores [rows, width], column
    c is key key_lo + c; row i may see starts[i] <= key < ends[i]. Equal scores go to the smaller index (a
    stable sort), so that a no-grad forward and its recomputation choose the same keys.
    """
    width = scores.size(1)
    key = torch.arange(key_lo, key_lo + width, device=scores.device)[None]
    valid = (key >= starts[:, None]) & (key < ends[:, None])
    masked = scores.masked_fill(~valid, float("-inf"))
    if width < count:
        masked = torch.nn.functional.pad(masked, (0, count - width), value=float("-inf"))
        valid = torch.nn.functional.pad(valid, (0, count - width), value=False)
    order = masked.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    none = key_lo + width + count
    chosen = torch.where(torch.gather(valid, 1, order), order + key_lo, none).sort(-1).values
    empty = chosen >= none
    picked = torch.gather(masked, 1, torch.where(empty, key_lo, chosen) - key_lo).masked_fill(
        empty, float("-inf")
    )
    return torch.where(empty, -1, chosen).int(), picked


def gather_step(topk: int, dim: int, heads: int, rows: int, budget: int, size: int) -> int:
    """Rows per step so that the gathered keys [rows, topk, dim] and two score arrays fit the budget."""
    return row_step(rows, topk * (dim + 2 * heads) * size, budget)


def attention_forward(
    q: Tensor, kv: Tensor, indices: Tensor, scale: float, d_v: int, budget: int
) -> tuple[Tensor, Tensor]:
    """Output [sq, H, d_v] in q's type and lse [sq, H] (-inf for a row without keys).

    indices int32 [sq, topk].
    """
    sq, heads, dim = q.shape
    acc = wide(q, kv)
    out = torch.empty(sq, heads, d_v, dtype=q.dtype, device=q.device)
    lse = torch.empty(sq, heads, dtype=acc, device=q.device)
    step = gather_step(indices.size(1), dim, heads, sq, budget, out.element_size() if acc == q.dtype else 4)
    for lo in range(0, sq, step):
        hi = min(lo + step, sq)
        keys, logits, none = _logits(q[lo:hi], kv, indices[lo:hi], scale, acc)
        lse[lo:hi] = logits.logsumexp(-1)
        probs = logits.masked_fill(none, 0.0).softmax(-1).masked_fill(none, 0.0)
        out[lo:hi] = torch.einsum("qht,qtd->qhd", probs, keys[..., :d_v]).to(q.dtype)
    return out, lse


def attention_backward(
    q: Tensor, kv: Tensor, indices: Tensor, out: Tensor, lse: Tensor, dout: Tensor, scale: float, budget: int
) -> tuple[Tensor, Tensor]:
    """(dq, dkv) in the types of q and kv; dkv is accumulated in fp32 (or fp64)."""
    sq, heads, dim = q.shape
    d_v = out.size(-1)
    acc = wide(q, kv)
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dkv = torch.zeros(kv.shape, dtype=acc, device=kv.device)
    step = gather_step(2 * indices.size(1), dim, heads, sq, budget, 4)
    for lo in range(0, sq, step):
        hi = min(lo + step, sq)
        keys, logits, _ = _logits(q[lo:hi], kv, indices[lo:hi], scale, acc)
        base = torch.where(torch.isinf(lse[lo:hi]), torch.zeros_like(lse[lo:hi]), lse[lo:hi])
        probs = torch.exp(logits - base[..., None].to(acc))
        do = dout[lo:hi].to(acc)
        delta = (do * out[lo:hi].to(acc)).sum(-1, keepdim=True)
        dlogits = probs * (torch.einsum("qhd,qtd->qht", do, keys[..., :d_v]) - delta) * scale
        dq[lo:hi] = torch.einsum("qht,qtd->qhd", dlogits, keys).to(q.dtype)
        part = torch.einsum("qht,qhd->qtd", dlogits, q[lo:hi].to(acc))
        part[..., :d_v] += torch.einsum("qht,qhd->qtd", probs, do)
        flat = indices[lo:hi].reshape(-1).clamp_min(0).long()
        dkv.index_add_(0, flat, part.reshape(-1, dim))
    return dq, dkv.to(kv.dtype)


def _logits(
    q: Tensor, kv: Tensor, indices: Tensor, scale: float, acc: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(gathered keys [r, topk, D], masked logits [r, H, topk], rows without keys [r, 1, 1])."""
    empty = indices < 0
    keys = kv[indices.clamp_min(0).long()].to(acc)
    logits = torch.einsum("qhd,qtd->qht", q.to(acc), keys) * scale
    return keys, logits.masked_fill(empty[:, None], float("-inf")), empty.all(-1)[:, None, None]


def sparse_target(
    query: Tensor, kv: Tensor, lse: Tensor, indices: Tensor, scale: float, budget: int
) -> Tensor:
    """Sum over heads of exp(s - lse) at the chosen keys, [sq, topk]; 0 in an empty slot."""
    sq, heads, dim = query.shape
    acc = wide(query, kv)
    out = torch.empty(indices.shape, dtype=acc, device=query.device)
    step = gather_step(indices.size(1), dim, heads, sq, budget, 4)
    for lo in range(0, sq, step):
        hi = min(lo + step, sq)
        _, logits, _ = _logits(query[lo:hi], kv, indices[lo:hi], scale, acc)
        base = torch.where(torch.isinf(lse[lo:hi]), torch.zeros_like(lse[lo:hi]), lse[lo:hi])
        out[lo:hi] = torch.exp(logits - base[..., None].to(acc)).sum(1)
    return out


def dense_target(query: Tensor, keys: Tensor, valid: Tensor, scale: float) -> Tensor:
    """Sum over heads of the softmax over all valid keys, [rows, width].

    keys [width, D], valid bool [rows, width].
    """
    acc = wide(query, keys)
    logits = torch.einsum("qhd,kd->qhk", query.to(acc), keys.to(acc)) * scale
    logits = logits.masked_fill(~valid[:, None], float("-inf"))
    none = ~valid.any(-1)[:, None, None]
    return logits.masked_fill(none, 0.0).softmax(-1).masked_fill(~valid[:, None], 0.0).sum(1)


def score_gradient(
    q: Tensor, k: Tensor, weights: Tensor, di: Tensor, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dw, dk) of sum(di * scores(q, k, weights)). q [r, Hi, D], k [width, D], di [r, width]."""
    acc = wide(q, k)
    dots = torch.einsum("qhd,kd->qhk", q.to(acc), k.to(acc))
    on = (dots > 0).to(acc) if relu else torch.ones_like(dots)
    dw = torch.einsum("qhk,qk->qh", dots * on, di.to(acc))
    g = on * di.to(acc)[:, None] * weights.to(acc)[..., None]
    dq = torch.einsum("qhk,kd->qhd", g, k.to(acc)).to(q.dtype)
    return dq, dw, torch.einsum("qhk,qhd->kd", g, q.to(acc))


def kl_rows(target: Tensor, logits: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """(KL(target || softmax(logits)) per row, d(KL)/d(logits)) on `valid`; target need not be normalised.

    Floors of 1e-10 under the target's norm and inside its logarithm as in megatron-core 0.19.2
    dsa_indexer_loss.py.
    """
    eps = 1e-10
    target = target.masked_fill(~valid, 0.0)
    target = target / target.sum(-1, keepdim=True).clamp_min(eps)
    some = valid.any(-1, keepdim=True)
    logp = logits.masked_fill(~valid, float("-inf")).masked_fill(~some, 0.0).log_softmax(-1)
    terms = target * (target.clamp_min(eps).log() - logp)
    kl = terms.masked_fill(~valid, 0.0).sum(-1)
    return kl, (logp.exp() - target).masked_fill(~valid, 0.0)
