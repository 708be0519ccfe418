"""Compiled wheels: their key, the store's part for them, and the driver that runs in the container."""

import io
import json
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from dsv32_image.compiled import MARKER, CompiledWheels, compile_jobs
from dsv32_image.config import load_config
from dsv32_image.errors import NotReproducibleError, WheelError
from dsv32_image.lockfile import Dist, LayerLock, Lock

ROOT = Path(__file__).parents[2]
CONFIG = load_config(ROOT)
DIST = Dist(name="transformer-engine-torch", version="1.0", file="te.tar.gz", size=1, sha256="aa")
VARIANT = CONFIG.variant("cu130")
LAYER = next(layer for layer in VARIANT.layers if layer.compile)
TORCH = LayerLock(name="torch", wheels=(replace(DIST, name="torch", sha256="bb"),))


def a_lock(**changes):
    tool = replace(DIST, name="ninja", sha256="cc")
    whole = {"epoch": 0, "inputs": "", "patches": {}, "tools": (), "compile_tools": (tool,), "variants": {}}
    return Lock(**{**whole, **changes})


def jobs(dist=DIST, variant=VARIANT, below=TORCH, lock=None):
    section = LayerLock(name="extensions", wheels=(dist,))
    return compile_jobs(ROOT, CONFIG, variant, LAYER, section, [below], lock or a_lock())


def test_only_what_the_layer_names_is_compiled():
    assert [job.dist.name for job in jobs()] == ["transformer-engine-torch"]
    assert jobs(dist=replace(DIST, name="einops")) == ()


def test_the_key_follows_everything_that_goes_in():
    keys = {
        jobs()[0].key,
        jobs(dist=replace(DIST, sha256="ab"))[0].key,
        jobs(variant=replace(VARIANT, cuda_archs=("9.0",)))[0].key,
        jobs(below=replace(TORCH, wheels=(replace(TORCH.wheels[0], sha256="be"),)))[0].key,
        jobs(lock=a_lock(compile_tools=()))[0].key,
        jobs(lock=a_lock(patches={"torch": "dd"}))[0].key,
    }
    assert len(keys) == 6
    assert jobs()[0].key in keys


def test_the_architectures_reach_the_build_under_each_name():
    env = jobs(variant=replace(VARIANT, cuda_archs=("9.0", "12.0")))[0].env
    assert env["TORCH_CUDA_ARCH_LIST"] == "9.0;12.0"
    assert env["CUDAARCHS"] == env["NVTE_CUDA_ARCHS"] == "90;120"
    assert env["NVTE_PYTORCH_FORCE_BUILD"] == "TRUE"


def a_wheel(folder, body, date=(2020, 1, 1, 0, 0, 0)):
    path = folder / "te-1.0-py3-none-any.whl"
    info = "te-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {
            "te.py": body,
            f"{info}/METADATA": "Metadata-Version: 2.1\nName: te\nVersion: 1.0\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nTag: py3-none-any\n",
            f"{info}/RECORD": "",
        }.items():
            archive.writestr(zipfile.ZipInfo(name, date), text)
    return path


def test_a_wheel_goes_in_repacked_and_comes_out(tmp_path):
    store, job = CompiledWheels(tmp_path / "store"), jobs()[0]
    assert store.get(job) is None
    wheel = store.put(job, a_wheel(tmp_path, "x = 1"), epoch=0)
    assert store.get(job) == wheel
    marker = json.loads(zipfile.ZipFile(wheel.path).read(f"te-1.0.dist-info/{MARKER}"))
    assert marker["key"] == job.key
    # Another date in the archive is no other wheel.
    again = store.put(job, a_wheel(tmp_path, "x = 1", date=(2026, 5, 5, 0, 0, 0)), epoch=0)
    assert again == wheel


def test_other_bytes_of_the_same_inputs_are_refused_and_kept_beside(tmp_path):
    store, job = CompiledWheels(tmp_path / "store"), jobs()[0]
    first = store.put(job, a_wheel(tmp_path, "x = 1"), epoch=0)
    with pytest.raises(NotReproducibleError) as caught:
        store.put(job, a_wheel(tmp_path, "x = 2"), epoch=0)
    assert first.sha256 in caught.value.message
    assert store.get(job) == first
    assert Path(caught.value.hint.split()[-1]).exists()


def test_a_damaged_wheel_is_not_handed_out(tmp_path):
    store, job = CompiledWheels(tmp_path / "store"), jobs()[0]
    wheel = store.put(job, a_wheel(tmp_path, "x = 1"), epoch=0)
    wheel.path.write_bytes(b"cut")
    assert store.get(job) is None


def test_what_is_no_wheel_is_refused(tmp_path):
    bad = tmp_path / "te-1.0-py3-none-any.whl"
    bad.write_bytes(b"no zip")
    with pytest.raises(WheelError):
        CompiledWheels(tmp_path / "store").put(jobs()[0], bad, epoch=0)


SETUP = """
import os, pathlib, sys, setuptools
if int(os.environ["MAX_JOBS"]) > {limit}:
    print("g++: fatal error: Killed signal terminated program cc1plus")
    sys.exit(1)
if {broken}:
    sys.exit("error: no such header")
order = [name for _, _, names in os.walk("src") for name in names]
assert order == sorted(order) and len(order) == 40, order
assert [p.name for p in pathlib.Path("src").iterdir()] == order
setuptools.setup(name="tiny", version="1.0", py_modules=["tiny"])
"""


def drive(tmp_path, *, limit=99, broken=False, at_once=8):
    layer, work, out = (tmp_path / name for name in ("layer", "work", "out"))
    layer.mkdir()
    work.mkdir()
    members = {"setup.py": SETUP.format(limit=limit, broken=broken), "tiny.py": ""}
    members |= {f"src/{n * 17 % 40:02}.cpp": "" for n in range(40)}
    with tarfile.open(layer / "tiny.tar.gz", "w:gz") as archive:
        for name, text in members.items():
            info = tarfile.TarInfo(f"tiny-1.0/{name}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    settings = {"sdist": "tiny.tar.gz", "env": {}, "epoch": 1764460800, "jobs": at_once}
    (layer / "settings.json").write_text(json.dumps(settings))
    command = [sys.executable, str(ROOT / "docker" / "compile_wheel.py"), str(layer), str(work), str(out)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return done, sorted(path.name for path in out.glob("*.whl"))


def test_the_backend_sees_folders_in_sorted_order(tmp_path):
    done, wheels = drive(tmp_path)
    assert done.returncode == 0, done.stdout
    assert wheels == ["tiny-1.0-py3-none-any.whl"]


def test_a_compiler_killed_for_memory_halves_the_number_at_once_and_goes_on(tmp_path):
    done, wheels = drive(tmp_path, limit=2)
    assert done.returncode == 0, done.stdout
    counts = [line.split()[-3] for line in done.stdout.splitlines() if line.startswith("compiling")]
    assert counts == ["8", "4", "2"]
    assert len(wheels) == 1


def test_out_of_memory_with_a_single_compiler_is_said(tmp_path):
    done, wheels = drive(tmp_path, limit=0)
    assert done.returncode != 0
    assert wheels == []
    assert done.stdout.splitlines()[-1] == "out of memory with one compiler"


def test_another_failure_is_not_tried_again(tmp_path):
    done, wheels = drive(tmp_path, broken=True)
    assert done.returncode == 1
    assert wheels == []
    assert done.stdout.count("compiling tiny") == 1
    assert "no such header" in done.stdout
