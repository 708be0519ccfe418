"""The command `dsv32` of the image."""

import subprocess
import sys

import pytest
import torch

from dsv32.dsa.settings import Settings
from dsv32.warm import Shape, warm


def dsv32(*words):
    command = [sys.executable, "-c", "from dsv32.cli import main; main()", *words]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def test_warm_runs_every_operation_of_a_layer():
    shape = Shape(heads=2, queries=8, keys=12, topk=4, index_heads=2)
    seconds = warm(shape, Settings(path="torch"), torch.device("cpu"))
    assert len(seconds) == 4
    assert all(took > 0 for took in seconds.values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_warm_without_a_gpu_says_so():
    done = dsv32("warm", "--heads", "16")
    assert done.returncode == 2
    assert "no GPU here" in done.stderr
    assert "--gpus all" in done.stderr
    assert "Traceback" not in done.stderr


def test_more_queries_than_keys_are_refused():
    done = dsv32("warm", "--queries", "16", "--keys", "8")
    assert done.returncode == 2
    assert "--keys" in done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: kernels are compiled for it")
def test_warm_fills_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    done = dsv32("warm", "--heads", "16", "--queries", "4096", "--keys", "4096")
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.rglob("*.cubin"))


def test_the_image_has_the_command(image_share):
    done = subprocess.run(["dsv32", "--help"], check=True, capture_output=True, text=True)
    assert "warm" in done.stdout
