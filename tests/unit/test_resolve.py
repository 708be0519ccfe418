"""Resolving: mirrors from the host's apt settings, wheels by uv from an index on loopback."""

import functools
import hashlib
import http.server
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from dsv32_image import resolve_wheels
from dsv32_image.config import LayerConfig, VariantConfig, load_config
from dsv32_image.errors import DownloadError, ResolveError, ToolMissingError
from dsv32_image.families import check_families
from dsv32_image.lockfile import Dist
from dsv32_image.resolve_debs import host_mirrors

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_settings_of_this_host(monkeypatch):
    for name in ("DSV32_DEBIAN_MIRROR", "DSV32_DEBIAN_SECURITY_MIRROR", "PIP_INDEX_URL", "UV_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)


def apt(tmp_path, one_line="", deb822=""):
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list").write_text(one_line)
    if deb822:
        (tmp_path / "sources.list.d" / "debian.sources").write_text(deb822)
    return tmp_path


def test_mirrors_from_one_line_sources(tmp_path):
    found = host_mirrors(
        apt(
            tmp_path,
            "# deb http://old.example/debian x main\n"
            "deb [signed-by=/k] http://mirror.example/debian bookworm main\n"
            "deb http://safe.example/debian-security bookworm-security main\n"
            "deb http://other.example/apt stable main\n",
        )
    )
    assert (found.main, found.security) == (
        "http://mirror.example/debian",
        "http://safe.example/debian-security",
    )


def test_mirrors_from_deb822_sources(tmp_path):
    text = (
        "Types: deb\nURIs: http://off.example/debian\nSuites: trixie\nEnabled: no\n\n"
        "Types: deb deb-src\nURIs: http://m.example/debian/\nSuites: trixie trixie-updates\n"
    )
    found = host_mirrors(apt(tmp_path, deb822=text))
    assert (found.main, found.security) == ("http://m.example/debian", "http://m.example/debian-security")


def test_a_host_without_debian_sources_is_told_what_to_set(tmp_path):
    with pytest.raises(ToolMissingError) as caught:
        host_mirrors(apt(tmp_path, "deb http://u.example/ubuntu noble main\n"))
    assert "DSV32_DEBIAN_MIRROR" in caught.value.hint


def test_the_environment_decides(tmp_path, monkeypatch):
    monkeypatch.setenv("DSV32_DEBIAN_MIRROR", "http://mine.example/debian/")
    found = host_mirrors(apt(tmp_path, "deb http://m.example/debian bookworm main\n"))
    assert found.main == "http://mine.example/debian"


class Index:
    """A package index on loopback with small wheels."""

    def __init__(self, folder, monkeypatch):
        self.folder = folder
        quiet = type("Quiet", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *a: None})
        handler = functools.partial(quiet, directory=str(folder))
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        monkeypatch.setenv("UV_DEFAULT_INDEX", f"http://127.0.0.1:{self.server.server_address[1]}/simple")
        monkeypatch.setenv("UV_CACHE_DIR", str(folder / "uv-cache"))

    def add(self, name, version, requires=(), tag="py3-none-any"):
        module = name.replace("-", "_")
        folder = self.folder / "simple" / name
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{module}-{version}-{tag}.whl"
        info = f"{module}-{version}.dist-info"
        lines = "".join(f"Requires-Dist: {r}\n" for r in requires)
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr(
                f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{lines}"
            )
            wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
            wheel.writestr(f"{info}/RECORD", "")
        links = "".join(
            f'<a href="{p.name}#sha256={hashlib.sha256(p.read_bytes()).hexdigest()}">{p.name}</a>\n'
            for p in sorted(folder.glob("*.whl"))
        )
        (folder / "index.html").write_text(f"<html><body>{links}</body></html>")
        return path


@pytest.fixture
def index(tmp_path, monkeypatch):
    running = Index(tmp_path, monkeypatch)
    yield running
    running.server.shutdown()
    running.server.server_close()


def variant(*layers, debs=()):
    return VariantConfig(name="cpu", summary="", python_from_debs=debs, layers=layers)


CONFIG = load_config(ROOT)


def resolve(*layers, debs=(), keep=None):
    found = resolve_wheels.resolve_variant(CONFIG, variant(*layers, debs=debs), keep or {})
    return {name: {d.name: d.version for d in dists} for name, dists in found.items()}


def test_what_is_listed_lies_in_its_layer_and_what_it_needs_in_the_first(index):
    index.add("lib", "1.0")
    index.add("cuda-lib", "1.0")
    index.add("app", "2.0", ["lib", "cuda-lib"])
    layers = (
        LayerConfig(name="cuda", collect=("cuda-*",)),
        LayerConfig(name="python", wheels=("lib",)),
        LayerConfig(name="app", wheels=("app",)),
    )
    assert resolve(*layers) == {"cuda": {"cuda-lib": "1.0"}, "python": {"lib": "1.0"}, "app": {"app": "2.0"}}


