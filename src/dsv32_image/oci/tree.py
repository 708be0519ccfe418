"""A file-system state as plain data, and the difference of two states.

Engines disagree on how to express a layer: overlay lists copied-up but unchanged files and opaque folders,
vfs lists single whiteouts, some list parent folders and some do not. None of that matters once a layer has
been applied to the state below it, so a canonical layer is `diff(state below, state after)`.

Sources: OCI image spec, layer.md (change sets, whiteouts, hard links); the extractors of moby `pkg/archive`
and containers/storage, for what they do where layer.md is silent.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dsv32_image.errors import ImageLayoutError
from dsv32_image.files import replacing
from dsv32_image.oci.entry import (
    WHITEOUT,
    Entry,
    LayerChange,
    alone,
    ancestors,
    is_dropped,
    parent_of,
    same,
    show,
)
from dsv32_image.oci.links import grouped, regrouped, with_links

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Entry", "LayerChange", "Tree", "diff"]

_MAGIC = b"dsv32-tree"
_FORMAT = 1  # raise when `_encode` changes, so that cached trees of older versions are not misread


class Tree(Mapping[bytes, Entry]):
    """A file-system state: path (bytes) to `Entry`. Cannot be changed; `apply` gives a new one.

    Every path's parent folder is in the tree. The root folder is not: engines disagree on whether a layer
    lists it, and none of its metadata can be set in a Dockerfile in a way all of them keep.
    """

    __slots__ = ("_entries",)

    def __init__(self, entries: Mapping[bytes, Entry] | None = None) -> None:
        self._entries: dict[bytes, Entry] = dict(entries or {})

    def __getitem__(self, path: bytes) -> Entry:
        return self._entries[path]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def apply(self, change: LayerChange) -> Tree:
        """The state after `change`, whatever dialect it is written in and in whatever order it was listed.

        A path that is listed but equal to the state below counts as untouched. Hard links are where the
        engines' own file systems differ: overlay breaks them when it copies a file up and vfs does not, and
        vfs does not tell that a new name is one of an untouched file. So two paths that were files below are
        linked if they were then and are still equal (a `chown -R` breaks nothing), and a new name for an
        untouched file is a file of its own (with the link the layer would hold the content as well). Out of
        reach remains a change through one of several names: there the content itself differs.

        Raises:
            ImageLayoutError: A hard link to nothing, or a path below something that is not a folder.
        """
        old = self._entries
        listed = with_links(change, old)
        new = _survivors(old, change, listed)
        for path, entry in listed.items():
            before = old.get(path)
            new[path] = before if before is not None and same(before, entry) else entry
        for path in listed:
            _ensure_parents(new, path)
        return Tree(grouped(new))

    def save(self, out: Path) -> None:
        """Writes the tree to a compact file, atomically; the same tree gives the same bytes.

        Raises:
            DiskFullError: No space left.
        """
        lines = [json.dumps(_encode(path, self._entries[path])) for path in sorted(self._entries)]
        body = "\n".join(lines).encode()
        head = b"%s %d %s\n" % (_MAGIC, _FORMAT, hashlib.sha256(body).hexdigest().encode())
        with replacing(out) as file:
            file.write(head + zlib.compress(body, 1))

    @classmethod
    def load(cls, path: Path) -> Tree:
        """Reads what `save` wrote.

        Raises:
            ImageLayoutError: The file is damaged or of another format version.
            OSError: There is no such file.
        """
        head, _, packed = path.read_bytes().partition(b"\n")
        try:
            magic, version, digest = head.split(b" ")
            if (magic, int(version)) != (_MAGIC, _FORMAT):
                raise ValueError("another format")
            body = zlib.decompress(packed)
            if hashlib.sha256(body).hexdigest().encode() != digest:
                raise ValueError("digest differs")
            return cls(dict(_decode(json.loads(line)) for line in body.splitlines()))
        except (ValueError, zlib.error) as error:
            raise ImageLayoutError(f"cached tree {path} is damaged: {error}", "remove the file") from error


def diff(old: Tree, new: Tree) -> LayerChange:
    """The canonical layer between two states.

    Holds what differs, each parent folder of it with its metadata (extractors would create parents with a
    default mode), and a whiteout for the topmost deleted paths. Never both a whiteout and an entry for a
    path: extractors disagree on their order. A folder that was deleted and made again therefore shows as
    single whiteouts, and a change of kind as the new entry alone. A hard-link group is listed whole as
    soon as it is not exactly what is left of one lower group, since overlay extracts each layer into a folder
    of its own where a link to a lower file would dangle; its leader is the first path in byte order.

    Raises:
        ImageLayoutError: A name starts with `.wh.`, which a layer cannot express.
    """
    emit = {path for path, entry in new.items() if (b := old.get(path)) is None or not same(b, entry)}
    emit |= regrouped(old, new, emit)
    whiteouts = frozenset(path for path in old if path not in new and _is_folder(new, parent_of(path)))
    for path in [*emit, *whiteouts]:
        emit.update(ancestors(path))
    for path in emit:
        if path.rpartition(b"/")[2].startswith(WHITEOUT):
            raise ImageLayoutError(
                f"/{show(path)}: a name that starts with .wh. cannot be put into an image layer",
                "rename or remove the file in the step that makes it",
            )
    links = {path: new[path].link for path in emit if new[path].link not in (b"", path)}
    entries = {path: alone(new[path]) for path in emit if path not in links}
    return LayerChange(entries=entries, links=links, whiteouts=whiteouts)


def _is_folder(tree: Mapping[bytes, Entry], path: bytes) -> bool:
    return not path or (path in tree and tree[path].kind == "dir")


def _survivors(
    old: Mapping[bytes, Entry], change: LayerChange, listed: Mapping[bytes, Entry]
) -> dict[bytes, Entry]:
    """The lower paths that neither a whiteout nor an opaque folder nor a change of kind removes."""
    gone = {path for path in change.whiteouts if not is_dropped(path)}
    replaced = {path for path, e in listed.items() if e.kind != "dir" and _is_folder(old, path)}
    emptied = gone | replaced | change.opaques
    if not emptied:
        return dict(old)
    if b"" in emptied:
        return {}
    return {p: e for p, e in old.items() if p not in gone and not any(a in emptied for a in ancestors(p))}


def _ensure_parents(new: dict[bytes, Entry], path: bytes) -> None:
    for folder in ancestors(path):
        entry = new.get(folder)
        if entry is None:
            new[folder] = Entry(kind="dir", mode=0o755)  # what every extractor does with an unlisted parent
        elif entry.kind == "dir":
            return  # its own parents are there, or are visited for its own sake
        else:
            raise ImageLayoutError(f"/{show(path)} lies below /{show(folder)}, which is a {entry.kind}")


def _encode(path: bytes, e: Entry) -> list[Any]:
    def text(raw: bytes) -> str:
        return raw.decode("utf-8", "surrogateescape")

    xattrs = [[text(name), value.hex()] for name, value in e.xattrs]
    numbers = [e.mode, e.uid, e.gid, e.size, *e.rdev]
    return [text(path), e.kind, numbers, e.sha256.hex(), text(e.target), text(e.link), xattrs]


def _decode(row: list[Any]) -> tuple[bytes, Entry]:  # only rows of `_encode`: the digest was checked
    def raw(value: str) -> bytes:
        return value.encode("utf-8", "surrogateescape")

    path, kind, (mode, uid, gid, size, major, minor), sha256, target, link, xattrs = row
    return raw(path), Entry(
        kind=kind,
        mode=mode,
        uid=uid,
        gid=gid,
        size=size,
        sha256=bytes.fromhex(sha256),
        target=raw(target),
        rdev=(major, minor),
        xattrs=tuple((raw(name), bytes.fromhex(value)) for name, value in xattrs),
        link=raw(link),
    )
