"""A layout for loading into an engine on this machine: no gzip where the tar is at hand, nothing known twice.

Unpacking gzip is most of the work of a load (Go inflates some 150 MB/s), and a build has the tar of each
layer it just made. A layer that the engine holds already is listed by its diff_id with an empty file:
engines ask their storage first and do not open it. The config is the same file, so the image id is, too.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

from dsv32_image.errors import ImageLayoutError
from dsv32_image.oci.files import disk_full
from dsv32_image.oci.layout import canonical_json, manifest_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

_PLAIN = "application/vnd.oci.image.layer.v1.tar"


def write_loading_layout(
    layout: Path, out: Path, *, plain: Mapping[str, Path], known: Collection[str] = ()
) -> None:
    """Derive from a layout one that is only good for loading.

    Args:
        layout: What `write_layout` wrote.
        out: The folder to write; what was there is removed.
        plain: Uncompressed tar of a layer, by diff_id (`sha256:…`); layers without one stay gzip'ed.
        known: diff_ids of layers that the engine holds.

    Raises:
        ImageLayoutError: The layout is not whole.
        DiskFullError: No space left.
    """
    try:
        entry, manifest, config = manifest_of(layout)
        diff_ids = config["rootfs"]["diff_ids"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ImageLayoutError(f"{layout}: not a whole OCI layout: {error}", "build it again") from error
    shutil.rmtree(out, ignore_errors=True)
    blobs = out / "blobs" / "sha256"
    with disk_full(out):
        blobs.mkdir(parents=True)
        manifest["layers"] = [
            _layer(layout, blobs, layer, diff_id, plain, known)
            for layer, diff_id in zip(manifest["layers"], diff_ids, strict=True)
        ]
        _link(layout, blobs, manifest["config"]["digest"])
        document = canonical_json(manifest)
        entry |= document.descriptor
        (blobs / document.hex).write_bytes(document.data)
        index = {"schemaVersion": 2, "manifests": [entry]}
        (out / "index.json").write_bytes(canonical_json(index).data)
        shutil.copyfile(layout / "oci-layout", out / "oci-layout")


def _layer(
    layout: Path,
    blobs: Path,
    layer: dict[str, Any],
    diff_id: str,
    plain: Mapping[str, Path],
    known: Collection[str],
) -> dict[str, Any]:
    target = blobs / diff_id.removeprefix("sha256:")
    if diff_id in known:
        target.touch()
        return {"mediaType": _PLAIN, "digest": diff_id, "size": 0}
    if diff_id in plain:
        os.link(plain[diff_id], target)
        return {"mediaType": _PLAIN, "digest": diff_id, "size": plain[diff_id].stat().st_size}
    _link(layout, blobs, layer["digest"])
    return layer


def _link(layout: Path, blobs: Path, digest: str) -> None:
    name = digest.removeprefix("sha256:")
    source = layout / "blobs" / "sha256" / name
    try:
        os.link(source, blobs / name)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, blobs / name)
