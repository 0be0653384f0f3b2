"""`rollout_func`: a flow as the generation of TRL's synchronous `GRPOTrainer`.

The trainer asks for the rollouts of a batch, and the flow's next groups are the answer. New weights are published when
an optimizer step has used up a batch, before its trajectories are committed: a synchronous source (`max_lag=0`) then
samples the next batch with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import TracebackType
from typing import Any, Self

from ...._pipeline.errors import InvalidPipeline
from ...._pipeline.graph.report import Report
from ...._schemas import TrajectoryGroup, TrajectoryId
from ...sink.sink_trainer import WeightSink
from ..flow_thread.deliveries import Deliveries
from ..flow_thread.flow_run import Decode, Drop, FlowRun, Groups
from ..flow_thread.flow_thread import FlowThread
from ..flow_thread.sample_queue import SampleQueue, Trajectories
from ..interface import installed_version
from .callback import callback_of
from .samples import check
from .transfer import TRLTransfer

STALE_AFTER_S = 300.0
"""Seconds that the trainer waits for the next group: TRL's default for its asynchronous trainer."""


def rollout_func(flow: Groups | Callable[[], Groups], publisher: AbstractAsyncContextManager[WeightSink]) -> Rollouts:
    """Return the generation of `GRPOTrainer`, to be opened around the training.

        with rollout_func(flow, publisher) as rollouts:
            trainer = GRPOTrainer(…, reward_funcs=flow_reward, rollout_func=rollouts, callbacks=[rollouts.callback()])
            trainer.train()

    Args:
        flow: sends groups of the trainer's `num_generations`, or is a function that returns such a flow; see
            `TRLWorker`.
        publisher: of the trainer's weights; see `TRLTransfer`.
    """
    return Rollouts(flow, publisher)


def flow_reward(*, reward: list[float], **_: Any) -> list[float]:
    """Return the rewards that the flow gave: the reward function of a `GRPOTrainer` with `rollout_func`."""
    return reward


class Rollouts:
    """Answers `GRPOTrainer` with groups of a flow; see `rollout_func`."""

    def __init__(self, flow: Groups | Callable[[], Groups], publisher: AbstractAsyncContextManager[WeightSink]) -> None:
        self._flow = flow
        self._transfer = TRLTransfer(publisher)
        self._queue = SampleQueue()
        self._thread = FlowThread("penstock-trl-flow")
        self._trainer: Any = None
        self._began = False
        self._saved: Mapping[str, Any] | None = None
        self.deliveries: Deliveries[TrajectoryId, None] = Deliveries()
        """Each batch is trained in the micro-batches that TRL makes of it: every sequence `num_iterations` times."""
        self.report: Report | None = None
        """The report of the flow, after the body; None if TRL asked for no batch, as after its last step."""

    def __enter__(self) -> Self:
        """Open the publisher."""
        self._transfer.init_weight_transfer()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop the flow and everything that it started, and close the publisher; set `report`."""
        try:
            self.report = self._thread.stop()
        finally:
            self._transfer.destroy()

    def callback(self) -> Any:
        """Return the `TrainerCallback` that commits trained groups, for `GRPOTrainer(callbacks=[…])`.

        Raises:
            MissingExtra: transformers is not installed.
        """
        return callback_of(self)

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Return rollouts, one for each of `prompts`: these are counted and not read. Called by TRL.

        Raises:
            InvalidPipeline: the trainer lacks the callback, evaluates, or has several processes.
            PenstockError: the error that ended the flow.
            FlowEnded: the flow has sent its last group.
            FlowStalled: it has sent no group for 300 seconds.
        """
        self._check(trainer)
        if not self._thread.started:
            self._start(trainer, len(prompts))
        count = len(prompts) // trainer.num_generations
        groups = [self._thread.next(self._queue, stale_after_s=STALE_AFTER_S) for _ in range(count)]
        ids = [each for group in groups for each in group.ids]
        for each in ids:
            self.deliveries.give(each, (each,), None)
        self.deliveries.batch(ids, trainer.args.steps_per_generation * trainer.num_iterations)
        return columns_of(groups)

    def _check(self, trainer: Any) -> None:
        if not self._began:
            raise InvalidPipeline(
                "TRL: expected GRPOTrainer(callbacks=[rollouts.callback()]), got a trainer without: what it trains "
                "could not be committed"
            )
        if trainer.accelerator.num_processes > 1 or not trainer.model.training:
            found = "an evaluation" if not trainer.model.training else f"{trainer.accelerator.num_processes} processes"
            raise InvalidPipeline(f"TRL: expected rollout_func to generate for one process that trains, got {found}")

    def _start(self, trainer: Any, asked: int) -> None:
        installed_version("trl")
        self._trainer = trainer
        self._publish()
        size = trainer.num_generations
        items = partial(groups_of, size, trainer.temperature)
        rest = Drop("rejected", f"TRL: expected groups of num_generations={size} rollouts that train")
        run = FlowRun(
            self._flow,
            items,
            self._queue,
            trainer="TRL",
            rest=rest,
            saved=self._saved,
            version=self._transfer.version,
            per_step=asked,
        )
        self._thread.start(run)

    def _publish(self) -> None:
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        self._transfer.send_weights((name, parameter.detach()) for name, parameter in model.named_parameters())

    # -- called by the callback --------------------------------------------------------------------------------------

    def train_begins(self, args: Any, loader: Any, saved: Mapping[str, Any] | None) -> None:  # noqa: ARG002 (the protocol's)
        """Note the state of the checkpoint that the trainer resumes; see `TrainedByTRL`."""
        self._began, self._saved = True, saved

    def step_ends(self, step: int, args: Any) -> None:  # noqa: ARG002 (the protocol's)
        """Publish the weights and commit, if a batch is used up; see `TrainedByTRL`."""
        if self._thread.running and (stepped := self.deliveries.stepped()):
            self._publish()
            self._thread.commit(stepped, self._transfer.version)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: the trajectories that were trained, and the state of the flow's stages."""
        return self._thread.state_dict()


def groups_of(
    size: int, temperature: float, group: TrajectoryGroup, decode: Decode | None
) -> Iterator[tuple[Trajectories, TrajectoryGroup]]:
    """Yield a copy of `group`, if it has `size` rollouts that train.

    Raises:
        InvalidPipeline: it has no log-probabilities.
        InvalidRecord: it was sampled at another temperature than `temperature`.
    """
    del decode
    check(group, temperature)
    if len(group) == size and all(row.loss_mask.any() for row in group):
        yield tuple(group.ids), group.owned()


def columns_of(groups: Iterable[TrajectoryGroup]) -> dict[str, list[Any]]:
    """Return the fields of TRL's rollouts, a row for each sequence; a completion begins at the first sampled token.

    `env_mask` is 1 on tokens that the policy sampled. `reward` is passed on to reward functions; see `flow_reward`.
    """
    rows = [row for group in groups for row in group]
    starts = [row.prompt_length for row in rows]
    cut = list(zip(rows, starts, strict=True))
    return {
        "prompt_ids": [row.tokens[:start].tolist() for row, start in cut],
        "completion_ids": [row.tokens[start:].tolist() for row, start in cut],
        "logprobs": [
            () if row.behavior_logprobs is None else row.behavior_logprobs[start:].tolist() for row, start in cut
        ],
        "env_mask": [row.loss_mask[start:].astype(int).tolist() for row, start in cut],
        "reward": [row.reward for row in rows],
    }
