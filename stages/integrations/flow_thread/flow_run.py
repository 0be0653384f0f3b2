"""`FlowRun`: a flow that runs beside a trainer that is not penstock's, and feeds a queue that this takes from.

The ledger belongs to the event loop of the flow. Its steps are the versions of the trainer's weights.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import anyio
from anyio import TASK_STATUS_IGNORED
from anyio.abc import TaskStatus

from ...._pipeline.accounting.committed_prompts import CommittedPrompts
from ...._pipeline.accounting.end_states import EndState
from ...._pipeline.accounting.ledger import Ledger
from ...._pipeline.accounting.telemetry import Metrics, get_logger
from ...._pipeline.channels.channel import ReceiveChannel
from ...._pipeline.durability.resumption import ResumePoint, Stateful
from ...._pipeline.errors import FlowEnded, FlowStalled
from ...._pipeline.graph.context import drop
from ...._pipeline.graph.stage_info import StageInfo, info_of
from ...._pipeline.graph.statistics import PipelineStatistics
from ...._pipeline.runtime.flow import Flow, Pipeline
from ...._pipeline.util.waiting import Waiters
from ...._schemas import TrajectoryGroup, TrajectoryId
from .sample_queue import Trajectories

log = get_logger("penstock.flow")

Decode: TypeAlias = Callable[[Sequence[int]], str]
"""Tokens to text."""

Groups: TypeAlias = Flow[TrajectoryGroup]

Items: TypeAlias = Callable[[TrajectoryGroup, Decode | None], Iterable[tuple[Trajectories, Any]]]


class SampleReceiver(Protocol):
    """Receives the trainer's samples, on the event loop of the flow: a `SampleQueue`, for one."""

    def offer(self, sample: Any, trajectories: Trajectories, /) -> bool:
        """Take a sample of these trajectories, and return True; return False where there is no room now."""
        ...

    def close(self, error: BaseException, /) -> None:
        """Note that no further sample will come, because of `error`."""
        ...


class Drop(NamedTuple):
    """The end of trajectories that the trainer drops, or is not given."""

    state: EndState
    reason: str
    evaluated: bool = False
    """True if they were sampled for an evaluation."""


