"""Peers that have the key flood a receiver in a process of its own and die: it lives, and the others' records arrive.

With a high-water mark on the receiving socket, ZeroMQ aborts its process: exit code 134.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from tests.cells import cells
from tests.failsafe import FAILSAFE_S
from tests.processes.children import line

from penstock import TrajectoryGroup
from penstock.channels import connect
from penstock.testing import group

SCRIPT = Path(__file__).with_name("script_of_a_flood.py")

RECORDS = 10
"""Records of the sender that keeps to the protocol."""

KINDS = ["never joined", "joined", "telemetry"]


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process of the script, and kill it when the body ends."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-m", f"tests.processes.{SCRIPT.stem}", *arguments], stdin=pipe, stdout=pipe, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def tell(process: subprocess.Popen[str], command: str) -> None:
    assert process.stdin is not None
    print(command, file=process.stdin, flush=True)


async def until_ended(process: subprocess.Popen[str]) -> int:
    return await anyio.to_thread.run_sync(process.wait, FAILSAFE_S)


async def flooded(kind: str, heartbeat_timeout_s: float, *, floods: int, held: bool) -> None:
    """Flood a receiver `floods` times, all while its event loop is held or while it runs, and check that it lives."""
    with ExitStack() as stack:
        receiver = stack.enter_context(started("receive", str(heartbeat_timeout_s)))
        url = await line(receiver)
        flooders = [stack.enter_context(started("flood", url, str(number), kind)) for number in range(floods)]
        assert [await line(flooder) for flooder in flooders] == ["ready"] * floods
        async with connect(url, TrajectoryGroup) as outbox:
            if held:
                tell(receiver, f"hold {3 * heartbeat_timeout_s}")
                assert await line(receiver) == "holding"
            for number in range(RECORDS):
                await outbox.send(group(instance_id=str(number)))
            for flooder in flooders:
                tell(flooder, "go")
            for flooder in flooders:
                await until_ended(flooder)
            if held:
                assert await line(receiver) == "held"
            await outbox.send(group(instance_id="end"))

        assert await line(receiver) == str(RECORDS)
        assert await until_ended(receiver) == 0


@pytest.mark.parametrize("kind", cells(["never joined", "joined", "telemetry"], run=["joined"]))
async def test_a_receiver_outlives_a_flood_whose_peer_dies_while_the_event_loop_is_held(kind: str) -> None:
    await flooded(kind, 1.0, floods=2, held=True)


@pytest.mark.long
@pytest.mark.parametrize("held", [False, True], ids=["free", "held"])
@pytest.mark.parametrize("heartbeat_timeout_s", [1.0, 30.0])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_receiver_outlives_twenty_floods(kind: str, heartbeat_timeout_s: float, *, held: bool) -> None:
    await flooded(kind, heartbeat_timeout_s, floods=20, held=held)
