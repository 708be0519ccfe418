"""`nox -s patch`: work on the patches of a package as commits in a git repository.

`edit` unpacks the locked source into `work/<package>/` with one commit a patch, whose message is the patch's
header. `refresh` turns the commits back into patch files. `check` applies every series to its locked source.

A commit remembers its patch file in a last line `Patch-file: <name> <digest of the header>`, so `git rebase`,
`commit --amend` and splitting or dropping commits all work, and a header may be edited in either place.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from dsv32_image.archives import read_archive, write_files
from dsv32_image.errors import PatchError, UsageError
from dsv32_image.files import sha256_file, temporary_folder, write_atomic
from dsv32_image.patch_fit import Row, try_series
from dsv32_image.patch_repo import PatchRepo, State
from dsv32_image.patching import (
    REQUIRED_FIELDS,
    SERIES,
    apply_series,
    header_fields,
    parse_patch,
    read_series,
    series_names,
    series_sha256,
    split_header,
)
from dsv32_image.ui import Ui

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MEGATRON = "megatron-core"

app = typer.Typer(no_args_is_help=True, help="Work on the patches of a package: edit, refresh, check.")


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Where patches live and where they are worked on.

    Attributes:
        patches: The checkout's `patches/`.
        work: The checkout's `work/`, ignored by git.
        find_source: Gives the locked wheel or sdist of a package in the store; raises an ImageError that says
            what to do when it is not there.
    """

    patches: Path
    work: Path
    find_source: Callable[[str], Path]
    is_commit: Callable[[str], bool] = lambda package: False
    commit_source: Callable[[str], Path] | None = None


@dataclass(frozen=True, kw_only=True)
class Edited:
    """What `edit` made: the folder, how many patches are commits in it, and whether it was there before."""

    folder: Path
    patches: int
    already: bool = False


@dataclass(frozen=True, kw_only=True)
class Refreshed:
    """What `refresh` changed, as file names; `unfinished` patches have a header to fill in."""

    written: tuple[str, ...]
    removed: tuple[str, ...]
    unfinished: tuple[str, ...]


def edit(workspace: Workspace, package: str) -> Edited:
    """Unpack the locked source with one commit a patch, or go on after a patch that did not apply.

    A hunk may sit at another line here (after an upgrade of the package): `refresh` writes the new numbers.

    Raises:
        UsageError: `work/<package>` holds work that is not in `patches/<package>`.
        PatchError: A patch does not apply. The ones before it are commits; the hint says how to go on.
    """
    folder, series = workspace.work / package, workspace.patches / package
    source = workspace.find_source(package)
    names = series_names(series) if series.is_dir() else ()
    source_sha256 = sha256_file(source)
    if folder.exists():
        repo = PatchRepo(folder)
        state = repo.state()
        repo.stage()
        if state.pending:
            return _go_on(repo, state, series, names)
        digest = series_sha256(series) if series.is_dir() else ""
        if repo.is_dirty() or state.head != repo.head() or state.series_sha256 != digest:
            raise UsageError(
                f"{folder} holds work that is not in {series}, or the patches there changed since",
                f"nox -s patch -- refresh {package}, or remove {folder} to begin again",
            )
        if state.source_sha256 == source_sha256:
            return Edited(folder=folder, patches=len(repo.commits()), already=True)
    # All commits are made under a temporary name: a killed edit leaves no half-made work to refresh from.
    with temporary_folder(folder) as temporary:
        write_files(read_archive(source), temporary)
        message = f"{package}: source as published\n\nSource-sha256: {source_sha256}\n"
        repo = PatchRepo.create(temporary, message)
        repo.write_state(
            State(source_sha256=source_sha256, series_sha256="", head=repo.head(), pending=names)
        )
        try:
            count = _commit_pending(repo, series, names)
        except PatchError as error:
            failed: PatchError | None = error
        else:
            failed = None
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    if failed:
        raise _by_hand(failed, folder, series)
    return Edited(folder=folder, patches=count)


def _go_on(repo: PatchRepo, state: State, series: Path, names: tuple[str, ...]) -> Edited:
    """After a patch that did not apply: edits or commits by hand stand for it, then the rest follows."""
    pending = tuple(name for name in state.pending if name in names)
    if pending and repo.is_dirty():
        header, _ = split_header((series / pending[0]).read_bytes())
        repo.commit(header, pending[0])
        pending = pending[1:]
    elif pending and repo.head() != state.head:
        pending = pending[1:]
    try:
        return Edited(folder=repo.folder, patches=_commit_pending(repo, series, pending))
    except PatchError as error:
        raise _by_hand(error, repo.folder, series) from error


