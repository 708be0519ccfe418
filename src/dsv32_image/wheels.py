"""Patched wheels: an upstream wheel or sdist with our series applied, repacked so that its bytes never vary.

A wheel is patched as it is. An sdist is patched, must be pure Python by then, and is built by its own
setup.py with the setuptools of the running interpreter. Either way the result is called
`X+dsv32.<8 hex of the series>` and carries `<dist-info>/dsv32-patches.json`, by which the image later says
what was applied to it.
"""

from __future__ import annotations

import json
import re
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.utils import canonicalize_name

from dsv32_image.archives import read_archive
from dsv32_image.errors import WheelError
from dsv32_image.files import disk_full_is_clear, sha256_file, sha256_parts, temporary_file, write_atomic
from dsv32_image.patching import FileState, Patch, plan_series, read_series, series_sha256
from dsv32_image.sdist_build import build_sdist, setuptools_version
from dsv32_image.wheel_file import WheelInfo, pack_wheel, with_record

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dsv32_image.lockfile import GitDist

FORMAT_VERSION = 1
"""Part of the cache key: raise it when the same input shall give other bytes."""

MARKER = "dsv32-patches.json"


@dataclass(frozen=True, kw_only=True)
class PatchedWheel:
    """A finished wheel.

    Attributes:
        name: Canonical distribution name, e.g. `megatron-core`.
        version: Upstream version with our local label, e.g. `0.19.2+dsv32.1a2b3c4d`.
        path: The wheel.
        sha256: Of the wheel.
        size: Of the wheel, in bytes.
    """

    name: str
    version: str
    path: Path
    sha256: str
    size: int


def patch_wheel(
    source: Path, series_dir: Path, out_dir: Path, *, epoch: int, allow_offset: bool = False
) -> PatchedWheel:
    """Apply a series to a wheel or sdist and write the result to `out_dir`, unless it is there already.

    Args:
        source: Wheel or sdist (.tar.gz); told apart by content, so a file of the store does.
        series_dir: `patches/<package>/`.
        out_dir: Folder for the wheel, and for a record by which a later call finds it.
        epoch: Seconds since 1970 that files in the wheel are dated with.
        allow_offset: See `plan_series`; for a wheel of a git commit.

    Raises:
        PatchError: A patch does not apply or the series is malformed.
        WheelError: The source is damaged, is for another package, or cannot be built.
        DiskFullError: No space left; nothing half-written stays.
    """
    patches = read_series(series_dir)
    series = series_sha256(series_dir)
    try:
        source_sha256 = sha256_file(source)
        is_wheel = zipfile.is_zipfile(source)
    except OSError as error:
        raise WheelError(f"{source}: cannot be read: {error}", "nox -s fetch") from error
    key = sha256_parts(
        *(source_sha256, series, str(epoch), str(FORMAT_VERSION)),
        "" if is_wheel else setuptools_version(),
        *(["offsets"] if allow_offset else []),
    )
    record = out_dir / f"{canonicalize_name(series_dir.name)}-{key[:16]}.json"
    if found := _lookup(record, key):
        return found

    files = read_archive(source)
    changed = apply_to_files(files, patches, allow_offset=allow_offset)
    if not is_wheel:
        changed = build_sdist(changed, source, FORMAT_VERSION)
    upstream = WheelInfo.read(changed, source)
    if canonicalize_name(upstream.name) != canonicalize_name(series_dir.name):
        raise WheelError(f"{series_dir}: this series is for another package than {source}, {upstream.name}")
    local = f"{upstream.version}{'.' if '+' in upstream.version else '+'}dsv32.{series[:8]}"
    marker = {
        "package": canonicalize_name(upstream.name),
        "upstream_version": upstream.version,
        "source_sha256": source_sha256,
        "series_sha256": series,
        "patches": [{"file": patch.name, "sha256": patch.sha256} for patch in patches],
    }
    relabelled = _relabel(changed, upstream, local, MARKER, marker)
    path = out_dir / f"{upstream.stem(local)}-{upstream.tags}.whl"
    try:
        with disk_full_is_clear(out_dir):
            out_dir.mkdir(parents=True, exist_ok=True)
            with temporary_file(path) as temporary:
                pack_wheel(relabelled, temporary, epoch)
                temporary.chmod(0o644)
                sha256, size = sha256_file(temporary), temporary.stat().st_size
                temporary.replace(path)
        name = canonicalize_name(upstream.name)
        entry = {"key": key, "name": name, "version": local, "file": path.name, "sha256": sha256}
        write_atomic(record, (json.dumps(entry, indent=1) + "\n").encode())
    except OSError as error:
        raise WheelError(f"{path}: cannot be written: {error}") from error
    return PatchedWheel(name=name, version=local, path=path, sha256=sha256, size=size)


