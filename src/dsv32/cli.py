"""The command `dsv32` inside the image."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Tools of the image that DeepSeek-V3.2 is trained in.",
)


@app.callback()
def dsv32() -> None:
    """Tools of the image that DeepSeek-V3.2 is trained in."""


@app.command()
def warm(
    heads: Annotated[int, typer.Option(min=1, help="Attention heads of one rank: 128 divided by TP.")] = 128,
    queries: Annotated[int, typer.Option(min=1, help="Query tokens of one rank: sequence / CP.")] = 8192,
    keys: Annotated[int, typer.Option(min=1, help="Key tokens a query may see: the whole sequence.")] = 8192,
    topk: Annotated[int, typer.Option("--top-k", min=1, help="Keys the indexer chooses.")] = 2048,
    index_heads: Annotated[int, typer.Option(min=1, help="The indexer's heads.")] = 64,
) -> None:
    """Compile the DSA kernels of a shape ahead, so that the first step of a run does not.

    What is compiled stays in $DSV32_JIT_CACHE; mount a volume there to keep it from container to container.
    """
    import torch

    from dsv32.dsa.settings import DsaDeclined, Settings
    from dsv32.warm import Shape, cache_folder
    from dsv32.warm import warm as run

    if queries > keys:
        raise SystemExit(stop(f"{queries} queries see at most {keys} keys", "--keys is at least --queries"))
    if not torch.cuda.is_available():
        raise SystemExit(
            stop("no GPU here, and kernels are compiled for the one that is there", "start with --gpus all")
        )
    shape = Shape(heads=heads, queries=queries, keys=keys, topk=topk, index_heads=index_heads)
    try:
        seconds = run(shape, Settings(strict=True), torch.device("cuda"))
    except DsaDeclined as error:
        raise SystemExit(
            stop(str(error), "docs/dsa-kernels.md says which shapes the kernels cover")
        ) from None
    for name, took in seconds.items():
        typer.echo(f"{took:8.1f} s  {name}")
    typer.echo(f"compiled kernels: {cache_folder()}")


def stop(what: str, hint: str) -> int:
    """Say what happened and the next step; the exit code of a wrong use."""
    sys.stderr.write(f"error: {what}\n  next: {hint}\n")
    return 2


def main() -> None:
    """Entry point of the console script."""
    app()
