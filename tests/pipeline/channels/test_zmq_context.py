"""Channels use a ZeroMQ context of their own, one in each process, apart from that of the user's code."""

from __future__ import annotations

import subprocess
import sys

import anyio
import anyio.to_thread
import zmq
from tests.failsafe import FAILSAFE_S

from penstock import TrajectoryGroup
from penstock.channels import connect, serve
from penstock.testing import group

SEND = """
import os
import anyio
from penstock import TrajectoryGroup
from penstock.channels import connect, serve
from penstock.testing import group

async def send():
    async with serve("shm://", TrajectoryGroup) as inbox, connect(inbox.url, TrajectoryGroup) as outbox:
        await outbox.send(group(instance_id="sent"))
        assert (await inbox.receive()).instance_id == "sent"

anyio.run(send)
"""

FORKED = f"""{SEND}
if child := os.fork():
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
anyio.run(send)
"""

COUNTED = f"""{SEND}
anyio.run(send)
names = []
for thread in os.listdir("/proc/self/task"):
    try:
        with open(f"/proc/self/task/{{thread}}/comm") as file:
            names.append(file.read())
    except FileNotFoundError:  # it has just ended
        pass
assert sum(name.startswith("ZMQbg/IO") for name in names) == 1, names
"""


def run(script: str) -> tuple[int, str]:
    """Run a script with all warnings but those of deprecation; return its exit status and what it wrote to stderr."""
    warnings = ["-W", "always", "-W", "ignore::DeprecationWarning"]
    ran = subprocess.run(
        [sys.executable, *warnings, "-c", script], capture_output=True, check=False, text=True, timeout=FAILSAFE_S
    )
    return ran.returncode, ran.stderr


def test_all_channels_of_a_process_share_one_context() -> None:
    assert run(COUNTED) == (0, "")


async def test_a_channel_works_while_the_users_own_code_terminates_its_context() -> None:
    async with serve("shm://", TrajectoryGroup) as inbox, connect(inbox.url, TrajectoryGroup) as outbox:
        await anyio.to_thread.run_sync(zmq.Context.instance().term)
        await outbox.send(group(instance_id="sent"))

        assert (await inbox.receive()).instance_id == "sent"


def test_a_forked_process_makes_a_context_of_its_own_and_exits_without_a_warning() -> None:
    assert run(FORKED) == (0, "")
