from __future__ import annotations

import asyncio
import os
import pickle
import sys
import threading
import types
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.atropos import step_environments
from tests.atropos.step_environments import (
    Doubling,
    Environment,
    Group,
    InTurn,
    Managed,
    Parallel,
    Rendered,
    Respelled,
    Steps,
    Texts,
    Trouble,
)
from tests.failsafe import FAILSAFE_S
from tests.fake_policy import FakePolicy
from tests.fake_policy import Letters as PolicyLetters

from penstock.errors import InvalidConfig, MissingExtra
from penstock.pipeline.context import Context, entered
from penstock.schemas import InvalidRecord, StopReason
from penstock.stages.environments import StepEnvironment
from penstock.stages.integrations.atropos.steps import episodes, stepwise
from penstock.stages.integrations.atropos.steps.conversation import Action, ModelCallRefused
from penstock.stages.integrations.atropos.steps.episodes import EnvironmentTimedOut
from penstock.stages.integrations.atropos.steps.home import NoMoreItems
from penstock.stages.integrations.atropos.steps.scoring import NotScored, sampled
from penstock.stages.integrations.atropos.steps.stepwise import (
    AtroposEnvironment,
    AtroposStepEnvironment,
    BlockingStepEnvironment,
    register_with_gem,
)
from penstock.stages.source_env import SourceEnv
from penstock.testing import drive_source

FILE = step_environments.__file__

PATIENCE_S = 1.0
"""Given to environments that hang; all else that they do takes milliseconds."""


@asynccontextmanager
async def playing(environment: AtroposEnvironment) -> AsyncIterator[AtroposStepEnvironment]:
    """One step-wise environment, closed at the end."""
    env = await anyio.to_thread.run_sync(environment)
    try:
        yield env
    finally:
        await env.close()


def bare(make: Callable[..., Any], **options: Any) -> AtroposEnvironment:
    return AtroposEnvironment(make, bare=True, **options)


# -- turns -------------------------------------------------------------------------------------------------------------


async def test_calls_are_observations_and_the_score_is_the_reward_of_the_last_step() -> None:
    async with playing(bare(Doubling)) as env:
        first, info = await env.reset(seed=1)
        hint = await env.step("3")
        *last, scored = await env.step("2")

    assert first == "Double.\n\n1?"
    assert info["sampling"] == {"max_tokens": 5, "temperature": 0.7}
    assert [message["role"] for message in info["messages"]] == ["system", "user"]
    assert hint[:4] == ("No, double.", 0.0, False, False)
    assert hint[4]["continues"]
    assert last == ["", 0.5, True, False]
    assert scored["scored"]["scores"] == 0.5
    assert scored["scored"]["messages"][-1] == {"role": "assistant", "content": "2"}


async def test_observations_of_an_environment_with_a_template_go_on_where_the_answer_ended() -> None:
    async with playing(AtroposEnvironment(Rendered)) as env:
        first, _ = await env.reset(seed=1)
        after_the_end, *_ = await env.step("3")
        await env.reset(seed=1)
        after_a_cut, *_ = await env.step(Action(text="3", stop_reason=StopReason.LENGTH))

    assert first == "<system>Double.\0<user>1?\0<assistant>"
    assert after_the_end == "<user>No, double.\0<assistant>"
    assert after_a_cut == "\0<user>No, double.\0<assistant>"


async def test_equal_seeds_begin_alike_and_an_episode_that_is_given_up_is_over() -> None:
    async with playing(bare(Doubling)) as env:
        begun = [(await env.reset(seed=seed))[0][-2:] for seed in (5, 5, 6, 5)]
        begun.append((await env.reset())[0][-2:])
        *_, over, _, _ = await env.step("6")

    assert begun == ["1?", "1?", "2?", "1?", "3?"]
    assert over


async def test_text_is_continued_by_what_is_new_and_ids_are_those_that_were_sampled() -> None:
    async with playing(AtroposEnvironment(Texts)) as env:
        first, info = await env.reset(seed=0)
        second, *_ = await env.step(" upon")
        third, *_, told = await env.step(" a time")
        *_, scored = await env.step(Action(text="ok", tokens=[5, 6], logprobs=[-0.5, -0.25]))

    assert (first, second, third) == ("Once", " and", "ids")
    assert info["sampling"] == {"max_tokens": 3, "stop": ["."]}
    assert not told["continues"]
    text, ids = scored["scored"]["images"]
    assert text == "Once upon and a time and"
    assert ids == ([1, 105, 100, 115], [[5, 6]], [[-0.5, -0.25]], ["stop"])


