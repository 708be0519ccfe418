"""The DSA backend on any device: plan, selection, losses and attention against dense fp64, no GPU needed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from dsv32 import dsa
from dsv32.dsa import attention, loss, plan, reference, selection, streaming
from dsv32.dsa.settings import DsaDeclined, Settings, decline

if TYPE_CHECKING:
    from pathlib import Path

# fp64 in, fp64 arithmetic: what is left is summation order over a few hundred terms of order one.
EXACT = {"rtol": 1e-9, "atol": 1e-11}
SMALL = Settings(byte_budget=1 << 16, path="torch")  # so small that every case needs several blocks
SCALE = 0.2


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One layer's tensors, fp64, attention of size 24 with values 16, index heads of size 8."""

    q: Tensor
    kv: Tensor
    iq: Tensor
    ik: Tensor
    iw: Tensor
    bounds: plan.Bounds


def packed_bounds(lengths: list[int], extra: int = 0) -> plan.Bounds:
    """Causal bounds of packed sequences; `extra` trailing rows see nothing."""
    starts, ends, base = [], [], 0
    for n in lengths:
        starts += [base] * n
        ends += [base + i + 1 for i in range(n)]
        base += n
    starts += [0] * extra
    ends += [0] * extra
    return plan.Bounds(starts=torch.tensor(starts).int(), ends=torch.tensor(ends).int(), sk=base)


def zigzag_bounds(total: int, ranks: int, rank: int) -> plan.Bounds:
    """Rows of one context-parallel rank: its front chunk and the mirrored back chunk."""
    part = total // (2 * ranks)
    chunks = [
        torch.arange(rank * part, (rank + 1) * part),
        torch.arange(total - (rank + 1) * part, total - rank * part),
    ]
    rows = torch.cat(chunks).int()
    return plan.Bounds(starts=torch.zeros_like(rows), ends=rows + 1, sk=total)


BOUNDS = {
    "causal": plan.causal_bounds(37, 37, torch.device("cpu")),
    "more keys than queries": plan.causal_bounds(19, 45, torch.device("cpu")),
    "one token": plan.causal_bounds(1, 1, torch.device("cpu")),
    "packed with empty rows": packed_bounds([13, 1, 22], extra=3),
    "context parallel chunks": zigzag_bounds(48, 2, 1),
}


def make(bounds: plan.Bounds, heads: int = 3, seed: int = 0) -> Problem:
    gen = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    sq, sk = bounds.sq, bounds.sk
    return Problem(
        q=rand(sq, heads, 24),
        kv=rand(sk, 24),
        iq=rand(sq, 4, 8),
        ik=rand(sk, 8),
        iw=rand(sq, 4),
        bounds=bounds,
    )


def allowed(p: Problem) -> Tensor:
    return reference.valid_mask(p.bounds.starts, p.bounds.ends, p.bounds.sk)


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("step", [1, 7, 64])
def test_blocks_cover_every_row_and_every_visible_key(name: str, step: int) -> None:
    bounds = BOUNDS[name]
    cut = plan.blocks(bounds, step)
    assert [i for b in cut for i in range(b.lo, b.hi)] == list(range(bounds.sq))
    for b in cut:
        for i in range(b.lo, b.hi):
            lo, hi = int(bounds.starts[i]), int(bounds.ends[i])
            assert hi <= lo or (b.key_lo <= lo and hi <= b.key_hi)


def test_known_causal_bounds_give_the_plan_that_the_tensors_give() -> None:
    known = plan.causal_bounds(50, 70, torch.device("cpu"))
    read = replace(known, causal_offset=None)
    assert [(b.lo, b.hi, b.key_hi) for b in plan.blocks(known, 8)] == [
        (b.lo, b.hi, b.key_hi) for b in plan.blocks(read, 8)
    ]


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("topk", [1, 8, 64])
@pytest.mark.parametrize("relu", [True, False])
def test_selection_equals_the_dense_definition(name: str, topk: int, relu: bool) -> None:
    p = make(BOUNDS[name])
    indices, picked = selection.select(p.iq, p.ik, p.iw, p.bounds, topk, SMALL, relu=relu)
    scores = reference.scores(p.iq, p.ik, p.iw, relu)
    want = reference.topk(scores, allowed(p), min(topk, p.bounds.sk))
    assert torch.equal(indices, want)
    got = torch.gather(scores, 1, want.clamp_min(0).long()).masked_fill(want < 0, float("-inf"))
    torch.testing.assert_close(picked, got, **EXACT)


