"""What the command `penstock` runs. Errors are sentences, and exit with 1."""

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
