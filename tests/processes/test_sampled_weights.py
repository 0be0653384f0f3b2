"""The torch policy on weights that are published over a real segment and a real socket."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import numpy as np
import pytest
import torch
from anyio.lowlevel import checkpoint
from tests.fake_policy import Letters
from tests.fixed_limits import set_limits
from tests.moments import moment
from tests.tiny_model import TinyModel
from torch import Tensor

from penstock import Context, Worker
from penstock.errors import EngineRefused, PeerLost, WeightsMismatch
from penstock.policies import Completion, Engine, SamplingParams
from penstock.testing import entered
from penstock.torch import Attention, KVCache, TorchPolicy, WeightFolder
from penstock.weights import WeightPublisher, WeightSubscriber

PROMPT = np.array([1, 2], np.int32)
EOS = 99


async def one(engine: Engine) -> Completion:
    (completion,) = await engine.generate([PROMPT], SamplingParams(max_completion_tokens=8, greedy=True))
    return completion


async def settle() -> None:
    for _ in range(100):
        await checkpoint()


async def untrained(seed: int) -> list[int]:
    """Sample a model that was made with `seed`."""
    async with TorchPolicy(partial(TinyModel, seed=seed), EOS).open(Worker()) as engine:
        completion = await one(engine)
        return [int(token) for token in completion.tokens]


async def test_each_batch_is_sampled_with_the_newest_version_and_reports_it() -> None:
    async with WeightPublisher(TinyModel().state_dict()) as publisher:
        policy = TorchPolicy(partial(TinyModel, seed=7), EOS, weights=publisher.url)
        async with policy.open(Worker()) as engine:
            await publisher.publish(TinyModel(seed=1).state_dict(), version=10)
            first = await one(engine)
            await publisher.publish(TinyModel(seed=2).state_dict(), version=20)
            second = await one(engine)

    assert first.tokens.tolist() == await untrained(1)
    assert second.tokens.tolist() == await untrained(2)
    assert (set(first.policy_versions.tolist()), set(second.policy_versions.tolist())) == ({10}, {20})


async def test_nothing_is_sampled_before_the_first_version() -> None:
    sampled: list[Completion] = []

    async def ask(engine: Engine) -> None:
        sampled.append(await one(engine))

    async with (
        WeightPublisher(TinyModel().state_dict()) as publisher,
        TorchPolicy(TinyModel, EOS, weights=publisher.url).open(Worker()) as engine,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(ask, engine)
        await settle()
        assert not sampled
        await publisher.publish(TinyModel().state_dict(), version=0)

    assert set(sampled[0].policy_versions.tolist()) == {0}


async def test_a_pause_waits_for_the_batch_and_holds_the_next_until_it_ends() -> None:
    sampled: list[Completion] = []

    async def ask(engine: Engine) -> None:
        sampled.append(await one(engine))

    async with WeightPublisher(TinyModel().state_dict()) as publisher:
        await publisher.publish(TinyModel().state_dict(), version=0)
        async with (
            TorchPolicy(TinyModel, EOS, weights=publisher.url).open(Worker()) as engine,
            anyio.create_task_group() as tasks,
            publisher.paused(),
        ):
            tasks.start_soon(ask, engine)
            await publisher.publish(TinyModel(seed=1).state_dict(), version=1)
            await settle()
            assert not sampled

    assert set(sampled[0].policy_versions.tolist()) == {1}


# -- explicit updates ----------------------------------------------------------------------------------------------


async def test_an_engine_samples_with_the_version_of_its_update_and_not_with_newer_ones() -> None:
    async with (
        WeightPublisher(TinyModel().state_dict()) as publisher,
        TorchPolicy(partial(TinyModel, seed=7), EOS).open(Worker()) as engine,
    ):
        before = await one(engine)
        await publisher.publish(TinyModel(seed=1).state_dict(), version=10)
        await engine.update_weights(publisher.url, version=10)
        await publisher.publish(TinyModel(seed=2).state_dict(), version=20)
        updated = await one(engine)
        await engine.update_weights(publisher.url, version=15)
        newer = await one(engine)

    assert [before.tokens.tolist(), updated.tokens.tolist(), newer.tokens.tolist()] == [
        await untrained(seed) for seed in (7, 1, 2)
    ]
    assert [int(sampled.policy_versions[0]) for sampled in (before, updated, newer)] == [0, 10, 20]


async def test_an_update_waits_for_its_version() -> None:
    async with (
        WeightPublisher(TinyModel().state_dict()) as publisher,
        TorchPolicy(TinyModel, EOS).open(Worker()) as engine,
        anyio.create_task_group() as tasks,
    ):
        await publisher.publish(TinyModel(seed=1).state_dict(), version=1)
        tasks.start_soon(engine.update_weights, publisher.url, 2)
        await settle()
        between = await one(engine)
        assert int(between.policy_versions[0]) == 0
        await publisher.publish(TinyModel(seed=2).state_dict(), version=2)


async def test_requests_during_a_pause_are_sampled_after_it_with_the_newer_weights() -> None:
    sampled: list[Completion] = []

    async def ask(engine: Engine) -> None:
        sampled.append(await one(engine))

    async with (
        WeightPublisher(TinyModel().state_dict()) as publisher,
        TorchPolicy(TinyModel, EOS).open(Worker()) as engine,
        anyio.create_task_group() as tasks,
    ):
        await engine.pause()
        tasks.start_soon(ask, engine)
        await publisher.publish(TinyModel(seed=3).state_dict(), version=3)
        await engine.update_weights(publisher.url, 3)
        await settle()
        assert not sampled
        await engine.resume()

    assert sampled[0].tokens.tolist() == await untrained(3)
    assert set(sampled[0].policy_versions.tolist()) == {3}


async def test_a_paused_engine_does_not_keep_a_pause_of_the_publisher_waiting_nor_the_other_way_round() -> None:
    sampled: list[Completion] = []

    async def ask(engine: Engine) -> None:
        sampled.append(await one(engine))

    async with WeightPublisher(TinyModel().state_dict()) as publisher:
        await publisher.publish(TinyModel().state_dict(), version=0)
        async with (
            TorchPolicy(TinyModel, EOS, weights=publisher.url).open(Worker()) as engine,
            anyio.create_task_group() as tasks,
        ):
            await engine.pause()
            tasks.start_soon(ask, engine)
            await settle()
            async with publisher.paused():
                await engine.resume()
                await settle()
                await engine.pause()
            await settle()
            assert not sampled
            await engine.resume()

    assert sampled


async def test_an_engine_that_sleeps_gives_memory_back_and_wakes_with_the_newest_weights() -> None:
    models: list[TinyModel] = []

    def make_model() -> TinyModel:
        models.append(TinyModel())
        return models[0]

    def held() -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in models[0].state_dict().values())

    async with WeightPublisher(TinyModel().state_dict()) as publisher:
        await publisher.publish(TinyModel(seed=1).state_dict(), version=1)
        async with TorchPolicy(make_model, EOS).open(Worker()) as engine:
            await engine.update_weights(publisher.url, 1)
            awake = held()
            await engine.sleep()
            await engine.sleep()
            asleep = held()
            with pytest.raises(EngineRefused, match=r"asleep, version 1.*call wake_up first"):
                await engine.update_weights(publisher.url, 1)
            await publisher.publish(TinyModel(seed=2).state_dict(), version=2)
            await engine.wake_up()
            sampled = await one(engine)
            woken = held()

    assert (asleep, woken) == (0, awake)
    assert sampled.tokens.tolist() == await untrained(2)
    assert set(sampled.policy_versions.tolist()) == {2}


async def test_an_engine_without_a_publisher_keeps_its_weights_while_it_sleeps() -> None:
    async with TorchPolicy(partial(TinyModel, seed=5), EOS).open(Worker()) as engine:
        await engine.sleep()
        await engine.wake_up()
        sampled = await one(engine)

    assert sampled.tokens.tolist() == await untrained(5)


async def test_an_engine_has_its_weights_from_one_publisher() -> None:
    async with (
        WeightPublisher(TinyModel().state_dict()) as publisher,
        WeightPublisher(TinyModel().state_dict()) as another,
        TorchPolicy(TinyModel, EOS, weights=publisher.url).open(Worker()) as engine,
    ):
        await another.publish(TinyModel().state_dict(), version=1)

        with pytest.raises(EngineRefused, match=f"expected weights of {publisher.url}.*, got {another.url}"):
            await engine.update_weights(another.url, 1)


async def test_weights_that_do_not_fit_the_model_are_refused_when_the_policy_opens() -> None:
    async with WeightPublisher({"head.weight": torch.zeros(3)}) as publisher:
        with pytest.raises(WeightsMismatch, match=r"head\.weight: expected float32 \[11, 16\], found float32 \[3\]"):
            async with TorchPolicy(TinyModel, EOS, weights=publisher.url).open(Worker()):
                pass


# -- updates in flight -------------------------------------------------------------------------------------------------


class Stepwise(TinyModel):
    """Calls functions of a test before a pass."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.before: dict[int, Callable[[], None]] = {}
        """Called before a pass, which is counted from 0."""
        self.passes = 0

    def forward(self, tokens: Tensor, *, positions: Tensor, attend: Attention, cache: KVCache | None = None) -> Tensor:
        self.before.get(self.passes, lambda: None)()
        self.passes += 1
        return super().forward(tokens, positions=positions, attend=attend, cache=cache)


