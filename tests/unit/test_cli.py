"""The command line: messages, exit codes, and that nothing half-made is left."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from config_samples import MINIMAL

from dsv32_image import cli, errors
from dsv32_image.files import only_one
from dsv32_image.lockfile import Dist
from dsv32_image.smoke_step import require_own_image, show
from dsv32_image.store import Store
from dsv32_image.ui import Ui

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A small project folder with patches/ and nothing locked."""
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "0"\n' + MINIMAL)
    series = tmp_path / "patches" / "einops"
    series.mkdir(parents=True)
    (series / "series").write_text("")
    monkeypatch.setenv("DSV32_ROOT", str(tmp_path))
    monkeypatch.setenv("DSV32_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_each_error_class_has_an_exit_code_of_its_own():
    found = [value for value in vars(errors).values() if isinstance(value, type)]
    codes = {value.__name__: value.exit_code for value in found if value is not errors.ImageError}
    assert len(set(codes.values())) == len(codes)
    assert 0 not in codes.values() and 1 not in codes.values()


def test_an_error_is_shown_on_few_lines_without_a_traceback(project, capsys):
    assert cli.main(["fetch", "--variant", "cpu"]) == errors.LockMissingError.exit_code
    shown = capsys.readouterr().err
    assert shown.startswith("error: no versions.lock")
    assert "next: `git checkout versions.lock`" in shown
    assert "Traceback" not in shown
    assert len(shown.splitlines()) <= 4


def test_verbose_raises_for_a_traceback(project):
    with pytest.raises(errors.LockMissingError):
        cli.main(["fetch", "--variant", "cpu", "--verbose"])


def test_a_look_at_the_lock_moves_nothing(project, capsys):
    assert cli.main(["lock", "--check", "--upgrade", "einops"]) == errors.UsageError.exit_code
    assert "next: nox -s lock -- --upgrade" in capsys.readouterr().err


def test_a_patch_that_names_no_test_is_refused_before_it_is_locked(project, capsys):
    (project / "smoke").mkdir()
    (project / "patches/einops/series").write_text("0001-x.patch\n")
    (project / "patches/einops/0001-x.patch").write_text(
        "X\n\nUpstream: none\nWhy: x\nDrop-when: x\nTest: smoke/nosuch.py::test_x\n\n"
        "--- a/einops/x.py\n+++ b/einops/x.py\n@@ -1,1 +1,1 @@\n-a\n+b\n"
    )
    assert cli.main(["lock"]) == errors.PatchError.exit_code
    assert "Test: names smoke/nosuch.py::test_x, which does not exist" in capsys.readouterr().err


def test_proof_is_asked_for_packages_with_a_series_before_any_engine(project, monkeypatch, capsys):
    monkeypatch.setattr(cli.engines, "choose", lambda *_: pytest.fail("an engine was looked for"))
    assert cli.main(["patch", "prove", "nosuch"]) == errors.UsageError.exit_code
    assert "known: einops" in capsys.readouterr().err


def test_unknown_variant(project, capsys):
    assert cli.main(["build", "--variant", "rocm"]) == errors.UsageError.exit_code
    assert "rocm" in capsys.readouterr().err


def test_an_architecture_where_nothing_is_compiled_is_refused(project, capsys):
    assert cli.main(["build", "--variant", "cpu", "--arch", "9.0"]) == errors.UsageError.exit_code
    assert "compiles nothing for a GPU" in capsys.readouterr().err


def test_an_architecture_of_another_notation_is_refused(project, capsys):
    path = project / "pyproject.toml"
    path.write_text(path.read_text().replace('summary = "small"', 'summary = "small"\ncuda-archs = ["9.0"]'))
    assert cli.main(["build", "--variant", "cpu", "--arch", "sm_90"]) == errors.UsageError.exit_code
    assert "--arch 9.0" in capsys.readouterr().err


def test_unknown_engine(project, capsys):
    assert cli.main(["build", "--variant", "cpu", "--engine", "rkt"]) == errors.UsageError.exit_code
    assert "docker, podman, buildah" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message", "step"),
    [
        ("build --varant cpu", "build: no such option: --varant; did you mean --variant?", "build -- --help"),
        ("build --colour red", "build: no such option: --colour", "build -- --help"),
        ("build --jobs few", "build: invalid value for '--jobs'", "build -- --help"),
        ("build --jobs -1", "build: invalid value for '--jobs'", "build -- --help"),
        ("patch edit", "patch edit: missing argument 'package'", "patch -- edit --help"),
        ("patch edt pkg", "patch: no such command 'edt'. Did you mean 'edit'?", "patch -- --help"),
        ("bild", "no such command 'bild'. Did you mean 'build'?", "nox -l"),
        ("build --variant", "option '--variant' requires an argument", "--help"),
    ],
)
def test_a_command_line_that_cannot_be_understood_is_an_error_like_any_other(capsys, words, message, step):
    assert cli.main(words.split()) == errors.UsageError.exit_code
    said, next_step = capsys.readouterr().err.splitlines()
    assert said.startswith(f"error: {message}")
    assert next_step.startswith("  next: ") and step in next_step


