from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidConfig
from penstock.schemas.config import MAX_CHARACTERS, Config, check_finite, load_config, parse_config, parse_yaml


class Marker(Config, frozen=True):
    marker: str
    reward: float
    counted: Literal["once", "each"] = "once"

    def __post_init__(self) -> None:
        check_finite(reward=self.reward)


class Reward(Config, frozen=True):
    format_markers: tuple[Marker, ...] = ()
    clip: tuple[float, float] | None = None
    workers: Annotated[int, msgspec.Meta(ge=1)] = 1
    strict: bool = False
    extra: Marker | None = None
    weights: dict[str, float] = msgspec.field(default_factory=dict)


def refusal(values: Any) -> str:
    with pytest.raises(InvalidConfig) as refused:
        parse_config(Reward, values, root="reward")
    return str(refused.value)


def yaml_refusal(text: str) -> str:
    with pytest.raises(InvalidConfig) as refused:
        parse_yaml(Reward, text, root="reward")
    return str(refused.value)


def test_a_wrong_type_is_told_with_the_path_of_the_value() -> None:
    good, bad = {"marker": "a", "reward": 1}, {"marker": "b", "reward": "0.1"}

    assert refusal({"format_markers": [good, bad]}) == "reward.format_markers[1].reward: expected float, got str"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"format_marker": []}, "reward: expected only the fields format_markers, clip, workers, strict, extra, "),
        (
            {"format_markers": [{"marker": "a", "reward": 1, "Reward": 2}]},
            "reward.format_markers[0]: expected only the fields marker, reward, counted, got 'Reward'",
        ),
        ({"format_markers": [{"marker": "a"}]}, "reward.format_markers[0].reward: expected a value, got none"),
        (
            {"format_markers": [{"marker": "a", "reward": 1, "counted": "twice"}]},
            "reward.format_markers[0].counted: expected one of 'each', 'once', got 'twice'",
        ),
        ({"extra": {"marker": "a", "reward": 1, "counted": 1}}, "reward.extra.counted: expected str, got int"),
        ({"extra": {"marker": "a", "reward": 1, "x": 1}}, "reward.extra: expected only the fields marker, reward, "),
        ({"workers": 0}, "reward.workers: expected int >= 1, got 0"),
        ({"workers": True}, "reward.workers: expected int, got bool"),
        ({"workers": 1.0}, "reward.workers: expected int, got float"),
        ({"strict": 1}, "reward.strict: expected bool, got int"),
        ({"clip": [0]}, "reward.clip: expected list of length 2, got 1"),
        ({"clip": "0, 1"}, "reward.clip: expected list or none, got str"),
        ({"clip": [0, "1"]}, "reward.clip[1]: expected float, got str"),
        ({"weights": {"a": "b"}}, "reward.weights[...]: expected float, got str"),
        ({"extra": {"marker": "a", "reward": float("nan")}}, "reward.extra.reward: expected a finite number, got nan"),
        ({1: 2}, "reward: expected str for every key, got {1: 2}"),
        ([1], "reward: expected mapping, got list"),
        ({"extra": print}, "reward.extra: expected mapping or none, got builtin_function_or_method"),
    ],
)
def test_every_mistake_is_told_with_path_expectation_and_value(values: Any, message: str) -> None:
    assert refusal(values).startswith(message)


def test_a_whole_number_serves_where_a_float_is_wanted() -> None:
    config = parse_config(Reward, {"clip": [0, 1]})

    assert config.clip == (0.0, 1.0)


def test_no_text_at_all_gives_the_defaults() -> None:
    assert parse_yaml(Reward, "") == parse_yaml(Reward, "# nothing yet\n") == Reward()


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        setattr(Reward(), "workers", 2)  # noqa: B010 (type checkers refuse the statement)


@pytest.mark.parametrize(
    ("scalar", "value"),
    [
        ("1e-3", 1e-3),
        ("-1.5E+2", -150.0),
        (".5", 0.5),
        ("7", 7.0),
        ("010", 10.0),
        ("+3", 3.0),
    ],
)
def test_numbers_are_those_of_yaml_1_2(scalar: str, value: float) -> None:
    assert parse_yaml(Marker, f"{{marker: a, reward: {scalar}}}").reward == value


