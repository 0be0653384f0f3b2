"""The calls of users' code: what passes, and what becomes an error."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NoReturn

import anyio
import pytest
from anyio.lowlevel import checkpoint

from penstock._pipeline.util.user_code import await_user, call_user, open_user
from penstock.errors import UserCodeExited

EXITS = [
    asyncio.CancelledError("closed"),
    SystemExit(3),
    KeyboardInterrupt("stop"),
    GeneratorExit("closed"),
    StopIteration("no more"),
    StopAsyncIteration("no more"),
    BaseExceptionGroup("tasks", [ValueError("first"), SystemExit(3)]),
]


def fail(error: BaseException) -> NoReturn:
    raise error


async def fail_async(error: BaseException) -> NoReturn:
    await checkpoint()
    raise error


async def in_group(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of an async function in a task of a task group, where users' functions run."""
    results: list[Any] = []

    async def call() -> None:
        results.append(await function(*arguments))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
    return results[0]


@pytest.mark.parametrize("error", EXITS, ids=repr)
async def test_what_ends_a_task_or_a_process_becomes_an_error_with_its_type_and_text(error: BaseException) -> None:
    with pytest.raises(UserCodeExited) as raised:
        call_user(fail, error)
    with pytest.raises(RuntimeError) as awaited:  # of a StopIteration Python itself makes one
        await await_user(fail_async, error)

    group = isinstance(error, BaseExceptionGroup)
    text = "ValueError: first, SystemExit: 3" if group else f"{type(error).__name__}: {error}"
    assert str(raised.value) == text
    assert raised.value.__cause__ is error
    assert str(awaited.value) == ("coroutine raised StopIteration" if isinstance(error, StopIteration) else text)


async def test_errors_and_results_pass_as_they_are() -> None:
    error = ValueError("no simulator")

    with pytest.raises(ValueError) as raised:  # noqa: PT011 (compared below)
        await await_user(fail_async, error)

    assert raised.value is error
    assert call_user(max, 1, 2) == 2


async def test_a_cancellation_by_a_scope_around_the_call_passes() -> None:
    with anyio.move_on_after(0.001) as scope:
        await await_user(anyio.sleep_forever)

    assert scope.cancelled_caught


async def test_a_cancellation_by_an_outer_scope_passes_although_the_code_has_tasks_of_its_own() -> None:
    async def work() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.sleep(60))
            async with asyncio.timeout(60):
                await asyncio.gather(asyncio.sleep(60), asyncio.sleep(60))

    with anyio.move_on_after(0.001) as scope:
        await in_group(await_user, work)

    assert scope.cancelled_caught


async def test_a_task_of_its_own_can_be_cancelled_by_its_owner() -> None:
    task = asyncio.ensure_future(await_user(anyio.sleep_forever))
    await checkpoint()

    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task


def test_the_end_of_the_loop_cancels_calls_in_the_tasks_of_a_group() -> None:
    errors: list[BaseException] = []

    async def call() -> None:
        try:
            await await_user(anyio.sleep_forever)
        except BaseException as error:
            errors.append(error)
            raise

    async def begin() -> object:
        task = asyncio.ensure_future(in_group(call))
        await anyio.wait_all_tasks_blocked()
        return task

    asyncio.run(begin())

    assert [type(error) for error in errors] == [asyncio.CancelledError]


def cancel_this_task() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


async def cancel_and_wait() -> None:
    cancel_this_task()
    await checkpoint()


async def cancel_and_return() -> str:
    cancel_this_task()
    return "done"


async def await_what_was_cancelled() -> None:
    task = asyncio.ensure_future(asyncio.sleep(60))
    await checkpoint()
    task.cancel("Cancelled via cancel scope 7f")  # as a scope of anyio would
    await task


@pytest.mark.parametrize("function", [cancel_and_wait, await_what_was_cancelled])
async def test_a_cancellation_by_the_code_itself_is_an_error_of_the_call(function: Callable[[], Any]) -> None:
    async def call() -> bool:
        with anyio.move_on_after(60) as scope:
            with pytest.raises(UserCodeExited, match="CancelledError"):
                await await_user(function)
            await checkpoint()
        with anyio.move_on_after(0) as later:
            await checkpoint()
        return later.cancelled_caught and not scope.cancel_called

    assert await in_group(call), "the scopes of the task work as before"


async def test_a_request_to_cancel_that_has_no_effect_within_the_call_is_withdrawn() -> None:
    async def call() -> str:
        result = await await_user(cancel_and_return)
        await checkpoint()
        return str(result)

    assert await in_group(call) == "done"


async def test_a_context_manager_of_a_user_is_entered_and_left_like_a_call() -> None:
    @asynccontextmanager
    async def opened(enter: BaseException | None, leave: BaseException | None) -> AsyncGenerator[str]:
        if enter:
            raise enter
        yield "engine"
        if leave:
            raise leave

    with pytest.raises(UserCodeExited, match="SystemExit: 3"):
        async with open_user(opened, SystemExit(3), None):
            pass
    with pytest.raises(UserCodeExited, match="SystemExit: 4"):
        async with open_user(opened, None, SystemExit(4)) as engine:
            assert engine == "engine"
    with pytest.raises(ValueError, match="body"):
        async with open_user(opened, None, None):
            raise ValueError("body")


@contextmanager
def handled(by: Any) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, by)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def send_sigint() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):  # the handler runs between two instructions
        pass


@pytest.mark.parametrize("exit_by", [signal.default_int_handler, lambda *_: sys.exit(3)], ids=["python's", "its own"])
async def test_what_a_signal_raises_in_the_main_thread_passes(exit_by: Any) -> None:
    async def work() -> None:
        send_sigint()

    with handled(exit_by):
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            call_user(send_sigint)
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            await await_user(work)


async def test_a_keyboard_interrupt_in_a_thread_or_of_the_code_itself_is_an_error() -> None:
    found: list[str] = []

    def call() -> None:
        try:
            call_user(fail, KeyboardInterrupt("stop"))
        except UserCodeExited as error:
            found.append(str(error))

    with handled(signal.default_int_handler):
        call()
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    assert found == ["KeyboardInterrupt: stop"] * 2


async def test_a_coroutine_that_is_closed_ends_quietly() -> None:
    call = await_user(anyio.sleep_forever)

    class Drive:
        def __await__(self) -> Generator[Any, Any, None]:
            steps = call.__await__()
            next(steps)
            yield

    with anyio.move_on_after(0):
        await Drive()
    await asyncio.get_running_loop().run_in_executor(None, call.close)
