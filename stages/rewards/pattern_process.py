"""The main module of a process that reads numbers in texts by a regular expression.

A pattern of a user meets the text of a model here: a match may take time without end and keep the interpreter to
itself, and only the end of the process ends it.
"""

from __future__ import annotations

import re

import msgspec

from ..._pipeline.workers.reply_loop import reply_to
from ..._schemas.conversion import decode_json

LONGEST_NUMBER = 1000
"""Characters."""


class Found(msgspec.Struct, frozen=True, omit_defaults=True):
    """The last match of a pattern in a text."""

    number: str | None = None
    """Its first group if it has one; None without a match."""


def main(parent: str) -> None:
    """Read numbers until `parent`, the process that started this one, closes the pipe."""
    reply_to(parent, lambda: None, lambda line: Found(last_match(*decode_json(line, tuple[str, str]))))


def last_match(pattern: str, text: str) -> str | None:
    r"""Return the text of the last match, or of its first group.

    >>> last_match(r"Score: (\d+)", "Score: 3, no, Score: 7"), last_match(r"\d", "none")
    ('7', None)
    """
    last = None
    for last in re.finditer(pattern, text):  # noqa: B007 (only the last one counts)
        pass
    found = None if last is None else last[1 if last.re.groups else 0]
    return None if found is None else found[:LONGEST_NUMBER]
