"""Hard links: which paths of a state share a file.

The engines' own file systems differ here. Overlay breaks links when it copies a file up; vfs keeps them, but
does not tell that a new name is one of an untouched file. `Tree.apply` says which rule makes both the same.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from dsv32_image.errors import ImageLayoutError
from dsv32_image.oci.entry import Entry, LayerChange, alone, is_dropped, same, show

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# Names a group while a layer is applied: where its mates are found, the path they are known by, their entry.
_Key = tuple[str, bytes, Entry | None]


def with_links(change: LayerChange, old: Mapping[bytes, Entry]) -> dict[bytes, Entry]:
    """All kept paths of the layer, hard links resolved and each marked with a temporary name of its group."""
    owners = {path: _owner(path, change.links) for path in change.links}
    listed: dict[bytes, Entry] = {}
    for path in [*change.entries, *owners]:
        owner = owners.get(path, path)
        entry = change.entries.get(owner) or old.get(owner)
        if entry is None or (path in owners and entry.kind == "dir"):
            raise ImageLayoutError(f"/{show(path)}: hard link to /{show(owner)}, which is not a file")
        listed[path] = alone(entry)
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
        if path in listed and not same(old[path], listed[path]):
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


def _groups(tree: Mapping[bytes, Entry]) -> dict[bytes, list[bytes]]:
    groups: dict[bytes, list[bytes]] = defaultdict(list)
    for path, entry in tree.items():
        if entry.link:
            groups[entry.link].append(path)
    return groups


def grouped(entries: dict[bytes, Entry]) -> dict[bytes, Entry]:
    """Names each hard-link group after its first path, and frees those that are alone."""
    for name, members in _groups(entries).items():
        leader = min(members) if len(members) > 1 else b""
        if leader != name:
            for path in members:
                entries[path] = replace(entries[path], link=leader)
    return entries


def regrouped(old: Mapping[bytes, Entry], new: Mapping[bytes, Entry], changed: set[bytes]) -> set[bytes]:
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
