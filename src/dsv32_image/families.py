"""CUDA wheels of one family must share one minor version: a plain resolve mixes nvcc 13.0 with crt 13.5."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsv32_image.errors import ResolveError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dsv32_image.lockfile import Dist

# The compiler and what it includes and links at compile time: one toolkit release, or JIT breaks.
TOOLKIT = frozenset(
    f"nvidia-cuda-{part}" for part in ("nvcc", "crt", "cccl", "nvrtc", "runtime", "cupti", "nvvm")
) | {"nvidia-nvvm"}


def check_families(variant: str, dists: Iterable[Dist]) -> None:
    """Refuse a mix of CUDA toolkit releases.

    Raises:
        ResolveError: Names two wheels of the family and their versions.
    """
    minors: dict[str, str] = {}
    for dist in sorted(dists, key=lambda d: d.name):
        if dist.name in TOOLKIT:
            minors.setdefault(".".join(dist.version.split(".")[:2]), f"{dist.name} {dist.version}")
    if len(minors) > 1:
        first, second = list(minors.values())[:2]
        raise ResolveError(
            f"variant {variant} mixes CUDA toolkit releases: {first} beside {second}",
            hint="pin the whole family to one minor version in pyproject.toml",
        )
