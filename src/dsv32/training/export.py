"""A checkpoint of Megatron's to a folder that transformers and inference engines read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from dsv32.mcore.full_state import gather_expert_biases, gather_full
from dsv32.mcore.hf_names import hf_config, to_hf
from dsv32.training import checkpoint, text
from dsv32.training.errors import TrainingError
from dsv32.training.loop import make_trainer, vocabulary
from dsv32.training.model import Parallel
from dsv32.training.settings import DTYPES, TrainSettings

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

#: Tensors that stay in fp32 whatever the rest is: DeepSeek's checkpoints have them so.
_FP32 = (".e_score_correction_bias", ".indexer.weights_proj.weight")
_SHARD_BYTES = 5 * 10**9


def export(device: torch.device, folder: Path, out: Path, data: Path, dtype: str) -> int:
    """Write ``config.json`` and safetensors shards; returns how many tensors.

    One process with the whole model in memory, whatever layout wrote the checkpoint.

    Args:
        device: where the model is built.
        folder: a ``step-…`` folder.
        out: folder to write; made if missing.
        data: the corpus the run trained on, for its vocabulary.
        dtype: of the tensors, ``fp32`` or ``bf16``.

    Raises:
        TrainingError: no complete checkpoint, or more than one process.
    """
    if dist.get_world_size() != 1:
        raise TrainingError(
            f"export on {dist.get_world_size()} ranks", "start it on one rank, without torchrun"
        )
    written = checkpoint.about(folder)["settings"]
    settings = TrainSettings(
        data=data,
        out=out,
        size=written["size"],
        experts=written["experts"],
        layers=written["layers"],
        stage=written["stage"],
        parallel=Parallel(),
    )
    corpus = text.load(data)
    settings.parallel.initialize()
    torch.manual_seed(settings.seed)
    trainer = make_trainer(settings, corpus, device)
    checkpoint.load(folder, trainer=trainer, scheduler=None, weights_only=True)
    chunks = trainer.plain_chunks
    full = gather_full(chunks, lambda parameter: parameter) | gather_expert_biases(chunks)

    rows = vocabulary(settings, corpus)
    positions = int(settings.model_size.yarn_factor * settings.model_size.yarn_original_length)
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value if name.endswith(_FP32) else value.to(DTYPES[dtype])
        for name, value in to_hf(full, vocabulary=rows)
    }
    _write_shards(tensors, out)
    config = hf_config(size=settings.model_size, vocabulary=rows, max_positions=positions)
    config["torch_dtype"] = {"fp32": "float32", "bf16": "bfloat16"}[dtype]
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return len(tensors)


def _write_shards(tensors: dict[str, Tensor], out: Path) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    room = _SHARD_BYTES
    for name, value in tensors.items():
        size = value.numel() * value.element_size()
        if size > room and shards[-1]:
            shards.append({})
            room = _SHARD_BYTES
        shards[-1][name] = value.contiguous()
        room -= size
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, out / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(value.numel() * value.element_size() for value in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
