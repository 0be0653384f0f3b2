from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.errors import InvalidRecord
from penstock.stages.integrations.atropos.contract import (
    BatchAnswer,
    EnvReference,
    EnvRegistration,
    ScoredData,
    TrainerRegistration,
    decode_request,
    decode_scored,
    scored_data,
)

NEEDED: dict[str, Any] = {"tokens": [[5, 6, 7], [5, 8]], "masks": [[-100, 6, 7], [-100, 8]], "scores": [1.0, 0.0]}
"""Two sequences, of 3 and 2 tokens, with what every group has."""


def sent(**changed: Any) -> bytes:
    return json.dumps(NEEDED | changed).encode()


@pytest.mark.parametrize(
    ("given", "meant"), [("7", 7), (7.0, 7), ("7.0", 7), (" +7 ", 7), ("-7", -7), ("1_000", 1000), (True, 1)]
)
def test_what_means_a_whole_number_is_one(given: object, meant: int) -> None:
    body = json.dumps({"env_id": given}).encode()

    assert decode_request(body, EnvReference) == EnvReference(env_id=meant)


@pytest.mark.parametrize("given", [1.5, "x", "", None, "1.5", "7.", "1e3", "0x7", "٧", 1e20, [1], {}])
def test_what_means_none_is_refused_by_name(given: object) -> None:
    with pytest.raises(InvalidRecord, match=r"\$\.env_id"):
        decode_request(json.dumps({"env_id": given}).encode(), EnvReference)


def test_a_registration_may_be_lax_and_hold_what_nobody_knows() -> None:
    body = b'{"max_token_length": "2048", "desired_name": "gsm8k", "weight": "0.5", "group_size": 8.0, "colour": "red"}'

    assert decode_request(body, EnvRegistration) == EnvRegistration(
        max_token_length=2048, desired_name="gsm8k", weight=0.5, group_size=8
    )


@pytest.mark.parametrize(("given", "meant"), [(True, 1.0), ("1e-3", 0.001), (" 1.5 ", 1.5), (2, 2.0)])
def test_what_means_a_number_is_one(given: object, meant: float) -> None:
    assert decode_scored(sent(scores=[given, 0]))[0].scores == [meant, 0.0]


@pytest.mark.parametrize("given", ["nan", "inf", "٧", "x", None, []])
def test_what_means_none_that_is_finite_is_refused(given: object) -> None:
    with pytest.raises(InvalidRecord, match=r"expected `float`, got `\w+` - at `\$\.scores\[0\]`"):
        decode_scored(sent(scores=[given, 0]))


@pytest.mark.parametrize("name", ["null", "7"])
def test_a_name_is_text_and_nothing_else(name: str) -> None:
    body = f'{{"max_token_length": 1, "desired_name": {name}, "weight": 1, "group_size": 1}}'.encode()

    with pytest.raises(InvalidRecord, match=r"expected `str`, got `(null|int)` - at `\$\.desired_name`"):
        decode_request(body, EnvRegistration)


def test_a_trainer_says_everything() -> None:
    with pytest.raises(InvalidRecord, match="missing required field `wandb_project`"):
        decode_request(b'{"wandb_group": "g"}', TrainerRegistration)


def test_an_answer_may_hold_a_lease_or_none() -> None:
    assert decode_request(b'{"batch": null}', BatchAnswer) == BatchAnswer(batch=None)
    assert decode_request(b'{"batch": [], "lease": 3}', BatchAnswer).lease == 3


def test_one_group_or_a_list_of_groups_is_decoded() -> None:
    (one,) = decode_scored(sent(env_id="3"))
    two = decode_scored(b"[%b, %b]" % (sent(), sent(scores=[2, "3"])))

    assert (one.tokens, one.masks, one.scores, one.env_id) == (*NEEDED.values(), 3)
    assert [group.scores for group in two] == [[1.0, 0.0], [2.0, 3.0]]


DICTS = ("generation_params", "group_overrides")


@pytest.mark.parametrize("name", ScoredData.optional)
def test_null_says_that_a_field_is_absent_and_so_does_what_is_empty(name: str) -> None:
    empty: dict[str, Any] = {"env_id": None} | {key: {} for key in DICTS}

    for nothing in (None, empty.get(name, [])):
        (group,) = decode_scored(sent(**{name: nothing}))

        assert getattr(group, name) is None


def test_every_field_is_in_what_a_trainer_is_sent_whatever_came() -> None:
    plain, lax, unknown = (
        json.loads(decode_scored(body)[0].json())
        for body in (sent(advantages=[]), sent(scores=["1", "0"]), sent(colour="red"))
    )

    absent = dict.fromkeys(ScoredData.optional)
    assert plain == NEEDED | absent | {"advantages": []}  # as the original does, word for word
    assert lax == unknown == NEEDED | absent


def test_what_was_sent_whole_is_sent_on_as_the_same_bytes() -> None:
    body = sent(**dict.fromkeys(ScoredData.optional))

    assert decode_scored(body)[0].json() is body


FLOATS: dict[str, Any] = {
    "scores": [1, 0.5],
    "advantages": [[0.0, 1.0, 2.0], [0, 1.0]],
    "ref_logprobs": [[-1.0, -1.0, -1], [-1.0, -1.0]],
    "inference_logprobs": [[1, -0.5, -0.5], [1, -0.5]],
    "distill_logprobs": [[[], [-1.0], [-1.0, -2]], [[], []]],
}


@pytest.mark.parametrize("name", FLOATS)
def test_a_trainer_is_sent_no_whole_number_where_others_are_meant(name: str) -> None:
    (group,) = decode_scored(sent(**{name: FLOATS[name]}, **IDS if name == "distill_logprobs" else {}))

    told = json.loads(group.json())[name]
    assert told == FLOATS[name] == getattr(group, name)
    assert {*map(type, flat(told))} == {float}


