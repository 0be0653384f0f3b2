"""The tcp transport: the same descriptors, with the columns in extra frames of the message. For senders on other hosts.

Small columns are copied into frames that they share, a large one is a frame that ZeroMQ sends from where it is
(`Framing`). Frames become arrays on the other side without copying. Records that have not left the process of a sender
when it dies are lost, and reported so. Both sides need the same `ChannelKey`; on loopback they use this user's unless
they are given one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import zmq

from ..._schemas import Array, InvalidRecord, TokenizerIdentity
from ..._schemas.control import Accept, Connect, Publish, Ready, encode
from ..._schemas.descriptor import Descriptor
from ..._schemas.layout import (
    FRAME_BYTES,
    AxisSizes,
    BundleHeader,
    ColumnLayout,
    Framing,
    Schema,
    aligned,
    copy_into,
    encode_contents,
    typed,
)
from ..errors import NobodyListens, RecordTooLarge, StaleDescriptor
from ..util.retry_pace import RetryPace
from .checksum import CHECKSUM_BYTES, checked, with_checksum
from .handshake import (
    ANSWER_TIMEOUT_S,
    NOT_SERVED,
    complete_handshake,
    connect_message,
    handshake_timeout,
    request_session,
)
from .heartbeat import ping_interval_s
from .keys import ChannelKey
from .message_counts import count_interval_s
from .pending_handshakes import HANDSHAKE_S
from .receiver_config import ReceiverConfig
from .remote_receiver import RemoteReceiver
from .remote_sender import RemoteSender, SenderConnection
from .tcp_address import TcpAddress, bind, bracketed, resolved
from .tcp_control import TcpControl, connected
from .tcp_senders import TcpSenders
from .transport import LARGEST_MESSAGE, Bundle, R, Released, router, start_zero_copy

NO_ADDRESS = "is its name right, and does the resolver answer?"


class FrameWriter:
    """Accounts for the records in flight; ZeroMQ keeps the arrays."""

    def __init__(self, capacity: int, capacity_bytes: int, kind: str, *, checksum: bool = False) -> None:
        self.items = 0
        self.nbytes = 0
        self._capacity = capacity
        self._capacity_bytes = capacity_bytes
        self._kind = kind
        self._checksum = checksum
        self._shared: list[memoryview] = []
        """Memory for columns that share a frame, by its number, until the frame is made."""
        self._items: list[list[Any]] = []
        """The same, item by item, for each of DTYPES."""
        self._ready: list[Bundle] = []
        """Records that were placed and not posted."""
        self._in_flight: dict[int, int] = {}
        """Bytes of each record in flight, by sequence number."""

    @property
    def full(self) -> bool:
        """Return whether as many records are in flight as the capacity allows."""
        return self.items >= self._capacity

    def place(
        self, form: ColumnLayout, lengths: AxisSizes, header: bytes, columns: Collection[Array], sequence: int
    ) -> bool:
        """Take credit for a record; see `PayloadWriter.place`."""
        contents = encode_contents(BundleHeader.alone(self._kind, form, lengths, header))
        framing = form.framing(lengths)
        nbytes = sum(map(aligned, framing.frames)) + aligned(len(contents) + self._checksum * CHECKSUM_BYTES)
        if nbytes > self._capacity_bytes:
            raise RecordTooLarge(
                f"expected a record of at most {self._capacity_bytes} bytes (capacity_bytes of the channel), "
                f"got one of {nbytes}: raise capacity_bytes or make the group smaller"
            )
        if self.full or self.nbytes + nbytes > self._capacity_bytes:
            return False
        buffers = self._framed(framing, columns)
        if self._checksum:
            contents = with_checksum(contents, buffers)
        frames = [zmq.Frame(buffer, copy=buffer.nbytes <= FRAME_BYTES) for buffer in buffers]
        self._ready.append((Descriptor(sequence, 1, sequence, 0, 0, nbytes), [zmq.Frame(contents), *frames]))
        self._in_flight[sequence] = nbytes
        self.items += 1
        self.nbytes += nbytes
        return True

    def _framed(self, framing: Framing, columns: Collection[Array]) -> list[memoryview]:
        """Return the buffers of the frames; those that columns share are used again by the next call."""
        while len(self._shared) < len(framing.frames):
            self._shared.append(memoryview(bytearray(FRAME_BYTES)))
            self._items.append(typed(self._shared[-1]))
        buffers = [shared[:nbytes] for shared, nbytes in zip(self._shared, framing.frames, strict=False)]
        for column, (number, (index, first, last)) in zip(columns, framing.places, strict=True):
            if framing.frames[number] > FRAME_BYTES:
                buffers[number] = np.ascontiguousarray(column).data
            else:
                copy_into(self._items[number][index], first, last, column)
        return buffers

    def post(self, socket: zmq.Socket[bytes]) -> None:
        """Send one message for each record, because its frames are its own; see `PayloadWriter.post`."""
        ready, self._ready = self._ready, []
        for descriptor, frames in ready:
            socket.send_multipart([encode(Publish((descriptor,))), *frames], zmq.NOBLOCK, copy=False)

    def free(self, slot: int, generation: int, records: int) -> None:
        """Return the credit of a record that the receiver took; see `PayloadWriter.free`."""
        nbytes = self._in_flight.pop(slot, None)
        if nbytes is None or generation or records != 1:
            raise StaleDescriptor(f"release of record {slot}, generation {generation}, which is not in flight")
        self.items -= 1
        self.nbytes -= nbytes

    def close(self) -> None:
        """Forget the records in flight."""
        self._in_flight.clear()


class FrameReader:
    """Reads records of any sender from frames."""

    def __init__(self, schema: Schema, *, checksum: bool = False) -> None:
        self._schema = schema
        self._checksum = checksum

    def fetch(self, bundle: Bundle, index: int, released: Released) -> tuple[bytes, dict[str, Array]]:
        """Return arrays over the frames; credit returns at once, the memory is the receiver's own."""
        descriptor, frames = bundle
        if not frames or descriptor.records != 1:
            raise StaleDescriptor(f"expected {descriptor} to be one record and come with its columns, got none")
        buffers = [frame.buffer for frame in frames[1:]]
        encoded = frames[0].bytes
        contents = BundleHeader.decode(checked(encoded, buffers) if self._checksum else encoded)
        if len(contents.parts) != 1:
            raise InvalidRecord(f"expected one record a message, got {len(contents.parts)}")
        form = self._schema.received(contents)
        columns = form.frames(contents.lengths(), buffers)
        form.check_numbers(list(columns.values()), contents.parts)
        released(descriptor, 1)
        return contents.parts[index].header, columns

    def recover(self, sequence: int) -> list[Bundle]:
        """Return an empty list: unsent records are lost with their process."""
        del sequence
        return []


