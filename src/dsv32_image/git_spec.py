"""How a git source is written: `git+URL@REF`, without credentials."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from dsv32_image.errors import UsageError

_REF = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./+-]*")
_URL = re.compile(r"[!#-&(-\[\]-_a-~]+")  # printable ASCII that needs no quoting in TOML
_EXAMPLE = "git+https://HOST/PATH@REF, REF being a tag, a branch or all 40 digits of a commit"
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, kw_only=True)
class GitSpec:
    """A repository's URL (without credentials) and a name or commit in it."""

    repo: str
    ref: str


def parse_spec(text: str) -> GitSpec:
    """Take `git+URL@REF` apart.

    Raises:
        UsageError: It is written otherwise, or the URL carries a password, token, query or fragment. What
            looks like a secret is not repeated in the message.
    """
    url = text.removeprefix("git+")
    if url == text or "://" not in url or not _URL.fullmatch(url):
        raise UsageError(f"'{shown(text)}' is no git URL with a scheme", hint=f"write {_EXAMPLE}")
    try:
        parts = urlsplit(url)
        user, password = parts.username, parts.password
    except ValueError:
        raise UsageError("the git URL cannot be understood", hint=f"write {_EXAMPLE}") from None
    if parts.scheme not in {"https", "http", "ssh", "git", "file"}:
        raise UsageError(
            f"git over '{parts.scheme}' is not supported",
            hint="https, http, ssh, git or file (a local folder)",
        )
    if password is not None or (user is not None and parts.scheme != "ssh"):
        raise UsageError(
            f"the URL of {parts.hostname} carries credentials, which pyproject.toml and the lock would keep",
            hint="leave them out; git asks its credential helper, or uses ~/.netrc or ssh keys",
        )
    if parts.query or parts.fragment:
        raise UsageError(
            f"the URL of {parts.hostname or 'the repository'} has a query or a fragment",
            hint=f"write {_EXAMPLE}",
        )
    path, at, ref = parts.path.rpartition("@")
    if not at or not path.strip("/"):
        raise UsageError(f"'{text}' names no commit, tag or branch", hint=f"write {_EXAMPLE}")
    if not _REF.fullmatch(ref) or ".." in ref or ref.endswith((".lock", "/", ".")):
        raise UsageError(f"'{ref}' cannot be a tag, branch or commit of git", hint=f"write {_EXAMPLE}")
    return GitSpec(repo=parts._replace(path=path).geturl(), ref=ref)


def shown(text: str) -> str:
    """The text without what stands before an @ in its authority: a password has no place in a log."""
    return re.sub(r"(://)[^/@\s]*@", r"\1…@", text)
