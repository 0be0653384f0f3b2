"""Arrow IPC: a stream of record batches over a Unix socket for each producer."""

from __future__ import annotations

import select
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ..records import COLUMNS, Plain
from .harness import IDLE_S, Case, Control, Outcome, Send, decode_header, encode_header, need, race

__all__ = ["arrow"]

HEADER = b"header"


def arrow(case: Case) -> Outcome:
    """Send each group as a record batch with its columns over tokens; the rest is metadata of the batch."""
    return race(case, _serve, _connect)


@contextmanager
def _serve(_case: Case, _control: Control) -> Iterator[tuple[Any, Iterator[Plain | None]]]:
    need("pyarrow.ipc", "pyarrow")
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address := f"{directory}/socket")
        listener.listen()
        with ExitStack() as connections:
            yield address, _taken_from(listener, connections)


def _taken_from(listener: socket.socket, connections: ExitStack) -> Iterator[Plain | None]:
    ipc = need("pyarrow.ipc", "pyarrow")
    poll, streams = select.poll(), dict[int, Any]()
    poll.register(listener, select.POLLIN)
    while True:
        ready = poll.poll(IDLE_S * 1000)
        if not ready:
            yield None
        for fd, _ in ready:
            if fd == listener.fileno():
                connection = connections.enter_context(listener.accept()[0])
                poll.register(connection, select.POLLIN)
                streams[connection.fileno()] = ipc.open_stream(_Whole(connection))
            elif (record := _next_of(streams[fd])) is not None:
                yield record
            else:
                poll.unregister(fd)


def _next_of(stream: Any) -> Plain | None:
    try:
        batch, metadata = stream.read_next_batch_with_custom_metadata()
    except StopIteration:
        return None
    return decode_header(metadata[HEADER], [column.buffers()[1] for column in batch.columns])


class _Whole:
    """A socket as a file whose reads return exactly the requested bytes, so that none stay in a buffer."""

    closed = False

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def read(self, size: int) -> bytearray:
        memory = bytearray(size)
        got = self._connection.recv_into(memory, size, socket.MSG_WAITALL) if size else 0
        return memory if got == size else memory[:got]


@contextmanager
def _connect(address: str, _producer: int) -> Iterator[Send]:
    pa, ipc = need("pyarrow", "pyarrow"), need("pyarrow.ipc", "pyarrow")
    # Booleans of Arrow are bits; a mask is sent as bytes, as it is stored.
    types = [pa.uint8() if dtype.itemsize == 1 else pa.from_numpy_dtype(dtype) for dtype in COLUMNS.values()]
    schema = pa.schema(list(zip(COLUMNS, types, strict=True)))
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        with connection.makefile("wb", buffering=0) as file, ipc.new_stream(file, schema) as stream:

            def send(record: Plain) -> None:
                tokens = len(record.columns[1])
                arrays = [
                    pa.Array.from_buffers(kind, tokens, [None, pa.py_buffer(column)])
                    for kind, column in zip(types, record.columns, strict=True)
                ]
                batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
                stream.write_batch(batch, custom_metadata={HEADER: encode_header(record)})

            yield send