def published(publisher: WeightPublisher, seed: int, version: int) -> Callable[[], None]:
    """Return a function that publishes, from the thread that samples."""
    state = TinyModel(seed=seed).state_dict()
    return lambda: anyio.from_thread.run(publisher.publish, state, version)


def loaded(model: TinyModel, seed: int) -> Callable[[], None]:
    """Return a function that loads other weights into `model`."""

    def load() -> None:
        model.load_state_dict(TinyModel(seed=seed).state_dict())

    return load


async def test_with_updates_in_flight_each_token_has_the_version_that_sampled_it() -> None:
    model, alone = Stepwise(), Stepwise(seed=1)

    async with WeightPublisher(TinyModel().state_dict()) as publisher:
        await publisher.publish(alone.state_dict(), version=1)
        model.before = {2: published(publisher, 2, 20), 3: published(publisher, 3, 30), 5: published(publisher, 4, 40)}
        policy = TorchPolicy(lambda: model, EOS, weights=publisher.url, weight_updates="in_flight")
        async with policy.open(Worker()) as engine:
            sampled = await one(engine)

    alone.before = {3: loaded(alone, 2), 4: loaded(alone, 3), 6: loaded(alone, 4)}
    async with TorchPolicy(lambda: alone, EOS).open(Worker()) as engine:
        expected = await one(engine)
    assert sampled.policy_versions.tolist() == [1, 1, 1, 20, 30, 30, 40, 40]
    assert sampled.tokens.tolist() == expected.tokens.tolist()
    assert sampled.logprobs is not None
    assert expected.logprobs is not None
    assert sampled.logprobs.tolist() == expected.logprobs.tolist()


