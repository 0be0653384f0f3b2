"""SourceChannel: a source of records from processes that the run did not start, and that may outlive it.

They send with `connect_with_replay`: they keep sent records until a checkpoint of the trainer contains them, and replay
them to the run that resumes from that checkpoint. This module tracks the records that each sender keeps; the ledger
rejects duplicates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from ..._pipeline.accounting.ledger import Ledger
from ..._pipeline.accounting.repetition_sets import mask_in
from ..._pipeline.accounting.retention import Retention
from ..._pipeline.accounting.telemetry import get_logger
from ..._pipeline.channels.channel import REMOTE_CAPACITY, REMOTE_CAPACITY_BYTES, SendChannel
from ..._pipeline.channels.heartbeat import DEFAULT_HEARTBEAT_TIMEOUT_S
from ..._pipeline.channels.keys import ChannelKey
from ..._pipeline.channels.members import DEFAULT_ABSENCE_TIMEOUT_S, OnAbsence
from ..._pipeline.channels.peer import Peer
from ..._pipeline.channels.remote_receiver import RemoteReceiver
from ..._pipeline.channels.transports import DEFAULT_MAX_SENDERS, scheme_of, serve
from ..._pipeline.errors import PeerLost
from ..._pipeline.graph.context import current
from ..._pipeline.graph.stage_info import StageInfo, tokenizer_of
from ..._pipeline.util.atomic_file import write_atomically
from ..._pipeline.util.os_errors import explaining_os_errors
from ..._pipeline.util.user_code import call_user
from ..._pipeline.util.waiting import Waiters
from ..._schemas import GroupId, TrajectoryGroup, tokenizer_identity
from ..._schemas.choices import check_choice
from ..._schemas.numbers import normalize_counts, normalize_numbers

log = get_logger("penstock.source_channel")

ELSEWHERE = "set address to a path in another folder"


@dataclass(frozen=True, slots=True)
class SourceChannel:
    """Receive groups at `url` from senders that may connect, disconnect, and outlive the run.

    >>> SourceChannel("tcp://127.0.0.1:5555", senders=2).capacity
    64

    Args:
        url: address to listen on; see `serve`. Senders must find it again: use a fixed port, or `address`.
        address: a file for the URL of this run, because `shm://` gets a new one in every run.
        senders: number of members: the stream ends when so many, known by their names, have closed; see `serve`. None
            for any number, with or without names: the stream does not end by itself. When all that are connected have
            closed, the groups that stages have gathered are flushed: trained, and saved in a checkpoint.
        absence_timeout_s: with `senders`, bound on waiting for a member that is lost or has not connected, see `serve`;
            and, after the last checkpoint, for one that keeps records and was not notified that they are saved.
        on_absence: the action then: `fail` ends the run with MemberAbsent, `continue` goes on without the member.
        max_senders: bound on connected senders.
        capacity: records that each sender may have in flight.
        capacity_bytes: bytes that each sender may have in flight.
        key: secret that senders must share, over tcp.
        heartbeat_timeout_s: a sender whose process is stopped, or whose host hangs, for this time is lost; see `serve`.
        tokenizer: the tokenizer of the token ids, or its `TokenizerIdentity`: senders with another one are rejected,
            and `pipeline.check()` compares it with that of the trainer.

    Raises:
        InvalidConfig: a URL of another kind, a count that is not whole or is below 1, or seconds that are not finite.
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
        scheme_of(self.url, self.key)
        check_choice("on_absence", self.on_absence, OnAbsence)
        normalize_counts(self, "senders", "max_senders", "capacity", "capacity_bytes")
        normalize_numbers(self, "absence_timeout_s", "heartbeat_timeout_s")

    def stage_info(self) -> StageInfo:
        """State the tokenizer, and that senders learn of checkpoints."""
        return StageInfo(tokenizers=tokenizer_of(self), follows_trajectories=True)

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        """Run the source; see `Source`. After the stream, wait until all is saved and the members are notified.

        Raises:
            MemberAbsent: a member did not connect, or was lost and did not reconnect.
            DiskFull, NotWritable: `address` cannot be written.
        """
        unsaved, flush = _Unsaved(current().ledger), current().flush
        known = self.tokenizer is not None
        identity = await anyio.to_thread.run_sync(call_user, tokenizer_identity, self.tokenizer) if known else None
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
                unsaved.on_disconnect = lambda: flush.request() if _all_closed(inbox) and not unsaved.empty else None
            stack.enter_context(current().ledger.on_checkpoint(unsaved.saved))
            if self.address is not None:
                await anyio.to_thread.run_sync(_write_address, Path(self.address), inbox.url)
            async for record in inbox:
                await outbox.send(record)
                del record  # its slots are free while the next is waited for
            await outbox.aclose()
            unsaved.ended = True
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_receive_replays, inbox)
                scope = anyio.CancelScope()
                with current().on_sink_returned(scope.cancel):
                    with scope:
                        await unsaved.none()
                    if unsaved.empty:  # else there is no last checkpoint: members keep the rest for another run
                        await self._notify_members(unsaved)
                tasks.cancel_scope.cancel()

    async def _notify_members(self, unsaved: _Unsaved) -> None:
        """Wait until every member that keeps records, connected or not, is notified that they are saved."""
        with anyio.move_on_after(self.absence_timeout_s) as timeout:
            await unsaved.all_notified()
        if timeout.cancelled_caught:
            log.warning("members_absent", names=unsaved.unnotified, waited_s=self.absence_timeout_s)


