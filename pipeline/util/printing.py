"""Print lines for the user to stderr; stdout belongs to the script."""

from __future__ import annotations

import sys
from contextlib import suppress


def print_line(line: str) -> None:
    """Print a line to stderr, where that is open."""
    with suppress(OSError, ValueError):
        print(f"penstock: {line}", file=sys.stderr, flush=True)  # noqa: T201 (for the user)
