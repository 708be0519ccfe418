"""The whole model against transformers' DeepseekV32ForCausalLM: same weights, logits and selections."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron_fixtures import relative_error, run_ranks
from model_cases import Layout, make_trainer, start
from safetensors.torch import save_file
from torch import Tensor

from dsv32.mcore.full_state import gather_expert_biases, gather_full
from dsv32.mcore.hf_names import hf_config, to_hf
from dsv32.mcore.packing import zigzag_rows
from dsv32.training.model import Parallel
from dsv32.training.sizes import TINY

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

#: Two programs, fp32, five layers with some ten matrix products each: about a hundred roundings of 6e-8.
LOGITS = 5e-6
#: Below, at and above the top-k of 16; the longest beyond yarn's original length of 32.
LENGTHS = (12, 16, 64)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A way to run the model that transformers has, too."""

    name: str
    yarn: bool
    parallel: Parallel = field(default_factory=Parallel)

    @property
    def ranks(self) -> int:
        return self.parallel.tp * self.parallel.cp * self.parallel.pp

    def __str__(self) -> str:
        return self.name


SETTINGS = [
    Setting(name="rope", yarn=False),
    Setting(name="yarn", yarn=True),
    Setting(name="yarn-cp2", yarn=True, parallel=Parallel(cp=2)),
]


def _tokens(length: int) -> Tensor:
    return torch.randint(0, TINY.vocabulary, (2, length), generator=torch.Generator().manual_seed(length))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Logits [2, s, vocabulary] and each layer's selection as a mask [2, s, s], by sequence length."""

    logits: dict[int, Tensor]
    selections: dict[int, list[Tensor]]
    checkpoint: dict[str, Tensor]


def _as_mask(indices: Tensor, length: int) -> Tensor:
    """[b, rows, k] with -1 for nothing to [b, rows, s]."""
    mask = torch.zeros(*indices.shape[:2], length + 1, dtype=torch.bool)
    indices = indices.cpu().long()
    return mask.scatter_(-1, indices.masked_fill(indices < 0, length), True)[..., :length]


def _megatron(rank: int, device: torch.device, setting: Setting) -> Outcome:
    settings = {} if setting.yarn else {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    layout = Layout(name="hf", parallel=setting.parallel, settings=settings)
    start(layout)
    model = make_trainer(layout, device).plain_model.eval()
    for layer in model.decoder.layers:
        if hasattr(layer.mlp, "router"):  # a bias large enough to change which experts are chosen
            generator = torch.Generator().manual_seed(layer.layer_number)
            layer.mlp.router.expert_bias.copy_(torch.randn(TINY.experts, generator=generator) * 0.1)
    cp_size = setting.parallel.cp
    logits, selections = {}, {}
    attend = dsa._run_sparse_attention
    for length in LENGTHS:
        if length % (2 * cp_size):
            continue
        rows = zigzag_rows([length], cp_size=cp_size, cp_rank=rank)
        seen: list[Tensor] = []

        def record(*, topk_indices: Tensor, _seen: list[Tensor] = seen, **kwargs: Any) -> Tensor:
            _seen.append(topk_indices)
            return attend(topk_indices=topk_indices, **kwargs)

        with torch.no_grad(), mock.patch.object(dsa, "_run_sparse_attention", record):
            local = model(
                input_ids=_tokens(length)[:, rows].to(device),
                position_ids=rows.expand(2, -1).to(device),
                attention_mask=None,
            )
        order = torch.cat([zigzag_rows([length], cp_size=cp_size, cp_rank=r) for r in range(cp_size)])
        logits[length] = _gather(local.float(), order)
        # Where every key is chosen both name future ones as well, which the attention masks.
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        selections[length] = [
            _gather(_as_mask(indices, length).to(device), order) & causal for indices in seen
        ]
    checkpoint = gather_full([model], lambda parameter: parameter) | gather_expert_biases([model])
    return Outcome(logits=logits, selections=selections, checkpoint=checkpoint)


def _gather(local: Tensor, order: Tensor) -> Tensor:
    """Every rank's rows [b, rows, ...] in the order of positions."""
    parts = [torch.empty_like(local) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, local.contiguous())
    return torch.cat(parts, dim=1).cpu()[:, order.argsort()]


def _transformers(folder: Path, setting: Setting, checkpoint: dict[str, Tensor]) -> Outcome:
    """Write the checkpoint as published ones are, load it with transformers and run it."""
    from transformers import DeepseekV32ForCausalLM
    from transformers.models.deepseek_v32 import modeling_deepseek_v32 as modeling

    tensors = dict(to_hf(checkpoint, vocabulary=TINY.vocabulary))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = hf_config(size=TINY, vocabulary=TINY.vocabulary, max_positions=128, yarn=setting.yarn)
    (folder / "config.json").write_text(json.dumps(config))
    model, report = DeepseekV32ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"], report["missing_keys"]
    assert not report["unexpected_keys"], report["unexpected_keys"]
    model.eval()
    forward = modeling.DeepseekV32Indexer.forward
    logits, selections = {}, {}
    for length in LENGTHS:
        seen: list[Tensor] = []

        def record(self: Any, *args: Any, _seen: list[Tensor] = seen, **kwargs: Any) -> Tensor:
            indices = forward(self, *args, **kwargs)
            _seen.append(indices)
            return indices

        with torch.no_grad(), mock.patch.object(modeling.DeepseekV32Indexer, "forward", record):
            logits[length] = model(_tokens(length), use_cache=False).logits
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        selections[length] = [_as_mask(indices, length) & causal for indices in seen]
    return Outcome(logits=logits, selections=selections, checkpoint=tensors)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_logits_and_selections_equal_transformers(
    setting: Setting, tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    got = run_ranks(setting.ranks, _megatron, setting)[0]
    wanted = _transformers(tmp_path, setting, got.checkpoint)
    assert got.logits, "no sequence length fits the layout"
    for length, logits in got.logits.items():
        error = relative_error(logits, wanted.logits[length])
        record_property(f"logits {length}", error)
        agreement = (logits.argmax(-1) == wanted.logits[length].argmax(-1)).float().mean().item()
        record_property(f"argmax agreement {length}", agreement)
        assert len(got.selections[length]) == TINY.layers
        for layer, (mine, theirs) in enumerate(
            zip(got.selections[length], wanted.selections[length], strict=True)
        ):
            assert torch.equal(mine, theirs), f"{length} tokens: layer {layer} selects other tokens"
        assert error <= LOGITS, f"{length} tokens: relative error {error:.2e}"
        assert agreement == 1.0
