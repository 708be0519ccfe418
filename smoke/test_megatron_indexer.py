"""The indexer: precision of its head weights, freezing, and the choice among equal scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dsa_cases import CASES, THD_LENGTHS, build, indexer_state, make_config, make_inputs, single_groups
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant import dsa

from dsv32.mcore.packing import packed_params

pytestmark = pytest.mark.usefixtures("cpu_only")  # tensors of this process, on the CPU


def _indexer(**changes: Any) -> dsa.DSAIndexer:
    one = single_groups()
    return build(make_config(CASES[0], **changes), one.cp, one.tp).indexer


def test_weights_proj_stays_in_fp32_through_a_cast_to_bf16() -> None:
    indexer = _indexer(bf16=True, params_dtype=torch.bfloat16)
    weight = indexer.linear_weights_proj.weight
    assert weight.dtype == torch.float32, "built in params_dtype"
    wanted = indexer_state()["linear_weights_proj.weight"]
    torch.nn.Sequential(indexer).bfloat16()  # as Float16Module does it
    assert indexer.linear_wk.weight.dtype == torch.bfloat16
    assert indexer.linear_weights_proj.weight is weight
    assert torch.equal(weight, wanted), "the cast rounded the parameter"

    x = torch.randn(24, 1, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    qr = torch.randn(24, 1, 32, generator=torch.Generator().manual_seed(4)).bfloat16()
    _, _, weights = indexer.forward_before_topk(x, qr)
    exact = x.double() @ wanted.double().T * (16**-0.5 * 32**-0.5)
    # A sum of 64 products in fp32; bf16 would be off by 2e-3.
    torch.testing.assert_close(weights.double(), exact, rtol=0, atol=1e-6 * exact.abs().max().item())


@pytest.mark.parametrize("coefficient", [None, 0.0])
def test_indexer_without_a_loss_is_frozen(coefficient: float | None) -> None:
    frozen = _indexer(dsa_indexer_loss_coeff=coefficient)
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    trained = _indexer(dsa_indexer_loss_coeff=0.01)
    assert all(parameter.requires_grad for parameter in trained.parameters())


def test_equal_scores_go_to_the_smaller_index() -> None:
    """With one head and a relu most scores are exactly 0; found by chance, their order would vary with k."""
    generator = torch.Generator().manual_seed(5)
    rows = 256
    q, k = (torch.randn(rows, 1, *shape, generator=generator) for shape in ((1, 4), (4,)))
    weights = torch.ones(rows, 1, 1)
    starts, ends = torch.zeros(rows, dtype=torch.int64), torch.arange(1, rows + 1)
    scores, _ = dsa.fused_qk_topk_naive(q, k, weights, rows, varlen_starts=starts, varlen_ends=ends)
    ties = int((scores == 0).sum())
    assert ties > rows**2 // 8, "the case lost its ties"
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    for top_k in (1, 2, 7, 16, 64, 200):
        _, chosen = dsa.fused_qk_topk_naive(q, k, weights, top_k, varlen_starts=starts, varlen_ends=ends)
        for row in range(rows):
            count = min(top_k, row + 1)
            assert set(chosen[0, row, :count].tolist()) == set(order[0, row, :count].tolist()), (top_k, row)
            assert (chosen[0, row, count:] == -1).all()


def test_grad_and_no_grad_forward_choose_the_same_tokens_and_give_the_same_output() -> None:
    one = single_groups()
    case = CASES[-1]
    attention = build(make_config(case, dsa_indexer_n_heads=2), one.cp, one.tp, state=False)
    inputs = make_inputs(case)
    with torch.no_grad():
        recorded = _attend(attention, inputs)
    trained = _attend(attention, inputs)
    assert trained.requires_grad
    assert torch.equal(recorded, trained.detach()), "the ratio of the two forwards is not 1"


def _attend(attention: dsa.DSAttention, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return attention(
        inputs["query"],
        inputs["key"],
        None,
        attention_mask=None,
        x=inputs["x"].unsqueeze(1),
        qr=inputs["qr"].unsqueeze(1),
        attn_mask_type=AttnMaskType.causal,
        packed_seq_params=packed_params(THD_LENGTHS),
        up_v_weight=inputs["up_v"],
    )
