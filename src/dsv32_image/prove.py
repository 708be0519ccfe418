"""`nox -s patch -- prove`: every patch is taken out in turn, and its test must then fail.

The series of the working tree are applied in memory, once whole and once without each patch, and laid beside
each other in one folder: the whole packages as files, each variant as links to them with its own few files.
Tests, `src/dsv32` and scripts are copied there, too. Python finds all of it by PYTHONPATH before what is
installed, so a patch is proved before an image with it is built; the image gives the interpreter and the
other packages. `prove_inside.py` runs the tests there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from dsv32_image.archives import read_archive, write_files
from dsv32_image.engine import RunRequest
from dsv32_image.errors import EngineError, PatchError, UsageError, WheelError
from dsv32_image.files import temporary_folder
from dsv32_image.patch_tests import tests_of
from dsv32_image.patching import FileState, Patch, plan_series, read_series
from dsv32_image.sdist_build import build_sdist
from dsv32_image.smoke_step import ENV
from dsv32_image.wheels import FORMAT_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from dsv32_image.engine import Engine
    from dsv32_image.ui import Ui

INSIDE = "/run/prove"
PLAN, RESULTS = "plan.json", "results.json"
# Bytecode is checked by seconds and size: files of a variant must never look like those of the whole series.
_WHOLE_TIME, _VARIANT_TIME = 1_000_000_000, 1_100_000_000


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A package without one patch (`patch` is empty: with all of them).

    Attributes:
        package: Folder under `patches/`.
        patch: File name of the patch that is out.
        tests: Node ids that its header names, relative to the checkout.
        also_out: Later patches that do not apply without it.
        files: The package's files, by path below the import root; empty where `broken` says why.
        broken: Why the package cannot be made without the patch.
    """

    package: str
    patch: str
    tests: tuple[str, ...]
    also_out: tuple[str, ...] = ()
    files: Mapping[str, FileState]
    broken: str = ""

    @property
    def name(self) -> str:
        """Of its folder and in the plan."""
        return f"{self.package}-{PurePosixPath(self.patch).stem if self.patch else 'whole'}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a test did: passed, failed or skipped, with the reason of the last two."""

    result: str
    seconds: float
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """One row: `answer` is "yes", "no", or "not here" where none of the tests can run on this machine."""

    package: str
    patch: str
    tests: tuple[str, ...]
    answer: str
    seconds: float
    remark: str


def without(
    files: Mapping[str, FileState], patches: Sequence[Patch], out: int
) -> tuple[dict[str, FileState], tuple[str, ...]]:
    """The files after a series without patch number `out`, and the later patches that do not apply then.

    Later hunks may sit at other lines, where their old lines occur once only.

    Raises:
        PatchError: A patch before it does not apply.
    """
    tree: dict[str, FileState | None] = dict(files)
    also: list[str] = []
    for number, patch in enumerate(patches):
        if number == out:
            continue
        try:
            tree.update(plan_series(tree.get, [patch], allow_offset=number > out).changes)
        except PatchError:
            if number < out:
                raise
            also.append(patch.name)
    return {path: state for path, state in tree.items() if state is not None}, tuple(also)


def variants_of(package: str, series: Path, source: Path, checkout: Path) -> list[Variant]:
    """The package with its whole series, then without each patch in turn.

    Raises:
        PatchError: The series is malformed or does not apply, or a header names no test.
        WheelError: The source is damaged, or cannot be built with the whole series.
    """
    patches = read_series(series)
    tests = [tests_of(patch, checkout) for patch in patches]
    files = read_archive(source)
    is_sdist = not zipfile.is_zipfile(source)
    metadata = any(".dist-info/" in file.path for patch in patches for file in patch.files)

    def make(tree: dict[str, FileState]) -> dict[str, FileState]:
        tree = build_sdist(tree, source, FORMAT_VERSION) if is_sdist else tree
        # The image's own metadata stay in force, with the version that tells of the patches.
        return {name: state for name, state in tree.items() if metadata or ".dist-info/" not in name}

    whole, _ = without(files, patches, len(patches))
    named = tuple(dict.fromkeys(test for group in tests for test in group))
    made = [Variant(package=package, patch="", tests=named, files=make(whole))]
    for number, patch in enumerate(patches):
        tree, also = without(files, patches, number)
        broken, content = "", {}
        try:
            content = make(tree)
        except WheelError as error:
            broken = error.message.rpartition(": ")[2]
        made.append(
            Variant(
                package=package,
                patch=patch.name,
                tests=tests[number],
                also_out=also,
                files=content,
                broken=broken,
            )
        )
    return made


