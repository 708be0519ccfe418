"""`lock --megatron`: pyproject.toml, the lock, tags that move, and what is compiled and patched of it."""

import hashlib
import json
import tomllib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from config_samples import MINIMAL
from git_samples import ENV, Upstream
from patch_samples import EDIT, MODULE, make_wheel, wheel_files, write_series
from test_resolve import Index

from dsv32_image import cli, errors, git_archive, git_pin, resolve_debs
from dsv32_image.compiled import CompiledWheels, CompileJob, compile_context, compile_jobs
from dsv32_image.config import load_config
from dsv32_image.context import compiled_wheels, patched_wheels
from dsv32_image.errors import ConfigError, ResolveError, WheelError
from dsv32_image.layers import LayerPlan
from dsv32_image.lock import make_lock
from dsv32_image.lockfile import Deb, GitDist, LayerLock, Lock, read_lock, render, write_lock
from dsv32_image.store import Store
from dsv32_image.ui import Ui

TABLE = MINIMAL.replace(
    "[tool.dsv32-image.variants.cpu]",
    """[tool.dsv32-image.tools]
compile = ["setuptools", "pybind11", "packaging"]
compile-debs = ["g++"]
[tool.dsv32-image.compile.megatron-core]
NO_VCS_VERSION = "1"
[tool.dsv32-image.variants.cpu]""",
)
TABLE += """
[[tool.dsv32-image.variants.cpu.layers]]
name = "megatron"                       # "megatron-core==0.19.2" is the release
wheels = ['megatron-core==0.19.2',      # last in its line
          "einops"]
"""
PATCH = EDIT.replace(b"pkg/mod.py", b"megatron/core/mod.py")
SHIFTED = b"# one\n# two\n" + MODULE
BROKEN = MODULE.replace(b"line 5\n", b"line V\n")


def a_deb(name, version="1"):
    return Deb(
        name=name, version=version, arch="amd64", archive="debian", path=f"{name}.deb", size=1, sha256=name
    )


class Project:
    """A project folder with one patch for megatron-core, an index on loopback, an upstream, and no apt."""

    def __init__(self, folder, monkeypatch):
        self.root = folder / "project"
        write_series(self.root / "patches" / "megatron-core", {"0001-greet.patch": PATCH})
        (self.root / "pyproject.toml").write_text('[project]\nversion = "0"\n' + TABLE)
        monkeypatch.setenv("DSV32_ROOT", str(self.root))
        monkeypatch.setenv("DSV32_CACHE", str(folder / "cache"))
        self.store = Store(folder / "cache")
        self.index = Index(folder, monkeypatch)
        for name, version in (
            ("einops", "1.0"),
            ("lib", "1.5"),
            ("setuptools", "84.0"),
            ("packaging", "26.0"),
        ):
            self.index.add(name, version)
        self.index.add("pybind11", "3.0")
        self.index.add("megatron-core", "0.19.2", ["lib"])
        self.upstream = Upstream(folder)
        mirrors = resolve_debs.Mirrors(main="http://m.example/debian", security="http://m.example/s")
        monkeypatch.setattr(resolve_debs, "host_mirrors", lambda: mirrors)
        monkeypatch.setattr(resolve_debs, "resolve", self.debs)

    def debs(self, wanted, **_):
        return tuple(
            a_deb(name) for name in sorted({*wanted, "libc6", *(["cpp"] if "g++" in wanted else [])})
        )

    def lock(self, *words):
        return cli.main(["lock", *words])

    def asked(self, ref):
        return f"git+{self.upstream.url}@{ref}"

    @property
    def text(self):
        return (self.root / "pyproject.toml").read_text()


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.delenv("UV_INDEX_URL", raising=False)
    made = Project(tmp_path, monkeypatch)
    yield made
    made.index.server.shutdown()
    made.index.server.server_close()


def versions(lock, layer="megatron"):
    return {
        d.name: d.version for section in lock.variant("cpu") if section.name == layer for d in section.wheels
    }


