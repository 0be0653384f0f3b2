"""The agents of smolagents: `make test-agents` runs this file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from tests.agents_real.calculator import NUMBER, ROLLOUTS, call_of, run
from tests.agents_real.smol import Smol

from penstock.chat import ChatFormat

TASK = "New task:\n"


def call(prompt: str) -> str:
    """Call `add`, and then `final_answer` with its result."""
    task = prompt.rpartition(TASK)[2]
    if "Observation" in task:
        return call_of("final_answer", answer=NUMBER.findall(task)[-1])
    return "I add." + call_of("add", **dict(zip("ab", map(int, NUMBER.findall(task)), strict=True)))


def code(prompt: str) -> str:
    """Write code that adds, and then code that ends."""
    task = prompt.rpartition(TASK)[2]
    if "Observation" in task:
        return f"Thought: I know.\n<code>\nfinal_answer({NUMBER.findall(task)[-1]})\n</code>"
    return "Thought: I add.\n<code>\nprint(add({}, {}))\n</code>".format(*NUMBER.findall(task))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("kind", "script"), [("ToolCallingAgent", call), ("CodeAgent", code)])
async def test_an_agent_that_writes_its_history_anew_has_a_branch_for_each_call(
    kind: str, script: Callable[[str], str], *, stream: bool, chat: ChatFormat
) -> None:
    ran = await run(partial(Smol, kind, stream), chat, script)

    ran.trains_once(sequences=4)
    assert ran.branched == {"edited": 3 * ROLLOUTS}


async def test_a_call_that_is_required_is_an_error_of_the_agent(chat: ChatFormat) -> None:
    ran = await run(partial(Smol, required=True), chat, call)

    (reason,) = ran.failures
    assert "tool_choice: expected 'auto' or 'none'" in reason
