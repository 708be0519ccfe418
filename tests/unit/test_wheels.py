"""Patched wheels: right content and labels, the same bytes every time, and clear errors for damaged input."""

from __future__ import annotations

import csv
import errno
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest
from patch_samples import EDIT, MODULE, SETUP, make_sdist, make_wheel, record_hash, wheel_files, write_series

from dsv32_image import archives, wheels
from dsv32_image.archives import read_archive
from dsv32_image.errors import DiskFullError, PatchError, WheelError
from dsv32_image.own_wheel import make_own_wheel
from dsv32_image.patching import series_sha256
from dsv32_image.wheels import MARKER, metadata_only, patch_wheel

EPOCH = 1_764_460_800
INFO = "pkg-1.0.dist-info"
NATIVE = b"""from setuptools import Distribution, setup
class Native(Distribution):
    def has_ext_modules(self): return True
setup(name="pkg", version="1.0", packages=["pkg"], distclass=Native)
"""


@pytest.fixture
def series(tmp_path):
    return write_series(tmp_path / "patches/pkg", {"0001-x.patch": EDIT})


@pytest.fixture
def wheel(tmp_path):
    return make_wheel(tmp_path / "pkg-1.0-py3-none-any.whl")


def contents(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist()}


def refused(source: Path, series: Path, out: Path, expected: str, error: type = WheelError) -> None:
    with pytest.raises(error, match=expected) as caught:
        patch_wheel(source, series, out, epoch=EPOCH)
    assert len(caught.value.message.splitlines()) <= 4
    assert not out.exists() or not list(out.iterdir())


# ---- what comes out


def test_version_dist_info_and_data_folder_carry_the_label(wheel, series, tmp_path):
    done = patch_wheel(wheel, series, tmp_path / "out", epoch=EPOCH)
    label = f"1.0+dsv32.{series_sha256(series)[:8]}"
    files = contents(done.path)
    assert (done.name, done.version) == ("pkg", label)
    assert done.path.name == f"pkg-{label}-py3-none-any.whl"
    assert done.size == done.path.stat().st_size
    assert files["pkg/mod.py"] == MODULE.replace(b"line 5\n", b"line five\n")
    metadata = files[f"pkg-{label}.dist-info/METADATA"]
    assert metadata.startswith(f"Metadata-Version: 2.1\nName: pkg\nVersion: {label}\n".encode())
    assert metadata.endswith(b"Version: of the text\n")
    assert f"pkg-{label}.data/scripts/run-pkg" in files
    assert not [name for name in files if name.startswith(("pkg-1.0.dist", "pkg-1.0.data"))]


def test_the_marker_says_what_was_applied(wheel, series, tmp_path):
    done = patch_wheel(wheel, series, tmp_path / "out", epoch=EPOCH)
    marker = json.loads(contents(done.path)[f"pkg-{done.version}.dist-info/{MARKER}"])
    assert marker["package"] == "pkg"
    assert marker["upstream_version"] == "1.0"
    assert marker["series_sha256"] == series_sha256(series)
    assert [patch["file"] for patch in marker["patches"]] == ["0001-x.patch"]


def test_record_is_sorted_and_true_for_every_file(wheel, series, tmp_path):
    done = patch_wheel(wheel, series, tmp_path / "out", epoch=EPOCH)
    files = contents(done.path)
    record = f"pkg-{done.version}.dist-info/RECORD"
    rows = list(csv.reader(files[record].decode().splitlines()))
    assert [row[0] for row in rows] == sorted(files)
    for name, digest, size in rows:
        if name == record:
            assert (digest, size) == ("", "")
        else:
            assert (digest, int(size)) == (f"sha256={record_hash(files[name])}", len(files[name]))


def test_the_archive_is_sorted_stored_and_dated_with_fixed_modes(wheel, series, tmp_path):
    done = patch_wheel(wheel, series, tmp_path / "out", epoch=EPOCH)
    with zipfile.ZipFile(done.path) as archive:
        infos = archive.infolist()
    assert [info.filename for info in infos] == sorted(info.filename for info in infos)
    for info in infos:
        assert info.compress_type == zipfile.ZIP_STORED
        assert info.date_time == (2025, 11, 30, 0, 0, 0)
        assert info.create_system == 3
        executable = "scripts/" in info.filename
        assert info.external_attr >> 16 == (0o100755 if executable else 0o100644)


