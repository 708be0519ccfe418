"""Writing a canonical layer.

Source: OCI image spec, layer.md. Entries are sorted by the bytes of their path, times are the epoch, owners
are numeric, PAX records stand only where ustar cannot hold a value, and the tar stream becomes the gzip of
`gzipstream`.
"""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from dsv32_image.errors import BuildError, ImageLayoutError
from dsv32_image.oci import tarheader as tar
from dsv32_image.oci.entry import WHITEOUT, Entry, Kind, LayerChange, show
from dsv32_image.oci.files import disk_full, replacing
from dsv32_image.oci.gzipstream import CHUNK, GzipPool
from dsv32_image.oci.scan import ScannedLayer, scan_layer
from dsv32_image.oci.tree import Tree, diff

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

__all__ = ["LAYER_FORMAT", "LayerBlob", "ScannedLayer", "scan_layer", "write_layer"]

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
    """A written layer.

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


def write_layer(
    old: Tree,
    new: Tree,
    sources: Sequence[ScannedLayer],
    out: Path,
    *,
    epoch: int,
    plain: Path | None = None,
    workers: int | None = None,
) -> LayerBlob:
    """Writes the canonical layer that leads from `old` to `new`; `out` appears whole or not at all.

    Args:
        old: State below.
        new: State after.
        sources: Where content is found, by digest: the engine's layers between the two states, and those
            below if one of them hard-links to a file it does not hold.
        out: The gzip file.
        epoch: Time of every entry, seconds since 1970.
        plain: Where to write the tar stream as well, uncompressed; what was there is overwritten.
        workers: Processes that compress; changes the speed, never the bytes. None: one a processor.

    Raises:
        ImageLayoutError: Content is in none of the sources, or a name that a layer cannot express.
        DiskFullError: No space left.
        BuildError: A compressing process was killed.
    """
    change = diff(old, new)
    unpacked, packed = hashlib.sha256(), hashlib.sha256()
    sizes = [0, 0]

    def chunks(copy: IO[bytes] | None) -> Iterator[bytes]:
        for chunk in _cut(_tar_stream(new, change, sources, epoch)):
            unpacked.update(chunk)
            sizes[0] += len(chunk)
            if copy is not None:
                with disk_full(plain or out):
                    copy.write(chunk)
            yield chunk

    try:
        with ExitStack() as stack:
            pool, file = stack.enter_context(GzipPool(workers)), stack.enter_context(replacing(out))
            copy = stack.enter_context(plain.open("wb")) if plain else None
            for member in pool.compress(chunks(copy)):
                packed.update(member)
                sizes[1] += len(member)
                file.write(member)
    except ChildProcessError as error:
        raise BuildError(f"{out}: {error}", "out of memory? run it again") from error
    return LayerBlob(
        digest=f"sha256:{packed.hexdigest()}",
        diff_id=f"sha256:{unpacked.hexdigest()}",
        size=sizes[1],
        uncompressed_size=sizes[0],
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


def _cut(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The same stream in chunks of `CHUNK` bytes, the last one shorter."""
    buffer = bytearray()
    for piece in pieces:
        buffer += piece
        if len(buffer) >= CHUNK:  # a piece is at most one chunk long
            yield bytes(memoryview(buffer)[:CHUNK])
            del buffer[:CHUNK]
    if buffer:
        yield bytes(buffer)
