"""What we ask for: `[tool.dsv32-image]` of pyproject.toml as frozen dataclasses."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dsv32_image.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

ARCH = re.compile(r"[1-9][0-9]?\.[0-9]")
_SEPARATORS = re.compile(r"[-_.]+")
_TOOL_KEYS = {"wheels", "debs", "compile", "compile-debs"}
_LAYER_KEYS = {"name", "debs", "wheels", "collect", "compile", "metadata-only", "remove", "tree"}
_VARIANT_KEYS = {"summary", "python-from-debs", "leave-out", "compatible-with", "cuda-archs", "layers"}
_TOP_KEYS = {
    "epoch",
    "suites",
    "python",
    "wheel-platform",
    "dpkg-exclude",
    "dpkg-include",
    "tools",
    "compile",
    "variants",
}


def normalise(name: str) -> str:
    """A distribution name in the form the package index compares by (PEP 503)."""
    return _SEPARATORS.sub("-", name).lower()


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One layer: one Dockerfile stage, fed by one section of the lock.

    `collect` holds glob patterns of distribution names that land here although nobody lists them; the
    longest pattern that fits decides. `compile` names those of its sdists that a compiler builds on the
    layers below. `metadata_only` names those of which no more than name and version is installed. `remove`
    holds glob patterns of installed paths, below site-packages, that the image does without. `tree` holds
    folders of this repository.
    """

    name: str
    debs: tuple[str, ...] = ()
    wheels: tuple[str, ...] = ()
    collect: tuple[str, ...] = ()
    compile: tuple[str, ...] = ()
    metadata_only: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    tree: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class VariantConfig:
    """One flavour of the stack: `cpu` or `cu130`.

    `leave_out` names distributions that are not installed although something asks for them.
    `compatible_with` holds requirements that the locked versions leave room for; they are not installed.
    `cuda_archs` are the compute capabilities that wheels are compiled for; empty without a GPU.
    """

    name: str
    summary: str
    layers: tuple[LayerConfig, ...]
    python_from_debs: tuple[str, ...] = ()
    leave_out: tuple[str, ...] = ()
    compatible_with: tuple[str, ...] = ()
    cuda_archs: tuple[str, ...] = ()

    @property
    def excluded(self) -> tuple[str, ...]:
        """What the resolver must not bring."""
        return (*self.python_from_debs, *self.leave_out)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole table. `inputs` is the sha256 of the table, whatever its layout in the file."""

    epoch: int
    suites: tuple[str, ...]
    python: str
    wheel_platform: str
    dpkg_exclude: tuple[str, ...]
    dpkg_include: tuple[str, ...]
    tool_wheels: tuple[str, ...]
    tool_debs: tuple[str, ...]
    compile_wheels: tuple[str, ...]
    compile_debs: tuple[str, ...] = ()
    compile_env: Mapping[str, Mapping[str, str]]
    variants: tuple[VariantConfig, ...]
    inputs: str

    def variant(self, name: str) -> VariantConfig:
        """The variant of that name.

        Raises:
            UsageError: There is none.
        """
        for variant in self.variants:
            if variant.name == name:
                return variant
        known = ", ".join(v.name for v in self.variants)
        raise UsageError(f"unknown variant '{name}'", hint=f"choose one of: {known}")


def load_config(root: Path, text: str | None = None) -> Config:
    """Read pyproject.toml below `root`, or a text that is to become that file.

    Raises:
        ConfigError: The file or the table is missing, or a key is unknown or of the wrong type.
    """
    path = root / "pyproject.toml"
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8") if text is None else text)
    except FileNotFoundError:
        raise ConfigError(f"no pyproject.toml in {root}", hint="run from the project's root folder") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"pyproject.toml is not valid TOML: {error}",
            hint="mend it there; `git diff pyproject.toml` shows what changed",
        ) from None
    table = document.get("tool", {}).get("dsv32-image")
    if not isinstance(table, dict):
        raise ConfigError("pyproject.toml has no [tool.dsv32-image]", hint="see README, 'What goes in'")
    try:
        return _parse(table)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"[tool.dsv32-image] in pyproject.toml: {_describe(error)}",
            hint="compare with the comments beside that table",
        ) from None


def _describe(error: Exception) -> str:
    return f"key {error} is missing" if isinstance(error, KeyError) else str(error)


def _parse(table: dict[str, Any]) -> Config:
    _refuse_unknown(table, _TOP_KEYS, "the table")
    variants = []
    for name, body in sorted(table["variants"].items()):
        _refuse_unknown(body, _VARIANT_KEYS, f"variant {name}")
        layers = tuple(_layer(item, name) for item in body["layers"])
        names = [layer.name for layer in layers]
        if len(set(names)) != len(names):
            raise ValueError(f"variant {name} has two layers of one name")
        if not layers or not layers[0].debs or any(layer.debs for layer in layers[1:]):
            raise ValueError(f"variant {name}: the first layer, and only it, lists debs")
        variants.append(
            VariantConfig(
                name=name,
                summary=body["summary"],
                layers=layers,
                python_from_debs=tuple(normalise(d) for d in body.get("python-from-debs", ())),
                leave_out=tuple(normalise(d) for d in body.get("leave-out", ())),
                compatible_with=_strings(body.get("compatible-with", []), f"variant {name}"),
                cuda_archs=_archs(body.get("cuda-archs", []), f"variant {name}"),
            )
        )
    epoch = table["epoch"]
    if not isinstance(epoch, int):
        raise TypeError("epoch must be a number of seconds since 1970")
    tools = table.get("tools", {})
    _refuse_unknown(tools, _TOOL_KEYS, "tools")
    canonical = json.dumps(table, sort_keys=True, separators=(",", ":"))
    return Config(
        epoch=epoch,
        suites=_strings(table["suites"], "suites"),
        python=table["python"],
        wheel_platform=table["wheel-platform"],
        dpkg_exclude=_strings(table.get("dpkg-exclude", []), "dpkg-exclude"),
        dpkg_include=_strings(table.get("dpkg-include", []), "dpkg-include"),
        tool_wheels=_strings(tools.get("wheels", []), "tools"),
        tool_debs=_strings(tools.get("debs", []), "tools"),
        compile_env=_environments(table.get("compile", {})),
        compile_wheels=_strings(tools.get("compile", []), "tools"),
        compile_debs=_strings(tools.get("compile-debs", []), "tools"),
        variants=tuple(variants),
        inputs=hashlib.sha256(canonical.encode()).hexdigest(),
    )


def _layer(item: dict[str, Any], variant: str) -> LayerConfig:
    name = item["name"]
    where = f"layer {name} of {variant}"
    _refuse_unknown(item, _LAYER_KEYS, where)
    if not re.fullmatch(r"[a-z][a-z0-9]*", name):
        raise ValueError(f"{where}: a layer's name is lower case letters and digits")
    return LayerConfig(
        name=name,
        debs=_strings(item.get("debs", []), where),
        wheels=_strings(item.get("wheels", []), where),
        collect=_strings(item.get("collect", []), where),
        compile=tuple(normalise(d) for d in _strings(item.get("compile", []), where)),
        metadata_only=tuple(normalise(d) for d in _strings(item.get("metadata-only", []), where)),
        remove=_strings(item.get("remove", []), where),
        tree=_strings(item.get("tree", []), where),
    )


def _environments(table: object) -> dict[str, dict[str, str]]:
    """`[tool.dsv32-image.compile.NAME]`: the variables that the build of a distribution reads."""
    if not isinstance(table, dict):
        raise TypeError("compile: expected a table of tables")
    for name, body in table.items():
        if not isinstance(body, dict) or not all(isinstance(value, str) for value in body.values()):
            raise TypeError(f"compile.{name}: expected variables with strings as values")
    return {normalise(name): dict(body) for name, body in table.items()}


def _archs(value: object, where: str) -> tuple[str, ...]:
    archs = _strings(value, where)
    for arch in archs:
        if not ARCH.fullmatch(arch):
            raise ValueError(f"{where}: {arch!r} is no compute capability such as '9.0'")
    return archs


def _strings(value: object, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise TypeError(f"{where}: expected a list of strings, got {value!r}")
    return tuple(value)


def _refuse_unknown(table: dict[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(set(table) - known)
    if unknown:
        meant = difflib.get_close_matches(unknown[0], sorted(known), n=1)
        hint = f"; did you mean {meant[0]!r}?" if meant else f" (known: {', '.join(sorted(known))})"
        raise ValueError(f"{where}: unknown key {unknown[0]!r}{hint}")
