"""The shm transport: payload in shared-memory slots, descriptors over a ZeroMQ `ipc://` socket.

The sender owns its segment, allocates in it alone, and passes it over a control connection, a Unix socket beside the
ZeroMQ one. The receiver maps it read-only and makes arrays that are views of the slots: no transport copies them.
"""

from __future__ import annotations

import os
import socket as sockets
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import zmq
from anyio.abc import SocketListener

from ..._schemas import Array, InvalidRecord, ProtocolMismatch, TokenizerIdentity
from ..._schemas.control import Publish, SegmentOffer, encode
from ..._schemas.descriptor import Descriptor
from ..._schemas.layout import (
    MOST_RECORDS,
    AxisSizes,
    BundleEntry,
    BundleHeader,
    ColumnLayout,
    Items,
    Schema,
    Widths,
    aligned,
    encode_contents,
)
from ..errors import InvalidConfig, NobodyListens, PeerLost, RecordTooLarge
from ..util.blocking import enter_in_thread
from .checksum import CHECKSUM_BYTES
from .control_connection import ControlConnection, connect_control
from .handshake import complete_handshake, connect_message, handshake_timeout, request_session
from .heartbeat import enable_heartbeats
from .receiver_config import ReceiverConfig
from .remote_receiver import RemoteReceiver
from .remote_sender import RemoteSender, SenderConnection
from .segment import DEFAULT_SLOT_BYTES, SegmentReader, SegmentWriter
from .shm_acceptor import ShmAcceptor
from .shm_control import ShmControl
from .slots import SlotTable, Span
from .socket_directory import socket_directory, sweep, sweep_after
from .transport import Bundle, PayloadReader, R, Released, dealer, router

SCHEME = "shm://"
CONTROL_SOCKET = "control"
DATA = "data"


BUNDLE_SHARE = 4
"""A bundle takes at most this part of the capacity: its bytes are credit again only when all of it is read."""

BUNDLE_BYTES = 2 * 2**20
"""Beyond this a bundle grows no more: its cost is by then that of its bytes, and they must stay in the cache."""

CONTENTS_BYTES, PART_BYTES = 64, 32
"""Bytes that the contents of a bundle take at most, and each record in them, beside the form and the headers."""


class _Bundle:
    """Records of one form that will be written side by side, in a span that has room for all of them."""

    __slots__ = ("columns", "form", "parts", "room", "sequences", "span", "tokens", "widths")

    def __init__(self, span: Span, form: ColumnLayout, widths: Widths, room: int) -> None:
        self.span = span
        self.form = form
        self.widths = widths
        self.room = room
        """Bytes that are free in the span."""
        self.tokens = 0
        self.sequences = 0
        self.columns: list[Collection[Array]] = []
        """Of each record."""
        self.parts: list[tuple[int, int, bytes]] = []
        """A `BundleEntry` each."""


