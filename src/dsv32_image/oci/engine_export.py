"""Finding the layers in what an engine exported, without unpacking it.

Two forms: a docker-archive (`docker save`, `podman save`, `skopeo copy … docker-archive:`), which has a
manifest.json, and an OCI layout as a folder or as an uncompressed tar (`buildah push … oci:DIR` and
`oci-archive:FILE`), which has an index.json. A tar with both, as docker writes since version 25, is read by
its manifest.json.
"""

from __future__ import annotations

import json
import os
import posixpath
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dsv32_image.errors import ImageLayoutError

_MAX_JSON = 16 << 20  # bytes; containerd reads at most 8 MiB of a manifest
_INDEXES = frozenset(
    {
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
    }
)


@dataclass(frozen=True, kw_only=True)
class LayerSource:
    """Where the bytes of one engine layer lie; the arguments of `layer.scan_layer`.

    Args:
        path: The file.
        offset: Begin of the layer in it, bytes.
        size: Length of the layer, bytes.
        diff_id: `sha256:…` of the uncompressed layer, as the engine's config says.
    """

    path: Path
    offset: int
    size: int
    diff_id: str


@dataclass(frozen=True, kw_only=True)
class EngineExport:
    """An image as the engine exported it.

    Args:
        layers: Lowest first. Instructions that change no file (ENV, LABEL) have none in an OCI layout of
            buildah, and may have an empty one elsewhere.
        config: The engine's image config (OCI image spec, config.md).
    """

    layers: tuple[LayerSource, ...]
    config: dict[str, Any]


def open_export(path: Path) -> EngineExport:
    """Reads the manifest and config of an export; the layers stay where they are.

    Args:
        path: A docker-archive, an OCI layout folder or an oci-archive.

    Raises:
        ImageLayoutError: Neither of these, damaged, or with more than one image.
    """
    try:
        store: _Store = _Folder(path) if path.is_dir() else _Archive(path)
        config, blobs = _docker(store) if store.has("manifest.json") else _oci(store)
        diff_ids = config["rootfs"]["diff_ids"] or []
        if len(diff_ids) != len(blobs):
            raise ValueError(f"{len(blobs)} layers, but the config knows {len(diff_ids)}")
        layers = tuple(
            LayerSource(path=where[0], offset=where[1], size=where[2], diff_id=diff_id)
            for where, diff_id in zip(blobs, diff_ids, strict=True)
        )
        return EngineExport(layers=layers, config=config)
    except (tarfile.TarError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        message = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ImageLayoutError(f"{path}: not an exported image: {message}", "export it again") from error


_Where = tuple[Path, int, int]


class _Store(Protocol):
    """A folder or a tar, seen as named byte ranges."""

    def has(self, name: str) -> bool: ...

    def find(self, name: str) -> _Where: ...


class _Folder:
    def __init__(self, path: Path) -> None:
        self._path = path

    def has(self, name: str) -> bool:
        return (self._path / name).is_file()

    def find(self, name: str) -> _Where:
        if not self.has(name):
            raise KeyError(name)
        return self._path / name, 0, (self._path / name).stat().st_size


class _Archive:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: dict[str, tuple[int, int]] = {}
        self._links: dict[str, str] = {}
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                name = posixpath.normpath(member.name)
                if member.isreg():
                    self._files[name] = member.offset_data, member.size
                elif member.issym():  # docker stores a layer that two images share once
                    folder = posixpath.dirname(name)
                    self._links[name] = posixpath.normpath(posixpath.join(folder, member.linkname))
                elif member.islnk():
                    self._links[name] = posixpath.normpath(member.linkname)

    def _resolve(self, name: str) -> str:
        for _ in range(len(self._links) + 1):
            if name not in self._links:
                break
            name = self._links[name]
        return name

    def has(self, name: str) -> bool:
        return self._resolve(name) in self._files

    def find(self, name: str) -> _Where:
        return self._path, *self._files[self._resolve(name)]


def _json(where: _Where) -> Any:  # noqa: ANN401  # callers say what they expect
    path, offset, size = where
    if size > _MAX_JSON:
        raise ValueError(f"a manifest of {size} bytes")
    with path.open("rb") as file:
        data = os.pread(file.fileno(), size, offset)
    return json.loads(data)


def _docker(store: _Store) -> tuple[dict[str, Any], list[_Where]]:
    images = _json(store.find("manifest.json"))
    if len(images) != 1:
        raise ValueError(f"{len(images)} images in one archive; export one")
    return _json(store.find(images[0]["Config"])), [store.find(name) for name in images[0]["Layers"] or []]


def _oci(store: _Store) -> tuple[dict[str, Any], list[_Where]]:
    index = _json(store.find("index.json"))
    manifest = _manifest(store, index)
    layers = [store.find(_blob(layer)) for layer in manifest["layers"]]
    return _json(store.find(_blob(manifest["config"]))), layers


def _manifest(store: _Store, index: dict[str, Any]) -> dict[str, Any]:
    manifests = index["manifests"]
    if len(manifests) != 1:
        raise ValueError(f"{len(manifests)} images in one layout; export one")
    found: dict[str, Any] = _json(store.find(_blob(manifests[0])))
    return _manifest(store, found) if manifests[0].get("mediaType") in _INDEXES else found


def _blob(descriptor: dict[str, Any]) -> str:
    algorithm, _, digest = descriptor["digest"].partition(":")
    if algorithm != "sha256" or not digest.isalnum():
        raise ValueError(f"digest {descriptor['digest']!r}")
    return f"blobs/sha256/{digest}"
