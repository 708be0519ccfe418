"""The hooks megatron-core 0.19.2 looks up in a DSA kernel backend (`dsa_kernels.py`).

They make `dsa_kernel_backend: dsv32.dsa` work.

Layouts are Megatron's: query [sq, b, H, 576], key [sk, b, 1, 576] (absorbed MLA), indexer q [sq, b, Hi, 128],
k [sk, b, 128], weights [sq, b, Hi], top-k int32 [b, sq, topk]. Bounds are per row and on the device, so
packed (thd) sequences and the front and back chunks of context parallelism need no case of their own: the
keys of all ranks are in global order by then, and a row is scored against the keys its bounds allow and no
others. Returning None makes Megatron fall back to its quadratic reference; this backend does so only where a
call is outside its contract, says why, and raises instead in strict mode.
"""

# ruff: noqa: ANN401  # Megatron's own types are not imported: this package runs without Megatron
from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsv32.dsa.attention import attend, attend_all
from dsv32.dsa.loss import LossInputs, indexer_loss
from dsv32.dsa.plan import Bounds, causal_bounds, loss_factor
from dsv32.dsa.selection import select
from dsv32.dsa.settings import Settings, decline


def _settings(config: Any | None) -> Settings:
    """Settings from the environment; Megatron's deterministic mode switches ours on."""
    settings = Settings.from_env()
    if getattr(config, "deterministic_mode", False) and not settings.deterministic:
        return replace(settings, deterministic=True)
    return settings


def _bounds(starts: Tensor, ends: Tensor, sk: int, plain_causal: bool = False) -> Bounds:
    return Bounds(
        starts=starts.to(torch.int32).clamp(0, sk).contiguous(),
        ends=ends.to(torch.int32).clamp(0, sk).contiguous(),
        sk=sk,
        causal_offset=0 if plain_causal else None,
    )


def _valid_rows(rows: Tensor | None, b: int, sq: int) -> Tensor | None:
    if rows is None:
        return None
    rows = rows.to(torch.bool)
    return rows[None].expand(b, sq) if rows.ndim == 1 else rows.expand(b, sq)


def run_fused_qk_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    index_topk: int,
    starts: Tensor,
    ends: Tensor,
    block_size: int,
    use_relu: bool = True,
    **_: Any,
) -> tuple[Tensor, Tensor | None] | None:
    """Top-k keys of every row: (int32 [b, sq, min(topk, sk)] ascending with -1 for empty, None)."""
    del block_size  # blocks are cut by bytes, not rows
    settings = _settings(None)
    bounds = _bounds(starts, ends, k.size(0))
    found = [
        select(q[:, i], k[:, i], weights[:, i], bounds, index_topk, settings, relu=use_relu)[0]
        for i in range(q.size(1))
    ]
    return torch.stack(found), None


def run_fused_qk_topk_with_loss(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    index_topk: int,
    starts: Tensor,
    ends: Tensor,
    block_size: int,
    query: Tensor,
    key: Tensor,
    softmax_scale: float,
    loss_coeff: float,
    pg_collection: Any,
    query_valid_rows: Tensor | None = None,
    calculate_per_token_loss: bool = False,
    use_relu: bool = True,
    config: Any | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None, Tensor] | None:
    """Top-k and the sparse KL loss: (int32 [b, sq, topk], None, fp32 scalar).

    query and key get no gradient.
    """
    del block_size
    settings = _settings(config)
    if key.ndim == 4 and key.size(2) != 1:
        decline(settings, "indexer loss", f"{key.size(2)} key heads, only absorbed MLA (1) is covered")
        return None
    bounds = _bounds(starts, ends, k.size(0))
    b, sq = q.size(1), q.size(0)
    rows = _valid_rows(query_valid_rows, b, sq)
    factor = loss_factor(loss_coeff, rows, b * sq, calculate_per_token_loss, q.device)
    found, losses = [], []
    for i in range(b):
        indices, picked = select(q[:, i], k[:, i], weights[:, i], bounds, index_topk, settings, relu=use_relu)
        kv = key[:, i].reshape(key.size(0), -1).detach().contiguous()
        with torch.no_grad():
            lse = attend(query[:, i].detach(), kv, indices, softmax_scale, _d_v(kv), settings, bounds)[1]
        inputs = _loss_inputs(
            query, kv, i, softmax_scale, bounds, use_relu, lse, indices, picked, rows, pg_collection
        )
        losses.append(indexer_loss(q[:, i], k[:, i], weights[:, i], inputs, factor, True, settings))
        found.append(indices)
    return torch.stack(found), None, torch.stack(losses).sum()


