"""Step `smoke`: run the suite inside the image and show what ran, with the errors it measured."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv32_image.build import built
from dsv32_image.diagnose import diagnose
from dsv32_image.engine import RunRequest
from dsv32_image.errors import EngineError
from dsv32_image.files import temporary_folder, write_atomic
from dsv32_image.identity import image_tag

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dsv32_image.diagnose import Diagnosis
    from dsv32_image.engine import Engine
    from dsv32_image.ui import Ui

REPORT = "smoke-report.json"
DRIVER = Path("/proc/driver/nvidia/version")
_INSIDE = "/opt/dsv32/share/smoke"
# One thread a process: the suite starts several ranks, and more threads only fight for the cores.
ENV = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "NO_VCS_VERSION": "1"}


def run_smoke(
    root: Path, variant: str, engine: Engine | None, words: Sequence[str], ui: Ui, *, gpus: bool | None = None
) -> int:
    """Run pytest over smoke/ in the image (or without a container); its exit code.

    `gpus`: give the container the host's GPUs; None: where an NVIDIA driver answers and the engine can.

    Raises:
        EngineError: The image is not in the engine, or the run wrote no report.
    """
    digest = "none: no container"
    report_path = root / "dist" / f"{variant}.{REPORT}"
    with temporary_folder(root / "build" / variant / "smoke") as folder:
        folder.chmod(0o777)  # the image's user is not this one
        pytest = [
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "--color=yes" if ui.console.is_terminal else "--color=no",
        ]
        if engine is None:
            command = [
                sys.executable,
                *pytest,
                str(root / "smoke"),
                f"--smoke-report={folder / REPORT}",
                *words,
            ]
            code = subprocess.run(command, check=False, cwd=root).returncode
        else:
            tag = image_tag(variant)
            digest = require_own_image(root, variant, engine)
            ui.say(f"  smoke  {tag} in {engine.description}\n{'':>7}  {digest}")
            gpus = _with_gpus(gpus, engine, ui)
            # The whole suite only: one test is looked at without workers between.
            pytest += () if gpus or words else workers()
            request = RunRequest(
                image=tag,
                command=["python", *pytest, _INSIDE, "--smoke-report=/run/smoke/" + REPORT, *words],
                mounts={folder: ("/run/smoke", True)},
                env=ENV,
                gpus=gpus,
            )
            code = engine.run(request)
        written = folder / REPORT
        if not written.exists():
            raise EngineError(
                f"the smoke run ended with code {code} and wrote no report", hint="its output above says why"
            )
        report = {**json.loads(written.read_text()), "image": digest}
        write_atomic(report_path, (json.dumps(report, indent=1, sort_keys=True) + "\n").encode())
        shutil.rmtree(folder, ignore_errors=True)
    show(report, ui)
    for known in causes(report):
        ui.say(f"  cause  {known.problem}\n{'':>7}  next: {known.hint}")
    ui.say(f" report  {report_path.relative_to(root)}")
    return code


def workers() -> tuple[str, ...]:
    """Options by which pytest-xdist runs files beside each other, on CPUs: a GPU's memory is one test's."""
    count = min(4, len(os.sched_getaffinity(0)))
    return () if count == 1 else ("-n", str(count), "--dist", "loadfile", "--no-loadscope-reorder")


def _with_gpus(asked: bool | None, engine: Engine, ui: Ui) -> bool:
    if asked is not None:
        return asked
    there = DRIVER.exists()
    if there and engine.name == "buildah":
        ui.say("  smoke  buildah gives containers no GPU: this is the suite's CPU part (--engine docker)")
        return False
    return there


def _build_hint(variant: str) -> str:
    return f"run `nox -s build -- --variant {variant}`"


def require_image(tag: str, variant: str, engine: Engine) -> str:
    """The engine's id of the image of that tag.

    Raises:
        EngineError: It has none.
    """
    image = engine.image_id(tag)
    if not image:
        raise EngineError(f"{tag} is not in {engine.name}", hint=_build_hint(variant))
    return image


def require_own_image(root: Path, variant: str, engine: Engine) -> str:
    """The manifest digest of the image built in this folder, if the engine's tag is that image.

    Raises:
        EngineError: Nothing was built here, or the tag is another checkout's image or an older one.
    """
    tag, hint = image_tag(variant), _build_hint(variant)
    image, own = require_image(tag, variant, engine), built(root / "dist" / variant)
    # Docker with containerd's store names an image by its manifest, others by its config.
    if own is None or image not in (own.config, own.manifest):
        here = own.config if own else "nothing"
        raise EngineError(f"{tag} in {engine.name} is {image}, built in this folder was {here}", hint=hint)
    return own.manifest


def causes(report: Mapping[str, Any]) -> list[Diagnosis]:
    """The known causes among the reasons of the failed tests, each once."""
    reasons = (test["reason"] for test in report["tests"] if test["outcome"] == "failed")
    return list(dict.fromkeys(known for reason in reasons if (known := diagnose(reason))))


def show(report: Mapping[str, Any], ui: Ui) -> None:
    """The table of what ran, a row a test: its cases by outcome and the largest error of any."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for test in report["tests"]:
        groups.setdefault(f"{test['file']}::{test['name'].split('[')[0]}", []).append(test)
    rows = []
    for name, cases in groups.items():
        seconds = sum(case["seconds"] for case in cases)
        rows.append((name, _outcomes(cases), f"{seconds:.1f}", _largest(cases)))
    ui.table(
        f"smoke: {report['where']}", ("test", "cases", "s", "measured (largest), or why not"), rows, out=True
    )
    print(_outcomes(report["tests"], always=("passed", "failed", "skipped")))


def _outcomes(cases: Sequence[Mapping[str, Any]], always: Sequence[str] = ()) -> str:
    found = [case["outcome"] for case in cases]
    return ", ".join(
        f"{found.count(o)} {o}" for o in ("passed", "failed", "skipped") if o in found or o in always
    )


def _largest(cases: Sequence[Mapping[str, Any]]) -> str:
    reasons = [case["reason"] for case in cases if case["reason"]]
    if reasons:
        return str(reasons[0])
    errors = {
        (value, key) for case in cases for key, value in case["measured"].items() if isinstance(value, float)
    }
    if errors:
        value, key = max(errors)
        return f"{value:.1e} {key}"
    return ", ".join(f"{value} {key}" for case in cases for key, value in case["measured"].items())
