"""Step `rootfs`: the base layer's file system, made by mmdebstrap from the store alone."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from debian.debfile import DebFile

from dsv32_image import proc
from dsv32_image.errors import BuildError
from dsv32_image.files import copy_stream, disk_full_is_clear, sha256_file, sha256_parts, temporary_folder

if TYPE_CHECKING:
    from pathlib import Path

    from dsv32_image.config import Config
    from dsv32_image.lockfile import Deb
    from dsv32_image.store import Store

# Runs a command with an environment; it may read and write the folder, the last is its log.
Runner = Callable[["Path", Sequence[str], Mapping[str, str], "Path"], None]

# Goes into the key: raise it when anything below changes the bytes.
FORMAT = 2

# Debian compiles the bytecode of each package in its postinst, one process and one processor a package:
# half of the time that the whole root file system takes (97 s against 49 s, 2 cores). So that is off
# while packages are installed, and everything is compiled once at the end, as in the other layers.
_ESSENTIAL = r"""
set -eu
chroot "$1" dpkg-divert --quiet --local --rename --divert /usr/bin/py3compile.real /usr/bin/py3compile
ln -s /bin/true "$1/usr/bin/py3compile"
"""

# Each line removes or mends something that differs from run to run or from host to host.
_CUSTOMIZE = r"""
set -eu
cd "$1"
# mmdebstrap copies both from the host (its manual says so); engines bind their own over them.
rm -f etc/resolv.conf etc/hostname
# The list names the local folder; a mirror is the user's choice, not ours.
printf '# No mirror is configured: this image is made from a locked set of packages.\n' > etc/apt/sources.list
rm -f etc/apt/apt.conf.d/99mmdebstrap
# Ours while packages are installed, and nobody's afterwards.
sed -i '/^force-unsafe-io$/d' etc/dpkg/dpkg.cfg.d/99mmdebstrap
rm usr/bin/py3compile
chroot . dpkg-divert --quiet --local --rename --remove /usr/bin/py3compile
cp "$COMPILE_BYTECODE" run/compile_bytecode.py
chroot . python3 -B -S -I /run/compile_bytecode.py /usr/lib/python3 /usr/lib/python3.13 /usr/share/python3
rm run/compile_bytecode.py
# The interpreter's own package compiled its part already, with checked hashes (SOURCE_DATE_EPOCH was
# set): every import would hash its source again. Unchecked ones differ in one header bit, and no time
# stamp can make them stale.
PYTHONDONTWRITEBYTECODE=1 chroot . python3 -S -c '
import os
for top, _, names in os.walk("/usr"):
    for name in names:
        if name.endswith(".pyc"):
            with open(os.path.join(top, name), "r+b") as file:
                if file.read(8)[4:] == b"\3\0\0\0":
                    file.seek(4)
                    file.write(b"\1")
