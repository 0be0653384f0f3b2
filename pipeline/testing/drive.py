"""Tools for tests, penstock's and yours: drive one stage alone, build records, run in virtual time.

Public as `penstock.testing`. No process, no socket, no sleep: a stage is a coroutine between two memory channels.

    async def test_only_tokens_past_the_allowance_cost_reward() -> None:
        out = await drive(LengthPenalty(per_token=0.5, free_tokens=4), [group(completion_lengths=[4, 6])])

        assert out[0].rewards.tolist() == [1.0, 0.0]
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import anyio
import numpy as np

from ..._schemas import StopReason, TrainBatch, Trajectory, TrajectoryGroup
from ..accounting.ledger import Ledger
from ..accounting.repetition_sets import iter_bits, masks_by_group
from ..accounting.telemetry import Metrics
from ..channels.memory import MemoryReceiver, memory_channel
from ..graph.context import Context, Worker, entered
from ..graph.schedule import UNBOUNDED, Schedule
from ..graph.stage import Sink, Source, Stage
from ..graph.stage_info import stated_tokenizers

In = TypeVar("In")
Out = TypeVar("Out")
R = TypeVar("R")


class Driven(list[Out], Generic[Out]):
    """The records that a stage sent, in order, with the ledger and the metrics of the drive."""

    def __init__(self, records: Iterable[Out], context: Context) -> None:
        super().__init__(records)
        self.ledger: Ledger = context.ledger
        """Every record that was fed is admitted here; those that were sent are in flight, dropped ones have ended."""
        self.metrics: Metrics = context.metrics
        """`metrics.emit(step)` returns the observations of the stage."""


async def drive(
    stage: Stage[In, Out],
    records: Iterable[In],
    *,
    worker: Worker | None = None,
    schedule: Schedule = UNBOUNDED,
    tokenizer: Any = None,
) -> Driven[Out]:
    """Run `stage` alone on `records` until both ends are done, and return the records that it sent.

    `schedule` and `tokenizer` are those that a pipeline would hand it.

    Raises:
        Exception: the exception of the stage, not in a group.
    """
    context = Context(worker=worker or Worker(), schedule=schedule, tokenizer=tokenizer)
    outbox, collected = memory_channel[Out](1)
    fed = _feed(records, context)

    async def run() -> None:
        async with fed, outbox:
            await stage.run(fed, outbox)

    return Driven(await _collect(run, collected, context), context)


async def drive_source(
    source: Source[Out], *, limit: int | None = None, worker: Worker | None = None, schedule: Schedule = UNBOUNDED
) -> Driven[Out]:
    """Run `source` alone and return the records that it sent; after `limit` records it is cancelled."""
    tokenizer = next(stated_tokenizers([source]), None)
    context = Context(worker=worker or Worker(), schedule=schedule, tokenizer=tokenizer)
    outbox, collected = memory_channel[Out](1)

    async def run() -> None:
        async with outbox:
            await source.run(outbox)

    return Driven(await _collect(run, collected, context, limit), context)


async def drive_sink(
    sink: Sink[In], records: Iterable[In], *, worker: Worker | None = None, tokenizer: Any = None
) -> Driven[In]:
    """Run `sink` alone on `records`; the result is empty but for its ledger and metrics."""
    context = Context(worker=worker or Worker(), tokenizer=tokenizer)
    async with _feed(records, context) as fed:
        with entered(context):
            await sink.run(fed)
    return Driven([], context)


def _feed(records: Iterable[In], context: Context) -> MemoryReceiver[In]:
    """Return a channel that holds `records` and then ends; their trajectories are admitted."""
    given = list(records)
    sender, receiver = memory_channel[In](max(1, len(given)))
    for record in given:
        if isinstance(record, TrajectoryGroup | TrainBatch):
            for group_id, mask in masks_by_group(record):
                context.ledger.admit(group_id, iter_bits(mask))
        sender.send_nowait(record)
    sender.close()
    return receiver


async def _collect(
    run: Callable[[], Awaitable[None]], collected: MemoryReceiver[Out], context: Context, limit: int | None = None
) -> list[Out]:
    out: list[Out] = []
    failure: list[Exception] = []

    async def guarded() -> None:
        try:
            await run()
        except Exception as error:  # noqa: BLE001 (raised below, not in a group)
            failure.append(error)

    async with collected, anyio.create_task_group() as tasks:
        with entered(context):
            tasks.start_soon(guarded)
        while limit is None or len(out) < limit:
            try:
                out.append(await collected.receive())
            except anyio.EndOfStream:
                break
        if limit is not None:
            tasks.cancel_scope.cancel()
    if failure:
        raise failure[0]
    return out


# -- builders ------------------------------------------------------------------------------------------------------


def group(
    *,
    completion_lengths: Sequence[int] = (4, 6),
    prompt_length: int = 2,
    rewards: Sequence[float] | None = None,
    env: str = "test",
    instance_id: str = "0",
    policy_version: int = 0,
    stop_reason: StopReason = StopReason.STOP,
    seed: int = 0,
    meta: Mapping[str, Any] | None = None,
    **columns: Any,
) -> TrajectoryGroup:
    """Return a checked group: one sequence for each completion length, random tokens, every reward 1 by default.

    >>> group(completion_lengths=[4, 6]).completion_lengths().tolist()
    [4, 6]
    """
    random = np.random.default_rng(seed)
    lengths = np.asarray(completion_lengths, np.int64) + prompt_length
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    loss_mask = position >= prompt_length
    logprobs = np.where(loss_mask, -random.random(offsets[-1]), 0.0).astype(np.float32)
    given: dict[str, Any] = {
        "tokens": random.integers(0, 1000, offsets[-1]),
        "loss_mask": loss_mask,
        "behavior_logprobs": logprobs,
        "policy_versions": np.full(len(lengths), policy_version),
        "stop_reasons": np.full(len(lengths), int(stop_reason)),
    }
    return TrajectoryGroup.build(
        env=env,
        instance_id=instance_id,
        offsets=offsets,
        rewards=np.ones(len(lengths)) if rewards is None else rewards,
        meta=meta,
        **(given | columns),
    )


def trajectory(*, completion_len: int = 6, reward: float = 1.0, **columns: Any) -> Trajectory:
    """Return the only row of a group of one.

    >>> int(trajectory(completion_len=6).loss_mask.sum())
    6
    """
    return group(completion_lengths=[completion_len], rewards=[reward], **columns)[0]


def batch(groups: int = 2, **columns: Any) -> TrainBatch:
    """Return a packed batch of `groups` groups, each built by `group` with `columns` and an instance id of its own.

    >>> len(batch(groups=3, completion_lengths=[4, 6]))
    6
    """
    return TrainBatch.pack(group(instance_id=str(i), seed=i, **columns) for i in range(groups))


# -- time ----------------------------------------------------------------------------------------------------------


class VirtualClock:
    """An event loop whose time passes only when no task can run, and then at once.

    Timeouts, deadlines and sleeps of the code under test keep their order and cost no real time. Work in threads and
    other processes is not waited for: this is for single-threaded code.

    >>> clock = VirtualClock()
    >>> clock.run(lambda: anyio.sleep(3600))
    >>> clock.now_s
    3600.0
    """

    def __init__(self) -> None:
        self.now_s: float = 0.0
        """Seconds that have passed, virtually."""

    def run(self, main: Callable[[], Awaitable[R]]) -> R:
        """Run `main` as `anyio.run(main)` does, in virtual time."""
        return anyio.run(main, backend_options={"loop_factory": lambda: _VirtualLoop(self)})


class _VirtualSelector(selectors.DefaultSelector):
    """Polls real descriptors, and passes virtual time where the loop would have slept."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select(None)
        ready = super().select(0)
        if not ready:
            self._clock.now_s += max(0.0, timeout)
        return ready


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(_VirtualSelector(clock))
        self._virtual = clock

    def time(self) -> float:
        return self._virtual.now_s
