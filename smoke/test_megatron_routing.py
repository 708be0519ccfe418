"""Group-limited routing as DeepSeek defines it."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.moe import moe_utils
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


def test_router_on_the_cpu_does_not_ask_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_a_gpu_only(*_: object, **__: object) -> None:
        raise AssertionError("Transformer Engine's GEMM was called for tensors on the CPU")

    monkeypatch.setattr(moe_utils, "te_general_gemm", on_a_gpu_only)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(5, 8, generator=generator, dtype=torch.float64).float().requires_grad_()
    weight = torch.randn(3, 8, generator=generator, dtype=torch.float64).float().requires_grad_()
    out = moe_utils.router_gating_linear(rows, weight, None, torch.float32)
    out.sum().backward()
    wide = rows.detach().double() @ weight.detach().double().T
    # Eight products summed in fp32.
    assert (out - wide).abs().max() <= 8 * 2**-24 * (rows.abs().double() @ weight.abs().double().T).max()
    assert rows.grad is not None and weight.grad is not None
    sums = weight.detach().double().sum(0).expand(5, 8)
    assert (rows.grad - sums).abs().max() <= 3 * 2**-24 * weight.detach().abs().sum(0).max()
    assert weight.grad.shape == weight.shape
