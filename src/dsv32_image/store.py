"""The content store: downloads on the host, by sha256, shared by all checkouts of one user."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dsv32_image.errors import HashMismatchError, OfflineError
from dsv32_image.files import disk_full_is_clear, link_or_copy, sha256_file

if TYPE_CHECKING:
    from collections.abc import Iterable


class Locked(Protocol):
    """Anything with a file name, a size and a hash: a Deb or a Dist."""

    @property
    def file(self) -> str: ...  # noqa: D102
    @property
    def size(self) -> int: ...  # noqa: D102
    @property
    def sha256(self) -> str: ...  # noqa: D102


def cache_home() -> Path:
    """The project's cache folder: $DSV32_CACHE, else below $XDG_CACHE_HOME, else ~/.cache."""
    if named := os.environ.get("DSV32_CACHE"):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dsv32-image"


class Store:
    """Files named by their sha256 below `<home>/sha256/<2 hex>/<64 hex>`."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def path(self, sha256: str) -> Path:
        """Where a file of that hash lies or would lie."""
        return self.home / "sha256" / sha256[:2] / sha256

    def partial(self, sha256: str) -> Path:
        """Where a download of that hash grows; kept when it is cut, so that it can go on."""
        return self.home / "partial" / sha256

    def has(self, item: Locked) -> bool:
        """Whether the file is there with the locked size (`place` checks the content)."""
        try:
            return self.path(item.sha256).stat().st_size == item.size
        except FileNotFoundError:
            return False

    def missing(self, items: Iterable[Locked]) -> list[Locked]:
        """Those that have to be fetched."""
        return [item for item in items if not self.has(item)]

    def drop_damaged(self, items: Iterable[Locked]) -> list[str]:
        """Remove files whose bytes are not those of the lock, so that they are fetched again; their names."""
        damaged = []
        for item in items:
            path = self.path(item.sha256)
            if path.exists() and (path.stat().st_size != item.size or sha256_file(path) != item.sha256):
                path.unlink()
                damaged.append(item.file)
        return damaged

    def require(self, items: Iterable[Locked]) -> None:
        """Refuse to go on without all of them.

        Raises:
            OfflineError: Names the first file that is not there and says how many are not.
        """
        absent = self.missing(items)
        if absent:
            total = sum(item.size for item in absent)
            raise OfflineError(
                f"not in the store, or not whole: {absent[0].file} ({len(absent)} in all, {total >> 20} MiB)",
                hint="run `nox -s fetch` without --offline, or copy the store of another machine to "
                + str(self.home),
            )

    def place(self, item: Locked, folder: Path) -> Path:
        """Put a file into a folder under its own name, after checking its content.

        Raises:
            OfflineError: It is not in the store.
            HashMismatchError: It is, but the bytes are not those of the lock; the bad file is removed.
        """
        source = self.path(item.sha256)
        if not source.exists():
            raise OfflineError(f"{item.file} is not in the store", hint="run `nox -s fetch`")
        got = sha256_file(source)
        if got != item.sha256:
            source.unlink()
            raise HashMismatchError(
                f"{item.file} in the store is damaged: wanted sha256 {item.sha256}, got {got} (removed)",
                hint="run `nox -s fetch` to get it again; check the disk if it comes back",
            )
        target = folder / item.file
        with disk_full_is_clear(target):
            link_or_copy(source, target)
        return target
