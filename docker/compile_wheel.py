"""Compile one sdist to a wheel by its own build backend, so that the same inputs give the same bytes.

What varies between two runs of one compiler over the same files is the folder they lie in, the order in which
a file system lists them (and so the order in which they are linked), times, and the number of processes
(which changes nothing in C++). The first is fixed by the caller, the next two here.

A compiler that is killed for want of memory is a matter of how many run at once: half as many go on from
where it stopped.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tarfile

BYTES_PER_JOB = 3 << 30  # what one g++ takes on the largest file of torch's headers, and some room
KILLED = re.compile(rb"Killed|signal (?:9|terminated)|Cannot allocate memory|virtual memory exhausted")
# Runs in the source folder, as a frontend would (PEP 517), with folders listed in sorted order.
HOOK = """
import os, pathlib, sys
walk, iterdir = os.walk, pathlib.Path.iterdir
def sorted_walk(top, topdown=True, onerror=None, followlinks=False):
    for folder, folders, names in walk(top, topdown, onerror, followlinks):
        folders.sort()
        names.sort()
        yield folder, folders, names
os.walk = sorted_walk
pathlib.Path.iterdir = lambda self: iter(sorted(iterdir(self)))
from setuptools.build_meta import __legacy__ as backend
backend.build_wheel(sys.argv[1])
"""


def main(layer: pathlib.Path, work: pathlib.Path, out: pathlib.Path) -> int:
    """Unpack, compile, and leave the wheel in `out`; 0, or the compiler's exit code."""
    settings = json.loads((layer / "settings.json").read_text())
    with tarfile.open(layer / settings["sdist"]) as archive:
        archive.extractall(work / "source", filter="data")
    (source,) = (work / "source").iterdir()
    out.mkdir()
    tools = work / "tools"
    env = {
        **os.environ,
        **settings["env"],
        "PYTHONPATH": str(tools),
        "PATH": f"{tools}/bin:/opt/dsv32/bin:{os.environ.get('PATH', os.defpath)}",
        "SOURCE_DATE_EPOCH": str(settings["epoch"]),
        "TMPDIR": str(work),
    }
    jobs = settings["jobs"] or affordable()
    while True:
        print(f"compiling {settings['sdist']} with {jobs} at once", flush=True)
        done = subprocess.run(
            [sys.executable, "-B", "-c", HOOK, str(out)],
            cwd=source,
            env={**env, "MAX_JOBS": str(jobs)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        sys.stdout.buffer.write(done.stdout)
        if done.returncode == 0:
            return 0
        killed = done.returncode < 0 or KILLED.search(done.stdout)
        if not killed or jobs == 1:
            print("out of memory with one compiler" if killed else "the build backend failed", flush=True)
            return abs(done.returncode)
        jobs //= 2
        print(f"a compiler was killed, as happens for want of memory: on with {jobs}", flush=True)


def affordable() -> int:
    """As many compilers as there are processors and memory for."""
    free = next(
        int(line.split()[1]) << 10
        for line in pathlib.Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable")
    )
    return max(1, min(len(os.sched_getaffinity(0)), free // BYTES_PER_JOB))


if __name__ == "__main__":
    sys.exit(main(*map(pathlib.Path, sys.argv[1:])))
