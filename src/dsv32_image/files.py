"""Small file helpers that every step shares: atomic writes, hashes, the lock against two builds."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING

from dsv32_image.errors import BusyError, DiskFullError, FileAccessError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_BLOCK = 1 << 20


def sha256_file(path: Path) -> str:
    """The sha256 of a file, as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_parts(*parts: str | bytes) -> str:
    """The sha256 over several values, each with its length, so that no two lists collide."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "big"))
        total.update(data)
    return total.hexdigest()


def tree_digest(folder: Path) -> str:
    """The sha256 of a folder: relative paths, executable bits and contents; bytecode left out."""
    parts: list[str] = []
    for path in tree_files(folder):
        executable = "x" if path.stat().st_mode & 0o100 else "-"
        parts += [path.relative_to(folder).as_posix(), executable, sha256_file(path)]
    return sha256_parts(*parts)


def tree_files(folder: Path) -> list[Path]:
    """The regular files of a folder, sorted; caches and bytecode left out."""
    found = []
    for path in folder.rglob("*"):
        parts = path.relative_to(folder).parts
        if path.is_file() and not any(p == "__pycache__" or p.startswith(".") for p in parts):
            found.append(path)
    return sorted(found, key=lambda p: p.relative_to(folder).as_posix())


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file under a temporary name and rename it: it is there whole or not at all.

    Raises:
        DiskFullError: No space left.
    """
    with replacing(path) as file:
        file.write(data)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A new file that takes the place of `path` when the block ends well, and is removed when it does not.

    Its temporary name is unique, so that two builds that share a cache cannot write into the same file.

    Raises:
        DiskFullError: No space left.
    """
    with disk_full_is_clear(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary_file(path) as temporary:
            with temporary.open("wb") as file:
                yield file
            temporary.chmod(0o644)
            temporary.replace(path)


@contextlib.contextmanager
def temporary_file(target: Path) -> Iterator[Path]:
    """A fresh name beside `target`, removed at the end unless it was renamed away."""
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    os.close(descriptor)
    path = Path(name)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def temporary_folder(target: Path) -> Iterator[Path]:
    """A fresh folder beside `target`, removed at the end unless it was renamed away."""
    target.parent.mkdir(parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def disk_full_is_clear(where: Path) -> Iterator[None]:
    """Turn ENOSPC into an error that says where and how much is free."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        folder = next(path for path in (where, *where.parents) if path.is_dir())
        free = shutil.disk_usage(folder).free
        raise DiskFullError(
            f"no space left while writing {where} ({free >> 20} MiB free)",
            hint="free some space (`nox -s clean -- --all` drops this project's caches too) and run it again",
        ) from None


@contextlib.contextmanager
def only_one(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold a lock file; the kernel lets go of it when the process ends, however it ends.

    Raises:
        BusyError: Somebody else holds it and `wait` is off.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise BusyError(
                f"another build runs in this folder (process {holder})",
                hint="wait for it to end and run it again",
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


@contextlib.contextmanager
def sharing(home: Path, folders: Sequence[str]) -> Iterator[None]:
    """Use folders of a cache beside other builds, after removing what killed ones left there.

    Temporary names begin with a dot and may be another build's, so they go only while nobody else is here.
    """
    home.mkdir(parents=True, exist_ok=True)
    with (home / "in-use").open("a") as file:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for folder in folders:
                for leftover in (home / folder).glob(".*"):
                    shutil.rmtree(leftover)
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def refuse_mounts(folder: Path, table: Path = Path("/proc/self/mountinfo")) -> None:
    """Before a folder is removed: what is mounted below it is somebody else's.

    Raises:
        FileAccessError: Something is mounted below it; the hint says how to unmount it.
    """
    if not table.exists():
        return
    # proc_pid_mountinfo(5): the fifth field is the mount point, with spaces and the like in octal.
    fields = (line.split()[4] for line in table.read_text().splitlines())
    points = [re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), field) for field in fields]
    below = [point for point in points if Path(point).is_relative_to(folder.resolve())]
    if below:
        raise FileAccessError(
            f"{below[0]} is mounted ({len(below)} in all below {folder}), perhaps left by a killed build",
            hint=f"umount {shlex.join(reversed(below))}  and run it again",
        )


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link a file where the file system allows, else copy it."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK):
            raise
        with disk_full_is_clear(target):
            shutil.copyfile(source, target)


def copy_stream(source: Path, target: Path) -> None:
    """Copy a file's bytes only, block by block."""
    with source.open("rb") as reader, target.open("wb") as writer:
        shutil.copyfileobj(reader, writer, _BLOCK)
