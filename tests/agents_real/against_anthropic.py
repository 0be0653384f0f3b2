"""The client of Anthropic as an agent: `make test-agents` runs this file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import pytest
from tests.agents_real.calculator import ADD, ANSWERS, SUMS, run
from tests.agents_real.losing import losing_transport

from penstock.agents import AgentClient
from penstock.chat import ChatFormat

anthropic: Any = import_module("anthropic")

TOOL = {"name": ADD["name"], "description": ADD["description"], "input_schema": ADD["parameters"]}
HI = [{"role": "user", "content": "Hi"}]


def client_of(client: AgentClient, **options: Any) -> Any:
    return anthropic.AsyncAnthropic(base_url=client.env["ANTHROPIC_BASE_URL"], api_key=client.api_key, **options)


@dataclass
class Messages:
    """Asks for three sums, and adds when it is told to; `plain` sends back dictionaries, as agents that save them."""

    stream: bool = False
    plain: bool = False

    async def drive(self, _: int, client: AgentClient) -> float:
        async with client_of(client) as api:
            return await self.converse(api)

    async def converse(self, api: Any) -> float:
        messages: list[Any] = []
        for asked, right in zip(SUMS, ANSWERS, strict=True):
            messages.append({"role": "user", "content": [{"type": "text", "text": asked}]})
            while (answer := await self._ask(api, messages)).stop_reason == "tool_use":
                results = [
                    {"type": "tool_result", "tool_use_id": block.id, "content": str(sum(block.input.values()))}
                    for block in answer.content
                    if block.type == "tool_use"
                ]
                messages.append({"role": "user", "content": results})
            if answer.content[-1].text != f"It is {right}.":
                return 0.0
        return 1.0

    async def _ask(self, api: Any, messages: list[Any]) -> Any:
        cached = {"cache_control": {"type": "ephemeral"}}
        fields = {
            "model": "policy",
            "max_tokens": 512,
            "system": [{"type": "text", "text": "Be brief.", **cached}],
            "tools": [TOOL | cached],
            "messages": messages,
            "metadata": {"user_id": "u"},
        }
        if self.stream:
            async with api.messages.stream(**fields) as stream:
                answer = await stream.get_final_message()
        else:
            counted = await api.messages.count_tokens(
                **{name: fields[name] for name in ("model", "system", "tools", "messages")}
            )
            answer = await api.messages.create(**fields)
            assert answer.usage.input_tokens == counted.input_tokens
        content = [block.model_dump() for block in answer.content] if self.plain else answer.content
        messages.append({"role": "assistant", "content": content})
        return answer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("plain", [False, True])
async def test_a_conversation_with_tools_is_one_sequence(*, stream: bool, plain: bool, chat: ChatFormat) -> None:
    ran = await run(partial(Messages, stream, plain), chat)

    ran.trains_once()
    assert ran.branched == {}


async def test_the_runner_of_tools_is_one_sequence(chat: ChatFormat) -> None:
    async def add(a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    class Runs:
        async def drive(self, _: int, client: AgentClient) -> float:
            async with client_of(client) as api:
                asked = [{"role": "user", "content": SUMS[0]}]
                runner = api.beta.messages.tool_runner(
                    max_tokens=512, messages=asked, model="policy", tools=[anthropic.beta_async_tool(add)]
                )
                answer = await runner.until_done()
            return float(answer.content[-1].text == f"It is {ANSWERS[0]}.")

    (await run(Runs, chat)).trains_once()


async def test_what_is_refused_is_an_error_of_the_client(chat: ChatFormat) -> None:
    class Errs:
        async def drive(self, _: int, client: AgentClient) -> float:
            async with client_of(client) as api:
                create = partial(api.messages.create, model="policy", max_tokens=32)
                with pytest.raises(anthropic.BadRequestError, match="context_length_exceeded"):
                    await create(messages=[{"role": "user", "content": "x" * 5000}])
                with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
                    await create(messages=HI, tools=[TOOL], tool_choice={"type": "any"})
                with pytest.raises(anthropic.BadRequestError, match="thinking"):
                    await create(messages=HI, thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=2048)
                url = client.env["ANTHROPIC_BASE_URL"].replace(client.api_key, "x")
                async with anthropic.AsyncAnthropic(base_url=url, api_key="x") as stranger:
                    with pytest.raises(anthropic.AuthenticationError):
                        await stranger.messages.create(model="policy", max_tokens=32, messages=HI)
                await create(messages=HI)
            return 1.0

    (await run(Errs, chat, max_length=1000)).trains_once()


async def test_a_rollout_that_has_ended_is_a_conflict(chat: ChatFormat) -> None:
    ended: list[AgentClient] = []

    class Lingers:
        async def drive(self, _: int, client: AgentClient) -> float:
            async with client_of(client) as api:
                await api.messages.create(model="policy", max_tokens=32, messages=HI)
            if ended:
                async with client_of(ended[0]) as api:
                    with pytest.raises(anthropic.ConflictError, match="rollout_ended"):
                        await api.messages.create(model="policy", max_tokens=32, messages=HI)
            ended.append(client)
            return 1.0

    ran = await run(Lingers, chat, group_size=1, groups=2)

    assert (ran.failures, len(ran.records)) == ({}, 2)


async def test_the_client_s_own_retry_samples_nothing_twice(chat: ChatFormat) -> None:
    lost: list[int] = []

    class Retries(Messages):
        async def drive(self, _: int, client: AgentClient) -> float:
            async with losing_transport(lost) as http, client_of(client, http_client=http) as api:
                return await self.converse(api)

    ran = await run(Retries, chat)

    ran.trains_once()
    assert lost
