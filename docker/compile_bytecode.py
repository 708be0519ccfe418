"""Compile what has no bytecode yet, so that the bytes depend on the sources alone.

Hash-based and unchecked (PEP 552): time stamps cannot make it stale and imports do not hash.
A .pyc also records which constants were shared, which depends on what its process compiled before
(python/cpython#78274). So the files are dealt to a fixed number of processes in sorted order, and
each process compiles its share in that order: the number of processors changes nothing.
"""

import os
import py_compile
import subprocess
import sys

SHARES = 4


def main(folders: list[str]) -> int:
    """Deal the sources below the folders to processes; the number of processes that failed."""
    sources = sorted(source for folder in folders for source in missing(folder))
    if not sources:
        return 0
    running: list[subprocess.Popen[str]] = []
    failed = 0
    for share in range(SHARES):
        if len(running) >= (os.cpu_count() or 1):
            failed += running.pop(0).wait() != 0
        process = subprocess.Popen(
            [sys.executable, "-B", "-I", __file__, "--share"], stdin=subprocess.PIPE, text=True
        )
        assert process.stdin is not None
        process.stdin.write("\n".join(sources[share::SHARES]))
        process.stdin.close()
        running.append(process)
    return failed + sum(process.wait() != 0 for process in running)


def missing(top: str) -> list[str]:
    """Sources without bytecode beside them."""
    found = []
    for folder, _, names in os.walk(top):
        cached = (
            set(os.listdir(os.path.join(folder, "__pycache__")))
            if "__pycache__" in os.listdir(folder)
            else set()
        )
        tag = sys.implementation.cache_tag
        found += [
            os.path.join(folder, name)
            for name in names
            if name.endswith(".py") and f"{name[:-3]}.{tag}.pyc" not in cached
        ]
    return found


def compile_share() -> int:
    """Compile the files named on standard input; files that are not Python 3 are left alone."""
    for source in sys.stdin.read().split("\n"):
        try:
            py_compile.compile(
                source, doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
            )
        except (py_compile.PyCompileError, UnicodeDecodeError, ValueError):
            # Templates and test data of other languages' versions; an import would say so itself.
            continue
    return 0


if __name__ == "__main__":
    sys.exit(compile_share() if sys.argv[1] == "--share" else main(sys.argv[1:]))