def apply_to_files(
    files: Mapping[str, FileState], patches: tuple[Patch, ...], *, allow_offset: bool = False
) -> dict[str, FileState]:
    """The files after the series, all hunks exactly where they say unless an offset is allowed.

    Raises:
        PatchError: A patch does not apply.
    """
    merged: dict[str, FileState | None] = {
        **files,
        **plan_series(files.get, patches, allow_offset=allow_offset).changes,
    }
    return {path: state for path, state in merged.items() if state is not None}


def _relabel(
    files: Mapping[str, FileState],
    upstream: WheelInfo,
    local: str,
    marker_name: str,
    marker: Mapping[str, object],
) -> dict[str, FileState]:
    """New version, marker and RECORD; the .dist-info and .data folders are named after the version."""
    old, new = upstream.dist_info.removesuffix(".dist-info"), upstream.stem(local)
    renamed: dict[str, FileState] = {}
    for name, state in files.items():
        top, slash, rest = name.partition("/")
        if top in {f"{old}.dist-info", f"{old}.data"}:
            # Signatures of RECORD would be of the old one.
            if rest in {"RECORD", "RECORD.jws", "RECORD.p7s"} and top.endswith(".dist-info"):
                continue
            top = new + top[len(old) :]
        renamed[f"{top}{slash}{rest}"] = state
    folder = f"{new}.dist-info"
    metadata = renamed[f"{folder}/METADATA"].data
    renamed[f"{folder}/METADATA"] = FileState(
        re.sub(rb"(?mi)^version:[^\r\n]*", b"Version: " + local.encode(), metadata, count=1)
    )
    renamed[f"{folder}/{marker_name}"] = FileState((json.dumps(marker, indent=1) + "\n").encode())
    return with_record(renamed, folder)


def metadata_only(source: Path, out_dir: Path, *, epoch: int) -> Path:
    """Write a wheel anew that installs no more than its .dist-info: name, version and requirements.

    Raises:
        WheelError: It is damaged or no wheel.
    """
    files = read_archive(source)
    upstream = WheelInfo.read(files, source)
    top, record = f"{upstream.dist_info}/", f"{upstream.dist_info}/RECORD"
    kept = {name: state for name, state in files.items() if name.startswith(top) and name != record}
    path = out_dir / f"{upstream.stem(upstream.version)}-{upstream.tags}.whl"
    pack_wheel(with_record(kept, upstream.dist_info), path, epoch)
    return path


def repack(
    source: Path,
    out_dir: Path,
    name: str,
    marker: Mapping[str, object],
    *,
    epoch: int,
    git: GitDist | None = None,
) -> Path:
    """Write a wheel anew, sorted and dated, with a marker file in its .dist-info; tags stay.

    So does the version, but that of a commit of git is named after it.

    Raises:
        WheelError: It is damaged, no wheel, or of a commit: of another version than was locked, or without
            a compiled module (upstream's build goes on where the compiler failed).
    """
    files = read_archive(source)
    upstream = WheelInfo.read(files, source)
    version = git.version if git else upstream.version
    if git and upstream.version != git.source_version:
        raise WheelError(
            f"{git.file}: compiled it calls itself {upstream.version}, locked was {git.source_version}"
        )
    if git and not any(path.endswith(".so") for path in files):
        raise WheelError(
            f"{git.file}: the wheel holds no compiled module", "see the compiler's log in build/log"
        )
    path = out_dir / f"{upstream.stem(version)}-{upstream.tags}.whl"
    pack_wheel(_relabel(files, upstream, version, name, marker), path, epoch)
    return path


def _lookup(record: Path, key: str) -> PatchedWheel | None:
    """The wheel that an earlier call wrote for this key, if it is still whole."""
    try:
        entry = json.loads(record.read_text(encoding="utf-8"))
        path = record.parent / entry["file"]
        if entry["key"] != key or sha256_file(path) != entry["sha256"]:
            return None
        return PatchedWheel(
            name=entry["name"],
            version=entry["version"],
            path=path,
            sha256=entry["sha256"],
            size=path.stat().st_size,
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
