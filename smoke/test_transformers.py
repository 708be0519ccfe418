"""Transformers' DeepSeek-V3.2: what it needs on CPU, precision on load, the multi-token prediction layer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from transformers.utils import import_utils

from dsv32.mcore.hf_names import hf_config
from dsv32.training.sizes import TINY

if TYPE_CHECKING:
    from pathlib import Path


def test_device_type_without_an_accelerator_is_cpu() -> None:
    with (
        mock.patch("torch.accelerator.is_available", return_value=False),
        mock.patch("torch.accelerator.current_accelerator", side_effect=RuntimeError("as torch 2.6 does")),
    ):
        assert import_utils.get_device_type() == "cpu"


def _saved(folder: Path) -> dict[str, torch.Tensor]:
    """A checkpoint of random weights, written as transformers writes it; its tensors."""
    from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

    torch.manual_seed(0)
    fields = hf_config(size=TINY, vocabulary=TINY.vocabulary, max_positions=128)
    DeepseekV32ForCausalLM(DeepseekV32Config(**fields)).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def test_weights_proj_stays_in_fp32_on_a_bf16_load(tmp_path: Path) -> None:
    from transformers import DeepseekV32ForCausalLM

    saved = _saved(tmp_path)
    loaded = DeepseekV32ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    for layer in range(TINY.layers):
        name = f"model.layers.{layer}.self_attn.indexer.weights_proj.weight"
        assert torch.equal(loaded[name], saved[name]), f"{name} is {loaded[name].dtype} or rounded"
    assert loaded["lm_head.weight"].dtype == torch.bfloat16


def test_mtp_layer_is_skipped_by_the_layer_count(tmp_path: Path) -> None:
    from transformers import DeepseekV32ForCausalLM

    tensors = _saved(tmp_path)
    last = f"model.layers.{TINY.layers - 1}."
    behind = f"model.layers.{TINY.layers}."
    mtp = {name.replace(last, behind): value.clone() for name, value in tensors.items() if last in name}
    mtp[f"{behind}eh_proj.weight"] = torch.zeros(TINY.hidden, 2 * TINY.hidden)
    save_file(tensors | mtp, tmp_path / "model.safetensors", metadata={"format": "pt"})
    _, report = DeepseekV32ForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["unexpected_keys"]
    assert not report["missing_keys"]

    # A stray tensor elsewhere is still reported, layer 61 of a model without one included.
    save_file(
        tensors | {"model.layers.61.stray.weight": torch.zeros(1)},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == TINY.layers
    _, report = DeepseekV32ForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(report["unexpected_keys"]) == {"model.layers.61.stray.weight"}
