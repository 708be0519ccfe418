"""The memory estimate counts the parameters that a rank really has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from megatron_fixtures import run_ranks
from model_cases import Layout, make_trainer, start

from dsv32.training.memory import SEED_CASE, estimate, parameters
from dsv32.training.model import Parallel
from dsv32.training.sizes import FULL, TINY

if TYPE_CHECKING:
    import torch

LAYOUTS = [Parallel(), Parallel(tp=2), Parallel(ep=2), Parallel(pp=2), Parallel(tp=2, cp=2)]


def _count(rank: int, device: torch.device, layout: Layout) -> tuple[int, int, tuple[int, int], bool, bool]:
    start(layout)
    model = make_trainer(layout, device).plain_model
    named = list(model.named_parameters())
    numbers = [layer.layer_number - 1 for layer in model.decoder.layers]
    return (
        sum(parameter.numel() for _, parameter in named),
        sum(parameter.numel() for name, parameter in named if ".experts." in name),
        (numbers[0], numbers[-1] + 1),
        model.pre_process,
        model.post_process,
    )


@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_parameters_are_counted_exactly(parallel: Parallel) -> None:
    layout = Layout(name="count", parallel=parallel)
    for total, experts, (first, end), pre, post in run_ranks(layout.ranks, _count, layout):
        # The harness builds TINY's vocabulary as it is; the estimate pads it as a run does.
        padding = (384 - TINY.vocabulary) * TINY.hidden // parallel.tp * (pre + post)
        counted = parameters(TINY, parallel=parallel, layers=range(first, end), ends=(pre, post))
        assert counted == (total + padding, experts)


def test_seed_case_fits_an_h200_and_recompute_saves_memory() -> None:
    got = [
        estimate(size=FULL, parallel=parallel, world_size=64, sequence_length=8192, recompute=recompute)
        for parallel, recompute in SEED_CASE
    ]
    assert all(entry.total < 139 * 2**30 for entry in got)
    assert got[1].activations < got[0].activations
    assert got[1].weights == got[0].weights
    assert got[2].weights < got[0].weights, "more expert parallelism, fewer experts a rank"
