"""Step `lock`: from pyproject.toml and patches/ to versions.lock."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dsv32_image import git_archive, resolve_debs, resolve_wheels
from dsv32_image.archives import read_archive
from dsv32_image.config import normalise
from dsv32_image.errors import LockEditedError, LockMissingError, PatchError, ResolveError, UsageError
from dsv32_image.families import check_families
from dsv32_image.lockfile import Deb, Dist, GitDist, LayerLock, Lock, read_lock, write_lock
from dsv32_image.patch_tests import tests_of
from dsv32_image.patching import read_series, series_sha256
from dsv32_image.store import Store, cache_home
from dsv32_image.wheels import apply_to_files

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from dsv32_image.config import Config, VariantConfig
    from dsv32_image.ui import Ui


def patch_series(root: Path) -> dict[str, str]:
    """The sha256 of each patch series below patches/, by package."""
    folder = root / "patches"
    return {path.name: series_sha256(path) for path in sorted(folder.iterdir()) if (path / "series").exists()}


def make_lock(
    root: Path,
    config: Config,
    ui: Ui,
    *,
    upgrade: Iterable[str] | None = None,
    store: Store | None = None,
    refs: Mapping[str, str] | None = None,
) -> bool:
    """Write versions.lock if anything it depends on changed; True if it was written.

    Args:
        root: The project's folder.
        config: What is asked for.
        ui: Where to say what happens.
        upgrade: None keeps every version that still fits; names let those move; an empty
            collection lets all of them move.
        store: Where sources lie that series are tried on; None tries none.
        refs: By name, which tag or branch the commit of a git requirement was looked up by just now; the
            series of these is not tried on what was locked before.

    Raises:
        ConfigError: A git requirement names no commit.
        RefError, WheelError: See `git_archive.pin_source`.
        UsageError: A name to upgrade is in no section of the lock.
        ResolveError, DownloadError, ToolMissingError: See the resolvers.
    """
    patches = patch_series(root)
    old = _old_lock(root, ui)
    _check_series(root, old, store, skip=refs or {})
    if old and upgrade is None and old.inputs == config.inputs:
        if dict(old.patches) == patches:
            ui.say("   lock  versions.lock is up to date")
            return False
        # Only a series changed: nothing to resolve, and no network needed.
        write_lock(root, replace(old, patches=patches))
        ui.say("   lock  took up the changed patch series; no version moved")
        return True
    moving = None if upgrade is None else {normalise(name) for name in upgrade}
    _check_names(old, moving)
    with ui.step("lock", "resolving what pyproject.toml asks for"):
        lock = _resolve(config, patches, old, moving, store or Store(cache_home()), refs or {})
    if old and replace(lock, digest="") == replace(old, digest=""):
        ui.say("   lock  nothing newer that fits; versions.lock unchanged")
        return False
    write_lock(root, lock)
    rows = changes(old, lock)
    if rows:
        ui.table("versions.lock", ("what", "was", "is"), rows)
    else:
        ui.say("   lock  took up pyproject.toml as it is now; no version moved")
    if store:
        _say_misfits(root, lock, store, ui)
    return True


def changes(old: Lock | None, new: Lock) -> list[tuple[str, str, str]]:
    """What moved between two locks: rows (variant/layer/name, version before, version after)."""
    before, after = _versions(old) if old else {}, _versions(new)
    rows = []
    for key in sorted(before.keys() | after.keys()):
        was, now = before.get(key, "-"), after.get(key, "-")
        if was != now:
            rows.append((key, was, now))
    return rows


def _check_series(root: Path, old: Lock | None, store: Store | None, *, skip: Iterable[str] = ()) -> None:
    """Refuse a malformed series, one without tests, and one that does not apply to a source at hand.

    Raises:
        PatchError: See `patching` and `patch_tests`.
    """
    sources = {item.name: item for item in old.files() if isinstance(item, Dist)} if old else {}
    for name in patch_series(root):
        patches = read_series(root / "patches" / name)
        for patch in patches if (root / "smoke").is_dir() else ():
            tests_of(patch, root)
        if store and name in sources and name not in skip and store.has(sources[name]):
            files = read_archive(store.path(sources[name].sha256))
            apply_to_files(files, patches, allow_offset=isinstance(sources[name], GitDist))


def _say_misfits(root: Path, lock: Lock, store: Store, ui: Ui) -> None:
    """Say where a series does not apply to what was just locked; `patch edit`, which mends it, needs that."""
    try:
        _check_series(root, lock, store)
    except PatchError as error:
        ui.say(f"   lock  the image cannot be built yet: {error.message}\n  next: {error.hint}")


def _old_lock(root: Path, ui: Ui) -> Lock | None:
    try:
        return read_lock(root)
    except LockMissingError:
        return None
    except LockEditedError as error:
        # Writing a new one mends it, but without the pins of the old.
        ui.say(f"   lock  {error.message}; resolving anew, every version may move")
        return None


def _resolve(
    config: Config,
    patches: Mapping[str, str],
    old: Lock | None,
    moving: set[str] | None,
    store: Store,
    refs: Mapping[str, str],
) -> Lock:
    sources = git_archive.pinned_sources(config, old, refs, store)
    compile_tools = resolve_wheels.resolve_compile_tools(
        config, _kept({d.name: d.version for d in old.compile_tools} if old else {}, moving)
    )
    git_archive.require_buildable(config, sources, compile_tools)
    mirrors = resolve_debs.host_mirrors()
    tool_debs = resolve_debs.resolve(
        config.tool_debs,
        suites=config.suites,
        mirrors=mirrors,
        keep=_kept({d.name: d.version for d in old.tool_debs} if old else {}, moving),
    )
    variants: dict[str, tuple[LayerLock, ...]] = {}
    compile_debs: dict[str, tuple[Deb, ...]] = {}
    for variant in config.variants:
        locked = old.variants.get(variant.name, ()) if old else ()
        debs = resolve_debs.resolve(
            variant.layers[0].debs,
            suites=config.suites,
            mirrors=mirrors,
            keep=_kept({d.name: d.version for layer in locked for d in layer.debs}, moving),
        )
        kept = {d.name: d.version for d in old.compile_debs.get(variant.name, ())} if old else {}
        compile_debs[variant.name] = _compile_debs(config, variant, debs, mirrors, _kept(kept, moving))
        # A release must not be preferred by the version of a commit.
        held = (d for layer in locked for d in layer.wheels if not isinstance(d, GitDist))
        wheels = resolve_wheels.resolve_variant(
            config, variant, _kept({d.name: d.version for d in held}, moving), sources
        )
        check_families(variant.name, [d for section in wheels.values() for d in section])
        variants[variant.name] = tuple(
            LayerLock(name=layer.name, debs=debs if layer.debs else (), wheels=wheels[layer.name])
            for layer in variant.layers
        )
    return Lock(
        epoch=config.epoch,
        inputs=config.inputs,
        patches=dict(patches),
        tools=resolve_wheels.resolve_tools(config),
        tool_debs=tool_debs,
        compile_tools=compile_tools,
        compile_debs={name: debs for name, debs in compile_debs.items() if debs},
        variants=variants,
    )


def _compile_debs(
    config: Config,
    variant: VariantConfig,
    base: tuple[Deb, ...],
    mirrors: resolve_debs.Mirrors,
    keep: Mapping[str, str],
) -> tuple[Deb, ...]:
    """What the compiler's packages add to the base layer of a variant.

    Raises:
        ResolveError: They need another version of something in the base layer.
    """
    there = {deb.name: deb.version for deb in base}
    if all(name in there for name in config.compile_debs):
        return ()
    both = resolve_debs.resolve(
        [*variant.layers[0].debs, *config.compile_debs],
        suites=config.suites,
        mirrors=mirrors,
        keep={**keep, **there},
    )
    for deb in both:
        if there.get(deb.name, deb.version) != deb.version:
            raise ResolveError(
                f"the compiler for variant {variant.name} needs {deb.name} {deb.version}, "
                f"its base layer has {there[deb.name]}",
                hint=f"nox -s lock -- --upgrade {deb.name}",
            )
    return tuple(deb for deb in both if deb.name not in there)


def _kept(versions: dict[str, str], moving: set[str] | None) -> dict[str, str]:
    """The versions to hold on to: all by default, none on a full upgrade."""
    if moving is None:
        return versions
    if not moving:
        return {}
    return {name: version for name, version in versions.items() if normalise(name) not in moving}


def _check_names(old: Lock | None, moving: set[str] | None) -> None:
    if not old or not moving:
        return
    known = {normalise(name.rsplit("/", 1)[-1]) for name in _versions(old)}
    if unknown := sorted(moving - known):
        raise UsageError(
            f"nothing named '{unknown[0]}' is locked, so it cannot be upgraded",
            hint="versions.lock lists the names",
        )


def _versions(lock: Lock) -> dict[str, str]:
    tools: list[Deb | Dist] = [*lock.tools, *lock.tool_debs, *lock.compile_tools]
    found = {f"tools/{item.name}": item.version for item in tools}
    for variant, debs in lock.compile_debs.items():
        found.update({f"tools/{variant}/{deb.name}": deb.version for deb in debs})
    for variant, layers in lock.variants.items():
        for layer in layers:
            items: list[Deb | Dist] = [*layer.debs, *layer.wheels]
            for item in items:
                found[f"{variant}/{layer.name}/{item.name}"] = item.version
    found.update({f"patches/{name}": sha[:12] for name, sha in lock.patches.items()})
    return found
