"""InfiniBand and RoCE, for training on several hosts, and what it needs of memory limits and modules."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsv32_image.doctor import nvidia
from dsv32_image.doctor.engine_checks import engine_in_use
from dsv32_image.doctor.probe import Finding
from dsv32_image.ui import size

if TYPE_CHECKING:
    from dsv32_image.doctor.probe import Asked, Probe

_ROOT = "/sys/class/infiniband"
# From this kernel on, a network card can reach GPU memory through dma-buf, without nvidia-peermem.
_DMA_BUF_KERNEL = (5, 12)


@dataclass(frozen=True, kw_only=True)
class Port:
    """A port of a network card that speaks RDMA."""

    name: str
    state: str
    rate: str

    @property
    def active(self) -> bool:
        """Whether traffic can go through it."""
        return self.state == "ACTIVE"


def ports(probe: Probe) -> list[Port]:
    """All ports: InfiniBand and RoCE."""
    found = []
    for card in probe.list(_ROOT):
        for port in probe.list(f"{_ROOT}/{card}/ports"):
            folder = f"{_ROOT}/{card}/ports/{port}"
            # "4: ACTIVE", "1: DOWN", "2: INIT"
            state = (probe.read(f"{folder}/state") or "unknown").rpartition(":")[2].strip()
            rate = (probe.read(f"{folder}/rate") or "").strip()
            found.append(Port(name=f"{card}/{port}", state=state, rate=rate))
    return found


def check_infiniband(probe: Probe, asked: Asked) -> Finding | None:
    """Every port that is there is up."""
    if not asked.gpu:
        return None
    found = ports(probe)
    if not found:
        return Finding(check="infiniband", status="pass", detail="none: this host trains alone, or over TCP")
    down = [port for port in found if not port.active]
    if down:
        names = ", ".join(f"{port.name} {port.state}" for port in down)
        return Finding(
            check="infiniband",
            status="warn",
            detail=f"{len(found) - len(down)} of {len(found)} ports active; {names}",
            fix="see ibstat: DOWN is cable or switch, INIT waits for a subnet manager; or leave them out "
            "with NCCL_IB_HCA",
        )
    if not any(name.startswith("uverbs") for name in probe.list("/dev/infiniband")):
        return Finding(
            check="infiniband",
            status="warn",
            detail=f"{len(found)} ports active, but there is no /dev/infiniband/uverbs*",
            fix="as root: modprobe ib_uverbs (in a container: --device /dev/infiniband)",
        )
    rates = ", ".join(sorted({port.rate for port in found if port.rate}))
    return Finding(check="infiniband", status="pass", detail=f"{len(found)} ports active, {rates}")


def check_peermem(probe: Probe, asked: Asked) -> Finding | None:
    """Network cards read and write GPU memory themselves (GPUDirect RDMA)."""
    if not asked.gpu or not nvidia.driver_version(probe) or not any(port.active for port in ports(probe)):
        return None
    modules = (probe.read("/proc/modules") or "").splitlines()
    if any(line.startswith("nvidia_peermem ") for line in modules):
        return Finding(check="peermem", status="pass", detail="nvidia-peermem is loaded")
    release = re.match(r"(\d+)\.(\d+)", probe.read("/proc/sys/kernel/osrelease") or "")
    kernel = (int(release[1]), int(release[2])) if release else (0, 0)
    if nvidia.open_module(probe) and kernel >= _DMA_BUF_KERNEL:
        return Finding(check="peermem", status="pass", detail="not loaded; the open module offers dma-buf")
    return Finding(
        check="peermem",
        status="warn",
        detail="nvidia-peermem is not loaded: traffic between hosts goes through host memory",
        fix="as root: modprobe nvidia-peermem, and its name into /etc/modules-load.d/nvidia-peermem.conf",
    )


def check_memlock(probe: Probe, asked: Asked) -> Finding | None:
    """Memory that may be locked; RDMA locks all buffers that it registers."""
    if not asked.gpu:
        return None
    limit = probe.limit("memlock")
    if limit is None:
        return Finding(check="memlock", status="pass", detail="no limit")
    if not ports(probe):
        detail = f"{size(limit)}; there is no InfiniBand that would need more"
        return Finding(check="memlock", status="pass", detail=detail)
    engine = engine_in_use(probe, asked)
    # Docker's containers get the daemon's limit, not this shell's; what this says is only a sign.
    docker = engine is not None and engine.name == "docker"
    return Finding(
        check="memlock",
        status="warn" if docker else "fail",
        detail=f"{size(limit)}: NCCL over InfiniBand fails with `Cannot allocate memory`",
        fix="`* - memlock unlimited` in /etc/security/limits.conf and a new login; `docker run` takes "
        "--ulimit memlock=-1",
    )
