"""A whole tiny model trained under every parallel layout gives one result.

Losses of three steps and the gradients of the first, under Megatron's own data parallelism, optimizer and
schedules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from megatron_fixtures import no_te, relative_error, run_ranks, skip_unless_fits
from model_cases import Layout, Run, train

from dsv32.training.model import Parallel
from dsv32.training.sizes import TINY

if TYPE_CHECKING:
    from collections.abc import Callable

#: A mean over some 200 tokens, of which a split changes the order of sums; three updates carry it on.
LOSS = 1e-6
#: Ranks sum partial products in another order in each of the model's five layers, in some ten products,
#: forward and backward: a hundred roundings of 6e-8 on the way to the first layer's parameters.
GRADIENT = 6e-6
#: A choice that flips changes a few tokens' losses by a nat or two, among some 200 tokens with 6 nats each.
FLIP = 2e-3

_TP2_CP2 = Parallel(tp=2, cp=2)
_RECOMPUTE_ALL: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
_RECOMPUTE_SOME: dict[str, Any] = {
    "recompute_granularity": "selective",
    "recompute_modules": ["core_attn", "mla_up_proj", "moe"],
}
#: Tensor parallelism rounds every layer's output differently in bf16, enough to change choices at once; a
#: model that attends to every token and asks every expert has none to change.
_EVERY_EXPERT: dict[str, Any] = {
    "moe_router_topk": TINY.experts,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
}
#: An interleaved pipeline of two stages has both directions under way from the third microbatch on.
_MTP: dict[str, Any] = {
    "microbatches": 4,
    "settings": {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.3},
}
_BACKEND: dict[str, Any] = {"dsa_kernel_backend": "dsv32.dsa", "dsa_kernel_strict": True}

REFERENCES = {
    "sbhd": Layout(name="one rank"),
    "thd": Layout(name="one rank thd", thd=True),
    "dense": Layout(name="one rank dense", sparse=False),
    "adam": Layout(name="one rank adam", optimizer="adam"),
    "mtp": Layout(name="one rank mtp", **_MTP),
    "mtp thd": Layout(name="one rank mtp thd", thd=True, **_MTP),
}
LAYOUTS = [
    ("sbhd", Layout(name="cp2", parallel=Parallel(cp=2))),
    ("sbhd", Layout(name="tp2 sequence parallel", parallel=Parallel(tp=2))),
    ("sbhd", Layout(name="tp2 cp2", parallel=_TP2_CP2)),
    ("sbhd", Layout(name="ep2", parallel=Parallel(ep=2))),
    ("sbhd", Layout(name="pp2", parallel=Parallel(pp=2))),
    ("sbhd", Layout(name="cp2 ep2", parallel=Parallel(cp=2, ep=2))),
    ("sbhd", Layout(name="cp2 overlapped reduction", parallel=Parallel(cp=2), overlap_grad_reduce=True)),
    (
        "adam",
        Layout(
            name="cp2 distributed optimizer",
            parallel=Parallel(cp=2),
            optimizer="adam",
            distributed_optimizer=True,
        ),
    ),
    ("sbhd", Layout(name="full recompute", settings=_RECOMPUTE_ALL)),
    ("sbhd", Layout(name="selective recompute", settings=_RECOMPUTE_SOME)),
    ("sbhd", Layout(name="cp2 full recompute", parallel=Parallel(cp=2), settings=_RECOMPUTE_ALL)),
    ("sbhd", Layout(name="our backend cp2", parallel=Parallel(cp=2), settings=_BACKEND)),
    ("thd", Layout(name="thd cp2", thd=True, parallel=Parallel(cp=2))),
    ("thd", Layout(name="thd tp2 cp2", thd=True, parallel=_TP2_CP2)),
    ("thd", Layout(name="thd tp2 cp4", thd=True, parallel=Parallel(tp=2, cp=4))),
    ("dense", Layout(name="dense cp2", sparse=False, parallel=Parallel(cp=2))),
    ("dense", Layout(name="dense tp2", sparse=False, parallel=Parallel(tp=2))),
    ("dense", Layout(name="dense our backend", sparse=False, settings=_BACKEND)),
    ("adam", Layout(name="tp2 adam", optimizer="adam", parallel=Parallel(tp=2))),
    ("mtp", Layout(name="mtp cp2", parallel=Parallel(cp=2), **_MTP)),
    ("mtp", Layout(name="mtp tp2", parallel=Parallel(tp=2), **_MTP)),
    ("mtp", Layout(name="mtp pp2", parallel=Parallel(pp=2), **_MTP)),
    ("mtp thd", Layout(name="mtp thd cp2", thd=True, parallel=Parallel(cp=2), **_MTP)),
    ("mtp thd", Layout(name="mtp thd pp2 vpp2", thd=True, parallel=Parallel(pp=2, vpp=2), **_MTP)),
]


def run(layout: Layout) -> Run:
    """Train on the layout's ranks; every rank must report the same."""
    runs = run_ranks(layout.ranks, train, layout)
    assert all(other.lm_loss == runs[0].lm_loss for other in runs), "ranks disagree about the loss"
    return runs[0]


@pytest.fixture(scope="module")
def references() -> dict[str, Run]:
    """Filled as tests ask."""
    return {}


