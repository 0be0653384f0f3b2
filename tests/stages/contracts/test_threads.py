import asyncio
import sys
import threading
from functools import partial

import anyio
import pytest
from anyio.lowlevel import checkpoint

from penstock._stages.contracts.threads import Threads
from penstock.errors import UserCodeExited


async def test_a_call_returns_the_result_and_raises_the_exception_of_the_function() -> None:
    threads = Threads(1)

    assert await threads.call(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        await threads.call(lambda: 1 // 0)
    with pytest.raises(UserCodeExited, match="StopIteration"):
        await threads.call(lambda: next(iter(())))
    with pytest.raises(UserCodeExited, match="SystemExit: 3"):
        await threads.call(partial(sys.exit, 3))

    threads.close()


async def test_no_more_calls_run_at_once_than_there_are_threads() -> None:
    threads, now, most, lock = Threads(2), 0, 0, threading.Lock()

    def work() -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        with lock:
            now -= 1

    async with anyio.create_task_group() as tasks:
        for _ in range(20):
            tasks.start_soon(threads.call, work)

    assert most <= 2
    assert repr(threads) == "<Threads: 0 calls, 2 of 2 threads>"
    threads.close()


async def test_an_abandoned_call_keeps_its_thread_until_it_returns() -> None:
    threads, begun, release = Threads(1), anyio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def hang() -> None:
        loop.call_soon_threadsafe(begun.set)
        release.wait()

    hung = threads.start(hang)
    after: list[str] = []
    await begun.wait()

    with anyio.move_on_after(0):
        await asyncio.wrap_future(hung)
    threads.start_after(hung, lambda: after.append("closed"))
    await checkpoint()

    assert (hung.done(), after) == (False, [])
    assert repr(threads) == "<Threads: 1 calls, 1 of 1 threads>"
    release.set()
    assert await threads.call(lambda: "next") == "next"
    await threads.wait_idle()
    assert (hung.done(), after) == (True, ["closed"])
    threads.close()


async def test_a_call_whose_caller_was_cancelled_is_not_begun() -> None:
    threads, release = Threads(1), threading.Event()
    begun: list[str] = []
    threads.start(release.wait)

    with anyio.move_on_after(0):
        await threads.call(lambda: begun.append("in vain"))
    release.set()
    await threads.call(lambda: begun.append("wanted"))

    assert begun == ["wanted"]
    threads.close()
