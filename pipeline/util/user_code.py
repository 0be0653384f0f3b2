"""Call code of users: environments, rewards, engines, stages, trainers, trackers, tokenizers.

A function may raise an exception that ends a task, a thread or a process without an error: CancelledError from an HTTP
client that was closed, SystemExit from a script that is called as a function, StopIteration from `next`. They are
failures of that call, so they leave it as `UserCodeExited`, an ordinary exception.

Two kinds of exceptions pass: a cancellation that was requested outside the call, and an exception that a signal raised
in the main thread. A task of a task group is cancelled by a scope, so a request without one came from the call; any
other task belongs to its caller, and each request counts.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar

import anyio

from ..errors import UserCodeExited
from .exception_groups import leaves
from .signal_exceptions import raised_by_signal

R = TypeVar("R")


def call_user(function: Callable[..., R], *arguments: Any) -> R:
    """Return the result of a user's function, which may block the thread.

    Raises:
        UserCodeExited: it raised an exception that is no error; see the module.
        Exception: raised by the function.

    >>> call_user(next, iter(()))
    Traceback (most recent call last):
    penstock.errors.UserCodeExited: StopIteration
    """
    try:
        return function(*arguments)
    except (StopIteration, StopAsyncIteration) as error:
        raise _exited(error) from error
    except Exception:
        raise
    except BaseException as error:
        if raised_by_signal(error):
            raise
        raise _exited(error) from error


async def await_user(function: Callable[..., Awaitable[R]], *arguments: Any) -> R:
    """Return the result of a user's async function; raises as `call_user`.

    The function leaves the task as it found it: requests to cancel the task that its own code made are withdrawn.
    """
    task = asyncio.current_task()
    assert task is not None  # noqa: S101 (an async function is called by a task)
    requests = task.cancelling()
    try:
        result = await function(*arguments)
    except (StopIteration, StopAsyncIteration) as error:
        raise _exited(error) from error
    except Exception:
        raise
    except BaseException as error:
        if _passes(error, task, requests):
            raise
        await _withdraw(task, requests)
        raise _exited(error) from error
    if task.cancelling() > requests and not _is_cancelled(task, requests):
        await _withdraw(task, requests)
    return result


@asynccontextmanager
async def open_user(
    make: Callable[..., AbstractAsyncContextManager[R, bool | None]], *arguments: Any
) -> AsyncGenerator[R]:
    """Enter the context manager that a user's function returns, and leave it after the body; as `await_user`."""
    manager = call_user(make, *arguments)
    entered = await await_user(manager.__aenter__)
    try:
        yield entered
    except BaseException as error:
        if not await await_user(manager.__aexit__, type(error), error, error.__traceback__):
            raise
    else:
        await await_user(manager.__aexit__, None, None, None)


def raised_text(error: BaseException) -> str:
    """Return the type and the text of an exception of a user's function: `ValueError: no such file`."""
    try:
        said = str(error)
    except Exception as raised:  # noqa: BLE001 (the user's class makes the text)
        said = f"its text cannot be made ({type(raised).__name__})"
    return said if isinstance(error, UserCodeExited) else f"{type(error).__name__}: {said}".rstrip(": ")


def _exited(error: BaseException) -> UserCodeExited:
    """Return the error for `error`, with its traceback: the place in the log is the user's."""
    kinds = dict.fromkeys(raised_text(leaf) for leaf in leaves(error))
    return UserCodeExited(", ".join(kinds)).with_traceback(error.__traceback__)


def _passes(error: BaseException, task: asyncio.Task[Any], requests: int) -> bool:
    """Return whether `error` came from outside the call that raised it."""
    # 1. The coroutine is closed, because its loop has ended: no task runs.
    if isinstance(error, GeneratorExit) and _running_task() is not task:
        return True
    # 2. A cancellation.
    if any(isinstance(leaf, asyncio.CancelledError) for leaf in leaves(error)) and _is_cancelled(task, requests):
        return True
    # 3. A signal.
    return raised_by_signal(error)


def _running_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def _is_cancelled(task: asyncio.Task[Any], requests: int) -> bool:
    """Return whether the cancellation of the running task was requested outside a call that found `requests`."""
    # 1. By a scope, which holds for every task within it.
    if anyio.current_effective_deadline() == -math.inf:
        return True
    # 2. By the owner of a task that no task group started; also just before the call, so each request counts.
    parent = anyio.get_current_task().parent_id
    if parent is None:
        return task.cancelling() > 0
    # 3. By a loop that ends, and cancels every task at once: those that wait for this one cancel their scopes next.
    return task.cancelling() > requests and any(
        id(other) == parent and other.cancelling() for other in asyncio.all_tasks()
    )


async def _withdraw(task: asyncio.Task[Any], requests: int) -> None:
    """Withdraw the requests to cancel `task` above `requests`.

    Raises:
        CancelledError: a request arrived meanwhile.
    """
    if task.cancelling() <= requests:
        return
    while task.cancelling() > requests:
        task.uncancel()
    try:
        await asyncio.sleep(0)  # raises a request that has had no effect yet
    except asyncio.CancelledError:
        if _is_cancelled(task, requests):
            raise
