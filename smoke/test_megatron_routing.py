"""Group-limited routing as DeepSeek defines it."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import group_limited_topk


@pytest.mark.parametrize(("top_k", "groups_kept"), [(8, 4), (2, 2), (4, 4), (4, 1), (6, 2)])
def test_groups_are_chosen_by_their_two_best_experts(top_k: int, groups_kept: int) -> None:
    """Written out per token, from the gate of DeepSeek-V3's published inference code."""
    tokens, experts, groups = 64, 32, 4
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(top_k))
    _, chosen = group_limited_topk(scores, top_k, tokens, experts, groups, groups_kept)
    size = experts // groups
    for row, got in zip(scores.tolist(), chosen.tolist(), strict=True):
        by_group = [row[first : first + size] for first in range(0, experts, size)]
        best = sorted(range(groups), key=lambda g: -sum(sorted(by_group[g])[-2:]))[:groups_kept]
        allowed = [expert for expert in range(experts) if expert // size in best]
        assert set(got) == set(sorted(allowed, key=lambda expert: -row[expert])[:top_k])
