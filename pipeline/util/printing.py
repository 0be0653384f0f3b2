"""Print lines for the user to stderr; stdout belongs to the script."""

from __future__ import annotations

import errno
import os
import sys
import termios
from contextlib import suppress


def print_line(line: str) -> None:
    """Print a line to stderr, where that is open."""
    with suppress(OSError, ValueError):
        print(f"penstock: {printable(line)}", file=sys.stderr, flush=True)  # noqa: T201 (for the user)


def printable(text: str) -> str:
    """Return text without control characters (a model may sample them too); lines and tabs stay."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "�" for letter in text)


def leave_closed_terminal() -> None:
    """Discard output to a terminal that was closed: `print` would raise in the code of a user."""
    for descriptor in (1, 2):
        try:
            termios.tcgetattr(descriptor)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
                os.dup2(null, descriptor)
                os.close(null)
