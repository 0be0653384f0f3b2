"""An agent that blocks, with OpenAI's client: as a class, and as a program that prints its reward."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any

ASKED = (("2+3", "It is 5."), ("40+2", "It is 42."))
NUMBER = {"type": "integer"}
ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}}}


def converse(api: Any) -> float:
    """Ask for two sums."""
    messages: list[Any] = []
    for asked, right in ASKED:
        messages.append({"role": "user", "content": asked})
        while True:
            answer = api.chat.completions.create(
                model="policy", messages=messages, tools=[{"type": "function", "function": ADD}]
            )
            message = answer.choices[0].message
            messages.append(message.model_dump())
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                result = str(sum(json.loads(call.function.arguments).values()))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if message.content != right:
            return 0.0
    return 1.0


class Blocks:
    """The agent in a process of its own."""

    def drive(self, _: int, client: Any) -> float:
        with import_module("openai").OpenAI(base_url=client.base_url, api_key=client.api_key) as api:
            return converse(api)


if __name__ == "__main__":
    with import_module("openai").OpenAI() as found:
        sys.stdout.write(f"{converse(found)}\n")
