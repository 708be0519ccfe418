"""The end of a build, with layers from a cache and an engine that only takes notes."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from oci_samples import Member, canonical

from dsv32_image import stages
from dsv32_image.build import build, is_current
from dsv32_image.config import load_config
from dsv32_image.errors import BuildError, EngineError, FileAccessError, UsageError
from dsv32_image.files import refuse_mounts
from dsv32_image.layers import LayerCache, plan_layers
from dsv32_image.lockfile import read_lock
from dsv32_image.oci import Tree, verify_layout
from dsv32_image.scratch_tags import scratch_tag
from dsv32_image.stages import BuildRequest
from dsv32_image.store import Store
from dsv32_image.ui import Ui

ROOT = Path(__file__).parents[2]
INPUTS = ("pyproject.toml", "versions.lock", "docker", "patches", "scripts", "smoke", "src/dsv32")
START = {"env": ["A=1"], "entrypoint": ["/e"], "cmd": [], "user": "1:1", "workdir": "/"}


class NotingEngine:
    name = description = "notes"
    broken = False

    def __init__(self):
        self.held = ""
        self.tags = []

    def unnamed(self):
        return {}

    def own_tags(self):
        return list(self.tags)

    def remove(self, tag):
        self.tags = [one for one in self.tags if one != tag]

    def image_id(self, tag):
        return self.held

    def load(self, image, tag, work):
        if self.broken:
            raise EngineError("no space left in the engine")
        self.held = image.id
        self.tags.append(tag)

    def build(self, context, dockerfile, args, tag, log):
        raise self.stops


@pytest.fixture
def request_(tmp_path):
    """A build for which every layer is in the cache."""
    root = tmp_path / "root"
    for name in INPUTS:
        source, target = ROOT / name, root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, target)
    config, lock, cache = load_config(root), read_lock(root), LayerCache(tmp_path / "cache")
    variant = config.variant("cpu")
    plans, tree = plan_layers(root, config, variant, lock), Tree()
    for plan in plans:
        tree, blob, path = canonical(tmp_path, tree, [Member(name=plan.name.encode())])
        cache.put(plan, path, blob, tree)
    cache.put_start(plans[-1], START)
    return BuildRequest(
        root=root,
        config=config,
        variant=variant,
        store=Store(tmp_path),
        cache=cache,
        fetch=lambda items: None,
        engine=NotingEngine(),
    )


def test_the_image_is_written_and_loaded_under_the_same_id(request_):
    digest = build(request_, Ui())
    assert verify_layout(request_.root / "dist" / "cpu") == digest
    assert request_.engine.held == digest.config


def test_an_engine_that_fails_at_the_end_leaves_the_written_image(request_):
    request_.engine.broken = True
    with pytest.raises(EngineError, match="in the engine"):
        build(request_, Ui())
    digest = verify_layout(request_.root / "dist" / "cpu")
    request_.engine.broken = False
    stamp = (request_.root / "dist" / "cpu").stat().st_mtime_ns
    assert build(request_, Ui()) == digest
    assert request_.engine.held == digest.config
    assert (request_.root / "dist" / "cpu").stat().st_mtime_ns == stamp  # only loaded


@pytest.mark.parametrize("stops", [BuildError("RUN failed"), KeyboardInterrupt(), SystemExit(143)])
def test_a_build_that_does_not_end_well_leaves_no_image_of_its_own(request_, monkeypatch, stops):
    engine, tree = request_.engine, request_.root / "scripts" / "note.txt"
    tree.write_text("a layer that is in no cache")
    monkeypatch.setattr(stages, "lay_out", lambda *_: request_.root)
    engine.stops, seen = stops, []
    monkeypatch.setattr(engine, "load", lambda image, tag, work: (engine.tags.append(tag), seen.append(tag)))
    with pytest.raises(type(stops)):
        build(request_, Ui())
    assert seen and seen[0].startswith("localhost/dsv32-part:")
    assert engine.tags == []


def test_a_build_begins_by_removing_what_a_killed_one_left(request_):
    request_.engine.tags = [scratch_tag("part", "0" * 64), "localhost/dsv32:other"]
    build(request_, Ui())
    assert request_.engine.tags == ["localhost/dsv32:other", "localhost/dsv32:cpu"]


def test_an_image_is_current_until_what_it_is_made_of_changes(request_):
    build(request_, Ui())
    where = request_.root, request_.config, request_.variant
    assert is_current(*where)
    (request_.root / "scripts" / "note.txt").write_text("new")
    assert not is_current(*where)


def test_nothing_is_compiled_for_cpu_and_so_not_again(request_):
    with pytest.raises(UsageError, match="'cpu' has no compiled wheels"):
        build(replace(request_, recompile=True, fresh=True), Ui())


def test_a_layout_that_lost_its_config_is_written_again(request_):
    digest = build(request_, Ui())
    layout = request_.root / "dist" / "cpu"
    (layout / "blobs" / "sha256" / digest.config.removeprefix("sha256:")).unlink()
    assert build(request_, Ui()) == digest
    assert verify_layout(layout) == digest


def test_a_folder_with_something_mounted_below_is_not_removed(tmp_path):
    table = tmp_path / "mountinfo"
    table.write_text(
        f"21 1 0:20 / / rw - ext4 /dev/a rw\n"
        f"22 21 0:27 / {tmp_path}/build/cpu/.layers.x/a\\040b/dev/shm rw - tmpfs tmpfs rw\n"
        f"23 21 0:28 / {tmp_path}/build-of-others rw - tmpfs tmpfs rw\n"
    )
    with pytest.raises(FileAccessError, match=r"a b/dev/shm is mounted") as caught:
        refuse_mounts(tmp_path / "build", table)
    assert f"umount '{tmp_path}/build/cpu/.layers.x/a b/dev/shm'" in caught.value.hint
    refuse_mounts(tmp_path / "dist", table)