async def test_ids_that_nobody_gave_are_not_made_up() -> None:
    async with playing(AtroposEnvironment(Texts)) as env:
        await env.reset(seed=0)
        await env.step("")
        await env.step("")
        with pytest.raises(ModelCallRefused, match=r"expected actions with token ids .*, got text: step\(Action\("):
            await env.step("ok")


async def test_a_managed_server_keeps_the_tokens_that_the_caller_sampled() -> None:
    async with playing(AtroposEnvironment(Managed)) as env:
        _, first = await env.reset(seed=0)
        *_, second = await env.step(Action(text="x", tokens=[120, 0], logprobs=[-1.0, -2.0]))
        *_, last = await env.step(Action(text="y", tokens=[121], logprobs=[-3.0], stop_reason=StopReason.LENGTH))

    begin, then = "<user>a\0<assistant>", "<user>b\0<assistant>"
    prompt, more = [*map(ord, begin)], [*map(ord, then)]
    scored = last["scored"]
    assert first["input_ids"] == prompt
    assert second["input_ids"] == [*prompt, 120, 0, *more]
    assert scored["tokens"] == [*prompt, 120, 0, *more, 121]
    assert scored["masks"] == [*[-100] * len(prompt), 120, 0, *[-100] * len(more), 121]
    assert scored["inference_logprobs"] == [*[1.0] * len(prompt), -1.0, -2.0, *[1.0] * len(more), -3.0]
    assert scored["overrides"] == {"finish": "length"}


async def test_tokens_that_were_made_of_text_leave_nobody() -> None:
    async with playing(AtroposEnvironment(Managed)) as env:
        await env.reset(seed=0)
        await env.step(Action(text="x", tokens=[120, 0]))
        *_, last = await env.step("y")
        await env.reset(seed=0)
        await env.step(Action(text="x", tokens=[120, 0]))
        *_, without_logprobs = await env.step(Action(text="y", tokens=[121]))

    assert last["scored"].keys() == {"scores", "overrides"}
    assert without_logprobs["scored"]["tokens"][-1] == 121
    assert without_logprobs["scored"]["inference_logprobs"] is None


@pytest.mark.parametrize(
    ("action", "left"),
    [
        ("ab", set()),
        (Action(text="ab", tokens=[900], logprobs=[-0.5]), set()),
        (Action(text="ab", tokens=[97, 98], logprobs=[-0.5, -0.5]), {"tokens", "masks", "advantages"}),
        (Action(text="ab", tokens=[97, 98]), {"tokens", "masks", "advantages"}),
        (
            Action(text="ab", tokens=[97, 98], logprobs=[-9.0, -9.0]),
            {"tokens", "masks", "advantages", "inference_logprobs"},
        ),
    ],
)
async def test_of_what_an_environment_makes_by_itself_only_that_is_left_which_was_sampled(
    action: str | Action, left: set[str]
) -> None:
    async with playing(AtroposEnvironment(Respelled)) as env:
        await env.reset(seed=0)
        *_, last = await env.step(action)

    assert last["scored"].keys() == {"scores"} | left


async def test_ids_of_text_that_train_beside_sampled_ones_are_left_out_with_those() -> None:
    async with playing(AtroposEnvironment(Managed)) as env:
        await env.reset(seed=0)
        await env.step("x")
        *_, last = await env.step(Action(text="y", tokens=[121], logprobs=[-3.0]))

    assert last["scored"].keys() == {"scores", "overrides"}


@pytest.mark.parametrize("columns", [{"logprobs": [0.0]}, {"tokens": [1], "logprobs": [float("nan")]}])
def test_log_probabilities_without_tokens_are_refused(columns: dict[str, Any]) -> None:
    with pytest.raises(InvalidRecord, match=r"logprobs: expected a finite one for each of \d tokens"):
        Action(text="x", **columns)


# -- groups ------------------------------------------------------------------------------------------------------------


async def played(env: AtroposStepEnvironment, *answers: str, seed: int = 0) -> float:
    """The reward of an episode with these answers."""
    await env.reset(seed=seed)
    stepped = [await env.step(answer) for answer in answers]
    assert stepped[-1][2]
    return stepped[-1][1]


async def together(environment: AtroposEnvironment, *players: tuple[str, ...], seed: int = 0) -> list[Any]:
    """What each player comes to, all of them in one group."""
    async with AsyncExitStack() as stack:
        envs = [await stack.enter_async_context(playing(environment)) for _ in players]
        games = [played(env, *answers, seed=seed) for env, answers in zip(envs, players, strict=True)]
        return await asyncio.gather(*games, return_exceptions=True)


