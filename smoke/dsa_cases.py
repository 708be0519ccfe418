"""Inputs, Megatron's DSAttention and the dense fp64 reference for one and the same small problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from dense_reference import IndexerWeights, attend, index_scores
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from dsv32.mcore.local_backend import LocalBackend
from dsv32.mcore.packing import packed_params, real_rows, zigzag_rows

if TYPE_CHECKING:
    from collections.abc import Callable

HIDDEN, HEADS, Q_RANK, KV_RANK, NOPE, ROPE, V_SIZE = 64, 4, 32, 32, 16, 16, 16
#: With 16 heads a score is exactly 0 (all heads under the relu) once in 65,536, so ties at the top-k border
#: do not blur what is measured here; the tie rule has its own test.
INDEX_HEADS, INDEX_SIZE, TOP_K = 16, 32, 16
#: Longer and shorter than top-k, each a multiple of 8 so that 1, 2 and 4 context-parallel ranks can share
#: them.
THD_LENGTHS = (32, 16, 8, 56)
SBHD_LENGTHS = (48, 48)
#: One sequence longer than top-k, one shorter, one of a single token, and the last with a whole chunk of
#: padding.
TOKENS = (29, 13, 1, 52)
PADDED_LENGTHS = (32, 16, 8, 72)
#: Large enough for the indexer's gradient to be compared beside the main one.
LOSS_COEFFICIENT = 0.5
NORM_EPS = 1e-6
#: Two ranks do the same fp32 arithmetic as one, but sum partial gradients in another order: some ten
#: roundings of 6e-8 on sums of up to 112 rows.
PARITY = 1e-6
#: fp32 against fp64: dot products of 48 to 64 terms and softmaxes accumulate a few roundings of 6e-8 more.
AGAINST_FP64 = 2e-6
Results = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One cell of the matrix."""

    layout: str  # sbhd or thd
    absorbed: bool
    sparse_loss: bool
    padding: str = "none"  # none or tail: rows after the tokens of each sequence; thd only

    @property
    def lengths(self) -> tuple[int, ...]:
        """Rows that each sequence takes."""
        return {"none": THD_LENGTHS, "tail": PADDED_LENGTHS}[self.padding] if self.thd else SBHD_LENGTHS

    @property
    def tokens(self) -> tuple[int, ...]:
        """Rows of each sequence that are tokens."""
        return TOKENS if self.padding == "tail" else self.lengths

    @property
    def thd(self) -> bool:
        return self.layout == "thd"

    def __str__(self) -> str:
        kind = "absorbed" if self.absorbed else "full"
        padded = "" if self.padding == "none" else "-padded"
        return f"{self.layout}{padded}-{kind}-{'sparse' if self.sparse_loss else 'dense'}"


CASES = [
    Case(layout=layout, absorbed=absorbed, sparse_loss=sparse)
    for layout in ("sbhd", "thd")
    for absorbed in (False, True)
    for sparse in (False, True)
]
PADDED_CASES = [
    Case(layout="thd", absorbed=absorbed, sparse_loss=sparse, padding="tail")
    for absorbed in (False, True)
    for sparse in (False, True)
]


def make_config(case: Case, **changes: Any) -> MLATransformerConfig:
    """Megatron's configuration of the problem, in fp32 and without fusions."""
    settings: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "q_lora_rank": Q_RANK,
        "kv_lora_rank": KV_RANK,
        "qk_head_dim": NOPE,
        "qk_pos_emb_head_dim": ROPE,
        "v_head_dim": V_SIZE,
        "rope_type": "rope",
        "rotary_base": 10000,
        "normalization": "RMSNorm",
        "layernorm_epsilon": NORM_EPS,
        "add_bias_linear": False,
        "qk_layernorm": True,
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": INDEX_HEADS,
        "dsa_indexer_head_dim": INDEX_SIZE,
        "dsa_indexer_topk": TOP_K,
        "dsa_indexer_loss_coeff": LOSS_COEFFICIENT,
        "dsa_indexer_use_sparse_loss": case.sparse_loss,
        "transformer_impl": "local",
        "use_cpu_initialization": True,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "params_dtype": torch.float32,
    }
    return MLATransformerConfig(**(settings | changes))


