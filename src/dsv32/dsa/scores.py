"""Index scores by kernel in the precision that the settings ask for, for selection and dense loss alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from dsv32.dsa.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """Queries [sq, Hi, D], keys [sk, D] and weights [sq, Hi], ready to be scored block by block.

    With fp8, q and k are e4m3, the queries' scales are inside the weights (a positive factor passes through
    the relu) and k_scale fp32 [sk] holds the keys'. Without kernels `blocked.Scoring` says the precision.
    """

    q: Tensor
    k: Tensor
    weights: Tensor
    relu: bool
    k_scale: Tensor | None = None

    @classmethod
    def of(cls, q: Tensor, k: Tensor, weights: Tensor, relu: bool, settings: Settings) -> Scorer:
        """A scorer of contiguous q, k and weights."""
        if settings.indexer == "bf16":
            return cls(q=q, k=k, weights=weights, relu=relu)
        from dsv32.dsa.kernels import indexer

        (q8, q_scale), (k8, k_scale) = indexer.quantise(q), indexer.quantise(k)
        return cls(q=q8, k=k8, weights=weights.float() * q_scale, relu=relu, k_scale=k_scale)

    def kernel(
        self, rows: slice, starts: Tensor, ends: Tensor, width: int, out: Tensor | None = None
    ) -> Tensor:
        """Scores of the rows' keys by the Triton kernel, as `kernels.indexer.scores` lays them out."""
        from dsv32.dsa.kernels import indexer

        return indexer.scores(
            self.q[rows], self.k, self.weights[rows], starts, ends, width, self.relu, out, self.k_scale
        )
