"""A record is read from its span: the layout in it is used only if it fits the schema."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock import TrainBatch, TrajectoryGroup
from penstock._schemas.group import GROUP_SCHEMA
from penstock._schemas.layout import (
    CACHED_COLUMNS,
    CACHED_FORMS,
    CACHED_PLACES,
    MOST_CANDIDATES,
    MOST_EXPERTS,
    MOST_LAYERS,
    AxisSizes,
    BundleEntry,
    BundleHeader,
    ColumnLayout,
    Schema,
    Widths,
    aligned,
)
from penstock.errors import InvalidRecord
from penstock.records import Array
from penstock.testing import group

FORM = [
    ("offsets", "<i8", "F"),
    ("tokens", "<i4", "N"),
    ("loss_mask", "|b1", "N"),
    ("rewards", "<f4", "S"),
    ("policy_versions", "<i8", "S"),
    ("stop_reasons", "|u1", "S"),
    ("rollout_ids", "<i8", "S"),
]
"""The least that a group has."""


def contents(form: Any = FORM, kind: str = "group") -> BundleHeader:
    return BundleHeader(kind, msgspec.msgpack.encode(form), 0, (BundleEntry(5, 2, b""),))


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
        routed_experts=np.arange(40).reshape(5, 2, 4),
        reward_parts={"score: raw, before all else": [1, 2]},
    )


def laid_out(record: TrajectoryGroup) -> tuple[ColumnLayout, AxisSizes, Array]:
    """Return a record's columns as they are in a span."""
    columns = record.columns()
    form, lengths = GROUP_SCHEMA.measure(columns)
    whole = [c.tobytes().ljust(aligned(c.nbytes), b"\0") for c in columns.values()]
    return form, lengths, np.frombuffer(b"".join(whole), np.uint8)


@pytest.mark.parametrize("record", [group(), complete(), complete().select(np.array([False, True]))], ids=repr)
def test_columns_lie_one_behind_the_other_on_cache_lines(record: TrajectoryGroup) -> None:
    form, lengths, payload = laid_out(record)
    part = BundleEntry(lengths.tokens, lengths.sequences, b"")
    found = BundleHeader.of("group", form, lengths.widths, (part,))
    received = GROUP_SCHEMA.received(found)
    layout = received.layout(found.lengths())

    seen = received.view(layout.places, payload, found.widths)

    assert layout.nbytes == len(payload)
    assert {name: (c.dtype, c.shape, c.tobytes()) for name, c in seen.items()} == {
        name: (c.dtype, c.shape, c.tobytes()) for name, c in record.columns().items()
    }


def test_frames_of_another_size_than_their_columns_are_refused() -> None:
    form, lengths, payload = laid_out(complete())

    for frames in ([], [payload, payload], [payload[:-1]], [payload[:-64]]):
        with pytest.raises(InvalidRecord, match=rf"columns: expected frames of \({len(payload)},\) bytes for .*, got"):
            form.frames(lengths, [frame.data for frame in frames])


def test_frames_need_not_begin_on_a_whole_item() -> None:
    form, lengths, payload = laid_out(complete())

    seen = form.frames(lengths, [memoryview(b"\0" + payload.tobytes())[1:]])

    assert [c.tolist() for c in seen.values()] == [c.tolist() for c in complete().columns().values()]
    assert all(c.flags.aligned and not c.flags.writeable for c in seen.values())


@pytest.mark.parametrize(("tokens", "large"), [(10, []), (2**14 + 1, [2**16 + 4] * 2)])
def test_columns_share_frames_of_64_kib_at_most_and_larger_ones_have_their_own(tokens: int, large: list[int]) -> None:
    form, lengths = GROUP_SCHEMA.measure(group(completion_lengths=[tokens - 1], prompt_length=1).columns())

    frames = form.framing(lengths).frames

    assert [nbytes for nbytes in frames if nbytes > 2**16] == large  # token ids and log-probabilities, 4 bytes each
    assert len(frames) == len(large) + 1


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ([], "offsets: expected a column of int64, got none"),
        (FORM[:-1], "rollout_ids: expected a column of int64, got none"),
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
    for n in range(3 * CACHED_FORMS):
        GROUP_SCHEMA.received(contents([*FORM, (f"reward_parts.{n}", "<f4", "S")]))

    assert len(GROUP_SCHEMA._received) <= CACHED_FORMS


