"""The agents of a source are given an endpoint: on the event loop, in processes of their own, and as commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import anyio.lowlevel
import numpy as np
import pytest
from tests.stages.agents.blocking_agent import AGAIN, ASKED, Blocks
from tests.stages.agents.says import Says
from tests.stages.agents.served import chat_format, completion_of
from tests.tiny_model import TinyModel

from penstock import SourceEnv, TrajectoryGroup
from penstock.agents import AgentClient, CommandFailed, Outcome
from penstock.chat import ChatFormat
from penstock.errors import InvalidPipeline
from penstock.policies import SamplingParams
from penstock.testing import Driven, drive, drive_source
from penstock.torch import TorchPolicy, TorchReference


@pytest.fixture
def chat(tmp_path: Path) -> ChatFormat:
    return chat_format(tmp_path)


async def driven(make_env: Callable[[], Any], format_: ChatFormat, **fields: Any) -> Driven[TrajectoryGroup]:
    fields = {"group_size": 2, "groups": 1, "chat": format_, **fields}
    return await drive_source(SourceEnv(make_env, Says(format_), format_.tokenizer, **fields))


def text(group: TrajectoryGroup, chat: ChatFormat) -> list[str]:
    return [chat.tokenizer.decode(row.tokens.tolist()) for row in group]


# -- on the event loop -------------------------------------------------------------------------------------------------


class Asks:
    """Asks twice by HTTP, with the client's address alone, and names its first answer in a reward."""

    async def drive(self, _: int, client: AgentClient) -> Outcome:
        said: list[Any] = list(ASKED)
        async with aiohttp.ClientSession() as session:
            for new in [AGAIN, None]:
                async with session.post(f"{client.base_url}/chat/completions", json={"messages": said}) as came:
                    answer = await came.json()
                said += [answer["choices"][0]["message"], *([new] if new else [])]
                if new is not None:
                    said.append(new)
                    await client.reward(0.25, call=answer["id"])
        return Outcome(reward=float(said[-1]["content"] == "4"))


async def test_an_agent_that_calls_the_endpoint_is_one_sequence_of_its_tokens(chat: ChatFormat) -> None:
    ran = await driven(Asks, chat, turn_rewards=True)

    (group,) = ran
    assert group.rollouts == len(group) == 2
    assert group.rewards.tolist() == [1.25, 1.25]
    assert group.completion_lengths().tolist() == [4, 4]
    assert group.token_rewards is not None
    assert group.token_rewards[group.token_rewards > 0].tolist() == [0.25, 1.0] * 2


async def test_each_token_that_an_agent_saw_trains_once_with_the_log_probability_of_a_forward_pass(
    chat: ChatFormat,
) -> None:
    """Its calls continue, fork, compact, run at once, ask for two answers, and have temperatures of their own."""
    seen: list[list[int]] = []

    class Wanders:
        async def drive(self, _: int, client: AgentClient) -> float:
            async def ask(messages: Sequence[Any], **fields: Any) -> list[Any]:
                body = {"messages": messages, "return_token_ids": True, **fields}
                async with session.post(f"{client.base_url}/chat/completions", json=body) as came:
                    answer = await came.json()
                seen.extend(choice["token_ids"] for choice in answer["choices"])
                return [choice["message"] for choice in answer["choices"]]

            said: list[Any] = list(ASKED)
            for temperature in (0.5, 1.0, 1.5):
                said += [*await ask(said, temperature=temperature), AGAIN]
            await ask([AGAIN], n=2)
            async with anyio.create_task_group() as calls:
                calls.start_soon(ask, [*said, AGAIN])
                calls.start_soon(ask, [*said[:1], {"role": "assistant", "content": "edited"}, *said[2:], AGAIN])
            return float(client.repetition)

    model = partial(TinyModel, vocabulary=300, context=2048)
    policy = TorchPolicy(model, chat.tokenizer.eos_id)
    sampling = SamplingParams(max_completion_tokens=8)
    env = SourceEnv(Wanders, policy, chat=chat, group_size=2, groups=1, max_length=2048, sampling=sampling)
    async with aiohttp.ClientSession() as session:
        groups = await drive_source(env)
    (group,) = await drive(TorchReference(model), groups)

    trained = np.sort(group.tokens[group.loss_mask])
    assert trained.tolist() == sorted(token for each in seen for token in each)
    assert group.ref_logprobs is not None
    assert group.behavior_logprobs is not None
    np.testing.assert_allclose(group.ref_logprobs, group.behavior_logprobs, atol=1e-5)
    metrics = groups.metrics.emit(0)
    assert metrics["rollout/branches"] == 4
    assert {name: value for name, value in metrics.items() if "branched" in name} == {
        "rollout/branched/compacted": 4,
        "rollout/branched/edited": 2,
    }


