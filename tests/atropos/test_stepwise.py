from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import types
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.atropos import step_environments
from tests.atropos.step_environments import (
    STAND_IN,
    Doubling,
    Group,
    Parallel,
    Process,
    Steps,
    Texts,
    Troubled,
    Turns,
)
from tests.failsafe import FAILSAFE_S
from tests.fake_policy import FakePolicy
from tests.fake_policy import Letters as PolicyLetters

from penstock import SourceEnv, StopReason, TrajectoryGroup
from penstock._stages.integrations.atropos.steps.episodes import sampled
from penstock._stages.integrations.atropos.steps.messages import (
    EnvironmentDied,
    EnvironmentRaised,
    EnvironmentTimedOut,
    GroupIncomplete,
    ModelCallRefused,
    NoMoreItems,
    NotScored,
)
from penstock._stages.integrations.atropos.steps.stepwise import AtroposStepEnvironment, BlockingStepEnvironment
from penstock.environments import StepEnvironment
from penstock.errors import InvalidConfig, InvalidRecord, MissingExtra
from penstock.integrations.atropos import Action, AtroposEnvironment, register_with_gem
from penstock.testing import Driven, drive_source

FILE = step_environments.__file__

SHORT_S = 1.0
"""Given to environments that hang."""


@pytest.fixture(autouse=True)
def stand_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes of environments find the stand-in for atroposlib."""
    if "without_atroposlib" not in request.fixturenames:
        monkeypatch.syspath_prepend(str(STAND_IN))


@pytest.fixture
def without_atroposlib() -> None:
    """Let them find none."""


@asynccontextmanager
async def playing(environment: AtroposEnvironment) -> AsyncIterator[AtroposStepEnvironment]:
    """Yield one step-wise environment, and close it at the end."""
    env = await anyio.to_thread.run_sync(environment)
    try:
        yield env
    finally:
        await env.close()


async def ended(pid: int) -> None:
    """Wait until there is no such process."""
    with anyio.fail_after(FAILSAFE_S):
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        await anyio.wait_readable(descriptor)
        os.close(descriptor)


# -- turns -------------------------------------------------------------------------------------------------------------


async def test_calls_are_observations_and_the_score_is_the_reward_of_the_last_step() -> None:
    async with playing(AtroposEnvironment(Doubling)) as env:
        first, info = await env.reset(seed=1)
        hint = await env.step("3")
        *last, scored = await env.step("2")

    assert first == "<system>Double.\0<user>1?\0<assistant>"
    assert info["sampling"] == {"max_tokens": 5, "temperature": 0.7}
    assert [message["role"] for message in info["messages"]] == ["system", "user"]
    assert hint[:4] == ("<user>No, double.\0<assistant>", 0.0, False, False)
    assert hint[4]["continues"]
    assert last == ["", 0.5, True, False]
    assert scored["scored"]["scores"] == 0.5
    assert scored["scored"]["messages"][-1] == {"role": "assistant", "content": "2"}


async def test_the_mark_that_ends_an_answer_is_part_of_it_unless_the_answer_was_cut() -> None:
    async with playing(AtroposEnvironment(Doubling)) as env:
        await env.reset(seed=1)
        after_a_cut, *_ = await env.step(Action(text="3", stop_reason=StopReason.LENGTH))

    assert after_a_cut == "\0<user>No, double.\0<assistant>"


async def test_equal_seeds_begin_alike_and_an_episode_that_is_given_up_is_over() -> None:
    async with playing(AtroposEnvironment(Doubling)) as env:
        begun = [(await env.reset(seed=seed))[0].partition("?")[0][-1] for seed in (5, 5, 6, 5)]
        begun.append((await env.reset())[0].partition("?")[0][-1])
        *_, over, _, _ = await env.step("6")

    assert begun == ["1", "1", "2", "1", "3"]
    assert over


async def test_text_is_continued_by_what_is_new_and_ids_are_those_that_were_sampled() -> None:
    async with playing(AtroposEnvironment(Texts)) as env:
        first, info = await env.reset(seed=0)
        second, *_ = await env.step(" upon")
        third, *_, later = await env.step(" a time")
        *_, scored = await env.step(Action(text="ok", tokens=[5, 6], logprobs=[-0.5, -0.25]))

    assert (first, second, third) == ("Once", " and", "ids")
    assert info["sampling"] == {"max_tokens": 3, "stop": ["."]}
    assert not later["continues"]
    text, ids = scored["scored"]["images"]
    assert text == "Once upon and a time and"
    assert ids == [[1, 105, 100, 115], [[5, 6]], [[-0.5, -0.25]], ["stop"]]


async def test_of_text_alone_the_ids_are_its_own_and_the_log_probabilities_say_that_there_are_none() -> None:
    async with playing(AtroposEnvironment(Texts)) as env:
        await env.reset(seed=0)
        await env.step("")
        await env.step("")
        *_, scored = await env.step("ok")

    assert scored["scored"]["images"][1][1:3] == [[[111, 107]], [[1.0, 1.0]]]


# -- what was sampled --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "left"),
    [
        (Action(text="ab"), set()),
        (Action(text="ab", tokens=[900], logprobs=[-0.5]), set()),
        (Action(text="ab", tokens=[97, 98], logprobs=[-0.5, -0.5]), {"tokens", "masks", "advantages"}),
        (Action(text="ab", tokens=[97, 98]), {"tokens", "masks", "advantages"}),
        (
            Action(text="ab", tokens=[97, 98], logprobs=[-9.0, -9.0]),
            {"tokens", "masks", "advantages", "inference_logprobs"},
        ),
    ],
)
def test_of_what_an_environment_makes_by_itself_only_that_is_left_which_was_sampled(
    action: Action, left: set[str]
) -> None:
    row = {
        "tokens": [7, 97, 98],
        "masks": [-100, 97, 98],
        "inference_logprobs": [1.0, -9.0, -9.0],
        "advantages": [0.5, 0.5, 0.5],
        "scores": 1.0,
    }

    assert sampled(row, [action]).keys() == {"scores"} | left


def test_ids_of_text_that_train_beside_sampled_ones_are_left_out_with_those() -> None:
    row = {"tokens": [120, 121], "masks": [120, 121], "scores": 1.0}

    assert sampled(row, [Action(text="x"), Action(text="y", tokens=[121])]).keys() == {"scores"}


@pytest.mark.parametrize("before", [[], [Action(text="a", tokens=[5])]])
@pytest.mark.parametrize("after", [[], [Action(text="c")], [Action(text="c", tokens=[9], logprobs=[-1.0])]])
def test_of_several_turns_one_alone_may_train(before: list[Action], after: list[Action]) -> None:
    row = {"tokens": [5, 8, 6], "masks": [-100, -100, 6], "inference_logprobs": [1.0, 1.0, -2.0]}

    assert sampled(row, [*before, Action(text="b", tokens=[6], logprobs=[-2.0]), *after]) == row


@pytest.mark.parametrize("unknown", [None, "-1"])
def test_logprobs_of_a_row_that_are_no_numbers_are_left_out(unknown: object) -> None:
    row = {"tokens": [1, 5, 6], "masks": [-100, 5, 6], "inference_logprobs": [1.0, -0.5, unknown]}

    kept = sampled(row, [Action(text="ok", tokens=[5, 6], logprobs=[-0.5, -0.25])])

    assert kept == {"tokens": [1, 5, 6], "masks": [-100, 5, 6]}


@pytest.mark.parametrize("columns", [{"logprobs": [0.0]}, {"tokens": [1], "logprobs": [float("nan")]}])
def test_log_probabilities_without_tokens_are_refused(columns: dict[str, Any]) -> None:
    with pytest.raises(InvalidRecord, match=r"logprobs: expected a finite one for each of \d tokens"):
        Action(text="x", **columns)


# -- groups ------------------------------------------------------------------------------------------------------------


async def played(env: AtroposStepEnvironment, *answers: str) -> float:
    """Return the reward of an episode with these answers."""
    await env.reset(seed=0)
    stepped = [await env.step(answer) for answer in answers]
    assert stepped[-1][2]
    return stepped[-1][1]


async def together(environment: AtroposEnvironment, *players: tuple[str, ...]) -> list[Any]:
    """Run all players in one group; return the outcome of each."""
    async with AsyncExitStack() as stack:
        envs = [await stack.enter_async_context(playing(environment)) for _ in players]
        games = [played(env, *answers) for env, answers in zip(envs, players, strict=True)]
        return await asyncio.gather(*games, return_exceptions=True)


async def test_a_group_is_scored_together_and_every_answer_has_its_own_score() -> None:
    rewards = await together(AtroposEnvironment(Group, group_size=3), ("1",), ("2",), ("1",))

    assert rewards == [0.0, 1.0, 0.0]


async def test_concurrent_conversations_are_distinguished_by_their_text() -> None:
    rewards = await together(AtroposEnvironment(Parallel, group_size=2), ("a", "bc"), ("abc", "def"))

    assert rewards == [3.0, 6.0]


async def test_a_second_turn_goes_to_the_seat_of_the_first_also_if_its_answer_was_reformatted() -> None:
    rewards = await together(
        AtroposEnvironment(Turns, group_size=4),
        ("<think>a</think>no",),
        ("<think>b</think>b x", "x b"),
        ("<think>c</think>c x", "no c"),
        ("<think>b</think>d x", "x d"),
    )

    assert rewards == [0.0, 2.0, 1.0, 2.0]


async def test_a_group_that_the_environment_drops_has_no_rewards() -> None:
    outcomes = await together(AtroposEnvironment(Group, group_size=2), ("1",), ("1",))

    assert [type(outcome) for outcome in outcomes] == [NotScored, NotScored]
    # a reason of the ledger has 200 characters at most, with what SourceEnv puts before it
    assert {len(str(outcome)) < 170 for outcome in outcomes} == {True}
    assert all(str(outcome).endswith("all right (the task is learned) or all wrong") for outcome in outcomes)


async def test_a_group_that_is_not_complete_in_time_ends() -> None:
    environment = AtroposEnvironment(Group, group_size=2, turn_timeout_s=SHORT_S)

    async with playing(environment) as env:
        await env.reset(seed=0)
        with pytest.raises(GroupIncomplete, match=r"expected 2 step-wise .*same seed.*, got 1 within 1 s"):
            await env.step("1")
        with pytest.raises(InvalidConfig, match="expected a seed"):
            await env.reset()


async def test_a_group_ends_when_one_of_its_players_leaves() -> None:
    environment = AtroposEnvironment(Group, group_size=2)

    async with playing(environment) as stays:
        async with playing(environment) as leaves:
            await leaves.reset(seed=0)
            await stays.reset(seed=0)
        with pytest.raises(GroupIncomplete, match="of the group was reset or closed"):
            await stays.step("1")


async def test_where_every_turn_is_scored_the_last_score_counts_and_items_may_come_again() -> None:
    async with playing(AtroposEnvironment(Steps)) as env:
        await env.reset(seed=0)
        await env.step("1")
        _, reward, *_ = await env.step("2")
        again, _ = await env.reset(seed=1)

    assert reward == 102.0
    assert again == "again 0"


# -- the process -------------------------------------------------------------------------------------------------------


async def test_all_of_one_environment_share_a_process_whose_main_thread_is_theirs() -> None:
    environment = AtroposEnvironment(Process)

    async with playing(environment) as one, playing(environment) as other:
        pids = {(await env.reset())[0] for env in (one, other)}
        rewards = [(await env.step(""))[1] for env in (one, other)]

    (pid,) = {int(pid.split()[0]) for pid in pids}
    assert pid != os.getpid()
    assert rewards == [1.0, 1.0]
    await ended(pid)


PARENT = f"""
import sys, time
from tests.atropos.step_environments import Process, Troubled
from penstock._stages.integrations.atropos import AtroposEnvironment

