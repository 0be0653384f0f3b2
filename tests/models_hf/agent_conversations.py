"""Conversations of agents, as OpenAI's API sends them."""

from __future__ import annotations

import json
from typing import Any


def schema(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "one", "parameters": {"type": "object"}}}


ADD, LOOK = schema("add"), schema("look")

QUESTION = {"role": "user", "content": "a question?"}


def call(name: str, number: int, *, as_json: bool = True) -> dict[str, Any]:
    """Return a call as OpenAI's API sends it, or with an object as arguments."""
    arguments = {"left": number, "text": 'a "b" <é>'}
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False) if as_json else arguments}
    return {"id": f"call0000{number}", "type": "function", "function": function}


def called(*calls: dict[str, Any], content: str = "") -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def result(number: int, content: str = "4") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call0000{number}", "content": content}


SYSTEM = {"role": "system", "content": "be kind"}
ANSWER = {"role": "assistant", "content": "an answer"}
AGAIN = {"role": "user", "content": "again, an hour?"}
CALLED = called(call("add", 1))

GOING_ON: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "a message of the user": ([SYSTEM, QUESTION, ANSWER], [AGAIN]),
    "a later one": ([QUESTION, ANSWER, AGAIN, CALLED, result(1), ANSWER], [AGAIN]),
    "a result": ([SYSTEM, QUESTION, CALLED], [result(1)]),
    "results": ([QUESTION, called(call("add", 1), call("look", 2))], [result(2, "5"), result(1)]),
    "a later result": ([QUESTION, CALLED, result(1), called(call("look", 2))], [result(2)]),
}
"""Messages up to a turn of the policy, and those that follow it."""
