"""Calls of an environment's code: every exception of it becomes `EnvironmentFailed`.

So it is never taken for an error of the policy. Knows no kind of environment.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias

from ..._pipeline.errors import PenstockError
from ..._pipeline.util.user_code import call_user, raised_text
from ..contracts.rollouts import RolloutFiltered
from ..contracts.threads import Threads

BeganFn: TypeAlias = Callable[[Future[Any]], None]


class EnvironmentFailed(PenstockError):
    """An environment raised, or returned an invalid value; `__cause__` is the original exception."""


async def called(
    threads: Threads, function: Callable[[], Any], take: Callable[[Any], Any], began: BeganFn | None = None
) -> Any:
    """Return `take` of the result of `function`, of an environment; `began` receives the call if it runs in a thread.

    Raises:
        EnvironmentFailed: either raised.
    """
    try:
        return call_user(take, await threads.call(function, began))
    except Exception as error:
        raise failed(error) from error


def failed(error: Exception) -> EnvironmentFailed:
    """Return the error that reports one of an environment's code; a filtered rollout says its reason alone."""
    said = str(error) if isinstance(error, RolloutFiltered) else f"environment raised {raised_text(error)}"
    return EnvironmentFailed(said)


def unchanged(value: Any) -> Any:
    """Return `value`."""
    return value
