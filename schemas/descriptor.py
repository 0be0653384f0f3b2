"""The descriptor: a small message with the location of records. The span itself describes their columns."""

from __future__ import annotations

from typing import NamedTuple

from .bounds import Count


class Descriptor(NamedTuple):
    """The location of a published bundle: one record, or several that were sent together."""

    sequence: Count
    """Number of its last record; those of one sender count from 1."""
    records: Count
    """Records in it."""
    slot: Count
    """First slot of the span; where the payload travels in frames (tcp), the sequence again."""
    slots: Count
    """Slots in the span; 0 where the payload travels in frames."""
    generation: Count
    """Uses of the first slot before this one."""
    nbytes: Count
    """Bytes of the records, contents and padding included."""

    def bytes_of(self, records: int) -> int:
        """Return the bytes of some of its records, as if all were alike."""
        return self.nbytes // self.records * records
