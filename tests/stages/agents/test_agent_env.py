"""An agent is a function of a row, or a program that reads it; the rows are those of a data set."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.stages.agents.agent_functions import answers, blocks
from tests.stages.agents.says import Says
from tests.stages.agents.served import chat_format

from penstock import RewardBridge, SourceEnv, TrajectoryGroup
from penstock.agents import AgentClient, AgentCommand, AgentEnv, MCPTools, OpenEnvEnvironment, VerifiersEnvironment
from penstock.chat import ChatFormat
from penstock.data import PromptDataset
from penstock.errors import InvalidConfig, MissingExtra
from penstock.rewards import RewardFunction, RewardInput
from penstock.testing import Driven, drive, drive_source

ROWS: list[dict[str, Any]] = [
    {"question": "2+2?", "answer": "4", "ids": [1, 2], "worth": 0.5},
    {"question": "2+3?", "answer": "5", "ids": [3], "worth": 2},
]


@pytest.fixture
def chat(tmp_path: Path) -> ChatFormat:
    return chat_format(tmp_path)


def rows() -> PromptDataset:
    return PromptDataset(ROWS, prompt="question", shuffle=False)


async def driven(env: AgentEnv, format_: ChatFormat, **fields: Any) -> Driven[TrajectoryGroup]:
    fields = {"group_size": 1, "groups": 2, "concurrency": 1, **fields}
    return await drive_source(SourceEnv(env, Says(format_), format_.tokenizer, chat=format_, **fields))


# -- functions ---------------------------------------------------------------------------------------------------------


async def test_an_agent_is_given_the_row_of_its_prompt(chat: ChatFormat) -> None:
    groups = await driven(AgentEnv(answers, rows()), chat)

    assert [group.rewards.tolist() for group in groups] == [[0.5], [2.0]]
    assert [group.tokens[: len(row["ids"])].tolist() for group, row in zip(groups, ROWS, strict=True)] == [[1, 2], [3]]


async def test_the_row_is_a_fact_about_the_group_as_that_of_a_prompt(chat: ChatFormat) -> None:
    first, _ = await driven(AgentEnv(answers, rows()), chat)

    assert first.meta["row"] == ROWS[0]
    assert (first.meta["prompt"], first.meta["data_source"]) == ("2+2?", "rows")


async def test_an_agent_that_blocks_is_given_its_row_in_a_process(chat: ChatFormat) -> None:
    groups = await driven(AgentEnv(blocks, rows()), chat)

    assert [group.rewards.tolist() for group in groups] == [[1.0], [0.0]]


def right(judged: RewardInput) -> float:
    return float(judged.text == judged.meta["row"]["answer"])


async def test_a_later_stage_rewards_an_agent_that_returns_nothing(chat: ChatFormat) -> None:
    async def asks(row: dict[str, Any], client: AgentClient) -> None:
        await client.generate(row["ids"])

    sampled = await driven(AgentEnv(asks, rows(), scored=False), chat)
    rewarded = await drive(RewardBridge(functions=[RewardFunction(right)]), sampled, tokenizer=chat.tokenizer)

    assert [group.rewards.tolist() for group in rewarded] == [[1.0], [0.0]]


async def test_an_agent_without_a_reward_fails_where_no_later_stage_gives_one(chat: ChatFormat) -> None:
    async def asks(row: dict[str, Any], client: AgentClient) -> None:
        await client.generate(row["ids"])

    ran = await driven(AgentEnv(asks, rows()), chat)

    assert "expected a reward" in str(ran.ledger.balance().reasons["failed"])


@pytest.mark.parametrize(("bound", "calls"), [({"max_calls": 2}, 2), ({"max_tokens": 3}, 2)])
async def test_the_calls_and_tokens_of_a_rollout_are_bounded(
    bound: dict[str, Any], calls: int, chat: ChatFormat
) -> None:
    """The policy says two tokens a call; the last call may sample what is left."""

    async def goes_on(row: dict[str, Any], client: AgentClient) -> float:
        for _ in range(9):
            await client.generate(row["ids"])
        return 1.0

    ran = await driven(AgentEnv(goes_on, rows(), **bound), chat, groups=1)

    ((reason, _),) = ran.ledger.balance().reasons["failed"].items()
    assert "CallsUsedUp: expected a rollout of at most 3 sampled tokens" in reason or f"at most {calls} calls" in reason
    assert ran.metrics.emit(0)["rollout/dropped_tokens/failed"] == bound.get("max_tokens", 4)


# -- agents that are opened -------------------------------------------------------------------------------------------


async def test_an_agent_is_opened_once_for_all_rollouts_and_closed_after_them(chat: ChatFormat) -> None:
    happened: list[str] = []

    @asynccontextmanager
    async def opened() -> AsyncGenerator[Any]:
        async def solve(row: dict[str, Any], client: AgentClient) -> float:
            await client.generate(row["ids"])
            happened.append("rollout")
            return 1.0

        happened.append("opened")
        yield solve
        happened.append("closed")

    groups = await driven(AgentEnv(opened, rows()), chat, group_size=2, concurrency=4)

    assert [group.rewards.tolist() for group in groups] == [[1.0, 1.0], [1.0, 1.0]]
    assert happened == ["opened", *["rollout"] * 4, "closed"]


async def test_an_agent_that_cannot_be_opened_ends_the_run_with_its_error(chat: ChatFormat) -> None:
    @asynccontextmanager
    async def refused() -> AsyncGenerator[Any]:
        raise ConnectionRefusedError("the server of tools is not there")
        yield

    with pytest.raises(ConnectionRefusedError, match="the server of tools is not there"):
        await driven(AgentEnv(refused, rows()), chat)


# -- commands ----------------------------------------------------------------------------------------------------------

PROGRAM = """
import json, os, sys, tempfile, urllib.request

