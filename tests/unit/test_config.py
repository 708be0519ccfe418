"""pyproject.toml's table: what is read, and that mistakes are named."""

from pathlib import Path

import pytest
from config_samples import MINIMAL

from dsv32_image.config import load_config, normalise
from dsv32_image.errors import ConfigError, UsageError

ROOT = Path(__file__).parents[2]


def write(tmp_path, text):
    (tmp_path / "pyproject.toml").write_text(text)
    return tmp_path


def test_the_projects_own_table_is_valid_and_each_layer_has_its_dockerfile_stage():
    config = load_config(ROOT)
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    for layer in config.variant("cpu").layers:
        assert f" AS {layer.name}\n" in dockerfile
        assert layer.debs or f"ARG KEY_{layer.name.upper()}\n" in dockerfile


def test_inputs_do_not_depend_on_the_layout_of_the_file(tmp_path):
    first = load_config(write(tmp_path, MINIMAL))
    second = load_config(write(tmp_path, "# a comment\n" + MINIMAL.replace("epoch = 100", "epoch   =   100")))
    assert first.inputs == second.inputs


def test_inputs_change_with_any_value(tmp_path):
    first = load_config(write(tmp_path, MINIMAL))
    second = load_config(write(tmp_path, MINIMAL.replace("einops", "einops==1")))
    assert first.inputs != second.inputs


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (("epoch = 100", 'epoch = "yesterday"'), "epoch"),
        (("epoch = 100\n", ""), "epoch"),
        (('name = "python"', 'name = "Python!"'), "Python!"),
        (('name = "python"', 'name = "base"'), "two layers"),
        (('wheels = ["einops"]', 'weels = ["einops"]'), "weels"),
        (('wheels = ["einops"]', 'wheels = "einops"'), "list of strings"),
        (('wheels = ["einops"]', 'debs = ["vim"]'), "first layer"),
        (("[tool.dsv32-image]", "[tool.other]"), "tool.dsv32-image"),
        (("[tool.dsv32-image]", "[tool.dsv32-image"), "TOML"),
    ],
)
def test_a_mistake_is_named(tmp_path, change, word):
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, MINIMAL.replace(*change)))
    assert word in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (('wheels = ["einops"]', 'weels = ["einops"]'), "unknown key 'weels'; did you mean 'wheels'?"),
        (("epoch = 100", "epoch = 100\ndpkg_exclude = []"), "'dpkg_exclude'; did you mean 'dpkg-exclude'?"),
        (
            ('wheels = ["einops"]', "colour = 1"),
            "'colour' (known: collect, compile, debs, metadata-only, name, remove, tree, wheels)",
        ),
    ],
)
def test_a_mistyped_key_is_told_what_was_meant(tmp_path, change, words):
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, MINIMAL.replace(*change)))
    assert words in caught.value.message


def test_no_pyproject_is_a_clear_error(tmp_path):
    with pytest.raises(ConfigError, match=r"no pyproject\.toml"):
        load_config(tmp_path)


def test_an_unknown_variant_lists_the_known_ones(tmp_path):
    with pytest.raises(UsageError) as caught:
        load_config(write(tmp_path, MINIMAL)).variant("rocm")
    assert "rocm" in caught.value.message
    assert "cpu" in caught.value.hint


def test_names_compare_as_the_index_compares_them():
    assert normalise("Fast_Hadamard.Transform") == "fast-hadamard-transform"
