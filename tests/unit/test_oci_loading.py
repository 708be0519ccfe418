"""Layouts that are only good for loading: nothing packed that need not be, nothing that the engine holds."""

import json

import pytest
from oci_samples import EPOCH, Member, canonical, folder, write_layer

from dsv32_image.errors import DiskFullError, EngineError, ImageLayoutError
from dsv32_image.oci import engine_export
from dsv32_image.oci.layer import scan_layer, write_tar
from dsv32_image.oci.layout import ImageConfig, NamedLayer, verify_layout, write_layout
from dsv32_image.oci.loading import OpenLayer, loadable, loadable_layout, write_loading_layout
from dsv32_image.oci.tree import Tree

CONFIG = ImageConfig(created=EPOCH, cmd=("bash",), labels={"a": "é"})


def refuse():
    raise AssertionError("nobody needs the gzip file yet")


@pytest.fixture
def layers(tmp_path):
    """A layer that was finished earlier, and one whose tar is there."""
    cache = tmp_path / "cache"
    cache.mkdir()
    tree, blob, path = canonical(cache, Tree(), [folder(b"d"), Member(name=b"d/low", content=b"low")])
    low = NamedLayer(name="base", path=path, blob=blob)
    _, packed, high_path = canonical(cache, tree, [Member(name=b"high", content=b"high")], name="high.gz")
    high = NamedLayer(name="top", path=high_path, blob=packed)
    with scan_layer(high_path) as scanned:
        tar = write_tar(tree, tree.apply(scanned.change), [scanned], cache / "high.tar", epoch=EPOCH)
        assert write_layer(tree, tree.apply(scanned.change), [scanned], cache / "again") == packed
    assert tar.diff_id == packed.diff_id
    return low, high, tar.path


def described(layout):
    """(end of media type, digest, size of the file) of each layer, after a look by the reader of exports."""
    assert len(engine_export.open_export(layout).layers) == 2
    (entry,) = json.loads((layout / "index.json").read_bytes())["manifests"]
    blobs = layout / "blobs" / "sha256"
    manifest = json.loads((blobs / entry["digest"][7:]).read_bytes())
    rows = [(d["mediaType"].rpartition(".")[2], d["digest"], d["size"]) for d in manifest["layers"]]
    assert all((blobs / digest[7:]).stat().st_size == size for _, digest, size in rows)
    return rows, manifest["config"]["digest"]


def test_an_image_is_loaded_before_its_layers_are_compressed(tmp_path, layers):
    low, high, tar = layers
    below = OpenLayer(name="base", diff_id=low.blob.diff_id, tar=None, packed=refuse)
    above = OpenLayer(name="top", diff_id=high.blob.diff_id, tar=tar, packed=refuse)
    image = loadable([below, above], CONFIG)
    write_loading_layout(image, tmp_path / "load", known={low.blob.diff_id})
    rows, config = described(tmp_path / "load")
    assert rows == [
        ("tar", low.blob.diff_id, 0),
        ("tar", high.blob.diff_id, tar.stat().st_size),
    ]
    assert config == image.id == write_layout(tmp_path / "image", [low, high], CONFIG, "cpu").config


def test_what_has_no_tar_any_more_is_loaded_from_its_gzip_file(tmp_path, layers):
    low, high, tar = layers
    tar.unlink()
    above = OpenLayer(name="top", diff_id=high.blob.diff_id, tar=tar, packed=lambda: high)
    write_loading_layout(loadable([OpenLayer.of(low), above], CONFIG), tmp_path / "load")
    rows, _ = described(tmp_path / "load")
    assert rows == [("tar+gzip", x.blob.digest, x.blob.size) for x in (low, high)]


def test_the_ordinary_form_takes_no_short_cuts(tmp_path, layers):
    low, high, tar = layers
    above = OpenLayer(name="top", diff_id=high.blob.diff_id, tar=tar, packed=lambda: high)
    image = loadable([OpenLayer.of(low), above], CONFIG)
    write_loading_layout(image, tmp_path / "load", known=None)
    assert verify_layout(tmp_path / "load").config == image.id


def test_a_written_layout_is_loaded_under_the_same_id(tmp_path, layers):
    low, high, _ = layers
    digest = write_layout(tmp_path / "image", [low, high], CONFIG, "cpu")
    image = loadable_layout(tmp_path / "image")
    assert image.id == digest.config
    write_loading_layout(image, tmp_path / "load", known={low.blob.diff_id})
    rows, config = described(tmp_path / "load")
    assert rows == [("tar", low.blob.diff_id, 0), ("tar+gzip", high.blob.digest, high.blob.size)]
    assert config == digest.config


def test_a_layout_that_is_not_whole_is_refused(tmp_path, layers):
    write_layout(tmp_path / "image", list(layers[:2]), CONFIG, "cpu")
    (tmp_path / "image" / "index.json").unlink()
    with pytest.raises(ImageLayoutError, match="not a whole OCI layout"):
        loadable_layout(tmp_path / "image")


def test_why_a_layer_could_not_be_compressed_is_why_it_cannot_be_loaded(tmp_path, layers):
    def full():
        raise DiskFullError("no space left while writing base.tar.gz")

    lost = OpenLayer(name="base", diff_id=layers[0].blob.diff_id, tar=None, packed=full)
    with pytest.raises(DiskFullError, match=r"base\.tar\.gz"):
        write_loading_layout(loadable([lost], CONFIG), tmp_path / "load")


def test_an_engine_that_takes_no_lean_layout_gets_the_ordinary_one(tmp_path, layers):
    from dsv32_image.engine import _load_lean  # noqa: PLC0415

    low, high, tar = layers
    above = OpenLayer(name="top", diff_id=high.blob.diff_id, tar=tar, packed=lambda: high)
    seen = []

    def load_from(layout):
        seen.append(described(layout)[0])
        if len(seen) == 1:
            raise EngineError("it needs gzip")

    _load_lean(load_from, loadable([OpenLayer.of(low), above], CONFIG), tmp_path, {low.blob.diff_id})
    assert [kind for kind, _, _ in seen[0]] == ["tar", "tar"]
    assert [kind for kind, _, _ in seen[1]] == ["tar+gzip", "tar+gzip"]
    assert not (tmp_path / "load").exists()
