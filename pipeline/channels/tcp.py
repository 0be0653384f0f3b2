"""The tcp carrier: the same descriptors, with the columns as extra frames of the message. For senders on other hosts.

Frames are handed to ZeroMQ as they are, without joining them, and become arrays on the other side without copying.
Nothing is salvaged from a sender that dies: what had not left its process is lost, and reported so. Both sides need the
same `ChannelKey`; on loopback they use this user's unless they are given one.
"""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import anyio.to_thread
import numpy as np
import zmq

from ...schemas import Array, InvalidRecord, PackedGroup, Packer, TokenizerIdentity
from ...schemas.control import Publish, Ready, encode
from ...schemas.descriptor import Descriptor
from ...schemas.layout import Contents, Form, Lengths, Schema, aligned, encode_contents
from ..errors import RecordTooLarge, StaleDescriptor
from .carrier import HANDSHAKE_S, LARGEST_MESSAGE, Parcel, R, Released, router, start_zero_copy
from .checksum import checked, with_checksum
from .introduction import answering_within, greeting, introduce, let_in
from .keys import ChannelKey
from .remote_receiver import RemoteReceiver, Terms
from .remote_sender import RemoteSender, SenderLine
from .silence import send_signs_of_life
from .tcp_acceptor import TcpAcceptor
from .tcp_address import TcpAddress, bracketed, resolved
from .tcp_control import connected

__all__ = ["connect_tcp", "serve_tcp"]

BACKLOG = 1024
"""Connections that may wait for ZeroMQ's thread to accept them."""

MOST_CONTROL = 1024
"""Messages of a sender, beside its records, that may wait for the event loop: ZeroMQ reads on when some were heard."""

NO_ADDRESS = "is its name right, and does the resolver answer?"
HELD_UP = "its ZeroMQ answers, so its event loop is held up. Raise silence_s where that is usual"

_NO_ADDRESS = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ENODEV}


class FrameOutlet:
    """Keeps account of the records that are on their way; ZeroMQ keeps the arrays."""

    def __init__(self, capacity: int, capacity_bytes: int, kind: str, *, checksum: bool = False) -> None:
        self.items = 0
        self.nbytes = 0
        self._capacity = capacity
        self._capacity_bytes = capacity_bytes
        self._kind = kind
        self._checksum = checksum
        self._ready: list[Parcel] = []
        """Records that are not posted yet."""
        self._in_flight: dict[int, int] = {}
        """Bytes of each record in flight, by sequence number."""

    @property
    def full(self) -> bool:
        """Whether as many records are in flight as may be."""
        return self.items >= self._capacity

    def place(self, form: Form, lengths: Lengths, header: bytes, columns: Collection[Array], sequence: int) -> bool:
        """Take credit for a record; see `Outlet.place`."""
        contents = encode_contents(Contents.alone(self._kind, form, lengths, header))
        buffers = list(map(_frame, columns))
        if self._checksum:
            contents = with_checksum(contents, buffers)
        nbytes = form.layout(lengths).nbytes + aligned(len(contents))
        if nbytes > self._capacity_bytes:
            raise RecordTooLarge(
                f"expected a record of at most {self._capacity_bytes} bytes (capacity_bytes of the channel), "
                f"got one of {nbytes}: raise capacity_bytes or make the group smaller"
            )
        if self.full or self.nbytes + nbytes > self._capacity_bytes:
            return False
        self._ready.append((Descriptor(sequence, 1, sequence, 0, 0, nbytes), [contents, *buffers]))
        self._in_flight[sequence] = nbytes
        self.items += 1
        self.nbytes += nbytes
        return True

    def post(self, socket: zmq.Socket[bytes]) -> None:
        """One message a record: its frames are its own."""
        ready, self._ready = self._ready, []
        for descriptor, frames in ready:
            socket.send_multipart([encode(Publish((descriptor,))), *frames], zmq.NOBLOCK, copy=False)

    def free(self, slot: int, generation: int, records: int) -> None:
        """The receiver took a record in; see `Outlet.free`."""
        nbytes = self._in_flight.pop(slot, None)
        if nbytes is None or generation or records != 1:
            raise StaleDescriptor(f"release of record {slot}, generation {generation}, which is not in flight")
        self.items -= 1
        self.nbytes -= nbytes

    def close(self) -> None:
        """Forget what is in flight."""
        self._in_flight.clear()


