"""The interface between a transport and the part that shm and tcp share: payload writers, payload readers, sockets.

`remote_sender` and `remote_receiver` hold the shared part. It follows four rules:

1. Credit is returned by release messages, never by a socket buffer: high-water marks are off and drop nothing. It is
   returned by halves of the capacity, or when the sender has none left: each message wakes four threads.
2. Records leave by tick: when the sending task yields, when enough have gathered, and before it waits for credit.
3. A receiver drains its socket until it is empty, then waits on the descriptor, and drains again after any send of its
   own, because the descriptor is edge-triggered and a send may consume the edge.
4. The end of a connection is the notice of death: of the control connection over shm, of the only one over tcp. The
   records that a dead sender had published are taken in first, even those whose descriptors never left its process;
   then its loss is reported, once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import ClassVar, Protocol, Self, TypeAlias, TypeVar

import zmq

from ..._schemas import Array
from ..._schemas.descriptor import Descriptor
from ..._schemas.layout import AxisSizes, Columned, ColumnLayout, Schema
from .zmq_context import zmq_context

EVENTS = int(zmq.EVENTS)
"""The option to read before receiving from a socket: reading it costs half of an exception."""

POLLIN, POLLOUT = int(zmq.POLLIN), int(zmq.POLLOUT)

NOBLOCK = int(zmq.NOBLOCK)

LARGEST_MESSAGE = 64 * 2**20
"""Bytes of a frame that is no column: ZeroMQ disconnects a peer that sends a longer one, before it allocates memory."""

Frames: TypeAlias = Sequence[zmq.Frame]
"""Frames of a ZeroMQ message; those of a payload: none for shm."""


def receive_frames(socket: zmq.Socket[bytes]) -> list[zmq.Frame]:
    """Return the frames of the next message; `recv_multipart` asks the socket about each of them once more.

    Raises:
        zmq.Again: there is no message.
    """
    frames = [socket.recv(NOBLOCK, copy=False)]
    while frames[-1].more:
        frames.append(socket.recv(NOBLOCK, copy=False))
    return frames


class Record(Columned, Protocol):
    """A record that a remote channel can carry: columns, and a header with everything else."""

    schema: ClassVar[Schema]

    def header(self) -> bytes:
        """Return everything else, encoded."""
        ...

    @classmethod
    def assemble(cls, header: bytes | memoryview, columns: Mapping[str, Array]) -> Self:
        """Return the record of a header and columns."""
        ...


R = TypeVar("R", bound=Record)


class PayloadWriter(Protocol):
    """Sends the payload of a transport, and accounts for the records in flight."""

    items: int
    nbytes: int

    @property
    def full(self) -> bool:
        """Return whether there is no credit for any record, however small."""
        ...

    def place(
        self, form: ColumnLayout, lengths: AxisSizes, header: bytes, columns: Collection[Array], sequence: int
    ) -> bool:
        """Place a record with plain columns (see `ColumnLayout.contiguous`), or return False where there is no credit.

        Raises:
            RecordTooLarge: there never will be enough.
            InvalidRecord: a record that was placed before has changed since; no more may be sent.
        """
        ...

    def post(self, socket: zmq.Socket[bytes]) -> None:
        """Send the records that were placed.

        Raises:
            InvalidRecord: as `place`.
        """
        ...

    def free(self, slot: int, generation: int, records: int) -> None:
        """Return the credit of some records of a bundle that the receiver released.

        Raises:
            StaleDescriptor: the bundle is not in flight.
        """
        ...

    def close(self) -> None:
        """Release memory."""
        ...


Bundle: TypeAlias = tuple[Descriptor, Frames]
"""A bundle in flight: its place, and the frames that carry it where it does not lie in shared memory."""

Released: TypeAlias = Callable[[Descriptor, int], None]
"""Called when some more records of a bundle are released."""


class PayloadReader(Protocol):
    """Reads the payload of a transport, from one sender."""

    def fetch(self, bundle: Bundle, index: int, released: Released) -> tuple[bytes, dict[str, Array]]:
        """Return header and columns of record `index` of a bundle; `released` is called when its last view has died.

        Raises:
            StaleDescriptor: the descriptor does not fit the memory that it names.
            InvalidRecord: the memory holds no record.
        """
        ...

    def recover(self, sequence: int) -> list[Bundle]:
        """Return the bundles beyond record `sequence` that a dead sender had published."""
        ...


def start_zero_copy() -> None:
    """Start pyzmq's thread that frees frames sent without a copy, and wait until it runs.

    The first such frame of a process starts it. Starting it here keeps that out of the event loop: a busy machine may
    take long to run a new thread. Once it runs, this is free.
    """
    zmq.Frame(b"\0", copy=False)


def dealer(identity: bytes) -> zmq.Socket[bytes]:
    """Return a sender's socket, not yet connected; it neither drops nor reconnects: a connection ends once."""
    socket = zmq_context().socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_MESSAGE)
    return socket


def router() -> zmq.Socket[bytes]:
    """Return a receiver's socket, not yet bound, that takes frames of `LARGEST_MESSAGE` bytes at most."""
    socket = zmq_context().socket(zmq.ROUTER)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_MESSAGE)
    return socket
