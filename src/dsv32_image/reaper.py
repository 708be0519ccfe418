"""`python reaper.py FD UNDO COMMAND…`: run COMMAND, and end all it started once FD's other end is closed.

A killed build cannot clean up. Its children could go on for minutes and hold the engine's storage: a signal
to the engine's client alone leaves what that client started, and a signal to the process group leaves what
has a group of its own. So this small process stands between: the build holds the write end of a pipe, which
the kernel closes however the build ends, and this process is the reaper of all descendants of COMMAND
(PR_SET_CHILD_SUBREAPER, prctl(2)), so that none of them gets out of sight by losing its parent.

UNDO is a JSON list, empty or the words of a command that then ends what a daemon runs for COMMAND.

A file that runs by itself (`-I -S`, nothing of this package imported), so that it starts in a few ms.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_GRACE = 2.0  # seconds from SIGTERM to SIGKILL; docker's client tells its daemon to stop in that time
_NULL = subprocess.DEVNULL
_PATIENCE = 10.0  # seconds in which killed processes are gone, unless one hangs in the kernel


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends; without that right, they are init's."""
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import ctypes  # noqa: PLC0415  # not in every Python

        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(root: int) -> list[int]:
    """Living processes below `root`, from /proc; none where there is no /proc."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # proc_pid_stat(5): the name, which may hold anything, ends at the last parenthesis.
            state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state not in "ZX":
                parents[int(entry.name)] = int(parent)
    found, level = [], [root]
    while level:
        level = [child for child, parent in parents.items() if parent in level]
        found += level
    return found


def end_all(undo: list[str], grace: float = _GRACE) -> None:
    """SIGTERM, then SIGKILL, to all descendants of this process, and to its process group if it leads one."""
    leads = os.getpgrp() == os.getpid()
    _signal(descendants(os.getpid()) + [0] * leads, signal.SIGTERM)
    limit = time.monotonic() + grace
    while descendants(os.getpid()) and time.monotonic() < limit:
        time.sleep(0.05)
    limit = time.monotonic() + _PATIENCE
    # More than once: a process may be born between the look and the signal.
    while (left := descendants(os.getpid())) and time.monotonic() < limit:
        _signal(left, signal.SIGKILL)
        time.sleep(0.05)
    if undo:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(undo, check=False, timeout=_PATIENCE, stdin=_NULL, stdout=_NULL, stderr=_NULL)
    if leads:
        os.kill(0, signal.SIGKILL)  # itself too; where there is no /proc, this is all that can be reached


def _signal(processes: list[int], number: int) -> None:
    for process in processes:
        with contextlib.suppress(OSError):
            os.kill(process, number)


def main(fd: int, undo: list[str], command: list[str]) -> int:
    """The exit code of the command; 128 + n if signal n ended it, as shells have it."""
    # Its own SIGTERM reaches this process as well. Not SIG_IGN, which the command would inherit.
    signal.signal(signal.SIGTERM, lambda *_: None)
    adopt_orphans()
    closed = threading.Event()

    def watch() -> None:
        while os.read(fd, 1):
            pass
        closed.set()
        end_all(undo)

    child = subprocess.Popen(command)
    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    code = child.wait()
    if closed.is_set():
        watching.join()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    try:
        sys.exit(main(int(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:]))
    except OSError as error:  # as a shell says it
        print(f"{sys.argv[3]}: {error.strerror}", file=sys.stderr)
        sys.exit(126)
