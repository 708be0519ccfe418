"""What every smoke test shares: the report, and where the image's own files are."""

import json
import os
import platform
import time
from pathlib import Path

import pytest

_REPORT = pytest.StashKey[list]()


def pytest_addoption(parser):
    parser.addoption("--smoke-report", default=None, help="write what ran, with measured errors, as JSON")


def pytest_configure(config):
    config.stash[_REPORT] = []


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
        reason = ""
        if report.skipped and isinstance(report.longrepr, tuple):
            reason = report.longrepr[2].removeprefix("Skipped: ")
        elif report.failed:
            lines = [line for line in str(call.excinfo.value).splitlines() if line.strip()]
            # What a rank raised comes as its traceback, of which the last line says what.
            traceback = any(line.startswith("Traceback (most recent call last)") for line in lines)
            reason = (lines or [call.excinfo.typename])[-1 if traceback else 0][:200]
        item.config.stash[_REPORT].append(
            {
                "file": item.path.name,
                "name": item.name,
                "outcome": report.outcome,
                "seconds": round(report.duration, 3),
                "measured": dict(report.user_properties),
                "reason": reason,
            }
        )


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector):
    """A file that cannot be imported is a failed line of the report, not a report without lines."""
    outcome = yield
    report = outcome.get_result()
    if report.failed:
        lines = str(report.longrepr).strip().splitlines() or ["cannot be collected"]
        collector.config.stash[_REPORT].append(
            {
                "file": getattr(collector, "path", Path(collector.name)).name,
                "name": "import",
                "outcome": "failed",
                "seconds": 0.0,
                "measured": {},
                "reason": lines[-1].removeprefix("E   ")[:400],
            }
        )


def pytest_sessionfinish(session):
    path = session.config.getoption("--smoke-report")
    if path:
        report = {"where": where(), "time": int(time.time()), "tests": session.config.stash[_REPORT]}
        Path(path).write_text(json.dumps(report, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def where():
    """One line on where the suite runs."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    inside = "image" if SHARE.exists() else "no container"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{inside}, {versions}, {device}, uid {os.getuid()}"


@pytest.fixture
def cpu_only(monkeypatch):
    """Hide the GPU from Megatron, which moves rotary tables there whatever device the model is on."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


SHARE = Path("/opt/dsv32/share")


@pytest.fixture(scope="session")
def image_share():
    """The image's own folder; tests of what the image says of itself make sense only there."""
    if not (SHARE / "build.json").exists():
        pytest.skip("not inside the image: /opt/dsv32/share/build.json is missing")
    return SHARE
