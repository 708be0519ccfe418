"""Which Debian packages: the host's apt resolves for trixie in a private folder, from the host's mirror."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from debian.deb822 import Deb822

from dsv32_image import proc
from dsv32_image.errors import DownloadError, ResolveError, ToolMissingError
from dsv32_image.lockfile import Deb

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
SOURCES = Path("/etc/apt")
MAIN, SECURITY = "debian", "debian-security"


@dataclass(frozen=True, kw_only=True)
class Mirrors:
    """Base URLs of the two archives, from the host's own apt settings."""

    main: str
    security: str

    def base(self, archive: str) -> str:
        """The base URL of an archive named in the lock."""
        return self.security if archive == SECURITY else self.main


def host_mirrors(sources: Path = SOURCES) -> Mirrors:
    """The Debian mirrors this host's apt uses; $DSV32_DEBIAN_MIRROR (and _SECURITY_MIRROR) decide if set.

    Raises:
        ToolMissingError: The host has no Debian sources and nothing is set.
    """
    main = os.environ.get("DSV32_DEBIAN_MIRROR", "")
    security = os.environ.get("DSV32_DEBIAN_SECURITY_MIRROR", "")
    for uri, suite in _apt_sources(sources):
        kind = _archive_of(uri, suite)
        if kind == SECURITY:
            security = security or uri
        elif kind == MAIN:
            main = main or uri
    if not main:
        raise ToolMissingError(
            "this host's apt settings name no Debian mirror",
            hint="set DSV32_DEBIAN_MIRROR (and DSV32_DEBIAN_SECURITY_MIRROR) to the mirror you use",
        )
    # Without a security entry the main host usually serves it beside the archive.
    return Mirrors(main=main.rstrip("/"), security=(security or main.rstrip("/") + "-security").rstrip("/"))


def _archive_of(uri: str, suite: str) -> str:
    last = uri.rstrip("/").rsplit("/", 1)[-1]
    if suite.endswith("-security") or last == SECURITY:
        return SECURITY
    return MAIN if last == MAIN else ""


def _apt_sources(sources: Path) -> Iterator[tuple[str, str]]:
    """(URI, suite) of every deb entry, one-line and deb822 style."""
    lists = [sources / "sources.list", *sorted((sources / "sources.list.d").glob("*.list"))]
    for path in lists:
        if path.exists():
            for line in path.read_text(errors="replace").splitlines():
                if match := re.match(r"\s*deb\s+(?:\[[^]]*\]\s+)?(\S+)\s+(\S+)", line):
                    yield match.group(1), match.group(2)
    for path in sorted((sources / "sources.list.d").glob("*.sources")):
        with path.open(errors="replace") as file:
            for stanza in Deb822.iter_paragraphs(file):
                if "deb" in stanza.get("Types", "").split() and stanza.get("Enabled", "yes").lower() != "no":
                    for uri in stanza.get("URIs", "").split():
                        for suite in stanza.get("Suites", "").split():
                            yield uri, suite


