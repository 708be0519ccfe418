"""A model's parameters by names and shapes that do not depend on the parallel layout.

Global names count decoder layers over pipeline stages and experts over expert-parallel ranks; full shapes
undo tensor parallelism.  Used to give models of different layouts the same weights, and to bring their
gradients together.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import parallel_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from megatron.core.models.gpt import GPTModel
    from torch import Tensor, nn

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.local_experts\.(\d+)\.linear_fc([12])\.weight$")
_GROUPED_EXPERT = re.compile(r"\.experts\.linear_fc([12])\.weight(\d+)$")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What this rank holds of one parameter."""

    name: str  # global
    parameter: nn.Parameter
    dim: int | None  # cut over tensor-parallel ranks along it, or None where every rank holds all
    halves: int  # 2 where the parameter stacks gate and up projection, each of which is cut for itself

    def cut(self, full: Tensor, *, size: int, rank: int) -> Tensor:
        """This rank's part of a full tensor, for ``size`` tensor-parallel ranks."""
        if self.dim is None:
            return full
        parts = [half.chunk(size, dim=self.dim)[rank] for half in full.chunk(self.halves, dim=self.dim)]
        return torch.cat(parts, dim=self.dim)

    def join(self, parts: list[Tensor]) -> Tensor:
        """The full tensor from every tensor-parallel rank's part, in rank order."""
        if self.dim is None:
            return parts[0]
        halves = zip(*(part.chunk(self.halves, dim=self.dim) for part in parts), strict=True)
        return torch.cat([piece for half in halves for piece in half], dim=self.dim)

    def full_shape(self, *, size: int) -> tuple[int, ...]:
        """Shape of the whole parameter, for ``size`` tensor-parallel ranks."""
        shape = list(self.parameter.shape)
        if self.dim is not None:
            shape[self.dim] *= size
        return tuple(shape)


def pieces(model: GPTModel) -> Iterator[Piece]:
    """Every parameter of one chunk of the model (unwrapped: no data parallelism around it)."""
    numbers = [layer.layer_number - 1 for layer in model.decoder.layers]
    experts = (model.config.num_moe_experts or 0) // model.config.expert_model_parallel_size
    first_expert = experts * parallel_state.get_expert_model_parallel_rank()
    for local_name, parameter in model.named_parameters():
        name = local_name.replace(".mlp.linear_fc1.layer_norm_weight", ".pre_mlp_layernorm.weight")
        name = _GROUPED_EXPERT.sub(r".experts.local_experts.\2.linear_fc\1.weight", name)
        expert = _EXPERT.search(name)
        if expert is not None:
            number = first_expert + int(expert.group(1))
            name = _EXPERT.sub(f".experts.local_experts.{number}.linear_fc{expert.group(2)}.weight", name)
        name = _LAYER.sub(lambda found: f"decoder.layers.{numbers[int(found.group(1))]}.", name)
        # Experts are never cut: megatron_config sets their tensor parallelism to 1.
        cut = expert is None and getattr(parameter, "tensor_model_parallel", False)
        yield Piece(
            name=name,
            parameter=parameter,
            dim=parameter.partition_dim if cut else None,
            halves=2 if name.endswith(".linear_fc1.weight") and model.config.gated_linear_unit else 1,
        )


def load_full(chunks: Sequence[GPTModel], make: Callable[[str, tuple[int, ...]], Tensor]) -> None:
    """Set every parameter from ``make(global name, full shape)``, which must answer alike on every rank."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    with torch.no_grad():
        for piece in _all_pieces(chunks):
            full = make(piece.name, piece.full_shape(size=size))
            piece.parameter.copy_(piece.cut(full, size=size, rank=rank))


def gather_full(chunks: Sequence[GPTModel], read: Callable[[nn.Parameter], Tensor]) -> dict[str, Tensor]:
    """``read(parameter)`` of every parameter, joined over tensor, expert and pipeline parallelism, on CPU.

    Collective over the world; every rank gets everything, so this is for models that fit one host's memory.

    Args:
        chunks: the unwrapped chunks of this rank's pipeline stage.
        read: gives a tensor of the parameter's shape, for instance its value or its gradient.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    mine = {}
    for piece in _all_pieces(chunks):
        local = read(piece.parameter).detach().contiguous()
        parts = [local]
        if piece.dim is not None:
            parts = [torch.empty_like(local) for _ in range(group.size())]
            dist.all_gather(parts, local, group=group)
        mine[piece.name] = piece.join(parts).cpu()
    return _from_everyone(mine)


def gather_expert_biases(chunks: Sequence[GPTModel]) -> dict[str, Tensor]:
    """The routers' balancing biases by global name, on CPU; alike on every rank of a stage.  Collective."""
    return _from_everyone(
        {
            f"decoder.layers.{layer.layer_number - 1}.mlp.router.expert_bias": bias.cpu()
            for chunk in chunks
            for layer in chunk.decoder.layers
            if (bias := getattr(getattr(layer.mlp, "router", None), "expert_bias", None)) is not None
        }
    )


def _all_pieces(chunks: Sequence[GPTModel]) -> Iterator[Piece]:
    return (piece for chunk in chunks for piece in pieces(chunk))


def _from_everyone(mine: dict[str, Tensor]) -> dict[str, Tensor]:
    """All ranks' tensors by name; of those of one name, the last rank's."""
    everyone: list[dict[str, Tensor] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {name: value for part in everyone if part is not None for name, value in part.items()}