def run_fused_absorbed_sparse_attention(
    query: Tensor,
    key: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    v_channels: int,
    topk_length: Tensor | None = None,
) -> Tensor | None:
    """Sparse attention in the latent space: [sq, b, H, v_channels]."""
    settings = _settings(None)
    if key.ndim != 4 or key.size(2) != 1 or query.size(-1) != key.size(-1):
        decline(
            settings, "sparse attention", f"key {tuple(key.shape)} is not one shared head of query's size"
        )
        return None
    if topk_length is not None:
        slot = torch.arange(topk_indices.size(-1), device=topk_indices.device)
        topk_indices = topk_indices.masked_fill(slot >= topk_length[..., None], -1)
    outs = []
    for i in range(query.size(1)):
        indices = topk_indices[i].to(torch.int32)
        outs.append(attend(query[:, i], key[:, i, 0], indices, softmax_scale, v_channels, settings, None)[0])
    return torch.stack(outs, dim=1)


def run_fused_dsa_attention(
    *,
    config: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    up_v_weight: Tensor | None,
    q_indexer: Tensor,
    k_indexer: Tensor,
    indexer_weights: Tensor,
    indexer_topk: int,
    softmax_scale: float,
    loss_coeff: float,
    sparse_loss: bool,
    calculate_per_token_loss: bool,
    absorbed_mla: bool,
    varlen_starts: Tensor | None,
    varlen_ends: Tensor | None,
    key_positions: Tensor | None,
    query_valid_rows: Tensor | None,
    varlen_is_plain_causal: bool = False,
    use_relu: bool = True,
    pg_collection: Any | None = None,
    attn_mask_type: Any | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None] | None:
    """The whole layer: (output [sq, b, H * dv], indexer loss fp32 scalar or None), sparse and dense loss.

    One call, so that the forward's log-sum-exp serves the KL target and nothing is computed twice.
    """
    settings = _settings(config)
    if not absorbed_mla or value is not None or up_v_weight is None or key.size(2) != 1:
        decline(settings, "layer", "only absorbed MLA with one shared key head is covered")
        return None
    if key_positions is not None:
        decline(settings, "layer", "explicit key positions are not covered")
        return None
    if varlen_starts is None and attn_mask_type is None:
        decline(settings, "layer", "an arbitrary attention mask is not covered")
        return None
    sq, b = query.shape[:2]
    sk, d_v = key.size(0), int(config.kv_lora_rank)
    if varlen_starts is None or varlen_ends is None:
        bounds = causal_bounds(sq, sk, query.device, offset=0)
    else:
        bounds = _bounds(varlen_starts, varlen_ends, sk, varlen_is_plain_causal)
    rows = _valid_rows(query_valid_rows, b, sq)
    want_loss = loss_coeff > 0 and torch.is_grad_enabled()
    factor = loss_factor(loss_coeff, rows, b * sq, calculate_per_token_loss, query.device)
    everything = indexer_topk >= sk  # the dense warm-up, or a short sequence: nothing to select
    outs, losses = [], []
    for i in range(b):
        iq, ik, iw = q_indexer[:, i], k_indexer[:, i], indexer_weights[:, i]
        kv, lse, indices, picked = key[:, i, 0], None, None, None
        if everything:
            out = attend_all(query[:, i], kv, softmax_scale, d_v, settings, bounds)
        else:
            indices, picked = select(iq, ik, iw, bounds, indexer_topk, settings, relu=use_relu)
            out, lse = attend(query[:, i], kv, indices, softmax_scale, d_v, settings, bounds)
        outs.append(out)
        if want_loss:
            inputs = _loss_inputs(
                query,
                kv.detach().contiguous(),
                i,
                softmax_scale,
                bounds,
                use_relu,
                lse,
                indices,
                picked,
                rows,
                pg_collection,
            )
            sparse = sparse_loss and not everything
            losses.append(indexer_loss(iq, ik, iw, inputs, factor, sparse, settings))
    output = torch.einsum("sbhc,hdc->sbhd", torch.stack(outs, dim=1), up_v_weight).reshape(sq, b, -1)
    return output, torch.stack(losses).sum() if losses else None


def _d_v(kv: Tensor) -> int:
    """Value channels where the caller only wants the log-sum-exp: DeepSeek's 512 of 576, else all."""
    return 512 if kv.size(-1) == 576 else kv.size(-1)


def _loss_inputs(
    query: Tensor,
    kv: Tensor,
    i: int,
    scale: float,
    bounds: Bounds,
    relu: bool,
    lse: Tensor | None,
    indices: Tensor | None,
    picked: Tensor | None,
    rows: Tensor | None,
    pg_collection: Any | None,
) -> LossInputs:
    return LossInputs(
        query=query[:, i].detach().contiguous(),
        kv=kv,
        scale=scale,
        bounds=bounds,
        relu=relu,
        lse=None if lse is None else lse.detach(),
        indices=indices,
        picked=picked,
        rows=None if rows is None else rows[i].contiguous(),
        tp_group=getattr(pg_collection, "tp", None),
    )
