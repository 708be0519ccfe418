"""Every error a user can cause, each with its own exit code.

Only `cli.main` catches these. A message says what happened and where; `hint` is the next step.
Exit code 1 is left for "the check ran and the answer is no" (`lock --check`, a failed smoke run),
2 for a command line that cannot be understood.
"""

from __future__ import annotations


class ImageError(Exception):
    """Base of all errors shown without a traceback.

    Args:
        message: What happened and where, one or two lines.
        hint: The next step for the user, one line; empty if there is none.
    """

    exit_code = 3

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(ImageError):
    """The command line names something that does not exist (variant, engine, package)."""

    exit_code = 2


class ConfigError(ImageError):
    """`[tool.dsv32-image]` in pyproject.toml is missing or malformed."""

    exit_code = 10


class LockMissingError(ImageError):
    """There is no versions.lock, or no section for the wanted variant."""

    exit_code = 11


class LockEditedError(ImageError):
    """versions.lock does not carry the digest of its own content: edited by hand or cut short."""

    exit_code = 12


class LockStaleError(ImageError):
    """versions.lock was made from other inputs than pyproject.toml and patches/ hold now."""

    exit_code = 13


class ResolveError(ImageError):
    """uv or apt found no set of versions that satisfies what pyproject.toml asks for."""

    exit_code = 14


class RefError(ImageError):
    """A git repository has no such commit, tag or branch, or the name does not say which."""

    exit_code = 15


class RefMovedError(ImageError):
    """A git tag names another commit than when it was locked."""

    exit_code = 16


class HashMismatchError(ImageError):
    """A downloaded or stored file does not have the locked sha256."""

    exit_code = 20


class DownloadError(ImageError):
    """A file could not be fetched: index or mirror unreachable, file gone, connection cut."""

    exit_code = 21


class OfflineError(ImageError):
    """`--offline` was asked and a file is not in the store."""

    exit_code = 22


class DiskFullError(ImageError):
    """No space left while writing."""

    exit_code = 23


class FileAccessError(ImageError):
    """A file or folder cannot be read or written: permissions, a missing parent, a read-only disk."""

    exit_code = 24


class PatchError(ImageError):
    """A patch does not apply exactly, is listed but missing, or is malformed."""

    exit_code = 30


class WheelError(ImageError):
    """A wheel or sdist cannot be unpacked, built or repacked."""

    exit_code = 31


class NotReproducibleError(ImageError):
    """The same inputs gave other bytes than before."""

    exit_code = 32


class ToolMissingError(ImageError):
    """A program the step needs (mmdebstrap, skopeo, git, apt) is not installed."""

    exit_code = 40


class EngineError(ImageError):
    """The container engine is missing, dead, or cannot do what is asked."""

    exit_code = 41


class BuildError(ImageError):
    """mmdebstrap or the engine's build failed."""

    exit_code = 42


class BusyError(ImageError):
    """Another process holds the lock file of this checkout."""

    exit_code = 43


class ImageLayoutError(ImageError):
    """An engine's layer or an OCI layout is damaged or holds something we refuse to guess about."""

    exit_code = 44


class HostUnfitError(ImageError):
    """`doctor` found something on this host that keeps the image from being built or run."""

    exit_code = 50
