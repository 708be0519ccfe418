"""What the host itself must have: room, memory, limits, a clock that is right, and a package index."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from dsv32_image.config import load_config
from dsv32_image.doctor.engine_checks import engine_in_use
from dsv32_image.doctor.probe import Finding
from dsv32_image.errors import ConfigError
from dsv32_image.ui import size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dsv32_image.doctor.probe import Asked, Probe

GB = 10**9
GIB = 1 << 30

# Free bytes that a first build wants, by where it writes; together about 12 GB for `cpu` (README) and about
# 45 GB for `cu130`. The engine holds each state twice for a while: as its own layers and as our export. How
# the sum falls on the places is an estimate, and only decides where they are file systems of their own.
DISK: Mapping[str, Mapping[str, int]] = {
    "cpu": {"cache": 2 * GB, "project": 3 * GB, "engine": 7 * GB},
    "cu130": {"cache": 10 * GB, "project": 12 * GB, "engine": 23 * GB},
}
# Prudent floors, below which there is only a warning: nothing is known to stop there.
MEMORY: Mapping[str, int] = {"cpu": 4 * GIB, "cu130": 16 * GIB}
CORES = 2
OPEN_FILES = 4096
# `smoke` starts containers with --shm-size 8g. NCCL and torch's loaders put their buffers into it.
SHM = 8 * GIB
SHM_LEAST: Mapping[str, int] = {"cpu": GIB // 4, "cu130": GIB}
_STORAGE = {
    "docker": "{{.DockerRootDir}}",
    "podman": "{{.Store.GraphRoot}}",
    "buildah": "{{.store.GraphRoot}}",
}
_NO_CGROUP_LIMIT = 1 << 60  # version 1 says "no limit" as a number of nearly 2**63


def check_disk(probe: Probe, asked: Asked) -> Finding:
    """Room where the build writes; places on one file system share it."""
    needs = DISK[asked.variant]
    places = {"cache": str(asked.cache), "project": str(asked.root), "engine": _storage(probe, asked)}
    names: dict[int, list[str]] = {}
    free: dict[int, int] = {}
    for name, path in places.items():
        if path and (found := probe.filesystem(path)):
            names.setdefault(found.device, []).append(name)
            free[found.device] = found.free
    short, shown, lines = [], [], []
    for device, here in names.items():
        need, have = sum(needs[name] for name in here), free[device]
        where = ", ".join(f"{name} {places[name]}" for name in here)
        shown.append(f"{size(have)} free for {where} (a first build wants about {size(need)})")
        if have < need:
            short.append(where)
            lines.append(f"{size(need - have)} at {where}")
    if not short:
        return Finding(check="disk", status="pass", detail="; ".join(shown))
    built = probe.exists(str(asked.root / "dist" / asked.variant / "index.json"))
    note = "; the image was built here before, and a build that finds its layers writes less" if built else ""
    return Finding(
        check="disk",
        status="warn" if built else "fail",
        detail="; ".join(shown) + note,
        fix=f"free {', '.join(lines)}: `nox -s clean -- --all`, or DSV32_CACHE on another disk",
    )


def _storage(probe: Probe, asked: Asked) -> str:
    """Where the engine keeps its images, empty if it does not say (a daemon elsewhere)."""
    engine = engine_in_use(probe, asked)
    if engine is None:
        return ""
    said = probe.run(engine.program, "info", "--format", _STORAGE[engine.name])
    path = said.out.strip() if said.ok else ""
    return path if path.startswith("/") and probe.exists(path) else ""


def check_memory(probe: Probe, asked: Asked) -> Finding:
    """Memory, and the limit of the container that this may run in."""
    total = _meminfo(probe, "MemTotal")
    if total is None:
        return Finding(check="memory", status="warn", detail="/proc/meminfo does not say how much there is")
    limit = _cgroup_limit(probe)
    have = min(total, limit) if limit else total
    bound = ", by the limit of this container" if limit and limit < total else ""
    need = MEMORY[asked.variant]
    detail = f"{size(have)}{bound}"
    if have >= need:
        return Finding(check="memory", status="pass", detail=detail)
    fix = "MAX_JOBS=1 for what is compiled, or a larger machine" if asked.variant != "cpu" else ""
    detail += f"; below {size(need)} a build or a smoke run may be killed"
    return Finding(check="memory", status="warn", detail=detail, fix=fix or "use a larger machine")


def check_cores(probe: Probe, asked: Asked) -> Finding:
    """Processors that may be used."""
    count = probe.cores()
    if count >= CORES:
        return Finding(check="cores", status="pass", detail=str(count))
    return Finding(check="cores", status="warn", detail=f"{count}: slow", fix="use a machine with more")


def check_shm(probe: Probe, asked: Asked) -> Finding:
    """Shared memory. Docker and podman give a container its own; buildah's chroot uses the host's."""
    found = probe.filesystem("/dev/shm") if probe.exists("/dev/shm") else None
    engine = engine_in_use(probe, asked)
    own = engine is not None and engine.name in ("docker", "podman")
    note = "; `smoke` gives containers 8 GB, your own `docker run` needs --shm-size 8g (its default is 64 MB)"
    note = note if own else ""
    least = SHM_LEAST[asked.variant]
    wanted = SHM if asked.variant != "cpu" else least
    have = found.total if found else 0
    detail = f"/dev/shm has {size(have)}" if found else "there is no /dev/shm"
    if have >= wanted:
        return Finding(check="shm", status="pass", detail=detail + note)
    if have < least:
        detail += f", less than {size(least)}: ranks end with a bus error or `No space left on device`"
    inside = f"{-(-wanted // GIB)}g"
    return Finding(
        check="shm",
        status="fail" if have < least and not own else "warn",
        detail=detail + note,
        fix=f"as root: mount -o remount,size={inside} /dev/shm (inside a container: --shm-size {inside})",
    )


def check_open_files(probe: Probe, asked: Asked) -> Finding:
    """Open files: each rank holds sockets to the others and files for shared tensors."""
    limit = probe.limit("nofile")
    if limit is None or limit >= OPEN_FILES:
        return Finding(check="open files", status="pass", detail="no limit" if limit is None else f"{limit}")
    return Finding(
        check="open files",
        status="warn",
        detail=f"{limit}, which many ranks or loader processes use up",
        fix="ulimit -n 65536, and LimitNOFILE for the engine's service",
    )


def check_clock(probe: Probe, asked: Asked) -> Finding:
    """A clock before the image's own date makes certificates and package lists invalid."""
    now = probe.now()
    shown = _date(now)
    try:
        epoch = load_config(asked.root).epoch
    except ConfigError:
        epoch = 0
    own = _date(epoch)
    fix = "timedatectl set-ntp true, or set it by hand: date --set"
    if now < epoch:
        detail = f"{shown} is before the date of the image's files ({own}): certificates will not be valid"
        return Finding(check="clock", status="fail", detail=detail, fix=fix)
    said = probe.run("timedatectl", "show", "--property=NTPSynchronized", "--value")
    if said.ok and said.out.strip() == "no":
        return Finding(check="clock", status="warn", detail=f"{shown}, not synchronised", fix=fix)
    known = ", synchronised" if said.ok and said.out.strip() == "yes" else ""
    return Finding(check="clock", status="pass", detail=shown + known)


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def check_index(probe: Probe, asked: Asked) -> Finding | None:
    """With `--network`: does the package index answer."""
    if not asked.network:
        return None
    return _reached("index", probe.index(), "UV_DEFAULT_INDEX, or uv's or pip's own settings, name the index")


def check_mirror(probe: Probe, asked: Asked) -> Finding | None:
    """With `--network`: does the Debian mirror answer."""
    if not asked.network:
        return None
    return _reached(
        "mirror", probe.mirror(), "apt's own settings or DSV32_DEBIAN_MIRROR name the mirror; check the proxy"
    )


def _reached(check: str, problem: str, fix: str) -> Finding:
    if not problem:
        return Finding(check=check, status="pass", detail="answers")
    lines = [line.strip(" |") for line in problem.splitlines()]
    return Finding(check=check, status="fail", detail=" ".join(lines)[:400], fix=fix)


def _meminfo(probe: Probe, name: str) -> int | None:
    """A line of /proc/meminfo in bytes."""
    for line in (probe.read("/proc/meminfo") or "").splitlines():
        key, _, rest = line.partition(":")
        words = rest.split()
        if key == name and words and words[0].isdigit():
            return int(words[0]) * 1024
    return None


def _cgroup_limit(probe: Probe) -> int | None:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = (probe.read(path) or "").strip()
        if text.isdigit() and int(text) < _NO_CGROUP_LIMIT:
            return int(text)
    return None
