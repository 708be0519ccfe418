"""The indexer's loss: its scale under context parallelism, padding, and what is logged."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from dsa_cases import (
    AGAINST_FP64,
    CASES,
    PADDED_CASES,
    PARITY,
    Case,
    Results,
    make_config,
    run_megatron,
    run_reference,
)
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock
from megatron_fixtures import groups_of, relative_error, run_ranks, worst

from dsv32 import cpu
from dsv32.mcore.layer_spec import mtp_spec

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


class _Board:
    """Stands for a TensorBoard writer."""

    def __init__(self) -> None:
        self.scalars: dict[str, float] = {}

    def add_scalar(self, name: str, value: torch.Tensor, iteration: int) -> None:
        self.scalars[name] = float(value)


def _pipeline_log(rank: int, device: torch.device) -> tuple[list[float], float]:
    """Two stages of two context-parallel ranks: the first logs layers 1 and 2 of three, the other none."""
    if device.type == "cpu":
        cpu.install()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, context_parallel_size=2)
    helper, board = dsa.DSAIndexerLossLoggingHelper, _Board()
    group = {"reduce_group": parallel_state.get_context_parallel_group()}
    first = parallel_state.is_pipeline_first_stage()

    def save(layer: int, loss: float) -> None:
        share = loss / 4 if rank % 2 else 3 * loss / 4  # of a rank's tokens
        helper.save_loss_to_tracker(torch.tensor(share, device=device), layer, num_layers=3, **group)

    if first:
        for layer, loss in ((1, 0.25), (2, 0.75), (1, 0.25), (2, 0.75)):  # two microbatches
            save(layer, loss)
    helper.reduce_loss_in_tracker(num_layers=3)
    values = helper.tracker["values"].tolist()
    helper.clean_loss_in_tracker()
    if first:
        save(1, 0.25)
        save(2, 0.75)
    helper.track_indexer_metrics(1.0, 1, board, num_layers=3)
    return values, board.scalars["indexer loss"]


def _mtp_slots(rank: int, device: torch.device) -> list[list[float]]:
    """What two prediction depths of 0.5 log behind three decoder layers: two layers, or one repeated."""
    if device.type == "cpu":
        cpu.install()
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    logged = []
    for repeated in (False, True):
        config = make_config(
            CASES[0],
            num_layers=3,
            mtp_num_layers=2,
            mtp_use_repeated_layer=repeated,
            cp_comm_type="allgather",
        )
        groups = ProcessGroupCollection.use_mpu_process_groups()
        block = MultiTokenPredictionBlock(config=config, spec=mtp_spec(config=config), pg_collection=groups)
        found = [module for module in block.modules() if isinstance(module, dsa.DSAttention)]
        helper = dsa.DSAIndexerLossLoggingHelper
        helper.tracker.clear()
        for attention in found * 2 if repeated else found:
            helper.save_loss_to_tracker(
                torch.tensor(0.5), attention.loss_slot, num_layers=5, slots=attention.loss_slots
            )
        logged.append(helper.tracker["values"].tolist())
    return logged


def test_logged_loss_has_a_slot_for_mtp_and_spans_the_pipeline() -> None:
    assert run_ranks(4, _pipeline_log) == [([0.5, 1.5, 0.0], 0.5)] * 4
    assert run_ranks(1, _mtp_slots) == [[[0.0, 0.0, 0.0, 0.5, 0.5]] * 2]
