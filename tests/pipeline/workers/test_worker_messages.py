from __future__ import annotations

import msgspec
import pytest

from penstock._pipeline.workers.worker_messages import (
    Failed,
    Finished,
    Serving,
    WorkerEvent,
    decode_events,
    encode_event,
)


def test_words_come_out_as_they_went_in_however_they_are_cut() -> None:
    sent: list[WorkerEvent] = [Serving("shm:///tmp/x"), Failed("ValueError: no", "Traceback …"), Finished()]
    stream = b"".join(encode_event(event) for event in sent)
    buffer = bytearray()
    received: list[object] = []

    for position in range(len(stream)):
        buffer += stream[position : position + 1]
        received += decode_events(buffer)

    assert received == sent
    assert not buffer


def test_what_is_no_word_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_events(bytearray(b"\xc1\n"))
