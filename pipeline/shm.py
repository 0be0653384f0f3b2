"""The shm carrier: payload in shared-memory slots, descriptors over a ZeroMQ `ipc://` socket.

The sender owns its segment, allocates in it alone, and hands it over at the door, a Unix socket beside the ZeroMQ one.
The receiver maps it read-only and gives arrays that are views of the slots: nothing is copied until someone copies.
"""

from __future__ import annotations

import os
import socket as sockets
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import zmq
from anyio.abc import SocketListener

from ..schemas import Array, InvalidRecord, PackedGroup, Packer, ProtocolMismatch
from ..schemas.control import Offer, Publish, Ready, encode
from ..schemas.descriptor import Descriptor
from ..schemas.layout import Contents, Form, Layout, Schema, aligned
from .blocking import enter_in_thread
from .carrier import Inlet, Parcel, R, dealer, router
from .door import Door
from .errors import NobodyListens, RecordTooLarge
from .remote_receiver import RemoteReceiver, Terms
from .remote_sender import RemoteSender, SenderLine, introduce
from .segment import DEFAULT_SLOT_BYTES, SegmentReader, SegmentWriter
from .slots import SlotTable
from .socket_directory import socket_directory

__all__ = ["connect_shm", "serve_shm"]

SCHEME = "shm://"
DOOR = "door"
DATA = "data"


