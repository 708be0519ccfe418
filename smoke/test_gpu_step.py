"""A training step of the 5-layer model at the real widths on one GPU: Transformer Engine and our kernels.

hidden 7168, 128 heads, q_lora 1536, kv_lora 512, 64 index heads, top-k 2048, 8192 packed tokens, 3 dense and
2 MoE layers in bf16, Adam with fp32 master weights, every layer recomputed; 16 of 256 experts, which is the
least of which a token can choose 8, and fits 141 GB.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from megatron_fixtures import run_ranks

from dsv32.dsa import gpu
from dsv32.mcore.layer_spec import why_no_te

if TYPE_CHECKING:
    from collections.abc import Callable

#: 18 bytes each of 5.5 G parameters are 93 GiB, the rest one layer's activations and the logits.
NEEDS_GIB = 125


def missing() -> str | None:
    """What this machine lacks for this test, or None."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.cuda.get_device_capability()[0] != 9:
        return f"needs a Hopper GPU, found compute capability {torch.cuda.get_device_capability()}"
    if gpu.flash_mla() is None:
        return "flash_mla (wheel sgl-flash-mla) is not importable"
    if gpu.cudnn_dsa() is None:
        return "cudnn.DSA (wheel nvidia-cudnn-frontend with nvidia-cutlass-dsl) is not importable"
    if why_no_te() is not None:
        return why_no_te()
    total = torch.cuda.get_device_properties(0).total_memory / 2**30
    return None if total > NEEDS_GIB else f"needs {NEEDS_GIB} GiB of GPU memory, there are {total:.0f}"


pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

#: A document longer than top-k by far, one of top-k's length, one shorter, a single token.
DOCUMENTS = (5000, 2048, 1143, 1)


def _step(rank: int, device: torch.device) -> dict[str, Any]:
    import os

    os.environ["DSV32_DSA_STRICT"] = "1"  # leaving a fused path inside the backend is an error, too
    from dsv32.mcore.local_backend import DuplicatedLinear
    from dsv32.training import full_step
    from dsv32.training.model import Parallel

    calls: dict[str, int] = {}
    for name in ("forward", "topk", "sparse_target", "backward", "indexer_backward"):
        original = getattr(gpu, name)

        def spy(*args: Any, name: str = name, original: Any = original, **kwargs: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            return original(*args, **kwargs)

        setattr(gpu, name, spy)
    Parallel().initialize()
    case = full_step.Case(optimizer="adam", recompute=True, documents=DOCUMENTS)
    trainer = full_step.make(case, device, learning_rate=1e-4)
    layers = trainer.plain_model.decoder.layers
    projections = [layer.self_attention.core_attention.indexer.linear_weights_proj for layer in layers]
    before = layers[0].self_attention.core_attention.indexer.linear_wk.weight.detach().clone()
    batch = full_step.make_batch(case, device)
    got = full_step.measure(trainer, batch, backend="dsv32.dsa", repeats=3)
    after = layers[0].self_attention.core_attention.indexer.linear_wk.weight.detach()
    return {
        "calls": calls,
        "ran": got.ran,
        "declined": got.declined,
        "first s": got.first_s,
        "step ms": got.median_ms,
        "peak GiB": got.peak_gib,
        "parameters": got.parameters,
        "lm loss": got.lm_loss,
        "indexer loss": got.indexer_loss,
        "grad norm": got.grad_norm,
        "fp32 projections": sum(
            isinstance(layer, DuplicatedLinear) and layer.weight.dtype == torch.float32
            for layer in projections
        ),
        "linear": type(layers[0].mlp.linear_fc1).__name__,
        "experts": type(layers[-1].mlp.experts).__name__,
        "indexer moved": not torch.equal(before, after),
    }


def test_a_step_at_the_real_widths_runs_in_the_fused_kernels(
    record_property: Callable[[str, Any], None],
) -> None:
    (got,) = run_ranks(1, _step)
    for name, value in got.items():
        record_property(name, value)
    steps, layers = 4, 5
    # A layer runs forward without gradients first, and again in the backward pass.
    assert got["ran"] == {"run_fused_dsa_attention": 2 * steps * layers}
    assert not got["declined"]
    # Our own kernels take the place of cuDNN's where they are faster, but these have no other on this path.
    assert got["calls"]["forward"] == 2 * steps * layers
    assert got["calls"]["topk"] >= 2 * steps * layers
    assert got["calls"]["indexer_backward"] == steps * layers
    assert got["linear"] == "TELayerNormColumnParallelLinear"
    assert got["experts"] == "TEGroupedMLP"
    assert got["fp32 projections"] == layers
    assert got["indexer moved"]
    # Random weights know nothing: at first the loss is near ln 129,280 = 11.77 (measured 13.2: the logits of
    # random weights are not 0), and it falls on the repeated sample.
    assert 0 < got["lm loss"] < 1.2 * math.log(129_280)
    assert got["indexer loss"] > 0
    assert math.isfinite(got["grad norm"])
