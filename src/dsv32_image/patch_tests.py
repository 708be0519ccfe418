"""Which tests a patch's header names: those that fail without it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dsv32_image.errors import PatchError

if TYPE_CHECKING:
    from pathlib import Path

    from dsv32_image.patching import Patch

_NODE = re.compile(r"([\w./-]+\.py)?::(\w+(?:\[[^\]]*\])?)")


def tests_of(patch: Patch, checkout: Path) -> tuple[str, ...]:
    """The node ids that a patch's `Test:` names; `::name` alone is in the file named before it.

    Raises:
        PatchError: None is named, or a named one is not in the checkout.
    """
    found: list[str] = []
    file = ""
    for match in _NODE.finditer(patch.fields["Test"]):
        file = match[1] or file
        found.append(f"{file}::{match[2]}")
    if not found:
        raise PatchError(
            f"{patch.name}: Test: names no test", "write it as smoke/test_x.py::test_y in the patch's header"
        )
    for node in found:
        file, _, name = node.partition("::")
        path = checkout / file
        function = name.partition("[")[0]
        if not file or not path.is_file() or f"def {function}(" not in path.read_text(encoding="utf-8"):
            raise PatchError(f"{patch.name}: Test: names {node}, which does not exist", f"look into {path}")
    return tuple(found)