class FlowRun:
    """One run of a flow, on the event loop of its thread."""

    def __init__(
        self,
        flow: Groups | Callable[[], Groups],
        items: Items,
        samples: SampleReceiver,
        *,
        trainer: str,
        rest: Drop,
        saved: Mapping[str, Any] | None,
        version: int,
        per_step: int | None = None,
    ) -> None:
        """Prepare a run.

        Args:
            flow: sends groups, or is a function that returns such a flow.
            items: returns the samples of a group for the trainer, each with its trajectories; or a `Drop` of these.
            samples: takes these.
            trainer: the name of the framework, in metrics and errors.
            rest: the end of trajectories without a sample.
            saved: the state of a checkpoint, or None.
            version: of the trainer's weights.
            per_step: trajectories that the trainer takes for a version of its weights; None if that varies.

        Raises:
            InvalidPipeline: the flow cannot work.
        """
        flow = flow if isinstance(flow, Flow) else flow()
        self._items = items
        self._samples = samples
        self._trainer = trainer
        self._rest = rest
        self._ledger = Ledger()
        self._metrics = Metrics()
        self._room = Waiters()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._progress: tuple[int, float] = 0, time.monotonic()
        """Count of groups that had been sent, and the time of its first observation."""
        self._cancel: Callable[[], None] = _nothing
        self._over = False
        """True if the pipeline has ended: its ledger has counted the end of all that was in flight."""
        self._late: list[TrajectoryId] = []
        """Trained after that."""
        self._stateful = {
            node.name: node.stage for node in flow.nodes if not node.remote and isinstance(node.stage, Stateful)
        }
        flow = self._resumed(flow, saved, version)
        self._decode = _decoder(flow)
        self.pipeline: Pipeline = flow.sink(_Sink(self, trainer, per_step))
        self.pipeline.check()
        self.failure: BaseException | None = None
        """The error that ended the flow."""
        self.ended: bool = False
        """True if the flow has sent its last group."""
        self.sent: int = 0
        """Samples, or groups, that were put into the queue."""

    def _resumed(self, flow: Groups, saved: Mapping[str, Any] | None, version: int) -> Groups:
        if not saved:
            self._ledger.step = version
            return flow
        committed = CommittedPrompts.of_state(saved["committed"])
        self._ledger.restore(committed, version)
        for name, stage in self._stateful.items():
            if name in saved["stages"]:
                stage.load_state_dict(saved["stages"][name])
        log.info("flow_resumed", trained=len(committed))
        return flow.resume_from(ResumePoint(version, committed))

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Run the flow until `stop`, or until a stage fails."""
        self._loop = asyncio.get_running_loop()
        try:
            with anyio.CancelScope() as scope:
                self._cancel = scope.cancel
                task_status.started()
                await self.pipeline.run(ledger=self._ledger, metrics=self._metrics)
        except Exception as error:  # noqa: BLE001 (raised in the trainer's thread)
            self.failure = error
        finally:
            self._over = True
            self._samples.close(self.error)

    def stop(self) -> None:
        """Cancel the flow."""
        self._cancel()

    async def feed(self, inbox: ReceiveChannel[TrajectoryGroup]) -> None:
        """Put the samples of every group into the queue, each when there is room."""
        async for group in inbox:
            found = list(self._items(group, self._decode))
            given = {trajectory for trajectories, _ in found for trajectory in trajectories}
            drop([each for each in group.ids if each not in given], *self._rest[:2])
            del group  # copied: its slot must not wait for the trainer
            for trajectories, item in found:
                if isinstance(item, Drop):
                    drop(trajectories, *item[:2])
                else:
                    await self._put(item, trajectories)
        self.ended = True
        self._samples.close(self.error)
        await anyio.sleep_forever()  # the trainer trains the last groups meanwhile

    async def _put(self, item: Any, trajectories: Trajectories) -> None:
        while not self._samples.offer(item, trajectories):
            await self._room.wait()
        self.sent += 1

    @property
    def error(self) -> BaseException:
        """The error for a trainer that waits for more groups than a flow has sent before its end."""
        return self.failure or FlowEnded(
            f"{self._trainer} waits for more samples than the {self.sent} that the flow has sent, which has ended: "
            f"give it more prompts (SourceEnv(groups=None), PromptDataset(epochs=None)), or train fewer steps"
        )

    def check(self, stale_after_s: float, waits: Callable[[], PipelineStatistics], began: float = 0.0) -> None:
        """Raise if no group will come; called in the trainer's thread while it waits, since `began`.

        Raises:
            PenstockError: the error that ended the flow.
            FlowEnded: the flow has sent its last group, or was stopped.
            FlowStalled: it has sent no group for `stale_after_s`.
        """
        if self.failure is not None or self.ended:
            raise self.error
        sent, since = self._progress
        if self.sent != sent:
            self._progress = self.sent, time.monotonic()
        elif (waited_s := time.monotonic() - max(since, began)) > stale_after_s:
            stages = "; ".join(f"{stage.name}: {stage.waiting_for or 'works'}" for stage in waits().stages)
            raise FlowStalled(f"expected a sample within {stale_after_s:g} s, got none in {waited_s:.0f} s ({stages})")

    def wake(self) -> None:
        """Let the sink look for room. Called in the trainer's thread."""
        self.post(self._room.wake_all)

    def post(self, function: Callable[[], object]) -> None:
        """Have `function` called on the event loop of the flow, if that runs, without waiting. Called in any thread."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(function)

    def end(self, trajectories: Trajectories, dropped: Drop) -> None:
        """Count the end of trajectories that the trainer drops; those of a run that is over have ended."""
        ending = [each for each in trajectories if self._ledger.trajectories.is_open(each)]
        if dropped.evaluated:
            self._ledger.evaluated += len(ending)
        self._ledger.end(ending, dropped.state, dropped.reason)

    def commit(self, trained: list[TrajectoryId], version: int) -> dict[str, float]:
        """Commit trajectories at `version`; return the metrics since the last commit.

        Those of a run that is over were counted as unfinished; a checkpoint lists them as trained all the same.
        """
        if self._over:
            self._late += trained
            return {}
        self._ledger.commit_ids(trained, version)
        return self._metrics.emit(version)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON values."""
        stages = {name: dict(stage.state_dict()) for name, stage in self._stateful.items()}
        committed = self._ledger.committed
        for trajectory in self._late:
            committed.add(trajectory.group, 1 << trajectory.repetition_id)
        return {"committed": committed.state_dict(), "stages": stages}


class _Sink:
    """The end of the flow: it feeds the trainer's queue."""

    def __init__(self, run: FlowRun, name: str, per_step: int | None) -> None:
        self._run = run
        self._name = name
        self._per_step = per_step

    def stage_info(self) -> StageInfo:
        """State the name in metrics and errors, the batch, and that the trainer's steps are committed."""
        return StageInfo(name=self._name, commits=True, waits_for=self._per_step)

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup]) -> None:
        """Run the sink; see `Sink`."""
        await self._run.feed(inbox)


def _nothing() -> None:
    pass


def _decoder(flow: Groups) -> Decode | None:
    """Return the function that decodes tokens, of the first tokenizer in the flow that has one."""
    for node in flow.nodes:
        for tokenizer in info_of(node.stage).tokenizers or ():
            if (decode := getattr(tokenizer, "decode", None)) is not None:
                return cast("Decode", decode)
    return None
