"""`AtroposEnvironment` with environments of Atropos, out of a checkout: `make test-atropos`. The suite skips this file.

Nothing is downloaded: data sets and the tokenizer are made locally, and the policy is scripted.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import anyio
import pytest
from tests.atropos_real.workspace import call
from tests.fake_policy import FakePolicy, Letters
from transformers import AutoTokenizer

from penstock import SourceEnv, TrajectoryGroup
from penstock._stages.integrations.atropos.steps.messages import ModelCallRefused
from penstock._stages.integrations.atropos.steps.stepwise import AtroposStepEnvironment, BlockingStepEnvironment
from penstock.integrations.atropos import Action, AtroposEnvironment
from penstock.policies import SamplingParams
from penstock.testing import Driven, drive_source

pytestmark = pytest.mark.timeout(300)

PAGE = Path(__file__).parents[2] / "docs" / "atropos-stepwise.md"
REGEX = "community/regex_generation/regex_env.py:RegexEnv"
BLACKJACK = "game_environments/gymnasium/blackjack/blackjack_env_no_thinking.py:BlackjackEnvNoThinking"


class MakeEnvironment(Protocol):
    def __call__(self, where: str, *, group_size: int = 4) -> AtroposEnvironment: ...


@pytest.fixture
def make(checkout: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> MakeEnvironment:
    """Return what makes an environment of the checkout, where its tokenizer and data sets are found."""
    monkeypatch.chdir(workspace)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = {"tokenizer_name": "tokenizer", "max_token_length": 100_000}

    def environment(where: str, *, group_size: int = 4) -> AtroposEnvironment:
        return AtroposEnvironment(str(checkout / "environments" / where), config=config, group_size=group_size)

    return environment


def alternating(*answers: str) -> Callable[[str], str]:
    """Return a policy's answers: to the same prompt, one after another and again from the beginning."""
    asked: defaultdict[str, int] = defaultdict(int)

    def answer(prompt: str) -> str:
        asked[prompt] += 1
        return answers[(asked[prompt] - 1) % len(answers)]

    return answer


async def sampled(
    environment: AtroposEnvironment, answer: Callable[[str], str], groups: int = 1
) -> Driven[TrajectoryGroup]:
    """Return groups of 4 that a source sampled with a scripted policy."""
    source = SourceEnv(
        environment,
        FakePolicy(answer=answer),
        Letters(),
        group_size=4,
        groups=groups,
        sampling=SamplingParams(max_completion_tokens=10**6),
    )
    return await drive_source(source)


async def test_regex_env_scores_each_pattern(make: MakeEnvironment) -> None:
    (group,) = await sampled(make(REGEX), alternating("<answer>.*</answer>", "<answer>[</answer>"))

    assert sorted(group.rewards.tolist())[:2] == [0.0, 0.0]
    assert min(sorted(group.rewards.tolist())[2:]) > 0


async def test_blackjack_is_played_to_its_end(make: MakeEnvironment) -> None:
    stick = '<tool_call>\n{"arguments": {"action": "stick"}, "name": "take_action"}\n</tool_call>'

    groups = await sampled(make(BLACKJACK), alternating(stick, "I fold"), groups=3)

    rewards = [reward for group in groups for reward in group.rewards.tolist()]
    assert len(rewards) == 12
    assert set(rewards) <= {-1.0, 0.0, 1.0, 1.5}
    assert all(group.rewards.tolist().count(-1.0) >= 2 for group in groups)


async def test_gsm8k_scores_with_its_verifier(make: MakeEnvironment) -> None:
    right = alternating("yes", "no")

    def answer(prompt: str) -> str:
        return f"<think>hm</think> It is \\boxed{{{sum(numbers(prompt)) if right(prompt) == 'yes' else 1000}}}"

    groups = await sampled(make("gsm8k_server.py:GSM8kEnv"), answer, groups=6)

    assert [sorted(group.rewards.tolist()) for group in groups] == [[-1.0, -1.0, 1.0, 1.0]] * 6


async def test_tool_calls_of_one_turn_are_compared(make: MakeEnvironment) -> None:
    turns = alternating("no", "no", "yes", "no")

    def answer(prompt: str) -> str:
        return call(*(numbers(prompt) if turns(prompt) == "yes" else (0, 1000)))

    (group,) = await sampled(make("tool_calling_server.py:SingleToolCallingEnv"), answer)

    assert sorted(group.rewards.tolist()) == [-1.0, -1.0, -1.0, 1.0]


def numbers(prompt: str) -> tuple[int, int]:
    """Return what is to be added."""
    left, right = re.findall(r"Add (\d+) and (\d+)\.", prompt)[-1]
    return int(left), int(right)


