"""Remove what the image does without from the distributions just installed, and keep one copy of equal files.

Both only touch files of the distributions of this layer, so that nothing of a layer below is written again.
Wheels cannot hold links, so a library with three names is in them three times; hard links mend that.
"""

import collections
import fnmatch
import hashlib
import importlib.metadata
import os
import re
import sys

WORTH_LINKING = 1 << 20


def main(site: str, requirements: str, patterns: str) -> int:
    """Trim below the folder `site`; 1 if a pattern matches nothing, which a new version can cause."""
    with open(requirements) as file:
        names = {normal(line.split("==")[0]) for line in file}
    files = sorted(
        os.path.normpath(os.path.join(site, entry))
        for dist in importlib.metadata.distributions(path=[site])
        if normal(dist.metadata["Name"]) in names
        for entry in dist.files or []
    )
    files = [path for path in files if os.path.isfile(path)]
    with open(patterns) as file:
        globs = file.read().split("\n")
    for glob in filter(None, globs):
        doomed = [p for p in files if fnmatch.fnmatchcase(os.path.relpath(p, site), glob)]
        if not doomed:
            print(f"trim: nothing matches '{glob}'; see `remove` in pyproject.toml", file=sys.stderr)
            return 1
        for path in doomed:
            os.unlink(path)
            drop_empty(os.path.dirname(path), site)
        files = [path for path in files if path not in set(doomed)]
    link_equal(files)
    return 0


def normal(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def drop_empty(folder: str, site: str) -> None:
    """Remove folders that have become empty."""
    while folder != site and not os.listdir(folder):
        os.rmdir(folder)
        folder = os.path.dirname(folder)


def link_equal(files: list[str]) -> None:
    """Make large files of equal bytes and mode links to the first of them."""
    sizes = collections.defaultdict(list)
    for path in files:
        status = os.stat(path)
        if status.st_size >= WORTH_LINKING:
            sizes[status.st_size, status.st_mode].append(path)
    for paths in sizes.values():
        if len(paths) < 2:
            continue
        first: dict[str, str] = {}
        for path in paths:
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if (leader := first.setdefault(digest, path)) != path:
                os.unlink(path)
                os.link(leader, path)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
