"""Whatever a listener raises at the bytes of a peer, that peer is disconnected and counted; the others go on."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs
from tests.cells import cells
from tests.failsafe import FAILSAFE_S

from penstock import TrajectoryGroup
from penstock.channels import RemoteReceiver, RemoteSender, connect, serve
from penstock.errors import LedgerImbalance, PeerLost, SenderRejected
from penstock.testing import group

Inbox = RemoteReceiver[TrajectoryGroup]

FORGER = "forger"

URLS = ["shm://", "tcp://127.0.0.1:0"]

RAISED = [
    ValueError("memoryview: invalid value for format 'q'"),
    KeyError("worker 7"),
    LedgerImbalance("a batch holds a copy"),
    ExceptionGroup("tasks", [OverflowError("int too large to convert")]),
    AssertionError(),
]


class Raising:
    """A listener that raises at one kind of event of the forger, and passes on what others send."""

    def __init__(self, event: str, error: Exception) -> None:
        self._event = event
        self._error = error
        self.lost_peers: list[str] = []

    def _handle(self, event: str, peer: Any) -> None:
        if event == self._event and peer.name == FORGER:
            raise self._error

    def received(self, peer: Any, record: TrajectoryGroup) -> TrajectoryGroup:
        self._handle("received", peer)
        return record

    def observed(self, peer: Any, payload: bytes) -> None:
        del payload
        self._handle("observed", peer)

    def lost(self, peer: Any, error: PeerLost) -> None:
        del error
        self.lost_peers.append(peer.name)

    def closed(self, peer: Any) -> None:
        self._handle("closed", peer)

    def disconnected(self, peer: Any) -> None:
        self._handle("disconnected", peer)


async def provoke(event: str, forger: RemoteSender[TrajectoryGroup]) -> None:
    if event == "received":
        await forger.send(group(instance_id="forged"))
    elif event == "observed":
        forger.send_telemetry(b"forged")
    else:
        forger.send_close()


@pytest.mark.parametrize("url", cells(URLS, run=["shm://"]), ids=["shm", "tcp"])
@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("event", ["received", "observed", "closed"])
async def test_an_exception_of_a_listener_costs_the_peer_its_connection_and_no_other(
    event: str, error: Exception, url: str
) -> None:
    listener = Raising(event, error)
    with capture_logs() as logs, anyio.fail_after(FAILSAFE_S):
        async with (
            serve(url, TrajectoryGroup, listener=listener) as inbox,
            connect(inbox.url, TrajectoryGroup, name="honest") as honest,
            connect(inbox.url, TrajectoryGroup, name=FORGER) as forger,
        ):
            await provoke(event, forger)
            await honest.send(group(instance_id="0"))
            assert (await inbox.receive()).instance_id == "0"
            while FORGER not in listener.lost_peers:  # its end is reported when the receiver waits
                await honest.send(group(instance_id="1"))
                assert (await inbox.receive()).instance_id == "1"
            await forger.wait_failed()
            assert isinstance(forger.failure, SenderRejected)
            assert inbox.rejected == 1

    (rejection,) = [entry for entry in logs if entry["event"] == "peer_rejected"]
    assert rejection["reason"].startswith(FORGER)


@pytest.mark.parametrize("url", URLS, ids=["shm", "tcp"])
async def test_the_messages_after_one_that_raised_are_handled(url: str) -> None:
    listener = Raising("observed", ValueError("any"))
    with anyio.fail_after(FAILSAFE_S):
        async with (
            serve(url, TrajectoryGroup, listener=listener) as inbox,
            connect(inbox.url, TrajectoryGroup, name=FORGER) as forger,
            connect(inbox.url, TrajectoryGroup, name="honest") as honest,
        ):
            for number in range(1000):
                forger.send_telemetry(b"forged")
                if number % 100 == 0:
                    await honest.send(group(instance_id=str(number)))
                    assert (await inbox.receive()).instance_id == str(number)
