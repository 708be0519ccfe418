"""A small repository with the layout of Megatron-LM, bare, as a server would have it."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

from patch_samples import MODULE

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

PYPROJECT = """
[build-system]
requires = ["setuptools>=80", "pybind11", "packaging>=24.2"]
build-backend = "setuptools.build_meta"
[tool.setuptools.dynamic]
version = { attr = "megatron.core.package_info.__version__" }
[project]
name = "megatron-core"
dynamic = ["version"]
requires-python = ">=3.12"
dependencies = ["lib>=1.0", "absent; sys_platform == 'win32'"]
[project.optional-dependencies]
dev = ["extra-lib"]
"""

INFO = """
import os
__version__ = ".".join(("0", "20")) + "rc1"
if not int(os.getenv("NO_VCS_VERSION", "0")):
    __version__ += "+unset"
"""

FILES = {
    "pyproject.toml": PYPROJECT.encode(),
    "setup.py": b"from setuptools import setup\nsetup()\n",
    "README.md": "Überblick\n".encode(),
    "megatron/core/__init__.py": b"",
    "megatron/core/package_info.py": INFO.encode(),
    "megatron/core/mod.py": MODULE,
    "megatron/core/run.sh": b"#!/bin/sh\n",
    "tests/test_mod.py": b"assert True\n",
}
ENV = {"NO_VCS_VERSION": "1"}


class Upstream:
    """A bare repository and a way to commit to it."""

    def __init__(self, folder: Path, files: Mapping[str, bytes | None] = FILES) -> None:
        self.bare, self.work = folder / "upstream.git", folder / "work"
        self.url = f"file://{self.bare}"
        self.git("init", "-q", "--bare", "-b", "main", str(self.bare), where=folder)
        self.git("clone", "-q", str(self.bare), str(self.work), where=folder)
        self.git("checkout", "-q", "-b", "main")
        self.first = self.commit(files)

    def git(self, *words: str, where: Path | None = None) -> str:
        env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
        env |= {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
        who = ["-c", "user.name=A User", "-c", "user.email=user@example.org"]
        command = ["git", *who, *words]
        done = subprocess.run(
            command, cwd=where or self.work, env=env, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    def commit(self, files: Mapping[str, bytes | None]) -> str:
        """Write some files (None removes one), commit and push; the commit."""
        for name, data in files.items():
            path = self.work / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if data is None:
                path.unlink()
            else:
                path.write_bytes(data)
                path.chmod(0o755 if name.endswith(".sh") else 0o644)
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "a change")
        self.git("push", "-q", "origin", "HEAD")
        return self.git("rev-parse", "HEAD")

    def tag(self, name: str, *, force: bool = False, annotated: bool = True) -> None:
        """Tag the commit at hand and push the tag; with `force` it moves."""
        about = ["-a", "-m", "released"] if annotated else []
        self.git("tag", *(["-f"] if force else []), *about, name)
        self.git("push", "-q", *(["-f"] if force else []), "origin", f"refs/tags/{name}")
