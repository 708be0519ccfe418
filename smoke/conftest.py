"""What every smoke test shares: the report, and where the image's own files are."""

import json
import os
import platform
import time
from pathlib import Path

import pytest

#: Where workers take whole files (pytest-xdist): one begins with the longest, the others with tests of one
#: process, which share the cores with its ranks better than more ranks would.
_FIRST, _LAST = ("test_training.py",), ("test_matrix_dsa.py", "test_matrix_mla.py", "test_matrix_model.py")


def pytest_addoption(parser):
    parser.addoption("--smoke-report", default=None, help="write what ran, with measured errors, as JSON")


def pytest_configure(config):
    # A worker's reports reach the process that started it.
    if config.getoption("--smoke-report") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Report(Path(config.getoption("--smoke-report"))))


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: (item.path.name in _LAST) - (item.path.name in _FIRST))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    report.why = ""
    if report.skipped and isinstance(report.longrepr, tuple):
        report.why = report.longrepr[2].removeprefix("Skipped: ")
    elif report.failed:
        lines = [line for line in str(call.excinfo.value).splitlines() if line.strip()]
        # What a rank raised comes as its traceback, of which the last line says what.
        traceback = any(line.startswith("Traceback (most recent call last)") for line in lines)
        report.why = (lines or [call.excinfo.typename])[-1 if traceback else 0][:200]


class _Report:
    """Gathers a line a test, here or from workers, and writes them at the end."""

    def __init__(self, path):
        self.path, self.tests, self.broken = path, [], {}

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            file, _, name = report.nodeid.partition("::")
            self.tests.append(
                {
                    "file": Path(file).name,
                    "name": name,
                    "outcome": report.outcome,
                    "seconds": round(report.duration, 3),
                    "measured": dict(report.user_properties),
                    # A worker that died makes no report of its own.
                    "reason": getattr(report, "why", str(report.longrepr)[:200]),
                }
            )

    def pytest_collectreport(self, report):
        """A file that cannot be imported is a failed line of the report, not a report without lines."""
        if report.failed:
            lines = str(report.longrepr).strip().splitlines() or ["cannot be collected"]
            self.broken[report.nodeid] = {  # every worker tells of it
                "file": Path(report.nodeid).name,
                "name": "import",
                "outcome": "failed",
                "seconds": 0.0,
                "measured": {},
                "reason": lines[-1].removeprefix("E   ")[:400],
            }

    def pytest_sessionfinish(self):
        tests = sorted([*self.broken.values(), *self.tests], key=lambda test: test["file"])
        report = {"where": where(), "time": int(time.time()), "tests": tests}
        self.path.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n", encoding="utf-8")


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
