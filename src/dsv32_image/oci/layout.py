"""An OCI image layout with a config and a manifest of our own.

Sources: OCI image spec, image-layout.md, manifest.md, config.md. All JSON is written with sorted keys and
without spaces, and holds nothing but what is passed in, so that the digests follow from the arguments.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import IO, TYPE_CHECKING, Any

from dsv32_image.errors import ImageLayoutError
from dsv32_image.files import disk_full_is_clear, replacing
from dsv32_image.oci import tarheader as tar
from dsv32_image.oci.gzipstream import CHUNK, inflate

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from dsv32_image.oci.layer import LayerBlob

_INDEX = "application/vnd.oci.image.index.v1+json"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
# gzip and not zstd: docker before 23 cannot read zstd layers ("archive/tar: invalid tar header").
GZIP_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
TAR_LAYER = "application/vnd.oci.image.layer.v1.tar"
_REF_NAME = "org.opencontainers.image.ref.name"


@dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """What a container of the image starts with.

    Args:
        created: Seconds since 1970; also the time of each history entry.
        entrypoint: Program and first arguments.
        cmd: Default arguments.
        env: Environment variables.
        user: User name or number, with `:group` if wanted.
        workdir: Absolute folder; empty for the root.
        labels: Labels.
        architecture: As Go names it.
        os: As Go names it.
    """

    created: int
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    workdir: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    architecture: str = "amd64"
    os: str = "linux"


@dataclass(frozen=True, kw_only=True)
class NamedLayer:
    """A layer of the image.

    Args:
        name: Stands in the image's history.
        path: The gzip file that `layer.pack_layer` wrote.
        blob: Its digests and sizes.
    """

    name: str
    path: Path
    blob: LayerBlob


@dataclass(frozen=True, kw_only=True)
class ImageDigest:
    """The two names of an image.

    Args:
        manifest: `sha256:…` of the manifest: what a registry and `skopeo` call the image's digest.
        config: `sha256:…` of the config: what docker calls the image id.
    """

    manifest: str
    config: str


def write_layout(
    folder: Path, layers: Sequence[NamedLayer], config: ImageConfig, ref_name: str
) -> ImageDigest:
    """Writes an OCI layout; `folder` appears whole or stays as it was.

    Layers are hard-linked where their file system allows it and copied elsewhere. An older layout of the
    same name is replaced; the caller sees to it that no other process writes the same folder.

    Args:
        folder: The layout.
        layers: Lowest first.
        config: What a container starts with.
        ref_name: Name of the image in the index, for example `cpu`.

    Raises:
        DiskFullError: No space left.
    """
    document = config_document([(layer.name, layer.blob.diff_id) for layer in layers], config)
    descriptors = [
        {"mediaType": GZIP_LAYER, "digest": layer.blob.digest, "size": layer.blob.size} for layer in layers
    ]
    fresh, aside = folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")
    for leftover in (fresh, aside):  # of a run that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    with disk_full_is_clear(folder):
        try:
            blobs = fresh / "blobs" / "sha256"
            blobs.mkdir(parents=True)
            for layer in layers:
                _place(layer.path, blobs / _hex(layer.blob.digest))
            digest = write_documents(fresh, document, descriptors, ref_name)
            if folder.exists():
                folder.rename(aside)
            fresh.rename(folder)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            if aside.exists() and not folder.exists():
                aside.rename(folder)
            raise
    shutil.rmtree(aside, ignore_errors=True)
    return digest


def write_documents(
    folder: Path, config: bytes, layers: Sequence[Mapping[str, Any]], ref_name: str
) -> ImageDigest:
    """Writes all of a layout but its layers.

    Args:
        folder: The layout; `blobs/sha256` is there.
        config: What `config_document` gave.
        layers: The layers' descriptors, lowest first.
        ref_name: Name of the image in the index.
    """
    about = json.loads(config)
    manifest = _canonical(
        {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": _descriptor(_CONFIG, config),
            "layers": list(layers),
        }
    )
    entry = {
        **_descriptor(_MANIFEST, manifest),
        "platform": {"architecture": about["architecture"], "os": about["os"]},
        "annotations": {_REF_NAME: ref_name},
    }
    for document in (config, manifest):
        (folder / "blobs" / "sha256" / hashlib.sha256(document).hexdigest()).write_bytes(document)
    (folder / "oci-layout").write_bytes(_canonical({"imageLayoutVersion": "1.0.0"}))
    index = {"schemaVersion": 2, "mediaType": _INDEX, "manifests": [entry]}
    (folder / "index.json").write_bytes(_canonical(index))
    return ImageDigest(manifest=digest_of(manifest), config=digest_of(config))


def verify_layout(folder: Path) -> ImageDigest:
    """Hashes every blob again, and the tar stream in every layer.

    Raises:
        ImageLayoutError: A blob is damaged, missing, or is not what the manifest or the config says.
    """
    blobs = folder / "blobs" / "sha256"
    try:
        for blob in sorted(blobs.iterdir()):
            if _hash(_blocks(blob)) != blob.name:
                raise ImageLayoutError(f"{blob}: the content has another sha256", "build the image again")
        entry = _only_manifest(folder)
        manifest = json.loads(_checked(folder, entry).read_bytes())
        config = json.loads(_checked(folder, manifest["config"]).read_bytes())
        diff_ids, layers = config["rootfs"]["diff_ids"], manifest["layers"]
        if len(diff_ids) != len(layers):
            raise ValueError(f"{len(layers)} layers, but the config knows {len(diff_ids)}")
        for layer, diff_id in zip(layers, diff_ids, strict=True):
            blob = _checked(folder, layer)
            if "sha256:" + _inflated_hash(blob) != diff_id:
                raise ImageLayoutError(f"{blob}: the tar inside is not {diff_id}", "build the image again")
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        message = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ImageLayoutError(f"{folder}: not a whole OCI layout: {message}", "build it again") from error
    return ImageDigest(manifest=entry["digest"], config=manifest["config"]["digest"])


def write_docker_archive(layout: Path, out: Path, tag: str) -> None:
    """Writes one tar that every docker can load: the layout with a manifest.json beside it.

    Docker before 25 reads manifest.json and names the image by the config's digest (it unpacks gzip'ed
    layers itself); docker with the containerd store reads index.json and keeps the manifest's digest.

    Args:
        layout: What `write_layout` wrote.
        out: The tar.
        tag: `name:tag`, for example `localhost/dsv32:cpu`.

    Raises:
        DiskFullError: No space left.
        ImageLayoutError: The layout is not whole.
    """
    try:
        entry, manifest, config = manifest_of(layout)
        names = [_blob(layer) for layer in manifest["layers"]]
        epoch = int(datetime.fromisoformat(config["created"]).timestamp())
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ImageLayoutError(f"{layout}: not a whole OCI layout: {error}", "build it again") from error
    entry["annotations"] = {_REF_NAME: tag.rpartition(":")[2], "io.containerd.image.name": tag}
    docker = [{"Config": _blob(manifest["config"]), "Layers": names, "RepoTags": [tag]}]
    documents = {
        "index.json": _canonical({"schemaVersion": 2, "mediaType": _INDEX, "manifests": [entry]}),
        "manifest.json": _canonical(docker),
        "oci-layout": (layout / "oci-layout").read_bytes(),
    }
    blobs = {_blob(entry), _blob(manifest["config"]), *names}
    with replacing(out) as file:
        for folder in ("blobs/", "blobs/sha256/"):
            file.write(tar.tar_header(folder.encode(), typeflag=tar.DIR, mode=0o755, mtime=epoch))
        for name in sorted(blobs):
            _append(file, name, (layout / name).stat().st_size, _blocks(layout / name), epoch)
        for name, document in documents.items():
            _append(file, name, len(document), [document], epoch)
        file.write(bytes(2 * tar.BLOCK))


def manifest_of(layout: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The index entry, the manifest and the config of a layout's one image.

    Raises:
        ImageLayoutError: A file is missing or has another size.
        OSError, ValueError, KeyError, TypeError, IndexError: It is no layout at all.
    """
    entry = _only_manifest(layout)
    manifest = json.loads(_checked(layout, entry).read_bytes())
    return entry, manifest, json.loads(_checked(layout, manifest["config"]).read_bytes())