async def test_another_client_has_a_key_and_a_conversation_of_its_own(chat: ChatFormat) -> None:
    class Debates:
        async def drive(self, _: int, first: AgentClient) -> float:
            second = first.another()
            said: list[Any] = list(ASKED)
            for debater in (first, second, first):
                url = f"{debater.base_url}/chat/completions"
                async with session.post(url, json={"messages": said}) as came:
                    answer = await came.json()
                said += [answer["choices"][0]["message"], AGAIN]
            assert (first.api_key, first.env) != (second.api_key, second.env)
            kept.append(second.base_url)
            return 1.0

    kept: list[str] = []
    async with aiohttp.ClientSession() as session:
        ran = await driven(Debates, chat)
        with pytest.raises(aiohttp.ClientConnectionError):
            await session.get(f"{kept[0]}/models")

    (group,) = ran
    assert [said.count("4") for said in text(group, chat)] == [2, 3] * 2
    assert group.completion_lengths().tolist() == [2, 4] * 2
    assert "rollout/branched/parallel" not in ran.metrics.emit(0)


async def test_an_agent_without_a_chat_format_has_no_endpoint(chat: ChatFormat) -> None:
    class Needs:
        async def drive(self, _: int, client: AgentClient) -> float:
            with pytest.raises(InvalidPipeline, match="expected a source with a chat format"):
                client.base_url.encode()
            await client.generate(completion_of(chat, "x").tokens)
            return 1.0

    ran = await driven(Needs, chat, chat=None)

    assert len(ran) == 1


# -- in processes ------------------------------------------------------------------------------------------------------


async def test_a_drive_that_blocks_runs_in_a_process_of_its_own(chat: ChatFormat) -> None:
    (group,) = await driven(Blocks, chat)

    assert group.rewards.tolist() == [1.0, 1.0]
    assert group.reward_parts["style"].tolist() == [0.5, 0.5]
    assert text(group, chat)[0].count("4") == 2
    assert {temperature for _, temperature in group.meta["temperatures"][0]} == {1.0, 0.5}


async def test_a_process_asks_for_a_completion_of_tokens(chat: ChatFormat) -> None:
    (group,) = await driven(partial(Blocks, "generates"), chat)

    assert group.rollout_ids.tolist() == [0, 0, 1, 1]
    assert group[1].tokens[:3].tolist() == [1, 2, 3]
    assert group.rewards.tolist() == [1.0] * 4


async def test_a_process_asks_for_another_client_of_its_rollout(chat: ChatFormat) -> None:
    (group,) = await driven(partial(Blocks, "debates"), chat, turn_rewards=True)

    assert group.rollout_ids.tolist() == [0, 0, 1, 1]
    assert group.token_rewards is not None
    assert group.token_rewards[group.token_rewards != 0].tolist() == [1.0, -0.5] * 2


async def test_a_process_rewards_its_rollout(chat: ChatFormat) -> None:
    (group,) = await driven(partial(Blocks, "rewards"), chat)

    assert group.rewards.tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("says", "reason"),
    [("raises", "environment raised ZeroDivisionError: no agent"), ("nan", "expected a finite number, got nan")],
)
async def test_an_error_in_a_process_fails_its_rollout(says: str, reason: str, chat: ChatFormat) -> None:
    ran = await driven(partial(Blocks, says), chat)

    (found,) = ran.ledger.balance().reasons["failed"]
    assert reason in found


