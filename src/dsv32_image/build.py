"""Step `build`: from the lock to the canonical image, made by an engine that only runs the Dockerfile."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsv32_image import oci
from dsv32_image.context import make_context
from dsv32_image.errors import BuildError, ImageLayoutError
from dsv32_image.files import link_or_copy, only_one, sha256_parts, temporary_folder, write_atomic
from dsv32_image.layers import LayerCache, LayerPlan, plan_layers
from dsv32_image.lockfile import read_lock, require_fresh
from dsv32_image.lock import patch_series
from dsv32_image.own_wheel import project_version
from dsv32_image.rootfs import make_rootfs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from dsv32_image.config import Config, VariantConfig
    from dsv32_image.engine import Engine
    from dsv32_image.lockfile import Lock
    from dsv32_image.oci import ImageDigest, NamedLayer, Tree
    from dsv32_image.store import Locked, Store
    from dsv32_image.ui import Ui

_STAGE = re.compile(r"ARG KEY_([A-Z0-9]+)\b")


@dataclass(frozen=True, kw_only=True)
class ContextRequest:
    """What to build and where. `fetch` brings files into the store or fails."""

    root: Path
    config: Config
    variant: VariantConfig
    store: Store
    cache: LayerCache
    fetch: Callable[[Sequence[Locked]], None]


@dataclass(frozen=True, kw_only=True)
class BuildRequest(ContextRequest):
    """The same with an engine; `fresh` trusts no cache but the store."""

    engine: Engine
    fresh: bool = False


def image_tag(variant: str) -> str:
    """The name under which an engine knows the image."""
    return f"localhost/dsv32:{variant}"


def build(request: BuildRequest, ui: Ui) -> ImageDigest:
    """Make the image, write it to `dist/<variant>` and load it into the engine.

    Raises:
        BusyError: Another build runs in this folder.
        LockMissingError, LockEditedError, LockStaleError: See `lockfile`.
        ImageError: Whatever a step raises; what was finished before stays usable.
    """
    root, name = request.root, request.variant.name
    with only_one(root / "build" / name / "lock"):
        lock = read_lock(root)
        require_fresh(lock, request.config, patch_series(root))
        plans = plan_layers(root, request.config, request.variant, lock)
        labels = _labels(root, lock, name)
        key = sha256_parts(*(plan.key for plan in plans), json.dumps(labels, sort_keys=True))
        layout = root / "dist" / name
        done = None if request.fresh else _finished(layout, key)
        if done is None:
            layers, start = _layers(request, lock, plans, ui)
            with ui.step("build", f"writing the image to {layout.relative_to(root)}"):
                done = oci.write_layout(layout, layers, _image_config(request.config, start, labels), name)
                _note(layout, key, done)
        _load(request, layout, done, ui)
        return done


def full_context(request: ContextRequest, ui: Ui) -> Path:
    """Lay out a context that holds everything, for `docker build` by hand; the folder.

    Raises:
        ImageError: As `build`.
    """
    root, name = request.root, request.variant.name
    work = root / "build" / name
    with only_one(work / "lock"):
        lock = read_lock(root)
        require_fresh(lock, request.config, patch_series(root))
        plans = plan_layers(root, request.config, request.variant, lock)
        request.fetch(list(lock.files(name)))
        base = request.cache.get(plans[0]) or _base_layer(request, plans[0], work, ui)
        context = work / "context"
        with ui.step("wheels", "patched wheels and the build context"):
            make_context(root, request.config, lock, plans[1:], request.store, work / "wheels", context)
            # ADD unpacks it: the canonical base layer is a gzip'ed tar of the root file system.
            link_or_copy(base.path, context / "base.tar")
    return context


def _layers(
    request: BuildRequest, lock: Lock, plans: Sequence[LayerPlan], ui: Ui
) -> tuple[list[NamedLayer], Mapping[str, object]]:
    """All layers, made where they are not in the cache, and what a container starts with."""
    found: list[NamedLayer] = []
    for plan in plans:
        layer = None if request.fresh else request.cache.get(plan)
        if layer is None:
            break
        found.append(layer)
    start = request.cache.start(plans[-1])
    missing = plans[len(found) :]
    if not missing and start is not None:
        return found, start
    missing = missing or plans[-1:]
    found = found[: len(plans) - len(missing)]
    ui.say(f"   build  layers to make: {', '.join(p.name for p in missing)}; engine: {request.engine.description}")
    wanted = [f for plan in missing for f in (*plan.section.debs, *plan.section.wheels)]
    request.fetch([*lock.tools, *wanted])
    work = request.root / "build" / request.variant.name
    if not found:
        found.append(_base_layer(request, missing[0], work, ui))
        missing = missing[1:]
    made, start = _engine_layers(request, lock, plans, found, missing, work, ui)
    return [*found, *made], start


def _base_layer(request: ContextRequest, plan: LayerPlan, work: Path, ui: Ui) -> NamedLayer:
    with temporary_folder(work / "base") as folder:
        tar = folder / "rootfs.tar"
        with ui.step("rootfs", f"{len(plan.section.debs)} Debian packages, mmdebstrap"):
            make_rootfs(request.config, plan.section.debs, request.store, tar, work / "log" / "rootfs.txt")
        with ui.step("layer", plan.name), oci.scan_layer(tar) as scanned:
            empty = oci.Tree()
            return _finish_layer(request, plan, (empty, empty.apply(scanned.change)), [scanned], folder)


def _engine_layers(
    request: BuildRequest,
    lock: Lock,
    plans: Sequence[LayerPlan],
    below: Sequence[NamedLayer],
    missing: Sequence[LayerPlan],
    work: Path,
    ui: Ui,
) -> tuple[list[NamedLayer], Mapping[str, object]]:
    """Run the Dockerfile's stages for `missing` on an image of the layers below; their canonical layers."""
    engine, config = request.engine, request.config
    context, log = work / "context", work / "log" / "engine.txt"
    with ui.step("wheels", "patched wheels and the build context"):
        make_context(request.root, config, lock, missing, request.store, work / "wheels", context)
    parent = f"localhost/dsv32-part:{plans[len(below) - 1].key[:16]}"
    made_tag = f"localhost/dsv32-build:{request.variant.name}"
    with temporary_folder(work / "engine") as folder:
        with ui.step("build", f"loading {len(below)} finished layers into {engine.name}"):
            part = oci.write_layout(folder / "part", below, oci.ImageConfig(created=config.epoch), "part")
            if engine.image_id(parent) != part.config:
                engine.load(folder / "part", parent, folder)
        with ui.step("build", f"{engine.name} runs the Dockerfile: {', '.join(p.name for p in missing)}"):
            args = {f"KEY_{plan.name.upper()}": plan.key for plan in missing}
            dockerfile = work / "Dockerfile"
            whole = (request.root / "docker" / "Dockerfile").read_text()
            write_atomic(dockerfile, stages_from(whole, missing[0].name, parent).encode())
            engine.build(context, dockerfile, args, made_tag, log)
        with ui.step("layer", "reading what the engine made"):
            exported = oci.open_export(engine.export(made_tag, folder))
            groups = _by_stage(exported, len(below), missing)
        tree = request.cache.tree(plans[len(below) - 1])
        made = []
        for plan, sources in zip(missing, groups, strict=True):
            with ui.step("layer", plan.name), ExitStack() as stack:
                scans = [
                    stack.enter_context(oci.scan_layer(s.path, offset=s.offset, size=s.size)) for s in sources
                ]
                after = tree
                for scan in scans:
                    after = after.apply(scan.change)
                made.append(_finish_layer(request, plan, (tree, after), scans, folder))
                tree = after
        start = _start(exported.config)
        request.cache.put_start(plans[-1], start)
    engine.remove(made_tag)
    engine.remove(parent)
    return made, start