def _canonical(document: object) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def config_document(layers: Sequence[tuple[str, str]], config: ImageConfig) -> bytes:
    """The image's config as canonical JSON; `layers` are names and diff_ids, lowest first."""
    created = datetime.fromtimestamp(config.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    container = {
        "Entrypoint": list(config.entrypoint),
        "Cmd": list(config.cmd),
        "Env": [f"{name}={value}" for name, value in sorted(config.env.items())],
        "User": config.user,
        "WorkingDir": config.workdir,
        "Labels": dict(config.labels),
    }
    return _canonical(
        {
            "created": created,
            "architecture": config.architecture,
            "os": config.os,
            "config": {name: value for name, value in container.items() if value},
            "rootfs": {"type": "layers", "diff_ids": [diff_id for _, diff_id in layers]},
            "history": [{"created": created, "created_by": name} for name, _ in layers],
        }
    )


def digest_of(document: bytes) -> str:
    """`sha256:…` of a document, by which others name it."""
    return f"sha256:{hashlib.sha256(document).hexdigest()}"


def _descriptor(media_type: str, document: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": digest_of(document), "size": len(document)}


def _hex(digest: str) -> str:
    algorithm, _, value = digest.partition(":")
    if algorithm != "sha256" or not value.isalnum():
        raise ValueError(f"digest {digest!r}")
    return value


def _blob(descriptor: Mapping[str, Any]) -> str:
    return f"blobs/sha256/{_hex(descriptor['digest'])}"


def _place(source: Path, target: Path) -> None:
    if target.exists():
        return  # two layers with the same content
    try:
        os.link(source, target)
    except OSError:  # another file system, one without hard links, or too many of them
        shutil.copyfile(source, target)


def _only_manifest(folder: Path) -> dict[str, Any]:
    manifests = json.loads((folder / "index.json").read_bytes())["manifests"]
    if len(manifests) != 1:
        raise ValueError(f"{len(manifests)} images in index.json")
    entry: dict[str, Any] = manifests[0]
    return entry


def _checked(folder: Path, descriptor: Mapping[str, Any]) -> Path:
    blob = folder / _blob(descriptor)
    if not blob.is_file() or blob.stat().st_size != descriptor["size"]:
        raise ImageLayoutError(f"{blob}: missing, or not {descriptor['size']} bytes", "build the image again")
    return blob


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(CHUNK):
            yield block


def _hash(blocks: Iterable[bytes]) -> str:
    hasher = hashlib.sha256()
    for block in blocks:
        hasher.update(block)
    return hasher.hexdigest()


def _inflated_hash(blob: Path) -> str:
    try:
        return _hash(inflate(_blocks(blob)))
    except ValueError as error:
        raise ImageLayoutError(f"{blob}: {error}", "build the image again") from error


def _append(file: IO[bytes], name: str, size: int, blocks: Iterable[bytes], epoch: int) -> None:
    file.write(tar.tar_header(name.encode(), typeflag=tar.FILE, mode=0o644, mtime=epoch, size=size))
    for block in blocks:
        file.write(block)
    file.write(tar.padding(size))