def test_a_tag_is_locked_as_its_commit_and_a_release_again(project):
    project.upstream.tag("v1")
    assert project.lock() == 0
    before, released = project.text, read_lock(project.root)
    assert versions(released) == {"megatron-core": "0.19.2", "einops": "1.0"}
    assert released.git == {}
    assert "[git]" not in render(released)

    assert project.lock("--megatron", project.asked("v1")) == 0
    commit = project.upstream.first
    requirement = f'"megatron-core @ git+{project.upstream.url}@{commit}"'
    assert project.text == before.replace("'megatron-core==0.19.2'", requirement)
    lock = read_lock(project.root)
    pin = lock.git["megatron-core"]
    assert (pin.commit, pin.ref, pin.source_version) == (commit, "v1", "0.20rc1")
    assert pin.version == f"0.20rc1+git.{commit[:12]}"
    assert tomllib.loads(render(lock))["git"]["megatron-core"] == {
        "repo": project.upstream.url,
        "commit": commit,
        "tree": pin.tree,
        "version": "0.20rc1",
        "ref": "v1",
    }
    # What it needs was resolved in its place, and not the index's own megatron-core.
    assert versions(lock)["megatron-core"] == pin.version
    assert versions(lock, "python") == {"lib": "1.5"}
    assert project.store.has(pin)
    # The repository is not asked again, and the name is kept, when something else changes.
    project.upstream.bare.rename(project.upstream.bare.with_name("gone.git"))
    path = project.root / "pyproject.toml"
    path.write_text(project.text.replace('"einops"]', '"einops>=1"]'))
    assert project.lock() == 0
    assert replace(read_lock(project.root), inputs=lock.inputs) == lock
    path.write_text(project.text.replace('"einops>=1"]', '"einops"]'))

    assert project.lock("--megatron", "0.19.2") == 0
    assert project.text == before.replace("'megatron-core==0.19.2'", '"megatron-core==0.19.2"')
    assert read_lock(project.root).git == {}
    assert versions(read_lock(project.root)) == versions(released)


def test_the_compiler_that_a_variant_lacks_is_locked_apart_and_fetched_only_for_a_commit(project):
    assert project.lock() == 0
    lock = read_lock(project.root)
    assert [deb.name for deb in lock.compile_debs["cpu"]] == ["cpp", "g++"]
    assert "g++" not in {item.name for item in lock.files("cpu")}
    assert project.lock("--megatron", project.asked("main")) == 0
    lock = read_lock(project.root)
    assert {"g++", "cpp"} <= {item.name for item in lock.files("cpu")}


def test_a_variant_with_a_compiler_locks_none(project):
    path = project.root / "pyproject.toml"
    path.write_text(project.text.replace('debs = ["python3"]', 'debs = ["python3", "g++"]'))
    assert project.lock() == 0
    assert read_lock(project.root).compile_debs == {}


def test_a_compiler_that_needs_another_base_is_refused(project, monkeypatch):
    def resolve(wanted, **_):
        return (a_deb("libc6", "2" if "g++" in wanted else "1"), *map(a_deb, wanted))

    monkeypatch.setattr(resolve_debs, "resolve", resolve)
    with pytest.raises(ResolveError, match="needs libc6 2, its base layer has 1"):
        make_lock(project.root, load_config(project.root), Ui(), store=project.store)


def test_a_moved_tag_is_refused_and_a_moved_branch_is_taken_up(project, capsys):
    up = project.upstream
    up.tag("v1")
    assert project.lock("--megatron", project.asked("v1")) == 0
    assert project.lock("--check", "--megatron", project.asked("v1")) == 0
    second = up.commit({"megatron/core/mod.py": SHIFTED})
    up.tag("v1", force=True)
    locked, text = render(read_lock(project.root)), project.text

    # What is locked stays what it is: nobody asks for the tag.
    assert project.lock() == 0
    assert project.lock("--check") == 0
    assert project.lock("--check", "--megatron", project.asked("v1")) == 1
    shown = capsys.readouterr().out
    assert up.first in shown
    assert second in shown
    assert project.lock("--megatron", project.asked("v1")) == errors.RefMovedError.exit_code
    assert "moved" in capsys.readouterr().err
    assert (render(read_lock(project.root)), project.text) == (locked, text)

    assert project.lock("--megatron", project.asked(second)) == 0
    assert read_lock(project.root).git["megatron-core"].commit == second
    assert project.lock("--megatron", project.asked("main")) == 0
    third = up.commit({"new.txt": b"x"})
    assert project.lock("--check", "--megatron", project.asked("main")) == 1
    assert project.lock("--megatron", project.asked("main")) == 0
    pin = read_lock(project.root).git["megatron-core"]
    assert (pin.commit, pin.ref) == (third, "main")


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ("git+URL@" + "ab" * 20, errors.RefError.exit_code),
        ("git+URL@v9", errors.RefError.exit_code),
        ("git+URL", errors.UsageError.exit_code),
        ("git+http://127.0.0.1:9/a@main", errors.DownloadError.exit_code),
        ("git+https://me:s3cret@h.example/a@main", errors.UsageError.exit_code),
        ("newest", errors.UsageError.exit_code),
        ("9.9.9", errors.ResolveError.exit_code),
    ],
)
def test_what_cannot_be_locked_leaves_both_files_as_they_were(project, asked, code, capsys):
    assert project.lock() == 0
    before = project.text, (project.root / "versions.lock").read_bytes()
    assert project.lock("--megatron", asked.replace("URL", project.upstream.url)) == code
    shown = capsys.readouterr().err
    assert "next: " in shown
    assert "Traceback" not in shown
    assert "s3cret" not in shown
    assert (project.text, (project.root / "versions.lock").read_bytes()) == before


