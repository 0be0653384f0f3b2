"""LiteLLM as the client of an agent: `make test-agents` runs this file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import pytest
from tests.agents_real.calculator import ADD, ANSWERS, SUMS, run

from penstock.agents import AgentClient
from penstock.chat import ChatFormat

litellm: Any = import_module("litellm")

HI = [{"role": "user", "content": "Hi"}]


def ask(client: AgentClient) -> Any:
    return partial(litellm.acompletion, model="openai/policy", api_base=client.base_url, api_key=client.api_key)


@dataclass
class Completes:
    """Asks for three sums, and adds when it is told to."""

    stream: bool = False
    plain: bool = False

    async def drive(self, _: int, client: AgentClient) -> float:
        messages: list[Any] = []
        for asked, right in zip(SUMS, ANSWERS, strict=True):
            messages.append({"role": "user", "content": asked})
            while (message := await self._ask(client, messages)).tool_calls:
                for call in message.tool_calls:
                    result = str(sum(json.loads(call.function.arguments).values()))
                    messages.append(
                        {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": result}
                    )
            if message.content != f"It is {right}.":
                return 0.0
        return 1.0

    async def _ask(self, client: AgentClient, messages: list[Any]) -> Any:
        fields = {"messages": messages, "tools": [{"type": "function", "function": ADD}], "temperature": 1.0}
        if self.stream:
            parts = [part async for part in await ask(client)(**fields, stream=True)]
            answer = litellm.stream_chunk_builder(parts, messages=messages)
        else:
            answer = await ask(client)(**fields, user="u", metadata={"a": "b"})
        message = answer.choices[0].message
        messages.append(message.model_dump() if self.plain else message)
        return message


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("plain", [False, True])
async def test_a_conversation_with_tools_is_one_sequence(*, stream: bool, plain: bool, chat: ChatFormat) -> None:
    ran = await run(partial(Completes, stream, plain), chat)

    ran.trains_once()
    assert ran.branched == {}


async def test_the_messages_of_anthropic_through_it_are_one_sequence(chat: ChatFormat) -> None:
    class Asks:
        async def drive(self, _: int, client: AgentClient) -> float:
            url, said = client.env["ANTHROPIC_BASE_URL"], list[Any](HI)
            for more in HI, None:
                answer = await litellm.acompletion(
                    model="anthropic/policy", api_base=url, api_key=client.api_key, messages=said, max_tokens=64
                )
                said.append(answer.choices[0].message)
                said += more or []
            return float(said[-1].content == "Hello.")

    (await run(Asks, chat)).trains_once()


async def test_responses_through_it_are_answered(chat: ChatFormat) -> None:
    class Asks:
        async def drive(self, _: int, client: AgentClient) -> float:
            answer = await litellm.aresponses(
                model="openai/policy", api_base=client.base_url, api_key=client.api_key, input="Hi", store=False
            )
            return float(answer.output[-1].content[0].text == "Hello.")

    (await run(Asks, chat)).trains_once()


async def test_what_is_refused_is_an_error_of_the_client(chat: ChatFormat) -> None:
    class Errs:
        async def drive(self, _: int, client: AgentClient) -> float:
            create = ask(client)
            with pytest.raises(litellm.ContextWindowExceededError):
                await create(messages=[{"role": "user", "content": "x" * 5000}])
            with pytest.raises(litellm.BadRequestError, match="response_format"):
                await create(messages=HI, response_format={"type": "json_object"})
            with pytest.raises(litellm.AuthenticationError):
                await create(messages=HI, api_base=client.base_url.replace(client.api_key, "x"), api_key="x")
            await create(messages=HI)
            return 1.0

    (await run(Errs, chat, max_length=1000)).trains_once()


async def test_a_rollout_that_has_ended_is_an_error_that_is_not_repeated(chat: ChatFormat) -> None:
    ended: list[AgentClient] = []

    class Lingers:
        async def drive(self, _: int, client: AgentClient) -> float:
            await ask(client)(messages=HI)
            if ended:
                with pytest.raises(litellm.APIError, match="the rollout has ended") as refused:
                    await ask(ended[0])(messages=HI)
                assert refused.value.status_code == 409
            ended.append(client)
            return 1.0

    ran = await run(Lingers, chat, group_size=1, groups=2)

    assert (ran.failures, len(ran.records)) == ({}, 2)