def test_a_peer_that_makes_up_parts_and_lengths_is_not_remembered_for_ever() -> None:
    def named(parts: int) -> ColumnLayout:
        return GROUP_SCHEMA.received(contents([*FORM, *[(f"reward_parts.{n}", "<f4", "S") for n in range(parts)]]))

    most = CACHED_COLUMNS - len(FORM)
    form = named(most)
    assert named(most) is form
    assert named(most + 1) is not named(most + 1)
    for tokens in range(CACHED_PLACES // CACHED_COLUMNS + 1):
        form.layout(AxisSizes(tokens, 0))
    assert len(form._layouts) * CACHED_COLUMNS <= CACHED_PLACES


def test_more_teacher_candidates_than_there_can_be_are_refused_also_where_there_are_no_tokens() -> None:
    taught = msgspec.msgpack.encode([*FORM, ("teacher_ids", "<i4", "NK")])
    part = (BundleEntry(0, 0, b""),)

    form = GROUP_SCHEMA.received(BundleHeader("group", taught, MOST_CANDIDATES, part))
    assert form.layout(AxisSizes(0, 0, Widths(MOST_CANDIDATES))).nbytes
    with pytest.raises(InvalidRecord, match=r"candidates: expected at most 1048576 a token in .*, got 1048577"):
        GROUP_SCHEMA.received(BundleHeader("group", taught, MOST_CANDIDATES + 1, part))
    with pytest.raises(InvalidRecord, match=r"candidates: expected at most 0 a token in .*, got 1"):
        GROUP_SCHEMA.received(contents()._replace(candidates=1))


def test_more_layers_or_experts_than_there_can_be_are_refused() -> None:
    routed = contents([*FORM, ("routed_experts", "<u2", "NLE")])

    form = GROUP_SCHEMA.received(routed._replace(layers=MOST_LAYERS, experts=MOST_EXPERTS))

    assert (
        form.layout(AxisSizes(0, 0, Widths(0, MOST_LAYERS, MOST_EXPERTS))).nbytes == form.layout(AxisSizes(0, 0)).nbytes
    )
    with pytest.raises(InvalidRecord, match=r"layers: expected at most 4096 a token in .*, got 4097"):
        GROUP_SCHEMA.received(routed._replace(layers=MOST_LAYERS + 1))
    with pytest.raises(InvalidRecord, match=r"experts: expected at most 65536 a token in .*, got 65537"):
        GROUP_SCHEMA.received(routed._replace(experts=MOST_EXPERTS + 1))
    with pytest.raises(InvalidRecord, match=r"experts: expected at most 0 a token in .*, got 1"):
        GROUP_SCHEMA.received(contents()._replace(experts=1))


def test_wider_supports_than_any_vocabulary_are_refused() -> None:
    kept = contents([*FORM, ("support_ids", "<i4", "NW")])

    GROUP_SCHEMA.received(kept._replace(support=MOST_CANDIDATES))
    with pytest.raises(InvalidRecord, match=r"support: expected at most 1048576 a token in .*, got 1048577"):
        GROUP_SCHEMA.received(kept._replace(support=MOST_CANDIDATES + 1))
    with pytest.raises(InvalidRecord, match=r"support: expected at most 0 a token in .*, got 1"):
        GROUP_SCHEMA.received(contents()._replace(support=1))


@pytest.mark.parametrize("repetition", [-1, 65_536, 2**40, -(2**63)])
def test_a_repetition_that_no_ledger_counts_is_refused_where_it_comes_in(repetition: int) -> None:
    record = complete()
    form, lengths = GROUP_SCHEMA.measure(record.columns())
    parts = (BundleEntry(lengths.tokens, lengths.sequences, b""),)

    form.check_numbers(GROUP_SCHEMA.contiguous(record.columns()), parts)
    forged = record.columns() | {"rollout_ids": np.array([repetition, 0])}
    with pytest.raises(InvalidRecord, match=f"rollout_ids: expected 0 to 65535, got .*{repetition}"):
        form.check_numbers(GROUP_SCHEMA.contiguous(forged), parts)


def test_a_record_without_sequences_is_refused_where_it_is_sent_and_where_it_comes_in() -> None:
    nothing = {name: column[:0] for name, column in complete().columns().items()} | {"offsets": np.zeros(1, np.int64)}
    form, _ = GROUP_SCHEMA.measure(complete().columns())

    for refuse in (GROUP_SCHEMA.measure, GROUP_SCHEMA.check):
        with pytest.raises(InvalidRecord, match="expected at least one sequence, got 0"):
            refuse(nothing)
    with pytest.raises(InvalidRecord, match="expected at least one sequence, got 0"):
        form.check_numbers(list(nothing.values()), (BundleEntry(0, 0, b""),))


@pytest.mark.parametrize("lengths", [AxisSizes(-1, 2), AxisSizes(5, -1), AxisSizes(5, 2, Widths(-3))])
def test_an_axis_of_negative_length_is_refused(lengths: AxisSizes) -> None:
    with pytest.raises(InvalidRecord, match="lengths: expected 0 or more"):
        GROUP_SCHEMA.received(contents()).layout(lengths)


@pytest.mark.parametrize("part", [(-1, 2, b""), (5, -1, b""), (5, 2), (5, 2, "")])
def test_a_part_of_negative_length_is_refused(part: Any) -> None:
    encoded = msgspec.msgpack.encode(("group", b"", 0, [(5, 2, b""), part]))

    with pytest.raises(InvalidRecord, match="contents: expected"):
        BundleHeader.decode(encoded)


@pytest.mark.parametrize("junk", [b"", b"\x00", b"\xc1" * 40, b"\x93\xa1a\x90", b"\x94\x01\x90\xc4\x00\xc0"])
def test_bytes_that_are_no_contents_are_refused(junk: bytes) -> None:
    with pytest.raises(InvalidRecord, match="contents: expected"):
        BundleHeader.decode(junk)


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
        GROUP_SCHEMA.contiguous(group_columns(**changed))


def test_columns_of_a_batch_are_held_to_its_own_rules() -> None:
    columns = TrainBatch.pack([group()]).columns()

    assert len(TrainBatch.schema.contiguous(columns)) == len(columns)
    with pytest.raises(InvalidRecord, match=r"rewards: expected shape \[S=3\], got"):
        TrainBatch.schema.contiguous(columns | {"cu_seqlens": np.zeros(4, np.int64)})
    with pytest.raises(InvalidRecord, match="offsets: expected one of the columns"):
        TrainBatch.schema.contiguous(columns | {"offsets": columns["cu_seqlens"]})


def test_plain_columns_are_contiguous_and_of_the_dtype_that_travels() -> None:
    odd = group_columns(
        tokens=np.arange(10, dtype=np.int32)[::2], rollout_ids=np.array([0, 1], np.longlong), loss_mask=None
    ) | {"loss_mask": np.ones(5, np.bool_)}

    contiguous = dict(zip(odd, GROUP_SCHEMA.contiguous(odd), strict=True))

    assert contiguous["tokens"].tolist() == [0, 2, 4, 6, 8]
    assert all(c.flags.c_contiguous and c.ndim == 1 for c in contiguous.values())
    assert contiguous["rollout_ids"].dtype.char == "l"


# -- records that are sent -------------------------------------------------------------------------------------------


def odd(column: Array) -> dict[str, Array]:
    """Return arrays with the values of `column`, and other properties."""
    items = len(column)
    spread = np.zeros(items, [("gap", np.uint8), ("item", column.dtype)])
    spread["item"] = column
    return {
        "on odd addresses": np.frombuffer(b"?" + column.tobytes(), column.dtype, offset=1),
        "a field of records": spread["item"],
        "every second item": np.repeat(column, 2)[::2],
        "backwards": column[::-1].copy()[::-1],
        "of a subclass": column.view(np.recarray),
        "of a dtype that only equals": column.view(np.dtype(column.dtype.str, metadata={"of": "something"})),
        "read-only": np.frombuffer(column.tobytes(), column.dtype),
    }


def usual(schema: Schema, record: TrajectoryGroup) -> None:
    """Measure records like `record`, so that `schema` has their layout cached."""
    schema._recent = None
    schema.laid_out(record)
    assert schema._recent is not None


@pytest.mark.parametrize("name", ["offsets", "tokens", "loss_mask", "rewards", "policy_versions", "behavior_logprobs"])
@pytest.mark.parametrize("how", odd(np.zeros(1, np.int64)))
@pytest.mark.parametrize("alike", [True, False], ids=["alike", "anew"])
def test_an_unusual_array_is_packed_with_its_values(name: str, how: str, alike: bool) -> None:  # noqa: FBT001 (a parameter)
    contiguous = group(completion_lengths=[700, 900])
    record = msgspec.structs.replace(contiguous, **{name: odd(getattr(contiguous, name))[how]})
    usual(GROUP_SCHEMA, contiguous if alike else contiguous.with_advantages([1.0, 2.0]))

    packed = TrainBatch.pack([record])

    expected = TrainBatch.pack([contiguous])
    assert {n: c.tolist() for n, c in packed.columns().items()} == {
        n: c.tolist() for n, c in expected.columns().items()
    }


WRONG: dict[str, Callable[[Any], Any]] = {
    "one more": lambda column: np.append(column, column[:1]),
    "one less": lambda column: column[1:],
    "one axis more": lambda column: column[:, None],
    "no axis": lambda column: column[0].reshape(()),
    "another dtype": lambda column: column.astype(np.float64),
    "a list": lambda column: column.tolist(),
    "none": lambda _: None,
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", [*(name for name, _, _ in FORM), "advantages"])
def test_a_column_that_breaks_its_rule_is_refused_after_any_other(name: str, wrong: str) -> None:
    contiguous = group().with_advantages([1.0, 2.0])
    usual(GROUP_SCHEMA, contiguous)
    broken = msgspec.structs.replace(contiguous, **{name: WRONG[wrong](getattr(contiguous, name))})

    if (name, wrong) == ("advantages", "none"):
        assert "advantages" not in GROUP_SCHEMA.laid_out(broken)[0].names
    else:
        with pytest.raises(InvalidRecord, match="expected"):
            GROUP_SCHEMA.laid_out(broken)


def test_columns_that_all_have_one_axis_more_are_refused_after_any_other() -> None:
    contiguous = group()
    usual(GROUP_SCHEMA, contiguous)
    folded = {name: column[:, None] for name, column in contiguous.columns().items()}

    for some in (
        ["tokens", "loss_mask", "behavior_logprobs"],
        [*{*folded} - {"tokens", "loss_mask", "offsets"}],
        folded,
    ):
        with pytest.raises(InvalidRecord, match="expected shape"):
            GROUP_SCHEMA.laid_out(msgspec.structs.replace(contiguous, **{name: folded[name] for name in some}))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"score": [0.0, 0.0]}, "score: expected a numpy array of float32, got list"),
        ({"score": None}, "score: expected a column of float32, got none"),
        ({"score": np.zeros(2)}, "score: expected dtype float32, got float64"),
        ({"score": np.zeros(2, ">f4")}, "score: expected dtype float32, got >f4"),
        ({"score": np.zeros((), np.float32)}, r"score: expected shape \[S=2\], got \[\]"),
        ({"score": np.zeros((2, 1), np.float32)}, r"score: expected shape \[S=2\], got \[2, 1\]"),
        ({"score": np.zeros(3, np.float32)}, r"score: expected shape \[S=2\], got \[3\]"),
    ],
)
def test_an_invalid_reward_part_is_refused_after_any_other_record(parts: Any, message: str) -> None:
    contiguous = group(reward_parts={"score": [1.0, 2.0]})
    usual(GROUP_SCHEMA, contiguous)

    with pytest.raises(InvalidRecord, match=message):
        GROUP_SCHEMA.laid_out(msgspec.structs.replace(contiguous, reward_parts=parts))