def _commit_pending(repo: PatchRepo, series: Path, pending: tuple[str, ...]) -> int:
    """One commit for each patch; what is left to do is noted when one does not apply."""
    state = repo.state()
    for done, name in enumerate(pending):
        repo.write_state(state.with_(head=repo.head(), pending=pending[done:]))
        patch = parse_patch(series / name)
        apply_series(repo.folder, [patch], allow_offset=True)
        repo.stage()
        repo.commit(patch.header, name)
    digest = series_sha256(series) if series.is_dir() else ""
    repo.write_state(state.with_(head=repo.head(), series_sha256=digest, pending=()))
    return len(repo.commits())


def _by_hand(error: PatchError, folder: Path, series: Path) -> PatchError:
    pending = PatchRepo(folder).state().pending
    return PatchError(
        f"{error.message}\n  the patches before it are commits in {folder}",
        f"there: git apply --reject {(series / pending[0]).resolve()}, do the rest by hand, "
        f"then `nox -s patch -- edit {series.name}` goes on",
    )


def refresh(workspace: Workspace, package: str, *, new: str = "") -> Refreshed:
    """Write patch files and series from the commits in `work/<package>`.

    Uncommitted edits go into the last patch, or with `new` (a title) become a patch of their own. Each file's
    diff has the fewest context lines (at least one) with which every hunk fits at one place only. Without a
    change the files stay byte for byte the same.

    Raises:
        UsageError: No `work/<package>`, or nothing to make a new patch of.
        PatchError: Merge commits, binary changes, a rebase under way, or a header edited in both places.
    """
    folder, series = workspace.work / package, workspace.patches / package
    if not folder.is_dir():
        raise UsageError(f"there is no {folder} to refresh from", f"nox -s patch -- edit {package}")
    repo = PatchRepo(folder)
    state = repo.state()
    if state.pending:
        raise PatchError(
            f"{folder}: {', '.join(state.pending)} not applied yet; a refresh now would lose them",
            f"nox -s patch -- edit {package}",
        )
    repo.require_no_rebase()
    repo.stage()
    if new:
        if not repo.is_dirty():
            raise UsageError(
                f"{folder} has no uncommitted edits to make a new patch of",
                hint="edit the files there first; to name a patch that is there, edit its file in patches/",
            )
        repo.commit(new + "\n", "")
    elif repo.is_dirty():
        if not repo.commits():
            raise PatchError(
                f"{folder}: edits, but no patch to fold them into",
                f"nox -s patch -- refresh {package} --new 'Title of the patch'",
            )
        repo.amend()

    files, headers = _patch_files(repo, series)
    old = set(series_names(series)) if (series / SERIES).is_file() else set()
    written = [name for name, data in files.items() if _write_changed(series / name, data)]
    if _write_changed(series / SERIES, _series_file(series / SERIES, list(files))):
        written.append(SERIES)
    removed = sorted(old - files.keys())
    for name in removed:
        (series / name).unlink()
    repo.reword(list(zip(headers, files, strict=True)))
    repo.write_state(state.with_(head=repo.head(), series_sha256=series_sha256(series)))
    unfinished = [
        name
        for name, header in zip(files, headers, strict=True)
        if any(not header_fields(header).get(key) for key in REQUIRED_FIELDS)
    ]
    return Refreshed(written=tuple(written), removed=tuple(removed), unfinished=tuple(unfinished))


def _patch_files(repo: PatchRepo, series: Path) -> tuple[dict[str, bytes], list[str]]:
    """Names and contents of the patch files, and their headers."""
    commits = repo.commits()
    taken = [commit.patch_file for commit in commits if commit.patch_file]
    files: dict[str, bytes] = {}
    headers: list[str] = []
    for commit in commits:
        name = commit.patch_file
        if not name or name in files:  # new, or the second half of a commit that was split
            name = commit.new_name(taken)
            taken.append(name)
        path = series / name
        on_disk = split_header(path.read_bytes())[0] if path.is_file() and commit.patch_file == name else None
        header = _with_all_fields(commit.choose_header(on_disk))
        headers.append(header)
        files[name] = header.encode() + b"\n\n" + repo.diff(commit)
    return files, headers


def _with_all_fields(header: str) -> str:
    """Missing header fields added, to be filled in."""
    missing = [f"{key}:" for key in REQUIRED_FIELDS if key not in header_fields(header)]
    if not missing:
        return header
    gap = "\n" if header_fields(header) else "\n\n"
    return header.rstrip() + gap + "\n".join(missing)


def _series_file(path: Path, names: list[str]) -> bytes:
    """The series file for these names; comments above a name stay above it."""
    comments: dict[str, list[str]] = {}
    lines: dict[str, str] = {}
    block: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        if name := line.partition("#")[0].strip():
            comments[name], lines[name], block = block, line, []
        else:
            block.append(line)
    out = [text for name in names for text in (*comments.get(name, ()), lines.get(name, name))] + block
    return "".join(f"{line}\n" for line in out).encode()


