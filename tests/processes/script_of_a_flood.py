"""The two processes of `test_dying_floods`: a receiver whose event loop may be held, and a peer that floods and dies.

    python script_of_a_flood.py receive HEARTBEAT_TIMEOUT_S
    python script_of_a_flood.py flood URL NUMBER KIND

The receiver prints its URL, obeys `hold SECONDS` on stdin, and ends with the record called `end`, when it prints how
many came before it. A flooder prints `ready`, and floods when a line comes on stdin.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import anyio
import anyio.to_thread
import msgspec
import zmq
from tests import wire

from penstock import TrajectoryGroup
from penstock._pipeline.accounting.telemetry import Observations
from penstock._pipeline.channels.default_key import default_key
from penstock._schemas.control import CreditRequest, Telemetry
from penstock.channels import RemoteReceiver, serve
from penstock.errors import PeerLost

FLOOD_S = 0.3

FLOODS = {
    "never joined": wire.encode(CreditRequest()),
    "joined": wire.encode(CreditRequest()),
    "telemetry": wire.encode(Telemetry(msgspec.msgpack.encode(Observations()))),
}
"""The message of each kind of flood."""


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


# -- the receiver ------------------------------------------------------------------------------------------------------


async def receive(heartbeat_timeout_s: str) -> None:
    """Receive until the record `end`, whatever becomes of senders."""
    async with (
        serve("tcp://127.0.0.1:0", TrajectoryGroup, heartbeat_timeout_s=float(heartbeat_timeout_s)) as inbox,
        anyio.create_task_group() as tasks,
    ):
        inbox.keep_open()
        say(inbox.url)
        tasks.start_soon(obey)
        say(await count(inbox))
        os._exit(0)  # `obey` waits for a line in a thread


async def count(inbox: RemoteReceiver[TrajectoryGroup]) -> int:
    received = 0
    while True:
        try:
            if (await inbox.receive()).instance_id == "end":
                return received
        except PeerLost:
            continue  # a flooder that had joined
        received += 1


async def obey() -> None:
    while line := await anyio.to_thread.run_sync(sys.stdin.readline):
        say("holding")
        time.sleep(float(line.split()[1]))  # noqa: ASYNC251 (the event loop is held)
        say("held")


# -- a flooder ---------------------------------------------------------------------------------------------------------


def flood(url: str, number: str, kind: str) -> None:
    """Connect with the key, flood, and die. A heartbeat of its own is always among what it has sent last."""
    identity = b"p" + int(number).to_bytes(15)
    socket: zmq.Socket[bytes] = zmq.Context().socket(zmq.DEALER)
    for option, value in {zmq.SNDHWM: 0, zmq.HEARTBEAT_IVL: 1, zmq.HEARTBEAT_TIMEOUT: 0}.items():
        socket.setsockopt(option, value)
    socket.setsockopt(zmq.IDENTITY, identity)
    default_key().protect(socket, "sender")
    socket.connect(url)
    if kind != "never joined":
        for message in (
            wire.connect_message(transport="tcp", identity=identity, name=f"flooder {number}"),
            wire.ready(),
        ):
            socket.send(wire.encode(message))
            socket.recv()
    say("ready")
    sys.stdin.readline()
    until = time.monotonic() + FLOOD_S
    while time.monotonic() < until:
        for _ in range(100):
            socket.send(FLOODS[kind])
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        anyio.run(receive, sys.argv[2])
    else:
        flood(*sys.argv[2:])
