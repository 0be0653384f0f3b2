"""Over tcp a peer without the key, or without a handshake, uses no place of a sender; others keep to their credit."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
import zmq
from tests import wire
from tests.failsafe import FAILSAFE_S
from tests.fixed_limits import set_limits
from tests.hostile.test_frames import frames_of, record, send_frames
from tests.moments import moment

from penstock import TrajectoryGroup
from penstock.channels import ChannelKey, RemoteReceiver, connect, serve
from penstock.errors import PeerClosed, PeerLost, TooManySenders
from penstock.testing import group

Inbox = RemoteReceiver[TrajectoryGroup]

KEY = ChannelKey(bytes(32))

LOOPBACK = "tcp://127.0.0.1:0"

MAX_HANDSHAKES = 64
"""Connections without a handshake that a receiver keeps open."""


def port_of(inbox: Inbox) -> int:
    return int(inbox.url.rpartition(":")[2])


def idle(inbox: Inbox, source: str = "127.0.0.1") -> socket.socket:
    """Open a connection from `source`, and send nothing."""
    connection = socket.create_connection(("127.0.0.1", port_of(inbox)), timeout=FAILSAFE_S, source_address=(source, 0))
    connection.setblocking(False)
    return connection


def is_ended(connection: socket.socket) -> bool:
    """Return whether the other side has ended `connection`."""
    try:
        while received := connection.recv(4096):
            del received
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True


async def until_rejected(inbox: Inbox, count: int) -> None:
    with anyio.fail_after(FAILSAFE_S):
        while inbox.rejected < count:
            await moment()


async def until_accepted(inbox: Inbox) -> None:
    """Wait until the acceptor knows of a connection."""
    with anyio.fail_after(FAILSAFE_S):
        while "1 in handshake" not in repr(inbox.peers.on_unknown):
            await moment()


async def until_closed(connection: socket.socket) -> None:
    with anyio.fail_after(FAILSAFE_S):
        while not is_ended(connection):
            await moment()


async def still_works(inbox: Inbox, key: ChannelKey | None = None) -> None:
    async with connect(inbox.url, TrajectoryGroup, key=key) as outbox:
        await outbox.send(group(instance_id="after"))
        assert (await inbox.receive()).instance_id == "after"


@contextmanager
def key_holder(url: str, number: int = 0) -> Iterator[zmq.Socket[bytes]]:
    """Open a ZeroMQ connection with the key, without a handshake."""
    one: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    one.setsockopt(zmq.IDENTITY, b"p" + number.to_bytes(15))
    one.setsockopt(zmq.RECONNECT_IVL, -1)
    KEY.protect(one, "sender")
    one.connect(url)
    try:
        yield one
    finally:
        one.close(linger=0)


@contextmanager
def no_more_than(most: int, port: int) -> Iterator[int]:
    """Open a port that forwards the first `most` bytes to `port`."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as both:
        near, far = (both.enter_context(socket.socket()) for _ in range(2))

        def back() -> None:
            with suppress(OSError):
                while part := far.recv(2**16):
                    near.sendall(part)
                near.shutdown(socket.SHUT_WR)  # shut for reading too, it would be reset, and lose the last part

        def forth() -> None:
            nonlocal near
            near = both.enter_context(listener.accept()[0])
            far.connect(("127.0.0.1", port))
            threading.Thread(target=back, daemon=True).start()
            left = most
            with suppress(OSError):
                while left and (part := near.recv(min(left, 2**16))):
                    far.sendall(part)
                    left -= len(part)

        threading.Thread(target=forth, daemon=True).start()
        yield int(listener.getsockname()[1])


def connect_frame(**changes: Any) -> bytes:
    return wire.encode(wire.connect_message(transport="tcp", **changes))


