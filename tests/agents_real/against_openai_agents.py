"""The Agents SDK of OpenAI, by chat completions and by Responses: `make test-agents` runs this file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import pytest
from tests.agents_real.calculator import ANSWERS, ROLLOUTS, SUMS, USER, calculate, call_of, run

from penstock.agents import AgentClient
from penstock.chat import ChatFormat

agents: Any = import_module("agents")
openai: Any = import_module("openai")

MODELS = {"chat": "OpenAIChatCompletionsModel", "responses": "OpenAIResponsesModel"}


def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


def model_of(api: str, client: Any) -> Any:
    return getattr(agents, MODELS[api])(model="policy", openai_client=client)


def client_of(client: AgentClient) -> Any:
    return openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key)


@dataclass
class Runs:
    """Asks for three sums in one conversation."""

    api: str
    stream: bool = False

    async def drive(self, _: int, client: AgentClient) -> float:
        async with client_of(client) as api:
            model = model_of(self.api, api)
            agent = agents.Agent(name="a", instructions="Be brief.", model=model, tools=[agents.function_tool(add)])
            items: list[Any] = []
            for asked, right in zip(SUMS, ANSWERS, strict=True):
                result = await self._result(agent, [*items, {"role": "user", "content": asked}])
                items = result.to_input_list()
                if result.final_output != f"It is {right}.":
                    return 0.0
        return 1.0

    async def _result(self, agent: Any, items: list[Any]) -> Any:
        if not self.stream:
            return await agents.Runner.run(agent, items)
        result = agents.Runner.run_streamed(agent, items)
        async for _ in result.stream_events():
            pass
        return result


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", MODELS)
async def test_a_conversation_with_tools_is_one_sequence(api: str, *, stream: bool, chat: ChatFormat) -> None:
    ran = await run(partial(Runs, api, stream), chat)

    ran.trains_once()
    assert ran.branched == {}


def hand_over(prompt: str) -> str:
    """Hand over to the agent that adds, which then says the sum."""
    tools, _, said = prompt.partition("</tools>")
    if "transfer_to_adder" in tools:
        return call_of("transfer_to_adder")
    return calculate(said if '"assistant"' not in said.rpartition(USER)[2] else f"{USER}{SUMS[0]}")


@pytest.mark.parametrize("api", MODELS)
async def test_an_agent_that_hands_over_has_a_branch_by_its_other_tools(api: str, chat: ChatFormat) -> None:
    class Hands:
        async def drive(self, _: int, client: AgentClient) -> float:
            async with client_of(client) as found:
                model = model_of(api, found)
                adder = agents.Agent(name="adder", model=model, tools=[agents.function_tool(add)])
                first = agents.Agent(name="first", model=model, handoffs=[adder])
                result = await agents.Runner.run(first, SUMS[0])
            return float("It is" in result.final_output)

    ran = await run(Hands, chat, hand_over)

    ran.trains_once(sequences=2)
    assert sum(ran.branched.values()) == ROLLOUTS


@pytest.mark.parametrize("api", MODELS)
async def test_what_is_refused_is_an_error_of_the_client(api: str, chat: ChatFormat) -> None:
    class Errs:
        async def drive(self, _: int, client: AgentClient) -> float:
            async with client_of(client) as found:
                agent = agents.Agent(name="a", model=model_of(api, found))
                with pytest.raises(openai.BadRequestError) as refused:
                    await agents.Runner.run(agent, "x" * 5000)
                assert refused.value.code == "context_length_exceeded"
                await agents.Runner.run(agent, "Hi")
            return 1.0

    (await run(Errs, chat, max_length=1000)).trains_once()
