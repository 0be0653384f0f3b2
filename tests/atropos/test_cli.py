"""The command line: what it refuses, in sentences. What it serves is in test_app.py."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from penstock import commands
from penstock.cli import main
from penstock.errors import InvalidConfig
from penstock.stages.integrations.atropos.server.access import Access, listen
from penstock.stages.integrations.atropos.server.door import Door

OF_EXTRAS = (
    "aiohttp",
    "httptools",
    "matplotlib",
    "safetensors",
    "starlette",
    "tokenizers",
    "torch",
    "uvicorn",
    "xxhash",
)
"""What a base install does not have."""


def told(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """What it exits with."""
    monkeypatch.setattr(sys, "argv", ["penstock", *arguments])
    monkeypatch.delenv("PENSTOCK_TOKEN", raising=False)
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_beyond_loopback_it_wants_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    sentence = str(told(monkeypatch, "gateway", "--host", "0.0.0.0"))  # noqa: S104 (refused)

    assert sentence.startswith("penstock: host: expected a loopback address or a token, got 0.0.0.0 and none")
    assert "PENSTOCK_TOKEN" in sentence


@pytest.mark.parametrize("token", ["", " ", " token", "token\n", "t\u00f6ken", "to\0ken"])
def test_a_token_that_lets_everybody_in_or_nobody_is_refused(token: str) -> None:
    with pytest.raises(InvalidConfig, match=r"Door\.token: expected printable ASCII"):
        Door(token=token)


def test_shared_memory_of_no_size_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"Door\.shm_bytes: expected a whole number of at least 1, got 0"):
        Door(shm_bytes=0)


def test_an_empty_token_is_none_that_was_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "got an empty one" in str(told(monkeypatch, "gateway", "--token", ""))


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with listen("127.0.0.1", 0, Access()) as taken:
        port = taken.getsockname()[1]

        sentence = str(told(monkeypatch, "gateway", "--port", str(port)))

    assert f"127.0.0.1:{port}: Address already in use; is another gateway running?" in sentence


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("port", "-1"),
        ("port", "65536"),
        ("capacity", "0"),
        ("capacity-bytes", "-3"),
        ("silence-s", "0"),
        ("silence-s", "-1"),
        ("silence-s", "nan"),
        ("request-bytes", "0"),
        ("inflated-bytes", "0"),
    ],
)
def test_numbers_that_make_no_sense_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    monkeypatch.setattr(commands, "stand", None)  # nothing is to be served
    assert told(monkeypatch, "gateway", f"--{option}", value) == 2
    assert f"--{option}" in capsys.readouterr().err


def without_extras(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in an interpreter that finds no package of an extra."""
    hidden = f"import sys; sys.modules.update(dict.fromkeys({OF_EXTRAS!r})); from penstock.cli import main; main()"
    return subprocess.run([sys.executable, "-c", hidden, *arguments], capture_output=True, text=True, check=False)


def test_the_help_needs_no_extra() -> None:
    ran = without_extras("--help")

    assert ran.returncode == 0, ran.stderr
    assert "gateway" in ran.stdout


def test_a_command_without_its_extra_says_what_to_install() -> None:
    ran = without_extras("gateway")

    assert ran.returncode == 1
    assert ran.stderr.startswith("penstock: penstock gateway needs starlette")
    assert "pip install 'penstock[gateway]'" in ran.stderr


def test_with_a_token_it_listens_anywhere() -> None:
    with listen("0.0.0.0", 0, Access("a token")) as listener:  # noqa: S104 (with a token)
        assert listener.getsockname()[1]


def test_the_name_at_which_it_listens_is_its_own() -> None:
    access = Access(host="Training")

    assert access.mistrusts({"host": "training:8000"}) is None
    assert "let --host be that name" in str(access.mistrusts({"host": "other:8000"}))


def test_a_gateway_that_listens_looks_for_garbage_seldom(capsys: pytest.CaptureFixture[str]) -> None:
    threshold = gc.get_threshold()
    try:
        commands._tell("http://127.0.0.1:8000")
        assert capsys.readouterr().out == "listening at http://127.0.0.1:8000\n"
        assert gc.get_threshold() == (commands.GARBAGE, *threshold[1:])
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        gc.set_threshold(*threshold)