async def test_with_updates_in_flight_a_pause_does_not_wait_for_the_batch() -> None:
    model, begun = Stepwise(), anyio.Event()
    reached: list[int] = []

    async def pause(publisher: WeightPublisher, engine: Engine) -> None:
        await begun.wait()
        async with publisher.paused():
            reached.append(model.passes)
            await publisher.publish(TinyModel(seed=2).state_dict(), version=2)
        await engine.pause()
        reached.append(model.passes)
        await engine.resume()

    async with WeightPublisher(TinyModel().state_dict()) as publisher:
        await publisher.publish(TinyModel(seed=1).state_dict(), version=1)
        policy = TorchPolicy(lambda: model, EOS, weights=publisher.url, weight_updates="in_flight")
        async with policy.open(Worker()) as engine, anyio.create_task_group() as tasks:
            opened: Any = engine

            async def until_paused() -> None:
                begun.set()
                while opened._weights is None or not opened._weights.paused:
                    await moment()

            model.before = {5: lambda: anyio.from_thread.run(until_paused)}
            tasks.start_soon(pause, publisher, engine)
            (sampled,) = await engine.generate([PROMPT], SamplingParams(max_completion_tokens=50, greedy=True))
            assert sampled.policy_versions.tolist() == [1] * 6 + [2] * 44

    assert reached[0] == 6
    assert reached[1] < 50


