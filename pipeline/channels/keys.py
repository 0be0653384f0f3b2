"""The key of a tcp channel: only processes that have it can connect, and no other can read or change a message.

Everything travels under CurveZMQ, with a pair of keys for each end derived from the one secret. To complete the
handshake a sender needs the receiver's public key: it is never sent, and can only be derived from the secret. Ends that
do not encrypt prove to each other that they have the secret.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import zmq
import zmq.utils.z85

from ..errors import InvalidKey
from ..util.atomic_file import create_atomically
from ..util.os_errors import explaining_os_errors

SECRET_BYTES = 32

NONCE_BYTES = 16
"""Random bytes of each end, that a proof is made for."""

LARGEST_FILE = 4096
"""Bytes of a key file that are read: a key takes 65 of them."""

Role: TypeAlias = Literal["receiver", "sender"]


class CurvePair(NamedTuple):
    """A pair of keys in Z85, as ZeroMQ takes them."""

    public: bytes
    secret: bytes


class ChannelKey:
    """32 random bytes that both ends of a channel know; kept in a file of mode 0600.

    >>> key = ChannelKey.create("/tmp/run-17.key")         # doctest: +SKIP
    >>> serve("tcp://0.0.0.0:5555", TrajectoryGroup, key=key)       # doctest: +SKIP
    """

    def __init__(self, secret: bytes) -> None:
        """Make a key from its bytes.

        Raises:
            InvalidKey: there are not 32 of them.
        """
        if len(secret) != SECRET_BYTES:
            raise InvalidKey(
                f"expected a key of {SECRET_BYTES} bytes, got {len(secret)}: make one with Key.create(path)"
            )
        self._secret = secret

    def __repr__(self) -> str:
        return "<Key>"

    @classmethod
    def create(cls, path: str | Path) -> ChannelKey:
        """Create a key in a new file that only this user can read. Copy it to the other host over a trusted connection.

        Raises:
            FileExistsError: there is one already.
            DiskFull, NotWritable: the file cannot be written; no part of it stays.
        """
        key = cls(secrets.token_bytes(SECRET_BYTES))
        with explaining_os_errors("a key", Path(path)):
            create_atomically(Path(path), f"{key._secret.hex()}\n".encode(), mode=0o600)
        return key

    @classmethod
    def load(cls, path: str | Path) -> ChannelKey:
        """Return the key in a file that `create` wrote.

        Raises:
            InvalidKey: the file holds no key, or others than its owner may read it.
            OSError: there is no such file.
        """
        with Path(path).open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(LARGEST_FILE)
        if mode & 0o077:
            raise InvalidKey(f"expected {path} to be readable by its owner alone, got mode {mode & 0o777:o}: chmod 600")
        try:
            return cls(bytes.fromhex(content.decode("ascii")))
        except ValueError:
            raise InvalidKey(
                f"expected {path} to hold {2 * SECRET_BYTES} hexadecimal digits: Key.create(path)"
            ) from None

    def protect(self, socket: zmq.Socket[bytes], role: Role) -> None:
        """Make a socket, not yet bound or connected, communicate only with peers that have the same key."""
        ours, receiver = self._pair(role), self._pair("receiver")
        socket.setsockopt(zmq.CURVE_PUBLICKEY, ours.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, ours.secret)
        if role == "receiver":
            socket.setsockopt(zmq.CURVE_SERVER, 1)
        else:
            socket.setsockopt(zmq.CURVE_SERVERKEY, receiver.public)

    def proof(self, role: Role, receiver_nonce: bytes, sender_nonce: bytes, content: bytes = b"") -> bytes:
        """Return what only an end with this key can answer to the nonces of both ends: HMAC-SHA256, 32 bytes.

        Args:
            role: of the end that proves its key.
            receiver_nonce: random bytes of the receiver.
            sender_nonce: likewise of the sender.
            content: what it sends with the proof.
        """
        proved = b"proof " + role.encode() + receiver_nonce + sender_nonce + content
        return hmac.digest(self._secret, proved, hashlib.sha256)

    def _pair(self, role: Role) -> CurvePair:
        derived = hmac.digest(self._secret, b"curve " + role.encode(), hashlib.sha256)
        secret = zmq.utils.z85.encode(derived)
        return CurvePair(zmq.curve_public(secret), secret)
