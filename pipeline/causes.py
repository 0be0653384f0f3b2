"""Exception groups, told as what they mostly are: one failure, and tasks that were cancelled because of it."""

from __future__ import annotations

__all__ = ["consists_of", "sole_cause"]


def sole_cause(error: BaseException) -> BaseException:
    """The only exception within `error`, however deep its groups are nested; `error` itself where there are several.

    >>> sole_cause(ExceptionGroup("tasks", [ExceptionGroup("more tasks", [ValueError("the cause")])]))
    ValueError('the cause')
    """
    cause = error
    while isinstance(cause, BaseExceptionGroup):
        if len(cause.exceptions) != 1:
            return error
        (cause,) = cause.exceptions
    return cause


def consists_of(error: BaseException, failure: BaseException | None) -> bool:
    """Whether `error` is `failure`, or groups that hold nothing else."""
    if isinstance(error, BaseExceptionGroup):
        return all(consists_of(inner, failure) for inner in error.exceptions)
    return error is failure
