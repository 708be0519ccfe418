"""What is installed, read inside the image, equals the lock: versions, patch markers, file hashes."""

import base64
import collections
import fnmatch
import hashlib
import importlib.metadata
import json
import os
import re
import stat
import subprocess
import tomllib
from pathlib import Path

import pytest

PREFIX = Path("/opt/dsv32")


@pytest.fixture(scope="module")
def lock(image_share):
    build = json.loads((image_share / "build.json").read_text())
    raw = (image_share / "versions.lock").read_bytes()
    assert hashlib.sha256(raw).hexdigest() == build["lock_digest"]
    document = tomllib.loads(raw.decode())
    layers = document["variants"][build["variant"]]
    return {"patches": document["patches"], "git": document.get("git", {}), "layers": layers}


@pytest.fixture(scope="module")
def installed(image_share):
    """The distributions below the image's prefix; Debian's own Python packages are checked as debs."""
    return {
        normal(dist.metadata["Name"]): dist
        for dist in importlib.metadata.distributions(path=[str(site_packages())])
    }


def site_packages():
    return next((PREFIX / "lib").glob("python3*/site-packages"))


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(lock, kind):
    return {name: item for layer in lock["layers"].values() for name, item in layer.get(kind, {}).items()}


def test_debian_packages_are_exactly_those_of_the_lock(lock, record_property):
    listing = subprocess.run(
        ["dpkg-query", "--show", "--showformat", "${Package} ${Version} ${db:Status-Status}\n"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    found = dict(line.split(" ", 1) for line in listing.splitlines())
    assert found == {name: f"{deb['version']} installed" for name, deb in locked(lock, "debs").items()}
    record_property("debs", len(found))


def test_files_of_debian_packages_are_as_packaged(image_share, record_property):
    # dpkg --verify compares with the md5sums that came in each deb; silent lines are files left out
    # on purpose, listed by the image itself.
    out = subprocess.run(["dpkg", "--verify"], check=False, capture_output=True, text=True).stdout
    settings = [p.read_text() for p in Path("/etc/dpkg/dpkg.cfg.d").iterdir()]
    excluded = [m for text in settings for m in re.findall(r"^path-exclude=(.+)$", text, re.MULTILINE)]
    wrong = []
    for line in out.splitlines():
        path = line[line.index("/") :]  # names with spaces are among them
        left_out = line.startswith("missing") and any(fnmatch.fnmatchcase(path, glob) for glob in excluded)
        if not left_out and "Permission denied" not in line:
            wrong.append(line)
    assert wrong == []
    record_property("left out", len(out.splitlines()))


def test_python_distributions_are_exactly_those_of_the_lock(lock, installed, record_property):
    expected = {}
    for name, dist in locked(lock, "wheels").items():
        series = lock["patches"].get(name)
        # The version of a git commit has a local part already.
        join = "." if "+" in dist["version"] else "+"
        expected[name] = dist["version"] + (f"{join}dsv32.{series[:8]}" if series else "")
    found = {name: dist.version for name, dist in installed.items() if name != "dsv32"}
    assert found == expected
    assert "dsv32" in installed
    record_property("distributions", len(found))


def test_patched_distributions_carry_the_marker_of_the_locked_series(lock, installed, record_property):
    assert lock["patches"], "the lock lists no series at all"
    for name, series in lock["patches"].items():
        if name in installed:
            marker = json.loads(installed[name].read_text("dsv32-patches.json"))
            assert marker["series_sha256"] == series, name
            record_property(name, len(marker["patches"]))


def test_compiled_distributions_carry_the_marker_of_the_locked_source(lock, installed, record_property):
    """A wheel of an sdist that was compiled by the build says from which, and that it was not downloaded."""
    sources = {n: d for n, d in locked(lock, "wheels").items() if d["file"].endswith(".tar.gz")}
    compiled = {name: dist.read_text("dsv32-compiled.json") for name, dist in installed.items()}
    for name, dist in sources.items():
        if name in lock["patches"] and name not in lock["git"]:
            continue  # built from its patched sdist, whose marker has a test of its own
        marker = json.loads(compiled[name])
        assert marker["sdist_sha256"] == dist["sha256"]
        if name in lock["git"]:
            assert marker["git"] == {key: lock["git"][name][key] for key in ("commit", "tree")}
        record_property(name, dist["version"])


@pytest.fixture(scope="module")
def removed(image_share, lock):
    """By distribution: patterns of files that the image goes without on purpose."""
    globs = json.loads((image_share / "build.json").read_text())["removed"]
    layers = lock["layers"].items()
    return {name: globs.get(layer, []) for layer, section in layers for name in section.get("wheels", {})}


def test_every_file_of_every_distribution_has_its_recorded_hash(installed, removed, record_property):
    site, wrong, count = site_packages(), [], 0
    for name, dist in installed.items():
        for file in dist.files:
            if file.hash is None:
                continue
            if any(fnmatch.fnmatchcase(str(file), glob) for glob in removed.get(name, [])):
                assert not (site / file).exists(), f"{file} should have been removed"
                continue
            data = (site / file).read_bytes()
            digest = (
                base64.urlsafe_b64encode(hashlib.new(file.hash.mode, data).digest()).rstrip(b"=").decode()
            )
            # An installer writes a launcher's first line anew, and then its hash.
            if digest != file.hash.value:
                wrong.append(str(file))
            count += 1
    assert wrong == []
    record_property("files", count)


def test_no_file_belongs_to_two_distributions_or_to_none(installed):
    site = site_packages()
    owners = collections.defaultdict(list)
    for name, dist in installed.items():
        for file in dist.files:
            owners[(site / file).resolve()].append(name)
    assert {str(path): names for path, names in owners.items() if len(names) > 1} == {}
    # Bytecode is compiled by the build; an installer's RECORD does not know it.
    stray = [p for p in site.rglob("*") if p.is_file() and p.suffix != ".pyc" and p.resolve() not in owners]
    assert stray == []


def test_dependencies_are_satisfied(image_share):
    done = subprocess.run(
        [str(PREFIX / "bin/python"), "-m", "pip", "check"], check=False, capture_output=True, text=True
    )
    wrong = {line for line in done.stdout.splitlines() if " requirement " in line or " requires " in line}
    # Debian ships torch 2.6.0 with sympy 1.13.3 and leaves upstream's pin of 1.13.1 in the metadata.
    debians_own = {
        line for line in wrong if line.startswith("torch 2.6.0+debian has requirement sympy==1.13.1")
    }
    assert wrong - debians_own == set()
    assert done.returncode == 0 or debians_own


def test_bytecode_is_there_and_cannot_go_stale(image_share, record_property):
    """Unchecked hash (PEP 552): flags 1. Time stamps would be stale, checked hashes slow each import."""
    flags = collections.Counter()
    for top in (PREFIX, Path("/usr/lib"), Path("/usr/share/python3")):
        for path in top.rglob("*.pyc"):
            flags[path.open("rb").read(8)[4]] += 1
    assert set(flags) == {1}
    record_property("files", flags[1])


def test_the_default_user_is_not_root_and_can_work(image_share, tmp_path):
    assert subprocess.run(["id", "-u"], capture_output=True, text=True, check=True).stdout.strip() != "0"
    Path("/workspace/.probe").touch()
    Path("/workspace/.probe").unlink()


def test_nothing_of_the_build_host_is_left(image_share):
    """Logs, caches, mirrors and resolver settings belong to a machine, not to the stack."""
    sources = Path("/etc/apt/sources.list").read_text()
    assert "deb " not in sources and "Types:" not in sources
    assert list(Path("/var/lib/apt/lists").glob("*Packages*")) == []
    assert [path for path in Path("/var/log").rglob("*") if path.is_file()] == []


def test_the_image_is_hardly_larger_than_what_it_installs(image_share, installed, record_property):
    """All that is there against the files of packages, distributions and bytecode: at most 3% more."""
    packaged = set()
    for listing in Path("/var/lib/dpkg/info").glob("*.list"):
        packaged.update(Path(line).resolve() for line in listing.read_text().splitlines())
    site = site_packages()
    for dist in installed.values():
        packaged.update((site / file).resolve() for file in dist.files)
    total = known = 0
    seen = set()
    # bin, lib and sbin are links into usr.
    for top in ("boot", "etc", "home", "opt", "root", "srv", "usr", "var", "workspace"):
        for folder, _, names in os.walk(Path("/") / top):
            for name in names:
                path = Path(folder) / name
                status = path.lstat()
                if not stat.S_ISREG(status.st_mode) or (status.st_dev, status.st_ino) in seen:
                    continue
                seen.add((status.st_dev, status.st_ino))
                total += status.st_size
                source = path.parent.parent / f"{name.split('.')[0]}.py" if name.endswith(".pyc") else path
                known += status.st_size if source in packaged or path in packaged else 0
    record_property("bytes", total)
    record_property("larger than installed", total / known - 1)
    assert total <= 1.03 * known
