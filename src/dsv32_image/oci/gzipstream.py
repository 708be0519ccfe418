"""Gzip whose bytes depend on the data alone, made on several processors.

The stream is cut into chunks of a fixed size and each becomes a gzip member of its own (RFC 1952, 2.2: a file
is a series of members), so neither the number of workers nor their timing shows. libdeflate gives the same
bytes on every x86-64 and comes as a hash-pinned wheel; zlib is the host's own and distributions swap in
zlib-ng, whose output, like that of isal, depends on the instructions the processor has.

Run as a program this file is one worker: length-prefixed chunks in, length-prefixed members out. Processes,
because `deflate` holds the GIL (60 chunks: 1.09 s in one thread, 1.29 s in two); of our own rather than
`multiprocessing`'s, because these end when the pipe closes, also after a kill -9 of the parent.
"""

from __future__ import annotations

import fcntl
import os
import queue
import signal
import struct
import subprocess
import sys
import zlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import deflate

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import TracebackType

CHUNK = 1 << 20  # bytes; 4 MiB would save 0.13% and make the last chunk of a layer wait longer
# A trixie root filesystem with torch, numpy and scipy, 1,314 MB as tar; processor seconds of the workers:
#   level 1: 453.8 MB in 8.8 s    level 4: 428.1 MB in 13.0 s
#   level 5: 419.3 MB in 16.8 s   level 6: 416.1 MB in 19.0 s
# On a twentieth of it, against level 6: 7 to 9 save at most 0.9% for 1.3 to 2.9 times the time, 10 to 12 save
# 3% for 10 to 22 times. From 4 to 6 a saved MB costs 0.5 s, more than sending it over a line of 20 Mbit/s
# takes; from 1 to 4 it costs 0.16 s.
LEVEL = 4
_LENGTH = struct.Struct("<I")


def compress_chunk(chunk: bytes | bytearray) -> bytearray:
    """One gzip member: no name, mtime 0, OS 255 (unknown)."""
    return deflate.gzip_compress(chunk, LEVEL)


class GzipPool:
    """Compresses chunks on `workers` processes; with one worker in this process.

    Args:
        workers: Number of processes; None for one a usable processor.
    """

    def __init__(self, workers: int | None = None) -> None:
        count = workers or len(os.sched_getaffinity(0))
        self._workers: list[subprocess.Popen[bytes]] = []
        if count == 1:
            return
        # The worker needs `deflate` from wherever this process has it, and nothing of the current folder.
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        command = [sys.executable, "-P", __file__]
        for _ in range(count):
            pipe = subprocess.PIPE
            worker = subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0, env=env)
            self._workers.append(worker)
            with suppress(OSError):  # a whole chunk at a time; the kernel may refuse it when many are open
                for end in (worker.stdin, worker.stdout):
                    fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, CHUNK)  # type: ignore[arg-type]

    def __enter__(self) -> GzipPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            for pipe in (worker.stdin, worker.stdout):
                if pipe is not None:
                    pipe.close()
        for worker in self._workers:
            worker.wait()

    def compress(self, chunks: Iterable[bytes]) -> Iterator[bytes | bytearray]:
        """Members in the order of the chunks; holds at most two chunks a worker in memory.

        Raises:
            ChildProcessError: A worker was killed.
        """
        if not self._workers:
            yield from map(compress_chunk, chunks)
            return
        idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        for worker in self._workers:
            idle.put(worker)

        def remote(chunk: bytes) -> bytes | bytearray:
            worker = idle.get()
            try:
                return _ask(worker, chunk)
            finally:
                idle.put(worker)

        pending: deque[Future[bytes | bytearray]] = deque()
        with ThreadPoolExecutor(len(self._workers)) as threads:
            try:
                for chunk in chunks:
                    pending.append(threads.submit(remote, chunk))
                    if len(pending) > 2 * len(self._workers):
                        yield pending.popleft().result()
                while pending:
                    yield pending.popleft().result()
            finally:
                for future in pending:
                    future.cancel()


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


def _ask(worker: subprocess.Popen[bytes], chunk: bytes) -> bytearray:
    assert worker.stdin is not None and worker.stdout is not None
    try:
        _send(worker.stdin.fileno(), chunk)
        member = _receive(worker.stdout.fileno())
    except (BrokenPipeError, EOFError):
        member = bytearray()
    if not member:
        raise ChildProcessError(f"a compression worker ended early with code {worker.wait()}")
    return member


def _send(fd: int, data: bytes | bytearray) -> None:
    for part in (_LENGTH.pack(len(data)), data):
        view = memoryview(part)
        while view:
            view = view[os.write(fd, view) :]


def _receive(fd: int) -> bytearray:
    (size,) = _LENGTH.unpack(_read(fd, _LENGTH.size))
    return _read(fd, size)


def _read(fd: int, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        got = os.readv(fd, [view])
        if not got:
            raise EOFError
        view = view[got:]
    return data


def _serve() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent; it closes the pipe
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a parent that is gone wants no traceback
    while True:
        try:
            chunk = _receive(0)
        except EOFError:
            return
        _send(1, compress_chunk(chunk))


if __name__ == "__main__":
    _serve()
