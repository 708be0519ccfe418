"""DSAttention on 1, 2 and 4 context-parallel ranks, each against the dense fp64 reference.

Every cell compares the output, the gradient of every input and parameter, and the indexer loss.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from dsa_cases import (
    AGAINST_FP64,
    CASES,
    PADDED_CASES,
    Case,
    Results,
    run_megatron,
    run_reference,
)
from megatron_fixtures import fits, groups_of, relative_error, run_ranks, skip_unless_fits, worst

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

ALL = [*CASES, *PADDED_CASES]
SIZES = (1, 2, 4)
#: Megatron's own code of [sq, sk]; what stands in for it under a byte budget; our kernel backend.
WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "dsv32.dsa.unfused": {"dsa_unfused_module": "dsv32.dsa.unfused"},
    "dsv32.dsa": {"dsa_kernel_backend": "dsv32.dsa"},
}
#: The least that is allowed: these small problems are then cut into several tiles of rows, keys and heads.
BUDGET = 1 << 16


def _measure(rank: int, device: torch.device, sizes: list[int]) -> dict[tuple[str, str, int], Results]:
    os.environ["DSV32_DSA_BYTE_BUDGET"] = str(BUDGET)
    groups = {size: groups_of(size) for size in sizes}
    return {
        (way, str(case), size): run_megatron(
            case,
            groups[size],
            groups[1],
            device,
            # Not absorbed is Megatron's own path by design; everything else must run in the backend.
            dsa_kernel_strict=case.absorbed,
            **settings,
        )
        for way, settings in WAYS.items()
        for case in ALL
        for size in sizes
    }


@pytest.fixture(scope="module")
def measured() -> dict[tuple[str, str, int], Results]:
    """Every case on every number of ranks that there are devices for, each way."""
    sizes = [size for size in SIZES if fits(size)]
    return run_ranks(max(sizes), _measure, sizes)[0]


@pytest.fixture(scope="module")
def wanted() -> dict[str, Results]:
    """The reference of every case."""
    return {str(case): run_reference(case) for case in ALL}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", ALL, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_context_parallel_ranks_equal_the_fp64_reference(
    way: str,
    case: Case,
    size: int,
    measured: dict[tuple[str, str, int], Results],
    wanted: dict[str, Results],
    record_property: Callable[[str, Any], None],
) -> None:
    skip_unless_fits(size)
    got, reference = measured[way, str(case), size], wanted[str(case)]
    for name in reference:
        record_property(name, relative_error(got[name], reference[name]))
    error, name = worst(got, reference)
    assert error <= AGAINST_FP64, f"{name}: relative error {error:.2e}"
