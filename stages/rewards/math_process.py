"""The main module of a process that compares mathematical answers with math-verify.

Its processor time is bounded by a signal: that works in the main thread of a process only. math-verify's own bound is
by the clock, and on a busy machine right answers would be wrong. Requests and replies are lines of JSON: the answers
that are right and a text in, a verdict out.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import msgspec

from ..._pipeline.workers.reply_loop import reply_to
from ..._schemas.conversion import decode_json
from .answer_forms import WHOLE, box_of, core_of, formulas_of, letters_of, same_brackets, with_marks, words_of
from .answer_units import same_units

GIVE_UP_S = 5.0
"""Processor time until a formula counts as one that cannot be read."""


class TextVerdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """The verdict about one text."""

    correct: bool | None = None
    """True if the text has a right answer; None if none is given."""
    error: str = ""
    """The exception that math-verify raised instead."""


def main(parent: str) -> None:
    """Compare until `parent`, the process that started this one, closes the pipe."""
    logging.disable(logging.WARNING)  # math-verify logs every timeout
    reply_to(parent, lambda: compare("1", "1"), _reply)  # the first call compiles its grammar


def _reply(line: bytes) -> TextVerdict:
    try:
        with bounded():
            return TextVerdict(compare(*decode_json(line, tuple[tuple[str, ...], str])))
    except Exception as error:  # noqa: BLE001 (raised in the parent)
        return TextVerdict(error=f"{type(error).__name__}: {error}")


@contextmanager
def bounded() -> Iterator[None]:
    """Raise in the body each time it has used GIVE_UP_S; math-verify then gives up on that text."""
    from math_verify.errors import TimeoutException  # noqa: PLC0415 (an extra)

    def give_up(_number: int, _frame: object) -> None:
        raise TimeoutException

    signal.signal(signal.SIGPROF, give_up)
    signal.setitimer(signal.ITIMER_PROF, GIVE_UP_S, GIVE_UP_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def compare(answers: str | Sequence[str], text: str) -> bool | None:
    r"""Return whether the last answer in `text` equals one of `answers`; None if none of them has content.

    >>> compare("0.5", r"It is $\frac{1}{2}$."), compare(["1", "x"], "It is 2."), compare("", "0")
    (True, False, None)
    """
    each = [answers] if isinstance(answers, str) else answers
    readable = [answer for answer in each if answer.strip()]
    if not readable:
        return None
    box = box_of(text)
    found = cache(lambda: [_parsed(formula) for formula in ((with_marks(text),) if box is None else formulas_of(box))])
    return any(_equal(answer, text, box, found) for answer in readable)


def _equal(answer: str, text: str, box: str | None, found: Callable[[], list[list[Any]]]) -> bool:
    """Return whether `answer` equals the last one of `text`; `found` returns math-verify's reading of `text`."""
    import math_verify  # noqa: PLC0415 (an extra)

    if (words := words_of(answer)) is not None:
        return words in {letters_of(written) for written in (_last_text(text) if box is None else [box])}
    if box is not None and not (same_brackets(answer, box) and same_units(core_of(answer), core_of(box))):
        return False
    expected = [_parsed(formula) for formula in formulas_of(answer)]
    return any(
        math_verify.verify(each, other, timeout_seconds=None)
        for each in expected
        for other in found()
        if not _one_side(each, other)
    )


def _parsed(formula: str) -> list[Any]:
    """Return math-verify's reading of `formula`: of a whole one the whole alone."""
    import math_verify  # noqa: PLC0415 (an extra)

    mode: Any = "first_match" if formula.startswith(WHOLE) else "any_match"
    found: list[Any] = math_verify.parse(formula, extraction_mode=mode, parsing_timeout=0)
    return found


def _one_side(expected: list[Any], found: list[Any]) -> bool:
    """Return whether a lone value stands for an equation of several unknowns: math-verify takes one side of it."""
    left = getattr(next(iter(expected), None), "lhs", None)
    return getattr(left, "is_Add", False) and not hasattr(next(iter(found), None), "lhs")


def _last_text(text: str) -> list[str]:
    """Return the last answer in `text` as it is written, with its units; empty if there is none."""
    import latex2sympy2_extended  # noqa: PLC0415 (of math-verify)
    import math_verify  # noqa: PLC0415 (an extra)

    as_written = latex2sympy2_extended.NormalizationConfig(
        basic_latex=False, units=False, malformed_operators=False, nits=False, boxed="all", equations=False
    )
    found = math_verify.parse(
        text, [math_verify.LatexExtractionConfig(normalization_config=as_written)], parsing_timeout=0
    )
    return [each for each in found if isinstance(each, str)]
