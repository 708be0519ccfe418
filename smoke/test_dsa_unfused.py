"""What stands in for Megatron's [sq, sk] PyTorch code: right to fp64, and within its byte budget."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from dsa_cases import (
    CASES,
    HIDDEN,
    KV_RANK,
    NOPE,
    Q_RANK,
    ROPE,
    V_SIZE,
    Case,
    build,
    make_config,
    single_groups,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron_fixtures import groups_of, relative_error, run_ranks
from memory_peak import peak_bytes, size_of

from dsv32.dsa import blocked, reference, unfused
from dsv32.dsa.attention import attend_all
from dsv32.dsa.plan import Bounds, causal_bounds
from dsv32.dsa.settings import Settings
from dsv32.dsa.streaming import through_fp8
from dsv32.mcore.packing import packed_params

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

#: The least that is allowed, which cuts these problems into many tiles; and one that cuts nothing.
BUDGETS = (1 << 16, 1 << 30)
#: fp64 on both sides: what is left are roundings of 1e-16 in sums of a few hundred terms.
EXACT = 1e-12


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One member of a batch, fp64."""

    q: Tensor
    k: Tensor
    weights: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    visible: blocked.Visible

    @property
    def allowed(self) -> Tensor:
        return self.visible.allowed(slice(0, len(self.q)), slice(0, len(self.k)))


