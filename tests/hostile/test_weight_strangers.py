"""At the port of published weights, strangers and peers with the key take bounded memory, descriptors and log lines."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec
import numpy as np
import pytest
import zmq
from structlog.testing import capture_logs
from tests.failsafe import FAILSAFE_S
from tests.fixed_limits import set_limits
from tests.hostile.test_tcp_strangers import is_ended, key_holder, no_more_than, until_closed, until_ended
from tests.moments import moment
from tests.wire import (
    PROTOCOL_VERSION,
    ChunkRequest,
    DeltaRequest,
    EndOfWeights,
    Message,
    NewVersion,
    NoDelta,
    PauseAck,
    Ready,
    Reject,
    Subscribe,
    WeightLayout,
    decode,
    encode,
)

from penstock.channels import ChannelKey
from penstock.errors import PeerClosed
from penstock.weights import WeightAddress, WeightPublisher, WeightSubscriber

KEY = ChannelKey(bytes(32))

NONCE = bytes(range(16))

SUBSCRIBE = Subscribe(PROTOCOL_VERSION, "a mirror", 1, NONCE)

TENSORS = {"weight": np.ones(2**18, np.float32)}
"""One chunk."""

MAX_HANDSHAKES = 64
"""Connections without a subscription that a publisher keeps open."""


def port_of(address: WeightAddress) -> int:
    return int(address.url.rpartition(":")[2])


@asynccontextmanager
async def served(*, trusted_link: bool = False) -> AsyncIterator[WeightAddress]:
    async with (
        WeightPublisher(TENSORS) as publisher,
        publisher.serve("tcp://127.0.0.1:0", key=KEY, trusted_link=trusted_link) as address,
    ):
        await publisher.publish(TENSORS, version=1)
        yield replace(address, host="another")


@contextmanager
def idle(address: WeightAddress, count: int = 1) -> Iterator[list[socket.socket]]:
    """Open connections that send nothing."""
    with ExitStack() as stack:
        opened = []
        for _ in range(count):
            opened.append(stack.enter_context(socket.create_connection(("127.0.0.1", port_of(address)), FAILSAFE_S)))
            opened[-1].setblocking(False)
        yield opened


async def still_works(address: WeightAddress) -> None:
    async with WeightSubscriber(address) as subscriber:
        assert await subscriber.newer() == 1


async def answer(one: zmq.Socket[bytes]) -> Message:
    with anyio.fail_after(FAILSAFE_S):
        while not int(one.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            await moment()
    _, message = decode(one.recv(zmq.NOBLOCK))
    assert isinstance(message, Message)
    return message


async def subscribe(one: zmq.Socket[bytes]) -> None:
    one.send(encode(SUBSCRIBE))
    layout = await answer(one)
    assert isinstance(layout, WeightLayout)
    one.send(encode(Ready(KEY.proof("sender", layout.nonce, NONCE))))
    assert isinstance(await answer(one), Ready)


async def refusal(one: zmq.Socket[bytes]) -> str:
    """Return the reason of the first refusal that arrives."""
    while not isinstance(message := await answer(one), Reject):
        pass
    return message.reason


# -- strangers ---------------------------------------------------------------------------------------------------------


async def test_more_idle_connections_than_permitted_keep_no_mirror_out_and_are_closed() -> None:
    async with served() as address:
        with idle(address, 300) as strangers:
            await still_works(address)
            with anyio.fail_after(FAILSAFE_S):
                while sum(map(is_ended, strangers)) < 300 - MAX_HANDSHAKES:
                    await moment()


async def test_an_idle_connection_is_closed_after_the_timeout_of_the_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, HANDSHAKE_S=0.05)
    async with served() as address:
        with idle(address) as [stranger]:
            await until_closed(stranger)
        monkeypatch.undo()
        await still_works(address)


@pytest.mark.parametrize("sent", [[], [SUBSCRIBE]], ids=["nothing", "Subscribe"])
async def test_a_peer_with_the_key_that_does_not_complete_the_handshake_is_disconnected(
    sent: list[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, HANDSHAKE_S=0.3)
    async with served() as address:
        with key_holder(address.url) as one:
            for message in sent:
                one.send(encode(message))
                assert isinstance(await answer(one), WeightLayout)
            with anyio.fail_after(FAILSAFE_S):  # it is writable once it is connected
                while not int(one.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
                    await moment()
            await until_ended(one)
        monkeypatch.undo()
        await still_works(address)


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", bytes(4096)], ids=range(2))
async def test_invalid_bytes_change_nothing(sent: bytes) -> None:
    async with served() as address:
        with idle(address) as [stranger]:
            stranger.sendall(sent)
            await still_works(address)


async def test_many_peers_with_another_key_take_few_lines_of_the_log() -> None:
    with capture_logs() as logs:
        async with served() as address:
            for _ in range(40):
                with pytest.raises(PeerClosed, match="has it the same key"):
                    async with WeightSubscriber(replace(address, key=ChannelKey(bytes(range(32))))):
                        pass
            await still_works(address)

    assert 1 <= sum(entry["event"] == "peer_rejected" for entry in logs) <= 20


# -- a trusted link ----------------------------------------------------------------------------------------------------


def stranger(address: WeightAddress) -> zmq.Socket[bytes]:
    """Return a connection of a program that speaks the protocol, and has no key."""
    one: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    one.setsockopt(zmq.RECONNECT_IVL, -1)
    one.connect(address.url)
    return one


OTHER = ChannelKey(bytes(range(32)))

PROOFS: dict[str, Callable[[WeightLayout], bytes]] = {
    "none": lambda _: b"",
    "that of the publisher": lambda layout: layout.proof,
    "of another key": lambda layout: OTHER.proof("sender", layout.nonce, NONCE),
    "of another connection": lambda _: KEY.proof("sender", bytes(16), NONCE),
    "of the other end": lambda layout: KEY.proof("receiver", layout.nonce, NONCE),
    "cut": lambda layout: KEY.proof("sender", layout.nonce, NONCE)[:-1],
}


@pytest.mark.parametrize("proof", PROOFS.values(), ids=PROOFS)
async def test_a_peer_that_does_not_prove_the_key_gets_no_weights(proof: Callable[[WeightLayout], bytes]) -> None:
    async with served(trusted_link=True) as address:
        with stranger(address) as one:
            one.send(encode(SUBSCRIBE))
            layout = await answer(one)
            assert isinstance(layout, WeightLayout)
            one.send(encode(Ready(proof(layout))))
            one.send(encode(ChunkRequest(1, 0)))
            assert "expected a proof that the mirror has the key" in await refusal(one)
            await until_ended(one)
        await still_works(address)


async def test_a_mirror_refuses_a_publisher_with_another_key() -> None:
    async with served(trusted_link=True) as address:
        with pytest.raises(PeerClosed, match="with the key of these weights, got one with another"):
            async with WeightSubscriber(replace(address, key=OTHER)):
                pass
        await still_works(address)


@pytest.mark.parametrize("trusted_link", [False, True], ids=["encrypted", "trusted"])
async def test_ends_that_do_not_agree_on_encryption_do_not_connect(*, trusted_link: bool) -> None:
    async with served(trusted_link=trusted_link) as address:
        with pytest.raises(PeerClosed, match="in the handshake"):
            async with WeightSubscriber(replace(address, trusted_link=not trusted_link)):
                pass
        await still_works(address)


# -- peers with the key ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        ([encode(Ready())], "expected Subscribe, got Ready"),
        ([encode(ChunkRequest(1, 0))], "expected Subscribe, got ChunkRequest"),
        ([encode(Subscribe(99, "a mirror", 1))], f"expected protocol version {PROTOCOL_VERSION}, got 99"),
        ([encode(SUBSCRIBE), b"and more"], "expected a message in one frame, got 2"),
        ([b"\xc1"], "expected a message of protocol version"),
        ([b""], "expected a message of protocol version"),
    ],
    ids=range(6),
)
async def test_an_invalid_handshake_is_refused_and_disconnected(
    sent: list[bytes], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, HANDSHAKE_S=1.0)
    async with served() as address:
        with key_holder(address.url) as one:
            one.send_multipart(sent)
            assert reason in await refusal(one)
            await until_ended(one)
        monkeypatch.undo()
        await still_works(address)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (SUBSCRIBE, "got another Subscribe"),
        (EndOfWeights(), "got another EndOfWeights"),
        (ChunkRequest(1, 1), "expected a chunk of 1048576 bytes, got number 1"),
        (ChunkRequest(1, -1), "Expected `int` >= 0"),
        (DeltaRequest(1, 0, 1), "expected a span of 1048576 bytes, got number 1"),
        (DeltaRequest(1, 0, -1), "Expected `int` >= 0"),
    ],
    ids=range(6),
)
async def test_an_invalid_message_of_a_mirror_ends_it_and_no_other(sent: Message, reason: str) -> None:
    async with served() as address, WeightSubscriber(address) as other:
        with key_holder(address.url) as one:
            await subscribe(one)
            one.send(encode(sent))
            assert reason in await refusal(one)
            await until_ended(one)
        assert await other.newer() == 1


@pytest.mark.parametrize(
    "request_of",
    [lambda version: ["ChunkRequest", version], lambda version: ["DeltaRequest", version, version]],
    ids=["chunk", "delta"],
)
@pytest.mark.parametrize("version", [1, 2**63, 2**64 - 1, "7"])
@pytest.mark.parametrize("index", [-1, 2**63 - 1, 2**64 - 1, 0.5])
async def test_a_request_with_any_numbers_ends_that_mirror_and_no_other(
    request_of: Callable[[object], list[object]], version: object, index: object
) -> None:
    async with served() as address, WeightSubscriber(address) as other:
        with key_holder(address.url) as one:
            await subscribe(one)
            one.send(msgspec.msgpack.encode([*request_of(version), index]))
            await refusal(one)
            await until_ended(one)
        assert await other.newer() == 1


async def test_a_message_longer_than_any_of_a_mirror_ends_the_connection() -> None:
    async with served() as address:
        with key_holder(address.url) as one:
            await subscribe(one)
            one.send(bytes(70_000))
            await until_ended(one)
        await still_works(address)


@pytest.mark.parametrize(
    "message", [ChunkRequest(1, 0), DeltaRequest(1, 0, 0), PauseAck(7)], ids=lambda message: type(message).__name__
)
async def test_more_requests_than_a_mirror_ever_has_end_it(message: Message, caplog: pytest.LogCaptureFixture) -> None:
    """The reason is in the log: what is left of its requests may end the connection before the answer has arrived."""
    async with served() as address:
        with key_holder(address.url) as one:
            await subscribe(one)
            for _ in range(2000):
                one.send(encode(message))
            await until_ended(one)
        await still_works(address)

    assert "expected at most 32 requests at a time" in caplog.text


async def test_a_mirror_that_leaves_with_requests_open_changes_nothing() -> None:
    async with served() as address:
        for number in range(30):
            with key_holder(address.url, number) as one:
                await subscribe(one)
                for _ in range(32):
                    one.send(encode(ChunkRequest(1, 0)))
                await answer(one)
        await still_works(address)


async def test_a_mirror_that_requests_deltas_of_any_base_is_told_that_there_are_none() -> None:
    async with served() as address:
        with key_holder(address.url) as one:
            await subscribe(one)
            for base in (-(2**63), 0, 1, 2**63 - 1):
                one.send(encode(DeltaRequest(1, base, 0)))
                while isinstance(message := await answer(one), NewVersion):
                    pass
                assert message == NoDelta(1, 0)
        await still_works(address)


async def test_a_mirror_that_requests_chunks_and_receives_none_fills_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, MOST_REQUESTS=10**6)
    async with served() as address:
        with key_holder(address.url) as one, capture_logs() as logs:
            await subscribe(one)
            one.setsockopt(zmq.RCVHWM, 1)
            one.setsockopt(zmq.RCVBUF, 2**16)
            for _ in range(200):
                one.send(encode(ChunkRequest(1, 0)))
            with anyio.fail_after(FAILSAFE_S):
                while not any("when chunks arrive, got more while" in str(entry) for entry in logs):
                    await moment()
        await still_works(address)


async def test_a_message_of_endless_parts_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, CHECK_INTERVAL_S=0.05, MOST_UNREAD_BYTES=2**20)
    async with served() as address:
        with no_more_than(2**23, port_of(address)) as port, key_holder(f"tcp://127.0.0.1:{port}") as flooder:
            await subscribe(flooder)
            flooder.send_multipart([bytes(2**15)] * 2**9)  # 16 MiB, of which half arrives
            assert "or of one that does not end" in await refusal(flooder)
            await until_ended(flooder)
        await still_works(address)
