"""Reading wheels and sdists: the files of an archive by name, as `FileState`.

The archive is read into memory (patched packages are a few MB; `MAX_UNPACKED` guards it) and never unpacked
onto the disk, so no name in it can reach outside a folder.
"""

from __future__ import annotations

import tarfile
import zipfile
import zlib
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from dsv32_image.diffs import is_inside
from dsv32_image.errors import WheelError
from dsv32_image.patching import FileState

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MAX_UNPACKED = 300_000_000
"""Bytes an archive may hold unpacked; the largest package we patch has 11 MB."""

# What zipfile and zlib raise on archives that are cut, overwritten, encrypted or in an unknown method.
_DAMAGE = (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, NotImplementedError, RuntimeError)


def read_archive(source: Path) -> dict[str, FileState]:
    """All regular files of a wheel or sdist by name; an sdist's top folder is taken off.

    Raises:
        WheelError: Neither format, damaged, too large, or it holds names or members that we refuse.
    """
    try:
        files = _read_zip(source) if zipfile.is_zipfile(source) else _read_tar(source)
    except FileNotFoundError as error:
        raise WheelError(f"{source}: not found", "nox -s fetch") from error
    except (*_DAMAGE, OSError) as error:
        raise WheelError(
            f"{source}: damaged, or neither a wheel nor an sdist: {error}", "nox -s fetch"
        ) from error
    for name in files:
        if any(str(parent) in files for parent in PurePosixPath(name).parents):
            raise WheelError(f"{source}: refused: {name} lies below something that is a file")
    return files


def write_files(files: Mapping[str, FileState], folder: Path) -> None:
    """Unpack into an empty folder. Names were checked when the archive was read, or the patch parsed."""
    for name, state in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(state.data)
        path.chmod(0o755 if state.executable else 0o644)


def _read_zip(source: Path) -> dict[str, FileState]:
    files: dict[str, FileState] = {}
    with zipfile.ZipFile(source) as archive:
        total = sum(info.file_size for info in archive.infolist())
        for info in archive.infolist():
            mode = info.external_attr >> 16
            if info.is_dir():
                continue
            kind = mode & 0o170000
            _check_member(source, info.filename, files, regular=kind in {0, 0o100000}, total=total)
            files[info.filename] = FileState(archive.read(info), bool(mode & 0o111))
    return files


def _read_tar(source: Path) -> dict[str, FileState]:
    files: dict[str, FileState] = {}
    total, tops = 0, set()
    with tarfile.open(source, "r:gz") as archive:
        for info in archive:
            top, _, name = info.name.removeprefix("./").partition("/")
            if info.isdir() or info.type == tarfile.XGLTYPE:
                continue
            tops.add(top)
            total += info.size
            _check_member(source, name, files, regular=info.isreg(), total=total)
            content = archive.extractfile(info)
            files[name] = FileState(content.read() if content else b"", bool(info.mode & 0o111))
    if len(tops) != 1 or not is_inside(*tops):
        raise WheelError(f"{source}: an sdist has exactly one top folder, this has {len(tops)}")
    return files


def _check_member(
    source: Path, name: str, files: Mapping[str, FileState], *, regular: bool, total: int
) -> None:
    if not is_inside(name):
        raise WheelError(f"{source}: refused: the name {name!r} could lead out of the folder")
    if not regular:
        raise WheelError(f"{source}: refused: {name} is a link or a special file")
    if name in files:
        raise WheelError(f"{source}: refused: {name} is in it twice")
    if total > MAX_UNPACKED:
        raise WheelError(f"{source}: unpacks to more than {MAX_UNPACKED} bytes")
