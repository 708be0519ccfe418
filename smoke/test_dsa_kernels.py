"""The DSA kernels on a Hopper GPU against dense fp64: fresh random inputs, every odd shape, poisoned outputs.

Tolerances are norms of the error over norms of the fp64 result. bf16 keeps 8 bits: one rounding is at most
2^-9 = 2e-3 of a value and about 1.1e-3 of a norm. The output rounds P and the result; a gradient rounds P or
dS, out (inside delta) and the result. Sums are fp32. Hence 4e-3 for the output, 8e-3 for gradients; stock
Megatron's forward has 2.3e-3.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from dsv32 import dsa
from dsv32.dsa import attention, gpu, loss, plan, reference, selection, streaming
from dsv32.dsa.settings import DsaDeclined, Settings

if TYPE_CHECKING:
    from collections.abc import Iterator


def missing() -> str | None:
    """What this machine lacks for these tests, or None."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.cuda.get_device_capability()[0] != 9:
        return f"needs a Hopper GPU, found compute capability {torch.cuda.get_device_capability()}"
    if not gpu.have_triton():
        return "triton is not installed"
    if gpu.flash_mla() is None:
        return "flash_mla (wheel sgl-flash-mla) is not importable"
    if gpu.cudnn_dsa() is None:
        return "cudnn.DSA (wheel nvidia-cudnn-frontend with nvidia-cutlass-dsl) is not importable"
    return None


pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

SCALE = 192**-0.5
OUTPUT, GRADIENT = 4e-3, 8e-3
STRICT = Settings(strict=True, byte_budget=64 << 20)
DETERMINISTIC = replace(STRICT, deterministic=True)
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill the allocator's free blocks with NaN: an element that a kernel does not write shows up as NaN."""
    torch.cuda.empty_cache()
    poison = [torch.full((n << 18,), float("nan"), device="cuda") for n in (1, 4, 16, 64, 256)]
    small = [torch.full((1 << n,), float("nan"), device="cuda") for n in range(6, 18) for _ in range(8)]
    torch.cuda.synchronize()
    del poison, small
    yield


def error(got: Tensor, want: Tensor) -> float:
    assert not torch.isnan(got).any(), "an output element is NaN or was never written"
    size = want.double().norm()
    if size == 0:  # a softmax over one key has no gradient; what is left is the rounding of out inside delta
        size = torch.tensor(got.numel(), device=got.device).double().sqrt()
    return ((got.double() - want.double()).norm() / size).item()


