"""Which public kernels are usable here, and thin calls into them.

FlashMLA (wheel sgl-flash-mla 1.0.0, forward, saves the log-sum-exp) and the cuDNN frontend's DSA kernels
(1.32.0: scores, top-k, KL target, both backward passes). Both are imported at first use, so that this package
imports on CPU.
"""

# ruff: noqa: ANN401  # modules of optional wheels without type information
from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor


@functools.lru_cache(maxsize=1)
def flash_mla() -> Any | None:
    """The FlashMLA module, or None where it cannot be imported."""
    try:
        return importlib.import_module("flash_mla")
    except (ImportError, OSError):
        return None


@functools.lru_cache(maxsize=1)
def cudnn_dsa() -> Any | None:
    """cuDNN frontend's DSA namespace, or None where it cannot be imported."""
    try:
        return importlib.import_module("cudnn").DSA
    except (ImportError, OSError, AttributeError):
        return None


@functools.lru_cache(maxsize=1)
def have_triton() -> bool:
    """Whether Triton imports."""
    try:
        importlib.import_module("triton")
    except ImportError:
        return False
    return True


def nvrtc_missing() -> bool:
    """Whether the compiler of the CUDA C++ kernels is not to be found."""
    from dsv32.dsa.kernels import cuda

    return cuda.nvrtc() is None


def why_not(*tensors: Tensor) -> str | None:
    """The reason why these tensors cannot use the GPU kernels at all, or None."""
    if not all(t.is_cuda for t in tensors):
        return "a tensor is not on a CUDA device"
    if torch.cuda.get_device_capability(tensors[0].device)[0] != 9:
        return "the device is not Hopper (compute capability 9.x)"
    if any(t.dtype != torch.bfloat16 for t in tensors):
        return f"inputs must be bfloat16, got {sorted({str(t.dtype) for t in tensors})}"
    if not have_triton():
        return "triton is not installed"
    return None


def pad_columns(indices: Tensor, multiple: int) -> Tensor:
    """int32 [rows, topk] padded with -1 to a multiple of `multiple` columns, contiguous."""
    extra = -indices.size(1) % multiple
    if extra:
        indices = torch.nn.functional.pad(indices, (0, extra), value=-1)
    return indices.contiguous()


def pad_heads(x: Tensor, heads: int) -> Tensor:
    """[sq, H, D] zero-padded to `heads` heads."""
    if x.size(1) == heads:
        return x.contiguous()
    return torch.nn.functional.pad(x, (0, 0, 0, heads - x.size(1)))


def widen_heads(q: Tensor, heads: int) -> Tensor:
    """A [sq, heads, D] view whose first q.size(1) heads are q's; the rest overlap the following tokens.

    FlashMLA computes 64 heads at least. Writing 48 zero heads a token costs four times q's bytes; what the
    unused heads hold does not matter as long as it is readable and finite, so they alias the next tokens'
    heads. One copy of q with a tail of zeros keeps the last tokens' view inside the storage.
    """
    sq, have, dim = q.shape
    if have == heads:
        return q.contiguous()
    flat = torch.empty(sq * have + heads - have, dim, dtype=q.dtype, device=q.device)
    flat[: sq * have].view(sq, have, dim).copy_(q)
    flat[sq * have :].zero_()
    return flat.as_strided((sq, heads, dim), (have * dim, dim, 1))


