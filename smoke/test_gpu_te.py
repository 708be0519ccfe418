"""Transformer Engine's layers on the GPU, forward and backward, bf16 and FP8 block scaling, against fp64.

Errors are norms of the difference over norms of the fp64 result.  A rounding to bf16 is at most 2^-9 of a
value, so of a norm, too; sums are fp32 and add nothing that shows.  A result is rounded once, and what goes
through a rounded intermediate once more.

FP8 block scaling rounds each operand of a product to e4m3 (4 bits with the hidden one, so at most 2^-4 of a
value), scaled by 1x128 and 128x128 blocks; what falls under e4m3's normal range is at most 2^-10 of a block's
largest value.  Two operands round independently of each other, so a product is off by at most sqrt(2) times
as much in norm; a wrong scale of one block in a hundred would show.  It is also off by at least some times
bf16's rounding: otherwise the recipe did not run.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from dsv32.mcore.layer_spec import why_no_te

if TYPE_CHECKING:
    from collections.abc import Callable


def missing() -> str | None:
    """What this machine lacks for these tests, or None."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.cuda.get_device_capability() < (9, 0):
        return f"FP8 block scaling needs compute capability 9.0, found {torch.cuda.get_device_capability()}"
    return why_no_te()


pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

ROUNDING = 2.0**-9
OPERAND = 2.0**-4
#: Widths of the model: latent queries to half the indexer's; experts see unequal shares, one of them nothing.
ROWS, IN, OUT, SPLITS = 1024, 1536, 4096, (512, 128, 0, 384)
EPS = 1e-6
BF16 = torch.bfloat16
RECIPES = ("bf16", "fp8 block scaling")


