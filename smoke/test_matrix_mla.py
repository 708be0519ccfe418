"""Multi-latent attention with DSA: sequences one by one, or packed on one, two, four ranks, are one result.

The yardstick is a dense fp64 computation of each sequence by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from dense_reference import IndexerWeights, MlaWeights, latent_attention
from dsa_cases import (
    AGAINST_FP64,
    HEADS,
    HIDDEN,
    LOSS_COEFFICIENT,
    NORM_EPS,
    PADDED_LENGTHS,
    ROPE,
    TOKENS,
    TOP_K,
    Case,
    Results,
    make_config,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.spec_utils import build_module
from megatron_fixtures import fits, groups_of, relative_error, run_ranks, skip_unless_fits, worst
from model_cases import weight

from dsv32.mcore.layer_spec import attention_spec
from dsv32.mcore.packing import packed_params, real_rows, zigzag_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch import distributed as dist

#: roundings.
WAYS = ("sbhd 1", "thd 1", "thd 2", "thd 4")


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Which of the indexer's losses."""

    sparse: bool

    def __str__(self) -> str:
        return "sparse" if self.sparse else "dense"


LOSSES = (Loss(sparse=False), Loss(sparse=True))


def _inputs() -> tuple[Tensor, Tensor]:
    """Hidden states and the output's gradient for the tokens of all sequences, fp32 [sum(TOKENS), HIDDEN]."""
    generator = torch.Generator().manual_seed(11)
    hidden, gradient = (torch.randn(sum(TOKENS), HIDDEN, generator=generator) for _ in range(2))
    return hidden, gradient


def _attention(loss: Loss, cp: dist.ProcessGroup, tp: dist.ProcessGroup, device: torch.device) -> Any:
    config = make_config(
        Case(layout="thd", absorbed=True, sparse_loss=loss.sparse),
        context_parallel_size=cp.size(),
        cp_comm_type="allgather",
    )
    groups = ProcessGroupCollection()
    groups.cp, groups.tp = cp, tp
    attention = build_module(
        attention_spec(config=config),
        config=config,
        layer_number=1,
        cp_comm_type="allgather",
        pg_collection=groups,
    )
    with torch.no_grad():
        for name, parameter in attention.named_parameters():
            parameter.copy_(weight(name, tuple(parameter.shape)))
    return attention.to(device)


def _packed(loss: Loss, cp: dist.ProcessGroup, tp: dist.ProcessGroup, device: torch.device) -> Results:
    """All sequences in one packed batch, padded, cut over context-parallel ranks."""
    attention = _attention(loss, cp, tp, device)
    real = real_rows(TOKENS, PADDED_LENGTHS)
    rows = zigzag_rows(PADDED_LENGTHS, cp_size=cp.size(), cp_rank=cp.rank())
    whole = []
    for given, filler in zip(_inputs(), (1.0, 0.0), strict=True):
        padded = torch.full((len(real), HIDDEN), filler)
        padded[real] = given
        whole.append(padded)
    hidden = whole[0][rows, None].to(device).requires_grad_()
    dsa.DSAIndexerLossLoggingHelper.tracker.clear()
    output, _ = attention(
        hidden,
        attention_mask=None,
        packed_seq_params=packed_params(
            TOKENS, padded_lengths=PADDED_LENGTHS, cp_size=cp.size(), cp_rank=cp.rank(), device=device
        ),
    )
    output.backward(whole[1][rows, None].to(device))
    order = torch.cat([zigzag_rows(PADDED_LENGTHS, cp_size=cp.size(), cp_rank=r) for r in range(cp.size())])
    results = {}
    for name, local in (("output", output.detach()), ("grad hidden", hidden.grad)):
        assert local is not None
        parts = [torch.empty_like(local) for _ in range(cp.size())]
        torch.distributed.all_gather(parts, local.contiguous(), group=cp)
        results[name] = torch.cat(parts)[:, 0].cpu()[order.argsort()][real]
    return results | _parameters(attention, cp)


def _parameters(attention: Any, cp: dist.ProcessGroup) -> Results:
    """The indexer loss and every parameter's gradient over the ranks, as data parallelism combines them."""
    loss = dsa.DSAIndexerLossLoggingHelper.tracker["values"].clone()
    torch.distributed.all_reduce(loss, group=cp)
    results = {"indexer loss": loss.cpu() / cp.size()}
    for name, parameter in attention.named_parameters():
        assert parameter.grad is not None, f"no gradient for {name}"
        torch.distributed.all_reduce(parameter.grad, group=cp)
        share = cp.size() if ".indexer." in name else 1  # the indexer's loss is a mean over a rank's rows
        results[f"grad {name}"] = parameter.grad.cpu() / share
    return results


