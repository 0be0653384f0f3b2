"""An agent with tools: it is asked `d4`, calls the tool `double` with 4, reads 8, and answers 8.

    cd examples/agents && penstock run calculator.yaml

A call of a tool is what the model can learn to write at once: the letter of the tool, and a digit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from penstock.agents import AgentClient, Outcome
from penstock.chat import CallBlock

FUNCTIONS: dict[str, tuple[str, Callable[[int], int]]] = {
    "d": ("double", lambda n: 2 * n),
    "n": ("next", lambda n: n + 1),
    "s": ("square", lambda n: n * n),
}
"""Tools by their letters."""

PARAMETERS = {"type": "object", "properties": {"n": {"type": "integer"}}}

TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name, _ in FUNCTIONS.values()]


def calls(text: str) -> Iterator[CallBlock]:
    """Find the call in a turn; see `ToolCallParser`."""
    if found := re.fullmatch(r"([dns])(\d)", text):
        name, _ = FUNCTIONS[found[1]]
        yield CallBlock(0, len(text), {"name": name, "arguments": {"n": int(found[2])}})


def rows() -> list[dict[str, Any]]:
    """Return every question with a result of one digit."""
    return [
        {"question": f"{letter}{n}", "answer": str(function(n))}
        for letter, (_, function) in FUNCTIONS.items()
        for n in range(10)
        if len(str(function(n))) == 1
    ]


async def solve(row: dict[str, Any], client: AgentClient) -> Outcome:
    """Ask, call what the model calls, and ask again."""
    said = [{"role": "user", "content": row["question"]}]
    turn = await client.chat(said, tools=TOOLS)
    if not turn.get("tool_calls"):
        written = zip(turn["content"], row["question"], strict=False)
        return Outcome(reward=0.2 * sum(a == b for a, b in written), metrics={"called": 0})
    (call,) = turn["tool_calls"]
    n = json.loads(call["function"]["arguments"])["n"]
    letter = next(each for each, (name, _) in FUNCTIONS.items() if name == call["function"]["name"])
    result = str(FUNCTIONS[letter][1](n))
    said += [turn, {"role": "tool", "tool_call_id": call["id"], "content": result}]
    answer = (await client.chat(said, tools=TOOLS))["content"] or ""
    right_call = 0.2 * sum(a == b for a, b in zip(f"{letter}{n}", row["question"], strict=True)) + 0.1
    return Outcome(
        reward=1.0 if answer == row["answer"] else right_call + 0.1 * answer.startswith(result),
        metrics={"called": 1, "read": float(answer == result)},
    )
