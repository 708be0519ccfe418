"""Each distribution's top modules import: what `pip check` cannot see (a missing library, a wrong ABI)."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

# Not meant to be imported by themselves, or only on another kind of machine; each with the reason.
LEFT_OUT = {
    "_distutils_hack": "runs at start through its .pth file",
    "mypyc": "compiled helper without a module of that name",
}


def top_modules():
    """(distribution, module) of everything installed beside this interpreter's pytest."""
    site = Path(pytest.__file__).parent.parent
    found = set()
    for dist in importlib.metadata.distributions(path=[str(site)]):
        for file in dist.files or ():
            head = file.parts[0]
            if head.endswith((".dist-info", ".data")) or head in ("..", "__pycache__"):
                continue
            if len(file.parts) == 1:
                module = re.sub(r"(\.cpython-[^.]+|\.abi3)?\.(py|so)$", "", head)
                if module == head:
                    continue
            elif file.parts[1:] != ("__init__.py",):
                continue
            else:
                module = head
            if module.isidentifier() and module not in LEFT_OUT:
                found.add((dist.metadata["Name"], module))
    return sorted(found)


@pytest.mark.parametrize(("distribution", "module"), top_modules())
def test_top_module_imports(image_share, distribution, module):
    # A process of its own: one broken import must not be hidden by what another already loaded.
    done = subprocess.run(
        [sys.executable, "-c", f"import {module}"], check=False, capture_output=True, text=True, timeout=300
    )
    no_driver = not Path("/proc/driver/nvidia/version").exists()
    if done.returncode and no_driver and "libcuda.so.1: cannot open" in done.stderr:
        pytest.skip("libcuda.so.1 is missing: it comes with an NVIDIA driver")
    assert done.returncode == 0, f"{distribution}: {done.stderr[-600:]}"
