"""The OCI layout, its check, the archive for docker, and reading what engines export."""

import errno
import gzip
import hashlib
import io
import json
import os
import tarfile

import pytest
from oci_samples import EPOCH, Member, canonical, folder, make_tar

from dsv32_image.errors import DiskFullError, ImageLayoutError
from dsv32_image.oci import layout as layout_module
from dsv32_image.oci.engine_export import open_export
from dsv32_image.oci.layer import scan_layer
from dsv32_image.oci.layout import (
    ImageConfig,
    NamedLayer,
    verify_layout,
    write_docker_archive,
    write_layout,
)
from dsv32_image.oci.tree import Tree

CONFIG = ImageConfig(
    created=EPOCH,
    entrypoint=("/bin/tool",),
    cmd=("--help",),
    env={"PATH": "/bin", "LANG": "C.UTF-8"},
    user="1000:1000",
    workdir="/srv",
    labels={"org.opencontainers.image.version": "1", "a": "é"},
)
FIRST = [folder(b"bin"), Member(name=b"bin/tool", content=b"#!", mode=0o755), Member(name=b"old")]
SECOND = [Member(name=b"bin/more", content=b"more"), Member(name=b".wh.old")]


def two_layers(tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir(exist_ok=True)
    tree, first, first_path = canonical(cache, Tree(), FIRST, name="1.tar.gz")
    _, second, second_path = canonical(cache, tree, SECOND, name="2.tar.gz")
    return [
        NamedLayer(name="rootfs", path=first_path, blob=first),
        NamedLayer(name="python", path=second_path, blob=second),
    ]


@pytest.fixture
def built(tmp_path):
    digest = write_layout(tmp_path / "image", two_layers(tmp_path), CONFIG, "cpu")
    return tmp_path / "image", digest


def blob(path, digest):
    return path / "blobs" / "sha256" / digest.removeprefix("sha256:")


def all_bytes(path):
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_the_layout_says_what_the_arguments_said(built):
    path, digest = built
    assert json.loads((path / "oci-layout").read_bytes()) == {"imageLayoutVersion": "1.0.0"}
    (entry,) = json.loads((path / "index.json").read_bytes())["manifests"]
    assert entry["digest"] == digest.manifest
    assert entry["annotations"] == {"org.opencontainers.image.ref.name": "cpu"}
    config = json.loads(blob(path, digest.config).read_bytes())
    assert config["config"] == {
        "Entrypoint": ["/bin/tool"],
        "Cmd": ["--help"],
        "Env": ["LANG=C.UTF-8", "PATH=/bin"],
        "User": "1000:1000",
        "WorkingDir": "/srv",
        "Labels": {"org.opencontainers.image.version": "1", "a": "é"},
    }
    assert config["created"] == "2023-11-14T22:13:20Z"
    assert [h["created_by"] for h in config["history"]] == ["rootfs", "python"]
    assert all(set(h) == {"created", "created_by"} for h in config["history"])


def test_the_digest_of_a_tiny_image_is_known(built):
    """If this fails the format has changed: every image gets a new digest, so say so in the change."""
    assert built[1].config == "sha256:c2730db0be46d2d2feafecfb664f7eb7e2d2cc59fc8e325ba330a6e3de63f670"
    assert built[1].manifest == "sha256:8a3b94d410b6ebeab63b5f25a2a7c0f1ca4763ef7a90ef52928dd2093b94c05a"


def test_the_digest_does_not_depend_on_folder_or_on_the_order_of_maps(tmp_path, built):
    backwards = ImageConfig(
        **{
            **{name: getattr(CONFIG, name) for name in CONFIG.__dataclass_fields__},
            "env": dict(reversed(CONFIG.env.items())),
            "labels": dict(reversed(CONFIG.labels.items())),
        }
    )
    (tmp_path / "elsewhere").mkdir()
    other = tmp_path / "elsewhere" / "x"
    assert write_layout(other, two_layers(tmp_path), backwards, "cpu") == built[1]
    assert all_bytes(other) == all_bytes(built[0])


def test_layers_are_linked_from_the_cache_or_copied(tmp_path, built, monkeypatch):
    layer = two_layers(tmp_path)[0]
    assert blob(built[0], layer.blob.digest).read_bytes() == layer.path.read_bytes()

    def refuse(*_):
        raise OSError(errno.EXDEV, "other file system")

    monkeypatch.setattr(os, "link", refuse)
    write_layout(tmp_path / "copied", two_layers(tmp_path), CONFIG, "cpu")
    assert all_bytes(tmp_path / "copied") == all_bytes(built[0])
    assert blob(tmp_path / "copied", layer.blob.digest).stat().st_nlink == 1


def test_an_older_layout_and_leftovers_of_a_killed_run_are_replaced(tmp_path, built):
    path, digest = built
    (tmp_path / ".image.new" / "blobs").mkdir(parents=True)
    (path / "stale").write_bytes(b"")
    assert write_layout(path, two_layers(tmp_path), CONFIG, "cpu") == digest
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cache", "image"]
    assert not (path / "stale").exists()


def test_a_full_disk_leaves_the_older_layout_alone(tmp_path, built, monkeypatch):
    path, digest = built

    def full(*_):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(layout_module, "_place", full)
    with pytest.raises(DiskFullError, match=str(path)):
        write_layout(path, two_layers(tmp_path), ImageConfig(created=0), "cpu")
    assert verify_layout(path) == digest
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cache", "image"]


def test_two_layers_with_the_same_content_share_a_blob(tmp_path):
    tree, empty, path = canonical(tmp_path, Tree(), [])
    layers = [NamedLayer(name=name, path=path, blob=empty) for name in ("one", "two")]
    assert not tree
    write_layout(tmp_path / "image", layers, CONFIG, "cpu")
    verify_layout(tmp_path / "image")
    assert len(list((tmp_path / "image" / "blobs" / "sha256").iterdir())) == 3


# --- verify ----------------------------------------------------------------------------------------------


def test_a_whole_layout_passes(built):
    assert verify_layout(built[0]) == built[1]


def test_each_damaged_or_missing_blob_is_named(built):
    for path in sorted((built[0] / "blobs" / "sha256").iterdir()):
        data = path.read_bytes()
        path.unlink()  # also breaks the link to the cache
        with pytest.raises(ImageLayoutError, match=path.name):
            verify_layout(built[0])
        for spoiled in (data[:-1], data[:-1] + bytes([data[-1] ^ 1])):
            path.write_bytes(spoiled)
            with pytest.raises(ImageLayoutError, match=path.name):
                verify_layout(built[0])
        path.write_bytes(data)
    assert verify_layout(built[0]) == built[1]


def test_a_layer_whose_tar_is_not_the_one_in_the_config_is_named(tmp_path):
    first, second = two_layers(tmp_path)
    wrong = NamedLayer(name="rootfs", path=second.path, blob=second.blob)
    wrong.blob.__dict__["diff_id"] = first.blob.diff_id
    write_layout(tmp_path / "image", [wrong], CONFIG, "cpu")
    with pytest.raises(ImageLayoutError, match=second.blob.digest.removeprefix("sha256:")):
        verify_layout(tmp_path / "image")


@pytest.mark.parametrize("name", ["index.json", "blobs"])
def test_a_layout_without_its_index_or_blobs_is_refused(built, name):
    (built[0] / name).rename(built[0] / "gone")
    with pytest.raises(ImageLayoutError):
        verify_layout(built[0])


# --- docker archive --------------------------------------------------------------------------------------


def test_the_docker_archive_names_the_config_as_image_and_keeps_the_manifest(tmp_path, built):
    path, digest = built
    write_docker_archive(path, tmp_path / "image.tar", "localhost/dsv32:cpu")
    with tarfile.open(tmp_path / "image.tar", "r:") as tar:
        files = {m.name: tar.extractfile(m).read() for m in tar if m.isreg()}
        assert {(m.mtime, m.uid, m.uname) for m in tar.getmembers()} == {(EPOCH, 0, "")}
    (docker,) = json.loads(files["manifest.json"])
    assert docker["RepoTags"] == ["localhost/dsv32:cpu"]
    assert docker["Config"] == "blobs/sha256/" + digest.config.removeprefix("sha256:")
    diff_ids = [
        f"sha256:{hashlib.sha256(gzip.decompress(files[name])).hexdigest()}" for name in docker["Layers"]
    ]
    assert json.loads(files[docker["Config"]])["rootfs"]["diff_ids"] == diff_ids
    assert json.loads(files["index.json"])["manifests"][0]["digest"] == digest.manifest


def test_the_docker_archive_is_deterministic_and_reads_back(tmp_path, built):
    for name in ("a.tar", "b.tar"):
        write_docker_archive(built[0], tmp_path / name, "localhost/dsv32:cpu")
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()
    export = open_export(tmp_path / "a.tar")
    assert [layer.diff_id for layer in export.layers] == [x.blob.diff_id for x in two_layers(tmp_path)]


# --- engine exports --------------------------------------------------------------------------------------


def add(tar, name, data=None, link=None):
    info = tarfile.TarInfo(name)
    if link is not None:
        info.type, info.linkname = tarfile.SYMTYPE, link
    info.size = len(data or b"")
    tar.addfile(info, io.BytesIO(data or b""))


def states(export):
    tree = Tree()
    for source in export.layers:
        with scan_layer(source.path, offset=source.offset, size=source.size) as layer:
            tree = tree.apply(layer.change)
        yield tree


def docker_save(path, layers, config, images=1):
    """As docker 20.10 writes it: a folder a layer, and a link where a layer comes twice."""
    with tarfile.open(path, "w") as tar:
        add(tar, "cfg.json", json.dumps(config).encode())
        seen = {}
        for i, layer in enumerate(layers):
            if layer in seen:
                add(tar, f"{i}/layer.tar", link=f"../{seen[layer]}/layer.tar")
            else:
                add(tar, f"{i}/layer.tar", layer)
                seen[layer] = i
        names = [f"{i}/layer.tar" for i in range(len(layers))]
        image = {"Config": "cfg.json", "RepoTags": None, "Layers": names}
        add(tar, "manifest.json", json.dumps([image] * images).encode())


def config_of(layers):
    ids = [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]
    return {"config": {"Env": ["A=b"]}, "rootfs": {"type": "layers", "diff_ids": ids}}


def test_docker_save_is_read_without_unpacking(tmp_path):
    layers = [make_tar(FIRST), make_tar([]), make_tar(SECOND), make_tar([])]
    docker_save(tmp_path / "x.tar", layers, config_of(layers))
    export = open_export(tmp_path / "x.tar")
    assert export.config["config"]["Env"] == ["A=b"]
    assert export.layers[1].offset == export.layers[3].offset
    assert sorted(list(states(export))[-1]) == [b"bin", b"bin/more", b"bin/tool"]


def test_oci_folder_and_oci_archive_give_the_same_states(tmp_path, built):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        tar.add(built[0], ".")
    folders, archive = (list(states(open_export(p))) for p in (built[0], tmp_path / "x.tar"))
    assert folders == archive
    assert len(folders) == 2


def test_an_index_of_an_index_is_followed(tmp_path, built):
    index = (built[0] / "index.json").read_bytes()
    name = hashlib.sha256(index).hexdigest()
    (built[0] / "blobs" / "sha256" / name).write_bytes(index)
    outer = {"mediaType": "application/vnd.oci.image.index.v1+json", "digest": f"sha256:{name}", "size": 1}
    (built[0] / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [outer]}))
    assert len(open_export(built[0]).layers) == 2


def test_what_is_no_single_image_is_refused_and_named(tmp_path, built):
    layers = [make_tar(FIRST)]
    docker_save(tmp_path / "two.tar", layers, config_of(layers), images=2)
    docker_save(tmp_path / "short.tar", layers, config_of([]))
    (tmp_path / "junk.tar").write_bytes(b"junk")
    (tmp_path / "empty").mkdir()
    (built[0] / "index.json").write_text('{"manifests": [{"digest": "sha256:../../etc"}]}')
    for name in ("two.tar", "short.tar", "junk.tar", "empty", "image"):
        with pytest.raises(ImageLayoutError, match=name):
            open_export(tmp_path / name)
