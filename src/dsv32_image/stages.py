"""The layers that an engine makes: run the Dockerfile from a stage on, and rewrite what comes out."""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dsv32_image import oci
from dsv32_image.context import make_context
from dsv32_image.errors import BuildError, ImageLayoutError
from dsv32_image.files import temporary_folder, write_atomic
from dsv32_image.oci import OpenLayer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from dsv32_image.background import Background
    from dsv32_image.config import Config, VariantConfig
    from dsv32_image.engine import Engine
    from dsv32_image.layers import LayerCache, LayerPlan
    from dsv32_image.lockfile import Lock
    from dsv32_image.oci import NamedLayer, Tree
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


@dataclass(frozen=True, kw_only=True)
class Scratch:
    """What lives as long as one build: a folder, jobs, states after layers by key, tags to forget."""

    folder: Path
    background: Background
    trees: dict[str, Tree] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)


def start_context(
    request: BuildRequest, lock: Lock, missing: Sequence[LayerPlan], scratch: Scratch
) -> Future[Path]:
    """Begin to lay out the build context for these layers; the folder."""
    work = request.root / "build" / request.variant.name
    context = work / "context"

    def make() -> Path:
        make_context(
            request.root,
            request.config,
            lock,
            request.variant.name,
            missing,
            request.store,
            work / "wheels",
            context,
        )
        return context

    return scratch.background.start(make)


def engine_layers(
    request: BuildRequest,
    plans: Sequence[LayerPlan],
    below: Sequence[OpenLayer],
    missing: Sequence[LayerPlan],
    context: Future[Path],
    scratch: Scratch,
    ui: Ui,
) -> tuple[list[OpenLayer], Mapping[str, object]]:
    """Run the Dockerfile's stages for `missing` on an image of the layers below; their canonical layers."""
    engine, config = request.engine, request.config
    work = request.root / "build" / request.variant.name
    log = work / "log" / "engine.txt"
    # Of this process alone: two checkouts may build at once with one engine.
    parent = f"localhost/dsv32-part:{plans[len(below) - 1].key[:16]}-{os.getpid()}"
    made_tag = f"localhost/dsv32-build:{plans[-1].key[:16]}-{os.getpid()}"
    with temporary_folder(work / "engine") as folder:
        with ui.step("build", f"loading {len(below)} finished layers into {engine.name}"):
            scratch.tags.append(parent)
            engine.load(oci.loadable(below, oci.ImageConfig(created=config.epoch)), parent, folder)
            for layer in below:
                if layer.tar is not None:
                    scratch.background.start(_free, layer, layer.tar)
        with ui.step("wheels", "patched wheels and the build context"):
            context.result()
        with ui.step("build", f"{engine.name} runs the Dockerfile: {', '.join(p.name for p in missing)}"):
            args = {f"KEY_{plan.name.upper()}": plan.key for plan in missing}
            dockerfile = work / "Dockerfile"
            whole = (request.root / "docker" / "Dockerfile").read_text()
            write_atomic(dockerfile, stages_from(whole, missing[0].name, parent).encode())
            scratch.background.check()
            engine.build(context.result(), dockerfile, args, made_tag, log)
        with ui.step("layer", "reading what the engine made"):
            scratch.background.check()
            known = [layer.diff_id for layer in below]
            exported = oci.open_export(engine.export(made_tag, folder, known))
            # Thousands of files to remove, while nobody needs the engine.
            scratch.background.start(engine.remove, made_tag)
            groups = layers_by_stage(exported, len(below), missing)
        lowest = plans[len(below) - 1]
        tree = scratch.trees[lowest.key] if lowest.key in scratch.trees else request.cache.tree(lowest)
        made = []
        for plan, sources in zip(missing, groups, strict=True):
            with ui.step("layer", plan.name), ExitStack() as stack:
                scans = [
                    stack.enter_context(oci.scan_layer(s.path, offset=s.offset, size=s.size)) for s in sources
                ]
                after = tree
                for scan in scans:
                    after = after.apply(scan.change)
                made.append(finish_layer(request, plan, (tree, after), scans, scratch))
                tree = after
        start = _start(exported.config)
    scratch.background.start(_note_start, request, plans[-1], made[-1], start)
    return made, start


def _free(layer: OpenLayer, tar: Path) -> None:
    """Remove the tar of a layer that the engine has, once it is compressed: it may have gigabytes."""
    layer.packed()
    tar.unlink()


def _note_start(
    request: BuildRequest, plan: LayerPlan, layer: OpenLayer, start: Mapping[str, object]
) -> None:
    layer.packed()  # its folder in the cache must be there
    request.cache.put_start(plan, start)


def stages_from(dockerfile: str, stage: str, parent: str) -> str:
    """The Dockerfile from one stage on, starting at an image instead of at the stage below.

    Not by an ARG in FROM: buildah 1.28 drops stages that only such a line refers to.

    Raises:
        BuildError: There is no such stage.
    """
    head = re.search(rf"^FROM \S+ AS {re.escape(stage)}$", dockerfile, re.MULTILINE)
    if head is None:
        raise BuildError(
            f"docker/Dockerfile has no stage '{stage}'", hint="each layer in pyproject.toml needs one"
        )
    return f"FROM {parent} AS {stage}{dockerfile[head.end() :]}"


def finish_layer(
    request: ContextRequest,
    plan: LayerPlan,
    states: tuple[Tree, Tree],
    scans: Sequence[oci.ScannedLayer],
    scratch: Scratch,
) -> OpenLayer:
    """Write the canonical layer between two states; in the background it is compressed and then cached."""
    tar = oci.write_tar(*states, scans, scratch.folder / f"{plan.name}.tar", epoch=request.config.epoch)
    scratch.trees[plan.key] = states[1]
    packed = scratch.background.start(_pack, request, plan, tar, states[1], scratch.background)
    return OpenLayer(name=plan.name, diff_id=tar.diff_id, tar=tar.path, packed=packed.result)


def _pack(
    request: ContextRequest, plan: LayerPlan, tar: oci.LayerTar, tree: Tree, background: Background
) -> NamedLayer:
    out = tar.path.with_suffix(".tar.gz")
    blob = oci.pack_layer(tar, out, proceed=background.proceed)
    return request.cache.put(plan, out, blob, tree)


def layers_by_stage(
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
            raise BuildError(
                "the engine's history has more layers than its image", hint="try another --engine"
            )
        if position >= below and stage in groups:
            groups[stage].append(exported.layers[position])
        position += 1
    for name, group in groups.items():
        if not group:
            raise BuildError(
                f"the engine made no layer for stage '{name.lower()}'", hint="see its log in build/"
            )
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
