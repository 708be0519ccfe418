"""Dense fp64 definitions of the DSA operations: slow, small, and the yardstick of every test.

Sources: DeepSeek-V3.2 report, section 2.1 (lightning indexer, equations 1 to 4: scores, top-k, KL losses);
megatron-core 0.19.2 `dsa.py` and `dsa_indexer_loss.py` for the loss's normalisation and its 1e-10 floors.
Shapes, one sequence: q [sq, H, D], kv [sk, D] shared by all heads, values are kv[:, :d_v]; index q [sq, Hi,
Di], index k [sk, Di], weights [sq, Hi]; valid [sq, sk] bool.
"""

from __future__ import annotations

import torch
from torch import Tensor

EPS = 1e-10  # megatron-core 0.19.2 dsa_indexer_loss.INDEXER_LOSS_EPS


def valid_mask(starts: Tensor, ends: Tensor, sk: int) -> Tensor:
    """[sq, sk] bool: starts[i] <= j < ends[i]."""
    j = torch.arange(sk, device=starts.device)[None]
    return (j >= starts[:, None]) & (j < ends[:, None])


def selected_mask(indices: Tensor, sk: int) -> Tensor:
    """[sq, sk] bool from int [sq, topk] indices with -1 for an empty slot."""
    out = torch.zeros(indices.size(0), sk + 1, dtype=torch.bool, device=indices.device)
    out.scatter_(1, torch.where(indices < 0, sk, indices).long(), True)
    return out[:, :sk]


def scores(q: Tensor, k: Tensor, weights: Tensor, relu: bool = True) -> Tensor:
    """I[i, j] = sum_h weights[i, h] * relu(q[i, h] . k[j]); fp64 [sq, sk]."""
    dots = torch.einsum("qhd,kd->qhk", q.double(), k.double())
    dots = dots.relu() if relu else dots
    return torch.einsum("qhk,qh->qk", dots, weights.double())


def topk(values: Tensor, valid: Tensor, count: int) -> Tensor:
    """int32 [sq, count]: the `count` largest valid values, ascending, -1 last.

    Ties go to the smaller index.
    """
    sk = values.size(1)
    order = (
        values.masked_fill(~valid, float("-inf"))
        .sort(dim=-1, descending=True, stable=True)
        .indices[:, :count]
    )
    keep = torch.gather(valid, 1, order)
    out = torch.where(keep, order, sk).sort(-1).values
    return torch.where(out < sk, out, -1).int()


def attention(q: Tensor, kv: Tensor, allowed: Tensor, scale: float, d_v: int) -> tuple[Tensor, Tensor]:
    """fp64 output [sq, H, d_v] and lse [sq, H]; a row with no allowed key gives 0 and -inf."""
    logits = torch.einsum("qhd,kd->qhk", q.double(), kv.double()) * scale
    logits = logits.masked_fill(~allowed[:, None], float("-inf"))
    some = allowed.any(-1)[:, None, None]
    probs = torch.where(some, logits, torch.zeros_like(logits)).softmax(-1)
    probs = torch.where(some & allowed[:, None], probs, torch.zeros_like(probs))
    return torch.einsum("qhk,kd->qhd", probs, kv.double()[:, :d_v]), logits.logsumexp(-1)


def kl_sum(
    query: Tensor,
    key: Tensor,
    scale: float,
    index_scores: Tensor,
    allowed: Tensor,
    rows: Tensor | None = None,
) -> Tensor:
    """Sum over rows of KL(target || softmax(index_scores)) on `allowed`; target is detached.

    target[i, j] = sum_h softmax_j(query[i, h] . key[j] * scale), L1-normalised over j. rows: bool [sq],
    counted rows.
    """
    logits = torch.einsum("qhd,kd->qhk", query.double(), key.double()) * scale
    some = allowed.any(-1)
    logits = logits.masked_fill(~allowed[:, None], float("-inf"))
    probs = torch.where(some[:, None, None], logits, torch.zeros_like(logits)).softmax(-1)
    target = (probs * allowed[:, None]).sum(1).detach()
    target = target / target.sum(-1, keepdim=True).clamp_min(EPS)
    masked = index_scores.masked_fill(~allowed, float("-inf"))
    logp = torch.where(some[:, None], masked, torch.zeros_like(masked)).log_softmax(-1)
    terms = target * (target.clamp_min(EPS).log() - torch.where(allowed, logp, torch.zeros_like(logp)))
    terms = torch.where(allowed, terms, torch.zeros_like(terms))
    if rows is not None:
        terms = terms * rows[:, None]
    return terms.sum()
