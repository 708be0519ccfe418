"""Run other programs. A failed command is shown so that it can be pasted into a shell."""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from dsv32_image import reaper
from dsv32_image.diagnose import diagnose
from dsv32_image.errors import BuildError, ImageError, ToolMissingError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

# An error is read on a screen: the end of what the program said, and where all of it is.
_TAIL_LINES = 6
_LONGEST_COMMAND = 300
_WATCHED = 1 << 16
_PR_SET_PDEATHSIG = 1  # prctl(2)


def stop_cleanly() -> None:
    """From now on SIGTERM ends this process as an error would; so does the end of the nox that began it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # nox's process number; for this process alone, since what it starts has another parent.
    parent = os.environ.pop("DSV32_PARENT", "")
    if not parent:
        return
    with contextlib.suppress(OSError, AttributeError):  # no Linux: a killed nox leaves the step running
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(parent):  # it ended before the line above
        sys.exit(128 + signal.SIGTERM)


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
    undo: Sequence[str] = (),
) -> str:
    """Run a command and return its standard output.

    However this process ends, the command and all that it started end with it (see `reaper`).

    Args:
        command: Program and arguments.
        what: What the command was for; the first words of the error.
        error: The class of error to raise.
        hint: The next step; a default names the log or `--verbose`.
        env: Variables on top of this process's own.
        cwd: Folder to run in.
        log: Where to keep everything the command printed.
        stdin: Bytes for its standard input; nothing otherwise.
        undo: A command to run if this process ends before that one: for what a daemon started.

    Raises:
        ImageError: Of class `error`, with the command and the end of what it printed.
    """
    words = [os.fspath(c) for c in command]
    environment = {**os.environ, **(env or {})}
    if not shutil.which(words[0], path=environment.get("PATH")) and os.sep not in words[0]:
        raise ToolMissingError(f"{what}: '{words[0]}' is not installed", hint=hint)
    code, out, err = _run_reaped(words, undo, environment, cwd, stdin or b"")
    stdout, stderr = out.decode(errors="replace"), err.decode(errors="replace")
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"$ {shlex.join(words)}\n{stdout}{stderr}\nexit {code}\n")
    if code != 0:
        known = diagnose(stdout + stderr)
        cause = f": {known.problem}" if known else ""
        raise error(
            f"{what} failed with exit code {code}{cause}\n{_shown(words, stderr or stdout, log)}",
            hint=(known.hint if known else hint)
            or "the lines above are the program's own words; run it by hand to look closer",
        )
    return stdout


def _run_reaped(
    words: Sequence[str], undo: Sequence[str], env: Mapping[str, str], cwd: Path | None, stdin: bytes
) -> tuple[int, bytes, bytes]:
    """Run a command to its end, or to ours: exit code, standard output, standard error."""
    pipe = subprocess.PIPE
    with _reaped(words, undo, stdin=pipe, stdout=pipe, stderr=pipe, env=env, cwd=cwd) as running:
        out, err = running.communicate(stdin)
    return running.returncode, out, err


def watch(command: Sequence[str], *, undo: Sequence[str] = ()) -> tuple[int, str]:
    """Run a command on this process's own streams; its exit code, and the end of its standard error.

    It ends with this process, as in `run`.
    """
    kept = ""
    # A block may end within a character.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    with _reaped(command, undo, stderr=subprocess.PIPE) as running:
        assert running.stderr is not None
        while block := os.read(running.stderr.fileno(), _WATCHED):
            text = decoder.decode(block)
            sys.stderr.write(text)
            sys.stderr.flush()
            kept = (kept + text)[-_WATCHED:]
    return running.returncode, kept


@contextlib.contextmanager
def _reaped(
    command: Sequence[str],
    undo: Sequence[str],
    **streams: Any,  # noqa: ANN401  # Popen's own
) -> Iterator[subprocess.Popen[bytes]]:
    """A command that ends, with all that it started, when this block or this process does."""
    read, write = os.pipe()
    try:
        with subprocess.Popen(
            [sys.executable, "-I", "-S", reaper.__file__, str(read), json.dumps(undo), *command],
            pass_fds=(read,),
            # Signals for our group (Ctrl-C, a killed session) must not end the reaper before its work.
            start_new_session=True,
            **streams,
        ) as running:
            try:
                yield running
            except BaseException:
                os.close(write)
                write = -1
                running.wait()
                raise
    finally:
        os.close(read)
        if write >= 0:
            os.close(write)


def _shown(words: list[str], output: str, log: Path | None) -> str:
    """The command, if it fits on a screen, and the last lines of what it printed."""
    lines = [f"  | {line[:_LONGEST_COMMAND]}" for line in output.strip().splitlines()[-_TAIL_LINES:]]
    command = shlex.join(words)
    if log is not None:
        return "\n".join([*lines, f"  command and all of its output: {log}"])
    if len(command) > _LONGEST_COMMAND:
        command = command[:_LONGEST_COMMAND] + " …"
    return "\n".join([f"  $ {command}", *lines])