@pytest.mark.parametrize("scalar", ["no", "on", "12:30", "2024-01-01", "0x10", "1_000", "<think>", "1.2.3", "<<", "="])
def test_what_is_not_a_yaml_1_2_number_or_boolean_is_text(scalar: str) -> None:
    assert parse_yaml(Marker, f"marker: {scalar}\nreward: 1").marker == scalar


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extra: !!python/object/apply:os.system ['true']", "expected plain data, got the tag"),
        ("extra: !mine {}", "expected plain data, got the tag !mine"),
        ("workers: !!int '3'", "expected plain data, got the tag tag:yaml.org,2002:int"),
        ("extra: !!binary aGk=", "expected plain data, got the tag"),
        ("clip: &both [1, 2]", "line 1, column 7: expected no anchors and aliases, write the value out"),
        ("clip: *both", "expected no anchors and aliases"),
        ("workers: 1\nworkers: 2", "line 2, column 1: expected each key once, got 'workers' again"),
        ("workers: 1\n---\nworkers: 2", "line 2, column 1"),
        ("workers: [", "line 1, column 11"),
        ("weights: {[1]: 2}", "line 1, column 11"),
        ("workers: \x00", "expected plain YAML, got"),
        ("workers: " + "9" * 5000, "expected plain YAML, got"),
        ("a" * (MAX_CHARACTERS + 1), "expected at most 65536 characters, got 65537"),
        ("clip: " + "[" * 40 + "]" * 40, "expected at most 32 levels"),
        ("clip: " + "[" * 30_000, "expected at most 32 levels"),
        ("just text", "reward: expected mapping, got str"),
    ],
)
def test_anything_but_bounded_plain_data_is_refused(text: str, message: str) -> None:
    assert message in yaml_refusal(text)


def test_a_bomb_of_aliases_is_refused_before_it_unfolds() -> None:
    bomb = "a: &a [1]\n" + "".join(
        f"{c}: &{c} [{', '.join('*' + p for _ in range(9))}]\n" for p, c in zip("abcdefgh", "bcdefghi", strict=True)
    )

    assert "expected no anchors" in yaml_refusal(bomb)


def test_a_file_is_named_in_the_message(tmp_path: Path) -> None:
    path = tmp_path / "reward.yaml"
    path.write_text("workers: none")

    with pytest.raises(InvalidConfig, match=r"reward.workers: expected int, got str \(in .*reward.yaml\)"):
        load_config(Reward, path, root="reward")


def test_a_file_is_read_as_the_text_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "reward.yaml"
    path.write_text("format_markers:\n  - {marker: '<think>', reward: 0.1}\n")

    assert load_config(Reward, path).format_markers == (Marker(marker="<think>", reward=0.1),)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "reward.yaml"
    path.write_bytes(b"\xff\xfe\x00")

    with pytest.raises(InvalidConfig, match="expected UTF-8 text"):
        load_config(Reward, path)


def test_a_huge_file_is_refused_without_reading_it_all(tmp_path: Path) -> None:
    path = tmp_path / "reward.yaml"
    with path.open("wb") as file:
        file.truncate(1 << 40)

    with pytest.raises(InvalidConfig, match="expected at most 65536 characters"):
        load_config(Reward, path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def refusal_of(parse: Callable[[], object]) -> str:
    try:
        parse()
    except InvalidConfig as error:
        return str(error)
    return ""


fewer = settings(max_examples=50)


@fewer
@given(st.dictionaries(st.sampled_from([*Reward.__struct_fields__, "other"]), JSON))
def test_whatever_comes_is_accepted_or_refused_with_a_path(values: dict[str, Any]) -> None:
    message = refusal_of(lambda: parse_config(Reward, values, root="reward"))

    assert not message or message.startswith("reward")


@fewer
@given(st.text())
def test_whatever_text_comes_is_accepted_or_refused(text: str) -> None:
    message = refusal_of(lambda: parse_yaml(Reward, text, root="reward"))

    assert not message or message.startswith("reward")
