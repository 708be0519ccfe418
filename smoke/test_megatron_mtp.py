"""Multi-token prediction: packed rows stay in their sequence, its loss is that of all ranks' tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer.multi_token_prediction import (
    MTPLossLoggingHelper,
    process_mtp_loss,
    roll_tensor,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_fixtures import groups_of, relative_error, run_ranks
from torch import Tensor
from torch.nn import functional

from dsv32 import cpu
from dsv32.mcore.packing import packed_params, zigzag_rows

#: Tokens of each packed sequence, and the rows it takes with its padding: multiples of 2 x cp for two ranks.
LENGTHS, PADDED = (5, 1, 8, 3), (8, 4, 8, 8)
ROWS, DEPTHS, HIDDEN, VOCABULARY = 16, 2, 8, 12
#: fp64: a few hundred roundings of 1e-16.
FP64 = 1e-13


def _rolled(rank: int, device: torch.device) -> dict[int, Tensor]:
    """Numbered rows after a roll on one and on two ranks, by the number of ranks."""
    got = {}
    for cp_group in (groups_of(1), groups_of(2)):
        size = cp_group.size()
        local = zigzag_rows(PADDED, cp_size=size, cp_rank=rank % size)
        packed = packed_params(
            LENGTHS, padded_lengths=PADDED, cp_size=size, cp_rank=rank % size, device=device
        )
        numbers = torch.arange(1, sum(PADDED) + 1, device=device)[local.to(device)]
        got[size], _ = roll_tensor(numbers[None], cp_group=cp_group, packed_seq_params=packed)
    return got


def test_packed_rows_take_the_next_row_of_their_padded_sequence() -> None:
    """Megatron pull requests 4495 and 6205: the boundaries were those of the tokens without padding."""
    numbers = torch.arange(1, sum(PADDED) + 1).split(PADDED)
    wanted = torch.cat([torch.cat((part[1:], torch.zeros(1, dtype=torch.int64))) for part in numbers])
    for rank, got in enumerate(run_ranks(2, _rolled)):
        assert torch.equal(got[1][0].cpu(), wanted)
        assert torch.equal(got[2][0].cpu(), wanted[zigzag_rows(PADDED, cp_size=2, cp_rank=rank)])


def _loss(rank: int, device: torch.device, per_token: bool) -> dict[int, tuple[Tensor, float]]:
    """Gradient of the hidden states of the whole batch, and the logged loss, on one and on two ranks.

    Most of the tokens with a loss are on the second rank, and a token that moves to the first has no other
    there.
    """
    if device.type == "cpu":
        cpu.install()
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        mtp_num_layers=DEPTHS,
        mtp_loss_scaling_factor=0.3,
        calculate_per_token_loss=per_token,
    )
    generator = torch.Generator().manual_seed(1)
    drawn: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    hidden = torch.randn(1 + DEPTHS, ROWS, 1, HIDDEN, **drawn)
    head = torch.randn(VOCABULARY, HIDDEN, **drawn).to(device)
    labels = torch.randint(VOCABULARY, (1, ROWS), generator=generator)
    mask = torch.zeros(1, ROWS, dtype=torch.float64)
    mask[:, 4:11] = 1

    def output_layer(states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return states @ head.T, None

    def cross_entropy(wanted: Tensor, logits: Tensor) -> Tensor:
        return functional.cross_entropy(logits.permute(1, 2, 0), wanted, reduction="none")

    got = {}
    for cp_group in (groups_of(1), groups_of(2)):
        size = cp_group.size()
        rows = zigzag_rows([ROWS], cp_size=size, cp_rank=rank % size)
        mine = hidden[:, rows].flatten(0, 1).to(device).requires_grad_()
        MTPLossLoggingHelper.tracker.clear()
        process_mtp_loss(
            hidden_states=mine,
            labels=labels[:, rows].to(device),
            loss_mask=mask[:, rows].to(device),
            output_layer=output_layer,
            output_weight=None,
            runtime_gather_output=True,
            is_training=True,
            compute_language_model_loss=cross_entropy,
            config=config,
            cp_group=cp_group,
        ).sum().backward()
        MTPLossLoggingHelper.reduce_metrics_in_tracker()
        assert mine.grad is not None
        whole = torch.zeros(1 + DEPTHS, ROWS, 1, HIDDEN, dtype=torch.float64, device=device)
        whole[:, rows] = mine.grad.unflatten(0, (1 + DEPTHS, -1))
        torch.distributed.all_reduce(whole)  # over the world: two ranks' shares, or twice the whole
        whole /= 2 if size == 1 or not per_token else 1
        got[size] = (whole.cpu(), float(MTPLossLoggingHelper.tracker["loss_values"].double().sum()))
    return got


@pytest.mark.parametrize("per_token", [True, False], ids=["per token", "mean over ranks"])
def test_prediction_loss_is_that_of_all_context_parallel_ranks_tokens(
    per_token: bool, record_property: Any
) -> None:
    """Megatron pull request 7498: each rank divided by its own number of tokens."""
    for got in run_ranks(2, _loss, per_token):
        (one, one_logged), (two, two_logged) = got[1], got[2]
        depths = slice(1, None)  # the decoder's own loss is not scaled here
        record_property("gradient", relative_error(two[depths], one[depths]))
        record_property("logged", abs(two_logged / one_logged - 1))
        assert relative_error(two[depths], one[depths]) <= FP64
        # The log is kept in fp32.
        assert two_logged == pytest.approx(one_logged, rel=1e-6)
