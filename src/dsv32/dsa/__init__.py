"""DeepSeek Sparse Attention for training: a megatron-core `dsa_kernel_backend` and the operations behind it.

`dsa_kernel_backend: dsv32.dsa` makes megatron-core call the four hooks below. On Hopper they run GPU kernels,
anywhere else PyTorch in blocks of a byte budget, with the same masks and tie rule. `docs/dsa-kernels.md`
says which kernel runs when and how fast.
"""

from dsv32.dsa.megatron import (
    run_fused_absorbed_sparse_attention,
    run_fused_dsa_attention,
    run_fused_qk_topk,
    run_fused_qk_topk_with_loss,
)
from dsv32.dsa.settings import DsaDeclined, Settings

__all__ = [
    "DsaDeclined",
    "Settings",
    "run_fused_absorbed_sparse_attention",
    "run_fused_dsa_attention",
    "run_fused_qk_topk",
    "run_fused_qk_topk_with_loss",
]
