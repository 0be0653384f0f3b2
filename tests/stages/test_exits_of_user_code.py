"""What a user's function raises is a failure of that call, whatever it is: a table of all functions and exceptions.

An exception that would end a task, a thread or a process ends a run as an ordinary one does in the same place, with the
same counts and reasons.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, NoReturn

import anyio
import numpy as np
import pytest
import structlog
from anyio.lowlevel import checkpoint
from numpy.typing import NDArray
from tests.failsafe import FAILSAFE_S
from tests.fake_policy import FakePolicy, Letters
from tests.pipeline.flow_stages import Groups, Pack
from tests.processes.worker_sinks import Commit

from penstock import (
    Batcher,
    Pipeline,
    ReceiveChannel,
    RewardBridge,
    SendChannel,
    SinkTrainer,
    SourceEnv,
    StageInfo,
    Teacher,
    TrainBatch,
    TrajectoryGroup,
    Worker,
    current,
    each,
    source,
)
from penstock.accounting import Metrics
from penstock.errors import UserCodeExited
from penstock.policies import EnginePublisher
from penstock.rewards import RewardComponent, RewardFunction
from penstock.teachers import TeacherCandidates
from penstock.trackers import RunInfo, Sample, Samples
from penstock.training import Evaluation

TEXT = "as a script may"


@dataclass(frozen=True)
class Raises:
    """Raises an exception of one kind, in a function or in an async one."""

    kind: Callable[[str], BaseException]
    __name__ = "function"

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise self.kind(TEXT)

    async def later(self, *_: Any, **__: Any) -> NoReturn:
        await checkpoint()
        raise self.kind(TEXT)


def group_of_exits(text: str) -> BaseException:
    return BaseExceptionGroup("tasks", [SystemExit(text)])


class CancelsItsTask(Raises):
    """Cancels the task that it runs in, as nobody outside did."""

    async def later(self, *_: Any, **__: Any) -> NoReturn:
        task = asyncio.current_task()
        assert task is not None
        task.cancel(TEXT)
        await anyio.sleep_forever()
        raise AssertionError


class AwaitsWhatWasCancelled(Raises):
    """Awaits a task that was cancelled, with the message that a scope of anyio gives."""

    async def later(self, *_: Any, **__: Any) -> NoReturn:
        task = asyncio.ensure_future(anyio.sleep_forever())
        await checkpoint()
        task.cancel("Cancelled via cancel scope 7f")
        await task
        raise AssertionError


EXITS = {
    "cancelled": Raises(asyncio.CancelledError),
    "cancels its task": CancelsItsTask(asyncio.CancelledError),
    "awaits a cancelled task": AwaitsWhatWasCancelled(asyncio.CancelledError),
    "exit": Raises(SystemExit),
    "interrupt": Raises(KeyboardInterrupt),
    "closed": Raises(GeneratorExit),
    "stop": Raises(StopIteration),
    "async stop": Raises(StopAsyncIteration),
    "group": Raises(group_of_exits),
}

ORDINARY = Raises(RuntimeError)

# -- the parts of a run, of which each raises in one function ----------------------------------------------------------


class Sums:
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"question": f"{index}+1=", "answer": str(index + 1)}

    def score_answer(self, answer: str, entry: Mapping[str, Any]) -> float:
        return float(answer == entry["answer"])


class Game:
    def reset(self, *, seed: int | None = None) -> Any:
        return f"game {seed}?", {}

    def step(self, action: str) -> Any:
        return f"<{action}>", 1.0, True, False, {}

    def close(self) -> None:
        pass


@dataclass
class Trainer:
    """Does steps; has weights and checkpoints."""

    steps: int = 0
    committed: Mapping[Any, int] = field(default_factory=dict)

    def step(self, batch: TrainBatch) -> dict[str, float]:  # noqa: ARG002 (the protocol's)
        self.steps += 1
        return {"loss": 0.5}

    def weights(self) -> dict[str, Any]:
        return {}

    def save(self, folder: Path, committed: Any) -> Path:  # noqa: ARG002 (the protocol's)
        return folder


@dataclass
class Watched(Trainer):
    raises: Raises = ORDINARY

    async def watch(self) -> None:
        await self.raises.later()


@dataclass
class Resumed(Trainer):
    def keep(self, state: Any) -> None:
        pass

    def resume(self, checkpoint: Path) -> None:
        pass


@dataclass
class Publisher:
    version: int = -1

    async def publish(self, tensors: Any, version: int) -> None:  # noqa: ARG002 (the protocol's)
        self.version = version

    @asynccontextmanager
    async def paused(self) -> AsyncGenerator[None]:
        yield


@dataclass
class Weights(Publisher):
    url: str = "file:///weights"


class Vocabulary(Letters):
    def get_vocab(self) -> dict[str, int]:
        return {chr(index): index for index in range(128)}


@dataclass(frozen=True)
class Likeliest:
    """A teacher."""

    tokenizer: Any = field(default_factory=Vocabulary)

    @asynccontextmanager
    async def open(self, worker: Worker) -> AsyncGenerator[Any]:  # noqa: ARG002 (the protocol's)
        yield self

    async def candidates(self, tokens: NDArray[np.int32], wanted: Any, top_k: int) -> TeacherCandidates:  # noqa: ARG002 (the protocol's)
        return TeacherCandidates.of([None, *({int(token): -0.5} for token in tokens[1:])])


@dataclass
class Tracker:
    def start(self, run: RunInfo) -> None:
        pass

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        pass

    def samples(self, samples: Sequence[Sample], step: int) -> None:
        pass

    def close(self, ok: bool) -> None:  # noqa: FBT001 (the protocol's)
        pass


def with_method(made: Any, **methods: Any) -> Any:
    """Return an object of a class of its own, with other methods."""
    kind = type(type(made).__name__, (type(made),), {name: staticmethod(call) for name, call in methods.items()})
    object.__setattr__(made, "__class__", kind)
    return made


@asynccontextmanager
async def opened(enter: Any = None, leave: Any = None) -> AsyncGenerator[FakePolicy]:
    if enter:
        await enter()
    yield FakePolicy()
    if leave:
        await leave()


def sampling(env: Any, policy: Any = None, **options: Any) -> SourceEnv:
    defaults: dict[str, Any] = {"tokenizer": Letters(), "groups": 200, "group_size": 2, "concurrency": 8}
    return SourceEnv(lambda: env, policy or FakePolicy(), name="env", **(defaults | options))


def run_of(env: Any, policy: Any = None, **options: Any) -> Pipeline:
    return source(sampling(env, policy, **options)).sink(Commit())


def environment(methods: Callable[[Raises], Mapping[str, Any]], made: Callable[[], Any] = Game) -> Any:
    return lambda raises: run_of(with_method(made(), **methods(raises)))


def making(call: Callable[[Raises], Any]) -> Any:
    return lambda raises: source(SourceEnv(call(raises), FakePolicy(), tokenizer=Letters(), name="env", groups=4)).sink(
        Commit()
    )


def rewarded(function: Callable[[Raises], Any], **options: Any) -> Any:
    def run(raises: Raises) -> Pipeline:
        bridge = RewardBridge(functions=[RewardFunction(function(raises), name="f", reads_text=False, **options)])
        return source(Groups(400)).then(bridge).sink(Commit())

    return run


@dataclass(frozen=True, slots=True)
class Opens(RewardComponent):
    raises: Raises = field(default=ORDINARY, kw_only=True)
    reads_text: bool = field(default=False, kw_only=True)

    def default_name(self) -> str:
        return "opens"

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[Any]:
        await self.raises.later()
        yield None


def trained(trainer: Any, tokenizer: Any = None, **options: Any) -> Pipeline:
    return source(Groups(8, tokenizer=tokenizer)).then(Pack()).sink(SinkTrainer(trainer, **options))


def training(methods: Callable[[Raises], Mapping[str, Any]], **options: Any) -> Any:
    return lambda raises: trained(with_method(Trainer(), **methods(raises)), **options)


def publishing(methods: Callable[[Raises], Mapping[str, Any]], **options: Any) -> Any:
    return lambda raises: trained(Trainer(), publisher=with_method(Publisher(), **methods(raises)), **options)


def updating(methods: Callable[[Raises], Mapping[str, Any]]) -> Any:
    def run(raises: Raises) -> Pipeline:
        engines = [with_method(FakePolicy(), **methods(raises)), FakePolicy()]
        return trained(Trainer(), publisher=EnginePublisher(Weights(), engines), sampling="pause")

    return run


def taught(methods: Callable[[Raises], Mapping[str, Any]]) -> Any:
    def run(raises: Raises) -> Pipeline:
        teacher = Teacher(with_method(Likeliest(), **methods(raises)), top_k=2)
        return source(Groups(8, tokenizer=Vocabulary())).then(teacher).sink(Commit())

    return run


@dataclass(frozen=True)
class Stage:
    """A stage or a sink that raises."""

    raises: Raises

    async def run(self, inbox: Any, outbox: Any = None) -> None:  # noqa: ARG002 (the protocol's)
        await self.raises.later()


@dataclass(frozen=True)
class FirstStage:
    raises: Raises

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        await self.raises.later(outbox)


@dataclass(frozen=True)
class FirstOne(Stage):
    """Raises after the first record."""

    async def run(self, inbox: Any, outbox: Any = None) -> None:  # noqa: ARG002 (the protocol's)
        await inbox.receive()
        self.raises()


@dataclass(frozen=True)
class Described:
    """Raises when it is asked for the facts about it."""

    raises: Raises

    async def run(self, outbox: SendChannel[Any]) -> None:
        await outbox.aclose()

    def stage_info(self) -> StageInfo:
        self.raises()


@dataclass(frozen=True)
class Silent:
    """A source that sends nothing."""

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:  # noqa: ARG002 (the protocol's)
        await anyio.sleep_forever()


def hooked(raises: Raises) -> Pipeline:
    @dataclass(frozen=True)
    class Hooked(SinkTrainer):
        async def run(self, inbox: ReceiveChannel[TrainBatch]) -> None:
            with current().ledger.on_step(raises):
                await SinkTrainer.run(self, inbox)

    return source(Groups(8)).then(Pack()).sink(Hooked(Trainer()))


def evaluated(**methods: Any) -> Pipeline:
    evaluation = Evaluation({"val": lambda: with_method(Sums(), **methods)}, every=1)
    env = sampling(Sums(), groups=None, evaluation=evaluation)
    return source(env, max_lag=1).then(Batcher(max_tokens=4096, sequences=4)).sink(SinkTrainer(Trainer(), max_steps=2))


@dataclass
class Run:
    """A run with trackers or metrics."""

    options: Mapping[str, Any]
    pipeline: Pipeline = field(default_factory=lambda: trained(Trainer()))

    @property
    def report(self) -> Any:
        return self.pipeline.report

    async def run(self) -> None:
        await self.pipeline.run(**self.options)


def tracked(methods: Callable[[Raises], Mapping[str, Any]]) -> Any:
    return lambda raises: Run({"trackers": [with_method(Tracker(), **methods(raises))]})


PLACES: dict[str, Callable[[Raises], Pipeline | Run]] = {
    "make_env": making(lambda raises: raises),
    "make_env, async": making(lambda raises: raises.later),
    "env.reset": environment(lambda raises: {"reset": raises}),
    "env.reset, async": environment(lambda raises: {"reset": raises.later}),
    "env.step": environment(lambda raises: {"step": raises}),
    "env.step, async": environment(lambda raises: {"step": raises.later}),
    "env.close": environment(lambda raises: {"close": raises}),
    "env.close, async": environment(lambda raises: {"close": raises.later}),
    "env[]": environment(lambda raises: {"__getitem__": raises}, Sums),
    "env.score_answer": environment(lambda raises: {"score_answer": raises}, Sums),
    "env.score_answer, async": environment(lambda raises: {"score_answer": raises.later}, Sums),
    "env.rollout": environment(lambda raises: {"rollout": raises}, type("Outside", (), {})),
    "env.rollout, async": environment(lambda raises: {"rollout": raises.later}, type("Outside", (), {})),
    "env.prompt": environment(lambda raises: {"prompt": raises}, type("Prompts", (), {})),
    "tokenizer.encode": lambda raises: run_of(Sums(), tokenizer=with_method(Letters(), encode=raises)),
    "tokenizer.decode": lambda raises: run_of(Game(), tokenizer=with_method(Letters(), decode=raises)),
    "policy.open": lambda raises: run_of(Game(), with_method(FakePolicy(), open=raises)),
    "policy.open, entered": lambda raises: run_of(
        Game(), with_method(FakePolicy(), open=lambda _: opened(raises.later))
    ),
    "policy.open, left": lambda raises: run_of(
        Game(), with_method(FakePolicy(), open=lambda _: opened(None, raises.later))
    ),
    "engine.generate": lambda raises: run_of(Game(), with_method(FakePolicy(), generate=raises)),
    "engine.generate, async": lambda raises: run_of(Game(), with_method(FakePolicy(), generate=raises.later)),
    "engine.arrived": lambda raises: (
        source(sampling(Game(), with_method(FakePolicy(), arrived=raises.later), groups=20), max_lag=1)
        .then(Batcher(max_tokens=4096, sequences=4))
        .sink(SinkTrainer(Trainer(), Publisher()))
    ),
    "reward": rewarded(lambda raises: raises),
    "reward, async": rewarded(lambda raises: raises.later),
    "reward of a group": rewarded(lambda raises: raises, batched=True),
    "reward of a group, async": rewarded(lambda raises: raises.later, batched=True),
    "reward that ends the run": rewarded(lambda raises: raises.later, on_failure="raise"),
    "reward with a default": rewarded(lambda raises: raises, on_failure=0.0),
    "reward.open": lambda raises: source(Groups(8)).then(RewardBridge(functions=[Opens(raises=raises)])).sink(Commit()),
    "each": lambda raises: source(Groups(8)).then(each(raises.later)).sink(Commit()),
    "each, sync": lambda raises: source(Groups(8)).then(each(raises)).sink(Commit()),
    "each, concurrent": lambda raises: source(Groups(8)).then(each(raises.later, concurrency=2)).sink(Commit()),
    "teacher.open": taught(lambda raises: {"open": raises}),
    "teacher.candidates": taught(lambda raises: {"candidates": raises.later}),
    "source.run": lambda raises: source(FirstStage(raises)).sink(Commit()),
    "stage.run": lambda raises: source(Groups(8)).then(Stage(raises)).sink(Commit()),
    "stage.run, later": lambda raises: source(Groups(8)).then(FirstOne(raises)).sink(Commit()),
    "sink.run": lambda raises: source(Groups(8)).sink(Stage(raises)),
    "sink.run, later": lambda raises: source(Groups(8)).sink(FirstOne(raises)),
    "stage.stage_info": lambda raises: source(Described(raises)).sink(Commit()),
    "trainer.step": training(lambda raises: {"step": raises}),
    "trainer.weights": lambda raises: trained(with_method(Trainer(), weights=raises), publisher=Publisher()),
    "trainer.save": lambda raises: trained(with_method(Trainer(), save=raises), checkpoints="absent"),
    "trainer.keep": lambda raises: Run({"folder": "run"}, trained(with_method(Resumed(), keep=raises))),
    "trainer.watch": lambda raises: source(Silent()).then(Pack()).sink(SinkTrainer(Watched(raises=raises))),
    "publisher.publish": publishing(lambda raises: {"publish": raises.later}),
    "publisher.paused": publishing(lambda raises: {"paused": raises}, sampling="pause"),
    "engine.update_weights": updating(lambda raises: {"update_weights": raises.later}),
    "engine.pause": updating(lambda raises: {"pause": raises.later}),
    "engine.resume": updating(lambda raises: {"resume": raises.later}),
    "samples.tokenizer": lambda raises: Run(
        {"trackers": [Tracker()]}, trained(Trainer(), with_method(Letters(), decode=raises), samples=Samples())
    ),
    "tracker.start": tracked(lambda raises: {"start": raises}),
    "tracker.log": tracked(lambda raises: {"log": raises}),
    "tracker.close": tracked(lambda raises: {"close": raises}),
    "sink of metrics": lambda raises: Run({"metrics": Metrics(raises)}),
    "ledger.on_step": hooked,
    "evaluation.make_env": lambda raises: source(
        sampling(Sums(), groups=None, evaluation=Evaluation({"val": raises}))
    ).sink(Commit()),
    "evaluation.score_answer": lambda raises: evaluated(score_answer=raises),
}


FAILURES = ("filtered", "rejected", "failed")
"""The ends that do not depend on the moment in which a run ends."""


async def outcome(make: Callable[[Raises], Pipeline | Run], raises: Raises) -> tuple[Any, ...]:
    """Return what a run raises, and how its trajectories ended; without the name of the exception and numbers."""
    pipeline: Pipeline | Run | None = None
    raised: BaseException | None = None
    with structlog.testing.capture_logs() as events, anyio.fail_after(FAILSAFE_S):
        try:
            pipeline = make(raises)
            await pipeline.run()
        except Exception as error:  # noqa: BLE001 (compared)
            raised = error
    report = None if pipeline is None else pipeline.report
    reasons = {} if report is None else report.balance.reasons
    kinds = {state: sorted({without(reason) for reason in of}) for state, of in reasons.items() if state in FAILURES}
    named = {event["event"] for event in events if event["log_level"] != "info"}
    if isinstance(raised, RuntimeError):  # it was not wrapped
        return RuntimeError, without(str(raised) if isinstance(raised, UserCodeExited) else f"RuntimeError: {raised}")
    return type(raised), without(str(raised)), kinds, named


NAMES = "|".join(sorted({type(each.kind(TEXT)).__name__ for each in EXITS.values()} | {"RuntimeError"}))

TEXTS = rf"{TEXT}|Cancelled via cancel scope 7f|(?:coroutine|(?:async )?generator) raised Stop(?:Async)?Iteration"


def without(text: str) -> str:
    """Return a text without numbers, and without the exception that it names."""
    return re.sub(r"\d+", "N", re.sub(rf"(?:asyncio\.exceptions\.)?(?:{NAMES}): (?:{TEXTS})", "EXCEPTION", text))


UNNAMED = {"env.close", "env.close, async", "each, concurrent"}
"""Places whose exception has no effect, or is one of several."""

ordinary: dict[str, tuple[Any, ...]] = {}
"""The outcome of an ordinary exception, by place."""


ALL_EXITS = {"env.step, async", "reward, async"}
"""Places in which `make test` tries every exception; in the others it tries one."""


def cells() -> Iterator[Any]:
    for (number, place), exit_ in product(enumerate(PLACES), EXITS):
        runs = place in ALL_EXITS or exit_ == ("cancelled", "exit")[number % 2]
        yield pytest.param(place, exit_, id=f"{place}-{exit_}", marks=[] if runs else pytest.mark.long)


@pytest.mark.parametrize(("place", "exit_"), list(cells()))
async def test_it_ends_a_run_as_an_ordinary_exception_does(
    place: str, exit_: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if place not in ordinary:
        ordinary[place] = await outcome(PLACES[place], ORDINARY)
        assert "EXCEPTION" in repr(ordinary[place]) or ordinary[place][-1] or place in UNNAMED

    assert await outcome(PLACES[place], EXITS[exit_]) == ordinary[place]
