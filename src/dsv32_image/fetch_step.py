"""Glue of step `fetch`: which URL each locked file has on this host, then download what is missing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING
from urllib.parse import quote

from dsv32_image import git_archive, resolve_debs, resolve_wheels
from dsv32_image.errors import DownloadError
from dsv32_image.fetch import Source, fetch_all, make_client
from dsv32_image.lockfile import Deb, Dist, GitDist
from dsv32_image.ui import size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsv32_image.config import Config
    from dsv32_image.store import Locked, Store
    from dsv32_image.ui import Ui


def bring(items: Sequence[Locked], config: Config, store: Store, ui: Ui, *, offline: bool) -> None:
    """Make sure that the store holds all of these files.

    Raises:
        OfflineError: `offline` and something is missing.
        DownloadError, HashMismatchError, DiskFullError: See `fetch_all`.
    """
    missing = store.missing(items)
    if not missing:
        ui.detail(f"  fetch  all {len(items)} files are in the store")
        return
    if offline:
        store.require(items)
    for dist in (item for item in missing if isinstance(item, GitDist)):
        with ui.step("fetch", f"{dist.file} from {dist.repo}"):
            git_archive.remake(dist, store)
    missing = [item for item in missing if not isinstance(item, GitDist)]
    if not missing:
        return
    with ui.step("fetch", f"{len(missing)} files, {size(sum(i.size for i in missing))}"):
        sources = _sources(missing, config)
        start = time.perf_counter()
        with make_client() as client:
            received = fetch_all(store, sources, ui, client=client)
        ui.say(f"{'':>7}  {size(received)} received, {size(received / (time.perf_counter() - start))}/s")


def _sources(missing: Sequence[Locked], config: Config) -> list[Source]:
    debs = [item for item in missing if isinstance(item, Deb)]
    dists = [item for item in missing if isinstance(item, Dist)]
    sources = []
    if debs:
        mirrors = resolve_debs.host_mirrors()
        sources += [
            Source(item=d, url=f"{mirrors.base(d.archive)}/{quote(d.path, safe='/+~')}") for d in debs
        ]
    urls = resolve_wheels.urls(config, dists) if dists else {}
    for dist in dists:
        if dist.sha256 not in urls:
            raise DownloadError(
                f"{dist.file} with the locked sha256 is not on this host's package index",
                hint="another index has another file of that version: `nox -s lock -- --upgrade "
                + f"{dist.name}`, or copy the file into the store",
            )
        sources.append(Source(item=dist, url=urls[dist.sha256]))
    return sources