def stages_from(dockerfile: str, stage: str, parent: str) -> str:
    """The Dockerfile from one stage on, starting at an image instead of at the stage below.

    Not by an ARG in FROM: buildah 1.28 drops stages that only such a line refers to.

    Raises:
        BuildError: There is no such stage.
    """
    head = re.search(rf"^FROM \S+ AS {re.escape(stage)}$", dockerfile, re.MULTILINE)
    if head is None:
        raise BuildError(f"docker/Dockerfile has no stage '{stage}'", hint="each layer in pyproject.toml needs one")
    return f"FROM {parent} AS {stage}{dockerfile[head.end() :]}"


def _finish_layer(
    request: ContextRequest,
    plan: LayerPlan,
    states: tuple[Tree, Tree],
    scans: Sequence[oci.ScannedLayer],
    folder: Path,
) -> NamedLayer:
    blob_path = folder / f"{plan.name}.tar.gz"
    blob = oci.write_layer(*states, scans, blob_path, epoch=request.config.epoch)
    return request.cache.put(plan, blob_path, blob, states[1])


def _by_stage(
    exported: oci.EngineExport, below: int, missing: Sequence[LayerPlan]
) -> list[list[oci.LayerSource]]:
    """The engine's new layers, sorted to the stages that made them: each stage begins with its ARG KEY_….

    Raises:
        BuildError: A stage left no layer, so the engine did not run what was asked.
    """
    groups: dict[str, list[oci.LayerSource]] = {plan.name.upper(): [] for plan in missing}
    stage, position = "", 0
    for entry in exported.config.get("history") or []:
        if match := _STAGE.search(entry.get("created_by", "")):
            stage = match.group(1)
        if entry.get("empty_layer"):
            continue
        if position >= len(exported.layers):
            raise BuildError("the engine's history has more layers than its image", hint="try another --engine")
        if position >= below and stage in groups:
            groups[stage].append(exported.layers[position])
        position += 1
    for name, group in groups.items():
        if not group:
            raise BuildError(f"the engine made no layer for stage '{name.lower()}'", hint="see its log in build/")
    return list(groups.values())