async def answer(one: zmq.Socket[bytes]) -> tuple[str, Any]:
    """Receive the next message: its type by name, and the message."""
    with anyio.fail_after(FAILSAFE_S):
        while not int(one.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            await moment()
    return wire.decode(one.recv(zmq.NOBLOCK))


async def until_ended(one: zmq.Socket[bytes]) -> None:
    """Wait until the connection of a key holder is closed."""
    with anyio.fail_after(FAILSAFE_S):
        while int(one.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
            await moment()


# -- strangers ---------------------------------------------------------------------------------------------------------


async def test_idle_connections_use_no_place_of_a_sender() -> None:
    async with serve(LOOPBACK, TrajectoryGroup, max_senders=1) as inbox:
        with ExitStack() as strangers:
            for _ in range(60):
                strangers.enter_context(idle(inbox))
            await still_works(inbox)


async def test_an_idle_connection_is_closed_after_the_timeout_of_the_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, HANDSHAKE_S=0.05)
    async with serve(LOOPBACK, TrajectoryGroup) as inbox:
        with idle(inbox) as stranger:
            await until_closed(stranger)
        monkeypatch.undo()
        await still_works(inbox)
        assert inbox.rejected == 1


async def test_of_too_many_idle_connections_the_oldest_of_the_address_with_the_most_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_limits(monkeypatch, MAX_HANDSHAKES=4, HANDSHAKE_S=FAILSAFE_S)  # they are closed for their number
    async with serve(LOOPBACK, TrajectoryGroup, max_senders=1) as inbox:
        with ExitStack() as strangers:
            alone = strangers.enter_context(idle(inbox, "127.0.0.2"))
            many = [strangers.enter_context(idle(inbox, "127.0.0.3")) for _ in range(6)]
            await until_rejected(inbox, 2)

            for oldest in many[:2]:
                await until_closed(oldest)
            assert not any(map(is_ended, [alone, *many[2:]]))
            await still_works(inbox)


async def test_more_idle_connections_than_permitted_keep_no_sender_out() -> None:
    async with serve(LOOPBACK, TrajectoryGroup, max_senders=2) as inbox:
        with ExitStack() as strangers:
            for _ in range(300):
                strangers.enter_context(await anyio.to_thread.run_sync(idle, inbox))
            await still_works(inbox)
            await until_rejected(inbox, 300 - 2 - MAX_HANDSHAKES)


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f" + b"\x03" + bytes(53), bytes(4096)], ids=range(3)
)
async def test_invalid_bytes_change_nothing(sent: bytes) -> None:
    async with serve(LOOPBACK, TrajectoryGroup) as inbox:
        with idle(inbox) as stranger:
            stranger.sendall(sent)
            await still_works(inbox)
            assert inbox.statistics().received == 1


async def test_strangers_that_connect_and_disconnect_end_no_other_connection() -> None:
    """Their descriptors are those that senders had, and will have."""
    received: list[str] = []
    async with serve(LOOPBACK, TrajectoryGroup, senders=30) as inbox, anyio.create_task_group() as tasks:

        async def come_and_go() -> None:
            while True:
                with idle(inbox) as stranger:
                    await anyio.lowlevel.checkpoint()
                    stranger.sendall(b"\xff")
                await anyio.lowlevel.checkpoint()

        async def send(number: int) -> None:
            async with connect(inbox.url, TrajectoryGroup, name=str(number)) as outbox:
                for _ in range(3):
                    await outbox.send(group(env=str(number)))

        async def send_in_turns() -> None:
            for first in range(0, 30, 3):
                async with anyio.create_task_group() as some:
                    for number in range(first, first + 3):
                        some.start_soon(send, number)

        for _ in range(3):
            tasks.start_soon(come_and_go)
        tasks.start_soon(send_in_turns)
        received += [record.env async for record in inbox]
        tasks.cancel_scope.cancel()

    assert sorted(received) == sorted(str(number) for number in range(30) for _ in range(3))


# -- a port that is busy -----------------------------------------------------------------------------------------------


