"""Gzip whose bytes depend on the data alone, made on several processors.

The stream is cut into chunks of a fixed size and each becomes a gzip member of its own (RFC 1952, 2.2: a file
is a series of members), so neither the number of workers nor their timing shows. libdeflate gives the same
bytes on every x86-64 and comes as a hash-pinned wheel; zlib is the host's own and distributions swap in
zlib-ng, whose output, like that of isal, depends on the instructions the processor has.

Threads, because `deflate` lets go of the GIL while it compresses (since 0.9.0, dcwatson/deflate#61).
"""

from __future__ import annotations

import os
import threading
import zlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import deflate

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator
    from pathlib import Path

CHUNK = 1 << 20  # bytes; 4 MiB would save 0.13% and make the last chunk of a layer wait longer
# A trixie root filesystem with torch, numpy and scipy, 1,314 MB as tar; processor seconds of the workers:
#   level 1: 453.8 MB in 8.8 s    level 4: 428.1 MB in 13.0 s
#   level 5: 419.3 MB in 16.8 s   level 6: 416.1 MB in 19.0 s
# On a twentieth of it, against level 6: 7 to 9 save at most 0.9% for 1.3 to 2.9 times the time, 10 to 12 save
# 3% for 10 to 22 times. From 4 to 6 a saved MB costs 0.5 s, more than sending it over a line of 20 Mbit/s
# takes; from 1 to 4 it costs 0.16 s.
LEVEL = 4
# Niceness of the compressing threads: the build waits for the engine first, and for these only at the end.
# Each step is worth a quarter; with 10, other people's work on the machine would starve that end.
_NICE = 5


def compress_chunk(chunk: bytes | bytearray) -> bytearray:
    """One gzip member: no name, mtime 0, OS 255 (unknown)."""
    return deflate.gzip_compress(chunk, LEVEL)


def gzip_members(source: Path, workers: int | None = None) -> Generator[bytearray]:
    """The gzip of a file, member by member; at most two chunks a worker are in memory.

    Args:
        source: The file; it must not change meanwhile.
        workers: Threads that compress; changes the speed, never the bytes. None: one a usable processor.

    Raises:
        OSError: The file cannot be read.
    """
    count = workers or len(os.sched_getaffinity(0))
    pending: deque[Future[bytearray]] = deque()
    with source.open("rb") as file, ThreadPoolExecutor(count, initializer=_step_back) as threads:
        descriptor = file.fileno()

        def member(offset: int) -> bytearray:
            return compress_chunk(os.pread(descriptor, CHUNK, offset))

        try:
            for offset in range(0, os.fstat(descriptor).st_size, CHUNK):
                pending.append(threads.submit(member, offset))
                if len(pending) > 2 * count:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def _step_back() -> None:
    """Linux schedules threads, so one of them can be nicer than its process; elsewhere it need not be."""
    thread = threading.get_native_id()
    with suppress(OSError):
        # Never forward, which root may: a whole build may be nicer already.
        os.setpriority(os.PRIO_PROCESS, thread, max(_NICE, os.getpriority(os.PRIO_PROCESS, thread)))


def inflate(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """The content of a gzip file of any number of members.

    Raises:
        ValueError: Not gzip, damaged, or cut short.
    """
    stream: zlib._Decompress | None = None
    try:
        for block in blocks:
            rest, full = block, False
            while rest or full:
                stream = stream or zlib.decompressobj(wbits=31)
                # Bounded, so that a block of a few bytes cannot unfold into gigabytes at once.
                plain = stream.decompress(rest, CHUNK)
                yield plain
                rest = stream.unused_data if stream.eof else stream.unconsumed_tail
                full = not stream.eof and len(plain) == CHUNK  # there may be more inside, without new input
                if stream.eof:
                    stream = None
    except zlib.error as error:
        raise ValueError(f"damaged gzip: {error}") from error
    if stream is not None:
        raise ValueError("gzip cut short")