def make_inputs(case: Case) -> dict[str, Tensor]:
    """Random inputs for the whole batch as rows [sum(lengths), ...] of packed sequences, fp32 on CPU.

    Tokens do not depend on the padding; padding rows hold numbers of their own, and the output's gradient is
    0 there, as a masked loss makes it.
    """
    tokens, padding = torch.Generator().manual_seed(20261130), torch.Generator().manual_seed(1)
    real = token_rows(case)

    def draw(*shape: int) -> Tensor:
        whole = torch.randn(sum(case.lengths), *shape, generator=padding)
        whole[real] = torch.randn(sum(case.tokens), *shape, generator=tokens)
        return whole

    size = KV_RANK + ROPE if case.absorbed else NOPE + ROPE
    inputs = {
        "x": draw(HIDDEN),
        "qr": draw(Q_RANK),
        "query": draw(HEADS, size),
        "key": draw(1 if case.absorbed else HEADS, size),
    }
    if case.absorbed:
        inputs["up_v"] = torch.randn(HEADS, V_SIZE, KV_RANK, generator=tokens) / KV_RANK**0.5
    else:
        inputs["value"] = draw(HEADS, V_SIZE)
    inputs["out_grad"] = draw(HEADS * V_SIZE)
    inputs["out_grad"][~real] = 0
    return inputs


def token_rows(case: Case) -> Tensor:
    """Rows of the batch that are tokens, bool [sum(lengths)]."""
    return real_rows(case.tokens, case.lengths)


def softmax_scale() -> float:
    """1 / sqrt of the query head's size, as in MLA without yarn."""
    return float((NOPE + ROPE) ** -0.5)


def indexer_state() -> dict[str, Tensor]:
    """Indexer parameters by Megatron's names, large enough that the selection depends on the tokens."""
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "linear_wq_b.weight": draw(INDEX_HEADS * INDEX_SIZE, Q_RANK) / Q_RANK**0.5,
        "linear_wk.weight": draw(INDEX_SIZE, HIDDEN) / HIDDEN**0.5,
        "k_norm.weight": 1 + 0.1 * draw(INDEX_SIZE),
        "k_norm.bias": 0.1 * draw(INDEX_SIZE),
        "linear_weights_proj.weight": draw(INDEX_HEADS, HIDDEN) / HIDDEN**0.5,
    }


class _Alone:
    """A process group of one rank, for tests that need no other process."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def single_groups() -> ProcessGroupCollection:
    """Tensor- and context-parallel groups of one rank without any initialisation."""
    groups = ProcessGroupCollection()
    groups.tp = groups.cp = cast("dist.ProcessGroup", _Alone())
    return groups


def build(
    config: MLATransformerConfig, cp: dist.ProcessGroup, tp: dist.ProcessGroup, *, state: bool = True
) -> dsa.DSAttention:
    """Megatron's DSAttention on the given groups, with ``indexer_state`` unless told otherwise."""
    backend = LocalBackend()
    groups = ProcessGroupCollection()
    groups.cp, groups.tp = cp, tp
    attention = dsa.DSAttention(
        config=config,
        submodules=dsa.DSAttentionSubmodules(
            indexer=ModuleSpec(
                module=dsa.DSAIndexer,
                submodules=dsa.DSAIndexerSubmodules(
                    linear_wq_b=backend.linear(),
                    linear_wk=backend.linear(),
                    k_norm=backend.layer_norm(rms_norm=False, for_qk=True),
                    linear_weights_proj=backend.linear(),
                ),
            )
        ),
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        softmax_scale=softmax_scale(),
        cp_comm_type="allgather",
        pg_collection=groups,
    )
    if state:
        attention.indexer.load_state_dict(indexer_state())
    return attention


def _local(case: Case, whole: Tensor, cp: dist.ProcessGroup, device: torch.device) -> Tensor:
    """This rank's rows: [t, ...] for thd, [s, b, ...] for sbhd."""
    if case.thd:
        rows = zigzag_rows(case.lengths, cp_size=cp.size(), cp_rank=cp.rank())
        return whole[rows].to(device)
    batch = whole.view(len(case.lengths), case.lengths[0], *whole.shape[1:]).transpose(0, 1)
    return batch[zigzag_rows(case.lengths[:1], cp_size=cp.size(), cp_rank=cp.rank())].contiguous().to(device)


def _whole(case: Case, local: Tensor, cp: dist.ProcessGroup) -> Tensor:
    """Undo ``_local``: gather every rank's rows and put them in the order of the batch."""
    parts = [torch.empty_like(local) for _ in range(cp.size())]
    dist.all_gather(parts, local.contiguous(), group=cp)
    lengths = case.lengths if case.thd else case.lengths[:1]
    rows = torch.cat([zigzag_rows(lengths, cp_size=cp.size(), cp_rank=rank) for rank in range(cp.size())])
    ordered = torch.cat(parts).cpu()[rows.argsort()]
    return ordered if case.thd else ordered.transpose(0, 1).flatten(0, 1)


