"""Layer keys, and the cache of finished canonical layers.

A layer's key is the hash of all that goes into it and of the key below it. A finished layer is kept under
its key with the file-system state after it, so that a build starts at the first layer that is not there.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from dsv32_image import wheels
from dsv32_image.compiled import CompileJob, compile_jobs
from dsv32_image.files import sha256_file, sha256_parts, temporary_folder, tree_digest, write_atomic
from dsv32_image.oci import LayerBlob, NamedLayer, Tree
from dsv32_image.oci.layer import LAYER_FORMAT
from dsv32_image.own_wheel import project_version
from dsv32_image.rootfs import rootfs_key

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dsv32_image.config import Config, LayerConfig, VariantConfig
    from dsv32_image.lockfile import LayerLock, Lock

# Raise it when the way a layer is made changes in a way that no hashed file shows.
FORMAT = 1
TOOLKIT = ("install-layer", "compile_bytecode.py", "trim.py")


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """A layer to be made or found: its name, its key, what it is made of, what must be compiled for it."""

    name: str
    key: str
    section: LayerLock
    config: LayerConfig
    jobs: tuple[CompileJob, ...] = ()


def plan_layers(root: Path, config: Config, variant: VariantConfig, lock: Lock) -> tuple[LayerPlan, ...]:
    """The layers of a variant, lowest first, with their keys."""
    plans: list[LayerPlan] = []
    names = (dockerfile_name(variant.name), *TOOLKIT)
    toolkit = [sha256_file(root / "docker" / name) for name in names] + [tool.sha256 for tool in lock.tools]
    for layer, section in zip(variant.layers, lock.variant(variant.name), strict=True):
        below = [plan.section for plan in plans]
        jobs = compile_jobs(root, config, variant, layer, section, below, lock)
        if not plans:
            key = sha256_parts(rootfs_key(root, config, section.debs), f"layer {LAYER_FORMAT}")
        else:
            key = sha256_parts(
                plans[-1].key,
                f"layer {FORMAT} {layer.name} {config.epoch}",
                *toolkit,
                *_contents(root, variant, layer, section, lock),
                *(job.key for job in jobs),
            )
        plans.append(LayerPlan(name=layer.name, key=key, section=section, config=layer, jobs=jobs))
    return tuple(plans)


def dockerfile_name(variant: str) -> str:
    """The file below docker/ with the stages of a variant."""
    return "Dockerfile" if variant == "cpu" else f"Dockerfile.{variant}"


def _contents(
    root: Path, variant: VariantConfig, layer: LayerConfig, section: LayerLock, lock: Lock
) -> list[str]:
    parts = [json.dumps(layer.remove), json.dumps(layer.metadata_only)]
    for dist in section.wheels:
        parts += [dist.name, dist.sha256]
        if dist.name in lock.patches:
            parts += [lock.patches[dist.name], f"patched {wheels.FORMAT_VERSION}"]
    for folder in layer.tree:
        parts += [folder, tree_digest(root / folder)]
    if layer.tree:
        parts += [
            sha256_file(root / "docker" / "entrypoint"),
            lock.digest,
            variant.name,
            project_version(root),
        ]
        parts += [json.dumps(removed(variant), sort_keys=True)]
    return parts


def removed(variant: VariantConfig) -> dict[str, list[str]]:
    """What each layer of a variant goes without, as the image tells it of itself."""
    return {layer.name: list(layer.remove) for layer in variant.layers if layer.remove}


class LayerCache:
    """Finished layers below `<home>/layers/<key>/`: `layer.tar.gz`, `tree`, `layer.json`."""

    def __init__(self, home: Path) -> None:
        self.home = home / "layers"

    def get(self, plan: LayerPlan) -> NamedLayer | None:
        """The finished layer, if it is there whole."""
        folder = self.home / plan.key
        try:
            blob = LayerBlob(**json.loads((folder / "layer.json").read_text()))
            if (folder / "layer.tar.gz").stat().st_size != blob.size or not (folder / "tree").exists():
                return None
        except (OSError, ValueError, TypeError):
            return None
        return NamedLayer(name=plan.name, path=folder / "layer.tar.gz", blob=blob)

    def tree(self, plan: LayerPlan) -> Tree:
        """The file-system state after the layer."""
        return Tree.load(self.home / plan.key / "tree")

    def put(self, plan: LayerPlan, blob_path: Path, blob: LayerBlob, tree: Tree) -> NamedLayer:
        """Take a layer in; `blob_path` is moved. The folder appears whole or not at all."""
        target = self.home / plan.key
        with temporary_folder(target) as folder:
            blob_path.replace(folder / "layer.tar.gz")
            tree.save(folder / "tree")
            (folder / "layer.json").write_text(json.dumps(asdict(blob), indent=1) + "\n")
            shutil.rmtree(target, ignore_errors=True)
            folder.chmod(0o755)
            folder.rename(target)
        return NamedLayer(name=plan.name, path=target / "layer.tar.gz", blob=blob)

    def put_start(self, plan: LayerPlan, start: Mapping[str, object]) -> None:
        """Note beside the last layer what a container starts with (the Dockerfile's ENV, USER, …)."""
        write_atomic(
            self.home / plan.key / "start.json", json.dumps(start, indent=1, sort_keys=True).encode()
        )

    def start(self, plan: LayerPlan) -> dict[str, object] | None:
        """What `put_start` noted."""
        try:
            found: dict[str, object] = json.loads((self.home / plan.key / "start.json").read_bytes())
        except (OSError, ValueError):
            return None
        return found
