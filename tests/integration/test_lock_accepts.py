"""What pyproject.toml promises to stay installable on top of the image is: every locked version holds."""

from pathlib import Path

import pytest

from dsv32_image.config import load_config
from dsv32_image.errors import DownloadError
from dsv32_image.lockfile import read_lock
from dsv32_image.resolve_wheels import compile_requirements

ROOT = Path(__file__).parents[2]
CONFIG = load_config(ROOT)
PROMISES = [(variant, wanted) for variant in CONFIG.variants for wanted in variant.compatible_with]


@pytest.mark.parametrize(("variant", "wanted"), PROMISES, ids=[wanted for _, wanted in PROMISES])
def test_the_locked_versions_leave_room(variant, wanted):
    locked = {d.name: d.version for layer in read_lock(ROOT).variant(variant.name) for d in layer.wheels}
    pins = [f"{name}=={version}" for name, version in locked.items()]
    try:
        found = compile_requirements(CONFIG, [*pins, wanted], variant.excluded, {})
    except DownloadError as error:
        pytest.skip(f"the package index is missing: {error.message.splitlines()[0]}")
    versions = {dist.name: dist.version for dist, _ in found}
    assert versions.items() >= locked.items()
    assert len(versions) > len(locked)


def test_sglang_is_among_the_promises():
    assert "sglang==0.5.23" in [wanted for _, wanted in PROMISES]