def test_parts_that_were_added_in_another_order_are_the_same_form() -> None:
    first = group(reward_parts={"a": [1.0, 2.0], "b": [3.0, 4.0]})
    second = msgspec.structs.replace(first, reward_parts=dict(reversed(first.reward_parts.items())))

    for one, other in ((first, second), (second, first)):
        usual(GROUP_SCHEMA, one)
        form, _, columns = GROUP_SCHEMA.laid_out(other)
        assert form is GROUP_SCHEMA.laid_out(one)[0]
        assert [column.tolist() for column in columns[-2:]] == [[1.0, 2.0], [3.0, 4.0]]

    assert {name: part.tolist() for name, part in TrainBatch.pack([first, second]).reward_parts.items()} == {
        "a": [1.0, 2.0] * 2,
        "b": [3.0, 4.0] * 2,
    }


def test_as_many_token_versions_as_sequences_are_read_as_versions_of_sequences() -> None:
    def by_token(*lengths: int) -> TrajectoryGroup:
        rows = [list(range(length)) for length in lengths]
        versions = np.arange(sum(lengths))
        return group().build(
            env="e",
            instance_id="1",
            sequences=rows,
            loss_mask=[[0] * len(row) for row in rows],
            rewards=np.zeros(len(rows)),
            policy_versions=versions,
        )

    usual(GROUP_SCHEMA, by_token(2, 3))

    form, lengths, _ = GROUP_SCHEMA.laid_out(by_token(1, 2, 0))
    assert not form.versions_by_token
    assert lengths == AxisSizes(3, 3)


@pytest.mark.parametrize(
    "changes",
    [
        {"rewards": np.array([1.0, 2.0])},
        {"rewards": [1.0, 2.0]},
        {"teacher_logprobs": "none"},
        {"reward_parts": {"score": [1.0, 2.0]}},
    ],
)
def test_types_are_checked_of_each_record_after_any_other(changes: dict[str, Any]) -> None:
    record = complete()
    GROUP_SCHEMA.check_types(record)

    with pytest.raises(InvalidRecord, match=next(iter(changes)).removesuffix("s")):
        GROUP_SCHEMA.check_types(msgspec.structs.replace(record, **changes))
    GROUP_SCHEMA.check_types(record)
