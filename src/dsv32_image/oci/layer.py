"""Writing a canonical layer.

Source: OCI image spec, layer.md. Entries are sorted by the bytes of their path, times are the epoch, owners
are numeric, PAX records stand only where ustar cannot hold a value. The tar is written first: its digest is
all that an engine needs to know of a layer. Its gzip, by `gzipstream`, is needed for the layout alone.
"""

from __future__ import annotations

import hashlib
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsv32_image.errors import ImageLayoutError
from dsv32_image.files import replacing
from dsv32_image.oci import tarheader as tar
from dsv32_image.oci.entry import WHITEOUT, Entry, Kind, LayerChange, show
from dsv32_image.oci.gzipstream import gzip_members
from dsv32_image.oci.scan import ScannedLayer, scan_layer
from dsv32_image.oci.tree import Tree, diff

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

__all__ = ["LAYER_FORMAT", "LayerBlob", "LayerTar", "ScannedLayer", "pack_layer", "scan_layer", "write_tar"]

# Belongs into the key of every cached layer. Raise it with any change that gives a layer other bytes or a
# state other entries: the golden digests in the tests fail on such a change.
LAYER_FORMAT = 1

_TYPEFLAGS: dict[Kind, bytes] = {
    "file": tar.FILE,
    "dir": tar.DIR,
    "symlink": tar.SYMLINK,
    "char": tar.CHAR,
    "block": tar.BLOCKDEV,
    "fifo": tar.FIFO,
}


@dataclass(frozen=True, kw_only=True)
class LayerBlob:
    """A layer as the layout holds it.

    Args:
        digest: `sha256:…` of the gzip file.
        diff_id: `sha256:…` of the tar stream inside.
        size: Bytes of the gzip file.
        uncompressed_size: Bytes of the tar stream.
    """

    digest: str
    diff_id: str
    size: int
    uncompressed_size: int


@dataclass(frozen=True, kw_only=True)
class LayerTar:
    """A layer before it is compressed.

    Args:
        path: The tar.
        diff_id: `sha256:…` of it.
        size: Bytes of it.
    """

    path: Path
    diff_id: str
    size: int


def write_tar(old: Tree, new: Tree, sources: Sequence[ScannedLayer], out: Path, *, epoch: int) -> LayerTar:
    """Writes the canonical layer that leads from `old` to `new` as a tar; `out` appears whole or not at all.

    Args:
        old: State below.
        new: State after.
        sources: Where content is found, by digest: the engine's layers between the two states, and those
            below if one of them hard-links to a file it does not hold.
        out: The tar.
        epoch: Time of every entry, seconds since 1970.

    Raises:
        ImageLayoutError: Content is in none of the sources, or a name that a layer cannot express.
        DiskFullError: No space left.
    """
    change = diff(old, new)
    digest, size = hashlib.sha256(), 0
    with replacing(out) as file:
        for piece in _tar_stream(new, change, sources, epoch):
            digest.update(piece)
            size += len(piece)
            file.write(piece)
    return LayerTar(path=out, diff_id=f"sha256:{digest.hexdigest()}", size=size)


def pack_layer(
    layer: LayerTar,
    out: Path,
    *,
    workers: int | None = None,
    proceed: Callable[[], None] = lambda: None,
) -> LayerBlob:
    """Compresses a layer; `out` appears whole or not at all.

    Args:
        layer: What `write_tar` wrote.
        out: The gzip file.
        workers: Threads that compress; changes the speed, never the bytes. None: one a processor.
        proceed: Called before each megabyte; what it raises ends the work.

    Raises:
        DiskFullError: No space left.
    """
    digest, size = hashlib.sha256(), 0
    with replacing(out) as file, closing(gzip_members(layer.path, workers)) as members:
        for member in members:
            proceed()
            digest.update(member)
            size += len(member)
            file.write(member)
    return LayerBlob(
        digest=f"sha256:{digest.hexdigest()}",
        diff_id=layer.diff_id,
        size=size,
        uncompressed_size=layer.size,
    )


def _tar_stream(
    new: Tree, change: LayerChange, sources: Sequence[ScannedLayer], epoch: int
) -> Iterator[bytes]:
    hidden = {_whiteout_name(path) for path in change.whiteouts}
    for path in sorted([*change.entries, *change.links, *hidden]):
        if path in hidden:
            # As moby writes them: an empty file without any permission.
            yield tar.tar_header(path, typeflag=tar.FILE, mode=0, mtime=epoch)
            continue
        entry = new[path]
        leader = change.links.get(path)
        kind = tar.HARDLINK if leader is not None else _TYPEFLAGS[entry.kind]
        content = entry.kind == "file" and leader is None
        yield tar.tar_header(
            path + b"/" if entry.kind == "dir" else path,
            typeflag=kind,
            # Links carry mode and xattrs too: moby's extractor sets the owner of each link it makes, and
            # chown takes setuid and security.capability from the inode they share.
            mode=entry.mode,
            uid=entry.uid,
            gid=entry.gid,
            mtime=epoch,
            size=entry.size if content else 0,
            linkname=leader if leader is not None else entry.target,
            rdev=entry.rdev,
            xattrs=entry.xattrs,
        )
        if content and entry.size:
            yield from _find(path, entry, sources)
            yield tar.padding(entry.size)
    yield bytes(2 * tar.BLOCK)


def _whiteout_name(path: bytes) -> bytes:
    head, slash, tail = path.rpartition(b"/")
    return head + slash + WHITEOUT + tail


def _find(path: bytes, entry: Entry, sources: Sequence[ScannedLayer]) -> Iterator[bytes]:
    for source in sources:
        if entry.sha256 in source:
            return source.read(entry.sha256, entry.size)
    raise ImageLayoutError(
        f"/{show(path)}: its content is in none of the engine's layers at hand",
        "it links to a file of a lower layer: scan that layer too",
    )
