"""Run a stage in an actor of Ray; the child's side.

The actor's method runs in the main thread of its process, so a stage may handle signals there as in a process of its
own. What Ray pickles is the stage and its `StageConfig`; records and reports are penstock's own and never pickled.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple

import anyio

from ..accounting.shared_counters import COUNTERS_BYTES, SharedCounters
from ..channels.keys import ChannelKey
from ..channels.tcp_address import bracketed
from ..util.exception_groups import single_exception
from ..util.host import host_identity
from ..util.signals import cancelled_by_sigterm
from .worker_messages import Failed, Finished, Left, StageConfig, WorkerEvent, encode_event
from .worker_stage import Link, description_of, run_stage, traceback_of


class Place(NamedTuple):
    """The process and the host of an actor."""

    pid: int
    node: str
    """The address of its host; empty on that of the pipeline."""


class StageActor:
    """One start of a worker, as Ray runs it; an actor runs one stage."""

    def place(self, host: str) -> Place:
        """Return where it runs, for the pipeline on `host`."""
        return Place(os.getpid(), "" if host == host_identity() else node_address())

    def run(self, stage: Any, config: StageConfig, directory: str) -> bytes:
        """Run `stage`, in `directory` where that exists here.

        Returns:
            A `Finished`, `Left` or `Failed` event, encoded.
        """
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the handler of Ray raises SystemExit in whatever runs
        with suppress(OSError):
            if directory:
                os.chdir(directory)
        event: WorkerEvent
        try:
            event = anyio.run(_run, stage, config)
        except BaseException as error:  # noqa: BLE001 (also what ends a process is an end of the stage)
            cause = single_exception(error)
            event = Failed(description_of(cause), traceback_of(cause))
        return encode_event(event)


async def _run(stage: Any, config: StageConfig) -> WorkerEvent:
    """Run `stage` until it returns, or leaves at SIGTERM, as of `ray stop` and of a node that is drained."""
    with anyio.CancelScope() as scope, cancelled_by_sigterm(scope):
        await run_stage(stage, config, SharedCounters(bytearray(COUNTERS_BYTES)), _link_to(config))
    return Left("it was stopped by SIGTERM") if scope.cancel_called else Finished()


def node_address() -> str:
    """Return the address of this host under which the other nodes of the cluster reach it."""
    address: str = import_module("ray.util").get_node_ip_address()
    return address


def _link_to(config: StageConfig) -> Link:
    channels = config.channels
    if channels.host == host_identity():
        return Link(channels.outbox_url, "shm://", None, "", None)
    address = node_address()
    key = ChannelKey(bytes.fromhex(channels.key))
    return Link(channels.remote_url, f"tcp://{bracketed(address)}:0", key, address, None)
