"""The image that people train DeepSeek-V3.2 in. First `build`, then `smoke`; words after -- go to the step.

    nox -s build                       nox -s build -- --variant cpu --engine docker
    nox -s smoke                       nox -s smoke -- -k parity
    nox -s lock -- --upgrade NAME      nox -s patch -- edit megatron-core

`nox -s STEP -- --help` says what a step takes. Without nox: `sh scripts/nox -s build`.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import nox

nox.needs_version = ">=2024.3.2"
nox.options.sessions = ["lint", "tests"]
nox.options.default_venv_backend = "none"

ROOT = Path(__file__).parent


def host(session: nox.Session, *words: str) -> None:
    """Run a module of the host environment, which is set up first if it is not there."""
    python = ROOT / ".venv" / "bin" / "python"
    subprocess.run(["sh", str(ROOT / "scripts" / "nox"), "--setup"], check=True)
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {"PYTHONPATH": os.pathsep.join(paths), "DSV32_ROOT": str(ROOT)}
    if words[0] == "dsv32_image":
        env["DSV32_PARENT"] = str(os.getpid())  # with which the step ends, also if nox is killed
    # Longer than nox's 0.3 s: a build that is stopped takes its images out of the engine.
    session.run(str(python), "-m", *words, *session.posargs, env=env, external=True, interrupt_timeout=60.0)


@nox.session
def build(session: nox.Session) -> None:
    """Build the image for this machine and load it into the engine; prints its digest last."""
    host(session, "dsv32_image", "build")


@nox.session
def smoke(session: nox.Session) -> None:
    """Run the smoke suite inside the built image: a table, and dist/<variant>.smoke-report.json."""
    host(session, "dsv32_image", "smoke")


@nox.session
def tests(session: nox.Session) -> None:
    """Run the project's own tests (`-m engine` for those that build an image)."""
    words = [] if "-m" in session.posargs else ["-m", "not engine"]
    host(session, "pytest", *words)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and types: ruff, ruff format, mypy strict."""
    host(session, "ruff", "check", ".")
    host(session, "mypy")


@nox.session
def lock(session: nox.Session) -> None:
    """Resolve pyproject.toml to versions.lock (`--check`, `--upgrade [NAME...]`, `--megatron ...`)."""
    host(session, "dsv32_image", "lock")


@nox.session
def fetch(session: nox.Session) -> None:
    """Bring every locked file into the store (`--offline`: only say what is missing)."""
    host(session, "dsv32_image", "fetch")


@nox.session
def patch(session: nox.Session) -> None:
    """Work on a patch series: `edit PKG`, `refresh PKG`, `check [PKG...]`, `prove [PKG...]`."""
    host(session, "dsv32_image", "patch")


@nox.session
def context(session: nox.Session) -> None:
    """Lay out the build context for a `docker build` of your own."""
    host(session, "dsv32_image", "context")


@nox.session
def doctor(session: nox.Session) -> None:
    """Check what this host needs to build and to run the image (`--json`, `--variant`)."""
    host(session, "dsv32_image", "doctor")


@nox.session
def bench(session: nox.Session) -> None:
    """Measure: `build` for cold, warm and one-patch builds beside the bare minimum."""
    host(session, "dsv32_image", "bench")


@nox.session
def clean(session: nox.Session) -> None:
    """Remove build/ and dist/ (`--all`: also the caches shared by all checkouts)."""
    host(session, "dsv32_image", "clean")
