"""How Megatron finds DSA kernels, and what it says when they decline."""

from __future__ import annotations

import logging
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from dsa_cases import CASES, THD_LENGTHS, Case, build, make_config, make_inputs, single_groups
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant import dsa, dsa_kernels

from dsv32.mcore.packing import packed_params

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("cpu_only")  # tensors of this process, on the CPU

NAME = "smoke_kernels.declining"
LOGGER = dsa_kernels.__name__


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """An importable module with the hooks, all of which decline; calls are counted in ``asked``."""
    module = ModuleType(NAME)
    asked: list[str] = []
    vars(module)["asked"] = asked

    def hook(name: str) -> Any:
        def decline(*_: Any, **__: Any) -> None:
            asked.append(name)

        return decline

    for name in ("run_fused_qk_topk", "run_fused_qk_topk_with_loss", "run_fused_absorbed_sparse_attention"):
        setattr(module, name, hook(name))
    monkeypatch.setitem(sys.modules, "smoke_kernels", ModuleType("smoke_kernels"))
    monkeypatch.setitem(sys.modules, NAME, module)
    monkeypatch.setattr(dsa_kernels, "_BACKEND", None)
    monkeypatch.setattr(dsa_kernels, "_FALLBACKS_SAID", set(), raising=False)
    yield module


def _run(case: Case, **changes: Any) -> torch.Tensor:
    one = single_groups()
    attention = build(make_config(case, **changes), one.cp, one.tp)
    inputs = make_inputs(case)
    return attention(
        inputs["query"],
        inputs["key"],
        inputs.get("value"),
        attention_mask=None,
        x=inputs["x"].unsqueeze(1),
        qr=inputs["qr"].unsqueeze(1),
        attn_mask_type=AttnMaskType.causal,
        packed_seq_params=packed_params(THD_LENGTHS),
        up_v_weight=inputs.get("up_v"),
    )


ABSORBED_SPARSE, ABSORBED_DENSE, FULL_SPARSE, FULL_DENSE = CASES[7], CASES[6], CASES[5], CASES[4]


def test_kernel_backend_may_be_a_module(backend: ModuleType) -> None:
    _run(ABSORBED_SPARSE, dsa_kernel_backend=NAME)
    assert vars(backend)["asked"] == ["run_fused_qk_topk_with_loss", "run_fused_absorbed_sparse_attention"]
    with pytest.raises(ModuleNotFoundError, match="smoke_kernels_absent"):
        make_config(ABSORBED_SPARSE, dsa_kernel_backend="smoke_kernels_absent.module")
    with pytest.raises(ValueError, match="must be one of"):
        make_config(ABSORBED_SPARSE, dsa_kernel_backend="tilelnag")


@pytest.mark.parametrize(
    ("case", "operation", "reason"),
    [
        (ABSORBED_SPARSE, "the indexer loss", "float32"),
        (ABSORBED_SPARSE, "sparse attention", "float32"),
        (ABSORBED_DENSE, "the indexer loss", "dense loss"),
        (FULL_SPARSE, "sparse attention", "not absorbed"),
    ],
)
def test_fallback_is_said_once_or_is_an_error(
    backend: ModuleType, caplog: pytest.LogCaptureFixture, case: Case, operation: str, reason: str
) -> None:
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        for _ in range(2):
            plain = _run(case, dsa_kernel_backend=NAME)
    said = [record.getMessage() for record in caplog.records if f"run {operation}:" in record.getMessage()]
    assert len(said) == 1, said
    assert NAME in said[0]
    assert reason in said[0]
    assert torch.equal(plain, _run(case)), "the fallback gives another result"
    with pytest.raises(RuntimeError, match="dsa_kernel_strict"):
        _run(case, dsa_kernel_backend=NAME, dsa_kernel_strict=True)


def test_fallback_of_the_selection_alone_is_said(
    backend: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger=LOGGER), torch.no_grad():
        _run(ABSORBED_SPARSE, dsa_kernel_backend=NAME)
    assert any("run top-k selection:" in record.getMessage() for record in caplog.records)


def test_without_a_backend_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        _run(ABSORBED_SPARSE, dsa_kernel_strict=True)
    assert not caplog.records
    assert dsa.dsa_kernels is dsa_kernels


@pytest.mark.parametrize("gradients", [True, False], ids=["training", "no-grad"])
@pytest.mark.parametrize("case", [ABSORBED_SPARSE, ABSORBED_DENSE, FULL_SPARSE, FULL_DENSE], ids=str)
def test_unfused_module_stands_in_for_the_quadratic_code(
    case: Case, gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the code of [sq, sk] was called")

    with torch.set_grad_enabled(gradients):
        plain = _run(case)
        for name in ("fused_qk_topk_naive", "_unfused_absorbed_dsa_fn", "unfused_dsa_fn"):
            monkeypatch.setattr(dsa, name, refuse)
        monkeypatch.setattr(dsa.FusedDSAIndexerLoss, "apply", refuse)
        streamed = _run(case, dsa_unfused_module="dsv32.dsa.unfused")
    # fp32 both: softmaxes over some 50 keys and sums of 48 products in another order.
    torch.testing.assert_close(streamed, plain, rtol=2e-6, atol=2e-6)
