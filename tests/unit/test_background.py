"""Jobs in the background of a build: they end with its block, and their errors are those of the build."""

import os
import signal
import threading
from concurrent.futures import CancelledError

import pytest

from dsv32_image.background import Background
from dsv32_image.errors import DiskFullError, EngineError


def full():
    raise DiskFullError("no space left while writing layer.tar.gz")


def test_jobs_run_beside_each_other_and_may_wait_for_each_other():
    with Background() as background:
        first = background.start(threading.Event().wait, 0.05)
        jobs = [background.start(lambda n=n: (first.result(), n)) for n in range(20)]
        assert [job.result() for job in jobs] == [(False, n) for n in range(20)]


def test_the_block_ends_after_its_jobs():
    gate, done = threading.Event(), []
    with Background() as background:
        background.start(lambda: (gate.wait(5), done.append("job")))
        assert not done
        gate.set()
    assert done == ["job"]


def test_an_error_that_nobody_asked_for_is_raised_at_the_end_as_it_is():
    with pytest.raises(DiskFullError, match=r"layer\.tar\.gz"), Background() as background:
        background.start(full)


def test_an_error_is_raised_once_where_its_result_is_asked_for():
    with pytest.raises(DiskFullError) as caught, Background() as background:
        background.start(full).result()
    assert caught.value.__cause__ is None


def test_check_raises_what_failed_before_more_work_is_begun():
    begun = []
    with pytest.raises(DiskFullError), Background() as background:
        background.check()
        background.start(full).exception()
        background.check()
        begun.append("engine")
    assert not begun


def test_the_error_that_came_first_is_the_one_that_is_shown():
    with pytest.raises(DiskFullError), Background() as background:
        background.start(full).exception()
        raise EngineError("the engine failed, since the disk was full")


def test_an_error_of_the_block_stands_and_what_runs_is_finished():
    gate, done = threading.Event(), []
    with pytest.raises(EngineError), Background() as background:
        background.start(lambda: (gate.wait(5), done.append("layer kept")))
        background.start(lambda: (gate.wait(5), full()))
        threading.Timer(0.05, gate.set).start()
        raise EngineError("the engine failed")
    assert done == ["layer kept"]


def test_ctrl_c_ends_long_jobs_and_is_not_replaced():
    ended = []

    def long():
        try:
            while True:
                background.proceed()
        except CancelledError:
            ended.append("stopped")
            raise

    with pytest.raises(KeyboardInterrupt), Background() as background:
        job = background.start(long)
        waiting = background.start(job.result)
        background.start(full).exception()
        os.kill(os.getpid(), signal.SIGINT)
        waiting.result()
    assert ended == ["stopped"]
    with pytest.raises(CancelledError):
        waiting.result()
