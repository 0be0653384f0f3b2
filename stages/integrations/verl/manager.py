"""`PenstockLoopManager`: a flow as the agent loop manager of verl's trainer.

    verl's thread                                        threads of the manager
    generate_sequences ──▶ Requests                      flow, on an event loop ──▶ SampleQueue (bounded)
    ReplayBuffer.sample ◀── TransferQueue ◀── delivery ◀──────────────────────────────┘
    keys removed: selected, dropped, trained ──▶ Requests ──▶ Ledger

The ledger belongs to the event loop. It counts steps as verl does: weights of step n are sent as version n.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from ...._pipeline.accounting.committed_prompts import CommittedPrompts
from ...._pipeline.accounting.telemetry import get_logger
from ...._pipeline.errors import InvalidPipeline
from ...._pipeline.graph.report import Report
from ...._pipeline.graph.statistics import PipelineStatistics
from ...._pipeline.util.json_file import write_json
from ...._schemas import TrajectoryGroup
from ...batching.batcher import NOTHING_TO_TRAIN
from ..flow_thread.flow_run import Decode, Drop, FlowRun
from ..flow_thread.flow_thread import FlowThread
from ..flow_thread.sample_queue import SampleQueue, Trajectories
from .advantages import register_estimator
from .configuration import Configuration
from .requests import VerlRequests
from .rows import Row, rows_of
from .transfer_queue import TransferQueue

log = get_logger("penstock.verl")

STALE_AFTER_S = 1800.0
"""Seconds without a group until the flow counts as stalled: verl itself waits without a bound."""

STATE = "penstock.json"
"""The file in a checkpoint of verl."""


class PenstockLoopManager:
    """Answers the prompts of verl's trainer with groups of a flow; for `rollout.agent.agent_loop_manager_class`.

    The flow runs from the start of verl's trainer to its end, in a thread with an event loop of its own.
    """

    def __init__(self, config: Any) -> None:
        """Start the flow that verl's configuration names.

        Args:
            config: of verl's trainer, with `actor_rollout_ref.rollout.custom.flow`.

        Raises:
            InvalidPipeline: the configuration cannot work, or the flow.
            InvalidConfig: there is no function of that name.
            MissingExtra: verl is not installed.
            MissingInterface: verl lacks an interface.
        """
        self._config = Configuration(config)
        self._queue = TransferQueue()
        if self._config.needs.advantages:
            register_estimator()
        self._lock = threading.Condition()
        """Of `_requests`, `_failure` and `_ending`."""
        self._requests = VerlRequests(self._config.limits)
        self._failure: BaseException | None = None
        """The error that ended the flow, or the delivery."""
        self._ending = False
        self.report: Report | None = None
        """The report of the flow, once the training has ended: the balance of the ledger, and why it ended."""
        self._samples = SampleQueue()
        saved, version = self._config.resumed(STATE)
        run = FlowRun(
            self._config.flow(),
            self._items,
            self._samples,
            trainer="verl",
            rest=Drop("filtered", NOTHING_TO_TRAIN),
            saved=saved,
            version=version,
            per_step=self._config.per_step,
        )
        self._thread = FlowThread("penstock-verl-flow")
        self._thread.start(run)
        self._delivery = threading.Thread(target=self._deliver, name="penstock-verl-delivery", daemon=True)
        self._delivery.start()
        self._queue.report(self._cleared, self.close)

    def __repr__(self) -> str:
        state = "ended" if self.report is not None else "failed" if self._failure is not None else "runs"
        return f"<PenstockLoopManager: {state}, {self._requests!r}>"

    @classmethod
    def create(
        cls,
        config: Any,
        llm_client: Any = None,  # noqa: ARG003 (of the interface)
        teacher_client: Any = None,  # noqa: ARG003 (as above)
        reward_loop_worker_handles: Any = None,  # noqa: ARG003 (as above)
    ) -> Self:
        """Return a manager. Called by verl when its trainer is initialized and has sent the first weights.

        Args:
            config: of verl's trainer.
            llm_client: not used: the flow samples.
            teacher_client: not used.
            reward_loop_worker_handles: not used: the flow rewards.

        Raises:
            PenstockError: see `PenstockLoopManager`.
        """
        return cls(config)

    def generate_sequences(self, prompts: Any) -> None:
        """Note that verl wants a group for each of `prompts`, counted and not read; return at once.

        Called by verl at the beginning of a step, and for each group that its replay buffer has dropped.

        Args:
            prompts: a TensorDict with `uid` [B] and `global_steps`.

        Raises:
            InvalidPipeline: verl validates.
            PenstockError: the error that ended the flow.
        """
        if prompts.get("validate"):
            raise InvalidPipeline(
                "verl: expected no validation by the agent loop manager, got validate=True: set "
                "trainer.val_before_train=False and trainer.test_freq=-1, and evaluate with penstock.Evaluation"
            )
        step = int(prompts["global_steps"])
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._requests.ask([str(uid) for uid in prompts["uid"]], step)
            self._lock.notify_all()
        self._thread.commit([], step - 1)  # verl trains with the weights before this step

    def statistics(self) -> PipelineStatistics:
        """Return the waits of every stage of the flow now; those of its end once the training has ended."""
        return self._thread.statistics()

    def save(self, folder: str | Path, step: int) -> None:
        """Commit the groups of step `step`, and write the ledger into a checkpoint of verl. Called by the callback.

        Groups that lie in TransferQueue count as trained: verl's checkpoint has them, and its next run trains them.
        """
        with self._lock:
            trained = self._requests.train()
            lying = self._requests.lying() if self._config.keeps_groups else []
        self._thread.commit(trained, step)
        state = self._thread.state_dict()
        committed = CommittedPrompts.of_state(state["committed"])
        for trajectory in lying:
            committed.add(trajectory.group, 1 << trajectory.repetition_id)
        state["committed"] = committed.state_dict()
        write_json(Path(folder, STATE), state)

    def close(self) -> None:
        """Stop the flow and everything that it started; set `report`. Called when verl closes TransferQueue."""
        with self._lock:
            if self._ending:
                return
            self._ending = True
            self._lock.notify_all()
        with ExitStack() as stack:
            stack.callback(self._queue.stop_reporting)
            self._samples.close()
            self._delivery.join()
            self.report = self._thread.stop()

    # -- on the event loop ---------------------------------------------------------------------------------------------

    def _items(self, group: TrajectoryGroup, _: Decode | None) -> Iterator[tuple[Trajectories, list[Row]]]:
        if group.rollouts > self._config.group_size:
            raise InvalidPipeline(
                f"verl: expected groups of at most actor_rollout_ref.rollout.n={self._config.group_size}, got "
                f"{group.rollouts} in {group.env}/{group.instance_id}: SourceEnv(group_size={self._config.group_size})"
            )
        if rows := rows_of(group, self._config.needs):
            yield tuple(row.trajectory for row in rows), rows

    # -- in the thread that delivers -----------------------------------------------------------------------------------

    def _deliver(self) -> None:
        """Answer prompts until the end; a failure fails all that wait, and is raised in verl's thread when it asks."""
        try:
            while (asked := self._asked()) is not None:
                if (rows := self._next()) is not None:
                    self._answer(*asked, rows)
        except BaseException as error:  # noqa: BLE001 (raised in verl's thread)
            log.warning("flow_failed", trainer="verl", error=repr(error))
            with self._lock:
                self._failure = error
                failed = self._requests.fail()
            self._queue.fail(failed)

    def _asked(self) -> tuple[str, int] | None:
        """Wait for a prompt, and return it; None at the end."""
        with self._lock:
            self._lock.wait_for(lambda: self._ending or self._requests.next() is not None)
            return None if self._ending else self._requests.next()

    def _next(self) -> list[Row] | None:
        """Return the next group of the flow; None at the end."""
        rows: list[Row] | None = self._thread.next(
            self._samples, stale_after_s=STALE_AFTER_S, wanted=lambda: not self._ending
        )
        return rows

    def _answer(self, uid: str, step: int, rows: list[Row]) -> None:
        oldest = min(row.tag["min_global_steps"] for row in rows)
        counted = min(step, oldest + 1)  # verl counts ages from the step that asked; sampled ahead, they are older
        values = [self._config.metric_of(row) for row in rows]
        self._queue.put(uid, step, rows, name_rows=self._config.needs.advantages)
        with self._lock:
            self._requests.answer(tuple(row.trajectory for row in rows), counted, values)
        self._queue.finish(uid, counted)

    # -- in verl's thread ----------------------------------------------------------------------------------------------

    def _cleared(self, keys: list[str]) -> None:
        """Count the groups that verl has trained or dropped, by the keys that it has removed."""
        with self._lock:
            cleared = self._requests.clear(keys)
            step = self._requests.step
        for trajectories, dropped in cleared.dropped:
            self._thread.end(trajectories, dropped)
        if cleared.trained:
            self._thread.commit(cleared.trained, step)
