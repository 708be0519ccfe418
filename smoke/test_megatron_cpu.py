"""What DSA needs of Megatron to run where there is no CUDA: one test a patch."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from dsa_cases import CASES, make_config
from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding
from megatron.core.models.common.embeddings.rope_utils import get_pos_emb_on_this_cp_rank
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.spec_utils import build_module
from megatron_fixtures import groups_of, run_ranks
from scipy.linalg import hadamard

from dsv32.mcore.layer_spec import attention_spec

CPU = torch.device("cpu")


def _collectives(rank: int, device: torch.device) -> dict[str, torch.Tensor]:
    group = groups_of(2)
    rows = torch.arange(8.0, device=device).view(4, 2) + 100 * rank
    splits = ([1, 3], [1, 2]) if rank == 0 else ([2, 1], [3, 1])  # send, receive
    sent = rows[: sum(splits[0])]
    return {
        "gather rows": mappings._gather_along_first_dim(rows, group),
        # gloo gathers equal parts only, so the split sizes are equal here
        "gather split rows": mappings._gather_along_first_dim(rows[:2], group, output_split_sizes=[2, 2]),
        "gather columns": mappings._gather_along_last_dim(rows, group),
        "reduce-scatter rows": mappings._reduce_scatter_along_first_dim(rows, group),
        "all-to-all": mappings._AllToAll.apply(group, sent, splits[1], splits[0], False),
    }


def test_collectives_allocate_on_the_inputs_device() -> None:
    first, second = run_ranks(2, _collectives, cpu=True)
    assert all(value.device == CPU for value in (*first.values(), *second.values()))
    rows = torch.arange(8.0).view(4, 2)
    assert torch.equal(first["gather rows"], torch.cat((rows, rows + 100)))
    assert torch.equal(first["gather split rows"], torch.cat((rows[:2], rows[:2] + 100)))
    assert torch.equal(second["gather columns"], torch.cat((rows, rows + 100), dim=1))
    assert torch.equal(second["reduce-scatter rows"], (2 * rows + 100)[2:])
    assert torch.equal(first["all-to-all"], torch.cat((rows[:1], rows[:2] + 100)))
    assert torch.equal(second["all-to-all"], torch.cat((rows[1:4], rows[2:3] + 100)))


class _Group:
    """A process group of two as far as the rotary embedding asks."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 1


@pytest.mark.parametrize("kind", [RotaryEmbedding, YarnRotaryEmbedding])
def test_rotary_embeddings_work_without_cuda(kind: type) -> None:
    settings: dict[str, Any] = {"rotary_percent": 1.0} if kind is RotaryEmbedding else {}
    with (
        mock.patch("torch.cuda.is_available", return_value=False),
        mock.patch("torch.cuda.current_device", side_effect=AssertionError("asked for a CUDA device")),
    ):
        embedding = kind(16, cp_group=_Group(), **settings)
        made = embedding.get_emb(8)
    table = made[0] if isinstance(made, tuple) else made
    assert table.device == CPU
    assert table.shape == (8, 1, 1, 16)


def test_rope_slice_of_a_context_parallel_rank_stays_on_its_device() -> None:
    table = torch.arange(8.0).view(8, 1, 1, 1)
    local = get_pos_emb_on_this_cp_rank(table, 0, _Group())
    assert local.device == CPU
    assert local.flatten().tolist() == [2.0, 3.0, 4.0, 5.0]  # chunks 1 and 2 of 4


def test_indexer_rotation_accepts_fp32_and_is_orthonormal() -> None:
    x = torch.randn(5, 3, 32, generator=torch.Generator().manual_seed(1))
    wanted = x.double() @ torch.from_numpy(hadamard(32)).double() / 32**0.5
    # Five butterfly stages, each one rounding of 6e-8 relative to the row's size.
    torch.testing.assert_close(
        dsa.rotate_activation(x).double(), wanted, rtol=0, atol=5 * 6e-8 * x.abs().max().item()
    )


def test_indexer_loss_tracker_is_on_the_losss_device() -> None:
    helper = dsa.DSAIndexerLossLoggingHelper
    helper.tracker.clear()
    try:
        helper.save_loss_to_tracker(torch.tensor(2.5), layer_number=2, num_layers=3)
        assert helper.tracker["values"].device == CPU
        assert helper.tracker["values"].tolist() == [0.0, 2.5, 0.0]
    finally:
        helper.tracker.clear()


def _mla(rank: int, device: torch.device) -> dict[str, Any]:
    config = make_config(CASES[0])
    one = groups_of(1)
    groups = ProcessGroupCollection()
    groups.tp = groups.cp = one
    attention = build_module(
        attention_spec(config=config),
        config=config,
        layer_number=1,
        cp_comm_type="allgather",
        pg_collection=groups,
    )
    hidden = torch.randn(24, 2, config.hidden_size, requires_grad=True)
    output, _ = attention(hidden, attention_mask=None)
    output.square().sum().backward()
    without = [name for name, parameter in attention.named_parameters() if parameter.grad is None]
    return {"shape": output.shape, "finite": bool(hidden.grad.isfinite().all()), "without gradient": without}


def test_absorbed_mla_takes_a_duplicated_linear() -> None:
    (result,) = run_ranks(1, _mla, cpu=True)
    assert result == {"shape": (24, 2, 64), "finite": True, "without gradient": []}
