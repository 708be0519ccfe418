"""`nox -s bench -- build`: cold, warm and one-patch builds beside the bare minimum, in one run.

The bare minimum is what nobody can do without: mmdebstrap over the same packages, and uv installing the
same wheels with their bytecode into a folder. Ratios hold on a noisy machine, single times do not.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dsv32_image import proc
from dsv32_image.context import compiled_wheels, patched_wheels
from dsv32_image.layers import plan_layers
from dsv32_image.lockfile import read_lock
from dsv32_image.resolve_wheels import uv_program
from dsv32_image.rootfs import write_repository
from dsv32_image.store import cache_home

if TYPE_CHECKING:
    from collections.abc import Callable

    from dsv32_image.config import Config, VariantConfig
    from dsv32_image.engine import Engine
    from dsv32_image.lockfile import Lock
    from dsv32_image.store import Store
    from dsv32_image.ui import Ui

GOALS = {"cold / bare minimum": 1.5, "warm": 3.0, "one Megatron patch edited": 20.0}


def bench_build(
    root: Path, config: Config, variant: VariantConfig, engine: Engine, store: Store, ui: Ui
) -> None:
    """Measure and print the table; needs a full store, so run `fetch` first.

    Raises:
        OfflineError: The store lacks a file.
        BuildError: A build failed.
    """
    lock = read_lock(root)
    store.require(list(lock.files(variant.name)))
    with tempfile.TemporaryDirectory(prefix="dsv32-bench-") as name:
        work = Path(name)
        clone = _clone(root, work / "clone")
        env = {
            **os.environ,
            "DSV32_CACHE": str(_empty_cache(work / "cache")),
            "DSV32_ROOT": str(clone),
            "PYTHONPATH": str(clone / "src"),
        }

        def step(*words: str) -> Callable[[], None]:
            options = ["--variant", variant.name, "--engine", engine.name] if words[0] == "build" else []
            command = [sys.executable, "-m", "dsv32_image", *words, *options]

            def run() -> None:
                proc.run(command, what=f"the measured {words[0]}", env=env, cwd=clone)

            return run

        debs = _timed(lambda: _bare_debs(root, config, lock, variant, store, work), ui, "bare: mmdebstrap")
        wheels = _timed(lambda: _bare_wheels(root, config, lock, variant, store, work), ui, "bare: uv")
        cold = _timed(step("build", "--offline", "--no-cache"), ui, "cold build")
        warm = min(_timed(step("build", "--offline"), ui, "warm build") for _ in range(3))
        _edit_a_patch(clone)
        relock = _timed(step("lock"), ui, "lock after an edit")
        edited = relock + _timed(step("build", "--offline"), ui, "build after an edit")
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    bare = debs + wheels
    rows = [
        ("bare minimum: mmdebstrap", f"{debs:.1f} s", ""),
        ("bare minimum: uv, with bytecode", f"{wheels:.1f} s", ""),
        ("cold build, store full", f"{cold:.1f} s", ""),
        ("cold / bare minimum", f"{cold / bare:.2f}", _goal("cold / bare minimum", cold / bare)),
        ("warm build, nothing to do (best of 3)", f"{warm:.2f} s", _goal("warm", warm)),
        (
            "one Megatron patch edited: lock and build",
            f"{edited:.1f} s",
            _goal("one Megatron patch edited", edited),
        ),
        ("largest process of any step", f"{peak:.0f} MB", ""),
    ]
    ui.table(
        f"bench build: {variant.name}, {engine.description}", ("what", "measured", "goal"), rows, out=True
    )


def _goal(name: str, value: float) -> str:
    return f"at most {GOALS[name]:g}: {'met' if value <= GOALS[name] else 'MISSED'}"


def _timed(action: Callable[[], object], ui: Ui, name: str) -> float:
    ui.say(f"  bench  {name} …")
    start = time.perf_counter()
    action()
    took = time.perf_counter() - start
    ui.say(f"  bench  {name}: {took:.1f} s")
    return took


def _clone(root: Path, target: Path) -> Path:
    """The working tree as it is, without what git ignores."""
    listing = proc.run(
        ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard"],
        what="listing files",
    )
    for line in listing.splitlines():
        source = root / line
        if source.is_file():
            (target / line).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / line)
    return target


def _empty_cache(folder: Path) -> Path:
    """A cache that shares the store and nothing else."""
    folder.mkdir()
    (folder / "sha256").symlink_to(cache_home() / "sha256")
    return folder


def _bare_debs(
    root: Path, config: Config, lock: Lock, variant: VariantConfig, store: Store, work: Path
) -> None:
    repository = work / "debs"
    repository.mkdir()
    debs = lock.variant(variant.name)[0].debs
    write_repository(debs, store, repository)
    work.chmod(0o755)
    command = [proc.require("mmdebstrap", "mmdebstrap"), "--variant=apt", "--architectures=amd64"]
    command += [f"--include={','.join(deb.name for deb in debs)}"]
    command += [f"--dpkgopt=path-exclude={p}" for p in config.dpkg_exclude]
    command += [f"--dpkgopt=path-include={p}" for p in config.dpkg_include]
    command += ["trixie", str(work / "bare.tar"), f"deb [trusted=yes] copy://{repository} ./"]
    proc.run(command, what="mmdebstrap", env={"SOURCE_DATE_EPOCH": str(config.epoch), "LC_ALL": "C.UTF-8"})
    shutil.rmtree(repository)


def _bare_wheels(
    root: Path, config: Config, lock: Lock, variant: VariantConfig, store: Store, work: Path
) -> None:
    """Install into a folder with the host's uv; bytecode by the root file system's own Python."""
    plans = plan_layers(root, config, variant, lock)
    folder, target, bare = work / "wheels", work / "site", work / "bare"
    folder.mkdir()
    bare.mkdir()
    subprocess.run(
        ["tar", "-xf", work / "bare.tar", "-C", bare, "./usr", "./lib", "./lib64", "./bin"], check=True
    )
    (work / "bare.tar").unlink()
    compiled = compiled_wheels(plans, store)
    patched = {**compiled, **patched_wheels(root, lock, plans, store, work / "patched", compiled)}
    names = []
    for plan in plans:
        for dist in plan.section.wheels:
            path = patched[dist.name].path if dist.name in patched else store.place(dist, folder)
            names.append(str(path))
    command = [
        uv_program(),
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-cache",
        "--target",
        str(target),
    ]
    command += [
        "--python-version",
        config.python,
        "--python-platform",
        config.wheel_platform,
        "--link-mode",
        "copy",
    ]
    proc.run([*command, *names], what="uv pip install")
    target.rename(bare / "site")
    compile_all = ["python3", "-m", "compileall", "-q", "-j", "2", "/site"]
    # Some packages carry templates that are no Python; compileall says so and ends with 1.
    subprocess.run(["chroot", str(bare), *compile_all], check=False, capture_output=True)
    shutil.rmtree(bare)


def _edit_a_patch(clone: Path) -> None:
    """Change what a Megatron patch says, as a person who works on the series would."""
    series = clone / "patches" / "megatron-core"
    names = [
        line for line in (series / "series").read_text().splitlines() if line and not line.startswith("#")
    ]
    path = series / names[-1]
    path.write_text(path.read_text().replace("Why: ", "Why: (edited) ", 1))
