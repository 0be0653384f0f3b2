"""The descriptor: the small message that says where a record lies. What lies there is told by the span itself."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Descriptor"]


class Descriptor(NamedTuple):
    """Where a published record lies."""

    sequence: int
    """Counts the records of one sender from 1."""
    slot: int
    """First slot of the span; where the payload travels in frames (tcp), the sequence again."""
    slots: int
    """Slots in the span; 0 where the payload travels in frames."""
    generation: int
    """How often the first slot had been used."""
    nbytes: int
    """Bytes of the record, contents and padding included."""