IDS = {"distill_token_ids": [[[], [7], [7, 8]], [[], []]]}


def flat(column: Any) -> list[Any]:
    return [each for part in column for each in flat(part)] if isinstance(column, list) else [column]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"masks": [[-100, 6, 7]]}, "masks: expected 2 lists, one for each sequence of tokens, got 1"),
        ({"masks": [[-100, 6, 7], [8]]}, r"masks\[1\]: expected 2 entries, one for each of tokens\[1\], got 1"),
        ({"scores": [1.0]}, "scores: expected 2, one for each sequence of tokens, got 1"),
        ({"advantages": [[0.0] * 3, [0.0] * 3]}, r"advantages\[1\]: expected 2 entries"),
        ({"ref_logprobs": [[0.0] * 2, [0.0] * 2]}, r"ref_logprobs\[0\]: expected 3 entries"),
        ({"overrides": [{}]}, "overrides: expected 2, one for each sequence"),
        ({"distill_token_ids": [[[]] * 3, [[]] * 2]}, "distill_token_ids, distill_logprobs: expected both or neither"),
        (
            {"messages": [[{"role": "user"}], []]},
            r"messages: expected a role and a content in each, got only \['role'\]",
        ),
        ({"messages": [[{"role": 5, "content": "2"}], []]}, "messages: expected text as role, got 5"),
        ({"messages": [[{"role": "user", "content": 5}], []]}, "expected text or a list of parts as content, got 5"),
        ({"messages": [[{"role": "user", "content": None}], []]}, "list of parts as content, got None"),
        ({"messages": [[{"role": "user", "content": ["2"]}], []]}, r"list of parts as content, got \['2'\]"),
        ({"tokens": [], "masks": [], "scores": []}, "tokens: expected at least one sequence, got none"),
        ({"tokens": [[5, 6.5, 7], [5, 8]]}, r"expected `int`, got `float` - at `\$\.tokens\[0\]\[1\]`"),
        ({"scores": ["nan", 0]}, r"expected `float`, got `str` - at `\$\.scores\[0\]`"),
        ({"messages": "hello"}, r"expected `array \| null`, got `str` - at `\$\.messages`"),
    ],
)
def test_what_does_not_fit_together_is_refused_by_name(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRecord, match=told):
        decode_scored(sent(**changed))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_json_does_not_have_is_told_with_its_field(number: float) -> None:
    body = sent(scores=[1.0, number], env_id=1)
    literal = json.dumps(number)

    with pytest.raises(InvalidRecord, match=f"scores: expected finite numbers, got {literal} at byte") as refused:
        decode_scored(body)

    at = int(str(refused.value).partition("at byte ")[2].partition(":")[0])
    assert body[at:].startswith(literal.encode())


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[1, 2", b"nothing", b'{"scores": [1e999]}', b"[" * 5000])
def test_what_is_no_json_is_told(body: bytes) -> None:
    with pytest.raises(InvalidRecord, match="expected JSON, got"):
        decode_scored(body)


def test_a_list_is_taken_whole_or_not_at_all() -> None:
    with pytest.raises(InvalidRecord, match="group 1: scores: expected 2"):
        decode_scored(b"[%b, %b]" % (sent(), sent(scores=[1])))


def test_what_an_environment_holds_is_taken_as_it_is() -> None:
    tokens = [[5, 6]]

    group = scored_data({"tokens": tokens, "masks": [[-100, 6]], "scores": [1], "messages": [], "colour": "red"})

    assert group.tokens is tokens
    assert group.messages is None
    with pytest.raises(InvalidRecord, match="expected tokens, masks and scores, got no masks and no scores"):
        scored_data({"tokens": tokens})
    with pytest.raises(InvalidRecord, match="expected lists, with one list for each sequence, got others"):
        scored_data({"tokens": [5, 6], "masks": [-100, 6], "scores": [1.0, 0.0]})


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("generation_params", {"x": float("nan")}, "generation_params: expected what JSON can say, got other: Out of"),
        ("generation_params", ["x"], r"expected `object \| null`, got `array` - at `\$\.generation_params`"),
        ("overrides", [{"w": float("inf")}, {}], "overrides: expected what JSON can say"),
        ("overrides", [None, {}], r"expected `object`, got `null` - at `\$\.overrides\[0\]`"),
        ("group_overrides", {"stop": "\ud800"}, "expected JSON"),
        (
            "messages",
            [[{"role": "user", "content": "x", "reward": float("nan")}]],
            "messages: expected what JSON can say",
        ),
        ("env_id", "seven", r"at `\$\.env_id`"),
    ],
)
def test_what_is_refused_as_json_is_refused_as_an_environment_holds_it(field: str, value: object, told: str) -> None:
    with pytest.raises(InvalidRecord):
        decode_scored(sent(**{field: value}))
    with pytest.raises(InvalidRecord, match=told):
        scored_data(NEEDED | {field: value})


def test_what_json_has_no_word_for_is_refused() -> None:
    with pytest.raises(InvalidRecord, match="images: expected what JSON can say, got other: Object of type set"):
        scored_data(NEEDED | {"images": {1}})


def test_what_json_would_alter_is_altered_alike() -> None:
    held = NEEDED | {"generation_params": {1: ("a", 2)}, "env_id": "7"}

    (came,) = decode_scored(json.dumps(held).encode())
    assert (came.generation_params, came.env_id) == ({"1": ["a", 2]}, 7)
    assert scored_data(held) == came
