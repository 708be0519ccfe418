"""The layers that an engine makes: run the Dockerfile from a stage on, and rewrite what comes out."""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dsv32_image import oci
from dsv32_image.compile_step import between_compilers, compile_if_missing, to_compile
from dsv32_image.context import make_context
from dsv32_image.errors import BuildError, ImageLayoutError
from dsv32_image.files import temporary_folder, write_atomic
from dsv32_image.layers import dockerfile_name, plan_layers
from dsv32_image.oci import OpenLayer
from dsv32_image.scratch_tags import scratch_labels, scratch_tag

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
    """The same with an engine; `fresh` trusts no cache but the store.

    `recompile` compiles wheels anew that the store has, and refuses other bytes. `jobs` is how many
    compilers run at once; 0 means as many as processors and memory allow.
    """

    engine: Engine
    fresh: bool = False
    recompile: bool = False
    jobs: int = 0


@dataclass(frozen=True, kw_only=True)
class Scratch:
    """What lives as long as one build: a folder, jobs, states after layers by key, tags to forget."""

    folder: Path
    background: Background
    trees: dict[str, Tree] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)


def start_context(
    request: BuildRequest, lock: Lock, missing: Sequence[LayerPlan], scratch: Scratch
) -> Future[Path] | None:
    """Begin to lay out the build context for these layers; None where a wheel has to be compiled before."""
    first = between_compilers(request, missing)[0]
    if any(to_compile(request, job) for job in first[0].jobs):
        return None
    return scratch.background.start(lay_out, request, lock, first)


def lay_out(request: BuildRequest, lock: Lock, plans: Sequence[LayerPlan]) -> Path:
    """Lay out the build context for these layers; the folder."""
    work = request.root / "build" / request.variant.name
    wheels, context = work / "wheels", work / "context"
    make_context(request.root, request.config, lock, request.variant, plans, request.store, wheels, context)
    return context


def engine_layers(
    request: BuildRequest,
    lock: Lock,
    plans: Sequence[LayerPlan],
    below: Sequence[OpenLayer],
    missing: Sequence[LayerPlan],
    context: Future[Path] | None,
    scratch: Scratch,
    ui: Ui,
) -> tuple[list[OpenLayer], Mapping[str, object]]:
    """Run the Dockerfile's stages for `missing` on an image of the layers below; their canonical layers."""
    engine, config = request.engine, request.config
    work = request.root / "build" / request.variant.name
    parent = scratch_tag("part", plans[len(below) - 1].key)
    made_tag = scratch_tag("build", plans[-1].key)
    with temporary_folder(work / "engine") as folder:
        with ui.step("build", f"loading {len(below)} finished layers into {engine.name}"):
            scratch.tags.append(parent)
            engine.load(
                oci.loadable(below, oci.ImageConfig(created=config.epoch, labels=scratch_labels())),
                parent,
                folder,
            )
            for layer in below:
                if layer.tar is not None:
                    scratch.background.start(_free, layer, layer.tar)
        for number, part in enumerate(between_compilers(request, missing)):
            scratch.background.check()
            for job in part[0].jobs:
                compile_if_missing(request, lock, job, parent, folder, ui)
            with ui.step("wheels", "patched wheels and the build context"):
                laid_out = lay_out(request, lock, part) if context is None or number else context.result()
            _require_unchanged(request, lock, part)
            tag = made_tag if part[-1] is missing[-1] else scratch_tag("build", plans[-1].key, number)
            scratch.tags.append(tag)
            scratch.background.check()
            _run_stages(request, part, laid_out, parent, tag, ui)
            parent = tag
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


def _run_stages(
    request: BuildRequest, plans: Sequence[LayerPlan], context: Path, parent: str, tag: str, ui: Ui
) -> None:
    """Run the Dockerfile's stages of some layers, on an image of those below."""
    engine, name = request.engine, request.variant.name
    work = request.root / "build" / name
    with ui.step("build", f"{engine.name} runs the Dockerfile: {', '.join(p.name for p in plans)}"):
        whole = (request.root / "docker" / dockerfile_name(name)).read_text()
        text = stages_from(whole, plans[0].name, parent, until=plans[-1].name)
        write_atomic(work / "Dockerfile", text.encode())
        args = {f"KEY_{plan.name.upper()}": plan.key for plan in plans}
        engine.build(context, work / "Dockerfile", args, tag, work / "log" / f"engine-{plans[0].name}.txt")


def _require_unchanged(request: BuildRequest, lock: Lock, plans: Sequence[LayerPlan]) -> None:
    """Refuse to go on if the sources changed between the reckoning of the keys and the copy in the context.

    Raises:
        BuildError: They did, and a layer would be cached under the key of other contents.
    """
    now = {plan.name: plan.key for plan in plan_layers(request.root, request.config, request.variant, lock)}
    for plan in plans:
        if now[plan.name] != plan.key:
            raise BuildError(
                f"files of layer '{plan.name}' were edited while the build ran", hint="run it again"
            )


def stages_from(dockerfile: str, stage: str, parent: str, *, until: str | None = None) -> str:
    """The Dockerfile from one stage on, starting at an image instead of at the stage below.

    With `until`, that stage is the last.

    Not by an ARG in FROM: buildah 1.28 drops stages that only such a line refers to.

    Raises:
        BuildError: There is no such stage.
    """
    head = re.search(rf"^FROM \S+ AS {re.escape(stage)}$", dockerfile, re.MULTILINE)
    if head is None:
        raise BuildError(
            f"docker/Dockerfile has no stage '{stage}'", hint="each layer in pyproject.toml needs one"
        )
    rest = dockerfile[head.end() :]
    if until is not None:
        following = re.search(rf"^FROM {re.escape(until)} AS \S+$", rest, re.MULTILINE)
        rest = rest[: following.start()] if following else rest
    return f"FROM {parent} AS {stage}{rest}"


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
