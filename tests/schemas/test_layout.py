"""A record is read from what lies in its span: its form is believed only if it fits the schema."""

from typing import Any

import msgspec
import numpy as np
import pytest

from penstock import TrainBatch, TrajectoryGroup
from penstock.errors import InvalidRecord
from penstock.schemas.columns import Array
from penstock.schemas.group import GROUP_SCHEMA
from penstock.schemas.layout import KNOWN_FORMS, Contents, Form, Lengths, Part, aligned
from penstock.testing import group

FORM = [
    ("offsets", "<i8", "F"),
    ("tokens", "<i4", "N"),
    ("loss_mask", "|b1", "N"),
    ("rewards", "<f4", "S"),
    ("policy_versions", "<i8", "S"),
    ("stop_reasons", "|u1", "S"),
    ("repetition_ids", "<i8", "S"),
]
"""The least that a group has."""


def contents(form: Any = FORM, kind: str = "group") -> Contents:
    return Contents(kind, msgspec.msgpack.encode(form), 0, (Part(5, 2, b""),))


def complete() -> TrajectoryGroup:
    return TrajectoryGroup.build(
        env="e",
        instance_id="1",
        sequences=[[1, 2, 3], [4, 5]],
        loss_mask=[[0, 1, 1], [0, 1]],
        rewards=[1, 2],
        policy_versions=[1, 1, 2, 2, 2],
        teacher_ids=np.arange(15).reshape(5, 3),
        teacher_logprobs=-np.arange(15.0).reshape(5, 3),
        reward_parts={"score: raw, before all else": [1, 2]},
    )


def laid_out(record: TrajectoryGroup) -> tuple[Form, Lengths, Array]:
    """A record's columns as they lie in a span."""
    columns = record.columns()
    form, lengths = GROUP_SCHEMA.measure(columns)
    whole = [c.tobytes().ljust(aligned(c.nbytes), b"\0") for c in columns.values()]
    return form, lengths, np.frombuffer(b"".join(whole), np.uint8)


@pytest.mark.parametrize("record", [group(), complete(), complete().select(np.array([False, False]))], ids=repr)
def test_columns_lie_one_behind_the_other_on_cache_lines(record: TrajectoryGroup) -> None:
    form, lengths, payload = laid_out(record)
    part = Part(lengths.tokens, lengths.sequences, b"")
    found = Contents("group", form.encoded, lengths.candidates, (part,))
    received = GROUP_SCHEMA.received(found)
    layout = received.layout(found.lengths())

    seen = received.view(layout.places, payload, found.candidates)

    assert layout.nbytes == len(payload)
    assert {name: (c.dtype, c.shape, c.tobytes()) for name, c in seen.items()} == {
        name: (c.dtype, c.shape, c.tobytes()) for name, c in record.columns().items()
    }


def test_frames_of_another_size_than_their_columns_are_refused() -> None:
    form, lengths, _ = laid_out(complete())
    frames = [c.reshape(-1).view(np.uint8).data for c in complete().columns().values()]

    with pytest.raises(InvalidRecord, match="columns: expected 10, got 9 frames"):
        form.frames(lengths, frames[:-1])
    with pytest.raises(InvalidRecord, match=r"tokens: expected 20 bytes for .*, got 16"):
        form.frames(lengths, [frames[0], frames[1][:16], *frames[2:]])


def test_frames_need_not_begin_on_a_whole_item() -> None:
    form, lengths, _ = laid_out(complete())
    columns = complete().columns()
    shifted = [memoryview(b"\0" + c.tobytes())[1:] for c in columns.values()]

    seen = form.frames(lengths, shifted)

    assert [c.tolist() for c in seen.values()] == [c.tolist() for c in columns.values()]
    assert all(c.flags.aligned and not c.flags.writeable for c in seen.values())


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ([], "offsets: expected a column of int64, got none"),
        (FORM[:-1], "repetition_ids: expected a column of int64, got none"),
        ([*FORM, ("tokens", "<i4", "N")], "expected every column once"),
        ([*FORM, ("logprobs", "<f4", "N")], "logprobs: expected one of the columns"),
        ([*FORM, ("advantages", "<f4", "S")], "advantages: expected <f4 over N, got <f4 over S"),
        ([*FORM, ("advantages", "<f8", "N")], "advantages: expected <f4 over N, got <f8 over N"),
        ([*FORM, ("advantages", "|O", "N")], "advantages: expected <f4 over N, got |O over N"),
        ([*FORM, ("reward_parts.x", "<f4", "N")], "reward_parts.x: expected <f4 over S"),
        ([*FORM[:4], ("policy_versions", "<i8", "F"), *FORM[5:]], "policy_versions: expected <i8 over S or N"),
        ([("tokens", 4, "N")], "form: expected"),
        ({"tokens": "<i4"}, "form: expected"),
    ],
)
def test_a_form_that_breaks_the_schema_is_refused(form: Any, message: str) -> None:
    with pytest.raises(InvalidRecord, match=message.replace("|", r"\|")):
        GROUP_SCHEMA.received(contents(form))


def test_a_record_of_another_kind_is_refused() -> None:
    with pytest.raises(InvalidRecord, match="expected a group, got a batch"):
        GROUP_SCHEMA.received(contents(kind="batch"))


def test_a_peer_that_makes_up_forms_is_not_remembered_for_ever() -> None:
    for n in range(3 * KNOWN_FORMS):
        GROUP_SCHEMA.received(contents([*FORM, (f"reward_parts.{n}", "<f4", "S")]))

    assert len(GROUP_SCHEMA._received) <= KNOWN_FORMS


