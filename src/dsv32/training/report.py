"""What a run shows: a line a step, a progress bar, TensorBoard events, ``metrics.jsonl`` and ``loss.png``."""

from __future__ import annotations

import json
import resource
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

METRICS = "metrics.jsonl"


@dataclass(frozen=True, kw_only=True)
class StepLine:
    """One step's figures."""

    step: int
    lm_loss: float  # nats a token
    indexer_loss: float  # nats a token
    grad_norm: float
    learning_rate: float
    tokens_per_second: float
    memory_gib: float  # peak of one rank: of the GPU, or of the process where there is none
    mtp_loss: float = 0.0  # nats a token, mean over the depths; 0 without multi-token prediction

    def text(self) -> str:
        """As a person reads it."""
        return (
            f"step {self.step:6d}  lm loss {self.lm_loss:8.4f}  indexer loss {self.indexer_loss:.3e}  "
            f"{f'mtp loss {self.mtp_loss:8.4f}  ' if self.mtp_loss else ''}"
            f"grad norm {self.grad_norm:8.3f}  lr {self.learning_rate:.2e}  "
            f"{self.tokens_per_second:9.0f} tokens/s  {self.memory_gib:6.2f} GiB"
        )


def peak_memory_gib() -> float:
    """Peak memory of this rank in GiB."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts KiB


class Report:
    """Writes on the rank that is told to, and is silent on the others."""

    def __init__(self, *, out: Path, steps: int, done: int, speaking: bool) -> None:
        self._out, self._speaking = out, speaking
        self._console = Console(highlight=False, soft_wrap=True)
        self._lines = read_metrics(out)[:done] if speaking else []
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not speaking or not self._console.is_terminal,
        )
        self._task = self._progress.add_task("training", total=steps, completed=done)
        self._board = None
        if speaking:
            from torch.utils.tensorboard import SummaryWriter

            out.mkdir(parents=True, exist_ok=True)
            # A resumed run replaces the lines of steps that it repeats.
            text = "".join(json.dumps(asdict(line)) + "\n" for line in self._lines)
            (out / METRICS).write_text(text, encoding="utf-8")
            self._board = SummaryWriter(str(out / "tensorboard"), purge_step=done + 1)

    def __enter__(self) -> Report:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        if self._board is not None:
            self._board.close()
        if self._speaking and self._lines:
            plot(self._lines, self._out / "loss.png")

    def say(self, text: str) -> None:
        """A line for the person."""
        if self._speaking:
            self._console.print(text, markup=False)

    def step(self, line: StepLine) -> None:
        """Record one step."""
        if not self._speaking:
            return
        self._lines.append(line)
        self._console.print(line.text(), markup=False)
        with (self._out / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(line)) + "\n")
        if self._board is not None:
            for name, value in asdict(line).items():
                if name != "step":
                    self._board.add_scalar(name, value, line.step)
        self._progress.update(self._task, completed=line.step)


def read_metrics(out: Path) -> list[StepLine]:
    """What a run has written so far, in order; empty where there is nothing."""
    path = out / METRICS
    if not path.is_file():
        return []
    return [StepLine(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def plot(lines: list[StepLine], path: Path) -> None:
    """Both losses over the steps, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    steps = [line.step for line in lines]
    upper.plot(steps, [line.lm_loss for line in lines])
    upper.set_ylabel("lm loss [nats/token]")
    lower.plot(steps, [line.indexer_loss for line in lines], color="tab:orange")
    lower.set_ylabel("indexer loss [nats/token]")
    lower.set_xlabel("step")
    for axes in (upper, lower):
        axes.grid(visible=True, alpha=0.3)
    figure.savefig(path, dpi=120)
