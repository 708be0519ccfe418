"""What a path is, and what a layer says about paths: the plain data of this package.

Source: OCI image spec, layer.md (change sets, whiteouts, hard links).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

Kind = Literal["file", "dir", "symlink", "char", "block", "fifo"]

WHITEOUT = b".wh."
OPAQUE = b".wh..wh..opq"

# Written by engines into every container, with other content on each host; a container gets fresh ones.
DROPPED = frozenset({b"etc/hostname", b"etc/hosts", b"etc/resolv.conf", b".dockerenv"})
# The folders stay, what is below goes: mount points, and scratch space that must not leak into an image.
# run/.containerenv of podman and buildah is among it.
EMPTIED = frozenset({b"dev", b"proc", b"sys", b"run", b"tmp", b"var/tmp"})
# How the engine's own storage marks things; security.selinux is given by the host's policy, not by content.
_ENGINE_XATTRS = (b"trusted.overlay.", b"user.overlay.")
_HOST_XATTRS = frozenset({b"security.selinux"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """What a path is. Times are left out on purpose: they are set to the epoch when written.

    Args:
        kind: File type.
        mode: Permission bits with setuid, setgid and sticky (0 to 0o7777).
        uid: Owner.
        gid: Group.
        size: Bytes of content; 0 for everything that is not a file.
        sha256: Raw digest of the content (32 bytes); empty for everything that is not a file.
        target: Where a symbolic link points.
        rdev: Major and minor of a device.
        xattrs: Name and value, sorted by name.
        link: Hard-link group: in a `Tree` the first path of the group in byte order, empty if alone.
    """

    kind: Kind
    mode: int
    uid: int = 0
    gid: int = 0
    size: int = 0
    sha256: bytes = b""
    target: bytes = b""
    rdev: tuple[int, int] = (0, 0)
    xattrs: tuple[tuple[bytes, bytes], ...] = ()
    link: bytes = b""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerChange:
    """A layer as an engine or `diff` expresses it; all paths relative, without leading or trailing slash.

    Args:
        entries: Paths with their own metadata and content.
        links: Hard links: path to the path that holds the content, in this layer or in one below.
        whiteouts: Paths of lower layers that are gone, with everything below them.
        opaques: Folders (empty name: the root) whose lower content is gone; the folder itself stays.
    """

    entries: Mapping[bytes, Entry] = field(default_factory=dict)
    links: Mapping[bytes, bytes] = field(default_factory=dict)
    whiteouts: frozenset[bytes] = frozenset()
    opaques: frozenset[bytes] = frozenset()

    @property
    def is_empty(self) -> bool:
        """True if the layer changes nothing (an engine's layer for ENV or LABEL)."""
        return not (self.entries or self.links or self.whiteouts or self.opaques)


def parent_of(path: bytes) -> bytes:
    """The folder that holds `path`; empty for the root."""
    return path.rpartition(b"/")[0]


def ancestors(path: bytes) -> Iterator[bytes]:
    """All folders above `path`, nearest first, without the root."""
    while path := parent_of(path):
        yield path


def is_dropped(path: bytes) -> bool:
    """True for paths that no canonical image holds (see `DROPPED` and `EMPTIED`)."""
    return path in DROPPED or any(folder in EMPTIED for folder in ancestors(path))


def kept_xattrs(xattrs: Iterable[tuple[bytes, bytes]]) -> tuple[tuple[bytes, bytes], ...]:
    """Sorted extended attributes, less those of the engine's storage and of the host's policy."""
    dropped = _ENGINE_XATTRS
    return tuple(sorted((n, v) for n, v in xattrs if n not in _HOST_XATTRS and not n.startswith(dropped)))


def show(path: bytes) -> str:
    """`path` for a message, with bytes that are not UTF-8 escaped."""
    return path.decode("utf-8", "backslashreplace")


def alone(entry: Entry) -> Entry:
    """The entry without its hard-link group."""
    return replace(entry, link=b"") if entry.link else entry


def same(a: Entry, b: Entry) -> bool:
    """True if both are equal but for their hard-link group."""
    return a is b or alone(a) == alone(b)
