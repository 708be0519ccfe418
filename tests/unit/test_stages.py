"""From the engine's history to our layers, the Dockerfile from a stage on, a layer's way into the cache."""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from oci_samples import EPOCH, Member, scan

from dsv32_image import oci, stages
from dsv32_image.background import Background
from dsv32_image.config import LayerConfig
from dsv32_image.errors import BuildError, DiskFullError
from dsv32_image.layers import LayerCache, LayerPlan
from dsv32_image.lockfile import LayerLock
from dsv32_image.oci import EngineExport, LayerSource, Tree
from dsv32_image.stages import Scratch, finish_layer, layers_by_stage, stages_from

ROOT = Path(__file__).parents[2]


def plan(name):
    return LayerPlan(name=name, key="0", section=LayerLock(name=name), config=LayerConfig(name=name))


def source(number):
    return LayerSource(path=Path(f"layer{number}"), offset=0, size=1, diff_id=f"sha256:{number}")


def export(count, history):
    return EngineExport(layers=tuple(source(n) for n in range(count)), config={"history": history})


def entry(text, *, empty=False):
    return {"created_by": text, **({"empty_layer": True} if empty else {})}


# As buildah 1.28 writes it: one layer a stage, named after the stage's last instruction.
BUILDAH = [
    entry("base"),
    entry("/bin/sh -c #(nop) ARG KEY_PYTHON", empty=True),
    entry('|1 KEY_PYTHON=3c /bin/sh -c KEY="${KEY_PYTHON}" sh /run/tools/install-layer'),
    entry("/bin/sh -c #(nop) ARG KEY_DSV32", empty=True),
    entry("|1 KEY_DSV32=85 /bin/sh -c sh /run/tools/install-layer", empty=True),
    entry("/bin/sh -c #(nop) USER 1000:1000", empty=True),
    entry('/bin/sh -c #(nop) CMD ["bash"]'),
]
# As BuildKit writes it: a layer for RUN and one for WORKDIR; arguments of lower stages are repeated.
BUILDKIT = [
    entry("base"),
    entry("ARG KEY_PYTHON=3c", empty=True),
    entry('RUN |1 KEY_PYTHON=3c /bin/sh -c KEY="${KEY_PYTHON}" sh install-layer # buildkit'),
    entry("ARG KEY_DSV32=85", empty=True),
    entry('RUN |2 KEY_PYTHON=3c KEY_DSV32=85 /bin/sh -c KEY="${KEY_DSV32}" sh install-layer # buildkit'),
    entry("WORKDIR /workspace"),
    entry('CMD ["bash"]', empty=True),
]


@pytest.mark.parametrize(("history", "count", "last"), [(BUILDAH, 3, [2]), (BUILDKIT, 4, [2, 3])])
def test_layers_find_their_stage_in_either_engines_history(history, count, last):
    groups = layers_by_stage(export(count, history), 1, [plan("python"), plan("dsv32")])
    assert groups == [[source(1)], [source(n) for n in last]]


def test_a_stage_without_a_layer_is_an_error():
    with pytest.raises(BuildError, match="megatron"):
        layers_by_stage(export(3, BUILDAH), 1, [plan("python"), plan("megatron"), plan("dsv32")])


def test_a_history_longer_than_the_image_is_an_error():
    with pytest.raises(BuildError, match="more layers"):
        layers_by_stage(export(2, BUILDKIT), 1, [plan("python"), plan("dsv32")])


def test_the_dockerfile_from_a_stage_on_starts_at_the_given_image():
    whole = (ROOT / "docker" / "Dockerfile").read_text()
    part = stages_from(whole, "megatron", "localhost/part:1")
    assert part.startswith("FROM localhost/part:1 AS megatron\n")
    assert "FROM megatron AS" in part
    assert "AS python" not in part
    assert part.endswith(whole[-200:])


def test_a_layer_without_a_stage_is_an_error():
    with pytest.raises(BuildError, match="no stage 'cuda'"):
        stages_from("FROM scratch AS base\n", "cuda", "x")


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cu130"])
def test_a_part_ends_where_it_is_told_to(name):
    whole = (ROOT / "docker" / name).read_text()
    part = stages_from(whole, "transformers", "localhost/part:1", until="megatron")
    assert [line for line in part.splitlines() if line.startswith("FROM")] == [
        "FROM localhost/part:1 AS transformers",
        "FROM transformers AS megatron",
    ]
    assert stages_from(whole, "transformers", "x", until="dsv32") == stages_from(whole, "transformers", "x")


# --- a layer's way into the cache ------------------------------------------------------------------------


@pytest.fixture
def request_(tmp_path):
    return SimpleNamespace(cache=LayerCache(tmp_path / "cache"), config=SimpleNamespace(epoch=EPOCH))


def finished(request_, scratch, folder):
    with scan(folder, [Member(name=b"a", content=b"content")]) as layer:
        after = Tree().apply(layer.change)
        return finish_layer(request_, plan("python"), (Tree(), after), [layer], scratch), after


def test_a_layer_can_be_loaded_while_it_is_still_compressed(request_, tmp_path, monkeypatch):
    gate, real = threading.Event(), oci.pack_layer

    def slow(*arguments, **options):
        assert gate.wait(10)
        return real(*arguments, **options)

    monkeypatch.setattr(oci, "pack_layer", slow)
    with Background() as background:
        scratch = Scratch(folder=tmp_path, background=background)
        layer, after = finished(request_, scratch, tmp_path)
        assert layer.tar.exists() and layer.diff_id.startswith("sha256:")
        assert scratch.trees == {plan("python").key: after}
        assert request_.cache.get(plan("python")) is None
        freed = background.start(stages._free, layer, layer.tar)
        assert layer.tar.exists() and not freed.done()
        gate.set()
        assert layer.packed() == request_.cache.get(plan("python"))
        freed.result()
        assert not layer.tar.exists()
    assert request_.cache.tree(plan("python")) == after


def test_a_disk_that_fills_while_a_layer_is_compressed_fails_the_build_in_its_own_words(
    request_, tmp_path, monkeypatch
):
    def full(tar, out, **_):
        raise DiskFullError(f"no space left while writing {out}")

    monkeypatch.setattr(oci, "pack_layer", full)
    with pytest.raises(DiskFullError, match=r"python\.tar\.gz"), Background() as background:
        layer, _ = finished(request_, Scratch(folder=tmp_path, background=background), tmp_path)
        background.start(stages._free, layer, layer.tar)
    assert request_.cache.get(plan("python")) is None
    assert list((tmp_path / "cache").rglob("*")) == []


def test_an_error_elsewhere_lets_a_layer_come_into_the_cache(request_, tmp_path):
    with pytest.raises(BuildError), Background() as background:
        finished(request_, Scratch(folder=tmp_path, background=background), tmp_path)
        raise BuildError("the engine failed in the next layer")
    assert request_.cache.get(plan("python")) is not None
