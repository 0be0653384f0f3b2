"""The shm carrier: payload in shared-memory slots, descriptors over a ZeroMQ `ipc://` socket.

The sender owns its segment, allocates in it alone, and hands it over at the door, a Unix socket beside the ZeroMQ one.
The receiver maps it read-only and gives arrays that are views of the slots: nothing is copied until someone copies.
"""

from __future__ import annotations

import os
import socket as sockets
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import anyio
import anyio.to_thread
import zmq
from anyio.abc import SocketListener

from ...schemas import Array, InvalidRecord, PackedGroup, Packer, ProtocolMismatch, TokenizerIdentity
from ...schemas.control import Offer, Publish, encode
from ...schemas.descriptor import Descriptor
from ...schemas.layout import Contents, Form, Layout, Lengths, Part, Place, Schema, aligned, encode_contents
from ..blocking import enter_in_thread
from ..errors import NobodyListens, PeerLost, RecordTooLarge
from .carrier import Inlet, Parcel, R, Released, dealer, router
from .door import Door
from .introduction import answering_within, introduce, let_in
from .remote_receiver import RemoteReceiver, Terms
from .remote_sender import RemoteSender, SenderLine
from .segment import DEFAULT_SLOT_BYTES, SegmentReader, SegmentWriter
from .slots import SlotTable, Span
from .socket_directory import socket_directory, sweep, sweep_after

__all__ = ["connect_shm", "serve_shm"]

SCHEME = "shm://"
DOOR = "door"
DATA = "data"


BUNDLE_SHARE = 4
"""A bundle takes at most this part of what may be in flight: its bytes are credit again only when all of it is read."""

BUNDLE_BYTES = 2 * 2**20
"""Beyond this a bundle grows no more: what writing it costs is its bytes by then, and they should stay in the cache."""

CONTENTS_BYTES, PART_BYTES = 64, 32
"""What the contents of a bundle take at most, and each record in them, beside the form and the headers."""


class _Bundle:
    """Records of one form that will be written side by side; the span has room for all of them."""

    __slots__ = ("candidates", "columns", "form", "nbytes", "parts", "span")

    def __init__(self, span: Span, form: Form, candidates: int, nbytes: int) -> None:
        self.span = span
        self.form = form
        self.candidates = candidates
        self.nbytes = nbytes
        """Bytes that they take at most."""
        self.columns: list[Collection[Array]] = []
        """Of each record."""
        self.parts: list[Part] = []


