"""Masks that DSA does not honour are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from dsa_cases import CASES, SBHD_LENGTHS, build, make_config, make_inputs, single_groups
from megatron.core.transformer.enums import AttnMaskType

if TYPE_CHECKING:
    from megatron.core.transformer.experimental_attention_variant import dsa

pytestmark = pytest.mark.usefixtures("cpu_only")  # tensors of this process, on the CPU

ROWS, BATCH = SBHD_LENGTHS[0], len(SBHD_LENGTHS)


def _causal() -> torch.Tensor:
    """Megatron's convention: True hides."""
    return torch.ones(ROWS, ROWS, dtype=torch.bool).triu(1).expand(BATCH, 1, -1, -1).clone()


def _forward(mask: torch.Tensor | None, attention: dsa.DSAttention | None = None) -> torch.Tensor:
    one = single_groups()
    attention = attention or build(make_config(CASES[0]), one.cp, one.tp)
    local = {
        name: whole.view(BATCH, ROWS, *whole.shape[1:]).transpose(0, 1)
        for name, whole in make_inputs(CASES[0]).items()
        if name != "out_grad"
    }
    return attention(
        local["query"],
        local["key"],
        local["value"],
        attention_mask=mask,
        x=local["x"],
        qr=local["qr"],
        attn_mask_type=AttnMaskType.causal,
    )


def _left_padded() -> torch.Tensor:
    mask = _causal()
    mask[1, 0, :, :5] = True
    return mask


def _sees_ahead() -> torch.Tensor:
    mask = _causal()
    mask[0, 0, 3, 4] = False
    return mask


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (_left_padded(), "left padding"),
        (_sees_ahead(), "not"),
        (torch.zeros(BATCH, 1, ROWS, ROWS, dtype=torch.bool), "not"),
        (torch.ones(1, 1, 1, ROWS, dtype=torch.bool), r"got attention_mask \(1, 1, 1, 48\)"),
    ],
    ids=["left padding", "one key ahead", "bidirectional", "key padding mask"],
)
def test_a_mask_that_is_not_causal_is_refused(mask: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _forward(mask)


def test_a_causal_mask_is_looked_at_once_and_changes_nothing() -> None:
    mask: Any = _causal()
    output = _forward(mask)
    assert torch.equal(output, _forward(None))
    with mock.patch("torch.equal", side_effect=AssertionError("compared again")):
        _forward(mask)
