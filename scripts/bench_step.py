#!/usr/bin/env python3
"""Time a training step of the 5-layer model: our DSA kernels against stock Megatron's, on this GPU.

    PYTHONPATH=src python scripts/bench_step.py --out docs/reports/<date>-h200-step

Both backends run on the same model object, the same weights (the learning rate is 0) and the same packed
tokens, one after the other in one process, so what differs is `dsa_kernel_backend`. A step is forward,
backward and the optimizer's update, by the host's clock between two synchronisations; the first one compiles
and is not counted. A case is heads:tokens[:vocabulary[:recompute]]; 16 heads and an eighth of the vocabulary
are what a rank of TP 8 holds of both (the other widths are not cut). Writes step.json, step.md and step.png.
"""

# ruff: noqa: PLC0415  # --help should not import Megatron
from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
import tempfile
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dsv32.dsa import report

if TYPE_CHECKING:
    from dsv32.training.full_step import Case, Measured

#: An eighth of 129,280 rows.
CASES = "128:8192,16:65536:16160:recompute,16:8192:16160,128:65536:16160:recompute"
COLOURS = {"tilelang": "#bbbbbb", "dsv32.dsa": "#dd7733"}
NAMES = {"tilelang": "stock Megatron-Core (tilelang)", "dsv32.dsa": "ours (dsv32.dsa)"}


def parse(text: str, *, experts: int, optimizer: str, layers: str) -> Case:
    """A case from heads:tokens[:vocabulary[:recompute]]."""
    from dsv32.training.full_step import Case

    parts = text.split(":")
    numbers, flags = parts[:3], parts[3:]
    if len(numbers) < 2 or not all(part.isdigit() for part in numbers) or flags not in ([], ["recompute"]):
        sys.exit(f"error: case {text!r}\n  give heads:tokens, heads:tokens:vocabulary or …:recompute")
    heads, tokens, *rest = map(int, numbers)
    more = {"vocabulary": rest[0]} if rest else {}
    return Case(
        heads=heads,
        tokens=tokens,
        experts=experts,
        optimizer=optimizer,
        layers=layers,
        recompute=bool(flags),
        **more,
    )


def run(case: Case, backends: list[str], repeats: int, device: torch.device) -> list[dict[str, Any]]:
    """Every backend on one case; a backend that cannot run leaves its error instead of times."""
    from dsv32.training.full_step import make, make_batch, measure

    rows: list[dict[str, Any]] = []
    trainer = make(case, device)
    batch = make_batch(case, device)
    for backend in backends:
        try:
            got = measure(trainer, batch, backend=backend, repeats=repeats, say=say)
        except (torch.cuda.OutOfMemoryError, RuntimeError) as error:
            note = str(error).splitlines()[0][:160]
            say(f"-- {case.name} {backend}: {note}")
            rows.append({"case": asdict(case), "name": case.name, "backend": backend, "note": note})
            trainer.optimizer.zero_grad()
            continue
        rows.append(row(case, got))
    return rows


def row(case: Case, got: Measured) -> dict[str, Any]:
    """As it is written to step.json."""
    return {"case": asdict(case), "name": case.name, "median_ms": got.median_ms, **asdict(got)}


def say(line: str) -> None:
    """At once, also into a pipe."""
    print(line, flush=True)


