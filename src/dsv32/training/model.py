"""Megatron's configuration and model for a size, a parallel layout and a training stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch.nn import functional

from dsv32.mcore.layer_spec import block_spec, mtp_spec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dsv32.training.sizes import Size


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """How ranks share the work; what is left of the world is data parallel."""

    tp: int = 1
    cp: int = 1
    ep: int = 1
    pp: int = 1
    vpp: int = 1  # chunks of layers that a pipeline stage holds; above 1 the schedule is interleaved

    def check(self, *, size: Size, world_size: int, sequence_length: int) -> None:
        """Raise before any work where the layout cannot hold the model.

        Raises:
            ValueError: naming the two numbers that do not fit and what to change.
        """
        model_ranks = self.tp * self.cp * self.pp
        experts_over = world_size // self.pp  # experts are not cut by tp, so their ranks are all of a stage
        demands = [
            (
                min(self.tp, self.cp, self.ep, self.pp, self.vpp) >= 1,
                f"every degree must be at least 1, got {self}",
            ),
            (
                world_size % model_ranks == 0,
                f"tp {self.tp} x cp {self.cp} x pp {self.pp} need a multiple of {model_ranks} ranks, and "
                f"{world_size} {'is' if world_size == 1 else 'are'} there (--ranks, or the launcher's)",
            ),
            (
                experts_over % self.ep == 0 and experts_over > 0,
                f"ep {self.ep} does not divide the {experts_over} ranks of a pipeline stage",
            ),
            (size.experts % self.ep == 0, f"{size.experts} experts do not divide by ep {self.ep}"),
            (size.heads % self.tp == 0, f"{size.heads} attention heads do not divide by tp {self.tp}"),
            (
                self.vpp == 1 or self.pp > 1,
                f"vpp {self.vpp} without pp: only the stages of a pipeline are cut into chunks",
            ),
            (
                self.pp * self.vpp <= size.layers,
                f"{size.layers} layers cannot be spread over pp {self.pp}"
                + (f" x vpp {self.vpp} = {self.pp * self.vpp} chunks" if self.vpp > 1 else ""),
            ),
            (
                sequence_length % (2 * self.cp * self.tp) == 0,
                f"sequence length {sequence_length} is not a multiple of 2 x cp x tp = "
                f"{2 * self.cp * self.tp}",
            ),
        ]
        for holds, message in demands:
            if not holds:
                raise ValueError(f"parallel layout: {message}")

    def initialize(self) -> None:
        """Set Megatron's process groups up; collective, after ``torch.distributed`` is initialised."""
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            virtual_pipeline_model_parallel_size=self.vpp if self.vpp > 1 else None,
            context_parallel_size=self.cp,
            expert_model_parallel_size=self.ep,
            expert_tensor_parallel_size=1,
        )

    def layer_layout(self, *, layers: int, mtp_layers: int) -> list[list[str]] | None:
        """What each chunk of the pipeline holds, in the order of layers; None without a pipeline.

        The first chunks take a layer more where the layers do not divide.  Chunk c belongs to stage
        c modulo ``pp``.  Megatron wants all layers of multi-token prediction in one chunk, after the decoder.

        Args:
            layers: of the decoder, at least ``pp * vpp``.
            mtp_layers: of multi-token prediction.
        """
        if self.pp == 1:
            return None
        chunks = self.pp * self.vpp
        held = [["decoder"] * (layers // chunks + (chunk < layers % chunks)) for chunk in range(chunks)]
        held[0].insert(0, "embedding")
        held[-1] += ["mtp"] * mtp_layers + ["loss"]
        return held


def megatron_config(
    *,
    size: Size,
    parallel: Parallel,
    dtype: torch.dtype,
    local: bool,
    indexer_loss: float = 1.0,
    sparse: bool = True,
    settings: Mapping[str, Any] | None = None,
) -> MLATransformerConfig:
    """Megatron's configuration.

    Args:
        size: the model.
        parallel: the layout; sequence parallelism is on where ``tp`` is above 1 (absorbed MLA demands it).
        dtype: of parameters and activations, fp32 or bf16.
        local: plain torch layers rather than Transformer Engine.
        indexer_loss: coefficient of the indexer's KL loss; 0 freezes the indexer.
        sparse: attention to the indexer's top-k and its loss over them; otherwise (the dense warm-up)
            attention
            to every token, and the loss over all of them.
        settings: further fields of Megatron's configuration, which win.
    """
    bf16 = dtype == torch.bfloat16
    mtp_layers = (settings or {}).get("mtp_num_layers") or 0
    fields: dict[str, Any] = {
        "num_layers": size.layers,
        "hidden_size": size.hidden,
        "num_attention_heads": size.heads,
        "ffn_hidden_size": size.ffn,
        "q_lora_rank": size.q_rank,
        "kv_lora_rank": size.kv_rank,
        "qk_head_dim": size.nope,
        "qk_pos_emb_head_dim": size.rope,
        "v_head_dim": size.value,
        "rope_type": "yarn",
        "rotary_base": size.rope_base,
        "rotary_scaling_factor": size.yarn_factor,
        "original_max_position_embeddings": size.yarn_original_length,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,  # Megatron's default of 0 leaves yarn's factor out of the softmax scale
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
        "qk_layernorm": True,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "apply_rope_fusion": False,
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": size.index_heads,
        "dsa_indexer_head_dim": size.index_size,
        # Top-k beyond any sequence is dense attention: the selection is then every visible token.
        "dsa_indexer_topk": size.top_k if sparse else 1 << 30,
        "dsa_indexer_loss_coeff": indexer_loss,
        "dsa_indexer_use_sparse_loss": sparse,
        "dsa_indexer_k_norm_epsilon": 1e-6,
        "dsa_unfused_module": "dsv32.dsa.unfused",  # where no kernel runs: bounded memory
        "moe_layer_freq": [0] * size.dense_layers + [1] * (size.layers - size.dense_layers),
        "num_moe_experts": size.experts,
        "moe_ffn_hidden_size": size.moe_ffn,
        "moe_router_topk": size.experts_per_token,
        "moe_router_num_groups": size.groups,
        "moe_router_group_topk": size.groups_kept,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": size.routed_scaling,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_shared_expert_intermediate_size": size.shared_experts * size.moe_ffn,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": not local,
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp if parallel.vpp > 1 else None,
        "context_parallel_size": parallel.cp,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": parallel.tp > 1,
        "cp_comm_type": "allgather",
        "pipeline_model_parallel_layout": parallel.layer_layout(layers=size.layers, mtp_layers=mtp_layers),
        "calculate_per_token_loss": True,
        "variable_seq_lengths": False,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        # Two stages are each other's previous and next, and in one batch Megatron pairs the sends of one with
        # the receives of the other so that a gradient is taken for an activation, without a word.  Its calls
        # one by one are ordered for that.
        "overlap_p2p_comm": parallel.vpp > 1,
        "batch_p2p_comm": parallel.vpp == 1,
        "bf16": bf16,
        "attention_softmax_in_fp32": True,
        "transformer_impl": "local" if local else "transformer_engine",
        "use_cpu_initialization": local,
        "persist_layer_norm": not local,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": not local,
        "bias_activation_fusion": not local,
        # One fp32 copy of the logits rather than three: 129,280 numbers a token are a step's largest array.
        # Megatron's own kernel; it warns of Transformer Engine's as unstable.
        "cross_entropy_loss_fusion": not local,
        "cross_entropy_fusion_impl": "native",
    }
    return MLATransformerConfig(**(fields | dict(settings or {})))


def build_model(*, config: MLATransformerConfig, vocabulary: int, sequence_length: int) -> list[GPTModel]:
    """The part of the model that this pipeline stage holds, with untied embedding and output layer.

    Returns:
        The stage's chunks in the order of their layers; one, unless the pipeline is interleaved.
    """
    count = config.virtual_pipeline_model_parallel_size
    chunks = []
    for vp_stage in [None] if count is None else range(count):
        end: dict[str, Any] = {"ignore_virtual": False, "vp_stage": vp_stage}
        chunks.append(
            GPTModel(
                config=config,
                transformer_layer_spec=block_spec(config=config, vp_stage=vp_stage),
                vocab_size=vocabulary,
                max_sequence_length=sequence_length,
                pre_process=parallel_state.is_pipeline_first_stage(**end),
                post_process=parallel_state.is_pipeline_last_stage(**end),
                share_embeddings_and_output_weights=False,
                position_embedding_type="rope",
                mtp_block_spec=mtp_spec(config=config, vp_stage=vp_stage),
                vp_stage=vp_stage,
            )
        )
    return chunks
