"""The indexer's KL losses, over the chosen keys and over all keys, streamed by blocks with their gradients.

Loss and gradient are computed in one pass over the blocks in the forward, as the gradient of a scalar loss is
known up to one factor: nothing of [sq, sk] is kept or recomputed, and backward multiplies three tensors by
that factor. Source: DeepSeek-V3.2 report, section 2.1, equations 3 (dense warm-up) and 4 (sparse stage);
reduction and floors as in megatron-core 0.19.2 dsa_indexer_loss.py.
"""

# ruff: noqa: ANN401  # torch.autograd.Function and process groups have no public types
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsv32.dsa import blocked, gpu, selection, streaming, tiling
from dsv32.dsa.plan import Bounds, blocks, even_step, row_step
from dsv32.dsa.scores import Scorer
from dsv32.dsa.settings import Settings, decline


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """What the loss needs beside the indexer's own tensors; all detached.

    query [sq, H, D], kv [sk, D]: attention in absorbed form; scale: its softmax scale. lse [sq, H]:
    log-sum-exp over the chosen keys (sparse loss only). indices int32 [sq, topk], picked: their scores. rows:
    bool [sq] or None, the rows that count. tp_group: target heads are summed over it.
    """

    query: Tensor
    kv: Tensor
    scale: float
    bounds: Bounds
    relu: bool = True
    lse: Tensor | None = None
    indices: Tensor | None = None
    picked: Tensor | None = None
    rows: Tensor | None = None
    tp_group: Any | None = None

    def fused(self, q: Tensor, k: Tensor, settings: Settings) -> str | None:
        """Why the kernels do not cover this loss, or None."""
        reason = selection.why_torch(q, k, settings) or gpu.why_not(self.query, self.kv)
        if reason is None and (self.query.size(-1) != 576 or self.query.size(1) > 128):
            reason = f"attention query {tuple(self.query.shape)}: not head dim 576 with up to 128 heads"
        return reason


class IndexerLoss(torch.autograd.Function):
    """loss = IndexerLoss.apply(q, k, weights, inputs, factor, sparse, settings).

    q [sq, Hi, D], k [sk, D], weights [sq, Hi] carry the gradient. factor: fp32 scalar tensor that the sum of
    KL over rows is multiplied by. Returns a fp32 scalar.
    """

    @staticmethod
    def forward(  # noqa: D102  # the class says it
        ctx: Any,
        q: Tensor,
        k: Tensor,
        weights: Tensor,
        inputs: LossInputs,
        factor: Tensor,
        sparse: bool,
        settings: Settings,
    ) -> Tensor:
        need = any(ctx.needs_input_grad[:3])
        run = sparse_loss if sparse else dense_loss
        kl, grads = run(q, k, weights, inputs, factor, settings, need)
        if grads is not None:
            ctx.save_for_backward(*(g.to(t.dtype) for g, t in zip(grads, (q, k, weights), strict=True)))
        return kl * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        if not ctx.saved_tensors:
            return (None,) * 7
        dq, dk, dw = ctx.saved_tensors
        return dq * grad.to(dq.dtype), dk * grad.to(dk.dtype), dw * grad.to(dw.dtype), None, None, None, None


def indexer_loss(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    inputs: LossInputs,
    factor: Tensor,
    sparse: bool,
    settings: Settings,
) -> Tensor:
    """`IndexerLoss.apply`, typed."""
    loss: Tensor = IndexerLoss.apply(q, k, weights, inputs, factor, sparse, settings)  # type: ignore[no-untyped-call]
    return loss


Grads = tuple[Tensor, Tensor, Tensor]


def _padded(inputs: LossInputs) -> tuple[Tensor, int]:
    """(query zero-padded to a power of two of heads, how many of them are real)."""
    heads = inputs.query.size(1)
    full = max(8, 1 << (heads - 1).bit_length())
    return gpu.pad_heads(inputs.query, full), heads


def _reduce(target: Tensor, group: Any | None) -> None:
    if group is not None and group.size() > 1:
        dist.all_reduce(target, group=group)


def sparse_loss(
    q: Tensor, k: Tensor, weights: Tensor, inputs: LossInputs, factor: Tensor, settings: Settings, need: bool
) -> tuple[Tensor, Grads | None]:
    """Sum of KL over rows on the chosen keys, and factor times its gradient (dq, dk, dw)."""
    indices, picked, lse = inputs.indices, inputs.picked, inputs.lse
    assert indices is not None and picked is not None and lse is not None
    q, k, weights = q.detach().contiguous(), k.detach().contiguous(), weights.detach().contiguous()
    reason = inputs.fused(q, k, settings)
    if reason is not None:
        return _in_torch(q, k, weights, inputs, factor, settings, need, "sparse indexer loss", reason)
    from dsv32.dsa.kernels import kl

    target = sparse_target(inputs, settings)
    _reduce(target, inputs.tp_group)
    per_row, predict = kl.sparse(target, picked, indices, inputs.rows)
    total = per_row.sum()
    if not need:
        return total, None
    if _cudnn_gradient(q, inputs, settings):
        idx = gpu.pad_columns(indices, 128)
        extra = idx.size(1) - indices.size(1)
        if extra:
            target, predict = (torch.nn.functional.pad(t, (0, extra)) for t in (target, predict))
        dq, dw, dk = gpu.indexer_backward(q, k, weights, target, predict, idx, factor)
        return total, (dq, dk, dw)
    gradient = _score_gradient_by_pairs if _pairs_gradient(q, k, inputs) else _score_gradient
    return total, gradient(q, k, weights, predict.sub_(target), factor, indices, inputs, settings)


