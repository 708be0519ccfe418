#!/usr/bin/env python3
"""Train a 5-layer DeepSeek-V3.2 (3 dense layers, 2 with experts) on Megatron-Core, from text to a checkpoint.

On one CPU, in a few minutes:

\b
  run_deepseek_v3.2_5layer.py prepare --out /tmp/text
  run_deepseek_v3.2_5layer.py train --data /tmp/text --out /tmp/run
  run_deepseek_v3.2_5layer.py export --checkpoint /tmp/run/step-000200 --data /tmp/text --out /tmp/hf

On several ranks of one host, or under torchrun on several hosts:

\b
  run_deepseek_v3.2_5layer.py train --data /tmp/text --out /tmp/run2 --ranks 2 --cp 2
  run_deepseek_v3.2_5layer.py train --data /tmp/text --out /tmp/run4 --ranks 2 --pp 2 --vpp 2
  torchrun --nproc-per-node 8 run_deepseek_v3.2_5layer.py train --size full --dtype bf16 --tp 2 --ep 4 ...

At the real widths on one GPU, with as many experts as fit 141 GB:

\b
  run_deepseek_v3.2_5layer.py train --size full --experts 16 --dtype bf16 --sequence-length 8192 \
      --global-batch 1 --optimizer sgd --data /tmp/text --out /tmp/full

The two stages of DeepSeek-V3.2's recipe, each from the other's checkpoint:

\b
  run_deepseek_v3.2_5layer.py train --stage warmup --load /tmp/run/step-000200 --data /tmp/text --out /tmp/w
  run_deepseek_v3.2_5layer.py train --stage sparse --load /tmp/w/step-000200 --data /tmp/text --out /tmp/run3
"""

# ruff: noqa: TC003, PLC0415  # typer reads annotations at run time; --help should not import Megatron
from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dsv32 import cpu
from dsv32.training.errors import TrainingError

app = typer.Typer(
    help=__doc__,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command()
def prepare(
    out: Annotated[Path, typer.Option(help="Folder for the corpus.")],
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help='Text file, .jsonl file (one {"text": …} a line) or folder; may be given several times. '
            "Default: the licence texts that ship in the image."
        ),
    ] = None,
    tokenizer: Annotated[
        str, typer.Option(help="'bytes', or a folder with a tokenizer for transformers.")
    ] = "bytes",
) -> None:
    """Turn text into documents of tokens, once, before training.

    Each file (each line of a jsonl) is a document.  Training packs documents so that none sees another.
    The unigram entropy that is printed is the loss of a model that only knows how often each token occurs: a
    trained model must get below it.
    """
    from dsv32.training import text as texts

    corpus = texts.prepare(text or [texts.SHIPPED_TEXT], out, tokenizer=tokenizer)
    typer.echo(
        f"{out}: {len(corpus)} documents, {len(corpus.tokens)} tokens, {corpus.vocabulary} ids, "
        f"unigram entropy {corpus.unigram_entropy:.3f} nats/token"
    )


