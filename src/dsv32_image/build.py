"""Step `build`: from the lock to the canonical image, made by an engine that only runs the Dockerfile."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from typing import TYPE_CHECKING

from dsv32_image import oci
from dsv32_image.background import Background
from dsv32_image.context import make_context
from dsv32_image.errors import ImageLayoutError, UsageError
from dsv32_image.files import (
    link_or_copy,
    only_one,
    refuse_mounts,
    sha256_parts,
    sharing,
    temporary_folder,
    write_atomic,
)
from dsv32_image.identity import image_labels, image_tag
from dsv32_image.layers import plan_layers
from dsv32_image.lock import patch_series
from dsv32_image.lockfile import read_lock, require_fresh
from dsv32_image.oci import OpenLayer
from dsv32_image.rootfs import make_rootfs
from dsv32_image.scratch_tags import remove_all, remove_stale
from dsv32_image.stages import Scratch, engine_layers, finish_layer, start_context
from dsv32_image.tools_image import run_in_container

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from dsv32_image.config import Config, VariantConfig
    from dsv32_image.engine import Engine
    from dsv32_image.layers import LayerPlan
    from dsv32_image.lockfile import Lock
    from dsv32_image.oci import ImageDigest
    from dsv32_image.stages import BuildRequest, ContextRequest
    from dsv32_image.store import Locked
    from dsv32_image.ui import Ui

#: Folders of the cache that builds write to.
_CACHED = ("layers", "compiled")


def build(request: BuildRequest, ui: Ui) -> ImageDigest:
    """Make the image, write it to `dist/<variant>` and load it into the engine.

    Raises:
        BusyError: Another build runs in this folder.
        LockMissingError, LockEditedError, LockStaleError: See `lockfile`.
        ImageError: Whatever a step raises; what was finished before stays usable.
    """
    root, name = request.root, request.variant.name
    with only_one(root / "build" / name / "lock"), sharing(request.cache.home.parent, _CACHED):
        _sweep(root / "build" / name)
        lock = read_lock(root)
        require_fresh(lock, request.config, patch_series(root))
        remove_stale(request.engine)
        plans = plan_layers(root, request.config, request.variant, lock)
        if request.recompile and not any(plan.jobs for plan in plans):
            raise UsageError(f"--recompile: variant '{name}' has no compiled wheels", hint="leave it away")
        labels = image_labels(root, lock, name)
        key = _key(plans, labels)
        layout = root / "dist" / name
        done = None if request.fresh else _finished(layout, key)
        if done is None:
            tags: list[str] = []
            with (
                ExitStack() as stack,
                temporary_folder(root / "build" / name / "layers") as folder,
                Background() as background,
            ):
                # After the background's jobs have ended, some of which use the engine.
                stack.callback(remove_all, request.engine, tags)
                scratch = Scratch(folder=folder, background=background, tags=tags)
                layers, start = _layers(request, lock, plans, scratch, ui)
                config = _image_config(request.config, start, labels)
                writing = background.start(_write, layout, layers, config, name, key)
                _load(request, oci.loadable(layers, config), ui)
                remove_all(request.engine, tags)
                with ui.step("build", f"writing the image to {layout.relative_to(root)}"):
                    done = writing.result()
        else:
            _load(request, oci.loadable_layout(layout), ui)
        return done


def _write(
    layout: Path, layers: Sequence[OpenLayer], config: oci.ImageConfig, name: str, key: str
) -> ImageDigest:
    done = oci.write_layout(layout, [layer.packed() for layer in layers], config, name)
    _note(layout, key, done)
    return done


def full_context(request: ContextRequest, ui: Ui) -> Path:
    """Lay out a context that holds everything, for `docker build` by hand; the folder.

    Raises:
        ImageError: As `build`.
    """
    root, name = request.root, request.variant.name
    work = root / "build" / name
    with only_one(work / "lock"), sharing(request.cache.home.parent, _CACHED):
        lock = read_lock(root)
        require_fresh(lock, request.config, patch_series(root))
        plans = plan_layers(root, request.config, request.variant, lock)
        request.fetch(list(lock.files(name)))
        base = request.cache.get(plans[0])
        if base is None:
            with temporary_folder(work / "layers") as folder, Background() as background:
                scratch = Scratch(folder=folder, background=background)
                base = _base_layer(request, lock, plans[0], scratch, None, ui).packed()
        context = work / "context"
        with ui.step("wheels", "patched wheels and the build context"):
            make_context(
                root,
                request.config,
                lock,
                request.variant,
                plans[1:],
                request.store,
                work / "wheels",
                context,
            )
            # ADD unpacks it: the canonical base layer is a gzip'ed tar of the root file system.
            link_or_copy(base.path, context / "base.tar")
    return context


def _layers(
    request: BuildRequest, lock: Lock, plans: Sequence[LayerPlan], scratch: Scratch, ui: Ui
) -> tuple[list[OpenLayer], Mapping[str, object]]:
    """All layers, made where they are not in the cache, and what a container starts with."""
    found: list[OpenLayer] = []
    for plan in plans:
        layer = None if request.fresh else request.cache.get(plan)
        if layer is None:
            break
        found.append(OpenLayer.of(layer))
    start = request.cache.start(plans[-1])
    missing = plans[len(found) :]
    if not missing and start is not None:
        return found, start
    missing = missing or plans[-1:]
    found = found[: len(plans) - len(missing)]
    names = ", ".join(plan.name for plan in missing)
    ui.say(f"   build  layers to make: {names}; engine: {request.engine.description}")
    wanted: list[Locked] = [*lock.tools]
    for plan in missing:
        wanted += [*plan.section.debs, *plan.section.wheels]
        wanted += lock.compile_files(request.variant.name) if plan.jobs else ()
    request.fetch(wanted)
    by_engine = missing if found else missing[1:]
    context = start_context(request, lock, by_engine, scratch)
    if not found:
        found.append(_base_layer(request, lock, missing[0], scratch, request.engine, ui))
    made, begin = engine_layers(request, lock, plans, found, by_engine, context, scratch, ui)
    return [*found, *made], begin


def _base_layer(
    request: ContextRequest, lock: Lock, plan: LayerPlan, scratch: Scratch, engine: Engine | None, ui: Ui
) -> OpenLayer:
    def run_elsewhere(work: Path, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        run_in_container(engine, lock.tool_debs, request.store, request.fetch, work, command, env, log)

    tar = scratch.folder / "rootfs.tar"
    log = request.root / "build" / request.variant.name / "log" / "rootfs.txt"
    with ui.step("rootfs", f"{len(plan.section.debs)} Debian packages, mmdebstrap"):
        make_rootfs(
            request.root,
            request.config,
            plan.section.debs,
            request.store,
            tar,
            log,
            run_elsewhere=run_elsewhere,
        )
    with ui.step("layer", plan.name), oci.scan_layer(tar) as scanned:
        empty = oci.Tree()
        layer = finish_layer(request, plan, (empty, empty.apply(scanned.change)), [scanned], scratch)
    tar.unlink()
    return layer


def _image_config(config: Config, start: Mapping[str, object], labels: Mapping[str, str]) -> oci.ImageConfig:
    env, entrypoint, cmd = (_texts(start[key]) for key in ("env", "entrypoint", "cmd"))
    return oci.ImageConfig(
        created=config.epoch,
        entrypoint=entrypoint,
        cmd=cmd,
        env=dict(item.split("=", 1) for item in env),
        user=str(start["user"]),
        workdir=str(start["workdir"]),
        labels=labels,
    )


def _texts(value: object) -> tuple[str, ...]:
    return tuple(str(item) for item in value) if isinstance(value, list) else ()


def _sweep(work: Path) -> None:
    """Remove what a killed build could not: temporary names begin with a dot, and we hold the lock."""
    for leftover in work.glob(".*"):
        refuse_mounts(leftover)
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()


def _key(plans: Sequence[LayerPlan], labels: Mapping[str, str]) -> str:
    return sha256_parts(*(plan.key for plan in plans), json.dumps(labels, sort_keys=True))


def is_current(root: Path, config: Config, variant: VariantConfig) -> bool:
    """Whether the image that was last built here is what `build` would give now.

    Raises:
        LockMissingError, LockEditedError: See `lockfile`.
    """
    lock = read_lock(root)
    plans = plan_layers(root, config, variant, lock)
    key = _key(plans, image_labels(root, lock, variant.name))
    return _finished(root / "dist" / variant.name, key) is not None


def built(layout: Path) -> ImageDigest | None:
    """The digest of the image that was last built here, if it is still there."""
    try:
        note = json.loads(layout.with_suffix(".json").read_text())
        return oci.ImageDigest(manifest=note["manifest"], config=note["config"])
    except (OSError, ValueError, KeyError):
        return None


def _finished(layout: Path, key: str) -> ImageDigest | None:
    """The digest of the layout, if it was made from exactly these inputs and is there."""
    try:
        note = json.loads(layout.with_suffix(".json").read_text())
        if note["key"] != key or oci.loadable_layout(layout).id != note["config"]:
            return None
        return oci.ImageDigest(manifest=note["manifest"], config=note["config"])
    except (OSError, ValueError, KeyError, ImageLayoutError):
        return None


def _note(layout: Path, key: str, digest: ImageDigest) -> None:
    note = {"key": key, "manifest": digest.manifest, "config": digest.config}
    write_atomic(layout.with_suffix(".json"), (json.dumps(note, indent=1) + "\n").encode())


def _load(request: BuildRequest, image: oci.LoadableImage, ui: Ui) -> None:
    tag = image_tag(request.variant.name)
    if request.engine.image_id(tag) == image.id:
        return
    with (
        ui.step("build", f"loading {tag} into {request.engine.name}"),
        temporary_folder(request.root / "build" / request.variant.name / "load") as folder,
    ):
        request.engine.load(image, tag, folder)


def clean(root: Path, cache: Path, *, everything: bool) -> list[Path]:
    """Remove what builds left below the project and, if asked, the caches; what was removed.

    Raises:
        BusyError: A build runs in this folder.
    """
    with ExitStack() as held:
        for lock in (root / "build").glob("*/lock"):
            held.enter_context(only_one(lock))
        return _remove(root, cache, everything=everything)


def _remove(root: Path, cache: Path, *, everything: bool) -> list[Path]:
    doomed = [root / "build", root / "dist"]
    if everything:
        doomed += [cache / "layers", cache / "sha256", cache / "partial", cache / "git", cache / "compiled"]
    removed = [path for path in doomed if path.exists()]
    for path in removed:
        refuse_mounts(path)
        shutil.rmtree(path)
    return removed
