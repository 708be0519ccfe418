"""Megatron imports whatever of its optional kernels can load."""

import os
import subprocess
import sys


def test_flash_mla_without_a_driver_is_no_obstacle(tmp_path):
    (tmp_path / "flash_mla.py").write_text(
        "raise OSError('libcuda.so.1: cannot open shared object file: No such file or directory')\n"
    )
    program = (
        "from dsv32 import cpu; cpu.prepare()\n"
        "from megatron.core.transformer import attention; print(attention.HAVE_FMLA)"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-600:]
    assert done.stdout.split()[-1] == "False"