if __name__ == "__main__":
    env = AtroposEnvironment(eval(sys.argv[1])).blocking()
    print(env.reset()[0], flush=True)
    env.step("block")
    time.sleep({FAILSAFE_S})
"""


@pytest.mark.parametrize("environment", ["Process", "Troubled()"])
async def test_the_process_ends_with_its_parent(environment: str, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    command = [sys.executable, str(script), environment]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}

    async with await anyio.open_process(command, stdout=subprocess.PIPE, stderr=None, env=environ) as parent:
        assert parent.stdout is not None
        with anyio.fail_after(FAILSAFE_S):
            pid = int((await parent.stdout.receive()).split()[0])
        parent.send_signal(signal.SIGKILL)

    await ended(pid)


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def troubled() -> Iterator[AtroposEnvironment]:
    """Yield an environment whose process survives all failures of these tests."""
    environment = AtroposEnvironment(Troubled())
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(STAND_IN))
        env = environment.blocking()
    yield environment
    env.close()


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("fail", EnvironmentRaised, "ZeroDivisionError: division"),
        ("exit", EnvironmentRaised, "the environment exited, with 3"),
        ("drop", NotScored, "expected the environment to score this episode, got no score"),
        ("infinite", EnvironmentRaised, "expected a finite score, got inf"),
        ("nonsense", EnvironmentRaised, "expected scored data, a list of them or None, got str"),
        ("logprobs", ModelCallRefused, "got get_logprobs"),
        ("many", ModelCallRefused, "got n=2: is group_size, 1, what"),
        ("ids", ModelCallRefused, "expected a prompt of type str, got list"),
        ("render", ModelCallRefused, "with a chat template"),
    ],
)
async def test_trouble_within_an_episode_ends_it_and_the_next_one_begins_in_the_same_process(
    troubled: AtroposEnvironment, kind: str, error: type[Exception], message: str
) -> None:
    async with playing(troubled) as env:
        pids = set()
        for _ in range(2):
            pids.add((await env.reset())[0])
            with pytest.raises(error, match=message):
                await env.step(kind)
        with pytest.raises(ModelCallRefused, match=r"expected reset\(\) before step\(\)"):
            await env.step("!")

    assert len(pids) == 1


async def test_work_that_hangs_is_cancelled() -> None:
    async with playing(AtroposEnvironment(Troubled(), turn_timeout_s=SHORT_S)) as env:
        first, _ = await env.reset()
        with pytest.raises(EnvironmentTimedOut, match="worked for more than 1 s a turn"):
            await env.step("hang")
        second, _ = await env.reset()

    assert first == second


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("block", EnvironmentTimedOut, "blocked its process for more than 1 s"),
        ("die", EnvironmentDied, "process exited with status 3"),
    ],
)
async def test_a_process_that_is_lost_is_followed_by_another(kind: str, error: type[Exception], message: str) -> None:
    async with playing(AtroposEnvironment(Troubled(), turn_timeout_s=SHORT_S)) as env:
        first, _ = await env.reset()
        with pytest.raises(error, match=message):
            await env.step(kind)
        with pytest.raises(error, match=message):
            await env.step("!")
        await ended(int(first))
        second, _ = await env.reset()

    assert first != second


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("draw", EnvironmentTimedOut, "get_next_item took more than 1 s"),
        ("end", NoMoreItems, "expected a next item, got None"),
    ],
)
async def test_an_item_that_does_not_arrive_is_an_error(kind: str, error: type[Exception], message: str) -> None:
    async with playing(AtroposEnvironment(Troubled(kind), turn_timeout_s=SHORT_S)) as env:
        with pytest.raises(error, match=message):
            await env.reset()


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("fail early", EnvironmentRaised, "LookupError: no data set"),
        ("call early", ModelCallRefused, "got one from elsewhere"),
        ("exit early", EnvironmentDied, "exited with status 3"),
        ("wait early", EnvironmentTimedOut, "took more than 1 s to be imported, made and set up"),
        ("block early", EnvironmentTimedOut, "took more than 1 s to be imported, made and set up"),
    ],
)
def test_an_environment_that_cannot_be_set_up_is_none(kind: str, error: type[Exception], message: str) -> None:
    limit_s = 1.0 if error is EnvironmentTimedOut else FAILSAFE_S
    environment = AtroposEnvironment(Troubled(kind), setup_timeout_s=limit_s)

    with pytest.raises(error, match=message):
        environment()
    assert repr(environment) == "<AtroposEnvironment atropos: 0 players>"


async def test_an_error_carries_the_traceback_of_its_process(troubled: AtroposEnvironment) -> None:
    async with playing(troubled) as env:
        await env.reset()
        with pytest.raises(EnvironmentRaised) as raised:
            await env.step("fail")

    assert "step_environments.py" in raised.value.__notes__[0]


async def test_a_caller_that_stops_waiting_ends_what_it_waited_for() -> None:
    environment = AtroposEnvironment(Group, group_size=2)

    async with playing(environment) as stops, playing(environment) as stays:
        await stops.reset(seed=0)
        await stays.reset(seed=0)
        with anyio.move_on_after(SHORT_S) as waited:
            await stops.step("1")
        with pytest.raises(GroupIncomplete):
            await stays.step("1")

    assert waited.cancelled_caught


async def test_an_action_that_comes_too_late_does_no_harm(troubled: AtroposEnvironment) -> None:
    async with playing(troubled) as env:
        await env.reset()
        quick, *_ = await env.step("impatient")
        _, reward, over, *_ = await env.step("too late")

    assert (quick, reward, over) == ("quick", 1.0, True)


@pytest.mark.parametrize("options", [{"group_size": 0}, {"turn_timeout_s": 0}, {"setup_timeout_s": 0}])
def test_numbers_that_can_never_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match=f"{next(iter(options))}: expected a .* number .*, got 0"):
        AtroposEnvironment(Doubling, **options)


# -- where it comes from -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("without_atroposlib")
def test_without_atroposlib_the_error_names_the_package_to_install() -> None:
    with pytest.raises(MissingExtra, match=r"needs atroposlib: pip install atroposlib==0\.4\.0"):
        AtroposEnvironment(f"{FILE}:Doubling")()


def test_a_file_finds_what_lies_beside_it_and_its_configuration_is_changed(tmp_path: Path) -> None:
    (tmp_path / "numbers_of_doubling.py").write_text("FIRST = 7")
    (tmp_path / "env.py").write_text(
        "from numbers_of_doubling import FIRST\n"
        "from tests.atropos.step_environments import Doubling\n"
        "class Env(Doubling):\n"
        "    async def setup(self):\n"
        "        self.next = FIRST + self.config.first\n"
    )
    env = AtroposEnvironment(f"{tmp_path}/env.py:Env", config={"first": 1}).blocking(seed=3)

    observation, _ = env.reset()
    env.close()
    env.close()

    assert "9?" in observation


@pytest.mark.parametrize(
    ("where", "error", "message"),
    [
        ("nowhere", InvalidConfig, "expected package.module:Class or folder/file.py:Class, got 'nowhere'"),
        ("no.such.module:Class", EnvironmentRaised, "No module named 'no'"),
        ("no/such/file.py:Class", InvalidConfig, "expected a file, got none at /.*no/such/file.py"),
        (f"{FILE}:Halving", InvalidConfig, "expected a class Halving in .*, got none"),
        ("collections:UserDict", InvalidConfig, "expected an Atropos environment"),
    ],
)
def test_a_place_without_an_environment_is_an_error(where: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        AtroposEnvironment(where)()


async def sampled_groups(environment: AtroposEnvironment, answer: Callable[[str], str]) -> Driven[TrajectoryGroup]:
    source = SourceEnv(environment, FakePolicy(answer=answer), PolicyLetters(), group_size=4, groups=2, threads=1)
    return await drive_source(source)


async def test_a_source_plays_it_in_a_worker_too() -> None:
    sent: AtroposEnvironment = pickle.loads(  # noqa: S301 (our own bytes)
        pickle.dumps(AtroposEnvironment(f"{FILE}:Group", group_size=4))
    )
    answers = {"1?": iter("1234"), "2?": iter("1234")}

    groups = await sampled_groups(sent, lambda prompt: next(answers[prompt]))

    assert [group.env for group in groups] == ["Group"] * 2
    assert [sorted(group.rewards.tolist()) for group in groups] == [[0.0, 0.0, 0.0, 1.0]] * 2
    assert groups[0].behavior_logprobs is not None


async def test_rollouts_of_a_group_that_the_environment_drops_are_filtered() -> None:
    groups = await sampled_groups(AtroposEnvironment(f"{FILE}:Group", group_size=4), lambda _: "1")

    assert groups == []
    ended = groups.ledger.balance()
    assert ended.ended["filtered"] == ended.admitted == 8
    assert "expected the environment to score this episode, got no score" in next(iter(ended.reasons["filtered"]))


async def test_a_rollout_without_room_for_another_turn_is_scored_with_its_group() -> None:
    answers = iter(["no", "a x", "b x", "c x"])
    environment = AtroposEnvironment(f"{FILE}:Turns", group_size=4)
    policy = FakePolicy(answer=lambda _: next(answers))
    source = SourceEnv(environment, policy, PolicyLetters(), group_size=4, groups=1, max_length=32, threads=1)

    (group,) = await drive_source(source)

    ended = sorted(zip(group.rewards.tolist(), group.stop_reasons.tolist(), strict=True))
    assert ended == [(0.0, StopReason.STOP)] + [(1.0, StopReason.LENGTH)] * 3


async def test_rollouts_whose_model_call_is_refused_fail_with_the_reason(troubled: AtroposEnvironment) -> None:
    groups = await sampled_groups(troubled, lambda _: "logprobs")

    assert groups == []
    (reason,) = groups.ledger.balance().reasons["failed"]
    assert "ModelCallRefused: expected model calls that an action answers, got get_logprobs" in reason


async def test_gem_makes_it_by_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingExtra, match="pip install gem-llm"):
        register_with_gem("atropos/doubling", AtroposEnvironment(Doubling))
    gem = types.ModuleType("gem")
    registered: dict[Any, Any] = {}
    gem.Env = type("Env", (), {"register": registered.setdefault})  # type: ignore[attr-defined]
    gem.register = registered.__setitem__  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gem", gem)

    register_with_gem("atropos/doubling", AtroposEnvironment(Doubling))
    env = await anyio.to_thread.run_sync(registered["atropos/doubling"])

    assert isinstance(env, BlockingStepEnvironment)
    assert isinstance(env, StepEnvironment)
    await anyio.to_thread.run_sync(env.close)
