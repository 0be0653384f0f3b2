"""The protocol of a view."""

from __future__ import annotations

from typing import Protocol


class Display(Protocol):
    """Shows a run."""

    async def open(self) -> None:
        """Begin to show it."""
        ...

    async def refresh(self) -> None:
        """Show it until cancelled."""
        ...

    async def close(self) -> None:
        """Show it for the last time, and leave the terminal as it was."""
        ...