def resolve(
    wanted: Iterable[str], *, suites: Iterable[str], mirrors: Mirrors, keep: Mapping[str, str]
) -> tuple[Deb, ...]:
    """The closure of `wanted` and of everything essential, as one apt transaction.

    Args:
        wanted: Package names.
        suites: trixie, trixie-updates, trixie-security.
        mirrors: Where from.
        keep: Versions to prefer, name to version (those of the old lock).

    Raises:
        ToolMissingError: No apt, or no Debian keyring.
        DownloadError: The mirror cannot be reached.
        ResolveError: apt finds no solution.
    """
    apt = proc.require("apt-get", "apt (Debian or Ubuntu; elsewhere use the lock as it is)")
    if not KEYRING.exists():
        raise ToolMissingError(
            "Debian's archive keys are not installed", hint="apt-get install debian-archive-keyring"
        )
    with tempfile.TemporaryDirectory(prefix="dsv32-apt-") as name:
        root = Path(name)
        config = _private_apt(root, suites, mirrors, keep)
        env = {"APT_CONFIG": str(config), "LC_ALL": "C.UTF-8"}
        proc.run(
            [apt, "update", "--error-on=any"],
            what=f"reading the package lists of {mirrors.main}",
            error=DownloadError,
            hint="check network and proxy, and the mirror in apt's settings or DSV32_DEBIAN_MIRROR",
            env=env,
        )
        names = [*wanted, "?essential", "?priority(required)"]
        plan = proc.run(
            [apt, "install", "--yes", "--print-uris", "--no-install-recommends", *names],
            what="resolving the Debian packages",
            error=ResolveError,
            hint="change `debs` under [tool.dsv32-image] in pyproject.toml",
            env=env,
        )
        chosen = set()
        for uri in re.findall(r"^'([^']+)' \S+ \d+", plan, re.MULTILINE):
            archive = SECURITY if uri.startswith(mirrors.security + "/") else MAIN
            chosen.add((archive, unquote(uri.removeprefix(mirrors.base(archive) + "/"))))
        found = _read_index(root / "state" / "lists", chosen)
    if absent := chosen - found.keys():
        raise ResolveError(
            f"apt names {min(absent)[1]}, which its own package lists lack", hint="run `nox -s lock` again"
        )
    return tuple(sorted(found.values(), key=lambda d: d.name))


def _private_apt(root: Path, suites: Iterable[str], mirrors: Mirrors, keep: Mapping[str, str]) -> Path:
    for folder in ("state/lists/partial", "cache/archives/partial", "etc/preferences.d", "etc/apt.conf.d"):
        (root / folder).mkdir(parents=True)
    (root / "state/status").touch()
    sources = []
    for suite in suites:
        base = mirrors.base(SECURITY if suite.endswith("-security") else MAIN)
        sources.append(f"deb [signed-by={KEYRING}] {base} {suite} main\n")
    (root / "etc/sources.list").write_text("".join(sources))
    pins = [f"Package: {n}\nPin: version {v}\nPin-Priority: 1001\n\n" for n, v in sorted(keep.items())]
    (root / "etc/preferences").write_text("".join(pins))
    # The host's proxies and certificates go along; its sources, pins and architectures do not.
    dump = subprocess.run(
        ["apt-config", "dump", "Acquire"], capture_output=True, text=True, check=False
    ).stdout
    transport = ("Acquire::http", "Acquire::https", "Acquire::ftp", "Acquire::socks")
    acquire = "".join(f"{line}\n" for line in dump.splitlines() if line.startswith(transport))
    settings = f"""
Dir "{root}";
Dir::State "{root}/state";
Dir::State::status "{root}/state/status";
Dir::Cache "{root}/cache";
Dir::Etc "{root}/etc";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::trustedparts "/dev/null";
Dir::Bin::Methods "/usr/lib/apt/methods";
APT::Architecture "amd64";
APT::Architectures {{ "amd64"; }};
APT::Install-Recommends "false";
APT::Sandbox::User "root";
Acquire::GzipIndexes "false";
Acquire::Languages "none";
Acquire::Retries "4";
"""
    config = root / "apt.conf"
    config.write_text(acquire + settings)
    return config


def _read_index(lists: Path, chosen: set[tuple[str, str]]) -> dict[tuple[str, str], Deb]:
    """The chosen packages, by archive and pool path, from the downloaded lists."""
    index = {}
    for path in sorted(lists.glob("*_Packages")):
        archive = SECURITY if "-security_dists_" in path.name else MAIN
        for block in path.read_text(encoding="utf-8").split("\n\n"):
            match = re.search(r"^Filename: (.+)$", block, re.MULTILINE)
            # Parsing all 70,000 stanzas takes 15 s, those of interest none.
            if match and (archive, match.group(1)) in chosen:
                stanza = Deb822(block)
                index[archive, match.group(1)] = Deb(
                    name=stanza["Package"],
                    version=stanza["Version"],
                    arch=stanza["Architecture"],
                    archive=archive,
                    path=stanza["Filename"],
                    size=int(stanza["Size"]),
                    sha256=stanza["SHA256"],
                )
    return index