def error(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    assert torch.isfinite(got).all(), "not finite"
    return ((got.double() - want).norm() / want.norm()).item()


def rand(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(BF16)


def run(recipe: str, layer: Any, x: Tensor, dy: Tensor, *more: Any) -> Tensor:
    """Output; gradients are left in the leaves."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8BlockScaling

    with te.autocast(enabled=recipe != "bf16", recipe=Float8BlockScaling()):
        y = layer(x, *more)
    y.backward(dy)
    return y.detach()


def check(
    recipe: str, errors: dict[str, float], roundings: dict[str, int], record: Callable[[str, Any], None]
) -> None:
    """Each error against its bound, and that FP8 was FP8."""
    for name, value in errors.items():
        record(name, value)
        bound = roundings[name] * ROUNDING
        if recipe != "bf16":
            bound += math.sqrt(2) * OPERAND
            assert value >= 4 * ROUNDING, f"{name}: {value:.1e} is too exact for e4m3: FP8 did not run"
        assert value <= bound, f"{name}: {value:.2e}, bound {bound:.2e}"


def normed(x: Tensor, gamma: Tensor) -> Tensor:
    """RMSNorm in the precision of its arguments."""
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * gamma


@pytest.mark.parametrize("recipe", RECIPES)
def test_linear(recipe: str, record_property: Callable[[str, Any], None]) -> None:
    import transformer_engine.pytorch as te

    torch.manual_seed(0)
    layer = te.Linear(IN, OUT, bias=False, params_dtype=BF16, device="cuda")
    x, dy = rand(ROWS, IN).requires_grad_(), rand(ROWS, OUT)
    y = run(recipe, layer, x, dy)
    x64, w64, dy64 = x.detach().double(), layer.weight.detach().double(), dy.double()
    errors = {
        "output": error(y, x64 @ w64.T),
        "grad input": error(x.grad, dy64 @ w64),
        "grad weight": error(layer.weight.grad, dy64.T @ x64),
    }
    check(recipe, errors, dict.fromkeys(errors, 1), record_property)


@pytest.mark.parametrize("recipe", RECIPES)
def test_layernorm_linear(recipe: str, record_property: Callable[[str, Any], None]) -> None:
    import transformer_engine.pytorch as te

    torch.manual_seed(1)
    layer = te.LayerNormLinear(
        IN, OUT, eps=EPS, bias=False, normalization="RMSNorm", params_dtype=BF16, device="cuda"
    )
    with torch.no_grad():
        layer.layer_norm_weight.copy_(1 + rand(IN, scale=0.1))
    x, dy = rand(ROWS, IN).requires_grad_(), rand(ROWS, OUT)
    y = run(recipe, layer, x, dy)
    leaves = {
        "grad input": x,
        "grad weight": layer.weight,
        "grad norm weight": layer.layer_norm_weight,
    }
    doubles = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    y64 = normed(doubles["grad input"], doubles["grad norm weight"]) @ doubles["grad weight"].T
    y64.backward(dy.double())
    errors = {"output": error(y, y64.detach())}
    errors |= {name: error(leaf.grad, doubles[name].grad) for name, leaf in leaves.items()}
    # The normed input is rounded before the product, the product's gradient before the norm's backward.
    check(recipe, errors, dict.fromkeys(errors, 2), record_property)


@pytest.mark.parametrize("recipe", RECIPES)
def test_grouped_linear(recipe: str, record_property: Callable[[str, Any], None]) -> None:
    import transformer_engine.pytorch as te

    torch.manual_seed(2)
    layer = te.GroupedLinear(len(SPLITS), IN, OUT, bias=False, params_dtype=BF16, device="cuda")
    x, dy = rand(ROWS, IN).requires_grad_(), rand(ROWS, OUT)
    y = run(recipe, layer, x, dy, list(SPLITS))
    parts = [
        (a.double(), b.double()) for a, b in zip(x.detach().split(SPLITS), dy.split(SPLITS), strict=True)
    ]
    weights = [getattr(layer, f"weight{i}") for i in range(len(SPLITS))]
    w64 = [weight.detach().double() for weight in weights]
    errors = {
        "output": error(y, torch.cat([a @ w.T for (a, _), w in zip(parts, w64, strict=True)])),
        "grad input": error(x.grad, torch.cat([b @ w for (_, b), w in zip(parts, w64, strict=True)])),
    }
    for i, (a, b) in enumerate(parts):
        if SPLITS[i]:
            errors[f"grad weight {i}"] = error(weights[i].grad, b.T @ a)
        else:
            assert not weights[i].grad.any(), "an expert without tokens has a gradient"
    check(recipe, errors, dict.fromkeys(errors, 1), record_property)


def test_rmsnorm(record_property: Callable[[str, Any], None]) -> None:
    import transformer_engine.pytorch as te

    torch.manual_seed(3)
    layer = te.RMSNorm(7168, eps=EPS, dtype=BF16, device="cuda")
    with torch.no_grad():
        layer.weight.copy_(1 + rand(7168, scale=0.1))
    x, dy = rand(ROWS, 7168).requires_grad_(), rand(ROWS, 7168)
    y = run("bf16", layer, x, dy)
    x64, g64 = (t.detach().double().requires_grad_() for t in (x, layer.weight))
    y64 = normed(x64, g64)
    y64.backward(dy.double())
    errors = {
        "output": error(y, y64.detach()),
        "grad input": error(x.grad, x64.grad),
        "grad weight": error(layer.weight.grad, g64.grad),
    }
    check("bf16", errors, dict.fromkeys(errors, 1), record_property)


def test_fp32_weights_proj_needs_a_layer_of_its_own(record_property: Callable[[str, Any], None]) -> None:
    # Transformer Engine multiplies fp32 in TF32 (10 bits of mantissa); the plain layer in dsv32's spec does
    # not. If the first assertion fails, Transformer Engine has changed and the spec's exception can go.
    from types import SimpleNamespace

    import transformer_engine.pytorch as te

    from dsv32.mcore.local_backend import DuplicatedLinear

    torch.manual_seed(4)
    torch.backends.cuda.matmul.allow_tf32 = False
    config: Any = SimpleNamespace(
        use_cpu_initialization=False,
        params_dtype=torch.float32,
        perform_initialization=True,
        sequence_parallel=False,
    )
    theirs = te.Linear(7168, 64, bias=False, params_dtype=torch.float32, device="cuda")
    ours = DuplicatedLinear(7168, 64, config=config, init_method=torch.nn.init.xavier_normal_)
    with torch.no_grad():
        theirs.weight.copy_(ours.weight)
    x = rand(ROWS, 7168).float()
    want = x.double() @ ours.weight.detach().double().T
    record_property("te.Linear in fp32", error(theirs(x).detach(), want))
    record_property("plain layer", error(ours(x)[0].detach(), want))
    assert error(theirs(x).detach(), want) > 1e-5
    # 7,168 products summed in fp32, in blocks: some sqrt(7168) roundings of 6e-8 at the very most.
    assert error(ours(x)[0].detach(), want) < 5e-6
