"""Receive from several channels as from one: workers on this host use one transport, those on others another."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import anyio
import anyio.lowlevel

from ..util.waiting import WaitClock, Waiters
from .channel import ChannelStatistics
from .memory import CHECKPOINT_EVERY
from .peer import Peer
from .protocols import AsyncReceiver
from .remote_receiver import RemoteReceiver
from .transport import R


class MergedReceiver(AsyncReceiver[R]):
    """The receiving ends of several channels; the stream ends when each of them has ended. See `ReceiveChannel`."""

    def __init__(self, receivers: Sequence[RemoteReceiver[R]]) -> None:
        """Merge `receivers`. The caller closes them, and receives from them through this object alone."""
        self._receivers = receivers
        self._open = deque(receivers)
        """Those whose stream has not ended; the first one is tried first."""
        self._waiting = Waiters()
        self._clock = WaitClock()
        self._until_checkpoint = CHECKPOINT_EVERY
        for receiver in receivers:
            receiver.wake_through(self._waiting)

    def __repr__(self) -> str:
        return f"<MergedReceiver of {', '.join(map(repr, self._receivers))}>"

    async def receive(self) -> R:
        """Return the next record, waiting for one if need be; see `ReceiveChannel.receive`."""
        self._until_checkpoint -= 1
        if self._until_checkpoint <= 0:
            self._until_checkpoint = CHECKPOINT_EVERY
            await anyio.lowlevel.checkpoint()
        while True:
            try:
                return self.receive_nowait()
            except anyio.WouldBlock:
                await self._wait()

    async def _wait(self) -> None:
        with self._clock.waiting("record"):
            ready = [receiver.ready_to_receive() for receiver in self._open]  # all of them: each returns credit
            if not any(ready):
                await self._waiting.wait()

    def receive_nowait(self) -> R:
        """Return the next record if there is one now; see `ReceiveChannel.receive_nowait`."""
        for receiver in list(self._open):
            self._open.rotate(-1)  # behind the others: none starves
            try:
                return receiver.receive_nowait()
            except anyio.WouldBlock:
                pass
            except anyio.EndOfStream:
                self._open.remove(receiver)
        if self._open:
            raise anyio.WouldBlock
        raise anyio.EndOfStream

    def statistics(self) -> ChannelStatistics:
        """Return the contents and the waits of these ends, added up."""
        each = [receiver.statistics() for receiver in self._receivers]
        return ChannelStatistics(
            transport=" and ".join(part.transport for part in each),
            capacity=max(1, sum(part.capacity for part in each if part.senders)),
            items=sum(part.items for part in each),
            capacity_bytes=sum(part.capacity_bytes or 0 for part in each if part.senders) or each[0].capacity_bytes,
            nbytes=sum(part.nbytes for part in each),
            sent=sum(part.sent for part in each),
            received=sum(part.received for part in each),
            senders=sum(part.senders for part in each),
            waiting_for=self._clock.waiting_for,
            waited_s=self._clock.waited_s,
        )

    async def aclose(self) -> None:
        """Close these ends; closing twice is fine."""
        for receiver in self._receivers:
            await receiver.aclose()

    # -- the parts of `RemoteReceiver` that workers need ---------------------------------------------------------------

    @property
    def peers(self) -> list[Peer]:
        """Admitted senders of all channels."""
        return [peer for receiver in self._receivers for peer in receiver.peers]

    def keep_open(self) -> None:
        """See `RemoteReceiver.keep_open`."""
        for receiver in self._receivers:
            receiver.keep_open()

    def let_end(self) -> None:
        """See `RemoteReceiver.let_end`."""
        for receiver in self._receivers:
            receiver.let_end()


AnyReceiver = RemoteReceiver[Any] | MergedReceiver[Any]
"""The receiving end of workers: one channel, or several."""
