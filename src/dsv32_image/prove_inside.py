"""Runs the tests of a plan of `prove.py` where torch and the packages are: in the image, or a given Python.

A file of its own that needs the standard library and pytest alone: `python prove_inside.py FOLDER`. torch and
what else does not depend on a patch is imported once; each run is a fork of this process.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

# Imported before the forks. None of them may import a package that has a series.
SHARED = ("numpy", "torch", "torch.distributed.checkpoint", "torch.multiprocessing", "scipy.linalg")


def main(folder: Path) -> int:
    """Run the plan in `folder` and write its results there; 0 unless the plan itself cannot be run."""
    plan = json.loads((folder / "plan.json").read_text())
    for name in SHARED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    tests, jobs = plan["whole"]["tests"], plan["jobs"]
    # Tests of one file stay together, for its fixtures; the whole series must pass before a variant may fail.
    files = sorted({test.partition("::")[0] for test in tests}, key=lambda file: -_count(file, tests))
    groups: list[list[str]] = [[] for _ in range(min(jobs, len(files)))]
    for file in files:
        min(groups, key=len).extend(test for test in tests if test.partition("::")[0] == file)
    trees = plan["whole"]["trees"]
    began = time.monotonic()
    parts = _run_all([Run(folder, f"whole-{n}", trees, part, 600.0) for n, part in enumerate(groups)], jobs)
    whole = {name: test for part in parts.values() for name, test in part["tests"].items()}
    _say(f"all patches in: {len(whole)} tests, {time.monotonic() - began:.0f} s")
    runs = []
    for entry in plan["runs"]:
        usual = sum(whole[test]["seconds"] for test in entry["tests"])
        runs.append(Run(folder, entry["name"], entry["trees"], entry["tests"], plan["limit"] + 5 * usual))
    results = {"whole": {"tests": whole}, "runs": _run_all(runs, jobs)}
    temporary = folder / "results.json.new"
    temporary.write_text(json.dumps(results, indent=1))
    temporary.replace(folder / "results.json")
    return 0


def _count(file: str, tests: list[str]) -> int:
    return sum(test.startswith(f"{file}::") for test in tests)


def _say(text: str) -> None:
    sys.stderr.write(f"  prove  {text}\n")
    sys.stderr.flush()


class Run:
    """Tests with some trees first on the path, in a fork of this process."""

    def __init__(self, folder: Path, name: str, trees: list[str], tests: list[str], limit: float) -> None:
        self.name, self.tests, self.limit, self.late = name, tests, limit, False
        self.report, self.log = folder / f"{name}.json", folder / f"{name}.log"
        paths = [str(folder / "trees" / tree) for tree in trees] + [str(folder / "checkout" / "src")]
        words = (folder, paths, tests, self.report, self.log)
        self.process = multiprocessing.get_context("fork").Process(target=_child, args=words)
        self.began = self.seconds = 0.0

    def start(self) -> None:
        """Fork."""
        self.began = time.monotonic()
        self.process.start()

    def ended(self) -> bool:
        """Whether it is over; one that took too long is ended with its ranks."""
        self.seconds = time.monotonic() - self.began
        if self.process.is_alive() and self.seconds > self.limit and self.process.pid is not None:
            self.late = True
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.join()
        return not self.process.is_alive()

    def result(self) -> dict[str, Any]:
        """What each test did, and the seconds of them all."""
        ran = json.loads(self.report.read_text())["tests"] if self.report.exists() else []
        why = f"still running after {self.limit:.0f} s" if self.late else _last_error(self.log)
        tests = {test: _sum_up(test, ran, why, self.seconds) for test in self.tests}
        return {"tests": tests, "seconds": self.seconds}


def _run_all(runs: list[Run], jobs: int) -> dict[str, dict[str, Any]]:
    """Results by name, up to `jobs` at once. No threads: a fork of a process with threads may hang."""
    waiting = list(reversed(runs))
    active: list[Run] = []
    results: dict[str, dict[str, Any]] = {}
    while waiting or active:
        while waiting and len(active) < jobs:
            active.append(waiting.pop())
            active[-1].start()
        multiprocessing.connection.wait([run.process.sentinel for run in active], timeout=1.0)
        for run in [run for run in active if run.ended()]:
            active.remove(run)
            results[run.name] = result = run.result()
            said = ", ".join(sorted({test["result"] for test in result["tests"].values()}))
            _say(f"{run.name}: {said}, {run.seconds:.0f} s")
    return results


def _child(folder: Path, paths: list[str], tests: list[str], report: Path, log: Path) -> None:
    os.setpgid(0, 0)  # so that ranks end with it
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    checkout = folder / "checkout"
    os.chdir(checkout)
    sys.path[:0] = paths
    importlib.invalidate_caches()
    # Ranks are new processes, which read the path from here.
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    if not report.name.startswith("whole-"):
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    # One failure proves a patch with one test; with more, each has to be seen.
    first = ["-x"] if len(tests) == 1 and not report.name.startswith("whole-") else []
    words = ["-q", "-p", "no:cacheprovider", "--color=no", f"--rootdir={checkout}", *first]
    code = pytest.main([*words, f"--smoke-report={report}", *tests])
    sys.stdout.flush()
    os._exit(int(code))


def _last_error(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    errors = [line[1:].strip() for line in lines if line.startswith("E  ")]
    return (errors or [line for line in lines if line.strip()] or ["no output"])[-1][:200]


def _sum_up(test: str, ran: list[dict[str, Any]], why: str, seconds: float) -> dict[str, Any]:
    """The outcome of a named test from those of its cases; a test that never ran has failed."""
    file, _, name = test.partition("::")
    cases = [
        case
        for case in ran
        if case["file"] == Path(file).name and name in (case["name"], case["name"].partition("[")[0])
    ]
    took = sum(case["seconds"] for case in cases)
    if not cases:
        return {"result": "failed", "seconds": seconds, "reason": why}
    for result in ("failed", "passed", "skipped"):
        some = [case for case in cases if case["outcome"] == result]
        if some:
            return {"result": result, "seconds": took, "reason": some[0]["reason"]}
    raise AssertionError(f"unknown outcomes of {test}: {cases}")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
