"""A build that ends in any way takes along what it started: real processes, found again by their words."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsv32_image import proc
from dsv32_image.errors import BuildError

SRC = Path(__file__).parents[2] / "src"
# A client with a child in a session of its own, as engines have, and one whose parent is gone.
CLIENT = "setsid sleep {t} & (setsid setsid sleep {t} &) ; echo begun > {note}; sleep {t}"


@pytest.fixture
def duration():
    """Seconds to sleep that no other process sleeps, by which the sleeping are found."""
    return f"{30_000 + os.getpid() % 10_000}.{time.monotonic_ns() % 1_000_000:06d}"


def sleeping(duration):
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if words[:2] == [b"sleep", duration.encode()]:
            found.append(int(entry.parent.name))
    return found


def until(condition, seconds=15.0):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not come to pass"
        time.sleep(0.02)


def begin(duration, tmp_path, client=CLIENT, undo=(), how="run"):
    """A process that runs a client by `proc.run` or `proc.watch`, once the client has begun."""
    note = tmp_path / "note"
    script = client.format(t=duration, note=note)
    words = f"['sh', '-c', {script!r}], undo={undo!r}" + ", what='the client'" * (how == "run")
    program = f"from dsv32_image import proc; proc.stop_cleanly(); proc.{how}({words})"
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    build = subprocess.Popen(
        [sys.executable, "-c", program], env=env, stderr=subprocess.DEVNULL, start_new_session=True
    )
    until(lambda: note.exists() and len(sleeping(duration)) == client.count("sleep"))
    return build


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("send", [os.kill, os.killpg])
@pytest.mark.parametrize("how", ["run", "watch"])
def test_a_step_that_is_killed_leaves_no_process_running(duration, tmp_path, number, send, how):
    build = begin(duration, tmp_path, how=how)
    send(build.pid, number)
    build.wait(15)
    until(lambda: not sleeping(duration))


def test_a_client_that_refuses_to_stop_is_killed(duration, tmp_path):
    build = begin(duration, tmp_path, "trap '' TERM; echo begun > {note}; while :; do sleep {t}; done")
    build.kill()
    build.wait(15)
    until(lambda: not sleeping(duration))


def test_what_a_command_leaves_running_when_it_ends_well_stays(duration):
    """Rootless podman keeps a process of its own between commands."""
    try:
        proc.run(["sh", "-c", f"setsid sleep {duration} >/dev/null 2>&1 &"], what="the client")
        time.sleep(0.2)
        assert len(sleeping(duration)) == 1
    finally:
        for process in sleeping(duration):
            os.kill(process, signal.SIGKILL)


def test_what_a_daemon_runs_for_a_killed_build_is_undone(duration, tmp_path):
    build = begin(duration, tmp_path, undo=["sh", "-c", f"echo undone > {tmp_path}/undone"])
    build.kill()
    build.wait(15)
    until((tmp_path / "undone").exists)
    assert not sleeping(duration)


def test_a_command_that_ends_by_itself_is_not_undone(tmp_path):
    for script in ("true", "exit 3"):
        with contextlib.suppress(BuildError):
            proc.run(["sh", "-c", script], what="the client", undo=["touch", str(tmp_path / "undone")])
    time.sleep(0.2)
    assert not (tmp_path / "undone").exists()


# Stands for nox: begins a step, says its number, and waits.
NOX = """
import os, subprocess, sys
env = {**os.environ, "DSV32_PARENT": str(os.getpid())}
step = subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=env)
print(step.pid, flush=True)
step.wait()
"""
STEP = """
import os, time
from dsv32_image import proc
proc.stop_cleanly()
assert "DSV32_PARENT" not in os.environ
try:
    open({note!r}, "w").close()
    time.sleep(60)
finally:
    open({note!r} + "-cleaned", "w").close()
"""


def test_a_killed_nox_ends_its_step_which_cleans_up(tmp_path):
    note = str(tmp_path / "note")
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    command = [sys.executable, "-c", NOX, STEP.format(note=note)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as nox:
        step = int(nox.stdout.readline())
        until(Path(note).exists)
        nox.kill()
        until(lambda: not Path(f"/proc/{step}/exe").exists())  # a zombie has none either
    assert Path(f"{note}-cleaned").exists()


def test_a_step_whose_nox_is_gone_does_not_begin(tmp_path):
    program = "from dsv32_image import proc; proc.stop_cleanly(); print('begun')"
    env = {**os.environ, "PYTHONPATH": str(SRC), "DSV32_PARENT": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, b"")


def test_a_command_that_a_signal_ends_fails_with_the_shells_code():
    with pytest.raises(BuildError, match="failed with exit code 137"):
        proc.run(["sh", "-c", "kill -9 $$"], what="the client")


def test_output_input_folder_and_variables_reach_the_command(tmp_path):
    out = proc.run(
        ["sh", "-c", "cat; pwd; echo $A; echo $PYTHONPATH"],
        what="the client",
        stdin=b"in\n",
        cwd=tmp_path,
        env={"A": "1", "PYTHONPATH": "/p"},
    )
    assert out == f"in\n{tmp_path}\n1\n/p\n"
