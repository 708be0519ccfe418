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
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from dsv32_image.errors import ImageLayoutError
from dsv32_image.oci.files import replacing

if TYPE_CHECKING:
    from pathlib import Path

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

_MAGIC = b"dsv32-tree"
_FORMAT = 1  # raise when `_encode` changes, so that cached trees of older versions are not misread


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
        listed = _with_links(change, old)
        new = _survivors(old, change, listed)
        for path, entry in listed.items():
            before = old.get(path)
            new[path] = before if before is not None and _same(before, entry) else entry
        for path in listed:
            _ensure_parents(new, path)
        return Tree(_grouped(new))

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
    emit = {path for path, entry in new.items() if (b := old.get(path)) is None or not _same(b, entry)}
    emit |= _regrouped(old, new, emit)
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
    entries = {path: _alone(new[path]) for path in emit if path not in links}
    return LayerChange(entries=entries, links=links, whiteouts=whiteouts)


def show(path: bytes) -> str:
    """`path` for a message, with bytes that are not UTF-8 escaped."""
    return path.decode("utf-8", "backslashreplace")


def _alone(entry: Entry) -> Entry:
    return replace(entry, link=b"") if entry.link else entry


def _same(a: Entry, b: Entry) -> bool:
    return a is b or _alone(a) == _alone(b)


def _is_folder(tree: Mapping[bytes, Entry], path: bytes) -> bool:
    return not path or (path in tree and tree[path].kind == "dir")


def _with_links(change: LayerChange, old: Mapping[bytes, Entry]) -> dict[bytes, Entry]:
    """All kept paths of the layer, hard links resolved and each marked with a temporary name of its group."""
    owners = {path: _owner(path, change.links) for path in change.links}
    listed: dict[bytes, Entry] = {}
    for path in [*change.entries, *owners]:
        owner = owners.get(path, path)
        entry = change.entries.get(owner) or old.get(owner)
        if entry is None or (path in owners and entry.kind == "dir"):
            raise ImageLayoutError(f"/{show(path)}: hard link to /{show(owner)}, which is not a file")
        listed[path] = _alone(entry)
    groups: dict[bytes, list[bytes]] = {owner: [owner] for owner in owners.values()}
    for path, owner in owners.items():
        groups[owner].append(path)
    fresh = {owner: _key_of_new_names(owner, paths, listed, old) for owner, paths in groups.items()}
    names: dict[_Key, bytes] = {}
    for path, entry in listed.items():
        key = _key_below(path, entry, old) or fresh.get(owners.get(path, path))
        # Links between symbolic links, devices and fifos save nothing and not all engines keep them.
        if key is not None and entry.kind == "file":
            # The NUL keeps the group apart from those of the state below.
            listed[path] = replace(entry, link=names.setdefault(key, b"\0%d" % len(names)))
    # Dropped only now: a kept path may be a link to a dropped one, to a cache in /tmp for example.
    return {path: entry for path, entry in listed.items() if not is_dropped(path)}


_Key = tuple[str, bytes, Entry | None]


def _key_below(path: bytes, entry: Entry, old: Mapping[bytes, Entry]) -> _Key | None:
    """Group of a path that was a file below: its mates of then that are still equal to it."""
    before = old.get(path)
    return ("below", before.link or path, entry) if before is not None and before.kind == "file" else None


def _key_of_new_names(
    owner: bytes, paths: Iterable[bytes], listed: Mapping[bytes, Entry], old: Mapping[bytes, Entry]
) -> _Key:
    """Group of the new names among the linked `paths`.

    With a file that was below and has changed; else, if all of those are untouched, apart from them.
    """
    below = sorted(p for p in paths if p in old and old[p].kind == "file")
    for path in below:
        if path in listed and not _same(old[path], listed[path]):
            return _key_below(path, listed[path], old) or ("own", owner, None)
    return ("beside", old[below[0]].link or below[0], None) if below else ("own", owner, None)


def _owner(path: bytes, links: Mapping[bytes, bytes]) -> bytes:
    seen = {path}
    while path in links:
        path = links[path]
        if path in seen:
            raise ImageLayoutError(f"/{show(path)}: hard links in a circle")
        seen.add(path)
    return path


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


def _groups(tree: Mapping[bytes, Entry]) -> dict[bytes, list[bytes]]:
    groups: dict[bytes, list[bytes]] = defaultdict(list)
    for path, entry in tree.items():
        if entry.link:
            groups[entry.link].append(path)
    return groups


def _grouped(entries: dict[bytes, Entry]) -> dict[bytes, Entry]:
    """Names each hard-link group after its first path, and frees those that are alone."""
    for name, members in _groups(entries).items():
        leader = min(members) if len(members) > 1 else b""
        if leader != name:
            for path in members:
                entries[path] = replace(entries[path], link=leader)
    return entries


def _regrouped(old: Tree, new: Tree, changed: set[bytes]) -> set[bytes]:
    """Members of the groups of `new` that are not exactly what is left of one group of `old`."""
    before, after = _groups(old), _groups(new)
    found: set[bytes] = set()
    seen: set[tuple[bytes, bytes]] = set()
    for path in {p for members in [*before.values(), *after.values()] for p in members}:
        if path in changed or path not in new:
            continue
        was, now = old[path].link, new[path].link
        if (was or path, now or path) in seen:
            continue
        seen.add((was or path, now or path))
        left = {p for p in (before[was] if was else [path]) if p in new and p not in changed}
        mates = set(after[now] if now else [path])
        if mates != left:
            found |= mates
    return found


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
