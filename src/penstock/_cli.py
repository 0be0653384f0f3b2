"""The entry point of the command `penstock`. Errors are printed as sentences, and exit with status 1."""

from __future__ import annotations

import sys

from ._commands import commands
from ._pipeline.errors import PenstockError

__all__ = ["main"]


def main() -> None:
    """Run a command of `commands.py`."""
    try:
        commands()
    except (PenstockError, OSError) as error:
        sys.exit(f"penstock: {error}")
