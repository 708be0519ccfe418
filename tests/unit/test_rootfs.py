"""How mmdebstrap is run. A program of that name stands in for it."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from dsv32_image.config import load_config
from dsv32_image.rootfs import make_rootfs
from dsv32_image.store import Store

ROOT = Path(__file__).parents[2]
CAN_UNSHARE = (
    shutil.which("unshare")
    and not subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode
)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Make a root file system of no packages; `script` sees the tar's name as $tar. What the tar holds."""

    def make(script):
        program = tmp_path / "bin" / "mmdebstrap"
        program.parent.mkdir()
        last = "for word; do case $word in *.tar) tar=$word ;; esac; done"
        program.write_text(f"#!/bin/sh\n{last}\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
        out = tmp_path / "out.tar"
        log = tmp_path / "log"
        make_rootfs(ROOT, load_config(ROOT), [], Store(tmp_path), out, log, run_elsewhere=None)
        return out.read_text()

    return make


def test_the_hosts_own_program_is_run_and_its_tar_taken(run):
    assert run('echo "$0" > "$tar"').endswith("bin/mmdebstrap\n")


@pytest.mark.skipif(os.geteuid() != 0 or not CAN_UNSHARE, reason="needs root with CAP_SYS_ADMIN")
def test_what_mmdebstrap_mounts_is_not_seen_outside(run):
    """It binds /dev/shm. Killed, it left that behind, and the next build removed what lay below."""
    assert run('readlink /proc/self/ns/mnt > "$tar"').strip() != str(Path("/proc/self/ns/mnt").readlink())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs it without a user namespace")
def test_root_without_the_right_to_mount_runs_it_all_the_same(run, tmp_path, monkeypatch):
    refused = tmp_path / "refused"
    refused.mkdir()
    (refused / "unshare").write_text("#!/bin/sh\nexit 1\n")
    (refused / "unshare").chmod(0o755)
    monkeypatch.setenv("PATH", f"{refused}{os.pathsep}{os.environ['PATH']}")
    assert run('echo made > "$tar"') == "made\n"
