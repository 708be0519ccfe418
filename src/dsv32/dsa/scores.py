"""Index scores in the precision that the settings ask for, for the selection and for the dense loss alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsv32.dsa import streaming

if TYPE_CHECKING:
    from torch import Tensor

    from dsv32.dsa.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """Queries [sq, Hi, D], keys [sk, D] and weights [sq, Hi], ready to be scored block by block.

    With fp8 on a GPU, q and k are e4m3, the queries' scales are inside the weights (a positive factor passes
    through the relu) and k_scale fp32 [sk] holds the keys'. Elsewhere fp8 is a rounding of q and k.
    """

    q: Tensor
    k: Tensor
    weights: Tensor
    relu: bool
    k_scale: Tensor | None = None

    @classmethod
    def of(cls, q: Tensor, k: Tensor, weights: Tensor, relu: bool, settings: Settings, fused: bool) -> Scorer:
        """A scorer of contiguous q, k and weights; fused: for `kernel`, else for `block`."""
        if settings.indexer == "bf16":
            return cls(q=q, k=k, weights=weights, relu=relu)
        if not fused:
            return cls(q=streaming.through_fp8(q), k=streaming.through_fp8(k), weights=weights, relu=relu)
        from dsv32.dsa.kernels import indexer

        (q8, q_scale), (k8, k_scale) = indexer.quantise(q), indexer.quantise(k)
        return cls(q=q8, k=k8, weights=weights.float() * q_scale, relu=relu, k_scale=k_scale)

    def block(self, rows: slice, keys: slice) -> Tensor:
        """Scores of rows and keys in torch, [rows, keys]."""
        return streaming.block_scores(self.q[rows], self.k[keys], self.weights[rows], self.relu)

    def kernel(
        self, rows: slice, starts: Tensor, ends: Tensor, width: int, out: Tensor | None = None
    ) -> Tensor:
        """Scores of the rows' keys by the Triton kernel, as `kernels.indexer.scores` lays them out."""
        from dsv32.dsa.kernels import indexer

        return indexer.scores(
            self.q[rows], self.k, self.weights[rows], starts, ends, width, self.relu, out, self.k_scale
        )
