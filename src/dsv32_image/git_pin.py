"""`nox -s lock -- --megatron`: pyproject.toml names a commit, the lock has its source archive.

A tag or branch is looked up here and nowhere else. What it named is noted in the lock (`ref`), so that a tag
that moved is seen when somebody locks it again or asks by `lock --check --megatron`.
"""

from __future__ import annotations

import copy
import re
import tomllib
from typing import TYPE_CHECKING, Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from dsv32_image import lock as lock_step
from dsv32_image.config import load_config, normalise
from dsv32_image.errors import ConfigError, LockMissingError, RefMovedError, UsageError
from dsv32_image.files import write_atomic
from dsv32_image.git_archive import pin_source
from dsv32_image.git_source import Repository
from dsv32_image.git_spec import parse_spec
from dsv32_image.lockfile import read_lock

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from dsv32_image.config import Config
    from dsv32_image.git_source import Resolved
    from dsv32_image.git_spec import GitSpec
    from dsv32_image.lockfile import Lock
    from dsv32_image.store import Store
    from dsv32_image.ui import Ui

MEGATRON = "megatron-core"
# Strings of one line, and comments, which are skipped.
_TOKEN = re.compile(r"""("(?:[^"\\\n]|\\.)*"|'[^'\n]*')|#[^\n]*""")


def lock_megatron(
    root: Path, asked: str, ui: Ui, *, upgrade: Iterable[str] | None = None, store: Store
) -> None:
    """Lock another Megatron; pyproject.toml is rewritten after the lock is, and not if that fails.

    Args:
        root: The project's folder.
        asked: `git+URL@REF`, or the version of a release.
        ui: Where to say what happens.
        upgrade: See `make_lock`.
        store: Where the source archive goes.

    Raises:
        UsageError: `asked` is neither.
        RefError, RefMovedError: There is no such commit, or the tag is another one than when it was locked.
        ImageError: See `make_lock`.
    """
    path = root / "pyproject.toml"
    load_config(root)  # so that its own errors come first
    text = path.read_text(encoding="utf-8")
    if asked.startswith("git+") or "://" in asked:
        spec = parse_spec(asked)
        with ui.step("lock", f"looking up {spec.ref} in {spec.repo}"):
            resolved = Repository(spec.repo, store.home).resolve(spec.ref)
        _refuse_moved(root, spec, resolved)
        wanted, ref = f"@ git+{spec.repo}@{resolved.commit}", "" if resolved.kind == "commit" else spec.ref
        ui.say(f"   lock  {MEGATRON} is commit {resolved.commit}")
    else:
        wanted, ref = f"=={_release(asked)}", ""
    new = rewrite(text, MEGATRON, wanted)
    config = load_config(root, new)
    lock_step.make_lock(root, config, ui, upgrade=upgrade, store=store, refs={MEGATRON: ref})
    if new != text:
        write_atomic(path, new.encode())
        ui.say(f"   lock  wrote pyproject.toml: {MEGATRON} {wanted}")


def moved_rows(lock: Lock, asked: str, cache_home: Path) -> list[tuple[str, str, str]]:
    """Whether `asked` still is what is locked: no row, or one (what, locked, now). Asks the remote.

    Raises:
        UsageError, RefError, DownloadError: As `lock_megatron`.
    """
    locked = {d.name: d for layers in lock.variants.values() for layer in layers for d in layer.wheels}
    found = locked.get(MEGATRON)
    has = found.version if found else "none"
    if not asked.startswith("git+") and "://" not in asked:
        now = _release(asked)
        return [] if found and Version(has) == Version(now) else [(f"{MEGATRON} {asked}", has, now)]
    spec = parse_spec(asked)
    now = Repository(spec.repo, cache_home).resolve(spec.ref).commit
    pin = lock.git.get(MEGATRON)
    if pin and (pin.repo, pin.commit) == (spec.repo, now):
        return []
    return [
        (f"{MEGATRON} {spec.ref}", f"{pin.commit} of {pin.repo}" if pin else has, f"{now} of {spec.repo}")
    ]


def commit_source(config: Config, asked: str, store: Store) -> Path:
    """The source archive of megatron-core at `git+URL@REF`, in the store; the lock is not asked.

    Raises:
        UsageError, RefError, DownloadError, WheelError: As `lock_megatron`.
    """
    spec = parse_spec(asked)
    commit = Repository(spec.repo, store.home).resolve(spec.ref).commit
    env = config.compile_env.get(MEGATRON, {})
    return store.path(pin_source(MEGATRON, spec.repo, commit, "", env, store).dist.sha256)


def rewrite(text: str, name: str, wanted: str) -> str:
    """pyproject.toml with another requirement for a distribution in all variants; all else as it was.

    Args:
        text: The file.
        name: The distribution.
        wanted: What follows its name (and extras): `==1.0` or `@ git+…`.

    Raises:
        ConfigError: No variant lists it, or it is written in a way that cannot be replaced.
    """
    before = tomllib.loads(text)
    after = copy.deepcopy(before)
    replaced: dict[str, str] = {}
    for variant in after["tool"]["dsv32-image"]["variants"].values():
        for layer in variant["layers"]:
            layer["wheels"] = [_replace(line, name, wanted, replaced) for line in layer.get("wheels", [])]
    if not replaced:
        raise ConfigError(
            f"no variant in pyproject.toml lists {name}", hint="add it to the wheels of a layer"
        )

    def swap(match: re.Match[str]) -> str:
        string = match[1]
        return f'"{replaced[string[1:-1]]}"' if string and string[1:-1] in replaced else match[0]

    new = _TOKEN.sub(swap, text)
    if _with_wheels(tomllib.loads(new)) != after:
        raise ConfigError(
            f"the requirement on {name} in pyproject.toml cannot be replaced by itself",
            hint=f'write "{next(iter(replaced.values()))}" there and run `nox -s lock`',
        )
    return new


def _refuse_moved(root: Path, spec: GitSpec, resolved: Resolved) -> None:
    """A branch moves, and the table of changes says so; a tag that did was not a release."""
    try:
        pin = read_lock(root).git.get(MEGATRON)
    except LockMissingError:
        return
    if (
        pin
        and resolved.kind == "tag"
        and (pin.repo, pin.ref) == (spec.repo, spec.ref)
        and pin.commit != resolved.commit
    ):
        raise RefMovedError(
            f"tag {spec.ref} of {spec.repo} moved: locked is {pin.commit}, it now names {resolved.commit}",
            hint=f"ask its authors; if it is meant: --megatron git+{spec.repo}@{resolved.commit}",
        )


def _release(text: str) -> str:
    try:
        return str(Version(text))
    except InvalidVersion:
        raise UsageError(
            f"'{text}' is neither the version of a release nor a git URL",
            hint="--megatron 0.19.2, or --megatron git+https://HOST/PATH@REF",
        ) from None


def _replace(line: str, name: str, wanted: str, replaced: dict[str, str]) -> str:
    try:
        requirement = Requirement(line)
    except InvalidRequirement:
        return line
    if normalise(requirement.name) != name:
        return line
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    gap = " " if wanted.startswith("@") else ""
    replaced[line] = f"{requirement.name}{extras}{gap}{wanted}"
    return replaced[line]


def _with_wheels(document: dict[str, Any]) -> dict[str, Any]:
    for variant in document["tool"]["dsv32-image"]["variants"].values():
        for layer in variant["layers"]:
            layer.setdefault("wheels", [])
    return document
