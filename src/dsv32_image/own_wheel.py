"""The wheel of `src/dsv32`, what this project itself puts into the image."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING

from dsv32_image.files import sha256_file, tree_files
from dsv32_image.patching import FileState
from dsv32_image.wheel_file import pack_wheel, with_record
from dsv32_image.wheels import PatchedWheel

if TYPE_CHECKING:
    from pathlib import Path

_WHEEL = "Wheel-Version: 1.0\nGenerator: dsv32-image\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def make_own_wheel(root: Path, out_dir: Path, *, epoch: int, torchrun: bool) -> PatchedWheel:
    """Pack `src/dsv32` as it is in the tree; the same sources give the same bytes.

    With `torchrun` it brings a command of that name, for a torch that comes without one.

    Not by setuptools: the wheel is a folder and two text files, and its bytes must not depend on the
    version of a build tool.

    Raises:
        DiskFullError: No space left.
    """
    version = project_version(root)
    source = root / "src" / "dsv32"
    files = {
        path.relative_to(source.parent).as_posix(): FileState(path.read_bytes(), executable=False)
        for path in tree_files(source)
    }
    info = f"dsv32-{version}.dist-info"
    files[f"{info}/METADATA"] = FileState(
        f"Metadata-Version: 2.1\nName: dsv32\nVersion: {version}\n".encode()
    )
    files[f"{info}/WHEEL"] = FileState(_WHEEL.encode())
    commands = ["dsv32 = dsv32.cli:main", *(["torchrun = dsv32.torchrun:main"] if torchrun else [])]
    text = "[console_scripts]\n" + "".join(f"{line}\n" for line in commands)
    files[f"{info}/entry_points.txt"] = FileState(text.encode())
    path = out_dir / f"dsv32-{version}-py3-none-any.whl"
    pack_wheel(with_record(files, info), path, epoch)
    return PatchedWheel(
        name="dsv32", version=version, path=path, sha256=sha256_file(path), size=path.stat().st_size
    )


def project_version(root: Path) -> str:
    """The version in pyproject.toml."""
    with (root / "pyproject.toml").open("rb") as file:
        version: str = tomllib.load(file)["project"]["version"]
    return version
