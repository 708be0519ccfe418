"""Parsing of unified diffs as `git diff` writes them, strictly: what is not understood is refused.

Ours because the Python libraries for it (unidiff, whatthepatch) decode to text, cut lines at lone CRs or
guess over malformed counts, and `git apply` and GNU patch answer in prose instead of data.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from dsv32_image.errors import PatchError

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_GIT_NAMES = re.compile(rb"diff --git a/(.+) b/\1\n?")
_NO_NEWLINE = b"\\ No newline at end of file"
# What git may write between `diff --git` and `---`. Renames, copies and binary changes are not in the list:
# they are refused, as the diff then does not show what the file holds afterwards.
_EXTENDED = (b"index ", b"new file mode ", b"deleted file mode ", b"old mode ", b"new mode ")


@dataclass(frozen=True, kw_only=True)
class Hunk:
    """One `@@` block; lines keep their own ends, so a last line without newline is just that.

    Attributes:
        number: Place in its file's section, from 1.
        old_start: First line in the file before, from 1; with no old lines the line that it follows.
        new_start: The same in the file afterwards.
        lines: Pairs of tag (" ", "-" or "+") and line with its line end.
    """

    number: int
    old_start: int
    new_start: int
    lines: tuple[tuple[str, bytes], ...]

    @property
    def old(self) -> tuple[bytes, ...]:
        """Context and removed lines."""
        return tuple(line for tag, line in self.lines if tag != "+")

    @property
    def new(self) -> tuple[bytes, ...]:
        """Context and added lines."""
        return tuple(line for tag, line in self.lines if tag != "-")


@dataclass(frozen=True, kw_only=True)
class FilePatch:
    """All hunks for one file. `executable` is the new executable bit, None where the diff leaves it alone."""

    path: str
    creates: bool = False
    deletes: bool = False
    executable: bool | None = None
    hunks: tuple[Hunk, ...] = ()


def split_lines(data: bytes) -> list[bytes]:
    """Lines with their ends, cut at LF only: `bytes.splitlines` would also cut at a lone CR."""
    lines = data.split(b"\n")
    tail = lines.pop()
    return [line + b"\n" for line in lines] + ([tail] if tail else [])


def parse_diff(diff: bytes, name: str, *, first_line: int = 1) -> tuple[FilePatch, ...]:
    """Parse the diff part of a patch.

    Args:
        diff: Unified diff with `a/` and `b/` prefixes.
        name: Patch file named in errors.
        first_line: Line of the patch file at which the diff starts, for errors.

    Raises:
        PatchError: Malformed diff, a path that leaves the tree, a rename or a binary change.
    """
    files = _Parser(split_lines(diff), name, first_line).files()
    if not files:
        raise PatchError(f"{name}: holds no diff")
    paths = [file.path for file in files]
    for path in paths:
        if paths.count(path) > 1:
            raise PatchError(f"{name}: has two sections for {path}")
    return files


class _Parser:
    """One pass over the lines of a diff."""

    def __init__(self, lines: list[bytes], name: str, first_line: int) -> None:
        self.lines, self.name, self.first_line, self.at = lines, name, first_line, 0

    def fail(self, what: str, at: int | None = None) -> PatchError:
        line = self.first_line + (self.at if at is None else at)
        return PatchError(f"{self.name}, line {line}: {what}", "write patches with `nox -s patch -- refresh`")

    def peek(self) -> bytes:
        return self.lines[self.at] if self.at < len(self.lines) else b""

    def files(self) -> tuple[FilePatch, ...]:
        found = []
        while self.at < len(self.lines):
            if self.peek().rstrip(b"\r\n") in {b"-- ", b"--"}:
                break  # the signature that `git format-patch` adds; nothing but a version follows
            found.append(self.file())
        return tuple(found)

    def file(self) -> FilePatch:
        start, git_path = self.at, None
        if not self.peek().startswith((b"diff --git ", b"--- ")):
            raise self.fail(f"not supported: {show_line(self.peek())} between the files of a diff")
        modes: dict[bytes, bytes] = {}
        if self.peek().startswith(b"diff --git "):
            match = _GIT_NAMES.fullmatch(self.peek())
            if match is None:
                raise self.fail("renames, quoted names and names without a/ and b/ are not supported")
            git_path = match[1]
            self.at += 1
            while self.peek() and not self.peek().startswith((b"diff --git ", b"--- ", b"-- ")):
                line = self.peek()
                if not line.startswith(_EXTENDED):
                    raise self.fail(
                        f"not supported: {show_line(line)} (renames and binary changes are refused)"
                    )
                key, _, value = line.rstrip(b"\n").rpartition(b" ")
                modes[key] = value
                self.at += 1
        if any(mode not in {b"100644", b"100755"} for key, mode in modes.items() if key.endswith(b"mode")):
            raise self.fail("only regular files are supported, no symbolic links or submodules", start)
        creates, deletes = b"new file mode" in modes, b"deleted file mode" in modes
        hunks: tuple[Hunk, ...] = ()
        path = git_path
        if self.peek().startswith(b"--- "):
            path, creates, deletes = self.names(git_path, creates, deletes)
            hunks = self.hunks()
        elif not (creates or deletes or b"new mode" in modes):
            raise self.fail("the diff ends before its first hunk")
        if path is None:
            raise self.fail("the file is not named", start)
        mode = modes.get(b"new file mode", modes.get(b"new mode"))
        return FilePatch(
            path=self.safe(path, start),
            creates=creates,
            deletes=deletes,
            executable=None if mode is None else mode == b"100755",
            hunks=hunks,
        )

    def names(self, git_path: bytes | None, creates: bool, deletes: bool) -> tuple[bytes, bool, bool]:
        """The `---` and `+++` lines; a time stamp after a tab is not part of the name."""
        old = self.peek()[4:].rstrip(b"\n").split(b"\t")[0]
        self.at += 1
        if not self.peek().startswith(b"+++ "):
            raise self.fail("'--- a/file' without '+++ b/file'")
        new = self.peek()[4:].rstrip(b"\n").split(b"\t")[0]
        creates, deletes = creates or old == b"/dev/null", deletes or new == b"/dev/null"
        for name, prefix in ((old, b"a/"), (new, b"b/")):
            if name != b"/dev/null" and not name.startswith(prefix):
                raise self.fail(f"{show_line(name)} does not start with {prefix.decode()}")
        path = new[2:] if creates else old[2:]
        named = {name[2:] for name in (old, new) if name != b"/dev/null"} | (
            {git_path} if git_path else set()
        )
        if named != {path} or creates != (old == b"/dev/null") or deletes != (new == b"/dev/null"):
            raise self.fail("the lines 'diff --git', '---' and '+++' do not name the same file")
        self.at += 1
        return path, creates, deletes

    def safe(self, path: bytes, at: int) -> str:
        try:
            text = path.decode()
        except UnicodeDecodeError as error:
            raise self.fail("file name is not UTF-8", at) from error
        if not is_inside(text):
            raise self.fail(f"{text!r} leaves the tree", at)
        return text

    def hunks(self) -> tuple[Hunk, ...]:
        found: list[Hunk] = []
        shift, end = 0, 0
        while self.peek().startswith(b"@@"):
            start = self.at
            hunk = self.hunk(len(found) + 1)
            position = hunk_index(hunk.old_start, len(hunk.old))
            if position < end:
                raise self.fail("hunks overlap or are out of order", start)
            if hunk_index(hunk.new_start, len(hunk.new)) != position + shift:
                raise self.fail("the line numbers of the hunk do not agree with the hunks before it", start)
            shift += len(hunk.new) - len(hunk.old)
            end = position + len(hunk.old)
            found.append(hunk)
        if not found:
            raise self.fail("no hunk follows the file names")
        return tuple(found)

    def hunk(self, number: int) -> Hunk:
        match = _HUNK.match(self.peek())
        if match is None:
            raise self.fail("malformed hunk line")
        old_left, new_left = (int(match[i]) if match[i] is not None else 1 for i in (2, 4))
        start = self.at
        self.at += 1
        lines: list[tuple[str, bytes]] = []
        while old_left > 0 or new_left > 0:
            line = self.peek()
            tag = line[:1].decode("latin-1")
            if tag not in {" ", "-", "+"}:
                raise self.fail(f"the hunk is cut short: {old_left} old and {new_left} new lines are missing")
            old_left -= tag != "+"
            new_left -= tag != "-"
            if old_left < 0 or new_left < 0:
                raise self.fail("the counts in the hunk line do not agree with its lines", start)
            self.at += 1
            body = line[1:]
            if self.peek().startswith(b"\\"):
                if self.peek().rstrip(b"\r\n") != _NO_NEWLINE:
                    raise self.fail("unknown '\\' line")
                self.at += 1
                body = body.removesuffix(b"\n")
            elif not body.endswith(b"\n"):
                raise self.fail("the patch file is cut short")
            lines.append((tag, body))
        if all(tag == " " for tag, _ in lines):
            raise self.fail("the hunk changes nothing", start)
        if self.peek()[:1] in {b" ", b"+", b"\\"} or (
            self.peek()[:1] == b"-" and not self.peek().startswith((b"--- ", b"-- ", b"--\n"))
        ):
            raise self.fail("more lines than the counts in the hunk line say")
        return Hunk(number=number, old_start=int(match[1]), new_start=int(match[3]), lines=tuple(lines))


def is_inside(path: str) -> bool:
    """Whether a relative POSIX path stays in its tree and is written in its plain form."""
    pure = PurePosixPath(path)
    return bool(
        path
        and not pure.is_absolute()
        and ".." not in pure.parts
        and str(pure) == path
        and not re.search(r"[\\\x00-\x1f\x7f]|^[A-Za-z]:", path)
    )


def hunk_index(start: int, count: int) -> int:
    """Line number of a hunk as an index: with no lines it names the line before."""
    return start if count == 0 else start - 1


def show_line(line: bytes) -> str:
    """A line for an error message: quoted, its end visible, at most 90 characters."""
    text = repr(line.decode("utf-8", "replace"))
    return text if len(text) <= 90 else text[:87] + "...'"
