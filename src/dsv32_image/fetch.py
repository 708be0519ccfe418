"""Step `fetch`: bring every locked file into the store, checked while it streams."""

from __future__ import annotations

import hashlib
import ssl
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from dsv32_image.errors import DownloadError, HashMismatchError
from dsv32_image.files import disk_full_is_clear

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from dsv32_image.store import Locked, Store
    from dsv32_image.ui import Ui

WORKERS = 6
ATTEMPTS = 5
_BLOCK = 1 << 18
_GONE = {403, 404, 410}
_RESUMABLE = 206


@dataclass(frozen=True, kw_only=True)
class Source:
    """A locked file and where this host gets it from."""

    item: Locked
    url: str


def make_client() -> httpx.Client:
    """A client with the host's proxies, .netrc and certificates (SSL_CERT_FILE, else the system's)."""
    # httpx would use its own bundle; a company's CA is in the system's, where apt and uv look too.
    context = ssl.create_default_context()
    return httpx.Client(verify=context, follow_redirects=True, timeout=httpx.Timeout(60, connect=20))


def fetch_all(
    store: Store,
    sources: Sequence[Source],
    ui: Ui,
    *,
    client: httpx.Client,
    pause: Callable[[float], None] = time.sleep,
) -> int:
    """Download what the store lacks, several at a time. Returns the number of bytes received.

    Raises:
        DownloadError: A file could not be had after several attempts.
        HashMismatchError: A file has other bytes than the lock says. Nothing of it is kept.
        DiskFullError: No space left.
    """
    received = 0
    guard = threading.Lock()
    stop = threading.Event()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(
        *columns, console=ui.console, transient=True, disable=not ui.console.is_terminal
    ) as progress:
        total = sum(s.item.size for s in sources)
        bar = progress.add_task(f"{len(sources)} files", total=total)

        def advance(count: int) -> None:
            nonlocal received
            with guard:
                received += max(count, 0)
                progress.advance(bar, count)

        with ThreadPoolExecutor(WORKERS) as pool:
            # The largest first: the last worker is then not left alone with one.
            ordered = sorted(sources, key=lambda s: -s.item.size)
            jobs = [pool.submit(_fetch_one, store, s, client, advance, pause, stop) for s in ordered]
            done, pending = wait(jobs, return_when=FIRST_EXCEPTION)
            if any(job.exception() for job in done):
                stop.set()
                for job in pending:
                    job.cancel()
    for job in jobs:
        if not job.cancelled() and (error := job.exception()):
            raise error
    return received


class _Stopped(Exception):
    """Another file failed; this download leaves its part for the next run."""


def _fetch_one(
    store: Store,
    source: Source,
    client: httpx.Client,
    advance: Callable[[int], None],
    pause: Callable[[float], None],
    stop: threading.Event,
) -> None:
    item = source.item
    partial = store.partial(item.sha256)
    target = store.path(item.sha256)
    for folder in (partial.parent, target.parent):
        folder.mkdir(parents=True, exist_ok=True)
    problem = ""
    for attempt in range(ATTEMPTS):
        if stop.is_set():
            return
        if attempt:
            pause(min(2.0**attempt / 2, 8.0))
        try:
            with disk_full_is_clear(partial):
                got = _stream(source, partial, client, advance, stop)
        except _Stopped:
            return
        except httpx.HTTPStatusError as error:
            problem = f"the server answers {error.response.status_code}"
            if error.response.status_code in _GONE:
                break
            continue
        except (httpx.TransportError, httpx.StreamError) as error:
            problem = str(error) or type(error).__name__
            continue
        have = partial.stat().st_size
        if have < item.size:
            problem = f"the connection ended after {have} of {item.size} bytes"
            continue
        if got != item.sha256:
            partial.unlink()
            raise HashMismatchError(
                f"{item.file}: wanted sha256 {item.sha256} ({item.size} bytes), got {got} ({have} bytes)",
                hint="nothing was kept; if it comes again, the mirror changed it: `nox -s lock -- --upgrade`",
            )
        partial.replace(target)
        return
    gone = problem.startswith("the server answers")
    raise DownloadError(
        f"{item.file} could not be fetched from {_host(source.url)}: {problem}",
        hint="the version may be gone: `nox -s lock -- --upgrade NAME`, or copy the file into the store"
        if gone
        else "check network, proxy and mirror settings; `nox -s fetch` then goes on where it stopped",
    )


def _stream(
    source: Source, partial: Path, client: httpx.Client, advance: Callable[[int], None], stop: threading.Event
) -> str:
    """Append to `partial` what is still missing; the sha256 of all of it."""
    digest = hashlib.sha256()
    have = 0
    if partial.exists():
        with partial.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
                have += len(block)
        if have >= source.item.size:
            partial.unlink()  # as long as it should be or longer, yet never accepted: not a prefix
            digest, have = hashlib.sha256(), 0
    headers = {"Range": f"bytes={have}-"} if have else {}
    # Compressed transfer would change the bytes that are hashed.
    headers["Accept-Encoding"] = "identity"
    with client.stream("GET", source.url, headers=headers) as response:
        response.raise_for_status()
        if have and response.status_code != _RESUMABLE:
            digest, have = hashlib.sha256(), 0  # the server starts over
        advance(have)
        with partial.open("ab" if have else "wb") as file:
            for block in response.iter_raw(_BLOCK):
                if stop.is_set():
                    raise _Stopped
                file.write(block)
                digest.update(block)
                advance(len(block))
                have += len(block)
                if have > source.item.size:
                    break  # longer than locked: the hash will not fit, do not fill the disk
    return digest.hexdigest()


def _host(url: str) -> str:
    return httpx.URL(url).host or url