def table(rows: list[dict[str, Any]]) -> str:
    """As Markdown, one line a case and backend."""
    lines = [
        "| case | vocabulary | recompute | backend | step ms (median) | fastest to slowest | tokens/s "
        "| peak GiB | times ours | lm loss | indexer loss | grad norm | fused calls |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    ours = {r["name"]: r["median_ms"] for r in rows if r["backend"] == "dsv32.dsa" and "median_ms" in r}
    for r in rows:
        case = r["case"]
        recompute = "full" if case["recompute"] else "none"
        head = f"| {r['name']} | {case['vocabulary']} | {recompute} | {r['backend']}"
        if "median_ms" not in r:
            lines.append(f"{head} | {r['note']} |||||||||")
            continue
        ratio = r["median_ms"] / ours[r["name"]] if r["name"] in ours else 0.0
        ran = ", ".join(f"{name.removeprefix('run_fused_')} {count}" for name, count in r["ran"].items())
        lines.append(
            f"{head} | {r['median_ms']:.1f} | {min(r['step_ms']):.1f} to {max(r['step_ms']):.1f} "
            f"| {case['tokens'] / r['median_ms'] * 1e3:.0f} | {r['peak_gib']:.1f} "
            f"| {f'{ratio:.2f}' if ratio else ''} | {r['lm_loss']:.5f} | {r['indexer_loss']:.5f} "
            f"| {r['grad_norm']:.4f} | {ran} |"
        )
    return "\n".join(lines)


def write(out: Path, rows: list[dict[str, Any]], info: dict[str, str]) -> None:
    """step.json, step.md and step.png below ``out``; after every case, so that a killed run leaves some."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "step.json").write_text(json.dumps({"environment": info, "rows": rows}, indent=1) + "\n")
    facts = "\n".join(f"* {name}: {value}" for name, value in info.items())
    (out / "step.md").write_text(f"# A training step of the 5-layer model\n\n{facts}\n\n{table(rows)}\n")
    chart(out / "step.png", [r for r in rows if "median_ms" in r], info)


def chart(path: Path, rows: list[dict[str, Any]], info: dict[str, str]) -> None:
    """Bars of time and of peak memory, a group a case."""
    if not rows:
        return
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(r["name"] for r in rows))
    backends = [name for name in COLOURS if any(r["backend"] == name for r in rows)]
    figure, both = pyplot.subplots(1, 2, figsize=(11, 1.1 * len(names) + 1.8), sharey=True)
    width = 0.8 / len(backends)
    for axes, key, scale, unit in ((both[0], "median_ms", 1e-3, "s"), (both[1], "peak_gib", 1.0, "GiB")):
        for place, backend in enumerate(backends):
            mine = [(names.index(r["name"]), r[key] * scale) for r in rows if r["backend"] == backend]
            bars = axes.barh(
                [y + (place - (len(backends) - 1) / 2) * width for y, _ in mine],
                [value for _, value in mine],
                width * 0.92,
                color=COLOURS[backend],
                label=NAMES[backend],
            )
            axes.bar_label(
                bars, [f"{value:.2f}" if unit == "s" else f"{value:.0f}" for _, value in mine], padding=3
            )
        axes.set_xlabel(f"{unit} (shorter is better)")
        axes.margins(x=0.14)
        axes.spines[["top", "right"]].set_visible(False)
    both[0].set_yticks(range(len(names)), names)
    both[0].invert_yaxis()
    both[0].set_title("training step, median", fontsize=10, loc="left")
    both[1].set_title("peak memory", fontsize=10, loc="left")
    handles, labels = both[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(backends), frameon=False)
    figure.suptitle(f"5-layer DeepSeek-V3.2, bf16, {info['card, driver']}, {info['date']}", fontsize=10)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main() -> None:
    """Parse, run, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the report")
    parser.add_argument("--cases", default=CASES, help=f"comma-separated; default {CASES}")
    parser.add_argument("--backends", default="dsv32.dsa,tilelang", help="comma-separated")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of a backend")
    parser.add_argument("--experts", type=int, default=16, help="of each of the two MoE layers")
    parser.add_argument("--optimizer", default="sgd", choices=("sgd", "adam"))
    parser.add_argument("--layers", default="te", choices=("te", "local"), help="as in the training script")
    args = parser.parse_args()
    given = {"experts": args.experts, "optimizer": args.optimizer, "layers": args.layers}
    cases = [parse(text, **given) for text in args.cases.split(",")]
    if not torch.cuda.is_available():
        sys.exit(
            "error: no GPU here\n  this benchmark times GPU kernels: run it on a machine with a Hopper GPU"
        )

    from megatron.core import parallel_state

    from dsv32.training.model import Parallel

    logging.getLogger("megatron").setLevel(logging.ERROR)  # notices, none about this run
    info = report.environment() | {
        "command": " ".join(["python", *sys.argv]),
        "model": f"3 dense layers, 2 with {args.experts} of 256 experts, every other width DeepSeek-V3.2's",
        "layers": f"{args.layers}, bf16, TP 1, thd, one document of all tokens",
        "optimizer": f"{args.optimizer}, learning rate 0",
    }
    say("\n".join(f"{name}: {value}" for name, value in info.items()))
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "nccl",
            init_method=f"file://{folder}/rendezvous",
            rank=0,
            world_size=1,
            timeout=timedelta(minutes=10),
        )
        Parallel().initialize()
        for case in cases:
            rows += run(case, args.backends.split(","), args.repeats, device)
            write(args.out, rows, info)
            gc.collect()  # Megatron's models hold cycles; the next one needs their memory
            torch.cuda.empty_cache()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    say(table(rows))


if __name__ == "__main__":
    main()