def write_whole(files: Mapping[str, FileState], folder: Path) -> None:
    """Unpack the whole package; its folders may be written by anyone, so that bytecode is kept there."""
    folder.mkdir(parents=True)
    write_files(files, folder)
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            path.chmod(0o777)
        else:
            os.utime(path, (_WHOLE_TIME, _WHOLE_TIME))


def write_variant(
    files: Mapping[str, FileState], whole: Mapping[str, FileState], base: Path, folder: Path
) -> None:
    """Lay out a variant: links to `base`, where `whole` is, but for files that differ and their folders."""
    differ = {name for name in {*files, *whole} if files.get(name) != whole.get(name)}
    own = {PurePosixPath(), *(parent for name in differ for parent in PurePosixPath(name).parents)}
    for name in sorted({*files, *differ}):
        path = PurePosixPath(name)
        top = next(part for part in (*reversed(path.parents), path) if part not in own)
        target = folder / top
        target.parent.mkdir(parents=True, exist_ok=True)
        if name not in differ:
            if not target.is_symlink():
                target.symlink_to(os.path.relpath(base / top, target.parent))
        elif name in files:
            target.write_bytes(files[name].data)
            os.utime(target, (_VARIANT_TIME, _VARIANT_TIME))
    for parent in own:
        cache = folder / parent / "__pycache__"
        if cache.parent.is_dir() and (base / parent).is_dir():
            cache.symlink_to(os.path.relpath(base / parent / "__pycache__", cache.parent))


