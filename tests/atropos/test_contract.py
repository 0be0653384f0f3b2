from __future__ import annotations

import json
from typing import Any

import pytest

from penstock._stages.integrations.atropos.contract import (
    BatchAnswer,
    EnvReference,
    EnvRegistration,
    ScoredData,
    TrainerRegistration,
    decode,
    decode_scored,
    scored_data,
)
from penstock.errors import InvalidRecord

NEEDED: dict[str, Any] = {"tokens": [[5, 6, 7], [5, 8]], "masks": [[-100, 6, 7], [-100, 8]], "scores": [1.0, 0.0]}
"""Two sequences, of 3 and 2 tokens, with what every group has."""


def sent(**changed: Any) -> bytes:
    return json.dumps(NEEDED | changed).encode()


@pytest.mark.parametrize(("given", "meant"), [("7", 7), (7.0, 7), ("7.0", 7), (" 7 ", 7), ("-7", -7), (True, 1)])
def test_text_and_booleans_that_mean_a_whole_number_are_accepted_as_one(given: object, meant: int) -> None:
    body = json.dumps({"env_id": given}).encode()

    assert decode(body, EnvReference) == EnvReference(env_id=meant)


@pytest.mark.parametrize("given", [1.5, "x", "", None, "1.5", "7.", "0x7", "٧", 1e20, [1], {}])
def test_other_values_are_refused_with_the_name_of_the_field(given: object) -> None:
    with pytest.raises(InvalidRecord, match=r"\$\.env_id"):
        decode(json.dumps({"env_id": given}).encode(), EnvReference)


def test_a_registration_is_coerced_and_its_unknown_fields_are_dropped() -> None:
    body = b'{"max_token_length": "2048", "desired_name": "gsm8k", "weight": "0.5", "group_size": 8.0, "colour": "red"}'

    assert decode(body, EnvRegistration) == EnvRegistration(
        max_token_length=2048, desired_name="gsm8k", weight=0.5, group_size=8
    )


@pytest.mark.parametrize(("given", "meant"), [(True, 1.0), ("1e-3", 0.001), (" 1.5 ", 1.5), (2, 2.0)])
def test_text_and_booleans_that_mean_a_number_are_accepted_as_one(given: object, meant: float) -> None:
    assert decode_scored(sent(scores=[given, 0]))[0].scores == [meant, 0.0]


@pytest.mark.parametrize("given", ["nan", "inf", "٧", "x", None, []])
def test_scores_that_mean_no_finite_number_are_refused(given: object) -> None:
    with pytest.raises(InvalidRecord, match=r"expected `float`, got `\w+` - at `\$\.scores\[0\]`"):
        decode_scored(sent(scores=[given, 0]))


@pytest.mark.parametrize("name", ["null", "7"])
def test_a_name_is_text(name: str) -> None:
    body = f'{{"max_token_length": 1, "desired_name": {name}, "weight": 1, "group_size": 1}}'.encode()

    with pytest.raises(InvalidRecord, match=r"expected `str`, got `(null|int)` - at `\$\.desired_name`"):
        decode(body, EnvRegistration)


def test_a_trainers_registration_has_every_field() -> None:
    with pytest.raises(InvalidRecord, match="missing required field `wandb_project`"):
        decode(b'{"wandb_group": "g"}', TrainerRegistration)


def test_an_answer_may_hold_a_lease_or_none() -> None:
    assert decode(b'{"batch": null}', BatchAnswer) == BatchAnswer(batch=None)
    assert decode(b'{"batch": [], "lease": 3}', BatchAnswer).lease == 3


def test_one_group_or_a_list_of_groups_is_decoded() -> None:
    (one,) = decode_scored(sent(env_id="3"))
    two = decode_scored(b"[%b, %b]" % (sent(), sent(scores=[2, "3"])))

    assert (one.tokens, one.masks, one.scores, one.env_id) == (*NEEDED.values(), 3)
    assert [group.scores for group in two] == [[1.0, 0.0], [2.0, 3.0]]


def test_every_field_is_in_the_json_for_a_trainer_and_an_empty_list_stays_one() -> None:
    exact, coerced, unknown = (
        json.loads(decode_scored(body)[0].json())
        for body in (sent(advantages=[]), sent(scores=["1", "0"]), sent(colour="red"))
    )

    absent = dict.fromkeys(ScoredData.optional)
    assert exact == NEEDED | absent | {"advantages": []}
    assert coerced == unknown == NEEDED | absent


@pytest.mark.parametrize(
    "accepted",
    [
        {"messages": [[{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}], "reward": 1.0}]]},
        {"messages": [[{"role": "user", "content": [{"type": "text", "text": "2+2"}]}], []]},
        {"advantages": [[1.0] * 4]},
        {"masks": [[1, 1, 1], [1, 1]]},
        {"scores": [1.0]},
        {"tokens": [], "masks": [], "scores": []},
        {"overrides": [{}]},
        {"images": ["base64", None]},
        {"generation_params": {"seed": 2**100}},
        {"distill_token_ids": [[[]] * 3, [[]] * 2]},
    ],
)
def test_groups_that_the_original_accepts_are_accepted_and_sent_on_as_they_came(accepted: dict[str, Any]) -> None:
    (group,) = decode_scored(sent(**accepted))

    assert json.loads(group.json()) == dict.fromkeys(ScoredData.optional) | NEEDED | accepted


