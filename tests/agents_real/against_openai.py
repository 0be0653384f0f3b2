"""The clients of OpenAI, chat completions and Responses, as agents: `make test-agents` runs this file."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tests.agents_real.blocking import Blocks
from tests.agents_real.calculator import ADD, ANSWERS, SUMS, run
from tests.agents_real.losing import losing_transport

from penstock.agents import AgentClient
from penstock.chat import ChatFormat

openai: Any = import_module("openai")


def client_of(client: AgentClient, **options: Any) -> Any:
    return openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, **options)


@dataclass
class Chats:
    """Asks for three sums, one after another, and adds when it is told to."""

    stream: bool = False

    async def drive(self, _: int, client: AgentClient) -> float:
        async with client_of(client) as api:
            return await self.converse(api)

    async def converse(self, api: Any) -> float:
        messages: list[Any] = [{"role": "system", "content": "Be brief."}]
        for asked, right in zip(SUMS, ANSWERS, strict=True):
            messages.append({"role": "user", "content": asked})
            while (message := await self._ask(api, messages)).tool_calls:
                for call in message.tool_calls:
                    result = str(sum(json.loads(call.function.arguments).values()))
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            if message.content != f"It is {right}.":
                return 0.0
        return 1.0

    async def _ask(self, api: Any, messages: list[Any]) -> Any:
        fields = {"model": "policy", "messages": messages, "tools": [{"type": "function", "function": ADD}]}
        if self.stream:
            async with api.chat.completions.stream(**fields, stream_options={"include_usage": True}) as stream:
                answer = await stream.get_final_completion()
        else:
            answer = await api.chat.completions.create(**fields, parallel_tool_calls=True, tool_choice="auto")
        messages.append(answer.choices[0].message)
        return messages[-1]


@dataclass
class Responds:
    """The same by Responses, whose items it sends back."""

    stream: bool = False

    async def drive(self, _: int, client: AgentClient) -> float:
        items: list[Any] = []
        async with client_of(client) as api:
            for asked, right in zip(SUMS, ANSWERS, strict=True):
                items.append({"role": "user", "content": asked})
                while calls := [item for item in (await self._ask(api, items)).output if item.type == "function_call"]:
                    for call in calls:
                        result = str(sum(json.loads(call.arguments).values()))
                        items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
                if items[-1].content[0].text != f"It is {right}.":
                    return 0.0
        return 1.0

    async def _ask(self, api: Any, items: list[Any]) -> Any:
        fields = {
            "model": "policy",
            "input": items,
            "instructions": "Be brief.",
            "tools": [{"type": "function", **ADD, "strict": False}],
            "store": False,
            "include": ["reasoning.encrypted_content"],
        }
        if self.stream:
            async with api.responses.stream(**fields) as stream:
                answer = await stream.get_final_response()
        else:
            answer = await api.responses.create(**fields)
        items += answer.output
        return answer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("agent", [Chats, Responds])
async def test_a_conversation_with_tools_is_one_sequence(agent: Any, *, stream: bool, chat: ChatFormat) -> None:
    ran = await run(partial(agent, stream=stream), chat)

    ran.trains_once()
    assert ran.branched == {}


async def test_an_agent_that_blocks_is_one_sequence(chat: ChatFormat) -> None:
    (await run(Blocks, chat)).trains_once()


async def test_a_command_is_one_sequence(chat: ChatFormat) -> None:
    class Runs:
        async def drive(self, _: int, client: AgentClient) -> float:
            ran = await client.run([sys.executable, Path(__file__).parent / "blocking.py"])
            return float(ran.output.strip())

    (await run(Runs, chat)).trains_once()


async def test_text_completions_continue_their_text(chat: ChatFormat) -> None:
    class Continues:
        async def drive(self, _: int, client: AgentClient) -> float:
            async with client_of(client) as api:
                first = await api.completions.create(model="policy", prompt="a", logprobs=0, max_tokens=16)
                await api.completions.create(model="policy", prompt=f"a{first.choices[0].text}<|im_end|>")
                said = ""
                async for part in await api.completions.create(model="policy", prompt="b", stream=True):
                    said += part.choices[0].text
            return float(said.endswith("Hello."))

    (await run(Continues, chat)).trains_once(sequences=2)


async def test_there_is_one_model(chat: ChatFormat) -> None:
    class Lists:
        async def drive(self, _: int, client: AgentClient) -> float:
            async with client_of(client) as api:
                (model,) = [model async for model in api.models.list()]
                await api.chat.completions.create(model=model.id, messages=[{"role": "user", "content": "Hi"}])
            return 1.0

    (await run(Lists, chat)).trains_once()


# -- errors ------------------------------------------------------------------------------------------------------------


async def test_what_is_refused_is_an_error_of_the_client(chat: ChatFormat) -> None:
    class Errs:
        async def drive(self, _: int, client: AgentClient) -> float:
            async with client_of(client) as api:
                create = partial(api.chat.completions.create, model="policy")
                hi = [{"role": "user", "content": "Hi"}]
                with pytest.raises(openai.BadRequestError) as long:
                    await create(messages=[{"role": "user", "content": "x" * 5000}])
                assert long.value.code == "context_length_exceeded"
                with pytest.raises(openai.BadRequestError) as refused:
                    await create(messages=hi, response_format={"type": "json_object"})
                assert refused.value.param == "response_format"
                image = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
                with pytest.raises(openai.BadRequestError) as refused:
                    await create(messages=[{"role": "user", "content": [image]}])
                assert refused.value.param == "messages"
                with pytest.raises(openai.BadRequestError) as refused:
                    await api.responses.create(model="policy", input="Hi", previous_response_id="call-0")
                assert refused.value.param == "previous_response_id"
                async with openai.AsyncOpenAI(base_url=client.base_url.replace(client.api_key, "x"), api_key="x") as no:
                    with pytest.raises(openai.AuthenticationError):
                        await no.chat.completions.create(model="policy", messages=hi)
                with pytest.raises(openai.NotFoundError):
                    await api.embeddings.create(model="policy", input="Hi")
                await create(messages=hi)
            return 1.0

    ran = await run(Errs, chat, max_length=1000)

    ran.trains_once()


async def test_a_rollout_that_has_ended_is_a_conflict_that_is_not_repeated(chat: ChatFormat) -> None:
    ended: list[AgentClient] = []

    class Lingers:
        async def drive(self, _: int, client: AgentClient) -> float:
            hi = [{"role": "user", "content": "Hi"}]
            async with client_of(client) as api:
                await api.chat.completions.create(model="policy", messages=hi)
            if ended:
                async with client_of(ended[0]) as api:
                    with pytest.raises(openai.ConflictError) as refused:
                        await api.chat.completions.create(model="policy", messages=hi)
                assert refused.value.code == "rollout_ended"
            ended.append(client)
            return 1.0

    ran = await run(Lingers, chat, group_size=1, groups=2)

    assert (ran.failures, len(ran.records)) == ({}, 2)


async def test_the_client_s_own_retry_samples_nothing_twice(chat: ChatFormat) -> None:
    lost: list[int] = []

    class Retries(Chats):
        async def drive(self, _: int, client: AgentClient) -> float:
            async with losing_transport(lost) as http, client_of(client, http_client=http) as api:
                return await self.converse(api)

    ran = await run(Retries, chat)

    ran.trains_once()
    assert lost
