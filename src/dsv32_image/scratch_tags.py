"""The names of images that live as long as one build, and what killed builds left of them.

A name tells whose it is: two checkouts may build at once with one engine, and several machines or containers
may share the engine of one of them.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import MutableSequence

    from dsv32_image.engine import Engine

#: Of the image that a build starts from; stages without a name, which buildah keeps as images, inherit it.
LABEL = "dsv32.build"

_OWNER = r"(?P<host>[0-9a-f]{8})-(?P<process>[0-9]+)"
_NAME = re.compile(rf"localhost/dsv32-(?:part|build|compile):[0-9a-f]{{1,16}}-{_OWNER}(?:-[0-9]+)?")


def scratch_tag(kind: str, key: str, number: int | None = None) -> str:
    """A name for an image of this process: `part`, `build` or `compile`, and the key of what is in it."""
    suffix = "" if number is None else f"-{number}"
    return f"localhost/dsv32-{kind}:{key[:16]}-{_owner()}{suffix}"


def scratch_labels() -> dict[str, str]:
    """Whose the images are that a build derives from one with this label."""
    return {LABEL: _owner()}


def is_stale(name: str) -> bool:
    """Whether the build is gone that made an image of that name, or with that value of the label.

    One of this process was made by an earlier of its number.
    """
    found = _NAME.fullmatch(name) or re.fullmatch(_OWNER, name)
    if not found or found["host"] != _host():
        return False  # another machine's processes cannot be seen from here
    process = int(found["process"])
    return process == os.getpid() or not _runs(process)


def remove_stale(engine: Engine) -> None:
    """Remove from an engine what killed builds of this machine left in it."""
    for tag in engine.own_tags():
        if is_stale(tag):
            engine.remove(tag)
    for image, owner in engine.unnamed().items():
        if is_stale(owner):
            engine.remove(image)


def remove_all(engine: Engine, tags: MutableSequence[str]) -> None:
    """Remove images from an engine, and their names from the list."""
    while tags:
        engine.remove(tags.pop())


def _owner() -> str:
    return f"{_host()}-{os.getpid()}"


def _host() -> str:
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # somebody else's
    return True
