"""Where a build stops for a compiler: wheels that the store lacks are made on the layers below."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from dsv32_image.compiled import CompiledWheels, CompileJob, compile_context, compile_wheel
from dsv32_image.context import make_context
from dsv32_image.files import temporary_folder
from dsv32_image.scratch_tags import scratch_tag

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dsv32_image.layers import LayerPlan
    from dsv32_image.lockfile import Lock
    from dsv32_image.stages import BuildRequest
    from dsv32_image.ui import Ui


def between_compilers(request: BuildRequest, missing: Sequence[LayerPlan]) -> list[list[LayerPlan]]:
    """The layers in parts: one begins where a wheel has to be compiled on the layers below it."""
    parts: list[list[LayerPlan]] = []
    for plan in missing:
        if not parts or any(to_compile(request, job) for job in plan.jobs):
            parts.append([])
        parts[-1].append(plan)
    return parts


def to_compile(request: BuildRequest, job: CompileJob) -> bool:
    """Whether the compiler has to run for it."""
    return request.recompile or CompiledWheels(request.store.home).get(job) is None


def compile_if_missing(
    request: BuildRequest, lock: Lock, job: CompileJob, parent: str, folder: Path, ui: Ui
) -> None:
    """Compile on the image `parent` what the store lacks.

    Raises:
        BuildError: The compiler failed.
        NotReproducibleError: With `recompile`, the bytes are not those of the store.
    """
    if not to_compile(request, job):
        return
    context = folder / "compile-context"
    with ui.step("wheels", f"compiling {job.dist.name} {job.dist.version}"):
        make_context(request.root, request.config, lock, request.variant, (), request.store, folder, context)
        compile_context(request.root, lock, request.variant.name, job, request.store, request.jobs, context)
        tag = scratch_tag("compile", job.key)
        with temporary_folder(folder / "compile") as work:
            built = compile_wheel(request.root, request.engine, job, parent, context, tag, work)
            CompiledWheels(request.store.home).put(job, built, epoch=request.config.epoch)
    shutil.rmtree(context)
