"""The CPU shim does what it says, only when asked, and never beside a GPU."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron_fixtures import run_ranks

from dsv32 import cpu


def _collectives(rank: int, device: torch.device) -> dict[str, Any]:
    plain = torch.Tensor.type
    assert torch.ones(1).type() == "torch.FloatTensor", "something installed the shim before it was asked for"
    cpu.install()
    cpu.install()
    mean = torch.tensor([1.0 + 2 * rank, 4.0])
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    handle_mean = torch.full((2,), float(rank), device="cuda")
    handle = dist.all_reduce(handle_mean, op=dist.ReduceOp.AVG, async_op=True)
    handle.wait()
    part, part_mean = torch.empty(2), torch.empty(2)
    dist.reduce_scatter(part, [torch.full((2,), 1.0 + rank), torch.full((2,), 10.0 + rank)])
    dist.reduce_scatter_tensor(part_mean, torch.arange(4.0) + rank, op=dist.ReduceOp.AVG)
    torch.cuda.manual_seed(5)
    drawn = torch.rand(2, device="cuda")
    torch.manual_seed(5)
    return {
        "type": torch.ones(1).type(),
        "type changed": torch.Tensor.type is not plain,
        "devices": {torch.empty(1, device=0).device.type, drawn.device.type, mean.cuda().device.type},
        "mean": mean.tolist(),
        "asynchronous mean": handle_mean.tolist(),
        "part": part.tolist(),
        "part mean": part_mean.tolist(),
        "same generator": torch.equal(drawn, torch.rand(2)),
    }


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="needs a machine without CUDA: the shim refuses to run beside it"
)
def test_shim_completes_gloo_and_redirects_cuda() -> None:
    first, second = run_ranks(2, _collectives)
    common = {
        "type": "torch.cuda.FloatTensor",
        "type changed": True,
        "devices": {"cpu"},
        "mean": [2.0, 4.0],
        "asynchronous mean": [0.5, 0.5],
        "same generator": True,
    }
    assert first == common | {"part": [3.0, 3.0], "part mean": [0.5, 1.5]}
    assert second == common | {"part": [21.0, 21.0], "part mean": [2.5, 3.5]}


def test_shim_refuses_to_hide_a_gpu() -> None:
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        pytest.raises(RuntimeError, match="CUDA is available"),
    ):
        cpu.install()
