"""versions.lock: the same lock gives the same bytes, and edits by hand are noticed."""

from dataclasses import replace

import pytest
from config_samples import MINIMAL
from hypothesis import given
from hypothesis import strategies as st

from dsv32_image.config import load_config
from dsv32_image.errors import LockEditedError, LockMissingError, LockStaleError
from dsv32_image.lockfile import (
    LOCK_NAME,
    Deb,
    Dist,
    LayerLock,
    Lock,
    read_lock,
    render,
    require_fresh,
    stale_rows,
    write_lock,
)

SHA = "ab" * 32


def deb(name="libc6", **changes):
    values = {
        "name": name,
        "version": "1:2.41-12+deb13u5",
        "arch": "amd64",
        "archive": "debian",
        "path": f"pool/main/g/glibc/{name}_2.41-12+deb13u5_amd64.deb",
        "size": 10,
        "sha256": SHA,
    }
    return Deb(**{**values, **changes})


def dist(name="einops", sha256="cd" * 32, **changes):
    values = {
        "name": name,
        "version": "1.0",
        "file": f"{name}-1.0-py3-none-any.whl",
        "size": 5,
        "sha256": sha256,
    }
    return Dist(**{**values, **changes})


def lock(**changes):
    values = {
        "epoch": 100,
        "inputs": "11" * 32,
        "patches": {"megatron-core": "22" * 32},
        "tools": (dist("uv", "33" * 32),),
        "variants": {
            "cpu": (LayerLock(name="base", debs=(deb(),)), LayerLock(name="python", wheels=(dist(),)))
        },
    }
    return Lock(**{**values, **changes})


def test_what_is_written_is_what_is_read(tmp_path):
    write_lock(tmp_path, lock())
    assert read_lock(tmp_path) == lock()


def test_order_of_the_input_does_not_show():
    many = [deb(name) for name in ("zlib1g", "apt", "libc6")]
    forwards = lock(variants={"cpu": (LayerLock(name="base", debs=tuple(many)),)})
    backwards = lock(variants={"cpu": (LayerLock(name="base", debs=tuple(reversed(many))),)})
    assert render(forwards) == render(backwards)


def test_layers_keep_their_order_whatever_their_names(tmp_path):
    layers = tuple(LayerLock(name=name) for name in ("zeta", "alpha", "mid"))
    write_lock(tmp_path, lock(variants={"cpu": layers}))
    assert [layer.name for layer in read_lock(tmp_path).variant("cpu")] == ["zeta", "alpha", "mid"]


names = st.from_regex(r"[a-z0-9][a-z0-9+.-]{0,20}", fullmatch=True)
versions = st.from_regex(r"[0-9][A-Za-z0-9.+~:-]{0,20}", fullmatch=True)


@given(st.dictionaries(names, versions, max_size=6))
def test_any_debian_name_and_version_survives(tmp_path_factory, packages):
    folder = tmp_path_factory.mktemp("lock")
    debs = tuple(sorted((deb(n, version=v) for n, v in packages.items()), key=lambda d: d.name))
    whole = lock(variants={"cpu": (LayerLock(name="base", debs=debs),)})
    write_lock(folder, whole)
    assert read_lock(folder) == whole


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text.replace("size = 10", "size = 11"),
        lambda text: text.replace(SHA, "00" * 32),
        lambda text: text + "\n",
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "\n".join(line for line in text.splitlines() if not line.startswith("content")),
    ],
)
def test_an_edit_by_hand_is_refused(tmp_path, edit):
    write_lock(tmp_path, lock())
    path = tmp_path / LOCK_NAME
    path.write_text(edit(path.read_text()))
    with pytest.raises(LockEditedError) as caught:
        read_lock(tmp_path)
    assert "nox -s lock" in caught.value.hint


def test_no_lock_names_the_next_step(tmp_path):
    with pytest.raises(LockMissingError) as caught:
        read_lock(tmp_path)
    assert "nox -s lock" in caught.value.hint


def test_no_section_for_a_variant_names_it():
    with pytest.raises(LockMissingError, match="cu130"):
        lock().variant("cu130")


def test_a_lock_older_than_its_inputs_is_refused_with_what_differs(tmp_path):
    (tmp_path / "pyproject.toml").write_text(MINIMAL)
    config = load_config(tmp_path)
    fresh = lock(inputs=config.inputs)
    require_fresh(fresh, config, fresh.patches)
    with pytest.raises(LockStaleError, match=r"pyproject\.toml"):
        require_fresh(lock(), config, fresh.patches)
    with pytest.raises(LockStaleError, match="patches/megatron-core"):
        require_fresh(fresh, config, {"megatron-core": "44" * 32})
    assert stale_rows(fresh, config, {}) == [("patches/megatron-core", "22" * 6, "none")]


def test_each_file_is_listed_once_and_tools_are_in():
    twice = lock(
        variants={
            "a": (LayerLock(name="x", wheels=(dist(),)),),
            "b": (LayerLock(name="x", wheels=(dist(),)),),
        }
    )
    assert [item.name for item in twice.files()] == ["uv", "einops"]


def test_the_digest_is_that_of_the_file(tmp_path):
    write_lock(tmp_path, lock())
    first = read_lock(tmp_path).digest
    write_lock(tmp_path, replace(lock(), epoch=101))
    assert read_lock(tmp_path).digest != first