@pytest.mark.usefixtures("make")
def test_what_the_page_shows_runs() -> None:
    environment, script = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    Path("doubling.py").write_text(environment)
    Path("script.py").write_text(script)

    subprocess.run([sys.executable, "script.py"], check=True)


async def test_tool_calls_of_several_turns_go_to_the_rollouts_that_began_them(make: MakeEnvironment) -> None:
    """Player 0 errs in the first turn, player 2 in the third; spelling and thoughts differ."""
    environment = make("tool_use_multiturn_server.py:MultiTurnToolCallingEnv")
    last: list[str] = []

    async with anyio.create_task_group() as tasks:
        for player in range(4):
            env = await anyio.to_thread.run_sync(environment)
            tasks.start_soon(play_tools, env, player, last)

    assert sorted(last) == ["0: 1 turns, -1.0", "1: 4 turns, 1.5", "2: 3 turns, -1.0", "3: 4 turns, 1.5"]


async def play_tools(env: AtroposStepEnvironment, player: int, last: list[str]) -> None:
    observation, _ = await env.reset(seed=0)
    over, turns, reward = False, 0, 0.0
    while not over:
        turns += 1
        said = f"Player {player} found it."
        if turns % 2:
            wrong = (player, turns) in ((0, 1), (2, 3))
            _, _, said = call(*((0, 1000) if wrong else numbers(observation))).partition("</think>")
        observation, reward, over, *_ = await env.step(f"<think>player {player}</think>" + "\n" * player + said)
        assert all(f"Player {other} found" not in observation for other in range(4) if other != player)
    last.append(f"{player}: {turns} turns, {reward}")
    await env.close()


PROBE = """
from atroposlib.envs.base import BaseEnv


class Probe(BaseEnv):
    \"\"\"Two turns at a managed server, whose node it reports; then a plain call with tools; and what is refused.\"\"\"

    async def setup(self): ...

    async def get_next_item(self):
        return 0

    async def collect_trajectory(self, item):
        messages = [{"role": "user", "content": "a"}]
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            for _ in range(2):
                said = await managed.chat_completion(messages=messages, max_tokens=8)
                messages.append({"role": "assistant", "content": said.choices[0].message.content})
                messages.append({"role": "user", "content": "b"})
            (node,) = managed.get_state()["nodes"]
        tools = [{"type": "function", "function": {"name": "lookup"}}]
        said = await self.server.chat_completion(messages=messages[:1], tools=tools)
        try:
            if said.choices[0].message.content == "refuse":
                await self.server.get_logprobs(prompt="x")
        except Exception:
            pass
        row = {"tokens": node.tokens, "masks": node.masked_tokens, "inference_logprobs": node.logprobs}
        return row | {"scores": 1.0, "messages": messages}, []

    async def evaluate(self): ...
"""


@pytest.fixture
def probe(make: MakeEnvironment, tmp_path: Path) -> Iterator[BlockingStepEnvironment]:
    (tmp_path / "probe.py").write_text(PROBE)
    env = make(f"{tmp_path}/probe.py:Probe", group_size=1).blocking()
    yield env
    env.close()


def test_nodes_hold_what_was_sampled_and_thoughts_are_kept_in_them(probe: BlockingStepEnvironment) -> None:
    tokenizer = AutoTokenizer.from_pretrained("tokenizer")
    first = tokenizer.encode("<think>x</think>y", add_special_tokens=False)
    second = tokenizer.encode("z", add_special_tokens=False)

    _, begun = probe.reset(seed=0)
    added, *_, after = probe.step(Action(text="<think>x</think>y", tokens=first, logprobs=[-0.5] * len(first)))
    probe.step(Action(text="z", tokens=second, logprobs=[-0.25]))
    *_, last = probe.step("done")

    asked = begun["input_ids"]
    between = after["input_ids"][len(asked) + len(first) :]
    assert after["input_ids"][: len(asked) + len(first)] == asked + first
    assert (
        tokenizer.decode(between)
        == f"<|im_end|>{added}"
        == "<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    )
    scored = last["scored"]
    assert scored["tokens"] == asked + first + between + second
    assert scored["masks"] == [-100] * len(asked) + first + [-100] * len(between) + second
    assert scored["inference_logprobs"] == [1.0] * len(asked) + [-0.5] * len(first) + [1.0] * len(between) + [-0.25]


def test_tools_are_rendered_into_the_prompt_and_a_refusal_that_is_caught_ends_the_episode(
    probe: BlockingStepEnvironment,
) -> None:
    probe.reset(seed=0)
    probe.step("1")
    observation, *_ = probe.step("2")

    assert '<tools>[{"type": "function", "function": {"name": "lookup"}}]</tools>' in observation
    with pytest.raises(ModelCallRefused, match="got get_logprobs"):
        probe.step("refuse")
