"""The build context: what the Dockerfile's mounts show, one folder a layer, laid out from the store."""

from __future__ import annotations

import json
import shutil
import zipfile
from typing import TYPE_CHECKING

from dsv32_image.compiled import CompiledWheels
from dsv32_image.errors import WheelError
from dsv32_image.files import copy_stream, link_or_copy, sha256_file, temporary_folder, tree_files
from dsv32_image.layers import TOOLKIT, removed
from dsv32_image.lockfile import GitDist
from dsv32_image.own_wheel import make_own_wheel
from dsv32_image.wheels import PatchedWheel, metadata_only, patch_wheel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from dsv32_image.config import Config, VariantConfig
    from dsv32_image.layers import LayerPlan
    from dsv32_image.lockfile import Lock
    from dsv32_image.store import Store

_UV_MEMBER = "/scripts/uv"
OWN_PACKAGE = "src/dsv32"


def compiled_wheels(plans: Sequence[LayerPlan], store: Store) -> dict[str, PatchedWheel]:
    """The wheels that were compiled for these layers, by name.

    Raises:
        WheelError: One is not in the store.
    """
    found = {}
    for job in (job for plan in plans for job in plan.jobs):
        wheel = CompiledWheels(store.home).get(job)
        if wheel is None:
            raise WheelError(
                f"{job.dist.file} is not compiled yet, which takes an engine", hint="run `nox -s build` first"
            )
        found[job.dist.name] = wheel
    return found


def patched_wheels(
    root: Path,
    lock: Lock,
    plans: Sequence[LayerPlan],
    store: Store,
    out: Path,
    compiled: Mapping[str, PatchedWheel],
) -> dict[str, PatchedWheel]:
    """Step `wheels`: the patched wheel of each locked distribution that has a series, by name.

    Of one that was compiled the wheel is patched; one of a git commit with offsets, as lines may have moved.
    """
    found = {}
    for plan in plans:
        for dist in plan.section.wheels:
            if dist.name in lock.patches:
                with temporary_folder(out / "source") as folder:
                    done = compiled.get(dist.name)
                    source = done.path if done else store.place(dist, folder)
                    found[dist.name] = patch_wheel(
                        source,
                        root / "patches" / dist.name,
                        out,
                        epoch=lock.epoch,
                        allow_offset=isinstance(dist, GitDist),
                    )
    return found


def make_context(
    root: Path,
    config: Config,
    lock: Lock,
    variant: VariantConfig,
    plans: Sequence[LayerPlan],
    store: Store,
    wheels: Path,
    out: Path,
) -> None:
    """Lay out the build context for these layers at `out`; what was there is replaced.

    Wheels that are compiled must be in the store by now.

    Raises:
        OfflineError, HashMismatchError: See `Store.place`.
        PatchError, WheelError: See `patch_wheel`.
    """
    compiled = compiled_wheels(plans, store)
    ready = {**compiled, **patched_wheels(root, lock, plans, store, wheels, compiled)}
    with temporary_folder(out) as folder:
        folder.chmod(0o755)
        _tools(root, config, lock, store, folder / "tools")
        for plan in plans:
            target = folder / plan.name
            target.mkdir()
            lines = _wheel_lines(plan, store, ready, target, epoch=config.epoch)
            (target / "remove.txt").write_text("".join(f"{glob}\n" for glob in plan.config.remove))
            if plan.config.tree:
                lines += _own_files(root, config, lock, variant, plan, target)
            (target / "requirements.txt").write_text("".join(f"{line}\n" for line in sorted(lines)))
        shutil.rmtree(out, ignore_errors=True)
        folder.rename(out)


def _tools(root: Path, config: Config, lock: Lock, store: Store, folder: Path) -> None:
    folder.mkdir()
    for name in TOOLKIT:
        copy_stream(root / "docker" / name, folder / name)
    (folder / "epoch-day").write_text(str(config.epoch // 86400))
    for tool in lock.tools:
        wheel = store.place(tool, folder)
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(_UV_MEMBER))
            (folder / "uv").write_bytes(archive.read(member))
        (folder / "uv").chmod(0o755)
        wheel.unlink()


def _wheel_lines(
    plan: LayerPlan, store: Store, ready: Mapping[str, PatchedWheel], folder: Path, *, epoch: int
) -> list[str]:
    lines = []
    for dist in plan.section.wheels:
        if wheel := ready.get(dist.name):
            link_or_copy(wheel.path, folder / wheel.path.name)
            lines.append(f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}")
        elif dist.name in plan.config.metadata_only:
            with temporary_folder(folder / "whole") as whole:
                path = metadata_only(store.place(dist, whole), folder, epoch=epoch)
            lines.append(f"{dist.name}=={dist.version} --hash=sha256:{sha256_file(path)}")
        else:
            store.place(dist, folder)
            lines.append(f"{dist.name}=={dist.version} --hash=sha256:{dist.sha256}")
    return lines


def _own_files(
    root: Path, config: Config, lock: Lock, variant: VariantConfig, plan: LayerPlan, folder: Path
) -> list[str]:
    """The project's own part: the package as a wheel, folders as files, and what the image says of itself."""
    lines = []
    files = folder / "files"
    files.mkdir()
    for tree in plan.config.tree:
        if tree == OWN_PACKAGE:
            wheel = make_own_wheel(
                root, folder, epoch=config.epoch, torchrun="torch" in variant.python_from_debs
            )
            lines.append(f"dsv32=={wheel.version} --hash=sha256:{wheel.sha256}")
            continue
        source = root / tree
        for path in tree_files(source):
            target = files / source.name / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            copy_stream(path, target)
    copy_stream(root / "docker" / "entrypoint", files / "entrypoint")
    copy_stream(root / "versions.lock", files / "versions.lock")
    build = {"lock_digest": lock.digest, "variant": variant.name, "removed": removed(variant)}
    (files / "build.json").write_text(json.dumps(build, indent=1, sort_keys=True) + "\n")
    return lines
