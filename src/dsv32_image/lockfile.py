"""What we get: versions.lock, every byte that goes in, by sha256.

TOML, one line a file, sorted, so that a change of one package is a change of one line. The line
`content` is the sha256 of the file without that line: an edit by hand is noticed.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dsv32_image.errors import LockEditedError, LockMissingError, LockStaleError
from dsv32_image.files import write_atomic

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from dsv32_image.config import Config

SCHEMA = 1
LOCK_NAME = "versions.lock"
_HEADER = "# Written by `nox -s lock`, never by hand: every byte that goes into the image, by sha256.\n"
_CONTENT_LINE = re.compile(rb'^content = "([0-9a-f]{64})"\n', re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Deb:
    """One Debian package. `archive` is `debian` or `debian-security`, `path` is below it."""

    name: str
    version: str
    arch: str
    archive: str
    path: str
    size: int
    sha256: str

    @property
    def file(self) -> str:
        """The file's own name."""
        return self.path.rsplit("/", 1)[-1]


@dataclass(frozen=True, kw_only=True)
class Dist:
    """One Python distribution: the one file chosen for it (wheel, or sdist if there is no wheel)."""

    name: str
    version: str
    file: str
    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class GitDist(Dist):
    """A distribution that is compiled from the source archive we make of one git commit.

    Attributes:
        repo: The repository's URL.
        commit: 40 hex digits.
        tree: Hash of the commit's tree.
        source_version: What the source calls itself; `version` has the commit as well.
        ref: The tag or branch that was asked for when locking, empty for a commit. Nothing is looked up by
            it but whether a tag moved, when it is locked again.
    """

    repo: str
    commit: str
    tree: str
    source_version: str
    ref: str = ""


