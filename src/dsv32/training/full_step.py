"""A training step of the 5-layer model at the real widths, timed, with a count of the kernels that ran.

For the GPU smoke test and for ``scripts/bench_step.py``: bf16, one rank, packed sequences (thd), random
tokens and random weights. Experts are as few as fit one card; every
other width is DeepSeek-V3.2's, unless a case asks for one rank's share of tensor parallelism.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from dsv32.mcore.packing import padded_length
from dsv32.training.batch import Batch, packed_batch
from dsv32.training.model import Parallel, build_model, megatron_config
from dsv32.training.sizes import FULL
from dsv32.training.step import StepResult, Trainer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dsv32.training.sizes import Size

HOOKS = (
    "run_fused_dsa_attention",
    "run_fused_qk_topk_with_loss",
    "run_fused_qk_topk",
    "run_fused_absorbed_sparse_attention",
)
_MEGATRONS = "megatron.core.transformer.experimental_attention_variant.dsa_{}_kernels"
_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step.

    heads: local attention heads; 128, or a tensor-parallel rank's share.
    tokens: rows of the packed sample, which is one document of that length unless ``documents`` says else.
    experts: of each of the two MoE layers.
    vocabulary: rows of embedding and output layer.
    optimizer: ``adam`` (fp32 master weight, mean, variance) or ``sgd`` (fp32 master weight).
    recompute: every layer in the backward pass.
    layers: ``te`` or ``local``, as in the training script.
    base: the model of which heads, experts and vocabulary are replaced.
    """

    heads: int = FULL.heads
    tokens: int = 8192
    experts: int = 16
    vocabulary: int = FULL.vocabulary
    optimizer: str = "sgd"
    recompute: bool = False
    layers: str = "te"
    base: Size = FULL
    documents: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """For tables."""
        return f"H={self.heads} {self.tokens} tokens"

    @property
    def size(self) -> Size:
        """The model; a case with fewer heads is not cut elsewhere."""
        return replace(self.base, heads=self.heads, experts=self.experts, vocabulary=self.vocabulary)


@dataclass(kw_only=True)
class Measured:
    """A backend's steps on a case: the result is that of the last, times are of all but the first."""

    backend: str
    first_s: float = 0.0  # the first step, compilation included
    step_ms: list[float] = field(default_factory=list)
    peak_gib: float = 0.0  # torch's allocator, over the timed steps, weights and optimizer included
    lm_loss: float = 0.0
    indexer_loss: float = 0.0
    grad_norm: float = 0.0
    parameters: int = 0
    ran: dict[str, int] = field(default_factory=dict)  # hook: calls it answered, over all steps
    declined: dict[str, int] = field(default_factory=dict)

    @property
    def median_ms(self) -> float:
        """Of the timed steps."""
        return statistics.median(self.step_ms)


def make(case: Case, device: torch.device, *, seed: int = 1234, learning_rate: float = 0.0) -> Trainer:
    """The model with its optimizer; Megatron's process groups are initialised.

    A learning rate of 0 leaves the weights as they are, so that backends can be compared on one model.
    """
    model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)
    config = megatron_config(
        size=case.size,
        parallel=Parallel(),
        dtype=torch.bfloat16,
        local=case.layers == "local",
        settings={
            "use_cpu_initialization": False,
            "dsa_kernel_backend": "dsv32.dsa",
            "dsa_kernel_strict": True,
            "moe_router_bias_update_rate": 0.0,  # moves the routers whatever the learning rate
            **(_RECOMPUTE if case.recompute else {}),
        },
    )
    rows = padded_length(case.vocabulary, multiple=128)
    (model,) = build_model(config=config, vocabulary=rows, sequence_length=case.tokens)
    return Trainer(
        chunks=[model.to(device)],
        optimizer=OptimizerConfig(
            optimizer=case.optimizer,
            lr=learning_rate,
            min_lr=learning_rate,
            weight_decay=0.0,
            sgd_momentum=0.0,
            clip_grad=1.0,
            bf16=True,
            params_dtype=torch.bfloat16,
        ),
    )


def make_batch(case: Case, device: torch.device, *, seed: int = 3) -> Batch:
    """Random documents that fill the sample."""
    generator = torch.Generator().manual_seed(seed)
    documents = [
        torch.randint(0, case.vocabulary, (length + 1,), generator=generator)
        for length in case.documents or (case.tokens,)
    ]
    return packed_batch(documents, rows=case.tokens, multiple=1, cp_size=1, cp_rank=0, device=device)


@contextlib.contextmanager
def counted(backend: str, measured: Measured) -> Iterator[None]:
    """Count what the backend's hooks answer and decline, while this lasts."""
    if backend == "none":
        yield
        return
    module = import_module(backend if "." in backend else _MEGATRONS.format(backend))
    originals = {name: getattr(module, name) for name in HOOKS if hasattr(module, name)}

    def spy(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def hook(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # as the hook it stands for
            result = call(*args, **kwargs)
            counts = measured.declined if result is None else measured.ran
            counts[name] = counts.get(name, 0) + 1
            return result

        return hook

    for name, call in originals.items():
        setattr(module, name, spy(name, call))
    try:
        yield
    finally:
        for name, call in originals.items():
            setattr(module, name, call)


def measure(
    trainer: Trainer, batch: Batch, *, backend: str, repeats: int, say: Callable[[str], None] = print
) -> Measured:
    """One first step and ``repeats`` timed ones with a DSA backend, whatever the model ran with before.

    Raises:
        RuntimeError: strict mode: the backend declined an operation.
        torch.cuda.OutOfMemoryError: the step does not fit.
    """
    trainer.config.dsa_kernel_backend = backend
    measured = Measured(
        backend=backend, parameters=sum(value.numel() for value in trainer.plain_model.parameters())
    )
    gc.collect()
    torch.cuda.empty_cache()
    result: StepResult | None = None
    with counted(backend, measured):
        for number in range(repeats + 1):
            if number == 1 and torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
            began = time.perf_counter()
            result = trainer.step([batch], sequence_length=batch.tokens.shape[1])
            torch.cuda.synchronize()
            took = time.perf_counter() - began
            if number == 0:
                measured.first_s = took
            else:
                measured.step_ms.append(took * 1e3)
            say(f"{backend}: step {number} {took:.3f} s, lm loss {result.lm_loss:.6f}")
    assert result is not None
    measured.peak_gib = torch.cuda.max_memory_allocated() / 2**30
    measured.lm_loss, measured.indexer_loss = result.lm_loss, result.indexer_loss
    measured.grad_norm = result.grad_norm
    return measured
