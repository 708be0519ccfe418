"""What a person sees: one line a step with its time, tables, and nothing else on standard output."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


class Ui:
    """Prints steps to standard error, so that standard output holds only results."""

    def __init__(self, *, verbose: bool = False) -> None:
        self.verbose = verbose
        self.console = Console(stderr=True, highlight=False)
        self.times: dict[str, float] = {}

    def say(self, text: str) -> None:
        """One plain line."""
        self.console.print(text, markup=False, soft_wrap=True)

    def detail(self, text: str) -> None:
        """A line that only `--verbose` shows."""
        if self.verbose:
            self.say(text)

    @contextlib.contextmanager
    def step(self, name: str, text: str) -> Iterator[None]:
        """Announce a step, then say how long it took. `name` is the word that README and nox use."""
        self.say(f"{name:>7}  {text}")
        start = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - start
            self.times[name] = self.times.get(name, 0.0) + took
        self.say(f"{'':>7}  {took:.1f} s")

    def table(
        self, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, out: bool = False
    ) -> None:
        """A table, on standard output if it is the result that was asked for."""
        table = Table(title=title, title_justify="left", title_style="bold")
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*row)
        console = Console(file=sys.stdout, highlight=False) if out else self.console
        if not console.is_terminal:
            # In a log there is no width to fit into; a folded table cannot be searched.
            console.width = 240
        console.print(table)


def show_error(message: str, hint: str) -> None:
    """What happened and where, and the next step if there is one."""
    print(f"error: {message}", file=sys.stderr)
    if hint:
        print(f"  next: {hint}", file=sys.stderr)


def show_usage_error(error: Any) -> None:  # noqa: ANN401  # click's UsageError, which Typer does not export
    """A command line that Typer does not understand, in the form of this project's errors."""
    said = error.format_message().removesuffix(".")
    if not said:
        return  # no words at all: the help was shown
    if meant := getattr(error, "possibilities", None):
        said = f"No such option: {error.option_name}; did you mean {' or '.join(sorted(meant))}?"
    names: list[str] = []
    context = error.ctx
    while context is not None and context.parent is not None:
        names.insert(0, context.info_name)
        context = context.parent
    said = said[:1].lower() + said[1:]
    if names:
        words = " ".join([*names[:1], "--", *names[1:], "--help"])
        show_error(f"{' '.join(names)}: {said}", f"`nox -s {words}` says what it takes")
    else:
        show_error(said, "`nox -l` lists the steps, `nox -s STEP -- --help` says what one takes")


def size(count: float) -> str:
    """A number of bytes for people, in powers of 1000 as package tools print them."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable: the loop returns at GB")
