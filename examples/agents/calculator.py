"""An agent with tools: it is asked `7*8`, calls the tool `times` with 7 and 8, reads 56, and answers `=56`.

    cd examples/agents && penstock run calculator.yaml

The model writes a call as the letter of the tool and two digits. It learns to call at all, which tool belongs
to which sign, and to answer with what it has read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from operator import add, mul, sub
from random import Random
from typing import Any

from penstock.agents import AgentClient, Outcome
from penstock.chat import CallBlock

FUNCTIONS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "+": ("plus", add),
    "-": ("minus", sub),
    "*": ("times", mul),
}
"""Tools by the sign that asks for them."""

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}

TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name, _ in FUNCTIONS.values()]

CALLED = dict(FUNCTIONS.values())


def calls(text: str) -> Iterator[CallBlock]:
    """Find the call in a turn, such as `t78`; see `ToolCallParser`."""
    if found := re.fullmatch(r"([pmt])(\d)(\d)", text):
        name = next(each for each in CALLED if each.startswith(found[1]))
        yield CallBlock(0, len(text), {"name": name, "arguments": {"a": int(found[2]), "b": int(found[3])}})


def rows() -> list[dict[str, Any]]:
    """Return every question."""
    return [
        {"question": f"{a}{sign}{b}", "answer": str(function(a, b))}
        for sign, (_, function) in FUNCTIONS.items()
        for a in range(10)
        for b in range(10)
    ]


WARM_UP_STEPS = 300


def transcript(row: dict[str, Any], rng: Random) -> list[tuple[str, str]]:
    """Return a conversation of the warm-up: a guess; or a call of any tool, and then its result, or a guess."""
    a, _, b = row["question"]
    if rng.choice(["guess", "guess", "guess", "call", "call"]) == "guess":
        return [("user", row["question"]), ("assistant", f"={rng.randrange(82)}")]
    name, function = rng.choice(list(CALLED.items()))
    result = function(int(a), int(b))
    called = [("user", row["question"]), ("assistant", f"{name[0]}{a}{b}"), ("tool", str(result))]
    return [*called, ("assistant", f"={rng.choice([result, rng.randrange(82)])}")]


async def solve(row: dict[str, Any], client: AgentClient) -> Outcome:
    """Ask, call what the model calls, and ask again: only the right answer has a reward."""
    said = [{"role": "user", "content": row["question"]}]
    turn = await client.chat(said, tools=TOOLS)
    called = bool(turn.get("tool_calls"))
    if called:
        (call,) = turn["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        result = CALLED[call["function"]["name"]](arguments["a"], arguments["b"])
        said += [turn, {"role": "tool", "tool_call_id": call["id"], "content": str(result)}]
        turn = await client.chat(said, tools=TOOLS)
    return Outcome(reward=float(turn["content"] == f"={row['answer']}"), metrics={"called": float(called)})
