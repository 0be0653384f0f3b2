"""Graphs of LangGraph with the models of langchain-openai: `make test-agents` runs this file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import pytest
from tests.agents_real.calculator import ANSWERS, SUMS, run

from penstock.agents import AgentClient
from penstock.chat import ChatFormat

prebuilt: Any = import_module("langgraph.prebuilt")
langchain_openai: Any = import_module("langchain_openai")
openai: Any = import_module("openai")


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def model_of(client: AgentClient, **options: Any) -> Any:
    return langchain_openai.ChatOpenAI(model="policy", base_url=client.base_url, api_key=client.api_key, **options)


@dataclass
class Reacts:
    """Asks the prebuilt agent for three sums."""

    stream: bool = False
    responses: bool = False

    async def drive(self, _: int, client: AgentClient) -> float:
        options = {"use_responses_api": True, "store": False} if self.responses else {}
        model = model_of(client, streaming=self.stream, **options)
        graph = prebuilt.create_react_agent(model, tools=[add], prompt="Be brief.")
        messages: list[Any] = []
        for asked, right in zip(SUMS, ANSWERS, strict=True):
            messages = (await graph.ainvoke({"messages": [*messages, ("user", asked)]}))["messages"]
            if not str(messages[-1].text).endswith(f"It is {right}."):
                return 0.0
        return 1.0


@pytest.mark.parametrize("responses", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_with_tools_is_one_sequence(*, stream: bool, responses: bool, chat: ChatFormat) -> None:
    ran = await run(partial(Reacts, stream, responses), chat)

    ran.trains_once()
    assert ran.branched == {}


async def test_what_is_refused_is_an_error_of_the_client(chat: ChatFormat) -> None:
    class Errs:
        async def drive(self, _: int, client: AgentClient) -> float:
            model = model_of(client)
            with pytest.raises(import_module("langchain_core.exceptions").ContextOverflowError):
                await model.ainvoke("x" * 5000)
            with pytest.raises(openai.BadRequestError, match="response_format"):
                await model.bind(response_format={"type": "json_object"}).ainvoke("Hi")
            await model.ainvoke("Hi")
            return 1.0

    (await run(Errs, chat, max_length=1000)).trains_once()