def _in_torch(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    inputs: LossInputs,
    factor: Tensor,
    settings: Settings,
    need: bool,
    operation: str,
    reason: str,
) -> tuple[Tensor, Grads | None]:
    """Either loss without kernels, within the byte budget."""
    if q.is_cuda and settings.path != "torch":
        decline(settings, operation, reason)
    target = blocked.Target(
        query=inputs.query, key=inputs.kv, scale=inputs.scale, rows=inputs.rows, group=inputs.tp_group
    )
    sparse = operation.startswith("sparse")
    chosen = tiling.Chosen(
        visible=tiling.Visible(bounds=inputs.bounds), indices=inputs.indices if sparse else None
    )
    scoring = blocked.Scoring(relu=inputs.relu, fp8=settings.indexer == "fp8")
    return blocked.kl_loss(
        q, k, weights, target, chosen, factor, settings.byte_budget, scoring=scoring, need=need
    )


# Picoseconds of an H200 at 64 index heads per (row, key) of the dense blocks and per (row, chosen key) of the
# pairs.
GRADIENT_TILE_PS, GRADIENT_PAIR_PS = 118.0, 360.0


def _pairs_gradient(q: Tensor, k: Tensor, inputs: LossInputs) -> bool:
    """Whether going over the chosen pairs alone is estimated faster than dense blocks; both deterministic."""
    if q.size(1) < 16:
        return False  # the kernel's products sum over heads, sixteen at least
    assert inputs.indices is not None
    sq, sk, topk = q.size(0), k.size(0), inputs.indices.size(1)
    return GRADIENT_PAIR_PS * topk < GRADIENT_TILE_PS * (sk - min(sq, sk) / 2)


def _score_gradient_by_pairs(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    di: Tensor,
    factor: Tensor,
    indices: Tensor,
    inputs: LossInputs,
    settings: Settings,
) -> Grads:
    """Gradient through the scores from factor * di [sq, topk], by the chosen pairs: equal bits every run."""
    from dsv32.dsa.kernels import pairs, tiles

    dq = torch.empty_like(q)
    dw = torch.empty(weights.shape, dtype=torch.float32, device=q.device)
    dk = torch.zeros(k.shape, dtype=torch.float32, device=q.device)
    length = tiles.used(indices)
    for rows, place, offsets, part in pairs.walk(
        indices, k.size(0), k.size(1), q.dtype, settings.byte_budget
    ):
        pairs.indexer(
            q[rows], k, weights[rows], di[rows], indices[rows], place, length[rows], factor, inputs.relu,
            dq[rows], dw[rows], part,
        )  # fmt: skip
        pairs.add_up(part, offsets, dk)
    return dq, dk, dw


def _cudnn_gradient(q: Tensor, inputs: LossInputs, settings: Settings) -> bool:
    """cuDNN's indexer backward adds dk with atomics, has the relu built in, and on Hopper needs 64 heads."""
    if settings.deterministic or not inputs.relu or gpu.cudnn_dsa() is None:
        return False
    return q.size(1) == 64 and q.size(0) > 1


def sparse_target(inputs: LossInputs, settings: Settings) -> Tensor:
    """Sum over heads of the attention probabilities at the chosen keys, fp32 [sq, topk]."""
    indices, lse = inputs.indices, inputs.lse
    assert indices is not None and lse is not None
    sq, sk, topk = inputs.query.size(0), inputs.kv.size(0), indices.size(1)
    query, heads = _padded(inputs)
    seen = sk - min(sq, sk) / 2
    if gpu.cudnn_dsa() is not None and TARGET_TILE_PS * seen * max(8, heads) > TARGET_GATHER_PS * topk * max(
        1.0, heads / 64
    ):
        return gpu.sparse_target(inputs.query, inputs.kv, lse, indices, inputs.scale)
    from dsv32.dsa.kernels import tiles

    lse2 = tiles.base2(torch.nn.functional.pad(lse, (0, query.size(1) - heads), value=float("inf")))
    out = torch.zeros(sq, topk, dtype=torch.float32, device=query.device)
    step = even_step(sq, row_step(sq, sk * 4, settings.byte_budget, 16), 16)
    for block in reversed(blocks(inputs.bounds, step)):
        if block.width == 0:
            continue
        rows = slice(block.lo, block.hi)
        dense = tiles.target(
            query[rows],
            inputs.kv,
            lse2[rows],
            inputs.bounds.starts[rows],
            inputs.bounds.ends[rows],
            block.key_lo,
            block.width,
            inputs.scale,
        )
        tiles.pick(dense, indices[rows], block.key_lo, out[rows])
    return out


