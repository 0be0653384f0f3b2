"""Engines load the newest weights when they are used, and sleep afterwards; with weights in real memory and files."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

import anyio
import numpy as np
import pytest
import structlog
import torch
from safetensors.torch import save_file
from tests import inference_server
from tests.fake_policy import Letters
from tests.fixed_limits import set_limits
from tests.tiny_model import TinyModel

from penstock import Batcher, SinkTrainer, SourceEnv, TrainBatch, Worker, source
from penstock.errors import EngineFailed
from penstock.policies import Backoff, Completion, Engine, EnginePublisher, HttpPolicy, SamplingParams
from penstock.torch import TorchPolicy, WeightFolder
from penstock.weights import WeightPublisher

PROMPT = np.array([1, 2], np.int32)
EOS = 99


async def one(engine: Engine) -> Completion:
    (completion,) = await engine.generate([PROMPT], SamplingParams(max_completion_tokens=8, greedy=True))
    return completion


async def untrained(seed: int) -> list[int]:
    """Sample a model that was made with `seed`."""
    async with TorchPolicy(partial(TinyModel, seed=seed), EOS).open(Worker()) as engine:
        completion = await one(engine)
        return [int(token) for token in completion.tokens]


class Colocated:
    """A model, the engine that samples it, and the publisher of its weights."""

    def __init__(self, publisher: WeightPublisher) -> None:
        self.publisher = publisher
        self.model = TinyModel()
        self.engine: Engine

    @property
    def nbytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.model.state_dict().values())

    @property
    def is_awake(self) -> bool:
        return "asleep" not in repr(self.engine)


@asynccontextmanager
async def colocated() -> AsyncIterator[Colocated]:
    async with WeightPublisher(TinyModel().state_dict()) as publisher:
        both = Colocated(publisher)
        async with TorchPolicy(lambda: both.model, EOS).open(Worker()) as both.engine:
            yield both


async def test_the_body_samples_with_the_newest_weights_and_their_memory_is_free_after_it() -> None:
    held: list[int] = []
    sampled: list[Completion] = []
    async with colocated() as both:
        for version in (1, 2):
            await both.publisher.publish(TinyModel(seed=version).state_dict(), version)
            async with both.publisher.sync(both.engine) as engine:
                held.append(both.nbytes)
                sampled.append(await one(engine))
            held.append(both.nbytes)

    assert [completion.tokens.tolist() for completion in sampled] == [await untrained(1), await untrained(2)]
    assert [int(completion.policy_versions[0]) for completion in sampled] == [1, 2]
    assert held[0] == held[2] > held[1] == held[3] == 0


async def test_an_engine_sleeps_also_when_the_body_raises_or_is_cancelled() -> None:
    async def fail(both: Colocated) -> NoReturn:
        async with both.publisher.sync(both.engine):
            assert both.is_awake
            raise ValueError("mine")

    async with colocated() as both:
        await both.publisher.publish(TinyModel().state_dict(), 0)
        with pytest.raises(ValueError, match="mine"):
            await fail(both)
        after_raising = both.is_awake
        with anyio.CancelScope() as scope:
            async with both.publisher.sync(both.engine):
                scope.cancel()
                await anyio.sleep_forever()

        assert (after_raising, both.is_awake) == (False, False)


async def test_an_engine_that_cannot_take_the_weights_is_left_asleep() -> None:
    async with colocated() as both, WeightPublisher({"other": torch.zeros(3)}) as other:
        await other.publish({"other": torch.zeros(3)}, 0)
        with pytest.raises(Exception, match="tensors differ"):
            async with other.sync(both.engine):
                pytest.fail("these are other weights")

        assert not both.is_awake


async def test_an_engine_cannot_use_weights_before_the_first_version() -> None:
    async with colocated() as both:
        with pytest.raises(RuntimeError, match="expected weights to be published before an engine samples with them"):
            async with both.publisher.sync(both.engine):
                pytest.fail("there are none")


@asynccontextmanager
async def published() -> AsyncIterator[WeightPublisher]:
    weights = {"weight": torch.zeros(3)}
    async with WeightPublisher(weights) as publisher:
        await publisher.publish(weights, 3)
        yield publisher


class Sleepless:
    """An engine whose `sleep` raises `failure`, or never returns."""

    def __init__(self, weights: WeightPublisher, failure: Exception | None) -> None:
        self.weights = weights
        self.failure = failure
        self.asked = anyio.Event()

    def __repr__(self) -> str:
        return "<Sleepless>"

    async def update_weights(self, url: str, version: int) -> None:
        assert (url, version) == (self.weights.url, 3)

    async def sleep(self) -> None:
        self.asked.set()
        if self.failure is not None:
            raise self.failure
        await anyio.sleep_forever()

    async def wake_up(self) -> None:
        pass


async def test_an_exception_of_the_body_is_raised_although_the_engine_does_not_fall_asleep() -> None:
    async def fail(weights: WeightPublisher) -> NoReturn:
        async with weights.sync(Sleepless(weights, EngineFailed("no server"))):
            raise ValueError("mine")

    async with published() as weights:
        with structlog.testing.capture_logs() as logs, pytest.raises(ValueError, match="mine") as raised:
            await fail(weights)

    assert raised.value.__notes__ == ["besides: <Sleepless> did not fall asleep: EngineFailed: no server"]
    assert logs == [
        {
            "event": "engine_left_awake",
            "log_level": "warning",
            "engine": "<Sleepless>",
            "reason": "EngineFailed: no server",
        }
    ]


async def test_an_engine_that_does_not_fall_asleep_after_a_body_that_ended_well_is_a_failure() -> None:
    async with published() as weights:
        with pytest.raises(EngineFailed, match="no server"):
            async with weights.sync(Sleepless(weights, EngineFailed("no server"))):
                pass


async def test_an_engine_that_never_falls_asleep_is_given_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, SLEEP_TIMEOUT_S=0.01)

    async with published() as weights:
        with pytest.raises(TimeoutError, match=r"expected <Sleepless> to fall asleep within 0\.01 s"):
            async with weights.sync(Sleepless(weights, None)):
                pass


@pytest.mark.parametrize("failure", [None, EngineFailed("no server")])
async def test_a_cancelled_body_stays_cancelled_although_the_engine_does_not_fall_asleep(
    monkeypatch: pytest.MonkeyPatch, failure: Exception | None
) -> None:
    set_limits(monkeypatch, CANCEL_TIMEOUT_S=0.01)
    seen: list[BaseException] = []

    async with published() as weights:
        engine = Sleepless(weights, failure)
        with structlog.testing.capture_logs() as logs, anyio.CancelScope() as scope:
            try:
                async with weights.sync(engine):
                    scope.cancel()
                    await anyio.sleep_forever()
            except BaseException as error:
                seen.append(error)
                raise

    assert scope.cancelled_caught
    assert engine.asked.is_set()
    assert [type(error) for error in seen] == [anyio.get_cancelled_exc_class()]
    assert [event["event"] for event in logs] == ["engine_left_awake"]


async def test_a_task_that_asyncio_cancels_is_not_held_up_by_an_engine_that_does_not_fall_asleep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_limits(monkeypatch, CANCEL_TIMEOUT_S=0.01)
    entered = anyio.Event()

    async def use(weights: WeightPublisher, engine: Sleepless) -> None:
        async with weights.sync(engine):
            entered.set()
            await anyio.sleep_forever()

    async with published() as weights:
        engine = Sleepless(weights, None)
        task = asyncio.ensure_future(use(weights, engine))
        await entered.wait()
        task.cancel()  # as asyncio.run does at the first Ctrl-C

        with pytest.raises(asyncio.CancelledError):
            await task
    assert engine.asked.is_set()


@pytest.mark.parametrize("failure", [ValueError("mine"), None])
async def test_a_cancellation_while_the_engine_falls_asleep_takes_effect_after_its_timeout(
    monkeypatch: pytest.MonkeyPatch, failure: Exception | None
) -> None:
    set_limits(monkeypatch, CANCEL_TIMEOUT_S=0.01)
    scope = anyio.CancelScope()

    async def cancel(engine: Sleepless) -> None:
        await engine.asked.wait()
        scope.cancel()

    async def use(weights: WeightPublisher, engine: Sleepless) -> None:
        async with weights.sync(engine):
            if failure is not None:
                raise failure

    async with published() as weights:
        engine = Sleepless(weights, None)
        with scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(cancel, engine)
                with pytest.raises(ValueError if failure else TimeoutError):
                    await use(weights, engine)
                tasks.cancel_scope.cancel()


# -- a server ------------------------------------------------------------------------------------------------------


VOCABULARY = inference_server.VOCABULARY


def counting(by: int) -> dict[str, torch.Tensor]:
    """Return weights with which the next token is always the one `by` above."""
    return {"table": 100 * torch.eye(VOCABULARY).roll(by, dims=1)}


@contextmanager
def served(folder: Path, kind: str = "sglang") -> Iterator[str]:
    """Start a server that counts by one, and yield its URL."""
    with started(folder, kind) as (url, _):
        yield url


@contextmanager
def started(folder: Path, kind: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Start a server that counts by one, and yield its URL and its process."""
    save_file(counting(1), folder / "model.safetensors")
    command = [sys.executable, inference_server.__file__, "0", kind, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        assert server.stdout
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}", server
        finally:
            server.kill()


