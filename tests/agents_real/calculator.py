"""A policy that calls a tool for each sum, and a source whose agents ask it by the clients of others."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from tests.stages.agents.served import completion_of

from penstock import SourceEnv, TrajectoryGroup, Worker
from penstock.chat import ChatFormat
from penstock.policies import Completion, NoOpEngine, SamplingParams
from penstock.testing import Driven, drive_source

SUMS = ("2+3", "40+2", "9+9")
ANSWERS = ("5", "42", "18")
ROLLOUTS = 2

ADD: dict[str, Any] = {
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}

USER = "<|im_start|>user\n"
RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
NUMBER = re.compile(r"\d+")


def call_of(name: str, **arguments: Any) -> str:
    """Return a call of a tool, as a model of Hermes' format writes it."""
    return f'\n<tool_call>\n{{"name": "{name}", "arguments": {msgspec.json.encode(arguments).decode()}}}\n</tool_call>'


def calculate(prompt: str) -> str:
    """Call `add` for a sum that the user asks for, and say its result."""
    last = prompt.rpartition(USER)[2]
    if results := RESULT.findall(last):
        return f"It is {NUMBER.findall(results[-1])[-1]}."
    if sums := re.findall(r"(\d+)\+(\d+)", last):
        return "I add." + "".join(call_of("add", a=int(a), b=int(b)) for a, b in sums)
    return "Hello."


@dataclass(eq=False)
class Scripted(NoOpEngine):
    """Answers each prompt by a script, after a thought, or a number, that no other turn has."""

    chat: ChatFormat
    script: Callable[[str], str] = calculate
    thinks: bool = True
    numbers: Any = field(default_factory=count)
    sampled: list[int] = field(default_factory=list)
    """Tokens of all completions."""

    @asynccontextmanager
    async def open(self, _: Worker) -> AsyncGenerator[Scripted]:
        yield self

    async def generate(self, prompts: Sequence[NDArray[Any]], sampling: SamplingParams) -> list[Completion]:  # noqa: ARG002 (the protocol's)
        return [self._answer(prompt) for prompt in prompts]

    def _answer(self, prompt: NDArray[Any]) -> Completion:
        said = self.script(self.chat.tokenizer.decode(prompt.tolist()))
        thought = "<think>{}</think>{}" if self.thinks else "{}: {}"
        completion = completion_of(self.chat, thought.format(next(self.numbers), said))
        self.sampled += completion.tokens.tolist()
        return completion


@dataclass(eq=False)
class Ran:
    """The end of a source with one group of rollouts."""

    records: Driven[TrajectoryGroup]
    policy: Scripted
    rollouts: int = ROLLOUTS

    @property
    def group(self) -> TrajectoryGroup:
        (group,) = self.records
        return group

    @property
    def branched(self) -> dict[str, float]:
        """Return the calls that began a branch, by reason."""
        metrics = self.records.metrics.emit(0)
        names = [name for name in metrics if name.startswith("rollout/branched/")]
        return {name.rpartition("/")[2]: metrics[name] for name in names}

    @property
    def failures(self) -> dict[str, int]:
        """Return the reasons for which rollouts failed."""
        return dict(self.records.ledger.balance().reasons.get("failed", {}))

    def trains_once(self, sequences: int = 1) -> None:
        """Check that all rollouts have the full reward, and that what was sampled trains once, in so many sequences."""
        assert not self.failures
        group = self.group
        assert group.rewards.tolist() == [1.0] * len(group)
        assert np.sort(group.tokens[group.loss_mask]).tolist() == sorted(self.policy.sampled)
        assert (group.rollouts, len(group)) == (self.rollouts, self.rollouts * sequences), self.branched


async def run(
    make_env: Callable[[], Any],
    chat: ChatFormat,
    script: Callable[[str], str] = calculate,
    *,
    thinks: bool = True,
    **fields: Any,
) -> Ran:
    """Run a source with one prompt."""
    policy = Scripted(chat, script, thinks)
    options = {"group_size": ROLLOUTS, "groups": 1, "sampling": SamplingParams(max_completion_tokens=512), **fields}
    env = SourceEnv(make_env, policy, chat.tokenizer, chat=chat, **options)
    return Ran(await drive_source(env), policy, options["group_size"])
