"""Lets Megatron-Core run on CPU with gloo: for tests and for a look at a run without a GPU.

Megatron assumes CUDA in some two hundred places (factories with ``device="cuda"``, CUDA generators, streams)
that have nothing to do with what it computes.  Patching each in the source would make a series that must be
redone at every release, so ``install()`` redirects torch instead, and only in the process that asks for it.
What DSA itself needs is a source patch (``patches/megatron-core``), because there the fix is right on a GPU,
too.

Nothing happens on import.  ``prepare()`` comes before Megatron is imported, ``install()`` after.
``install()`` refuses to run where CUDA is available.
"""

# ruff: noqa: ANN401  # the functions here wear the signatures of those that they stand in for
from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_FACTORIES = (
    "arange",
    "empty",
    "empty_like",
    "eye",
    "full",
    "full_like",
    "ones",
    "ones_like",
    "rand",
    "randint",
    "randn",
    "tensor",
    "zeros",
    "zeros_like",
)
_MARK = "_dsv32_cpu_shim"


def prepare() -> None:
    """Before Megatron is imported, where there is no CUDA: no compilation and no Transformer Engine.

    Megatron wraps its fused pieces in torch.compile as it is imported; on CPU that wants a C++ compiler at
    run time, and spends 18 s on a first step that takes 0.4 s without. It takes Transformer Engine's norms,
    clipping and optimizers where that imports, also for tensors on the CPU, for which it has no kernels.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        if "transformer_engine" not in sys.modules:
            vars(sys)["modules"]["transformer_engine"] = None  # an import of it is an ImportError


def install() -> None:
    """Redirect CUDA factories, generators and streams, and add the collectives gloo lacks; idempotent.

    Raises:
        RuntimeError: CUDA is available, where the shim would move work to the CPU without being noticed.
    """
    if torch.cuda.is_available():
        raise RuntimeError(
            "dsv32.cpu.install(): CUDA is available here; the CPU shim would hide it. Do not call it."
        )
    prepare()
    if getattr(torch, _MARK, False):
        return
    setattr(torch, _MARK, True)
    _redirect_factories()
    _redirect_tensor_methods()
    _redirect_generators()
    _redirect_streams()
    _complete_gloo()
    _complete_checkpoint_load()
    _redirect_megatron()


def _is_cuda(device: object) -> bool:
    if isinstance(device, int) and not isinstance(device, bool):
        return True  # torch reads a bare number as a CUDA ordinal
    return isinstance(device, (str, torch.device)) and torch.device(device).type == "cuda"


def _on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False  # pinning needs a CUDA driver
        return make(*args, **kwargs)

    return factory


def _redirect_factories() -> None:
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _redirect_tensor_methods() -> None:
    move, kind = torch.Tensor.to, torch.Tensor.type

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and _is_cuda(args[0]):
            args = ("cpu", *args[1:])
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return move(self, *args, **kwargs)

    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return kind(self, dtype, *args, **kwargs)
        # Megatron's optimizers tell fp32 from half parameters by the names that CUDA tensors have.
        return kind(self).replace("torch.", "torch.cuda.", 1)

    def stay(self: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return self

    methods: dict[str, Callable[..., Any]] = {"to": to, "type": type_, "cuda": stay, "pin_memory": stay}
    for name, method in methods.items():
        setattr(torch.Tensor, name, method)
    torch.Tensor.record_stream = lambda self, stream: None
    torch.nn.Module.cuda = lambda self, device=None: self


def _redirect_generators() -> None:
    def get_state(*_: Any, **__: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
        torch.set_rng_state(state)

    replaced: dict[str, Callable[..., Any]] = {
        "get_rng_state": get_state,
        "set_rng_state": set_state,
        "manual_seed": torch.default_generator.manual_seed,
        "manual_seed_all": lambda seed: None,
    }
    for name, function in replaced.items():
        setattr(torch.cuda, name, function)


class _Stream:
    """Stands for a CUDA stream or event on a device where everything is already in order."""

    device = torch.device("cpu")

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0

    def record_event(self, *_: Any) -> _Stream:
        return _Stream()

    def _nothing(self, *_: Any) -> None:
        return None

    wait_stream = wait_event = wait = synchronize = record = _nothing

    def query(self) -> bool:
        return True


@contextlib.contextmanager
def _in_stream(_: object) -> Iterator[None]:
    yield


def _redirect_streams() -> None:
    replaced: dict[str, Any] = {
        "Stream": _Stream,
        "Event": _Stream,
        "stream": _in_stream,
        "current_stream": lambda *_: _Stream(),
        "default_stream": lambda *_: _Stream(),
        "current_device": lambda: torch.device("cpu"),
        "set_device": lambda *_: None,
        "device_count": lambda: 0,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)


class _Done:
    """A finished collective, for callers that asked for an asynchronous one."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _complete_gloo() -> None:
    """Add what gloo of torch 2.6 lacks: the AVG operation, and reduce_scatter of a list."""
    all_reduce, scatter_tensor = dist.all_reduce, dist.reduce_scatter_tensor

    def sum_then_divide(
        collective: Callable[..., Any], output: torch.Tensor, *rest: Any, **kwargs: Any
    ) -> Any:
        asynchronous = kwargs.pop("async_op", False)
        kwargs["op"] = dist.ReduceOp.SUM
        collective(output, *rest, **kwargs)
        output.div_(dist.get_world_size(kwargs.get("group")))
        return _Done() if asynchronous else None

    @functools.wraps(all_reduce)
    def reduce_all(
        tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if op == dist.ReduceOp.AVG:
            return sum_then_divide(all_reduce, tensor, group=group, async_op=async_op)
        return all_reduce(tensor, op=op, group=group, async_op=async_op)

    @functools.wraps(scatter_tensor)
    def reduce_scatter_tensor(
        output: torch.Tensor,
        input: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if op == dist.ReduceOp.AVG:
            return sum_then_divide(scatter_tensor, output, input, group=group, async_op=async_op)
        return scatter_tensor(output, input, op=op, group=group, async_op=async_op)

    @functools.wraps(dist.reduce_scatter)
    def reduce_scatter(
        output: torch.Tensor,
        input_list: list[torch.Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        total = torch.cat([piece.reshape(-1) for piece in input_list])
        dist.all_reduce(total, op=op, group=group)
        sizes = [piece.numel() for piece in input_list]
        output.copy_(total.split(sizes)[dist.get_rank(group)].view_as(output))
        return _Done() if async_op else None

    dist.all_reduce = reduce_all
    dist.reduce_scatter_tensor = reduce_scatter_tensor
    dist.reduce_scatter = reduce_scatter


def _complete_checkpoint_load() -> None:
    """Megatron loads with ``no_dist`` and a positional reader, which torch 2.6 knows only one level below."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import state_dict_loader

    if "no_dist" in inspect.signature(checkpoint.load).parameters:
        return

    def load(
        state_dict: dict[str, Any], storage_reader: Any, *, planner: Any = None, no_dist: bool = False
    ) -> None:
        state_dict_loader._load_state_dict(state_dict, storage_reader, planner=planner, no_dist=no_dist)

    checkpoint.load = load


def _share_storage(target: torch.Tensor, source: torch.Tensor) -> None:
    """Give ``target`` the bytes of ``source`` behind autograd's back; Megatron compiles C++ for it."""
    storage, wanted = target.untyped_storage(), source.untyped_storage()
    storage.resize_(wanted.nbytes())
    storage.copy_(wanted)


def _redirect_megatron() -> None:
    """Names that Megatron binds at import or builds from CUDA internals."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    def get_state(device: object = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    def share_storage() -> Callable[[torch.Tensor, torch.Tensor], None]:
        return _share_storage

    random._get_share_storage = share_storage
    random._get_cuda_rng_state = get_state
    random._set_cuda_rng_state = set_state
    token_dispatcher.maybe_move_tensor_to_cpu = to_host
    # The tracker warns when the CPU generator moves inside a fork; here it is the generator being forked.
    logging.getLogger(random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )
