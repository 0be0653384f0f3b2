"""An agent whose tools are those of a server of MCP: `make test-agents` runs this file."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import anyio
import pytest
from tests.agents_real.calculator import ANSWERS, SUMS, run
from tests.ports import free_port

from penstock.agents import AgentClient, MCPTools
from penstock.chat import ChatFormat

mcp: Any = import_module("mcp")
openai: Any = import_module("openai")

SERVER = str(Path(__file__).parent / "adding_server.py")


@asynccontextmanager
async def by_stdio() -> AsyncGenerator[Any]:
    yield mcp.StdioServerParameters(command=sys.executable, args=[SERVER], env=dict(os.environ))


@asynccontextmanager
async def by_http() -> AsyncGenerator[Any]:
    port = free_port()
    async with await anyio.open_process([sys.executable, SERVER, str(port)]) as process:
        assert process.stderr is not None
        try:
            async for line in process.stderr:
                if b"running on" in line:
                    break
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            process.terminate()


@dataclass
class UsesTools:
    """Asks for three sums, with the tools that the server lists, and has it call them."""

    transport: Literal["stdio", "http"]

    async def drive(self, _: int, client: AgentClient) -> float:
        server = by_stdio() if self.transport == "stdio" else by_http()
        async with (
            server as address,
            openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as api,
            mcp.Client(address) as tools,
        ):
            return await self.converse(api, tools)

    async def converse(self, api: Any, session: Any) -> float:
        listed = (await session.list_tools()).tools
        functions = [{"name": t.name, "description": t.description, "parameters": t.input_schema} for t in listed]
        ask = partial(api.chat.completions.create, model="policy")
        tools = [{"type": "function", "function": function} for function in functions]
        messages: list[Any] = []
        for asked, right in zip(SUMS, ANSWERS, strict=True):
            messages.append({"role": "user", "content": asked})
            while (message := (await ask(messages=messages, tools=tools)).choices[0].message).tool_calls:
                messages.append(message)
                for call in message.tool_calls:
                    result = await session.call_tool(call.function.name, json.loads(call.function.arguments))
                    text = "".join(part.text for part in result.content)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
            messages.append(message)
            if message.content != f"It is {right}.":
                return 0.0
        return 1.0


@dataclass
class UsesMCPTools:
    """The same by `MCPTools` and `client.chat`, and a tool that does not exist."""

    transport: Literal["stdio", "http"]

    async def drive(self, _: int, client: AgentClient) -> float:
        async with by_http() if self.transport == "http" else nullcontext("") as url:
            server: dict[str, Any] = {"url": url} if url else {"command": [sys.executable, SERVER]}
            async with MCPTools(**server) as tools:
                assert "nothing" in await tools.call("nothing", {})
                return await self.converse(client, tools)

    async def converse(self, client: AgentClient, tools: MCPTools) -> float:
        messages: list[Any] = []
        for asked, right in zip(SUMS, ANSWERS, strict=True):
            messages.append({"role": "user", "content": asked})
            while (turn := await client.chat(messages, tools=tools.definitions)).get("tool_calls"):
                messages += [turn, *await tools.results(turn)]
            messages.append(turn)
            if turn["content"] != f"It is {right}.":
                return 0.0
        return 1.0


@pytest.mark.parametrize("agent", [UsesTools, UsesMCPTools])
@pytest.mark.parametrize("transport", ["stdio", "http"])
async def test_a_conversation_with_the_tools_of_a_server_is_one_sequence(
    transport: Literal["stdio", "http"], agent: type[UsesTools | UsesMCPTools], chat: ChatFormat
) -> None:
    ran = await run(partial(agent, transport), chat)

    ran.trains_once()
    assert ran.branched == {}


async def test_rollouts_at_once_share_one_session_of_a_server() -> None:
    async with by_http() as url, MCPTools(url=url) as tools, anyio.create_task_group() as rollouts:

        async def rollout(number: int) -> None:
            assert await tools.call("add", {"a": number, "b": 1}) == str(number + 1)

        for number in range(64):
            rollouts.start_soon(rollout, number)


async def test_a_server_that_does_not_answer_is_named() -> None:
    with pytest.raises(ConnectionError, match=r"expected a server of MCP at http://127.0.0.1:1/mcp, got ConnectError"):
        async with MCPTools(url="http://127.0.0.1:1/mcp"):
            pass


async def test_the_shop_of_the_examples_sells_by_mcp(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(__file__).parent.parent.parent / "examples" / "agents"
    monkeypatch.syspath_prepend(str(folder))
    server: Any = import_module("shop_server")
    (offer, price), *_ = server.prices("k7").items()
    script = f"""
import anyio, shop
from penstock.agents import MCPTools

async def main():
    async with MCPTools(url=shop.URL) as tools:
        print(await tools.call("search", dict(kind="k7")))
        print(await tools.call("look", dict(kind="k7", offer="{offer}")))
        print(await tools.call("buy", dict(kind="k7", offer="{offer}", most=9)))

anyio.run(main)
"""
    command = [sys.executable, str(folder / "shop_server.py"), sys.executable, "-c", script]

    ran = await anyio.run_process(command, cwd=folder, env={**os.environ, "SHOP_PORT": str(free_port())})

    assert ran.stdout.decode().split() == [server.search("k7"), str(price), f"k7{price}"]