class SlotOutlet:
    """Places records in the sender's segment."""

    def __init__(self, segment: SegmentWriter, capacity: int) -> None:
        self.items = 0
        self.nbytes = 0
        self._segment = segment
        self._table = SlotTable(segment.slots)
        self._capacity = capacity

    @property
    def full(self) -> bool:
        """Whether as many records are in flight as may be."""
        return self.items >= self._capacity

    def place(self, contents: bytes, columns: Iterable[Array], layout: Layout, sequence: int) -> Parcel | None:
        """Copy a record into a span and publish it; see `Outlet.place`."""
        segment = self._segment
        nbytes = layout.nbytes + aligned(len(contents))
        slots = -(-nbytes // segment.slot_bytes)
        if slots > segment.slots:
            raise RecordTooLarge(
                f"expected a record of at most {segment.slots * segment.slot_bytes} bytes (capacity_bytes of the "
                f"channel), got one of {nbytes}: raise capacity_bytes or make the group smaller"
            )
        if self.full or (span := self._table.allocate(slots)) is None:
            return None
        try:
            segment.write(span, contents, columns, layout)
        except BaseException:
            self._table.abandon(span)
            raise
        self._table.publish(span, sequence)
        segment.publish(span, sequence, len(contents), nbytes)
        self.items += 1
        self.nbytes += slots * segment.slot_bytes
        return Descriptor(sequence, span.start, slots, span.generation, nbytes), ()

    def post(self, socket: zmq.Socket[bytes], parcels: list[Parcel]) -> None:
        """One message for all of them."""
        socket.send(encode(Publish(tuple(descriptor for descriptor, _ in parcels))), zmq.NOBLOCK)

    def free(self, slot: int, generation: int) -> None:
        """The receiver released a span; see `Outlet.free`."""
        span = self._table.release(slot, generation)
        self._segment.free(span)
        self.items -= 1
        self.nbytes -= span.count * self._segment.slot_bytes

    def close(self) -> None:
        """Let go of the segment."""
        self._segment.close()


class SlotInlet:
    """Reads records from a sender's segment."""

    def __init__(self, segment: SegmentReader, schema: Schema) -> None:
        self._segment = segment
        self._schema = schema

    def fetch(self, parcel: Parcel, released: Callable[[Descriptor], None]) -> tuple[bytes, dict[str, Array]]:
        """Views of a span that release it when the last one dies; see `Inlet.fetch`."""
        descriptor = parcel[0]
        payload, encoded = self._segment.lease(descriptor, released)
        contents, form, layout = self._read(encoded, descriptor)
        return contents.header, form.view(layout, payload)

    def pack(self, parcel: Parcel, packer: Packer) -> bool:
        """Copy a group from its span into `packer`; see `Inlet.pack`."""
        descriptor = parcel[0]
        contents, form, layout = self._read(self._segment.contents(descriptor), descriptor)
        if not packer.takes(form, contents.lengths):
            return False
        group = PackedGroup.decode(contents.header, contents.lengths.sequences)
        packer.copy(form, contents.lengths, self._segment.columns(descriptor, layout), group)
        return True

    def _read(self, encoded: bytes, descriptor: Descriptor) -> tuple[Contents, Form, Layout]:
        contents = Contents.decode(encoded)
        form = self._schema.received(contents)
        layout = form.layout(contents.lengths)
        if layout.nbytes + aligned(len(encoded)) != descriptor.nbytes:
            raise InvalidRecord(f"{contents.lengths}: expected columns of {layout.nbytes} bytes, got {descriptor}")
        return contents, form, layout

    def salvage(self, sequence: int) -> list[Parcel]:
        """What the headers say was published; see `Inlet.salvage`."""
        return [(descriptor, ()) for descriptor in self._segment.published_after(sequence)]


async def _enter(door: Door, receiver: RemoteReceiver[Any], endpoint: str) -> Inlet:
    """Grant a sender its credit and take in its segment."""
    await door.say(receiver.welcome(endpoint, DEFAULT_SLOT_BYTES))
    offer = await door.hear()
    fd = door.take_fd()
    if not isinstance(offer, Offer) or fd is None:
        raise ProtocolMismatch(f"expected an Offer with a file descriptor, got {type(offer).__name__}")
    with ExitStack() as stack:
        stack.callback(os.close, fd)
        segment = await anyio.to_thread.run_sync(SegmentReader, fd, offer.slots, offer.slot_bytes)
        return SlotInlet(segment, receiver.schema)


@asynccontextmanager
async def serve_shm(url: str, record_type: type[R], terms: Terms) -> AsyncIterator[RemoteReceiver[R]]:
    """The receiving end of a channel on this host; see `serve`.

    Raises:
        ValueError: the URL says where: the sockets lie where this process may put them.
    """
    if url != SCHEME:
        raise ValueError(f"expected {SCHEME} and nothing behind it, got {url!r}: senders are given `inbox.url`")
    async with AsyncExitStack() as stack:
        directory = await enter_in_thread(stack, socket_directory())
        socket, door, endpoint = await anyio.to_thread.run_sync(_bind, directory)
        stack.callback(socket.close)
        listener_at_door = await SocketListener.from_socket(door)
        receiver = RemoteReceiver(
            record_type,
            carrier="shm",
            url=f"{SCHEME}{directory}",
            socket=socket,
            terms=terms,
        )
        receiver.attend(listener_at_door, lambda opened: _enter(opened, receiver, endpoint), stack.pop_all())
        async with receiver:
            yield receiver


@asynccontextmanager
async def connect_shm(url: str, record_type: type[R], *, name: str) -> AsyncIterator[RemoteSender[R]]:
    """The sending end of a channel on this host; see `connect`."""
    path = Path(url.removeprefix(SCHEME)) / DOOR
    try:
        stream = await anyio.connect_unix(path)
    except OSError as error:
        raise NobodyListens(f"expected a receiver at {url}, got {error.strerror}: is its process running?") from error
    async with AsyncExitStack() as stack:
        door = await stack.enter_async_context(Door(stream))
        welcome, identity = await introduce(door, "shm", record_type.schema.kind, name)
        segment = await anyio.to_thread.run_sync(
            SegmentWriter, -(-welcome.capacity_bytes // welcome.slot_bytes), welcome.slot_bytes
        )
        stack.callback(segment.close)
        await door.say(Offer(segment.slots, segment.slot_bytes, segment.nbytes), segment.fd)
        ready = await door.hear()
        if not isinstance(ready, Ready):
            raise ProtocolMismatch(f"expected Ready, got {type(ready).__name__}")
        line = SenderLine(door, welcome, SlotOutlet(segment, welcome.capacity), dealer(welcome.endpoint, identity))
        stack.pop_all()
        async with RemoteSender[R](line, "shm") as sender:
            yield sender


def _bind(directory: Path) -> tuple[zmq.Socket[bytes], sockets.socket, str]:
    """A receiver's two sockets, bound to files of mode 0600, and the ZeroMQ one's endpoint."""
    door = sockets.socket(sockets.AF_UNIX)
    door.bind(str(directory / DOOR))
    door.listen()
    socket, endpoint = router(), f"ipc://{directory / DATA}"
    socket.bind(endpoint)
    for path in (directory / DOOR, directory / DATA):
        path.chmod(0o600)
    return socket, door, endpoint
