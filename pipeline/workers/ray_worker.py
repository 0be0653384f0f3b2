"""Run a stage in an actor of Ray; the child's side.

The actor's method runs in the main thread of its process, so a stage may handle signals there as in a process of its
own. Ray pickles the stage and its `StageConfig`; records and reports are penstock's own and never pickled.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple

import anyio

from ..channels.keys import ChannelKey
from ..channels.tcp_address import bracketed
from ..util.host import host_identity
from ..util.signals import cancelled_by_sigterm
from .worker_messages import Left, StageConfig, WorkerChannels
from .worker_stage import Link, run_stage


class Place(NamedTuple):
    """The process and the host of an actor."""

    pid: int
    node: str
    """The address of its host; empty on that of the pipeline."""


class StageActor:
    """One start of a worker, as Ray runs it; an actor runs one stage."""

    def place(self, host: str) -> Place:
        """Return its process and its host, for the pipeline on `host`."""
        return Place(os.getpid(), "" if host == host_identity() else node_address())

    def run(self, stage: Any, config: StageConfig, directory: str) -> None:
        """Run `stage`, in `directory` where that exists here; its end is reported to the pipeline."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the handler of Ray raises SystemExit in whatever runs
        with suppress(OSError):
            if directory:
                os.chdir(directory)
        anyio.run(_run, stage, config)


async def _run(stage: Any, config: StageConfig) -> None:
    """Run `stage` until it returns, or leaves at SIGTERM, as of `ray stop` and of a node that is drained."""
    with anyio.CancelScope() as scope, cancelled_by_sigterm(scope):
        left = Left("it was stopped by SIGTERM")
        await run_stage(lambda: stage, config.name, _link_to(config.channels), if_stopped=left)


def node_address() -> str:
    """Return the address of this host for the other nodes of the cluster."""
    address: str = import_module("ray.util").get_node_ip_address()
    return address


def _link_to(channels: WorkerChannels) -> Link:
    if channels.host == host_identity():
        return Link(channels.outbox_url, channels.outbox_kind, "shm://", None, "")
    address = node_address()
    key = ChannelKey(bytes.fromhex(channels.key))
    return Link(channels.remote_url, channels.outbox_kind, f"tcp://{bracketed(address)}:0", key, address)
