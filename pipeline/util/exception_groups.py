"""Unwrap exception groups: most hold one failure, of a task whose siblings were cancelled because of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


def single_exception(error: BaseException) -> BaseException:
    """Return the only exception within `error`, at any depth of groups; `error` itself where there are several.

    >>> single_exception(ExceptionGroup("tasks", [ExceptionGroup("more tasks", [ValueError("the cause")])]))
    ValueError('the cause')
    """
    cause = error
    while isinstance(cause, BaseExceptionGroup):
        if len(cause.exceptions) != 1:
            return error
        (cause,) = cause.exceptions
    return cause


@contextmanager
def unwrap_single() -> Iterator[None]:
    """Raise the only exception in a group that the body raises, with its own cause, instead of the group.

    >>> with unwrap_single():
    ...     raise ExceptionGroup("tasks", [ValueError("the cause")])
    Traceback (most recent call last):
    ValueError: the cause
    """
    try:
        yield
    except BaseExceptionGroup as group:
        _raise(single_exception(group))


@contextmanager
def unwrap_first() -> Iterator[None]:
    """Raise the first exception in a group that the body raises, with its own cause, instead of the group.

    For tasks that fail of the same cause: the others add no information.

    >>> with unwrap_first():
    ...     raise ExceptionGroup("tasks", [ValueError("the cause"), ValueError("the same cause")])
    Traceback (most recent call last):
    ValueError: the cause
    """
    try:
        yield
    except BaseExceptionGroup as group:
        _raise(next(leaves(group)))


def _raise(cause: BaseException) -> NoReturn:
    """Raise an exception of a group with its own cause or context."""
    raise cause from cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def first_exception(error: BaseException, kind: type[BaseException]) -> BaseException:
    """Return the first exception within `error` where all are of one `kind`, with the others as notes.

    Return `single_exception` of it otherwise. For equal workers that fail of the same cause at the same time.
    """
    causes = list(leaves(error))
    if not all(isinstance(cause, kind) for cause in causes):
        return single_exception(error)
    first, *others = causes
    for other in others:
        first.add_note(f"besides: {str(other).partition(chr(10))[0]}")
    return first


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions within `error`, at any depth of groups; `error` itself where it is no group."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error


def all_of(error: BaseException, kind: type[BaseException]) -> bool:
    """Return whether `error` is of one `kind`, or groups that hold only such."""
    return all(isinstance(leaf, kind) for leaf in leaves(error))


def consists_of(error: BaseException, failure: BaseException | None) -> bool:
    """Return whether `error` is `failure`, or groups that hold only it."""
    if isinstance(error, BaseExceptionGroup):
        return all(consists_of(inner, failure) for inner in error.exceptions)
    return error is failure
