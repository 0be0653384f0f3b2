from __future__ import annotations

import sys
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
from anyio.lowlevel import checkpoint
from structlog.testing import capture_logs
from tests.failsafe import FAILSAFE_S

from penstock import Context, GroupId, SinkTrainer, StopReason, TrainBatch
from penstock.accounting import Ledger
from penstock.channels import MemoryReceiver, memory_channel
from penstock.errors import PeerLost
from penstock.testing import batch, drive_sink, entered
from penstock.training import write_checkpoint


@dataclass
class Recorder:
    """A trainer that notes what happens, in order, together with a `Recorded` generation."""

    story: list[str] = field(default_factory=list)
    fails: bool = False
    threads: set[int] = field(default_factory=set)
    steps: int = 0
    committed: Mapping[GroupId, int] = field(default_factory=dict)

    def step(self, batch: TrainBatch) -> dict[str, float]:
        self.threads.add(threading.get_ident())
        if self.fails:
            raise ZeroDivisionError
        self.steps += 1
        self.story.append(f"train {len(batch)}")
        return {"loss": 0.5}

    def weights(self) -> dict[str, Any]:
        return {"w": np.zeros(1)}

    def save(self, folder: Path, committed: Mapping[GroupId, int]) -> Path:
        self.story.append(f"save {folder.name} {len(committed)}")
        return folder


@dataclass
class Recorded:
    story: list[str]
    version: int = -1

    async def publish(self, tensors: Mapping[str, Any], version: int) -> None:
        assert "w" in tensors
        self.version = version
        self.story.append(f"publish {version}")

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        self.story.append("pause")
        try:
            yield
        finally:
            self.story.append("resume")


class Foreign:
    """Somebody else's trainer: `step` and nothing more."""

    def __init__(self) -> None:
        self.batches: list[TrainBatch] = []

    def step(self, batch: TrainBatch) -> dict[str, float]:
        self.batches.append(batch)
        return {"loss": float(len(self.batches))}


