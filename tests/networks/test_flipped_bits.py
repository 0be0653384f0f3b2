"""A relay flips one bit of a connection: both ends are told, or it changed nothing. Neither waits for ever.

CURVE authenticates contents. Lengths of frames, and what is sent before the keys are agreed on, are not authenticated:
after a longer length, ZeroMQ takes all that follows for the rest of one message.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import anyio
import pytest
from chaos.relay import relayed
from tests.failsafe import FAILSAFE_S

from penstock import TrajectoryGroup
from penstock.channels import connect, serve
from penstock.errors import PenstockError
from penstock.testing import group

HEARTBEAT_S = 3.0

RECORDS = 24
"""Records of a connection: they and the credit for them take more than 20 KB in each direction that is flipped."""

AT_ONCE = 32
"""Connections at a time."""

GREETING_BYTES, HANDSHAKE_FRAMES = 64, 2
"""What each side sends before the keys are agreed on."""


LONG = 2
"""The flag of a frame whose length takes 8 bytes."""

COMMAND = 4
"""The flag of a frame of ZMTP that is a command, such as a heartbeat, and no message."""


@dataclass
class Frames:
    """Follows the frames of ZMTP in one direction: positions of headers differ from one connection to the next."""

    complete: int = 0
    """Headers that have ended."""
    _header: bytearray = field(default_factory=bytearray)
    _left: int = GREETING_BYTES
    """Bytes left of the greeting, or of the present frame's content."""

    @property
    def at_header(self) -> bool:
        """Return whether the next byte begins a frame: it holds the flags."""
        return not self._left and not self._header

    def advance(self, byte: int) -> bool:
        """Pass the next byte, and return whether it is one of a header."""
        if self._left:
            self._left -= 1
            return False
        self._header.append(byte)
        if len(self._header) == (9 if self._header[0] & LONG else 2):
            self._left = int.from_bytes(self._header[1:], "big")
            self._header.clear()
            self.complete += 1
        return True


@dataclass
class OneByte(ABC):
    """Changes one byte of a direction, of one connection."""

    to_receiver: bool
    flipped_s: float | None = field(default=None, kw_only=True)
    """When it was done."""
    _frames: Frames = field(default_factory=Frames, kw_only=True)

    def __call__(self, to_receiver: bool, part: bytes) -> bytes:  # noqa: FBT001 (see `Change`)
        if to_receiver != self.to_receiver or self.flipped_s is not None:
            return part
        changed = bytearray(part)
        for index, byte in enumerate(part):
            if self._is_next(byte):
                changed[index] = self._changed(byte)
                self.flipped_s = time.monotonic()
                break
        return bytes(changed)

    @abstractmethod
    def _is_next(self, byte: int) -> bool:
        """Pass the next byte of the direction, and return whether it is the one."""

    @abstractmethod
    def _changed(self, byte: int) -> int:
        """Return the byte that arrives in its place."""


@dataclass
class Flip(OneByte):
    """Flips one bit of a direction: of a frame's header, of the handshake, or of any byte."""

    kind: str
    """header, handshake or byte."""
    number: int
    """Which byte of the kind."""
    bit: int
    _seen: int = 0

    def _is_next(self, byte: int) -> bool:
        handshake = self._frames.complete <= HANDSHAKE_FRAMES
        in_header = self._frames.advance(byte)
        self._seen += {"header": in_header, "handshake": handshake, "byte": True}[self.kind]
        return self._seen > self.number

    def _changed(self, byte: int) -> int:
        return byte ^ 1 << self.bit


@dataclass
class CommandFlag(OneByte):
    """Sets the command flag of message `number` of a direction: ZeroMQ drops the message, and stays connected."""

    number: int
    _messages: int = 0

    def _is_next(self, byte: int) -> bool:
        begins_message = self._frames.at_header and not byte & COMMAND
        self._frames.advance(byte)
        self._messages += begins_message
        return begins_message and self._messages > self.number

    def _changed(self, byte: int) -> int:
        return byte | COMMAND


class Told:
    """A `PeerListener` that keeps what it is told."""

    def __init__(self) -> None:
        self.received_of: dict[str, list[int]] = {}
        self.ended_s: dict[str, float] = {}

    def received(self, peer: Any, record: Any) -> None:
        self.received_of.setdefault(peer.name, []).append(int(record.instance_id))

    def observed(self, peer: Any, payload: bytes) -> None:
        pass

    def lost(self, peer: Any, error: Exception) -> None:  # noqa: ARG002 (see `PeerListener`)
        self.ended_s.setdefault(peer.name, time.monotonic())

    def closed(self, peer: Any) -> None:
        self.ended_s.setdefault(peer.name, time.monotonic())

    def disconnected(self, peer: Any) -> None:
        pass


