"""Agents over the clients of others that talk with any policy, whatever it says: with a model that samples at random.

Each has a conversation of several turns with parameters of its own, and keeps what the client gave it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, TypeAlias

import anyio.to_thread
from tests.agents_real.calculator import ADD

from penstock.agents import AgentClient

anthropic: Any = import_module("anthropic")
agents: Any = import_module("agents")
langchain_openai: Any = import_module("langchain_openai")
litellm: Any = import_module("litellm")
openai: Any = import_module("openai")
smolagents: Any = import_module("smolagents")

TURNS = ("Hi", "Why?", "2+3?")

TOOL = {"type": "function", "function": ADD}

Talk: TypeAlias = Callable[[AgentClient], Awaitable[None]]


def api_of(client: AgentClient) -> Any:
    return openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key)


async def openai_chat(client: AgentClient, *, stream: bool = False) -> None:
    messages: list[Any] = [{"role": "system", "content": "Be brief."}]
    async with api_of(client) as api:
        for number, asked in enumerate(TURNS):
            messages.append({"role": "user", "content": asked})
            fields = {"model": "policy", "messages": messages, "temperature": 0.5 + number / 2}
            if stream:  # the client's own assembly refuses a turn that is cut
                parts = [part async for part in await api.chat.completions.create(**fields, stream=True)]
                said = "".join(part.choices[0].delta.content or "" for part in parts)
            else:
                answer = await api.chat.completions.create(**fields, n=1 + (number == 1), tools=[TOOL])
                said = answer.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": said})


async def openai_responses(client: AgentClient, *, stream: bool = False) -> None:
    items: list[Any] = []
    async with api_of(client) as api:
        for asked in TURNS:
            items.append({"role": "user", "content": asked})
            fields = {"model": "policy", "input": items, "store": False, "include": ["reasoning.encrypted_content"]}
            if stream:
                events = [event async for event in await api.responses.create(**fields, stream=True)]
                answer = events[-1].response  # that of a cut turn is no "completed" one
            else:
                answer = await api.responses.create(**fields)
            items += answer.output


async def anthropic_messages(client: AgentClient, *, stream: bool = False) -> None:
    messages: list[Any] = []
    url = client.env["ANTHROPIC_BASE_URL"]
    async with anthropic.AsyncAnthropic(base_url=url, api_key=client.api_key) as api:
        for asked in TURNS:
            messages.append({"role": "user", "content": asked})
            fields = {"model": "policy", "max_tokens": 16, "messages": messages, "extra_body": {"temperature": 0.8}}
            if stream:
                async with api.messages.stream(**fields) as events:
                    answer = await events.get_final_message()
            else:
                answer = await api.messages.create(**fields)
            messages.append({"role": "assistant", "content": answer.content})


async def with_litellm(client: AgentClient) -> None:
    messages: list[Any] = []
    for asked in TURNS:
        messages.append({"role": "user", "content": asked})
        own = {"api_base": client.base_url, "api_key": client.api_key}
        answer = await litellm.acompletion(model="openai/policy", messages=messages, temperature=0.7, **own)
        messages.append(answer.choices[0].message)


async def with_langchain(client: AgentClient) -> None:
    model = langchain_openai.ChatOpenAI(model="policy", base_url=client.base_url, api_key=client.api_key, temperature=1)
    messages: list[Any] = []
    for asked in TURNS:
        messages.append(("user", asked))
        messages.append(await model.ainvoke(messages))


async def with_agents_sdk(client: AgentClient) -> None:
    items: list[Any] = []
    async with api_of(client) as api:
        model = agents.OpenAIChatCompletionsModel(model="policy", openai_client=api)
        talker = agents.Agent(name="talker", instructions="Be brief.", model=model)
        for asked in TURNS:
            items.append({"role": "user", "content": asked})
            items = (await agents.Runner.run(talker, items)).to_input_list()


async def with_smolagents(client: AgentClient) -> None:
    model = smolagents.OpenAIModel("policy", api_base=client.base_url, api_key=client.api_key)
    messages: list[Any] = []
    for asked in TURNS:
        messages.append({"role": "user", "content": asked})
        answer = await anyio.to_thread.run_sync(model.generate, list(messages))
        messages.append({"role": "assistant", "content": answer.content or ""})


TALKS: Mapping[str, Talk] = {
    "openai chat": openai_chat,
    "openai chat, streamed": partial(openai_chat, stream=True),
    "openai responses": openai_responses,
    "openai responses, streamed": partial(openai_responses, stream=True),
    "anthropic": anthropic_messages,
    "anthropic, streamed": partial(anthropic_messages, stream=True),
    "litellm": with_litellm,
    "langchain": with_langchain,
    "openai-agents": with_agents_sdk,
    "smolagents": with_smolagents,
}


@dataclass
class Talks:
    """Has the talk of a task's number."""

    async def drive(self, task: int, client: AgentClient) -> float:
        await [*TALKS.values()][task % len(TALKS)](client)
        return float(client.repetition)
