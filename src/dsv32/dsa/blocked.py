"""DSA in plain PyTorch under a byte budget: selection, both KL losses and attention, with their gradients.

Work is cut over query rows, keys and heads, so that no intermediate of [sq, sk] or [sq, heads, top-k] is made
at any length: what a function holds beside its inputs and results stays below the budget. Keys come in tiles
(`tiling`). Softmaxes over several tiles are put together from running maxima and sums (Milakov and
Gimelshein, "Online normalizer calculation for softmax", 2018).

Shapes, one sequence or packed batch: q [sq, H, D], k [sk, D] shared by all heads or [sk, H, D]; index q
[sq, Hi, Di], index k [sk, Di], weights [sq, Hi]. Arithmetic is fp32, or fp64 where an input is fp64.
"""

# ruff: noqa: ANN401  # torch.autograd.Function and process groups have no public types
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsv32.dsa.streaming import FP8_BLOCK, through_fp8, wide
from dsv32.dsa.tiling import Chosen, Cut, Tile, Visible, fit, groups

EPS = 1e-10  # floors of megatron-core 0.19.2 dsa_indexer_loss.py


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """How index scores are made.

    relu: whether the products go through a relu. fp8: of queries and keys rounded by `streaming.through_fp8`,
    a tile at a time; gradients go straight through the rounding, to the values given.
    """

    relu: bool = True
    fp8: bool = False

    def rounded(self, x: Tensor) -> Tensor:
        """Queries or keys as scores see them."""
        return through_fp8(x) if self.fp8 else x

    def scratch(self, dim: int) -> int:
        """Elements that rounding a query or key of size dim takes beside it."""
        return 3 * -(-dim // FP8_BLOCK) * FP8_BLOCK if self.fp8 else 0


PLAIN = Scoring()


class _Normalizer:
    """Running log-sum-exp of logits that come tile by tile; shapes without the key dimension."""

    def __init__(self, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype) -> None:
        self.top = torch.full(shape, float("-inf"), dtype=dtype, device=like.device)
        self.total = torch.zeros(shape, dtype=dtype, device=like.device)

    def add(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Take up a tile (which is overwritten): (exp(logits - top), the factor for what was before)."""
        top = torch.maximum(self.top, logits.amax(-1))
        base = top.masked_fill(top == float("-inf"), 0.0)
        before = torch.exp(self.top - base)
        weights = logits.sub_(base[..., None]).exp_()
        self.total = self.total * before + weights.sum(-1)
        self.top = top
        return weights, before

    def lse(self) -> Tensor:
        """-inf where nothing was valid."""
        return self.top + self.total.log()


def _dots(q: Tensor, keys: Tensor, tile: Tile, *, heads: bool) -> Tensor:
    """[rows, heads, width] products."""
    return torch.einsum(f"qhd,{tile.letters(heads)}->qhk", q, keys)


def _logits(q: Tensor, k: Tensor, tile: Tile, heads: slice, scale: float) -> tuple[Tensor, Tensor]:
    """(masked attention logits [rows, heads, width], the keys used). q is [rows, H, D], k all keys."""
    acc = wide(q, k)
    many = k.ndim == 3
    keys = tile.take(k[:, heads] if many else k, acc)
    logits = _dots(q[:, heads].to(acc), keys, tile, heads=many).mul_(scale)
    return logits.masked_fill_(~tile.valid[:, None], float("-inf")), keys


def _scores(q: Tensor, k: Tensor, weights: Tensor, tile: Tile, scoring: Scoring, step: int) -> Tensor:
    """Index scores [rows, width], summed over groups of heads; -inf where not valid."""
    acc = wide(q, k)
    keys = scoring.rounded(tile.take(k, acc))
    total = torch.zeros(tile.valid.shape, dtype=acc, device=q.device)
    for heads in groups(q.size(1), step):
        dots = _dots(scoring.rounded(q[:, heads].to(acc)), keys, tile, heads=False)
        dots = dots.relu_() if scoring.relu else dots
        total += torch.einsum("qhk,qh->qk", dots, weights[:, heads].to(acc))
    return total.masked_fill_(~tile.valid, float("-inf"))


def select(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    visible: Visible,
    count: int,
    budget: int,
    *,
    scoring: Scoring = PLAIN,
) -> tuple[Tensor, Tensor]:
    """The `count` best visible keys of each row: (int32 [sq, count] ascending, -1 last; their scores).

    Equal scores go to the smaller index, whatever the budget: the best so far stand before a tile's keys, and
    the sort is stable. Source: DeepSeek-V3.2 report, section 2.1, equation 1.
    """
    sq, heads, dim = q.shape
    acc = wide(q, k)
    size = torch.finfo(acc).bits // 8
    sk = k.size(0)
    found = torch.full((sq, count), -1, dtype=torch.int32, device=q.device)
    picked = torch.full((sq, count), float("-inf"), dtype=acc, device=q.device)
    if count == 0 or sk == 0:
        return found, picked

    def cost(r: int, w: int, h: int) -> int:
        # Candidates: scores, their sort with its indices, twice over for what is gathered from it.
        each = 2 * dim + scoring.scratch(dim)
        return r * (count + w) * (4 * size + 24) + size * (r * w * h + (r * h + w) * each)

    cut = fit(sq, sk, heads, cost, budget)
    chosen = Chosen(visible=visible)
    for rows, columns in chosen.blocks(cut.rows):
        best = torch.empty(rows.stop - rows.start, 0, dtype=acc, device=q.device)
        keys = torch.empty(best.shape, dtype=torch.int32, device=q.device)
        for tile in chosen.tiles(rows, columns, cut.keys):
            assert isinstance(tile.keys, slice)
            scores = _scores(q[rows], k, weights[rows], tile, scoring, cut.heads)
            names = torch.arange(tile.keys.start, tile.keys.stop, dtype=torch.int32, device=q.device)
            names = names.expand(scores.shape).masked_fill(~tile.valid, -1)
            scores, names = torch.cat((best, scores), 1), torch.cat((keys, names), 1)
            best, order = scores.sort(dim=-1, descending=True, stable=True)
            best, keys = best[:, :count].contiguous(), names.gather(1, order[:, :count])
            del scores, names, order
        got = keys.size(1)
        last = torch.where(keys < 0, sk, keys).sort(-1)
        found[rows, :got] = last.values.masked_fill_(last.values == sk, -1)
        picked[rows, :got] = best.gather(1, last.indices)
    return found, picked


@dataclass(frozen=True, kw_only=True)
class Target:
    """The attention that the indexer shall learn: query [sq, H, D], key [sk, D] or [sk, H, D], detached.

    rows: bool [sq] or None, the rows that count. group: process group whose ranks hold the other heads.
    """

    query: Tensor
    key: Tensor
    scale: float
    rows: Tensor | None = None
    group: Any | None = None

    @property
    def heads(self) -> int:
        """Of all ranks."""
        return self.query.size(1) * (self.group.size() if self.group is not None else 1)


Grads = tuple[Tensor, Tensor, Tensor]


def kl_loss(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    target: Target,
    chosen: Chosen,
    factor: Tensor,
    budget: int,
    *,
    scoring: Scoring = PLAIN,
    need: bool = True,
) -> tuple[Tensor, Grads | None]:
    """Sum over rows of KL(target || softmax(index scores)) on the chosen keys, and its gradient.

    Source: DeepSeek-V3.2 report, section 2.1, equations 3 (all keys) and 4 (chosen keys); floors as in
    megatron-core 0.19.2. The target's sum over the heads of other ranks runs while the next tile is computed:
    two tiles are held. It is normalised by the number of heads, which is what its rows sum to.

    Args:
        q: index query.
        k: index key.
        weights: of the index heads.
        target: attention.
        chosen: keys over which both distributions are taken.
        factor: fp32 scalar that the gradient (not the sum) is multiplied by.
        budget: bytes.
        scoring: of the index scores.
        need: whether the gradient is wanted.

    Returns:
        scalar; (dq, dk, dw) in the accumulation type, or None.
    """
    acc = wide(q, k)
    size = torch.finfo(acc).bits // 8
    heads, index_heads = target.query.size(1), q.size(1)
    dim, index_dim, many = target.query.size(2), q.size(2), target.key.ndim == 3
    gathered = chosen.indices is not None

    def cost(r: int, w: int, h: int) -> int:
        keys = (r if gathered else 1) * w
        attention = 2 * r * w * h + 2 * r * h * dim + 2 * keys * dim * (h if many else 1)
        index = 3 * r * w * h + (r * h + keys) * (3 * index_dim + scoring.scratch(index_dim))
        # Two targets under way, scores, their gradient and what is between them; lse of rows; masks, indices.
        return size * (max(attention, index) + 7 * r * w + r * 3 * heads) + r * w * 26

    cut = fit(q.size(0), chosen.width, max(heads, index_heads), cost, budget)
    total = torch.zeros((), dtype=acc, device=q.device)
    grads: Grads | None = None
    if need:
        grads = tuple(torch.zeros(x.shape, dtype=acc, device=x.device) for x in (q, k, weights))  # type: ignore[assignment]
    waiting: _Part | None = None
    for rows, columns in chosen.blocks(cut.rows):
        if columns.stop <= columns.start:
            continue
        lse, index_lse = _normalizers(q[rows], k, weights[rows], target, chosen, rows, columns, cut, scoring)
        for tile in chosen.tiles(rows, columns, cut.keys):
            part = _Part(
                rows=rows, tile=tile, index_lse=index_lse, target=_target(target, rows, tile, lse, cut)
            )
            part.reduce(target.group)
            if waiting is not None:
                total += _finish(waiting, q, k, weights, target, factor, scoring, cut, grads)
            waiting = part
    if waiting is not None:
        total += _finish(waiting, q, k, weights, target, factor, scoring, cut, grads)
    return total, grads


@dataclass(kw_only=True)
class _Part:
    """A tile whose target is being summed over ranks."""

    rows: slice
    tile: Tile
    index_lse: Tensor
    target: Tensor
    work: Any = None

    def reduce(self, group: Any | None) -> None:
        if group is not None and group.size() > 1:
            self.work = dist.all_reduce(self.target, group=group, async_op=True)

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.target


def _normalizers(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    target: Target,
    chosen: Chosen,
    rows: slice,
    columns: slice,
    cut: Cut,
    scoring: Scoring,
) -> tuple[Tensor, Tensor]:
    """Log-sum-exp over a block's tiles: of attention [rows, H], of index scores [rows]."""
    query, acc = target.query[rows], wide(q, k)
    count, heads = query.shape[:2]
    attention = [_Normalizer((count, h.stop - h.start), query, acc) for h in groups(heads, cut.heads)]
    index = _Normalizer((count,), query, acc)
    for tile in chosen.tiles(rows, columns, cut.keys):
        for some, normalizer in zip(groups(heads, cut.heads), attention, strict=True):
            normalizer.add(_logits(query, target.key, tile, some, target.scale)[0])
        index.add(_scores(q, k, weights, tile, scoring, cut.heads))
    return torch.cat([normalizer.lse() for normalizer in attention], 1), index.lse()


def _target(target: Target, rows: slice, tile: Tile, lse: Tensor, cut: Cut) -> Tensor:
    """Sum over this rank's heads of attention's probabilities, [rows, width]; 0 where not valid."""
    query = target.query[rows]
    total = torch.zeros(tile.valid.shape, dtype=lse.dtype, device=lse.device)
    base = lse.masked_fill(lse == float("-inf"), 0.0)
    for heads in groups(query.size(1), cut.heads):
        logits, _ = _logits(query, target.key, tile, heads, target.scale)
        total += logits.sub_(base[:, heads, None]).exp_().sum(1)
    return total


def _finish(
    part: _Part,
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    target: Target,
    factor: Tensor,
    scoring: Scoring,
    cut: Cut,
    grads: Grads | None,
) -> Tensor:
    """KL of a tile whose target is there, and its share of the gradient."""
    rows, tile = part.rows, part.tile
    counted = tile.valid if target.rows is None else tile.valid & target.rows[rows, None]
    wanted = part.wait().div_(target.heads)
    base = part.index_lse.masked_fill(part.index_lse == float("-inf"), 0.0)
    log = _scores(q[rows], k, weights[rows], tile, scoring, cut.heads).sub_(base[:, None])
    log = log.masked_fill_(~counted, 0.0)
    kl = (wanted.clamp_min(EPS).log_().sub_(log).mul_(wanted)).masked_fill_(~counted, 0.0).sum()
    if grads is not None:
        di = log.exp_().sub_(wanted).masked_fill_(~counted, 0.0).mul_(factor)
        _score_gradient(q[rows], k, weights[rows], di, tile, scoring.relu, cut.heads, rows, grads)
    return kl


def _score_gradient(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    di: Tensor,
    tile: Tile,
    relu: bool,
    step: int,
    rows: slice,
    grads: Grads,
) -> None:
    """Add the gradient of sum(di * scores); q and weights are of the block's rows, grads of all."""
    acc = wide(q, k)
    keys = tile.take(k, acc)
    letters = tile.letters(heads=False)
    for heads in groups(q.size(1), step):
        some = q[:, heads].to(acc)
        dots = _dots(some, keys, tile, heads=False)
        dots = dots.relu_() if relu else dots
        grads[2][rows, heads] += torch.einsum("qhk,qk->qh", dots, di)
        on = dots.gt_(0) if relu else dots.fill_(1)
        g = on.mul_(di[:, None]).mul_(weights[:, heads].to(acc)[..., None])
        grads[0][rows, heads] += torch.einsum(f"qhk,{letters}->qhd", g, keys)
        tile.add(grads[1], torch.einsum(f"qhk,qhd->{letters}", g, some), None)


class Loss(torch.autograd.Function):
    """loss = Loss.apply(q, k, weights, target, chosen, factor, budget, scoring); fp32 (or fp64) scalar.

    q, k and weights carry the gradient, which is computed with the loss: it is known up to one factor.
    """

    @staticmethod
    def forward(  # noqa: D102  # the class says it
        ctx: Any,
        q: Tensor,
        k: Tensor,
        weights: Tensor,
        target: Target,
        chosen: Chosen,
        factor: Tensor,
        budget: int,
        scoring: Scoring,
    ) -> Tensor:
        need = any(ctx.needs_input_grad[:3])
        kl, grads = kl_loss(q, k, weights, target, chosen, factor, budget, scoring=scoring, need=need)
        if grads is not None:
            ctx.save_for_backward(*(g.to(x.dtype) for g, x in zip(grads, (q, k, weights), strict=True)))
        return kl * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        dq, dk, dw = (saved * grad.to(saved.dtype) for saved in ctx.saved_tensors)
        return dq, dk, dw, None, None, None, None, None


class Attention(torch.autograd.Function):
    """out = Attention.apply(q, k, v, chosen, scale, budget); see `attention_forward`."""

    @staticmethod
    def forward(  # noqa: D102  # the class says it
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, chosen: Chosen, scale: float, budget: int
    ) -> Tensor:
        out, lse = attention_forward(q, k, v, chosen, scale, budget)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.chosen, ctx.scale, ctx.budget = chosen, scale, budget
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        q, k, v, out, lse = ctx.saved_tensors
        grads = attention_backward(q, k, v, out, lse, dout, ctx.chosen, ctx.scale, ctx.budget)
        return *(grad.to(x.dtype) for grad, x in zip(grads, (q, k, v), strict=True)), None, None, None


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, chosen: Chosen, scale: float, budget: int
) -> tuple[Tensor, Tensor]:
    """Output [sq, H, Dv] in v's type (0 for a row without keys) and log-sum-exp [sq, H] (-inf there).

    q [sq, H, D]; k [sk, D] and v [sk, Dv] shared by all heads, or k [sk, H, D] and v [sk, H, Dv]. Source:
    DeepSeek-V3.2 report, section 2.1, equation 2.
    """
    acc = wide(q, k)
    sq, heads, _ = q.shape
    out = torch.zeros(sq, heads, v.size(-1), dtype=v.dtype, device=q.device)
    lse = torch.full((sq, heads), float("-inf"), dtype=acc, device=q.device)
    many = v.ndim == 3
    cut = _attention_cut(q, k, v, chosen, budget, backward=False)
    for rows, columns in chosen.blocks(cut.rows):
        for some in groups(heads, cut.heads):
            normalizer = _Normalizer((rows.stop - rows.start, some.stop - some.start), q, acc)
            total = torch.zeros(*normalizer.top.shape, v.size(-1), dtype=acc, device=q.device)
            for tile in chosen.tiles(rows, columns, cut.keys):
                probs, before = normalizer.add(_logits(q[rows], k, tile, some, scale)[0])
                values = tile.take(v[:, some] if many else v, acc)
                part = torch.einsum(f"qhk,{tile.letters(many)}->qhd", probs, values)
                total = total.mul_(before[..., None]).add_(part)
                del probs, values, part
            norm = normalizer.total.masked_fill(normalizer.total == 0, 1.0)
            out[rows, some] = total.div_(norm[..., None]).to(v.dtype)
            lse[rows, some] = normalizer.lse()
    return out, lse


def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    chosen: Chosen,
    scale: float,
    budget: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), in fp32 (or fp64)."""
    acc = wide(q, k)
    many = v.ndim == 3
    dq = torch.zeros(q.shape, dtype=acc, device=q.device)
    dk, dv = (torch.zeros(x.shape, dtype=acc, device=x.device) for x in (k, v))
    cut = _attention_cut(q, k, v, chosen, budget, backward=True)
    for rows, columns in chosen.blocks(cut.rows):
        for some in groups(q.size(1), cut.heads):
            query, do = q[rows, some].to(acc), dout[rows, some].to(acc)
            delta = (do * out[rows, some]).sum(-1, keepdim=True)
            base = lse[rows, some].masked_fill(lse[rows, some] == float("-inf"), 0.0)
            own = some if many else None
            for tile in chosen.tiles(rows, columns, cut.keys):
                logits, keys = _logits(q[rows], k, tile, some, scale)
                probs = logits.sub_(base[..., None]).exp_()
                letters = tile.letters(many)
                values = tile.take(v[:, some] if many else v, acc)
                tile.add(dv, torch.einsum(f"qhk,qhd->{letters}", probs, do), own)
                grad = torch.einsum(f"qhd,{letters}->qhk", do, values).sub_(delta)
                grad = grad.mul_(probs).mul_(scale)
                del probs, values
                dq[rows, some] += torch.einsum(f"qhk,{letters}->qhd", grad, keys)
                tile.add(dk, torch.einsum(f"qhk,qhd->{letters}", grad, query), own)
    return dq, dk, dv


def _attention_cut(q: Tensor, k: Tensor, v: Tensor, chosen: Chosen, budget: int, *, backward: bool) -> Cut:
    size = torch.finfo(wide(q, k)).bits // 8
    dim, value, many = q.size(2), v.size(-1), k.ndim == 3
    gathered = chosen.indices is not None

    def cost(r: int, w: int, h: int) -> int:
        keys = (r if gathered else 1) * w * (h if many else 1)
        # Forward: logits and the copy that a product makes; rows and keys beside those of the product.
        # Backward: probabilities and their gradient, and gradients of keys and values of the tile.
        copies = 2 if backward else 1
        held = 2 * copies * r * w * h + copies * 2 * (r * h * (dim + value) + keys * (dim + value))
        return size * held + r * w * 26

    return fit(q.size(0), chosen.width, q.size(1), cost, budget)


def attend(q: Tensor, k: Tensor, v: Tensor, chosen: Chosen, scale: float, budget: int) -> Tensor:
    """`Attention.apply`, typed."""
    out: Tensor = Attention.apply(q, k, v, chosen, scale, budget)  # type: ignore[no-untyped-call]
    return out


def loss(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    target: Target,
    chosen: Chosen,
    factor: Tensor,
    budget: int,
    *,
    scoring: Scoring = PLAIN,
) -> Tensor:
    """`Loss.apply`, typed."""
    value: Tensor = Loss.apply(q, k, weights, target, chosen, factor, budget, scoring)  # type: ignore[no-untyped-call]
    return value