def test_an_empty_series_gives_a_marked_wheel(wheel, tmp_path):
    folder = write_series(tmp_path / "patches/pkg", {})
    done = patch_wheel(wheel, folder, tmp_path / "out", epoch=EPOCH)
    assert json.loads(contents(done.path)[f"pkg-{done.version}.dist-info/{MARKER}"])["patches"] == []


def test_a_local_version_of_upstream_is_kept(series, tmp_path):
    wheel = make_wheel(tmp_path / "w", wheel_files("1.0+cu130"))
    done = patch_wheel(wheel, series, tmp_path / "out", epoch=EPOCH)
    assert done.version.startswith("1.0+cu130.dsv32.")


def test_several_tags_are_compressed_as_in_the_upstream_file_name(series, tmp_path):
    files = wheel_files()
    files[f"{INFO}/WHEEL"] = b"Wheel-Version: 1.0\nTag: cp313-cp313-a_1\nTag: cp313-cp313-a_2\nBuild: 7\n"
    done = patch_wheel(make_wheel(tmp_path / "w", files), series, tmp_path / "out", epoch=EPOCH)
    assert done.path.name == f"pkg-{done.version}-7-cp313-cp313-a_1.a_2.whl"


def test_pip_accepts_the_wheel(wheel, series, tmp_path):
    done = patch_wheel(wheel, series, tmp_path / "out", epoch=EPOCH)
    target = tmp_path / "site"
    uv = [sys.executable, "-m", "uv", "pip", "install", "--no-index", "--no-deps", "--offline"]
    subprocess.run([*uv, "--target", target, done.path], check=True, capture_output=True)
    assert (target / "pkg/mod.py").read_bytes() == MODULE.replace(b"line 5\n", b"line five\n")
    assert (target / f"pkg-{done.version}.dist-info/{MARKER}").is_file()


# ---- the same bytes


def test_two_folders_and_file_names_give_the_same_bytes(wheel, series, tmp_path):
    first = patch_wheel(wheel, series, tmp_path / "a", epoch=EPOCH)
    other = shutil.copytree(series, tmp_path / "elsewhere/deeper/pkg")
    stored = shutil.copy(wheel, tmp_path / "sha256-of-something")
    os.utime(stored, (0, 0))
    second = patch_wheel(stored, other, tmp_path / "b/c", epoch=EPOCH)
    assert first.path.read_bytes() == second.path.read_bytes()
    assert first.path.name == second.path.name


def test_an_sdist_gives_the_same_bytes_for_another_folder_umask_and_time_zone(series, tmp_path, monkeypatch):
    source = make_sdist(tmp_path / "pkg-1.0.tar.gz")
    first = patch_wheel(source, series, tmp_path / "a", epoch=EPOCH)
    stored = Path(shutil.copy(source, tmp_path / "stored"))
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = os.umask(0o077)
    try:
        second = patch_wheel(stored, series, tmp_path / "b", epoch=EPOCH)
    finally:
        os.umask(before)
    assert first.path.read_bytes() == second.path.read_bytes()
    assert contents(first.path)["pkg/mod.py"] == MODULE.replace(b"line 5\n", b"line five\n")


def test_a_finished_wheel_is_found_again_and_a_damaged_one_made_again(wheel, series, tmp_path, monkeypatch):
    out = tmp_path / "out"
    first = patch_wheel(wheel, series, out, epoch=EPOCH)
    good = first.path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(wheels, "read_archive", lambda _: pytest.fail("the wheel was made again"))
        assert patch_wheel(wheel, series, out, epoch=EPOCH) == first
    first.path.write_bytes(good[:-5])
    assert patch_wheel(wheel, series, out, epoch=EPOCH) == first
    assert first.path.read_bytes() == good
    for record in out.glob("*.json"):
        record.write_text("{")
    assert patch_wheel(wheel, series, out, epoch=EPOCH) == first


