"""Channels to other processes by URL: `serve` opens the receiving end, `connect` the sending one.

async with serve("shm://", TrajectoryGroup) as inbox:            # inbox.url: give it to the senders
async with connect(url, TrajectoryGroup) as outbox:              # in another process
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar

from ..._schemas import tokenizer_identity
from ..._schemas.choices import check_choice
from ..._schemas.control import check_name
from ..._schemas.numbers import finite_number, whole_number
from ..errors import InvalidConfig
from ..util.file_descriptors import available
from .channel import REMOTE_CAPACITY, REMOTE_CAPACITY_BYTES
from .heartbeat import DEFAULT_HEARTBEAT_TIMEOUT_S
from .keys import ChannelKey
from .members import DEFAULT_ABSENCE_TIMEOUT_S, Members, OnAbsence
from .receiver_config import PeerListener, ReceiverConfig
from .remote_receiver import RemoteReceiver
from .remote_sender import RemoteSender
from .shm import connect_shm, serve_shm
from .tcp import connect_tcp, serve_tcp
from .transport import R

DEFAULT_MAX_SENDERS = 64
"""Senders at a time: with `capacity_bytes`, the bound on the memory that one channel can allocate on a machine."""

DESCRIPTORS = {"shm": 12, "tcp": 17}
"""File descriptors that opening an end takes: its sockets, temporary ones, and those of ZeroMQ itself, once."""

E = TypeVar("E")


def serve(
    url: str,
    record_type: type[R],
    *,
    capacity: int = REMOTE_CAPACITY,
    capacity_bytes: int = REMOTE_CAPACITY_BYTES,
    senders: int | None = None,
    absence_timeout_s: float = DEFAULT_ABSENCE_TIMEOUT_S,
    on_absence: OnAbsence = "fail",
    max_senders: int = DEFAULT_MAX_SENDERS,
    listener: PeerListener | None = None,
    name: str | None = None,
    key: ChannelKey | None = None,
    heartbeat_timeout_s: float | None = DEFAULT_HEARTBEAT_TIMEOUT_S,
    tokenizer: Any = None,
    checksum: bool = False,
) -> AbstractAsyncContextManager[RemoteReceiver[R]]:
    """Open the receiving end of a channel, within the `async with`.

    Args:
        url: `shm://` for senders on this host, `tcp://127.0.0.1:0` for any that reach the port; beyond loopback, as in
            `tcp://0.0.0.0:5555`, with a `key`.
        record_type: TrajectoryGroup or TrainBatch; senders of anything else are rejected.
        capacity: records that each sender may have in flight; at 1, release a record before you receive the next.
        capacity_bytes: bytes that each sender may have in flight; over shm the size of its segment, allocated in full.
        senders: how many members the stream has: senders with a name that stays the same when they are restarted. It
            ends when so many are done, which they report by closing; one that is absent is awaited. None for senders
            that need no name: the stream ends when one or more have connected and all have disconnected, and `receive`
            raises PeerLost for each that did not close.
        absence_timeout_s: with `senders`, how long an absent member is awaited: from when it was lost; where it never
            connected, from when the channel opened, or from when the newest of the others first connected.
        on_absence: the consequence: `fail` has `receive` raise MemberAbsent, `continue` goes on as if it were done.
        max_senders: how many may be connected at a time; the channel allocates at most `max_senders × capacity_bytes`.
        listener: is notified of lost senders, instead of `receive` raising PeerLost.
        name: the name of this end, for messages.
        key: the key that senders must have too, over tcp: everything is encrypted, and no other process can connect.
            On loopback this user's key is used by default; it is created on first use.
        heartbeat_timeout_s: a sender whose process is stopped, or whose host hangs, for this time is lost; a busy one
            is not. None waits for it as long as its process exists.
        tokenizer: the tokenizer here, or its `TokenizerIdentity`: senders that name another one are rejected, those
            that name none are admitted.
        checksum: senders compute one over every record, and a record that does not match is not received: `receive`
            raises RecordCorrupted, which is a PeerLost. Costs each end about 2 s for a GB.

    Raises:
        InvalidConfig: a count that is no whole number or below 1, seconds that are not finite, a name that is too long
            or not printable, an unknown scheme, a key that is missing, or one that shm does not use, or a tokenizer
            without an identity.
        InvalidKey, KeyUnavailable: this user's key cannot be used; the message names the file.
        OutOfFileDescriptors: this process has too few left.
        DiskFull, NotWritable: the folder for the sockets cannot be written; the message names it.
    """
    absence_timeout_s = finite_number("absence_timeout_s", absence_timeout_s)
    if senders is not None:
        senders = whole_number("senders", senders)
    check_choice("on_absence", on_absence, OnAbsence)
    counted = None if senders is None else Members(senders, absence_timeout_s=absence_timeout_s, on_absence=on_absence)
    config = ReceiverConfig(
        capacity=whole_number("capacity", capacity),
        capacity_bytes=whole_number("capacity_bytes", capacity_bytes),
        members=counted,
        max_senders=whole_number("max_senders", max_senders),
        listener=listener,
        name=check_name(name or f"process {os.getpid()}"),
        key=key,
        heartbeat_timeout_s=_heartbeat_timeout_s(heartbeat_timeout_s),
        tokenizer=None if tokenizer is None else tokenizer_identity(tokenizer),
        checksum=checksum,
    )
    scheme = scheme_of(url, key)
    opened = serve_shm if scheme == "shm" else serve_tcp
    return _with_descriptors(DESCRIPTORS[scheme], "the receiving end of a channel", opened(url, record_type, config))


def connect(
    url: str,
    record_type: type[R],
    *,
    name: str | None = None,
    key: ChannelKey | None = None,
    heartbeat_timeout_s: float | None = DEFAULT_HEARTBEAT_TIMEOUT_S,
    tokenizer: Any = None,
) -> AbstractAsyncContextManager[RemoteSender[R]]:
    """Open the sending end of a channel, within the `async with`.

    Leaving waits until the receiver has everything, or has disconnected: then `outbox.failure` is the reason.

    Args:
        url: the value of `inbox.url`.
        record_type: the type that the receiver receives.
        name: the name of this sender, for messages; a receiver that counts members recognises it by this name, so it
            must be the same after every restart. At most 128 printable characters.
        key: the key that the receiver has too, over tcp; on loopback this user's key by default.
        heartbeat_timeout_s: a receiver whose process is stopped, or whose host hangs, for this time is lost; a busy one
            is not, except in the handshake of shm. None waits for it as long as its process exists.
        tokenizer: the tokenizer that made the token ids, or its `TokenizerIdentity`, for a receiver that knows its own.

    Raises:
        TokenizersDiffer: the receiver has another tokenizer; the message lists the differences and both identities.
        InvalidConfig: `tokenizer` has no identity, or `url` is not one of a channel.
        NobodyListens: no receiver answers at `url`.
        ProtocolMismatch: the receiver carries another kind of record, or speaks another version.
        TooManySenders: the receiver has granted all its places.
        PeerClosed: the receiver has another key.
        InvalidKey, KeyUnavailable: this user's key cannot be used; the message names the file.
        OutOfSharedMemory: the machine has no room for the segment.
        OutOfFileDescriptors: this process, or the receiver, has too few left.
        MemberNameRequired, MemberNameInUse, TooManyMembers: the receiver counts senders by name, and not this one.
        InvalidConfig: seconds that are not finite, an unknown scheme, a key that is missing, or one that shm does not
            use, or a name that is too long or not printable.
    """
    heartbeat_timeout_s = _heartbeat_timeout_s(heartbeat_timeout_s)
    name = check_name(name or "")
    identity = None if tokenizer is None else tokenizer_identity(tokenizer)
    scheme = scheme_of(url, key)
    if scheme == "shm":
        opened = connect_shm(url, record_type, name=name, heartbeat_timeout_s=heartbeat_timeout_s, tokenizer=identity)
    else:
        opened = connect_tcp(
            url, record_type, name=name, key=key, heartbeat_timeout_s=heartbeat_timeout_s, tokenizer=identity
        )
    return _with_descriptors(DESCRIPTORS[scheme], "the sending end of a channel", opened)


@asynccontextmanager
async def _with_descriptors(count: int, purpose: str, opened: AbstractAsyncContextManager[E]) -> AsyncIterator[E]:
    """Open an end of a channel if `count` file descriptors are available; ZeroMQ ends the process without them."""
    available(count, purpose)
    async with opened as end:
        yield end


def _heartbeat_timeout_s(heartbeat_timeout_s: float | None) -> float | None:
    return None if heartbeat_timeout_s is None else finite_number("heartbeat_timeout_s", heartbeat_timeout_s)


def scheme_of(url: str, key: ChannelKey | None) -> str:
    """Return the transport of a URL: shm or tcp.

    Raises:
        InvalidConfig: it has another one, or a key with shm.
    """
    scheme = url.partition("://")[0]
    if scheme not in {"shm", "tcp"}:
        raise InvalidConfig(f"url: expected one that begins with shm:// or tcp://, got {url!r}")
    if scheme == "shm" and key is not None:
        raise InvalidConfig("key: expected none for shm://: only this user can open its sockets and its memory")
    return scheme
