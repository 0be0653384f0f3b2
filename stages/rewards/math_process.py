"""The main module of a process that compares mathematical answers with math-verify.

math-verify bounds its time by `signal.alarm`, which works in the main thread of a process only. Requests and replies
are lines of JSON: the answers that are right and a text in, a verdict out.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from ..._pipeline.processes.reply_loop import reply_to
from .answer_forms import formulas_of, in_latex, letters_of, with_marks, words_of


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The verdict about one text."""

    correct: bool | None = None
    """True if the text has a right answer; None if none is given."""
    error: str = ""
    """The exception that math-verify raised instead."""


def main(parent: str) -> None:
    """Compare until `parent`, the process that started this one, closes the pipe."""
    logging.disable(logging.WARNING)  # math-verify logs every timeout
    reply_to(parent, lambda: compare("1", "1"), _reply)  # the first call compiles its grammar


def _reply(line: bytes) -> Reply:
    try:
        return Reply(compare(*msgspec.json.decode(line, type=tuple[tuple[str, ...], str])))
    except Exception as error:  # noqa: BLE001 (raised in the parent)
        return Reply(error=f"{type(error).__name__}: {error}")


def compare(answers: str | Sequence[str], text: str) -> bool | None:
    r"""Return whether the last answer in `text` equals one of `answers`; None if none of them has content.

    >>> compare("0.5", r"It is $\frac{1}{2}$."), compare(["1", "x"], "It is 2."), compare("", "0")
    (True, False, None)
    """
    each = [answers] if isinstance(answers, str) else answers
    readable = [answer for answer in each if answer.strip()]
    return any(_equal(answer, text) for answer in readable) if readable else None


def _equal(answer: str, text: str) -> bool:
    import math_verify  # noqa: PLC0415 (an extra)

    if (words := words_of(answer)) is not None:
        return words in {letters_of(found) for found in _last_text(text)}
    found = math_verify.parse(with_marks(in_latex(text)))
    expected: list[list[Any]] = [math_verify.parse(formula) for formula in formulas_of(answer)]
    return any(math_verify.verify(each, found) for each in expected if not _one_side(each, found))


def _one_side(expected: list[Any], found: list[Any]) -> bool:
    """Return whether a lone value stands for an equation of several unknowns, of which math-verify takes a side."""
    left = getattr(next(iter(expected), None), "lhs", None)
    return getattr(left, "is_Add", False) and not hasattr(next(iter(found), None), "lhs")


def _last_text(text: str) -> list[str]:
    """Return the last answer in `text` as it is written, with its units; empty if there is none."""
    import latex2sympy2_extended  # noqa: PLC0415 (of math-verify)
    import math_verify  # noqa: PLC0415 (an extra)

    as_written = latex2sympy2_extended.NormalizationConfig(
        basic_latex=False, units=False, malformed_operators=False, nits=False, boxed="all", equations=False
    )
    found = math_verify.parse(text, [math_verify.LatexExtractionConfig(normalization_config=as_written)])
    return [each for each in found if isinstance(each, str)]
