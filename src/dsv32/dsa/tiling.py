"""What is worked on at a time: the keys that a block of query rows may see, in tiles that fit a byte budget.

A tile is either a range of keys that all rows of a block look at, or a range of columns of the chosen keys,
gathered for each row. `blocked` has the arithmetic on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsv32.dsa.plan import Bounds, blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True, kw_only=True)
class Visible:
    """Which keys a row may see: by `bounds` on key positions, or by `mask`.

    bounds: of rows, in terms of `positions`. positions: int [sk], None where key j has position j. mask: bool
    [sq, sk], True where a row may not look; wins over bounds.
    """

    bounds: Bounds
    positions: Tensor | None = None
    mask: Tensor | None = None

    def ranges(self, step: int) -> list[tuple[slice, slice]]:
        """Blocks of rows, each with the keys that at least one of its rows may see."""
        sq, sk = self.bounds.sq, self.bounds.sk
        if self.mask is not None or self.positions is not None:
            return [(slice(lo, min(lo + step, sq)), slice(0, sk)) for lo in range(0, sq, step)]
        return [(slice(b.lo, b.hi), slice(b.key_lo, b.key_hi)) for b in blocks(self.bounds, step)]

    def allowed(self, rows: slice, keys: slice | Tensor) -> Tensor:
        """Bool [rows, width]: for a range of keys, or for the keys int64 [rows, width] of each row."""
        if self.mask is not None:
            some = self.mask[rows]
            return ~(some[:, keys] if isinstance(keys, slice) else some.gather(1, keys))
        starts, ends = self.bounds.starts[rows, None], self.bounds.ends[rows, None]
        if self.positions is not None:
            at = self.positions[keys]
        elif isinstance(keys, slice):
            at = torch.arange(keys.start, keys.stop, device=starts.device, dtype=starts.dtype)
        else:
            at = keys
        return (at >= starts) & (at < ends)


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Some keys of a block of rows: `keys` a range, or int64 [rows, width]; `valid` bool [rows, width]."""

    keys: slice | Tensor
    valid: Tensor

    def take(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of x [sk, ...]: [width, ...], or gathered [rows, width, ...]."""
        return x[self.keys].to(dtype)

    def letters(self, heads: bool) -> str:
        """Dimensions of what `take` gives, in the letters of einsum."""
        return ("" if isinstance(self.keys, slice) else "q") + ("khd" if heads else "kd")

    def add(self, total: Tensor, part: Tensor, heads: slice | None) -> None:
        """Add gradients of what `take` gave to those of all keys; `heads`: theirs among [sk, H, D]."""
        rows = part.flatten(0, part.ndim - (2 if heads is None else 3))
        into = total if heads is None else total[:, heads]
        if isinstance(self.keys, slice):
            into[self.keys] += rows
        else:
            into.index_add_(0, self.keys.flatten(), rows)


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Visible keys cut into tiles; with `indices` int [sq, t] (-1 in empty slots) only the chosen ones."""

    visible: Visible
    indices: Tensor | None = None

    @property
    def width(self) -> int:
        """The most keys that a row may have."""
        return self.visible.bounds.sk if self.indices is None else self.indices.size(1)

    def blocks(self, step: int) -> list[tuple[slice, slice]]:
        """Blocks of rows, each with its range of columns."""
        if self.indices is None:
            return self.visible.ranges(step)
        sq, width = self.indices.shape
        return [(slice(lo, min(lo + step, sq)), slice(0, width)) for lo in range(0, sq, step)]

    def tiles(self, rows: slice, columns: slice, step: int) -> Iterator[Tile]:
        """The tiles of a block of rows."""
        for lo in range(columns.start, columns.stop, step):
            cut = slice(lo, min(lo + step, columns.stop))
            if self.indices is None:
                yield Tile(keys=cut, valid=self.visible.allowed(rows, cut))
            else:
                some = self.indices[rows, cut].long()
                keys = some.clamp_min(0)
                yield Tile(keys=keys, valid=(some >= 0) & self.visible.allowed(rows, keys))


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How much is worked on at a time: query rows, keys of a tile, heads."""

    rows: int
    keys: int
    heads: int


def fit(rows: int, keys: int, heads: int, cost: Callable[[int, int, int], int], budget: int) -> Cut:
    """The largest cut whose cost [bytes] of (rows, keys, heads) is within the budget, or 1, 1, 1.

    Rows and keys are halved down to 64 before heads are, as products of fewer are slow.
    """
    r, k, h = max(rows, 1), max(keys, 1), max(heads, 1)
    while cost(r, k, h) > budget and (r, k, h) != (1, 1, 1):
        if max(r, k) > 64 or h == 1:
            r, k = (-(-r // 2), k) if r >= k else (r, -(-k // 2))
        else:
            h = -(-h // 2)
    return Cut(rows=r, keys=k, heads=h)


def groups(count: int, step: int) -> Iterator[slice]:
    """Heads, `step` at a time."""
    for lo in range(0, count, step):
        yield slice(lo, min(lo + step, count))
