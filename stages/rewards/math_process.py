"""The main module of a process that compares mathematical answers with math-verify.

math-verify bounds its time by `signal.alarm`, which works in the main thread of a process only. Requests and replies
are lines of JSON: an answer that is right and a text in, a verdict out.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from ..._pipeline.processes.reply_loop import reply_to


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The verdict about one text."""

    correct: bool | None = None
    """True if the text contains the answer; None if the answer itself cannot be read."""
    error: str = ""
    """The exception that math-verify raised instead."""


def main(parent: str) -> None:
    """Compare until `parent`, the process that started this one, closes the pipe."""
    logging.disable(logging.WARNING)  # math-verify logs every timeout
    reply_to(parent, lambda: compare("1", "1"), _reply)  # the first call compiles its grammar


def _reply(line: bytes) -> Reply:
    try:
        return Reply(compare(*msgspec.json.decode(line, type=tuple[str, str])))
    except Exception as error:  # noqa: BLE001 (raised in the parent)
        return Reply(error=f"{type(error).__name__}: {error}")


def compare(answer: str, text: str) -> bool | None:
    r"""Return whether the last answer in `text` equals `answer`; None if `answer` cannot be read.

    >>> compare("0.5", r"It is $\\frac{1}{2}$."), compare("0.5", "It is 2."), compare("", "0")
    (True, False, None)
    """
    import math_verify  # noqa: PLC0415 (an extra)

    expected: list[Any] = math_verify.parse(answer) or math_verify.parse(rf"\boxed{{{answer}}}")
    return bool(math_verify.verify(expected, math_verify.parse(text))) if expected else None
