"""Any bytes that a peer writes are a record, or one of the two errors that disconnect it; no other error is raised."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock import TrainBatch, TrajectoryGroup
from penstock._pipeline.channels.segment import HEADER_BYTES, SegmentReader, SegmentWriter
from penstock._pipeline.channels.shm import SlotReader, SlotWriter
from penstock._schemas import control
from penstock._schemas.descriptor import Descriptor
from penstock._schemas.layout import BundleHeader, encode_contents
from penstock.errors import InvalidRecord, ProtocolMismatch, StaleDescriptor
from penstock.testing import batch, group

SLOTS, SLOT_BYTES = 64, 1024

EDGES = [0, 1, -1, 2**31, 2**32 - 1, 2**63 - 1, -(2**63), 2**64 - 1]
NUMBERS = st.sampled_from(EDGES) | st.integers(-3, SLOTS + 3) | st.integers(-(2**63), 2**63 - 1)
DESCRIPTORS = st.builds(Descriptor, *[NUMBERS] * 6)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats() | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)


class Published(NamedTuple):
    """Three groups and a batch that a sender published, and what the receiver reads them with."""

    writer: SegmentWriter
    groups: SlotReader
    batches: SlotReader
    first: Descriptor
    second: Descriptor

    @property
    def bundle(self) -> Descriptor:
        """Return a new descriptor of the groups: a receiver reads once for each descriptor."""
        return Descriptor(*self.first)

    @property
    def single(self) -> Descriptor:
        """Return a new descriptor of the batch."""
        return Descriptor(*self.second)


@pytest.fixture(scope="module")
def published() -> Iterator[Published]:
    writer = SegmentWriter(SLOTS, SLOT_BYTES)
    reader = SegmentReader(writer.fd, SLOTS, SLOT_BYTES)
    bundle = _publish(SlotWriter(writer, 64, "group"), *[group(instance_id=str(n), meta={"n": n}) for n in range(3)])
    single = _publish(SlotWriter(writer, 64, "batch"), batch(), skip=bundle.slots)
    yield Published(
        writer, SlotReader(reader, TrajectoryGroup.schema), SlotReader(reader, TrainBatch.schema), bundle, single
    )
    writer.close()


def _publish(outlet: SlotWriter, *records: TrajectoryGroup | TrainBatch, skip: int = 0) -> Descriptor:
    if skip:
        outlet._table.allocate(skip)
    for number, record in enumerate(records, 1):
        columns = record.columns()
        form, lengths = record.schema.measure(columns)
        assert outlet.place(form, lengths, record.header(), record.schema.contiguous(columns), number)
    outlet._complete()
    (descriptor,) = outlet._ready
    return descriptor


def _read(published: Published, descriptor: Descriptor) -> None:
    """Read a descriptor in each way that a receiver does; assert that the result, if any, is a valid record."""
    for index in range(max(0, min(descriptor.records, 3))):
        with suppress(InvalidRecord, StaleDescriptor):
            record = TrajectoryGroup.assemble(*published.groups.fetch((descriptor, ()), index, _ignore))
            _use_group(record)
            _use_batch(TrainBatch.pack([record]))
        with suppress(InvalidRecord, StaleDescriptor):
            _use_batch(TrainBatch.assemble(*published.batches.fetch((descriptor, ()), index, _ignore)))


def _ignore(descriptor: Descriptor, records: int) -> None:
    del descriptor, records


def _use_group(record: TrajectoryGroup) -> None:
    """Assert that the columns are as long as the offsets state; their values are not checked."""
    assert len(record.owned().completion_lengths()) == len(record)
    assert int(record.lengths().sum()) == len(record.tokens) == len(record.loss_mask)


def _use_batch(record: TrainBatch) -> None:
    record.columns()
    assert len(record.ids) == len(record) == len(record.rewards)


@given(st.binary(max_size=200))
def test_a_message_of_any_bytes_is_a_message_or_a_mismatch(sent: bytes) -> None:
    try:
        message = control.decode(sent)
    except ProtocolMismatch:
        return
    assert control.decode(control.encode(message)) == message


@given(
    st.sampled_from(["Publish", "CreditGrant", "Outcomes", "Close", "Connect", "SegmentOffer", "Nobody"]),
    st.lists(JSON, max_size=7),
)
def test_a_message_of_any_fields_is_a_message_or_a_mismatch(tag: str, fields: list[Any]) -> None:
    with suppress(ProtocolMismatch):
        control.decode(msgspec.msgpack.encode([tag, *fields]))


@given(DESCRIPTORS)
@example(Descriptor(3, 3, 0, SLOTS, 1, SLOTS * SLOT_BYTES))
@example(Descriptor(3, 3, 2**63 - 1, 2**63 - 1, 1, 64))
def test_a_descriptor_that_was_made_up_is_never_read_beyond_the_segment(
    published: Published, descriptor: Descriptor
) -> None:
    _read(published, descriptor)


@given(st.integers(0, 5), NUMBERS)
def test_a_true_descriptor_with_one_field_changed_is_stale(published: Published, field: int, value: int) -> None:
    fields = list(published.bundle)
    changed = fields[field] != value
    fields[field] = value
    forged = Descriptor(*fields)
    slots_only = field == 3 and -(-forged.nbytes // SLOT_BYTES) <= value <= SLOTS
    if changed and not slots_only:
        with pytest.raises((StaleDescriptor, InvalidRecord)):
            published.groups.fetch((forged, ()), 0, _ignore)
    else:
        published.groups.fetch((forged, ()), 0, _ignore)


@given(st.integers(0, HEADER_BYTES - 1), st.integers(0, 255))
def test_a_header_with_any_byte_changed_is_an_error_or_equivalent(published: Published, at: int, value: int) -> None:
    with _changed(published, published.bundle.slot * HEADER_BYTES + at, bytes([value])):
        _read(published, published.bundle)


@settings(max_examples=300)
@given(st.data())
def test_contents_with_any_bytes_changed_are_an_error_or_a_record(published: Published, data: st.DataObject) -> None:
    for descriptor in (published.bundle, published.single):
        encoded = published.groups._segment.contents(descriptor)
        begin = published.writer._payload + descriptor.slot * SLOT_BYTES + descriptor.nbytes
        begin -= -(-len(encoded) // 64) * 64
        at = data.draw(st.integers(0, len(encoded) - 1))
        replacement = data.draw(st.binary(min_size=1, max_size=len(encoded) - at))
        with _changed(published, begin + at, replacement):
            _read(published, descriptor)


@given(st.data())
def test_columns_with_any_bytes_changed_are_an_error_or_a_record(published: Published, data: st.DataObject) -> None:
    for descriptor in (published.bundle, published.single):
        at = data.draw(st.integers(0, descriptor.nbytes - 9))
        replacement = data.draw(st.binary(min_size=1, max_size=8))
        with _changed(published, published.writer._payload + descriptor.slot * SLOT_BYTES + at, replacement):
            _read(published, descriptor)


def test_offsets_that_lead_astray_are_refused_where_they_come_in(published: Published) -> None:
    places = published.groups._read(published.bundle).layout.places
    offsets_at = published.writer._payload + published.bundle.slot * SLOT_BYTES + places[0][1] * 8
    for position, offset in ((0, 1), (1, 2**40), (2, 3), (1, -1), (5, 10_000)):
        with (
            _changed(published, offsets_at + 8 * position, offset.to_bytes(8, "little", signed=True)),
            pytest.raises(InvalidRecord, match="offsets: expected to run from 0 to"),
        ):
            published.groups.fetch((published.bundle, ()), position // 3, _ignore)


LENGTHS = st.sampled_from([0, 1, 2, 6, 2**31, 2**62, 2**63 - 1])


@given(st.lists(st.tuples(LENGTHS, LENGTHS, st.binary(max_size=3)), max_size=4), LENGTHS)
def test_lengths_that_overflow_are_an_error_never_a_read(
    published: Published, parts: list[tuple[int, int, bytes]], candidates: int
) -> None:
    true = BundleHeader.decode(published.groups._segment.contents(published.bundle))
    contents = encode_contents((true.kind, true.form, candidates, parts))
    with _contents_replaced(published, contents):
        if [(tokens, sequences) for tokens, sequences, _ in parts] != [part[:2] for part in true.parts]:
            with pytest.raises((StaleDescriptor, InvalidRecord)):
                published.groups.fetch((published.bundle, ()), 0, _ignore)
        _read(published, published.bundle)


def test_contents_that_fill_another_span_than_theirs_are_refused(published: Published) -> None:
    """Also where offsets, columns and header agree with them: the bytes after the span are another record's."""
    true = BundleHeader.decode(published.groups._segment.contents(published.bundle))
    longer = true.parts[0].tokens + 1000
    contents = encode_contents((*true[:3], (true.parts[0]._replace(tokens=longer), *true.parts[1:])))
    offsets_at = published.writer._payload + published.bundle.slot * SLOT_BYTES
    last_offset_at = offsets_at + 8 * true.parts[0].sequences

    with (
        _contents_replaced(published, contents),
        _changed(published, last_offset_at, longer.to_bytes(8, "little")),
        pytest.raises(InvalidRecord, match=r"expected 3 records in \d+ bytes, got"),
    ):
        published.groups.fetch((published.bundle, ()), 0, _ignore)


