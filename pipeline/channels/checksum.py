"""A checksum over the bytes of a bundle, where a receiver requires one.

CRC-32 of zlib, as in the journal: it detects every error burst of up to 32 bits and needs no other package. xxHash is
about fifteen times as fast (9.6 against 0.6 GB/s): that would be worth a dependency if this were on by default.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

from ..._schemas import InvalidRecord

CHECKSUM_BYTES = 4


class ChecksumDiffers(InvalidRecord):
    """The received bytes are not those that were sent."""


def with_checksum(contents: bytes, columns: Iterable[Any]) -> bytes:
    """Return `contents`, followed by the checksum over them and the buffers `columns`."""
    return contents + _of(contents, columns)


def checked(contents: bytes, columns: Iterable[Any]) -> bytes:
    """Return the contents that `with_checksum` was given.

    Raises:
        ChecksumDiffers: the contents or the buffers `columns` have changed since.
    """
    plain, sent = contents[:-CHECKSUM_BYTES], contents[-CHECKSUM_BYTES:]
    found = _of(plain, columns)
    if found != sent:
        raise ChecksumDiffers(f"expected checksum {sent.hex()}, got {found.hex()}")
    return plain


def _of(contents: bytes, columns: Iterable[Any]) -> bytes:
    checksum = zlib.crc32(contents)
    for column in columns:
        checksum = zlib.crc32(column, checksum)
    return checksum.to_bytes(CHECKSUM_BYTES, "little")
