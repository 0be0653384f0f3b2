import fcntl
import gc
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import OutOfSharedMemory, StaleDescriptor
from penstock.pipeline.segment import DEFAULT_SLOT_BYTES, SegmentReader, SegmentWriter
from penstock.pipeline.slots import SlotTable, Span
from penstock.schemas.descriptor import Descriptor
from penstock.schemas.layout import Form, Layout, Lengths, aligned

SLOTS = 64

FORM = Form([("column", np.dtype(np.int32), "N")])
NOTHING = Form([])


def layout_of(form: Form, items: int) -> Layout:
    return form.layout(Lengths(items, 0, 0))


@pytest.fixture
def writer() -> Iterator[SegmentWriter]:
    segment = SegmentWriter(SLOTS)
    yield segment
    segment.close()


@pytest.fixture
def reader(writer: SegmentWriter) -> SegmentReader:
    return SegmentReader(writer.fd, SLOTS, DEFAULT_SLOT_BYTES)


def write(segment: SegmentWriter, table: SlotTable, values: list[int], sequence: int = 1) -> Descriptor:
    column = np.asarray(values, np.int32)
    span = table.allocate(4)
    assert span is not None
    segment.write(span, b"contents", [column], layout_of(FORM, len(column)))
    nbytes = aligned(len(b"contents")) + aligned(column.nbytes)
    table.publish(span, sequence)
    segment.publish(span, sequence, len(b"contents"), nbytes)
    return Descriptor(sequence, span.start, -(-nbytes // segment.slot_bytes), span.generation, nbytes)


def test_what_is_written_is_read_without_a_copy(writer: SegmentWriter, reader: SegmentReader) -> None:
    released: list[Descriptor] = []
    descriptor = write(writer, SlotTable(SLOTS), [1, 2, 3])

    payload, contents = reader.lease(descriptor, released.append)

    assert contents == b"contents"
    assert payload[:12].view(np.int32).tolist() == [1, 2, 3]
    assert not payload.flags.writeable
    assert released == []


def test_a_lease_ends_with_the_last_view_of_any_kind(writer: SegmentWriter, reader: SegmentReader) -> None:
    released: list[Descriptor] = []
    descriptor = write(writer, SlotTable(SLOTS), list(range(16)))
    payload, _ = reader.lease(descriptor, released.append)
    views = [payload[:64].view(np.int32)[2:5], np.frombuffer(payload, np.uint8), memoryview(payload)]  # type: ignore[arg-type]
    del payload
    while views:
        gc.collect()
        assert released == []
        views.pop()
    assert released == [descriptor]


def test_leases_outlive_the_writer(writer: SegmentWriter, reader: SegmentReader) -> None:
    payload, _ = reader.lease(write(writer, SlotTable(SLOTS), [7]), lambda _: None)
    del reader
    writer.close()
    assert payload[:4].view(np.int32)[0] == 7


@pytest.mark.parametrize(
    "wrong",
    [
        {"slot": -1},
        {"slot": SLOTS},
        {"slot": 1},
        {"slots": 0},
        {"slots": SLOTS + 1},
        {"slots": 2**62},
        {"generation": 2},
        {"sequence": 2},
        {"nbytes": 0},
        {"nbytes": 2**40},
        {"nbytes": 64},
    ],
    ids=str,
)
def test_a_descriptor_that_does_not_fit_is_an_error_never_a_read(
    writer: SegmentWriter, reader: SegmentReader, wrong: dict[str, int]
) -> None:
    descriptor = write(writer, SlotTable(SLOTS), [1])
    with pytest.raises(StaleDescriptor, match="expected"):
        reader.lease(descriptor._replace(**wrong), lambda _: None)


def test_a_span_that_was_used_again_or_is_being_written_is_stale(writer: SegmentWriter, reader: SegmentReader) -> None:
    table = SlotTable(SLOTS)
    old = write(writer, table, [1])
    writer.free(table.release(old.slot, old.generation))
    with pytest.raises(StaleDescriptor, match="got state 0"):
        reader.lease(old, lambda _: None)
    span = table.allocate(4)
    assert span is not None
    writer.write(span, b"new", [], layout_of(NOTHING, 0))
    with pytest.raises(StaleDescriptor, match="got state 1"):
        reader.lease(old._replace(generation=2), lambda _: None)


def test_the_headers_tell_what_a_dead_sender_had_published(writer: SegmentWriter, reader: SegmentReader) -> None:
    table = SlotTable(SLOTS)
    first, second, third = (write(writer, table, [n], sequence=n) for n in (1, 2, 3))
    writer.free(table.release(second.slot, second.generation))
    unfinished = table.allocate(1)
    assert isinstance(unfinished, Span)
    writer.write(unfinished, b"half", [], layout_of(NOTHING, 0))

    assert reader.published_after(0) == [first, third]
    assert reader.published_after(1) == [third]
    assert reader.published_after(3) == []


def test_a_segment_cannot_shrink_under_its_reader(writer: SegmentWriter) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(writer.fd, 0)


def test_memory_that_could_shrink_is_not_mapped() -> None:
    fd = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 2**20)
        with pytest.raises(StaleDescriptor, match="sealed against shrinking, got 1048576 bytes with seals 0x0"):
            SegmentReader(fd, SLOTS, DEFAULT_SLOT_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        with pytest.raises(StaleDescriptor, match="expected a segment of"):
            SegmentReader(fd, 2**20, DEFAULT_SLOT_BYTES)
    finally:
        os.close(fd)


@pytest.mark.parametrize(("slots", "slot_bytes"), [(0, 1024), (-1, 1024), (4, 0), (4, -64)])
def test_a_segment_without_slots_is_refused(writer: SegmentWriter, slots: int, slot_bytes: int) -> None:
    with pytest.raises(StaleDescriptor, match="at least one slot"):
        SegmentReader(writer.fd, slots, slot_bytes)


def test_memory_that_the_machine_does_not_have_is_an_error_at_the_start() -> None:
    with pytest.raises(OutOfSharedMemory, match="lower capacity_bytes"):
        SegmentWriter(2**50 // DEFAULT_SLOT_BYTES)


def test_nothing_of_a_segment_has_a_name(writer: SegmentWriter) -> None:
    assert str(Path(f"/proc/self/fd/{writer.fd}").readlink()) == "/memfd:penstock (deleted)"


def test_a_thousand_slots_of_a_trajectory_cost_under_18_mb() -> None:
    slots = 1000 * -(-16_704 // DEFAULT_SLOT_BYTES)
    segment = SegmentWriter(slots)
    segment.close()
    assert segment.nbytes < 18_000_000


def test_slots_are_whole_cache_lines() -> None:
    with pytest.raises(ValueError, match="multiple of 64, got 1000"):
        SegmentWriter(4, 1000)


@pytest.mark.parametrize(
    "column",
    [
        np.zeros(3, np.int32),
        np.zeros(4, np.float32),
        np.zeros(4, np.uint32),
        np.zeros(4, ">i4"),
        np.zeros((2, 2), np.int32),
        np.array(["a", "b", "c", "d"], object),
        [1, 2, 3, 4],
    ],
    ids=repr,
)
def test_a_column_that_is_not_what_the_layout_says_is_not_written(writer: SegmentWriter, column: Any) -> None:
    span = SlotTable(SLOTS).allocate(1)
    assert span is not None

    with pytest.raises((TypeError, ValueError)):
        writer.write(span, b"c", [column], layout_of(FORM, 4))


def test_contents_beyond_their_span_are_an_error_never_a_read(writer: SegmentWriter, reader: SegmentReader) -> None:
    table = SlotTable(SLOTS)
    span = table.allocate(1)
    assert span is not None
    writer.publish(span, 1, 2**31, 128)

    with pytest.raises(StaleDescriptor, match="expected contents within 128 bytes, got 2147483648"):
        reader.lease(Descriptor(1, 0, 1, 1, 128), lambda _: None)


def test_the_map_is_whole_pages(writer: SegmentWriter) -> None:
    assert (writer.nbytes - SLOTS * DEFAULT_SLOT_BYTES) % mmap.PAGESIZE == 0
