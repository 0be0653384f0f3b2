"""Configuration of an AtroposClient: a mapping, a file, two variables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.errors import InvalidConfig
from penstock.integrations.atropos import AtroposClient

NEEDED: dict[str, Any] = {"batch_size": 2, "max_token_len": 64, "num_steps": 3}


def test_a_client_is_made_of_a_mapping_or_a_file_and_the_environment_counts_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "atropos.yaml"
    path.write_text("api_url: http://a:1\nbatch_size: 2\nmax_token_len: 64\nnum_steps: 3\nrequest_timeout_s: 5\n")
    values = NEEDED | {"api_url": "http://a:1", "request_timeout_s": 5}

    assert AtroposClient.from_yaml(path) == AtroposClient.from_config(values)
    assert AtroposClient.from_yaml(path).request_timeout_s == 5

    monkeypatch.setenv("ATROPOS_API_URL", "http://b:2")
    monkeypatch.setenv("ATROPOS_TIMEOUT", "7.5")

    assert AtroposClient.from_yaml(path) == AtroposClient.from_config(values)
    assert (AtroposClient.from_yaml(path).api_url, AtroposClient.from_yaml(path).request_timeout_s) == (
        "http://b:2",
        7.5,
    )
    assert AtroposClient(api_url="http://c:3", **NEEDED).api_url == "http://c:3"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch_size": "2"}, r"^atropos: Expected `int`, got `str` - at `\$\.batch_size`"),
        ({"batch_size": 0}, r"batch_size: expected a whole number of at least 1, got 0"),
        ({"num_steps": 1, "starting_step": 2}, r"^atropos: num_steps: expected at least starting_step, 2, got 1"),
        ({"reconnect_timeout_s": -1}, r"reconnect_timeout_s: expected a finite number of 0 or more, got -1"),
        ({"lease_s": float("nan")}, r"lease_s: expected a finite number above 0, got nan"),
        ({"api_url": "localhost:8000"}, r"api_url: expected http://host:port without a path"),
        ({"retries": 3}, "Object contains unknown field `retries`"),
    ],
)
def test_an_invalid_value_is_named_by_its_path(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        AtroposClient.from_config(NEEDED | changed)


@pytest.mark.parametrize(
    ("name", "value"), [("ATROPOS_TIMEOUT", "soon"), ("ATROPOS_TIMEOUT", "0"), ("ATROPOS_API_URL", "x")]
)
def test_an_invalid_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)

    with pytest.raises(InvalidConfig, match=name):
        AtroposClient.from_config(NEEDED)