def _start(engine_config: Mapping[str, object]) -> dict[str, object]:
    """What the Dockerfile says a container starts with; engines add labels and times that are left out."""
    config = engine_config.get("config")
    if not isinstance(config, dict):
        raise ImageLayoutError("the engine's image has no config", hint="try another engine (--engine)")
    return {
        "env": sorted(config.get("Env") or []),
        "entrypoint": config.get("Entrypoint") or [],
        "cmd": config.get("Cmd") or [],
        "user": config.get("User") or "",
        "workdir": config.get("WorkingDir") or "",
    }


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


def _labels(root: Path, lock: Lock, variant: str) -> dict[str, str]:
    return {
        "org.opencontainers.image.title": "dsv32",
        "org.opencontainers.image.version": project_version(root),
        "org.opencontainers.image.revision": revision(root),
        "dsv32.lock.digest": f"sha256:{lock.digest}",
        "dsv32.variant": variant,
    }


IMAGE_INPUTS = ("versions.lock", "pyproject.toml", "docker", "patches", "src", "scripts", "smoke")


def revision(root: Path) -> str:
    """The last commit that touched what goes into the image, `-dirty` if the folder differs from it.

    Not HEAD: a commit to the docs would change the image's digest though no byte in it changed.
    """

    def git(*words: str) -> str:
        command = ["git", "-C", str(root), *words, "--", *IMAGE_INPUTS]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("log", "-1", "--format=%H")
    if not commit:
        return "unknown"
    return f"{commit}-dirty" if git("status", "--porcelain", "--untracked-files=normal") else commit


def _finished(layout: Path, key: str) -> ImageDigest | None:
    """The digest of the layout, if it was made from exactly these inputs."""
    try:
        note = json.loads(layout.with_suffix(".json").read_text())
        if note["key"] != key or not (layout / "index.json").exists():
            return None
        return oci.ImageDigest(manifest=note["manifest"], config=note["config"])
    except (OSError, ValueError, KeyError):
        return None


def _note(layout: Path, key: str, digest: ImageDigest) -> None:
    note = {"key": key, "manifest": digest.manifest, "config": digest.config}
    write_atomic(layout.with_suffix(".json"), (json.dumps(note, indent=1) + "\n").encode())


def _load(request: BuildRequest, layout: Path, digest: ImageDigest, ui: Ui) -> None:
    tag = image_tag(request.variant.name)
    if request.engine.image_id(tag) == digest.config:
        return
    with ui.step("build", f"loading {tag} into {request.engine.name}"), temporary_folder(
        request.root / "build" / request.variant.name / "load"
    ) as folder:
        request.engine.load(layout, tag, folder)


def clean(root: Path, cache: Path, *, everything: bool) -> list[Path]:
    """Remove what builds left below the project and, if asked, the caches; what was removed."""
    doomed = [root / "build", root / "dist"]
    if everything:
        doomed += [cache / "layers", cache / "sha256", cache / "partial"]
    removed = [path for path in doomed if path.exists()]
    for path in removed:
        shutil.rmtree(path)
    return removed