async def test_a_group_is_scored_together_and_every_answer_has_its_own_score() -> None:
    rewards = await together(AtroposEnvironment(Group, group_size=3), ("1",), ("2",), ("1",))

    assert rewards == [0.0, 1.0, 0.0]


async def test_conversations_side_by_side_are_told_apart_by_what_was_said() -> None:
    rewards = await together(bare(Parallel, group_size=2), ("a", "bc"), ("abc", "def"))

    assert rewards == [3.0, 6.0]


async def test_conversations_one_after_another_are_told_apart_even_if_nothing_is_said() -> None:
    rewards = await together(bare(InTurn, group_size=3), ("",), ("ab",), ("",))

    assert rewards == [0.0, 2.0, 0.0]


async def test_a_group_that_the_environment_drops_has_no_rewards() -> None:
    outcomes = await together(AtroposEnvironment(Group, group_size=2), ("1",), ("1",))

    assert [type(outcome) for outcome in outcomes] == [NotScored, NotScored]


async def test_a_group_that_is_not_complete_in_time_ends() -> None:
    environment = AtroposEnvironment(Group, group_size=2, timeout_s=PATIENCE_S)

    async with playing(environment) as env:
        await env.reset(seed=0)
        with pytest.raises(EnvironmentTimedOut, match=r"expected 2 step-wise .*same seed.*, got 1 within 1 s"):
            await env.step("1")
        with pytest.raises(InvalidConfig, match="expected a seed"):
            await env.reset()


async def test_the_others_of_a_group_are_told_that_one_of_them_left() -> None:
    environment = AtroposEnvironment(Group, group_size=2)

    async with playing(environment) as stays:
        async with playing(environment) as leaves:
            await leaves.reset(seed=0)
            await stays.reset(seed=0)
        with pytest.raises(EnvironmentTimedOut, match="another step-wise environment of the group was closed"):
            await stays.step("1")


async def test_where_every_turn_is_scored_the_last_score_counts_and_items_may_come_again() -> None:
    async with playing(bare(Steps)) as env:
        await env.reset(seed=0)
        await env.step("1")
        _, reward, *_ = await env.step("2")
        again, _ = await env.reset(seed=1)

    assert reward == 102.0
    assert again == "again 0"


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("hang", EnvironmentTimedOut, "worked for more than 1 s"),
        ("hang_in_thread", EnvironmentTimedOut, "worked for more than 1 s"),
        ("fail", ZeroDivisionError, "division"),
        ("exit", RuntimeError, "the environment exited, with 3"),
        ("drop", NotScored, "expected the environment to score this episode, got nothing"),
        ("infinite", NotScored, "expected a finite score, got inf"),
        ("nonsense", TypeError, "expected scored data, a list of them or None, got str"),
        ("logprobs", ModelCallRefused, "got get_logprobs"),
        ("many", ModelCallRefused, "got one with n=2: is group_size what"),
        ("render", ModelCallRefused, "expected a tokenizer"),
    ],
)
async def test_trouble_within_an_episode_ends_it_and_the_next_one_begins(
    kind: str, error: type[Exception], message: str
) -> None:
    trouble = Trouble(kind)

    async with playing(bare(trouble, timeout_s=PATIENCE_S if error is EnvironmentTimedOut else FAILSAFE_S)) as env:
        for _ in range(2):
            await env.reset()
            with pytest.raises(error, match=message):
                await env.step("!")
        with pytest.raises(ModelCallRefused, match=r"expected reset\(\) before step\(\)"):
            await env.step("!")
        await env.reset()
        trouble.release.put(None)
        trouble.release.put(None)

    assert trouble.ended[:2] == [kind, kind]


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("draw", EnvironmentTimedOut, "get_next_item took more than 1 s"),
        ("end", NoMoreItems, "expected a next item, got None"),
    ],
)
async def test_an_item_that_does_not_come_is_told(kind: str, error: type[Exception], message: str) -> None:
    async with playing(bare(Trouble(kind), timeout_s=PATIENCE_S)) as env:
        with pytest.raises(error, match=message):
            await env.reset()


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [("set up", LookupError, "no data set"), ("call early", ModelCallRefused, "got one from elsewhere")],
)
def test_an_environment_that_cannot_be_set_up_is_none(kind: str, error: type[Exception], message: str) -> None:
    environment = bare(Trouble(kind))

    for _ in range(2):
        with pytest.raises(error, match=message):
            environment()
    assert repr(environment) == "<AtroposEnvironment atropos: 0 players, 0 abandoned>"


