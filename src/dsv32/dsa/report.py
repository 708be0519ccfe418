"""The benchmark's report: table, JSON and bar charts.

    python -m dsv32.dsa.report layer.png run-a/bench.json run-b/bench.json

draws the whole-layer rows of several runs into one chart; of two runs with the same row the later one counts.
"""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import torch


@dataclass(kw_only=True)
class Row:
    """One line of the table; times in ms, memory in GiB."""

    operation: str
    shape: str
    ours: float | None = None
    public: float | None = None
    stock: float | None = None
    floor: float | None = None
    deterministic: float | None = None
    peak: float | None = None
    note: str = ""

    def line(self) -> str:
        """The row of the Markdown table."""

        def num(x: float | None) -> str:
            return "" if x is None else f"{x:.2f}"

        def ratio(x: float | None) -> str:
            return "" if x is None or not self.ours else f"{x / self.ours:.2f}x"

        cells = [
            self.operation,
            self.shape,
            num(self.ours),
            num(self.deterministic),
            num(self.public),
            num(self.stock),
            num(self.floor),
            ratio(self.public),
            ratio(self.stock),
            num(self.peak),
            self.note,
        ]
        return "| " + " | ".join(cells) + " |"


HEAD = (
    "| operation | shape | ours ms | ours deterministic ms | public ms | stock ms | floor ms | public / ours "
    "| stock / ours | ours peak GiB | note |\n|" + "---|" * 11
)


def environment() -> dict[str, str]:
    """Date, card, driver and versions."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        card = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        card = "no nvidia-smi here"
    info = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "card, driver": card,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    for name in (
        "triton",
        "sgl-flash-mla",
        "nvidia-cudnn-frontend",
        "nvidia-cutlass-dsl",
        "tilelang",
        "megatron-core",
    ):
        try:
            info[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            info[name] = "absent"
    return info


def write(out: Path, rows: list[Row], info: dict[str, str], rate: float, copy: float) -> None:
    """Write bench.json, bench.md and, with matplotlib, bench.png to the folder `out`.

    rate: measured bf16 product in TFLOP/s; copy: measured device copy in TB/s.
    """
    out.mkdir(parents=True, exist_ok=True)
    data = {
        "environment": info,
        "matrix rate TFLOP/s": rate,
        "copy TB/s": copy,
        "rows": [asdict(r) for r in rows],
    }
    (out / "bench.json").write_text(json.dumps(data, indent=1) + "\n")
    lines = ["# DSA operations on one GPU", "", *(f"* {k}: {v}" for k, v in info.items())]
    lines += [
        f"* ceilings in this run: bf16 8192^3 product {rate:.0f} TFLOP/s, device copy {copy:.2f} TB/s",
        f"* command: `{' '.join(['python', *sys.argv])}`",
        "",
        "Medians of CUDA-event times. Peak memory is what a call allocates above its inputs. An empty cell "
        "was not measured.",
        "",
        HEAD,
        *(r.line() for r in rows),
        "",
    ]
    (out / "bench.md").write_text("\n".join(lines))
    chart(out / "bench.png", [r for r in rows if r.ours], f"{info['card, driver']}, {info['date']}")


BARS = (("stock", "#bbbbbb"), ("public", "#7799cc"), ("ours", "#dd7733"), ("floor", "#55aa66"))


def chart(out: Path, rows: list[Row], title: str, log: bool = True) -> None:
    """Draw the rows as groups of bars; nothing without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return
    figure, axes = pyplot.subplots(figsize=(11, 0.6 * len(rows) + 1.5))
    for k, (name, colour) in enumerate(BARS):
        values = [getattr(r, name) or 0 for r in rows]
        bars = axes.barh(
            [i + (k - 1.5) * 0.2 for i in range(len(rows))], values, 0.2, label=name, color=colour
        )
        if not log:
            axes.bar_label(bars, [f"{v:.1f}" if v else "" for v in values], fontsize=7, padding=2)
    axes.set_yticks(range(len(rows)), [f"{r.operation}\n{r.shape}" for r in rows], fontsize=7)
    if log:
        axes.set_xscale("log")
    axes.set_xlabel("ms (log scale, shorter is better)" if log else "ms (shorter is better)")
    axes.set_title(title, fontsize=9)
    axes.invert_yaxis()
    axes.legend()
    figure.tight_layout()
    figure.savefig(out, dpi=130)
    pyplot.close(figure)


def layer_chart(out: Path, files: list[Path]) -> None:
    """Draw the whole-layer rows of several bench.json files; a later file replaces an earlier one's row."""
    rows: dict[str, Row] = {}
    titles = []
    for file in files:
        data = json.loads(file.read_text())
        titles.append(f"{data['environment']['card, driver']}, {data['environment']['date']}")
        for row in (Row(**r) for r in data["rows"]):
            if row.operation.startswith("whole layer") and row.ours:
                rows[row.shape] = row
    chart(out, list(rows.values()), "DSA layer, forward + backward\n" + "; ".join(titles), log=False)


if __name__ == "__main__":
    layer_chart(Path(sys.argv[1]), [Path(p) for p in sys.argv[2:]])
