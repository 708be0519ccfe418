"""How much memory a rank needs: parameters counted exactly, activations from the shapes that backward keeps.

``python -m dsv32.training.memory`` prints the table of docs/memory.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsv32.mcore.packing import padded_length
from dsv32.training.model import Parallel
from dsv32.training.sizes import FULL

if TYPE_CHECKING:
    from dsv32.training.sizes import Size

GIB = 2**30
#: bf16 weight, fp32 gradient; Adam's fp32 copy, mean and variance, which the distributed optimizer shards.
_WEIGHT, _GRADIENT, _ADAM = 2, 4, 12


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One rank of the first pipeline stage, in bytes, and what was counted for it."""

    parameters: int
    expert_parameters: int  # part of ``parameters``
    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """Without the allocator's slack, NCCL's buffers and CUDA's context (some 5 GiB together)."""
        return self.weights + self.gradients + self.optimizer + self.activations


def attention_parameters(size: Size, *, tp: int) -> int:
    """Of one layer on one tensor-parallel rank, its input norm included."""
    query = size.nope + size.rope
    shared = (
        size.hidden
        + size.q_rank * (size.hidden + 1)
        + (size.kv_rank + size.rope) * size.hidden
        + size.kv_rank
    )
    indexer = (
        size.index_heads * size.index_size * size.q_rank
        + size.index_size * (size.hidden + 2)
        + size.index_heads * size.hidden
    )
    cut = size.heads * (
        query * size.q_rank + (size.nope + size.value) * size.kv_rank + size.value * size.hidden
    )
    return shared + indexer + cut // tp


def parameters(size: Size, *, parallel: Parallel, layers: range, ends: tuple[bool, bool]) -> tuple[int, int]:
    """All parameters and the experts' among them, of one rank that holds ``layers`` (counted from 0).

    Args:
        size: the model.
        parallel: the layout.
        layers: decoder layers of the rank's pipeline stage.
        ends: whether the stage has the embedding, and the final norm with the output layer.
    """
    rows = padded_length(size.vocabulary, multiple=128)
    total = sum(ends) * rows * size.hidden // parallel.tp + (size.hidden if ends[1] else 0)
    experts = 0
    for layer in layers:
        total += attention_parameters(size, tp=parallel.tp) + size.hidden  # the norm before the MLP
        if layer < size.dense_layers:
            total += 3 * size.hidden * size.ffn // parallel.tp
            continue
        total += size.experts * size.hidden  # router
        total += 3 * size.hidden * size.moe_ffn * size.shared_experts // parallel.tp
        experts += 3 * size.hidden * size.moe_ffn * size.experts // parallel.ep
    return total + experts, experts


def estimate(
    *, size: Size, parallel: Parallel, world_size: int, sequence_length: int, recompute: bool
) -> Estimate:
    """Memory of one rank for one microbatch of one sample, bf16 with the distributed optimizer, no pipeline.

    Activations are what a layer keeps for its backward pass: with ``recompute`` its input alone, and the full
    set of one layer at a time.  Scores over all pairs of tokens are not counted: the kernels of ``dsv32.dsa``
    keep none. Experts are taken as evenly loaded.
    """
    if parallel.pp != 1:
        raise ValueError(f"pp {parallel.pp}: the estimate is for one pipeline stage")
    count, experts = parameters(size, parallel=parallel, layers=range(size.layers), ends=(True, True))
    dense_copies = world_size // parallel.tp
    expert_copies = world_size // parallel.ep
    adam = _ADAM * ((count - experts) // dense_copies + experts // expert_copies)

    rows = sequence_length // parallel.cp  # of this rank, before sequence parallelism
    own = rows // parallel.tp
    latent = size.kv_rank + size.rope
    attention = 2 * (
        own * (2 * size.hidden + size.q_rank + latent)  # input, its norm, query and key latents
        + rows * (size.heads // parallel.tp) * (size.nope + size.rope + latent + size.kv_rank + size.value)
        + sequence_length * latent  # gathered keys
        + rows * size.index_heads * (size.index_size + 2)  # every rank has all of the indexer's heads
        + sequence_length * size.index_size
        + own * size.hidden
    ) + 4 * rows * min(size.top_k, sequence_length)
    dense = 2 * (own * size.hidden + 3 * rows * size.ffn // parallel.tp)
    routed = own * size.experts_per_token
    moe = 2 * (own * size.hidden + routed * (2 * size.hidden + 3 * size.moe_ffn)) + 4 * own * size.experts
    logits = rows * padded_length(size.vocabulary, multiple=128) // parallel.tp * (2 + 4)
    sparse_layers = size.layers - size.dense_layers
    if recompute:
        kept = size.layers * 2 * own * size.hidden + attention + max(dense, moe)
    else:
        kept = size.layers * attention + size.dense_layers * dense + sparse_layers * moe
    return Estimate(
        parameters=count,
        expert_parameters=experts,
        weights=_WEIGHT * count,
        gradients=_GRADIENT * count,
        optimizer=adam,
        activations=kept + logits,
    )


#: Layouts of 64 ranks for the 5-layer model at 8,192 tokens a sample; the batch of 256 is accumulated.
SEED_CASE = [(Parallel(tp=8, cp=8, ep=ep), recompute) for ep in (8, 64) for recompute in (False, True)]


def table() -> str:
    """The seed case as Markdown."""
    lines = [
        "| TP | CP | EP | recompute | parameters | weights | gradients | Adam | activations | sum |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for parallel, recompute in SEED_CASE:
        got = estimate(size=FULL, parallel=parallel, world_size=64, sequence_length=8192, recompute=recompute)
        figures = " | ".join(
            f"{value / GIB:.2f}"
            for value in (got.weights, got.gradients, got.optimizer, got.activations, got.total)
        )
        lines.append(
            f"| {parallel.tp} | {parallel.cp} | {parallel.ep} | {'full' if recompute else 'none'} "
            f"| {got.parameters / 1e9:.2f} G | {figures} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
