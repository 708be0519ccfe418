"""DeepSeek sparse attention for one sequence, dense and in fp64, written from the paper.

Source:  DeepSeek-V3.2-Exp technical report, section 2.1: index score (eq. 1), attention over the selected
tokens (eq. 2), the indexer's KL loss over all tokens in the dense warm-up (eq. 3) and over the selected ones
in the sparse stage (eq. 4).  Nothing here is shared with Megatron.  The Hadamard rotation of the indexer is
left out: it is orthonormal and cancels in every product of a query with a key.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class IndexerWeights:
    """Parameters of the lightning indexer: H heads of size d on hidden size h and query rank r."""

    wq_b: Tensor  # [H * d, r]
    wk: Tensor  # [d, h]
    k_norm_weight: Tensor  # [d]
    k_norm_bias: Tensor  # [d]
    weights_proj: Tensor  # [H, h]

    @property
    def heads(self) -> int:
        return self.weights_proj.shape[0]


def rope(x: Tensor, *, size: int, base: float = 10000.0) -> Tensor:
    """Rotate the first ``size`` channels of x [s, ..., d] by position, halves against each other.

    The table of angles is computed in fp32, as DeepSeek's own code does it: it is part of the model's
    definition, and an fp64 table would differ by the rounding of position * frequency.
    """
    frequency = 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    angle = torch.outer(torch.arange(x.shape[0], dtype=torch.float32), frequency).double()
    angle = angle.reshape(x.shape[0], *[1] * (x.dim() - 2), size // 2)
    first, second = x[..., : size // 2], x[..., size // 2 : size]
    return torch.cat(
        (
            first * angle.cos() - second * angle.sin(),
            second * angle.cos() + first * angle.sin(),
            x[..., size:],
        ),
        dim=-1,
    )


def index_scores(x: Tensor, qr: Tensor, weights: IndexerWeights, *, rope_size: int, eps: float) -> Tensor:
    """Eq. 1: I[t, s] = sum_j w[t, j] relu(q[t, j] . k[s]), from x [s, h] and qr [s, r]; [s, s]."""
    heads, size = weights.heads, weights.wk.shape[0]
    q = rope((qr @ weights.wq_b.T).view(-1, heads, size), size=rope_size)
    k = functional.layer_norm(x @ weights.wk.T, (size,), weights.k_norm_weight, weights.k_norm_bias, eps)
    k = rope(k, size=rope_size)
    w = (x @ weights.weights_proj.T) * heads**-0.5 * size**-0.5
    return torch.einsum("th,ths->ts", w, torch.einsum("thd,sd->ths", q, k).relu())


def select(scores: Tensor, *, top_k: int) -> Tensor:
    """The causal top-k of each row of [s, s] as a mask; among equal scores the smaller index wins."""
    s = scores.shape[0]
    causal = torch.ones(s, s, dtype=torch.bool).tril()
    order = scores.detach().masked_fill(~causal, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    chosen = torch.zeros_like(causal).scatter_(1, order[:, : min(top_k, s)], True)
    return chosen & causal


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def interleaved_rope(x: Tensor, *, size: int) -> Tensor:
    """Rotate the last ``size`` channels of x [s, ..., d], channel 2i against 2i + 1 as in DeepSeek's MLA.

    The result has the even channels before the odd ones; the order is the same for queries and keys and
    cancels.
    """
    pairs = x[..., -size:].unflatten(-1, (size // 2, 2)).transpose(-1, -2).flatten(-2)
    return torch.cat((x[..., :-size], rope(pairs, size=size)), dim=-1)


@dataclass(frozen=True, kw_only=True)
class MlaWeights:
    """Parameters of multi-latent attention: n heads with query/key size a + b (b with rope), value size e."""

    q_down: Tensor  # [r, h]
    q_norm: Tensor  # [r]
    q_up: Tensor  # [n * (a + b), r]
    kv_down: Tensor  # [c + b, h]
    kv_norm: Tensor  # [c]
    kv_up: Tensor  # [n * (a + e), c]
    out: Tensor  # [h, n * e]


def latent_attention(
    x: Tensor,
    mla: MlaWeights,
    indexer: IndexerWeights,
    *,
    heads: int,
    rope_size: int,
    top_k: int,
    eps: float,
    sparse_loss: bool,
) -> tuple[Tensor, Tensor]:
    """Multi-latent attention with DSA for one sequence x [s, h]: output [s, h], KL divergence of each row.

    Source: DeepSeek-V2 report, section 2.1.2 and appendix C, for the projections; no yarn.
    """
    s, rank = x.shape[0], mla.kv_norm.shape[0]
    qr = rms_norm(x @ mla.q_down.T, mla.q_norm, eps=eps)
    q = interleaved_rope((qr @ mla.q_up.T).view(s, heads, -1), size=rope_size)
    latent = x @ mla.kv_down.T
    key_rope = interleaved_rope(latent[:, rank:], size=rope_size)
    up = (rms_norm(latent[:, :rank], mla.kv_norm, eps=eps) @ mla.kv_up.T).view(s, heads, -1)
    nope = q.shape[-1] - rope_size
    k = torch.cat((up[..., :nope], key_rope[:, None].expand(-1, heads, -1)), dim=-1)
    scores = index_scores(x.detach(), qr.detach(), indexer, rope_size=rope_size, eps=eps)
    output, divergence, _ = attend(
        q,
        k,
        up[..., nope:],
        scores,
        top_k=top_k,
        softmax_scale=q.shape[-1] ** -0.5,
        sparse_loss=sparse_loss,
    )
    return output @ mla.out.T, divergence


def attend(
    q: Tensor, k: Tensor, v: Tensor, scores: Tensor, *, top_k: int, softmax_scale: float, sparse_loss: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Eq. 2 and eq. 3 or 4 for one sequence.

    Args:
        q: [s, n, d]; k: [s, n, d]; v: [s, n, e], the heads' queries, keys and values.
        scores: [s, s] from ``index_scores``.
        top_k: number of tokens each query selects.
        softmax_scale: factor of q . k.
        sparse_loss: the loss over the selected tokens rather than over all.

    Returns:
        output [s, n * e]; KL divergence of each row [s]; the selection [s, s].
    """
    s = q.shape[0]
    causal = torch.ones(s, s, dtype=torch.bool).tril()
    chosen = select(scores, top_k=top_k)
    logits = torch.einsum("tnd,snd->nts", q, k) * softmax_scale
    output = torch.einsum("nts,sne->tne", logits.masked_fill(~chosen, -torch.inf).softmax(-1), v)

    support = chosen if sparse_loss else causal
    target = logits.detach().masked_fill(~support, -torch.inf).softmax(-1).sum(0)
    target = target / target.sum(-1, keepdim=True)
    log_predicted = scores.masked_fill(~support, -torch.inf).log_softmax(-1).masked_fill(~support, 0.0)
    divergence = (torch.xlogy(target, target) - target * log_predicted).sum(-1)
    return output.flatten(1), divergence, chosen
