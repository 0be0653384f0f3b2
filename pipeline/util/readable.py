"""Text of models, files and other processes on a terminal: nothing of it moves the cursor, or reverses a line."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment

from .printing import printable


@dataclass(frozen=True, slots=True)
class Readable:
    """Draws `content` without the control characters in its texts; colours and lines are those of rich."""

    content: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the segments of the content."""
        for segment in console.render(self.content, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
