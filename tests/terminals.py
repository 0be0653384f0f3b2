"""Pseudo terminals for tests, on machines that have them."""

from __future__ import annotations

import pty

import pytest


def open_terminal() -> tuple[int, int]:
    """Open a pseudo terminal, as `pty.openpty` does; skip the test where the machine has none."""
    try:
        return pty.openpty()
    except OSError as error:
        pytest.skip(f"the test needs a pseudo terminal, and this machine opens none: {error} (is devpts mounted?)")
