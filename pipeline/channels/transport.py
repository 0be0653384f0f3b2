"""What a transport adds to the machinery that shm and tcp share: how a payload leaves, and how it is taken in.

`remote_sender` and `remote_receiver` hold that machinery. Four rules keep it together:

1. Credit is given back by release messages, never by a socket buffer: high-water marks are off and drop nothing. It
   goes back by halves of the capacity, or when the sender has none left: each message wakes four threads.
2. Records leave by tick: when the sending task yields, when enough have gathered, and before it waits for credit.
3. A receiver drains its socket until it is empty, then waits on the descriptor, and drains again after any send of its
   own, because the descriptor is edge-triggered and a send may swallow the edge.
4. The end of a connection is the notice of death: of the door over shm, of the one there is over tcp. What a dead
   sender had published is taken in first, also the part whose descriptors never left its process; then its loss is
   told, once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, Protocol, Self, TypeAlias, TypeVar

import zmq

from ..._schemas import Array, Packer
from ..._schemas.descriptor import Descriptor
from ..._schemas.layout import AxisSizes, Columned, ColumnLayout, Schema

__all__ = [
    "EVENTS",
    "HANDSHAKE_S",
    "LARGEST_MESSAGE",
    "POLLIN",
    "POLLOUT",
    "Bundle",
    "Frames",
    "PayloadReader",
    "PayloadWriter",
    "R",
    "Record",
    "Released",
    "dealer",
    "router",
    "start_zero_copy",
]

EVENTS = int(zmq.EVENTS)
"""What to ask of a socket before reading from it: that costs half of what an exception does."""

POLLIN, POLLOUT = int(zmq.POLLIN), int(zmq.POLLOUT)

HANDSHAKE_S = 10.0
"""A peer that was let in must introduce itself within this time."""

LARGEST_MESSAGE = 64 * 2**20
"""Bytes of a frame that is no column: ZeroMQ cuts off who sends a longer one, before there is memory for it."""

Frames: TypeAlias = Sequence[Any]
"""Payload frames of a ZeroMQ message: none for shm."""


class Record(Columned, Protocol):
    """What a remote channel can carry: columns, and a header for all that is not a column."""

    schema: ClassVar[Schema]

    @property
    def nbytes(self) -> int:
        """Bytes that the columns occupy."""
        ...

    def columns(self) -> dict[str, Array]:
        """The arrays, by name."""
        ...

    def header(self) -> bytes:
        """All else, encoded."""
        ...

    @classmethod
    def assemble(cls, header: bytes | memoryview, columns: Mapping[str, Array]) -> Self:
        """The record again."""
        ...


R = TypeVar("R", bound=Record)


class PayloadWriter(Protocol):
    """How a transport's payload leaves, and what of it is still in flight."""

    items: int
    nbytes: int

    @property
    def full(self) -> bool:
        """Whether there is no credit for any record, however small."""
        ...

    def place(
        self, form: ColumnLayout, lengths: AxisSizes, header: bytes, columns: Collection[Array], sequence: int
    ) -> bool:
        """Take a record in, with plain columns (see `ColumnLayout.contiguous`), or tell that there is no credit for it.

        Raises:
            RecordTooLarge: there never will be.
            InvalidRecord: one that was taken in before has been changed since; nothing may be sent any more.
        """
        ...

    def post(self, socket: zmq.Socket[bytes]) -> None:
        """Send what was placed.

        Raises:
            InvalidRecord: as `place`.
        """
        ...

    def free(self, slot: int, generation: int, records: int) -> None:
        """The receiver released some records of a bundle.

        Raises:
            StaleDescriptor: it is not in flight.
        """
        ...

    def close(self) -> None:
        """Let go of memory."""
        ...


Bundle: TypeAlias = tuple[Descriptor, Frames]
"""A bundle on its way: where it lies, and the frames that carry it where it does not lie in shared memory."""

Released: TypeAlias = Callable[[Descriptor, int], None]
"""Is told that some more records of a bundle are done with."""


class PayloadReader(Protocol):
    """How a transport's payload is taken in, from one sender."""

    def fetch(self, bundle: Bundle, index: int, released: Released) -> tuple[bytes, dict[str, Array]]:
        """The header and the columns of record `index` of a bundle; `released` is called when nobody reads it any more.

        Raises:
            StaleDescriptor: the descriptor does not fit what lies there.
            InvalidRecord: what lies there is no record.
        """
        ...

    def pack(self, bundle: Bundle, index: int, packer: Packer) -> int:
        """Copy the groups of a bundle from `index` on straight into `packer`; how many it had room for.

        None where their columns are not those of the groups before them.

        Raises:
            StaleDescriptor: the descriptor does not fit what lies there.
            InvalidRecord: what lies there are no groups.
        """
        ...

    def recover(self, sequence: int) -> list[Bundle]:
        """Records beyond `sequence` that a dead sender had published."""
        ...


def _context() -> zmq.Context[zmq.Socket[bytes]]:
    """The process' ZeroMQ context. Its I/O threads are batch work, unless somebody has set it to work before.

    One of them is woken by every message, and would take the core from whoever copies records there; up to a fifth
    of the throughput goes into that (docs/performance.md). Where a core is idle they run at once all the same.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    if _may_run_as_batch_work():
        context.set(zmq.THREAD_SCHED_POLICY, os.SCHED_BATCH)
    return context


@cache
def _may_run_as_batch_work() -> bool:
    """Whether this process has the usual policy and may change it: ZeroMQ aborts the process if it may not."""
    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    try:
        for policy in (os.SCHED_BATCH, os.SCHED_OTHER):
            os.sched_setscheduler(0, policy, os.sched_param(0))
    except OSError:
        return False
    return True


def start_zero_copy() -> None:
    """Start the thread with which pyzmq frees frames that it sends without a copy, and wait until it runs.

    The first such frame of a process starts it. Made here, it is not one that the event loop sends: a busy machine may
    take long to run a new thread. Once it runs, this costs nothing.
    """
    zmq.Frame(b"\0", copy=False)


def dealer(identity: bytes) -> zmq.Socket[bytes]:
    """Return a sender's socket, not yet connected; it neither drops nor reconnects: a connection ends once."""
    socket = _context().socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_MESSAGE)
    return socket


def router() -> zmq.Socket[bytes]:
    """Return a receiver's socket, not yet bound, that takes frames of `LARGEST_MESSAGE` bytes at most."""
    socket = _context().socket(zmq.ROUTER)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_MESSAGE)
    return socket
