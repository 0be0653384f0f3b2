"""The letters as an environment of SkyRL's own gym, and an inference client that repeats what penstock has sampled."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from tests.skyrl_real.letters import share

BaseTextEnv: Any = importlib.import_module("skyrl_gym.envs.base_text_env").BaseTextEnv


class LettersEnv(BaseTextEnv):  # type: ignore[misc]  # of SkyRL, which is untyped here
    """One turn; the reward is the share of the letter that the row asks for."""

    def __init__(self, env_config: Any = None, extras: Any = None) -> None:  # noqa: ARG002 (of the interface)
        super().__init__()
        self._spec = extras["reward_spec"]

    def step(self, action: str) -> dict[str, Any]:
        return {"observations": [], "reward": share(action, self._spec), "done": True, "metadata": {}}


importlib.import_module("skyrl_gym").register(id="letters", entry_point=f"{__name__}:LettersEnv")


class Repeated:
    """In the place of an inference client: each session gets the row of that name."""

    def __init__(self, output: Mapping[str, Any], tokenizer: Any) -> None:
        names = [each.to_string() for each in output["trajectory_ids"]]
        self._rows = {name: place for place, name in enumerate(names)}
        self._output = output
        self._tokenizer = tokenizer

    async def generate(self, input_batch: Mapping[str, Any], model: str | None = None) -> dict[str, Any]:  # noqa: ARG002
        (session,) = input_batch["session_ids"]
        row = self._rows[session]
        ids = list(self._output["response_ids"][row])
        return {
            "responses": [self._tokenizer.decode(ids, skip_special_tokens=True)],
            "response_ids": [ids],
            "stop_reasons": [self._output["stop_reasons"][row]],
            "response_logprobs": [list(self._output["rollout_logprobs"][row])],
        }

    async def finish_session(self, session_id: str) -> None:
        assert session_id in self._rows
