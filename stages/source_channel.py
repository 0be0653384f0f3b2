"""SourceChannel: a source whose records are sent by processes that the run did not start, and that may outlive it.

They send with `outlast`: they keep what they sent until a checkpoint of the trainer holds it, and offer it again to the
run that goes on from that checkpoint. Here is noted who keeps what; what comes again is refused by the ledger.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from ..pipeline.channels.carriers import serve
from ..pipeline.channels.channel import REMOTE_CAPACITY, REMOTE_CAPACITY_BYTES, SendChannel
from ..pipeline.channels.keys import Key
from ..pipeline.channels.peer import Peer
from ..pipeline.context import current
from ..pipeline.errors import PeerLost
from ..pipeline.ledger import Ledger
from ..pipeline.repetitions import mask_of, noted
from ..pipeline.telemetry import get_logger
from ..schemas import GroupId, TrajectoryGroup, identity_of

__all__ = ["SourceChannel"]

NEVER = 2**62
"""So many senders never come."""

LEAVING_S = 5.0
"""How long senders that have nothing unsaved may take to leave: what was said to them dies with this process."""

log = get_logger("penstock.source_channel")


@dataclass(frozen=True, slots=True)
class SourceChannel:
    """Receive groups at `url` from senders that come, go, and outlive the run.

    >>> SourceChannel("tcp://127.0.0.1:5555", senders=2).capacity
    64

    Args:
        url: where to listen; see `serve`. Senders have to find it again: a port of your own, or `address`.
        address: a file in which it is noted where this run listens, for `shm://` has another place every time.
        senders: after so many have come and gone the stream ends; None for a stream that does not end by itself.
        capacity: records that each sender may have in flight.
        capacity_bytes: bytes that each sender may have in flight.
        key: what senders must know too, over tcp.
        tokenizer: what the token ids mean, or its `TokenizerIdentity`: senders that say another one are refused, and
            `pipeline.check()` holds it to that of the trainer.
    """

    url: str = "shm://"
    address: str | Path | None = None
    senders: int | None = None
    capacity: int = REMOTE_CAPACITY
    capacity_bytes: int = REMOTE_CAPACITY_BYTES
    key: Key | None = None
    tokenizer: Any = None

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        """See `Source`. When the stream has ended it stays until everything is saved, and senders have heard so."""
        unsaved = _Unsaved(current().ledger)
        known = self.tokenizer is not None
        identity = await anyio.to_thread.run_sync(identity_of, self.tokenizer) if known else None
        async with AsyncExitStack() as stack:
            inbox = await stack.enter_async_context(
                serve(
                    self.url,
                    TrajectoryGroup,
                    capacity=self.capacity,
                    capacity_bytes=self.capacity_bytes,
                    senders=NEVER if self.senders is None else self.senders,
                    listener=unsaved,
                    key=self.key,
                    tokenizer=identity,
                )
            )
            stack.enter_context(current().ledger.hearing_of_checkpoints(unsaved.saved))
            if self.address is not None:
                await anyio.to_thread.run_sync(_note, Path(self.address), inbox.url)
            async for record in inbox:
                await outbox.send(record)
                del record  # its slots are free while the next is waited for
            await outbox.aclose()
            try:
                await unsaved.none()
            finally:
                with anyio.move_on_after(LEAVING_S if unsaved.empty else 0, shield=True):
                    await inbox.deserted()


class _Unsaved:
    """Which trajectories each sender keeps. Decides; a `PeerListener`."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._saved: Mapping[GroupId, int] = ledger.committed
        """What the newest checkpoint holds."""
        self._kept: dict[Peer, dict[GroupId, int]] = {}
        """Repetitions of each group, as a bit mask, by who keeps them."""
        self._all_saved = anyio.Event()

    @property
    def empty(self) -> bool:
        """Whether nobody keeps anything."""
        return not any(self._kept.values())

    def received(self, peer: Peer, record: TrajectoryGroup) -> TrajectoryGroup:
        """Whatever a sender sends it keeps; the next moment it is in the books, or is there already."""
        mask = mask_of(record.repetition_ids.tolist())
        if saved := mask & self._saved.get(record.id, 0):
            peer.ended(record.id, saved, "saved", self._ledger.step)
        kept = self._kept.setdefault(peer, {})
        noted(kept, record.id, kept.get(record.id, 0) | mask & ~saved)
        return record

    def saved(self, committed: Mapping[GroupId, int]) -> None:
        """A checkpoint holds `committed`. What it does not hold, is not in flight, and was not trained was dropped."""
        self._saved = committed
        for peer, kept in self._kept.items():
            for group, mask in list(kept.items()):
                left = mask & ~committed.get(group, 0) & self._ledger.known(group)
                if done := mask & ~left:
                    peer.ended(group, done, "saved", self._ledger.step)
                noted(kept, group, left)
        self._kept = {peer: kept for peer, kept in self._kept.items() if kept or peer.open}
        if self.empty:
            self._all_saved.set()

    async def none(self) -> None:
        """Wait for the checkpoint that holds everything."""
        if not self.empty:
            self._all_saved = anyio.Event()
            await self._all_saved.wait()

    def observed(self, peer: Peer, payload: bytes) -> None:
        """They observe nothing that is told here; see `PeerListener`."""

    def lost(self, peer: Peer, error: PeerLost) -> None:
        """One that comes again offers again what it keeps; see `PeerListener`."""
        log.warning("sender_lost", reason=str(error))
        self._kept.pop(peer, None)

    def parted(self, peer: Peer) -> None:
        """One that said goodbye waits to hear what is saved; see `PeerListener`."""


def _note(path: Path, url: str) -> None:
    """Write it whole: a sender may be reading."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(url)
    unfinished.rename(path)