@dataclass
class Ends:
    """What became of one connection."""

    flip: OneByte
    intact: bool
    """Whether all records arrived and both ends closed without an error."""
    told_after_s: float
    """Seconds from the flip until both ends were told, or had closed."""


async def flipped(flips: Iterable[OneByte], capacity: int = 4) -> list[Ends]:
    """Send records through a relay once for each flip, `AT_ONCE` at a time, and wait until both ends are told."""
    told, ends, pending = Told(), list[Ends](), iter(list(flips))
    async with serve(
        "tcp://127.0.0.1:0",
        TrajectoryGroup,
        capacity=capacity,
        listener=told,
        heartbeat_timeout_s=HEARTBEAT_S,
        max_senders=2 * AT_ONCE,
    ) as inbox:
        inbox.keep_open()

        async def receive() -> None:
            while True:
                await inbox.receive()

        async def take_turns(lane: int) -> None:
            for number, flip in enumerate(pending):
                ends.append(await one(inbox, told, f"{lane}-{number}", flip))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(receive)
            async with anyio.create_task_group() as lanes:
                for lane in range(AT_ONCE):
                    lanes.start_soon(take_turns, lane)
            tasks.cancel_scope.cancel()
    return ends


async def one(inbox: Any, told: Told, name: str, flip: OneByte) -> Ends:
    """Send the records of one connection, and wait until both ends are told of its end."""
    failure: Exception | None = None
    async with relayed(int(inbox.url.rpartition(":")[2]), lambda: flip) as port:
        try:
            with anyio.fail_after(FAILSAFE_S):
                url = f"tcp://127.0.0.1:{port}"
                async with connect(url, TrajectoryGroup, name=name, heartbeat_timeout_s=HEARTBEAT_S) as outbox:
                    for number in range(RECORDS):
                        await outbox.send(group(instance_id=str(number), completion_lengths=[8]))
                failure = outbox.failure
        except PenstockError as error:
            failure = error
        sender_told_s = time.monotonic()
    with anyio.fail_after(FAILSAFE_S):
        # Its peer goes when its end is noticed, and the listener is told after all that came before.
        while any(peer.name == name for peer in inbox.peers) or inbox.ready_to_receive():  # noqa: ASYNC110
            await anyio.sleep(0.01)
    received = told.received_of.get(name, [])
    assert received == sorted(set(received))
    last_s = max(sender_told_s, told.ended_s.get(name, 0.0))
    return Ends(flip, failure is None and len(received) == RECORDS, last_s - (flip.flipped_s or last_s))


def every(kind: str, numbers: Iterable[int], random: Random) -> Iterator[Flip]:
    for number in numbers:
        for to_receiver in (True, False):
            yield Flip(to_receiver, kind, number, random.randrange(8))


async def test_one_flipped_bit_is_told_to_both_ends() -> None:
    """Lengths of frames are among them: a longer one made each end wait for the other for ever."""
    random = Random(0)  # noqa: S311 (no secret)
    headers = every("header", [0, 1, 6, 7, 13, 28, 40, 53], random)

    ends = await flipped([*headers, *every("handshake", range(0, 300, 40), random)])

    assert len(ends) == 32
    assert sum(not each.intact for each in ends) > 16


async def test_a_message_that_was_dropped_is_told_to_both_ends() -> None:
    """With credit for one record, each end waits for the next message of the other. A lost count changes nothing."""
    flags = [CommandFlag(way, number) for number in range(3, 12) for way in (True, False)]  # after the handshake

    ends = await flipped(flags, capacity=1)

    told = [each.flip.to_receiver for each in ends if each.flip.flipped_s is not None and not each.intact]
    assert {True, False} == set(told)


@pytest.mark.long
@pytest.mark.timeout(3600)
async def test_each_flipped_bit_is_told_to_both_ends() -> None:
    """Every byte of the handshake and of the headers of frames among the first 20 KB, and 500 others, both ways."""
    random = Random(0)  # noqa: S311 (no secret)
    flips = [
        *every("handshake", range(600), random),
        *every("header", range(400), random),
        *every("byte", random.sample(range(20_000), 500), random),
    ]

    ends = [each for each in await flipped(flips) if each.flip.flipped_s is not None]

    assert len(ends) > 1000
    assert max(each.told_after_s for each in ends if not each.intact) < 2 * HEARTBEAT_S
