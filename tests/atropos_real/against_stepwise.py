"""`AtroposEnvironment` with environments of Atropos, out of a checkout: `make test-atropos`. The suite skips this file.

Nothing is downloaded: data sets and the tokenizer are made locally, and the policy is scripted.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.atropos_real.local_data import save_dataset, save_tokenizer
from tests.fake_policy import FakePolicy, Letters
from transformers import AutoTokenizer

from penstock import SourceEnv
from penstock.schemas import TrajectoryGroup
from penstock.stages.integrations.atropos import Action, AtroposEnvironment
from penstock.stages.integrations.atropos.steps.messages import ModelCallRefused
from penstock.stages.integrations.atropos.steps.stepwise import BlockingStepEnvironment
from penstock.testing import Driven, drive_source

pytestmark = pytest.mark.timeout(300)

PAGE = Path(__file__).parents[2] / "docs" / "atropos-stepwise.md"
ENVIRONMENTS = Path(os.environ["ATROPOS"]) / "environments"
REGEX = ENVIRONMENTS / "community" / "regex_generation" / "regex_env.py"
BLACKJACK = ENVIRONMENTS / "game_environments" / "gymnasium" / "blackjack" / "blackjack_env_no_thinking.py"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run in an empty folder, with a tokenizer."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return {"tokenizer_name": save_tokenizer(tmp_path / "tokenizer"), "max_token_length": 100_000}


def alternating(*answers: str) -> Callable[[str], str]:
    """Return a policy's answers: to the same prompt, one after another and again from the beginning."""
    asked: defaultdict[str, int] = defaultdict(int)

    def answer(prompt: str) -> str:
        asked[prompt] += 1
        return answers[(asked[prompt] - 1) % len(answers)]

    return answer


async def sampled(
    environment: AtroposEnvironment, answer: Callable[[str], str], group_size: int, groups: int = 1
) -> Driven[TrajectoryGroup]:
    """Return groups that a source sampled with a scripted policy."""
    source = SourceEnv(
        environment, FakePolicy(answer=answer), Letters(), group_size=group_size, groups=groups, max_tokens=10**6
    )
    return await drive_source(source)


async def test_regex_env_scores_each_pattern(config: dict[str, Any]) -> None:
    environment = AtroposEnvironment(f"{REGEX}:RegexEnv", config=config, group_size=4)

    (group,) = await sampled(environment, alternating("<answer>.*</answer>", "<answer>[</answer>"), 4)

    assert sorted(group.rewards.tolist())[:2] == [0.0, 0.0]
    assert min(sorted(group.rewards.tolist())[2:]) > 0


async def test_blackjack_is_played_to_its_end(config: dict[str, Any]) -> None:
    environment = AtroposEnvironment(f"{BLACKJACK}:BlackjackEnvNoThinking", config=config, group_size=4)
    stick = '<tool_call>\n{"arguments": {"action": "stick"}, "name": "take_action"}\n</tool_call>'

    groups = await sampled(environment, alternating(stick, "I fold"), 4, groups=3)

    rewards = [reward for group in groups for reward in group.rewards.tolist()]
    assert len(rewards) == 12
    assert set(rewards) <= {-1.0, 0.0, 1.0, 1.5}
    assert all(group.rewards.tolist().count(-1.0) >= 2 for group in groups)


async def test_gsm8k_scores_with_its_verifier(config: dict[str, Any]) -> None:
    rows = [{"question": f"What is {n} + {n}?", "answer": f"Twice {n}.\n#### {2 * n}"} for n in range(10, 16)]
    save_dataset(Path("gsm8k"), "main", {"train": rows, "test": rows})
    environment = AtroposEnvironment(f"{ENVIRONMENTS}/gsm8k_server.py:GSM8kEnv", config=config, group_size=4)

    def answer(prompt: str) -> str:
        number = int(prompt.rpartition("What is ")[2].partition(" ")[0])
        turns[number] += 1
        return f"<think>hm</think> It is \\boxed{{{2 * number if turns[number] % 2 else 7}}}"

    turns: defaultdict[int, int] = defaultdict(int)
    groups = await sampled(environment, answer, 4, groups=6)

    assert [sorted(group.rewards.tolist()) for group in groups] == [[-1.0, -1.0, 1.0, 1.0]] * 6


CALL = '<tool_call>\n{"name": "lookup", "arguments": {"key": "%s"}}\n</tool_call>'


