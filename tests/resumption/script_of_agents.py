"""Runs of a synchronous schedule whose environment drives, with a history that is cut and one that is forked.

    python -m tests.resumption.script_of_agents FOLDER

FOLDER/whole is not killed. FOLDER/trainer is run until its trainer is killed in its third step, and then again. With
`workers`, FOLDER/workers has three worker processes, of which one is killed while it samples.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path

import numpy as np
from tests.resumption.script_of_a_run import KillPoint, import_late_parts, in_child
from tests.resumption.script_of_workers import run

from penstock.agents import AgentClient, Outcome
from penstock.policies import SamplingParams

CALLS = 40
"""Calls that the killed worker makes in its life."""


class Guesses:
    """Asks three times: of the question, of the question with the answer, and of the answer alone.

    Every second rollout asks a fourth time, so that the answer has two continuations. The reward counts a digit.
    """

    def __init__(self, mark: Path | None = None) -> None:
        self._mark = mark
        self._calls = 0

    async def drive(self, task: int, client: AgentClient) -> Outcome:
        question = [int(letter) for letter in str(task % 97)]
        answer = (await client.generate(np.array(question))).tokens.tolist()
        said = [answer, await self._ask(client, [*question, *answer, 1]), await self._ask(client, [*answer, 2])]
        if client.repetition % 2:
            said.append(await self._ask(client, [*question, *answer, 3]))
        reward = float(sum(token == question[-1] for tokens in said for token in tokens))
        return Outcome(reward=reward, parts={"first": float(answer[0])})

    async def _ask(self, client: AgentClient, prompt: list[int]) -> list[int]:
        self._calls += 1
        if self._mark is not None and self._calls > CALLS and not self._mark.exists():
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        call = await client.generate(np.array(prompt), SamplingParams(max_completion_tokens=2, temperature=0.8))
        tokens: list[int] = call.tokens.tolist()
        return tokens


def main(folder: Path, *, workers: bool) -> None:
    import_late_parts()
    alone = partial(run, make_env=Guesses, workers=0)
    assert in_child(alone, folder / "whole", KillPoint()) == 0
    assert in_child(alone, folder / "trainer", KillPoint("stepped", 3)) == -signal.SIGKILL
    assert in_child(alone, folder / "trainer", KillPoint()) == 0
    if workers:
        deadly = partial(Guesses, folder / "a worker was killed")
        assert in_child(partial(run, make_env=deadly), folder / "workers", KillPoint()) == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), workers="workers" in sys.argv[2:])
