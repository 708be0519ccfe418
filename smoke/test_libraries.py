"""CUDA's libraries are in the image once, and the loader takes that one."""

import collections
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

PREFIX = Path("/opt/dsv32")
#: Two copies of one of these in a process are two states: handles, communicators and kernels of one mean
#: nothing to the other. The names are the part before `.so`.
ONCE = re.compile(
    r"lib(cudnn\w*|nccl|cublas|cublasLt|cudart|nvrtc|nvrtc-builtins|nvJitLink|cupti|cufft|curand|cusolver|cusparse)\.so"
)


@pytest.fixture(scope="module")
def cuda(image_share):
    variant = json.loads((image_share / "build.json").read_text())["variant"]
    if variant == "cpu":
        pytest.skip("variant cpu has no CUDA libraries")
    return variant


def test_each_library_is_there_once(cuda, record_property):
    files = collections.defaultdict(set)
    for top in (PREFIX, Path("/usr/lib")):
        for path in top.rglob("lib*.so*"):
            if match := ONCE.match(path.name):
                status = path.stat()
                files[match[1]].add((status.st_dev, status.st_ino))
    assert {name: len(found) for name, found in files.items() if len(found) > 1} == {}
    record_property("libraries", len(files))


def test_nothing_to_link_statically_is_left(cuda):
    assert [str(path) for path in PREFIX.rglob("*.a")] == []


def test_the_loader_takes_them_from_the_locked_wheels(cuda, record_property):
    program = (
        "import torch, transformer_engine.pytorch\n"
        "print(*{line.split()[-1] for line in open('/proc/self/maps') if '.so' in line}, sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-600:]
    loaded = collections.defaultdict(set)
    for line in done.stdout.splitlines():
        if match := ONCE.match(Path(line).name):
            loaded[match[1]].add(line)
    assert {"cublas", "cublasLt", "cudart", "cudnn", "nccl"} <= loaded.keys()
    for name, paths in loaded.items():
        assert len(paths) == 1, name
        assert "/site-packages/nvidia/" in min(paths)
    record_property("loaded", len(loaded))
