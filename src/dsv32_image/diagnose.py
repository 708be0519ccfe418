"""What an engine, a compiler or a smoke run printed, turned into a problem and the next step.

Each cause is known by the words of the programs that meet it; `diagnose` tries all of them in their order. It
reads text and nothing else, so it serves a build's log, an engine's standard error and a report.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Kind(StrEnum):
    """The causes that are told apart; who can do something about one by itself asks for it by this."""

    DISK_FULL = "disk full"
    SHM_FULL = "shared memory full"
    COMPILER_KILLED = "compiler killed"
    RUNTIME_REFUSES = "container runtime refuses"
    TOOLKIT_MISSING = "toolkit missing"
    CDI_UNRESOLVED = "CDI device unresolved"
    DRIVER_TOO_OLD = "driver too old"
    FABRIC_NOT_READY = "fabric not ready"
    NO_GPU = "no GPU"
    OTHER_TORCH = "compiled for another torch"


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """A cause. `problem` says what is wrong in one line, `hint` the next step."""

    kind: Kind
    problem: str
    hint: str


_DOCTOR = "`nox -s doctor -- --variant cu130` says more"


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A cause that one of some regular expressions tells, in the first line that has one.

    `problem` may name that {line}, cut to what fits on a screen, and what the {group} of the expression is.
    """

    kind: Kind
    words: tuple[str, ...]
    problem: str
    hint: str

    def find(self, text: str) -> Diagnosis | None:
        """The diagnosis, None if no line has the words."""
        if not (found := _first(text, "|".join(self.words))):
            return None
        line, match = found
        group = next((part for part in match.groups() if part), "")
        return Diagnosis(kind=self.kind, problem=self.problem.format(line=line, group=group), hint=self.hint)


def _first(text: str, pattern: str, longest: int = 160) -> tuple[str, re.Match[str]] | None:
    """The first line that has one of the words, cut to what fits on a screen, and where they are in it."""
    wanted = re.compile(pattern, re.IGNORECASE)
    for line in text.splitlines():
        if found := wanted.search(line):
            start = max(0, min(found.start(), len(line) - longest)) if len(line) > longest else 0
            return line[start : start + longest].strip(), found
    return None


def driver_too_old(text: str) -> Diagnosis | None:
    """The driver does not know CUDA 13.0."""
    words = (
        r"NVIDIA driver on your system is too old",
        r"CUDA driver version is insufficient for CUDA runtime version",
        r"unsatisfied condition: cuda>=",
    )
    if not _first(text, "|".join(words)):
        return None
    # The number is that of cuDriverGetVersion: 1000 * major + 10 * minor.
    found = re.search(r"found version (\d+)", text)
    knows = f", it knows CUDA {int(found[1]) // 1000}.{int(found[1]) % 1000 // 10}" if found else ""
    return Diagnosis(
        kind=Kind.DRIVER_TOO_OLD,
        problem=f"the NVIDIA driver is too old for CUDA 13.0{knows}",
        hint=f"install driver 580 or newer; {_DOCTOR}",
    )


def other_torch(text: str) -> Diagnosis | None:
    """An extension (Transformer Engine's first of all) that was compiled for another torch."""
    found = re.search(r"(?P<file>[^\s/:]+\.so[\w.]*): undefined symbol: (?P<symbol>\w+)", text)
    if not found:
        return None
    # torch's own names: of its C++ namespaces, as they are mangled, and of its Python bindings in C.
    torch = re.match(r"_Z\w*(?:3c10|5torch)|_ZNK?2at|THP", found["symbol"])
    engine = "transformer_engine" in found["file"]
    if not torch and not engine:
        return None
    return Diagnosis(
        kind=Kind.OTHER_TORCH,
        problem=f"{found['file']} was compiled for another torch: undefined symbol {found['symbol']}",
        hint="in the image: `nox -s build -- --no-cache`; elsewhere: the torch of versions.lock, or compile "
        "the extension again for the one that is there",
    )


