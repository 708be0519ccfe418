"""What a killed build leaves in a cache that others share."""

import subprocess
import sys
from pathlib import Path

import pytest

from dsv32_image.files import sharing, temporary_folder

ROOT = Path(__file__).parents[2]
KILLED = (
    "import os, sys; sys.path.insert(0, sys.argv[1])\n"
    "from pathlib import Path; from dsv32_image.files import sharing, temporary_folder\n"
    "home = Path(sys.argv[2])\n"
    "with sharing(home, ['layers']), temporary_folder(home / 'layers' / 'key'):\n"
    "    os.kill(os.getpid(), 9)\n"
)


@pytest.fixture
def home(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, str(ROOT / "src"), str(tmp_path)], check=False)
    assert done.returncode == -9
    assert len(list((tmp_path / "layers").glob(".key.*"))) == 1
    return tmp_path


def test_the_next_build_removes_it(home):
    (home / "layers" / "whole").mkdir()
    with sharing(home, ["layers", "compiled"]):
        assert [path.name for path in (home / "layers").iterdir()] == ["whole"]


def test_not_while_another_build_may_own_it(home):
    with (
        sharing(home, ["layers"]),
        temporary_folder(home / "layers" / "other") as mine,
        sharing(home, ["layers"]),
    ):
        assert mine.is_dir()
