"""An environment of OpenEnv: sums, two in an episode. `python -m` this module serves it at the socket it is given."""

# Its base classes have no types here.
# mypy: ignore-errors
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import os
import sys
import time
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app

SESSIONS = 8


class SumAction(Action):
    answer: str


class SumObservation(Observation):
    question: str = ""


class Sums(Environment[SumAction, SumObservation, State]):
    """Ask for sums: each right answer is 0.5. Some answers have it misbehave."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> SumObservation:
        self._number = seed or 0
        self._state = State(episode_id=episode_id, step_count=0)
        return self._ask()

    def step(self, action: SumAction, **_: Any) -> SumObservation:
        if "die" in action.answer:
            os._exit(1)
        if "hang" in action.answer:
            time.sleep(3)
        if "raise" in action.answer:
            raise ValueError("no such answer")
        self._state.step_count += 1
        reward = 0.5 * action.answer.endswith(f"It is {self._right}.")
        if self._state.step_count == 2 and "go on" not in action.answer:
            return SumObservation(done=True, reward=reward)
        asked = self._ask()
        asked.reward = reward or None
        return asked

    @property
    def state(self) -> State:
        return self._state

    def _ask(self) -> SumObservation:
        self._number = self._number * 31 % 97 + 1
        self._right = self._number + 5
        return SumObservation(question=f"{self._number}+5")


if __name__ == "__main__":
    app = create_app(Sums, SumAction, SumObservation, env_name="sums", max_concurrent_envs=SESSIONS)
    uvicorn.run(app, fd=int(sys.argv[1]), log_level="warning")
