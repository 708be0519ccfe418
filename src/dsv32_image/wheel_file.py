"""The wheel format: what a wheel says about itself, its RECORD, and an archive whose bytes never vary."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import math
import re
import time
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from dsv32_image.errors import WheelError
from dsv32_image.patching import FileState

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_ZIP_EPOCH = 315_532_800  # 1980-01-01, the first date that a zip file can name


@dataclass(frozen=True, kw_only=True)
class WheelInfo:
    """What a wheel says about itself: name, version, dist-info folder and its tags, as in its file name."""

    name: str
    version: str
    dist_info: str
    tags: str

    @classmethod
    def read(cls, files: Mapping[str, FileState], source: Path) -> WheelInfo:
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