async def test_a_server_loads_the_newest_version_of_a_folder(tmp_path: Path) -> None:
    with served(tmp_path) as url:
        policy = HttpPolicy(url=url, model="bigram", server="sglang")
        async with WeightFolder(tmp_path / "weights", counting(2)) as folder, policy.open(Worker()) as engine:
            await folder.publish(counting(2), 7)
            async with folder.sync(engine):
                completion = await one(engine)

            assert completion.tokens.tolist() == [4, 6, 8, 10, 0]
            assert set(completion.policy_versions.tolist()) == {7}
            assert "asleep" in repr(engine)


async def killed_in_the_body(folder: WeightFolder, engine: Engine, server: subprocess.Popen[bytes]) -> NoReturn:
    async with folder.sync(engine):
        server.kill()
        await anyio.to_thread.run_sync(server.wait)
        raise ValueError("mine")


async def test_a_server_that_is_killed_in_the_body_hides_nothing(tmp_path: Path) -> None:
    with started(tmp_path, "sglang") as (url, server):
        policy = HttpPolicy(url=url, model="bigram", server="sglang", backoff=Backoff(attempts=2, first_s=0.01))
        async with WeightFolder(tmp_path / "weights", counting(2)) as folder, policy.open(Worker()) as engine:
            await folder.publish(counting(2), 7)
            with pytest.raises(ValueError, match="mine") as raised:
                await killed_in_the_body(folder, engine, server)

    (note,) = raised.value.__notes__
    assert "did not fall asleep: NobodyListens" in note