def test_a_name_in_pyproject_is_refused_with_the_command_that_looks_it_up(project, capsys):
    path = project.root / "pyproject.toml"
    path.write_text(
        project.text.replace("megatron-core==0.19.2'", f"megatron-core @ {project.asked('main')}'")
    )
    assert project.lock() == ConfigError.exit_code
    assert f"nox -s lock -- --megatron {project.asked('main')}" in capsys.readouterr().err


def test_a_series_that_does_not_apply_is_said_when_locking(project, capsys):
    broken = project.upstream.commit({"megatron/core/mod.py": BROKEN})
    assert project.lock("--megatron", project.asked(broken)) == 0
    shown = capsys.readouterr().err
    assert "0001-greet.patch does not apply: megatron/core/mod.py, hunk 1" in shown
    # It can be mended on the new source, and the way back is open.
    assert cli.main(["patch", "edit", "megatron-core"]) == errors.PatchError.exit_code
    assert "by hand" in capsys.readouterr().err
    assert (project.root / "work" / "megatron-core" / "megatron" / "core" / "mod.py").read_bytes() == BROKEN
    assert project.lock("--megatron", "0.19.2") == 0


@pytest.mark.parametrize(
    ("content", "code", "says"),
    [
        (MODULE, 0, "applies "),
        (SHIFTED, 0, "applies at an offset: megatron/core/mod.py +2"),
        (BROKEN, 1, "does not apply: megatron/core/mod.py, hunk 1 at line 5"),
    ],
)
def test_patch_check_says_how_each_patch_applies_to_a_commit(project, capsys, content, code, says):
    commit = project.upstream.commit({"megatron/core/mod.py": content, "new.txt": content})
    assert cli.main(["patch", "check", "--megatron", project.asked(commit)]) == code
    assert says in capsys.readouterr().out
    assert not (project.root / "versions.lock").exists()


def test_patch_check_goes_on_after_a_patch_that_does_not_apply(project, capsys):
    later = b"--- a/README.md\n+++ b/README.md\n@@ -1 +1 @@\n-\xc3\x9cberblick\n+Overview\n"
    write_series(
        project.root / "patches" / "megatron-core", {"0001-greet.patch": PATCH, "0002-readme.patch": later}
    )
    commit = project.upstream.commit({"megatron/core/mod.py": BROKEN})
    assert cli.main(["patch", "check", "--megatron", project.asked(commit)]) == 1
    first, second = (line for line in capsys.readouterr().out.splitlines() if ".patch" in line)
    assert "does not apply" in first
    assert "applies" in second


def test_patch_check_of_a_locked_commit_allows_offsets(project, capsys):
    commit = project.upstream.commit({"megatron/core/mod.py": SHIFTED})
    assert project.lock("--megatron", project.asked(commit)) == 0
    assert cli.main(["patch", "check"]) == 0
    assert "megatron/core/mod.py +2" in capsys.readouterr().out


def test_a_requirement_is_replaced_in_place_and_nothing_else():
    text = TABLE.replace('"einops"]', '"einops"]\ncollect = ["megatron-core-*"]\n# megatron-core==0.19.2')
    new = git_pin.rewrite(text, "megatron-core", "==1.0")
    assert new == text.replace("'megatron-core==0.19.2'", '"megatron-core==1.0"')


def test_a_requirement_that_also_stands_elsewhere_is_not_guessed_at():
    text = TABLE.replace("'megatron-core==0.19.2'", '"megatron-core"').replace(
        '"einops"]', '"einops"]\ncollect = ["megatron-core"]'
    )
    with pytest.raises(ConfigError, match="cannot be replaced"):
        git_pin.rewrite(text, "megatron-core", "==1.0")


def test_no_variant_with_megatron_is_said():
    with pytest.raises(ConfigError, match="no variant"):
        git_pin.rewrite(MINIMAL, "megatron-core", "==1.0")


DIST = GitDist(
    name="megatron-core",
    version="0.20rc1+git.0123456789ab",
    file="megatron_core-0.20rc1+git.0123456789ab.tar.gz",
    size=1,
    sha256="aa",
    repo="https://h.example/a",
    commit="0123456789ab" + "0" * 28,
    tree="f" * 40,
    source_version="0.20rc1",
)


def compiled(folder, *, version="0.20rc1", module=SHIFTED, library=True):
    """A wheel as the compiler's container leaves it."""
    info = f"megatron_core-{version}.dist-info"
    files = {
        name.replace("pkg-1.0", f"megatron_core-{version}"): data for name, data in wheel_files().items()
    }
    files = {name: data for name, data in files.items() if not name.startswith("pkg/")}
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: megatron-core\nVersion: {version}\n".encode()
    files["megatron/core/mod.py"] = module
    if library:
        files["megatron/core/helpers_cpp.cpython-313-x86_64-linux-gnu.so"] = b"\x7fELF"
    folder.mkdir(exist_ok=True)
    return make_wheel(folder / "built.whl", files)