def test_equal_scores_go_to_the_smaller_index() -> None:
    p = make(BOUNDS["causal"])
    indices, _ = selection.select(p.iq, torch.zeros_like(p.ik), p.iw, p.bounds, 5, SMALL)
    for i, row in enumerate(indices.tolist()):
        assert [j for j in row if j >= 0] == list(range(min(5, i + 1)))


@pytest.mark.parametrize("name", BOUNDS)
def test_attention_and_its_gradient_equal_dense_fp64(name: str) -> None:
    p = make(BOUNDS[name])
    indices, _ = selection.select(p.iq, p.ik, p.iw, p.bounds, 6, SMALL)
    q, kv = p.q.clone().requires_grad_(), p.kv.clone().requires_grad_()
    out, lse = attention.SparseAttention.apply(q, kv, indices, SCALE, 16, SMALL, p.bounds)
    grad = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    out.backward(grad)
    q2, kv2 = p.q.clone().requires_grad_(), p.kv.clone().requires_grad_()
    want, want_lse = reference.attention(q2, kv2, reference.selected_mask(indices, p.bounds.sk), SCALE, 16)
    want.backward(grad)
    torch.testing.assert_close(out, want, **EXACT)
    torch.testing.assert_close(lse, want_lse, **EXACT)
    torch.testing.assert_close(q.grad, q2.grad, **EXACT)
    torch.testing.assert_close(kv.grad, kv2.grad, **EXACT)


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("some_rows", [True, False])
def test_indexer_loss_and_its_gradient_equal_dense_fp64(name: str, sparse: bool, some_rows: bool) -> None:
    p = make(BOUNDS[name])
    rows = torch.arange(p.bounds.sq) % 3 != 1 if some_rows else None
    indices, picked = selection.select(p.iq, p.ik, p.iw, p.bounds, 6, SMALL)
    mask = reference.selected_mask(indices, p.bounds.sk) if sparse else allowed(p)
    _, lse = reference.attention(p.q, p.kv, mask, SCALE, 16)
    inputs = loss.LossInputs(
        query=p.q, kv=p.kv, scale=SCALE, bounds=p.bounds, lse=lse, indices=indices, picked=picked, rows=rows
    )
    mine = [t.clone().requires_grad_() for t in (p.iq, p.ik, p.iw)]
    got = loss.IndexerLoss.apply(*mine, inputs, torch.tensor(0.3, dtype=torch.float64), sparse, SMALL)
    (got * 2.0).backward()
    ref = [t.clone().requires_grad_() for t in (p.iq, p.ik, p.iw)]
    want = 0.3 * reference.kl_sum(p.q, p.kv, SCALE, reference.scores(*ref), mask, rows)
    (want * 2.0).backward()
    torch.testing.assert_close(got, want, **EXACT)
    for a, b in zip(mine, ref, strict=True):
        torch.testing.assert_close(a.grad, b.grad, **EXACT)