class SlotWriter:
    """Places records in the sender's segment: credit is taken at once, the copy is made when a bundle is complete."""

    def __init__(self, segment: SegmentWriter, capacity: int, kind: str, *, checksum: bool = False) -> None:
        self.items = 0
        self.nbytes = 0
        self._segment = segment
        self._table = SlotTable(segment.slots)
        self._capacity = capacity
        self._kind = kind
        self._checksum = checksum
        self._most = min(MOST_RECORDS, max(1, capacity // BUNDLE_SHARE))
        self._most_bytes = min(BUNDLE_BYTES, segment.slots * segment.slot_bytes // BUNDLE_SHARE)
        self._bundle: _Bundle | None = None
        self._sequence = 0
        self._ready: list[Descriptor] = []
        """Bundles that are published, and not posted yet."""

    @property
    def full(self) -> bool:
        """Return whether as many records are in flight as the capacity allows."""
        return self.items >= self._capacity

    def place(
        self, form: ColumnLayout, lengths: AxisSizes, header: bytes, columns: Collection[Array], sequence: int
    ) -> bool:
        """Add a record to the bundle that is being filled, or begin one; see `PayloadWriter.place`."""
        # There are four cases:
        #
        # 1. As many records are in flight as the capacity allows: there is no credit.
        # 2. The open bundle has the same form, and room: the record joins it, in slots that the bundle holds already.
        # 3. It has not: it is written, which frees the slots that it does not need, and a new bundle is begun.
        # 4. As 3, but there are too few free slots for a new bundle: there is no credit.
        if self.full:
            return False
        tokens, sequences, widths, _ = lengths
        nbytes = form.nbytes(lengths) + aligned(PART_BYTES + len(header))
        open_bundle = self._bundle
        if (
            open_bundle is None
            or nbytes > open_bundle.room
            or form is not open_bundle.form
            or widths != open_bundle.widths
        ):
            self._complete()
            open_bundle = self._begin(form, widths, nbytes)
            if open_bundle is None:
                return False
        open_bundle.room -= nbytes
        open_bundle.tokens += tokens
        open_bundle.sequences += sequences
        open_bundle.columns.append(columns)
        open_bundle.parts.append((tokens, sequences, header))
        self.items += 1
        self._sequence = sequence
        if len(open_bundle.parts) >= self._most:
            self._complete()
        return True

    def _begin(self, form: ColumnLayout, widths: Widths, nbytes: int) -> _Bundle | None:
        """Open a bundle for a record that takes `nbytes`, with room for more like it where free slots allow."""
        slot_bytes = self._segment.slot_bytes
        around = form.slack + aligned(CONTENTS_BYTES + len(form.encoded) + self._checksum * CHECKSUM_BYTES)
        slots, room = -(-(around + nbytes) // slot_bytes), self._segment.slots
        if slots > room:
            raise RecordTooLarge(
                f"expected a record of at most {room * slot_bytes} bytes (capacity_bytes of the channel), "
                f"got one of {around + nbytes}: raise capacity_bytes or make the group smaller"
            )
        most = -(-min(self._most_bytes, around + nbytes * self._most) // slot_bytes)
        span = self._table.allocate(slots, most)
        if span is None:
            return None
        self.nbytes += span.count * slot_bytes
        self._bundle = _Bundle(span, form, widths, span.count * slot_bytes - around)
        return self._bundle

    def _complete(self) -> None:
        """Write the bundle that is being filled, and publish it.

        Raises:
            InvalidRecord: one of its records has changed since it was placed. No record may be sent after it.
        """
        open_bundle, self._bundle = self._bundle, None
        if open_bundle is None:
            return
        span, form, parts, slot_bytes = open_bundle.span, open_bundle.form, open_bundle.parts, self._segment.slot_bytes
        layout = form.layout(AxisSizes(open_bundle.tokens, open_bundle.sequences, open_bundle.widths, len(parts)))
        contents = encode_contents(BundleHeader.of(self._kind, form, open_bundle.widths, parts))
        contents_bytes = len(contents) + self._checksum * CHECKSUM_BYTES
        nbytes = layout.nbytes + aligned(contents_bytes)
        try:
            self._segment.write(span, contents, open_bundle.columns, layout, checksum=self._checksum)
        except (TypeError, ValueError) as error:
            raise InvalidRecord(
                f"expected the {len(parts)} records up to number {self._sequence} to be as they were when they were "
                f"sent, got others ({error}): leave a record alone until the task that sent it has yielded, or send "
                f"a copy"
            ) from error
        self.nbytes -= self._table.trim(span, -(-nbytes // slot_bytes)) * slot_bytes
        self._table.publish(span, self._sequence, len(parts))
        self._segment.publish(span, contents_bytes, nbytes)
        self._ready.append(Descriptor(self._sequence, len(parts), span.start, span.count, span.generation, nbytes))

    def post(self, socket: zmq.Socket[bytes]) -> None:
        """Send one message for all bundles; see `PayloadWriter.post`."""
        self._complete()
        ready, self._ready = self._ready, []
        socket.send(encode(Publish(tuple(ready))), zmq.NOBLOCK)

    def free(self, slot: int, generation: int, records: int) -> None:
        """Return the credit of some records of a span; see `PayloadWriter.free`."""
        span = self._table.release(slot, generation, records)
        self.items -= records
        if not span.records:
            self._segment.free(span)
            self.nbytes -= span.count * self._segment.slot_bytes

    def close(self) -> None:
        """Close the segment."""
        self._segment.close()


class _Reading:
    """A bundle that is being read. Its contents conform to the schema and to each other."""

    __slots__ = ("descriptor", "form", "layout", "parts", "rows", "tokens", "widths")

    def __init__(
        self, descriptor: Descriptor, form: ColumnLayout, widths: Widths, parts: Sequence[BundleEntry]
    ) -> None:
        self.descriptor = descriptor
        self.form = form
        self.widths = widths
        self.parts = parts
        self.tokens = list(accumulate([tokens for tokens, _, _ in parts], initial=0))
        """Tokens before each record, and of all."""
        self.rows = list(accumulate([sequences for _, sequences, _ in parts], initial=0))
        """Sequences before each record, and of all."""
        self.layout = form.layout(AxisSizes(self.tokens[-1], self.rows[-1], widths, len(parts)))

    def items(self, index: int) -> Items:
        """Return the entries on each axis before record `index`."""
        return AxisSizes(self.tokens[index], self.rows[index], self.widths, index).items()


class SlotReader:
    """Reads records from a sender's segment."""

    def __init__(self, segment: SegmentReader, schema: Schema, *, checksum: bool = False) -> None:
        self._segment = segment
        self._checksum = checksum
        self._schema = schema
        self._open: _Reading | None = None
        """The bundle that was read last: its records are mostly taken one after the other."""

    def fetch(self, bundle: Bundle, index: int, released: Released) -> tuple[bytes, dict[str, Array]]:
        """Return views of a record; the death of the last one releases it; see `PayloadReader.fetch`."""
        descriptor = bundle[0]
        open_bundle = self._read(descriptor)
        form, places = open_bundle.form, open_bundle.layout.places
        if len(open_bundle.parts) > 1:
            places = form.within(places, open_bundle.items(index), open_bundle.items(index + 1))
        lease = self._segment.lease(descriptor, released)
        return open_bundle.parts[index].header, form.view(places, lease, open_bundle.widths)

    def _read(self, descriptor: Descriptor) -> _Reading:
        """Return the bundle of `descriptor`; read once, however many of its records are taken."""
        open_bundle = self._open
        if open_bundle is None or open_bundle.descriptor is not descriptor:
            open_bundle = self._open = self._read_anew(descriptor)
        return open_bundle

    def _read_anew(self, descriptor: Descriptor) -> _Reading:
        encoded = self._segment.contents(descriptor)
        contents = BundleHeader.decode(self._segment.check(descriptor, encoded) if self._checksum else encoded)
        form = self._schema.received(contents)
        open_bundle = _Reading(descriptor, form, contents.widths, contents.parts)
        expected = open_bundle.layout.nbytes + aligned(len(encoded))
        if expected != descriptor.nbytes or len(open_bundle.parts) != descriptor.records:
            raise InvalidRecord(f"expected {len(open_bundle.parts)} records in {expected} bytes, got {descriptor}")
        form.check_numbers(self._segment.columns(descriptor, open_bundle.layout.places), open_bundle.parts)
        return open_bundle

    def recover(self, sequence: int) -> list[Bundle]:
        """Return the bundles that the headers have as published; see `PayloadReader.recover`."""
        return [(descriptor, ()) for descriptor in self._segment.published_after(sequence)]


async def _receive_segment(
    connection: ControlConnection, receiver: RemoteReceiver[Any], endpoint: str
) -> PayloadReader:
    """Grant a sender its credit, and map the segment that it sends."""
    await connection.send(receiver.peers.accept_message(endpoint, DEFAULT_SLOT_BYTES))
    offer = await connection.receive()
    fd = connection.take_fd()
    if not isinstance(offer, SegmentOffer) or fd is None:
        raise ProtocolMismatch(f"expected a SegmentOffer with a file descriptor, got {type(offer).__name__}")
    with ExitStack() as stack:
        stack.callback(os.close, fd)
        segment = await anyio.to_thread.run_sync(SegmentReader, fd, offer.slots, offer.slot_bytes)
        return SlotReader(segment, receiver.schema, checksum=receiver.config.checksum)


@asynccontextmanager
async def serve_shm(url: str, record_type: type[R], config: ReceiverConfig) -> AsyncIterator[RemoteReceiver[R]]:
    """Open the receiving end of a channel on this host; see `serve`.

    Raises:
        InvalidConfig: the URL names a path; the sockets always lie in a directory that this process makes.
    """
    if url != SCHEME:
        raise InvalidConfig(f"expected {SCHEME} without a path, got {url!r}: senders connect to `inbox.url`")
    async with AsyncExitStack() as stack:
        directory = await enter_in_thread(stack, socket_directory())
        socket, connection, endpoint = await anyio.to_thread.run_sync(_bind, directory, config.heartbeat_timeout_s)
        stack.callback(socket.close)
        listener = await SocketListener.from_socket(connection)
        receiver = RemoteReceiver(record_type, url=f"{SCHEME}{directory}", socket=socket, config=config)
        acceptor = ShmAcceptor(
            receiver.peers, socket, listener, lambda opened: _receive_segment(opened, receiver, endpoint)
        )
        stack.push_async_callback(acceptor.aclose)
        receiver.start_accepting(stack.pop_all())
        async with receiver:
            yield receiver


@asynccontextmanager
async def connect_shm(
    url: str, record_type: type[R], *, name: str, heartbeat_timeout_s: float | None, tokenizer: TokenizerIdentity | None
) -> AsyncIterator[RemoteSender[R]]:
    """Open the sending end of a channel on this host; see `connect`."""
    path = Path(url.removeprefix(SCHEME)) / CONTROL_SOCKET
    async with AsyncExitStack() as stack:
        with handshake_timeout(heartbeat_timeout_s, url):
            control = await stack.enter_async_context(await _connect_control(url, path))
            request = connect_message("shm", record_type.schema.kind, name, tokenizer)
            accepted = await request_session(control, request)
            segment = await anyio.to_thread.run_sync(
                SegmentWriter, -(-accepted.capacity_bytes // accepted.slot_bytes), accepted.slot_bytes
            )
            stack.callback(segment.close)
            offer = SegmentOffer(segment.slots, segment.slot_bytes, segment.nbytes)
            await complete_handshake(control, control.send(offer, segment.fd))
        writer = SlotWriter(segment, accepted.capacity, record_type.schema.kind, checksum=accepted.checksum)
        data = dealer(request.identity)
        enable_heartbeats(data, heartbeat_timeout_s)
        data.connect(accepted.endpoint)
        connection = SenderConnection(ShmControl(control, heartbeat_timeout_s), accepted, writer, data)
        stack.pop_all()
        try:
            async with RemoteSender[R](connection, "shm") as sender:
                yield sender
        finally:
            if isinstance(connection.failure, PeerLost):  # its sockets have no owner any more
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(sweep_after, path.parent)


async def _connect_control(url: str, path: Path) -> ControlConnection:
    try:
        return await connect_control(path)
    except OSError as error:
        await anyio.to_thread.run_sync(sweep)
        raise NobodyListens(f"expected a receiver at {url}, got {error.strerror}: is its process running?") from error


def _bind(directory: Path, heartbeat_timeout_s: float | None) -> tuple[zmq.Socket[bytes], sockets.socket, str]:
    """Return a receiver's two sockets, bound to files of mode 0600, and the endpoint of the ZeroMQ one."""
    connection = sockets.socket(sockets.AF_UNIX)
    connection.bind(str(directory / CONTROL_SOCKET))
    connection.listen()
    socket, endpoint = router(), f"ipc://{directory / DATA}"
    enable_heartbeats(socket, heartbeat_timeout_s)
    socket.bind(endpoint)
    for path in (directory / CONTROL_SOCKET, directory / DATA):
        path.chmod(0o600)
    return socket, connection, endpoint
