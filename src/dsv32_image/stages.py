"""The layers that an engine makes: run the Dockerfile from a stage on, and rewrite what comes out."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dsv32_image import oci
from dsv32_image.compiled import CompiledWheels, compile_context, compile_wheel
from dsv32_image.context import make_context
from dsv32_image.errors import BuildError, ImageLayoutError
from dsv32_image.files import temporary_folder, write_atomic
from dsv32_image.layers import dockerfile_name, plan_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from dsv32_image.compiled import CompileJob
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
    # Of this process alone: two checkouts may build at once with one engine.
    parent = f"localhost/dsv32-part:{plans[len(below) - 1].key[:16]}-{os.getpid()}"
    made_tag = f"localhost/dsv32-build:{plans[-1].key[:16]}-{os.getpid()}"
    with temporary_folder(work / "engine") as folder:
        with ui.step("build", f"loading {len(below)} finished layers into {engine.name}"):
            oci.write_layout(folder / "part", below, oci.ImageConfig(created=config.epoch), "part")
            scratch.tags.append(parent)
            engine.load(folder / "part", parent, folder, scratch.plain)
        for number, part in enumerate(_between_compilers(request, missing)):
            for job in part[0].jobs:
                _compile(request, lock, job, parent, folder, ui)
            tag = made_tag if part[-1] is missing[-1] else f"{made_tag}-{number}"
            scratch.tags.append(tag)
            _run_stages(request, lock, part, parent, tag, ui)
            parent = tag
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


def _between_compilers(request: BuildRequest, missing: Sequence[LayerPlan]) -> list[list[LayerPlan]]:
    """The layers in parts: one begins where a wheel has to be compiled on the layers below it."""
    parts: list[list[LayerPlan]] = []
    for plan in missing:
        if not parts or any(_to_compile(request, job) for job in plan.jobs):
            parts.append([])
        parts[-1].append(plan)
    return parts


def _to_compile(request: BuildRequest, job: CompileJob) -> bool:
    return request.recompile or CompiledWheels(request.store.home).get(job) is None


def _compile(request: BuildRequest, lock: Lock, job: CompileJob, parent: str, folder: Path, ui: Ui) -> None:
    if not _to_compile(request, job):
        return
    context = folder / "compile-context"
    with ui.step("wheels", f"compiling {job.dist.name} {job.dist.version}"):
        make_context(request.root, request.config, lock, request.variant, (), request.store, folder, context)
        compile_context(request.root, lock, request.variant.name, job, request.store, request.jobs, context)
        tag = f"localhost/dsv32-compile:{job.key[:16]}-{os.getpid()}"
        with temporary_folder(folder / "compile") as work:
            built = compile_wheel(request.root, request.engine, job, parent, context, tag, work)
            CompiledWheels(request.store.home).put(job, built, epoch=request.config.epoch)
    shutil.rmtree(context)


def _run_stages(
    request: BuildRequest, lock: Lock, plans: Sequence[LayerPlan], parent: str, tag: str, ui: Ui
) -> None:
    """Run the Dockerfile's stages of some layers, on an image of those below."""
    engine, name = request.engine, request.variant.name
    work = request.root / "build" / name
    context, dockerfile = work / "context", work / "Dockerfile"
    with ui.step("wheels", "patched wheels and the build context"):
        make_context(
            request.root,
            request.config,
            lock,
            request.variant,
            plans,
            request.store,
            work / "wheels",
            context,
        )
    _require_unchanged(request, lock, plans)
    with ui.step("build", f"{engine.name} runs the Dockerfile: {', '.join(p.name for p in plans)}"):
        whole = (request.root / "docker" / dockerfile_name(name)).read_text()
        text = stages_from(whole, plans[0].name, parent, until=plans[-1].name)
        write_atomic(dockerfile, text.encode())
        args = {f"KEY_{plan.name.upper()}": plan.key for plan in plans}
        log = work / "log" / f"engine-{plans[0].name}.txt"
        engine.build(context, dockerfile, args, tag, log)


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
