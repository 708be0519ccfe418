"""Layer specs for a DSA model, with Transformer Engine or without.

With ``transformer_impl="transformer_engine"`` the layers are those of Megatron's own specs for the
experimental attention variant, but for one: Transformer Engine multiplies fp32 matrices in TF32, and
quantises every linear layer under its FP8 recipes, so the indexer's ``weights_proj`` is a plain torch layer.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_dsa_module_spec_for_backend,
    get_transformer_block_with_experimental_attention_variant_spec,
    get_transformer_layer_with_experimental_attention_variant_spec,
)
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_mtp_block_spec,
    get_gpt_mtp_block_spec_for_backend,
)
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from dsv32.mcore.local_backend import DuplicatedLinear, LocalBackend

if TYPE_CHECKING:
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import MLATransformerConfig


def attention_spec(*, config: MLATransformerConfig) -> ModuleSpec:
    """Absorbed multi-latent attention with DSA, from plain torch layers."""
    return get_dsa_module_spec_for_backend(config=config, backend=LocalBackend())


def block_spec(*, config: MLATransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The decoder layers of this pipeline stage: DSA everywhere, dense or MoE by ``config.moe_layer_freq``.

    Args:
        config: ``transformer_impl`` decides between plain torch (``local``) and Transformer Engine.
        vp_stage: stage of an interleaved pipeline, or None.
    """
    if config.transformer_impl != "local":
        return _te_block_spec(config=config, vp_stage=vp_stage)
    backend = LocalBackend()
    layers = get_transformer_layer_with_experimental_attention_variant_spec(config=config, backend=backend)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(
        layer_specs=layers[first : first + count], layer_norm=backend.layer_norm(rms_norm=True)
    )


def why_no_te() -> str | None:
    """Why Transformer Engine's layers cannot be built here, or None."""
    try:
        import_module("transformer_engine.pytorch")
    # A missing library, one of another torch, or parts of two versions, which it asserts about.
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        reason = str(error).strip() or type(error).__name__
        return f"transformer_engine.pytorch cannot be imported: {reason.splitlines()[0]}"
    return None


def _te_block_spec(*, config: MLATransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Megatron's Transformer Engine spec of this stage's layers, with ``weights_proj`` in true fp32."""
    block = get_transformer_block_with_experimental_attention_variant_spec(config=config, vp_stage=vp_stage)
    for layer in block.layer_specs:
        core_attention = layer.submodules.self_attention.submodules.core_attention
        core_attention.submodules.indexer.submodules.linear_weights_proj = DuplicatedLinear
    return block


def mtp_spec(
    *, config: MLATransformerConfig, vp_stage: int | None = None
) -> MultiTokenPredictionBlockSubmodules | None:
    """The multi-token prediction block; None where this stage has none or the config asks for none.

    Its inner layer is like the last decoder layer, as in DeepSeek-V3.
    """
    if not config.mtp_num_layers:
        return None
    if config.transformer_impl != "local":
        block = _te_block_spec(config=config, vp_stage=vp_stage)
        return get_gpt_mtp_block_spec(
            config=config, spec=block, use_transformer_engine=True, vp_stage=vp_stage
        )
    backend = LocalBackend()
    layers = get_transformer_layer_with_experimental_attention_variant_spec(config=config, backend=backend)
    return get_gpt_mtp_block_spec_for_backend(
        config=config, spec=layers[-1], backend=backend, vp_stage=vp_stage
    )