@app.command()
def train(  # a command's options are its parameters
    data: Annotated[Path, typer.Option(help="Folder that `prepare` wrote.")],
    out: Annotated[Path, typer.Option(help="Folder for checkpoints, metrics.jsonl, loss.png, tensorboard.")],
    size: Annotated[
        str, typer.Option(help="'tiny' (CPU) or 'full' (the real widths, 256 experts).")
    ] = "tiny",
    experts: Annotated[
        int, typer.Option(help="Fewer experts than the size has, to fit a smaller machine; 0: all.")
    ] = 0,
    stage: Annotated[
        str,
        typer.Option(
            help="'warmup': only the indexer learns, attention is dense, the loss is over all tokens. "
            "'sparse': everything learns, attention is to the indexer's top-k."
        ),
    ] = "sparse",
    layout: Annotated[
        str, typer.Option(help="'thd' packs whole documents; 'sbhd' cuts one stream into equal pieces.")
    ] = "thd",
    steps: Annotated[int, typer.Option(help="Steps in all, those of a resumed run included.")] = 200,
    sequence_length: Annotated[int, typer.Option(help="Rows of a sample.")] = 128,
    global_batch: Annotated[int, typer.Option(help="Samples of a step, over all ranks.")] = 8,
    micro_batch: Annotated[int, typer.Option(help="Samples at a time on a rank (sbhd).")] = 1,
    ranks: Annotated[int, typer.Option(help="Processes to start on this host; torchrun overrides it.")] = 1,
    tp: Annotated[int, typer.Option(help="Tensor parallelism, with sequence parallelism above 1.")] = 1,
    cp: Annotated[int, typer.Option(help="Context parallelism (zigzag, keys gathered).")] = 1,
    ep: Annotated[int, typer.Option(help="Expert parallelism.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline parallelism.")] = 1,
    vpp: Annotated[
        int,
        typer.Option(
            help="Chunks of layers that a pipeline stage holds (interleaved schedule); above 1 it needs --pp "
            "above 1 and microbatches a multiple of --pp."
        ),
    ] = 1,
    learning_rate: Annotated[float, typer.Option(help="Highest, after the warm-up.")] = 3e-3,
    warmup_steps: Annotated[int, typer.Option(help="Steps over which the learning rate rises.")] = 10,
    weight_decay: Annotated[float, typer.Option()] = 0.1,
    clip: Annotated[float, typer.Option(help="Gradient norm above which gradients are scaled down.")] = 1.0,
    optimizer: Annotated[str, typer.Option(help="'adam' or 'sgd'.")] = "adam",
    distributed_optimizer: Annotated[
        bool, typer.Option(help="Shard Adam's state over data- and context-parallel ranks.")
    ] = False,
    indexer_loss: Annotated[float, typer.Option(help="Weight of the indexer's loss; 0 freezes it.")] = 1.0,
    mtp: Annotated[
        int,
        typer.Option(help="Tokens beyond the next to predict, each by a layer more; export leaves them out."),
    ] = 0,
    mtp_loss: Annotated[float, typer.Option(help="Weight of their mean loss.")] = 0.3,
    dtype: Annotated[str, typer.Option(help="'fp32' or 'bf16'.")] = "fp32",
    layers: Annotated[
        str,
        typer.Option(
            help="'te' (Transformer Engine, needs a GPU), 'local' (plain torch), or 'auto': te on a GPU "
            "where it is installed."
        ),
    ] = "auto",
    kernels: Annotated[
        str,
        typer.Option(
            "--dsa-kernel-backend",
            "--kernels",
            help="'dsv32.dsa' (our kernels, or another such module), 'tilelang' or 'cudnn' (Megatron's own), "
            "'none' (plain torch), or 'auto': dsv32.dsa on a GPU with --size full --dtype bf16.",
        ),
    ] = "auto",
    kernels_strict: Annotated[
        bool,
        typer.Option(help="A kernel that declines is an error, rather than a warning and a slow step."),
    ] = True,
    recompute: Annotated[bool, typer.Option(help="Recompute every layer in the backward pass.")] = False,
    seed: Annotated[int, typer.Option(help="Of weights and of the samples' order.")] = 1234,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints; 0: only at the end.")] = 0,
    load: Annotated[
        Path | None,
        typer.Option(help="A step-… folder to begin from. Default: the newest in --out, if there is one."),
    ] = None,
) -> None:
    """Train, or go on from the newest checkpoint in `--out`.

    A checkpoint of the other stage gives its weights only: train with `--stage warmup` first, then give its
    last `step-…` folder to `--load` with `--stage sparse` and another `--out`.  A checkpoint may be loaded
    under other --cp, --pp, --vpp and data parallelism than it was written with.
    """
    cpu.prepare()
    from dsv32.training import launch
    from dsv32.training.loop import train as run
    from dsv32.training.model import Parallel
    from dsv32.training.settings import TrainSettings

    settings = TrainSettings(
        data=data,
        out=out,
        size=size,
        experts=experts,
        stage=stage,
        layout=layout,
        parallel=Parallel(tp=tp, cp=cp, ep=ep, pp=pp, vpp=vpp),
        steps=steps,
        sequence_length=sequence_length,
        global_batch=global_batch,
        micro_batch=micro_batch,
        learning_rate=learning_rate,
        warmup_steps=warmup_steps,
        weight_decay=weight_decay,
        clip=clip,
        optimizer=optimizer,
        distributed_optimizer=distributed_optimizer,
        indexer_loss=indexer_loss,
        mtp=mtp,
        mtp_loss=mtp_loss,
        dtype=dtype,
        layers=layers,
        kernels=kernels,
        kernels_strict=kernels_strict,
        recompute=recompute,
        seed=seed,
        save_every=save_every,
        load=load,
    )
    settings.check(world_size=launch.ranks_given() or ranks)
    launch.on_ranks(ranks, run, settings)


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Option(help="A step-… folder of a run.")],
    data: Annotated[Path, typer.Option(help="The corpus the run trained on.")],
    out: Annotated[Path, typer.Option(help="Folder for config.json and safetensors.")],
    dtype: Annotated[str, typer.Option(help="'bf16' or 'fp32'.")] = "bf16",
) -> None:
    """Write a checkpoint as transformers reads it (AutoModelForCausalLM.from_pretrained)."""
    cpu.prepare()
    from dsv32.training import launch
    from dsv32.training.export import export as run

    launch.on_ranks(1, run, checkpoint, out, data, dtype)
    typer.echo(f"wrote {out}")


if __name__ == "__main__":
    try:
        app()
    except TrainingError as error:
        sys.stderr.write(f"error: {error.what}\n  {error.hint}\n")
        sys.exit(2)
