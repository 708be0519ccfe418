"""What the ways to compute DSA share: the type that sums are in, and the rounding to fp8."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(*tensors: Tensor) -> torch.dtype:
    """The accumulation type for these inputs."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


E4M3_MAX = 448.0
FP8_BLOCK = 128


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3 values as x, fp32 scales [..., blocks]): x is about values * scale, one scale for 128 channels.

    A scale is the power of two at or above amax / 448 (`scale_fmt` ue8m0 of DeepSeek-V3.2's inference
    configuration), with amax at least 1e-4. So a rounded value times its scale is exact in bf16. A last
    dimension that is no multiple of 128 has a shorter last block.
    """
    dim = x.size(-1)
    blocks = -(-dim // FP8_BLOCK)
    padded = torch.nn.functional.pad(x.float(), (0, blocks * FP8_BLOCK - dim)).unflatten(
        -1, (blocks, FP8_BLOCK)
    )
    high = padded.abs().amax(-1).clamp_min(1e-4) * torch.tensor(1 / E4M3_MAX, device=x.device)
    mantissa, exponent = torch.frexp(high)
    scale = torch.ldexp(torch.ones_like(high), exponent - (mantissa == 0.5).int())
    values = (padded / scale[..., None]).to(torch.float8_e4m3fn)
    return values.flatten(-2)[..., :dim], scale


def through_fp8(x: Tensor) -> Tensor:
    """What x becomes when rounded to fp8 by `quantise`, in x's own type, where it is exact."""
    values, scale = quantise(x)
    rounded = values.float()
    for block in range(scale.size(-1)):
        rounded[..., block * FP8_BLOCK : (block + 1) * FP8_BLOCK] *= scale[..., block, None]
    return rounded.to(x.dtype)
