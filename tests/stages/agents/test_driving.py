"""An environment that drives asks for completions itself; every token that is sampled for it trains once."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import structlog
from tests.fake_policy import FakePolicy, Letters

from penstock import AdvantageNormalizer, SourceEnv, StopReason, TrajectoryGroup
from penstock.agents import AgentClient, CallsUsedUp, ContextTooLong, Outcome, RolloutEnded
from penstock.errors import InvalidConfig, InvalidRecord, NothingTrained
from penstock.policies import SamplingParams
from penstock.testing import Driven, VirtualClock, drive_source
from penstock.testing import drive as run_stage

Drive = Callable[[int, AgentClient], Awaitable[Any]]


class Agent:
    """An environment with a function as its `drive`."""

    def __init__(self, drive: Drive) -> None:
        self._drive = drive

    async def drive(self, task: int, client: AgentClient) -> Any:
        return await self._drive(task, client)


def ids(text: str) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(Letters().encode(text), np.int32)


async def driven(drive: Drive, policy: FakePolicy | None = None, **fields: Any) -> Driven[TrajectoryGroup]:
    fields = {"group_size": 1, "groups": 1, **fields}
    return await drive_source(SourceEnv(lambda: Agent(drive), policy or FakePolicy(), **fields))


async def group_of(drive: Drive, policy: FakePolicy | None = None, **fields: Any) -> TrajectoryGroup:
    (group,) = await driven(drive, policy, **fields)
    return group


def rows(group: TrajectoryGroup) -> list[str]:
    """Return the text of each sequence, the sampled tokens that train in capitals, the end token as a full stop."""
    texts = []
    for row in group:
        letters = Letters().decode(row.tokens.tolist()).replace("\0", ".")
        texts.append("".join(a.upper() if mask else a for a, mask in zip(letters, row.loss_mask, strict=True)))
    return texts


# -- agents that do too much -------------------------------------------------------------------------------------------


async def test_a_rollout_of_more_sequences_than_a_batch_has_room_for_fails_alone() -> None:
    async def drive(task: int, client: AgentClient) -> float:
        for number in range(30 if task == 0 else 8):
            await client.generate(ids(f"{number} is a number of ten"[:16]))
        return 1.0

    ran = await driven(drive, max_length=20, groups=2)

    (group,) = ran
    assert group.instance_id == "1"
    (dropped,) = ran.ledger.balance().reasons["failed"]
    assert "expected a rollout of at most 160 tokens in all, 8 times max_length, got " in dropped


async def test_an_agent_that_catches_its_cancellation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock._stages.sampling.driving_environments.PATIENCE_S", 0.01)

    async def stubborn(_: int, client: AgentClient) -> float:
        await client.generate(ids("a"))
        while not logs:
            with contextlib.suppress(BaseException):
                await anyio.sleep_forever()
        return 1.0

    with structlog.testing.capture_logs() as logs:
        await driven(stubborn, rollout_timeout_s=0.01)

    assert logs[0]["event"] == "agent_goes_on"
    assert logs[0]["agent"] == "Agent"


# -- sequences ---------------------------------------------------------------------------------------------------------


async def test_calls_that_continue_one_another_are_one_sequence() -> None:
    async def drive(task: int, client: AgentClient) -> float:
        first = await client.generate(ids(f"task {task}?"))
        await client.generate(np.concatenate([ids(f"task {task}?"), first.tokens, ids("and?")]))
        return 0.5

    group = await group_of(drive, FakePolicy(answer=lambda text: "yes" if text.endswith("and?") else "no"))

    assert rows(group) == ["task 0?NO.and?YES."]
    assert group.rewards.tolist() == [0.5]
    assert group.stop_reasons.tolist() == [StopReason.STOP]


async def test_a_call_with_another_history_begins_a_sequence_of_the_same_rollout() -> None:
    async def drive(_: int, client: AgentClient) -> float:
        first = await client.generate(ids("a long history"))
        await client.generate(np.concatenate([ids("a long history"), first.tokens, ids("b")]))
        await client.generate(ids("compacted"))
        return 1.0

    group = await group_of(drive, group_size=2)

    assert rows(group) == ["a long historyOK.bOK.", "compactedOK."] * 2
    assert group.rollout_ids.tolist() == [0, 0, 1, 1]
    assert group.rewards.tolist() == [1.0] * 4


async def test_a_turn_that_two_calls_continue_trains_in_the_first_and_is_context_of_the_second() -> None:
    async def drive(_: int, client: AgentClient) -> float:
        asked = ids("q")
        said = (await client.generate(asked)).tokens
        for fork in ("b", "c"):
            await client.generate(np.concatenate([asked, said, ids(fork)]))
        return 1.0

    assert rows(await group_of(drive)) == ["qOK.bOK.", "qok.cOK."]


async def test_completions_of_one_prompt_are_a_sequence_each() -> None:
    async def drive(_: int, client: AgentClient) -> float:
        async with anyio.create_task_group() as calls:
            for _ in range(3):
                calls.start_soon(client.generate, ids("q"))
        return 1.0

    assert rows(await group_of(drive)) == ["qOK."] * 3


# -- parameters --------------------------------------------------------------------------------------------------------


async def test_a_call_brings_parameters_within_those_of_the_source() -> None:
    async def drive(_: int, client: AgentClient) -> float:
        await client.generate(ids("q"), SamplingParams(temperature=0.5, max_completion_tokens=999, stop=("!",)))
        await client.generate(ids("r"), SamplingParams(max_completion_tokens=3))
        await client.generate(ids("s"))
        return 1.0

    policy = FakePolicy()
    usual = SamplingParams(max_completion_tokens=50, temperature=0.7, stop_ids=(5,))
    await group_of(drive, policy, sampling=usual)

    assert [(each.max_completion_tokens, each.temperature, each.stop) for each in policy.requests] == [
        (50, 0.5, ("!",)),
        (3, 1.0, ()),
        (50, 0.7, ()),
    ]
    assert {each.stop_ids for each in policy.requests} == {(5,)}


async def test_temperatures_of_calls_are_recorded_by_token_of_each_rollout() -> None:
    async def drive(_: int, client: AgentClient) -> float:
        first = await client.generate(ids("q"), SamplingParams(temperature=0.5 + client.repetition))
        await client.generate(np.concatenate([ids("q"), first.tokens, ids("r")]))
        await client.generate(ids("other"), SamplingParams(temperature=0.25))
        return 1.0

    group = await group_of(drive, group_size=2)

    assert "temperature" not in group.meta
    assert group.meta["temperatures"] == [
        [(1, 1.0), (3, temperature), (1, 1.0), (3, 1.0), (5, 1.0), (3, 0.25)] for temperature in (0.5, 1.5)
    ]


async def test_calls_at_the_temperature_of_the_source_are_recorded_as_one_number() -> None:
    async def drive(_: int, client: AgentClient) -> float:
        await client.generate(ids("q"))
        await client.generate(ids("r"), SamplingParams(temperature=0.7, top_p=0.9))
        return 1.0

    group = await group_of(drive, sampling=SamplingParams(temperature=0.7))

    assert group.meta["temperature"] == 0.7
    assert "temperatures" not in group.meta


async def test_a_seed_of_a_call_repeats_it_within_its_rollout_alone() -> None:
    async def drive(_: int, client: AgentClient) -> float:
        for seed in (1, 1, 2, None):
            await client.generate(ids("q"), SamplingParams(seed=seed))
        return 1.0

    policy = FakePolicy()
    await group_of(drive, policy, group_size=2, concurrency=1, sampling=SamplingParams(seed=7))

    seeds = [each.seed for each in policy.requests]
    for of_rollout in (seeds[:4], seeds[4:]):
        assert of_rollout[0] == of_rollout[1]
        assert len(set(of_rollout)) == 3
    assert not set(seeds[:4]) & set(seeds[4:])


# -- rewards -----------------------------------------------------------------------------------------------------------


async def test_rewards_of_calls_are_those_of_their_turns_and_the_rest_is_that_of_the_last() -> None:
    async def drive(_: int, client: AgentClient) -> Outcome:
        first = await client.generate(ids("q"))
        await client.generate(ids("other"))
        await client.reward(0.25, call=first.id)
        await client.reward(1.0)
        return Outcome(reward=2.0, parts={"style": 0.5}, metrics={"tools": 3})

    ran = await driven(drive, turn_rewards=True)
    (group,) = ran

    assert group.rewards.tolist() == [3.25, 3.25]
    assert group.token_rewards is not None
    assert [row.sum() for row in np.split(group.token_rewards, group.offsets[1:-1])] == [0.25, 3.0]
    assert group.reward_parts["style"].tolist() == [0.5, 0.5]
    metrics = ran.metrics.emit(0)
    assert (metrics["env/tools"], metrics["rollout/branches"]) == (3, 2)


NO_REWARDS: dict[str, Any] = {
    "drive: expected a reward, a number or an Outcome, or calls of client.reward, got neither": None,
    "reward: expected a finite number, such as a float, got str": "1.0",
    "reward: expected a finite number, such as a float, got bool": True,
    "reward: expected a finite number, such as a float, got list": [1.0],
    "reward: expected a finite number, such as a float, got dict": {"reward": 1.0},
    "reward: expected a finite number, such as a float, got ndarray": np.ones(1),
    "reward: expected a finite number, such as a float, got type": float,
    "reward: expected a finite number, such as a float, got complex": 1j,
    "expected a finite number, got nan": float("nan"),
    "expected a finite number, got inf": 10**5000,
    "expected a number of at most 3.4e+38, got -1e+39": -1e39,
    "parts['style']: expected a finite number, such as a float, got list": Outcome(parts={"style": [1]}),  # type: ignore[dict-item]
    "metrics['turns']: expected a finite number, such as a float, got NoneType": Outcome(metrics={"turns": None}),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("sentence", NO_REWARDS)
async def test_a_rollout_without_a_finite_reward_fails_with_a_sentence(sentence: str) -> None:
    async def drive(_: int, client: AgentClient) -> Any:
        await client.generate(ids("q"))
        return NO_REWARDS[sentence]

    ran = await driven(drive)

    assert ran == []
    (reason,) = ran.ledger.balance().reasons["failed"]
    assert reason.removeprefix("environment raised ").partition(": ")[2] == sentence


@pytest.mark.parametrize("reward", [1, 1.0, np.float32(1), np.int64(1), Fraction(1)])
async def test_any_real_number_is_a_reward(reward: Any) -> None:
    async def drive(_: int, client: AgentClient) -> Any:
        await client.generate(ids("q"))
        await client.reward(reward)
        return reward

    assert (await group_of(drive)).rewards.tolist() == [2.0]


async def test_an_agent_that_made_no_call_in_its_first_rollouts_ends_the_run_with_its_name() -> None:
    async def drive(*_: object) -> float:
        return 1.0

    named = "expected the agent Agent to call the policy, got no call in its first 20 rollouts"
    with pytest.raises(NothingTrained, match=named):
        await driven(drive, groups=None)


async def test_rollouts_without_a_call_are_rejected_once_an_agent_has_made_calls() -> None:
    async def drive(task: int, client: AgentClient) -> float:
        if task == 0:
            await client.generate(ids("q"))
        return 1.0

    ran = await driven(drive, groups=30)

    assert len(ran) == 1
    assert ran.ledger.balance().reasons["rejected"] == {"nothing was sampled": 29}


async def test_a_rollout_that_is_dropped_is_counted_as_filtered_by_its_reason() -> None:
    async def drive(_: int, client: AgentClient) -> Outcome:
        await client.generate(ids("q"))
        return Outcome(drop="no tool was called")

    ran = await driven(drive)

    assert ran.ledger.balance().reasons["filtered"] == {"no tool was called": 1}
    assert ran.metrics.emit(0)["rollout/dropped_tokens/filtered"] == 3


# -- other clients of a rollout ----------------------------------------------------------------------------------------


async def test_a_call_of_another_client_continues_none_of_the_first() -> None:
    async def drive(_: int, client: AgentClient) -> float:
        said = (await client.generate(ids("q"))).tokens
        for each in (client.another(), client):
            await each.generate(np.concatenate([ids("q"), said, ids("b")]))
        return 1.0

    group = await group_of(drive, group_size=2)

    assert rows(group) == ["qok.bOK.", "qOK.bOK."] * 2
    assert group.rollout_ids.tolist() == [0, 0, 1, 1]


async def test_a_group_says_which_client_sampled_each_sequence_where_there_are_several() -> None:
    async def drive(_: int, first: AgentClient) -> float:
        second = first.another()
        for client, text in ((second, "a"), (first, "b"), (second, "c")):
            await client.generate(ids(text))
        return 1.0

    async def alone(_: int, client: AgentClient) -> float:
        await client.generate(ids("a"))
        return 1.0

    group = await group_of(drive, group_size=2)

    assert [row[0] for row in rows(group)] == ["a", "b", "c"] * 2
    assert group.meta["agents"] == [[1, 0, 1]] * 2
    assert "agents" not in (await group_of(alone, group_size=2)).meta


async def test_the_reward_at_a_client_is_that_of_its_last_turn() -> None:
    async def drive(_: int, first: AgentClient) -> float:
        second = first.another()
        for text in ("a", "b"):
            await first.generate(ids(f"first {text}"))
            await second.generate(ids(f"second {text}"))
        await first.reward(1.0)
        await second.reward(-2.0)
        await first.another().reward(0.25)
        return 4.0

    (group,) = await driven(drive, turn_rewards=True)

    assert group.token_rewards is not None
    by_row = [row.sum() for row in np.split(group.token_rewards, group.offsets[1:-1])]
    assert dict(zip(rows(group), by_row, strict=True)) == {
        "first aOK.": 0.0,
        "second aOK.": 0.0,
        "first bOK.": 1.0,
        "second bOK.": 2.25,  # with what drive returned, and the reward of a client without a call
    }
    assert set(group.rewards.tolist()) == {3.25}


async def test_two_personas_that_play_against_each_other_learn_from_their_own_rewards() -> None:
    """The sum of their rewards is 0 in each rollout, so that a reward of the rollout would teach nothing."""

    async def drive(_: int, first: AgentClient) -> None:
        second = first.another()
        for player, text, sign in ((first, "i move", 1), (second, "i answer", -1)):
            await player.generate(ids(text))
            await player.reward(sign * (2.0 * first.repetition - 1))

    played = await driven(drive, group_size=2, turn_rewards=True)
    normalizer = AdvantageNormalizer("reinforce++", rewards="token", batch_groups=1, preset="skyrl")
    (group,) = await run_stage(normalizer, played)

    assert set(group.rewards.tolist()) == {0.0}
    assert group.advantages is not None
    by_row = np.split(np.where(group.loss_mask, np.sign(group.advantages), 0), group.offsets[1:-1])
    signs = [set(row[row != 0].tolist()) for row in by_row]
    assert signs == [{-1.0}, {1.0}, {1.0}, {-1.0}]


async def test_the_calls_of_all_clients_of_a_rollout_are_bounded_together() -> None:
    class Bounded(Agent):
        max_calls = 2

    async def drive(_: int, client: AgentClient) -> float:
        other = client.another()
        for each in (client, other):
            await each.generate(ids("q"))
        with pytest.raises(CallsUsedUp, match="expected at most 2 calls"):
            await other.generate(ids("q"))
        return 1.0

    (group,) = await drive_source(SourceEnv(lambda: Bounded(drive), FakePolicy(), group_size=1, groups=1))

    assert len(group) == 2


async def test_a_rollout_that_has_ended_gives_no_other_client() -> None:
    kept: list[AgentClient] = []

    async def drive(_: int, client: AgentClient) -> float:
        await client.generate(ids("q"))
        kept.append(client)
        return 1.0

    await driven(drive)

    with pytest.raises(RolloutEnded):
        kept[0].another()


# -- refusals and errors -----------------------------------------------------------------------------------------------


async def test_a_prompt_without_room_for_a_completion_is_refused_and_the_agent_may_go_on() -> None:
    async def drive(_: int, client: AgentClient) -> float:
        with pytest.raises(ContextTooLong, match="got 8 tokens"):
            await client.generate(ids("too long"))
        await client.generate(ids("short"))
        return 1.0

    assert rows(await group_of(drive, max_length=8)) == ["shortOK."]


@pytest.mark.parametrize("prompt", [[], [-1], [[1]], [0.5], [2**40]])
async def test_a_prompt_that_is_no_row_of_ids_is_refused(prompt: Any) -> None:
    async def drive(_: int, client: AgentClient) -> float:
        with pytest.raises(InvalidRecord, match="tokens: expected"):
            await client.generate(prompt)
        await client.generate(ids("q"))
        return 1.0

    assert rows(await group_of(drive)) == ["qOK."]


async def test_a_call_after_the_rollout_is_refused() -> None:
    kept: list[AgentClient] = []

    async def drive(_: int, client: AgentClient) -> float:
        await client.generate(ids("q"))
        kept.append(client)
        return 1.0

    await driven(drive)

    with pytest.raises(RolloutEnded):
        await kept[0].generate(ids("q"))
    with pytest.raises(RolloutEnded):
        await kept[0].reward(1.0)


async def test_a_command_after_the_rollout_is_not_started(tmp_path: Path) -> None:
    kept: list[AgentClient] = []

    async def drive(_: int, client: AgentClient) -> float:
        await client.generate(ids("q"))
        kept.append(client)
        return 1.0

    await driven(drive)

    with pytest.raises(RolloutEnded):
        await kept[0].run(["touch", tmp_path / "started"])
    assert not await anyio.Path(tmp_path / "started").exists()


async def test_a_call_that_is_being_sampled_when_the_rollout_ends_is_ended() -> None:
    ended: list[type[Exception]] = []

    async def sample(client: AgentClient) -> None:
        try:
            await client.generate(ids("late"))
        except RolloutEnded as error:
            ended.append(type(error))

    async def drive(_: int, client: AgentClient) -> float:
        await client.generate(ids("q"))
        late.start_soon(sample, client)
        await stuck.wait()
        return 1.0

    stuck = anyio.Event()

    async def wait() -> None:
        if len(policy.prompts) == 2:
            stuck.set()
            await anyio.sleep_forever()

    policy = FakePolicy(wait=wait)
    async with anyio.create_task_group() as late:
        assert rows(await group_of(drive, policy)) == ["qOK."]

    assert ended == [RolloutEnded]


async def test_an_environment_bounds_the_calls_of_a_rollout() -> None:
    class Bounded(Agent):
        max_calls = 2

    async def drive(_: int, client: AgentClient) -> float:
        for _ in range(2):
            await client.generate(ids("q"))
        with pytest.raises(CallsUsedUp, match="expected at most 2 calls"):
            await client.generate(ids("q"))
        return 1.0

    (group,) = await drive_source(SourceEnv(lambda: Bounded(drive), FakePolicy(), group_size=1, groups=1))

    assert len(group) == 2


async def test_an_agent_that_raises_costs_its_rollout_alone() -> None:
    async def drive(_: int, client: AgentClient) -> float:
        await client.generate(ids("q"))
        if client.repetition == 1:
            raise ZeroDivisionError
        return 1.0

    ran = await driven(drive, group_size=3)

    assert ran[0].rollout_ids.tolist() == [0, 2]
    assert ran.metrics.emit(0)["rollout/dropped_tokens/failed"] == 3


async def test_an_error_of_the_policy_ends_the_run_whatever_the_agent_does_with_it() -> None:
    class Broken(FakePolicy):
        async def generate(self, prompts: Any, sampling: Any) -> Any:  # noqa: ARG002 (the protocol's)
            raise OSError("the engine is gone")

    async def drive(_: int, client: AgentClient) -> float:
        while True:
            with contextlib.suppress(Exception):
                await client.generate(ids("q"))

    with pytest.raises(OSError, match="the engine is gone"):
        await driven(drive, Broken())


async def test_a_call_that_the_engine_refuses_for_its_parameters_is_an_error_of_the_agent() -> None:
    class Picky(FakePolicy):
        async def generate(self, prompts: Any, sampling: SamplingParams) -> Any:
            if sampling.stop:
                raise InvalidConfig("SamplingParams.stop: expected none")
            return await super().generate(prompts, sampling)

    async def drive(_: int, client: AgentClient) -> float:
        await client.generate(ids("q"), SamplingParams(stop=("!",) * client.repetition))
        return 1.0

    ran = await driven(drive, Picky(), group_size=2)

    assert ran[0].rollout_ids.tolist() == [0]


def test_an_agent_without_end_is_given_up_at_its_deadline() -> None:
    async def drive(_: int, client: AgentClient) -> float:
        await client.generate(ids("q"))
        assert client.deadline_s == anyio.current_time() + 20
        await anyio.sleep_forever()
        return 1.0

    ran = VirtualClock().run(lambda: driven(drive, rollout_timeout_s=20))

    assert ran.ledger.balance().ended["failed"] == 1
    assert ran.metrics.emit(0)["rollout/dropped_tokens/cancelled"] == 3
