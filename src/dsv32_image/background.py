"""Work that nobody waits for yet: a finished layer's gzip, while the engine already makes the next layer."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

P = ParamSpec("P")
T = TypeVar("T")

# More than a build has: no job stands in a queue, so one may wait for the result of another.
_MOST_JOBS = 64


class Background:
    """A block whose jobs have all ended when it is left, each in a thread of its own.

    * Left well: the jobs are waited for, and the first error of one is raised.
    * Left by an error: the jobs are waited for, so that what was made is kept. If one of them had failed
      before, its error is raised instead, since it came first (a full disk fails the engine next).
    * Left by Ctrl-C: the jobs are told to stop.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_MOST_JOBS, thread_name_prefix="background")
        self._failed: list[Exception] = []
        self._stop = threading.Event()

    def start(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Begin a job; `result()` of what is returned waits for it and raises its error."""

        def job() -> T:
            try:
                return work(*args, **kwargs)
            except CancelledError:
                raise
            except Exception as error:
                self._failed.append(error)
                raise

        return self._threads.submit(job)

    def check(self) -> None:
        """Raise the error of a job that has failed, before more time is spent on its build.

        Raises:
            Exception: What a job raised.
        """
        if self._failed:
            raise self._failed[0]

    def proceed(self) -> None:
        """A long job calls this now and then.

        Raises:
            CancelledError: The block was left by Ctrl-C.
        """
        if self._stop.is_set():
            raise CancelledError

    def __enter__(self) -> Background:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        interrupted = value is not None and not isinstance(value, Exception)
        if interrupted:
            self._stop.set()
        earlier = list(self._failed)
        self._threads.shutdown()
        if interrupted:
            return
        causes = self._failed if value is None else earlier
        if causes and causes[0] is not value:
            raise causes[0] from value