async def test_a_server_that_is_killed_in_a_cancelled_body_does_not_delay_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, CANCEL_TIMEOUT_S=0.1, CANCELLED_RESUME_TIMEOUT_S=0.1)
    with started(tmp_path, "sglang") as (url, server):
        policy = HttpPolicy(url=url, model="bigram", server="sglang", backoff=Backoff(attempts=99, first_s=5))
        async with WeightFolder(tmp_path / "weights", counting(2)) as folder, policy.open(Worker()) as engine:
            await folder.publish(counting(2), 7)
            with anyio.CancelScope() as scope:
                async with folder.sync(engine):
                    server.kill()
                    await anyio.to_thread.run_sync(server.wait)
                    scope.cancel()
                    await anyio.sleep_forever()

    assert scope.cancelled_caught


class Counts:
    """A trainer whose version k counts by k + 1. It records by how much each trained token is above the one before."""

    def __init__(self) -> None:
        self.steps = 0
        self.trained: list[tuple[int, int]] = []
        """(version of a token, how much it is above the one before)."""

    def step(self, batch: TrainBatch) -> dict[str, float]:
        self.steps += 1
        versions = np.repeat(batch.policy_versions, batch.lengths())
        above = np.diff(batch.tokens, prepend=0) % VOCABULARY
        self.trained += zip(versions[batch.loss_mask].tolist(), above[batch.loss_mask].tolist(), strict=True)
        return {}

    def weights(self) -> dict[str, torch.Tensor]:
        return counting(self.steps + 1)


class Numbers:
    """Questions of one token; every answer is as good as its length."""

    def __len__(self) -> int:
        return VOCABULARY

    def __getitem__(self, index: int) -> dict[str, str]:
        return {"question": chr(index % VOCABULARY)}

    def score_answer(self, answer: str, entry: Any) -> float:
        return float(len(answer)) if entry else 0.0


@pytest.mark.parametrize("sampling", ["overlap", "pause"])
async def test_a_run_trains_samples_of_a_server(tmp_path: Path, sampling: Literal["overlap", "pause"]) -> None:
    trainer = Counts()
    with served(tmp_path, "vllm") as url:
        policy = HttpPolicy(url=url, model="bigram", server="vllm", versions="server")
        async with WeightFolder(tmp_path / "weights", counting(1)) as folder, policy.open(Worker()) as engine:
            await (
                source(
                    SourceEnv(
                        Numbers,
                        policy,
                        Letters(),
                        group_size=2,
                        sampling=SamplingParams(max_completion_tokens=4),
                        concurrency=4,
                    ),
                    max_lag=1,
                )
                .then(Batcher(max_tokens=40))
                .sink(SinkTrainer(trainer, EnginePublisher(folder, [engine]), sampling=sampling, max_steps=4))
                .run()
            )

    assert trainer.steps == 4
    assert max(version for version, _ in trainer.trained) >= 2
    assert all(above > version for version, above in trainer.trained), (
        "a token has a newer version than the weights that sampled it"
    )