def _write_changed(path: Path, data: bytes) -> bool:
    if path.is_file() and path.read_bytes() == data:
        return False
    write_atomic(path, data)
    return True


def check(workspace: Workspace, packages: list[str]) -> list[Row]:
    """Apply every series (or those of `packages`) to its locked source, in memory.

    Raises:
        UsageError: No such folder under `patches/`.
        ImageError: From `find_source`.
    """
    known = sorted(path.name for path in workspace.patches.glob("*") if path.is_dir() and any(path.iterdir()))
    for package in packages:
        if package not in known:
            raise UsageError(f"there is no {workspace.patches / package}", f"known: {', '.join(known)}")
    rows: list[Row] = []
    for package in packages or known:
        try:
            patches = read_series(workspace.patches / package)
        except PatchError as error:
            rows.append(Row(package=package, patch=SERIES, result="malformed", error=error))
            continue
        if patches:
            files = read_archive(workspace.find_source(package))
            rows += try_series(package, patches, files, allow_offset=workspace.is_commit(package))
        else:
            rows.append(Row(package=package, patch="(none)", result="nothing to apply"))
    return rows


def check_commit(workspace: Workspace, asked: str, packages: list[str]) -> list[Row]:
    """Apply megatron-core's series to the source of a commit, offsets allowed, and say which patches apply.

    Raises:
        UsageError: Another package is named too, or `asked` is no `git+URL@REF`.
        ImageError: From `commit_source`.
    """
    if set(packages) - {MEGATRON}:
        raise UsageError(f"--megatron is about {MEGATRON}", "leave the names of other packages out")
    if workspace.commit_source is None:
        raise UsageError(
            "the command line was not given a commit_source", "set it where the Workspace is made"
        )
    patches = read_series(workspace.patches / MEGATRON)
    return try_series(MEGATRON, patches, read_archive(workspace.commit_source(asked)), allow_offset=True)


def _workspace(context: typer.Context) -> Workspace:
    found = context.find_object(Workspace)
    if found is None:
        raise UsageError("the command line was not given a Workspace", "set ctx.obj in a callback above")
    return found


@app.command("edit")
def edit_command(
    context: typer.Context,
    package: Annotated[str, typer.Argument(help="Folder under patches/, e.g. megatron-core.")],
) -> None:
    """Unpack the locked source into work/PACKAGE, one commit a patch."""
    ui = Ui()
    done = edit(_workspace(context), package)
    ui.say(
        f"{done.folder}: {'already there, ' if done.already else ''}one commit a patch, {done.patches} in all"
    )
    ui.say(f"  edit, then `nox -s patch -- refresh {package}` folds the edits into the last patch,")
    ui.say(f"  or `nox -s patch -- refresh {package} --new 'Title'` makes a new one of them.")
    ui.say(f"  For an earlier patch: git -C {done.folder} rebase -i refs/dsv32/base")


@app.command("refresh")
def refresh_command(
    context: typer.Context,
    package: Annotated[str, typer.Argument(help="Folder under work/.")],
    new: Annotated[
        str, typer.Option(metavar="TITLE", help="Make uncommitted edits a patch of their own.")
    ] = "",
) -> None:
    """Write patches/PACKAGE from the commits in work/PACKAGE."""
    ui, workspace = Ui(), _workspace(context)
    done = refresh(workspace, package, new=new)
    for name in done.written:
        ui.say(f"wrote    {workspace.patches / package / name}")
    for name in done.removed:
        ui.say(f"removed  {workspace.patches / package / name}")
    if not done.written and not done.removed:
        ui.say(f"{workspace.patches / package}: nothing changed")
    for name in done.unfinished:
        ui.say(f"fill in the header of {workspace.patches / package / name}: {', '.join(REQUIRED_FIELDS)}")


@app.command("check")
def check_command(
    context: typer.Context,
    packages: Annotated[
        list[str] | None, typer.Argument(help="Folders under patches/; all by default.")
    ] = None,
    megatron: Annotated[
        str, typer.Option(metavar="git+URL@REF", help="Only megatron-core's, and on this commit's source.")
    ] = "",
) -> None:
    """Apply every series to its locked source; exit 1 when one does not apply."""
    ui, workspace = Ui(), _workspace(context)
    named = packages or []
    rows = check_commit(workspace, megatron, named) if megatron else check(workspace, named)
    ui.table(
        "patches",
        ("package", "patch", "files", "hunks", "result"),
        ([row.package, row.patch, str(row.files), str(row.hunks), row.result] for row in rows),
        out=True,
    )
    failed = [row.error for row in rows if row.error]
    for error in failed:
        ui.say(error.message + (f"\n  next: {error.hint}" if error.hint else ""))
    if failed:
        raise typer.Exit(1)