class FrameInlet:
    """Makes records of frames."""

    def __init__(self, schema: Schema, *, checksum: bool = False) -> None:
        self._schema = schema
        self._checksum = checksum

    def fetch(self, parcel: Parcel, index: int, released: Released) -> tuple[bytes, dict[str, Array]]:
        """Arrays over the frames; credit goes back at once, the memory is the receiver's own."""
        contents, form, buffers = self._read(parcel)
        columns = form.frames(contents.lengths(), buffers)
        form.check_numbers(list(columns.values()), contents.parts)
        released(parcel[0], 1)
        return contents.parts[index].header, columns

    def pack(self, parcel: Parcel, index: int, packer: Packer) -> int:
        """Copy a group from its frames into `packer`; see `Inlet.pack`."""
        contents, form, buffers = self._read(parcel)
        part = contents.parts[index]
        ends = (0, part.tokens)
        flat = [column.reshape(-1) for column in form.frames(contents.lengths(), buffers).values()]
        form.check_numbers(flat, contents.parts)
        if not packer.room(form, contents.candidates, ends):
            return 0
        [group] = PackedGroup.decode([part])
        packer.copy(form, contents.candidates, flat, [group], ends)
        return 1

    def _read(self, parcel: Parcel) -> tuple[Contents, Form, list[memoryview]]:
        descriptor, frames = parcel
        if not frames or descriptor.records != 1:
            raise StaleDescriptor(f"expected {descriptor} to be one record and come with its columns, got none")
        buffers = [frame.buffer for frame in frames[1:]]
        encoded = frames[0].bytes
        contents = Contents.decode(checked(encoded, buffers) if self._checksum else encoded)
        if len(contents.parts) != 1:
            raise InvalidRecord(f"expected one record a message, got {len(contents.parts)}")
        return contents, self._schema.received(contents), buffers

    def salvage(self, sequence: int) -> list[Parcel]:
        """Nothing: what had not left the process is gone with it."""
        del sequence
        return []


def _frame(column: Array) -> memoryview | bytes:
    """A column as a buffer."""
    return np.ascontiguousarray(column).data if column.size else b""


def _bound(place: TcpAddress, terms: Terms) -> tuple[zmq.Socket[bytes], int]:
    """A receiver's socket, bound to one port of all addresses of the host, and the port.

    Raises:
        OSError: the port is taken, or no address is one of this machine.
    """
    socket = router()
    socket.setsockopt(zmq.MAXMSGSIZE, max(LARGEST_MESSAGE, terms.capacity_bytes))
    socket.setsockopt(zmq.RCVHWM, most_waiting(terms))
    socket.setsockopt(zmq.BACKLOG, BACKLOG)
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(2000 * HANDSHAKE_S))  # should the event loop be held up: it is sooner
    send_signs_of_life(socket, terms.silence_s)
    place.key.protect(socket, "receiver")
    try:
        return socket, _bind(socket, place)
    except BaseException:
        socket.close()
        raise


def _bind(socket: zmq.Socket[bytes], place: TcpAddress) -> int:
    port, bound, missing = place.port, False, OSError(f"expected an address of this machine, got {place.host}")
    for address in place.addresses:
        socket.setsockopt(zmq.IPV6, int(":" in address))
        try:
            socket.bind(f"tcp://{bracketed(address)}:{port or '*'}")
        except zmq.ZMQError as error:
            missing = OSError(error.errno, f"expected to listen at {address} port {port}, got {error.strerror}")
            if error.errno not in _NO_ADDRESS:
                raise missing from None
        else:
            bound, port = True, int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
    if not bound:
        raise missing
    return port


def most_waiting(terms: Terms) -> int:
    """Messages of one sender that may wait for the event loop: its records, and what else is said."""
    return terms.capacity + MOST_CONTROL


@asynccontextmanager
async def serve_tcp(url: str, record_type: type[R], terms: Terms) -> AsyncIterator[RemoteReceiver[R]]:
    """The receiving end of a channel over TCP; see `serve`."""
    place = await anyio.to_thread.run_sync(resolved, url, terms.key)
    socket, port = _bound(place, terms)
    receiver = RemoteReceiver(
        record_type,
        carrier="tcp",
        url=f"tcp://{bracketed(place.host)}:{port}",
        socket=socket,
        terms=terms,
        most_waiting=most_waiting(terms),
    )
    acceptor = TcpAcceptor(
        receiver,
        socket,
        welcome=lambda: receiver.welcome("", 0),
        inlet=lambda: FrameInlet(record_type.schema, checksum=terms.checksum),
        port=port,
        most_unread=terms.capacity_bytes + LARGEST_MESSAGE,
        silence_s=terms.silence_s,
    )
    receiver.attend(acceptor, AsyncExitStack())
    async with receiver:
        yield receiver


@asynccontextmanager
async def connect_tcp(
    url: str,
    record_type: type[R],
    *,
    name: str,
    key: ChannelKey | None,
    silence_s: float | None,
    tokenizer: TokenizerIdentity | None,
) -> AsyncIterator[RemoteSender[R]]:
    """The sending end of a channel over TCP; see `connect`."""
    with answering_within(silence_s, url, NO_ADDRESS):
        place = await anyio.to_thread.run_sync(resolved, url, key)
    await anyio.to_thread.run_sync(start_zero_copy)
    hello = greeting("tcp", record_type.schema.kind, name, tokenizer)
    async with AsyncExitStack() as stack:
        control = await connected(url, place, hello.identity, silence_s)
        stack.push_async_callback(control.aclose)
        with answering_within(silence_s, url, HELD_UP):
            welcome = await introduce(control, hello)
            await let_in(control, Ready())
        outlet = FrameOutlet(
            welcome.capacity, welcome.capacity_bytes, record_type.schema.kind, checksum=welcome.checksum
        )
        line = SenderLine(control, welcome, outlet, control.socket)
        stack.pop_all()
    async with RemoteSender[R](line, "tcp") as sender:
        yield sender
