"""Driver, GPUs and the links between them, for the variant `cu130`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dsv32_image.doctor import nvidia
from dsv32_image.doctor.probe import NOT_THERE, Finding

if TYPE_CHECKING:
    from dsv32_image.doctor.nvidia import Gpu
    from dsv32_image.doctor.probe import Asked, Probe

# "CUDA 13.x: >= 580" in NVIDIA's CUDA Compatibility guide, section Minor Version Compatibility, table 1:
# https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
DRIVER_BRANCH = 580
# What the compiled extensions hold code for: Hopper (H100, H200) and Blackwell (B200).
CAPABILITIES = ("9.0", "10.0")
_BUILDS_WITHOUT = "building needs no GPU (`nox -s doctor -- --variant cu130 --build-only`)"


def check_driver(probe: Probe, asked: Asked) -> Finding | None:
    """The NVIDIA driver is loaded, answers, and is new enough for CUDA 13.0."""
    if not asked.gpu:
        return None
    version, answer = nvidia.driver_version(probe), nvidia.query(probe)
    if not version and not answer.ok:
        return _no_driver(probe)
    if not version or (not answer.ok and not _too_old(version)):
        return _no_answer(version, answer.code, f"{answer.out}\n{answer.err}", answer.last_words)
    if _too_old(version):
        return Finding(
            check="driver",
            status="fail",
            detail=f"{version}; CUDA 13.x needs {DRIVER_BRANCH} or newer (NVIDIA's CUDA Compatibility guide)",
            fix=f"install driver {DRIVER_BRANCH} or newer and reboot; where that cannot be, NVIDIA's package "
            "cuda-compat-13-0 bridges it on data-centre GPUs (forward compatibility, not in the image)",
        )
    return Finding(check="driver", status="pass", detail=f"{version} (CUDA 13.x needs {DRIVER_BRANCH})")


def _too_old(version: str) -> bool:
    return int(version.partition(".")[0]) < DRIVER_BRANCH


def _no_driver(probe: Probe) -> Finding:
    count = nvidia.devices_on_the_bus(probe)
    if not count:
        return Finding(
            check="driver",
            status="fail",
            detail="no NVIDIA driver, and no NVIDIA GPU on the PCI bus",
            fix=f"run on a host with an H100, H200 or B200; {_BUILDS_WITHOUT}",
        )
    nouveau = any(line.startswith("nouveau ") for line in (probe.read("/proc/modules") or "").splitlines())
    instead = "; nouveau is loaded in its place" if nouveau else ""
    return Finding(
        check="driver",
        status="fail",
        detail=f"{count} NVIDIA GPU(s) on the PCI bus, but the driver is not loaded{instead}",
        fix=f"install NVIDIA's driver, branch {DRIVER_BRANCH} or newer, and reboot"
        + (" (blacklist nouveau)" if nouveau else ""),
    )


def _no_answer(version: str, code: int, text: str, last_words: str) -> Finding:
    """The module is loaded and nvidia-smi does not get through to it."""
    if code == NOT_THERE:
        detail, fix = "nvidia-smi is not installed", "install the driver's utilities (nvidia-smi)"
    elif "version mismatch" in text:
        detail = "its libraries are of another version than the loaded module"
        fix = "reboot, so that the module of the installed driver is loaded"
    else:
        detail, fix = f"nvidia-smi fails: {last_words}", "see dmesg for lines with NVRM or Xid, then reboot"
    return Finding(check="driver", status="fail", detail=f"{version or 'unknown version'}, {detail}", fix=fix)


def check_gpus(probe: Probe, asked: Asked) -> Finding | None:
    """GPUs are there, and the image holds code for them."""
    if not asked.gpu or not nvidia.query(probe).ok:
        return None  # `check_driver` says why
    found = nvidia.gpus(probe)
    wanted = " and ".join(CAPABILITIES)
    if not found:
        fix = f"in a container: start it with the GPUs; {_BUILDS_WITHOUT}"
        return Finding(check="gpus", status="fail", detail="nvidia-smi lists none", fix=fix)
    detail = "; ".join(_summary(found))
    foreign = [gpu for gpu in found if gpu.capability not in CAPABILITIES]
    if foreign:
        some = len(foreign) < len(found)
        chosen = ",".join(str(gpu.index) for gpu in found if gpu not in foreign)
        return Finding(
            check="gpus",
            status="warn" if some else "fail",
            detail=f"{detail}; the image is compiled for {wanted}",
            fix=f"CUDA_VISIBLE_DEVICES={chosen}" if some else "use an H100, H200 or B200",
        )
    if split := [gpu for gpu in found if gpu.mig]:
        return Finding(
            check="gpus",
            status="warn",
            detail=f"{detail}; cut into MIG slices: {', '.join(str(gpu.index) for gpu in split)}",
            fix="the administrator can join them: nvidia-smi -i INDEX -mig 0",
        )
    return Finding(check="gpus", status="pass", detail=detail)


def _summary(found: list[Gpu]) -> list[str]:
    kinds = [f"{gpu.name} ({gpu.capability})" for gpu in found]
    return [f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)]


def check_persistence(probe: Probe, asked: Asked) -> Finding | None:
    """Without persistence mode the driver unloads between runs, and each start waits for it."""
    found = nvidia.gpus(probe) if asked.gpu else []
    if not found:
        return None
    off = [str(gpu.index) for gpu in found if not gpu.persistent]
    if not off:
        return Finding(check="persistence", status="pass", detail="on")
    return Finding(
        check="persistence",
        status="warn",
        detail=f"off for GPU {', '.join(off)}: each run starts with seconds of waiting",
        fix="as root: systemctl enable --now nvidia-persistenced (or nvidia-smi -pm 1 until the next boot)",
    )


def check_fabric(probe: Probe, asked: Asked) -> Finding | None:
    """On NVSwitch hosts CUDA answers error 802 until the fabric manager has set up the switches."""
    found = nvidia.gpus(probe) if asked.gpu else []
    if not found:
        return None
    count = nvidia.switches(probe)
    states = [s for s in nvidia.fabric(probe) if s.state not in ("", "N/A", "Not Supported")]
    if not count and not states:
        return Finding(check="fabric", status="pass", detail="no NVSwitch, so no fabric manager is needed")
    service = probe.run("systemctl", "is-active", "nvidia-fabricmanager")
    manager = "not there" if service.code == NOT_THERE else service.out.strip() or service.last_words
    bad = [s for s in states if (s.state, s.status) != ("Completed", "Success")]
    if states and not bad:
        return Finding(check="fabric", status="pass", detail=f"{len(states)} GPUs joined the NVSwitch fabric")
    if not states and manager == "active":
        return Finding(check="fabric", status="pass", detail=f"{count} NVSwitches, fabric manager active")
    shown = f"{len(bad)} of {len(states)} GPUs: {bad[0].state}, {bad[0].status}" if bad else "state unknown"
    version, driver = _manager_version(probe), nvidia.driver_version(probe)
    other = f" {version}, which must be the driver's {driver}" if version and version != driver else ""
    package = f"nvidia-fabricmanager {driver}" if other or not version else "nvidia-fabricmanager"
    return Finding(
        check="fabric",
        status="fail",
        detail=f"{shown}; fabric manager{other}: {manager}; CUDA fails: `system not yet initialized` (802)",
        fix=f"as root: install {package}, then systemctl enable --now nvidia-fabricmanager",
    )


def _manager_version(probe: Probe) -> str:
    answer = probe.run("nv-fabricmanager", "--version")
    found = re.search(r"\d+(?:\.\d+)+", answer.out) if answer.ok else None
    return found[0] if found else ""


def check_topology(probe: Probe, asked: Asked) -> Finding | None:
    """How the GPUs are connected, where there are several."""
    found = nvidia.gpus(probe) if asked.gpu else []
    if len(found) < 2:
        return None
    pairs = nvidia.links_between(probe)
    if not pairs:
        fix = "nvidia-smi topo -m shows what is wrong"
        return Finding(check="topology", status="warn", detail="nvidia-smi shows no matrix", fix=fix)
    kinds = sorted(set(pairs.values()))
    if all(kind.startswith("NV") for kind in kinds):
        return Finding(
            check="topology", status="pass", detail=f"{'/'.join(kinds)} between all {len(found)} GPUs"
        )
    slow = [f"GPU{a}-GPU{b}" for (a, b), kind in pairs.items() if not kind.startswith("NV")]
    return Finding(
        check="topology",
        status="warn",
        detail=f"{len(slow)} of {len(pairs)} pairs without NVLink ({'/'.join(kinds)}): {slow[0]}, …",
        fix="expected on PCIe boards, slow for tensor and context parallelism; elsewhere see `fabric`",
    )


def check_nvlink(probe: Probe, asked: Asked) -> Finding | None:
    """No NVLink is down, where there are several GPUs that have them."""
    found = nvidia.gpus(probe) if asked.gpu else []
    links = nvidia.inactive_links(probe) if len(found) > 1 else {}
    if not links:
        return None
    down = [f"GPU {gpu}: {bad} of {total}" for gpu, (bad, total) in links.items() if bad]
    if not down:
        total = sum(count for _, count in links.values())
        return Finding(check="nvlink", status="pass", detail=f"all {total} links up")
    return Finding(
        check="nvlink",
        status="warn",
        detail=f"links down: {', '.join(down)}",
        fix="nvidia-smi nvlink --errorcounters, and dmesg for Xid 74; an empty bridge slot is no fault",
    )
