"""The full-size 5-layer model is built, without memory for it: every shape, on the meta device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron_fixtures import run_ranks
from torch.overrides import TorchFunctionMode

from dsv32 import cpu
from dsv32.mcore.hf_names import hf_config, to_hf
from dsv32.training.memory import parameters
from dsv32.training.model import Parallel, build_model, megatron_config
from dsv32.training.sizes import FULL

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


_FACTORIES = {torch.empty, torch.zeros, torch.ones, torch.full, torch.arange, torch.tensor, torch.randn}


class _OnMeta(TorchFunctionMode):
    """Whatever makes a tensor or is given a device gets the meta device."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs or func in _FACTORIES:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _build(
    rank: int, device: torch.device, parallel: Parallel
) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    cpu.install()
    parallel.initialize()
    model_parallel_cuda_manual_seed(1)
    config = megatron_config(
        size=FULL,
        parallel=parallel,
        dtype=torch.bfloat16,
        local=True,
        # Nothing to draw; and CPU initialisation would make a copy of the whole of each weight first.
        settings={"perform_initialization": False, "use_cpu_initialization": False},
    )
    with _OnMeta():
        (model,) = build_model(config=config, vocabulary=FULL.vocabulary, sequence_length=8192)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return shapes, [name for name, parameter in model.named_parameters() if not parameter.is_meta]


def test_full_size_builds_with_the_shapes_of_transformers() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    ((shapes, real),) = run_ranks(1, _build, Parallel())
    assert not real, f"in memory: {real}"
    counted = sum(torch.Size(shape).numel() for shape in shapes.values())
    assert counted == parameters(FULL, parallel=Parallel(), layers=range(FULL.layers), ends=(True, True))[0]

    words = hf_config(size=FULL, vocabulary=FULL.vocabulary, max_positions=163_840)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**words))
        full = {name: torch.empty(shape) for name, shape in shapes.items()}
        ours = {name: tuple(value.shape) for name, value in to_hf(full, vocabulary=FULL.vocabulary)}
    # transformers stacks the experts of a layer; a file has one after the other.
    wanted = {name: tuple(p.shape) for name, p in theirs.named_parameters() if ".mlp.experts." not in name}
    assert {name: shape for name, shape in ours.items() if ".mlp.experts." not in name} == wanted
    experts = {name: shape for name, shape in ours.items() if ".mlp.experts." in name}
    assert len(experts) == (FULL.layers - FULL.dense_layers) * FULL.experts * 3
    assert set(experts.values()) == {(FULL.moe_ffn, FULL.hidden), (FULL.hidden, FULL.moe_ffn)}
