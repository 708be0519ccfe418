"""What our calls hand to kernels that are picky about formats; no GPU needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from dsv32.dsa import gpu

if TYPE_CHECKING:
    import pytest

BF16 = torch.bfloat16


def test_fp32_index_weights_reach_cudnn_as_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    # Megatron's indexer keeps weights_proj in fp32 (patch 0010); nvidia-cudnn-frontend 1.32.0 refuses that:
    # deepseek_sparse_attention/indexer_backward/api.py checks weights and d_weights for bf16.
    seen: dict[str, torch.dtype] = {}

    def wrapper(q: Any, weights: Any, k: Any, *_: Any, **__: Any) -> dict[str, Any]:
        seen.update(q=q.dtype, weights=weights.dtype, k=k.dtype)
        return {"d_index_q": q, "d_weights": weights, "d_index_k": k}

    monkeypatch.setattr(gpu, "cudnn_dsa", lambda: SimpleNamespace(indexer_backward_wrapper=wrapper))
    q, k, weights = torch.ones(3, 64, 128, dtype=BF16), torch.ones(5, 128, dtype=BF16), torch.ones(3, 64)
    scores, indices = torch.ones(3, 4), torch.zeros(3, 4, dtype=torch.int32)
    gpu.indexer_backward(q, k, weights, scores, scores, indices, torch.ones(()))
    assert seen == {"q": BF16, "weights": BF16, "k": BF16}