async def test_a_process_drops_its_rollout_by_an_error_as_the_event_loop_does(chat: ChatFormat) -> None:
    ran = await driven(partial(Blocks, "filters"), chat)

    assert ran.ledger.balance().reasons["filtered"] == {"no tool was called": 2}
    assert ran.metrics.emit(0)["rollout/dropped_tokens/filtered"] == 8


async def test_a_process_that_is_killed_costs_its_rollout_alone_and_leaves_no_process(
    chat: ChatFormat, tmp_path: Path
) -> None:
    left = anyio.Path(tmp_path / "left")

    ran = await driven(partial(Blocks, "is killed", str(left)), chat)

    assert ran[0].rollout_ids.tolist() == [1]
    (reason,) = ran.ledger.balance().reasons["failed"]
    assert "the process of an agent, got its end" in reason
    assert not await anyio.Path(f"/proc/{await left.read_text()}").exists()


async def test_a_process_that_hangs_ends_at_the_deadline_of_its_rollout(chat: ChatFormat) -> None:
    ran = await driven(partial(Blocks, "hangs"), chat, group_size=1, rollout_timeout_s=1)

    assert ran.ledger.balance().reasons["failed"] == {"rollout took longer than 1 s": 1}
    left = await anyio.run_process(["pgrep", "-P", str(os.getpid()), "-f", "agent_process"], check=False)
    assert left.stdout == b""


async def test_a_drive_that_blocks_needs_a_chat_format(chat: ChatFormat) -> None:
    with pytest.raises(InvalidPipeline, match="expected a source with a chat format"):
        await driven(Blocks, chat, chat=None)


# -- as commands -------------------------------------------------------------------------------------------------------

SCRIPT = """
import json, os, urllib.request
body = json.dumps({"messages": [{"role": "user", "content": "2+2?"}]}).encode()
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
    print(json.load(answer)["choices"][0]["message"]["content"])
"""


class Commands:
    """Runs a script, and rewards what it prints."""

    async def drive(self, _: int, client: AgentClient) -> float:
        ran = await client.run([sys.executable, "-c", SCRIPT])
        return float(ran.output.strip() == "4")


async def test_a_command_finds_the_endpoint_in_its_environment(chat: ChatFormat) -> None:
    (group,) = await driven(Commands, chat)

    assert group.rewards.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["sh", "-c", "echo oops; exit 3"], "exited with status 3: oops"),
        (["no-such-program"], "could not be started: No such file or directory"),
    ],
)
async def test_a_command_that_fails_fails_its_rollout(
    command: list[str], said: str, chat: ChatFormat, tmp_path: Path
) -> None:
    class Fails:
        async def drive(self, _: int, client: AgentClient) -> float:
            with pytest.raises(CommandFailed, match=said):
                await client.run(command)
            ran = await client.run(["sh", "-c", "pwd; exit 4"], folder=tmp_path, check=False)
            assert (ran.status, ran.output.strip()) == (4, str(tmp_path))
            await client.run(command)
            return 1.0

    ran = await driven(Fails, chat)

    assert said in str(ran.ledger.balance().reasons["failed"])


async def test_all_processes_of_a_command_end_with_its_rollout(chat: ChatFormat, tmp_path: Path) -> None:
    pids = anyio.Path(tmp_path / "pids")

    class Leaves:
        async def drive(self, _: int, client: AgentClient) -> float:
            await client.run(["sh", "-c", f"sleep 1000 & echo $! >> {pids}; echo $$ >> {pids}; wait"])
            return 1.0

    async def until_it_runs(scope: anyio.CancelScope) -> None:
        while not await pids.exists() or (await pids.read_text()).count("\n") < 2:
            await anyio.lowlevel.checkpoint()
        scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(until_it_runs, tasks.cancel_scope)
        await driven(Leaves, chat, group_size=1)

    for pid in (await pids.read_text()).split():
        assert not await anyio.Path(f"/proc/{pid}").exists()