class SlotOutlet:
    """Places records in the sender's segment: credit is taken at once, the copy is made when a bundle is complete."""

    def __init__(self, segment: SegmentWriter, capacity: int, kind: str) -> None:
        self.items = 0
        self.nbytes = 0
        self._segment = segment
        self._table = SlotTable(segment.slots)
        self._capacity = capacity
        self._kind = kind
        self._most = max(1, capacity // BUNDLE_SHARE)
        self._most_bytes = min(BUNDLE_BYTES, segment.slots * segment.slot_bytes // BUNDLE_SHARE)
        self._bundle: _Bundle | None = None
        self._sequence = 0
        self._ready: list[Descriptor] = []
        """Bundles that are published, and not posted yet."""

    @property
    def full(self) -> bool:
        """Whether as many records are in flight as may be."""
        return self.items >= self._capacity

    def place(self, form: Form, lengths: Lengths, header: bytes, columns: Collection[Array], sequence: int) -> bool:
        """Make a record part of the bundle that is being filled, or begin one; see `Outlet.place`."""
        if self.full:
            return False
        nbytes = form.layout(lengths).nbytes + aligned(PART_BYTES + len(header))
        bundle = self._bundle
        if bundle is None or not self._joins(bundle, form, lengths, nbytes):
            self._complete()
            bundle = self._begin(form, lengths, nbytes)
            if bundle is None:
                return False
        bundle.columns.append(columns)
        bundle.parts.append(Part(lengths.tokens, lengths.sequences, header))
        self.items += 1
        self._sequence = sequence
        if len(bundle.parts) >= self._most or bundle.nbytes >= self._most_bytes:
            self._complete()
        return True

    def _joins(self, bundle: _Bundle, form: Form, lengths: Lengths, nbytes: int) -> bool:
        """Whether a record can lie beside those of `bundle`; if so its bytes are taken."""
        together = bundle.nbytes + nbytes
        if bundle.form is not form or bundle.candidates != lengths.candidates or together > self._most_bytes:
            return False
        more = -(-together // self._segment.slot_bytes) - bundle.span.count
        if more > 0:
            if not self._table.extend(bundle.span, more):
                return False
            self.nbytes += more * self._segment.slot_bytes
        bundle.nbytes = together
        return True

    def _begin(self, form: Form, lengths: Lengths, nbytes: int) -> _Bundle | None:
        segment = self._segment
        nbytes += aligned(CONTENTS_BYTES + len(form.encoded))
        slots = -(-nbytes // segment.slot_bytes)
        if slots > segment.slots:
            raise RecordTooLarge(
                f"expected a record of at most {segment.slots * segment.slot_bytes} bytes (capacity_bytes of the "
                f"channel), got one of {nbytes}: raise capacity_bytes or make the group smaller"
            )
        span = self._table.allocate(slots)
        if span is None:
            return None
        self.nbytes += slots * segment.slot_bytes
        self._bundle = _Bundle(span, form, lengths.candidates, nbytes)
        return self._bundle

    def _complete(self) -> None:
        """Write the bundle that is being filled, and publish it."""
        bundle, self._bundle = self._bundle, None
        if bundle is None:
            return
        span, form, parts = bundle.span, bundle.form, tuple(bundle.parts)
        contents = Contents(self._kind, form.encoded, bundle.candidates, parts)
        encoded, layout = encode_contents(contents), form.layout(contents.lengths())
        nbytes = layout.nbytes + aligned(len(encoded))
        self._segment.write(span, encoded, bundle.columns, layout)
        self._table.publish(span, self._sequence, len(parts))
        self._segment.publish(span, len(encoded), nbytes)
        self._ready.append(Descriptor(self._sequence, len(parts), span.start, span.count, span.generation, nbytes))

    def post(self, socket: zmq.Socket[bytes]) -> None:
        """One message for all of them."""
        self._complete()
        ready, self._ready = self._ready, []
        socket.send(encode(Publish(tuple(ready))), zmq.NOBLOCK)

    def free(self, slot: int, generation: int, records: int) -> None:
        """The receiver released some records of a span; see `Outlet.free`."""
        span = self._table.release(slot, generation, records)
        self.items -= records
        if not span.records:
            self._segment.free(span)
            self.nbytes -= span.count * self._segment.slot_bytes

    def close(self) -> None:
        """Let go of the segment."""
        self._segment.close()


_Reading: TypeAlias = tuple[Contents, Form, Layout]
"""What the contents of a bundle say."""


class SlotInlet:
    """Reads records from a sender's segment."""

    def __init__(self, segment: SegmentReader, schema: Schema) -> None:
        self._segment = segment
        self._schema = schema
        self._open: tuple[Descriptor, _Reading] | None = None
        """The bundle that was read last: its records are mostly taken one after the other."""

    def fetch(self, parcel: Parcel, index: int, released: Released) -> tuple[bytes, dict[str, Array]]:
        """Views of a record that release it when the last one dies; see `Inlet.fetch`."""
        descriptor = parcel[0]
        contents, form, layout = self._read(descriptor)
        places, part = self._places(contents, form, layout, index, index + 1), contents.parts[index]
        form.check_offsets(self._segment.columns(descriptor, places), [part])
        return part.header, form.view(places, self._segment.lease(descriptor, released), contents.candidates)

    def pack(self, parcel: Parcel, index: int, packer: Packer) -> int:
        """Copy groups from their span into `packer`; see `Inlet.pack`."""
        descriptor = parcel[0]
        contents, form, layout = self._read(descriptor)
        count = packer.room(form, contents.candidates, [part.tokens for part in contents.parts[index:]])
        if count:
            parts = contents.parts[index : index + count]
            columns = self._segment.columns(descriptor, self._places(contents, form, layout, index, index + count))
            form.check_offsets(columns, parts)
            groups = PackedGroup.decode(parts)
            packer.copy(form, contents.candidates, columns, groups, [part.tokens for part in parts])
        return count

    def _read(self, descriptor: Descriptor) -> _Reading:
        if self._open is None or self._open[0] is not descriptor:
            self._open = descriptor, self._read_anew(descriptor)
        return self._open[1]

    def _read_anew(self, descriptor: Descriptor) -> _Reading:
        encoded = self._segment.contents(descriptor)
        contents = Contents.decode(encoded)
        form = self._schema.received(contents)
        lengths = contents.lengths()
        layout = form.layout(lengths)
        if layout.nbytes + aligned(len(encoded)) != descriptor.nbytes or lengths.records != descriptor.records:
            raise InvalidRecord(f"{lengths}: expected columns of {layout.nbytes} bytes, got {descriptor}")
        return contents, form, layout

    @staticmethod
    def _places(contents: Contents, form: Form, layout: Layout, first: int, last: int) -> Iterable[Place]:
        """Where the columns of records `first` to before `last` lie."""
        if not first and last == len(contents.parts):
            return layout.places
        return form.within(layout, contents.lengths(0, first), contents.lengths(first, last))

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
        socket, door, endpoint = await anyio.to_thread.run_sync(_bind, directory, terms.silence_s)
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
async def connect_shm(
    url: str, record_type: type[R], *, name: str, silence_s: float | None, tokenizer: TokenizerIdentity | None
) -> AsyncIterator[RemoteSender[R]]:
    """The sending end of a channel on this host; see `connect`."""
    path = Path(url.removeprefix(SCHEME)) / DOOR
    try:
        stream = await anyio.connect_unix(path)
    except OSError as error:
        await anyio.to_thread.run_sync(sweep)
        raise NobodyListens(f"expected a receiver at {url}, got {error.strerror}: is its process running?") from error
    async with AsyncExitStack() as stack:
        door = await stack.enter_async_context(Door(stream))
        with answering_within(silence_s, url):
            welcome, identity = await introduce(door, "shm", record_type.schema.kind, name, tokenizer)
            segment = await anyio.to_thread.run_sync(
                SegmentWriter, -(-welcome.capacity_bytes // welcome.slot_bytes), welcome.slot_bytes
            )
            stack.callback(segment.close)
            await let_in(door, Offer(segment.slots, segment.slot_bytes, segment.nbytes), segment.fd)
        outlet = SlotOutlet(segment, welcome.capacity, record_type.schema.kind)
        line = SenderLine(door, welcome, outlet, dealer(welcome.endpoint, identity, silence_s=silence_s), silence_s)
        stack.pop_all()
        try:
            async with RemoteSender[R](line, "shm") as sender:
                yield sender
        finally:
            if isinstance(line.failure, PeerLost):  # its sockets are nobody's now
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(sweep_after, path.parent)


def _bind(directory: Path, silence_s: float | None) -> tuple[zmq.Socket[bytes], sockets.socket, str]:
    """A receiver's two sockets, bound to files of mode 0600, and the ZeroMQ one's endpoint."""
    door = sockets.socket(sockets.AF_UNIX)
    door.bind(str(directory / DOOR))
    door.listen()
    socket, endpoint = router(silence_s=silence_s), f"ipc://{directory / DATA}"
    socket.bind(endpoint)
    for path in (directory / DOOR, directory / DATA):
        path.chmod(0o600)
    return socket, door, endpoint
