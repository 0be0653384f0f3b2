"""The tcp carrier: the same descriptors, with the columns as extra frames of the message. For senders on other hosts.

Frames are handed to ZeroMQ as they are, without joining them, and become arrays on the other side without copying.
Nothing is salvaged from a sender that dies: what had not left its process is lost, and reported so. Both sides need the
same `Key`; on loopback they use this user's unless they are given one.
"""

from __future__ import annotations

import ipaddress
import socket as sockets
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from urllib.parse import urlsplit

import anyio
import anyio.abc
import anyio.to_thread
import numpy as np
import zmq

from ...schemas import Array, InvalidRecord, PackedGroup, Packer, TokenizerIdentity
from ...schemas.control import Publish, encode
from ...schemas.descriptor import Descriptor
from ...schemas.layout import Contents, Form, Lengths, Schema, aligned, encode_contents
from ..errors import NobodyListens, PeerClosed, RecordTooLarge, StaleDescriptor
from .carrier import LARGEST_MESSAGE, Inlet, Parcel, R, Released, dealer, router, start_zero_copy
from .checksum import checked, with_checksum
from .default_key import default_key
from .door import Door
from .introduction import answering_within, introduce, let_in
from .keys import Key
from .remote_receiver import RemoteReceiver, Terms
from .remote_sender import RemoteSender, SenderLine

__all__ = ["connect_tcp", "serve_tcp"]


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


def _address(url: str, key: Key | None) -> tuple[str, int, Key]:
    """Return host and port of a tcp URL, and the key to use there: on loopback this user's, unless another is given.

    Raises:
        InvalidKey, KeyUnavailable: there is no key that this user may use by default.
        ValueError: it has no port, or a host beyond loopback and there is no key.
    """
    parts = urlsplit(url)
    if parts.scheme != "tcp" or parts.hostname is None or parts.port is None:
        raise ValueError(f"expected tcp://HOST:PORT, got {url!r}")
    resolved = {info[4][0] for info in sockets.getaddrinfo(parts.hostname, parts.port, type=sockets.SOCK_STREAM)}
    if key is None and not all(ipaddress.ip_address(address).is_loopback for address in resolved):
        raise ValueError(
            f"expected a loopback address or a key, got {parts.hostname} and none: whoever reaches the port could read "
            f"and forge records; make a file with Key.create(path), copy it to the other host, and give both ends "
            f"key=Key.load(path), or tunnel the port with ssh -L"
        )
    return parts.hostname, parts.port, key or default_key()


@asynccontextmanager
async def serve_tcp(url: str, record_type: type[R], terms: Terms) -> AsyncIterator[RemoteReceiver[R]]:
    """The receiving end of a channel over TCP; see `serve`."""
    host, port, key = await anyio.to_thread.run_sync(_address, url, terms.key)
    terms = replace(terms, key=key)
    socket = router(max(LARGEST_MESSAGE, terms.capacity_bytes), key, terms.silence_s)
    wildcard = f"tcp://{f'[{host}]' if ':' in host else host}:*"
    if ":" in host:
        socket.setsockopt(zmq.IPV6, 1)
    socket.bind(wildcard)
    endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    async with AsyncExitStack() as stack:
        stack.callback(socket.close)
        door = await anyio.create_tcp_listener(local_host=host, local_port=port)
        bound = door.extra(anyio.abc.SocketAttribute.local_port)  # noqa: S610 (of anyio, not of Django)
        stack.pop_all()
    receiver = RemoteReceiver(
        record_type,
        carrier="tcp",
        url=wildcard.replace("*", str(bound)),
        socket=socket,
        terms=terms,
    )

    async def enter(opened: Door) -> Inlet:
        await opened.say(receiver.welcome(endpoint, 0))
        return FrameInlet(record_type.schema, checksum=terms.checksum)

    receiver.attend(door, enter, AsyncExitStack())
    async with receiver:
        yield receiver


@asynccontextmanager
async def connect_tcp(
    url: str,
    record_type: type[R],
    *,
    name: str,
    key: Key | None,
    silence_s: float | None,
    tokenizer: TokenizerIdentity | None,
) -> AsyncIterator[RemoteSender[R]]:
    """The sending end of a channel over TCP; see `connect`."""
    host, port, used = await anyio.to_thread.run_sync(_address, url, key)
    await anyio.to_thread.run_sync(start_zero_copy)
    with answering_within(silence_s, url):
        try:
            stream = await anyio.connect_tcp(host, port)
        except OSError as error:
            raise NobodyListens(f"expected a receiver at {url}, got {error}: is its process running?") from error
    async with AsyncExitStack() as stack:
        door = await stack.enter_async_context(Door(stream))
        with answering_within(silence_s, url):
            await _greet(door, used)
            welcome, identity = await introduce(door, "tcp", record_type.schema.kind, name, tokenizer)
            await let_in(door)
        outlet = FrameOutlet(
            welcome.capacity, welcome.capacity_bytes, record_type.schema.kind, checksum=welcome.checksum
        )
        data = dealer(_reached(welcome.endpoint, host), identity, used, silence_s)
        line = SenderLine(door, welcome, outlet, data, silence_s)
        stack.pop_all()
    async with RemoteSender[R](line, "tcp") as sender:
        yield sender


async def _greet(door: Door, key: Key) -> None:
    try:
        await door.greet(key, "sender")
    except (anyio.EndOfStream, anyio.BrokenResourceError):
        raise PeerClosed("the receiver closed the door: has it the same key?") from None


def _reached(endpoint: str, host: str) -> str:
    """A receiver's data port, on the address at which its door was reached: it may be bound to all that it has."""
    return f"tcp://{f'[{host}]' if ':' in host else host}:{endpoint.rpartition(':')[2]}"
