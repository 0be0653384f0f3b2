"""ZeroMQ sockets with the whole payload: PUSH to PULL, every byte copied through the socket."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import zmq

from ..records import Plain, as_bytes
from .harness import IDLE_S, IN_FLIGHT, Case, Control, Outcome, Send, decode_header, encode_header, race

__all__ = ["zmq_msgpack", "zmq_multipart", "zmq_tcp"]


def zmq_multipart(case: Case) -> Outcome:
    """Send a header, and a frame for each column."""
    return race(case, partial(_serve, receive=_receive_multipart), partial(_connect, send=_send_multipart))


def zmq_tcp(case: Case) -> Outcome:
    """Send the frames of `zmq_multipart` over the loopback without copies, as the tcp transport does."""
    return race(case, _serve_tcp, partial(_connect, send=_send_frames))


def zmq_msgpack(case: Case) -> Outcome:
    """Send one message, with header and columns encoded as msgpack."""
    return race(case, partial(_serve, receive=_receive_msgpack), partial(_connect, send=_send_msgpack))


@contextmanager
def _serve(
    _case: Case, _control: Control, *, receive: Callable[[zmq.Socket[bytes]], Plain]
) -> Iterator[tuple[Any, Iterator[Plain | None]]]:
    with tempfile.TemporaryDirectory() as directory, zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.set_hwm(IN_FLIGHT)
        socket.bind(address := f"ipc://{directory}/socket")
        yield address, _taken_from(socket, receive)


@contextmanager
def _serve_tcp(_case: Case, _control: Control) -> Iterator[tuple[Any, Iterator[Plain | None]]]:
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.set_hwm(IN_FLIGHT)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        yield f"tcp://127.0.0.1:{port}", _taken_from(socket, _receive_multipart)


def _taken_from(socket: zmq.Socket[bytes], receive: Callable[[zmq.Socket[bytes]], Plain]) -> Iterator[Plain | None]:
    while True:
        try:
            yield receive(socket)
        except zmq.Again:
            if not socket.poll(int(IDLE_S * 1000)):
                yield None


@contextmanager
def _connect(address: str, _producer: int, *, send: Callable[[zmq.Socket[bytes], Plain], None]) -> Iterator[Send]:
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:  # the context waits for unsent messages
        socket.set_hwm(IN_FLIGHT)
        socket.connect(address)
        yield partial(send, socket)


def _send_multipart(socket: zmq.Socket[bytes], record: Plain) -> None:
    socket.send_multipart([encode_header(record), *record.columns])


def _send_frames(socket: zmq.Socket[bytes], record: Plain) -> None:
    socket.send_multipart([encode_header(record), *record.columns], copy=False)


def _receive_multipart(socket: zmq.Socket[bytes]) -> Plain:
    header, *columns = socket.recv_multipart(zmq.NOBLOCK, copy=False)
    return decode_header(header.buffer, [frame.buffer for frame in columns])


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[bytes, list[memoryview]]).decode


def _send_msgpack(socket: zmq.Socket[bytes], record: Plain) -> None:
    socket.send(_encode((encode_header(record), list(map(as_bytes, record.columns)))), copy=False)


def _receive_msgpack(socket: zmq.Socket[bytes]) -> Plain:
    header, columns = _decode(socket.recv(zmq.NOBLOCK, copy=False).buffer)
    return decode_header(header, columns)
