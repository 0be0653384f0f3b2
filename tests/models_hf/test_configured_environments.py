"""A configuration names the environment of a run: of any kind, an agent, a program, or several by weight."""

from __future__ import annotations

import sys
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
from tests.installation import interpreter
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


async def hangs(row, client):
    while True:
        pass


async def dies(row, client):
    import os

    os._exit(3)


class Counted(Twice):
    def __len__(self):
        return 3


class Elsewhere(Counted):
    # it needs a package that another interpreter has alone
    def step(self, action):
        import only_there

        return only_there.SAID, *super().step(action)[1:]


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


HANGING = {
    "hangs": r"got none within 1 s",
    "dies": r"got the end of its process: expected a reply from the process of a rollout with a made-up model",
}


@pytest.mark.parametrize("agent", HANGING)
def test_an_agent_that_hangs_or_dies_ends_with_its_process(
    agent: str, questions: Questions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that keeps the event loop busy is ended by no deadline on it."""
    monkeypatch.setattr("penstock._stages.sampling.environment_trial.PATIENCE_S", 0.0)
    bound = {"timeout_s": 1.0} if agent == "hangs" else {}
    with pytest.raises(InvalidConfig, match=HANGING[agent]):
        described(questions, agent=f"some_agents:{agent}", **bound)


def test_environments_that_are_evaluated_are_tried_too(questions: Questions) -> None:
    twice = {"evaluation": {"environments": [{"make": "some_agents:Counted", "name": "games"}]}}
    with chdir(questions.folder):
        tried = describe_run(load_run_config(questions.values | twice))

        assert tried.index("first prompt, ") < tried.index("one rollout of evaluation.games with a made-up model")
        endless = {"evaluation": {"environments": [{"make": "some_agents:Twice"}]}}
        with pytest.raises(InvalidConfig, match=r"expected an environment with a length, .* got Twice: .* __len__"):
            describe_run(load_run_config(questions.values | endless))


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
        ({"verifiers": {"taskset": "t"}, "max_tokens": 3}, {}, "max_tokens: expected it beside agent or command"),
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


def test_environments_are_evaluated_whose_turns_are_rewarded_apart(questions: Questions) -> None:
    """The stages agree on the column: a pipeline that lacks `token_rewards` is refused."""
    ran = questions.train(
        "algorithm.steps=1",
        "algorithm.advantages=reinforce++",
        "algorithm.preset=skyrl",
        "algorithm.rewards=token",
        data={},
        environment={"make": "some_agents:Twice"},
        evaluation={"environments": [{"make": "some_agents:Counted"}]},
        reward={},
        folder="turns",
    )

    assert [line["eval/Counted/reward"] for line in ran.evaluations()] == [1.0, 1.0]
    assert (ran.summary.reward_before, ran.summary.reward_after) == (1.0, 1.0)
    assert len(ran.steps()) == 1


@pytest.fixture
def python(tmp_path: Path) -> str:
    """Return an interpreter with a module that this one lacks."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages/only_there.py").write_text("SAID = 'hello'")
    return interpreter(tmp_path / "other", str(tmp_path / "packages"), *filter(None, sys.path))


def test_the_rollout_before_a_run_has_the_packages_of_the_samplers(questions: Questions, python: str) -> None:
    values = values_of(questions, make="some_agents:Elsewhere")
    with chdir(questions.folder):
        with pytest.raises(InvalidConfig, match="got ModuleNotFoundError: No module named 'only_there'"):
            describe_run(load_run_config(values))

        assert "hello" in describe_run(load_run_config(values, [f"placement.python={python}"]))


@pytest.mark.long
def test_samplers_of_another_interpreter_have_its_packages(questions: Questions, python: str) -> None:
    values = values_of(questions, make="some_agents:Elsewhere") | {"folder": "elsewhere"}

    ran = questions.train(f"placement.python={python}", "algorithm.steps=1", **values)

    assert ran.summary.ledger["ended"]["trained"] == 8


# -- in the run --------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_run_ends_when_its_agent_makes_no_call(questions: Questions) -> None:
    values = values_of(questions, agent="some_agents:falls_silent")

    with pytest.raises(
        WorkerFailed, match="NothingTrained: expected the agent falls_silent to call the policy, got no"
    ):
        questions.train("folder=silent", **values)
