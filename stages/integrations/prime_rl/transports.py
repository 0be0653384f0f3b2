"""The two transports of micro-batches to prime-rl's trainer: files in its output folder, and ZeroMQ.

Read off prime-rl's src/prime_rl/transports/rollouts/{filesystem,zmq}.py. Knows no batch.

    <output>/rollouts/step_3/rank_0.bin      a list of micro-batches in msgpack, renamed when it is whole
    tcp://host:5555                          PUB, the topic `data_rank|0|` and the same list
    tcp://host:5556                          PULL, the number of each rank that has connected
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import anyio.from_thread
import msgspec
import zmq

from ...._pipeline.errors import TrainerSilent
from ...._pipeline.util.atomic_file import write_atomically
from ...._pipeline.util.os_errors import explaining_os_errors
from .micro_batches import PrimeRLMicroBatch

ROLLOUTS = "rollouts"
"""The folder in the output_dir of prime-rl."""

HIGH_WATER_MARK = 10
"""Messages to a rank that may wait; prime-rl's own default. A step is sent when the one before it is done."""

POLL_MS = 20

Ranks = Sequence[Sequence[PrimeRLMicroBatch]]

_encode = msgspec.msgpack.Encoder().encode


class Transport(Protocol):
    """Sends the micro-batches of each rank."""

    def send(self, step: int, micro_batches: Ranks, timeout_s: float) -> None:
        """Send each rank its micro-batches of `step`. Blocks."""
        ...

    def lost_ranks(self) -> list[int]:
        """Return the ranks that are known to have gone."""
        ...

    def close(self) -> None:
        """Close sockets, if there are any."""
        ...


class FileTransport:
    """Writes files into the output folder of prime-rl: `rollout_transport.type = "filesystem"`."""

    def __init__(self, output: Path) -> None:
        self._rollouts = output / ROLLOUTS

    def __repr__(self) -> str:
        return f"<FileTransport: {self._rollouts}>"

    def send(self, step: int, micro_batches: Ranks, timeout_s: float) -> None:  # noqa: ARG002 (writing does not wait)
        """Write the file of each rank.

        Raises:
            DiskFull, NotWritable, OutOfFileDescriptors: they cannot be written.
        """
        folder = self._rollouts / f"step_{step}"
        with explaining_os_errors(f"the micro-batches of step {step}", folder, or_else="then run again"):
            folder.mkdir(parents=True, exist_ok=True)
            for rank, listed in enumerate(micro_batches):
                write_atomically(folder / f"rank_{rank}.bin", _encode(listed))

    def lost_ranks(self) -> list[int]:
        """Return []: the readers of a file are unknown."""
        return []

    def close(self) -> None:
        """Do nothing."""


class ZmqTransport:
    """Publishes to the ranks at a port, when all have subscribed: `rollout_transport.type = "zmq"`.

    Each rank also says at the port behind it that it has connected. That may be heard before its subscription, and
    messages would be dropped until then: an XPUB socket tells of the subscriptions themselves, and of their end. Bound
    with the first step.
    """

    def __init__(self, url: str, ranks: int) -> None:
        host, _, port = url.removeprefix("tcp://").rpartition(":")
        self._urls = url, f"tcp://{host}:{int(port) + 1}"
        self._topics = {b"data_rank|%d|" % rank: rank for rank in range(ranks)}
        self._absent = set(range(ranks))
        self._sockets: list[zmq.Socket[bytes]] = []

    def __repr__(self) -> str:
        return f"<ZmqTransport: {self._urls[0]} to {len(self._topics)} ranks, {len(self._absent)} absent>"

    def send(self, step: int, micro_batches: Ranks, timeout_s: float) -> None:
        """Publish to every rank; before the first step, wait until all have subscribed.

        Raises:
            TrainerSilent: they have not, within `timeout_s`.
            zmq.ZMQError: a port is in use.
        """
        if not self._sockets:
            self._bind()
            self._wait_for_ranks(step, timeout_s)
        data = self._sockets[0]
        for topic, rank in self._topics.items():
            data.send_multipart([topic, _encode(micro_batches[rank])])

    def _bind(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        for kind, url in zip((zmq.XPUB, zmq.PULL), self._urls, strict=True):
            socket = context.socket(kind)
            self._sockets.append(socket)
            socket.linger = 0
            socket.sndhwm, socket.rcvhwm = HIGH_WATER_MARK, 0  # with one for receiving, a peer may end the process
            socket.bind(url)

    def _wait_for_ranks(self, step: int, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while self.lost_ranks():
            stop_if_cancelled()
            if time.monotonic() > until:
                raise TrainerSilent(
                    f"step {step}: expected {len(self._topics)} ranks of prime-rl to subscribe to {self._urls[0]} "
                    f"within {timeout_s} s, got none from {sorted(self._absent)}: give its trainer this host and port "
                    "in rollout_transport, and the same number of ranks"
                )
            self._sockets[0].poll(POLL_MS)

    def lost_ranks(self) -> list[int]:
        """Return the ranks that have not subscribed, or have gone since."""
        while self._sockets and self._sockets[0].poll(0):
            said = self._sockets[0].recv()
            if (rank := self._topics.get(said[1:])) is not None:
                (self._absent.discard if said[:1] == b"\x01" else self._absent.add)(rank)
        return sorted(self._absent)

    def close(self) -> None:
        """Close the sockets."""
        for socket in self._sockets:
            socket.close()


def stop_if_cancelled() -> None:
    """Raise if this is a worker thread with a result that is not awaited any more."""
    with suppress(RuntimeError):  # a thread without an event loop
        anyio.from_thread.check_cancelled()