def the_job(**changes):
    return CompileJob(**{"dist": DIST, "key": "k", "env": {}, **changes})


def test_the_compiled_wheel_is_named_after_the_commit_and_then_patched_at_an_offset(project, tmp_path):
    store = CompiledWheels(project.store.home)
    wheel = store.put(the_job(), compiled(tmp_path / "out"), epoch=0)
    assert wheel.path.name == "megatron_core-0.20rc1+git.0123456789ab-py3-none-any.whl"
    info = "megatron_core-0.20rc1+git.0123456789ab.dist-info"
    with zipfile.ZipFile(wheel.path) as archive:
        assert b"Version: 0.20rc1+git.0123456789ab\n" in archive.read(f"{info}/METADATA")
        marker = json.loads(archive.read(f"{info}/dsv32-compiled.json"))
    assert marker["git"] == {"commit": DIST.commit, "tree": DIST.tree}

    config = load_config(project.root)
    layer = LayerLock(name="megatron", wheels=(DIST,))
    plan = LayerPlan(
        name="megatron", key="0", section=layer, config=config.variants[0].layers[2], jobs=(the_job(),)
    )
    lock = Lock(epoch=0, inputs="", patches={"megatron-core": "x"}, tools=(), variants={"cpu": (layer,)})
    found = compiled_wheels([plan], project.store)
    (done,) = patched_wheels(project.root, lock, [plan], project.store, tmp_path / "wheels", found).values()
    assert done.version.startswith("0.20rc1+git.0123456789ab.dsv32.")
    with zipfile.ZipFile(done.path) as archive:
        assert archive.read("megatron/core/mod.py").startswith(b"# one\n# two\nline 1\n")
        assert b"line five\n" in archive.read("megatron/core/mod.py")
        assert f"megatron_core-{done.version}.dist-info/dsv32-compiled.json" in archive.namelist()


def test_a_wheel_of_another_version_or_without_its_compiled_module_is_refused(tmp_path):
    store = CompiledWheels(tmp_path)
    with pytest.raises(WheelError, match=r"calls itself 0\.21, locked was 0\.20rc1"):
        store.put(the_job(), compiled(tmp_path / "a", version="0.21"), epoch=0)
    with pytest.raises(WheelError, match="no compiled module"):
        store.put(the_job(), compiled(tmp_path / "b", library=False), epoch=0)
    assert store.get(the_job()) is None


def test_a_commit_is_compiled_without_being_listed_and_its_key_knows_the_compiler(project):
    config = load_config(project.root)
    variant = config.variants[0]
    layer, section = variant.layers[2], LayerLock(name="megatron", wheels=(DIST,))

    def key(dist=DIST, debs=()):
        lock = Lock(epoch=0, inputs="", patches={}, tools=(), compile_debs={"cpu": debs}, variants={})
        root = Path(__file__).parents[2]
        (job,) = compile_jobs(root, config, variant, layer, replace(section, wheels=(dist,)), (), lock)
        assert job.env["NO_VCS_VERSION"] == "1"
        return job.key

    assert len({key(), key(replace(DIST, sha256="bb")), key(debs=(a_deb("g++"),))}) == 3


def test_the_compiler_lies_in_the_compile_context(project, tmp_path):
    source = git_archive.pin_source(
        "megatron-core", project.upstream.url, project.upstream.first, "", ENV, project.store
    )
    data = b"a deb"
    deb = replace(a_deb("g++"), sha256=hashlib.sha256(data).hexdigest(), size=len(data))
    path = project.store.path(deb.sha256)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    lock = Lock(epoch=0, inputs="", patches={}, tools=(), compile_debs={"cpu": (deb,)}, variants={})
    for variant, there in (("cpu", True), ("cu130", False)):
        context = tmp_path / variant
        (context / "tools").mkdir(parents=True)
        root = Path(__file__).parents[2]
        compile_context(root, lock, variant, the_job(dist=source.dist), project.store, 1, context)
        assert (context / "compile" / "debs" / "g++.deb").exists() == there
        assert (context / "compile" / source.dist.file).exists()


def test_a_lock_with_a_commit_is_read_back(tmp_path):
    layers = (LayerLock(name="megatron", wheels=(DIST,)),)
    whole = Lock(
        epoch=0,
        inputs="",
        patches={},
        tools=(),
        compile_debs={"cpu": (a_deb("g++"),)},
        variants={"cpu": layers, "cu130": layers},
    )
    write_lock(tmp_path, whole)
    assert read_lock(tmp_path) == whole