@pytest.mark.parametrize(("reference", "layout"), LAYOUTS, ids=[str(layout) for _, layout in LAYOUTS])
def test_layout_equals_one_rank(
    reference: str,
    layout: Layout,
    references: dict[str, Run],
    record_property: Callable[[str, Any], None],
) -> None:
    skip_unless_fits(layout.ranks)
    if reference not in references:
        references[reference] = run(REFERENCES[reference])
    one, got = references[reference], run(layout)
    predicts = "mtp_num_layers" in layout.settings
    assert all(bool(loss) == predicts for loss in (*one.mtp_loss, *got.mtp_loss))
    for step in range(3):
        flips = got.choices[step].flips(one.choices[step])
        error = abs(got.lm_loss[step] / one.lm_loss[step] - 1)
        indexer_error = abs(got.indexer_loss[step] / one.indexer_loss[step] - 1)
        mtp_error = abs(got.mtp_loss[step] / one.mtp_loss[step] - 1) if predicts else 0.0
        record_property(f"lm loss step {step}", error)
        record_property(f"indexer loss step {step}", indexer_error)
        record_property(f"mtp loss step {step}", mtp_error)
        if flips and step:
            # From here on the two are different models; what remains to be shown is that it was a flip.
            record_property(f"flips step {step}", flips)
            assert error <= max(flips, 1) * FLIP, f"{flips} flips cannot move the loss by {error:.1e}"
            break
        assert error <= LOSS, f"step {step}, {flips} flips: {got.lm_loss} for {one.lm_loss}"
        assert indexer_error <= GRADIENT, f"step {step}: {got.indexer_loss} for {one.indexer_loss}"
        assert mtp_error <= LOSS, f"step {step}: {got.mtp_loss} for {one.mtp_loss}"
    record_property("grad norm", abs(got.grad_norm[0] / one.grad_norm[0] - 1))
    assert abs(got.grad_norm[0] / one.grad_norm[0] - 1) <= GRADIENT
    if layout.distributed_optimizer:
        return  # each rank has reduced its share only; the losses of steps 1 and 2 depend on all of them

    assert got.gradients.keys() == one.gradients.keys()
    errors = {}
    for name, wanted in one.gradients.items():
        if not wanted.any():  # an expert that no token chose
            assert not got.gradients[name].any(), name
            continue
        errors[name] = relative_error(got.gradients[name], wanted)
    worst = max(errors, key=errors.__getitem__)
    record_property("worst gradient", errors[worst])
    assert errors[worst] <= GRADIENT, f"{worst}: {errors[worst]:.2e}"


#: bf16 rounds a layer's output to 2**-9 relative, and whatever rounds differently moves a gradient by as much
#: as rounding as such does.  So the yardstick is the distance of one rank in bf16 from fp32: a layout in bf16
#: is a second draw of the same error.  Two draws of the norm of many errors differ by less than this factor.
SECOND_DRAW = 2.0
SMOOTH: dict[str, Any] = {"sparse": False, "rounded_weights": True, "settings": _EVERY_EXPERT}
BF16_LAYOUTS = [
    Layout(name="bf16 cp2", dtype=torch.bfloat16, parallel=Parallel(cp=2), **SMOOTH),
    Layout(name="bf16 tp2", dtype=torch.bfloat16, parallel=Parallel(tp=2), **SMOOTH),
    Layout(name="bf16 thd cp2", dtype=torch.bfloat16, thd=True, parallel=Parallel(cp=2), **SMOOTH),
    Layout(name="bf16 te", dtype=torch.bfloat16, te=True, **SMOOTH),
    Layout(name="bf16 te thd", dtype=torch.bfloat16, te=True, thd=True, **SMOOTH),
    Layout(name="bf16 te tp2", dtype=torch.bfloat16, te=True, parallel=Parallel(tp=2), **SMOOTH),
]


@pytest.mark.parametrize("layout", BF16_LAYOUTS, ids=str)
def test_bf16_layout_is_as_near_to_fp32_as_one_rank(
    layout: Layout, references: dict[str, Run], record_property: Callable[[str, Any], None]
) -> None:
    skip_unless_fits(layout.ranks)
    if layout.te and (missing := no_te()):
        pytest.skip(missing)
    for dtype in (torch.float32, torch.bfloat16):
        name = f"smooth {dtype} {layout.thd}"
        if name not in references:
            references[name] = run(Layout(name=name, dtype=dtype, thd=layout.thd, **SMOOTH))
    exact = references[f"smooth {torch.float32} {layout.thd}"]
    one, got = references[f"smooth {torch.bfloat16} {layout.thd}"], run(layout)

    def distance(run: Run, name: str) -> float:
        wanted = exact.gradients[name]
        return float((run.gradients[name] - wanted).norm() / wanted.norm())

    assert abs(got.lm_loss[0] / exact.lm_loss[0] - 1) <= 2**-8
    ratios = {name: distance(got, name) / distance(one, name) for name in exact.gradients}
    worst = max(ratios, key=ratios.__getitem__)
    record_property("lm loss step 0", abs(got.lm_loss[0] / exact.lm_loss[0] - 1))
    record_property("worst ratio to one rank's error", ratios[worst])
    record_property("largest error of one rank", max(distance(one, name) for name in exact.gradients))
    assert ratios[worst] <= SECOND_DRAW, f"{worst}: {ratios[worst]:.2f} times the error of one rank"