def test_without_words_the_help_is_shown(capsys):
    assert cli.main([]) == errors.UsageError.exit_code
    shown = "".join(capsys.readouterr())
    assert "Usage" in shown and "build" in shown and "error:" not in shown


def test_a_stopped_step_says_that_what_was_finished_stays(project, monkeypatch, capsys):
    def stopped(root):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "read_lock", stopped)
    assert cli.main(["fetch", "--variant", "cpu"]) == 130
    assert "what was finished stays" in capsys.readouterr().err


def test_lock_check_is_quiet_when_fresh_and_a_table_when_stale(tmp_path, monkeypatch, capsys):
    for name in ("pyproject.toml", "versions.lock"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "patches", tmp_path / "patches")
    monkeypatch.setenv("DSV32_ROOT", str(tmp_path))
    cli.main(["lock"])  # takes up patch series, offline
    assert cli.main(["lock", "--check"]) == 0
    (tmp_path / "patches" / "megatron-core" / "series").write_text("")
    for path in (tmp_path / "patches" / "megatron-core").glob("*.patch"):
        path.unlink()
    capsys.readouterr()
    assert cli.main(["lock", "--check"]) == 1
    assert "patches/megatron-core" in capsys.readouterr().out


def test_a_stale_lock_stops_a_build_before_any_work(tmp_path, monkeypatch, capsys):
    for name in ("pyproject.toml", "versions.lock"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "patches", tmp_path / "patches")
    text = (tmp_path / "pyproject.toml").read_text()
    (tmp_path / "pyproject.toml").write_text(text.replace('"einops", ', ""))
    monkeypatch.setenv("DSV32_ROOT", str(tmp_path))
    monkeypatch.setattr(cli.engines, "choose", lambda *_: object())
    assert cli.main(["build", "--variant", "cpu"]) == errors.LockStaleError.exit_code
    assert "nox -s lock" in capsys.readouterr().err
    assert not (tmp_path / "dist").exists()


def test_two_builds_at_once_the_second_says_who_is_first(project, monkeypatch, capsys):
    monkeypatch.setattr(cli.engines, "choose", lambda *_: object())
    with only_one(project / "build" / "cpu" / "lock"):
        assert cli.main(["build", "--variant", "cpu"]) == errors.BusyError.exit_code
    assert "another build runs in this folder (process" in capsys.readouterr().err


