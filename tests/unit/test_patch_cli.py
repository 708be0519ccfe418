"""`nox -s patch`: edit, refresh and check; what is refreshed without a change stays as it is."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from patch_samples import EDIT, HEADER, MODULE, make_sdist, make_wheel, wheel_files, write_series
from typer.testing import CliRunner

from dsv32_image import patch_cli
from dsv32_image.errors import PatchError, UsageError
from dsv32_image.patch_cli import Workspace, check, edit, refresh
from dsv32_image.patch_repo import PatchRepo
from dsv32_image.patching import FileState, parse_patch, plan_series, read_series, split_header

if TYPE_CHECKING:
    from pathlib import Path

TOP = b"--- a/pkg/mod.py\n+++ b/pkg/mod.py\n@@ -1,2 +1,3 @@\n line 1\n+line 1.5\n line 2\n"
LATER = EDIT.replace(b"-4,3 +4,3", b"-5,3 +5,3")
"""EDIT as it looks after TOP."""


@pytest.fixture
def workspace(tmp_path):
    wheel = make_wheel(tmp_path / "pkg.whl")
    write_series(tmp_path / "patches/pkg", {"0001-top.patch": TOP, "0002-later.patch": LATER})
    return Workspace(patches=tmp_path / "patches", work=tmp_path / "work", find_source=lambda _: wheel)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def git(folder: Path, *args: str, stdin: str = "") -> str:
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    who = ["-c", "user.name=A User", "-c", "user.email=user@example.org"]
    done = subprocess.run(
        ["git", "-C", folder, *who, *args], input=stdin, env=env, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_edit_unpacks_the_source_with_one_commit_a_patch(workspace):
    done = edit(workspace, "pkg")
    assert done.patches == 2
    log = git(done.folder, "log", "--format=%s").splitlines()
    assert log == ["Say hello politely", "Say hello politely", "pkg: source as published"]
    body = git(done.folder, "log", "-1", "--format=%B")
    assert HEADER.rstrip() in body
    assert (done.folder / "pkg/mod.py").read_bytes().count(b"five") == 1
    assert git(done.folder, "status", "--porcelain") == ""
    assert [path.name for path in workspace.work.iterdir()] == ["pkg"]


UNTITLED = HEADER.partition("\n")[2].lstrip().encode()
"""As the project's own patches have it: the file's name is the title."""


@pytest.fixture
def untitled(workspace):
    series = workspace.patches / "pkg"
    for path, name in (("0001-top.patch", "0001-top-on-input-device.patch"), ("0002-later.patch", "")):
        data = UNTITLED + b"\n" + split_header((series / path).read_bytes())[1]
        (series / path).unlink()
        (series / (name or path)).write_bytes(data)
    (series / "series").write_text("0001-top-on-input-device.patch\n0002-later.patch\n")
    return workspace


def test_a_commit_of_a_patch_without_a_title_is_called_after_its_file(untitled):
    done = edit(untitled, "pkg")
    log = git(done.folder, "log", "--format=%s").splitlines()
    assert log == ["0002-later", "0001-top-on-input-device", "pkg: source as published"]


def test_that_title_does_not_come_into_the_patch_unless_it_is_changed(untitled):
    folder = edit(untitled, "pkg").folder
    refresh(untitled, "pkg")
    before = files_of(untitled.patches / "pkg")
    assert refresh(untitled, "pkg").written == ()
    assert all(
        split_header(data)[0].encode() == UNTITLED.rstrip() for n, data in before.items() if n != "series"
    )
    message = git(folder, "log", "-1", "--format=%B").replace("0002-later", "A line, later", 1)
    git(folder, "commit", "--amend", "--quiet", "--file=-", stdin=message)
    assert refresh(untitled, "pkg").written == ("0002-later.patch",)
    text = (untitled.patches / "pkg" / "0002-later.patch").read_bytes()
    assert text.startswith(b"A line, later\n\n" + UNTITLED.partition(b"\n")[0])
    assert git(folder, "log", "-1", "--format=%s") == "A line, later\n"


def test_half_of_a_split_patch_without_a_title_is_called_after_the_whole(untitled):
    folder = edit(untitled, "pkg").folder
    (folder / "pkg/mod.py").write_bytes((folder / "pkg/mod.py").read_bytes() + b"last\n")
    message = git(folder, "log", "-1", "--format=%B")
    git(folder, "commit", "--all", "--quiet", "--file=-", stdin=message)
    refresh(untitled, "pkg")
    names = ["0001-top-on-input-device.patch", "0002-later.patch", "0003-later.patch"]
    assert (untitled.patches / "pkg" / "series").read_text().split() == names


def test_refresh_without_a_change_gives_the_same_bytes(workspace):
    edit(workspace, "pkg")
    refresh(workspace, "pkg")
    first = files_of(workspace.patches / "pkg")
    assert refresh(workspace, "pkg").written == ()
    shutil.rmtree(workspace.work)
    edit(workspace, "pkg")
    done = refresh(workspace, "pkg")
    assert (done.written, done.removed, done.unfinished) == ((), (), ())
    assert files_of(workspace.patches / "pkg") == first
    assert all(row.result == "applies" for row in check(workspace, []))


def test_the_users_git_settings_do_not_show_in_a_patch(workspace, tmp_path, monkeypatch):
    edit(workspace, "pkg")
    refresh(workspace, "pkg")
    first = files_of(workspace.patches / "pkg")
    shutil.rmtree(workspace.work)
    (tmp_path / ".gitconfig").write_text(
        "[diff]\nnoprefix=true\nmnemonicPrefix=true\ncontext=9\nexternal=/bin/false\nrenames=copies\n"
        "[core]\nautocrlf=true\nhooksPath=/nowhere\n[commit]\ngpgSign=true\n[color]\nui=always\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "another.git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "another-index"))
    edit(workspace, "pkg")
    assert refresh(workspace, "pkg").written == ()
    assert files_of(workspace.patches / "pkg") == first


def test_uncommitted_edits_go_into_the_last_patch(workspace):
    folder = edit(workspace, "pkg").folder
    before = files_of(workspace.patches / "pkg")["0001-top.patch"]
    (folder / "pkg/mod.py").write_bytes((folder / "pkg/mod.py").read_bytes().replace(b"five", b"V"))
    (folder / "pkg/added.py").write_bytes(b"x = 1\n")
    (folder / "pkg/__pycache__").mkdir()
    (folder / "pkg/__pycache__/mod.pyc").write_bytes(b"\0")
    refresh(workspace, "pkg")
    last = read_series(workspace.patches / "pkg")[1]
    assert [file.path for file in last.files] == ["pkg/added.py", "pkg/mod.py"]
    assert split_header(before)[0] == HEADER.rstrip()
    assert all(row.result == "applies" for row in check(workspace, ["pkg"]))


def test_uncommitted_edits_become_a_new_patch_with_a_header_to_fill_in(workspace):
    folder = edit(workspace, "pkg").folder
    (folder / "pkg/mod.py").write_bytes((folder / "pkg/mod.py").read_bytes() + b"last\n")
    done = refresh(workspace, "pkg", new="Add the last line, at last!")
    name = "0003-add-the-last-line-at-last.patch"
    assert done.unfinished == (name,)
    path = workspace.patches / "pkg" / name
    (row,) = [row for row in check(workspace, []) if row.error]
    assert "lacks Upstream, Why, Drop-when, Test" in row.error.message
    # Filled in in the patch file, the header stays through the next refresh.
    text = path.read_bytes()
    for field in (b"Upstream", b"Why", b"Drop-when", b"Test"):
        text = text.replace(field + b":", field + b": something")
    path.write_bytes(text)
    assert refresh(workspace, "pkg").unfinished == ()
    assert path.read_bytes() == text
    assert [row.result for row in check(workspace, [])] == ["applies"] * 3


def test_a_header_may_be_edited_in_the_commit_or_in_the_file_but_not_in_both(workspace):
    folder = edit(workspace, "pkg").folder
    path = workspace.patches / "pkg/0002-later.patch"
    message = git(folder, "log", "-1", "--format=%B").replace("rude", "blunt")
    git(folder, "commit", "--amend", "-F", "-", stdin=message)
    refresh(workspace, "pkg")
    assert b"blunt" in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(b"blunt", b"curt"))
    refresh(workspace, "pkg")
    assert "curt" in git(folder, "log", "-1", "--format=%B")
    path.write_bytes(path.read_bytes().replace(b"curt", b"terse"))
    git(
        folder,
        "commit",
        "--amend",
        "-F",
        "-",
        stdin=git(folder, "log", "-1", "--format=%B").replace("curt", "x"),
    )
    with pytest.raises(PatchError, match=r"0002-later\.patch: header edited in"):
        refresh(workspace, "pkg")


def test_commits_of_the_user_dropped_and_reordered_commits_are_followed(workspace):
    series = workspace.patches / "pkg"
    (series / "series").write_text(
        "# first things first\n0001-top.patch\n# and this\n0002-later.patch\n# end\n"
    )
    folder = edit(workspace, "pkg").folder
    refresh(workspace, "pkg")
    assert (series / "series").read_text().startswith("# first things first\n")
    first = git(folder, "rev-parse", "HEAD~1").strip()
    git(folder, "rebase", "--quiet", "--onto", "refs/dsv32/base", first)
    (folder / "new.txt").write_text("x\n")
    git(folder, "add", "new.txt")
    git(folder, "commit", "-q", "-m", "Bring a file")
    done = refresh(workspace, "pkg")
    assert done.removed == ("0001-top.patch",)
    assert (series / "series").read_text() == "# and this\n0002-later.patch\n0003-bring-a-file.patch\n# end\n"
    assert parse_patch(series / "0002-later.patch").files[0].hunks[0].old_start == 4


def test_a_split_commit_gives_two_patches(workspace):
    folder = edit(workspace, "pkg").folder
    message = git(folder, "log", "-1", "--format=%B")
    (folder / "pkg/mod.py").write_bytes((folder / "pkg/mod.py").read_bytes() + b"tail\n")
    git(folder, "commit", "-aq", "-F", "-", stdin=message)
    assert "0003-say-hello-politely.patch" in refresh(workspace, "pkg").written
    assert [row.result for row in check(workspace, [])] == ["applies"] * 3


def test_context_is_as_short_as_one_place_allows(workspace, tmp_path):
    body = b"".join(b"same\n" for _ in range(6)) + b"only here\n" + b"same\n" * 6 + b"x\n"
    wheel = make_wheel(tmp_path / "pkg.whl", {**wheel_files(), "pkg/mod.py": body})
    write_series(workspace.patches / "pkg", {})
    for path in workspace.patches.glob("pkg/*.patch"):
        path.unlink()
    folder = edit(workspace, "pkg").folder
    assert wheel.is_file()
    lines = body.splitlines(keepends=True)
    lines[8] = b"changed\n"
    (folder / "pkg/mod.py").write_bytes(b"".join(lines))
    refresh(workspace, "pkg", new="Change one of the same")
    _, diff = split_header((workspace.patches / "pkg/0001-change-one-of-the-same.patch").read_bytes())
    assert b" only here\n same\n-same\n+changed\n same\n same\n" in diff
    assert diff.count(b"\n ") == 4


def test_edit_twice_says_already_there_and_never_overwrites_work(workspace):
    folder = edit(workspace, "pkg").folder
    assert edit(workspace, "pkg").already
    (folder / "pkg/mod.py").write_bytes(b"my work\n")
    with pytest.raises(UsageError, match="holds work"):
        edit(workspace, "pkg")
    assert (folder / "pkg/mod.py").read_bytes() == b"my work\n"
    refresh(workspace, "pkg")
    assert edit(workspace, "pkg").already
    (workspace.work / "other").mkdir()
    with pytest.raises(UsageError, match="was not made by"):
        edit(workspace, "other")


def test_a_new_source_replaces_work_that_is_all_in_the_patches(workspace, tmp_path):
    folder = edit(workspace, "pkg").folder
    make_wheel(tmp_path / "pkg.whl", {**wheel_files(), "pkg/mod.py": b"line 0\n" + MODULE})
    assert not edit(workspace, "pkg").already
    assert (folder / "pkg/mod.py").read_bytes().startswith(b"line 0\nline 1\nline 1.5\n")
    refresh(workspace, "pkg")
    assert [row.result for row in check(workspace, [])] == ["applies"] * 2


def test_after_a_patch_that_does_not_apply_work_goes_on_by_hand(workspace, tmp_path):
    make_wheel(
        tmp_path / "pkg.whl", {**wheel_files(), "pkg/mod.py": MODULE.replace(b"line 6\n", b"line VI\n")}
    )
    assert [row.result for row in check(workspace, [])] == ["applies", "does not apply"]
    with pytest.raises(PatchError, match=r"0002-later\.patch does not apply") as caught:
        edit(workspace, "pkg")
    assert "git apply --reject" in caught.value.hint
    with pytest.raises(PatchError, match="not applied yet"):
        refresh(workspace, "pkg")
    with pytest.raises(PatchError, match="does not apply"):
        edit(workspace, "pkg")
    file = workspace.work / "pkg/pkg/mod.py"
    assert b"line 1.5\n" in file.read_bytes()
    file.write_bytes(file.read_bytes().replace(b"line 5\n", b"line five\n"))
    assert edit(workspace, "pkg").patches == 2
    refresh(workspace, "pkg")
    assert [row.result for row in check(workspace, [])] == ["applies"] * 2
    assert b"line VI" in (workspace.patches / "pkg/0002-later.patch").read_bytes()


def test_a_patch_taken_out_of_the_series_is_not_waited_for(workspace, tmp_path):
    make_wheel(
        tmp_path / "pkg.whl", {**wheel_files(), "pkg/mod.py": MODULE.replace(b"line 6\n", b"line VI\n")}
    )
    with pytest.raises(PatchError):
        edit(workspace, "pkg")
    (workspace.patches / "pkg/0002-later.patch").unlink()
    (workspace.patches / "pkg/series").write_text("0001-top.patch\n")
    assert edit(workspace, "pkg").patches == 1


def test_line_ends_modes_and_hidden_files_survive(workspace, tmp_path):
    source = {
        **wheel_files(),
        ".gitattributes": b"* text=auto eol=lf\n*.py filter=x ident\n",
        ".gitignore": b"*.gen\n",
        "pkg/dos.txt": b"a\r\nb\r\n",
        "pkg/old.gen": b"$Id$\n",
    }
    make_wheel(tmp_path / "pkg.whl", source)
    folder = edit(workspace, "pkg").folder
    (folder / "pkg/dos.txt").write_bytes(b"a\r\nB\r\nc")
    (folder / "pkg/new.gen").write_bytes(b"n\n")
    (folder / "pkg/mod.py").chmod(0o755)
    (folder / "pkg/old.gen").unlink()
    refresh(workspace, "pkg", new="All kinds")
    refreshed = (workspace.patches / "pkg/0003-all-kinds.patch").read_bytes()
    assert b"-b\r\n+B\r\n+c\n\\ No newline" in refreshed
    filled = refreshed
    for field in (b"Upstream", b"Why", b"Drop-when", b"Test"):
        filled = filled.replace(field + b":", field + b": yes")
    (workspace.patches / "pkg/0003-all-kinds.patch").write_bytes(filled)
    files = {name: FileState(data) for name, data in source.items()}
    changes = plan_series(files.get, read_series(workspace.patches / "pkg")).changes
    assert changes["pkg/dos.txt"] == FileState(b"a\r\nB\r\nc")
    assert changes["pkg/new.gen"] == FileState(b"n\n")
    assert changes["pkg/old.gen"] is None
    assert changes["pkg/mod.py"].executable


def test_what_a_patch_cannot_carry_is_refused(workspace):
    folder = edit(workspace, "pkg").folder
    (folder / "pkg/blob").write_bytes(b"\0\1\2")
    with pytest.raises(PatchError, match="pkg/blob is binary"):
        refresh(workspace, "pkg")
    (folder / "pkg/blob").unlink()
    (folder / "pkg/link").symlink_to("mod.py")
    with pytest.raises(PatchError, match="link"):
        refresh(workspace, "pkg")
    (folder / "pkg/link").unlink()
    refresh(workspace, "pkg")
    git(folder, "commit", "--allow-empty", "-qm", "Nothing")
    with pytest.raises(PatchError, match="changes nothing"):
        refresh(workspace, "pkg")


def test_refresh_without_work_patches_or_edits_says_what_to_do(workspace, tmp_path):
    with pytest.raises(UsageError) as caught:
        refresh(workspace, "pkg")
    assert caught.value.hint == "nox -s patch -- edit pkg"
    write_series(workspace.patches / "pkg", {})
    for path in workspace.patches.glob("pkg/*.patch"):
        path.unlink()
    folder = edit(workspace, "pkg").folder
    with pytest.raises(UsageError, match="no uncommitted edits"):
        refresh(workspace, "pkg", new="Title")
    (folder / "pkg/mod.py").write_bytes(b"")
    with pytest.raises(PatchError, match="no patch to fold them into"):
        refresh(workspace, "pkg")


def test_a_merge_a_lost_base_and_an_unfinished_rebase_are_refused(workspace):
    folder = edit(workspace, "pkg").folder
    (folder / ".git/rebase-merge").mkdir()
    with pytest.raises(PatchError, match="not finished"):
        refresh(workspace, "pkg")
    (folder / ".git/rebase-merge").rmdir()
    git(folder, "checkout", "-q", "-b", "side", "HEAD~1")
    git(folder, "commit", "-q", "--allow-empty", "-m", "Side")
    git(folder, "checkout", "-q", "main")
    git(folder, "merge", "-q", "--no-edit", "side")
    with pytest.raises(PatchError, match="merge"):
        refresh(workspace, "pkg")
    git(folder, "checkout", "-q", "--orphan", "fresh")
    git(folder, "commit", "-q", "-m", "Fresh")
    with pytest.raises(PatchError, match="published source"):
        refresh(workspace, "pkg")


def test_an_sdist_is_edited_without_its_top_folder(workspace, tmp_path):
    sdist = make_sdist(tmp_path / "pkg.tar.gz")
    other = Workspace(patches=workspace.patches, work=workspace.work, find_source=lambda _: sdist)
    assert (edit(other, "pkg").folder / "setup.py").is_file()


def test_a_series_can_be_begun_for_a_package_without_one(workspace):
    shutil.rmtree(workspace.patches / "pkg")
    folder = edit(workspace, "pkg").folder
    (folder / "pkg/mod.py").write_bytes(MODULE + b"x\n")
    assert "series" in refresh(workspace, "pkg", new="Begin").written


def run(workspace: Workspace, *args: str):
    root = typer.Typer()

    @root.callback()
    def wire(context: typer.Context) -> None:
        context.obj = workspace

    root.add_typer(patch_cli.app, name="patch")
    wire.__annotations__["context"] = typer.Context
    return CliRunner().invoke(root, ["patch", *args])


def test_the_commands_are_a_sub_app_with_exit_codes(workspace):
    assert run(workspace, "edit", "pkg").exit_code == 0
    assert run(workspace, "refresh", "pkg").exit_code == 0
    done = run(workspace, "check")
    assert done.exit_code == 0
    assert "0002-later.patch" in done.stdout
    assert done.stdout.count("applies") == 2
    path = workspace.patches / "pkg/0002-later.patch"
    path.write_bytes(path.read_bytes().replace(b" line 6", b" line six"))
    done = run(workspace, "check", "pkg")
    assert done.exit_code == 1
    assert "does not apply" in done.stdout
    assert isinstance(run(workspace, "check", "nobody").exception, UsageError)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("scratch")


TEXT = st.lists(st.sampled_from(["a", "b", "", "c d", "# e"]), min_size=1, max_size=12).map("\n".join)


@settings(max_examples=15, deadline=None)
@given(old=TEXT, new=TEXT)
def test_any_edit_comes_back_from_its_refreshed_patch(scratch, old, new):
    if old == new:
        return
    folder = scratch / "work"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "f").write_text(old)
    repo = PatchRepo.create(folder, "base\n")
    (folder / "f").write_text(new)
    repo.stage()
    repo.commit("Title", "")
    # `diff` applies what it wrote and compares; it raises when that is not the edit.
    assert repo.diff(repo.commits()[0]).startswith(b"diff --git a/f b/f\n")