def _all_closed(inbox: RemoteReceiver[TrajectoryGroup]) -> bool:
    """Return whether all connected senders have closed, and every record that arrived was received."""
    now = inbox.statistics()
    return not now.senders and now.sent == now.received


async def _receive_replays(inbox: RemoteReceiver[TrajectoryGroup]) -> None:
    """Receive the replays of members that reconnect after the end, so that they are notified when all is saved."""
    inbox.keep_open()
    async for _ in inbox:
        pass


class _Unsaved:
    """The trajectories that each sender keeps. Decides, does no I/O; a `PeerListener`."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._saved: Mapping[GroupId, int] = ledger.committed
        """Trajectories in the newest checkpoint."""
        self._kept = Retention[Peer]()
        """The senders that keep records."""
        self._changed = Waiters()
        self._awaiting_saved: set[Peer] = set()
        """Connected members that disconnect once notified that all is saved."""
        self._absent: set[str] = set()
        """Members that keep records, and disconnected before they were notified that these are saved."""
        self._awaiting_next: set[Peer] = set()
        """Members that keep a record for the next run."""
        self.on_received: Callable[[], None] = _nothing
        self.on_disconnect: Callable[[], None] = _nothing
        """Called when a sender closed or was lost, and all its records were received and passed on."""
        self.ended = False
        """True if the stream has ended: a new record belongs to the next run, and its sender keeps it."""

    @property
    def empty(self) -> bool:
        """Return whether no sender keeps any record."""
        return not self._kept

    def received(self, peer: Peer, record: TrajectoryGroup) -> TrajectoryGroup:
        """Note that the sender keeps `record`: the ledger admits it next, or has already. See `PeerListener`."""
        mask = mask_in(record.rollout_ids)
        if saved := mask & self._saved.get(record.id, 0):
            peer.ended(record.id, saved, "saved", self._ledger.step)
        self.on_received()
        if self.ended:
            if mask & ~self._ledger.trajectories.known(record.id):
                self._awaiting_next.add(peer)
            mask &= self._ledger.trajectories.known(record.id)
        self._kept.keep(peer, record.id, mask & ~saved)
        return record

    def saved(self, committed: Mapping[GroupId, int]) -> None:
        """Notify senders of records that a checkpoint contains (`committed`), and of those that were dropped."""
        self._saved = committed
        for peer, group, mask in self._kept.save_checkpoint(committed, self._ledger):
            peer.ended(group, mask, "saved", self._ledger.step)
        self._changed.wake_all()

    async def none(self) -> None:
        """Wait for the checkpoint that contains every kept record."""
        while not self.empty:
            await self._changed.wait()

    @property
    def unnotified(self) -> list[str]:
        """Return the members that were not yet notified that all their records are saved."""
        return sorted(self._absent | {peer.member for peer in self._awaiting_saved})

    async def all_notified(self) -> None:
        """Wait until every member is notified that all its records are saved."""
        while self.unnotified:
            await self._changed.wait()

    def observed(self, peer: Peer, payload: bytes) -> None:
        """Ignore telemetry; see `PeerListener`."""

    def lost(self, peer: Peer, error: PeerLost) -> None:
        """Forget the records of a lost sender: it replays them when it reconnects. See `PeerListener`."""
        del error  # the receiver has logged it
        self._kept.discard(peer)
        if self.ended:  # it had reconnected to learn of saved records
            self._absent.add(peer.member)
        self.on_disconnect()

    def closed(self, peer: Peer) -> None:
        """Note a sender that closed and waits for the notice that all is saved; see `PeerListener`."""
        self._absent.discard(peer.member)
        if peer.awaits_saved and peer not in self._awaiting_next:
            self._awaiting_saved.add(peer)
        self._changed.wake_all()
        self.on_disconnect()

    def disconnected(self, peer: Peer) -> None:
        """Note that a closed sender disconnected, notified or not; see `PeerListener`."""
        if peer in self._awaiting_saved and peer.awaits_saved:
            self._absent.add(peer.member)
        self._awaiting_saved.discard(peer)
        self._awaiting_next.discard(peer)
        self._changed.wake_all()


def _nothing() -> None:
    pass


def _write_address(path: Path, url: str) -> None:
    """Write the file atomically: a sender may be reading it."""
    with explaining_os_errors("the address of a channel", path, or_else=ELSEWHERE, elsewhere=ELSEWHERE):
        write_atomically(path, url.encode())
