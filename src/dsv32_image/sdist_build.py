"""Building patched sdists: by their own setup.py, with the setuptools of the running interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from dsv32_image.archives import read_archive, write_files
from dsv32_image.errors import DiskFullError, WheelError
from dsv32_image.files import disk_full_is_clear
from dsv32_image.patching import FileState
from dsv32_image.wheel_file import WheelInfo

if TYPE_CHECKING:
    from collections.abc import Mapping

# Runs in a child, so that setuptools' global state, chdir and prints stay there. The audit hook is what
# "no network" means here: upstream setup.py files like to download wheels.
_BUILD = """
import sys
def refuse(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        raise RuntimeError("the build tried to use the network")
sys.addaudithook(refuse)
from setuptools.build_meta import __legacy__ as backend
backend.build_wheel(sys.argv[1])
"""


def setuptools_version() -> str:
    """Part of the key for an sdist: another setuptools may word METADATA otherwise."""
    try:
        return version("setuptools")
    except PackageNotFoundError:
        raise WheelError(
            "setuptools is not installed beside this project, and a patched sdist is built with it",
            "sh scripts/nox  (sets up the environment from requirements/host.txt)",
        ) from None


def build_sdist(files: Mapping[str, FileState], source: Path, format_version: int) -> dict[str, FileState]:
    """Build a patched sdist by the hook of PEP 517 and read the wheel; its `Generator:` line becomes ours.

    Not by `pip wheel` (pip may not be there) nor with the `build` package (it is about isolated environments,
    which would need the network).
    """
    if "setup.py" not in files:
        raise WheelError(f"{source}: the sdist has no setup.py; only setuptools packages can be built here")
    with disk_full_is_clear(Path(tempfile.gettempdir())), tempfile.TemporaryDirectory() as temporary:
        tree, out, home = (Path(temporary) / name for name in ("tree", "out", "home"))
        for folder in (tree, out, home):
            folder.mkdir()
        write_files(files, tree)
        done = subprocess.run(
            [sys.executable, "-I", "-c", _BUILD, str(out)],
            cwd=tree,
            env={"PATH": os.environ.get("PATH", os.defpath), "HOME": str(home), "LC_ALL": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
        if done.returncode:
            lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["(no output)"]
            if any("No space left on device" in line for line in lines):
                raise DiskFullError(
                    f"no space left while building {source} in {temporary}", "free some space"
                )
            raise WheelError(f"{source}: its setup.py failed after the series: {lines[-1].strip()}")
        wheels = list(out.glob("*.whl"))
        if len(wheels) != 1:
            raise WheelError(f"{source}: setup.py made {len(wheels)} wheels instead of one")
        built = read_archive(wheels[0])
    upstream = WheelInfo.read(built, source)
    if not upstream.tags.endswith("py3-none-any"):
        raise WheelError(f"{source}: is not pure Python after the series: its wheel is {upstream.tags}")
    about = f"{upstream.dist_info}/WHEEL"
    generator = f"Generator: dsv32-image ({format_version})".encode()
    built[about] = FileState(re.sub(rb"(?m)^Generator:[^\r\n]*", generator, built[about].data))
    return built
