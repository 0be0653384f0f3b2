"""A sender that outlives its receiver: it keeps each record until a checkpoint holds it, and sends it again if need be.

When the receiver has disconnected, it connects to a new one, and sends the records that it keeps, in order, before
any new one. The ledger there refuses those that are not needed, because they are in flight there or were trained. All
it knows of checkpoints is that the receiver reports trajectories as `saved`: those trained, and those dropped.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import anyio
import anyio.to_thread

from ..._schemas import GroupId, TrajectoryGroup, tokenizer_identity
from ..._schemas.numbers import finite_number, whole_number
from ..accounting.retention import Retention
from ..accounting.telemetry import get_logger
from ..errors import MemberNameInUse, NobodyListens, PeerClosed, PeerLost, ReplayBufferFull, TooManySenders
from ..util.exception_groups import unwrap_single
from ..util.retry_pace import RetryPace
from ..util.waiting import WaitClock, Waiters
from .channel import ChannelStatistics
from .heartbeat import DEFAULT_HEARTBEAT_TIMEOUT_S
from .keys import ChannelKey
from .remote_sender import RemoteSender
from .transports import connect

log = get_logger("penstock.channel")

DEFAULT_CAPACITY = 4096
"""Records: more than are sent between two checkpoints."""

DEFAULT_CAPACITY_BYTES = 2**30

RECONNECT_TIMEOUT_S = 3600.0
"""Bound on the time without a receiver: a new machine has to be found and a model loaded."""

LAST_MESSAGES_S = 1.0
"""Bound on the flight of messages that a receiver sent before it closed."""

ConnectTo: TypeAlias = Callable[[str], AbstractAsyncContextManager[RemoteSender[TrajectoryGroup]]]
"""Opens a connection to a URL."""

_DISCONNECTED = (PeerClosed, PeerLost)
_UNAVAILABLE = (MemberNameInUse, NobodyListens, PeerClosed, PeerLost, TooManySenders, OSError)


@dataclass(slots=True, eq=False)
class _Retained:
    """A record that is kept until it is saved."""

    record: TrajectoryGroup
    sent: bool = False
    """True if it was sent at least once."""


class ReplayingSender:
    """The sending end of a channel whose receiver may die and come back; see `connect_with_replay`."""

    def __init__(self, capacity: int, capacity_bytes: int, reconnect_timeout_s: float, name: str | None = None) -> None:
        self._capacity = whole_number("capacity", capacity)
        self._capacity_bytes = whole_number("capacity_bytes", capacity_bytes)
        self._reconnect_timeout_s = finite_number("reconnect_timeout_s", reconnect_timeout_s, zero=True)
        self._unsaved = Retention[_Retained]()
        """In the order of sending."""
        self._nbytes = 0
        self._connection: RemoteSender[TrajectoryGroup] | None = None
        """The connection, while there is one and all kept records have been sent on it."""
        self._failure: Exception | None = None
        """The reason why there will be no other connection."""
        self._name = name
        self._counted = name is not None
        """True if a receiver may wait until this sender is done: the newest one decided it."""
        self._finished = False
        """True once all records are sent and saved, and every receiver that has to know this does."""
        self._changed = Waiters()
        self._clock = WaitClock()

    def __repr__(self) -> str:
        state = "connected" if self._connection is not None else "connecting"
        return f"<ReplayingSender: {state}, {len(self._unsaved)} records unsaved>"

    @property
    def unsaved(self) -> int:
        """Return the number of records that no checkpoint is known to hold."""
        return len(self._unsaved)

    async def send(self, record: TrajectoryGroup, /) -> None:
        """Send `record`, waiting for a receiver and for credit if need be. A cancelled call has not sent it.

        Raises:
            ReplayBufferFull: so much is kept already that `record` has no room.
            NobodyListens, PeerLost, PeerClosed: no receiver was available within the time that was given.
            RecordTooLarge: it would not fit an empty channel.
        """
        retained = self._retain(record)
        try:
            while not await self._send_on(await self._connected(), retained):
                pass
        except BaseException:
            self._forget(retained)
            raise

    def _retain(self, record: TrajectoryGroup) -> _Retained:
        if len(self._unsaved) >= self._capacity or self._nbytes + record.nbytes > self._capacity_bytes:
            raise ReplayBufferFull(
                f"expected at most {self._capacity} records and {self._capacity_bytes} bytes that no checkpoint holds, "
                f"got another one of {record.nbytes} bytes on top of {len(self._unsaved)} and {self._nbytes}: let "
                f"SinkTrainer write checkpoints more often (checkpoint_every), or raise capacity and capacity_bytes"
            )
        retained = _Retained(record)
        self._unsaved.keep_record(retained, record)
        self._nbytes += record.nbytes
        return retained

    def _forget(self, retained: _Retained) -> None:
        if retained in self._unsaved:  # else it was saved meanwhile, with another record of the group
            self._unsaved.discard(retained)
            self._nbytes -= retained.record.nbytes

    async def _connected(self) -> RemoteSender[TrajectoryGroup]:
        with self._clock.waiting("receiver"):
            while self._connection is None:
                if self._failure is not None:
                    raise self._failure
                await self._changed.wait()
        return self._connection

    async def _send_on(self, connection: RemoteSender[TrajectoryGroup], retained: _Retained) -> bool:
        """Send `retained` on `connection`; return False where the connection ended before it was sent."""
        try:
            await connection.send(retained.record)
        except _DISCONNECTED:
            while self._connection is connection:
                await self._changed.wait()
            return False
        retained.sent = True
        return True

    def _handle(self, group: GroupId, mask: int, state: str, step: int) -> None:
        """Forget the records whose trajectories the receiver reports as saved."""
        del step
        if state == "saved":
            for retained, _ in self._unsaved.save(group, mask):
                if retained not in self._unsaved:
                    self._nbytes -= retained.record.nbytes
            self._changed.wake_all()

    async def finish(self) -> None:
        """Close, and wait until everything is saved.

        A receiver that counts this sender by its name has to know that it is done: where the connection ends before
        that, Close is sent on the next one.

        Raises:
            NobodyListens, PeerLost, PeerClosed: no receiver was available within the time that was given.
        """
        acknowledged = False
        try:
            while self._unsaved or (self._counted and not acknowledged):
                acknowledged = await self._close(await self._connected())
        except _UNAVAILABLE as error:
            if not self._unsaved:
                error.add_note(
                    f"everything that {self._name!r} sent is saved, but no receiver acknowledged that it is done: "
                    f"start it again for the next run that counts senders by name"
                )
            raise
        self._finished = True

    async def _close(self, connection: RemoteSender[TrajectoryGroup]) -> bool:
        """Send Close; return whether it was acknowledged, when all is saved or the connection has ended."""
        connection.send_close()
        with self._clock.waiting("checkpoint" if self._unsaved else "receiver"):
            acknowledged = await connection.wait_close_acknowledged()
            while self._connection is connection and (self._unsaved or not acknowledged):
                await self._changed.wait()
        return acknowledged

    # -- connecting --------------------------------------------------------------------------------------------------

    async def stay_connected(self, url: str | Path, connect_to: ConnectTo) -> None:
        """Connect, and reconnect, until cancelled or there was no receiver for too long."""
        pace = RetryPace(self._reconnect_timeout_s)
        while True:
            try:
                address = url if isinstance(url, str) else await anyio.to_thread.run_sync(url.read_text)
                async with connect_to(address) as connection:
                    connection.on_ended(self._handle)
                    try:
                        await self._use(connection)
                    finally:
                        if self._finished:
                            connection.send_close("done")
                    log.warning("receiver_disconnected", reason=str(connection.failure), unsaved=len(self._unsaved))
                pace.restart()
            except _UNAVAILABLE as error:
                if pace.expired:
                    self._failure = error
                    self._changed.wake_all()
                    return
            await pace.wait()

    async def _use(self, connection: RemoteSender[TrajectoryGroup]) -> None:
        """Send again what was sent before, let `send` send the rest, and return when the connection has ended."""
        for retained in [retained for retained in self._unsaved if retained.sent]:
            if retained in self._unsaved and not await self._send_on(connection, retained):
                return
        self._counted = connection.counts_members
        self._connection = connection
        self._changed.wake_all()
        try:
            await connection.wait_failed()
            with anyio.move_on_after(LAST_MESSAGES_S):
                await connection.wait_disconnected()
        finally:
            self._connection = None
            self._changed.wake_all()

    def statistics(self) -> ChannelStatistics:
        """Return the records that are kept, and the wait."""
        connection = self._connection.statistics() if self._connection is not None else None
        return ChannelStatistics(
            transport=connection.transport if connection else "none",
            capacity=self._capacity,
            items=len(self._unsaved),
            capacity_bytes=self._capacity_bytes,
            nbytes=self._nbytes,
            sent=connection.sent if connection else 0,
            received=connection.received if connection else 0,
            senders=1,
            waiting_for=self._clock.waiting_for or (connection.waiting_for if connection else ""),
            waited_s=self._clock.waited_s + (connection.waited_s if connection else 0.0),
        )


@asynccontextmanager
async def connect_with_replay(
    url: str | Path,
    *,
    capacity: int = DEFAULT_CAPACITY,
    capacity_bytes: int = DEFAULT_CAPACITY_BYTES,
    reconnect_timeout_s: float = RECONNECT_TIMEOUT_S,
    name: str | None = None,
    key: ChannelKey | None = None,
    heartbeat_timeout_s: float | None = DEFAULT_HEARTBEAT_TIMEOUT_S,
    tokenizer: Any = None,
) -> AsyncIterator[ReplayingSender]:
    """Open the sending end of a channel to a `SourceChannel`, for a process that outlives its trainer.

    Leaving waits until a checkpoint holds everything that was sent and not dropped, and until a receiver that counts
    this sender by its name has acknowledged that it is done. A body that raises is left at once.

    Args:
        url: where the receiver listens: the same after every start, or a file to which the newest one writes its own.
        capacity: records that may be kept.
        capacity_bytes: bytes that may be kept.
        reconnect_timeout_s: how long there may be no receiver.
        name: the name of this sender, the same after every restart; see `connect`.
        key: the key that the receiver has too, over tcp.
        heartbeat_timeout_s: see `connect`.
        tokenizer: see `connect`.

    Raises:
        InvalidConfig: a count that is no whole number or below 1, or seconds that are not finite.
        TokenizersDiffer: a receiver has another tokenizer; there is no retry.
        MemberNameRequired, TooManyMembers: a receiver counts senders by name, and not this one; likewise.
        NobodyListens, PeerLost, PeerClosed: no receiver was available within `reconnect_timeout_s`. If all that was
            sent is saved, a note says that only the end was not acknowledged.
        MemberNameInUse: another sender of this name was connected for as long.
    """
    identity = None if tokenizer is None else await anyio.to_thread.run_sync(tokenizer_identity, tokenizer)
    sender = ReplayingSender(capacity, capacity_bytes, reconnect_timeout_s, name)
    heartbeat_timeout_s = (
        None if heartbeat_timeout_s is None else finite_number("heartbeat_timeout_s", heartbeat_timeout_s)
    )
    connect_to = partial(
        connect,
        record_type=TrajectoryGroup,
        name=name,
        key=key,
        heartbeat_timeout_s=heartbeat_timeout_s,
        tokenizer=identity,
    )
    with unwrap_single():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sender.stay_connected, url, connect_to)
            yield sender
            await sender.finish()
            tasks.cancel_scope.cancel()
