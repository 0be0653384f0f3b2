"""The examples of agents train, each by its configuration."""

from __future__ import annotations

import importlib
import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any, ClassVar

import anyio
import pytest

from penstock.chat import parse_turn
from penstock.runs import describe_run, load_run_config, train

FOLDER = Path(__file__).parent.parent.parent / "examples" / "agents"

SMALL = ["algorithm.steps=1", "algorithm.prompts=2", "algorithm.group_size=2", "evaluation=null"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the files of the examples, which is the current one."""
    shutil.copytree(FOLDER, folder := tmp_path / "agents", ignore=shutil.ignore_patterns("runs", "models", "*.jsonl"))
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    for name in ("prepare", "calculator", "debate", "shop", "shop_server"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in ("calculator", "debate"):
        monkeypatch.setattr(importlib.import_module(name), "WARM_UP_STEPS", 1)
    return folder


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("example", "turn", "name", "arguments"),
    [
        ("calculator", "t78", "times", {"a": 7, "b": 8}),
        ("shop", "sk7", "search", {"kind": "k7"}),
        ("shop", "lk7b", "look", {"kind": "k7", "offer": "b"}),
        ("shop", "bk7b5", "buy", {"kind": "k7", "offer": "b", "most": 5}),
    ],
)
def test_a_call_of_an_example_is_the_letter_of_a_tool_and_its_arguments(
    example: str, turn: str, name: str, arguments: dict[str, Any]
) -> None:
    tools = [{"type": "function", "function": {"name": name}}]
    calls: Any = importlib.import_module(example).calls

    (call,) = parse_turn(turn, calls, tools=tools).calls

    assert (call.name, call.arguments) == (name, arguments)
    assert not parse_turn(turn + "0", calls, tools=tools).calls


class Shop:
    """The tools of the shop without its server."""

    definitions: ClassVar[list[dict[str, Any]]] = []

    async def results(self, turn: dict[str, Any]) -> list[dict[str, Any]]:
        server: Any = importlib.import_module("shop_server")
        ((name, arguments),) = [
            (call["function"]["name"], call["function"]["arguments"]) for call in turn["tool_calls"]
        ]
        return [{"role": "tool", "tool_call_id": "1", "content": getattr(server, name)(**json.loads(arguments))}]


class Buyer:
    """A policy that searches, and buys the offer of a rank by price."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    async def chat(self, said: list[dict[str, Any]], **_: Any) -> dict[str, Any]:
        wish, listed = said[0]["content"], said[-1]["content"]
        if len(said) == 1:
            return self.calls("search", kind=wish[:2])
        offers = sorted((listed[place + 1], listed[place]) for place in (0, 2, 4))
        return self.calls("buy", kind=wish[:2], offer=offers[self.rank][1], most=9)

    def calls(self, name: str, **arguments: Any) -> dict[str, Any]:
        return {"tool_calls": [{"function": {"name": name, "arguments": json.dumps(arguments)}}]}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("rank", "reward"), [(0, 1.0), (2, 0.0)])
async def test_a_purchase_is_rewarded_if_it_is_what_was_wished_and_within_the_budget(rank: int, reward: float) -> None:
    shop: Any = importlib.import_module("shop")

    outcomes = [await shop.visit(row["question"], Buyer(rank), Shop()) for row in shop.rows()[:20]]

    assert {outcome.reward for outcome in outcomes} == {reward}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("example", ["calculator", "debate", "shop"])
def test_transcripts_of_the_warm_up_show_right_and_wrong_ways(example: str) -> None:
    prepare: Any = importlib.import_module("prepare")
    module: Any = importlib.import_module(example)

    rng = random.Random(0)  # noqa: S311 (no secret)
    shown = {tuple(module.transcript(row, rng)) for row in module.rows()}

    assert len(shown) > len(module.rows()) / 2
    assert {*"".join(said for transcript in shown for _, said in transcript)} <= {*prepare.CHARACTERS}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("example", "sequences"), [("calculator", 1), ("debate", 2)])
def test_the_model_and_the_rows_are_made_once_and_a_rollout_is_described(example: str, sequences: int) -> None:
    config = load_run_config(f"{example}.yaml")
    prepare: Any = importlib.import_module("prepare")

    prepare.prepare(config)
    made = {path: path.stat().st_mtime_ns for path in [Path(config.data.path), *Path(config.model.path).iterdir()]}
    prepare.prepare(config)

    assert made == {path: path.stat().st_mtime_ns for path in made}
    assert f"in {sequences} sequences" in describe_run(config)


@pytest.mark.long
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("example", ["calculator", "debate"])
def test_an_example_trains(example: str) -> None:
    assert anyio.run(train, load_run_config(f"{example}.yaml", SMALL)).steps == 1
