"""Which tokens each sample of a run holds: decided by the seed alone, so that a resumed run sees the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from dsv32.mcore.packing import padded_length
from dsv32.training.batch import packed_batch, padded_batch
from dsv32.training.errors import TrainingError

if TYPE_CHECKING:
    from torch import Tensor

    from dsv32.training.batch import Batch
    from dsv32.training.text import Corpus


class Samples:
    """Endless samples of ``rows`` rows each, shuffled anew every time the corpus is through.

    Args:
        corpus: the text.
        rows: rows of a sample, before context parallelism cuts it.
        thd: pack whole documents (those longer than a sample are cut into pieces, and no piece sees another);
            otherwise the documents follow each other in one stream, cut every ``rows`` tokens.
        multiple: rows of a packed document are a multiple of it.
        seed: of the order.
    """

    def __init__(self, *, corpus: Corpus, rows: int, thd: bool, multiple: int, seed: int) -> None:
        self._corpus, self._rows, self._thd, self._multiple, self._seed = corpus, rows, thd, multiple, seed
        if thd:
            self._packs = _pack(corpus, rows=rows, multiple=multiple, seed=seed)
            self._count = len(self._packs)
        else:
            self._count = (len(corpus.tokens) - 1) // rows
        if not self._count:
            raise TrainingError(
                f"the corpus has {len(corpus.tokens)} tokens, not enough for one sample of {rows} rows",
                "give more text, or a smaller --sequence-length",
            )

    def documents(self, number: int) -> list[Tensor]:
        """Sample ``number`` as int64 pieces of n + 1 tokens each, of which n are rows."""
        epoch, place = divmod(number, self._count)
        order = np.random.default_rng((self._seed, epoch)).permutation(self._count)
        chosen = int(order[place])
        if self._thd:
            return [self._read(first, last) for first, last in self._packs[chosen]]
        return [self._read(chosen * self._rows, (chosen + 1) * self._rows + 1)]

    def batch(self, numbers: list[int], *, cp_size: int, cp_rank: int, device: torch.device) -> Batch:
        """A microbatch of these samples, cut for a context-parallel rank; thd takes one sample at a time."""
        if self._thd:
            (number,) = numbers
            return packed_batch(
                self.documents(number),
                rows=self._rows,
                multiple=self._multiple,
                cp_size=cp_size,
                cp_rank=cp_rank,
                device=device,
            )
        sequences = torch.stack([self.documents(number)[0] for number in numbers])
        return padded_batch(sequences, cp_size=cp_size, cp_rank=cp_rank, device=device)

    def _read(self, first: int, last: int) -> Tensor:
        return torch.from_numpy(self._corpus.tokens[first:last].astype(np.int64))


def _pack(corpus: Corpus, *, rows: int, multiple: int, seed: int) -> list[list[tuple[int, int]]]:
    """Fill samples with pieces (first and last token) of documents, in a shuffled order, as they come."""
    pieces = []
    for number in range(len(corpus)):
        first, end = int(corpus.offsets[number]), int(corpus.offsets[number + 1])
        # A piece of n rows needs n + 1 tokens; the next begins with the token that this one predicted last.
        pieces += [(start, min(start + rows + 1, end)) for start in range(first, end - 1, rows)]
    order = np.random.default_rng(seed).permutation(len(pieces))
    packs: list[list[tuple[int, int]]] = []
    room = 0
    for place in order:
        first, last = pieces[int(place)]
        needed = padded_length(last - first - 1, multiple=multiple)
        if not packs or needed > room:
            packs.append([])
            room = rows
        packs[-1].append((first, last))
        room -= needed
    return packs
