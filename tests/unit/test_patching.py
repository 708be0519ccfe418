"""The patch applier: what fits exactly is applied, everything else is an error that says where and why."""

from __future__ import annotations

import difflib
import errno
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from patch_samples import EDIT, HEADER, MODULE, write_series

from dsv32_image import patching
from dsv32_image.diffs import parse_diff, split_lines
from dsv32_image.errors import DiskFullError, PatchError
from dsv32_image.patching import (
    FileState,
    MisfitError,
    apply_file,
    apply_series,
    parse_patch,
    plan_series,
    read_series,
    series_sha256,
)

NO_NEWLINE = b"\\ No newline at end of file\n"


@pytest.fixture
def tree(tmp_path):
    folder = tmp_path / "tree"
    (folder / "pkg").mkdir(parents=True)
    (folder / "pkg/mod.py").write_bytes(MODULE)
    return folder


@pytest.fixture
def series(tmp_path):
    def make(*diffs: bytes, header: str = HEADER) -> Path:
        names = {f"{number:04}-x.patch": diff for number, diff in enumerate(diffs, 1)}
        return write_series(tmp_path / "patches/pkg", names, header)

    return make


def content(tree: Path) -> dict[str, bytes]:
    return {str(p.relative_to(tree)): p.read_bytes() for p in sorted(tree.rglob("*")) if p.is_file()}


def fails(tree: Path, folder: Path, **options: bool) -> PatchError:
    before = content(tree)
    with pytest.raises(PatchError) as caught:
        apply_series(tree, read_series(folder), **options)
    assert content(tree) == before
    assert len(caught.value.message.splitlines()) <= 4
    return caught.value


def diff_of(body: str, path: str = "pkg/mod.py") -> bytes:
    return f"--- a/{path}\n+++ b/{path}\n{body}".encode()


# ---- what applies


def test_a_patch_changes_its_lines_and_nothing_else(tree, series):
    applied = apply_series(tree, read_series(series(EDIT)))
    assert (tree / "pkg/mod.py").read_bytes() == MODULE.replace(b"line 5\n", b"line five\n")
    assert [(a.patch, a.path, a.hunks, a.offsets) for a in applied] == [
        ("0001-x.patch", "pkg/mod.py", 1, (0,))
    ]
    assert [p.name for p in tree.rglob("*")] == ["pkg", "mod.py"]


def test_each_patch_sees_the_files_as_the_ones_before_left_them(tree, series):
    second = diff_of("@@ -5,2 +5,3 @@\n line five\n+more\n line 6\n")
    apply_series(tree, read_series(series(EDIT, second)))
    assert b"line five\nmore\nline 6\n" in (tree / "pkg/mod.py").read_bytes()


def test_header_fields_are_read_with_their_continuation_lines(series):
    patch = read_series(series(EDIT))[0]
    assert patch.title == "Say hello politely"
    assert patch.fields["Why"] == "the greeting is rude, and was so for years"
    assert (patch.package, patch.header) == ("pkg", HEADER.rstrip())


def test_files_are_created_deleted_and_their_mode_changed(tree, series):
    diff = b"""diff --git a/new/tool.sh b/new/tool.sh
new file mode 100755
index 0000000..1111111
--- /dev/null
+++ b/new/tool.sh
@@ -0,0 +1,2 @@
+#!/bin/sh
+echo hi
\\ No newline at end of file
diff --git a/new/empty b/new/empty
new file mode 100644
index 0000000..e69de29
diff --git a/pkg/mod.py b/pkg/mod.py
old mode 100644
new mode 100755
"""
    apply_series(tree, read_series(series(diff)))
    assert (tree / "new/tool.sh").read_bytes() == b"#!/bin/sh\necho hi"
    assert (tree / "new/tool.sh").stat().st_mode & 0o777 == 0o755
    assert (tree / "new/empty").read_bytes() == b""
    assert (tree / "pkg/mod.py").stat().st_mode & 0o111
    gone = b"--- a/new/tool.sh\n+++ /dev/null\n@@ -1,2 +0,0 @@\n-#!/bin/sh\n-echo hi\n" + NO_NEWLINE
    apply_series(tree, read_series(series(gone)))
    assert not (tree / "new/tool.sh").exists()


def test_crlf_and_a_missing_last_newline_are_kept(tree, series):
    (tree / "pkg/dos.txt").write_bytes(b"a\r\nb\r\nc")
    diff = diff_of("@@ -1,3 +1,3 @@\n a\r\n-b\r\n+B\r\n c\n", "pkg/dos.txt") + NO_NEWLINE
    apply_series(tree, read_series(series(diff)))
    assert (tree / "pkg/dos.txt").read_bytes() == b"a\r\nB\r\nc"


