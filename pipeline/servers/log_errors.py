"""Find the error in the output of a program that explains its end.

The last lines are often about something else: an inference server of several processes prints the traceback of the one
that failed first, and then those of the others, for want of it. Knows neither processes nor files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

TRACEBACK = "Traceback (most recent call last):"

ERROR = re.compile(r"\b(?:ERROR|FATAL|CRITICAL|PANIC)\b|(?:\b|[a-z])(?:[Ee]rror|[Ee]xception|[Ff]atal|panicked)\b.*:")
"""Matches a line about an error, by its level or by the name of an exception."""

MAX_LINES = 5
"""The most lines of an exception's message."""


def first_error(lines: Sequence[str]) -> str:
    r"""Return the exception that the first traceback in `lines` ends with, or else the first line about an error.

    Returns:
        At most `MAX_LINES` lines, without a logger's prefix; empty where there is neither.

    >>> log = "(core) Traceback (most recent call last):\n(core)   File …\n(core) OSError: no such file\nExiting: error"
    >>> first_error(log.splitlines())
    'OSError: no such file'
    """
    for number, line in enumerate(lines):
        if line.endswith(TRACEBACK) and (raised := _raised(lines[number + 1 :], line.removesuffix(TRACEBACK))):
            return "\n".join(raised)
    return next((line.strip() for line in lines if ERROR.search(line)), "")


def _raised(lines: Sequence[str], logged: str) -> list[str]:
    """Return the exception at the end of a traceback, whose lines begin with `logged`; other lines may intervene."""
    raised: list[str] = []
    for line in lines:
        if not line.startswith(logged):
            continue
        text = line.removeprefix(logged).rstrip()
        is_frame_or_empty = not text or text.startswith((" ", "\t"))
        if not raised and is_frame_or_empty:
            continue
        if raised and (not text or text.endswith(TRACEBACK) or len(raised) == MAX_LINES):
            break
        if raised and not logged and not is_frame_or_empty:
            break  # without a logger's prefix, only the first line is certain to belong to the exception
        raised.append(text)
    return raised
