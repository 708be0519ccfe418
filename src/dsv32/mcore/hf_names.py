"""From Megatron's parameters to the tensors of a published DeepSeek-V3.2 checkpoint, and its config.

Names and shapes are those of the checkpoint on disk (one tensor an expert and projection), which
transformers' ``DeepseekV32ForCausalLM.from_pretrained`` reads.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from dsv32.training.sizes import Size

_OUTER = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_INDEXER = "self_attention.core_attention.indexer"
_INNER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_a_layernorm.weight",
    "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
    "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
    "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    f"{_INDEXER}.linear_wq_b.weight": "self_attn.indexer.wq_b.weight",
    f"{_INDEXER}.linear_wk.weight": "self_attn.indexer.wk.weight",
    f"{_INDEXER}.k_norm.weight": "self_attn.indexer.k_norm.weight",
    f"{_INDEXER}.k_norm.bias": "self_attn.indexer.k_norm.bias",
    f"{_INDEXER}.linear_weights_proj.weight": "self_attn.indexer.weights_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
}
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
_MLP = re.compile(r"^mlp\.(?:experts\.local_experts\.(\d+)|(shared_experts))?\.?linear_fc([12])\.weight$")


def to_hf(full: Mapping[str, Tensor], *, vocabulary: int) -> Iterator[tuple[str, Tensor]]:
    """Rename and, where gate and up projection are one, split.

    Args:
        full: by global name (``dsv32.mcore.full_state``): parameters, and expert biases.
        vocabulary: rows of embedding and output layer; what Megatron padded beyond is dropped.

    Raises:
        ValueError: a name that has no counterpart, such as a multi-token prediction layer's.
    """
    for name, value in full.items():
        if name in _OUTER:
            yield _OUTER[name], value if value.dim() == 1 else value[:vocabulary]
            continue
        found = _LAYER.match(name)
        if found is None:
            raise ValueError(f"{name} has no counterpart in a DeepSeek-V3.2 checkpoint's decoder")
        prefix, inner = f"model.layers.{found.group(1)}.", found.group(2)
        mlp = _MLP.match(inner)
        if mlp is None:
            if inner not in _INNER:
                raise ValueError(f"{name} has no counterpart in a DeepSeek-V3.2 checkpoint's decoder")
            yield prefix + _INNER[inner], value
            continue
        expert, shared, layer = mlp.groups()
        part = f"experts.{expert}." if expert else "shared_experts." if shared else ""
        if layer == "2":
            yield f"{prefix}mlp.{part}down_proj.weight", value
        else:
            for projection, half in zip(("gate_proj", "up_proj"), value.chunk(2), strict=True):
                yield f"{prefix}mlp.{part}{projection}.weight", half.contiguous()


def hf_config(*, size: Size, vocabulary: int, max_positions: int, yarn: bool = True) -> dict[str, Any]:
    """What ``config.json`` of the exported checkpoint says."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(size.rope_base)}
    if yarn:
        rope |= {
            "rope_type": "yarn",
            "factor": size.yarn_factor,
            "original_max_position_embeddings": size.yarn_original_length,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        }
    return {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "vocab_size": vocabulary,
        "hidden_size": size.hidden,
        "intermediate_size": size.ffn,
        "moe_intermediate_size": size.moe_ffn,
        "num_hidden_layers": size.layers,
        "first_k_dense_replace": size.dense_layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads,
        "n_shared_experts": size.shared_experts,
        "n_routed_experts": size.experts,
        "num_experts_per_tok": size.experts_per_token,
        "n_group": size.groups,
        "topk_group": size.groups_kept,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "routed_scaling_factor": size.routed_scaling,
        "q_lora_rank": size.q_rank,
        "kv_lora_rank": size.kv_rank,
        "qk_nope_head_dim": size.nope,
        "qk_rope_head_dim": size.rope,
        "v_head_dim": size.value,
        "index_n_heads": size.index_heads,
        "index_head_dim": size.index_size,
        "index_topk": size.top_k,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": max_positions,
        "rope_parameters": rope,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "num_nextn_predict_layers": 0,
    }
