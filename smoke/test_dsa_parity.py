"""Megatron's DSAttention: two context-parallel ranks against one, and one against a dense fp64 reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from dsa_cases import AGAINST_FP64, CASES, PARITY, Case, Results, run_megatron, run_reference
from megatron_fixtures import groups_of, relative_error, run_ranks, worst
from mutations import MUTATIONS, Mutation

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

#: A defect moves some result by more than a thousand times the tolerance.
DEFECT = 2e-3
#: Mutations are tried on one case of each layout; between them they cover both paths and both losses.
MUTATED = [
    Case(layout="sbhd", absorbed=True, sparse_loss=False),
    Case(layout="thd", absorbed=False, sparse_loss=True),
]


def _measure(rank: int, device: torch.device) -> dict[tuple[str, int | str], Results]:
    one, two = groups_of(1), groups_of(2)
    results = {}
    for case in CASES:
        results[str(case), 1] = run_megatron(case, one, one, device)
        results[str(case), 2] = run_megatron(case, two, one, device)
    for mutation in MUTATIONS:
        with mutation.applied():
            for case in MUTATED:
                results[str(case), mutation.name] = run_megatron(case, two, one, device, **mutation.settings)
    return results


@pytest.fixture(scope="module")
def measured() -> dict[tuple[str, int | str], Results]:
    """Every case on one and on two ranks."""
    return run_ranks(2, _measure)[0]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_context_parallel_ranks_equal_one(
    case: Case, measured: dict[tuple[str, int | str], Results], record_property: Callable[[str, Any], None]
) -> None:
    one, two = measured[str(case), 1], measured[str(case), 2]
    for name in one:
        record_property(name, relative_error(two[name], one[name]))
    error, name = worst(two, one)
    assert error <= PARITY, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_rank_equals_the_dense_fp64_reference(
    case: Case, measured: dict[tuple[str, int | str], Results], record_property: Callable[[str, Any], None]
) -> None:
    got, wanted = measured[str(case), 1], run_reference(case)
    for name in wanted:
        record_property(name, relative_error(got[name], wanted[name]))
    error, name = worst(got, wanted)
    assert error <= AGAINST_FP64, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("case", MUTATED, ids=str)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_a_defect_is_noticed_where_it_acts_and_only_there(
    case: Case,
    mutation: Mutation,
    measured: dict[tuple[str, int | str], Results],
    record_property: Callable[[str, Any], None],
) -> None:
    error, name = worst(measured[str(case), mutation.name], run_reference(case))
    record_property(f"worst: {name}", error)
    if case.layout in mutation.layouts:
        assert error > DEFECT, f"not noticed: worst is {name} with {error:.2e}"
    else:
        assert error <= AGAINST_FP64, f"{name}: relative error {error:.2e}"
