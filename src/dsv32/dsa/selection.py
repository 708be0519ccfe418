"""Indexer scores and top-k, block by block.

The same keys with and without gradients, from run to run and on every rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv32.dsa import blocked, gpu, tiling
from dsv32.dsa.plan import Bounds, even_step, row_step
from dsv32.dsa.scores import Scorer
from dsv32.dsa.settings import Settings, decline


def select(
    q: Tensor, k: Tensor, weights: Tensor, bounds: Bounds, topk: int, settings: Settings, *, relu: bool = True
) -> tuple[Tensor, Tensor]:
    """The best min(topk, sk) keys of each row and their scores, without gradients.

    q [sq, Hi, D], k [sk, D], weights [sq, Hi]. Returns int32 [sq, count], ascending with -1 in empty slots,
    and fp32 scores [sq, count] with -inf there. Equal scores go to the smaller index. Source: DeepSeek-V3.2
    report, equation 1.
    """
    sq = q.size(0)
    count = min(topk, k.size(0))
    with torch.no_grad():
        q, k, weights = q.detach().contiguous(), k.detach().contiguous(), weights.detach().contiguous()
        reason = why_torch(q, k, settings)
        if reason is not None:
            if q.is_cuda and settings.path != "torch":
                decline(settings, "indexer top-k", reason)
            scoring = blocked.Scoring(relu=relu, fp8=settings.indexer == "fp8")
            visible = tiling.Visible(bounds=bounds)
            return blocked.select(q, k, weights, visible, count, settings.byte_budget, scoring=scoring)
        indices = torch.empty(sq, count, dtype=torch.int32, device=q.device)
        picked = torch.empty(sq, count, dtype=torch.float32, device=q.device)
        if sq and count:
            scorer = Scorer.of(q, k, weights, relu, settings)
            _select_gpu(scorer, bounds, settings, indices, picked)
    return indices, picked


def _select_gpu(scorer: Scorer, bounds: Bounds, settings: Settings, indices: Tensor, picked: Tensor) -> None:
    from dsv32.dsa.kernels import topk

    sq, sk = bounds.sq, bounds.sk
    step = even_step(sq, row_step(sq, sk * 4, settings.byte_budget, 128), 128)
    buffer = torch.empty(step, -(-sk // 4) * 4, dtype=torch.float32, device=indices.device)
    for lo in range(0, sq, step):
        rows = slice(lo, min(lo + step, sq))
        starts, ends = bounds.starts[rows], bounds.ends[rows]
        scores = scorer.kernel(rows, starts, ends, sk, buffer[: rows.stop - lo])
        # Columns count from each row's first key, so that the valid ones are a prefix.
        topk.topk(scores[:, :sk], starts, ends, indices[rows], picked[rows])


def why_torch(q: Tensor, k: Tensor, settings: Settings) -> str | None:
    """Why the indexer kernels do not cover these inputs, or None."""
    if settings.path == "torch":
        return "DSV32_DSA_PATH=torch"
    reason = gpu.why_not(q, k)
    if reason is not None:
        return reason
    if gpu.nvrtc_missing():
        return "NVRTC (libnvrtc), which compiles the top-k kernel, was not found beside torch"
    if q.size(-1) != 128:
        return f"index head dim {q.size(-1)}, the kernels have 128"
    if q.size(1) not in (8, 16, 32, 64, 128):
        return f"{q.size(1)} index heads, the kernels have 8 to 128 in powers of two"
    return None