def test_lf_context_does_not_fit_a_crlf_file(tree, series):
    (tree / "pkg/mod.py").write_bytes(MODULE.replace(b"\n", b"\r\n"))
    assert r"'line 4\r\n'" in fails(tree, series(EDIT)).message


def test_time_stamps_and_a_mail_signature_are_not_part_of_the_diff(tree, series):
    stamped = EDIT.replace(b"--- a/pkg/mod.py\n", b"--- a/pkg/mod.py\t2024-01-01\n") + b"-- \n2.39.5\n\n"
    assert len(apply_series(tree, read_series(series(stamped)))) == 1


def test_an_empty_series_is_a_package_without_patches(tree, tmp_path):
    folder = write_series(tmp_path / "patches/pkg", {})
    assert apply_series(tree, read_series(folder)) == []


# ---- what does not


def test_a_wrong_context_line_is_named_with_file_hunk_line_and_both_texts(tree, series):
    error = fails(tree, series(EDIT.replace(b" line 6", b" line six")))
    for part in ("0001-x.patch", "pkg/mod.py", "hunk 1", "line 6", "'line six\\n'", "'line 6\\n'", "nowhere"):
        assert part in error.message
    assert error.hint == "nox -s patch -- edit pkg"


def test_a_wrong_line_number_is_refused_and_the_right_one_told(tree, series):
    error = fails(tree, series(EDIT.replace(b"-4,3 +4,3", b"-7,3 +7,3")))
    assert "line 4 (offset -3)" in error.message


def test_a_hunk_beyond_the_end_of_the_file_is_refused(tree, series):
    error = fails(tree, series(EDIT.replace(b"-4,3 +4,3", b"-90,3 +90,3")))
    assert "end of file" in error.message


def test_a_patch_applied_twice_is_called_already_applied(tree, series):
    folder = series(EDIT)
    apply_series(tree, read_series(folder))
    error = fails(tree, folder)
    assert "already applied" in error.message
    assert "hunk 1" in error.message


def test_a_new_file_applied_twice_is_called_already_applied(tree, series):
    folder = series(b"--- /dev/null\n+++ b/new.py\n@@ -0,0 +1 @@\n+x\n")
    apply_series(tree, read_series(folder))
    assert "already applied" in fails(tree, folder).message


def test_nothing_is_written_when_a_later_patch_does_not_apply(tree, series):
    fails(tree, series(EDIT, EDIT.replace(b"line 6", b"line six")))


def test_a_missing_target_and_a_new_file_that_exists_are_refused(tree, series):
    assert "no file of that name" in fails(tree, series(EDIT.replace(b"mod.py", b"gone.py"))).message
    new = b"--- /dev/null\n+++ b/pkg/mod.py\n@@ -0,0 +1 @@\n+x\n"
    assert "expected: no such file" in fails(tree, series(new)).message


def test_a_deletion_must_name_the_whole_file(tree, series):
    gone = diff_of("@@ -1,2 +0,0 @@\n-line 1\n-line 2\n").replace(b"+++ b/pkg/mod.py", b"+++ /dev/null")
    assert "nothing else in it" in fails(tree, series(gone)).message


def test_a_hunk_without_context_is_refused_where_it_could_sit_anywhere(tree, series):
    assert "no context" in fails(tree, series(diff_of("@@ -4,0 +5 @@\n+x\n"))).message


