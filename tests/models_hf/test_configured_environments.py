"""A configuration names the environment of a run: of any kind, an agent, a program, or several by weight."""

from __future__ import annotations

import sys
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
from tests.models_hf.questions import Questions, write_questions

from penstock.errors import InvalidConfig, WorkerFailed
from penstock.runs import describe_run, load_run_config

AGENTS = """
from pathlib import Path


class Twice:
    def reset(self, *, seed):
        self.left = 2
        return "twice", {}

    def step(self, action):
        self.left -= 1
        return "again", 0.5, self.left == 0, False, {}


async def solve(row, client):
    import numpy as np

    for _ in range(2):
        said = await client.generate(np.arange(3, 3 + len(row["question"])))
    return float(len(said.tokens))


async def silent(row, client):
    return 1.0


async def falls_silent(row, client):
    # it calls in the rollout before the run alone
    if not Path("called").exists():
        Path("called").touch()
        await solve(row, client)
    return 1.0


async def raises(row, client):
    raise KeyError(row["question"])


async def asks(row, client):
    await solve(row, client)


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
NUMBER = 3
"""

PROGRAM = """
import json, os, sys, urllib.request
row = json.load(sys.stdin)
for path, body in [
    ("/chat/completions", {"messages": [{"role": "user", "content": row["question"]}]}),
    ("/reward", {"value": 0.75}),
]:
    urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode()))
"""


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory, model_folder: Any) -> Questions:
    folder = tmp_path_factory.mktemp("environments")
    with chdir(folder):
        written = write_questions(folder, model_folder("llama"))
        Path("some_agents.py").write_text(AGENTS)
        Path("program.py").write_text(PROGRAM)
    return written


def values_of(questions: Questions, **environment: Any) -> dict[str, Any]:
    values = questions.values | {"environment": environment, "reward": {}}
    if "make" in environment:
        values["data"] = {}
    return values


def described(questions: Questions, **environment: Any) -> str:
    with chdir(questions.folder):
        return describe_run(load_run_config(values_of(questions, **environment))).partition("one rollout")[2]


# -- one rollout before the run ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"make": "some_agents:Twice"}, "2 calls in 1 sequences, reward 1"),
        ({"agent": "some_agents:solve", "tools": "some_agents:TOOLS"}, "2 calls in 2 sequences, reward 6"),
        ({"command": [sys.executable, "program.py"]}, "1 calls in 1 sequences, reward 0.75"),
    ],
)
def test_a_described_run_does_one_rollout_with_a_made_up_model(
    environment: dict[str, Any], said: str, questions: Questions
) -> None:
    assert said in described(questions, **environment)


def test_reward_functions_reward_an_agent_that_returns_nothing(questions: Questions) -> None:
    values = values_of(questions, agent="some_agents:asks") | {"reward": questions.values["reward"]}
    with chdir(questions.folder):
        assert "no reward of its own" in describe_run(load_run_config(values))


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"agent": "some_agents:raises"},
            r"environment: expected a rollout .* got KeyError: .* \(some_agents.py, line 36",
        ),
        (
            {"agent": "some_agents:silent"},
            "got one without a call of the model by silent .some_agents.py, line 23.: call client.generate, or give",
        ),
        ({"agent": "some_agents:asks"}, "drive: expected a reward"),
        ({"agent": "some_agents:sole"}, "config: environment.agent: expected a name in some_agents, got 'sole'"),
        ({"make": "some_agents:NUMBER"}, "config: environment.make: expected a function, got some_agents:NUMBER"),
        ({"make": "some_agents:solve"}, "environment: expected a rollout with a made-up model, got TypeError"),
        ({"command": ["no-such-program"]}, "could not be started: No such file or directory"),
        (
            {"agent": "some_agents:solve", "tools": "some_agents:NUMBER"},
            "config: environment: ChatFormat.tools: expected",
        ),
        ({"agent": "some_agents:solve", "tool_calls": "some_agents:no"}, "environment.tool_calls: expected a name in"),
        ({"agent": "some_agents:solve", "tool_calls": "hermse"}, "ChatFormat.tool_calls: expected one of"),
        (
            {"mix": [{"agent": "some_agents:solve"}] * 2},
            "environment.mix: expected names of their own, got solve, solve",
        ),
    ],
)
def test_a_mistake_is_told_before_the_run_with_its_key(
    environment: dict[str, Any], message: str, questions: Questions
) -> None:
    with pytest.raises(InvalidConfig, match=message):
        described(questions, **environment)


# -- keys --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "data", "message"),
    [
        ({}, {"path": "d"}, "make: expected one of make, agent, command, verifiers, mix, got none"),
        (
            {"make": "m:e", "agent": "m:a"},
            {},
            "make: expected one of make, agent, command, verifiers, mix, got make, agent",
        ),
        ({"mix": [{"weight": 2.0}]}, {}, "make: expected one of make, agent, command, verifiers, got none"),
        ({"make": "m:e", "max_calls": 3}, {}, "max_calls: expected it beside agent or command, got make"),
        ({"make": "m:e"}, {"path": "d"}, "data: expected neither path, sets nor evaluation beside an environment"),
        ({"agent": "m:a"}, {}, "data.path: expected either it or sets"),
        ({"agent": "m:a"}, {"path": "d", "system": "s"}, "data: expected chat, and no system, beside an agent"),
        ({"agent": "m:a"}, {"path": "d", "chat": False}, "data: expected chat, and no system, beside an agent"),
    ],
)
def test_keys_that_exclude_each_other_are_refused(
    environment: dict[str, Any], data: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidConfig, match=message):
        load_run_config({"model": {"path": "m"}, "environment": environment, "data": data})


# -- a run -------------------------------------------------------------------------------------------------------------


def test_a_run_mixes_environments_and_evaluates_its_agents(questions: Questions) -> None:
    mix = [{"make": "some_agents:Twice", "weight": 3.0}, {"agent": "some_agents:solve", "max_calls": 3}]
    ran = questions.train(
        "algorithm.steps=1", "algorithm.prompts=4", environment={"mix": mix}, reward={}, folder="mixed"
    )

    (step,) = ran.steps()
    assert {"reward/Twice", "reward/solve"} <= step.keys()
    assert step["reward/Twice"] == 1.0
    assert [sorted(line["eval/step"] for line in ran.evaluations())] == [[0, 1]]


# -- in the run --------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_run_ends_when_its_agent_makes_no_call(questions: Questions) -> None:
    values = values_of(questions, agent="some_agents:falls_silent")

    with pytest.raises(
        WorkerFailed, match="NothingTrained: expected the agent falls_silent to call the policy, got no"
    ):
        questions.train("folder=silent", **values)