async def test_a_sender_that_the_port_did_not_get_to_in_time_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, HANDSHAKE_S=0.5)
    async with serve(LOOPBACK, TrajectoryGroup, key=KEY) as inbox:
        with key_holder(inbox.url) as one:
            await until_accepted(inbox)
            one.send(connect_frame())
            time.sleep(2.0)  # noqa: ASYNC251 (the event loop is blocked)

            assert (await answer(one))[0] == "Accept"
            one.send(wire.encode(wire.ready()))
            assert (await answer(one))[0] == "Ready"


async def test_a_sender_whose_connection_a_busy_port_closes_is_told_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def close_late() -> None:
            with listener.accept()[0] as accepted:
                accepted.settimeout(1.5)
                with suppress(TimeoutError):
                    while accepted.recv(4096):
                        pass

        thread = threading.Thread(target=close_late)
        thread.start()
        with pytest.raises(PeerClosed, match=r"in the handshake after \d s: it is too busy to complete one"):
            async with connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}", TrajectoryGroup):
                pass
        await anyio.to_thread.run_sync(thread.join)


# -- peers with the key ------------------------------------------------------------------------------------------------


async def test_a_sender_beyond_the_maximum_is_rejected_and_uses_no_place() -> None:
    async with serve(LOOPBACK, TrajectoryGroup, max_senders=1) as inbox:
        async with connect(inbox.url, TrajectoryGroup):
            for _ in range(3):
                with pytest.raises(TooManySenders, match="expected at most 1 senders: raise max_senders"):
                    async with connect(inbox.url, TrajectoryGroup):
                        pass
        with anyio.fail_after(FAILSAFE_S):
            while inbox.statistics().senders or inbox.peers:
                await moment()
        await still_works(inbox)


async def test_a_place_that_was_granted_and_not_used_is_free_again_after_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_limits(monkeypatch, HANDSHAKE_S=0.3)
    async with serve(LOOPBACK, TrajectoryGroup, max_senders=1, key=KEY) as inbox:
        with key_holder(inbox.url) as one:
            one.send(connect_frame())
            assert (await answer(one))[0] == "Accept"
            with pytest.raises(TooManySenders):
                async with connect(inbox.url, TrajectoryGroup, key=KEY):
                    pass
            with anyio.fail_after(FAILSAFE_S):
                while inbox.peers.attendance.granted:
                    await moment()
        monkeypatch.undo()
        await still_works(inbox, KEY)


@pytest.mark.parametrize(
    "sent",
    [
        [wire.encode(wire.publish((1, 1, 0, 1, 1, 64)))],
        [wire.encode(wire.ready())],
        [connect_frame(identity=b"q" + bytes(15))],
        [bytes(70_000)],
        [connect_frame(), b"and more"],
        [b"\xc1"],
        [b""],
    ],
    ids=range(7),
)
async def test_an_invalid_handshake_with_the_key_is_rejected_and_disconnected(sent: list[bytes]) -> None:
    async with serve(LOOPBACK, TrajectoryGroup, key=KEY) as inbox:
        with key_holder(inbox.url) as one:
            one.send_multipart(sent)
            kind, refused = await answer(one)
            assert kind == "Reject"
            assert refused.error == "ProtocolMismatch"
            await until_ended(one)
        await still_works(inbox, KEY)
        assert inbox.rejected == 1


async def test_a_sender_that_sends_more_bytes_than_its_credit_is_disconnected() -> None:
    async with (
        serve(LOOPBACK, TrajectoryGroup, capacity_bytes=8192) as inbox,
        connect(inbox.url, TrajectoryGroup, name="the forger") as outbox,
    ):
        for number in (1, 2, 3):
            send_frames(outbox, (number, 1, number, 0, 0, 4096), frames_of(record(str(number))))
        await until_rejected(inbox, 1)
        received = [(await inbox.receive()).instance_id for _ in range(3)]  # sent before the excess was noticed
        with pytest.raises(PeerLost, match=r"expected at most 9216 bytes in flight, got 12288"):
            await inbox.receive()
        assert received == ["1", "2", "3"]


