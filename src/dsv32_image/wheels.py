"""Patched wheels: an upstream wheel or sdist with our series applied, repacked so that its bytes never vary.

A wheel is patched as it is. An sdist is patched, must be pure Python by then, and is built by its own
setup.py with the setuptools of the running interpreter. Either way the result is called
`X+dsv32.<8 hex of the series>` and carries `<dist-info>/dsv32-patches.json`, by which the image later says
what was applied to it.

The archive is read into memory (patched packages are a few MB; `MAX_UNPACKED` guards it) and never unpacked
onto the disk, so no name in it can reach outside a folder.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import math
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
import zlib
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from dsv32_image.diffs import is_inside
from dsv32_image.errors import DiskFullError, WheelError
from dsv32_image.files import disk_full_is_clear, sha256_file, sha256_parts, temporary_file, write_atomic
from dsv32_image.patching import FileState, Patch, plan_series, read_series, series_sha256

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dsv32_image.lockfile import GitDist

FORMAT_VERSION = 1
"""Part of the cache key: raise it when the same input shall give other bytes."""

MARKER = "dsv32-patches.json"
MAX_UNPACKED = 300_000_000
"""Bytes an archive may hold unpacked; the largest package we patch has 11 MB."""

_ZIP_EPOCH = 315_532_800  # 1980-01-01, the first date that a zip file can name
# What zipfile and zlib raise on archives that are cut, overwritten, encrypted or in an unknown method.
_DAMAGE = (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, NotImplementedError, RuntimeError)
# Runs in a child, so that setuptools' global state, chdir and prints stay there. The audit hook is what
# "no network" means here: upstream setup.py files like to download wheels.
_BUILD = """
import sys
def refuse(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        raise RuntimeError("the build tried to use the network")
sys.addaudithook(refuse)
from setuptools.build_meta import __legacy__ as backend
backend.build_wheel(sys.argv[1])
"""


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
        "" if is_wheel else _setuptools_version(),
        *(["offsets"] if allow_offset else []),
    )
    record = out_dir / f"{canonicalize_name(series_dir.name)}-{key[:16]}.json"
    if found := _lookup(record, key):
        return found

    files = read_archive(source)
    changed = apply_to_files(files, patches, allow_offset=allow_offset)
    if not is_wheel:
        changed = build_sdist(changed, source)
    upstream = _Upstream.read(changed, source)
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


def read_archive(source: Path) -> dict[str, FileState]:
    """All regular files of a wheel or sdist by name; an sdist's top folder is taken off.

    Raises:
        WheelError: Neither format, damaged, too large, or it holds names or members that we refuse.
    """
    try:
        files = _read_zip(source) if zipfile.is_zipfile(source) else _read_tar(source)
    except FileNotFoundError as error:
        raise WheelError(f"{source}: not found", "nox -s fetch") from error
    except (*_DAMAGE, OSError) as error:
        raise WheelError(
            f"{source}: damaged, or neither a wheel nor an sdist: {error}", "nox -s fetch"
        ) from error
    for name in files:
        if any(str(parent) in files for parent in PurePosixPath(name).parents):
            raise WheelError(f"{source}: refused: {name} lies below something that is a file")
    return files


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


def write_files(files: Mapping[str, FileState], folder: Path) -> None:
    """Unpack into an empty folder. Names were checked when the archive was read, or the patch parsed."""
    for name, state in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(state.data)
        path.chmod(0o755 if state.executable else 0o644)


def _read_zip(source: Path) -> dict[str, FileState]:
    files: dict[str, FileState] = {}
    with zipfile.ZipFile(source) as archive:
        total = sum(info.file_size for info in archive.infolist())
        for info in archive.infolist():
            mode = info.external_attr >> 16
            if info.is_dir():
                continue
            kind = mode & 0o170000
            _check_member(source, info.filename, files, regular=kind in {0, 0o100000}, total=total)
            files[info.filename] = FileState(archive.read(info), bool(mode & 0o111))
    return files


def _read_tar(source: Path) -> dict[str, FileState]:
    files: dict[str, FileState] = {}
    total, tops = 0, set()
    with tarfile.open(source, "r:gz") as archive:
        for info in archive:
            top, _, name = info.name.removeprefix("./").partition("/")
            if info.isdir() or info.type == tarfile.XGLTYPE:
                continue
            tops.add(top)
            total += info.size
            _check_member(source, name, files, regular=info.isreg(), total=total)
            content = archive.extractfile(info)
            files[name] = FileState(content.read() if content else b"", bool(info.mode & 0o111))
    if len(tops) != 1 or not is_inside(*tops):
        raise WheelError(f"{source}: an sdist has exactly one top folder, this has {len(tops)}")
    return files


def _check_member(
    source: Path, name: str, files: Mapping[str, FileState], *, regular: bool, total: int
) -> None:
    if not is_inside(name):
        raise WheelError(f"{source}: refused: the name {name!r} could lead out of the folder")
    if not regular:
        raise WheelError(f"{source}: refused: {name} is a link or a special file")
    if name in files:
        raise WheelError(f"{source}: refused: {name} is in it twice")
    if total > MAX_UNPACKED:
        raise WheelError(f"{source}: unpacks to more than {MAX_UNPACKED} bytes")


@dataclass(frozen=True, kw_only=True)
class _Upstream:
    """What a wheel says about itself: name, version, dist-info folder and its tags, as in its file name."""

    name: str
    version: str
    dist_info: str
    tags: str

    @classmethod
    def read(cls, files: Mapping[str, FileState], source: Path) -> _Upstream:
        """From METADATA and WHEEL, not from the file name: the store's files have none."""
        folders = {name.split("/")[0] for name in files if re.match(r"[^/]+\.dist-info/", name)}
        if len(folders) != 1:
            raise WheelError(f"{source}: a wheel has exactly one .dist-info folder, this has {len(folders)}")
        dist_info = folders.pop()
        for required in ("METADATA", "WHEEL", "RECORD"):
            if f"{dist_info}/{required}" not in files:
                raise WheelError(f"{source}: damaged: {dist_info}/{required} is missing", "nox -s fetch")
        metadata = _headers(files[f"{dist_info}/METADATA"].data)
        wheel = _headers(files[f"{dist_info}/WHEEL"].data)
        try:
            (name,), (upstream,) = metadata["name"], metadata["version"]
            Version(upstream)
            parts = [list(dict.fromkeys(p)) for p in zip(*(t.split("-") for t in wheel["tag"]), strict=True)]
            python, abi, platform = (".".join(part) for part in parts)
            if math.prod(map(len, parts)) != len(set(wheel["tag"])):
                raise ValueError("the tags are not the product that a file name can say")
        except (KeyError, ValueError, InvalidVersion) as error:
            raise WheelError(f"{source}: damaged: {dist_info} gives no name, version and tag") from error
        build = "".join(f"{number}-" for number in wheel.get("build", []))
        return cls(name=name, version=upstream, dist_info=dist_info, tags=f"{build}{python}-{abi}-{platform}")

    def stem(self, local: str) -> str:
        """First part of the file name and of the .dist-info and .data folders, for a version."""
        return f"{self.dist_info.removesuffix('.dist-info').rpartition('-')[0]}-{local}"


def _headers(data: bytes) -> dict[str, list[str]]:
    fields: dict[str, list[str]] = {}
    head = data.replace(b"\r\n", b"\n").partition(b"\n\n")[0]
    for line in head.decode("utf-8", "replace").split("\n"):
        if match := re.match(r"([A-Za-z-]+):\s*(.*)", line):
            fields.setdefault(match[1].lower(), []).append(match[2].strip())
    return fields


def _relabel(
    files: Mapping[str, FileState],
    upstream: _Upstream,
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
    upstream = _Upstream.read(files, source)
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
    upstream = _Upstream.read(files, source)
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


def with_record(files: Mapping[str, FileState], dist_info: str) -> dict[str, FileState]:
    """The same files with the RECORD of them all in the folder `dist_info`."""
    record = io.StringIO(newline="")
    writer = csv.writer(record, lineterminator="\n")
    name_of_record = f"{dist_info}/RECORD"
    for name in sorted({*files, name_of_record}):
        if name == name_of_record:
            writer.writerow((name, "", ""))
        else:
            digest = base64.urlsafe_b64encode(hashlib.sha256(files[name].data).digest()).rstrip(b"=")
            writer.writerow((name, f"sha256={digest.decode()}", len(files[name].data)))
    return {**files, name_of_record: FileState(record.getvalue().encode())}


def pack_wheel(files: Mapping[str, FileState], path: Path, epoch: int) -> None:
    """Write the archive: sorted, dated, stored. Deflate would tie the bytes to one zlib and its version."""
    date = time.gmtime(max(epoch, _ZIP_EPOCH))[:6]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(files):
            info = zipfile.ZipInfo(name, date)
            info.create_system = 3
            info.create_version = info.extract_version = 20
            info.external_attr = (0o100755 if files[name].executable else 0o100644) << 16
            archive.writestr(info, files[name].data)


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


def _setuptools_version() -> str:
    """Part of the key for an sdist: another setuptools may word METADATA otherwise."""
    try:
        return version("setuptools")
    except PackageNotFoundError:
        raise WheelError(
            "setuptools is not installed beside this project, and a patched sdist is built with it",
            "sh scripts/nox  (sets up the environment from requirements/host.txt)",
        ) from None


def build_sdist(files: Mapping[str, FileState], source: Path) -> dict[str, FileState]:
    """Build a patched sdist by the hook of PEP 517 and read the wheel; its `Generator:` line becomes ours.

    Not by `pip wheel` (pip may not be there) nor with the `build` package (it is about isolated environments,
    which would need the network).
    """
    if "setup.py" not in files:
        raise WheelError(f"{source}: the sdist has no setup.py; only setuptools packages can be built here")
    with disk_full_is_clear(Path(tempfile.gettempdir())), tempfile.TemporaryDirectory() as temporary:
        tree, out, home = (Path(temporary) / name for name in ("tree", "out", "home"))
        for folder in (tree, out, home):
            folder.mkdir()
        write_files(files, tree)
        done = subprocess.run(
            [sys.executable, "-I", "-c", _BUILD, str(out)],
            cwd=tree,
            env={"PATH": os.environ.get("PATH", os.defpath), "HOME": str(home), "LC_ALL": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
        if done.returncode:
            lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["(no output)"]
            if any("No space left on device" in line for line in lines):
                raise DiskFullError(
                    f"no space left while building {source} in {temporary}", "free some space"
                )
            raise WheelError(f"{source}: its setup.py failed after the series: {lines[-1].strip()}")
        wheels = list(out.glob("*.whl"))
        if len(wheels) != 1:
            raise WheelError(f"{source}: setup.py made {len(wheels)} wheels instead of one")
        built = _read_zip(wheels[0])
    upstream = _Upstream.read(built, source)
    if not upstream.tags.endswith("py3-none-any"):
        raise WheelError(f"{source}: is not pure Python after the series: its wheel is {upstream.tags}")
    about = f"{upstream.dist_info}/WHEEL"
    generator = f"Generator: dsv32-image ({FORMAT_VERSION})".encode()
    built[about] = FileState(re.sub(rb"(?m)^Generator:[^\r\n]*", generator, built[about].data))
    return built
