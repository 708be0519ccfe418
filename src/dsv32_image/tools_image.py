"""mmdebstrap where the host has none: the locked packages of `[tools.debs]`, run by docker or podman.

The root of that container is made without any image: the packages' files, unpacked one over the other. No
maintainer script runs; perl, apt and dpkg work without, given the two files that base-passwd would copy.
"""

from __future__ import annotations

import io
import tarfile
from typing import TYPE_CHECKING

from debian.debfile import DebFile

from dsv32_image.errors import BuildError, ToolMissingError
from dsv32_image.files import sha256_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from dsv32_image.engine import Engine
    from dsv32_image.lockfile import Deb
    from dsv32_image.store import Locked, Store

_ACCOUNTS = {
    "usr/share/base-passwd/passwd.master": "etc/passwd",
    "usr/share/base-passwd/group.master": "etc/group",
}


def run_in_container(
    engine: Engine | None,
    debs: Sequence[Deb],
    store: Store,
    fetch: Callable[[Sequence[Locked]], None],
    work: Path,
    command: Sequence[str],
    env: Mapping[str, str],
    log: Path,
) -> None:
    """Run a command of the tools in a container that sees `work` under the same path.

    Raises:
        ToolMissingError: There is no engine that can run it.
        BuildError: It failed; the message names the log.
    """
    if engine is None or not engine.runs_tools:
        raise ToolMissingError(
            "'mmdebstrap' is not installed, and there is no docker or podman to run it in",
            hint="apt-get install mmdebstrap (`sh scripts/nox` does it where apt is), or --engine docker",
        )
    fetch(debs)
    tag = f"localhost/dsv32-tools:{sha256_parts(*(deb.sha256 for deb in debs))[:16]}"
    if not engine.image_id(tag):
        root = work / "tools.tar"
        _unpack(debs, store, work, root)
        engine.import_root(root, tag)
        root.unlink()
    engine.run_tools(tag, work, command, env, log)


def _unpack(debs: Sequence[Deb], store: Store, work: Path, out: Path) -> None:
    """One tar of all files of the packages; a path that two packages list (a folder) is taken once."""
    seen: set[str] = set()
    accounts: dict[str, bytes] = {}
    with tarfile.open(out, "w", format=tarfile.PAX_FORMAT) as target:
        for deb in debs:
            path = store.place(deb, work)
            with DebFile(str(path)).data.tgz() as source:
                for member in source:
                    name = member.name.removeprefix("./").rstrip("/")
                    if name in seen and member.isdir():
                        continue
                    seen.add(name)
                    content = source.extractfile(member) if member.isreg() else None
                    data = content.read() if content else b""
                    if name in _ACCOUNTS:
                        accounts[_ACCOUNTS[name]] = data
                    target.addfile(member, io.BytesIO(data) if member.isreg() else None)
            path.unlink()
        if len(accounts) != len(_ACCOUNTS):
            raise BuildError("the locked tools lack base-passwd", hint="run `nox -s lock`")
        for name, data in accounts.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            target.addfile(info, io.BytesIO(data))
