"""Which Python distributions: uv resolves for the image's Python, on the host, with the host's indexes."""

from __future__ import annotations

import fnmatch
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import httpx
from packaging import tags
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

from dsv32_image.config import Config, VariantConfig, normalise
from dsv32_image.errors import DownloadError, ResolveError
from dsv32_image.fetch import make_client
from dsv32_image.lockfile import Dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from dsv32_image.git_archive import PinnedSource

_NEVER = "sys_platform == 'never'"
_NETWORK_WORDS = (
    "Failed to fetch",
    "error sending request",
    "Network is",
    "Connect",
    "dns error",
    "timed out",
)


def uv_program() -> str:
    """The uv that came with this Python environment."""
    beside = Path(sys.executable).parent / "uv"
    return str(beside) if beside.exists() else "uv"


def resolve_variant(
    config: Config,
    variant: VariantConfig,
    keep: Mapping[str, str],
    sources: Mapping[str, PinnedSource] | None = None,
) -> dict[str, tuple[Dist, ...]]:
    """Resolve all layers of a variant together; the distributions by layer name.

    Args:
        config: What is asked for.
        variant: The variant to resolve.
        keep: Versions to prefer (name to version): those of the old lock that need not move.
        sources: By name, those that are compiled from a commit: what they need is resolved in their place.

    Raises:
        ResolveError: No set of versions fits.
        DownloadError: The index cannot be reached.
    """
    sources = sources or {}
    pins = {layer.name: [s for w in layer.wheels if (s := _source(w, sources))] for layer in variant.layers}
    wanted = [line for layer in variant.layers for w in layer.wheels for line in _wanted(w, sources)]
    # Something else may ask for the one that is pinned; the index's must not come beside it.
    excluded = [*variant.excluded, *(source.dist.name for found in pins.values() for source in found)]
    if variant.compatible_with:
        # Solved together first; of that solution only what the image needs is taken.
        together = [*wanted, *variant.compatible_with]
        solved = compile_requirements(config, together, excluded, keep)
        keep = {dist.name: dist.version for dist, _ in solved}
    pinned = compile_requirements(config, wanted, excluded, keep)
    layers: dict[str, list[Dist]] = {name: [s.dist for s in found] for name, found in pins.items()}
    home = _homes(variant)
    for dist, _ in pinned:
        layers[home(dist.name)].append(dist)
    return {name: tuple(items) for name, items in layers.items()}


def _source(requirement: str, sources: Mapping[str, PinnedSource]) -> PinnedSource | None:
    parsed = Requirement(requirement)
    return sources[normalise(parsed.name)] if parsed.url else None


def _wanted(requirement: str, sources: Mapping[str, PinnedSource]) -> list[str]:
    source = _source(requirement, sources)
    return source.metadata.requirements(Requirement(requirement).extras) if source else [requirement]


def resolve_tools(config: Config) -> tuple[Dist, ...]:
    """The tools that are mounted while a layer is made."""
    return tuple(dist for dist, _ in compile_requirements(config, config.tool_wheels, (), {}))


def resolve_compile_tools(config: Config, keep: Mapping[str, str]) -> tuple[Dist, ...]:
    """What a build backend imports while a wheel is compiled, besides the layers below it."""
    return tuple(dist for dist, _ in compile_requirements(config, config.compile_wheels, (), keep))


def urls(config: Config, dists: Iterable[Dist]) -> dict[str, str]:
    """Where this host gets each file from: sha256 to URL.

    Raises:
        DownloadError: The index cannot be reached or no longer has a version.
    """
    by_sha: dict[str, str] = {}
    wanted = {f"{d.name}=={d.version}": d for d in dists}
    # Two variants may hold two versions of one name; uv takes one version of a name at a time.
    rounds: list[dict[str, str]] = []
    for requirement, dist in sorted(wanted.items()):
        for group in rounds:
            if dist.name not in group:
                group[dist.name] = requirement
                break
        else:
            rounds.append({dist.name: requirement})
    for group in rounds:
        try:
            found = compile_requirements(config, list(group.values()), (), {}, no_deps=True, every_file=True)
        except ResolveError as error:
            raise DownloadError(
                error.message, hint="`nox -s lock -- --upgrade` locks what the index has now"
            ) from None
        by_sha.update({dist.sha256: url for dist, url in found})
    return by_sha