def post(path, body):
    url = os.environ["OPENAI_BASE_URL"] + path
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode())) as answer:
        return json.load(answer)

row = json.load(sys.stdin)
tempfile.mkdtemp()
said = post("/chat/completions", {"messages": [{"role": "user", "content": row["question"]}]})
post("/reward", {"value": float(said["choices"][0]["message"]["content"] == row["answer"])})
sys.exit(row["answer"] == "status")
"""


async def test_a_program_reads_its_row_and_posts_its_reward(chat: ChatFormat) -> None:
    groups = await driven(AgentEnv(AgentCommand([sys.executable, "-c", PROGRAM]), rows()), chat)

    assert [group.rewards.tolist() for group in groups] == [[1.0], [0.0]]


async def test_a_program_leaves_no_temporary_file(
    chat: ChatFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))

    await driven(AgentEnv(AgentCommand([sys.executable, "-c", PROGRAM]), rows()), chat, groups=1)

    assert not list(temporary.iterdir())


async def test_a_program_that_fails_fails_its_rollout(chat: ChatFormat) -> None:
    bad = PromptDataset([{"question": "?", "answer": "status"}], prompt="question")

    ran = await driven(AgentEnv(AgentCommand([sys.executable, "-c", PROGRAM]), bad), chat, groups=1)

    assert "exited with status 1" in str(ran.ledger.balance().reasons["failed"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: AgentCommand("agent.py"),
            "AgentCommand.command: expected a program and its arguments, got 'agent.py'",
        ),
        (lambda: AgentEnv(answers, ROWS), "AgentEnv.tasks: expected a PromptDataset or a Mixture"),  # type: ignore[arg-type]
        (lambda: AgentEnv(3, rows()), "AgentEnv.agent: expected a function of a row and a client, got 3"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_agent_is_refused(make: Any, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        make()


# -- tools of MCP ------------------------------------------------------------------------------------------------------


async def test_an_agent_has_a_turn_of_a_conversation_without_http(chat: ChatFormat) -> None:
    async def asks(row: dict[str, Any], client: AgentClient) -> float:
        said: list[Any] = [{"role": "user", "content": row["question"]}]
        for _ in range(2):
            said += [await client.chat(said, temperature=0.5), {"role": "user", "content": "again"}]
        with pytest.raises(InvalidConfig, match="chat: Invalid enum value"):
            await client.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
        return float(said[1] == {"role": "assistant", "content": "4"})

    group, _ = await driven(AgentEnv(asks, rows()), chat)

    assert (group.rewards.tolist(), group.completion_lengths().tolist()) == ([1.0], [4])
    assert {temperature for _, temperature in group.meta["temperatures"][0]} >= {0.5}


async def test_the_tools_of_mcp_need_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)

    with pytest.raises(MissingExtra, match=r"MCPTools needs mcp, which is not installed: .*\[mcp\]"):
        async with MCPTools(url="http://127.0.0.1:1/mcp"):
            pass


def test_tasksets_of_verifiers_need_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)

    with pytest.raises(
        MissingExtra, match=r"VerifiersEnvironment needs verifiers, which is not installed: .*\[verifiers\]"
    ):
        VerifiersEnvironment("gsm8k-v1")()


def test_environments_of_openenv_need_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "websockets", None)

    with pytest.raises(
        MissingExtra, match=r"OpenEnvEnvironment needs websockets, which is not installed: .*\[openenv\]"
    ):
        OpenEnvEnvironment("http://127.0.0.1:1", action="message", observation="text")()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"url": "127.0.0.1:8000"}, r"OpenEnvEnvironment\.url: expected http://… or https://…"),
        ({"action": ""}, r"OpenEnvEnvironment\.action: expected the name of a field or a function"),
        ({"observation": 3}, r"OpenEnvEnvironment\.observation: expected the name of a field or a function"),
    ],
)
def test_an_environment_of_openenv_has_an_address_and_names_its_fields(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        OpenEnvEnvironment(**{"url": "http://127.0.0.1:1", "action": "message", "observation": "text", **fields})


@pytest.mark.parametrize("server", [{}, {"command": ["a"], "url": "b"}, {"command": "a b"}])
def test_the_tools_of_mcp_are_of_one_server(server: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match=r"MCPTools\.command: expected either it or url"):
        MCPTools(**server)