async def test_an_environment_that_blocks_its_thread_is_left_to_itself_and_another_one_is_made() -> None:
    trouble = Trouble("block")
    environment = bare(trouble, timeout_s=PATIENCE_S)

    async with playing(environment) as env:
        await env.reset()
        with pytest.raises(EnvironmentTimedOut, match=r"blocked its thread for more than 1 s"):
            await env.step("!")
        assert environment.abandoned == 1
        assert (await env.reset())[0] == "?"
        ended = [thread for thread in threading.enumerate() if thread.name == "penstock Atropos environment"]
        trouble.release.put(None)
        trouble.release.put(None)
        await anyio.to_thread.run_sync(ended[0].join)

    assert environment.abandoned == 0


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("wait", r"setup took more than 1 s: see what it waits for, or raise opening_s"),
        ("block early", r"blocked its thread for more than 1 s while it was imported, made and set up"),
    ],
)
def test_a_setup_that_does_not_end_is_told_with_its_bound(kind: str, message: str) -> None:
    trouble = Trouble(kind)
    with pytest.raises(EnvironmentTimedOut, match=message):
        bare(trouble, opening_s=PATIENCE_S)()
    trouble.release.put(None)


async def test_a_module_that_blocks_holds_up_nobody_but_those_who_asked_for_it(tmp_path: Path) -> None:
    blocks, goes_on = os.pipe()
    path = tmp_path / "blocking.py"
    path.write_text(f"import os\nos.read({blocks}, 1)\nclass Class: ...")
    environment = AtroposEnvironment(f"{path}:Class", opening_s=PATIENCE_S)
    raised: list[EnvironmentTimedOut] = []

    def ask() -> None:
        with pytest.raises(EnvironmentTimedOut, match=r"blocked its thread for more than 1 s") as told:
            environment.blocking()
        raised.append(told.value)

    async with anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(anyio.to_thread.run_sync, ask)
        other = await anyio.to_thread.run_sync(AtroposEnvironment(f"{FILE}:Doubling", bare=True).blocking)
        await anyio.to_thread.run_sync(other.close)
    abandoned = environment.abandoned
    os.write(goes_on, b"!")

    assert (len(raised), abandoned) == (2, 1)
    for thread in threading.enumerate():
        if thread.name == "penstock Atropos environment":
            await anyio.to_thread.run_sync(thread.join)
    assert environment.abandoned == 0
    os.close(blocks)
    os.close(goes_on)


async def test_a_caller_that_stops_waiting_ends_what_it_waited_for() -> None:
    trouble = Trouble("hang")

    async with playing(bare(trouble)) as env:
        await env.reset()
        with anyio.move_on_after(PATIENCE_S) as waited:
            await env.step("!")
        await env.reset()

    assert waited.cancelled_caught
    assert trouble.ended[0] == "hang"


async def test_an_action_that_comes_too_late_does_no_harm() -> None:
    async with playing(bare(Trouble("impatient"))) as env:
        await env.reset()
        quick, *_ = await env.step("!")
        _, reward, over, *_ = await env.step("too late")

    assert (quick, reward, over) == ("quick", 1.0, True)


async def test_a_coroutine_that_clings_to_life_is_left_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episodes, "GRACE_S", 0.0)
    trouble = Trouble("cling")
    environment = bare(trouble, timeout_s=PATIENCE_S)

    async with playing(environment) as env:
        await env.reset()
        with pytest.raises(EnvironmentTimedOut, match="worked for more than"):
            await env.step("!")
        await env.reset()
        assert environment.abandoned == 1
        monkeypatch.setattr(stepwise, "MOST_ABANDONED", 1)
        with pytest.raises(EnvironmentTimedOut, match="expected an environment that returns, got 1 times"):
            await env.reset()
        (thread,) = [thread for thread in threading.enumerate() if thread.name == "penstock Atropos environment"]
        trouble.release.put(None)

    await anyio.to_thread.run_sync(thread.join)
    assert (environment.abandoned, trouble.ended) == (0, ["cling"])


async def test_a_template_that_is_missing_is_told_when_it_is_needed() -> None:
    async with playing(AtroposEnvironment(Doubling)) as env:
        with pytest.raises(
            ModelCallRefused, match=r"expected the environment to have a `tokenizer` with a chat template"
        ):
            await env.reset()


