"""A sender that outlives its receiver: what it sent it keeps until a checkpoint holds it, and offers again.

When the receiver is gone it looks for one again, and offers what it keeps, in order, before anything new. What it then
need not have offered, because it is in flight there or was trained, the ledger there refuses. Knows nothing about
checkpoints but that the receiver says what is `saved`: of what was trained, and of what was dropped.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from ..._schemas import GroupId, TokenizerIdentity, TrajectoryGroup, tokenizer_identity
from ..._schemas.numbers import finite_number, whole_number
from ..errors import MemberNameInUse, NobodyListens, PeerClosed, PeerLost, ReplayBufferFull, TooManySenders
from ..exception_groups import unwrap_single
from ..repetition_sets import mask_of
from ..telemetry import get_logger
from ..waiting import WaitClock, Waiters
from .channel import ChannelStatistics
from .heartbeat import DEFAULT_HEARTBEAT_TIMEOUT_S
from .keys import ChannelKey
from .remote_sender import RemoteSender
from .transports import connect

__all__ = ["ReplayingSender", "connect_with_replay"]

log = get_logger("penstock.channel")

DEFAULT_CAPACITY = 4096
"""Records: what is sent between two checkpoints, and then some."""

DEFAULT_CAPACITY_BYTES = 2**30

RECONNECT_TIMEOUT_S = 3600.0
"""How long a receiver may be gone: a machine that is found, a model that is loaded."""

FIRST_RETRY_S, LAST_RETRY_S = 0.05, 1.0
"""A receiver that is not there is no event to wait for."""

LAST_WORDS_S = 1.0
"""How long what a receiver said before it closed may be on its way."""

_GONE = (PeerClosed, PeerLost)
_NOT_THERE = (MemberNameInUse, NobodyListens, PeerClosed, PeerLost, TooManySenders, OSError)


@dataclass(slots=True, eq=False)
class _Retained:
    """A record until it is saved."""

    record: TrajectoryGroup
    unsaved: int
    """Repetitions, as a bit mask."""
    offered: bool = False
    """Whether it was sent at least once."""


class ReplayingSender:
    """The sending end of a channel whose receiver may die and come back; see `connect_with_replay`."""

    def __init__(self, capacity: int, capacity_bytes: int, reconnect_timeout_s: float, name: str | None = None) -> None:
        self._capacity = whole_number("capacity", capacity)
        self._capacity_bytes = whole_number("capacity_bytes", capacity_bytes)
        self._reconnect_timeout_s = finite_number("reconnect_timeout_s", reconnect_timeout_s, zero=True)
        self._kept: dict[_Retained, None] = {}
        """In the order in which they were sent."""
        self._by_group: dict[GroupId, list[_Retained]] = {}
        self._nbytes = 0
        self._line: RemoteSender[TrajectoryGroup] | None = None
        """The connection, while there is one and all that was kept has been offered on it."""
        self._failure: Exception | None = None
        """Why there will be none."""
        self._name = name
        self._counted = name is not None
        """Whether a receiver may wait to hear that this sender is done: the newest one told whether it does."""
        self._finished = False
        """Whether nothing more comes, all of it is saved, and a receiver that waits to hear so has."""
        self._changed = Waiters()
        self._clock = WaitClock()

    def __repr__(self) -> str:
        state = "connected" if self._line is not None else "looking for a receiver"
        return f"<ReplayingSender: {state}, {len(self._kept)} records unsaved>"

    @property
    def unsaved(self) -> int:
        """Records that no checkpoint is known to hold."""
        return len(self._kept)

    async def send(self, record: TrajectoryGroup, /) -> None:
        """Hand over `record`, waiting for a receiver and for credit if need be. Cancelled, it has sent nothing.

        Raises:
            ReplayBufferFull: so much is kept already that `record` has no room.
            NobodyListens, PeerLost, PeerClosed: no receiver came back within the time that was given.
            RecordTooLarge: it would not fit an empty channel.
        """
        kept = self._keep(record)
        try:
            while not await self._offer(kept, await self._connected()):
                pass
        except BaseException:
            self._forget(kept)
            raise

    def _keep(self, record: TrajectoryGroup) -> _Retained:
        if len(self._kept) >= self._capacity or self._nbytes + record.nbytes > self._capacity_bytes:
            raise ReplayBufferFull(
                f"expected at most {self._capacity} records and {self._capacity_bytes} bytes that no checkpoint holds, "
                f"got another one of {record.nbytes} bytes on top of {len(self._kept)} and {self._nbytes}: let "
                f"SinkTrainer write checkpoints more often (checkpoint_every), or raise capacity and capacity_bytes"
            )
        kept = _Retained(record, mask_of(record.repetition_ids.tolist()))
        self._kept[kept] = None
        self._by_group.setdefault(record.id, []).append(kept)
        self._nbytes += record.nbytes
        return kept

    def _forget(self, kept: _Retained) -> None:
        if kept not in self._kept:  # saved meanwhile, with another record of the group
            return
        del self._kept[kept]
        alike = self._by_group[kept.record.id]
        alike.remove(kept)
        if not alike:
            del self._by_group[kept.record.id]
        self._nbytes -= kept.record.nbytes

    async def _connected(self) -> RemoteSender[TrajectoryGroup]:
        with self._clock.waiting("receiver"):
            while self._line is None:
                if self._failure is not None:
                    raise self._failure
                await self._changed.wait()
        return self._line

    async def _offer(self, kept: _Retained, line: RemoteSender[TrajectoryGroup]) -> bool:
        """Whether `kept` could be sent on `line`."""
        try:
            await line.send(kept.record)
        except _GONE:
            while self._line is line:
                await self._changed.wait()
            return False
        kept.offered = True
        return True

    def _handle(self, group: GroupId, mask: int, state: str, step: int) -> None:
        """The receiver says what became of some trajectories; what is saved need not be kept."""
        del step
        if state == "saved":
            for kept in list(self._by_group.get(group, ())):
                kept.unsaved &= ~mask
                if not kept.unsaved:
                    self._forget(kept)
            self._changed.wake_all()

    async def finish(self) -> None:
        """Say that nothing more comes, and wait until everything is saved.

        A receiver that counts this sender by its name has to hear that it is done: where the connection ends before, it
        is told on the next one.

        Raises:
            NobodyListens, PeerLost, PeerClosed: no receiver came back within the time that was given.
        """
        heard = False
        try:
            while self._kept or (self._counted and not heard):
                heard = await self._say_goodbye(await self._connected())
        except _NOT_THERE as error:
            if not self._kept:
                error.add_note(
                    f"everything that {self._name!r} sent is saved, but no receiver heard that it is done: start it "
                    f"again for the next run that counts senders by name"
                )
            raise
        self._finished = True

    async def _say_goodbye(self, line: RemoteSender[TrajectoryGroup]) -> bool:
        """Say on `line` that nothing more comes, and return whether it was heard, when all is saved or `line` ended."""
        line.send_close()
        with self._clock.waiting("checkpoint" if self._kept else "receiver"):
            heard = await line.close_acknowledged()
            while self._line is line and (self._kept or not heard):
                await self._changed.wait()
        return heard

    # -- looking for a receiver --------------------------------------------------------------------------------------

    async def stay_connected(
        self,
        url: str | Path,
        name: str | None,
        key: ChannelKey | None,
        heartbeat_timeout_s: float | None,
        tokenizer: TokenizerIdentity | None,
    ) -> None:
        """Connect, and connect again, until cancelled or patience is at its end."""
        retry_s, deadline = FIRST_RETRY_S, anyio.current_time() + self._reconnect_timeout_s
        while True:
            try:
                address = url if isinstance(url, str) else await anyio.to_thread.run_sync(url.read_text)
                connected = connect(
                    address,
                    TrajectoryGroup,
                    name=name,
                    key=key,
                    heartbeat_timeout_s=heartbeat_timeout_s,
                    tokenizer=tokenizer,
                )
                async with connected as line:
                    line.on_ended(self._handle)
                    try:
                        await self._use(line)
                    finally:
                        if self._finished:
                            line.send_close("done")
                    log.warning("receiver_gone", reason=str(line.failure), unsaved=len(self._kept))
                retry_s, deadline = FIRST_RETRY_S, anyio.current_time() + self._reconnect_timeout_s
            except _NOT_THERE as error:
                if anyio.current_time() >= deadline:
                    self._failure = error
                    self._changed.wake_all()
                    return
            await anyio.sleep(retry_s)
            retry_s = min(2 * retry_s, LAST_RETRY_S)

    async def _use(self, line: RemoteSender[TrajectoryGroup]) -> None:
        """SegmentOffer again what was sent, let `send` offer the rest, and return when the receiver is gone."""
        for kept in [kept for kept in self._kept if kept.offered]:
            if kept in self._kept and not await self._offer(kept, line):
                return
        self._counted = line.counts_members
        self._line = line
        self._changed.wake_all()
        try:
            await line.gone()
            with anyio.move_on_after(LAST_WORDS_S):
                await line.disconnected()
        finally:
            self._line = None
            self._changed.wake_all()

    def statistics(self) -> ChannelStatistics:
        """What is kept, and waited for."""
        line = self._line.statistics() if self._line is not None else None
        return ChannelStatistics(
            transport=line.transport if line else "none",
            capacity=self._capacity,
            items=len(self._kept),
            capacity_bytes=self._capacity_bytes,
            nbytes=self._nbytes,
            sent=line.sent if line else 0,
            received=line.received if line else 0,
            senders=1,
            waiting_for=self._clock.waiting_for or (line.waiting_for if line else ""),
            waited_s=self._clock.waited_s + (line.waited_s if line else 0.0),
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
    """The sending end of a channel to a `SourceChannel`, for a process that outlives its trainer.

    Leaving waits until a checkpoint holds everything that was sent and not dropped, and until a receiver that counts
    this sender by its name has heard that it is done. A body that raises is left at once.

    Args:
        url: where the receiver listens: the same after every start, or a file in which the newest one notes its own.
        capacity: records that may be kept.
        capacity_bytes: bytes that may be kept.
        reconnect_timeout_s: how long there may be no receiver.
        name: what this sender is called, the same after every restart; see `connect`.
        key: what the receiver knows too, over tcp.
        heartbeat_timeout_s: see `connect`.
        tokenizer: see `connect`.

    Raises:
        InvalidConfig: a count that is no whole number or below 1, or seconds that are not finite.
        TokenizersDiffer: a receiver has another tokenizer; it is not asked again.
        MemberNameRequired, TooManyMembers: a receiver counts senders by name, and not this one; likewise.
        NobodyListens, PeerLost, PeerClosed: no receiver came back within `reconnect_timeout_s`. If all that was sent is
            saved, a note says that only the end was not heard.
        MemberNameInUse: another sender of this name was connected for as long.
    """
    identity = None if tokenizer is None else await anyio.to_thread.run_sync(tokenizer_identity, tokenizer)
    sender = ReplayingSender(capacity, capacity_bytes, reconnect_timeout_s, name)
    heartbeat_timeout_s = (
        None if heartbeat_timeout_s is None else finite_number("heartbeat_timeout_s", heartbeat_timeout_s)
    )
    with unwrap_single():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sender.stay_connected, url, name, key, heartbeat_timeout_s, identity)
            yield sender
            await sender.finish()
            tasks.cancel_scope.cancel()
