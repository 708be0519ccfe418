"""`nox -s patch -- prove`: which tests a header names, how a patch is taken out, and what is concluded."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from patch_samples import EDIT, HEADER, make_wheel, write_series

from dsv32_image import prove
from dsv32_image.archives import read_archive
from dsv32_image.errors import EngineError, PatchError, UsageError
from dsv32_image.patching import FileState, read_series

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[2]
TOP = b"--- a/pkg/mod.py\n+++ b/pkg/mod.py\n@@ -1,2 +1,3 @@\n line 1\n+line 1.5\n line 2\n"
LATER = EDIT.replace(b"-4,3 +4,3", b"-5,3 +5,3")
ON_TOP = b"--- a/pkg/mod.py\n+++ b/pkg/mod.py\n@@ -2,1 +2,1 @@\n-line 1.5\n+line one and a half\n"
NEW = (
    b"diff --git a/pkg/new.py b/pkg/new.py\nnew file mode 100644\n--- /dev/null\n+++ b/pkg/new.py\n"
    b"@@ -0,0 +1,1 @@\n+there = 1\n"
)
METADATA = (
    b"--- a/pkg-1.0.dist-info/METADATA\n+++ b/pkg-1.0.dist-info/METADATA\n"
    b"@@ -3,1 +3,2 @@\n Version: 1.0\n+Requires-Dist: polite\n"
)
TESTS = """
import time
from pathlib import Path
import pkg, pytest

TEXT = (Path(pkg.__file__).parent / "mod.py").read_text()

def test_top():
    assert "line 1.5" in TEXT

@pytest.mark.parametrize("word", ["five", "six"])
def test_later(word):
    assert word == "six" or word in TEXT

def test_new():
    from pkg.new import there
    assert there == 1

def test_always():
    assert TEXT

def test_never():
    assert not TEXT

def test_gpu():
    pytest.skip("no GPU here")

def test_requires():
    from importlib.metadata import distribution
    assert distribution("pkg").requires == ["polite"]

def test_waits():
    if "line 1.5" not in TEXT:
        time.sleep(600)
