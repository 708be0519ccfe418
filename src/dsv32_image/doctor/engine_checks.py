"""What makes the image: the container engine, what it needs of the host, and mmdebstrap."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsv32_image.doctor.probe import Finding
from dsv32_image.engine_discovery import NAMES
from dsv32_image.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsv32_image.doctor.probe import Asked, Probe, Status
    from dsv32_image.engine import Engine

_UBUNTU_RESTRICTS = "/proc/sys/kernel/apparmor_restrict_unprivileged_userns"
_DEBIAN_ALLOWS = "/proc/sys/kernel/unprivileged_userns_clone"


def engine_in_use(probe: Probe, asked: Asked) -> Engine | None:
    """The engine that `build` and `smoke` would take; None if there is none."""
    try:
        return probe.engine(asked.engine)
    except EngineError:
        return None


def check_engine(probe: Probe, asked: Asked) -> Finding:
    """The engine that a build takes."""
    try:
        engine = probe.engine(asked.engine)
    except EngineError as error:
        return Finding(check="engine", status="fail", detail=_one_line(error.message), fix=error.hint)
    return Finding(check="engine", status="pass", detail=engine.description)


def check_other_engines(probe: Probe, asked: Asked) -> Finding | None:
    """Engines that are installed but do not work, while another one does: `--engine` would meet them."""
    used = engine_in_use(probe, asked)
    if asked.engine or used is None:
        return None  # only one was asked for, or `check_engine` has named them all
    good, bad, fixes = [], [], []
    for name in NAMES:
        if name == used.name or not probe.which(name):
            continue
        try:
            good.append(probe.engine(name).description)
        except EngineError as error:
            bad.append(_one_line(error.message))
            fixes.append(error.hint)
    if not good and not bad:
        return None
    status: Status = "warn" if bad else "pass"
    return Finding(
        check="other engines", status=status, detail="; ".join([*bad, *good]), fix=" / ".join(fixes)
    )


def check_mmdebstrap(probe: Probe, asked: Asked) -> Finding:
    """What makes the root file system: mmdebstrap here, or an engine that runs it."""
    if probe.which("mmdebstrap"):
        version = probe.run("mmdebstrap", "--version")
        return Finding(check="mmdebstrap", status="pass", detail=version.last_words)
    engine = engine_in_use(probe, asked)
    if engine is not None and engine.runs_tools:
        return Finding(
            check="mmdebstrap", status="pass", detail=f"not installed; {engine.name} runs the locked one"
        )
    return Finding(
        check="mmdebstrap",
        status="fail",
        detail="not installed, and there is no docker or podman to run it in",
        fix="apt-get install mmdebstrap (`sh scripts/nox` does it where apt is), or --engine docker",
    )


def check_user(probe: Probe, asked: Asked) -> Finding:
    """Root, or user namespaces for those parts that run on the host itself."""
    if probe.uid() == 0:
        return Finding(check="user", status="pass", detail="root")
    engine = engine_in_use(probe, asked)
    here = [name for name in ("mmdebstrap",) if probe.which(name)]
    here += [engine.name] if engine is not None and engine.name != "docker" else []
    if not here:
        return Finding(check="user", status="pass", detail="not root; docker's daemon does what needs it")
    who = " and ".join(here)
    made = probe.run("unshare", "--user", "--map-root-user", "true")
    if not made.ok:
        return Finding(
            check="user",
            status="fail",
            detail=f"not root, and {who} cannot have a user namespace: {made.last_words}",
            fix=_allow_namespaces(probe),
        )
    if not probe.which("newuidmap"):
        return Finding(
            check="user",
            status="fail",
            detail=f"not root, and {who} needs newuidmap, which is not installed",
            fix="as root: apt-get install uidmap",
        )
    lacking = [path for path in ("/etc/subuid", "/etc/subgid") if not _has_range(probe, path)]
    if lacking:
        return Finding(
            check="user",
            status="fail",
            detail=f"not root, and {who} finds no range of ids for this user in {' and '.join(lacking)}",
            fix='as root: usermod --add-subuids 100000-165535 --add-subgids 100000-165535 "$USER"',
        )
    return Finding(check="user", status="pass", detail=f"not root; {who} can use user namespaces")


def check_network_off(probe: Probe, asked: Asked) -> Finding | None:
    """Buildah's chroot isolation shares the caller's network, so the caller must get one without."""
    engine = engine_in_use(probe, asked)
    if engine is None or engine.name != "buildah":
        return None
    words = ["unshare", "--net"] + ([] if probe.uid() == 0 else ["--map-root-user"])
    made = probe.run(*words, "true")
    if made.ok:
        return Finding(check="network off", status="pass", detail=f"`{' '.join(words)}` works")
    return Finding(
        check="network off",
        status="fail",
        detail=f"buildah builds without network by `{' '.join(words)}`, which fails: {made.last_words}",
        fix="give this container or user CAP_SYS_ADMIN, or use --engine docker",
    )


def _allow_namespaces(probe: Probe) -> str:
    if (probe.read(_UBUNTU_RESTRICTS) or "").strip() == "1":
        return "as root: sysctl kernel.apparmor_restrict_unprivileged_userns=0, or --engine docker"
    if (probe.read(_DEBIAN_ALLOWS) or "").strip() == "0":
        return "as root: sysctl kernel.unprivileged_userns_clone=1, or --engine docker"
    return "run as root, or use --engine docker"


def _has_range(probe: Probe, path: str) -> bool:
    """Whether subuid(5) or subgid(5) gives this user ids, by name or by number."""
    name = probe.run("id", "-un").out.strip()
    lines: Sequence[str] = (probe.read(path) or "").splitlines()
    return any(line.split(":")[0] in (name, str(probe.uid())) for line in lines if line.count(":") == 2)


def _one_line(message: str) -> str:
    first, *rest = (line.strip() for line in message.splitlines())
    return f"{first} {'; '.join(rest)}" if rest else first
