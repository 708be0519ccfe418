"""The indexer's loss: its scale under context parallelism, padding, and what is logged."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from dsa_cases import AGAINST_FP64, CASES, PADDED_CASES, PARITY, Case, Results, run_megatron, run_reference
from megatron.core.pipeline_parallel import schedules
from megatron_fixtures import groups_of, relative_error, run_ranks, worst

if TYPE_CHECKING:
    from collections.abc import Callable

    from megatron.core.transformer.transformer_config import MLATransformerConfig


def _set_scale(config: MLATransformerConfig, cp_size: int, *, legacy: bool) -> None:
    """Let Megatron's schedule set the scale of the indexer loss, as for one microbatch."""
    loss = torch.zeros(())
    outputs: tuple[Any, ...] = (loss, {}) if legacy else (loss, torch.tensor(1), {})
    schedules.forward_step_calc_loss(
        model=None,
        output_tensor=loss,
        loss_func=lambda _: outputs,
        config=config,
        vp_stage=None,
        collect_non_loss_data=False,
        num_microbatches=1,
        forward_data_store=[],
        cp_group_size=cp_size,
        is_last_stage=True,
    )


def _scaled(rank: int, device: torch.device, legacy: bool) -> tuple[Results, Results]:
    one, two = groups_of(1), groups_of(2)
    scale = partial(_set_scale, legacy=legacy)
    return (
        run_megatron(CASES[0], one, one, device, before_backward=scale),
        run_megatron(CASES[0], two, one, device, before_backward=scale),
    )


@pytest.mark.parametrize("legacy", [False, True], ids=["with token count", "legacy pair"])
def test_schedule_scales_indexer_gradients_alike_on_one_and_two_ranks(
    legacy: bool, record_property: Callable[[str, Any], None]
) -> None:
    one, two = run_ranks(2, _scaled, legacy)[0]
    for name in one:
        if name.startswith("grad indexer"):
            ratio = (two[name].norm() / one[name].norm()).item()
            record_property(f"ratio {name}", ratio)
            assert relative_error(two[name], one[name]) <= PARITY, f"{name}: two ranks / one = {ratio:.6f}"


def _padded(rank: int, device: torch.device) -> dict[tuple[str, int], Results]:
    one, two = groups_of(1), groups_of(2)
    return {
        (str(case), cp.size()): run_megatron(case, cp, one, device)
        for case in PADDED_CASES
        for cp in (one, two)
    }


@pytest.fixture(scope="module")
def padded() -> dict[tuple[str, int], Results]:
    """Every case with padding, on one and on two ranks, whose shares of real rows differ."""
    return run_ranks(2, _padded)[0]


def _check(case: Case, got: Results, record_property: Callable[[str, Any], None]) -> None:
    wanted = run_reference(case)  # of the tokens alone
    for name in wanted:
        record_property(name, relative_error(got[name], wanted[name]))
    error, name = worst(got, wanted)
    assert error <= AGAINST_FP64, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("case", PADDED_CASES, ids=str)
def test_padding_rows_change_neither_loss_nor_gradients(
    case: Case, padded: dict[tuple[str, int], Results], record_property: Callable[[str, Any], None]
) -> None:
    _check(case, padded[str(case), 1], record_property)


@pytest.mark.parametrize("case", PADDED_CASES, ids=str)
def test_unequal_real_rows_on_two_ranks_give_the_mean_over_rows(
    case: Case, padded: dict[tuple[str, int], Results], record_property: Callable[[str, Any], None]
) -> None:
    _check(case, padded[str(case), 2], record_property)
