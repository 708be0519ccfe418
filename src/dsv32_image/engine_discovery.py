"""Finding an engine: which are installed, which of them answer, and why the others cannot be used."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from dsv32_image.diagnose import Kind, diagnose
from dsv32_image.engine import BuildahEngine, DockerEngine, PodmanEngine
from dsv32_image.errors import EngineError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dsv32_image.engine import Engine

NAMES = ("docker", "podman", "buildah")
_OLDEST_DOCKER = (20, 10)
_BUILDX_SPLIT = 23  # from this client on, BuildKit is a plugin of its own


class _NotInstalledError(EngineError):
    """Nothing to tell about when another engine is there."""


def choose(name: str | None, say: Callable[[str], None] = lambda line: None) -> Engine:
    """The engine asked for, else the first that answers: docker, podman, buildah.

    Args:
        name: What the user asked for, or None.
        say: Gets a line about each engine that is installed and was passed over.

    Raises:
        UsageError: No engine is called that.
        EngineError: It is not there or not usable; the message says which and why.
    """
    if name is not None and name not in NAMES:
        raise UsageError(f"unknown engine '{name}'", hint=f"choose one of: {', '.join(NAMES)}")
    problems: list[EngineError] = []
    for candidate in (name,) if name else NAMES:
        try:
            engine = _MAKERS[candidate]()
            if candidate == "podman" and not name:
                _require_runtime(engine)
        except EngineError as error:
            problems.append(error)
            continue
        for problem in problems:
            if not isinstance(problem, _NotInstalledError):
                say(f" engine  {problem.message}; using {engine.name}")
        return engine
    if name:
        raise problems[0]
    reasons = "\n".join(f"  {error.message}" for error in problems)
    raise EngineError(
        f"no usable container engine:\n{reasons}", hint="`sh scripts/nox` installs buildah where apt is"
    )


def _find_docker() -> Engine:
    programs = _all_on_path("docker")
    if not programs:
        raise _NotInstalledError("docker: not installed", hint="install docker, or use --engine buildah")
    problem = EngineError("docker: no usable client")
    for program in programs:
        try:
            return DockerEngine(program, _check_docker(program))
        except EngineError as error:
            problem = error
    raise problem


def _check_docker(program: str) -> str:
    """A one-line description of client and daemon.

    Raises:
        EngineError: No daemon answers, it is too old, or the client cannot drive BuildKit.
    """
    command = [program, "version", "--format", "{{.Client.Version}} {{.Server.Version}}"]
    answer, reason = _ask(command)
    if reason:
        raise EngineError(
            f"docker: {program} is there but no daemon answers it: {reason}",
            hint=_docker_hint(reason),
        )
    client, server = answer.split()
    if _version(server) < _OLDEST_DOCKER:
        raise EngineError(
            f"docker: daemon {server} is too old", hint="20.10 or newer is needed for BuildKit mounts"
        )
    if _version(client)[0] >= _BUILDX_SPLIT:
        buildx = subprocess.run([program, "buildx", "version"], capture_output=True, check=False)
        if buildx.returncode != 0:
            raise EngineError(
                f"docker: client {client} ({program}) has no buildx, which it needs for BuildKit",
                hint="install docker-buildx (or docker-buildx-plugin), or the daemon's own client",
            )
    return f"docker {server} (client {client}, {program})"


def _docker_hint(reason: str) -> str:
    if host := os.environ.get("DOCKER_HOST"):
        return f"DOCKER_HOST is set to {host}: correct or unset it, or use --engine buildah"
    if "permission denied" in reason:
        return "this user may not talk to it: add it to the group docker, or use --engine buildah"
    return "start it (`systemctl start docker`, or `dockerd &` as root), or use --engine buildah"


def _find_podman() -> Engine:
    program = shutil.which("podman")
    if not program:
        raise _NotInstalledError("podman: not installed", hint="install podman, or use --engine buildah")
    return PodmanEngine(program, _answer(program, "podman"))


def _require_runtime(podman: Engine) -> None:
    """Before podman is taken unasked: `podman info` answers, too, where no container can start.

    Raises:
        EngineError: Its runtime refuses; asked for by name it may still build (BUILDAH_ISOLATION=chroot).
    """
    with tempfile.TemporaryDirectory() as empty:
        # There is no such program in an empty root: a runtime that works gets as far as saying that.
        command = [podman.program, "run", "--rm", "--network", "none", "--rootfs", empty, "/none"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    known = diagnose(done.stderr)
    if known and known.kind is Kind.RUNTIME_REFUSES:
        raise EngineError(f"podman: {known.problem}", hint=known.hint)


def _find_buildah() -> Engine:
    program = shutil.which("buildah")
    if not program:
        raise _NotInstalledError("buildah: not installed", hint="apt-get install buildah skopeo")
    if not shutil.which("skopeo"):
        raise EngineError("buildah: needs skopeo to load images", hint="apt-get install skopeo")
    return BuildahEngine(program, _answer(program, "buildah"))


def _answer(program: str, name: str) -> str:
    _, reason = _ask([program, "info"])
    if reason:
        raise EngineError(
            f"{name}: {program} does not work here: {reason}", hint=f"run `{name} info` to see more"
        )
    return _ask([program, "--version"])[0]


def _ask(command: Sequence[str]) -> tuple[str, str]:
    """What a program answers; if it fails, the last line of why."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return done.stdout.strip(), ""
    return "", (done.stderr.strip().splitlines() or ["no answer"])[-1]


def _all_on_path(program: str) -> list[str]:
    found = []
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        path = Path(folder) / program
        # os.access first: a folder that may not be entered is no error, it just holds nothing for us.
        if os.access(path, os.X_OK) and path.is_file() and str(path) not in found:
            found.append(str(path))
    return found


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text)[:2]) or (0,)


_MAKERS = {"docker": _find_docker, "podman": _find_podman, "buildah": _find_buildah}
