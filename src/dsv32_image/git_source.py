"""Commits of a remote git repository, and a bare clone of our own that holds them.

A name (tag or branch) is looked up once, when locking. From then on there is only the commit: it is fetched
alone (`--depth 1`) into `<cache home>/git/`, and kept there by a ref of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsv32_image.errors import DownloadError, RefError, WheelError
from dsv32_image.files import disk_full_is_clear, only_one, temporary_folder
from dsv32_image.git_spec import COMMIT, shown
from dsv32_image.patching import FileState
from dsv32_image.proc import require

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_SHORT = re.compile(r"[0-9a-fA-F]{4,39}")
_KINDS = {"refs/tags/": "tag", "refs/heads/": "branch"}
# Variables that would make git work on another repository than the one that we name.
_LOCAL = frozenset(
    f"GIT_{name}"
    for name in (
        *("DIR", "WORK_TREE", "INDEX_FILE", "COMMON_DIR", "PREFIX", "NAMESPACE", "SHALLOW_FILE"),
        *("OBJECT_DIRECTORY", "ALTERNATE_OBJECT_DIRECTORIES"),
    )
)
_LOOKUP_SECONDS, _FETCH_SECONDS = 90, 1800
_UNKNOWN = ("not our ref", "unadvertised object", "couldn't find remote ref")
_REFUSED = ("Authentication failed", "could not read Username", "could not read Password", "denied", "403")


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """The commit that a reference names; `kind` is `commit`, `tag`, `branch` or `ref`."""

    commit: str
    kind: str


class _GitError(Exception):
    """git ended with an error; `words` is what it said."""

    def __init__(self, words: str) -> None:
        super().__init__(words)
        self.words = words


class Repository:
    """One remote repository, and the bare clone below the cache home that holds what was fetched of it."""

    def __init__(self, url: str, cache_home: Path) -> None:
        self.url = url
        name = hashlib.sha256(url.encode()).hexdigest()[:16]
        self.folder = cache_home / "git" / f"{name}.git"

    def resolve(self, ref: str) -> Resolved:
        """The commit that a name stands for now, annotated tags peeled; asks the remote.

        Raises:
            RefError: There is no such name or commit, it is a short hash, or a tag and a branch differ.
            DownloadError: The remote cannot be reached, or wants a password.
            ToolMissingError: There is no git.
        """
        if COMMIT.fullmatch(ref.lower()):
            return Resolved(commit=self.bring(ref.lower()), kind="commit")
        if ref == "HEAD" or ref.startswith("refs/"):
            kinds = {ref: next((kind for top, kind in _KINDS.items() if ref.startswith(top)), "ref")}
        else:
            kinds = {top + ref: kind for top, kind in _KINDS.items()}
        patterns = [pattern for name in kinds for pattern in (name, f"{name}^{{}}")]
        try:
            listing = self._git("ls-remote", "--", self.url, *patterns, seconds=_LOOKUP_SECONDS).decode()
        except _GitError as error:
            raise self._unreachable(error) from None
        found = {name: commit for commit, name in (line.split("\t", 1) for line in listing.splitlines())}
        commits = {
            kind: found.get(f"{name}^{{}}") or found[name] for name, kind in kinds.items() if name in found
        }
        if not commits:
            if _SHORT.fullmatch(ref):
                raise RefError(
                    f"{ref} is no tag or branch of {self.url}, and a server cannot be asked for a short hash",
                    hint="give all 40 digits of the commit",
                )
            raise RefError(
                f"{self.url} has no tag or branch '{ref}'", hint=f"`git ls-remote {self.url}` lists them"
            )
        if len(set(commits.values())) > 1:
            raise RefError(
                f"'{ref}' is both a tag and a branch of {self.url}, at different commits",
                hint=f"write refs/tags/{ref} or refs/heads/{ref}",
            )
        kind, commit = next(iter(commits.items()))
        return Resolved(commit=self.bring(commit), kind=kind)

    def bring(self, commit: str) -> str:
        """Have a commit in the clone, fetched if it is not there; the commit itself (a tag's id is peeled).

        Raises:
            RefError: The remote has no such object, or it is no commit.
            DownloadError, DiskFullError: It cannot be fetched.
        """
        with only_one(self.folder.with_suffix(".busy"), wait=True), disk_full_is_clear(self.folder.parent):
            self._prepare()
            peeled = self._commit(commit)
            if peeled is None:
                self._fetch(commit)
                peeled = self._commit(commit)
        if peeled is None:
            raise RefError(f"{commit} in {self.url} is no commit", hint="`git cat-file -t` says what it is")
        return peeled

    def tree(self, commit: str) -> str:
        """The hash of the tree of a commit that `bring` brought.

        Raises:
            DownloadError: The clone is damaged; it is removed.
        """
        with self._whole():
            return self._git("rev-parse", "--verify", f"{commit}^{{tree}}").decode().strip()

    def files(self, commit: str, folders: Sequence[str]) -> dict[str, FileState]:
        """The files of a commit: those at the top, and below some folders (none: below all).

        Raises:
            WheelError: A folder is not there, or holds a link or a submodule.
            DownloadError: The clone is damaged; it is removed.
        """
        with self._whole():
            listing = self._git("ls-tree", "-r", "-z", "--full-tree", commit)
        entries: dict[str, tuple[str, str]] = {}
        for line in listing.decode("utf-8", "surrogateescape").split("\0")[:-1]:
            about, _, path = line.partition("\t")
            mode, _, name = about.split(" ")
            top, below, _ = path.partition("/")
            regular = mode in {"100644", "100755"}
            if (below and folders and top not in folders) or (not below and not regular):
                continue
            if not regular:
                raise WheelError(
                    f"{self.url} at {commit[:12]}: {path} is a link or a submodule, "
                    "which the source archive of a Python package does not hold"
                )
            entries[path] = (mode, name)
        for folder in folders:
            if not any(path.startswith(f"{folder}/") for path in entries):
                raise WheelError(
                    f"{self.url} at {commit[:12]} has no folder {folder}/", hint="is it the right repository?"
                )
        with self._whole():
            return self._blobs(entries)

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        try:
            yield
        except (_GitError, ValueError) as error:
            shutil.rmtree(self.folder, ignore_errors=True)
            words = str(error).strip().splitlines()[:1]
            raise DownloadError(
                f"the clone of {self.url} in {self.folder} was damaged and is removed ({''.join(words)})",
                hint="run it again; check the disk if it comes back",
            ) from None

    def _blobs(self, entries: dict[str, tuple[str, str]]) -> dict[str, FileState]:
        wanted = "".join(f"{name}\n" for _, name in entries.values())
        output = self._git("cat-file", "--batch", stdin=wanted.encode())
        files, at = {}, 0
        for path, (mode, name) in entries.items():
            end = output.index(b"\n", at)
            _, kind, count = output[at:end].split(b" ")
            if kind != b"blob":
                raise ValueError(f"{name} is a {kind.decode()}")
            at = end + 1 + int(count)
            files[path] = FileState(output[end + 1 : at], mode == "100755")
            at += 1
        return files

    def _prepare(self) -> None:
        if not (self.folder / "HEAD").exists():
            with temporary_folder(self.folder) as fresh:
                try:
                    self._git("init", "--quiet", "--bare", "--template=", str(fresh))
                except _GitError as error:
                    raise self._unreachable(error) from None
                shutil.rmtree(self.folder, ignore_errors=True)
                fresh.rename(self.folder)
        # We hold the lock of this clone, so these are of a git that was killed.
        for stale in [*self.folder.glob("*.lock"), *self.folder.glob("refs/**/*.lock")]:
            stale.unlink()

    def _commit(self, commit: str) -> str | None:
        """The commit, if it was fetched: the ref is written when all of its objects are there."""
        try:
            name = f"refs/pins/{commit}^{{commit}}"
            return self._git("rev-parse", "--quiet", "--verify", name).decode().strip()
        except _GitError:
            return None

    def _fetch(self, commit: str) -> None:
        pin = f"refs/pins/{commit}"
        options = ("fetch", "--quiet", "--no-tags", "--no-write-fetch-head")
        try:
            self._git(*options, "--depth=1", "--", self.url, f"+{commit}:{pin}", seconds=_FETCH_SECONDS)
        except _GitError as error:
            if not any(words in error.words for words in _UNKNOWN):
                raise self._unreachable(error) from None
            if "unadvertised" not in error.words:
                raise self._no_commit(commit) from None
        else:
            return
        # An old server gives only what it lists: fetch all of that, and look again.
        try:
            self._git(*options, "--", self.url, "+refs/*:refs/all/*", seconds=_FETCH_SECONDS)
            self._git("update-ref", pin, commit)
        except _GitError as error:
            if "nonexistent object" in error.words:
                raise self._no_commit(commit) from None
            raise self._unreachable(error) from None

    def _no_commit(self, commit: str) -> RefError:
        return RefError(
            f"{self.url} has no commit {commit}",
            hint="check the digits and the repository; a commit that no branch or tag holds may be gone",
        )

    def _unreachable(self, error: _GitError) -> DownloadError:
        lines = error.words.strip().splitlines()
        telling = [line for line in lines if line.startswith(("fatal:", "error:", "remote:", "ssh:"))]
        words = "\n".join(f"  | {shown(line)}" for line in (telling or lines)[-3:])
        hint = "check the URL, network and proxy (git's own settings count)"
        if any(word in error.words for word in _REFUSED):
            hint = "the repository may be private or misspelt; set up git's credential helper or an ssh key"
        return DownloadError(f"{self.url} cannot be read by git:\n{words}", hint=hint)

    def _git(self, *words: str, stdin: bytes = b"", seconds: float | None = None) -> bytes:
        git = require("git", "git")
        env = {key: value for key, value in os.environ.items() if key not in _LOCAL}
        env |= {
            "LC_ALL": "C.UTF-8",
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_ALLOW_PROTOCOL": "https:http:ssh:git:file",
        }
        env.setdefault("GIT_SSH_COMMAND", "ssh -oBatchMode=yes -oConnectTimeout=30")
        settings = ("gc.auto=0", "http.lowSpeedLimit=1000", "http.lowSpeedTime=60", "protocol.version=2")
        command = [git, *(word for setting in settings for word in ("-c", setting))]
        # Never in the folder that the user happens to stand in, whose settings are of another repository.
        here = self.folder.exists()
        command += [f"--git-dir={self.folder}"] if here else []
        try:
            done = subprocess.run(
                [*command, *words],
                cwd=self.folder if here else "/",
                env=env,
                input=stdin,
                capture_output=True,
                check=False,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            raise _GitError(f"no answer within {seconds:.0f} s") from None
        if done.returncode:
            raise _GitError(done.stderr.decode("utf-8", "replace"))
        return done.stdout