# More specific ones first: a full /dev/shm says ENOSPC too, and a driver that is too old offers no GPU.
_KNOWN: Sequence[Callable[[str], Diagnosis | None]] = (
    Cause(  # NCCL's segments, torch's shared tensors
        kind=Kind.SHM_FULL,
        words=(
            r"/dev/shm.*(?:no space left|ENOSPC|quota exceeded)",
            r"(?:no space left|ENOSPC|quota exceeded).*/dev/shm",
            r"insufficient shared memory",
        ),
        problem="shared memory is used up: {line}",
        hint="start the container with --shm-size 8g, as `nox -s smoke` does (docker's default is 64 MB)",
    ).find,
    Cause(
        kind=Kind.DISK_FULL,
        words=(r"no space left on device", r"\bENOSPC\b", r"disk quota exceeded"),
        problem="no space left: {line}",
        hint="`nox -s doctor` lists what is free where; most is written in the engine's own storage "
        "(`docker system df`), `nox -s clean -- --all` drops this project's caches",
    ).find,
    Cause(  # by the kernel, for want of memory, or by itself
        kind=Kind.COMPILER_KILLED,
        words=(
            r"Killed signal terminated program (\S+)",
            r"internal compiler error: Killed \(program ([^)]+)\)",
            r"'([^']+)' died due to signal 9",
            r"(\w+) terminated with signal 9",
            r"(cc1\w*): out of memory allocating",
            r"(cc1\w*|ld|nvcc|cicc|ptxas): .*Cannot allocate memory",
        ),
        problem="the compiler ({group}) was killed: too many of them at once for the memory here",
        hint="halve MAX_JOBS (MAX_JOBS=1 takes the least), or give the build more memory",
    ).find,
    Cause(  # crun, which has not the cgroups or rights that it wants
        kind=Kind.RUNTIME_REFUSES,
        words=(
            r"cgroups in hybrid mode not supported",
            r"crun: setrlimit `RLIMIT_\w+`: Operation not permitted",  # in a container, no CAP_SYS_RESOURCE
        ),
        problem="the container runtime cannot start containers on this host: {line}",
        hint="use --engine buildah, which needs none; or, to build only, set BUILDAH_ISOLATION=chroot",
    ).find,
    Cause(  # docker was asked for GPUs and nothing connects it to NVIDIA's driver
        kind=Kind.TOOLKIT_MISSING,
        words=(
            r"could not select device driver",
            r"unknown or invalid runtime name: nvidia",
            r"unknown runtime specified nvidia",
            r"no known GPU vendor found",
        ),
        problem="docker was asked for GPUs and NVIDIA's container toolkit is not set up: {line}",
        hint="install nvidia-container-toolkit, then as root: nvidia-ctk runtime configure --runtime=docker "
        f"&& systemctl restart docker; {_DOCTOR}",
    ).find,
    Cause(  # no specification defines the device, or what it names is gone since the driver changed
        kind=Kind.CDI_UNRESOLVED,
        words=(
            r"unresolvable CDI devices",
            r"failed to stat CDI host device",
            r"stat nvidia\.com/gpu=\S+: no such file",  # podman before 4.1 takes it for a path
            r"error stat'ing file \S*(?:libcuda|nvidia)\S*: No such file",
        ),
        problem="the CDI specification is missing or older than the driver: {line}",
        hint=f"as root: nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml; {_DOCTOR}",
    ).find,
    driver_too_old,
    Cause(  # NVSwitches that no fabric manager has set up
        kind=Kind.FABRIC_NOT_READY,
        words=(r"system not yet initialized", r"cudaErrorSystemNotReady", r"CUDA_ERROR_SYSTEM_NOT_READY"),
        problem="the NVSwitch fabric is not set up (CUDA error 802)",
        hint=f"as root: systemctl enable --now nvidia-fabricmanager, of the driver's version; {_DOCTOR}",
    ).find,
    Cause(
        kind=Kind.NO_GPU,
        words=(
            r"Found no NVIDIA driver on your system",
            r"No CUDA GPUs are available",
            r"no CUDA-capable device is detected",
            r"nvidia-container-cli: (?:initialization|device|detection) error",
            r"nvml error: driver not loaded",
        ),
        problem="GPUs were asked for, and no driver offers one: {line}",
        hint=f"{_DOCTOR}; without a GPU: --variant cpu",
    ).find,
    other_torch,
)


def diagnose(text: str) -> Diagnosis | None:
    """The first known cause in what a program printed, None if there is none."""
    found = (known(text) for known in _KNOWN)
    return next((diagnosis for diagnosis in found if diagnosis is not None), None)