def forward(q: Tensor, kv: Tensor, indices: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """FlashMLA sparse forward: out bf16 [sq, H, 512], lse fp32 [sq, H] (natural log, -inf without keys).

    q [sq, H, 576] with H <= 128, kv [sk, 576], indices int32 [sq, topk] with -1 for empty.
    """
    from dsv32.dsa.kernels import tiles

    heads = q.size(1)
    full = 64 if heads <= 64 else 128
    module = flash_mla()
    assert module is not None
    idx = pad_columns(indices, 128)
    out, _, lse = module.flash_mla_sparse_fwd(
        widen_heads(q, full), kv[:, None], idx[:, None], scale, topk_length=tiles.used(idx), use_legacy=True
    )
    # FlashMLA reports +inf for a row without keys; the mathematical value is -inf.
    lse = torch.where(torch.isinf(lse), torch.full_like(lse, float("-inf")), lse)
    return out[:, :heads].contiguous(), lse[:, :heads].contiguous()


# fp32 rows of dKV that stay in the second-level cache while atomics add to them: 16,384 rows of 2,304 bytes
# are 38 MB of its 60 MB. Measured: 3.7 TB/s of reductions up to there, 1.7 TB/s on 65,536 rows.
RESIDENT_KEYS = 16384


def backward(
    q: Tensor, kv: Tensor, indices: Tensor, out: Tensor, lse: Tensor, dout: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """cuDNN sparse backward (atomic dKV): dq [sq, H, 576] and dkv [sk, 576] in bf16.

    Long contexts are walked by ranges of RESIDENT_KEYS keys: P and dS of a key depend on the row's
    log-sum-exp and delta only, so the ranges are independent, dkv is complete within one, and dq is their
    sum.
    """
    from dsv32.dsa.kernels import tiles

    heads, sk = q.size(1), kv.size(0)
    full = max(16, heads)
    idx = pad_columns(indices, 64)
    lse = torch.where(torch.isinf(lse), torch.zeros_like(lse), lse)
    if full != heads:
        q, out, dout = (pad_heads(t, full) for t in (q, out, dout))
        lse = torch.nn.functional.pad(lse, (0, full - heads))
    fixed = (q.contiguous(), out.contiguous(), dout.contiguous(), lse.contiguous())
    if sk <= 2 * RESIDENT_KEYS:
        dq, dkv = _cudnn_backward(fixed, kv, idx, tiles.used(idx), scale)
        return dq[:, :heads], dkv
    dq = None
    shares: list[Tensor] = []
    dkv = torch.empty_like(kv)
    part = torch.empty_like(idx)
    for lo in range(0, sk, RESIDENT_KEYS):
        hi = min(lo + RESIDENT_KEYS, sk)
        length = tiles.within(idx, lo, hi, part)
        share, dkv[lo:hi] = _cudnn_backward(fixed, kv[lo:hi], part, length, scale)
        shares.append(share)
        if len(shares) == 4 or hi == sk:
            # Four at a time: a running fp32 sum would be read and written for every range.
            dq = tiles.add_up(shares, dq, torch.float32 if hi < sk else q.dtype)
            shares.clear()
    assert dq is not None
    return dq[:, :heads], dkv


def _cudnn_backward(
    fixed: tuple[Tensor, Tensor, Tensor, Tensor], kv: Tensor, indices: Tensor, length: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    q, out, dout, lse = fixed
    sink = torch.full((q.size(1),), float("-inf"), device=q.device)
    dsa = cudnn_dsa()
    assert dsa is not None
    got = dsa.sparse_attention_backward_wrapper(
        q, kv, out, dout, lse, sink, indices, softmax_scale=scale, topk_length=length
    )
    return got["dq"], got["dkv"]


def causal_scores(q: Tensor, k: Tensor, weights: Tensor, offset: int) -> Tensor:
    """cuDNN indexer scores fp32 [rows, sk]; row i sees keys j <= i + offset.

    q bf16 [rows, Hi, 128], k bf16 [sk, 128], weights [rows, Hi].
    """
    dsa = cudnn_dsa()
    assert dsa is not None
    offsets = torch.full((1,), offset, dtype=torch.int32, device=q.device)
    got = dsa.indexer_forward_wrapper(
        q[None], k[None, :, None], weights[None], ratio=1, sm_scale=1.0, q_causal_offsets=offsets
    )
    scores: Tensor = got["scores"][0]
    return scores


def sparse_target(query: Tensor, kv: Tensor, lse: Tensor, indices: Tensor, scale: float) -> Tensor:
    """cuDNN KL target: sum over heads of exp(s - lse) at the chosen keys, fp32 [sq, topk]."""
    heads = query.size(1)
    topk_count = indices.size(1)
    if query.size(0) == 1:
        # The wrapper takes the strides of a dimension of one row for a layout it does not know.
        return sparse_target(query.expand(2, -1, -1), kv, lse.expand(2, -1), indices.expand(2, -1), scale)[
            :1
        ].contiguous()
    query = query.contiguous()
    idx = pad_columns(indices, 128)
    lse = torch.where(torch.isinf(lse), torch.zeros_like(lse), lse)
    if heads < 16:
        # An added head must add nothing to the sum: exp(0 - inf) = 0.
        query = pad_heads(query, 16)
        lse = torch.nn.functional.pad(lse, (0, 16 - heads), value=float("inf"))
    dsa = cudnn_dsa()
    assert dsa is not None
    got = dsa.sparse_attn_score_recompute_wrapper(
        query[None],
        kv[None],
        lse[None].contiguous(),
        idx[None],
        softmax_scale=scale,
        qhead_per_kv_head=query.size(1),
    )
    out: Tensor = got["target"][0, :, :topk_count]
    return out.contiguous()  # it is summed over tensor-parallel ranks next


def indexer_backward(
    q: Tensor, k: Tensor, weights: Tensor, target: Tensor, predict: Tensor, indices: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """cuDNN sparse indexer backward of scale * sum(KL): (dq, dw, dk). target is overwritten.

    target, predict fp32 [sq, topk], both 0 in slots that do not count; scale: fp32 tensor of one element.
    weights may be fp32, as the fp32 projection of the indexer gives them: the kernel takes bf16 alone, which
    rounds them once in dq and dk. The choice of keys and the loss have seen them unrounded.
    """
    sq = q.size(0)
    dsa = cudnn_dsa()
    assert dsa is not None
    got = dsa.indexer_backward_wrapper(
        q[None],
        weights.to(q.dtype)[None],
        k[None],
        target[None],
        predict[None],
        indices[None],
        scale.reshape(1),
        loss_coeff=float(sq),
    )
    return got["d_index_q"][0], got["d_weights"][0], got["d_index_k"][0]
