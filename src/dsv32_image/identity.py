"""What the image says of itself: version, revision, lock and variant as OCI labels."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from dsv32_image.own_wheel import project_version

if TYPE_CHECKING:
    from pathlib import Path

    from dsv32_image.lockfile import Lock


def image_tag(variant: str) -> str:
    """The name under which an engine knows the image."""
    return f"localhost/dsv32:{variant}"


def image_labels(root: Path, lock: Lock, variant: str) -> dict[str, str]:
    """The labels of an image."""
    return {
        "org.opencontainers.image.title": "dsv32",
        "org.opencontainers.image.version": project_version(root),
        "org.opencontainers.image.revision": revision(root),
        "dsv32.lock.digest": f"sha256:{lock.digest}",
        "dsv32.variant": variant,
    }


IMAGE_INPUTS = ("versions.lock", "pyproject.toml", "docker", "patches", "src", "scripts", "smoke")


def revision(root: Path) -> str:
    """The last commit that touched what goes into the image, `-dirty` if the folder differs from it.

    Not HEAD: a commit to the docs would change the image's digest though no byte in it changed.
    """

    def git(*words: str) -> str:
        command = ["git", "-C", str(root), *words, "--", *IMAGE_INPUTS]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("log", "-1", "--format=%H")
    if not commit:
        return "unknown"
    return f"{commit}-dirty" if git("status", "--porcelain", "--untracked-files=normal") else commit
