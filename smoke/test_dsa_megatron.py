"""Our hooks behind megatron-core's dispatcher, and our losses against its reference loss, on CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv32 import dsa as ours

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
kernels = pytest.importorskip("megatron.core.transformer.experimental_attention_variant.dsa_kernels")
megatron = pytest.importorskip("megatron.core.transformer.experimental_attention_variant.dsa")
enums = pytest.importorskip("megatron.core.transformer.enums")

SQ, BATCH, HEADS, INDEX_HEADS, TOPK, SCALE, COEFF = 40, 2, 4, 16, 8, 0.2, 0.7
ONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
GROUPS = SimpleNamespace(tp=ONE, cp=ONE)
CONFIG = SimpleNamespace(
    dsa_kernel_backend="dsv32.dsa", attention_backend=None, kv_lora_rank=16, deterministic_mode=False
)


@pytest.fixture
def problem() -> dict[str, Any]:
    """fp32 inputs; 16 index heads, so that no score is exactly 0 and no tie is broken two ways."""
    gen = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen)

    return {
        "q": rand(SQ, BATCH, INDEX_HEADS, 16), "k": rand(SQ, BATCH, 16), "w": rand(SQ, BATCH, INDEX_HEADS),
        "query": rand(SQ, BATCH, HEADS, 24), "key": rand(SQ, BATCH, 1, 24), "up": rand(HEADS, 5, 16),
        "starts": torch.zeros(SQ).int(), "ends": (torch.arange(SQ) + 1).int(),
    }  # fmt: skip


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let megatron-core's dispatcher call our module, as `dsa_kernel_backend: dsv32.dsa` does."""
    monkeypatch.setattr(kernels, "_load_backend", lambda config: ours)


def layer(p: dict[str, Any], leaves: list[torch.Tensor], sparse: bool, rows: Any, per_token: bool) -> Any:
    """The whole-layer hook, called as DSAttention calls it."""
    return kernels.run_fused_dsa_attention(
        config=CONFIG, query=p["query"], key=p["key"], value=None, up_v_weight=p["up"], q_indexer=leaves[0],
        k_indexer=leaves[1], indexer_weights=leaves[2], indexer_topk=TOPK, softmax_scale=SCALE,
        loss_coeff=COEFF, sparse_loss=sparse, calculate_per_token_loss=per_token, absorbed_mla=True,
        cp_size=1, attn_mask_type=enums.AttnMaskType.causal, packed_seq_params=None,
        varlen_starts=p["starts"],
        varlen_ends=p["ends"], key_positions=None, query_valid_rows=rows, varlen_is_plain_causal=True,
        use_relu=True, pg_collection=GROUPS,
    )  # fmt: skip


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("some_rows", [True, False])
@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.usefixtures("backend")
def test_loss_and_gradients_equal_megatrons_reference(
    problem: dict[str, Any], sparse: bool, some_rows: bool, per_token: bool
) -> None:
    p = problem
    rows = (torch.arange(SQ) % 3 != 0)[None].expand(BATCH, SQ) if some_rows else None
    mine = [p[n].clone().requires_grad_() for n in ("q", "k", "w")]
    output, loss = layer(p, mine, sparse, rows, per_token)
    loss.backward()
    theirs = [p[n].clone().requires_grad_() for n in ("q", "k", "w")]
    key = p["key"].expand(-1, -1, HEADS, -1)
    indices, want = megatron.FusedDSAIndexerLoss.apply(
        theirs[0], theirs[2], theirs[1], p["query"], key, SCALE, TOPK, COEFF, None, sparse, GROUPS,
        p["starts"], p["ends"], None, rows, per_token, True,
    )  # fmt: skip
    want.backward()
    # Both are fp32: a few thousand terms of order one, summed in different orders.
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-6)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5 * b.grad.abs().max().item())
    unfused = megatron._unfused_absorbed_dsa_fn(
        p["query"], p["key"], indices, SCALE, 16, mask=None, varlen_starts=p["starts"], varlen_ends=p["ends"],
        key_positions=None,
    )  # fmt: skip
    want_output = torch.einsum("sbhc,hdc->sbhd", unfused, p["up"]).flatten(2)
    torch.testing.assert_close(output, want_output, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("backend")
def test_the_other_hooks_take_what_the_dispatcher_passes(problem: dict[str, Any]) -> None:
    p = problem
    indices, length = kernels.run_fused_qk_topk(
        CONFIG, p["q"], p["k"], p["w"], TOPK, p["starts"], p["ends"], block_size=8192
    )
    assert indices.shape == (BATCH, SQ, TOPK) and indices.dtype == torch.int32 and length is None
    again, _, loss = kernels.run_fused_qk_topk_with_loss(
        CONFIG,
        p["q"],
        p["k"],
        p["w"],
        TOPK,
        p["starts"],
        p["ends"],
        8192,
        p["query"],
        p["key"],
        SCALE,
        COEFF,
        GROUPS,
    )
    assert torch.equal(again, indices) and loss.shape == ()
    out = kernels.run_fused_absorbed_sparse_attention(CONFIG, p["query"], p["key"], indices, SCALE, 16)
    assert out.shape == (SQ, BATCH, HEADS, 16)
