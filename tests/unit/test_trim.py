"""What the image does without is removed, equal files become links, and a stale pattern is an error."""

import subprocess
import sys
from pathlib import Path

import pytest

TRIM = Path(__file__).parents[2] / "docker" / "trim.py"
LARGE = 1 << 20


@pytest.fixture
def site(tmp_path):
    """Two distributions, `cuda_lib` of this layer and `other` of one below, with equal large files."""
    site = tmp_path / "site"
    for name in ("cuda_lib", "other"):
        files = {
            f"{name}/lib/a.so.1": b"x" * LARGE,
            f"{name}/lib/a.so": b"x" * LARGE,
            f"{name}/lib/b.so": b"y" * LARGE,
            f"{name}/static/c.a": b"z",
            f"{name}/small1": b"s",
            f"{name}/small2": b"s",
        }
        for path, data in files.items():
            (site / path).parent.mkdir(parents=True, exist_ok=True)
            (site / path).write_bytes(data)
        info = site / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "RECORD").write_text("".join(f"{path},,\n" for path in files))
    return site


def trim(site, *globs):
    requirements, patterns = site.parent / "requirements.txt", site.parent / "remove.txt"
    requirements.write_text("cuda-lib==1.0 --hash=sha256:00\n")
    patterns.write_text("".join(f"{glob}\n" for glob in globs))
    command = [sys.executable, "-I", str(TRIM), str(site), str(requirements), str(patterns)]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def test_patterns_remove_files_of_this_layer_only_and_empty_folders(site):
    assert trim(site, "*.a").returncode == 0
    assert not (site / "cuda_lib/static").exists()
    assert (site / "other/static/c.a").exists()


def test_large_equal_files_become_links_and_small_ones_stay(site):
    assert trim(site).returncode == 0
    assert (site / "cuda_lib/lib/a.so").samefile(site / "cuda_lib/lib/a.so.1")
    assert not (site / "cuda_lib/small1").samefile(site / "cuda_lib/small2")
    assert not (site / "other/lib/a.so").samefile(site / "other/lib/a.so.1")
    assert (site / "cuda_lib/lib/b.so").read_bytes() == b"y" * LARGE


def test_a_pattern_that_matches_nothing_is_an_error(site):
    done = trim(site, "*.a", "gone/*")
    assert done.returncode == 1
    assert "'gone/*'" in done.stderr