def compile_host(root: Path, *, upgrade: bool) -> None:
    """Write requirements/host.txt, the host's own tools by hash, from host.in.

    Raises:
        ResolveError, DownloadError: As `resolve_variant`.
    """
    command = [uv_program(), "pip", "compile", "host.in", "--output-file", "host.txt", "--universal"]
    command += ["--python-version", "3.11", "--generate-hashes", "--quiet", "--python", sys.executable]
    command += ["--upgrade"] if upgrade else []
    env = {**_uv_env(), "UV_CUSTOM_COMPILE_COMMAND": "nox -s lock -- --host"}
    folder = root / "requirements"
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise _uv_error(done.stderr)


def compile_requirements(
    config: Config,
    requirements: Sequence[str],
    excluded: Iterable[str],
    keep: Mapping[str, str],
    *,
    no_deps: bool = False,
    every_file: bool = False,
) -> list[tuple[Dist, str]]:
    """Run uv; each distribution with the URL of its file. `every_file` lists all of a version's files."""
    if not requirements:
        return []
    with tempfile.TemporaryDirectory(prefix="dsv32-resolve-") as name:
        folder = Path(name)
        (folder / "in.txt").write_text("".join(f"{r}\n" for r in requirements))
        # A requirement that holds on no platform takes a distribution out of the graph.
        (folder / "overrides.txt").write_text("".join(f"{e}; {_NEVER}\n" for e in excluded))
        # uv prefers the versions of an existing output file, which is what keeping means.
        if keep:
            (folder / "pylock.toml").write_text(_preferences(keep))
        command = [
            uv_program(),
            "pip",
            "compile",
            "in.txt",
            "--output-file",
            "pylock.toml",
            "--format",
            "pylock.toml",
        ]
        command += ["--python-version", config.python, "--python-platform", config.wheel_platform]
        command += ["--override", "overrides.txt", "--no-header", "--quiet"]
        # Without it uv asks every interpreter on the PATH for its version: seconds a call with pyenv.
        command += ["--python", sys.executable]
        command += ["--no-deps"] if no_deps else []
        done = subprocess.run(command, cwd=folder, env=_uv_env(), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise _uv_error(done.stderr)
        document = tomllib.loads((folder / "pylock.toml").read_text())
    return [
        entry for package in document.get("packages", ()) for entry in _files(config, package, every_file)
    ]


def _preferences(keep: Mapping[str, str]) -> str:
    lines = ['lock-version = "1.0"', 'created-by = "dsv32-image"']
    for name, version in sorted(keep.items()):
        lines += ["[[packages]]", f"name = {json.dumps(name)}", f"version = {json.dumps(version)}"]
    return "\n".join(lines) + "\n"


def _uv_env() -> dict[str, str]:
    """The environment for uv: the host's uv settings, else the index that pip is set to use."""
    env = dict(os.environ)
    # An offline cache of local files is a property of one machine, not of the stack.
    for name in ("UV_FIND_LINKS", "UV_CONSTRAINT", "UV_OVERRIDE", "UV_EXCLUDE_NEWER"):
        env.pop(name, None)
    if not any(env.get(n) for n in ("UV_DEFAULT_INDEX", "UV_INDEX_URL")) and (index := _pip_index()):
        env["UV_DEFAULT_INDEX"] = index
    return env


def _pip_index() -> str:
    """The index-url of pip's own settings (environment or configuration), empty if it has none."""
    if named := os.environ.get("PIP_INDEX_URL"):
        return named
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def _uv_error(stderr: str) -> Exception:
    text = "\n".join(f"  | {line}" for line in stderr.strip().splitlines()[-12:])
    if any(word in stderr for word in _NETWORK_WORDS):
        return DownloadError(
            f"the package index cannot be reached:\n{text}",
            hint="check network and proxy, and the index that UV_DEFAULT_INDEX, uv's or pip's settings name",
        )
    return ResolveError(
        f"no set of versions satisfies what pyproject.toml asks for:\n{text}",
        hint="change the pins under [tool.dsv32-image] in pyproject.toml",
    )


def _files(config: Config, package: dict[str, Any], every_file: bool) -> list[tuple[Dist, str]]:
    wheels, sdist = package.get("wheels", []), package.get("sdist")
    if not every_file:
        chosen = [_best(config, wheels)] if wheels else ([sdist] if sdist else [])
    else:
        chosen = [*wheels, *([sdist] if sdist else [])]
    if not chosen:
        raise ResolveError(
            f"{package['name']} {package.get('version')} has no file that fits the image's Python",
            hint="pin another version in pyproject.toml",
        )
    return [
        (
            Dist(
                name=normalise(package["name"]),
                version=package["version"],
                file=_file_name(file),
                # Indexes that only serve HTML name no size; for finding a URL it does not matter.
                size=file.get("size") or (0 if every_file else _remote_size(file["url"])),
                sha256=_sha256(package["name"], file),
            ),
            file["url"],
        )
        for file in chosen
    ]


def _remote_size(url: str) -> int:
    try:
        with make_client() as client:
            return int(client.head(url).raise_for_status().headers["Content-Length"])
    except (httpx.HTTPError, KeyError, ValueError) as error:
        raise DownloadError(
            f"the index names no size of {url.rsplit('/', 1)[-1]}, and asking for it failed: {error}",
            hint="use an index with the JSON API (PEP 691), or try again",
        ) from None


def _sha256(name: str, file: dict[str, Any]) -> str:
    digest: str | None = file.get("hashes", {}).get("sha256")
    if digest is None:
        raise ResolveError(f"the index gives no sha256 for {name}", hint="use an index that does")
    return digest


def _file_name(file: dict[str, Any]) -> str:
    name: str = file.get("name") or unquote(file["url"].rsplit("/", 1)[-1].split("#")[0])
    return name


def _best(config: Config, wheels: list[dict[str, Any]]) -> dict[str, Any]:
    """The wheel an installer would take: uv lists those that fit, the tag order of PEP 425 decides."""
    major, minor = (int(part) for part in config.python.split("."))
    arch, _, glibc = config.wheel_platform.partition("-manylinux_2_")
    platforms = [f"manylinux_2_{n}_{arch}" for n in range(int(glibc), 4, -1)]
    platforms[-12:-12] = [f"manylinux2014_{arch}"]
    platforms += [f"manylinux2010_{arch}", f"manylinux1_{arch}", f"linux_{arch}"]
    order = [
        *tags.cpython_tags((major, minor), platforms=platforms),
        *tags.compatible_tags((major, minor), f"cp{major}{minor}", platforms),
    ]
    rank = {tag: position for position, tag in enumerate(order)}

    def place(file: dict[str, Any]) -> tuple[int, str]:
        name = _file_name(file)
        return min(
            (rank.get(tag, len(order)) for tag in parse_wheel_filename(name)[3]), default=len(order)
        ), name

    return min(wheels, key=place)


def _homes(variant: VariantConfig) -> Callable[[str], str]:
    """A function from a distribution's name to its layer.

    Listed by name: that layer. Caught by a layer's `collect`: that of the longest pattern. Anything else:
    the first layer that lists wheels, so that what many need lies below what changes often.
    """
    listed = {normalise(Requirement(w).name): layer.name for layer in variant.layers for w in layer.wheels}
    patterns = [(pattern, layer.name) for layer in variant.layers for pattern in layer.collect]
    patterns.sort(key=lambda item: -len(item[0]))
    default = next(layer.name for layer in variant.layers if layer.wheels)

    def home(name: str) -> str:
        if name in listed:
            return listed[name]
        return next((layer for pattern, layer in patterns if fnmatch.fnmatchcase(name, pattern)), default)

    return home