def test_a_symbolic_link_is_not_followed(tree, series, tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/mod.py").write_bytes(MODULE)
    (tree / "link").symlink_to(tmp_path / "outside")
    assert "symbolic link" in fails(tree, series(EDIT.replace(b"pkg/mod.py", b"link/mod.py"))).message
    assert (tmp_path / "outside/mod.py").read_bytes() == MODULE


def test_a_full_disk_leaves_the_tree_as_it_was(tree, series, monkeypatch):
    new = b"--- /dev/null\n+++ b/deep/er/new.py\n@@ -0,0 +1 @@\n+x\n"
    folder, before = series(EDIT, new), content(tree)
    chmod = Path.chmod

    def full(self, mode):
        if self.name.endswith("new.py.dsv32-new"):
            raise OSError(errno.ENOSPC, "No space left on device")
        chmod(self, mode)

    monkeypatch.setattr(Path, "chmod", full)
    with pytest.raises(DiskFullError):
        apply_series(tree, read_series(folder))
    assert content(tree) == before
    assert not (tree / "deep").exists()


BAD = {
    "leaves the tree": EDIT.replace(b"a/pkg/mod.py", b"a/../mod.py").replace(b"b/pkg/mod.py", b"b/../mod.py"),
    "'/etc/passwd' leaves": EDIT.replace(b"/pkg/mod.py", b"//etc/passwd"),
    "does not start with a/": EDIT[EDIT.index(b"---") :].replace(b"--- a/", b"--- "),
    "not name the same file": EDIT.replace(b"+++ b/pkg", b"+++ b/other"),
    "without '+++": EDIT.replace(b"+++ b/pkg/mod.py\n", b""),
    "renames": b"diff --git a/x b/y\nrename from x\nrename to y\n",
    "binary": b"diff --git a/x b/x\nindex 1..2 100644\nBinary files a/x and b/x differ\n",
    "only regular files": b"diff --git a/x b/x\nnew file mode 120000\nindex 0..1\n",
    "cut short": EDIT[: EDIT.index(b" line 6")],
    "patch file is cut short": EDIT.rstrip(b"\n"),
    "malformed hunk": EDIT.replace(b"@@ -4,3 +4,3 @@", b"@@ -4,3 @@"),
    "more lines than": EDIT + b" line 7\n",
    "do not agree with its lines": EDIT.replace(b"-4,3 +4,3", b"-4,2 +4,4"),
    "line numbers of the hunk": EDIT.replace(b"-4,3 +4,3", b"-4,3 +5,3"),
    "out of order": EDIT + b"@@ -2 +2 @@\n-line 2\n+line two\n",
    "two sections": EDIT + EDIT,
    "holds no diff": b"",
    "no hunk follows": EDIT[: EDIT.index(b"@@")],
    "unknown '\\' line": EDIT + b"\\ Kein Zeilenumbruch\n",
    "not supported": EDIT + b"some words\n",
    "changes nothing": EDIT.replace(b"-line 5\n+line five\n", b" line 5\n"),
}


@pytest.mark.parametrize("expected", BAD)
def test_a_malformed_patch_is_refused_with_its_name(series, expected):
    with pytest.raises(PatchError) as caught:
        read_series(series(BAD[expected]))
    assert expected in caught.value.message
    assert "0001-x.patch" in caught.value.message


@pytest.mark.parametrize("field", ["Upstream", "Why", "Drop-when", "Test"])
def test_a_missing_or_empty_header_field_is_named(series, field):
    for header in (
        HEADER.replace(f"{field}:", "Else:"),
        HEADER.replace("rude,\n  and was so for years", "rude"),
    ):
        lines = [f"{field}:" if line.startswith(f"{field}:") else line for line in header.splitlines()]
        with pytest.raises(PatchError, match=f"lacks {field}"):
            read_series(series(EDIT, header="\n".join(lines) + "\n"))


def test_listed_but_missing_and_present_but_not_listed_patches_are_named(series):
    folder = series(EDIT)
    (folder / "0002-stray.patch").write_bytes(b"")
    with pytest.raises(PatchError, match=r"0002-stray\.patch: not listed"):
        read_series(folder)
    (folder / "0002-stray.patch").unlink()
    (folder / "0001-x.patch").unlink()
    with pytest.raises(PatchError, match=r"lists 0001-x\.patch, which is missing"):
        read_series(folder)


@pytest.mark.parametrize(
    "series_file", ["0001-x.patch\n0001-x.patch\n", "../0001-x.patch\n", "README\n", None]
)
def test_a_bad_series_file_is_refused(series, series_file):
    folder = series(EDIT)
    if series_file is None:
        (folder / "series").unlink()
    else:
        (folder / "series").write_text(series_file)
    with pytest.raises(PatchError, match="series"):
        read_series(folder)


def test_a_header_that_is_not_utf8_is_refused(series):
    folder = series(EDIT)
    (folder / "0001-x.patch").write_bytes(b"Why: \xff\n" + EDIT)
    with pytest.raises(PatchError, match="cannot be read"):
        read_series(folder)


# ---- offsets, for sources pinned by commit


def test_an_offset_is_allowed_only_when_asked_and_is_reported(tree, series):
    (tree / "pkg/mod.py").write_bytes(b"new top\n" * 3 + MODULE)
    folder = series(EDIT)
    fails(tree, folder)
    assert apply_series(tree, read_series(folder), allow_offset=True)[0].offsets == (3,)
    assert b"line 4\nline five\nline 6\n" in (tree / "pkg/mod.py").read_bytes()


def test_an_offset_needs_a_place_that_is_the_only_one(tree, series):
    (tree / "pkg/mod.py").write_bytes(b"new top\n" * 3 + MODULE + MODULE)
    assert "2 places: 7, 27" in fails(tree, series(EDIT), allow_offset=True).message


def test_a_moved_hunk_may_not_overlap_the_one_before(tree, series):
    (tree / "pkg/mod.py").write_bytes(b"".join(b"%d\n" % i for i in (5, 6, 1, 2, 3)))
    diff = diff_of("@@ -1,2 +1,2 @@\n 1\n-2\n+two\n@@ -5,2 +5,2 @@\n 5\n-6\n+six\n")
    assert "hunk 2" in fails(tree, series(diff), allow_offset=True).message


# ---- the digest


def test_the_digest_counts_order_names_and_bytes_but_no_comments(series):
    folder = series(EDIT, diff_of("@@ -1 +1 @@\n-line 1\n+one\n"))
    first = series_sha256(folder)
    (folder / "series").write_text("# why\n0001-x.patch\n\n0002-x.patch # last\n")
    assert series_sha256(folder) == first
    (folder / "series").write_text("0002-x.patch\n0001-x.patch\n")
    assert series_sha256(folder) != first
    (folder / "series").write_text("0001-x.patch\n0002-x.patch\n")
    (folder / "0002-x.patch").write_bytes((folder / "0002-x.patch").read_bytes() + b"-- \n")
    assert series_sha256(folder) != first


# ---- properties

LINES = st.lists(
    st.sampled_from([b"a\n", b"b\n", b"c\r\n", b"\n", b" x\n", b"-y\n", b"\xff\x0c\n", b"-- z\n"]),
    max_size=14,
)
FILES = st.tuples(LINES, st.sampled_from([b"", b"end", b"\rend"])).map(
    lambda parts: b"".join(parts[0]) + parts[1]
)


def make_diff(old: bytes, new: bytes, context: int) -> bytes:
    """An independent diff writer."""
    before, after = split_lines(old), split_lines(new)
    out: list[bytes] = []
    for line in difflib.diff_bytes(
        difflib.unified_diff, before, after, b"a/f", b"b/f", n=context, lineterm=b"\n"
    ):
        out.append(line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n")
    return b"".join(out)


@settings(max_examples=300, deadline=None)
@given(old=FILES.filter(bool), new=FILES.filter(bool), context=st.integers(1, 3))
def test_what_a_diff_says_is_what_applying_it_gives(old, new, context):
    if old != new:
        (file,) = parse_diff(make_diff(old, new, context), "x.patch")
        state, offsets = apply_file(FileState(old), file)
        assert state == FileState(new)
        assert not any(offsets)


@settings(max_examples=300, deadline=None)
@given(old=FILES.filter(bool), new=FILES.filter(bool), data=st.data())
def test_a_file_changed_under_a_hunk_is_never_patched(old, new, data):
    if old == new:
        return
    (file,) = parse_diff(make_diff(old, new, 1), "x.patch")
    hunk = data.draw(st.sampled_from([h for h in file.hunks if h.old]))
    lines = split_lines(old)
    at = hunk.old_start - 1 + data.draw(st.integers(0, len(hunk.old) - 1))
    kind = data.draw(st.sampled_from(["change", "remove"]))
    if kind == "change":
        lines[at] = b"mutated " + lines[at]
        with pytest.raises(MisfitError):
            apply_file(FileState(b"".join(lines)), file)
        # Elsewhere it may go, but only where its old lines stand.
        try:
            apply_file(FileState(b"".join(lines)), file, allow_offset=True)
        except MisfitError:
            return
        height = len(hunk.old)
        assert any(tuple(lines[i : i + height]) == tuple(hunk.old) for i in range(len(lines)))
    else:
        mutated = b"".join(lines[:at] + lines[at + 1 :])
        try:
            state, _ = apply_file(FileState(mutated), file)
        except MisfitError:
            return
        # Only possible where the lines that moved up are the same: then the result is explained by the text.
        assert split_lines(mutated)[hunk.old_start - 1 :][: len(hunk.old)] == list(hunk.old)
        assert state is not None


@settings(max_examples=200, deadline=None)
@given(
    data=st.binary(max_size=200)
    | st.sampled_from(sorted(BAD.values())).flatmap(
        lambda diff: st.tuples(st.just(diff), st.integers(0, len(diff)), st.binary(max_size=3)).map(
            lambda t: t[0][: t[1]] + t[2] + t[0][t[1] + 1 :]
        )
    )
)
def test_no_bytes_make_the_parser_fail_otherwise_than_with_a_patch_error(data):
    try:
        files = parse_diff(data, "x.patch")
    except PatchError:
        return
    assert files


def test_a_series_in_memory_touches_no_file(series):
    result = plan_series({"pkg/mod.py": FileState(MODULE)}.get, read_series(series(EDIT)))
    assert result.changes["pkg/mod.py"] == FileState(MODULE.replace(b"line 5\n", b"line five\n"))


def test_a_patch_without_title_is_called_after_its_file(series):
    header = HEADER.split("\n\n", 1)[1]
    assert parse_patch(series(EDIT, header=header) / "0001-x.patch").title == "0001-x"
    assert patching.REQUIRED_FIELDS == ("Upstream", "Why", "Drop-when", "Test")
