"""Top-k of index scores in CUDA C++ (`topk.cu`).

Not in Triton: the search is a chain of counts over a block, each of which takes several barriers there and
one here, and a prefix sum over a tile is a scan there and ballots here. docs/dsa-kernels.md has the times.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING

from dsv32.dsa.kernels import cuda

if TYPE_CHECKING:
    from torch import Tensor

THREADS = 256  # as in the source


@functools.cache
def source() -> str:
    """The kernel's text."""
    return Path(__file__).with_suffix(".cu").read_text()


def topk(scores: Tensor, starts: Tensor, ends: Tensor, indices: Tensor, picked: Tensor) -> None:
    """Choose the best columns of every row: column c of row i is key starts[i] + c, of ends[i] - starts[i].

    scores: fp32 [rows, width], consecutive columns. starts, ends: int32 [rows]. indices int32 and picked fp32
    [rows, count] are written: keys ascending and their scores, then -1 and -inf. Equal scores go to the
    smaller key.
    """
    rows, count = indices.shape
    if rows == 0 or count == 0:
        return
    for t in (scores, indices, picked):
        if t.stride(-1) != 1:
            raise ValueError("top-k needs consecutive columns")
    cuda.launch(
        source(),
        "topk",
        rows,
        THREADS,
        scores.device,
        *(ctypes.c_void_p(t.data_ptr()) for t in (scores, starts, ends, indices, picked)),
        ctypes.c_int(count),
        *(ctypes.c_longlong(t.stride(0)) for t in (scores, indices, picked)),
    )
