"""What the command `penstock` runs. Errors are sentences, and exit with 1."""

from __future__ import annotations

import sys

from .pipeline.errors import PenstockError

__all__ = ["main"]


def main() -> None:
    """Run a command of `commands.py`, if what it needs is installed."""
    try:
        from .commands import commands  # noqa: PLC0415 (typer comes with an extra)
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        sys.exit("penstock: the command line needs typer, which is not installed: pip install 'penstock[gateway]'")
    try:
        commands()
    except (PenstockError, OSError) as error:
        sys.exit(f"penstock: {error}")
