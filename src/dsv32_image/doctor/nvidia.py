"""Reading what the NVIDIA driver and its tools say. Every function takes a host where they say nothing."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsv32_image.doctor.probe import Probe, Result

QUERY = (
    "nvidia-smi",
    "--query-gpu=index,uuid,name,driver_version,compute_cap,persistence_mode,mig.mode.current",
    "--format=csv,noheader",
)
_FIELDS = 7
KERNEL_MODULE = "/proc/driver/nvidia/version"
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One line of nvidia-smi's table."""

    index: int
    uuid: str
    name: str
    driver: str
    capability: str
    persistent: bool
    mig: bool


@dataclass(frozen=True, kw_only=True)
class FabricState:
    """How far a GPU got in joining its NVSwitch fabric."""

    state: str
    status: str


def query(probe: Probe) -> Result:
    """What nvidia-smi answers to the one question that most checks share."""
    return probe.run(*QUERY)


def gpus(probe: Probe) -> list[Gpu]:
    """The GPUs, none if nvidia-smi does not answer."""
    answer = query(probe)
    found = []
    for row in csv.reader(answer.out.splitlines() if answer.ok else []):
        words = [word.strip() for word in row]
        if len(words) == _FIELDS and words[0].isdigit():
            index, uuid, name, driver, capability, persistence, mig = words
            found.append(
                Gpu(
                    index=int(index),
                    uuid=uuid,
                    name=name,
                    driver=driver,
                    capability=capability,
                    persistent=persistence == "Enabled",
                    mig=mig == "Enabled",
                )
            )
    return found


def driver_version(probe: Probe) -> str:
    """The driver's version: of the loaded kernel module, else what nvidia-smi says; empty if none."""
    text = probe.read(KERNEL_MODULE) or ""
    if found := re.search(r"Kernel Module(?:\s+for \S+)?\s+(\d+(?:\.\d+)+)", text):
        return found[1]
    return next((gpu.driver for gpu in gpus(probe)), "")


def open_module(probe: Probe) -> bool:
    """Whether the loaded kernel module is the open one, which can export memory as a dma-buf."""
    return "Open Kernel Module" in (probe.read(KERNEL_MODULE) or "")


def devices_on_the_bus(probe: Probe) -> int:
    """NVIDIA's display and 3D controllers on the PCI bus, with or without a driver."""
    root, count = "/sys/bus/pci/devices", 0
    for name in probe.list(root):
        vendor, kind = (probe.read(f"{root}/{name}/{file}") or "" for file in ("vendor", "class"))
        count += vendor.strip() == "0x10de" and kind.startswith("0x03")
    return count


def switches(probe: Probe) -> int:
    """NVSwitches that this system sees. A virtual machine may have the links and not the switches."""
    return len(probe.list("/proc/driver/nvidia-nvswitch/devices")) or sum(
        re.fullmatch(r"nvidia-nvswitch\d+", name) is not None for name in probe.list("/dev")
    )


def fabric(probe: Probe) -> list[FabricState]:
    """The section `Fabric` of `nvidia-smi -q`, one a GPU; drivers before 525 do not have it."""
    answer = probe.run("nvidia-smi", "-q")
    found: list[FabricState] = []
    depth = -1
    values: dict[str, str] = {}
    for line in [*(answer.out.splitlines() if answer.ok else []), "end"]:
        indent = len(line) - len(line.lstrip())
        if depth >= 0 and line.strip() and indent <= depth:
            found.append(FabricState(state=values.get("State", ""), status=values.get("Status", "")))
            depth, values = -1, {}
        if line.strip() == "Fabric":
            depth = indent
        elif depth >= 0:
            key, _, value = line.partition(":")
            values.setdefault(key.strip(), value.strip())
    return found


def links_between(probe: Probe) -> dict[tuple[int, int], str]:
    """The matrix of `nvidia-smi topo -m`: NV18, PIX, NODE, SYS… for each pair of GPUs."""
    answer = probe.run("nvidia-smi", "topo", "-m")
    lines = _ESCAPES.sub("", answer.out).splitlines() if answer.ok else []
    columns: Sequence[str] = ()
    found = {}
    for line in lines:
        words = line.split()
        if not columns:
            columns = words if words and words[0] == "GPU0" and "X" not in words else ()
        elif words and re.fullmatch(r"GPU\d+", words[0]):
            row = int(words[0][3:])
            for column, word in zip(columns, words[1:], strict=False):
                if re.fullmatch(r"GPU\d+", column) and row < int(column[3:]):
                    found[row, int(column[3:])] = word
    return found


def inactive_links(probe: Probe) -> dict[int, tuple[int, int]]:
    """NVLinks by GPU, (down, all), of `nvidia-smi nvlink --status`."""
    answer = probe.run("nvidia-smi", "nvlink", "--status")
    found: dict[int, tuple[int, int]] = {}
    gpu = -1
    for line in answer.out.splitlines() if answer.ok else []:
        if header := re.match(r"GPU (\d+):", line):
            gpu = int(header[1])
        elif re.match(r"\s+Link \d+:", line) and gpu >= 0:
            down, total = found.get(gpu, (0, 0))
            found[gpu] = (down + ("inactive" in line), total + 1)
    return found