def rand(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(BF16)


def packed(lengths: list[int], extra: int = 0) -> plan.Bounds:
    """Causal bounds of packed sequences; `extra` trailing rows see nothing."""
    start = torch.repeat_interleave(
        torch.tensor([sum(lengths[:i]) for i in range(len(lengths))]), torch.tensor(lengths)
    )
    end = torch.arange(sum(lengths)) + 1
    start, end = (torch.nn.functional.pad(t.int(), (0, extra)).cuda() for t in (start, end))
    return plan.Bounds(starts=start, ends=end, sk=sum(lengths))


def zigzag(total: int, ranks: int, rank: int) -> plan.Bounds:
    part = total // (2 * ranks)
    rows = torch.cat(
        (
            torch.arange(rank * part, (rank + 1) * part),
            torch.arange(total - (rank + 1) * part, total - rank * part),
        )
    )
    rows = rows.int().cuda()
    return plan.Bounds(starts=torch.zeros_like(rows), ends=rows + 1, sk=total)


def causal(sq: int, sk: int) -> plan.Bounds:
    return plan.causal_bounds(sq, sk, torch.device("cuda"))


SHAPES = {
    "causal, odd length": lambda: causal(333, 333),
    "more keys than queries": lambda: causal(130, 1111),
    "one token": lambda: causal(1, 1),
    "one query, many keys": lambda: causal(1, 700),
    "packed with empty rows": lambda: packed([200, 1, 129, 64], extra=6),
    "context parallel chunks": lambda: zigzag(512, 2, 1),
}


def choose(bounds: plan.Bounds, topk: int) -> Tensor:
    """Random distinct valid keys per row, ascending, -1 in empty slots."""
    valid = reference.valid_mask(bounds.starts, bounds.ends, bounds.sk)
    return reference.topk(
        torch.rand(valid.shape, device="cuda", dtype=torch.float64), valid, min(topk, bounds.sk)
    )


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
def test_attention_and_both_backward_passes_equal_fp64(name: str, heads: int) -> None:
    bounds = SHAPES[name]()
    q, kv = rand(bounds.sq, heads, 576, scale=0.5), rand(bounds.sk, 576, scale=0.5)
    indices, dout = choose(bounds, 128), rand(bounds.sq, heads, 512)
    q64, kv64 = q.double().requires_grad_(), kv.double().requires_grad_()
    want, want_lse = reference.attention(q64, kv64, reference.selected_mask(indices, bounds.sk), SCALE, 512)
    want.backward(dout.double())
    assert q64.grad is not None and kv64.grad is not None
    q1, kv1 = q.clone().requires_grad_(), kv.clone().requires_grad_()
    out, lse = attention.SparseAttention.apply(q1, kv1, indices, SCALE, 512, STRICT, bounds)
    assert error(out, want.detach()) < OUTPUT
    empty = torch.isinf(want_lse)
    assert torch.equal(torch.isinf(lse), empty)
    torch.testing.assert_close(
        lse.double()[~empty], want_lse.detach()[~empty], rtol=0, atol=1e-4
    )  # fp32 sums of fp32 logits
    for way in ("tiles", "pairs", "atomics"):
        dq, dkv = attention.attention_backward(q, kv, indices, out, lse, dout, SCALE, STRICT, bounds, way=way)
        assert error(dq, q64.grad) < GRADIENT, way
        assert error(dkv, kv64.grad) < GRADIENT, way
    out.backward(dout)
    assert error(q1.grad, q64.grad) < GRADIENT and error(kv1.grad, kv64.grad) < GRADIENT


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("heads", [16, 64])
def test_selection_follows_its_own_scores_and_the_tie_rule(name: str, heads: int) -> None:
    bounds = SHAPES[name]()
    q, k, w = rand(bounds.sq, heads, 128), rand(bounds.sk, 128), rand(bounds.sq, heads, scale=0.1)
    indices, picked = selection.select(q, k, w, bounds, 96, STRICT)
    exact = reference.scores(q, k, w)
    valid = reference.valid_mask(bounds.starts, bounds.ends, bounds.sk)
    want = reference.topk(exact, valid, min(96, bounds.sk))
    assert torch.equal((indices >= 0).sum(-1), (want >= 0).sum(-1))
    filled = indices >= 0
    got = torch.gather(exact, 1, indices.clamp_min(0).long())
    # fp32 products and sums of `heads` terms: a few times 2^-23 of the largest partial sum.
    tol = 1e-5 * exact.abs().amax()
    assert ((got - picked).abs()[filled] <= tol).all() if filled.any() else True
    # Whatever differs from the exact choice lies within rounding of the last chosen score.
    mine, ref = reference.selected_mask(indices, bounds.sk), reference.selected_mask(want, bounds.sk)
    last = torch.where(ref, exact, torch.inf).amin(-1, keepdim=True)
    assert ((exact - last).abs()[mine != ref] <= 2 * tol).all()
    assert ((indices[:, 1:] > indices[:, :-1]) | (indices[:, 1:] < 0)).all()


@pytest.mark.parametrize("name", ["causal, odd length", "packed with empty rows"])
def test_equal_scores_go_to_the_smaller_index(name: str) -> None:
    bounds = SHAPES[name]()
    q, w = rand(bounds.sq, 64, 128), rand(bounds.sq, 64)
    indices, _ = selection.select(
        q, torch.zeros(bounds.sk, 128, device="cuda", dtype=BF16), w, bounds, 64, STRICT
    )
    step = torch.arange(64, device="cuda")[None]
    want = torch.where(step < bounds.lengths()[:, None], bounds.starts[:, None] + step, -1)
    assert torch.equal(indices, want[:, : indices.size(1)].int())


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("settings", [STRICT, DETERMINISTIC], ids=["fast", "deterministic"])
@pytest.mark.parametrize("heads,index_heads", [(16, 64), (8, 32), (128, 64)])
def test_indexer_loss_and_gradients_equal_fp64(
    name: str, sparse: bool, settings: Settings, heads: int, index_heads: int
) -> None:
    bounds = SHAPES[name]()
    query, kv = rand(bounds.sq, heads, 576, scale=0.5), rand(bounds.sk, 576, scale=0.5)
    leaves = [
        rand(bounds.sq, index_heads, 128),
        rand(bounds.sk, 128),
        rand(bounds.sq, index_heads, scale=0.02),
    ]
    rows = torch.arange(bounds.sq, device="cuda") % 5 != 2 if bounds.sq > 1 else None
    indices, picked = selection.select(*leaves, bounds, 128, settings)
    valid = reference.valid_mask(bounds.starts, bounds.ends, bounds.sk)
    mask = reference.selected_mask(indices, bounds.sk) if sparse else valid
    _, lse = reference.attention(query, kv, mask, SCALE, 512)
    inputs = loss.LossInputs(
        query=query,
        kv=kv,
        scale=SCALE,
        bounds=bounds,
        lse=lse.float(),
        indices=indices,
        picked=picked,
        rows=rows,
    )
    mine = [t.clone().requires_grad_() for t in leaves]
    factor = torch.tensor(0.3 / bounds.sq, device="cuda")
    got = loss.IndexerLoss.apply(*mine, inputs, factor, sparse, settings)
    got.backward()
    ref = [t.double().requires_grad_() for t in leaves]
    want = reference.kl_sum(query, kv, SCALE, reference.scores(*ref), mask, rows) * factor.double()
    want.backward()
    # Targets and scores are fp32 of exact bf16 products; KL is a difference of logarithms of order one.
    torch.testing.assert_close(got.double(), want.detach(), rtol=2e-4, atol=1e-6)
    if bounds.sk == 1:
        return  # one key: the gradient is zero, and so is the norm to divide by
    for a, b, what in zip(mine, ref, ("q", "k", "weights"), strict=True):
        assert error(a.grad, b.grad) < GRADIENT, what


def layer(bounds: plan.Bounds, heads: int, batch: int = 1) -> dict[str, object]:
    sq, sk = bounds.sq, bounds.sk
    return {
        "config": SimpleNamespace(kv_lora_rank=512, deterministic_mode=False),
        "query": rand(sq, batch, heads, 576, scale=0.5).requires_grad_(),
        "value": None,
        "key": rand(sk, batch, 1, 576, scale=0.5).requires_grad_(),
        "up_v_weight": rand(heads, 128, 512, scale=0.05),
        "q_indexer": rand(sq, batch, 64, 128).requires_grad_(),
        "k_indexer": rand(sk, batch, 128).requires_grad_(),
        "indexer_weights": rand(sq, batch, 64, scale=0.02).requires_grad_(),
        "indexer_topk": 256,
        "softmax_scale": SCALE,
        "loss_coeff": 0.5,
        "sparse_loss": True,
        "calculate_per_token_loss": False,
        "absorbed_mla": True,
        "varlen_starts": bounds.starts,
        "varlen_ends": bounds.ends,
        "key_positions": None,
        "query_valid_rows": None,
        "use_relu": True,
        "cp_size": 1,
    }


LEAVES = ("query", "key", "q_indexer", "k_indexer", "indexer_weights")


def step(args: dict[str, object], grad: Tensor) -> list[Tensor]:
    """Output, loss and the five gradients of one forward and backward."""
    for name in LEAVES:
        args[name].grad = None
    output, kl = dsa.run_fused_dsa_attention(**args)
    torch.autograd.backward([output, kl], [grad, torch.ones_like(kl)])
    return [output.detach(), kl.detach(), *(args[name].grad for name in LEAVES)]


@pytest.mark.parametrize("sparse", [True, False])
def test_deterministic_mode_is_bitwise_equal_from_run_to_run(
    sparse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSV32_DSA_STRICT", "1")
    args = layer(causal(1500, 1500), 16)
    args["config"] = SimpleNamespace(kv_lora_rank=512, deterministic_mode=True)
    args["sparse_loss"] = sparse
    grad = rand(1500, 1, 16 * 128)
    first = [t.clone() for t in step(args, grad)]
    for _ in range(3):
        for a, b in zip(first, step(args, grad), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("way", ["tiles", "pairs"])
def test_backward_without_float_atomics_is_bitwise_equal_from_run_to_run(way: str) -> None:
    bounds = causal(700, 3000)
    q, kv, dout = rand(700, 16, 576, scale=0.5), rand(3000, 576, scale=0.5), rand(700, 16, 512)
    indices = choose(bounds, 512)
    out, lse = attention.SparseAttention.apply(q, kv, indices, SCALE, 512, STRICT, bounds)
    runs = [
        attention.attention_backward(q, kv, indices, out, lse, dout, SCALE, STRICT, bounds, way=way)
        for _ in range(4)
    ]
    for dq, dkv in runs[1:]:
        assert torch.equal(dq, runs[0][0]) and torch.equal(dkv, runs[0][1])


def test_score_gradient_by_pairs_equals_fp64_and_itself_bitwise() -> None:
    bounds = packed([700, 1, 299], extra=5)
    leaves = [rand(bounds.sq, 64, 128), rand(bounds.sk, 128), rand(bounds.sq, 64, scale=0.02)]
    indices = choose(bounds, 128)
    di = torch.randn(indices.shape, device="cuda").masked_fill(indices < 0, 0.0)
    factor = torch.tensor(0.3, device="cuda")
    inputs = loss.LossInputs(query=leaves[0], kv=leaves[1], scale=SCALE, bounds=bounds, indices=indices)
    ref = [t.double().requires_grad_() for t in leaves]
    dense = torch.zeros(bounds.sq, bounds.sk + 1, device="cuda", dtype=torch.float64)
    dense.scatter_(1, torch.where(indices >= 0, indices, bounds.sk).long(), di.double())
    (reference.scores(*ref) * dense[:, :-1] * factor.double()).sum().backward()
    runs = [loss._score_gradient_by_pairs(*leaves, di, factor, indices, inputs, STRICT) for _ in range(3)]
    for got, leaf, what in zip(runs[0], ref, ("q", "k", "weights"), strict=True):
        assert error(got, leaf.grad) < GRADIENT, what
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


SCORES = {
    "normal": lambda s: s,
    "many ties": lambda s: (s * 4).round(),
    "all equal": lambda s: torch.full_like(s, -0.0),
    "one cluster": lambda s: s + 9.0 * ((torch.arange(s.size(1), device="cuda") % 4099) < 1500),
    "mostly zero": lambda s: s.relu() * (torch.rand_like(s) < 0.02),
    "infinite and huge": lambda s: (s * 60).exp() * s.sign(),
}


@pytest.mark.parametrize("width", [1, 300, 8192, 8193, 40000, 131072])
@pytest.mark.parametrize("name", SCORES)
def test_topk_equals_a_stable_sort(name: str, width: int) -> None:
    """Every path: short rows, registers, sample and packing, rows that mislead the sample."""
    from dsv32.dsa.kernels import topk

    rows = 24
    scores = SCORES[name](torch.randn(rows, width, device="cuda"))
    starts = torch.randint(0, 9, (rows,), device="cuda").int()
    ends = starts + torch.randint(0, width + 1, (rows,), device="cuda").int()
    ends[:6], ends[6] = starts[:6] + width, starts[6]
    for count in sorted({1, min(100, width), min(2048, width)}):
        indices = torch.full((rows, count), 77, dtype=torch.int32, device="cuda")
        picked = torch.full((rows, count), float("nan"), device="cuda")
        topk.topk(scores, starts, ends, indices, picked)
        valid = torch.arange(width, device="cuda")[None] < (ends - starts)[:, None]
        want = reference.topk(scores, valid, count)
        values = torch.gather(scores, 1, want.clamp_min(0).long()).masked_fill(want < 0, float("-inf"))
        assert torch.equal(indices, torch.where(want >= 0, want + starts[:, None], -1).int())
        assert torch.equal(picked, values)


def test_topk_of_nan_scores_stays_within_the_row() -> None:
    """A diverged run must show NaN, not read keys that nobody chose."""
    from dsv32.dsa.kernels import topk

    scores = torch.randn(4, 20000, device="cuda")
    scores[0], scores[1, ::2], scores[2, :300] = float("nan"), float("nan"), float("nan")
    scores[3].view(torch.int32).fill_(-1)
    starts = torch.zeros(4, dtype=torch.int32, device="cuda")
    for width in (5000, 20000):
        indices = torch.full((4, 512), -7, dtype=torch.int32, device="cuda")
        picked = torch.empty(4, 512, device="cuda")
        topk.topk(scores[:, :width], starts, starts + width, indices, picked)
        assert ((indices >= 0) & (indices < width)).all()
        assert (indices[:, 1:] > indices[:, :-1]).all()


def test_fp8_values_are_those_of_the_reference_and_so_are_the_scores() -> None:
    from dsv32.dsa.kernels import indexer

    x = (torch.randn(300, 64, 128, device="cuda") * torch.randn(300, 64, 1, device="cuda").exp()).to(BF16)
    x[0], x[1, 0] = 0.0, 448.0
    want, got = streaming.quantise(x), indexer.quantise(x)
    assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8))
    assert torch.equal(got[1], want[1][..., 0])
    bounds = packed([200, 1, 129, 64], extra=6)
    q, k, w = rand(bounds.sq, 64, 128), rand(bounds.sk, 128), rand(bounds.sq, 64, scale=0.1)
    indices, picked = selection.select(q, k, w, bounds, 96, replace(STRICT, indexer="fp8"))
    exact = reference.scores(streaming.through_fp8(q), streaming.through_fp8(k), w)
    filled = indices >= 0
    chosen = torch.gather(exact, 1, indices.clamp_min(0).long())[filled]
    # Hopper's fp8 products keep about 14 bits of a sum (DeepSeek-V3 report, section 3.3.2).
    assert error(picked[filled], chosen) < 2**-12


def test_batch_of_two_equals_each_alone_and_the_fused_path_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV32_DSA_STRICT", "1")  # strict: leaving the fused path would raise
    calls: list[str] = []
    original = gpu.forward
    monkeypatch.setattr(gpu, "forward", lambda *a: (calls.append("forward"), original(*a))[1])
    args = layer(packed([300, 77, 135]), 16, batch=2)
    both, kl = dsa.run_fused_dsa_attention(**args)
    assert calls == ["forward", "forward"]
    parts = []
    for i in range(2):
        one = {k: v[:, i : i + 1] if k in LEAVES else v for k, v in args.items()}
        alone, part = dsa.run_fused_dsa_attention(**one)
        assert torch.equal(alone[:, 0], both[:, i])
        parts.append(part)
    torch.testing.assert_close(kl, (parts[0] + parts[1]) / 2, rtol=1e-6, atol=0)  # fp32 sums in another order


def test_a_forward_without_gradients_chooses_the_same_keys() -> None:
    bounds = causal(900, 900)
    leaves = [rand(900, 64, 128).requires_grad_(), rand(900, 128), rand(900, 64)]
    a, _ = selection.select(*leaves, bounds, 256, STRICT)
    with torch.no_grad():
        b, _ = selection.select(*leaves, bounds, 256, STRICT)
    assert torch.equal(a, b)


def test_non_contiguous_and_offset_inputs_give_the_same_bits() -> None:
    bounds = causal(200, 300)
    store, kv = rand(200, 16, 1200), rand(300, 577)[:, 1:]
    q, indices = store[..., 7:583], choose(bounds, 64)
    a, _ = attention.SparseAttention.apply(q, kv, indices, SCALE, 512, STRICT, bounds)
    b, _ = attention.SparseAttention.apply(q.contiguous(), kv.contiguous(), indices, SCALE, 512, STRICT, None)
    assert torch.equal(a, b)


def test_long_keys_index_past_two_to_the_31_elements() -> None:
    """131072 keys: blocks of more than 2^31 bytes, and keys far out in a row."""
    sq, sk = 192, 131072
    bounds = causal(sq, sk)
    q, k, w = rand(sq, 64, 128), rand(sk, 128), rand(sq, 64, scale=0.1)
    indices, picked = selection.select(q, k, w, bounds, 2048, replace(STRICT, byte_budget=32 << 20))
    assert int(indices.max()) > 100_000
    for i in (0, 77, sq - 1):
        exact = reference.scores(q[i : i + 1], k, w[i : i + 1])[0]
        got = exact[indices[i].long()]
        assert (got - picked[i]).abs().max() <= 1e-5 * exact.abs().max()
        cut = exact[: int(bounds.ends[i])].topk(2048).values[-1]
        assert got.min() >= cut - 2e-5 * exact.abs().max()
    heads = 16
    query, kv, dout = rand(sq, heads, 576, scale=0.5), rand(sk, 576, scale=0.5), rand(sq, heads, 512)
    out, lse = attention.SparseAttention.apply(query, kv, indices, SCALE, 512, STRICT, bounds)
    big = replace(STRICT, byte_budget=4 << 30)  # [3072, 131072] twice: offsets of 805 M elements, 1.6 GB
    a = attention.attention_backward(query, kv, indices, out, lse, dout, SCALE, big, bounds, way="tiles")
    b = attention.attention_backward(query, kv, indices, out, lse, dout, SCALE, STRICT, bounds, way="atomics")
    c = attention.attention_backward(query, kv, indices, out, lse, dout, SCALE, STRICT, bounds, way="pairs")
    assert error(a[0], b[0]) < GRADIENT and error(a[1], b[1]) < GRADIENT
    assert error(c[0], b[0]) < GRADIENT and error(c[1], b[1]) < GRADIENT


def test_strict_mode_refuses_what_the_kernels_do_not_cover() -> None:
    bounds = causal(64, 64)
    indices = choose(bounds, 32)
    with pytest.raises(DsaDeclined, match="bfloat16"):
        q, kv = torch.randn(64, 16, 576, device="cuda"), torch.randn(64, 576, device="cuda")
        attention.SparseAttention.apply(q, kv, indices, SCALE, 512, STRICT, bounds)
    with pytest.raises(DsaDeclined, match="head dim"):
        attention.SparseAttention.apply(rand(64, 16, 128), rand(64, 128), indices, SCALE, 128, STRICT, bounds)
