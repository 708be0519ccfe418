"""Run other programs. A failed command is shown so that it can be pasted into a shell."""

from __future__ import annotations

import codecs
import os
import shlex
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

from dsv32_image.diagnose import diagnose
from dsv32_image.errors import BuildError, ImageError, ToolMissingError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

# An error is read on a screen: the end of what the program said, and where all of it is.
_TAIL_LINES = 6
_LONGEST_COMMAND = 300
_WATCHED = 1 << 16


def require(program: str, package: str) -> str:
    """The full path of a program.

    Raises:
        ToolMissingError: It is not on the PATH; the hint names the Debian package.
    """
    found = shutil.which(program)
    if not found:
        raise ToolMissingError(
            f"'{program}' is not installed",
            hint=f"apt-get install {package}  (`sh scripts/nox` does it where apt is)",
        )
    return found


def run(
    command: Sequence[str | os.PathLike[str]],
    *,
    what: str,
    error: type[ImageError] = BuildError,
    hint: str = "",
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    log: Path | None = None,
    stdin: bytes | None = None,
) -> str:
    """Run a command and return its standard output.

    Args:
        command: Program and arguments.
        what: What the command was for; the first words of the error.
        error: The class of error to raise.
        hint: The next step; a default names the log or `--verbose`.
        env: Variables on top of this process's own.
        cwd: Folder to run in.
        log: Where to keep everything the command printed.
        stdin: Bytes for its standard input; nothing otherwise.

    Raises:
        ImageError: Of class `error`, with the command and the end of what it printed.
    """
    words = [os.fspath(c) for c in command]
    try:
        done = subprocess.run(
            words,
            check=False,
            capture_output=True,
            input=stdin if stdin is not None else b"",
            env={**os.environ, **(env or {})},
            cwd=cwd,
        )
    except FileNotFoundError:
        raise ToolMissingError(f"{what}: '{words[0]}' is not installed", hint=hint) from None
    stdout, stderr = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"$ {shlex.join(words)}\n{stdout}{stderr}\nexit {done.returncode}\n")
    if done.returncode != 0:
        known = diagnose(stdout + stderr)
        cause = f": {known.problem}" if known else ""
        raise error(
            f"{what} failed with exit code {done.returncode}{cause}\n{_shown(words, stderr or stdout, log)}",
            hint=(known.hint if known else hint)
            or "the lines above are the program's own words; run it by hand to look closer",
        )
    return stdout


def watch(command: Sequence[str]) -> tuple[int, str]:
    """Run a command on this process's own streams; its exit code, and the end of its standard error."""
    kept = ""
    # A block may end within a character.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    with subprocess.Popen(command, stderr=subprocess.PIPE) as running:
        assert running.stderr is not None
        while block := os.read(running.stderr.fileno(), _WATCHED):
            text = decoder.decode(block)
            sys.stderr.write(text)
            sys.stderr.flush()
            kept = (kept + text)[-_WATCHED:]
    return running.returncode, kept


def _shown(words: list[str], output: str, log: Path | None) -> str:
    """The command, if it fits on a screen, and the last lines of what it printed."""
    lines = [f"  | {line[:_LONGEST_COMMAND]}" for line in output.strip().splitlines()[-_TAIL_LINES:]]
    command = shlex.join(words)
    if log is not None:
        return "\n".join([*lines, f"  command and all of its output: {log}"])
    if len(command) > _LONGEST_COMMAND:
        command = command[:_LONGEST_COMMAND] + " …"
    return "\n".join([f"  $ {command}", *lines])