def _half_of_the_heads(rank: int, store: str) -> None:
    """One of two tensor-parallel ranks: it has half of the attention heads and all of the indexer."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    p = make(BOUNDS["packed with empty rows"], heads=4)
    indices, picked = selection.select(p.iq, p.ik, p.iw, p.bounds, 6, SMALL)
    query = p.q[:, 2 * rank : 2 * rank + 2]
    for sparse in (True, False):
        mask = reference.selected_mask(indices, p.bounds.sk) if sparse else allowed(p)
        _, lse = reference.attention(query, p.kv, mask, SCALE, 16)
        inputs = loss.LossInputs(
            query=query, kv=p.kv, scale=SCALE, bounds=p.bounds, lse=lse, indices=indices, picked=picked,
            tp_group=dist.group.WORLD,
        )  # fmt: skip
        leaves = [t.clone().requires_grad_() for t in (p.iq, p.ik, p.iw)]
        got = loss.indexer_loss(*leaves, inputs, torch.tensor(1.0, dtype=torch.float64), sparse, SMALL)
        got.backward()
        ref = [t.clone().requires_grad_() for t in (p.iq, p.ik, p.iw)]
        want = reference.kl_sum(p.q, p.kv, SCALE, reference.scores(*ref), mask)
        want.backward()
        torch.testing.assert_close(got, want, **EXACT)
        for a, b in zip(leaves, ref, strict=True):
            torch.testing.assert_close(a.grad, b.grad, **EXACT)
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")
def test_tensor_parallel_ranks_with_half_the_heads_get_the_sparse_and_dense_loss_of_all_heads(
    tmp_path: Path,
) -> None:
    torch.multiprocessing.spawn(_half_of_the_heads, (str(tmp_path / "store"),), nprocs=2)


def layer(p: Problem, batch: int = 2, **change: object) -> dict[str, object]:
    """Arguments of the whole-layer hook for `batch` copies with different queries."""
    sbh = [
        torch.stack([t * (1 + 0.1 * i) for i in range(batch)], dim=1) for t in (p.q, p.kv, p.iq, p.ik, p.iw)
    ]
    args = {
        "config": SimpleNamespace(kv_lora_rank=16, deterministic_mode=False),
        "query": sbh[0],
        "key": sbh[1][:, :, None],
        "value": None,
        "up_v_weight": torch.randn(p.q.size(1), 5, 16, dtype=torch.float64),
        "q_indexer": sbh[2],
        "k_indexer": sbh[3],
        "indexer_weights": sbh[4],
        "indexer_topk": 6,
        "softmax_scale": SCALE,
        "loss_coeff": 0.5,
        "sparse_loss": True,
        "calculate_per_token_loss": False,
        "absorbed_mla": True,
        "varlen_starts": p.bounds.starts,
        "varlen_ends": p.bounds.ends,
        "key_positions": None,
        "query_valid_rows": None,
        "use_relu": True,
        "cp_size": 1,
    }
    return {**args, **change}


@pytest.mark.parametrize("sparse", [True, False])
def test_whole_layer_hook_equals_the_separate_hooks(sparse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV32_DSA_BYTE_BUDGET", str(1 << 16))
    p = make(BOUNDS["packed with empty rows"])
    args = layer(p, sparse_loss=sparse)
    output, kl = dsa.run_fused_dsa_attention(**args)
    indices, _ = dsa.run_fused_qk_topk(
        q=args["q_indexer"],
        k=args["k_indexer"],
        weights=args["indexer_weights"],
        index_topk=6,
        starts=p.bounds.starts,
        ends=p.bounds.ends,
        block_size=8192,
    )
    latent = dsa.run_fused_absorbed_sparse_attention(args["query"], args["key"], indices, SCALE, 16)
    want = torch.einsum("sbhc,hdc->sbhd", latent, args["up_v_weight"]).flatten(2)
    torch.testing.assert_close(output, want, **EXACT)
    if sparse:
        again, _, kl2 = dsa.run_fused_qk_topk_with_loss(
            q=args["q_indexer"],
            k=args["k_indexer"],
            weights=args["indexer_weights"],
            index_topk=6,
            starts=p.bounds.starts,
            ends=p.bounds.ends,
            block_size=8192,
            query=args["query"],
            key=args["key"],
            softmax_scale=SCALE,
            loss_coeff=0.5,
            pg_collection=None,
        )
        assert torch.equal(again, indices)
        torch.testing.assert_close(kl, kl2, **EXACT)
    else:
        each = [
            reference.kl_sum(
                args["query"][:, i],
                args["key"][:, i, 0],
                SCALE,
                reference.scores(
                    args["q_indexer"][:, i], args["k_indexer"][:, i], args["indexer_weights"][:, i]
                ),
                allowed(p),
            )
            for i in range(2)
        ]
        # The factor 0.5 / rows is a fp32 scalar: half a unit in its last place is 6e-8.
        torch.testing.assert_close(kl, 0.5 * (each[0] + each[1]) / (2 * p.bounds.sq), rtol=6e-8, atol=0)


def test_a_split_over_context_parallel_ranks_gives_the_rows_of_the_whole() -> None:
    whole = make(plan.causal_bounds(48, 48, torch.device("cpu")))
    full, _ = selection.select(whole.iq, whole.ik, whole.iw, whole.bounds, 6, SMALL)
    for rank in range(2):
        bounds = zigzag_bounds(48, 2, rank)
        rows = (bounds.ends - 1).long()
        part, _ = selection.select(whole.iq[rows], whole.ik, whole.iw[rows], bounds, 6, SMALL)
        assert torch.equal(part, full[rows])


def test_forward_without_gradients_chooses_the_same_keys() -> None:
    p = make(BOUNDS["causal"])
    iq = p.iq.float().requires_grad_()
    with_grad, _ = selection.select(iq, p.ik.float(), p.iw.float(), p.bounds, 6, SMALL)
    with torch.no_grad():
        without, _ = selection.select(
            iq, p.ik.float(), p.iw.float(), p.bounds, 6, replace(SMALL, byte_budget=1 << 24)
        )
    assert torch.equal(with_grad, without)


def test_topk_length_drops_the_slots_behind_it() -> None:
    p = make(BOUNDS["causal"])
    indices, _ = selection.select(p.iq, p.ik, p.iw, p.bounds, 6, SMALL)
    length = (indices >= 0).sum(-1).clamp_max(3)[None]
    got = dsa.run_fused_absorbed_sparse_attention(
        p.q[:, None], p.kv[:, None, None], indices[None], SCALE, 16, length
    )
    cut = torch.where(torch.arange(6) < length[0, :, None], indices, -1)
    want, _ = reference.attention(p.q, p.kv, reference.selected_mask(cut, p.bounds.sk), SCALE, 16)
    torch.testing.assert_close(got[:, 0], want, **EXACT)


def test_non_contiguous_inputs_give_the_same_result() -> None:
    p = make(BOUNDS["causal"])
    wide = torch.randn(p.q.size(0), p.q.size(1), 48, dtype=torch.float64)
    wide[..., ::2] = p.q
    indices, _ = selection.select(p.iq, p.ik, p.iw, p.bounds, 6, SMALL)
    a, _ = attention.SparseAttention.apply(wide[..., ::2], p.kv, indices, SCALE, 16, SMALL, None)
    b, _ = attention.SparseAttention.apply(p.q, p.kv, indices, SCALE, 16, SMALL, None)
    assert torch.equal(a, b)


def test_a_decline_names_its_reason_and_strict_mode_raises(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="dsv32.dsa"):
        decline(Settings(), "test operation", "a reason of its own")
    assert "a reason of its own" in caplog.text
    with pytest.raises(DsaDeclined, match="only absorbed MLA"):
        p = make(BOUNDS["causal"])
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DSV32_DSA_STRICT", "1")
            dsa.run_fused_dsa_attention(**layer(p, absorbed_mla=False))


def test_settings_read_the_environment_and_refuse_nonsense() -> None:
    got = Settings.from_env(
        {"DSV32_DSA_BYTE_BUDGET": "1048576", "DSV32_DSA_STRICT": "1", "DSV32_DSA_DETERMINISTIC": "1"}
    )
    assert got == Settings(byte_budget=1 << 20, strict=True, deterministic=True)
    assert Settings.from_env({"DSV32_DSA_INDEXER": "fp8"}) == Settings(indexer="fp8")
    for bad in (
        {"DSV32_DSA_STRICT": "maybe"},
        {"DSV32_DSA_PATH": "fast"},
        {"DSV32_DSA_BYTE_BUDGET": "1"},
        {"DSV32_DSA_INDEXER": "fp4"},
    ):
        with pytest.raises(ValueError):
            Settings.from_env(bad)


def test_fp8_rounds_each_128_channels_to_e4m3_with_a_power_of_two() -> None:
    gen = torch.Generator().manual_seed(3)
    x = torch.randn(40, 4, 300, generator=gen) * torch.randn(40, 4, 1, generator=gen).exp()
    x[0], x[1, 0, :128] = 0.0, 448.0
    values, scale = streaming.quantise(x)
    assert values.dtype == torch.float8_e4m3fn and values.shape == x.shape and scale.shape == (40, 4, 3)
    assert torch.equal(scale.log2(), scale.log2().round())
    each = scale.repeat_interleave(128, -1)[..., :300]
    high = torch.nn.functional.pad(x, (0, 84)).unflatten(-1, (3, 128)).abs().amax(-1)
    some = high > 1e-4
    assert (high <= 448 * scale).all() and (high > 224 * scale)[some].all()  # the smallest power that fits
    # e4m3: three bits behind the first, so half of 2^-3 of the value; below 2^-6 steps of 2^-9.
    assert ((values.float() * each - x).abs() <= torch.maximum(x.abs() / 16, each / 1024)).all()
    exact = streaming.through_fp8(x.bfloat16())
    assert torch.equal(exact.float(), streaming.through_fp8(x.bfloat16().float()))  # exact in bf16
    assert torch.equal(streaming.through_fp8(exact), exact)


@pytest.mark.parametrize("name", BOUNDS)
def test_fp8_selection_is_the_selection_by_rounded_queries_and_keys(name: str) -> None:
    p = make(BOUNDS[name])
    indices, picked = selection.select(p.iq, p.ik, p.iw, p.bounds, 6, replace(SMALL, indexer="fp8"))
    scores = reference.scores(streaming.through_fp8(p.iq), streaming.through_fp8(p.ik), p.iw)
    want = reference.topk(scores, allowed(p), min(6, p.bounds.sk))
    assert torch.equal(indices, want)
    got = torch.gather(scores, 1, want.clamp_min(0).long()).masked_fill(want < 0, float("-inf"))
    torch.testing.assert_close(picked, got, **EXACT)


def test_fp8_changes_few_of_the_chosen_keys() -> None:
    bounds = plan.causal_bounds(64, 1024, torch.device("cpu"))
    gen = torch.Generator().manual_seed(4)
    q, k, w = (torch.randn(*s, generator=gen) for s in ((64, 8, 128), (1024, 128), (64, 8)))
    a, _ = selection.select(q, k, w, bounds, 128, Settings(path="torch"))
    b, _ = selection.select(q, k, w, bounds, 128, Settings(path="torch", indexer="fp8"))
    same = (reference.selected_mask(a, 1024) & reference.selected_mask(b, 1024)).sum().item()
    differ = 1 - same / (64 * 128)
    # Half of e4m3's last bit is 2^-5 to 2^-4 of a value, 2.6 % on average as a deviation, so 3.7 % for a
    # product of two. One in eight is chosen: the normal density at that threshold is 0.206, and the share
    # that leaves is 0.206 * 3.7 % / sqrt(2 pi) / 0.125, about 2.4 %.
    assert 0.002 < differ < 0.04, differ


@pytest.mark.parametrize("sparse", [True, False])
def test_fp8_loss_has_rounded_scores_and_straight_through_gradients(sparse: bool) -> None:
    p = make(BOUNDS["packed with empty rows"])
    settings = replace(SMALL, indexer="fp8")
    indices, picked = selection.select(p.iq, p.ik, p.iw, p.bounds, 6, settings)
    mask = reference.selected_mask(indices, p.bounds.sk) if sparse else allowed(p)
    _, lse = reference.attention(p.q, p.kv, mask, SCALE, 16)
    inputs = loss.LossInputs(
        query=p.q, kv=p.kv, scale=SCALE, bounds=p.bounds, lse=lse, indices=indices, picked=picked
    )
    mine = [t.clone().requires_grad_() for t in (p.iq, p.ik, p.iw)]
    got = loss.indexer_loss(*mine, inputs, torch.tensor(0.3, dtype=torch.float64), sparse, settings)
    got.backward()
    ref = [t.clone().requires_grad_() for t in (p.iq, p.ik, p.iw)]
    exact = reference.scores(*ref)
    rounded = reference.scores(streaming.through_fp8(p.iq), streaming.through_fp8(p.ik), p.iw)
    through = exact + (rounded - exact).detach()
    want = 0.3 * reference.kl_sum(p.q, p.kv, SCALE, through, mask)
    want.backward()
    torch.testing.assert_close(got, want, **EXACT)
    for a, b in zip(mine, ref, strict=True):
        torch.testing.assert_close(a.grad, b.grad, **EXACT)
