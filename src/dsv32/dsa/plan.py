"""Which rows are worked on together, and which keys they may see.

A plan is plain integers on the host: the same plan drives the GPU kernels and the CPU reference, so block
cuts, packed sequences and context-parallel chunks are tested without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Block:
    """Query rows [lo, hi) and the keys [key_lo, key_hi) that at least one of them may see."""

    lo: int
    hi: int
    key_lo: int
    key_hi: int

    @property
    def rows(self) -> int:
        """How many rows."""
        return self.hi - self.lo

    @property
    def width(self) -> int:
        """How many keys."""
        return self.key_hi - self.key_lo


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Row i may see keys starts[i] <= j < ends[i]; int32 [sq] on the device of the data.

    causal_offset: set when starts == 0 and ends == min(i + 1 + causal_offset, sk) is known without looking at
    the device; then no plan needs a device-to-host copy.
    """

    starts: Tensor
    ends: Tensor
    sk: int
    causal_offset: int | None = None

    @property
    def sq(self) -> int:
        """How many rows."""
        return self.ends.numel()

    def lengths(self) -> Tensor:
        """Valid keys per row, int32 [sq]; 0 for a row that sees nothing."""
        return (self.ends - self.starts).clamp_min(0)

    def rows(self, lo: int, hi: int) -> Bounds:
        """The bounds of rows [lo, hi)."""
        off = None if self.causal_offset is None else self.causal_offset + lo
        return Bounds(starts=self.starts[lo:hi], ends=self.ends[lo:hi], sk=self.sk, causal_offset=off)


def causal_bounds(sq: int, sk: int, device: torch.device, offset: int | None = None) -> Bounds:
    """Bottom-right aligned causal bounds (offset = sk - sq), or aligned as `offset` says."""
    off = sk - sq if offset is None else offset
    ends = (torch.arange(sq, device=device, dtype=torch.int32) + (off + 1)).clamp(0, sk)
    return Bounds(starts=torch.zeros_like(ends), ends=ends, sk=sk, causal_offset=off)


def row_step(rows: int, bytes_per_row: int, budget: int, multiple: int = 1) -> int:
    """Rows per block so that rows * bytes_per_row <= budget; at least `multiple`, and a multiple of it."""
    step = max(1, budget // max(1, bytes_per_row))
    step = max(multiple, step // multiple * multiple)
    return max(1, min(rows, step))


def even_step(rows: int, step: int, multiple: int) -> int:
    """Shrink `step` so that the blocks are about equal: one ragged last block would waste a launch."""
    if rows <= step:
        return rows
    parts = -(-rows // step)
    share = -(-rows // parts)
    return min(step, -(-share // multiple) * multiple)


def blocks(bounds: Bounds, step: int) -> list[Block]:
    """Cut the rows into blocks of `step` with the key range of each.

    Plain causal bounds need no device access. Otherwise the per-block minimum of starts and maximum of ends
    come to the host in one copy (one synchronisation per call, not one per block). A block whose rows see
    nothing gets an empty key range.
    """
    sq, sk = bounds.sq, bounds.sk
    cuts = [(lo, min(lo + step, sq)) for lo in range(0, sq, step)]
    if bounds.causal_offset is not None:
        off = bounds.causal_offset
        return [Block(lo=lo, hi=hi, key_lo=0, key_hi=max(0, min(hi + off, sk))) for lo, hi in cuts]
    pad = len(cuts) * step - sq
    seen = bounds.ends > bounds.starts
    starts = torch.where(seen, bounds.starts, torch.full_like(bounds.starts, sk))
    ends = torch.where(seen, bounds.ends, torch.zeros_like(bounds.ends))
    starts = torch.nn.functional.pad(starts, (0, pad), value=sk).view(len(cuts), step).amin(1)
    ends = torch.nn.functional.pad(ends, (0, pad), value=0).view(len(cuts), step).amax(1)
    host = torch.stack((starts, ends)).tolist()
    out = []
    for (lo, hi), key_lo, key_hi in zip(cuts, host[0], host[1], strict=True):
        last = max(0, min(int(key_hi), sk))
        out.append(Block(lo=lo, hi=hi, key_lo=min(max(0, int(key_lo)), last), key_hi=last))
    return out


def bounds_of_indices(indices: Tensor, sk: int) -> Bounds:
    """Bounds that cover the chosen keys of each row. indices: int32 [sq, topk], -1 for an empty slot."""
    valid = indices >= 0
    ends = torch.where(valid, indices, -1).amax(-1) + 1
    starts = torch.where(valid, indices, sk).amin(-1)
    return Bounds(starts=torch.minimum(starts, ends).int(), ends=ends.int(), sk=sk)


def loss_factor(
    loss_coeff: float, rows: Tensor | None, count: int, per_token: bool, device: torch.device
) -> Tensor:
    """What the KL sum is multiplied by.

    The reduction of megatron-core 0.19.2 `reduce_indexer_kl_sum`, times the coefficient.
    """
    if per_token:
        return torch.full((), loss_coeff, dtype=torch.float32, device=device)
    if rows is not None:
        return loss_coeff / rows.sum().to(torch.float32).clamp_min(1.0)
    return torch.full((), loss_coeff / max(count, 1), dtype=torch.float32, device=device)