def lay_out(folder: Path, checkout: Path, variants: Sequence[Variant], jobs: int, limit: float) -> None:
    """Write trees, a copy of the checkout's own code and the plan into `folder`."""
    for name in ("smoke", "scripts", "src/dsv32"):
        shutil.copytree(
            checkout / name, folder / "checkout" / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(Path(__file__).with_name("prove_inside.py"), folder)
    wholes = {variant.package: variant for variant in variants if not variant.patch}
    for whole in wholes.values():
        write_whole(whole.files, folder / "trees" / whole.name)
    runs = []
    for variant in variants:
        if variant.patch and not variant.broken:
            base = wholes[variant.package]
            target = folder / "trees" / variant.name
            write_variant(variant.files, base.files, folder / "trees" / base.name, target)
            others = [whole.name for whole in wholes.values() if whole.package != variant.package]
            runs.append(
                {"name": variant.name, "trees": [variant.name, *others], "tests": list(variant.tests)}
            )
    named = dict.fromkeys(test for variant in variants if variant.patch for test in variant.tests)
    plan = {
        "whole": {"trees": [whole.name for whole in wholes.values()], "tests": list(named)},
        "runs": runs,
        "jobs": jobs,
        "limit": limit,
    }
    (folder / PLAN).write_text(json.dumps(plan, indent=1))
    for path in (folder, *folder.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o777)
        elif not path.is_symlink():
            path.chmod(0o666)


def judge(
    variant: Variant, before: Mapping[str, Outcome], after: Mapping[str, Outcome], seconds: float
) -> Proof:
    """Does every test of a patch fail without it, and pass with it?"""
    notes = [f"also out: {', '.join(variant.also_out)}"] if variant.also_out else []
    answers = []
    if variant.broken:
        answers.append("yes")
        notes.insert(0, f"the package cannot be built: {variant.broken}")
    for test in variant.tests if not variant.broken else ():
        name = test.rpartition("::")[2]
        one, two = before.get(test), after.get(test)
        if one is None or one.result == "failed":
            answers.append("no")
            notes.append(f"{name} fails with all patches in: {one.reason if one else 'it did not run'}")
        elif one.result == "skipped":
            notes.append(f"{name} does not run here: {one.reason}")
        elif two is None or two.result == "failed":
            answers.append("yes")
            notes.append(two.reason[:120] if two else "it did not run")
        else:
            answers.append("no")
            notes.append(f"{name} {two.result}")
    answer = "no" if "no" in answers else "yes" if answers else "not here"
    return Proof(
        package=variant.package,
        patch=variant.patch,
        tests=variant.tests,
        answer=answer,
        seconds=seconds,
        remark="; ".join(notes),
    )


def require_series(checkout: Path, packages: Sequence[str]) -> dict[str, Path]:
    """The folders under `patches/` by package.

    Raises:
        UsageError: One of the packages has none.
    """
    series = {path.parent.name: path.parent for path in sorted(checkout.glob("patches/*/series"))}
    for package in packages:
        if package not in series:
            raise UsageError(f"there is no {checkout / 'patches' / package}", f"known: {', '.join(series)}")
    return series


def prove(
    checkout: Path,
    packages: Sequence[str],
    find_source: Callable[[str], Path],
    run: Callable[[Path], int],
    *,
    jobs: int,
    limit: float = 60.0,
    absent: Collection[str] = (),
) -> list[Proof]:
    """One row a patch of the packages, or of all that have a series.

    Args:
        checkout: The folder with `patches/`, `smoke/` and `src/`.
        packages: Folders under `patches/`; empty: all.
        find_source: Gives the locked wheel or sdist of a package.
        run: Runs `prove_inside.py` on a laid-out folder and returns its exit code.
        jobs: Test runs at once.
        limit: Seconds that a run may take beyond five times those of the whole series; ranks that wait for
            each other are how some defects show.
        absent: Packages that are not where the tests run; their patches cannot be tried there.

    Raises:
        UsageError: No such folder under `patches/`.
        EngineError: The run wrote no results.
    """
    series = require_series(checkout, packages)
    asked = set(packages or series) - set(absent)
    # Those not asked about are laid out whole: an image may hold an older series.
    variants = [
        variant
        for name, folder in series.items()
        if name not in absent
        for variant in variants_of(name, folder, find_source(name), checkout)
        if name in asked or not variant.patch
    ]
    with temporary_folder(checkout / "build" / "prove") as folder:
        lay_out(folder, checkout, variants, jobs, limit)
        code = run(folder)
        written = folder / RESULTS
        if not written.exists():
            raise EngineError(
                f"the tests ended with code {code} and gave no results", hint="its output above says why"
            )
        results = json.loads(written.read_text())
        shutil.rmtree(folder, ignore_errors=True)
    before = _outcomes(results["whole"]["tests"])
    rows = [
        Proof(
            package=name,
            patch=patch.name,
            tests=tests_of(patch, checkout),
            answer="not here",
            seconds=0.0,
            remark="the package is not in this image",
        )
        for name in series
        if name in absent and name in (packages or series)
        for patch in read_series(series[name])
    ]
    for variant in variants:
        if variant.patch:
            got = results["runs"].get(variant.name, {"tests": {}, "seconds": 0.0})
            rows.append(judge(variant, before, _outcomes(got["tests"]), got["seconds"]))
    return rows


def _outcomes(tests: Mapping[str, Mapping[str, object]]) -> dict[str, Outcome]:
    return {
        name: Outcome(
            result=str(test["result"]), seconds=float(str(test["seconds"])), reason=str(test["reason"])
        )
        for name, test in tests.items()
    }


def run_in_image(engine: Engine, image: str) -> Callable[[Path], int]:
    """How to run a laid-out folder in an image."""

    def run(folder: Path) -> int:
        command = ["python", f"{INSIDE}/prove_inside.py", INSIDE]
        request = RunRequest(image=image, command=command, mounts={folder: (INSIDE, True)}, env=ENV)
        return engine.run(request)

    return run


def run_in_python(python: str) -> Callable[[Path], int]:
    """How to run a laid-out folder in a Python of this machine that has torch and the packages."""

    def run(folder: Path) -> int:
        command = [python, str(folder / "prove_inside.py"), str(folder)]
        return subprocess.run(command, check=False, env={**os.environ, **ENV}).returncode

    return run


def show(rows: Sequence[Proof], ui: Ui) -> None:
    """The table, a row a patch, and its counts."""
    ui.table(
        "patches, each taken out in turn",
        ("package", "patch", "tests", "fails without", "s", "how"),
        (
            (
                row.package,
                row.patch,
                "\n".join(test.removeprefix("smoke/") for test in row.tests),
                row.answer,
                f"{row.seconds:.0f}",
                row.remark,
            )
            for row in rows
        ),
        out=True,
    )
    answers = [row.answer for row in rows]
    print(
        f"of {len(rows)} patches {answers.count('yes')} have tests that fail without them, "
        f"{answers.count('no')} have not, {answers.count('not here')} cannot be tried here"
    )
