"""No message that arrives at a ROUTER socket stays unnoticed, and many of them do not keep other tasks from running."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import pytest
import zmq
from tests.failsafe import FAILSAFE_S
from tests.fixed_limits import set_limits

from penstock._pipeline.channels.router_socket import RouterSocket
from penstock._pipeline.channels.transport import Frames, dealer, router
from penstock._pipeline.channels.turns import Share
from penstock._schemas.control import CloseAck


class Ends:
    """A router socket with its sender, and the number of messages that were handled in each turn."""

    def __init__(self, socket: zmq.Socket[bytes], sender: zmq.Socket[bytes]) -> None:
        self.sender = sender
        self.router = RouterSocket(socket, self._handle, self._handled)
        self.turns: list[int] = []
        self._now = 0

    def _handle(self, identity: bytes, frames: Frames) -> None:
        assert (identity, frames[0].bytes) == (b"sender", b"message")
        self._now += 1

    def _handled(self) -> None:
        if self._now:
            self.turns.append(self._now)
        self._now = 0

    async def until(self, count: int) -> None:
        with anyio.fail_after(FAILSAFE_S):
            while sum(self.turns) < count:
                await anyio.lowlevel.checkpoint()


@contextmanager
def connected() -> Iterator[Ends]:
    """Yield the ends of a connection within this process, where what is sent arrives at once."""
    socket, sender = router(), dealer(b"sender")
    socket.bind("inproc://test-router-socket")
    sender.connect("inproc://test-router-socket")
    ends = Ends(socket, sender)
    try:
        yield ends
    finally:
        ends.router.unwatch()
        socket.close(linger=0)
        sender.close(linger=0)


async def test_a_message_is_handled_whose_report_a_send_has_consumed() -> None:
    with connected() as ends:
        ends.sender.send(b"message")
        assert ends.router.send(b"sender", CloseAck())

        await ends.until(1)

        assert ends.turns == [1]


async def test_messages_beyond_a_turn_are_handled_after_other_tasks_have_run(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, AT_ONCE=Share(2, 1000))
    with connected() as ends:
        for _ in range(5):
            ends.sender.send(b"message")

        await ends.until(5)

        assert ends.turns == [2, 2, 1]


async def test_a_sender_that_is_not_connected_is_unreachable() -> None:
    with connected() as ends:
        assert not ends.router.send(b"another", CloseAck())


async def test_a_socket_that_is_not_watched_is_handled_when_it_is_drained() -> None:
    with connected() as ends:
        ends.router.unwatch()
        ends.sender.send(b"message")
        for _ in range(10):
            await anyio.lowlevel.checkpoint()
        assert not ends.turns

        assert ends.router.drain()
        assert ends._now == 1
