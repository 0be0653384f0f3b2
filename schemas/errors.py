"""Errors that a record, a message or a configuration can raise before any stage or channel is involved."""

from __future__ import annotations

import msgspec

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The errors that msgspec raises for bytes that it cannot decode, or that do not have the requested type."""


class PenstockError(Exception):
    """The base class of every error that penstock raises itself."""


class InvalidRecord(PenstockError, ValueError):
    """A record breaks a rule of its schema: the message names the column, the expected value and the actual one."""


class InvalidConfig(PenstockError, ValueError):
    """A configuration or an argument cannot be used: the message has its name, the expected and the actual value."""


class ProtocolMismatch(PenstockError):
    """The other end has another protocol version, or carries another kind of record."""


class TokenizersDiffer(PenstockError):
    """Parts of a run have different tokenizers; the message lists the differences, with the identity of each."""
