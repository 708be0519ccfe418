"""Small wheels, sdists and series that the tests on patches share."""

from __future__ import annotations

import base64
import hashlib
import io
import tarfile
import zipfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

HEADER = """Say hello politely

Upstream: none yet
Why: the greeting is rude,
  and was so for years
Drop-when: upstream is polite
Test: tests/unit/test_patching.py
"""

MODULE = b"".join(b"line %d\n" % i for i in range(1, 21))

EDIT = b"""diff --git a/pkg/mod.py b/pkg/mod.py
--- a/pkg/mod.py
+++ b/pkg/mod.py
@@ -4,3 +4,3 @@
 line 4
-line 5
+line five
 line 6
"""


def write_series(folder: Path, patches: Mapping[str, bytes], header: str = HEADER) -> Path:
    """A series folder; the values are diffs, the header is put before each."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, diff in patches.items():
        (folder / name).write_bytes(header.encode() + b"\n" + diff)
    (folder / "series").write_text("".join(f"{name}\n" for name in patches))
    return folder


def wheel_files(version: str = "1.0") -> dict[str, bytes]:
    """The files of a wheel, without RECORD."""
    info = f"pkg-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: pkg\nVersion: {version}\n\nVersion: of the text\n"
    return {
        "pkg/__init__.py": b"",
        "pkg/mod.py": MODULE,
        "pkg/naïve,name.txt": b"data\r\n",
        f"pkg-{version}.data/scripts/run-pkg": b"#!/bin/sh\n",
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }


def make_wheel(path: Path, files: Mapping[str, bytes] | None = None, *, record: bool = True) -> Path:
    """A deflated wheel with a script that has the executable bit."""
    files = dict(files or wheel_files())
    if record:
        info = next(name for name in files if ".dist-info/" in name).split("/")[0]
        lines = [f"{name},sha256={record_hash(data)},{len(data)}" for name, data in files.items()]
        files[f"{info}/RECORD"] = ("\n".join([*lines, f"{info}/RECORD,,"]) + "\n").encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            info_ = zipfile.ZipInfo(name, (2024, 1, 2, 3, 4, 6))
            info_.external_attr = (0o100755 if "scripts/" in name else 0o100664) << 16
            archive.writestr(info_, data)
    return path


SETUP = b"""from setuptools import setup
setup(name="pkg", version="1.0", packages=["pkg"], python_requires=">=3.7")
"""


def make_sdist(path: Path, files: Mapping[str, bytes] | None = None, top: str = "pkg-1.0") -> Path:
    """An sdist whose setup.py builds a pure wheel."""
    files = files or {"setup.py": SETUP, "pkg/__init__.py": b"", "pkg/mod.py": MODULE}
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(f"{top}/{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def record_hash(data: bytes) -> str:
    """A hash as RECORD writes it."""
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