# Picoseconds of an H200 per (row, key, head) in full tiles, and per (row, chosen key) for the gathering
# kernel.
TARGET_TILE_PS, TARGET_GATHER_PS = 2.6, 160.0


def _score_gradient(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    di: Tensor,
    factor: Tensor,
    indices: Tensor,
    inputs: LossInputs,
    settings: Settings,
) -> Grads:
    """Gradient through the scores from factor * di [sq, topk] at the chosen keys, by dense blocks.

    No atomics: equal bits from run to run.
    """
    from dsv32.dsa.kernels import indexer

    sq, sk = q.size(0), k.size(0)
    grads = _zeros(q, k, weights)
    step = even_step(sq, row_step(sq, sk * 8, settings.byte_budget, 128), 128)
    for block in reversed(blocks(inputs.bounds, step)):
        if block.width == 0:
            continue
        rows, keys = slice(block.lo, block.hi), slice(block.key_lo, block.key_hi)
        dense = indexer.spread(di[rows], indices[rows], factor, block.key_lo, block.width)
        _add_gradient(q, k, weights, dense, inputs, rows, keys, grads)
    return grads


def _add_gradient(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    dense: Tensor,
    inputs: LossInputs,
    rows: slice,
    keys: slice,
    grads: Grads,
) -> None:
    from dsv32.dsa.kernels import indexer

    starts, ends = inputs.bounds.starts[rows], inputs.bounds.ends[rows]
    width = keys.stop - keys.start
    part = indexer.gradient(q[rows], k, weights[rows], dense, starts, ends, keys.start, width, inputs.relu)
    grads[0][rows], grads[2][rows] = part[0], part[1]
    grads[1][keys] += part[2]


def _zeros(q: Tensor, k: Tensor, weights: Tensor) -> Grads:
    acc = streaming.wide(q, k)
    return (
        torch.zeros_like(q),
        torch.zeros(k.shape, dtype=acc, device=k.device),
        torch.zeros(weights.shape, dtype=acc, device=k.device),
    )


def dense_loss(
    q: Tensor, k: Tensor, weights: Tensor, inputs: LossInputs, factor: Tensor, settings: Settings, need: bool
) -> tuple[Tensor, Grads | None]:
    """Sum of KL over rows on all valid keys, and factor times its gradient (dq, dk, dw)."""
    q, k, weights = q.detach().contiguous(), k.detach().contiguous(), weights.detach().contiguous()
    reason = inputs.fused(q, k, settings)
    if reason is not None:
        return _in_torch(q, k, weights, inputs, factor, settings, need, "dense indexer loss", reason)
    from dsv32.dsa.kernels import kl

    sq, sk = q.size(0), k.size(0)
    # Target, scores and the gradient block in fp32, and the parts of dk.
    step = even_step(sq, row_step(sq, sk * 16, settings.byte_budget, 128), 128)
    grads = _zeros(q, k, weights) if need else None
    total = torch.zeros((), dtype=torch.float32, device=q.device)
    scorer = Scorer.of(q, k, weights, inputs.relu, settings)
    for block in reversed(blocks(inputs.bounds, step)):
        if block.width == 0:
            continue
        rows, keys = slice(block.lo, block.hi), slice(block.key_lo, block.key_hi)
        target, scores = _dense_block(scorer, inputs, rows, keys)
        _reduce(target, inputs.tp_group)
        row_ok = None if inputs.rows is None else inputs.rows[rows]
        starts, ends = inputs.bounds.starts[rows], inputs.bounds.ends[rows]
        per, di = kl.dense(target, scores, starts, ends, block.key_lo, row_ok, factor)
        total += per.sum()
        if grads is not None:
            _add_gradient(q, k, weights, di, inputs, rows, keys, grads)
    return total, grads


def _dense_block(scorer: Scorer, inputs: LossInputs, rows: slice, keys: slice) -> tuple[Tensor, Tensor]:
    """(target, scores) of one block, [rows, width].

    Columns a row may not see hold anything finite or nothing.
    """
    from dsv32.dsa.kernels import tiles

    starts, ends = inputs.bounds.starts[rows], inputs.bounds.ends[rows]
    width = keys.stop - keys.start
    query, heads = _padded(inputs)
    lse = tiles.statistics(query[rows], inputs.kv, starts, ends, keys.start, width, inputs.scale)
    lse[:, heads:] = float("inf")
    target = tiles.target(
        query[rows], inputs.kv, tiles.base2(lse), starts, ends, keys.start, width, inputs.scale
    )
    first = torch.full_like(starts, keys.start)
    return target, scorer.kernel(rows, first, ends, width)
