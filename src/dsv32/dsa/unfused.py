"""What megatron-core calls in place of its own PyTorch code of [sq, sk]: `dsa_unfused_module`.

Megatron's unfused DSA holds attention scores of every head, index scores of every head and several copies of
each, for all queries and keys at once. These functions take the same arguments and give the same results,
by `dsv32.dsa.blocked`: beside inputs and results they hold no more than `DSV32_DSA_BYTE_BUDGET`. Unlike the
hooks of a kernel backend they decline nothing: sbhd and thd, absorbed and not, explicit key positions and
arbitrary masks, dense and sparse loss.

Layouts are Megatron's: query [sq, b, H, D], key [sk, b, 1 or H, D], index q [sq, b, Hi, Di], k [sk, b, Di],
weights [sq, b, Hi], indices [b, sq, top-k] with -1 in empty slots; thd has no b.
"""

# ruff: noqa: ANN401  # Megatron's own types are not imported: this package runs without Megatron
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv32.dsa import blocked, tiling
from dsv32.dsa.plan import Bounds, causal_bounds, loss_factor
from dsv32.dsa.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Masking:
    """Megatron's four ways to say which keys a row may see.

    mask: fp32 [sq, sk] or [b, sq, sk], -inf where a row may not look. varlen_starts, varlen_ends: int [sq],
    bounds on key positions. key_positions: int [sk], None where key j has position j. Nothing: causal.
    """

    mask: Tensor | None = None
    varlen_starts: Tensor | None = None
    varlen_ends: Tensor | None = None
    key_positions: Tensor | None = None

    def of(self, batch: int, sq: int, sk: int, device: torch.device) -> tiling.Visible:
        """The visible keys of one member of the batch."""
        if self.varlen_starts is None or self.varlen_ends is None:
            mask = self.mask[batch] if self.mask is not None and self.mask.ndim == 3 else self.mask
            return tiling.Visible(
                bounds=causal_bounds(sq, sk, device, offset=0), mask=None if mask is None else mask.isneginf()
            )
        starts, ends = (x.to(device).int() for x in (self.varlen_starts, self.varlen_ends))
        if self.key_positions is None:
            starts, ends = starts.clamp(0, sk), ends.clamp(0, sk)
        return tiling.Visible(
            bounds=Bounds(starts=starts, ends=ends, sk=sk),
            positions=None if self.key_positions is None else self.key_positions.to(device),
        )


def topk(
    *,
    config: Any,
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    index_topk: int,
    use_relu: bool,
    **masking: Tensor | None,
) -> Tensor:
    """Top-k keys of every row, int32 [b, sq, min(top-k, sk)] ascending with -1 last.

    With a top-k of all keys there is nothing to select: every row names all of them (one row in memory), and
    what takes the indices looks at the mask. Fused kernels only look at the indices, so that where one may
    follow the indices are written out, 4 bytes for each query and key.
    """
    sq, batch, _, _ = q.shape
    sk = k.size(0)
    rules = Masking(**masking)
    if index_topk >= sk and config.dsa_kernel_backend == "none":
        return torch.arange(sk, dtype=torch.int32, device=q.device).expand(batch, sq, sk)
    settings = Settings.from_env()
    with torch.no_grad():
        found = [
            blocked.select(
                q[:, i],
                k[:, i],
                weights[:, i],
                rules.of(i, sq, sk, q.device),
                min(index_topk, sk),
                settings.byte_budget,
                scoring=blocked.Scoring(relu=use_relu, fp8=settings.indexer == "fp8"),
            )[0]
            for i in range(batch)
        ]
    return torch.stack(found)


def topk_with_loss(
    *,
    config: Any,
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    query: Tensor,
    key: Tensor,
    index_topk: int,
    softmax_scale: float,
    loss_coeff: float,
    sparse_loss: bool,
    pg_collection: Any,
    query_valid_rows: Tensor | None,
    calculate_per_token_loss: bool,
    use_relu: bool,
    **masking: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Top-k keys (see `topk`) and the indexer's KL loss, a scalar; query and key get no gradient."""
    indices = topk(
        config=config, q=q, k=k, weights=weights, index_topk=index_topk, use_relu=use_relu, **masking
    )
    query, key = _with_batch(query).detach(), _with_batch(key).detach()
    sq, batch = q.shape[:2]
    sk = k.size(0)
    rows = None if query_valid_rows is None else query_valid_rows.to(torch.bool).expand(batch, sq)
    factor = loss_factor(loss_coeff, rows, batch * sq, calculate_per_token_loss, q.device)
    settings, rules = Settings.from_env(), Masking(**masking)
    scoring = blocked.Scoring(relu=use_relu, fp8=settings.indexer == "fp8")
    losses = []
    for i in range(batch):
        target = blocked.Target(
            query=query[:, i],
            key=_one_head(key[:, i]),
            scale=softmax_scale,
            rows=None if rows is None else rows[i],
            group=getattr(pg_collection, "tp", None),
        )
        chosen = _chosen(rules.of(i, sq, sk, q.device), indices[i] if sparse_loss else None)
        losses.append(
            blocked.loss(
                q[:, i], k[:, i], weights[:, i], target, chosen, factor, settings.byte_budget, scoring=scoring
            )
        )
    return indices, torch.stack(losses).sum()


def sparse_attention(
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    topk_indices: Tensor,
    softmax_scale: float,
    v_channels: int = 0,
    **masking: Tensor | None,
) -> Tensor:
    """Attention to the chosen keys, [sq, b, H, Dv].

    Args:
        query: [sq, b, H, D].
        key: [sk, b, 1 or H, D].
        value: [sk, b, 1 or H, Dv]; None (absorbed MLA): the first `v_channels` of the key.
        topk_indices: int [b, sq, t].
        softmax_scale: of the logits.
        v_channels: Dv where value is None.
        **masking: see `Masking`.
    """
    query, key = _with_batch(query), _with_batch(key)
    value = key[..., :v_channels] if value is None else _with_batch(value)
    sq, batch = query.shape[:2]
    sk, heads = key.size(0), max(key.size(2), value.size(2))
    key, value = (x.squeeze(2) if heads == 1 else x.expand(-1, -1, heads, -1) for x in (key, value))
    budget, rules = Settings.from_env().byte_budget, Masking(**masking)
    outs = [
        blocked.attend(
            query[:, i],
            key[:, i],
            value[:, i],
            _chosen(rules.of(i, sq, sk, query.device), topk_indices[i]),
            softmax_scale,
            budget,
        )
        for i in range(batch)
    ]
    return torch.stack(outs, dim=1)


def _with_batch(x: Tensor) -> Tensor:
    return x.unsqueeze(1) if x.ndim == 3 else x


def _one_head(x: Tensor) -> Tensor:
    """[sk, 1, D] as [sk, D]: all heads share it. Heads that are views of one head share it, too."""
    return x[:, 0] if x.size(1) == 1 or x.stride(1) == 0 else x


def _chosen(visible: tiling.Visible, indices: Tensor | None) -> tiling.Chosen:
    """As many chosen as there are keys are all visible ones; then a range of keys needs no gathering."""
    if indices is not None and indices.size(-1) >= visible.bounds.sk:
        indices = None
    return tiling.Chosen(visible=visible, indices=indices)
