"""Megatron's own tilelang DSA kernels on the GPU against dense fp64: the stock backend of every benchmark.

FlashMLA and the cuDNN frontend have their tests in test_dsa_kernels.py, where ours call them.  Bounds as
there: a rounding to bf16 is at most 2^-9 = 2e-3 of a value and about 1.1e-3 of a norm; the output rounds P
and the result, a gradient P or dS, the output inside delta and the result.
"""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from dsv32.dsa import plan, reference

if TYPE_CHECKING:
    from collections.abc import Callable


def missing() -> str | None:
    """What this machine lacks for these tests, or None."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if importlib.util.find_spec("tilelang") is None:
        return "tilelang is not installed"
    from megatron.core.transformer.experimental_attention_variant.ops import sparse_mla

    if not sparse_mla.HAVE_TILELANG_SPARSE_MLA:
        return "Megatron cannot import its tilelang kernels"
    return None


pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

SCALE, TOP_K, SEQUENCE = 192**-0.5, 256, 700
OUTPUT, GRADIENT = 4e-3, 8e-3
BF16 = torch.bfloat16
ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)


def rand(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(BF16)


def error(got: Tensor, want: Tensor) -> float:
    assert torch.isfinite(got).all(), "not finite"
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def test_sparse_attention_and_indexer_loss_equal_fp64(record_property: Callable[[str, Any], None]) -> None:
    from megatron.core.transformer.experimental_attention_variant import dsa_tilelang_kernels as stock

    torch.manual_seed(0)
    bounds = plan.causal_bounds(SEQUENCE, SEQUENCE, torch.device("cuda"))
    heads = 16
    query, key = rand(SEQUENCE, 1, heads, 576, scale=0.5), rand(SEQUENCE, 1, 1, 576, scale=0.5)
    indexer = [rand(SEQUENCE, 1, 64, 128), rand(SEQUENCE, 1, 128), rand(SEQUENCE, 1, 64, scale=0.02)]
    q, k, weights = (leaf.requires_grad_() for leaf in indexer)
    answer = stock.run_fused_qk_topk_with_loss(
        q=q,
        k=k,
        weights=weights,
        index_topk=TOP_K,
        starts=bounds.starts,
        ends=bounds.ends,
        block_size=8192,
        query=query,
        key=key,
        softmax_scale=SCALE,
        loss_coeff=0.5,
        pg_collection=SimpleNamespace(tp=ALONE, cp=ALONE),
    )
    assert answer is not None, "the indexer's loss was declined"
    indices, loss = answer[0], answer[-1]
    loss.backward()

    query.requires_grad_()
    key.requires_grad_()
    out = stock.run_fused_absorbed_sparse_attention(query, key, indices, SCALE, 512)
    assert out is not None, "sparse attention was declined"
    dout = rand(SEQUENCE, 1, heads, 512)
    out.backward(dout)

    allowed = reference.selected_mask(indices[0], SEQUENCE)
    assert torch.equal(allowed.sum(-1), bounds.lengths().clamp(max=TOP_K))
    q64, k64, w64, query64, key64 = (
        leaf.detach().squeeze(1).double().requires_grad_() for leaf in (q, k, weights, query, key[:, :, 0])
    )
    want_loss = (
        0.5
        / SEQUENCE
        * reference.kl_sum(query64.detach(), key64.detach(), SCALE, reference.scores(q64, k64, w64), allowed)
    )
    want_loss.backward()
    want, _ = reference.attention(query64, key64, allowed, SCALE, 512)
    want.backward(dout.squeeze(1).double())
    errors = {
        "output": error(out.detach().squeeze(1), want.detach()),
        "grad query": error(query.grad.squeeze(1), query64.grad),
        "grad key": error(key.grad[:, 0, 0], key64.grad),
        "grad index query": error(q.grad.squeeze(1), q64.grad),
        "grad index key": error(k.grad.squeeze(1), k64.grad),
        "grad weights": error(weights.grad.squeeze(1), w64.grad),
        "indexer loss": abs(loss.item() / want_loss.item() - 1),
    }
    for name, value in errors.items():
        record_property(name, value)
    for name, value in errors.items():
        assert value < (OUTPUT if name == "output" else GRADIENT), f"{name}: {value:.2e}"
