"""Compile the kernels of one layer's shape ahead, by running the layer once on random numbers."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dsv32.dsa import attention, loss, plan, selection

if TYPE_CHECKING:
    from dsv32.dsa.settings import Settings

LATENT, ROPE, INDEX_DIM = 512, 64, 128  # DeepSeek-V3.2's head dimensions; the kernels know no others


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One layer on one rank: queries [queries, heads, 576] against keys [keys, 576], top-k of the keys."""

    heads: int
    queries: int
    keys: int
    topk: int = 2048
    index_heads: int = 64


def warm(shape: Shape, settings: Settings, device: torch.device) -> dict[str, float]:
    """Run selection, attention, both losses and all gradients once; seconds of each, compilation included.

    Raises:
        DsaDeclined: In strict mode, a kernel does not cover the shape.
    """
    seconds = {}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def rand(*size: int) -> torch.Tensor:
        return (torch.randn(*size, device=device) * 0.1).to(dtype).requires_grad_()

    def timed(name: str, start: float) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds[name] = time.perf_counter() - start

    bounds = plan.causal_bounds(shape.queries, shape.keys, device)
    q, kv = rand(shape.queries, shape.heads, LATENT + ROPE), rand(shape.keys, LATENT + ROPE)
    iq, ik = rand(shape.queries, shape.index_heads, INDEX_DIM), rand(shape.keys, INDEX_DIM)
    iw = rand(shape.queries, shape.index_heads)
    scale = 192**-0.5

    start = time.perf_counter()
    indices, picked = selection.select(iq, ik, iw, bounds, shape.topk, settings)
    timed("indexer scores and top-k", start)

    start = time.perf_counter()
    out, lse = attention.attend(q, kv, indices, scale, LATENT, settings, bounds)
    out.sum().backward()
    timed("sparse attention, forward and backward", start)

    factor = torch.ones((), device=device)
    for sparse in (True, False):
        start = time.perf_counter()
        inputs = loss.LossInputs(
            query=q.detach(),
            kv=kv.detach(),
            scale=scale,
            bounds=bounds,
            lse=lse.detach() if sparse else None,
            indices=indices if sparse else None,
            picked=picked if sparse else None,
        )
        loss.indexer_loss(iq, ik, iw, inputs, factor, sparse, settings).backward()
        timed(f"{'sparse' if sparse else 'dense'} indexer loss, forward and backward", start)
    return seconds


def cache_folder() -> Path:
    """Where compiled kernels are kept: Triton's folder, as the environment names it."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