async def test_an_engine_that_is_updated_in_flight_continues_with_the_new_weights() -> None:
    model = Stepwise()

    async with WeightPublisher(TinyModel().state_dict()) as publisher:
        await publisher.publish(TinyModel(seed=1).state_dict(), version=1)
        async with (
            TorchPolicy(lambda: model, EOS, weight_updates="in_flight").open(Worker()) as engine,
            anyio.create_task_group() as tasks,
        ):

            async def update() -> None:
                tasks.start_soon(engine.update_weights, publisher.url, 1)
                while "awake" in repr(engine):
                    await moment()

            model.before = {3: lambda: anyio.from_thread.run(update)}
            (sampled,) = await engine.generate([PROMPT], SamplingParams(max_completion_tokens=8, greedy=True))
            assert sampled.policy_versions.tolist() == [0] * 4 + [1] * 4


async def test_a_batch_whose_weights_were_written_over_is_sampled_anew_as_a_whole() -> None:
    model = Stepwise()

    async with WeightPublisher(TinyModel().state_dict(), release_timeout_s=0) as publisher:
        await publisher.publish(TinyModel(seed=1).state_dict(), version=1)
        model.before = {2: published(publisher, 2, 2), 3: published(publisher, 3, 3)}
        async with TorchPolicy(lambda: model, EOS, weights=publisher.url).open(Worker()) as engine:
            sampled = await one(engine)

    assert model.passes == 4 + 8
    assert sampled.tokens.tolist() == await untrained(3)
    assert set(sampled.policy_versions.tolist()) == {3}


async def test_a_row_that_is_sampled_anew_searches_for_its_stop_strings_anew() -> None:
    model = Stepwise()
    old, new = [await untrained(seed) for seed in (1, 3)]
    across = Letters().decode([old[2], new[0]])
    assert across not in Letters().decode(new)

    async with WeightPublisher(TinyModel().state_dict(), release_timeout_s=0) as publisher:
        await publisher.publish(TinyModel(seed=1).state_dict(), version=1)
        model.before = {2: published(publisher, 2, 2), 3: published(publisher, 3, 3)}
        policy = TorchPolicy(lambda: model, EOS, weights=publisher.url)
        with entered(Context(tokenizer=Letters())):
            async with policy.open(Worker()) as engine:
                sampling = SamplingParams(max_completion_tokens=8, greedy=True, stop=(across,))
                (sampled,) = await engine.generate([PROMPT], sampling)

    assert model.passes == 4 + 8
    assert sampled.tokens.tolist() == new


async def test_a_batch_that_is_overwritten_repeatedly_is_an_error_with_the_remedy() -> None:
    model = Stepwise()

    async with WeightPublisher(TinyModel().state_dict(), release_timeout_s=0) as publisher:
        await publisher.publish(TinyModel(seed=1).state_dict(), version=1)
        model.before = {at: published(publisher, at, 2 + at) for at in range(9)}
        async with TorchPolicy(lambda: model, EOS, weights=publisher.url).open(Worker()) as engine:
            with pytest.raises(PeerLost, match="failed 3 times: raise WeightPublisher's release_timeout_s"):
                await one(engine)


async def test_a_policy_samples_a_model_that_was_built_on_the_meta_device() -> None:
    def make_model() -> TinyModel:
        with torch.device("meta"):
            return TinyModel()

    async with WeightPublisher(TinyModel().state_dict()) as publisher:
        await publisher.publish(TinyModel(seed=5).state_dict(), version=1)
        async with TorchPolicy(make_model, EOS, weights=publisher.url).open(Worker()) as engine:
            sampled = await one(engine)

    assert sampled.tokens.tolist() == await untrained(5)


async def test_a_policy_samples_with_weights_that_lie_in_a_folder(tmp_path: Path) -> None:
    async with WeightFolder(tmp_path, TinyModel().state_dict()) as publisher:
        await publisher.publish(TinyModel(seed=3).state_dict(), version=3)
        async with TorchPolicy(TinyModel, EOS, weights=publisher.url).open(Worker()) as engine:
            sampled = await one(engine)

    assert sampled.tokens.tolist() == await untrained(3)
    assert set(sampled.policy_versions.tolist()) == {3}


# -- rows that join ----------------------------------------------------------------------------------------------------