def test_epoch_series_source_and_format_are_each_part_of_the_key(wheel, series, tmp_path, monkeypatch):
    out = tmp_path / "out"
    first = patch_wheel(wheel, series, out, epoch=EPOCH)
    assert patch_wheel(wheel, series, out, epoch=EPOCH + 2).sha256 != first.sha256
    (series / "0001-x.patch").write_bytes((series / "0001-x.patch").read_bytes().replace(b"five", b"FIVE"))
    assert patch_wheel(wheel, series, out, epoch=EPOCH).version != first.version
    monkeypatch.setattr(wheels, "FORMAT_VERSION", 99)
    before = len(list(out.glob("*.json")))
    patch_wheel(wheel, series, out, epoch=EPOCH)
    assert len(list(out.glob("*.json"))) == before + 1


def test_no_temporary_file_stays(wheel, series, tmp_path):
    patch_wheel(wheel, series, tmp_path / "out", epoch=EPOCH)
    assert sorted(path.suffix for path in (tmp_path / "out").iterdir()) == [".json", ".whl"]


# ---- bad input


def test_a_patch_that_does_not_apply_leaves_nothing(wheel, tmp_path):
    folder = write_series(tmp_path / "patches/pkg", {"0001-x.patch": EDIT.replace(b"line 6", b"line six")})
    refused(wheel, folder, tmp_path / "out", "hunk 1", PatchError)


def test_a_cut_overwritten_or_foreign_file_is_called_damaged(wheel, series, tmp_path):
    data = wheel.read_bytes()
    at = data.index(b"pkg/mod.py") + 20
    with tarfile.open(tmp_path / "empty.tar.gz", "w:gz"):
        pass
    tar = make_sdist(tmp_path / "t.tar.gz").read_bytes()
    for bad in (data[:-40], data[:100], b"", b"hello", data[:at] + b"\xff" * 20 + data[at + 20 :], tar[:-50]):
        path = tmp_path / "bad"
        path.write_bytes(bad)
        refused(path, series, tmp_path / "out", "damaged")
    refused(tmp_path / "empty.tar.gz", series, tmp_path / "out", "exactly one top folder")
    refused(tmp_path / "gone.whl", series, tmp_path / "out", "cannot be read")


@pytest.mark.parametrize("name", ["METADATA", "WHEEL", "RECORD"])
def test_a_wheel_without_its_metadata_is_refused(series, tmp_path, name):
    files = {key: data for key, data in wheel_files().items() if not key.endswith(name)}
    wheel = make_wheel(tmp_path / "w", files, record=name != "RECORD")
    refused(wheel, series, tmp_path / "out", f"{name} is missing")


def test_a_wheel_with_two_or_no_dist_info_folders_is_refused(series, tmp_path):
    two = make_wheel(tmp_path / "two", {**wheel_files(), "x-1.dist-info/METADATA": b""})
    refused(two, series, tmp_path / "out", "has 2")
    none = make_wheel(tmp_path / "none", {"pkg/mod.py": MODULE}, record=False)
    refused(none, series, tmp_path / "out", "has 0")


@pytest.mark.parametrize(
    "bad", [b"", b"Name: pkg\nVersion: not a version\n", b"Name: pkg\nName: x\nVersion: 1\n"]
)
def test_metadata_without_one_name_and_version_is_refused(series, tmp_path, bad):
    wheel = make_wheel(tmp_path / "w", {**wheel_files(), f"{INFO}/METADATA": bad})
    refused(wheel, series, tmp_path / "out", "no name, version and tag")


def test_a_series_for_another_package_is_refused(wheel, tmp_path):
    folder = write_series(tmp_path / "patches/other", {})
    refused(wheel, folder, tmp_path / "out", "another package")


@pytest.mark.parametrize(
    "name", ["../evil.py", "/etc/evil", "a/../../b", "C:/evil", "a\\b", "./x", "a//b", "a\nb"]
)
def test_names_that_leave_the_folder_are_refused(series, tmp_path, name):
    wheel = make_wheel(tmp_path / "w", {**wheel_files(), name: b"x"})
    refused(wheel, series, tmp_path / "out", "refused")
    sdist = make_sdist(tmp_path / "s", {"setup.py": SETUP, name: b"x"})
    refused(sdist, series, tmp_path / "out", "refused")