def run_megatron(
    case: Case,
    cp: dist.ProcessGroup,
    tp: dist.ProcessGroup,
    device: torch.device,
    before_backward: Callable[[MLATransformerConfig, int], None] | None = None,
    **changes: Any,
) -> dict[str, Tensor]:
    """One forward and backward of DSAttention; every result for the tokens of the whole batch, on CPU.

    Gradients are combined as Megatron's data parallelism does without per-token loss: the indexer loss is a
    mean over a rank's rows, so the indexer's gradients are averaged over the context-parallel ranks.
    """
    config = make_config(case, context_parallel_size=cp.size(), cp_comm_type="allgather", **changes)
    attention = build(config, cp, tp).to(device)
    inputs = make_inputs(case)
    out_grad = _local(case, inputs.pop("out_grad"), cp, device)
    up_v = inputs.pop("up_v", None)
    local = {name: _local(case, whole, cp, device).requires_grad_() for name, whole in inputs.items()}
    if up_v is not None:
        up_v = up_v.to(device).requires_grad_()

    dsa.DSAIndexerLossLoggingHelper.tracker.clear()
    packed = packed_params(
        case.tokens, padded_lengths=case.lengths, cp_size=cp.size(), cp_rank=cp.rank(), device=device
    )
    output = attention(
        local["query"],
        local["key"],
        local.get("value"),
        attention_mask=None,
        x=local["x"].unsqueeze(1) if case.thd else local["x"],
        qr=local["qr"].unsqueeze(1) if case.thd else local["qr"],
        attn_mask_type=AttnMaskType.causal,
        packed_seq_params=packed if case.thd else None,
        up_v_weight=up_v,
    )
    output = output.squeeze(1) if case.thd else output
    if before_backward is not None:
        before_backward(config, cp.size())
    output.backward(out_grad)

    real = token_rows(case)
    results = {"output": _whole(case, output.detach(), cp)[real]}
    for name in ("query", "key", "value"):
        if name in local:
            gradient = local[name].grad
            assert gradient is not None, f"no gradient for {name}"
            whole = _whole(case, gradient, cp)
            assert not whole[~real].any(), f"the gradient of {name} reaches padding"
            results[f"grad {name}"] = whole[real]
    for name in ("x", "qr"):
        assert local[name].grad is None, f"the indexer's gradient flowed back into {name}"
    loss = dsa.DSAIndexerLossLoggingHelper.tracker["values"].clone()
    dist.all_reduce(loss, group=cp)
    results["indexer loss"] = loss.cpu() / cp.size()
    if up_v is not None:
        assert up_v.grad is not None
        dist.all_reduce(up_v.grad, group=cp)
        results["grad up_v"] = up_v.grad.cpu()
    for name, parameter in attention.indexer.named_parameters():
        assert parameter.grad is not None, f"no gradient for {name}"
        dist.all_reduce(parameter.grad, group=cp)
        results[f"grad indexer {name}"] = parameter.grad.cpu() / cp.size()
    return results


def run_reference(case: Case) -> dict[str, Tensor]:
    """The same problem, sequence by sequence, by the dense fp64 reference."""
    real = token_rows(case)
    inputs = {
        name: (whole if name == "up_v" else whole[real]).double() for name, whole in make_inputs(case).items()
    }
    out_grad = inputs.pop("out_grad")
    for whole in inputs.values():
        whole.requires_grad_()
    state = {name: value.double().requires_grad_() for name, value in indexer_state().items()}
    weights = IndexerWeights(
        wq_b=state["linear_wq_b.weight"],
        wk=state["linear_wk.weight"],
        k_norm_weight=state["k_norm.weight"],
        k_norm_bias=state["k_norm.bias"],
        weights_proj=state["linear_weights_proj.weight"],
    )
    outputs, divergences, start = [], [], 0
    for length in case.tokens:
        rows = slice(start, start + length)
        start += length
        q, k = inputs["query"][rows], inputs["key"][rows].expand(-1, HEADS, -1)
        if case.absorbed:
            v = torch.einsum("sc,nec->sne", inputs["key"][rows, 0, :KV_RANK], inputs["up_v"])
        else:
            v = inputs["value"][rows]
        scores = index_scores(
            inputs["x"][rows].detach(), inputs["qr"][rows].detach(), weights, rope_size=ROPE, eps=NORM_EPS
        )
        output, divergence, _ = attend(
            q, k, v, scores, top_k=TOP_K, softmax_scale=softmax_scale(), sparse_loss=case.sparse_loss
        )
        outputs.append(output)
        divergences.append(divergence)
    loss = LOSS_COEFFICIENT * torch.cat(divergences).mean()
    ((torch.cat(outputs) * out_grad).sum() + loss).backward()

    results = {"output": torch.cat(outputs).detach(), "indexer loss": loss.detach().reshape(1)}
    for name in ("query", "key", "value", "up_v"):
        if name in inputs:
            results[f"grad {name}"] = _gradient(inputs[name])
    return results | {f"grad indexer {name}": _gradient(value) for name, value in state.items()}


def _gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad
