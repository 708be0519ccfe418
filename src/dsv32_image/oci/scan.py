"""Reading an engine's layer without unpacking it.

Source: OCI image spec, layer.md. Content is hashed once, here; `layer.write_tar` copies it from the same
file later.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
import tempfile
from contextlib import suppress
from typing import IO, TYPE_CHECKING

from dsv32_image.errors import ImageLayoutError
from dsv32_image.files import disk_full_is_clear
from dsv32_image.oci.entry import OPAQUE, WHITEOUT, Entry, Kind, LayerChange, kept_xattrs, parent_of, show
from dsv32_image.oci.gzipstream import CHUNK, inflate
from dsv32_image.oci.tarheader import BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path
    from types import TracebackType

# Where content lies in a layer's tar: (position in the content, length, offset in the tar). One piece for an
# ordinary file, several for a sparse one; what no piece covers is zero.
Pieces = tuple[tuple[int, int, int], ...]

_KINDS: dict[bytes, Kind] = {
    tarfile.DIRTYPE: "dir",
    tarfile.SYMTYPE: "symlink",
    tarfile.CHRTYPE: "char",
    tarfile.BLKTYPE: "block",
    tarfile.FIFOTYPE: "fifo",
}
_XATTR = "SCHILY.xattr."


class ScannedLayer:
    """An engine's layer: what it changes, and where the content of each file can be read again.

    Holds a file open; close it, or use it as a context manager.
    """

    def __init__(self, file: IO[bytes], change: LayerChange, contents: Mapping[bytes, Pieces]) -> None:
        self._file = file
        self.change = change
        self._contents = contents

    def __enter__(self) -> ScannedLayer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file; a temporary one is gone with that."""
        self._file.close()

    def __contains__(self, sha256: object) -> bool:
        return sha256 in self._contents

    def read(self, sha256: bytes, size: int) -> Iterator[bytes]:
        """The content with this raw digest and size, in blocks of at most 1 MiB.

        Raises:
            ImageLayoutError: The file has become shorter since it was scanned.
        """
        try:
            yield from _read_content(self._file.fileno(), self._contents[sha256], size)
        except ValueError as error:
            raise ImageLayoutError("an engine's layer changed while it was read", "run it again") from error


def scan_layer(
    path: Path, *, offset: int = 0, size: int | None = None, spool: Path | None = None
) -> ScannedLayer:
    """Reads a layer: a tar, a gzip'ed tar, or either as a member of an uncompressed archive.

    A gzip'ed layer is unpacked into an unlinked temporary file, since content is needed in another order than
    it comes in; ask the engine for uncompressed layers to save that.

    Args:
        path: The file.
        offset: Where the layer begins in it, bytes.
        size: Bytes of the layer; None for the rest of the file.
        spool: Folder for the temporary file; None for the system's.

    Raises:
        ImageLayoutError: Not a tar, damaged, cut short, or with something we refuse to guess about.
        DiskFullError: No space for the temporary file.
    """
    file: IO[bytes] = path.open("rb")
    try:
        end = file.seek(0, os.SEEK_END) if size is None else offset + size
        magic = os.pread(file.fileno(), 4, offset)
        if magic[:2] == b"\x1f\x8b":
            packed, file = file, tempfile.TemporaryFile(dir=spool)  # noqa: SIM115
            with packed, disk_full_is_clear(spool or path):
                for block in inflate(_blocks(packed.fileno(), offset, end - offset)):
                    file.write(block)
                offset, end = 0, file.tell()
                file.flush()
        elif magic == b"\x28\xb5\x2f\xfd":
            raise ImageLayoutError("a zstd layer", "export the image with gzip or uncompressed layers")
        file.seek(offset)
        return _scan(file, end)
    except (tarfile.TarError, ValueError) as error:
        file.close()
        raise ImageLayoutError(f"{path}: damaged layer: {error}", "export the image again") from error
    except ImageLayoutError as error:
        file.close()
        raise ImageLayoutError(f"{path}: {error.message}", error.hint) from error
    except BaseException:
        with suppress(OSError):  # what could not be written fails again when it is flushed
            file.close()
        raise


def _blocks(fd: int, offset: int, size: int) -> Iterator[bytes]:
    while size:
        block = os.pread(fd, min(size, CHUNK), offset)
        if not block:
            raise ValueError("cut short")
        yield block
        offset += len(block)
        size -= len(block)


def _read_content(fd: int, pieces: Pieces, size: int) -> Iterator[bytes]:
    position = 0
    for start, length, offset in (*pieces, (size, 0, 0)):
        while position < start:
            hole = min(start - position, CHUNK)
            yield bytes(hole)
            position += hole
        yield from _blocks(fd, offset, length)
        position += length


def _scan(file: IO[bytes], end: int) -> ScannedLayer:
    entries: dict[bytes, Entry] = {}
    links: dict[bytes, bytes] = {}
    whiteouts: set[bytes] = set()
    opaques: set[bytes] = set()
    contents: dict[bytes, Pieces] = {}
    # tarfile knows all dialects (GNU and PAX long names, three kinds of sparse files); surrogateescape
    # carries names and attribute values that are not UTF-8 through unchanged.
    archive = tarfile.TarFile(fileobj=file, encoding="utf-8", errors="surrogateescape")
    while (member := archive.next()) is not None:
        archive.members.clear()  # type: ignore[attr-defined]  # else it keeps about 1 kB a member
        path = _normal(_raw(member.name))
        name = path.rpartition(b"/")[2]
        if name.startswith(WHITEOUT):
            _whiteout(path, name, member, whiteouts, opaques)
        elif not path:
            continue  # the root folder, see Tree
        elif path in links or (path in entries and not (member.isdir() and entries[path].kind == "dir")):
            raise ImageLayoutError(f"/{show(path)}: listed twice in one layer")
        elif member.islnk():
            links[path] = _normal(_raw(member.linkname))
        else:
            entries[path] = _entry(file.fileno(), path, member, contents)
    _check_end(file.fileno(), archive.offset, end)
    change = LayerChange(
        entries=entries, links=links, whiteouts=frozenset(whiteouts), opaques=frozenset(opaques)
    )
    return ScannedLayer(file, change, contents)


def _check_end(fd: int, offset: int, end: int) -> None:
    """tarfile takes a damaged header after the first for the end; a real end is a block of zeros."""
    if offset + BLOCK > end or os.pread(fd, BLOCK, offset) != bytes(BLOCK):
        raise ValueError(f"no valid header and no end at byte {offset}")


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _normal(name: bytes) -> bytes:
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    if b".." in parts:
        raise ImageLayoutError(f"{show(name)}: a path that leaves its folder")
    if any(part.startswith(WHITEOUT) for part in parts[:-1]):
        raise ImageLayoutError(f"{show(name)}: a folder whose name starts with .wh.")
    return b"/".join(parts)


def _whiteout(
    path: bytes, name: bytes, member: tarfile.TarInfo, whiteouts: set[bytes], opaques: set[bytes]
) -> None:
    if name == OPAQUE:
        opaques.add(parent_of(path))
        return
    target = name[len(WHITEOUT) :]
    # .wh..wh.* are notes of aufs to itself; a folder or link of such a name is nobody's whiteout.
    if target in (b"", b".", b"..") or target.startswith(WHITEOUT) or not member.isreg():
        raise ImageLayoutError(f"/{show(path)}: a name that starts with .wh. but is no whiteout")
    whiteouts.add(path[: len(path) - len(name)] + target)


def _entry(fd: int, path: bytes, member: tarfile.TarInfo, contents: dict[bytes, Pieces]) -> Entry:
    xattrs = kept_xattrs(
        (_raw(key[len(_XATTR) :]), _raw(value))
        for key, value in member.pax_headers.items()
        if key.startswith(_XATTR)
    )
    kind: Kind = "file" if member.isreg() else _KINDS.get(member.type, "file")
    if kind == "file" and not member.isreg():
        raise ImageLayoutError(f"/{show(path)}: unknown type {member.type!r} in a layer")
    size, digest = 0, b""
    if kind == "file":
        pieces = _pieces(member)
        size = member.size
        hasher = hashlib.sha256()
        for block in _read_content(fd, pieces, size):
            hasher.update(block)
        digest = hasher.digest()
        contents.setdefault(digest, pieces)
    return Entry(
        kind=kind,
        # The mode of a symbolic link means nothing, and tar writers disagree on it.
        mode=0o777 if kind == "symlink" else member.mode & 0o7777,
        uid=member.uid,
        gid=member.gid,
        size=size,
        sha256=digest,
        target=_raw(member.linkname) if kind == "symlink" else b"",
        rdev=(member.devmajor, member.devminor) if kind in ("char", "block") else (0, 0),
        xattrs=xattrs,
    )


def _pieces(member: tarfile.TarInfo) -> Pieces:
    if not member.issparse():
        return ((0, member.size, member.offset_data),)
    pieces, offset = [], member.offset_data
    sparse: list[tuple[int, int]] = member.sparse  # type: ignore[assignment]  # the stub says bytes
    for start, length in sparse:
        if length:
            pieces.append((start, length, offset))
            offset += length
    return tuple(pieces)