def test_the_longest_pattern_collects(index):
    index.add("cuda-lib", "1.0")
    index.add("cuda-dsl-libs", "1.0")
    index.add("app", "2.0", ["cuda-lib", "cuda-dsl-libs"])
    layers = (
        LayerConfig(name="cuda", collect=("cuda-*",)),
        LayerConfig(name="kernels", wheels=("app",), collect=("cuda-dsl-*",)),
    )
    assert resolve(*layers) == {
        "cuda": {"cuda-lib": "1.0"},
        "kernels": {"app": "2.0", "cuda-dsl-libs": "1.0"},
    }


def test_what_comes_as_a_deb_is_not_brought_again(index):
    index.add("app", "1.0", ["torch>=2"])
    assert resolve(LayerConfig(name="python", wheels=("app",)), debs=("torch",)) == {"python": {"app": "1.0"}}


def test_locked_versions_are_kept_until_upgraded(index):
    for version in ("1.0", "1.1"):
        index.add("lib", version)
    layer = LayerConfig(name="python", wheels=("lib",))
    assert resolve(layer, keep={"lib": "1.0"}) == {"python": {"lib": "1.0"}}
    assert resolve(layer) == {"python": {"lib": "1.1"}}


def test_the_wheel_that_an_installer_would_take_is_chosen(index):
    index.add("fast", "1.0")
    best = index.add("fast", "1.0", tag="cp313-cp313-manylinux_2_17_x86_64")
    index.add("fast", "1.0", tag="cp313-cp313-macosx_11_0_arm64")
    found = resolve_wheels.resolve_variant(CONFIG, variant(LayerConfig(name="python", wheels=("fast",))), {})
    (dist,) = found["python"]
    assert dist.file == best.name
    assert dist.size == best.stat().st_size
    assert dist.sha256 == hashlib.sha256(best.read_bytes()).hexdigest()


def test_urls_are_found_for_locked_files_of_two_versions(index):
    first, second = index.add("lib", "1.0"), index.add("lib", "1.1")
    dists = []
    for path, version in ((first, "1.0"), (second, "1.1")):
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        dists.append(
            Dist(name="lib", version=version, file=path.name, size=path.stat().st_size, sha256=sha256)
        )
    urls = resolve_wheels.urls(CONFIG, dists)
    assert {Path(urls[d.sha256]).name for d in dists} == {first.name, second.name}


def test_no_solution_shows_the_resolvers_own_words(index):
    index.add("lib", "1.0")
    index.add("app", "1.0", ["lib>=2"])
    with pytest.raises(ResolveError) as caught:
        resolve(LayerConfig(name="python", wheels=("app",)))
    assert "lib>=2" in caught.value.message
    assert "pyproject.toml" in caught.value.hint


def test_an_unreachable_index_is_not_taken_for_a_bad_pin(index, monkeypatch):
    index.server.shutdown()
    index.server.server_close()
    monkeypatch.setenv("UV_HTTP_TIMEOUT", "5")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    with pytest.raises(DownloadError, match="index cannot be reached"):
        resolve(LayerConfig(name="python", wheels=("app",)))


def test_local_links_of_one_machine_do_not_leak(index, monkeypatch, tmp_path):
    hidden = Index.add(index, "lib", "9.9").rename(tmp_path / "lib-9.9-py3-none-any.whl")
    index.add("lib", "1.0")
    monkeypatch.setenv("UV_FIND_LINKS", str(hidden.parent))
    assert resolve(LayerConfig(name="python", wheels=("lib",))) == {"python": {"lib": "1.0"}}


def cuda(name, version):
    return Dist(name=name, version=version, file="x.whl", size=1, sha256="0")


def test_cuda_wheels_of_two_toolkits_are_refused():
    good = [
        cuda("nvidia-cuda-nvcc", "13.0.88"),
        cuda("nvidia-cuda-crt", "13.0.88"),
        cuda("nvidia-cudnn-cu13", "9.1"),
    ]
    check_families("cu130", good)
    with pytest.raises(ResolveError, match=r"nvidia-cuda-nvcc 13\.0\.88|nvidia-cuda-crt 13\.5\.1"):
        check_families("cu130", [good[0], replace(good[1], version="13.5.1")])


def test_versions_leave_room_for_what_must_stay_installable(index):
    index.add("tokenizers", "1.2")
    index.add("tokenizers", "1.3")
    index.add("sparse", "1.0")
    index.add("app", "1.0", ["tokenizers"])
    index.add("rollout", "5.0", ["tokenizers==1.2", "sparse"])
    layer = LayerConfig(name="python", wheels=("app",))
    alone = VariantConfig(name="gpu", summary="", layers=(layer,))
    beside = replace(alone, compatible_with=("rollout==5.0",))
    found = [resolve_wheels.resolve_variant(CONFIG, v, {})["python"] for v in (alone, beside)]
    assert [{d.name: d.version for d in dists} for dists in found] == [
        {"app": "1.0", "tokenizers": "1.3"},
        {"app": "1.0", "tokenizers": "1.2"},
    ]