async def test_a_sender_that_sends_more_bytes_than_its_descriptor_states_is_disconnected() -> None:
    async with (
        serve(LOOPBACK, TrajectoryGroup) as inbox,
        connect(inbox.url, TrajectoryGroup, name="the forger") as outbox,
    ):
        send_frames(outbox, (1, 1, 1, 0, 0, 64), frames_of(record()))
        with pytest.raises(PeerLost, match=r"expected at most 64 bytes of columns, got more"):
            await inbox.receive()


async def test_a_message_of_endless_parts_ends_the_connection_of_its_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, CHECK_INTERVAL_S=0.05, LARGEST_MESSAGE=2**20)
    async with serve(LOOPBACK, TrajectoryGroup, capacity_bytes=2**20, key=KEY) as inbox:
        with no_more_than(2**23, port_of(inbox)) as port, key_holder(f"tcp://127.0.0.1:{port}") as flooder:
            flooder.send(connect_frame())
            assert (await answer(flooder))[0] == "Accept"
            flooder.send(wire.encode(wire.ready()))
            assert (await answer(flooder))[0] == "Ready"
            flooder.send_multipart([bytes(2**16)] * 2**8)  # 16 MiB, of which half arrives
            await until_rejected(inbox, 1)
            await until_ended(flooder)
        with pytest.raises(
            PeerLost, match=r"stranger .* was disconnected: expected at most 2162688 bytes .* does not end"
        ):
            await inbox.receive()


async def test_a_disconnected_sender_can_send_nothing_more() -> None:
    async with serve(LOOPBACK, TrajectoryGroup) as inbox:
        async with connect(inbox.url, TrajectoryGroup, name="the forger") as outbox:
            send_frames(outbox, (9, 1, 1, 0, 0, 4096), frames_of(record()))
            with pytest.raises(PeerLost, match=r"the forger .* was disconnected"):
                await inbox.receive()
            line: Any = outbox
            with anyio.fail_after(FAILSAFE_S):
                await line.wait_disconnected()
            assert isinstance(outbox.failure, PeerClosed)
        await still_works(inbox)


def left_behind(inbox: Inbox, messages: list[bytes]) -> None:
    """Connect, send `messages` and disconnect, while the event loop does not run. Blocks."""
    with zmq.Context() as context:
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.IDENTITY, LEFT)
        KEY.protect(stranger, "sender")
        stranger.connect(inbox.url)
        for message in messages:
            stranger.send(message)
        stranger.close(linger=-1)


def begun(inbox: Inbox, identity: bytes) -> zmq.Socket[bytes]:
    """Connect, and send what a sender begins with, while the event loop does not run. Blocks."""
    sender: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    sender.setsockopt(zmq.IDENTITY, identity)
    sender.setsockopt(zmq.IMMEDIATE, 1)
    sender.setsockopt(zmq.LINGER, 0)
    sender.setsockopt(zmq.RCVTIMEO, int(1000 * FAILSAFE_S))
    KEY.protect(sender, "sender")
    sender.connect(inbox.url)
    sender.send(wire.encode(wire.connect_message(transport="tcp", identity=identity)))
    return sender


LEFT = b"left" + bytes(12)

LEFT_BEHIND = {
    "bytes": [b"\xc1"] * 50,
    "requests to join": [wire.encode(wire.connect_message(transport="tcp", identity=LEFT))] * 50,
}


@pytest.mark.parametrize("messages", LEFT_BEHIND.values(), ids=LEFT_BEHIND)
async def test_messages_of_a_connection_that_has_ended_cost_one_with_its_descriptor_nothing(
    messages: list[bytes],
) -> None:
    async with serve(LOOPBACK, TrajectoryGroup, key=KEY) as inbox:
        left_behind(inbox, messages)
        with begun(inbox, b"p" + bytes(15)) as sender:
            assert await answer_to(sender) == "Accept"
            sender.send(wire.encode(wire.ready()))
            assert await answer_to(sender) == "Ready"


async def answer_to(sender: zmq.Socket[bytes]) -> str:
    """Return the kind of the next message to a sender."""
    kind, _ = wire.decode(await anyio.to_thread.run_sync(sender.recv))
    return str(kind)