"""


def header(*tests: str) -> str:
    return HEADER.replace("tests/unit/test_patching.py", ", ".join(tests))


@pytest.fixture
def checkout(tmp_path):
    """A checkout with a patched package `pkg` and a smoke suite whose conftest is ours."""
    smoke = tmp_path / "smoke"
    smoke.mkdir()
    shutil.copy(ROOT / "smoke/conftest.py", smoke)
    # The report says where it was made; here there is no torch to ask.
    (smoke / "torch.py").write_text(
        "__version__ = '0'\nclass cuda:\n    @staticmethod\n    def is_available(): return False\n"
    )
    (smoke / "test_pkg.py").write_text(TESTS)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "src/dsv32").mkdir(parents=True)
    make_wheel(tmp_path / "pkg.whl")
    return tmp_path


def add(checkout: Path, name: str, diff: bytes, *tests: str) -> None:
    series = checkout / "patches/pkg"
    before = (series / "series").read_text() if series.exists() else ""
    write_series(series, {name: diff}, header(*tests))
    (series / "series").write_text(f"{before}{name}\n")


def run(
    checkout: Path, limit: float = 60.0, packages: Sequence[str] = (), absent: Sequence[str] = ()
) -> dict[str, prove.Proof]:
    rows = prove.prove(
        checkout,
        packages,
        lambda _: checkout / "pkg.whl",
        prove.run_in_python(sys.executable),
        jobs=2,
        limit=limit,
        absent=absent,
    )
    return {row.patch: row for row in rows}


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("smoke/test_pkg.py::test_top", ["test_top"]),
        ("smoke/test_pkg.py::test_top, ::test_later", ["test_top", "test_later"]),
        ("smoke/test_pkg.py::test_later[five] (orders 20, 28); else", ["test_later[five]"]),
    ],
)
def test_a_header_names_tests(checkout, text, nodes):
    add(checkout, "0001-a.patch", TOP, text)
    (patch,) = read_series(checkout / "patches/pkg")
    assert prove.tests_of(patch, checkout) == tuple(f"smoke/test_pkg.py::{node}" for node in nodes)


@pytest.mark.parametrize(
    ("text", "message"),
    [("see the docs", "names no test"), ("smoke/test_pkg.py::test_typo", "which does not exist")],
)
def test_a_header_without_a_test_that_exists_is_an_error(checkout, text, message):
    add(checkout, "0001-a.patch", TOP, text)
    with pytest.raises(PatchError, match=message):
        run(checkout)


def test_without_one_patch_the_others_stay_at_other_lines_and_what_needs_it_goes(checkout):
    for number, diff in enumerate((TOP, LATER, ON_TOP)):
        add(checkout, f"{number}.patch", diff, "smoke/test_pkg.py::test_top")
    files = read_archive(checkout / "pkg.whl")
    patches = read_series(checkout / "patches/pkg")
    tree, also = prove.without(files, patches, 0)
    assert also == ("2.patch",)
    lines = tree["pkg/mod.py"].data.splitlines()
    assert lines[:2] == [b"line 1", b"line 2"]
    assert b"line five" in lines
    tree, also = prove.without(files, patches, 1)
    assert also == ()
    assert b"line one and a half" in tree["pkg/mod.py"].data
    assert b"line 5" in tree["pkg/mod.py"].data


def test_a_variant_is_links_but_for_what_differs(tmp_path):
    def states(**files: bytes) -> dict[str, FileState]:
        return {name.replace("__", "/") + ".py": FileState(data) for name, data in files.items()}

    whole = states(top=b"1", a__same=b"1", a__other=b"1", b__c__deep=b"1", b__d__same=b"1", b__gone=b"1")
    other = states(top=b"1", a__same=b"1", a__other=b"1", b__c__deep=b"2", b__d__same=b"1", b__more=b"3")
    prove.write_whole(whole, tmp_path / "whole")
    prove.write_variant(other, whole, tmp_path / "whole", tmp_path / "variant")
    found = {
        path.relative_to(tmp_path / "variant").as_posix(): path.read_bytes()
        for name in ("*.py", "*/*.py", "*/*/*.py")
        for path in (tmp_path / "variant").glob(name)
    }
    assert found == {name: state.data for name, state in other.items()}
    assert (tmp_path / "variant/a").is_symlink()
    assert (tmp_path / "variant/b/d").is_symlink()
    assert not (tmp_path / "variant/b/c/deep.py").is_symlink()
    # Python takes bytecode by time and size of the source: equal ones would run the other's code.
    one, two = (tmp_path / tree / "b/c/deep.py" for tree in ("whole", "variant"))
    assert one.stat().st_mtime != two.stat().st_mtime


def test_patches_are_taken_out_in_turn(checkout):
    add(checkout, "top.patch", TOP, "smoke/test_pkg.py::test_top")
    add(checkout, "later.patch", LATER, "smoke/test_pkg.py::test_later, ::test_gpu")
    add(checkout, "new.patch", NEW, "smoke/test_pkg.py::test_new")
    rows = run(checkout)
    assert {patch: row.answer for patch, row in rows.items()} == {
        "top.patch": "yes",
        "later.patch": "yes",
        "new.patch": "yes",
    }
    assert "line 1.5" in rows["top.patch"].remark
    assert "test_gpu does not run here: no GPU here" in rows["later.patch"].remark
    assert "No module named 'pkg.new'" in rows["new.patch"].remark
    assert not list((checkout / "build").iterdir())


def test_a_test_that_passes_without_its_patch_or_fails_with_it_proves_nothing(checkout):
    add(checkout, "top.patch", TOP, "smoke/test_pkg.py::test_top, ::test_always")
    add(checkout, "later.patch", LATER, "smoke/test_pkg.py::test_never")
    add(checkout, "new.patch", NEW, "smoke/test_pkg.py::test_gpu")
    rows = run(checkout)
    assert [row.answer for row in rows.values()] == ["no", "no", "not here"]
    assert "test_always passed" in rows["top.patch"].remark
    assert "test_never fails with all patches in" in rows["later.patch"].remark


def test_a_patch_to_metadata_is_seen_by_what_reads_the_installed_distributions(checkout):
    add(checkout, "metadata.patch", METADATA, "smoke/test_pkg.py::test_requires")
    row = run(checkout)["metadata.patch"]
    assert (row.answer, "None" in row.remark) == ("yes", True)


@pytest.mark.parametrize("packages", [[], ["pkg"]])
def test_what_is_not_in_the_image_cannot_be_tried_there(checkout, packages):
    add(checkout, "top.patch", TOP, "smoke/test_pkg.py::test_top")
    row = run(checkout, packages=packages, absent=["pkg"])["top.patch"]
    assert (row.answer, row.remark) == ("not here", "the package is not in this image")


def test_a_test_that_hangs_without_its_patch_is_ended(checkout):
    add(checkout, "top.patch", TOP, "smoke/test_pkg.py::test_waits")
    row = run(checkout, limit=3.0)["top.patch"]
    assert row.answer == "yes"
    assert "still running after" in row.remark


def test_unknown_packages_and_a_python_that_cannot_run_are_errors(checkout):
    add(checkout, "top.patch", TOP, "smoke/test_pkg.py::test_top")
    with pytest.raises(UsageError, match="patches/other"):
        prove.prove(checkout, ["other"], lambda _: checkout / "pkg.whl", lambda _: 0, jobs=1)
    with pytest.raises(EngineError, match="ended with code 3 and gave no results"):
        prove.prove(checkout, [], lambda _: checkout / "pkg.whl", lambda _: 3, jobs=1)


def test_every_header_of_this_project_names_tests_that_exist():
    for series in sorted((ROOT / "patches").glob("*/series")):
        for patch in read_series(series.parent):
            assert prove.tests_of(patch, ROOT)
