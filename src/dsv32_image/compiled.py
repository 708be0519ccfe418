"""Compiled wheels: sdists that a compiler builds on the layers below them, in the engine, network off.

The result is kept in the store under the hash of everything that went in: sdist, build tools, settings, and
what the layers below are made of. Repacked by us, two compilations give the same bytes.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from dataclasses import dataclass
from string import Template
from typing import TYPE_CHECKING

from dsv32_image import oci
from dsv32_image.errors import BuildError, NotReproducibleError
from dsv32_image.files import (
    copy_stream,
    disk_full_is_clear,
    sha256_file,
    sha256_parts,
    temporary_folder,
    write_atomic,
)
from dsv32_image.lockfile import GitDist
from dsv32_image.wheels import PatchedWheel, repack

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from dsv32_image.config import Config, LayerConfig, VariantConfig
    from dsv32_image.engine import Engine
    from dsv32_image.lockfile import Dist, LayerLock, Lock
    from dsv32_image.store import Store

# Part of the key: raise it when the same input shall give other bytes.
FORMAT = 1
MARKER = "dsv32-compiled.json"
SCRIPTS = ("compile-wheel", "compile_wheel.py", "Dockerfile.compile")


@dataclass(frozen=True, kw_only=True)
class CompileJob:
    """One sdist to compile: `key` is the hash of everything that goes into its wheel."""

    dist: Dist
    key: str
    env: Mapping[str, str]


def compile_jobs(
    root: Path,
    config: Config,
    variant: VariantConfig,
    layer: LayerConfig,
    section: LayerLock,
    below: Sequence[LayerLock],
    lock: Lock,
) -> tuple[CompileJob, ...]:
    """What has to be compiled for one layer. `below` are the layers whose headers and libraries it uses."""
    jobs = []
    for dist in section.wheels:
        if dist.name not in layer.compile and not isinstance(dist, GitDist):
            continue
        env = {
            "TORCH_CUDA_ARCH_LIST": ";".join(variant.cuda_archs),
            "CUDAARCHS": ";".join(arch.replace(".", "") for arch in variant.cuda_archs),
        }
        for name, value in config.compile_env.get(dist.name, {}).items():
            env[name] = Template(value).safe_substitute(env)
        under = [f"{deb.name} {deb.sha256}" for part in below for deb in part.debs]
        under += [
            f"{wheel.name} {wheel.sha256} {lock.patches.get(wheel.name, '')}"
            for part in below
            for wheel in part.wheels
        ]
        key = sha256_parts(
            f"compiled {FORMAT} {config.epoch} {config.python}",
            dist.sha256,
            json.dumps(env, sort_keys=True),
            *(sha256_file(root / "docker" / name) for name in SCRIPTS),
            *(tool.sha256 for tool in lock.compile_files(variant.name)),
            *under,
        )
        jobs.append(CompileJob(dist=dist, key=key, env=env))
    return tuple(jobs)


class CompiledWheels:
    """The part of the store that holds compiled wheels: `<home>/compiled/<key>/` with wheel and record."""

    def __init__(self, home: Path) -> None:
        self.home = home / "compiled"

    def get(self, job: CompileJob) -> PatchedWheel | None:
        """The wheel, if it is there whole."""
        folder = self.home / job.key
        try:
            entry = json.loads((folder / "wheel.json").read_text())
            path = folder / entry["file"]
            if sha256_file(path) != entry["sha256"]:
                return None
        except (OSError, ValueError, KeyError):
            return None
        return PatchedWheel(
            name=job.dist.name,
            version=job.dist.version,
            path=path,
            sha256=entry["sha256"],
            size=path.stat().st_size,
        )

    def put(self, job: CompileJob, built: Path, *, epoch: int) -> PatchedWheel:
        """Repack a wheel as the compiler's container left it and take it in.

        Raises:
            NotReproducibleError: A wheel of the same inputs is there and its bytes differ.
            WheelError: It is no wheel of that name.
        """
        before = self.get(job)
        target = self.home / job.key
        with temporary_folder(target) as folder, disk_full_is_clear(folder):
            marker = {"sdist_sha256": job.dist.sha256, "key": job.key, "env": dict(job.env)}
            git = job.dist if isinstance(job.dist, GitDist) else None
            if git:
                # Not from where: another mirror of the repository gives the same wheel.
                marker["git"] = {"commit": git.commit, "tree": git.tree}
            path = repack(built, folder, MARKER, marker, epoch=epoch, git=git)
            sha256 = sha256_file(path)
            if before and before.sha256 != sha256:
                kept = target.with_name(f"{target.name}-differs")
                shutil.rmtree(kept, ignore_errors=True)
                folder.rename(kept)
                raise NotReproducibleError(
                    f"{path.name}: compiled again from the same inputs it has sha256 {sha256}, "
                    f"the one in the store {before.sha256}",
                    hint=f"compare {before.path} with {kept / path.name}",
                )
            (folder / "wheel.json").write_text(json.dumps({"file": path.name, "sha256": sha256}) + "\n")
            shutil.rmtree(target, ignore_errors=True)
            folder.chmod(0o755)
            folder.rename(target)
        found = self.get(job)
        assert found is not None
        return found


def compile_context(
    root: Path, lock: Lock, variant: str, job: CompileJob, store: Store, jobs: int, context: Path
) -> None:
    """Add to a build context what Dockerfile.compile mounts."""
    folder = context / "compile"
    folder.mkdir()
    if debs := lock.compile_debs.get(variant):
        (folder / "debs").mkdir()
        for deb in debs:
            store.place(deb, folder / "debs")
    lines = []
    for tool in lock.compile_tools:
        store.place(tool, folder)
        lines.append(f"{tool.name}=={tool.version} --hash=sha256:{tool.sha256}\n")
    (folder / "requirements.txt").write_text("".join(sorted(lines)))
    sdist = store.place(job.dist, folder)
    settings = {"sdist": sdist.name, "env": dict(job.env), "epoch": lock.epoch, "jobs": jobs}
    (folder / "settings.json").write_text(json.dumps(settings, indent=1, sort_keys=True) + "\n")
    for name in SCRIPTS[:2]:
        copy_stream(root / "docker" / name, context / "tools" / name)


def compile_wheel(
    root: Path, engine: Engine, job: CompileJob, parent: str, context: Path, tag: str, work: Path
) -> Path:
    """Run Dockerfile.compile on the image `parent`; the wheel it left, below `work`.

    Raises:
        BuildError: The compiler failed; the log has its words.
    """
    dockerfile = work / "Dockerfile"
    text = (root / "docker" / "Dockerfile.compile").read_text()
    write_atomic(dockerfile, text.replace("FROM parent AS", f"FROM {parent} AS", 1).encode())
    log = root / "build" / "log" / f"compile-{job.dist.name}.txt"
    engine.build(context, dockerfile, {"KEY_COMPILE": job.key}, tag, log)
    try:
        exported = oci.open_export(engine.export(tag, work, []))
        for layer in exported.layers:
            with layer.path.open("rb") as file:
                file.seek(layer.offset)
                with tarfile.open(fileobj=file, mode="r|*") as archive:
                    for member in archive:
                        if member.isfile() and member.name.endswith(".whl"):
                            target = work / member.name.rsplit("/", 1)[-1]
                            content = archive.extractfile(member)
                            assert content is not None
                            with target.open("wb") as out:
                                shutil.copyfileobj(content, out, 1 << 20)
                            return target
    finally:
        engine.remove(tag)
    raise BuildError(f"compiling {job.dist.file} left no wheel", hint=f"see {log}")