def conversation(number: int) -> dict[str, Any]:
    """Two calls of a tool, each with a response and a summary, and a user's question between."""
    said = [
        ("system", "Tools: lookup(key)"),
        ("human", f"Look up a{number}."),
        ("gpt", f"<think>\nfirst\n</think>\n{CALL % f'a{number}'}"),
        ("tool", "<tool_response>\nfound a\n</tool_response>"),
        ("gpt", "<think>\nfound\n</think>\nIt is there."),
        ("human", f"And b{number}?"),
        ("gpt", f"<think>\nsecond\n</think>\n{CALL % f'b{number}'}"),
        ("tool", "<tool_response>\nfound b\n</tool_response>"),
        ("gpt", "<think>\nfound\n</think>\nIt is there, too."),
    ]
    return {"conversations": [{"from": role, "value": text} for role, text in said]}


async def test_tool_calls_of_one_turn_are_compared(config: dict[str, Any]) -> None:
    save_dataset(Path("NousResearch/XLAM-Atropos"), "default", {"train": [conversation(n) for n in range(110)]})
    environment = AtroposEnvironment(
        f"{ENVIRONMENTS}/tool_calling_server.py:SingleToolCallingEnv", config=config, group_size=4
    )

    def answer(prompt: str) -> str:
        key = prompt.rpartition("Look up ")[2].partition(".")[0]
        turns[key] += 1
        return CALL % (key if turns[key] == 3 else "nothing")

    turns: defaultdict[str, int] = defaultdict(int)
    (group,) = await sampled(environment, answer, 4)

    assert sorted(group.rewards.tolist()) == [-1.0, -1.0, -1.0, 1.0]


@pytest.mark.usefixtures("config")
def test_what_the_page_shows_runs() -> None:
    environment, script = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    Path("doubling.py").write_text(environment)
    Path("script.py").write_text(script)

    subprocess.run([sys.executable, "script.py"], check=True)


async def test_tool_calls_of_several_turns_go_to_those_who_began_them(config: dict[str, Any]) -> None:
    """One call in four is wrong at once; those that are right go on, each with thoughts of its own."""
    save_dataset(
        Path("interstellarninja/toolace_hermes_sequential_tool_use"),
        "default",
        {"train": [conversation(n) for n in range(40)]},
    )
    environment = AtroposEnvironment(
        f"{ENVIRONMENTS}/tool_use_multiturn_server.py:MultiTurnToolCallingEnv", config=config, group_size=4
    )
    last: list[str] = []

    async with anyio.create_task_group() as tasks:
        for player in range(4):
            env = await anyio.to_thread.run_sync(environment)
            tasks.start_soon(play_tools, env, player, last)

    assert sorted(last) == ["0: 1 turns, -1.0", "1: 4 turns, 1.5", "2: 3 turns, -1.0", "3: 4 turns, 1.5"]


async def play_tools(env: Any, player: int, last: list[str]) -> None:
    """Player 0 errs in the first turn, player 2 in the third; spelling and thoughts differ."""
    observation, _ = await env.reset(seed=0)
    key = observation.rpartition("Look up a")[2].partition(".")[0]
    letters, over, turns, reward = iter("ab"), False, 0, 0.0
    spelled = CALL.replace("\n", "\n" * (player + 1))
    while not over:
        turns += 1
        if turns % 2:
            wrong = (player, turns) in ((0, 1), (2, 3))
            said = f"<think>player {player}</think>\n{spelled % ('nothing' if wrong else next(letters) + key)}"
        else:
            said = f"<think>player {player}</think>\nPlayer {player} found it."
        observation, reward, over, *_ = await env.step(said)
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
def probe(config: dict[str, Any]) -> Iterator[BlockingStepEnvironment]:
    Path("probe.py").write_text(PROBE)
    env = AtroposEnvironment("probe.py:Probe", config=config).blocking()
    yield env
    env.close()


def test_nodes_hold_what_was_sampled_and_thoughts_are_kept_in_them(probe: BlockingStepEnvironment) -> None:
    tokenizer = AutoTokenizer.from_pretrained("tokenizer")
    first = tokenizer.encode("<think>x</think>y", add_special_tokens=False)
    second = tokenizer.encode("z", add_special_tokens=False)

    _, begun = probe.reset(seed=0)
    told, *_, after = probe.step(Action(text="<think>x</think>y", tokens=first, logprobs=[-0.5] * len(first)))
    probe.step(Action(text="z", tokens=second, logprobs=[-0.25]))
    *_, last = probe.step("done")

    asked = begun["input_ids"]
    between = after["input_ids"][len(asked) + len(first) :]
    assert after["input_ids"][: len(asked) + len(first)] == asked + first
    assert (
        tokenizer.decode(between)
        == f"<|im_end|>{told}"
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

    assert 'Tools: [{"type": "function", "function": {"name": "lookup"}}]' in observation
    with pytest.raises(ModelCallRefused, match="got get_logprobs"):
        probe.step("refuse")
