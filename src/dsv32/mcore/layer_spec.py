"""Layer specs for DSA, with Transformer Engine or without."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_dsa_module_spec_for_backend,
)

from dsv32.mcore.local_backend import LocalBackend

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import MLATransformerConfig


def attention_spec(*, config: MLATransformerConfig) -> ModuleSpec:
    """Absorbed multi-latent attention with DSA, for ``config.transformer_impl``.

    ``local`` gives plain torch layers (any device), ``transformer_engine`` Megatron's own choice.
    """
    backend: Any = LocalBackend() if config.transformer_impl == "local" else TESpecProvider()
    return get_dsa_module_spec_for_backend(config=config, backend=backend)
