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

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

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
    """What lives as long as one build: a folder, tars of layers just made by diff_id, tags to forget."""

    folder: Path
    plain: dict[str, Path] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)


def engine_layers(
    request: BuildRequest,
    lock: Lock,
    plans: Sequence[LayerPlan],
    below: Sequence[NamedLayer],
    missing: Sequence[LayerPlan],
    scratch: Scratch,
    ui: Ui,
) -> tuple[list[NamedLayer], Mapping[str, object]]:
    """Run the Dockerfile's stages for `missing` on an image of the layers below; their canonical layers."""
    engine, config = request.engine, request.config
    work = request.root / "build" / request.variant.name
    context, log = work / "context", work / "log" / "engine.txt"
    with ui.step("wheels", "patched wheels and the build context"):
        make_context(
            request.root, config, lock, request.variant.name, missing, request.store, work / "wheels", context
        )
    # Of this process alone: two checkouts may build at once with one engine.
    parent = f"localhost/dsv32-part:{plans[len(below) - 1].key[:16]}-{os.getpid()}"
    made_tag = f"localhost/dsv32-build:{plans[-1].key[:16]}-{os.getpid()}"
    with temporary_folder(work / "engine") as folder:
        with ui.step("build", f"loading {len(below)} finished layers into {engine.name}"):
            oci.write_layout(folder / "part", below, oci.ImageConfig(created=config.epoch), "part")
            scratch.tags.extend([parent, made_tag])
            engine.load(folder / "part", parent, folder, scratch.plain)
        with ui.step("build", f"{engine.name} runs the Dockerfile: {', '.join(p.name for p in missing)}"):
            args = {f"KEY_{plan.name.upper()}": plan.key for plan in missing}
            dockerfile = work / "Dockerfile"
            whole = (request.root / "docker" / "Dockerfile").read_text()
            write_atomic(dockerfile, stages_from(whole, missing[0].name, parent).encode())
            engine.build(context, dockerfile, args, made_tag, log)
        with ui.step("layer", "reading what the engine made"):
            known = [layer.blob.diff_id for layer in below]
            exported = oci.open_export(engine.export(made_tag, folder, known))
            groups = layers_by_stage(exported, len(below), missing)
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
                made.append(finish_layer(request, plan, (tree, after), scans, scratch))
                tree = after
        start = _start(exported.config)
        request.cache.put_start(plans[-1], start)
    return made, start


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
) -> NamedLayer:
    """Write the canonical layer between two states and take it into the cache."""
    blob_path, plain = (scratch.folder / f"{plan.name}{end}" for end in (".tar.gz", ".tar"))
    blob = oci.write_layer(*states, scans, blob_path, epoch=request.config.epoch, plain=plain)
    scratch.plain[blob.diff_id] = plain
    return request.cache.put(plan, blob_path, blob, states[1])


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
