"""What the source of a Python distribution says about itself, read from pyproject.toml without building it.

Building would need the build backend and pybind11 on the host. What is read here is checked against the
wheel when it is compiled (`wheels.repack`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from dsv32_image.errors import ConfigError, ResolveError, WheelError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dsv32_image.lockfile import Dist
    from dsv32_image.patching import FileState

_SECONDS = 60
# The one module is run in a child, alone: prints and sys.modules stay there. The audit hook is what "no
# network" means here.
_READ = """
import runpy, sys
def refuse(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        raise RuntimeError("it tried to use the network")
sys.addaudithook(refuse)
print(runpy.run_path(sys.argv[1])[sys.argv[2]])
"""


@dataclass(frozen=True, kw_only=True)
class SourceMetadata:
    """Version and requirements of a source; `extras` by name; `build` is what its build backend imports."""

    version: str
    requires_python: str
    dependencies: tuple[str, ...]
    extras: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    build: tuple[str, ...] = ()

    def requirements(self, extras: Iterable[str] = ()) -> list[str]:
        """What it needs at run time, with those of some extras."""
        return [*self.dependencies, *(line for name in sorted(extras) for line in self.extras.get(name, ()))]


def read_metadata(
    name: str, files: Mapping[str, FileState], where: str, env: Mapping[str, str]
) -> SourceMetadata:
    """Read the pyproject.toml of a source; a version that is an attribute of a module by running that module.

    Args:
        name: Which distribution it has to be.
        files: The source tree.
        where: How errors call it.
        env: Variables for the module.

    Raises:
        WheelError: There is no such table, it is of another distribution, or something in it is only known to
            the build backend.
    """
    try:
        document = tomllib.loads(files["pyproject.toml"].data.decode())
        project: dict[str, Any] = document["project"]
        found = canonicalize_name(project["name"])
    except (KeyError, TypeError, ValueError) as error:
        raise WheelError(f"{where}: no pyproject.toml with a [project] table and a name ({error})") from None
    if found != canonicalize_name(name):
        raise WheelError(f"{where}: holds the source of {found}, not of {name}", hint="check the repository")
    backend = document.get("build-system", {}).get("build-backend", "setuptools.build_meta")
    if not backend.startswith("setuptools."):
        raise WheelError(f"{where}: is built by {backend}; only setuptools is compiled here")
    if "dependencies" in project.get("dynamic", ()):
        raise WheelError(f"{where}: its dependencies are only known to its build backend")
    version = project.get("version") or _dynamic_version(document, files, where, env)
    try:
        metadata = SourceMetadata(
            version=str(Version(version)),  # as the build backend will write it
            requires_python=str(SpecifierSet(project.get("requires-python", ""))),
            dependencies=_requirements(project.get("dependencies", ())),
            extras={
                key: _requirements(lines) for key, lines in project.get("optional-dependencies", {}).items()
            },
            build=_requirements(document.get("build-system", {}).get("requires", ())),
        )
    except (TypeError, InvalidVersion, InvalidSpecifier, InvalidRequirement) as error:
        raise WheelError(f"{where}: malformed pyproject.toml: {error}") from None
    if "+" in metadata.version:
        raise WheelError(
            f"{where}: calls itself {metadata.version}, which leaves no room for the commit",
            hint="set the variable that turns it off in [tool.dsv32-image.compile.NAME]",
        )
    return metadata


def require_fits(metadata: SourceMetadata, where: str, python: str, tools: Mapping[str, Dist]) -> None:
    """Refuse a source that the image's Python or the locked build tools are too old for.

    Args:
        metadata: Of the source.
        where: How errors call it.
        python: The image's, e.g. `3.13`.
        tools: The locked build tools by name.

    Raises:
        ConfigError: A build tool is not listed in pyproject.toml.
        ResolveError: A version does not fit.
    """
    if not SpecifierSet(metadata.requires_python).contains(f"{python}.0"):
        raise ResolveError(
            f"{where} needs Python {metadata.requires_python}, the image has {python}",
            hint="take another commit",
        )
    for requirement in map(Requirement, metadata.build):
        name = canonicalize_name(requirement.name)
        if name not in tools:
            raise ConfigError(
                f"{where} is built with {name}, which is not in `compile` of [tool.dsv32-image.tools]",
                hint="add it there in pyproject.toml",
            )
        if not requirement.specifier.contains(tools[name].version, prereleases=True):
            raise ResolveError(
                f"{where} is built with {requirement}, locked is {tools[name].version}",
                hint=f"nox -s lock -- --upgrade {name}",
            )


def _requirements(lines: Iterable[str]) -> tuple[str, ...]:
    return tuple(str(Requirement(line)) for line in lines)


def _dynamic_version(
    document: dict[str, Any], files: Mapping[str, FileState], where: str, env: Mapping[str, str]
) -> str:
    """The version by setuptools' `attr`, which names a module and a variable in it."""
    table = document.get("tool", {}).get("setuptools", {}).get("dynamic", {}).get("version", {})
    module, _, attribute = str(table.get("attr", "")).rpartition(".")
    path = module.replace(".", "/") + ".py"
    if path not in files:
        raise WheelError(f"{where}: its version is only known to its build backend")
    with tempfile.TemporaryDirectory(prefix="dsv32-version-") as folder:
        script = Path(folder) / path.rpartition("/")[2]
        script.write_bytes(files[path].data)
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", _READ, str(script), attribute],
                cwd=folder,
                env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8", **env},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise WheelError(f"{where}: {path} did not end within {_SECONDS} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["(no output)"])[-1]
        raise WheelError(f"{where}: its version cannot be read from {path}: {last}")
    return done.stdout.strip()