def test_links_doubles_and_files_below_files_are_refused(wheel, series, tmp_path):
    with zipfile.ZipFile(wheel, "a") as archive:
        link = zipfile.ZipInfo("pkg/link")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    refused(wheel, series, tmp_path / "out", "is a link")
    sdist = tmp_path / "s"
    with tarfile.open(sdist, "w:gz") as archive:
        for kind, target in ((tarfile.SYMTYPE, "/etc/passwd"), (tarfile.LNKTYPE, "pkg-1.0/setup.py")):
            member = tarfile.TarInfo("pkg-1.0/x")
            member.type, member.linkname = kind, target
            archive.addfile(member)
    refused(sdist, series, tmp_path / "out", "is a link")
    double = make_wheel(tmp_path / "d")
    with pytest.warns(UserWarning), zipfile.ZipFile(double, "a") as archive:
        archive.writestr("pkg/mod.py", b"other")
    refused(double, series, tmp_path / "out", "twice")
    below = make_wheel(tmp_path / "b", {**wheel_files(), "pkg/mod.py/x": b""})
    refused(below, series, tmp_path / "out", "below something that is a file")


def test_an_archive_that_unpacks_to_too_much_is_refused(wheel, series, tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MAX_UNPACKED", 100)
    refused(wheel, series, tmp_path / "out", "more than 100 bytes")
    refused(make_sdist(tmp_path / "s"), series, tmp_path / "out", "more than 100 bytes")


def test_a_full_disk_is_said_and_leaves_nothing(wheel, series, tmp_path, monkeypatch):
    def full(self, info, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "writestr", full)
    refused(wheel, series, tmp_path / "out", "no space left", DiskFullError)


def test_an_unwritable_target_is_an_error_without_traceback(wheel, series, tmp_path):
    (tmp_path / "out").write_text("a file")
    with pytest.raises(WheelError, match="cannot be written"):
        patch_wheel(wheel, series, tmp_path / "out", epoch=EPOCH)


@pytest.mark.parametrize(
    ("setup", "expected"),
    [
        (b"raise SystemExit('nvcc not found')", "nvcc not found"),
        (b"import socket\nsocket.create_connection(('192.0.2.1', 80))", "network"),
        (b"import urllib.request\nurllib.request.urlopen('http://127.0.0.1:9/')", "network"),
        (b"raise OSError(28, 'No space left on device')", "no space left"),
        (NATIVE, "not pure Python"),
        (SETUP.replace(b'name="pkg"', b'name="other"'), "another package"),
        (None, "no setup.py"),
    ],
)
def test_an_sdist_that_cannot_be_built_says_why(series, tmp_path, setup, expected):
    files = {"pkg/__init__.py": b"", "pkg/mod.py": MODULE, **({"setup.py": setup} if setup else {})}
    class_ = DiskFullError if "space" in expected else WheelError
    refused(make_sdist(tmp_path / "s", files), series, tmp_path / "out", expected, class_)


def test_an_sdist_is_read_without_its_top_folder(tmp_path):
    assert sorted(read_archive(make_sdist(tmp_path / "s"))) == ["pkg/__init__.py", "pkg/mod.py", "setup.py"]


@pytest.mark.parametrize("torchrun", [True, False])
def test_the_own_wheel_brings_a_torchrun_where_torch_has_none_that_starts(tmp_path, torchrun):
    made = make_own_wheel(Path(__file__).parents[2], tmp_path, epoch=EPOCH, torchrun=torchrun)
    with zipfile.ZipFile(made.path) as archive:
        commands = archive.read(f"dsv32-{made.version}.dist-info/entry_points.txt").decode()
        assert "dsv32/torchrun.py" in archive.namelist()
    assert "dsv32 = dsv32.cli:main\n" in commands
    assert ("torchrun = dsv32.torchrun:main\n" in commands) == torchrun


def test_a_wheel_of_metadata_alone_installs_no_module(tmp_path):
    source = tmp_path / "te-1.0-py3-none-any.whl"
    info = "te-1.0.dist-info"
    with zipfile.ZipFile(source, "w") as archive:
        archive.writestr("te/__init__.py", "x = 1")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: te\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "te/__init__.py,,\n")
    out = tmp_path / "out"
    out.mkdir()
    made = metadata_only(source, out, epoch=EPOCH)
    assert made.name == source.name
    with zipfile.ZipFile(made) as archive:
        assert archive.namelist() == [f"{info}/{name}" for name in ("METADATA", "RECORD", "WHEEL")]
        assert "te/__init__.py" not in archive.read(f"{info}/RECORD").decode()
