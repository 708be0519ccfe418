"""The git repository under `work/<package>/`: a base commit and one commit a patch.

Every call names the repository and shuts out the user's own git settings: a pager, a signing key,
`diff.noprefix` or `autocrlf` must change neither a patch nor a file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsv32_image.diffs import parse_diff, split_lines
from dsv32_image.errors import PatchError, UsageError
from dsv32_image.files import write_atomic
from dsv32_image.patching import FileState, MisfitError, apply_file, has_title, occurrences
from dsv32_image.proc import require

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

BASE = "refs/dsv32/base"

_TRAILER = re.compile(r"Patch-file: ([^\s/]+\.patch) ([0-9a-f]{12})")
_CONFIG = {
    "core.autocrlf": "false",
    "core.fileMode": "true",
    "core.quotePath": "false",
    "commit.gpgSign": "false",
    # Headers may have lines that start with '#'.
    "commit.cleanup": "scissors",
    "gc.auto": "0",
}
# The source's own .gitattributes must not rewrite line ends or run filters; this file goes before them.
_ATTRIBUTES = "* -text -ident !eol !filter !working-tree-encoding !diff !merge\n"
_EXCLUDE = "__pycache__/\n*.pyc\n.pytest_cache/\n.mypy_cache/\n.ruff_cache/\n*.orig\n*.rej\n.*.dsv32-new\n"
_DIFF = (
    "diff",
    *("--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", "--full-index"),
    *("--diff-algorithm=histogram", "--indent-heuristic", "--inter-hunk-context=0"),
    *("--src-prefix=a/", "--dst-prefix=b/"),
)


@dataclass(frozen=True, kw_only=True)
class State:
    """What `edit` and `refresh` note for the next call, in the repository's own folder.

    Attributes:
        source_sha256: Of the archive that was unpacked.
        series_sha256: Of the series that the commits stand for.
        head: Commit at that time.
        pending: Patches that are not commits yet, as one before them did not apply.
    """

    source_sha256: str
    series_sha256: str
    head: str
    pending: tuple[str, ...] = ()

    def with_(
        self, *, head: str, series_sha256: str | None = None, pending: tuple[str, ...] | None = None
    ) -> State:
        """A copy with some fields changed."""
        return dataclasses.replace(
            self,
            head=head,
            series_sha256=self.series_sha256 if series_sha256 is None else series_sha256,
            pending=self.pending if pending is None else pending,
        )


@dataclass(frozen=True, kw_only=True)
class Commit:
    """One commit: its id and parent, the header in its message, and the trailer (empty: a new patch)."""

    id: str
    parent: str
    header: str
    patch_file: str
    recorded: str

    def choose_header(self, on_disk: str | None) -> str:
        """The header that was edited since they were last the same: in the message or in the patch file.

        Raises:
            PatchError: Both were edited, differently.
        """
        if on_disk is None or on_disk == self.header or header_digest(on_disk) == self.recorded:
            return self.header
        if header_digest(self.header) == self.recorded:
            return on_disk
        raise PatchError(
            f"{self.patch_file}: header edited in the patch file and in the message of commit {self.id[:10]}",
            "make both the same, then refresh again",
        )

    def new_name(self, taken: Sequence[str]) -> str:
        """A file name after the title, numbered after those that are taken."""
        title = self.header.split("\n", 1)[0]
        if self.patch_file and not has_title(self.header):  # half of a commit that was split
            title = re.sub(r"^\d+-", "", _stem(self.patch_file))
        slug = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:50].strip("-") or "patch"
        numbers = [int(match[1]) for name in taken if (match := re.match(r"(\d{1,6})-", name))]
        return f"{max(numbers, default=0) + 1:04}-{slug}.patch"


def header_digest(header: str) -> str:
    """Short digest by which an edit of a header is seen."""
    return hashlib.sha256(header.encode()).hexdigest()[:12]


class PatchRepo:
    """`work/<package>/` as a repository.

    Raises:
        UsageError: The folder is there but was not made by `edit`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not self._state_file.is_file():
            raise UsageError(
                f"{folder} is there, but was not made by `nox -s patch -- edit`",
                f"move {folder} away",
            )

    @property
    def _state_file(self) -> Path:
        return self.folder / ".git" / "dsv32.json"

    @classmethod
    def create(cls, folder: Path, message: str) -> PatchRepo:
        """Make a repository of an unpacked source, with all of it in the base commit."""
        repo = cls.__new__(cls)
        repo.folder = folder
        repo.git("init", "--quiet", "--initial-branch=main", "--template=")
        for key, value in _CONFIG.items():
            repo.git("config", key, value)
        info = folder / ".git" / "info"
        info.mkdir(exist_ok=True)
        (info / "attributes").write_text(_ATTRIBUTES)
        (info / "exclude").write_text(_EXCLUDE)
        repo.git("add", "--all", "--force", ".")
        repo.git(
            "commit", "--quiet", "--allow-empty", "--cleanup=verbatim", "--file=-", stdin=message.encode()
        )
        repo.git("update-ref", BASE, "HEAD")
        return repo

    def git(self, *args: str, stdin: bytes = b"") -> bytes:
        """Run git on this repository and return what it prints.

        Raises:
            PatchError: It failed; with its last words.
            ToolMissingError: No git.
        """
        folder = self.folder.resolve()
        env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")} | {
            "GIT_DIR": str(folder / ".git"),
            "GIT_WORK_TREE": str(folder),
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_LITERAL_PATHSPECS": "1",
            "LC_ALL": "C.UTF-8",
            # Who and when are fixed, so that the same patches always give the same commits.
            **{f"GIT_{who}_NAME": "dsv32-image" for who in ("AUTHOR", "COMMITTER")},
            **{f"GIT_{who}_EMAIL": "dsv32-image@localhost" for who in ("AUTHOR", "COMMITTER")},
            **{f"GIT_{who}_DATE": "1700000000 +0000" for who in ("AUTHOR", "COMMITTER")},
        }
        done = subprocess.run(
            [require("git", "git"), "-c", f"core.hooksPath={os.devnull}", *args],
            cwd=folder,
            env=env,
            input=stdin,
            capture_output=True,
            check=False,
        )
        if done.returncode:
            words = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["no output"]
            raise PatchError(f"git {args[0]} failed in {self.folder}: {words[-1]}")
        return done.stdout

    def state(self) -> State:
        """The note of the last `edit` or `refresh`."""
        raw = json.loads(self._state_file.read_text(encoding="utf-8"))
        return State(**{**raw, "pending": tuple(raw["pending"])})

    def write_state(self, state: State) -> None:
        """Leave a note for the next call."""
        write_atomic(self._state_file, (json.dumps(dataclasses.asdict(state), indent=1) + "\n").encode())

    def head(self) -> str:
        """Id of the current commit."""
        return self.git("rev-parse", "HEAD").decode().strip()

    def stage(self) -> None:
        """Put all edits into the index, files that the source's own .gitignore hides included."""
        self.git("add", "--update", ".")
        new = self.git(
            "ls-files", "--others", "-z", f"--exclude-from={self.folder.resolve()}/.git/info/exclude"
        )
        if new:
            self.git("add", "--force", "--pathspec-from-file=-", "--pathspec-file-nul", stdin=new)

    def is_dirty(self) -> bool:
        """Whether anything is staged."""
        return bool(self.git("diff", "--cached", "--name-only", "HEAD"))

    def require_no_rebase(self) -> None:
        """Raise a PatchError in the middle of a rebase, merge or pick: the commits are not all there."""
        for name in ("rebase-merge", "rebase-apply", "MERGE_HEAD", "CHERRY_PICK_HEAD"):
            if (self.folder / ".git" / name).exists():
                raise PatchError(
                    f"{self.folder}: a rebase, merge or cherry-pick is not finished",
                    "git rebase --continue (or --abort) there, then refresh again",
                )

    def commit(self, header: str, patch_file: str) -> None:
        """Commit what is staged as one patch; without a name it is a new one."""
        message = _message(header, patch_file)
        self.git("commit", "--quiet", "--allow-empty", "--cleanup=verbatim", "--file=-", stdin=message)

    def amend(self) -> None:
        """Fold what is staged into the last commit."""
        self.git("commit", "--quiet", "--amend", "--no-edit", "--allow-empty", "--cleanup=verbatim")

    def commits(self) -> list[Commit]:
        """The commits after the base, oldest first.

        Raises:
            PatchError: History was rewritten below the base, or has merges.
        """
        found: list[Commit] = []
        parent = self.git("rev-parse", BASE).decode().strip()
        for line in self.git("rev-list", "--reverse", "--parents", f"{BASE}..HEAD").decode().splitlines():
            commit, *parents = line.split()
            if parents != [parent]:
                raise PatchError(
                    f"{self.folder}: commit {commit[:10]} is a merge or not based on the published source",
                    f"git rebase {BASE} there: patches are one line of commits",
                )
            raw = self.git("cat-file", "commit", commit).partition(b"\n\n")[2].decode("utf-8", "replace")
            body, _, last = raw.rstrip().rpartition("\n")
            trailer = _TRAILER.fullmatch(last)
            found.append(
                Commit(
                    id=commit,
                    parent=parent,
                    header=_header(body, trailer[1]) if trailer else raw.strip(),
                    patch_file=trailer[1] if trailer else "",
                    recorded=trailer[2] if trailer else "",
                )
            )
            parent = commit
        if parent != self.head():
            raise PatchError(
                f"{self.folder}: HEAD is not on top of the source as published", "git checkout main"
            )
        return found

    def reword(self, headers: Sequence[tuple[str, str]]) -> None:
        """Give the commits these headers and patch file names; their trees stay."""
        parent = self.git("rev-parse", BASE).decode().strip()
        for commit, (header, name) in zip(self.commits(), headers, strict=True):
            made = self.git(
                "commit-tree", f"{commit.id}^{{tree}}", "-p", parent, "-F", "-", stdin=_message(header, name)
            )
            parent = made.decode().strip()
        if parent != self.head():
            self.git("update-ref", "-m", "refresh", "HEAD", parent)

    def diff(self, commit: Commit) -> bytes:
        """The commit as a unified diff, checked to give exactly the commit's files when applied.

        Raises:
            PatchError: Empty commit, binary file, symbolic link or mode that a patch cannot carry.
        """
        names = self.git("diff", "--name-only", "--no-renames", "-z", commit.parent, commit.id)
        paths = [name.decode("utf-8", "surrogateescape") for name in names.split(b"\0") if name]
        if not paths:
            raise PatchError(
                f"{self.folder}: commit {commit.id[:10]} ({commit.header.splitlines()[0]}) changes nothing",
                f"drop it there: git rebase -i {BASE}",
            )
        return b"".join(self._file_diff(commit, path) for path in paths)

    def _file_diff(self, commit: Commit, path: str) -> bytes:
        """One file's diff, with as little context as still tells every place in the file from all others.

        At least one line: without any, a hunk that only adds would have nothing to check.
        """
        label = commit.patch_file or commit.id[:10]
        before, after = self._blob(commit.parent, path), self._blob(commit.id, path)
        for context in range(1, len(split_lines(before.data if before else b"")) + 2):
            raw = self.git(*_DIFF, f"-U{context}", commit.parent, commit.id, "--", path)
            if b"\nBinary files " in raw:
                raise PatchError(f"{label}: {path} is binary; patches are for text")
            # Blob ids say nothing that the lock does not, and would make noise in every refresh.
            diff = re.sub(rb"\nindex [0-9a-f]+\.\.[^\n]*", b"", raw, count=1)
            (file,) = parse_diff(diff, label)
            data = before.data if before else b""
            if all(occurrences(data, hunk) == 1 for hunk in file.hunks):
                break
        try:
            state, _ = apply_file(before, file)
        except MisfitError as misfit:
            raise PatchError(f"{label}: {path}: its own diff does not apply: {misfit.where}") from misfit
        if state != after:
            raise PatchError(f"{label}: {path} cannot be carried by a patch (symbolic link or odd mode?)")
        return diff

    def _blob(self, commit: str, path: str) -> FileState | None:
        entry = self.git("ls-tree", "-z", "--full-tree", commit, "--", path).rstrip(b"\0")
        if not entry:
            return None
        mode, kind, blob = entry.partition(b"\t")[0].decode().split()
        if kind != "blob" or mode not in {"100644", "100755"}:
            raise PatchError(f"{path} is a link or a submodule; patches are for regular files")
        return FileState(self.git("cat-file", "blob", blob), mode == "100755")


def _message(header: str, patch_file: str) -> bytes:
    """A commit's message; a header without a title gets the file's name as one, until `_header` reads it."""
    trailer = f"\n\nPatch-file: {patch_file} {header_digest(header)}" if patch_file else ""
    title = f"{_stem(patch_file)}\n\n" if patch_file and not has_title(header) else ""
    return f"{title}{header.rstrip()}{trailer}\n".encode()


def _header(message: str, patch_file: str) -> str:
    """The header in a message whose trailer is off."""
    title, _, rest = message.strip().partition("\n\n")
    return rest.strip() if title == _stem(patch_file) and not has_title(rest.strip()) else message.strip()


def _stem(patch_file: str) -> str:
    return patch_file.removesuffix(".patch")
