"""Log errors that may occur thousands of times: a distinct one with its traceback once, then only its count."""

from __future__ import annotations

from collections import Counter
from typing import Any, TypeAlias

_Place: TypeAlias = tuple[str, str, int]


class RepeatedErrors:
    """Count errors by their type and by the line that raised them.

    An error is logged when it first occurs, with its traceback, and from then on each time that its count has doubled,
    without one. Messages do not distinguish errors: they may hold the number of a prompt.
    """

    def __init__(self, log: Any, event: str) -> None:
        self._log = log
        self._event = event
        self._counts: Counter[_Place] = Counter()

    def record(self, error: BaseException, /, **fields: object) -> None:
        """Count `error`, and log it with `fields` where it is the first of its kind or its count has doubled."""
        place = _place(error)
        self._counts[place] += 1
        count = self._counts[place]
        if count & (count - 1) == 0:
            self._log.warning(self._event, **fields, count=count, exc_info=error if count == 1 else None)


def _place(error: BaseException) -> _Place:
    """Return the type of `error`, and the file and line of the innermost frame of its traceback."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    if frame is None:
        return type(error).__qualname__, "", 0
    return type(error).__qualname__, frame.tb_frame.f_code.co_filename, frame.tb_lineno
