"""How a GPU gets into a container: NVIDIA's container toolkit for docker, CDI specifications for podman."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsv32_image.doctor import nvidia
from dsv32_image.doctor.engine_checks import engine_in_use
from dsv32_image.doctor.probe import Finding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsv32_image.doctor.probe import Asked, Probe, Status

# The engines' own search path, the folder that wins first (CDI: later folders override earlier ones).
CDI_FOLDERS = ("/var/run/cdi", "/etc/cdi")
_INSTALL = (
    "install nvidia-container-toolkit (NVIDIA's guide: "
    "https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/install-guide.html)"
)

_DOCKER_WITHOUT = "`docker run --gpus all` ends with `could not select device driver`"


@dataclass(frozen=True, kw_only=True)
class CdiSpec:
    """What we use of a CDI specification: device names, and host files that it mounts."""

    path: str
    devices: frozenset[str]
    nodes: Sequence[str]
    libraries: Sequence[str]


def check_toolkit(probe: Probe, asked: Asked) -> Finding | None:
    """NVIDIA's container toolkit, which docker's `--gpus` needs and which writes CDI specifications."""
    if not asked.gpu:
        return None
    engine = engine_in_use(probe, asked)
    docker = engine is not None and engine.name == "docker"
    answer = probe.run("nvidia-ctk", "--version")
    if not answer.ok:
        return Finding(
            check="toolkit",
            status="fail" if docker else "warn",
            detail="nvidia-ctk is not there: "
            + (_DOCKER_WITHOUT if docker else "it writes CDI specifications"),
            fix=_INSTALL + ("; then nvidia-ctk runtime configure --runtime=docker" if docker else ""),
        )
    found = re.search(r"version (\S+)", answer.out)
    version = found[1] if found else "of unknown version"
    if not docker or engine is None:
        return Finding(check="toolkit", status="pass", detail=version)
    runtimes = probe.run(engine.program, "info", "--format", "{{json .Runtimes}}")
    if runtimes.ok and "nvidia" not in _names(runtimes.out):
        return Finding(
            check="toolkit",
            status="warn",
            detail=f"{version}, but docker does not know the runtime `nvidia`",
            fix="as root: nvidia-ctk runtime configure --runtime=docker && systemctl restart docker",
        )
    return Finding(check="toolkit", status="pass", detail=f"{version}, and docker knows its runtime")


def _names(text: str) -> Sequence[str]:
    try:
        table = json.loads(text)
    except ValueError:
        return ()
    return tuple(table) if isinstance(table, dict) else ()


def read_specs(probe: Probe) -> list[list[CdiSpec]]:
    """The specifications for nvidia.com/gpu, a list a folder that has any, the folder that wins first."""
    found = []
    for folder in CDI_FOLDERS:
        paths = [f"{folder}/{n}" for n in probe.list(folder) if n.endswith((".yaml", ".yml", ".json"))]
        specs = [parse_spec(path, probe.read(path) or "") for path in paths]
        if here := [spec for spec in specs if spec is not None]:
            found.append(here)
    return found


def parse_spec(path: str, text: str) -> CdiSpec | None:
    """Read a specification, YAML or JSON alike: only the values of three keys matter. None: another kind."""
    if "nvidia.com/gpu" not in _values(text, "kind"):
        return None
    hosts = _values(text, "hostPath")
    return CdiSpec(
        path=path,
        devices=frozenset(_values(text, "name")),
        nodes=[p for p in (*_values(text, "path"), *hosts) if re.fullmatch(r"/dev/nvidia\d+", p)],
        libraries=[p for p in hosts if ".so" in p.rpartition("/")[2]],
    )


def _values(text: str, key: str) -> list[str]:
    pattern = rf"""(?:^|[\s{{,-])["']?{key}["']?\s*:\s*["']?([^\s"',}}]+)"""
    return re.findall(pattern, text)


def check_cdi(probe: Probe, asked: Asked) -> Finding | None:
    """A CDI specification that fits driver and GPUs. Podman needs it; docker only with `--device`."""
    if not asked.gpu:
        return None
    engine = engine_in_use(probe, asked)
    needed = engine is not None and engine.name == "podman"
    bad: Status = "fail" if needed else "warn"
    folders = read_specs(probe)
    write = "as root: nvidia-ctk cdi generate --output="
    if not folders:
        if engine is not None and engine.name == "docker":
            return Finding(check="cdi", status="pass", detail="no specification; docker's --gpus needs none")
        detail = f"no specification for nvidia.com/gpu in {' or '.join(CDI_FOLDERS)}"
        return Finding(check="cdi", status=bad, detail=detail, fix=f"{write}/etc/cdi/nvidia.yaml")
    winners = folders[0]
    if len(winners) > 1:
        names = ", ".join(spec.path for spec in winners)
        fix = "remove all but one of them: names that two of one folder define cannot be resolved"
        return Finding(check="cdi", status=bad, detail=f"several specifications: {names}", fix=fix)
    spec = winners[0]
    problems = spec_problems(probe, spec)
    if not problems:
        detail = f"{spec.path}: fits the driver and {len(nvidia.gpus(probe))} GPU(s)"
        return Finding(check="cdi", status="pass", detail=detail)
    fix = f"{write}{spec.path} (after every change of driver or GPUs; nvidia-cdi-refresh.service does it)"
    return Finding(check="cdi", status=bad, detail=f"{spec.path} is stale: {'; '.join(problems)}", fix=fix)


def spec_problems(probe: Probe, spec: CdiSpec) -> list[str]:
    """In what a specification does not fit this host."""
    problems = []
    if "all" not in spec.devices:
        problems.append("no device `all`")
    absent = [g.index for g in nvidia.gpus(probe) if not {str(g.index), g.uuid} & spec.devices]
    if absent:
        problems.append(f"it does not list GPU {', '.join(map(str, absent))}")
    if gone := sorted({path for path in spec.nodes if not probe.exists(path)}):
        problems.append(f"{gone[0]} is not there" + (f" ({len(gone)} in all)" if len(gone) > 1 else ""))
    driver = nvidia.driver_version(probe)
    versions = {v[1] for p in spec.libraries if (v := re.search(r"/libcuda\.so\.(\d+(?:\.\d+)+)$", p))}
    if driver and versions and driver not in versions:
        problems.append(f"it is for driver {', '.join(sorted(versions))}, loaded is {driver}")
    if lost := sorted({path for path in spec.libraries if not probe.exists(path)}):
        problems.append(f"{lost[0]} is not there" + (f" ({len(lost)} in all)" if len(lost) > 1 else ""))
    return problems
