"""Strict unified diffs: a series of patches that applies exactly, or not at all.

A series is a folder `patches/<package>/` with one patch a file and a file `series` that gives the order,
one file name a line, `#` starts a comment. A patch is a header and a diff as `git diff` writes it:

    Short title                      (optional)

    Upstream: issue or pull request, or "none yet"
    Why: what goes wrong without it
    Drop-when: what makes it unneeded
    Test: what fails if it is taken out

    diff --git a/pkg/x.py b/pkg/x.py
    ...

Context lines, removed lines and line numbers must all agree with the file as the patches before left it.
There is no fuzz and no three-way merge: a patch that still "sort of" fits another version of a file is the
kind of error that this repository exists to prevent.
"""

from __future__ import annotations

import hashlib
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dsv32_image.diffs import FilePatch, Hunk, hunk_index, parse_diff, show_line, split_lines
from dsv32_image.errors import PatchError
from dsv32_image.files import disk_full_is_clear

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

REQUIRED_FIELDS = ("Upstream", "Why", "Drop-when", "Test")
SERIES = "series"

_FIELD = re.compile(r"(Upstream|Why|Drop-when|Test):[ \t]*(.*)")
_DIFF_START = re.compile(rb"^(?:diff --git |--- )", re.MULTILINE)


class FileState(NamedTuple):
    """What a tree holds at one path: content and whether the executable bit is set."""

    data: bytes
    executable: bool = False


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One patch file, parsed and checked.

    Attributes:
        name: File name, e.g. `0001-pure-python.patch`.
        package: Name of the folder it lies in.
        title: First line of the header, or the file name where the header starts with a field.
        header: Everything before the diff, without trailing blank lines.
        fields: The required header fields.
        files: One entry a file, in the order of the diff.
        sha256: Of the patch file's bytes.
    """

    name: str
    package: str
    title: str
    header: str
    fields: dict[str, str] = field(hash=False)
    files: tuple[FilePatch, ...]
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Applied:
    """One file changed by one patch; `offsets` has one number of lines a hunk (all 0 unless allowed)."""

    patch: str
    path: str
    hunks: int
    offsets: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class SeriesResult:
    """What a series does to a tree: the files it changes (None for a deleted one), and a report."""

    changes: Mapping[str, FileState | None]
    applied: tuple[Applied, ...]


class MisfitError(Exception):
    """A hunk or file does not fit: where, and in `lines` what was expected and found. Not shown as it is."""

    def __init__(self, where: str, *lines: str) -> None:
        super().__init__(where)
        self.where = where
        self.lines = lines


def split_header(data: bytes) -> tuple[str, bytes]:
    """Cut a patch file into its header (trailing blank lines gone) and its diff.

    Raises:
        UnicodeDecodeError: The header is not UTF-8.
    """
    match = _DIFF_START.search(data)
    cut = match.start() if match else len(data)
    return data[:cut].decode().rstrip(), data[cut:]


def header_fields(header: str) -> dict[str, str]:
    """The required fields that the header has, continuation lines (indented) joined with a blank."""
    fields: dict[str, str] = {}
    current = ""
    for line in header.split("\n"):
        if match := _FIELD.fullmatch(line):
            current = match[1]
            fields[current] = match[2].strip()
        elif current and line[:1] in {" ", "\t"} and line.strip():
            fields[current] = f"{fields[current]} {line.strip()}".strip()
        else:
            current = ""
    return fields


def has_title(header: str) -> bool:
    """Whether something stands before the first field; the name of the file is the title otherwise."""
    return not _FIELD.fullmatch(header.split("\n", 1)[0])


def parse_patch(path: Path) -> Patch:
    """Read and check one patch file.

    Raises:
        PatchError: It cannot be read, lacks a header field, or its diff is malformed.
    """
    try:
        data = path.read_bytes()
        header, diff = split_header(data)
    except (OSError, UnicodeDecodeError) as error:
        raise PatchError(f"{path}: cannot be read: {error}") from error
    fields = header_fields(header)
    missing = [name for name in REQUIRED_FIELDS if not fields.get(name)]
    if missing:
        raise PatchError(
            f"{path.name}: the header lacks {', '.join(missing)}",
            f"add a line such as '{missing[0]}: ...' above the diff in {path}",
        )
    return Patch(
        name=path.name,
        package=path.parent.name,
        title=header.split("\n", 1)[0].strip() if has_title(header) else path.stem,
        header=header,
        fields=fields,
        files=parse_diff(diff, path.name, first_line=data.count(b"\n", 0, len(data) - len(diff)) + 1),
        sha256=hashlib.sha256(data).hexdigest(),
    )


def series_names(folder: Path) -> tuple[str, ...]:
    """The file names in `folder/series`, in order, checked against the folder.

    Raises:
        PatchError: No series file, a name twice, a listed file missing, or a .patch file not listed.
    """
    path = folder / SERIES
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PatchError(
            f"{path}: cannot be read: {error}", "a package without patches has an empty one"
        ) from error
    names = tuple(name for line in text.split("\n") if (name := line.partition("#")[0].strip()))
    for name in names:
        if "/" in name or not name.endswith(".patch"):
            raise PatchError(f"{path}: {name!r} is not the name of a .patch file beside it")
        if names.count(name) > 1:
            raise PatchError(f"{path}: lists {name} twice")
        if not (folder / name).is_file():
            raise PatchError(
                f"{path}: lists {name}, which is missing",
                f"restore {folder / name}, or take the line out of the series",
            )
    for extra in sorted(file.name for file in folder.glob("*.patch")):
        if extra not in names:
            raise PatchError(
                f"{folder / extra}: not listed in {path}", "add its name to the series, or remove the file"
            )
    return names


def read_series(folder: Path) -> tuple[Patch, ...]:
    """The patches of `patches/<package>/` in the order of its series file; none is fine.

    Raises:
        PatchError: As `series_names` and `parse_patch`.
    """
    return tuple(parse_patch(folder / name) for name in series_names(folder))


def series_sha256(folder: Path) -> str:
    """Digest over order, names and bytes of the listed patches: that of `sha256sum <listed> | sha256sum`.

    Comments in the series file do not count.
    """
    lines = "".join(
        f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n"
        for name in series_names(folder)
    )
    return hashlib.sha256(lines.encode()).hexdigest()


def plan_series(
    read: Callable[[str], FileState | None], patches: Sequence[Patch], *, allow_offset: bool = False
) -> SeriesResult:
    """Apply a series in memory.

    Args:
        read: Gives the state of a file by its relative path, None where there is none.
        patches: In order.
        allow_offset: Accept a hunk at another line if its old lines occur exactly once in the file. For
            sources pinned by commit, where the lines above may have moved.

    Raises:
        PatchError: Names patch, file, hunk and line, what was expected and what was found.
    """
    changes: dict[str, FileState | None] = {}
    applied: list[Applied] = []

    def now(path: str) -> FileState | None:
        return changes[path] if path in changes else read(path)

    for patch in patches:
        states: dict[str, FileState | None] = {}
        for file in patch.files:
            try:
                states[file.path], offsets = apply_file(now(file.path), file, allow_offset=allow_offset)
            except MisfitError as misfit:
                raise _explain(patch, file, misfit, now) from None
            applied.append(
                Applied(patch=patch.name, path=file.path, hunks=len(file.hunks), offsets=tuple(offsets))
            )
        changes.update(states)
    return SeriesResult(changes=changes, applied=tuple(applied))


def apply_series(tree: Path, patches: Sequence[Patch], *, allow_offset: bool = False) -> list[Applied]:
    """Apply a series to the files under `tree`, all or nothing.

    The whole series is checked in memory first. New content then goes to temporary names beside the old
    files, and is renamed only when all of it is on disk.

    Raises:
        PatchError: A patch does not fit (see `plan_series`), or a path runs through a symbolic link.
        DiskFullError: No space left; the tree is as before.
    """
    result = plan_series(lambda path: _read(tree, path), patches, allow_offset=allow_offset)
    written: list[tuple[Path, Path]] = []
    folders: list[Path] = []
    try:
        with disk_full_is_clear(tree):
            for path, state in result.changes.items():
                if state is not None:
                    _write_beside(tree / path, state, written, folders)
    except BaseException as error:
        for temporary, _ in written:
            temporary.unlink(missing_ok=True)
        for folder in reversed(folders):
            folder.rmdir()
        if isinstance(error, OSError):
            raise PatchError(f"{tree}: patched files cannot be written: {error}") from error
        raise
    for temporary, target in written:
        temporary.replace(target)
    for path, state in result.changes.items():
        if state is None:
            (tree / path).unlink(missing_ok=True)
    return list(result.applied)


def _write_beside(
    target: Path, state: FileState, written: list[tuple[Path, Path]], folders: list[Path]
) -> None:
    """Write new content beside `target`; noted before it is made, so that it can be undone."""
    for folder in reversed(target.parents):
        if not folder.is_dir():
            folder.mkdir()
            folders.append(folder)
    temporary = target.with_name(f".{target.name}.dsv32-new")
    written.append((temporary, target))
    temporary.write_bytes(state.data)
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o644
    temporary.chmod(mode | 0o111 if state.executable else mode & ~0o111)


def _read(tree: Path, path: str) -> FileState | None:
    at = tree
    for part in Path(path).parts:
        at /= part
        if at.is_symlink():
            raise PatchError(f"{path}: {at} is a symbolic link; patches do not follow those")
    if not at.exists():
        return None
    if not at.is_file():
        raise PatchError(f"{path}: {at} is a folder, not a file")
    return FileState(at.read_bytes(), bool(at.stat().st_mode & stat.S_IXUSR))


def apply_file(
    state: FileState | None, file: FilePatch, *, allow_offset: bool = False
) -> tuple[FileState | None, list[int]]:
    """Apply the hunks for one file: its state afterwards (None: deleted), and an offset a hunk.

    Raises:
        MisfitError: A hunk does not fit; callers know the patch's name and make a PatchError of it.
    """
    if file.creates and state is not None:
        raise MisfitError("cannot create", "expected: no such file", "found:    a file of that name")
    if state is None and not file.creates:
        raise MisfitError("cannot change", "expected: a file", "found:    no file of that name")
    lines = split_lines(state.data) if state else []
    result: list[bytes] = []
    offsets: list[int] = []
    done = 0
    for hunk in file.hunks:
        at = _place(lines, hunk, done, allow_offset=allow_offset)
        result += [*lines[done:at], *hunk.new]
        done = at + len(hunk.old)
        offsets.append(at - hunk_index(hunk.old_start, len(hunk.old)))
    result += lines[done:]
    if any(not line.endswith(b"\n") for line in result[:-1]):
        raise MisfitError("would leave a line without newline inside")
    if file.deletes:
        if result:
            raise MisfitError(
                "cannot delete", "expected: nothing else in it", f"found:    {show_line(result[0])}"
            )
        return None, offsets
    executable = state.executable if state and file.executable is None else bool(file.executable)
    return FileState(b"".join(result), executable), offsets


def _place(lines: list[bytes], hunk: Hunk, done: int, *, allow_offset: bool) -> int:
    """Index at which a hunk applies; `done` is the end of the hunk before."""
    old = list(hunk.old)
    at = hunk_index(hunk.old_start, len(old))
    if not old:
        if not lines:
            return 0
        raise MisfitError(
            f"hunk {hunk.number} at line {hunk.old_start}", "it has no context, so nothing can be checked"
        )
    if at >= done and lines[at : at + len(old)] == old:
        return at
    places = _find(lines, old)
    if allow_offset and len(places) == 1 and places[0] >= done:
        return places[0]
    wrong = next(i for i, line in enumerate(old) if lines[at + i : at + i + 1] != [line])
    found = show_line(lines[at + wrong]) if at + wrong < len(lines) else "end of file"
    if not places:
        elsewhere = "these lines stand nowhere in the file"
    elif len(places) == 1:
        elsewhere = f"these lines stand at line {places[0] + 1} (offset {places[0] - at:+d})"
    else:
        listed = ", ".join(str(place + 1) for place in places[:5])
        elsewhere = f"these lines stand at {len(places)} places: {listed}{', ...' if len(places) > 5 else ''}"
    raise MisfitError(
        f"hunk {hunk.number} at line {at + wrong + 1}",
        f"expected: {show_line(old[wrong])}",
        f"found:    {found}; {elsewhere}",
    )


def _find(lines: list[bytes], wanted: Sequence[bytes]) -> list[int]:
    """All places where `wanted` stands in `lines`."""
    count = len(wanted)
    return [at for at in range(len(lines) - count + 1) if lines[at : at + count] == list(wanted)]


def occurrences(data: bytes, hunk: Hunk) -> int:
    """How often the old lines of a hunk occur in a file."""
    return len(_find(split_lines(data), hunk.old)) if hunk.old else int(not data)


def _explain(
    patch: Patch, file: FilePatch, misfit: MisfitError, now: Callable[[str], FileState | None]
) -> PatchError:
    edit = f"nox -s patch -- edit {patch.package}"
    where = f"{patch.name} does not apply: {file.path}, {misfit.where}"
    try:
        for each in patch.files:
            apply_file(now(each.path), _reverse(each), allow_offset=False)
    except MisfitError:
        return PatchError("\n".join((where, *(f"  {line}" for line in misfit.lines))), edit)
    return PatchError(
        f"{where}\n  the patch is already applied (it applies in reverse)",
        f"drop it from patches/{patch.package}/{SERIES} if upstream has it now, else {edit}",
    )


def _reverse(file: FilePatch) -> FilePatch:
    swap = {" ": " ", "-": "+", "+": "-"}
    return FilePatch(
        path=file.path,
        creates=file.deletes,
        deletes=file.creates,
        hunks=tuple(
            Hunk(
                number=hunk.number,
                old_start=hunk.new_start,
                new_start=hunk.old_start,
                lines=tuple((swap[tag], line) for tag, line in hunk.lines),
            )
            for hunk in file.hunks
        ),
    )