'
# Written with inode numbers and times of this machine.
rm -f var/cache/ldconfig/aux-cache
# Files only: the folders are in the packages, and what writes there later expects them.
find var/lib/apt/lists var/cache/apt var/log -type f -delete
# Owner and mode are as the version of apt on the host sees fit; apt sets them again when it needs them.
chown 0:0 var/lib/apt/lists/partial var/cache/apt/archives/partial
chmod 700 var/lib/apt/lists/partial var/cache/apt/archives/partial
# Folders that apt and debconf make for themselves, whose owner or presence depends on their version.
rm -rf var/lib/apt/lists/auxfiles var/cache/debconf/tmp.ci
# The day of the build, in days since 1970: shadow(5) field 3.
chroot . awk -F: -v OFS=: -v day="$EPOCH_DAY" '$3 != "" { $3 = day } { print }' etc/shadow > etc/shadow.new
cat etc/shadow.new > etc/shadow
rm -f etc/shadow.new etc/shadow- etc/passwd- etc/group- etc/gshadow-
rm -f var/cache/debconf/*-old var/lib/dpkg/*-old
"""


def rootfs_key(root: Path, config: Config, debs: Sequence[Deb]) -> str:
    """What the root file system depends on, as a hash."""
    parts = [f"rootfs {FORMAT}", str(config.epoch), _ESSENTIAL, _CUSTOMIZE, sha256_file(_compiler(root))]
    parts += [*config.dpkg_exclude, "--", *config.dpkg_include]
    return sha256_parts(*parts, *(deb.sha256 for deb in debs))


def _compiler(root: Path) -> Path:
    return root / "docker" / "compile_bytecode.py"


def make_rootfs(
    root: Path,
    config: Config,
    debs: Sequence[Deb],
    store: Store,
    out: Path,
    log: Path,
    *,
    run_elsewhere: Runner,
) -> None:
    """Write the root file system as a tar to `out`; bit-identical from run to run.

    Args:
        root: The project's folder.
        config: Epoch, and what is left out.
        debs: The locked packages.
        store: Where they lie.
        out: The tar.
        log: Where mmdebstrap's words go.
        run_elsewhere: Runs the command if this host has no mmdebstrap (`tools_image`).

    Raises:
        ToolMissingError: No mmdebstrap, and no way to run one.
        BuildError: mmdebstrap failed; the message names its log.
        OfflineError, HashMismatchError: See `Store.place`.
    """
    host = shutil.which("mmdebstrap")
    with temporary_folder(out.with_name("rootfs-work")) as work, disk_full_is_clear(out):
        tar = work / "rootfs.tar"
        work.chmod(0o755)  # apt's user and a user namespace read from here
        repository = work / "debs"
        repository.mkdir()
        write_repository(debs, store, repository)
        essential = _script(work / "essential", _ESSENTIAL)
        customize = _script(work / "customize", _CUSTOMIZE)
        compiler = work / "compile_bytecode.py"
        copy_stream(_compiler(root), compiler)
        mode = "root" if os.geteuid() == 0 or not host else "unshare"
        command = ["mmdebstrap", f"--mode={mode}", "--variant=apt", "--format=tar", "--architectures=amd64"]
        command += [f"--include={','.join(deb.name for deb in debs)}"]
        command += [f"--dpkgopt=path-exclude={p}" for p in config.dpkg_exclude]
        command += [f"--dpkgopt=path-include={p}" for p in config.dpkg_include]
        # dpkg syncs each file it unpacks, against a power cut that this folder would not outlive anyway.
        command += ["--dpkgopt=force-unsafe-io"]
        # The packages were checked against the lock; there is no signature on our own folder.
        command += [f"--essential-hook={essential}", f"--customize-hook={customize}"]
        # Done by the hook above; mmdebstrap's own cleaning runs after it and differs between versions.
        command += ["--skip=cleanup/apt"]
        command += ["trixie", str(tar), f"deb [trusted=yes] copy://{repository} ./"]
        env = {
            "SOURCE_DATE_EPOCH": str(config.epoch),
            "COMPILE_BYTECODE": str(compiler),
            "EPOCH_DAY": str(config.epoch // 86400),
            "LC_ALL": "C.UTF-8",
            "TZ": "UTC",
            "PYTHONHASHSEED": "0",
            "TMPDIR": str(work),
        }
        run = _run_here if host else run_elsewhere
        run(work, command, env, log)
        tar.replace(out)


def _run_here(work: Path, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
    hint = f"see {log}; a full disk shows there too"
    words = [*_own_mounts(), *command]
    proc.run(words, what="mmdebstrap", error=BuildError, env=env, log=log, hint=hint)


def _own_mounts() -> list[str]:
    """A prefix by which what root mounts is seen by nobody else and ends with the program, also if killed.

    As root mmdebstrap binds the host's /dev/shm, /proc and /sys into its folder. A killed one left them
    there, and whoever removed that folder afterwards removed what is in the host's /dev/shm.
    """
    prefix = ["unshare", "--mount", "--"]
    if os.geteuid() != 0 or not shutil.which("unshare"):
        return []  # mmdebstrap itself uses a namespace of its own then
    done = subprocess.run([*prefix, "true"], capture_output=True, check=False)
    return [] if done.returncode else prefix  # without that right it cannot mount either


def _script(path: Path, text: str) -> Path:
    path.write_text("#!/bin/sh" + text)
    path.chmod(0o755)
    return path


def write_repository(debs: Sequence[Deb], store: Store, folder: Path) -> None:
    """A flat apt repository: the files under their own names and a Packages index."""
    stanzas = []
    for deb in debs:
        path = store.place(deb, folder)
        control = DebFile(str(path)).debcontrol()
        if (control["Package"], control["Version"]) != (deb.name, deb.version):
            raise BuildError(
                f"{deb.file} holds {control['Package']} {control['Version']}, not {deb.name} {deb.version}",
                hint="run `nox -s lock`",
            )
        control["Filename"] = f"./{deb.file}"
        control["Size"] = str(deb.size)
        control["SHA256"] = deb.sha256
        stanzas.append(control.dump())
    packages = "\n".join(stanzas)
    (folder / "Packages").write_text(packages)
    # mmdebstrap from 1.5 on asks apt for the essential packages of this code name.
    digest = hashlib.sha256(packages.encode()).hexdigest()
    release = "Suite: trixie\nCodename: trixie\nDate: Thu, 01 Jan 1970 00:00:00 UTC\n"
    (folder / "Release").write_text(f"{release}SHA256:\n {digest} {len(packages.encode())} Packages\n")
