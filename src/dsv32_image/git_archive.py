"""From a git commit to the locked source archive, and back: the same commit gives the same bytes anywhere.

Not by `git archive`: it reads .gitattributes and the user's settings, and its gzip is that of the host. The
archive is stored, not deflated, so that no compression library and none of its versions shows in the hash.

Of Megatron-LM's tree it holds `megatron/` and the files at the top, which is what its wheel is built from;
tests, examples and documentation are several times as much. The folder in it is named after the commit, so
no two commits share an archive, or what is kept by its hash.
"""

from __future__ import annotations

import hashlib
import io
import struct
import tarfile
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.requirements import Requirement

from dsv32_image.config import normalise
from dsv32_image.errors import ConfigError, HashMismatchError, UsageError
from dsv32_image.files import write_atomic
from dsv32_image.git_source import Repository
from dsv32_image.git_spec import COMMIT, GitSpec, parse_spec
from dsv32_image.lockfile import GitDist
from dsv32_image.source_metadata import SourceMetadata, read_metadata, require_fits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dsv32_image.config import Config
    from dsv32_image.lockfile import Dist, Lock
    from dsv32_image.patching import FileState
    from dsv32_image.store import Store

FOLDERS = {"megatron-core": ("megatron",)}
"""Which folders at the top of the tree a distribution is built from; all of them if it is not listed."""

_EPOCH = 315_532_800  # 1980-01-01, the first date that the wheel's zip can name
_BLOCK = 0xFFFF  # what a stored block of deflate holds (RFC 1951, 3.2.4)


@dataclass(frozen=True, kw_only=True)
class PinnedSource:
    """A commit's locked source, and what it says about itself."""

    dist: GitDist
    metadata: SourceMetadata


def pin_source(
    name: str, repo: str, commit: str, ref: str, env: Mapping[str, str], store: Store
) -> PinnedSource:
    """Make the source archive of a commit, leave it in the store, and read its metadata.

    Args:
        name: The distribution's name, e.g. `megatron-core`.
        repo: URL of the repository.
        commit: 40 hex digits.
        ref: The tag or branch that was asked for; empty for a commit.
        env: Variables that the source's version depends on.
        store: Where the archive goes; the clone is kept beside it.

    Raises:
        RefError, DownloadError, ToolMissingError: See `Repository.bring`.
        WheelError: The tree holds no source of that distribution, or its version cannot be read.
    """
    repository = Repository(repo, store.home)
    repository.bring(commit)
    files = repository.files(commit, FOLDERS.get(name, ()))
    metadata = read_metadata(name, files, f"{repo} at {commit[:12]}", env)
    version = f"{metadata.version}+git.{commit[:12]}"
    stem = f"{name.replace('-', '_')}-{version}"
    data = archive(files, stem)
    sha256 = hashlib.sha256(data).hexdigest()
    write_atomic(store.path(sha256), data)
    dist = GitDist(
        name=name,
        version=version,
        file=f"{stem}.tar.gz",
        size=len(data),
        sha256=sha256,
        repo=repo,
        commit=commit,
        tree=repository.tree(commit),
        source_version=metadata.version,
        ref=ref,
    )
    return PinnedSource(dist=dist, metadata=metadata)


def pinned_sources(
    config: Config, old: Lock | None, refs: Mapping[str, str], store: Store
) -> dict[str, PinnedSource]:
    """The source of each distribution that pyproject.toml pins by a commit, by name.

    Raises:
        ConfigError: One is pinned by something else than a commit, or two variants by two commits.
        ImageError: See `pin_source`.
    """
    specs: dict[str, GitSpec] = {}
    for line in (line for variant in config.variants for layer in variant.layers for line in layer.wheels):
        requirement = Requirement(line)
        if not requirement.url:
            continue
        name = normalise(requirement.name)
        try:
            spec = parse_spec(requirement.url)
        except UsageError as error:
            raise ConfigError(f"{name} in pyproject.toml: {error.message}", hint=error.hint) from None
        if not COMMIT.fullmatch(spec.ref):
            raise ConfigError(
                f"{name} in pyproject.toml is pinned by '{spec.ref}', which is no commit of 40 digits",
                hint=f"nox -s lock -- --megatron {requirement.url} looks it up",
            )
        if specs.setdefault(name, spec) != spec:
            raise ConfigError(
                f"two variants in pyproject.toml pin {name} by two commits", hint="take one of them"
            )
    found = {}
    for name, spec in specs.items():
        pin = old.git.get(name) if old else None
        known = pin.ref if pin and (pin.repo, pin.commit) == (spec.repo, spec.ref) else ""
        env = config.compile_env.get(name, {})
        found[name] = pin_source(name, spec.repo, spec.ref, refs.get(name) or known, env, store)
    return found


def require_buildable(
    config: Config, sources: Mapping[str, PinnedSource], compile_tools: Sequence[Dist]
) -> None:
    """Refuse sources that the image's Python or the build tools do not fit.

    Raises:
        ConfigError, ResolveError: See `require_fits`.
    """
    tools = {tool.name: tool for tool in compile_tools}
    for name, source in sources.items():
        where = f"{name} at {source.dist.commit[:12]}"
        require_fits(source.metadata, where, config.python, tools)


def remake(dist: GitDist, store: Store) -> None:
    """Make a locked source archive again from its repository and put it into the store.

    Raises:
        RefError, DownloadError, ToolMissingError: See `Repository.bring`.
        HashMismatchError: The commit has another tree than the lock says, or the archive other bytes.
    """
    repository = Repository(dist.repo, store.home)
    repository.bring(dist.commit)
    tree = repository.tree(dist.commit)
    if tree != dist.tree:
        raise HashMismatchError(
            f"commit {dist.commit} of {dist.repo} has tree {tree}, the lock says {dist.tree}",
            hint="`git checkout versions.lock`, or lock it again",
        )
    files = repository.files(dist.commit, FOLDERS.get(dist.name, ()))
    data = archive(files, dist.file.removesuffix(".tar.gz"))
    got = hashlib.sha256(data).hexdigest()
    if got != dist.sha256:
        raise HashMismatchError(
            f"{dist.file}: made again from its commit it has sha256 {got}, the lock says {dist.sha256}",
            hint="another version of this project may have made the lock: `git log versions.lock`",
        )
    write_atomic(store.path(dist.sha256), data)


def archive(files: Mapping[str, FileState], top: str) -> bytes:
    """A tar.gz of the files below the folder `top`: sorted, of owner 0, of one date, stored."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in sorted(files):
            info = tarfile.TarInfo(f"{top}/{name}")
            info.size, info.mtime = len(files[name].data), _EPOCH
            info.mode = 0o755 if files[name].executable else 0o644
            tar.addfile(info, io.BytesIO(files[name].data))
    return _stored_gzip(plain.getvalue())


def _stored_gzip(data: bytes) -> bytes:
    """RFC 1952 around stored blocks: no time, no name, system unknown."""
    out = [b"\x1f\x8b\x08\0\0\0\0\0\0\xff"]
    for at in range(0, max(len(data), 1), _BLOCK):
        block = data[at : at + _BLOCK]
        last = at + _BLOCK >= len(data)
        out += [struct.pack("<BHH", last, len(block), len(block) ^ 0xFFFF), block]
    out.append(struct.pack("<II", zlib.crc32(data), len(data) & 0xFFFFFFFF))
    return b"".join(out)
