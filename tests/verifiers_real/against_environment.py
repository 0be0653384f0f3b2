"""`VerifiersEnvironment`: tasksets of verifiers, with its own harnesses and tools, by both of its clients."""

from __future__ import annotations

import os
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.agents_real.calculator import NUMBER, RESULT, USER, Ran, call_of, run
from tests.verifiers_real.against_verifiers import chat as chat  # noqa: PLC0414 (a fixture)
from tests.verifiers_real.against_verifiers import folder as folder  # noqa: PLC0414 (a fixture)

from penstock.agents import VerifiersEnvironment
from penstock.chat import ChatFormat
from penstock.errors import InvalidConfig

ROLLOUTS = int(os.environ.get("ROLLOUTS", "4"))
"""Each starts two interpreters, so that four are done at once."""

HERE = {"type": "subprocess"}


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the list of the traces that the taskset `summing` rewards."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}")
    found: list[Any] = import_module("summing").TRACES
    found.clear()
    return found


def add_one_by_one(prompt: str) -> str:
    """Call the tool for one sum after another, and say the last result."""
    last = prompt.rpartition(USER)[2]
    asked = prompt.partition(f"{USER}")[2].partition("<|im_end|>")[0]
    sums = re.findall(r"(\d+)\+(\d+)", asked)
    results = RESULT.findall(prompt)
    if len(results) < len(sums):
        a, b = map(int, sums[len(results)])
        name = re.findall(r'"name": "(\w*add)"', prompt)
        return "I add." + call_of(name[0], a=a, b=b)
    return f"It is {NUMBER.findall(results[-1])[-1]}." if last else ""


def environment(harness: str, **client: Any) -> VerifiersEnvironment:
    agent = {"harness": {"id": harness}, "runtime": HERE}
    return VerifiersEnvironment("summing", {"agent": agent}, client)


def compare(ran: Ran, traces: list[Any]) -> None:
    """Check that the sequences that train are the branches of the traces, token by token."""
    branches = [branch for trace in traces for branch in trace.branches]
    assert len(branches) == len(ran.group)
    for row in ran.group:
        (branch,) = [each for each in branches if each.token_ids == row.tokens.tolist()]
        assert row.loss_mask.tolist() == branch.sampled_mask
        assert row.behavior_logprobs is not None
        np.testing.assert_allclose(np.where(row.loss_mask, row.behavior_logprobs, 0), branch.logprobs, atol=1e-6)


@pytest.mark.parametrize("harness", ["null", "bash"])
async def test_three_turns_with_tools_train_as_the_trace_has_them(
    harness: str, chat: ChatFormat, folder: Path, traces: list[Any]
) -> None:
    env = environment(harness, type="train", renderer_model_name=str(folder), renderer={"name": "qwen3"})

    ran = await run(env, chat, add_one_by_one, thinks=False, group_size=ROLLOUTS, concurrency=4)

    ran.trains_once()
    compare(ran, traces)
    assert {name: values.tolist() for name, values in ran.group.reward_parts.items()} == {
        "right": [0.5] * ROLLOUTS,
        "called": [0.5] * ROLLOUTS,
    }
    assert ran.records.metrics.emit(0)["env/turns"] == 3


@pytest.mark.parametrize("harness", ["null", "bash"])
async def test_by_chat_three_turns_are_one_sequence(harness: str, chat: ChatFormat, traces: list[Any]) -> None:
    ran = await run(environment(harness), chat, add_one_by_one, group_size=2)

    ran.trains_once()
    assert len(traces) == 2


@pytest.mark.parametrize(
    ("taskset", "config", "message"),
    [
        ("no_such_taskset", {}, "taskset 'no_such_taskset' not found"),
        ("summing", {"agent": {"harness": {"id": "no_such_harness"}}}, "harness 'no_such_harness' not found"),
        ("summing", {"agent": {"max_turn": 3}}, "max_turn"),
    ],
)
def test_a_configuration_that_verifiers_refuses_is_refused_when_it_is_opened(
    taskset: str, config: dict[str, Any], message: str, traces: list[Any]
) -> None:
    with pytest.raises(InvalidConfig, match=message):
        VerifiersEnvironment(taskset, config)()
    assert not traces
