from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock._schemas.config import Config, check_finite, load_config, parse_config
from penstock.errors import InvalidConfig


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


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "reward.yaml"


def test_a_mistake_is_reported_with_the_expected_and_actual_value_and_the_path() -> None:
    good, bad = {"marker": "a", "reward": 1}, {"marker": "b", "reward": "0.1"}

    assert refusal({"format_markers": [good, bad]}) == (
        "reward: Expected `float`, got `str` - at `$.format_markers[1].reward`"
    )
    assert refusal({"extra": {"marker": "a", "reward": float("nan")}}) == (
        "reward: reward: expected a finite number, got nan - at `$.extra`"
    )


@pytest.mark.parametrize("values", [{"format_marker": []}, {"workers": 0}, {"workers": "1"}, {"strict": 1}, [1]])
def test_unknown_keys_and_values_of_another_type_are_rejected(values: Any) -> None:
    assert refusal(values).startswith("reward: ")


@pytest.mark.parametrize(
    ("values", "end"),
    [
        ({"clib": [0, 1]}, "unknown field `clib`; did you mean 'clip'?"),
        ({"extra": {"marker": "a", "rewards": 1}}, "`rewards` - at `$.extra`; did you mean 'reward'?"),
        ({"format_markers": [{"marker": "a", "conted": "once"}]}, "`$.format_markers[0]`; did you mean 'counted'?"),
        ({"zzz": 1}, "unknown field `zzz`"),
    ],
    ids=str,
)
def test_an_unknown_key_is_reported_with_the_nearest_known_one(values: Any, end: str) -> None:
    assert refusal(values).endswith(end)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"format_markers": [{"marker": "a", "reward": 1, "counted": "onec"}]},
            "Expected one of once, each, got 'onec' - at `$.format_markers[0].counted`; did you mean 'once'?",
        ),
        (
            {"extra": {"marker": "a", "reward": 1, "counted": "zzz"}},
            "Expected one of once, each, got 'zzz' - at `$.extra.counted`",
        ),
        ({"workers": 0}, "Expected `int` >= 1, got 0 - at `$.workers`"),
    ],
    ids=str,
)
def test_a_value_out_of_bounds_is_reported_with_itself_and_a_name_with_the_known_ones(
    values: Any, message: str
) -> None:
    assert refusal(values) == f"reward: {message}"


def test_a_whole_number_serves_where_a_float_is_expected() -> None:
    config = parse_config(Reward, {"clip": [0, 1]})

    assert config.clip == (0.0, 1.0)


def test_an_empty_file_gives_the_defaults(path: Path) -> None:
    for text in ("", "# nothing yet\n"):
        path.write_text(text)
        assert load_config(Reward, path) == Reward()


@pytest.mark.parametrize(
    ("scalar", "value"), [("1e-3", 1e-3), ("-1.5E+2", -150.0), (".5", 0.5), ("7", 7.0), ("+3", 3.0), ("2.e4", 2e4)]
)
def test_numbers_may_have_an_exponent_without_a_point(path: Path, scalar: str, value: float) -> None:
    path.write_text(f"{{marker: a, reward: {scalar}}}")

    assert load_config(Marker, path).reward == value


@pytest.mark.parametrize("scalar", ["<think>", "1.2.3", "1e", "e5", "1e-3x", "1_e-3"])
def test_text_that_only_resembles_a_number_stays_text(path: Path, scalar: str) -> None:
    path.write_text(f"marker: {scalar}\nreward: 1")

    assert load_config(Marker, path).marker == scalar


@pytest.mark.parametrize(
    "text",
    [
        "extra: !!python/object/apply:os.system ['true']",
        "extra: !mine {}",
        "workers: 1\n---\nworkers: 2",
        "workers: [",
        "workers: \x00",
        "workers: " + "9" * 5000,
        "workers: !!int 3",
        "workers: !!binary x",
        "clip: " + "[" * 5_000,
    ],
)
def test_anything_but_plain_values_is_rejected(path: Path, text: str) -> None:
    path.write_text(text)

    with pytest.raises(InvalidConfig, match=r"^reward: expected YAML of plain values in UTF-8, got (?s:.*)reward.yaml"):
        load_config(Reward, path, root="reward")


def test_a_bomb_of_aliases_is_rejected_before_it_unfolds(path: Path) -> None:
    path.write_text(
        "a: &a [1]\n"
        + "".join(
            f"{c}: &{c} [{', '.join('*' + p for _ in range(9))}]\n" for p, c in zip("abcdefgh", "bcdefghi", strict=True)
        )
    )

    with pytest.raises(InvalidConfig, match="Object contains unknown field `a`"):
        load_config(Reward, path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"workers: none", r"^reward: .*, got `str` - at `\$.workers` \(in .*reward.yaml\)$"),
        (b"\xff\xfe\x00", "in UTF-8, got 'utf-8' codec"),
    ],
    ids=["another type", "no text"],
)
def test_a_file_that_does_not_fit_is_named_in_the_message(path: Path, content: bytes, message: str) -> None:
    path.write_bytes(content)

    with pytest.raises(InvalidConfig, match=message):
        load_config(Reward, path, root="reward")


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


# A list replaces that of the profile.
fewer = settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


@fewer
@given(st.dictionaries(st.sampled_from([*Reward.__struct_fields__, "other"]), JSON))
def test_any_value_is_accepted_or_rejected(values: dict[str, Any]) -> None:
    message = refusal_of(lambda: parse_config(Reward, values, root="reward"))

    assert not message or message.startswith("reward")


@fewer
@given(st.text())
def test_any_text_is_accepted_or_rejected(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")

    message = refusal_of(lambda: load_config(Reward, path, root="reward"))

    assert not message or message.startswith("reward")