def _separate(loss: Loss, alone: dist.ProcessGroup, device: torch.device) -> Results:
    """Each sequence by itself (sbhd, batch 1); losses weighted by tokens, as one mean over all."""
    attention = _attention(loss, alone, alone, device)
    hidden, gradient = _inputs()
    outputs, hidden_grads, total, start = [], [], torch.zeros(1), 0
    dsa.DSAIndexerLossAutoScaler.main_loss_backward_scale = None
    for tokens in TOKENS:
        rows = slice(start, start + tokens)
        start += tokens
        dsa.DSAIndexerLossLoggingHelper.tracker.clear()
        dsa.DSAIndexerLossAutoScaler.set_loss_scale(torch.tensor(tokens / sum(TOKENS), device=device))
        local = hidden[rows, None].to(device).requires_grad_()
        output, _ = attention(local, attention_mask=None)
        output.backward(gradient[rows, None].to(device))
        outputs.append(output[:, 0].detach().cpu())
        hidden_grads.append(local.grad[:, 0].cpu())
        total += dsa.DSAIndexerLossLoggingHelper.tracker["values"].cpu() * tokens / sum(TOKENS)
    dsa.DSAIndexerLossAutoScaler.main_loss_backward_scale = None
    results = {"output": torch.cat(outputs), "grad hidden": torch.cat(hidden_grads), "indexer loss": total}
    return results | {f"grad {name}": value.grad.cpu() for name, value in attention.named_parameters()}


def _measure(rank: int, device: torch.device, sizes: list[int]) -> dict[tuple[str, str], Results]:
    groups = {size: groups_of(size) for size in sizes}
    results = {}
    for loss in LOSSES:
        results[str(loss), "sbhd 1"] = _separate(loss, groups[1], device)
        for size in sizes:
            results[str(loss), f"thd {size}"] = _packed(loss, groups[size], groups[1], device)
    return results


@pytest.fixture(scope="module")
def measured() -> dict[tuple[str, str], Results]:
    """Both losses each way."""
    sizes = [size for size in (1, 2, 4) if fits(size)]
    return run_ranks(max(sizes), _measure, sizes)[0]


def _reference(loss: Loss, names: list[str], shapes: dict[str, tuple[int, ...]]) -> Results:
    state = {name: weight(name, shapes[name]).double().requires_grad_() for name in names}
    mla = MlaWeights(
        q_down=state["linear_q_down_proj.weight"],
        q_norm=state["q_layernorm.weight"],
        q_up=state["linear_q_up_proj.weight"],
        kv_down=state["linear_kv_down_proj.weight"],
        kv_norm=state["kv_layernorm.weight"],
        kv_up=state["linear_kv_up_proj.weight"],
        out=state["linear_proj.weight"],
    )
    prefix = "core_attention.indexer."
    indexer = IndexerWeights(
        wq_b=state[f"{prefix}linear_wq_b.weight"],
        wk=state[f"{prefix}linear_wk.weight"],
        k_norm_weight=state[f"{prefix}k_norm.weight"],
        k_norm_bias=state[f"{prefix}k_norm.bias"],
        weights_proj=state[f"{prefix}linear_weights_proj.weight"],
    )
    hidden, gradient = (whole.double() for whole in _inputs())
    hidden.requires_grad_()
    outputs, divergences, start = [], [], 0
    for tokens in TOKENS:
        output, divergence = latent_attention(
            hidden[start : start + tokens],
            mla,
            indexer,
            heads=HEADS,
            rope_size=ROPE,
            top_k=TOP_K,
            eps=NORM_EPS,
            sparse_loss=loss.sparse,
        )
        outputs.append(output)
        divergences.append(divergence)
        start += tokens
    total = LOSS_COEFFICIENT * torch.cat(divergences).mean()
    ((torch.cat(outputs) * gradient).sum() + total).backward()
    results = {"output": torch.cat(outputs).detach(), "indexer loss": total.detach().reshape(1)}
    leaves = {"hidden": hidden, **state}
    return results | {f"grad {name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_every_way_to_lay_sequences_out_equals_the_fp64_reference(
    loss: Loss,
    way: str,
    measured: dict[tuple[str, str], Results],
    record_property: Callable[[str, Any], None],
) -> None:
    skip_unless_fits(int(way.split()[1]))
    got = measured[str(loss), way]
    names = [key.removeprefix("grad ") for key in got if key.startswith("grad ") and key != "grad hidden"]
    wanted = _reference(loss, names, {name: tuple(got[f"grad {name}"].shape) for name in names})
    for name in wanted:
        record_property(name, relative_error(got[name], wanted[name]))
    error, name = worst(got, wanted)
    assert error <= AGAINST_FP64, f"{name}: relative error {error:.2e}"
