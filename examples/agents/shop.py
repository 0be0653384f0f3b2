"""An agent in a shop: it is asked `k75`, the kind `k7` for 5 at most; it searches, looks, and buys by MCP.

    cd examples/agents && python shop_server.py penstock run shop.yaml

The model writes a call as the first letter of the tool and its arguments: `sk7`, `lk7q`, `bk7q5`. It learns to come in
at all, to search before it buys, and to buy the offer that it can afford. Rewarded is what is bought.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from importlib import import_module
from random import Random
from typing import Any

from penstock.agents import AgentClient, MCPTools, Outcome
from penstock.chat import CallBlock

shop_server: Any = import_module("shop_server")

URL = f"http://127.0.0.1:{shop_server.PORT}/mcp"

MOST_CALLS = 3


def calls(text: str) -> Iterator[CallBlock]:
    """Find the call in a turn: `sk7`, `lk7q` or `bk7q5`; see `ToolCallParser`."""
    if found := re.fullmatch(r"s([a-z]\d)|l([a-z]\d)([a-z])|b([a-z]\d)([a-z])(\d)", text):
        searched, looked, look_offer, bought, offer, most = found.groups()
        if searched:
            call: dict[str, Any] = {"name": "search", "arguments": {"kind": searched}}
        elif looked:
            call = {"name": "look", "arguments": {"kind": looked, "offer": look_offer}}
        else:
            call = {"name": "buy", "arguments": {"kind": bought, "offer": offer, "most": int(most)}}
        yield CallBlock(0, len(text), call)


def rows() -> list[dict[str, Any]]:
    """Return a wish for each kind, with a budget for the cheapest offer alone."""
    return [{"question": f"{kind}{_budget(kind)}"} for kind in shop_server.KINDS]


def _budget(kind: str) -> int:
    cheapest, second, _ = sorted(shop_server.prices(kind).values())
    return Random(kind).randrange(cheapest, second)  # noqa: S311 (no secret)


WARM_UP_STEPS = 700


def transcript(row: dict[str, Any], rng: Random) -> list[tuple[str, str]]:
    """Return a conversation of the warm-up: some leave at once, some guess an offer, and some search and buy any."""
    wish = row["question"]
    kind, budget, offer = wish[:2], wish[2], rng.choice(shop_server.LETTERS)
    match rng.choice(["leave", "leave", "guess", "look", "search"]):
        case "leave":
            return [("user", wish), ("assistant", "no")]
        case "guess":
            called = []
        case "look":
            called = [("assistant", f"l{kind}{offer}"), ("tool", shop_server.look(kind, offer))]
        case _:
            called = [("assistant", f"s{kind}"), ("tool", shop_server.search(kind))]
            offer = rng.choice(list(shop_server.prices(kind)))
    return [("user", wish), *called, ("assistant", f"b{kind}{offer}{budget}")]


@asynccontextmanager
async def shopper() -> AsyncGenerator[Callable[[dict[str, Any], AgentClient], Awaitable[Outcome]]]:
    """Connect to the shop once, for all rollouts of a worker."""
    async with MCPTools(url=URL) as tools:

        async def shop(row: dict[str, Any], client: AgentClient) -> Outcome:
            return await visit(row["question"], client, tools)

        yield shop


async def visit(wish: str, client: AgentClient, tools: MCPTools) -> Outcome:
    """Let the model call tools until it has bought, or calls none."""
    said: list[dict[str, Any]] = [{"role": "user", "content": wish}]
    used: list[str] = []
    receipt = ""
    while len(used) < MOST_CALLS and not receipt:
        turn = await client.chat(said, tools=tools.definitions)
        if not turn.get("tool_calls"):
            break
        (result,) = await tools.results(turn)
        said += [turn, result]
        used.append(turn["tool_calls"][0]["function"]["name"])
        if used[-1] == "buy" and result["content"] != "no":
            receipt = result["content"]
    right = receipt[:2] == wish[:2] and receipt[2] <= wish[2]
    return Outcome(reward=float(right), metrics={"searched": float("search" in used), "bought": float(receipt != "")})
