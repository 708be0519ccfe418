"""A layout for loading into an engine on this machine: no gzip where the tar is at hand, nothing known twice.

Unpacking gzip is most of the work of a load (Go inflates some 150 MB/s), and a build has the tar of each
layer it just made. A layer that the engine holds already is listed by its diff_id with an empty file:
engines ask their storage first and do not open it. The config, and with it the image id, is that of the
canonical image. It names no gzip file, so an image can be loaded before its layers are compressed.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dsv32_image.errors import ImageLayoutError
from dsv32_image.files import disk_full_is_clear
from dsv32_image.oci.layout import (
    GZIP_LAYER,
    TAR_LAYER,
    ImageConfig,
    NamedLayer,
    config_document,
    digest_of,
    manifest_of,
    write_documents,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class OpenLayer:
    """A layer of which the gzip file may still be in the making.

    Args:
        name: Stands in the image's history.
        diff_id: `sha256:…` of its tar.
        tar: The tar, as long as that file is there; None if only the gzip file is.
        packed: Gives the finished layer, waits for it if it must, and raises why there is none.
    """

    name: str
    diff_id: str
    tar: Path | None
    packed: Callable[[], NamedLayer]

    @classmethod
    def of(cls, layer: NamedLayer) -> OpenLayer:
        """A layer that was finished earlier."""
        return cls(name=layer.name, diff_id=layer.blob.diff_id, tar=None, packed=lambda: layer)


@dataclass(frozen=True, kw_only=True)
class LoadableLayer:
    """What loading a layer takes.

    Args:
        diff_id: `sha256:…` of its tar.
        tar: The tar, as long as that file is there.
        gzip: Gives the gzip file and its digest; may wait.
    """

    diff_id: str
    tar: Path | None
    gzip: Callable[[], tuple[Path, str]]


@dataclass(frozen=True, kw_only=True)
class LoadableImage:
    """What loading an image takes: its config, as JSON, and its layers, lowest first."""

    config: bytes
    layers: tuple[LoadableLayer, ...]

    @property
    def id(self) -> str:
        """The config's digest, by which engines call the image."""
        return digest_of(self.config)


def loadable(layers: Sequence[OpenLayer], config: ImageConfig) -> LoadableImage:
    """The image that `write_layout` would write of these layers."""

    def gzip_of(layer: OpenLayer) -> tuple[Path, str]:
        packed = layer.packed()
        return packed.path, packed.blob.digest

    document = config_document([(layer.name, layer.diff_id) for layer in layers], config)
    return LoadableImage(
        config=document,
        layers=tuple(
            LoadableLayer(diff_id=layer.diff_id, tar=layer.tar, gzip=partial(gzip_of, layer))
            for layer in layers
        ),
    )


def loadable_layout(layout: Path) -> LoadableImage:
    """The image of a layout that was written earlier.

    Raises:
        ImageLayoutError: The layout is not whole.
    """

    def blob(digest: str) -> Path:
        return layout / "blobs" / "sha256" / digest.removeprefix("sha256:")

    def gzip_of(digest: str) -> tuple[Path, str]:
        return blob(digest), digest

    try:
        _, manifest, config = manifest_of(layout)
        digests = [str(layer["digest"]) for layer in manifest["layers"]]
        layers = tuple(
            LoadableLayer(diff_id=diff_id, tar=None, gzip=partial(gzip_of, digest))
            for digest, diff_id in zip(digests, config["rootfs"]["diff_ids"], strict=True)
        )
        return LoadableImage(config=blob(manifest["config"]["digest"]).read_bytes(), layers=layers)
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ImageLayoutError(f"{layout}: not a whole OCI layout: {error}", "build it again") from error


def write_loading_layout(image: LoadableImage, out: Path, *, known: Collection[str] | None = ()) -> None:
    """Write a layout that is only good for loading.

    Args:
        image: What to load.
        out: The folder to write; what was there is removed.
        known: diff_ids of layers that the engine holds. None: an ordinary layout, every layer gzip'ed, for
            an engine that takes nothing else; waits until the layers are compressed.

    Raises:
        DiskFullError: No space left.
        ImageError: A layer could not be compressed.
    """
    shutil.rmtree(out, ignore_errors=True)
    blobs = out / "blobs" / "sha256"
    with disk_full_is_clear(out):
        blobs.mkdir(parents=True)
        layers = [_layer(blobs, layer, known) for layer in image.layers]
        write_documents(out, image.config, layers, "load")


def _layer(blobs: Path, layer: LoadableLayer, known: Collection[str] | None) -> dict[str, Any]:
    """Put a layer's file into place; its descriptor."""
    target = blobs / layer.diff_id.removeprefix("sha256:")
    if known is not None and layer.diff_id in known:
        target.touch()
        return {"mediaType": TAR_LAYER, "digest": layer.diff_id, "size": 0}
    if known is not None and layer.tar is not None:
        with suppress(FileNotFoundError):  # removed in the meantime, since it is compressed
            _link(layer.tar, target)
            return {"mediaType": TAR_LAYER, "digest": layer.diff_id, "size": target.stat().st_size}
    source, digest = layer.gzip()
    _link(source, blobs / digest.removeprefix("sha256:"))
    return {"mediaType": GZIP_LAYER, "digest": digest, "size": source.stat().st_size}


def _link(source: Path, target: Path) -> None:
    if target.exists():
        return  # two layers with the same content
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)