FLOATS: dict[str, Any] = {
    "scores": [1, 0.5],
    "advantages": [[0.0, 1.0, 2.0], [0, 1.0]],
    "ref_logprobs": [[-1.0, -1.0, -1], [-1.0, -1.0]],
    "inference_logprobs": [[1, -0.5, -0.5], [1, -0.5]],
    "distill_logprobs": [[[], [-1.0], [-1.0, -2]], [[], []]],
}


@pytest.mark.parametrize("name", FLOATS)
def test_a_trainer_gets_1_0_where_1_was_sent_for_a_float(name: str) -> None:
    (group,) = decode_scored(sent(**{name: FLOATS[name]}, **IDS if name == "distill_logprobs" else {}))

    decoded = json.loads(group.json())[name]
    assert decoded == FLOATS[name] == getattr(group, name)
    assert {*map(type, flat(decoded))} == {float}


IDS = {"distill_token_ids": [[[], [7], [7, 8]], [[], []]]}


def flat(column: Any) -> list[Any]:
    return [each for part in column for each in flat(part)] if isinstance(column, list) else [column]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"messages": [[{"role": "user"}], []]},
            r"messages: expected a role and a content in each, got only \['role'\]",
        ),
        ({"tokens": [[5, 6.5, 7], [5, 8]]}, r"expected `int`, got `float` - at `\$\.tokens\[0\]\[1\]`"),
        ({"scores": ["nan", 0]}, r"expected `float`, got `str` - at `\$\.scores\[0\]`"),
        ({"messages": "hello"}, r"expected `array \| null`, got `str` - at `\$\.messages`"),
    ],
)
def test_values_of_another_type_are_refused_with_the_name_of_the_field(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRecord, match=message):
        decode_scored(sent(**changed))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_are_refused_with_the_name_of_the_field(number: float) -> None:
    body = sent(scores=[1.0, number], env_id=1)
    literal = json.dumps(number)

    with pytest.raises(InvalidRecord, match=f"scores: expected finite numbers, got {literal} at byte") as refused:
        decode_scored(body)

    at = int(str(refused.value).partition("at byte ")[2].partition(":")[0])
    assert body[at:].startswith(literal.encode())


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[1, 2", b"nothing", b'{"scores": [1e999]}', b"[" * 5000])
def test_a_body_that_is_not_json_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRecord, match=r"expected JSON, got|number out of range"):
        decode_scored(body)


def test_a_list_with_an_invalid_group_is_refused_as_a_whole() -> None:
    with pytest.raises(InvalidRecord, match=r"got `null` - at `\$\[1\]\.scores\[0\]`"):
        decode_scored(b"[%b, %b]" % (sent(), sent(scores=[None, 1])))


def test_the_columns_of_an_environments_group_are_not_copied() -> None:
    tokens = [[5, 6]]

    group = scored_data({"tokens": tokens, "masks": [[-100, 6]], "scores": [1], "colour": "red"})

    assert group.tokens is tokens
    assert group.messages is None
    with pytest.raises(InvalidRecord, match="expected tokens, masks and scores, got no masks and no scores"):
        scored_data({"tokens": tokens})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "generation_params",
            {"x": float("nan")},
            "generation_params.*: expected values that JSON can represent, got others: Out of",
        ),
        ("generation_params", ["x"], r"expected `object \| null`, got `array` - at `\$\.generation_params`"),
        ("overrides", [{"w": float("inf")}, {}], "overrides.*: expected values that JSON can represent"),
        ("overrides", [None, {}], r"expected `object`, got `null` - at `\$\.overrides\[0\]`"),
        ("group_overrides", {"stop": "\ud800"}, "expected JSON"),
        (
            "messages",
            [[{"role": "user", "content": "x", "reward": float("nan")}]],
            "messages.*: expected values that JSON can represent",
        ),
        ("env_id", "seven", r"at `\$\.env_id`"),
    ],
)
def test_a_group_that_is_refused_as_json_is_refused_as_a_dict(field: str, value: object, message: str) -> None:
    with pytest.raises(InvalidRecord):
        decode_scored(sent(**{field: value}))
    with pytest.raises(InvalidRecord, match=message):
        scored_data(NEEDED | {field: value})


def test_values_without_a_json_form_are_refused() -> None:
    with pytest.raises(
        InvalidRecord, match=r"images.*: expected values that JSON can represent, got others: Object of type set"
    ):
        scored_data(NEEDED | {"images": {1}})


def test_a_dict_is_decoded_as_its_json_would_be() -> None:
    held = NEEDED | {"generation_params": {1: ("a", 2)}, "env_id": "7"}

    (came,) = decode_scored(json.dumps(held).encode())
    assert (came.generation_params, came.env_id) == ({"1": ["a", 2]}, 7)
    assert scored_data(held) == came
