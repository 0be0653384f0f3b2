"""`TagFlow`: the flow of one tag of ROLL's configuration. It feeds all its groups of environments.

    threads of ROLL's worker, one a group                       the flow's thread
    next() ◀── SampleQueue (bounded) ◀── sink ◀── flow, on an event loop of its own
    put()  ──▶ ROLL's GroupQueue
    begin_step(N): groups that left the queue since N − 1 are trained ──▶ Ledger.commit at version N

The ledger's steps are ROLL's: before step N its weights have N optimizer steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ...._pipeline.accounting.telemetry import get_logger
from ...._pipeline.graph.report import Report
from ...._pipeline.graph.statistics import PipelineStatistics
from ...._schemas import TrajectoryGroup
from ..flow_thread.deliveries import Deliveries
from ..flow_thread.flow_run import Decode, Drop, FlowRun, Groups
from ..flow_thread.flow_thread import FlowThread
from ..flow_thread.sample_queue import SampleQueue, Trajectories
from ..flow_thread.sampling import check_unbranched
from .group_queue import Put, QueuePlace
from .rollouts import fits
from .step_files import StepFiles

log = get_logger("penstock.roll")

OLDER = Drop("stale", "sampled before ROLL created its group: older than async_generation_ratio")

FILTERED = Drop("filtered", "dropped by ROLL's group_filter_cls")


class Sampled(NamedTuple):
    """A group of the flow for ROLL's queue."""

    group: TrajectoryGroup
    trajectories: Trajectories


class Bounds(NamedTuple):
    """The values of ROLL's configuration that decide if it takes or drops a group."""

    group_size: int
    sequence_length: int
    async_generation_ratio: int
    hung_timeout: float
    """Seconds without a group until an error tells ROLL that none will come."""
    per_step: int | None = None
    """Trajectories of this tag in an optimizer step; None if ROLL takes as many as come."""


class TagFlow:
    """Runs a flow for the groups of environments of one tag, from ROLL's first step to its end."""

    def __init__(
        self,
        tag: str,
        make_flow: Callable[[], Groups],
        bounds: Bounds,
        files: StepFiles,
        held: Callable[[], set[QueuePlace]],
    ) -> None:
        """Prepare; the flow starts with ROLL's first step.

        Args:
            tag: the key in `custom_envs`.
            make_flow: returns the flow.
            bounds: of ROLL's configuration.
            files: keep the state of each step.
            held: returns the episodes that ROLL's queue holds.
        """
        self._tag = tag
        self._make_flow = make_flow
        self._bounds = bounds
        self._files = files
        self._held = held
        self._lock = threading.Lock()
        """Held while a group is put, and while a step begins: a group that ROLL has taken is known as such."""
        self._deliveries: Deliveries[QueuePlace, int] = Deliveries()
        """The trajectories that ROLL's queue has taken, each with the step at which ROLL created its group."""
        self._thread = FlowThread(f"penstock-roll-{tag}")
        self._queue = SampleQueue()
        self._metrics: dict[str, float] = {}
        """Of the last step, until a rollout carries them to ROLL."""
        self.step: int = -1
        """ROLL's step."""
        self.report: Report | None = None
        """The report of the flow, once ROLL has stopped it."""

    def __repr__(self) -> str:
        return f"<TagFlow {self._tag}: {self._thread.state}, {self._deliveries!r}>"

    def statistics(self) -> PipelineStatistics:
        """Return the waits of every stage of the flow now.

        Raises:
            RuntimeError: ROLL has not begun its first step.
        """
        return self._thread.statistics()

    # -- called by ROLL, which waits ---------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """Commit trained groups, and let the flow begin those to sample with the weights of `step`.

        Raises:
            InvalidPipeline: the flow cannot work.
            Exception: raised by the function that makes the flow.
        """
        with self._lock:
            if step == self.step:
                return  # each environment is told
            if self._thread.started:
                self._commit(step)
            else:
                self._start(step)
            self.step = step

    def stop(self) -> None:
        """Commit the groups of ROLL's last step, and stop the flow and everything that it started."""
        with self._lock:
            if not self._thread.running:
                return
            try:
                self._commit(self.step + 1)
            finally:
                self.report = self._thread.stop()
            if self.report is not None:
                self._files.save_balance(self.report.balance)
                log.info("flow_stopped", tag=self._tag, **self.report.balance.ended)

    def _start(self, step: int) -> None:
        saved = None
        if step:
            saved = self._files.load(step - 1)
        else:
            self._files.clear()
        rest = Drop(
            "rejected",
            f"ROLL: expected group_size={self._bounds.group_size} rollouts that train, of at most "
            f"sequence_length={self._bounds.sequence_length} tokens",
        )
        run = FlowRun(
            self._make_flow,
            self._items,
            self._queue,
            trainer="ROLL",
            rest=rest,
            saved=saved,
            version=step,
            per_step=self._bounds.per_step,
        )
        self._thread.start(run)

    def _commit(self, step: int) -> None:
        """Commit groups that left ROLL's queue before `step`, except those that ROLL has dropped.

        ROLL asks for the batch of a step, trains it, and then names the next. Between two steps a group leaves its
        queue into the batch, or is dropped as too old (roll/distributed/scheduler/rollout_scheduler.py:264, 525).
        """
        held, ratio = self._held(), self._bounds.async_generation_ratio
        gone = {place: given.note for place, given in self._deliveries.given.items() if place not in held}
        old = self._deliveries.drop([place for place, created in gone.items() if self.step - created > ratio])
        self._thread.end(old, Drop("stale", f"dropped by ROLL: older than async_generation_ratio={ratio}"))
        self._deliveries.batch(gone)
        self._deliveries.step_all()
        self._metrics |= self._thread.commit(self._deliveries.stepped(), step)
        self._files.save(step - 1, self._thread.state_dict())

    # -- called by the threads of ROLL's worker ----------------------------------------------------------------------

    def next(self, wanted: Callable[[], bool]) -> Sampled | None:
        """Wait for the next group, and return it; None once it is not `wanted`.

        Raises:
            PenstockError: the error that ended the flow.
            FlowEnded: the flow has sent its last group.
            FlowStalled: it has sent no group for ROLL's `env_monitor.hung_timeout`.
        """
        sampled: Sampled | None = self._thread.next(
            self._queue,
            stale_after_s=self._bounds.hung_timeout,
            wanted=lambda: wanted() and self._thread.running,
        )
        return sampled

    def put(self, episode: QueuePlace, sampled: Sampled, send: Callable[[int, dict[str, float]], Put]) -> Put:
        """Put a group into ROLL's queue by `send`, given the step and metrics, and note the outcome."""
        with self._lock:
            answer, created = send(self.step, self._metrics)
            if answer == "taken":
                self._metrics = {}
                self._deliveries.give(episode, sampled.trajectories, created)
            elif answer == "older":
                self._thread.end(sampled.trajectories, OLDER)
            elif answer == "filtered":
                self._thread.end(sampled.trajectories, FILTERED)
        return Put(answer, created)

    def _items(self, group: TrajectoryGroup, decode: Decode | None) -> Iterator[tuple[Trajectories, Sampled]]:
        """Yield the group, if ROLL can train it; on the event loop."""
        del decode
        check_unbranched(group, "ROLL")
        if fits(group, self._bounds.group_size, self._bounds.sequence_length):
            trajectories = tuple(group.ids)
            yield trajectories, Sampled(group.owned(), trajectories)
