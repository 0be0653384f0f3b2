"""Penstock has a ZeroMQ context of its own, one in each process."""

from __future__ import annotations

import subprocess
import sys

import anyio
import anyio.to_thread
import zmq

from penstock import TrajectoryGroup
from penstock._pipeline.channels.zmq_context import zmq_context
from penstock.channels import connect, serve
from penstock.testing import group

FORKED = """
import os
import zmq
from penstock._pipeline.channels.zmq_context import zmq_context

inherited = zmq_context()
inherited.socket(zmq.PAIR).close()
if child := os.fork():
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
assert zmq_context() is not inherited
one, other = zmq_context().socket(zmq.PAIR), zmq_context().socket(zmq.PAIR)
one.bind("inproc://forked")
other.connect("inproc://forked")
one.send(b"sent")
assert other.recv() == b"sent"
one.close()
other.close()
"""


def test_every_call_returns_the_same_context() -> None:
    assert zmq_context() is zmq_context()


def test_the_context_of_the_users_own_code_is_another() -> None:
    assert zmq_context() is not zmq.Context.instance()


async def test_a_channel_works_while_the_users_own_code_terminates_its_context() -> None:
    async with serve("shm://", TrajectoryGroup) as inbox, connect(inbox.url, TrajectoryGroup) as outbox:
        await anyio.to_thread.run_sync(zmq.Context.instance().term)
        await outbox.send(group(instance_id="sent"))

        assert (await inbox.receive()).instance_id == "sent"


def test_a_forked_process_makes_a_context_of_its_own_and_exits_without_a_warning() -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "always", "-W", "ignore::DeprecationWarning", "-c", FORKED],
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )

    assert (ended.returncode, ended.stderr) == (0, "")
