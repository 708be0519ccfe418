"""Builds with a real engine on the real lock: killed and run again, full disks, an engine used by hand.

The layers below the last come from the cache that `nox -s build` filled, so that each build takes seconds.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsv32_image.errors import DiskFullError, LockStaleError, PatchError
from dsv32_image.oci import verify_layout

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.engine


@pytest.fixture
def clone(tmp_path):
    """The working tree without its git history: the revision in the image is then the same everywhere."""
    return make_clone(tmp_path / "clone")


def make_clone(target):
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for line in listing.splitlines():
        if (ROOT / line).is_file():
            (target / line).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / line, target / line)
    return target


def start(clone, *words, **extra):
    env = {**os.environ, "DSV32_ROOT": str(clone), "PYTHONPATH": str(clone / "src"), **extra}
    command = [sys.executable, "-m", "dsv32_image", *words]
    return subprocess.Popen(
        command,
        cwd=clone,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(clone, *words, **extra):
    process = start(clone, *words, **extra)
    out, err = process.communicate()
    return process.returncode, out.strip(), err


BUILD = ("build", "--variant", "cpu", "--engine", "buildah", "--offline")


def change_last_layer(clone, text):
    (clone / "scripts" / "note.txt").write_text(text)


def test_a_build_killed_at_any_moment_and_run_again_gives_the_same_image(clone, tmp_path):
    text = f"killed {time.time()}"  # a layer that is in no cache
    change_last_layer(clone, text)
    ended = []
    for seconds in (0.3, 1, 2, 3, 5, 8):
        process = start(clone, *BUILD)
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        wait_until_nothing_runs(clone)
        ended.append(process.pid)
    code, killed, err = run(clone, *BUILD)
    assert code == 0, err
    assert [tag for tag in engine_tags() if any(tag.endswith(f"-{number}") for number in ended)] == []
    assert [p for p in (clone / "build" / "cpu").iterdir() if p.name.startswith(".")] == []
    verify_layout(clone / "dist" / "cpu")
    # Of the same moment: the working tree may be edited while this runs.
    other = tmp_path / "other"
    shutil.copytree(clone, other, ignore=lambda folder, _: ["build", "dist"] if Path(folder) == clone else [])
    code, calm, err = run(other, *BUILD, "--no-cache") if os.environ.get("CI_SLOW") else run(other, *BUILD)
    assert code == 0, err
    assert calm == killed


def wait_until_nothing_runs(clone, seconds=20):
    """Whatever a build starts has its folder in the environment."""
    limit = time.monotonic() + seconds
    while left := [entry.name for entry in Path("/proc").glob("[0-9]*") if belongs_to(entry, clone)]:
        assert time.monotonic() < limit, f"still running: {left}"
        time.sleep(0.1)


def belongs_to(process, clone):
    try:
        return f"DSV32_ROOT={clone}".encode() in (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return False


def engine_tags():
    command = ["buildah", "images", "--format", "{{.Name}}:{{.Tag}}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


def test_the_folder_of_a_checkout_does_not_show(clone, tmp_path):
    change_last_layer(clone, f"folders {time.time()}")
    code, first, err = run(clone, *BUILD)
    assert code == 0, err
    moved = tmp_path / "a" / "deeper" / "folder with a space"
    moved.parent.mkdir(parents=True)
    shutil.copytree(clone, moved, ignore=shutil.ignore_patterns("build", "dist"))
    # Made again by the engine, from another folder: the cached last layer is put aside.
    layers = last_layer_of(clone)
    aside = layers.with_name(f"aside-{layers.name}")
    layers.rename(aside)
    try:
        code, second, err = run(moved, *BUILD)
    finally:
        shutil.rmtree(aside)
    assert code == 0, err
    assert second == first


def last_layer_of(clone):
    """The cache folder of the layer that the last build made."""
    cache = Path(os.environ.get("DSV32_CACHE") or Path.home() / ".cache" / "dsv32-image")
    return max((cache / "layers").glob("[!.]*/layer.json"), key=lambda p: p.stat().st_mtime).parent


def test_a_second_build_with_nothing_to_do_makes_nothing(clone):
    code, first, err = run(clone, *BUILD)
    assert code == 0, err
    stamp = (clone / "dist" / "cpu" / "index.json").stat().st_mtime_ns
    code, second, err = run(clone, *BUILD)
    assert (code, second) == (0, first)
    assert "layers to make" not in err
    assert (clone / "dist" / "cpu" / "index.json").stat().st_mtime_ns == stamp


def test_labels_say_version_revision_lock_and_variant(clone):
    code, digest, err = run(clone, *BUILD)
    assert code == 0, err
    blobs = clone / "dist" / "cpu" / "blobs" / "sha256"
    manifest = json.loads((blobs / digest.removeprefix("sha256:")).read_bytes())
    config = json.loads((blobs / manifest["config"]["digest"].removeprefix("sha256:")).read_bytes())
    labels = config["config"]["Labels"]
    assert labels["dsv32.variant"] == "cpu"
    assert labels["org.opencontainers.image.version"] == "0.1.0"
    assert labels["org.opencontainers.image.revision"] == "unknown"  # a folder without git
    assert labels["dsv32.lock.digest"].startswith("sha256:")
    assert config["config"]["User"] == "1000:1000"
    assert config["history"][0]["created_by"] == "base"


def test_an_edited_patch_must_be_locked_and_one_that_does_not_apply_names_its_hunk(clone):
    series = clone / "patches" / "megatron-core"
    name = next(line for line in (series / "series").read_text().splitlines() if line.endswith(".patch"))
    path = series / name
    lines = path.read_text().splitlines(keepends=True)
    spot = next(n for n, line in enumerate(lines) if line.startswith("-") and not line.startswith("---"))
    lines[spot] = lines[spot].replace("-", "-something else ", 1)
    path.write_text("".join(lines))
    code, _, err = run(clone, *BUILD)
    assert code == LockStaleError.exit_code and "nox -s lock" in err
    # The lock does not take it up either: the source is in the store, so the series is tried on it.
    before = (clone / "versions.lock").read_bytes()
    code, _, err = run(clone, "lock")
    assert code == PatchError.exit_code, err
    assert (clone / "versions.lock").read_bytes() == before
    assert name in err and "hunk" in err and "next:" in err


def test_a_full_disk_is_a_clear_error_and_leaves_nothing(clone, tmp_path):
    """On a real small file system: the folder of the build lies on a tmpfs of 2 MB."""
    small = clone / "build"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(small)], check=True)
    try:
        change_last_layer(clone, f"full {time.time()}")
        code, _, err = run(clone, *BUILD)
        assert code == DiskFullError.exit_code, err
        assert "no space left" in err and "next:" in err
        assert "Traceback" not in err
        assert not (clone / "dist" / "cpu").exists()
    finally:
        subprocess.run(["umount", str(small)], check=True)
    code, _, err = run(clone, *BUILD)
    assert code == 0, err