def _bound(place: TcpAddress, config: ReceiverConfig) -> tuple[zmq.Socket[bytes], int]:
    """Return a receiver's socket, bound to one port of all addresses of the host, and the port.

    Raises:
        OSError: the port is in use, or no address belongs to this machine.
    """
    socket = router()
    socket.setsockopt(zmq.MAXMSGSIZE, max(LARGEST_MESSAGE, config.capacity_bytes))
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(3000 * HANDSHAKE_S))  # the acceptor is sooner unless its loop is blocked
    place.protect(socket, "receiver")
    try:
        return socket, bind(socket, place)
    except BaseException:
        socket.close()
        raise


@asynccontextmanager
async def serve_tcp(url: str, record_type: type[R], config: ReceiverConfig) -> AsyncIterator[RemoteReceiver[R]]:
    """Open the receiving end of a channel over TCP; see `serve`."""
    place = await anyio.to_thread.run_sync(resolved, url, config.key)
    socket, port = _bound(place, config)
    receiver = RemoteReceiver(record_type, url=f"tcp://{bracketed(place.host)}:{port}", socket=socket, config=config)
    reader = FrameReader(record_type.schema, checksum=config.checksum)
    acceptor = TcpSenders(receiver.peers, socket, reader, port).acceptor
    stack = AsyncExitStack()
    stack.callback(socket.close)
    stack.push_async_callback(acceptor.aclose)
    receiver.start_accepting(stack)
    async with receiver:
        await anyio.to_thread.run_sync(acceptor.watch.start)
        yield receiver


async def _admitted(
    url: str, place: TcpAddress, request: Callable[[], Connect], heartbeat_timeout_s: float | None
) -> tuple[TcpControl, Accept]:
    """Connect and complete the handshake; on a new connection if no answer comes, for its receiver may only be busy.

    Raises:
        NobodyListens: no answer came for `ANSWER_TIMEOUT_S`.
        PenstockError: as `connected`, `request_session` and `complete_handshake`.
    """
    pace = RetryPace(ANSWER_TIMEOUT_S)
    while True:
        message = request()
        control = await connected(url, place, message.identity, heartbeat_timeout_s)
        try:
            with handshake_timeout(heartbeat_timeout_s, url, NOT_SERVED):
                accepted = await request_session(control, message)
                await complete_handshake(control, control.send(Ready()))
                return control, accepted
        except BaseException as error:
            await control.aclose()
            if pace.expired or not isinstance(error, NobodyListens):
                raise


@asynccontextmanager
async def connect_tcp(
    url: str,
    record_type: type[R],
    *,
    name: str,
    key: ChannelKey | None,
    heartbeat_timeout_s: float | None,
    tokenizer: TokenizerIdentity | None,
) -> AsyncIterator[RemoteSender[R]]:
    """Open the sending end of a channel over TCP; see `connect`."""
    with handshake_timeout(heartbeat_timeout_s, url, NO_ADDRESS):
        place = await anyio.to_thread.run_sync(resolved, url, key)
    await anyio.to_thread.run_sync(start_zero_copy)
    ping_s = ping_interval_s(heartbeat_timeout_s)
    request = partial(connect_message, "tcp", record_type.schema.kind, name, tokenizer, ping_s)
    async with AsyncExitStack() as stack:
        control, accepted = await _admitted(url, place, request, heartbeat_timeout_s)
        stack.push_async_callback(control.aclose)
        writer = FrameWriter(
            accepted.capacity, accepted.capacity_bytes, record_type.schema.kind, checksum=accepted.checksum
        )
        interval_s = None if heartbeat_timeout_s is None else count_interval_s(heartbeat_timeout_s)
        connection = SenderConnection(control, accepted, writer, control.socket, interval_s)
        stack.pop_all()
    async with RemoteSender[R](connection, "tcp") as sender:
        yield sender
