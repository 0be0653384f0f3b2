"""A stream ends when its senders are done, and fails where a member is absent for too long."""

from __future__ import annotations

import anyio
import pytest
from tests.failsafe import FAILSAFE_S
from tests.loop_clock import LoopClock

from penstock._pipeline.channels.attendance import Attendance
from penstock._pipeline.channels.members import Members, OnAbsence
from penstock._pipeline.channels.peer import Peer
from penstock._pipeline.channels.receiver_config import ReceiverConfig
from penstock._schemas.control import PROTOCOL_VERSION, Connect
from penstock.errors import MemberAbsent, PeerClosed

ABSENCE_TIMEOUT_S = 600


class Stream:
    """An attendance with the senders that it looks at."""

    def __init__(self, members: Members | None = None) -> None:
        config = ReceiverConfig(
            capacity=1,
            capacity_bytes=1,
            members=members,
            max_senders=2,
            listener=None,
            name="receiver",
            key=None,
            heartbeat_timeout_s=None,
            tokenizer=None,
            checksum=False,
        )
        self.peers: dict[bytes, Peer] = {}
        self.woken = anyio.Event()
        self.attendance = Attendance(config, "shm", "group", self.peers, self.woken.set)
        self.attendance.open()

    def join(self, name: str = "a") -> Peer:
        peer = self.peers[name.encode()] = Peer(connect(name), lambda _: None, 32)
        self.attendance.join(peer)
        return peer


def connect(name: str, **fields: str) -> Connect:
    request = {"transport": "shm", "kind": "group"} | fields
    return Connect(PROTOCOL_VERSION, request["transport"], request["kind"], name.encode(), name, 7)


def counted(on_absence: OnAbsence = "fail") -> Members:
    return Members(1, absence_timeout_s=ABSENCE_TIMEOUT_S, on_absence=on_absence)


async def test_a_stream_is_over_when_a_sender_has_joined_and_all_have_left() -> None:
    stream = Stream()

    assert not stream.attendance.over
    peer = stream.join()
    assert not stream.attendance.over
    peer.open = False
    with pytest.raises(anyio.EndOfStream):
        stream.attendance.raise_if_over()


async def test_a_place_that_is_granted_holds_the_stream_open() -> None:
    stream = Stream()
    stream.join().open = False

    stream.attendance.granted = 1
    assert not stream.attendance.over


async def test_a_stream_that_is_kept_open_ends_when_it_is_let_without_a_sender() -> None:
    stream = Stream()
    stream.attendance.keep_open()
    stream.join().open = False

    assert not stream.attendance.over
    stream.attendance.let_end()
    assert stream.woken.is_set()
    assert stream.attendance.over


@pytest.mark.parametrize(("on_absence", "raised"), [("fail", MemberAbsent), ("continue", anyio.EndOfStream)])
async def test_a_member_that_is_absent_for_too_long_ends_the_stream(
    on_absence: OnAbsence, raised: type[Exception]
) -> None:
    clock, stream = LoopClock(), Stream(counted(on_absence))
    stream.attendance.lose(stream.join(), "a died")
    clock.set_forward(ABSENCE_TIMEOUT_S)

    with anyio.fail_after(FAILSAFE_S):
        await stream.woken.wait()

    with pytest.raises(raised):
        stream.attendance.raise_if_over()


async def test_no_member_is_awaited_once_the_receiver_is_closed() -> None:
    clock, stream = LoopClock(), Stream(counted())
    stream.attendance.close()
    clock.set_forward(ABSENCE_TIMEOUT_S)

    for _ in range(3):
        await anyio.lowlevel.checkpoint()
    assert not stream.woken.is_set()


async def test_a_member_may_not_come_back_after_the_end_of_the_stream_was_reported() -> None:
    members = counted()
    stream = Stream(members)
    stream.join()
    members.done("a")
    stream.attendance.check(connect("a"))

    with pytest.raises(anyio.EndOfStream):
        stream.attendance.raise_if_over()
    with pytest.raises(PeerClosed, match="every member is done"):
        stream.attendance.check(connect("a"))


@pytest.mark.parametrize("wrong", [{"transport": "tcp"}, {"kind": "batch"}])
async def test_a_sender_of_something_else_is_rejected(wrong: dict[str, str]) -> None:
    rejection = Stream().attendance.rejection(connect("a", **wrong))

    assert rejection is not None
    assert rejection.error == "ProtocolMismatch"


async def test_no_more_senders_are_admitted_than_there_are_places() -> None:
    stream = Stream()
    stream.join("a")
    assert stream.attendance.rejection(connect("b")) is None

    stream.attendance.granted = 1
    rejection = stream.attendance.rejection(connect("b"))
    assert rejection is not None
    assert rejection.error == "TooManySenders"
