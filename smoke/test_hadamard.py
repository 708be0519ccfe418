"""The patched fast-hadamard-transform against scipy's matrices in fp64, on every path that it has.

Run as a program it checks the Triton kernels in Triton's interpreter and prints the errors as JSON; the
interpreter is chosen by an environment variable when triton is imported, so it needs a process of its own.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.linalg import hadamard

if importlib.util.find_spec("fast_hadamard_transform") is None and not Path("/opt/dsv32/share").exists():
    pytest.skip("fast-hadamard-transform is not installed here", allow_module_level=True)

from fast_hadamard_transform import _ops as ops
from fast_hadamard_transform import fast_hadamard_transform_interface as interface

NAME = "fast-hadamard-transform"
TRANSFORMS = {
    1: interface.hadamard_transform,
    12: interface.hadamard_transform_12N,
    20: interface.hadamard_transform_20N,
    28: interface.hadamard_transform_28N,
    40: interface.hadamard_transform_40N,
}
DIMS = (1, 2, 3, 8, 12, 31, 64, 100, 128, 137, 160, 512, 1000)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def length(dim: int, order: int) -> int:
    """Entries of the whole transform: order times a power of two, at least 4 for orders other than 1."""
    power = 1 if order == 1 else 4
    while order * power < dim:
        power *= 2
    return order * power


def matrix(dim: int, order: int) -> torch.Tensor:
    """The dense matrix in fp64, cut to (dim, dim).

    The Sylvester part is scipy's; for the other orders the first factor is read from the package, and
    `test_special_orders_are_hadamard_matrices` checks that by itself.
    """
    from fast_hadamard_transform import _torch

    sylvester = hadamard(length(dim, order) // order).astype(np.float64)
    return torch.from_numpy(np.kron(_torch.hadamard(order).numpy(), sylvester)[:dim, :dim].copy())


def make_input(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Normal entries, the same on every device."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def bound(ref: torch.Tensor, x: torch.Tensor, *, order: int, scale: float, n: int) -> torch.Tensor:
    """Largest error that rounding explains, for each entry.

    The result is rounded once to its own format: u |y|, u half its eps. Before, it is a sum that is rounded
    to fp32 (fp64 for fp64) log2(N) times in the butterflies, order times in the small matrix and once by the
    scale, each time by at most u' of the partial sum, which the sum of |x| bounds.
    """
    own, sums = (
        torch.finfo(x.dtype),
        torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32),
    )
    # Triton 3.2's interpreter cuts fp32 to bf16 where the GPU rounds.
    cut = x.dtype == torch.bfloat16 and os.environ.get("TRITON_INTERPRET") == "1"
    roundings = (n // order).bit_length() + order + 1
    total = x.double().abs().sum(-1, keepdim=True) * abs(scale)
    return own.eps / (1 if cut else 2) * ref.abs() + roundings * sums.eps / 2 * total + own.smallest_normal


def check(dim: int, dtype: torch.dtype, order: int = 1, device: str = "cpu", rows: int = 3) -> float:
    """Forward and backward against the dense matrix; the largest error relative to the largest entry."""
    n, scale, dense = length(dim, order), dim**-0.5, matrix(dim, order)
    x = make_input((rows, dim), dtype, device).requires_grad_()
    y = TRANSFORMS[order](x, scale)
    gradient = make_input((rows, dim), dtype, device).flip(0)
    (x_gradient,) = torch.autograd.grad(y, x, gradient)
    worst = 0.0
    for got, given, operator in ((y, x, dense.T), (x_gradient, gradient, dense)):
        ref = given.detach().cpu().double() @ operator * scale
        error = (got.detach().cpu().double() - ref).abs()
        assert got.dtype == dtype
        assert got.shape == x.shape
        limit = bound(ref, given.detach().cpu(), order=order, scale=scale, n=n)
        assert bool((error <= limit).all()), (
            f"order {order}, dim {dim}, {dtype}: off by {(error / limit).max()} x"
        )
        worst = max(worst, (error.max() / ref.abs().max()).item())
    return worst


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_and_backward_are_the_matrix_of_scipy(dtype, record_property):
    worst = max(check(dim, dtype) for dim in DIMS)
    record_property("max_rel_error", worst)


@pytest.mark.parametrize("order", [12, 20, 28, 40])
def test_special_orders_are_hadamard_matrices(order, record_property):
    dim = 4 * order
    dense = TRANSFORMS[order](torch.eye(dim, dtype=torch.float64)).T
    assert set(dense.unique().tolist()) == {-1.0, 1.0}
    assert torch.equal(dense @ dense.T, dim * torch.eye(dim, dtype=torch.float64))
    # Block (0, 0) of H x Sylvester is the Sylvester part: the last entries run fastest, as upstream has it.
    assert torch.equal(dense[:4, :4], torch.from_numpy(hadamard(4)).double() * dense[0, 0])
    worst = max(check(dim, dtype, order) for dim in (1, order, 100, 4 * order, 500) for dtype in DTYPES[:2])
    record_property("max_rel_error", worst)


@pytest.mark.parametrize("order", TRANSFORMS)
def test_gradients_of_first_and_second_order(order):
    # 33 entries reach beyond the blocks of the matrices of order 20 and 28 in which they look symmetric.
    x = make_input((1, 33), torch.float64, "cpu").requires_grad_()
    assert torch.autograd.gradcheck(lambda t: TRANSFORMS[order](t, 0.25), (x,))
    assert torch.autograd.gradgradcheck(lambda t: TRANSFORMS[order](t, 0.25) ** 2, (x,), fast_mode=True)


@pytest.mark.parametrize("shape", [(5,), (0, 8), (2, 3, 4, 6), (1, 1)])
def test_any_batch_shape_is_kept(shape):
    x = make_input(shape, torch.float32, "cpu").requires_grad_()
    y = interface.hadamard_transform(x)
    y.sum().backward()
    assert y.shape == shape == x.grad.shape
    assert torch.equal(
        y.detach(), interface.hadamard_transform(x.detach().reshape(-1, shape[-1])).view(shape)
    )


def strided_views(device: str) -> list[torch.Tensor]:
    wide = make_input((6, 40, 20), torch.float32, device)
    return [wide.transpose(1, 2), wide[::2, :, 3:15], wide[:, :1].expand(6, 3, 20), wide[..., 0]]


def test_tensors_need_not_be_contiguous():
    for view in strided_views("cpu"):
        before = view.clone()
        assert torch.equal(
            interface.hadamard_transform(view), interface.hadamard_transform(view.contiguous())
        )
        assert torch.equal(view, before)


@pytest.mark.parametrize("bad", [torch.ones(2, 4, dtype=torch.int64), torch.tensor(1.0), torch.ones(2, 0)])
def test_what_has_no_transform_is_refused(bad):
    with pytest.raises(ValueError, match="floating-point"):
        interface.hadamard_transform(bad)


def test_triton_is_not_imported_for_cpu_tensors():
    code = (
        "import sys, torch, fast_hadamard_transform as f; f.hadamard_transform(torch.ones(4));"
        "assert 'fast_hadamard_transform._triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], env=_environment(), check=True)


def _environment(**extra: str) -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | extra


@needs_triton
def test_the_triton_kernels_in_the_interpreter(record_property):
    done = subprocess.run(
        [sys.executable, Path(__file__)],
        env=_environment(TRITON_INTERPRET="1"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["path"] == "triton"
    record_property("max_rel_error", report["max_rel_error"]["torch.float32"])
    for dtype, error in report["max_rel_error"].items():
        record_property(f"max_rel_error {dtype}", error)


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_the_triton_kernels_on_the_gpu(dtype, record_property):
    assert ops.path(torch.ones(1, dtype=dtype, device="cuda")) == "triton"
    cases = [(dim, 1) for dim in (*DIMS, 4096, 16384, 20000)]
    cases += list(itertools.product((1, 100, 160, 1000), (12, 20, 28, 40)))
    record_property("max_rel_error", max(check(dim, dtype, order, "cuda") for dim, order in cases))
    for view in strided_views("cuda"):
        assert torch.equal(
            interface.hadamard_transform(view), interface.hadamard_transform(view.contiguous())
        )


@needs_gpu
def test_fp64_on_the_gpu_goes_through_torch(record_property):
    assert ops.path(torch.ones(1, dtype=torch.float64, device="cuda")) == "torch"
    record_property("max_rel_error", check(100, torch.float64, 1, "cuda"))


def test_the_installed_package_is_the_patched_one():
    distribution = importlib.metadata.distribution(NAME)
    marker = json.loads(distribution.read_text("dsv32-patches.json") or "{}")
    assert marker["package"] == NAME
    assert distribution.version == f"{marker['upstream_version']}+dsv32.{marker['series_sha256'][:8]}"
    assert len(marker["patches"]) >= 5
    # Upstream's setup.py asks for ninja and builds an extension module.
    assert distribution.requires == ["torch"]
    assert importlib.util.find_spec("fast_hadamard_transform_cuda") is None


def main() -> None:
    """Small cases only: the interpreter runs one program after another in numpy."""
    from fast_hadamard_transform import _triton

    worst = {str(dtype): max(check(dim, dtype) for dim in (1, 2, 3, 100, 128)) for dtype in DTYPES[1:]}
    for view in strided_views("cpu"):
        few = view[:2]
        assert torch.equal(interface.hadamard_transform(few), interface.hadamard_transform(few.contiguous()))
    _triton.LONGEST = 16  # rows longer than one program holds, without the long rows
    for dim, order in ((50, 1), (64, 1), (12, 12), (50, 12)):
        worst["torch.float32"] = max(worst["torch.float32"], check(dim, torch.float32, order, rows=2))
    sys.stdout.write(json.dumps({"path": ops.path(torch.ones(1)), "max_rel_error": worst}) + "\n")


if __name__ == "__main__":
    main()
