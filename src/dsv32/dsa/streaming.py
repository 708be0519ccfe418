"""What the ways to compute DSA share: the type that sums are in, and a row's KL with its gradient."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(*tensors: Tensor) -> torch.dtype:
    """The accumulation type for these inputs."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


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
