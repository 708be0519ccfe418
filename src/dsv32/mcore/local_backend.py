"""Layers for a DSA model without Transformer Engine: plain torch, any device, any dtype.

Megatron's ``LocalSpecProvider`` has no duplicated linear layer and its torch norms refuse sequence
parallelism, so DSA (which needs both) can only be built with Transformer Engine.  These two classes close the
gap.
"""

# ruff: noqa: ANN401  # builders take and ignore whatever else Megatron's specs pass
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from megatron.core.transformer.transformer_config import TransformerConfig


class DuplicatedLinear(nn.Module):
    """A bias-free linear layer with the same full weight on every tensor-parallel rank.

    Input [..., in_features], output ([..., out_features], None):  Megatron's linear layers return a bias
    beside the product.  The weight is drawn by ``init_method`` from torch's default generator, which every
    tensor-parallel rank must have seeded alike (``model_parallel_cuda_manual_seed`` does).  ``is_duplicated``
    tells absorbed MLA so.
    """

    is_duplicated = True

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], Any],
        bias: bool = False,
        **_: Any,
    ) -> None:
        super().__init__()
        if bias:
            raise ValueError(
                "DuplicatedLinear has no bias; DSA uses none (config.add_bias_linear must be False)"
            )
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(
            torch.empty(output_size, input_size, dtype=config.params_dtype, device=device)
        )
        if config.perform_initialization:
            init_method(self.weight)
        # Before MLA's up projections each rank holds its own rows; the indexer, which gathers them, overrides
        # this.
        _tag(self, sequence_parallel=config.sequence_parallel)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Multiply; the second member is the bias that Megatron's callers expect, always None."""
        return nn.functional.linear(x, self.weight), None


class LocalNorm:
    """Builds torch's LayerNorm or RMSNorm, by ``config.normalization``, usable with sequence parallelism.

    Under sequence parallelism each rank normalises its own rows, so the parameters' gradients are partial
    sums; the ``sequence_parallel`` tag makes Megatron add them up.  A class, because ``build_module`` calls
    nothing else.
    """

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> nn.Module:
        """Return the norm over the last dimension of size ``hidden_size``.

        Raises:
            ValueError: ``config.normalization`` is neither LayerNorm nor RMSNorm.
        """
        norms: dict[str, type[nn.Module]] = {"LayerNorm": nn.LayerNorm, "RMSNorm": nn.RMSNorm}
        if config.normalization not in norms:
            raise ValueError(
                f"LocalNorm: normalization {config.normalization!r}; want one of {sorted(norms)}"
            )
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        norm = norms[config.normalization](hidden_size, eps=eps, device=device, dtype=config.params_dtype)
        _tag(norm, sequence_parallel=config.sequence_parallel)
        return norm


def _tag(module: nn.Module, **attributes: object) -> None:
    """Mark a module's parameters with the attributes by which Megatron decides how to sum gradients."""
    for parameter in module.parameters():
        vars(parameter).update(attributes)


class LocalBackend(LocalSpecProvider):  # type: ignore[misc]
    """Megatron's local layers, plus what DSA needs beyond them."""

    def linear(self) -> type[nn.Module]:
        """The layer for the indexer's projections, which tensor-parallel ranks hold in full."""
        return DuplicatedLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> Any:
        """The norm; ``config.normalization`` decides which, so the flags change nothing here."""
        return LocalNorm
