"""verifiers: its traces are the sequences that train. `make test-agents` runs this file, with packages of its own."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.agents_real.calculator import ADD, ANSWERS, ROLLOUTS, SUMS, Ran, run
from tests.models_hf.chat_templates import QWEN, tokenizer_folder

from penstock import Trajectory
from penstock.agents import AgentClient
from penstock.chat import ChatFormat
from penstock.policies import PretrainedTokenizer

vf: Any = import_module("verifiers.v1")
openai: Any = import_module("openai")

KEY = "KEY_OF_ROLLOUT"
MANY = 100

TOKENS_OF_QWEN = ("<|endoftext|>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""That the renderer of Qwen3 writes."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a tokenizer with the tokens of Qwen3."""
    folder = tokenizer_folder(tmp_path / "tokenizer", QWEN)
    tokenizer = import_module("transformers").AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(TOKENS_OF_QWEN)})
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def chat(folder: Path) -> ChatFormat:
    return ChatFormat(PretrainedTokenizer(folder))


class InProcess(vf.Harness):  # type: ignore[misc]
    """A harness whose program runs in this process, as verifiers allows it."""

    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(self, ctx: Any, _: Any, __: Any, endpoint: str, secret: str, *___: Any) -> Any:
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as api:
            await self.converse(api, ctx.model)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class Adds(InProcess):
    """Asks for three sums, and adds when it is told to."""

    async def converse(self, api: Any, model: str) -> None:
        said: list[Any] = []
        tools = [{"type": "function", "function": ADD}]
        for asked, right in zip(SUMS, ANSWERS, strict=True):
            said.append({"role": "user", "content": asked})
            while True:
                answer = await api.chat.completions.create(model=model, messages=said, tools=tools)
                said.append(answer.choices[0].message)
                if not said[-1].tool_calls:
                    break
                for call in said[-1].tool_calls:
                    result = str(sum(json.loads(call.function.arguments).values()))
                    said.append({"role": "tool", "tool_call_id": call.id, "content": result})
            assert said[-1].content.endswith(f"It is {right}.")


class Forks(InProcess):
    """Asks for three turns, and for another second one."""

    async def converse(self, api: Any, model: str) -> None:
        said: list[Any] = []
        for turn in range(3):
            if turn == 1:
                await api.chat.completions.create(model=model, messages=[*said, {"role": "user", "content": "fork"}])
            said.append({"role": "user", "content": f"turn {turn}"})
            answer = await api.chat.completions.create(model=model, messages=said)
            said.append(answer.choices[0].message)


@dataclass
class Traced:
    """Runs a harness for each rollout, and keeps its trace."""

    harness: type[InProcess]
    config: dict[str, Any]
    traces: dict[int, Any] = field(default_factory=dict)

    def __call__(self) -> Traced:
        return self

    async def drive(self, _: int, client: AgentClient) -> float:
        variable = f"{KEY}_{client.repetition}"
        os.environ[variable] = client.api_key
        own = {"base_url": client.base_url, "api_key_var": variable, **self.config}
        null = vf.HarnessConfig(id="null")
        agent = vf.Agent(vf.AgentConfig(model="policy", client=own, runtime={"type": "subprocess"}, harness=null))
        agent.harness = self.harness(null)
        trace = await agent.run(vf.Task(vf.TaskData(idx=0, prompt="Hi")))
        self.traces[client.repetition] = trace
        assert not trace.errors
        return 1.0

    def pairs(self, ran: Ran) -> list[tuple[Trajectory, Any]]:
        """Return the sequences that train, each with the branch of the same tokens."""
        found = []
        for row, rollout in zip(ran.group, ran.group.rollout_ids.tolist(), strict=True):
            (branch,) = [each for each in self.traces[rollout].branches if each.token_ids == row.tokens.tolist()]
            found.append((row, branch))
        assert len(found) == sum(len(trace.branches) for trace in self.traces.values())
        return found


async def test_ids_masks_and_log_probabilities_are_those_of_the_trace(chat: ChatFormat, folder: Path) -> None:
    """The renderer of Qwen3 writes a whole prompt for each question: a branch begins."""
    env = Traced(Adds, {"type": "train", "renderer_model_name": str(folder), "renderer": {"name": "qwen3"}})

    ran = await run(env, chat, thinks=False, group_size=MANY)

    ran.trains_once(sequences=3)
    for row, branch in env.pairs(ran):
        assert row.loss_mask.tolist() == branch.sampled_mask
        assert row.behavior_logprobs is not None
        np.testing.assert_allclose(np.where(row.loss_mask, row.behavior_logprobs, 0), branch.logprobs, atol=1e-6)


@pytest.mark.parametrize(("thinks", "sequences"), [(False, 2), (True, 4)])
async def test_a_token_that_two_branches_of_a_trace_have_sampled_trains_in_one(
    *, thinks: bool, sequences: int, chat: ChatFormat, folder: Path
) -> None:
    """The renderer for any model writes whole prompts: a template that drops thoughts has a branch for each turn."""
    env = Traced(Forks, {"type": "train", "renderer_model_name": str(folder)})

    ran = await run(env, chat, lambda _: "Yes.", thinks=thinks)

    ran.trains_once(sequences)
    for row, branch in env.pairs(ran):
        trained = row.loss_mask
        assert np.all(np.array(branch.sampled_mask)[trained])
        assert row.behavior_logprobs is not None
        np.testing.assert_allclose(row.behavior_logprobs[trained], np.array(branch.logprobs)[trained], atol=1e-6)


@pytest.mark.parametrize(("harness", "sequences"), [(Adds, 1), (Forks, 2)])
async def test_by_chat_it_is_a_client_like_others(harness: Any, sequences: int, chat: ChatFormat) -> None:
    env = Traced(harness, {"type": "eval"})

    ran = await run(env, chat)

    ran.trains_once(sequences)
    assert [len(trace.branches) for trace in env.traces.values()] == [sequences] * ROLLOUTS