class Slow:
    """A trainer whose step ends when `may_end` is set."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()

    def step(self, batch: TrainBatch) -> dict[str, float]:
        self.begun.set()
        self.may_end.wait(timeout=FAILSAFE_S)
        return {"sequences": len(batch)}


@asynccontextmanager
async def fed(*given: TrainBatch) -> AsyncIterator[tuple[Context, MemoryReceiver[TrainBatch]]]:
    """Yield a context of its own, and a channel with the given batches that stays open."""
    sender, receiver = memory_channel[TrainBatch](max(1, len(given)))
    async with sender, receiver:
        for each in given:
            sender.send_nowait(each)
        with entered(Context(ledger=Ledger(admits_on_end=True))) as context:
            yield context, receiver


def batches(count: int) -> list[TrainBatch]:
    return [renamed(batch(groups=2), number) for number in range(count)]


def renamed(made: TrainBatch, number: int) -> TrainBatch:
    groups = tuple(each._replace(instance_id=f"{number}.{each.instance_id}") for each in made.groups)
    return msgspec.structs.replace(made, groups=groups)


# -- what happens to a batch -------------------------------------------------------------------------------------------


async def test_any_object_with_a_step_is_fed_every_batch_in_order() -> None:
    trainer, given = Foreign(), batches(3)

    await drive_sink(SinkTrainer(trainer), given)

    assert trainer.batches == given


async def test_a_batch_is_committed_when_its_step_is_done() -> None:
    driven = await drive_sink(SinkTrainer(Foreign()), batches(2))

    balance = driven.ledger.balance()
    assert (balance.ended["trained"], balance.in_flight, driven.ledger.step) == (8, 0, 2)


async def test_a_step_runs_off_the_event_loop() -> None:
    trainer = Recorder()

    await drive_sink(SinkTrainer(trainer), batches(2))

    assert threading.get_ident() not in trainer.threads


async def test_the_switch_interval_of_the_interpreter_is_left_alone() -> None:
    before, seen = sys.getswitchinterval(), list[float]()

    class Watching:
        def step(self, batch: TrainBatch, /) -> dict[str, float]:
            seen.append(sys.getswitchinterval())
            return {"sequences": len(batch)}

    await drive_sink(SinkTrainer(Watching()), batches(1))

    assert [*seen, sys.getswitchinterval()] == [before, before]


async def test_each_step_is_trained_then_published_then_saved() -> None:
    trainer = Recorder()
    sink = SinkTrainer(trainer, Recorded(trainer.story), checkpoints="kept", checkpoint_every=1)

    await drive_sink(sink, batches(2))

    assert trainer.story == [
        "publish 0",
        "train 4",
        "publish 1",
        "save kept 2",
        "train 4",
        "publish 2",
        "save kept 4",
    ]


async def test_a_step_that_fails_commits_nothing_and_its_error_arrives_as_raised() -> None:
    async with fed(batch()) as (context, inbox):
        with pytest.raises(ZeroDivisionError):
            await SinkTrainer(Recorder(fails=True)).run(inbox)

    assert context.ledger.balance().ended["trained"] == 0


async def test_a_step_that_returns_no_metrics_is_blamed_on_the_trainer() -> None:
    class Forgetful:
        def step(self, batch: TrainBatch, /) -> Any:
            del batch

    with pytest.raises(TypeError, match=r"expected Forgetful\.step to return metrics.*got None: end it with `return"):
        await drive_sink(SinkTrainer(Forgetful()), batches(1))


async def test_the_run_ends_at_max_steps_and_leaves_the_rest_in_the_channel() -> None:
    trainer = Foreign()

    driven = await drive_sink(SinkTrainer(trainer, max_steps=2), batches(3))

    assert len(trainer.batches) == 2
    assert driven.ledger.in_flight == 4


async def test_metrics_of_batch_trainer_and_clock_are_emitted_once_a_step() -> None:
    emitted: list[tuple[int, dict[str, float]]] = []

    async with fed(*batches(2)) as (context, inbox):
        context.metrics.sinks.append(lambda metrics, step: emitted.append((step, metrics)))
        await SinkTrainer(Foreign(), max_steps=2).run(inbox)

    assert [step for step, _ in emitted] == [1, 2]
    assert [metrics["loss"] for _, metrics in emitted] == [1.0, 2.0]
    assert {"reward", "staleness/mean", "perf/throughput", "timing_s/train"} <= emitted[0][1].keys()


# -- publishing and pausing --------------------------------------------------------------------------------------------


async def test_the_weights_that_the_run_begins_with_are_published_once() -> None:
    trainer = Recorder()

    await drive_sink(SinkTrainer(trainer, Recorded(trainer.story, version=0)), batches(1))

    assert trainer.story == ["train 4", "publish 1"]


async def test_with_external_generation_nothing_is_published_or_paused() -> None:
    trainer = Recorder()
    sink = SinkTrainer(trainer, Recorded(trainer.story), external_generation=True, sampling="pause")

    await drive_sink(sink, batches(2))

    assert trainer.story == ["train 4", "train 4"]


async def test_sampling_can_be_paused_from_before_the_step_until_the_weights_are_out() -> None:
    trainer = Recorder()

    await drive_sink(SinkTrainer(trainer, Recorded(trainer.story), sampling="pause"), batches(1))

    assert trainer.story == ["publish 0", "pause", "train 4", "publish 1", "resume"]


async def test_sampling_goes_on_when_a_step_fails() -> None:
    trainer = Recorder(fails=True)

    with pytest.raises(ZeroDivisionError):
        await drive_sink(SinkTrainer(trainer, Recorded(trainer.story), sampling="pause"), batches(1))

    assert trainer.story == ["publish 0", "pause", "resume"]


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("every", "saved"), [(2, ["save kept 4", "save kept 6"]), (3, ["save kept 6"])])
async def test_a_checkpoint_is_written_every_so_many_steps_and_once_at_the_end(every: int, saved: list[str]) -> None:
    trainer = Recorder()

    await drive_sink(SinkTrainer(trainer, checkpoints="kept", checkpoint_every=every), batches(3))

    assert [entry for entry in trainer.story if "save" in entry] == saved


async def test_old_checkpoints_are_removed_when_a_new_one_is_written(tmp_path: Path) -> None:
    class Saving(Recorder):
        def names_in(self, folder: Path) -> str:
            return " ".join(sorted(path.name for path in folder.glob("*")))

        def save(self, folder: Path, committed: Mapping[GroupId, int]) -> Path:  # noqa: ARG002 (the protocol's)
            self.story.append(self.names_in(folder))
            return write_checkpoint(folder, self.steps, lambda into: (into / "file").touch())

    trainer = Saving()

    await drive_sink(SinkTrainer(trainer, checkpoints=tmp_path, checkpoint_every=1, keep_checkpoints=2), batches(4))

    assert [event for event in trainer.story if event.startswith("step")] == [
        "step-00000001",
        "step-00000001 step-00000002",
        "step-00000002 step-00000003",
    ]
    assert trainer.names_in(tmp_path) == "step-00000003 step-00000004"


async def test_a_resumed_trainer_takes_the_ledger_and_the_version_with_it() -> None:
    done = GroupId("test", "long ago")
    trainer = Recorder(steps=7, committed={done: 0b11})
    generation = Recorded(trainer.story)

    driven = await drive_sink(SinkTrainer(trainer, generation, max_steps=8), batches(2))

    assert trainer.story == ["publish 7", "train 4", "publish 8"]
    assert driven.ledger.step == 8
    assert driven.ledger.committed[done] == 0b11


async def test_a_run_that_had_all_its_steps_trains_no_more() -> None:
    trainer = Recorder(steps=7)

    await drive_sink(SinkTrainer(trainer, max_steps=7), batches(1))

    assert trainer.story == []


# -- cancellation ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def running(sink: SinkTrainer, trainer: Slow) -> AsyncIterator[tuple[Context, anyio.CancelScope]]:
    """Run `sink` up to its first step; the body may cancel it."""
    async with fed(batch()) as (context, inbox), anyio.create_task_group() as tasks:
        tasks.start_soon(sink.run, inbox)
        await anyio.to_thread.run_sync(trainer.begun.wait)
        yield context, tasks.cancel_scope


async def test_a_cancelled_run_finishes_and_commits_the_step_it_is_in() -> None:
    trainer = Slow()

    async with running(SinkTrainer(trainer), trainer) as (context, scope):
        scope.cancel()
        trainer.may_end.set()

    assert context.ledger.balance().ended["trained"] == 4


async def test_a_cancelled_run_gives_a_step_up_that_takes_too_long_and_commits_nothing() -> None:
    trainer = Slow()

    with capture_logs() as logs:
        async with running(SinkTrainer(trainer, cancel_timeout_s=0.01), trainer) as (context, scope):
            scope.cancel()
        trainer.may_end.set()

    assert context.ledger.balance().ended["trained"] == 0
    assert [(entry["event"], entry["step"]) for entry in logs] == [("step_abandoned", 1)]


async def test_a_step_that_is_not_cancelled_may_take_longer_than_the_timeout() -> None:
    trainer = Slow()

    async with running(SinkTrainer(trainer, cancel_timeout_s=0.0, max_steps=1), trainer) as (context, _):
        for _ in range(50):
            await checkpoint()
        trainer.may_end.set()

    assert context.ledger.balance().ended["trained"] == 4


async def test_a_run_that_waits_for_a_batch_is_cancelled_at_once() -> None:
    async with fed() as (_, inbox), anyio.create_task_group() as tasks:
        tasks.start_soon(SinkTrainer(Foreign(), cancel_timeout_s=60).run, inbox)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()


# -- a trainer that fails between steps --------------------------------------------------------------------------------


class Lost(Foreign):
    """A trainer that has lost a process."""

    async def watch(self) -> None:
        raise PeerLost("rank 1 died")


class Watched(Foreign):
    """A trainer that does not fail."""

    async def watch(self) -> None:
        await anyio.sleep_forever()


async def test_a_trainer_that_fails_between_steps_ends_a_run_that_waits_for_a_batch() -> None:
    async with fed() as (_, inbox):
        with anyio.fail_after(FAILSAFE_S), pytest.raises(PeerLost, match="rank 1 died"):
            await SinkTrainer(Lost()).run(inbox)


async def test_a_run_ends_with_its_stream_though_its_trainer_is_watched() -> None:
    with anyio.fail_after(FAILSAFE_S):
        driven = await drive_sink(SinkTrainer(Watched()), [batch(groups=2)])

    assert driven.ledger.balance().ended["trained"] == 4


# -- invalid arguments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"publisher": Recorded([])}, r"expected weights\(\) -> tensors by name for publishing, got Foreign"),
        ({"checkpoints": "x"}, r"expected steps, committed and save\(folder, committed\) for checkpoints, got Foreign"),
        ({"trainer": object()}, r"expected step\(batch\) -> metrics for a trainer, got object"),
    ],
)
def test_a_trainer_that_cannot_do_what_is_asked_is_refused(options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"trainer": Foreign()} | options

    with pytest.raises(ValueError, match=message):
        SinkTrainer(**given)


@pytest.mark.parametrize("options", [{"max_steps": 0}, {"checkpoint_every": 0}, {"keep_checkpoints": 0}])
def test_counts_that_mean_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        SinkTrainer(Foreign(), **options)


async def test_checkpoints_need_a_folder() -> None:
    with pytest.raises(ValueError, match="checkpoint_every: expected with a folder"):
        await drive_sink(SinkTrainer(Foreign(), checkpoint_every=3), batches(1))
    with pytest.raises(ValueError, match="keep_checkpoints: expected with a folder"):
        await drive_sink(SinkTrainer(Foreign(), keep_checkpoints=3), batches(1))


def test_a_foreign_trainer_needs_no_weights_where_generation_is_outside() -> None:
    SinkTrainer(Foreign(), Recorded([]), external_generation=True)


# -- metrics -----------------------------------------------------------------------------------------------------------


async def test_a_batch_says_what_it_holds() -> None:
    made = batch(
        groups=1,
        completion_lengths=[4, 6],
        prompt_length=2,
        rewards=[1.0, 0.0],
        policy_versions=[3, 5],
        stop_reasons=[StopReason.STOP, StopReason.LENGTH],
        advantages=np.repeat([1.0, -1.0], [6, 8]),
        reward_parts={"format": [0.25, 0.75]},
        meta={"data_source": "gsm8k"},
    )

    emitted: list[dict[str, float]] = []
    async with fed(*batches(6), made) as (context, inbox):
        context.metrics.sinks.append(lambda metrics, _: emitted.append(dict(metrics)))
        await SinkTrainer(Foreign(), max_steps=7).run(inbox)
    expected = {
        "reward": 0.5,
        "reward/gsm8k": 0.5,
        "rewards/format": 0.5,
        "response_length/mean": 5,
        "response_length/max": 6,
        "response_length/min": 4,
        "response_length/clip_ratio": 0.5,
        "prompt_length/mean": 2,
        "staleness/mean": 2,
        "staleness/max": 3,
        "batch/groups": 1,
        "batch/trajectories": 2,
        "perf/total_num_tokens": 14,
        "advantages/mean": pytest.approx((4 - 6) / 10),
        "advantages/max": 1,
        "advantages/min": -1,
    }

    assert len(emitted) == 7
    assert {name: emitted[-1][name] for name in expected} == expected
