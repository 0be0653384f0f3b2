"""SourceChannel: a source whose records are sent by processes that the run did not start, and that may outlive it.

They send with `connect_with_replay`: they keep what they sent until a checkpoint of the trainer holds it, and offer it
again to the run that goes on from that checkpoint. Here is noted who keeps what; what comes again is refused by the
ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from .._pipeline.channels.channel import REMOTE_CAPACITY, REMOTE_CAPACITY_BYTES, SendChannel
from .._pipeline.channels.heartbeat import DEFAULT_HEARTBEAT_TIMEOUT_S
from .._pipeline.channels.keys import ChannelKey
from .._pipeline.channels.members import DEFAULT_ABSENCE_TIMEOUT_S, OnAbsence
from .._pipeline.channels.peer import Peer
from .._pipeline.channels.remote_receiver import RemoteReceiver
from .._pipeline.channels.transports import DEFAULT_MAX_SENDERS, serve
from .._pipeline.context import current, outliving_the_sink
from .._pipeline.errors import PeerLost
from .._pipeline.ledger import Ledger
from .._pipeline.os_errors import explaining_os_errors
from .._pipeline.repetition_sets import mask_of, set_mask
from .._pipeline.stage_info import StageInfo, tokenizer_of
from .._pipeline.telemetry import get_logger
from .._pipeline.waiting import Waiters
from .._schemas import GroupId, TrajectoryGroup, tokenizer_identity
from .._schemas.numbers import normalize_counts, normalize_numbers

__all__ = ["SourceChannel"]

log = get_logger("penstock.source_channel")

ELSEWHERE = "set address to a path in another folder"


@dataclass(frozen=True, slots=True)
class SourceChannel:
    """Receive groups at `url` from senders that come, go, and outlive the run.

    >>> SourceChannel("tcp://127.0.0.1:5555", senders=2).capacity
    64

    Args:
        url: where to listen; see `serve`. Senders have to find it again: a port of your own, or `address`.
        address: a file in which it is noted where this run listens, for `shm://` has another place every time.
        senders: how many members send: the stream ends when so many, known by their names, said that they are done;
            see `serve`. None for any number, with or without names: the stream does not end by itself. When all that
            are connected are done, what stages have gathered is flushed: trained, and saved in a checkpoint.
        absence_timeout_s: with `senders`, how long a member that is lost or has not come is awaited, see `serve`; and,
            after the last checkpoint, one that keeps records and has not heard that they are saved.
        on_absence: what follows then: `fail` ends the run with MemberAbsent, `continue` goes on without the member.
        max_senders: how many may be connected at a time.
        capacity: records that each sender may have in flight.
        capacity_bytes: bytes that each sender may have in flight.
        key: what senders must know too, over tcp.
        heartbeat_timeout_s: a sender whose process is stopped, or whose host hangs, for this time is lost; see `serve`.
        tokenizer: what the token ids mean, or its `TokenizerIdentity`: senders that say another one are refused, and
            `pipeline.check()` holds it to that of the trainer.

    Raises:
        InvalidConfig: a count that is no whole number or below 1, or seconds that are not finite.
    """

    url: str = "shm://"
    address: str | Path | None = None
    senders: int | None = None
    absence_timeout_s: float = DEFAULT_ABSENCE_TIMEOUT_S
    on_absence: OnAbsence = "fail"
    max_senders: int = DEFAULT_MAX_SENDERS
    capacity: int = REMOTE_CAPACITY
    capacity_bytes: int = REMOTE_CAPACITY_BYTES
    key: ChannelKey | None = None
    heartbeat_timeout_s: float | None = DEFAULT_HEARTBEAT_TIMEOUT_S
    tokenizer: Any = None

    def __post_init__(self) -> None:
        normalize_counts(self, "senders", "max_senders", "capacity", "capacity_bytes")
        normalize_numbers(self, "absence_timeout_s", "heartbeat_timeout_s")

    def stage_info(self) -> StageInfo:
        """State its tokenizers."""
        return StageInfo(tokenizers=tokenizer_of(self))

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        """See `Source`. When the stream has ended it awaits_saved until everything is saved, and members have heard so.

        Raises:
            MemberAbsent: a member did not come, or was lost and did not come back.
            DiskFull, NotWritable: `address` cannot be written.
        """
        unsaved, flush = _Unsaved(current().ledger), current().flush
        known = self.tokenizer is not None
        identity = await anyio.to_thread.run_sync(tokenizer_identity, self.tokenizer) if known else None
        async with AsyncExitStack() as stack:
            inbox = await stack.enter_async_context(
                serve(
                    self.url,
                    TrajectoryGroup,
                    capacity=self.capacity,
                    capacity_bytes=self.capacity_bytes,
                    senders=self.senders,
                    absence_timeout_s=self.absence_timeout_s,
                    on_absence=self.on_absence,
                    max_senders=self.max_senders,
                    listener=unsaved,
                    key=self.key,
                    heartbeat_timeout_s=self.heartbeat_timeout_s,
                    tokenizer=identity,
                )
            )
            if self.senders is None:
                inbox.keep_open()
                unsaved.on_received = flush.withdraw
                unsaved.on_gone = lambda: flush.request() if _all_done(inbox) and not unsaved.empty else None
            stack.enter_context(current().ledger.on_checkpoint(unsaved.saved))
            if self.address is not None:
                await anyio.to_thread.run_sync(_note, Path(self.address), inbox.url)
            async for record in inbox:
                await outbox.send(record)
                del record  # its slots are free while the next is waited for
            await outbox.aclose()
            unsaved.ended = True
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_hear_again, inbox)
                scope = anyio.CancelScope()
                with outliving_the_sink(scope.cancel):
                    with scope:
                        await unsaved.none()
                    if unsaved.empty:  # else the sink wrote no last checkpoint: members keep the rest for another run
                        await self._have_members_hear(unsaved)
                tasks.cancel_scope.cancel()

    async def _have_members_hear(self, unsaved: _Unsaved) -> None:
        """Wait until every member that keeps records has heard that they are saved, also one that is cut off now."""
        with anyio.move_on_after(self.absence_timeout_s) as bound:
            await unsaved.all_heard()
        if bound.cancelled_caught:
            log.warning("members_absent", names=unsaved.unheard, waited_s=self.absence_timeout_s)


def _all_done(inbox: RemoteReceiver[TrajectoryGroup]) -> bool:
    """Whether no sender is connected but those that said that they are done, and all that came was received."""
    now = inbox.statistics()
    return not now.senders and now.sent == now.received


async def _hear_again(inbox: RemoteReceiver[TrajectoryGroup]) -> None:
    """Receive what members offer again that were cut off after the end: it is noted, and told when it is saved."""
    inbox.keep_open()
    async for _ in inbox:
        pass


class _Unsaved:
    """Which trajectories each sender keeps. Decides; a `PeerListener`."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._saved: Mapping[GroupId, int] = ledger.committed
        """What the newest checkpoint holds."""
        self._kept: dict[Peer, dict[GroupId, int]] = {}
        """Repetitions of each group, as a bit mask, by who keeps them."""
        self._changed = Waiters()
        self._hearing: set[Peer] = set()
        """Connected members that leave when they have heard that all is saved."""
        self._absent: set[str] = set()
        """Members that keep records, and whose connection ended before they heard that these are saved."""
        self._awaiting_next: set[Peer] = set()
        """Those who keep a record for the next run."""
        self.on_received: Callable[[], None] = _nothing
        self.on_gone: Callable[[], None] = _nothing
        """Called when a sender is done or lost, and all that it sent was received and passed on."""
        self.ended = False
        """Whether the stream has ended: a record that is new belongs to the next run, and its sender keeps it."""

    @property
    def empty(self) -> bool:
        """Whether nobody keeps anything."""
        return not any(self._kept.values())

    def received(self, peer: Peer, record: TrajectoryGroup) -> TrajectoryGroup:
        """Whatever a sender sends it keeps; the next moment it is in the books, or is there already."""
        mask = mask_of(record.repetition_ids.tolist())
        if saved := mask & self._saved.get(record.id, 0):
            peer.ended(record.id, saved, "saved", self._ledger.step)
        self.on_received()
        if self.ended:
            if mask & ~self._ledger.known(record.id):
                self._awaiting_next.add(peer)
            mask &= self._ledger.known(record.id)
        kept = self._kept.setdefault(peer, {})
        set_mask(kept, record.id, kept.get(record.id, 0) | mask & ~saved)
        return record

    def saved(self, committed: Mapping[GroupId, int]) -> None:
        """A checkpoint holds `committed`. What it does not hold, is not in flight, and was not trained was dropped."""
        self._saved = committed
        for peer, kept in self._kept.items():
            for group, mask in list(kept.items()):
                left = mask & ~committed.get(group, 0) & self._ledger.known(group)
                if done := mask & ~left:
                    peer.ended(group, done, "saved", self._ledger.step)
                set_mask(kept, group, left)
        self._kept = {peer: kept for peer, kept in self._kept.items() if kept or peer.open}
        self._changed.wake_all()

    async def none(self) -> None:
        """Wait for the checkpoint that holds everything."""
        while not self.empty:
            await self._changed.wait()

    @property
    def unheard(self) -> list[str]:
        """The members that have not heard yet that all is saved which they keep."""
        return sorted(self._absent | {peer.member for peer in self._hearing})

    async def all_heard(self) -> None:
        """Wait until every member has heard that all is saved which it keeps."""
        while self.unheard:
            await self._changed.wait()

    def observed(self, peer: Peer, payload: bytes) -> None:
        """They observe nothing that is told here; see `PeerListener`."""

    def lost(self, peer: Peer, error: PeerLost) -> None:
        """One that comes again offers again what it keeps; see `PeerListener`."""
        log.warning("sender_lost", reason=str(error))
        self._kept.pop(peer, None)
        if self.ended:  # one that came again, to hear what is saved
            self._absent.add(peer.member)
        self.on_gone()

    def closed(self, peer: Peer) -> None:
        """One that said goodbye waits to hear what is saved; see `PeerListener`."""
        self._absent.discard(peer.member)
        if peer.awaits_saved and peer not in self._awaiting_next:
            self._hearing.add(peer)
        self._changed.wake_all()
        self.on_gone()

    def disconnected(self, peer: Peer) -> None:
        """One that said goodbye left, having heard that all is saved, or was cut off; see `PeerListener`."""
        if peer in self._hearing and peer.awaits_saved:
            self._absent.add(peer.member)
        self._hearing.discard(peer)
        self._awaiting_next.discard(peer)
        if not self._kept.get(peer):
            self._kept.pop(peer, None)  # with the peer, its segment is unmapped now
        self._changed.wake_all()


def _nothing() -> None:
    pass


def _note(path: Path, url: str) -> None:
    """Write it whole: a sender may be reading."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    with explaining_os_errors("the address of a channel", path, or_else=ELSEWHERE, elsewhere=ELSEWHERE):
        try:
            unfinished.write_text(url)
            unfinished.rename(path)
        finally:
            unfinished.unlink(missing_ok=True)
