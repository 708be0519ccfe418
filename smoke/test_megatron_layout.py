"""Context-parallel layouts are built without waiting for the device."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dsa_cases import CASES, SBHD_LENGTHS, THD_LENGTHS, build, make_config, make_inputs
from megatron.core.models.common.embeddings.rope_utils import (
    _apply_rotary_pos_emb_bshd,
    _apply_rotary_pos_emb_thd,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant import dsa_layout
from megatron_fixtures import groups_of, run_ranks

from dsv32.mcore.packing import cumulative, zigzag_rows


def test_packed_layout_has_no_value_dependence() -> None:
    """Meta tensors have shapes and no values: whatever depends on a value fails on them."""
    cu_seqlens = torch.empty(len(THD_LENGTHS) + 1, dtype=torch.int32, device="meta")
    rows = sum(THD_LENGTHS)
    positions, order = dsa_layout.build_packed_allgather_cp_query_positions_and_key_reorder(
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cp_size=2,
        cp_rank=1,
        device=torch.device("meta"),
        local_output_size=rows // 2,
        global_output_size=rows,
    )
    assert positions.shape == (rows // 2,)
    assert order.shape == (rows,)


class _Group:
    """A process group as far as the rotary embedding asks."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


def test_thd_rope_needs_nothing_from_the_host() -> None:
    rows = sum(THD_LENGTHS) // 2
    meta = torch.device("meta")
    rotated = _apply_rotary_pos_emb_thd(
        torch.empty(rows, 4, 16, device=meta),
        torch.empty(len(THD_LENGTHS) + 1, dtype=torch.int32, device=meta),
        torch.empty(max(THD_LENGTHS), 1, 1, 16, device=meta),
        cp_group=_Group(2, 1),
    )
    assert rotated.shape == (rows, 4, 16)


@pytest.mark.parametrize("extra", [0, 8])
@pytest.mark.parametrize("whole", [False, True], ids=["table of a sequence", "table of the batch"])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_thd_rope_rotates_each_row_by_its_place_in_its_sequence(
    cp_size: int, whole: bool, extra: int
) -> None:
    """Against the plain rotation of the whole batch, whose rows this rank then takes."""
    lengths = (32, 0, 16, 8, 56)
    total = sum(lengths)
    table_rows = total + extra * cp_size if whole and extra else total if whole else max(lengths)
    table = torch.randn(table_rows, 1, 1, 16, generator=torch.Generator().manual_seed(1))
    x = torch.randn(total, 4, 16, generator=torch.Generator().manual_seed(2))
    places = torch.arange(total) if whole else torch.cat([torch.arange(length) for length in lengths])
    wanted = _apply_rotary_pos_emb_bshd(x[:, None], table[places], mla_rotary_interleaved=True)[:, 0]
    for rank in range(cp_size):
        rows = zigzag_rows(lengths, cp_size=cp_size, cp_rank=rank)
        got = _apply_rotary_pos_emb_thd(
            torch.cat((x[rows], torch.ones(extra, 4, 16))),
            cumulative(lengths),
            table,
            mla_rotary_interleaved=True,
            cp_group=_Group(cp_size, rank),
        )
        assert torch.equal(got[: len(rows)], wanted[rows])
        assert got[len(rows) :].isfinite().all()


@pytest.mark.parametrize("lengths", [THD_LENGTHS, (0, 32, 0, 16, 0), (8,)], ids=str)
@pytest.mark.parametrize(("cp_size", "extra"), itertools.product((2, 4), (0, 8)))
def test_packed_layout_is_zigzag_with_padding_last(
    lengths: tuple[int, ...], cp_size: int, extra: int
) -> None:
    rows = sum(lengths) // cp_size
    for rank in range(cp_size):
        positions, order = dsa_layout.build_packed_allgather_cp_query_positions_and_key_reorder(
            cu_seqlens_q=cumulative(lengths),
            cu_seqlens_kv=cumulative(lengths),
            cp_size=cp_size,
            cp_rank=rank,
            device=torch.device("cpu"),
            local_output_size=rows + extra,
            global_output_size=(rows + extra) * cp_size,
        )
        assert torch.equal(positions[:rows], zigzag_rows(lengths, cp_size=cp_size, cp_rank=rank))
        assert (positions[rows:] >= sum(lengths)).all()
        assert order.sort().values.tolist() == list(range((rows + extra) * cp_size))


def _exchanges(rank: int, device: torch.device) -> list[int]:
    """How many all_gather calls each of three forwards of a layer makes."""
    case = CASES[0]
    one, two = groups_of(1), groups_of(2)
    attention = build(make_config(case, context_parallel_size=2, cp_comm_type="allgather"), two, one).to(
        device
    )
    shape = (len(SBHD_LENGTHS), SBHD_LENGTHS[0])
    rows = zigzag_rows(SBHD_LENGTHS[:1], cp_size=2, cp_rank=rank)
    local: dict[str, Any] = {
        name: whole.view(*shape, *whole.shape[1:]).transpose(0, 1)[rows].to(device)
        for name, whole in make_inputs(case).items()
        if name != "out_grad"
    }
    counts = []
    for _ in range(3):
        with mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as exchange:
            attention(
                local["query"],
                local["key"],
                local["value"],
                attention_mask=None,
                x=local["x"],
                qr=local["qr"],
                attn_mask_type=AttnMaskType.causal,
            )
        counts.append(exchange.call_count)
    return counts


def test_cp_layout_needs_nothing_from_the_host() -> None:
    """Lengths are exchanged at a layer's first forward only."""
    assert run_ranks(2, _exchanges) == [[1, 0, 0], [1, 0, 0]]