def problem(
    sq: int, sk: int, *, kind: str = "causal", shared: bool = True, dtype: torch.dtype = torch.float64
) -> Problem:
    """Inputs with the visibility asked for: causal, packed, chunks (context parallel), mask or positions."""
    generator = torch.Generator().manual_seed(sq * 1000 + sk)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    bounds = causal_bounds(sq, sk, torch.device("cpu"))
    visible = blocked.Visible(bounds=bounds)
    if kind == "packed":  # three sequences, and rows behind the last that see nothing
        cuts = torch.tensor([0, sq // 8, sq // 2, sq - 3])
        row = torch.arange(sq)
        start = cuts[torch.searchsorted(cuts, row, right=True) - 1]
        ends = torch.where(row < sq - 3, row + 1, start)
        visible = blocked.Visible(bounds=Bounds(starts=start.int(), ends=ends.int(), sk=sk))
    elif kind == "chunks":  # the first and the last quarter of the rows of a longer sequence
        row = torch.cat((torch.arange(sq // 2), sk - sq // 2 + torch.arange(sq - sq // 2)))
        visible = blocked.Visible(bounds=Bounds(starts=torch.zeros(sq).int(), ends=(row + 1).int(), sk=sk))
    elif kind == "mask":
        hidden = torch.rand(sq, sk, generator=generator) < 0.6
        hidden[sq // 2] = True
        visible = blocked.Visible(bounds=bounds, mask=hidden)
    elif kind == "positions":
        visible = blocked.Visible(bounds=bounds, positions=torch.randperm(sk, generator=generator))
    many = () if shared else (4,)
    return Problem(
        q=draw(sq, 8, 16),
        k=draw(sk, 16),
        weights=draw(sq, 8),
        query=draw(sq, 4, 24),
        key=draw(sk, *many, 24),
        value=draw(sk, *many, 12),
        visible=visible,
    )


KINDS = ("causal", "packed", "chunks", "mask", "positions")


def gradients(result: Tensor, *leaves: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(result, leaves))


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_selection_is_that_of_the_reference_with_ties(kind: str, budget: int) -> None:
    case = problem(70, 150, kind=kind)
    # Few values: most scores are equal to others, and zero behind the relu.
    q, k, weights = (x.sign() for x in (case.q[:, :2], case.k, case.weights[:, :2]))
    found, picked = blocked.select(q, k, weights, case.visible, 20, budget)
    scores = reference.scores(q, k, weights)
    assert torch.equal(found, reference.topk(scores, case.allowed, 20))
    wanted = scores.gather(1, found.clamp_min(0).long()).masked_fill(found < 0, float("-inf"))
    assert torch.equal(picked, wanted)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("shared", [True, False], ids=["absorbed", "full"])
@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_and_loss_equal_the_dense_reference(
    kind: str, sparse: bool, shared: bool, budget: int, record_property: Callable[[str, Any], None]
) -> None:
    case = problem(70, 150, kind=kind, shared=shared)
    leaves = [x.requires_grad_() for x in (case.q, case.k, case.weights, case.query, case.key, case.value)]
    q, k, weights, query, key, value = leaves
    rows = torch.arange(70) % 5 != 0
    allowed, indices = case.allowed, None
    if sparse:
        indices = blocked.select(q, k, weights, case.visible, 20, budget)[0]
        allowed = reference.selected_mask(indices, 150)
    chosen = blocked.Chosen(visible=case.visible, indices=indices)
    out = blocked.attend(query, key, value, chosen, 0.3, budget)
    target = blocked.Target(query=query.detach(), key=key.detach(), scale=0.3, rows=rows)
    factor = torch.tensor(0.7, dtype=torch.float64)
    loss = blocked.loss(q, k, weights, target, chosen, factor, budget)

    per_head = [(key, value)] * 4 if shared else [(key[:, h], value[:, h]) for h in range(4)]
    wanted_out = torch.stack([_plain(query[:, h], x, v, allowed) for h, (x, v) in enumerate(per_head)], 1)
    logits = torch.stack([query[:, h] @ x.T * 0.3 for h, (x, _) in enumerate(per_head)], 1)
    scores = reference.scores(q, k, weights)
    wanted_loss = factor * _kl(logits, scores, allowed, rows)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    got = gradients((out * grad).sum() + loss, *leaves)
    wanted = gradients((wanted_out * grad).sum() + wanted_loss, *leaves)
    errors = {"output": relative_error(out, wanted_out), "loss": relative_error(loss, wanted_loss)}
    names = ("q", "k", "weights", "query", "key", "value")
    errors |= {n: relative_error(g, w) for n, g, w in zip(names, got, wanted, strict=True)}
    for name, error in errors.items():
        record_property(name, error)
    assert max(errors.values()) <= EXACT, errors


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
def test_the_setting_of_fp8_rounds_scores_and_leaves_gradients_straight_through(
    sparse: bool, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSV32_DSA_BYTE_BUDGET", str(budget))
    monkeypatch.setenv("DSV32_DSA_INDEXER", "fp8")
    case = problem(70, 150)
    q, k, weights = (x.requires_grad_() for x in (case.q, case.k, case.weights))
    bounds = case.visible.bounds
    indices, loss = unfused.topk_with_loss(
        config=SimpleNamespace(dsa_kernel_backend="none"),
        q=q[:, None],
        k=k[:, None],
        weights=weights[:, None],
        query=case.query[:, None],
        key=case.key[:, None, None],
        index_topk=20,
        softmax_scale=0.3,
        loss_coeff=0.5,
        sparse_loss=sparse,
        pg_collection=None,
        query_valid_rows=None,
        calculate_per_token_loss=True,
        use_relu=True,
        varlen_starts=bounds.starts,
        varlen_ends=bounds.ends,
    )
    exact = reference.scores(q, k, weights)
    rounded = reference.scores(*(through_fp8(x.detach()) for x in (q, k)), weights.detach())
    wanted_indices = reference.topk(rounded, case.allowed, 20)
    assert torch.equal(indices[0], wanted_indices)
    assert not torch.equal(indices[0], reference.topk(exact, case.allowed, 20))
    allowed = reference.selected_mask(wanted_indices, 150) if sparse else case.allowed
    # The value is of rounded scores; all three gradients are of the scores as they were given.
    through = exact + (rounded - exact).detach()
    wanted = 0.5 * reference.kl_sum(case.query, case.key, 0.3, through, allowed)
    assert relative_error(loss, wanted) <= EXACT
    for got, want in zip(gradients(loss, q, k, weights), gradients(wanted, q, k, weights), strict=True):
        assert relative_error(got, want) <= EXACT


def _probabilities(logits: Tensor, allowed: Tensor) -> Tensor:
    some = allowed.any(-1, keepdim=True)
    probs = torch.where(some, logits.masked_fill(~allowed, float("-inf")), torch.zeros_like(logits)).softmax(
        -1
    )
    return torch.where(some & allowed, probs, torch.zeros_like(probs))


def _plain(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, scale: float = 0.3) -> Tensor:
    return _probabilities(query.double() @ key.double().T * scale, allowed) @ value.double()


def _kl(logits: Tensor, scores: Tensor, allowed: Tensor, rows: Tensor) -> Tensor:
    """Sum over counted rows of KL(mean over heads of softmax(logits) || softmax(scores)) on allowed keys."""
    target = torch.stack([_probabilities(x, allowed) for x in logits.detach().unbind(1)]).mean(0)
    log = _probabilities(scores, allowed).log()
    terms = target * (target.clamp_min(blocked.EPS).log() - log)
    return terms.masked_fill(~(allowed & rows[:, None]), 0.0).sum()


def _half_of_the_heads(rank: int, device: torch.device, budget: int) -> tuple[Tensor, ...]:
    group = groups_of(2)
    case = problem(70, 150, kind="packed")
    q, k, weights = (x.requires_grad_() for x in (case.q, case.k, case.weights))
    target = blocked.Target(
        query=case.query[:, 2 * rank : 2 * rank + 2], key=case.key, scale=0.3, group=group
    )
    factor = torch.tensor(0.7, dtype=torch.float64)
    loss = blocked.loss(q, k, weights, target, blocked.Chosen(visible=case.visible), factor, budget)
    return loss.detach(), *gradients(loss, q, k, weights)


def test_tensor_parallel_ranks_get_the_loss_of_all_heads() -> None:
    case = problem(70, 150, kind="packed")
    q, k, weights = (x.requires_grad_() for x in (case.q, case.k, case.weights))
    logits = torch.stack([case.query[:, h] @ case.key.T * 0.3 for h in range(4)], 1)
    rows = torch.ones(70, dtype=torch.bool)
    loss = 0.7 * _kl(logits, reference.scores(q, k, weights), case.allowed, rows)
    wanted = (loss, *gradients(loss, q, k, weights))
    for got in run_ranks(2, _half_of_the_heads, BUDGETS[0], cpu=True):
        for ours, theirs in zip(got, wanted, strict=True):
            assert relative_error(ours, theirs) <= EXACT


#: A twelfth of one copy of all heads' scores at the longer length below.
PEAK_BUDGET = 1 << 20
FP8 = blocked.Scoring(fp8=True)
HEADS, INDEX_HEADS, SIZE, VALUE, INDEX_SIZE, CHOSEN = 8, 8, 48, 32, 32, 32


def _pieces(tokens: int, *, shared: bool, sparse: bool) -> dict[str, tuple[Callable[[], object], int]]:
    """Each operation in fp32, with the bytes of its results."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(tokens, *shape, generator=generator)

    many = () if shared else (HEADS,)
    q, k, weights = draw(INDEX_HEADS, INDEX_SIZE), draw(INDEX_SIZE), draw(INDEX_HEADS)
    query, key, value = draw(HEADS, SIZE), draw(*many, SIZE), draw(*many, VALUE)
    visible = blocked.Visible(bounds=causal_bounds(tokens, tokens, torch.device("cpu")))
    found, picked = blocked.select(q, k, weights, visible, CHOSEN, 1 << 30)
    chosen = blocked.Chosen(visible=visible, indices=found if sparse else None)
    target = blocked.Target(query=query, key=key, scale=0.2)
    factor = torch.tensor(0.5)
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    output = blocked.attend(leaves[0], leaves[1], leaves[2], chosen, 0.2, PEAK_BUDGET)
    grad = torch.ones_like(output)

    def attend() -> Tensor:
        with torch.no_grad():
            return blocked.attend(query, key, value, chosen, 0.2, PEAK_BUDGET)

    return {
        "selection": (
            lambda: blocked.select(q, k, weights, visible, CHOSEN, PEAK_BUDGET),
            size_of(found, picked),
        ),
        "loss with its gradient": (
            lambda: blocked.kl_loss(q, k, weights, target, chosen, factor, PEAK_BUDGET),
            size_of(q, k, weights),
        ),
        "selection in fp8": (
            lambda: blocked.select(q, k, weights, visible, CHOSEN, PEAK_BUDGET, scoring=FP8),
            size_of(found, picked),
        ),
        "loss in fp8 with its gradient": (
            lambda: blocked.kl_loss(q, k, weights, target, chosen, factor, PEAK_BUDGET, scoring=FP8),
            size_of(q, k, weights),
        ),
        "attention": (attend, size_of(output, query[..., 0])),
        "attention's gradient": (
            lambda: torch.autograd.grad(output, leaves, grad),
            size_of(query, key, value),
        ),
    }


@pytest.mark.parametrize("shared", [True, False], ids=["absorbed", "full"])
@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
def test_no_operation_takes_more_than_the_budget_beside_its_results(
    sparse: bool, shared: bool, record_property: Callable[[str, Any], None]
) -> None:
    for tokens in (128, 640):
        for name, (work, results) in _pieces(tokens, shared=shared, sparse=sparse).items():
            beyond = peak_bytes(work) - results
            record_property(f"{name}, {tokens} tokens: bytes beyond results", float(beyond))
            assert beyond <= PEAK_BUDGET, f"{name}, {tokens} tokens: {beyond} bytes beyond its results"
    assert 640 * 640 * HEADS * 4 > 12 * PEAK_BUDGET


def test_attention_to_all_keys_writes_out_the_indices_of_a_block_only() -> None:
    """The dense warm-up of the kernel backend, where neither query nor key takes a gradient."""
    generator = torch.Generator().manual_seed(6)
    query, key = (torch.randn(640, *shape, generator=generator) for shape in ((HEADS, SIZE), (SIZE,)))
    bounds = causal_bounds(640, 640, torch.device("cpu"))
    settings = Settings(byte_budget=PEAK_BUDGET // 2)
    results = size_of(query[..., :VALUE]) * 2  # the blocks' outputs, then all of them together
    beyond = peak_bytes(lambda: attend_all(query, key, 0.2, VALUE, settings, bounds)) - results
    assert beyond <= PEAK_BUDGET, f"{beyond} bytes beyond its results"
    wanted = _plain(
        query[:, 3],
        key,
        key[:, :VALUE],
        blocked.Visible(bounds=bounds).allowed(slice(0, 640), slice(0, 640)),
        0.2,
    )
    got = attend_all(query, key, 0.2, VALUE, settings, bounds)[:, 3]
    # fp32, products of 48 terms and sums over up to 640 keys.
    assert relative_error(got, wanted) <= 2e-6


@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[6], CASES[7]], ids=str)
def test_megatron_in_its_own_code_takes_it_by_the_pair_and_ours_by_the_row(
    case: Case, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, Any], None]
) -> None:
    """A whole DSAttention, forward and backward; a dense loss with a top-k of every token is the warm-up."""
    monkeypatch.setenv("DSV32_DSA_BYTE_BUDGET", str(1 << 18))
    grown = {}
    for module in (None, "dsv32.dsa.unfused"):
        peaks = [_layer_peak(case, tokens, dsa_unfused_module=module) for tokens in (96, 384)]
        grown[module] = peaks[1] / peaks[0]
        record_property(f"peak from 96 to 384 rows, {module or 'Megatron alone'}", grown[module])
    # 4 times the rows are 16 times the pairs. What does not grow with either keeps both below that.
    assert grown["dsv32.dsa.unfused"] <= 4.0, grown
    assert grown[None] >= 8.0, grown


def _layer_peak(case: Case, tokens: int, **changes: Any) -> int:
    one = single_groups()
    top_k = {} if case.sparse_loss else {"dsa_indexer_topk": 1 << 30}
    attention = build(make_config(case, **top_k, **changes), one.cp, one.tp)
    generator = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> Tensor:
        return torch.randn(tokens, *shape, generator=generator).requires_grad_()

    width = KV_RANK + ROPE if case.absorbed else NOPE + ROPE
    given = [draw(1, 4, width), draw(1, 1 if case.absorbed else 4, width)]
    value = None if case.absorbed else draw(1, 4, V_SIZE)
    up_v = torch.randn(4, V_SIZE, KV_RANK, generator=generator) if case.absorbed else None
    x, qr = draw(1, HIDDEN), draw(1, Q_RANK)

    def work() -> Tensor:
        output: Tensor = attention(
            *given,
            value,
            attention_mask=None,
            x=x,
            qr=qr,
            attn_mask_type=AttnMaskType.causal,
            packed_seq_params=packed_params([tokens // 4, tokens - tokens // 4]) if case.thd else None,
            up_v_weight=up_v,
        )
        output.sum().backward()
        return output

    return peak_bytes(work)
