"""How many bytes a piece of work has allocated at most, beside what was there before it began."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.profiler import ProfilerActivity, profile

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def peak_bytes(work: Callable[[], object]) -> int:
    """Run it and follow the CPU allocator: temporaries inside of operations count, too."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        kept = work()  # what it returns is still alive when the last event is read
    results = recorded.profiler.kineto_results
    changes = sorted(
        (event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"
    )
    assert changes, "the profiler saw no allocation"
    live = peak = 0
    for _, change in changes:
        live += change
        peak = max(peak, live)
    del kept
    return peak


def size_of(*tensors: Tensor) -> int:
    """Bytes of tensors that do not share memory."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