@pytest.mark.parametrize("lengths", [Lengths(-1, 2, 0), Lengths(5, -1, 0), Lengths(5, 2, -3)])
def test_an_axis_of_negative_length_is_refused(lengths: Lengths) -> None:
    with pytest.raises(InvalidRecord, match="lengths: expected 0 or more"):
        GROUP_SCHEMA.received(contents()).layout(lengths)


@pytest.mark.parametrize("part", [(-1, 2, b""), (5, -1, b""), (5, 2), (5, 2, "")])
def test_a_part_of_negative_length_is_refused(part: Any) -> None:
    encoded = msgspec.msgpack.encode(("group", b"", 0, [(5, 2, b""), part]))

    with pytest.raises(InvalidRecord, match="contents: expected"):
        Contents.decode(encoded)


@pytest.mark.parametrize("junk", [b"", b"\x00", b"\xc1" * 40, b"\x93\xa1a\x90", b"\x94\x01\x90\xc4\x00\xc0"])
def test_bytes_that_are_no_contents_are_refused(junk: bytes) -> None:
    with pytest.raises(InvalidRecord, match="contents: expected"):
        Contents.decode(junk)


def group_columns(**changed: Any) -> dict[str, Array]:
    return {name: c for name, c in (complete().columns() | changed).items() if c is not None}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokens": None}, "tokens: expected a column of int32, got none"),
        ({"offsets": None}, "offsets: expected a column of int64, got none"),
        ({"rewards": None}, "rewards: expected a column of float32, got none"),
        ({"stop_reasons": None}, "stop_reasons: expected a column of uint8, got none"),
        ({"tokens": np.zeros(5, np.int64)}, "tokens: expected dtype int32, got int64"),
        ({"tokens": np.zeros(5, ">i4")}, "tokens: expected dtype int32, got >i4"),
        ({"tokens": np.zeros((5, 1), np.int32)}, r"tokens: expected shape \[N=\?\], got \[5, 1\]"),
        ({"tokens": [1] * 5}, "tokens: expected a numpy array of int32, got list"),
        ({"tokens": np.zeros(6, np.int32)}, r"loss_mask: expected shape \[N=6\], got \[5\]"),
        ({"offsets": np.zeros(2, np.int64)}, r"rewards: expected shape \[S=1\], got \[2\]"),
        ({"offsets": np.zeros(0, np.int64)}, "offsets: expected at least the entry 0, got none"),
        ({"offsets": np.zeros((), np.int64)}, r"offsets: expected shape \[F=\?\], got \[\]"),
        ({"offsets": np.zeros((3, 1), np.int64)}, r"offsets: expected shape \[F=\?\], got \[3, 1\]"),
        ({"rewards": np.zeros((2, 1), np.float32)}, r"rewards: expected shape \[S=2\], got \[2, 1\]"),
        ({"rewards": np.zeros((), np.float32)}, r"rewards: expected shape \[S=2\], got \[\]"),
        ({"policy_versions": np.zeros(3, np.int64)}, r"policy_versions: expected shape \[S=2\] or \[N=5\], got \[3\]"),
        ({"advantages": np.zeros(3, np.float32)}, r"advantages: expected shape \[N=5\], got \[3\]"),
        ({"teacher_ids": np.zeros((5, 2), np.int32)}, r"teacher_logprobs: expected shape \[N=5, K=2\], got \[5, 3\]"),
        ({"teacher_ids": np.zeros(5, np.int32)}, r"teacher_ids: expected shape \[N=5, K=\?\], got \[5\]"),
        ({"reward_parts.score": np.zeros(3, np.float32)}, r"score: expected shape \[S=2\], got \[3\]"),
        ({"reward_parts.score": np.zeros(2, np.float64)}, "score: expected dtype float32, got float64"),
        ({"reward_parts.score": [0.0, 0.0]}, "score: expected a numpy array of float32, got list"),
        ({"logprobs": np.zeros(5, np.float32)}, "logprobs: expected one of the columns"),
    ],
)
def test_columns_that_make_no_record_are_refused_in_words(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRecord, match=message):
        GROUP_SCHEMA.plain(group_columns(**changed))


def test_columns_of_a_batch_are_held_to_its_own_rules() -> None:
    columns = TrainBatch.pack([group()]).columns()

    assert len(TrainBatch.schema.plain(columns)) == len(columns)
    with pytest.raises(InvalidRecord, match=r"rewards: expected shape \[S=3\], got"):
        TrainBatch.schema.plain(columns | {"cu_seqlens": np.zeros(4, np.int64)})
    with pytest.raises(InvalidRecord, match="offsets: expected one of the columns"):
        TrainBatch.schema.plain(columns | {"offsets": columns["cu_seqlens"]})


def test_plain_columns_are_contiguous_and_of_the_dtype_that_travels() -> None:
    odd = group_columns(
        tokens=np.arange(10, dtype=np.int32)[::2], repetition_ids=np.array([0, 1], np.longlong), loss_mask=None
    ) | {"loss_mask": np.ones(5, np.bool_)}

    plain = dict(zip(odd, GROUP_SCHEMA.plain(odd), strict=True))

    assert plain["tokens"].tolist() == [0, 2, 4, 6, 8]
    assert all(c.flags.c_contiguous and c.ndim == 1 for c in plain.values())
    assert plain["repetition_ids"].dtype.char == "l"
