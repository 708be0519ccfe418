"""The Triton kernels of the DSA backend in Triton's interpreter: their arithmetic is tested without a GPU.

The interpreter runs a kernel's Python with numpy on CPU tensors. It must be chosen before a kernel is
defined, hence the process of its own. bf16 products are wrong in it (numpy has no bf16), so the inputs are
fp32.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor


def missing() -> str | None:
    """Why the interpreter cannot run these kernels, or None."""
    try:
        import numpy
        import triton.tools.tensor_descriptor  # noqa: F401
    except ImportError as exc:
        return f"needs triton 3.4 or later with numpy: {exc}"
    version = tuple(int(x) for x in numpy.__version__.split(".")[:2])
    # numpy 2.4 no longer turns a one-element array into an int, which the interpreter's loops do.
    return f"numpy {numpy.__version__} is too new for triton's interpreter" if version >= (2, 4) else None


@pytest.mark.skipif(missing() is not None, reason=missing() or "")
def test_every_kernel_equals_its_definition_in_the_interpreter() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def close(got: Tensor, want: Tensor, what: str) -> None:
    # fp32 sums of at most 576 products of order one.
    size = want.double().norm().clamp_min(1e-6)
    error = ((got.double() - want.double()).norm() / size).item()
    assert error < 2e-6, f"{what}: relative error {error:.1e}"


def attention_kernels(heads: int) -> None:
    from dsv32.dsa import reference as ref
    from dsv32.dsa.kernels import tiles

    tokens, sk, scale = 20, 150, 192**-0.5
    q, kv, do = (
        torch.randn(tokens, heads, 576) * 0.3,
        torch.randn(sk, 576) * 0.3,
        torch.randn(tokens, heads, 512),
    )
    starts, ends = torch.zeros(tokens).int(), (torch.arange(tokens) + 100).int()
    starts[12:], ends[3] = 70, 0
    valid = ref.valid_mask(starts, ends, sk)
    logits = torch.einsum("qhd,kd->qhk", q.double(), kv.double()) * scale

    _, lse = ref.attention(q, kv, valid, scale, 512)
    got = tiles.statistics(q, kv, starts, ends, 0, sk, scale)
    assert torch.equal(torch.isinf(got), torch.isinf(lse))
    close(got.nan_to_num(0, 0, 0), lse.nan_to_num(0, 0, 0), "statistics")
    probs = torch.exp(logits - lse.nan_to_num(0, 0, 0)[..., None]) * valid[:, None]
    target = tiles.target(q, kv, tiles.base2(got), starts, ends, 0, sk, scale)
    close(torch.where(valid, target, 0.0), probs.sum(1), "target")

    indices = ref.topk(torch.rand(tokens, sk, dtype=torch.float64), valid, 32)
    indices = torch.where(torch.rand(indices.shape) < 0.2, -1, indices).int()
    chosen = ref.selected_mask(indices, sk)
    keep = tiles.mark(indices, 0, sk)
    assert torch.equal(keep[:tokens, :sk].bool(), chosen)
    out, lse = ref.attention(q, kv, chosen, scale, 512)
    p = torch.exp(logits - lse.nan_to_num(0, 0, 0)[..., None]) * chosen[:, None]
    delta = (out * do.double()).sum(-1)
    dp = torch.einsum("qhd,kd->qhk", do.double(), kv.double()[:, :512])
    ds = p * (dp - delta[..., None]) * scale
    got_p, got_ds = tiles.gradients(
        q, kv, tiles.base2(lse.float()), delta.float(), do, starts, ends, 0, sk, scale, keep
    )
    close(got_p.view(p.shape), p, "P")
    close(got_ds.view(ds.shape), ds, "dS")
    close(tiles.row_dot(do, do), (do.double() ** 2).sum(-1), "row_dot")
    for count in (1, 3, 4):
        for before in (None, do[0] * 5):
            want = do[:count].sum(0) + (0 if before is None else before)
            close(tiles.add_up(list(do[:count]), before, torch.float32), want, "add_up")

    dense = torch.randn(tokens, sk)
    slots = torch.full(indices.shape, 7.0)
    tiles.pick(dense, indices, 0, slots)
    want = torch.where(indices >= 0, torch.gather(dense, 1, indices.clamp_min(0).long()), 7.0)
    assert torch.equal(slots, want)
    assert torch.equal(tiles.used(indices), ((indices >= 0) * torch.arange(1, 33)).amax(1).int())
    part = torch.full_like(indices, 5)
    length = tiles.within(indices, 40, 90, part)
    for row, got_row, count in zip(indices.tolist(), part.tolist(), length.tolist(), strict=True):
        inside = [j - 40 for j in row if 40 <= j < 90]
        assert got_row == inside + [-1] * (32 - len(inside)) and count == len(inside)


def pair_kernels() -> None:
    from dsv32.dsa import attention, loss
    from dsv32.dsa import reference as ref
    from dsv32.dsa.kernels import pairs
    from dsv32.dsa.plan import causal_bounds
    from dsv32.dsa.settings import Settings

    rows, sk, topk, scale = 40, 90, 24, 192**-0.5
    q, kv, do = torch.randn(rows, 24, 576) * 0.3, torch.randn(sk, 576) * 0.3, torch.randn(rows, 24, 512)
    bounds = causal_bounds(rows, sk, q.device)
    valid = ref.valid_mask(bounds.starts, bounds.ends, sk)
    valid[5] = False
    indices = ref.topk(torch.rand(rows, sk, dtype=torch.float64), valid, topk)
    chosen = ref.selected_mask(indices, sk)

    found = pairs.inverse(indices, sk, 32)
    assert torch.equal(found.place >= 0, indices >= 0)
    for block in range(2):
        lo, hi = block * 32, min(rows, block * 32 + 32)
        order = [(int(j), t, c) for t in range(lo, hi) for c, j in enumerate(indices[t]) if j >= 0]
        for place, (_, t, c) in enumerate(sorted(order)):
            assert found.place[t, c] == place
        per_key = chosen[lo:hi].sum(0).cumsum(0)
        assert torch.equal(found.offsets[block, 1:].long(), per_key) and found.offsets[block, 0] == 0

    leaves = [t.double().requires_grad_() for t in (q, kv)]
    out, lse = ref.attention(*leaves, chosen, scale, 512)
    out.backward(do.double())
    small = Settings(byte_budget=32 * topk * 576 * 4)  # one block holds 32 rows
    got = attention.pairs_backward(
        q, kv, indices, out.detach().float(), lse.detach().float(), do, scale, small
    )
    for name, mine, leaf in zip(("dq", "dkv"), got, leaves, strict=True):
        close(mine, leaf.grad, name + " by pairs")

    for relu in (True, False):
        iq, ik, iw = torch.randn(rows, 16, 128), torch.randn(sk, 128), torch.randn(rows, 16)
        di = torch.randn(rows, topk) * (indices >= 0)
        dense = torch.zeros(rows, sk + 1, dtype=torch.float64)
        dense.scatter_(1, torch.where(indices >= 0, indices, sk).long(), di.double())
        leaves = [t.double().requires_grad_() for t in (iq, ik, iw)]
        (ref.scores(*leaves, relu) * dense[:, :sk] * 0.7).sum().backward()
        inputs = loss.LossInputs(query=q, kv=kv, scale=scale, bounds=bounds, relu=relu, indices=indices)
        grads = loss._score_gradient_by_pairs(
            iq, ik, iw, di, torch.tensor(0.7), indices, inputs, Settings(byte_budget=1 << 19)
        )
        for name, mine, leaf in zip(("dq", "dk", "dw"), grads, leaves, strict=True):
            close(mine, leaf.grad, name + " by pairs")


def fp8_kernels() -> None:
    from dsv32.dsa import streaming
    from dsv32.dsa.kernels import indexer

    x = torch.randn(50, 4, 128) * torch.randn(50, 4, 1).exp()
    x[3], x[4, 0, :] = 0.0, 448.0
    # The interpreter cuts fp32 to fp8 where the GPU rounds: only the scales are compared here.
    assert torch.equal(indexer.quantise(x)[1], streaming.quantise(x)[1][..., 0])


def kl_rows(target: Tensor, logits: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """fp64 (KL(target / its sum || softmax(logits)) per row, d(KL)/d(logits)) on `valid`."""
    eps = 1e-10  # megatron-core 0.19.2 dsa_indexer_loss.INDEXER_LOSS_EPS
    target = target.double().masked_fill(~valid, 0.0)
    target = target / target.sum(-1, keepdim=True).clamp_min(eps)
    some = valid.any(-1, keepdim=True)
    logp = logits.double().masked_fill(~valid, float("-inf")).masked_fill(~some, 0.0).log_softmax(-1)
    terms = target * (target.clamp_min(eps).log() - logp)
    return terms.masked_fill(~valid, 0.0).sum(-1), (logp.exp() - target).masked_fill(~valid, 0.0)


def indexer_kernels(heads: int, relu: bool) -> None:
    from dsv32.dsa import reference as ref
    from dsv32.dsa.kernels import indexer, kl

    rows, sk = 20, 150
    q, k, w = torch.randn(rows, heads, 128), torch.randn(sk, 128), torch.randn(rows, heads) * 0.1
    starts, ends = torch.zeros(rows).int(), (torch.arange(rows) + 100).int()
    starts[12:], ends[3] = 70, 0
    valid = ref.valid_mask(starts, ends, sk)
    want = ref.scores(q, k, w, relu)
    got = torch.full((rows, sk), float("nan"))
    indexer.scores(q, k, w, starts, ends, sk, relu, got)
    for i in range(rows):
        count = max(0, int(ends[i] - starts[i]))
        close(got[i, :count], want[i, starts[i] : starts[i] + count], "scores")
        assert torch.isnan(got[i, count:]).all()

    di = indexer.padded(rows, sk, q.device).zero_()
    di[:rows, :sk] = torch.randn(rows, sk) * valid
    leaves = [t.double().requires_grad_() for t in (q, k, w)]
    (ref.scores(*leaves, relu) * di[:rows, :sk].double()).sum().backward()
    dq, dw, dk = indexer.gradient(q, k, w, di, starts, ends, 0, sk, relu)
    for name, mine, leaf in zip(("dq", "dk", "dw"), (dq, dk, dw), leaves, strict=True):
        close(mine, leaf.grad, name)

    target, logits, counted = torch.rand(rows, sk), torch.randn(rows, sk), torch.arange(rows) % 3 != 0
    factor = torch.tensor(0.7)
    per_row, grad = kl.dense(target, logits, starts, ends, 0, counted, factor)
    ref_kl, ref_grad = kl_rows(target, logits, valid & counted[:, None])
    close(per_row, ref_kl, "kl dense")
    close(grad[:rows, :sk], ref_grad * 0.7, "kl dense gradient")
    assert not grad[rows:].any() and not grad[:, sk:].any()

    indices = ref.topk(torch.rand(rows, sk, dtype=torch.float64), valid, 32)
    target, logits = torch.rand(rows, 32), torch.randn(rows, 32)
    ref_kl, ref_grad = kl_rows(target, logits, (indices >= 0) & counted[:, None])
    per_row, predict = kl.sparse(target, logits, indices, counted)
    close(per_row, ref_kl, "kl sparse")
    close(predict - target, ref_grad, "kl sparse gradient")
    spread = indexer.spread(ref_grad.float(), indices, torch.tensor(2.0), 50, 70)
    whole = torch.zeros(rows, sk + 1).scatter_(
        1, torch.where(indices >= 0, indices, sk).long(), ref_grad.float() * 2
    )
    assert torch.equal(spread[:rows, :70], whole[:, 50:120])


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
    torch.manual_seed(0)
    for n in (8, 32):
        attention_kernels(n)
    for n, relu in ((16, True), (64, True), (8, False)):
        indexer_kernels(n, relu)
    pair_kernels()
    fp8_kernels()