async def talk(engine: Engine, sampled: list[Completion]) -> None:
    """Request a short completion, then a longer one."""
    for longest in (2, 8):
        sampled += await engine.generate([PROMPT], SamplingParams(max_completion_tokens=longest, greedy=True))


async def test_rows_wait_for_those_of_older_weights_where_newer_ones_are_published() -> None:
    model, talked, beside = Stepwise(), list[Completion](), list[Completion]()

    async with WeightPublisher(TinyModel().state_dict()) as publisher:
        await publisher.publish(TinyModel(seed=1).state_dict(), version=1)
        model.before = {1: published(publisher, 2, 2)}
        policy = TorchPolicy(lambda: model, EOS, weights=publisher.url)
        async with policy.open(Worker()) as engine, anyio.create_task_group() as tasks:
            tasks.start_soon(talk, engine, talked)
            beside.append(await one(engine))

    assert beside[0].tokens.tolist() == await untrained(1)
    assert talked[1].tokens.tolist() == await untrained(2)
    assert [set(each.policy_versions.tolist()) for each in (*beside, *talked)] == [{1}, {1}, {2}]
    assert model.passes == 8 + 8


async def test_rows_wait_for_those_of_older_weights_where_newer_ones_lie_in_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, POLL_S=0)
    model, talked, beside = Stepwise(), list[Completion](), list[Completion]()

    async with (
        WeightFolder(tmp_path, TinyModel().state_dict()) as publisher,
        WeightSubscriber(publisher.url) as subscriber,
    ):

        async def publish() -> None:
            await publisher.publish(TinyModel(seed=2).state_dict(), version=2)
            await subscriber.newer(than=1)

        await publisher.publish(TinyModel(seed=1).state_dict(), version=1)
        model.before = {1: lambda: anyio.from_thread.run(publish)}
        policy = TorchPolicy(lambda: model, EOS, weights=publisher.url)
        async with policy.open(Worker()) as engine, anyio.create_task_group() as tasks:
            tasks.start_soon(talk, engine, talked)
            beside.append(await one(engine))

    assert [set(each.policy_versions.tolist()) for each in (*beside, *talked)] == [{1}, {1}, {2}]


async def test_with_updates_in_flight_rows_join_those_of_older_weights() -> None:
    model, talked, beside = Stepwise(), list[Completion](), list[Completion]()

    async with WeightPublisher(TinyModel().state_dict()) as publisher:
        await publisher.publish(TinyModel(seed=1).state_dict(), version=1)
        model.before = {1: published(publisher, 2, 2)}
        policy = TorchPolicy(lambda: model, EOS, weights=publisher.url, weight_updates="in_flight")
        async with policy.open(Worker()) as engine, anyio.create_task_group() as tasks:
            tasks.start_soon(talk, engine, talked)
            beside.append(await one(engine))

    assert beside[0].policy_versions.tolist() == [1, 1, 2, 2, 2, 2, 2, 2]
    assert [each.policy_versions.tolist() for each in talked] == [[1, 1], [2] * 8]
    assert talked[1].tokens.tolist() == await untrained(2)
    assert model.passes == 2 + 1 + 7  # the prompt of the second turn is read beside


@pytest.mark.parametrize("by", ["engine", "publisher"])
async def test_no_row_joins_those_that_a_pause_waits_for(by: str) -> None:
    model, talked, sampled_at_pause = Stepwise(), list[Completion](), list[int]()

    async with WeightPublisher(TinyModel().state_dict()) as publisher:
        await publisher.publish(TinyModel(seed=1).state_dict(), version=1)
        policy = TorchPolicy(lambda: model, EOS, weights=publisher.url)
        async with policy.open(Worker()) as engine, anyio.create_task_group() as tasks:
            opened: Any = engine

            async def pause() -> None:
                if by == "engine":
                    await engine.pause()
                    sampled_at_pause.append(model.passes)
                    await engine.resume()
                    return
                async with publisher.paused():
                    sampled_at_pause.append(model.passes)

            async def begin_pause() -> None:
                tasks.start_soon(pause)
                while not opened._pause_waits:
                    await moment()

            model.before = {1: lambda: anyio.from_thread.run(begin_pause)}
            tasks.start_soon(talk, engine, talked)
            await one(engine)

    assert sampled_at_pause == [8]
    assert model.passes == 8 + 8
