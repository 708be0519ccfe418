"""What the checks see of a host. All of it goes through `Probe`, so that a test can be any host."""

from __future__ import annotations

import functools
import os
import resource
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import httpx

from dsv32_image import engine_discovery as engines
from dsv32_image import resolve_debs, resolve_wheels
from dsv32_image.config import load_config
from dsv32_image.errors import EngineError, ImageError
from dsv32_image.fetch import make_client
from dsv32_image.lockfile import Dist, read_lock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsv32_image.engine import Engine

Status = Literal["pass", "warn", "fail"]

# As a shell says it: 127 for a command that is not there, 124 (timeout(1)) for one that does not end.
NOT_THERE = 127
TIMED_OUT = 124
_PATIENCE = 30  # seconds; `nvidia-smi` takes several where the driver has to wake up each of eight GPUs


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one check found. `fix` is the next step, empty if there is nothing to do."""

    check: str
    status: Status
    detail: str
    fix: str = ""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is to be built or run here."""

    variant: str
    root: Path
    cache: Path
    engine: str | None = None
    network: bool = False
    build_only: bool = False

    @property
    def gpu(self) -> bool:
        """Whether a GPU is to be used."""
        return self.variant != "cpu" and not self.build_only


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a command ended and what it printed."""

    code: int
    out: str = ""
    err: str = ""

    @property
    def ok(self) -> bool:
        """Whether it ended well."""
        return self.code == 0

    @property
    def last_words(self) -> str:
        """The last line of what it printed, standard error first."""
        lines = self.err.strip().splitlines() or self.out.strip().splitlines()
        return lines[-1].strip() if lines else f"exit code {self.code}"


@dataclass(frozen=True, kw_only=True)
class Filesystem:
    """Sizes in bytes; `device` tells two file systems apart."""

    device: int
    total: int
    free: int


class Probe(Protocol):
    """The host, as the checks see it. Nothing here raises where something is missing."""

    def run(self, *command: str) -> Result:
        """Run a command without input; code 127 if it is not there, 124 if it did not end."""

    def which(self, program: str) -> str:
        """The path of a program, empty if it is not there."""

    def read(self, path: str) -> str | None:
        """A text file, None if it cannot be read."""

    def list(self, path: str) -> Sequence[str]:
        """The names in a folder, sorted; none if it cannot be read."""

    def exists(self, path: str) -> bool:
        """Whether there is anything of that name."""

    def filesystem(self, path: str) -> Filesystem | None:
        """The file system on which a path lies or would lie."""

    def engine(self, name: str | None) -> Engine:
        """As `engine.choose`.

        Raises:
            EngineError: It is not there or not usable.
        """

    def limit(self, name: str) -> int | None:
        """A soft limit of this process: `memlock` in bytes or `nofile`; None if there is none."""

    def uid(self) -> int:
        """The user's number."""

    def cores(self) -> int:
        """The processors that this process may use."""

    def now(self) -> float:
        """Seconds since 1970 by this host's clock."""

    def index(self) -> str:
        """Ask the package index for a locked file; empty if it answers, else why not."""

    def mirror(self) -> str:
        """Ask the Debian mirror for its list of files; empty if it answers, else why not."""


class HostProbe:
    """This machine, and the project in `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._engines: dict[str | None, Engine | EngineError] = {}

    @functools.cache  # noqa: B019 - one probe a run; several checks ask nvidia-smi the same
    def run(self, *command: str) -> Result:
        """See `Probe`."""
        try:
            done = subprocess.run(
                command,
                check=False,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_PATIENCE,
                # Other languages would say the same things in other words.
                env={**os.environ, "LC_ALL": "C"},
            )
        except subprocess.TimeoutExpired:
            return Result(code=TIMED_OUT, err=f"no answer within {_PATIENCE} s")
        except OSError as error:
            return Result(code=NOT_THERE, err=f"{command[0]}: {error.strerror}")
        return Result(code=done.returncode, out=done.stdout, err=done.stderr)

    def which(self, program: str) -> str:
        """See `Probe`."""
        return shutil.which(program) or ""

    def read(self, path: str) -> str | None:
        """See `Probe`."""
        try:
            return Path(path).read_text(errors="replace")
        except OSError:
            return None

    def list(self, path: str) -> Sequence[str]:
        """See `Probe`."""
        try:
            return sorted(entry.name for entry in Path(path).iterdir())
        except OSError:
            return []

    def exists(self, path: str) -> bool:
        """See `Probe`."""
        try:
            return Path(path).exists()
        except OSError:
            return False

    def filesystem(self, path: str) -> Filesystem | None:
        """See `Probe`."""
        place = Path(path).absolute()
        for folder in (place, *place.parents):
            try:
                device, sizes = folder.stat().st_dev, os.statvfs(folder)
            except OSError:
                continue
            block = sizes.f_frsize
            return Filesystem(device=device, total=sizes.f_blocks * block, free=sizes.f_bavail * block)
        return None

    def engine(self, name: str | None) -> Engine:
        """See `Probe`."""
        # A refusal is remembered too: a daemon that does not answer takes its time each time.
        if name not in self._engines:
            try:
                self._engines[name] = engines.choose(name)
            except EngineError as error:
                self._engines[name] = error
        found = self._engines[name]
        if isinstance(found, EngineError):
            raise found
        return found

    def limit(self, name: str) -> int | None:
        """See `Probe`."""
        kind = {"memlock": resource.RLIMIT_MEMLOCK, "nofile": resource.RLIMIT_NOFILE}[name]
        soft, _hard = resource.getrlimit(kind)
        return None if soft == resource.RLIM_INFINITY else soft

    def uid(self) -> int:
        """See `Probe`."""
        return os.geteuid()

    def cores(self) -> int:
        """See `Probe`."""
        return len(os.sched_getaffinity(0))

    def now(self) -> float:
        """See `Probe`."""
        return time.time()

    def index(self) -> str:
        """See `Probe`."""
        try:
            dists = [f for f in read_lock(self._root).files() if isinstance(f, Dist)]
            smallest = min(dists, key=lambda dist: dist.size)
            found = resolve_wheels.urls(load_config(self._root), [smallest])
        except (ImageError, ValueError) as error:
            return str(error)
        return "" if smallest.sha256 in found else f"it does not have the locked {smallest.file}"

    def mirror(self) -> str:
        """See `Probe`."""
        try:
            url = f"{resolve_debs.host_mirrors().main}/dists/{load_config(self._root).suites[0]}/Release"
            with make_client() as client:
                client.get(url).raise_for_status()
        except (ImageError, httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            return str(error) or type(error).__name__
        return ""
