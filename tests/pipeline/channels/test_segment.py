import fcntl
import gc
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock._pipeline.channels.segment import DEFAULT_SLOT_BYTES, SegmentReader, SegmentWriter
from penstock._pipeline.channels.slots import SlotTable, Span
from penstock._schemas.descriptor import Descriptor
from penstock._schemas.layout import AxisSizes, ColumnLayout, Layout, aligned
from penstock.errors import OutOfSharedMemory, StaleDescriptor

SLOTS = 64

FORM = ColumnLayout([("column", np.dtype(np.int32), "N")])
NOTHING = ColumnLayout([])


def layout_of(form: ColumnLayout, items: int) -> Layout:
    return form.layout(AxisSizes(items, 0))


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
    segment.write(span, b"contents", [[column]], layout_of(FORM, len(column)))
    nbytes = aligned(len(b"contents")) + aligned(column.nbytes)
    table.publish(span, sequence)
    segment.publish(span, len(b"contents"), nbytes)
    return Descriptor(sequence, 1, span.start, -(-nbytes // segment.slot_bytes), span.generation, nbytes)


def test_written_values_are_read_without_a_copy(writer: SegmentWriter, reader: SegmentReader) -> None:
    released: list[tuple[Descriptor, int]] = []
    descriptor = write(writer, SlotTable(SLOTS), [1, 2, 3])

    payload = reader.lease(descriptor, lambda *what: released.append(what))

    assert reader.contents(descriptor) == b"contents"
    assert payload[:12].view(np.int32).tolist() == [1, 2, 3]
    assert not payload.flags.writeable
    assert released == []


def test_a_lease_ends_with_the_last_view_of_any_kind(writer: SegmentWriter, reader: SegmentReader) -> None:
    released: list[tuple[Descriptor, int]] = []
    descriptor = write(writer, SlotTable(SLOTS), list(range(16)))
    payload = reader.lease(descriptor, lambda *what: released.append(what))
    views = [payload[:64].view(np.int32)[2:5], np.frombuffer(payload, np.uint8), memoryview(payload)]  # type: ignore[arg-type]
    del payload
    while views:
        gc.collect()
        assert released == []
        views.pop()
    assert released == [(descriptor, 1)]


def test_records_of_a_bundle_lie_column_by_column(writer: SegmentWriter, reader: SegmentReader) -> None:
    form = ColumnLayout([("one", np.dtype(np.int32), "N"), ("other", np.dtype(np.int64), "F")])
    records = [
        (np.array([1, 2], np.int32), np.array([0, 2], np.int64)),
        (np.array([], np.int32), np.array([0], np.int64)),
        (np.array([3], np.int32), np.array([0, 1], np.int64)),
    ]
    layout = form.layout(AxisSizes(3, 2, records=3))
    table = SlotTable(SLOTS)
    span = table.allocate(1)
    assert span is not None
    writer.write(span, b"contents", records, layout)
    table.publish(span, 7, records=3)
    writer.publish(span, len(b"contents"), layout.nbytes + 64)

    (found,) = reader.published_after(4)

    assert found == Descriptor(7, 3, span.start, 1, 1, layout.nbytes + 64)
    assert [column.tolist() for column in reader.columns(found, layout.places)] == [[1, 2, 3], [0, 2, 0, 0, 1]]


def test_leases_outlive_the_writer(writer: SegmentWriter, reader: SegmentReader) -> None:
    payload = reader.lease(write(writer, SlotTable(SLOTS), [7]), lambda *_: None)
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
        {"records": 2},
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
        reader.contents(descriptor._replace(**wrong))


def test_a_span_that_was_used_again_or_is_being_written_is_stale(writer: SegmentWriter, reader: SegmentReader) -> None:
    table = SlotTable(SLOTS)
    old = write(writer, table, [1])
    writer.free(table.release(old.slot, old.generation))
    with pytest.raises(StaleDescriptor, match="got state 0"):
        reader.contents(old)
    span = table.allocate(4)
    assert span is not None
    writer.write(span, b"new", [], layout_of(NOTHING, 0))
    with pytest.raises(StaleDescriptor, match="got state 1"):
        reader.contents(old._replace(generation=2))


def test_the_headers_contain_the_published_records_of_a_dead_sender(
    writer: SegmentWriter, reader: SegmentReader
) -> None:
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
        with pytest.raises(StaleDescriptor, match="that cannot shrink, got 1048576 that can"):
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
    assert str(Path(f"/proc/self/fd/{writer.fd}").readlink()) == "/memfd:penstock: 64 slots of 1024 bytes (deleted)"


def test_a_thousand_slots_of_a_trajectory_cost_under_18_mb() -> None:
    slots = 1000 * -(-16_704 // DEFAULT_SLOT_BYTES)
    segment = SegmentWriter(slots)
    segment.close()
    assert segment.nbytes < 18_000_000


def test_slots_are_whole_cache_lines() -> None:
    with pytest.raises(ValueError, match="multiple of 64, got 1000"):
        SegmentWriter(4, 1000)


def test_contents_beyond_their_span_are_an_error_never_a_read(writer: SegmentWriter, reader: SegmentReader) -> None:
    table = SlotTable(SLOTS)
    span = table.allocate(1)
    assert span is not None
    table.publish(span, 1)
    writer.publish(span, 2**31, 128)

    with pytest.raises(StaleDescriptor, match="expected contents within 128 bytes, got 2147483648"):
        reader.contents(Descriptor(1, 1, 0, 1, 1, 128))


def test_the_map_is_whole_pages(writer: SegmentWriter) -> None:
    assert (writer.nbytes - SLOTS * DEFAULT_SLOT_BYTES) % mmap.PAGESIZE == 0