def test_a_killed_build_leaves_no_lock_behind(tmp_path):
    path = tmp_path / "lock"
    script = (
        "import os, sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path; from dsv32_image.files import only_one\n"
        "with only_one(Path(sys.argv[2])):\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(ROOT / "src"), str(path)], check=False)
    assert done.returncode == -9
    with only_one(path):
        pass


def test_patch_of_an_unlocked_package_is_named(project, capsys):
    shutil.copy(ROOT / "versions.lock", project)
    assert cli.main(["patch", "edit", "einopz"]) != 0
    assert "einopz" in capsys.readouterr().err


def test_the_report_table_counts_cases_and_shows_the_largest_error(capsys):
    case = {"file": "test_x.py", "outcome": "passed", "seconds": 1.0, "reason": ""}
    tests = [
        {**case, "name": "test_a[1]", "measured": {"out": 1e-7}},
        {**case, "name": "test_a[2]", "measured": {"out": 3e-7}},
        {**case, "name": "test_b", "measured": {}, "outcome": "skipped", "reason": "no GPU here"},
    ]
    show(json.loads(json.dumps({"where": "here", "tests": tests})), Ui())
    shown = capsys.readouterr().out
    assert "2 passed" in shown and "3.0e-07 out" in shown and "no GPU here" in shown
    assert shown.splitlines()[-1] == "2 passed, 0 failed, 1 skipped"


class FakeEngine:
    """An engine that holds one image."""

    name = "docker"

    def __init__(self, image):
        self.image = image

    def image_id(self, tag):
        return self.image


def test_smoke_refuses_an_image_that_was_not_built_here(tmp_path):
    (tmp_path / "dist").mkdir()
    note = tmp_path / "dist" / "cpu.json"
    with pytest.raises(errors.EngineError, match="is not in docker"):
        require_own_image(tmp_path, "cpu", FakeEngine(""))
    with pytest.raises(errors.EngineError, match="built in this folder was nothing"):
        require_own_image(tmp_path, "cpu", FakeEngine("sha256:old"))
    note.write_text(json.dumps({"key": "k", "manifest": "sha256:m", "config": "sha256:c"}))
    with pytest.raises(errors.EngineError, match="sha256:old") as caught:
        require_own_image(tmp_path, "cpu", FakeEngine("sha256:old"))
    assert "nox -s build" in caught.value.hint
    assert require_own_image(tmp_path, "cpu", FakeEngine("sha256:c")) == "sha256:m"


def test_clean_waits_for_no_build_and_takes_nothing_from_one(project, capsys):
    with only_one(project / "build" / "cpu" / "lock"):
        assert cli.main(["clean"]) == errors.BusyError.exit_code
    assert (project / "build" / "cpu" / "lock").exists()
    assert cli.main(["clean"]) == 0
    assert not (project / "build").exists()


def test_a_file_that_cannot_be_read_is_no_traceback(project, monkeypatch, capsys):
    def denied(root):
        raise PermissionError(13, "Permission denied", "/cache/x")

    monkeypatch.setattr(cli, "read_lock", denied)
    assert cli.main(["fetch", "--variant", "cpu"]) == errors.FileAccessError.exit_code
    assert "/cache/x: Permission denied" in capsys.readouterr().err


def test_names_without_upgrade_move_nothing(project, capsys):
    assert cli.main(["lock", "einops"]) == errors.UsageError.exit_code
    assert "--upgrade einops" in capsys.readouterr().err


def test_lock_refuses_a_series_with_a_patch_that_lacks_its_header(project, capsys):
    series = project / "patches" / "einops"
    (series / "series").write_text("0001-x.patch\n")
    (series / "0001-x.patch").write_text("Why: because\n\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n")
    assert cli.main(["lock"]) == errors.PatchError.exit_code
    assert "0001-x.patch" in capsys.readouterr().err
    assert not (project / "versions.lock").exists()


def test_a_damaged_file_of_the_right_size_is_dropped_and_named(tmp_path):
    store = Store(tmp_path)
    good = hashlib.sha256(b"good").hexdigest()
    item = Dist(name="a", version="1", file="a-1.whl", size=4, sha256=good)
    store.path(good).parent.mkdir(parents=True)
    store.path(good).write_bytes(b"evil")
    assert store.drop_damaged([item]) == ["a-1.whl"]
    assert store.missing([item]) == [item]
    store.path(good).write_bytes(b"good")
    assert store.drop_damaged([item]) == []
