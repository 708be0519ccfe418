"""What a training run is told, and what is refused before any work."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from dsv32.mcore.layer_spec import why_no_te
from dsv32.training.errors import TrainingError
from dsv32.training.model import Parallel
from dsv32.training.sizes import SIZES, Size

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
STAGES = ("sparse", "warmup")
LAYOUTS = ("thd", "sbhd")


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """A run.

    ``stage``: ``warmup`` trains the indexer alone, against dense attention and with the loss over all tokens;
    ``sparse`` trains everything with attention to the indexer's top-k.
    ``mtp``: tokens beyond the next that are predicted, too, each by a layer of its own; ``mtp_loss``: weight
    of their mean loss (DeepSeek-V3 report, section 4.2: 0.3, later 0.1).
    ``sequence_length``: rows of a sample.  ``global_batch``: samples of a step over all ranks.
    ``experts``: fewer experts than the size has, 0 for all of them.
    ``layers`` and ``kernels``: "auto" is decided by ``resolved``.
    """

    data: Path
    out: Path
    size: str = "tiny"
    experts: int = 0
    stage: str = "sparse"
    layout: str = "thd"
    parallel: Parallel = field(default_factory=Parallel)
    steps: int = 200
    sequence_length: int = 128
    global_batch: int = 8
    micro_batch: int = 1
    learning_rate: float = 3e-3
    warmup_steps: int = 10
    weight_decay: float = 0.1
    clip: float = 1.0
    optimizer: str = "adam"
    distributed_optimizer: bool = False
    indexer_loss: float = 1.0
    mtp: int = 0
    mtp_loss: float = 0.3
    dtype: str = "fp32"
    layers: str = "auto"
    kernels: str = "auto"
    kernels_strict: bool = True
    recompute: bool = False
    seed: int = 1234
    save_every: int = 0
    load: Path | None = None

    @property
    def model_size(self) -> Size:
        """The size by its name, with ``experts`` of its experts."""
        size = SIZES[self.size]
        return replace(size, experts=self.experts) if self.experts else size

    @property
    def row_multiple(self) -> int:
        """Rows of a packed document are a multiple of it: two chunks a cp rank, each whole under tp."""
        return 2 * self.parallel.cp * self.parallel.tp if self.parallel.cp > 1 else self.parallel.tp

    def resolved(self, *, gpu: bool) -> TrainSettings:
        """With every "auto" decided.

        On a GPU the layers are Transformer Engine's where it is installed (one that is installed and broken
        is an error, not a reason to do without), and attention runs in our kernels where they cover the
        model: bf16 and the full widths.  On a CPU both are plain torch.
        """
        covered = gpu and self.dtype == "bf16" and self.size == "full"
        choices = {
            "layers": "te" if gpu and find_spec("transformer_engine") else "local",
            "kernels": "dsv32.dsa" if covered else "none",
        }
        return replace(
            self, **{name: value for name, value in choices.items() if getattr(self, name) == "auto"}
        )

    def check_device(self, *, gpu: bool) -> None:
        """Refuse what this machine cannot run; for settings that are ``resolved``.

        Raises:
            TrainingError: naming the setting, what is missing and what to choose instead.
        """
        if self.layers == "te":
            reason = why_no_te() if gpu else "Transformer Engine's layers need a GPU, and there is none here"
            if reason is not None:
                raise TrainingError(f"--layers te: {reason}", "use --layers local, which is plain torch")
        if not gpu and self.kernels in ("tilelang", "cudnn"):
            raise TrainingError(
                f"--dsa-kernel-backend {self.kernels}: it needs a GPU, and there is none here",
                "use none, or dsv32.dsa, which runs on any device",
            )
        if gpu and self.kernels != "none" and self.kernels_strict and self.dtype != "bf16":
            raise TrainingError(
                f"--dsa-kernel-backend {self.kernels} with --dtype {self.dtype}: GPU kernels are for bf16",
                "use --dtype bf16, or --no-kernels-strict to let it fall back to torch",
            )

    def check(self, *, world_size: int) -> None:
        """Refuse what cannot run.

        Raises:
            TrainingError: naming the setting, what it is and what it may be.
        """
        if self.dtype == "fp16":
            raise TrainingError(
                "--dtype fp16: its loss scaling goes by steps that overflow and are skipped, and a gradient "
                "that is not finite ends a run here",
                "use --dtype bf16, as DeepSeek-V3.2 itself",
            )
        for name, value, allowed in (
            ("size", self.size, tuple(SIZES)),
            ("stage", self.stage, STAGES),
            ("layout", self.layout, LAYOUTS),
            ("dtype", self.dtype, tuple(DTYPES)),
            ("layers", self.layers, ("auto", "local", "te")),
            ("optimizer", self.optimizer, ("adam", "sgd")),
        ):
            if value not in allowed:
                raise TrainingError(f"--{name} {value}", f"choose one of {', '.join(allowed)}")
        for name, number in (
            ("steps", self.steps),
            ("sequence-length", self.sequence_length),
            ("global-batch", self.global_batch),
            ("micro-batch", self.micro_batch),
        ):
            if number < 1:
                raise TrainingError(f"--{name} {number}", "give a number of at least 1")
        if self.kernels not in ("auto", "none", "tilelang", "cudnn") and "." not in self.kernels:
            raise TrainingError(
                f"--dsa-kernel-backend {self.kernels}",
                "choose one of auto, none, tilelang, cudnn, or a dotted module such as dsv32.dsa",
            )
        size = SIZES[self.size]
        kept = size.groups_kept * self.experts // size.groups
        if self.experts < 0 or self.experts % size.groups or (self.experts and kept < size.experts_per_token):
            least = size.experts_per_token * size.groups // size.groups_kept
            raise TrainingError(
                f"--experts {self.experts}: a token chooses {size.experts_per_token} of them, "
                f"from {size.groups_kept} of {size.groups} groups",
                f"use a multiple of {size.groups} of at least {least}, or 0 for all {size.experts}",
            )
        try:
            self.parallel.check(
                size=self.model_size, world_size=world_size, sequence_length=self.sequence_length
            )
        except ValueError as error:
            raise TrainingError(
                str(error), "change --tp, --cp, --ep, --pp, --vpp or the number of ranks"
            ) from None
        data_ranks = world_size // (self.parallel.tp * self.parallel.cp * self.parallel.pp)
        if self.global_batch % (data_ranks * self.micro_batch):
            raise TrainingError(
                f"--global-batch {self.global_batch} is not a multiple of {data_ranks} data-parallel ranks "
                f"x --micro-batch {self.micro_batch}",
                f"use a multiple of {data_ranks * self.micro_batch}",
            )
        microbatches = self.global_batch // (data_ranks * self.micro_batch)
        if self.parallel.vpp > 1 and microbatches % self.parallel.pp:
            raise TrainingError(
                f"--vpp {self.parallel.vpp}: a step's {microbatches} microbatches a rank are not a multiple "
                f"of --pp {self.parallel.pp}",
                "use a --global-batch that is a multiple of "
                f"{data_ranks * self.micro_batch * self.parallel.pp}",
            )
        if self.layout == "thd" and self.micro_batch != 1:
            raise TrainingError(
                f"--micro-batch {self.micro_batch} with --layout thd",
                "a packed sample is a batch of its own: use --micro-batch 1 and a longer --sequence-length",
            )
        if self.stage == "warmup" and self.recompute:
            raise TrainingError(
                "--recompute with --stage warmup",
                "the frozen layers keep nothing for the backward pass: leave --recompute away",
            )
        if self.stage == "warmup" and not self.indexer_loss:
            raise TrainingError("--indexer-loss 0 with --stage warmup", "nothing would be trained")
        if self.mtp < 0 or (self.mtp and self.stage == "warmup"):
            raise TrainingError(
                f"--mtp {self.mtp} with --stage {self.stage}",
                "give 0 or more; the warm-up trains the decoder's indexers alone, add --mtp when it is over",
            )
        if self.distributed_optimizer and self.optimizer != "adam":
            raise TrainingError("--distributed-optimizer with sgd", "Megatron shards Adam only")
        if self.load is not None and not self.load.is_dir():
            raise TrainingError(f"--load {self.load} does not exist", "give a step-… folder of a run's --out")

    def record(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {
            name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()
        }
