"""Which patches of a series apply to a source, patch by patch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsv32_image.errors import PatchError
from dsv32_image.patching import plan_series

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dsv32_image.errors import ImageError
    from dsv32_image.patching import FileState, Patch


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of `check`: `error` is None where the patch applies."""

    package: str
    patch: str
    files: int = 0
    hunks: int = 0
    result: str
    error: ImageError | None = None


def try_series(
    package: str, patches: Sequence[Patch], files: Mapping[str, FileState], *, allow_offset: bool = False
) -> list[Row]:
    """Apply patch after patch in memory; one row each.

    With `allow_offset`, for a source that the series was not made on: hunks may sit at other lines, which the
    row says, and a patch that does not apply is left out and the next ones are tried all the same.
    """
    tree: dict[str, FileState | None] = dict(files)
    rows: list[Row] = []
    failed = ""
    for patch in patches:
        error: PatchError | None = None
        result = f"not tried after {failed}"
        if not failed or allow_offset:
            try:
                done = plan_series(tree.get, [patch], allow_offset=allow_offset)
                tree.update(done.changes)
                offsets = [(one.path, by) for one in done.applied for by in sorted(set(one.offsets)) if by]
                moved = [f"{path} {by:+d}" for path, by in offsets]
                result = f"applies at an offset: {', '.join(moved)}" if moved else "applies"
            except PatchError as caught:
                error, failed = caught, patch.name
                result = _where(patch, caught) if allow_offset else "does not apply"
        hunks = sum(len(file.hunks) for file in patch.files)
        rows.append(
            Row(
                package=package,
                patch=patch.name,
                files=len(patch.files),
                hunks=hunks,
                result=result,
                error=error,
            )
        )
    return rows


def _where(patch: Patch, error: PatchError) -> str:
    """File and hunk, from the first line of the error."""
    return error.message.split("\n", 1)[0].removeprefix(f"{patch.name} ")