@pytest.mark.parametrize("options", [{"group_size": 0}, {"timeout_s": 0}, {"opening_s": 0}])
def test_a_recipe_that_can_never_work_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match=f"{next(iter(options))}: expected a .* number .*, got 0"):
        AtroposEnvironment(Doubling, **options)


# -- where it comes from -----------------------------------------------------------------------------------------------


def test_an_environment_is_made_as_atropos_makes_it() -> None:
    made: list[Environment] = []

    class Noted(Doubling):
        async def setup(self) -> None:
            await super().setup()
            made.append(self)

    env = bare(Noted, config={"first": 7}).blocking()
    observation, _ = env.reset(seed=0)
    env.step("16")
    env.close()
    env.close()

    (one,) = made
    assert observation == "Double.\n\n8?"
    assert (one.config.group_size, one.config.use_wandb, one.made_for) == (1, False, (False, True))
    assert one.cleanups == 1


def test_a_file_is_loaded_once_and_nothing_global_is_changed() -> None:
    path, policy = list(sys.path), asyncio.get_event_loop_policy()
    environments = [AtroposEnvironment(f"{FILE}:Doubling", bare=True) for _ in range(2)]

    envs = [environment.blocking() for environment in environments]
    observations = [env.reset(seed=0)[0] for env in envs]
    for env in envs:
        env.close()

    assert observations == ["Double.\n\n1?"] * 2
    assert (sys.path, asyncio.get_event_loop_policy()) == (path, policy)
    assert environments[0].__name__ == "Doubling"
    assert not [thread for thread in threading.enumerate() if thread.name == "penstock Atropos environment"]


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("nowhere", "expected package.module:Class or folder/file.py:Class, got 'nowhere'"),
        ("no.such.module:Class", "expected a module no.such.module, got none"),
        ("no/such/file.py:Class", "expected a file, got nothing at /.*no/such/file.py"),
        (f"{FILE}:Halving", "expected a class Halving in .*, got .*Doubling"),
        ("collections:UserDict", "expected an Atropos environment"),
    ],
)
def test_a_place_where_there_is_no_environment_is_told(where: str, message: str) -> None:
    with pytest.raises((InvalidConfig, AttributeError), match=message):
        AtroposEnvironment(where)()


def test_a_file_that_raises_is_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("import no_such_module")
    before = set(sys.modules)

    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="no_such_module"):
            AtroposEnvironment(f"{path}:Class")()
    assert not [name for name in sys.modules.keys() - before if "broken" in name]


async def test_a_source_plays_it_in_a_worker_too() -> None:
    sent: AtroposEnvironment = pickle.loads(  # noqa: S301 (our own bytes)
        pickle.dumps(AtroposEnvironment(f"{FILE}:Group", group_size=4, bare=True))
    )
    answers = iter("1234" * 2)
    policy = FakePolicy(answer=lambda _: next(answers))

    with entered(Context()):
        groups = await drive_source(SourceEnv(sent, policy, PolicyLetters(), group_size=4, groups=2, threads=1))

    assert isinstance(AtroposStepEnvironment, type)
    assert [group.env for group in groups] == ["Group"] * 2
    assert sorted(group.rewards.tolist() for group in groups) == [[0.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0]]
    assert groups[0].behavior_logprobs is not None


async def test_gem_makes_it_by_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingExtra, match="pip install gem-llm"):
        register_with_gem("atropos/doubling", bare(Doubling))
    gem = types.ModuleType("gem")
    registered: dict[Any, Any] = {}
    gem.Env = type("Env", (), {"register": registered.setdefault})  # type: ignore[attr-defined]
    gem.register = registered.__setitem__  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gem", gem)

    register_with_gem("atropos/doubling", bare(Doubling))
    env = await anyio.to_thread.run_sync(registered["atropos/doubling"])

    assert isinstance(env, BlockingStepEnvironment)
    assert isinstance(env, StepEnvironment)
    await anyio.to_thread.run_sync(env.close)


@pytest.mark.parametrize("unknown", [None, "-1"])
def test_logprobs_of_a_row_that_are_no_numbers_are_left_out(unknown: object) -> None:
    row = {"tokens": [1, 5, 6], "masks": [-100, 5, 6], "inference_logprobs": [1.0, -0.5, unknown]}

    told = sampled(row, [Action(text="ok", tokens=[5, 6], logprobs=[-0.5, -0.25])])

    assert told == {"tokens": [1, 5, 6], "masks": [-100, 5, 6]}