@pytest.mark.parametrize("records", [1, 2, 4])
def test_a_header_with_a_wrong_number_of_records_is_refused(published: Published, records: int) -> None:
    forged = published.bundle._replace(records=records)

    with (
        _changed(published, published.bundle.slot * HEADER_BYTES + 2, records.to_bytes(2, "little")),
        pytest.raises(InvalidRecord, match="expected 3 records in"),
    ):
        published.groups.fetch((forged, ()), records - 1, _ignore)


@pytest.mark.parametrize("more", [1, 64, 2**31])
def test_contents_that_begin_before_their_span_are_refused(published: Published, more: int) -> None:
    nbytes = published.single.nbytes + more

    with (
        _changed(published, published.single.slot * HEADER_BYTES + 4, nbytes.to_bytes(4, "little")),
        pytest.raises(StaleDescriptor, match=f"expected contents within .* bytes, got {nbytes}"),
    ):
        published.batches.fetch((published.single, ()), 0, _ignore)


@contextmanager
def _contents_replaced(published: Published, contents: bytes) -> Iterator[None]:
    """Replace the contents of the groups within the body."""
    bundle = published.bundle
    begin = published.writer._payload + bundle.slot * SLOT_BYTES + bundle.nbytes - -(-len(contents) // 64) * 64
    length_at = bundle.slot * HEADER_BYTES + 4
    with _changed(published, begin, contents), _changed(published, length_at, len(contents).to_bytes(4, "little")):
        yield


@contextmanager
def _changed(published: Published, at: int, replacement: bytes) -> Iterator[None]:
    """Replace bytes of the segment within the body."""
    memory, span = published.writer._bytes, slice(at, at + len(replacement))
    before = bytes(memory[span])
    memory[span] = replacement
    try:
        yield
    finally:
        memory[span] = before