@dataclass(frozen=True, kw_only=True)
class LayerLock:
    """One section: what one layer is made of."""

    name: str
    debs: tuple[Deb, ...] = ()
    wheels: tuple[Dist, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Lock:
    """The whole lock. `digest` is the sha256 of the file's bytes."""

    epoch: int
    inputs: str
    patches: Mapping[str, str]
    tools: tuple[Dist, ...]
    tool_debs: tuple[Deb, ...] = ()
    compile_tools: tuple[Dist, ...] = ()
    compile_debs: Mapping[str, tuple[Deb, ...]] = field(default_factory=dict)
    variants: Mapping[str, tuple[LayerLock, ...]]
    digest: str = field(default="", compare=False)

    def variant(self, name: str) -> tuple[LayerLock, ...]:
        """The layers of a variant.

        Raises:
            LockMissingError: The lock has no section for it.
        """
        if name not in self.variants:
            raise LockMissingError(
                f"{LOCK_NAME} has no section for variant '{name}'", hint="run `nox -s lock`"
            )
        return self.variants[name]

    @property
    def git(self) -> dict[str, GitDist]:
        """The distributions that are compiled from a git commit, by name."""
        layers = (layer for name in sorted(self.variants) for layer in self.variants[name])
        return {dist.name: dist for layer in layers for dist in layer.wheels if isinstance(dist, GitDist)}

    def compile_files(self, variant: str) -> tuple[Deb | Dist, ...]:
        """What a wheel is compiled with, besides the layers below it."""
        return (*self.compile_tools, *self.compile_debs.get(variant, ()))

    def files(self, variant: str | None = None) -> Iterator[Deb | Dist]:
        """Each file to fetch, once, of one variant or of all."""
        seen: set[str] = set()
        names = [variant] if variant else sorted(self.variants)
        tools: list[Deb | Dist] = [*self.tools, *self.tool_debs, *self.compile_tools]
        for item in tools:
            seen.add(item.sha256)
            yield item
        for name in names:
            # The compiler itself is large, and only a source of git makes use of it.
            if any(isinstance(dist, GitDist) for layer in self.variant(name) for dist in layer.wheels):
                yield from self.compile_debs.get(name, ())
            for layer in self.variant(name):
                files: list[Deb | Dist] = [*layer.debs, *layer.wheels]
                for file in files:
                    if file.sha256 not in seen:
                        seen.add(file.sha256)
                        yield file


def render(lock: Lock) -> str:
    """The text of a lock; the same lock gives the same bytes."""
    lines = [f"schema = {SCHEMA}", f"epoch = {lock.epoch}", f'inputs = "{lock.inputs}"', ""]
    lines += ["[patches]", *(f'{name} = "{sha}"' for name, sha in sorted(lock.patches.items())), ""]
    if lock.git:
        lines += ["[git]", *map(_git_line, sorted(lock.git.values(), key=lambda d: d.name)), ""]
    lines += ["[tools.wheels]", *map(_dist_line, sorted(lock.tools, key=lambda d: d.name)), ""]
    lines += ["[tools.debs]", *map(_deb_line, sorted(lock.tool_debs, key=lambda d: d.name)), ""]
    lines += ["[tools.compile]", *map(_dist_line, sorted(lock.compile_tools, key=lambda d: d.name)), ""]
    for variant, debs in sorted(lock.compile_debs.items()):
        lines += [f"[tools.compile-debs.{variant}]"]
        lines += [*map(_deb_line, sorted(debs, key=lambda d: d.name)), ""]
    for variant, layers in sorted(lock.variants.items()):
        for position, layer in enumerate(layers):
            lines += [f"[variants.{variant}.{layer.name}]", f"position = {position}", ""]
            if layer.debs:
                lines += [f"[variants.{variant}.{layer.name}.debs]"]
                lines += [*map(_deb_line, sorted(layer.debs, key=lambda d: d.name)), ""]
            if layer.wheels:
                lines += [f"[variants.{variant}.{layer.name}.wheels]"]
                lines += [*map(_dist_line, sorted(layer.wheels, key=lambda d: d.name)), ""]
    body = "\n".join(lines)
    text = _HEADER + body
    return _HEADER + f'content = "{_sha256(text.encode())}"\n' + body


def write_lock(root: Path, lock: Lock) -> None:
    """Write versions.lock below `root` in one step."""
    write_atomic(root / LOCK_NAME, render(lock).encode())


def read_lock(root: Path) -> Lock:
    """Read versions.lock below `root`.

    Raises:
        LockMissingError: There is no lock.
        LockEditedError: It is not what `nox -s lock` wrote.
    """
    path = root / LOCK_NAME
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        hint = f"`git checkout {LOCK_NAME}`; `nox -s lock` makes a new one and lets versions move"
        raise LockMissingError(f"no {LOCK_NAME} in {root}", hint=hint) from None
    found = _CONTENT_LINE.search(raw)
    rest = _CONTENT_LINE.sub(b"", raw, count=1)
    if not found or found.group(1).decode() != _sha256(rest):
        raise LockEditedError(
            f"{LOCK_NAME} was edited by hand or cut short: its content does not have the digest it states",
            hint=f"`git checkout {LOCK_NAME}`, or change pyproject.toml and run `nox -s lock`",
        )
    try:
        return _parse(tomllib.loads(raw.decode()), _sha256(raw))
    except (KeyError, TypeError, ValueError) as error:
        raise LockEditedError(
            f"{LOCK_NAME} has another layout than this version of the project writes ({error})",
            hint="run `nox -s lock`",
        ) from None


def stale_rows(lock: Lock, config: Config, patches: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """What differs between the lock and what it was made from: rows (what, locked, now); offline."""
    rows = []
    if lock.inputs != config.inputs:
        rows.append(("[tool.dsv32-image] in pyproject.toml", lock.inputs[:12], config.inputs[:12]))
    for name in sorted(lock.patches.keys() | patches.keys()):
        old, new = lock.patches.get(name, "none"), patches.get(name, "none")
        if old != new:
            rows.append((f"patches/{name}", old[:12], new[:12]))
    return rows


def require_fresh(lock: Lock, config: Config, patches: Mapping[str, str]) -> None:
    """Refuse a lock that is older than pyproject.toml or the patches.

    Raises:
        LockStaleError: With the first thing that differs.
    """
    rows = stale_rows(lock, config, patches)
    if rows:
        what, locked, now = rows[0]
        more = f" (and {len(rows) - 1} more)" if len(rows) > 1 else ""
        raise LockStaleError(
            f"{LOCK_NAME} is older than its inputs: {what} is {now}, locked {locked}{more}",
            hint="run `nox -s lock`",
        )


def _parse(document: dict[str, Any], digest: str) -> Lock:
    if document["schema"] != SCHEMA:
        raise ValueError(f"schema {document['schema']}, expected {SCHEMA}")
    variants = {}
    git = document.get("git", {})
    for name, layers in document.get("variants", {}).items():
        ordered = sorted(layers.items(), key=lambda item: item[1]["position"])
        variants[name] = tuple(
            LayerLock(
                name=layer,
                debs=_debs(section.get("debs", {})),
                wheels=_dists(section.get("wheels", {}), git),
            )
            for layer, section in ordered
        )
    return Lock(
        epoch=document["epoch"],
        inputs=document["inputs"],
        patches=document.get("patches", {}),
        tools=_dists(document.get("tools", {}).get("wheels", {})),
        tool_debs=_debs(document.get("tools", {}).get("debs", {})),
        compile_tools=_dists(document.get("tools", {}).get("compile", {})),
        compile_debs={
            name: _debs(table) for name, table in document.get("tools", {}).get("compile-debs", {}).items()
        },
        variants=variants,
        digest=digest,
    )


def _dists(table: dict[str, Any], git: Mapping[str, Any] | None = None) -> tuple[Dist, ...]:
    return tuple(_dist(name, body, (git or {}).get(name)) for name, body in sorted(table.items()))


def _dist(name: str, body: dict[str, Any], git: dict[str, Any] | None) -> Dist:
    if git is None:
        return Dist(name=name, **body)
    about = {"source_version" if key == "version" else key: value for key, value in git.items()}
    return GitDist(name=name, **body, **about)


def _debs(table: dict[str, Any]) -> tuple[Deb, ...]:
    return tuple(Deb(name=name, **body) for name, body in sorted(table.items()))


def _deb_line(deb: Deb) -> str:
    return _line(deb.name, deb, ("version", "arch", "archive", "path", "size", "sha256"))


def _dist_line(dist: Dist) -> str:
    return _line(dist.name, dist, ("version", "file", "size", "sha256"))


def _git_line(dist: GitDist) -> str:
    pairs = [
        ("repo", dist.repo),
        ("commit", dist.commit),
        ("tree", dist.tree),
        ("version", dist.source_version),
    ]
    pairs += [("ref", dist.ref)] if dist.ref else []
    return (
        f"{json.dumps(dist.name)} = {{ {', '.join(f'{key} = {json.dumps(value)}' for key, value in pairs)} }}"
    )


def _line(name: str, item: object, keys: tuple[str, ...]) -> str:
    # JSON's strings are TOML's basic strings for the ASCII that package names and paths consist of.
    body = ", ".join(f"{key} = {json.dumps(getattr(item, key))}" for key in keys)
    return f"{json.dumps(name)} = {{ {body} }}"


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
