"""What times and counts a step at the real widths, on a tiny model: on the CPU, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from megatron_fixtures import run_ranks

from dsv32 import cpu
from dsv32.training import full_step
from dsv32.training.model import Parallel
from dsv32.training.sizes import TINY

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

BACKEND, REPEATS = "dsv32.dsa", 2


def _steps(rank: int, device: torch.device) -> dict[str, full_step.Measured]:
    cpu.install()
    Parallel().initialize()
    case = full_step.Case(
        heads=TINY.heads,
        tokens=128,
        experts=TINY.experts,
        vocabulary=TINY.vocabulary,
        recompute=True,
        layers="local",
        base=TINY,
        documents=(60, 40, 27, 1),
    )
    trainer, batch = full_step.make(case, device), full_step.make_batch(case, device)
    ours = full_step.measure(trainer, batch, backend=BACKEND, repeats=REPEATS)
    trainer.config.dsa_kernel_strict = False
    plain = full_step.measure(trainer, batch, backend="none", repeats=1)
    return {"ours": ours, "plain": plain}


def test_two_backends_are_compared_on_one_model_and_their_calls_counted(
    record_property: Callable[[str, Any], None],
) -> None:
    (got,) = run_ranks(1, _steps, cpu=True)
    ours, plain = got["ours"], got["plain"]
    calls = 2 * (REPEATS + 1) * TINY.layers  # without gradients at first, again in the backward pass
    assert ours.ran == {"run_fused_dsa_attention": calls}
    assert not ours.declined
    assert not plain.ran
    assert len(ours.step_ms) == REPEATS
    # The learning rate is 0, so both saw the same weights. In bf16 and on the CPU the two round attention's
    # output, of which the loss is a mean over 124 tokens, differently: 2^-9 each.
    record_property("lm loss", abs(ours.lm_loss / plain.lm_loss - 1))
    assert ours.lm_loss == pytest.approx(plain.lm_loss, rel=2**-9)
