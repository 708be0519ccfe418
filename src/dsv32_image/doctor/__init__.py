"""Step `doctor`: what a host needs to build and to run the image, each line with the fix.

A check is a function of a `Probe` (the host) and of what is `Asked`, and returns a `Finding`, or None where
it has nothing to say: `cpu` asks no question about GPUs.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from dsv32_image.doctor import (
    container_checks,
    engine_checks,
    gpu_checks,
    host_checks,
    network_checks,
    nvidia,
)
from dsv32_image.doctor.probe import Asked, Finding, HostProbe, Probe
from dsv32_image.errors import HostUnfitError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dsv32_image.ui import Ui

__all__ = ["Asked", "Finding", "HostProbe", "Probe", "choose_variant", "examine", "report", "require_fit"]

FORMAT = 1
VARIANTS = ("cpu", "cu130")
CHECKS: Sequence[Callable[[Probe, Asked], Finding | None]] = (
    engine_checks.check_engine,
    engine_checks.check_other_engines,
    engine_checks.check_mmdebstrap,
    engine_checks.check_user,
    engine_checks.check_network_off,
    host_checks.check_disk,
    host_checks.check_memory,
    host_checks.check_cores,
    host_checks.check_shm,
    host_checks.check_open_files,
    host_checks.check_clock,
    host_checks.check_index,
    host_checks.check_mirror,
    gpu_checks.check_driver,
    gpu_checks.check_gpus,
    gpu_checks.check_persistence,
    gpu_checks.check_fabric,
    gpu_checks.check_topology,
    gpu_checks.check_nvlink,
    container_checks.check_toolkit,
    container_checks.check_cdi,
    network_checks.check_infiniband,
    network_checks.check_peermem,
    network_checks.check_memlock,
)


def choose_variant(probe: Probe, name: str | None) -> str:
    """The variant asked for, else `cu130` where the host has an NVIDIA GPU, with or without a driver.

    Raises:
        UsageError: There is no such variant.
    """
    if name is None:
        return "cu130" if nvidia.driver_version(probe) or nvidia.devices_on_the_bus(probe) else "cpu"
    if name not in VARIANTS:
        raise UsageError(f"unknown variant '{name}'", hint=f"choose one of: {', '.join(VARIANTS)}")
    return name


def examine(probe: Probe, asked: Asked) -> list[Finding]:
    """Run all checks; what each found, in the order of the table."""
    found = (check(probe, asked) for check in CHECKS)
    return [finding for finding in found if finding is not None]


def report(findings: Sequence[Finding], asked: Asked, ui: Ui, *, as_json: bool) -> None:
    """Print the findings to standard output: a table, or JSON whose keys do not change within a `format`."""
    counts = {status: sum(f.status == status for f in findings) for status in ("pass", "warn", "fail")}
    if as_json:
        # Written out, not `vars`: a renamed field must not rename a key that scripts read.
        rows = [{"check": f.check, "status": f.status, "detail": f.detail, "fix": f.fix} for f in findings]
        document = {"format": FORMAT, "variant": asked.variant, "counts": counts, "findings": rows}
        print(json.dumps(document, indent=1))
        return
    what = "to build" if asked.build_only else "to build and to run"
    lines = [(f.check, f.status, f.detail + (f"\nfix: {f.fix}" if f.fix else "")) for f in findings]
    ui.table(f"doctor: {what} {asked.variant} here", ("check", "", "found"), lines, out=True)
    print(", ".join(f"{count} {status}" for status, count in counts.items()))


def require_fit(findings: Sequence[Finding], asked: Asked) -> None:
    """Refuse a host on which a check failed.

    Raises:
        HostUnfitError: Names the checks; the hint is the fix of the first.
    """
    failed = [finding for finding in findings if finding.status == "fail"]
    if failed:
        names = ", ".join(finding.check for finding in failed)
        what = "built" if asked.build_only else "built and run"
        raise HostUnfitError(f"{asked.variant} cannot be {what} here yet: {names}", hint=failed[0].fix)
