"""Reading a journal's file returns the entries that were written, or reports damage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import TrajectoryGroup
from penstock._pipeline.durability.journal_entry import CorruptRange, encode_entry, read_entries
from penstock.errors import InvalidRecord
from penstock.testing import group

RECORDS = [
    group(instance_id="0"),
    group(instance_id="1", completion_lengths=[1], meta={"prompt": "Δ" * 40, "penstock": "penstock" * 9}),
    group(
        instance_id="2",
        completion_lengths=[3, 0, 5],
        reward_parts={"score": [1, 2, 3]},
        teacher_ids=np.arange(28, dtype=np.int32).reshape(14, 2),
        teacher_logprobs=-np.ones((14, 2), np.float32),
    ),
    TrajectoryGroup.build(env="e", instance_id="3", sequences=[[]], loss_mask=[[]], rewards=[0.0]),
    group(instance_id="4", completion_lengths=[64] * 8),
]
ENTRIES = [encode_entry(record) for record in RECORDS]
ENDS = np.cumsum([len(entry) for entry in ENTRIES]).tolist()
DATA = b"".join(ENTRIES)


def contents(record: TrajectoryGroup) -> object:
    return record.header(), {name: (c.dtype, c.shape, c.tobytes()) for name, c in record.columns().items()}


def read(data: bytes) -> tuple[list[TrajectoryGroup], list[CorruptRange]]:
    found = list(read_entries(data, TrajectoryGroup))
    return [each for each in found if not isinstance(each, CorruptRange)], [
        each for each in found if isinstance(each, CorruptRange)
    ]


def whole(records: Sequence[TrajectoryGroup], expected: Sequence[TrajectoryGroup]) -> bool:
    return [contents(record) for record in records] == [contents(record) for record in expected]


def test_written_records_are_read_bit_for_bit() -> None:
    records, damage = read(DATA)

    assert whole(records, RECORDS)
    assert not damage


def test_a_record_lives_alone_and_cannot_be_changed() -> None:
    record = next(iter(read_entries(DATA, TrajectoryGroup)))

    assert isinstance(record, TrajectoryGroup)
    assert not any(column.flags.writeable for column in record.columns().values())
    assert record.tokens.base is not None
    assert record.tokens.base.nbytes < len(ENTRIES[0])


def test_columns_of_any_memory_layout_are_written_as_they_should_be() -> None:
    plain = RECORDS[4]
    twice = np.repeat(plain.tokens, 2)
    strided = group(instance_id="4", completion_lengths=[64] * 8, tokens=twice[::2])

    assert encode_entry(strided) == ENTRIES[4]


def test_a_record_that_breaks_its_schema_is_not_written() -> None:
    broken = TrajectoryGroup.assemble(
        RECORDS[0].header(), RECORDS[0].columns() | {"rewards": np.zeros(2, np.complex128)}
    )

    with pytest.raises(InvalidRecord, match="rewards: expected dtype float32"):
        encode_entry(broken)


def test_a_group_without_sequences_is_neither_written_nor_read(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {name: column[:0] for name, column in RECORDS[0].columns().items()} | {"offsets": np.zeros(1, np.int64)}
    nothing = TrajectoryGroup.assemble(RECORDS[0].header(), columns)

    with pytest.raises(InvalidRecord, match="expected at least one sequence, got 0"):
        encode_entry(nothing)
    with monkeypatch.context() as lenient:
        lenient.setattr("penstock._schemas.layout.check_sequences", lambda _: None)
        entry = encode_entry(nothing)
    assert read(entry) == ([], [CorruptRange(0, len(entry))])


@given(length=st.integers(0, len(DATA) - 1))
def test_a_file_that_ends_early_gives_every_record_before_its_end(length: int) -> None:
    records, damage = read(DATA[:length])

    count = sum(end <= length for end in ENDS)
    assert whole(records, RECORDS[:count])
    assert damage == ([] if length in {0, *ENDS} else [CorruptRange([0, *ENDS][count], length)])


@settings(max_examples=300)
@given(at=st.integers(0, len(DATA) - 1), flipped=st.integers(1, 255))
def test_a_byte_that_flips_costs_its_own_record_and_no_other(at: int, flipped: int) -> None:
    harmed = bytearray(DATA)
    harmed[at] ^= flipped

    records, damage = read(bytes(harmed))

    hit = sum(end <= at for end in ENDS)
    assert whole(records, RECORDS[:hit] + RECORDS[hit + 1 :])
    assert damage == [CorruptRange([0, *ENDS][hit], ENDS[hit])]


@given(
    edits=st.lists(
        st.tuples(st.integers(0, len(DATA)), st.integers(0, 200), st.binary(max_size=200)), min_size=1, max_size=6
    )
)
def test_after_any_change_of_the_file_only_whole_records_are_read(edits: list[tuple[int, int, bytes]]) -> None:
    harmed = bytearray(DATA)
    for at, length, put in edits:
        harmed[at : at + length] = put

    records, _ = read(bytes(harmed))

    written = [contents(record) for record in RECORDS]
    assert all(contents(record) in written for record in records)


@given(garbage=st.binary(max_size=4096))
def test_garbage_holds_no_record(garbage: bytes) -> None:
    assert read(garbage)[0] == []
    assert whole(read(garbage.ljust(4096, b"\0") + ENTRIES[0])[0], RECORDS[:1])
