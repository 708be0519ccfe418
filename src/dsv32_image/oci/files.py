"""Files that appear whole or not at all."""

from __future__ import annotations

import errno
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

from dsv32_image.errors import DiskFullError

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def disk_full(what: Path) -> Iterator[None]:
    """Turns "no space left" and "quota exceeded" into a `DiskFullError` that names the file."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskFullError(f"no space left while writing {what}", "free some space, run it again") from error


@contextmanager
def replacing(out: Path, *, mode: int = 0o644) -> Iterator[IO[bytes]]:
    """A new file that takes the place of `out` when the block ends well, and is removed when it does not.

    The temporary name is unique, so that two builds that share a cache cannot write into the same file.

    Raises:
        DiskFullError: No space left.
    """
    with disk_full(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        file = tempfile.NamedTemporaryFile(dir=out.parent, prefix=f".{out.name}.", delete=False)  # noqa: SIM115
        temporary = Path(file.name)
        try:
            with file:
                yield file
            temporary.chmod(mode)
            temporary.replace(out)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
