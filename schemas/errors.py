"""Errors that a record, a message or a configuration can raise before any stage or channel is involved."""

from __future__ import annotations

import msgspec

__all__ = ["UNREADABLE", "InvalidConfig", "InvalidRecord", "PenstockError", "ProtocolMismatch", "TokenizersDiffer"]

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that it cannot decode, or that are not of the type that was asked for."""


class PenstockError(Exception):
    """The root of every error that penstock raises on its own account."""


class InvalidRecord(PenstockError, ValueError):
    """A record breaks a rule of its schema: the message names the column, what was expected and what came."""


class InvalidConfig(PenstockError, ValueError):
    """A configuration does not fit its schema: the message gives the path of the value, what was expected and came."""


class ProtocolMismatch(PenstockError):
    """The other end speaks another protocol version, or carries another kind of record."""


class TokenizersDiffer(PenstockError):
    """Parts of a run have different tokenizers; the message says in what, with the identity of each."""
