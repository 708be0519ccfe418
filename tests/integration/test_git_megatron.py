"""The cpu image with megatron-core compiled from a commit: the released source in a repository of our own.

Needs the network beside an engine: for the sdist, and for the compiler that only a commit needs.
"""

import functools
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from test_build import make_clone, run

from dsv32_image import engine_discovery, fetch, git_archive, git_pin, resolve_wheels
from dsv32_image.archives import read_archive, write_files
from dsv32_image.config import load_config
from dsv32_image.engine import RunRequest
from dsv32_image.fetch import Source, fetch_all
from dsv32_image.identity import image_tag
from dsv32_image.lockfile import read_lock, write_lock
from dsv32_image.store import Store, cache_home
from dsv32_image.ui import Ui

ROOT = Path(__file__).parents[2]
DATE = "2025-11-30T00:00:00+0000"
SDIST = "de643eee32007a7504ad52f061103fe7432503603b6321c16c861eb67dbd3353"
DSA = "megatron/core/transformer/experimental_attention_variant/dsa.py"

pytestmark = pytest.mark.engine

# One row of the mapping that GPTDataset makes: sequences of 4 tokens in documents of 3 and 7.
PROBE = """
import importlib.metadata, numpy
from megatron.core.datasets import helpers_cpp
index = helpers_cpp.build_sample_idx_int32(
    numpy.array([3, 7], dtype=numpy.int32), numpy.array([0, 1], dtype=numpy.int32), 4, 1, 10, True, 1)
print("version", importlib.metadata.version("megatron-core"))
print("index", index.tolist())
"""


def released_source(config, store):
    """The files of the released sdist."""
    files = resolve_wheels.compile_requirements(
        config, ["megatron-core==0.19.2"], (), {}, no_deps=True, every_file=True
    )
    ((dist, url),) = [(dist, url) for dist, url in files if dist.sha256 == SDIST]
    if not store.has(dist):
        with fetch.make_client() as client:
            fetch_all(store, [Source(item=dist, url=url)], Ui(), client=client)
    return read_archive(store.path(SDIST))


def a_repository(folder, files):
    """A bare repository of these files; its commit."""
    work, bare = folder / "work", folder / "upstream.git"
    work.mkdir()
    write_files(files, work)
    who = ["-c", "user.name=A User", "-c", "user.email=user@example.org", "-c", "core.autocrlf=false"]
    # One date, so that the commit is the same each time, and what was made of it stays in the caches.
    env = {**os.environ, "GIT_AUTHOR_DATE": DATE, "GIT_COMMITTER_DATE": DATE}
    git = functools.partial(subprocess.run, check=True, capture_output=True, text=True, env=env)
    git(["git", "init", "-q", str(work)])
    git(["git", "-C", str(work), "add", "-A"])
    git(["git", "-C", str(work), *who, "commit", "-q", "-m", "the release, two lines longer"])
    git(["git", "clone", "-q", "--bare", str(work), str(bare)])
    return f"file://{bare}", git(["git", "-C", str(bare), "rev-parse", "HEAD"]).stdout.strip()


def test_an_image_with_megatron_of_a_commit(tmp_path, capfd):
    clone, store = make_clone(tmp_path / "clone"), Store(cache_home())
    config = load_config(clone)
    source = {
        name: state
        for name, state in released_source(config, store).items()
        if not name.startswith("megatron_core.egg-info/")
    }
    source[DSA] = replace_data(source[DSA], b"# One line,\n# and another.\n")
    url, commit = a_repository(tmp_path, source)

    # Locked by hand: the requirements are those of the release, so nothing is to be resolved.
    env = config.compile_env["megatron-core"]
    pin = git_archive.pin_source("megatron-core", url, commit, "", env, store).dist
    text = git_pin.rewrite((clone / "pyproject.toml").read_text(), "megatron-core", f"@ git+{url}@{commit}")
    (clone / "pyproject.toml").write_text(text)
    lock = read_lock(clone)
    variants = {
        name: tuple(with_pin(layer, pin) for layer in layers) for name, layers in lock.variants.items()
    }
    write_lock(clone, replace(lock, inputs=load_config(clone).inputs, variants=variants))

    code, _, err = run(clone, "build", "--variant", "cpu", "--engine", "buildah")
    assert code == 0, err
    capfd.readouterr()
    request = RunRequest(
        image=image_tag("cpu"), command=["python", "-c", PROBE], mounts={}, env={"NO_VCS_VERSION": "1"}
    )
    assert engine_discovery.choose("buildah").run(request) == 0
    out = capfd.readouterr().out
    series = lock.patches["megatron-core"][:8]
    assert f"version 0.19.2+git.{commit[:12]}.dsv32.{series}\n" in out
    assert "index [[0, 0], [1, 1], [1, 5]]\n" in out
    code, out, err = run(clone, "smoke", "--variant", "cpu", "--engine", "buildah", "-k", "distributions")
    assert code == 0, out + err


def replace_data(state, head):
    return state._replace(data=head + state.data)


def with_pin(layer, pin):
    wheels = tuple(pin if dist.name == pin.name else dist for dist in layer.wheels)
    return replace(layer, wheels=wheels)
