"""The evaluation in one sampling worker: its share of every set, completed by its engine and scored in its process.

The rollouts and the rewards of a set are an inner pipeline with a ledger and metrics of its own, so that an evaluation
admits no trajectory in the run, takes no credit, and does not count for the lag; and a failure in it ends only this.
The result is a part (`EvaluationPart`); the trainer's process merges it with those of the other workers.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
from anyio.lowlevel import checkpoint
from msgspec.structs import replace

from ..._pipeline.accounting.evaluations import EvaluationPart
from ..._pipeline.accounting.ledger import Ledger
from ..._pipeline.accounting.reasons import first_reasons
from ..._pipeline.accounting.telemetry import Metrics, get_logger
from ..._pipeline.channels.channel import ReceiveChannel
from ..._pipeline.errors import InvalidConfig, PenstockError
from ..._pipeline.graph.context import Context, Worker, current
from ..._pipeline.graph.schedule import Schedule
from ..._pipeline.graph.stage import Source
from ..._pipeline.runtime.flow import source
from ..._pipeline.runtime.run import Run
from ..._pipeline.util.user_code import call_user
from ..._schemas import TrajectoryGroup
from ..contracts.policies import Engine, Tokenizer
from ..rewards.reward_bridge import turns_of
from ..rewards.reward_shaping import right_from
from .evaluated_samples import Candidates
from .evaluation import Evaluation
from .scores import ks, maj_at_n, mean_at_n, pass_at_k

log = get_logger("penstock.evaluation")

PROGRESS_S = 1.0
"""Least seconds between two reports of the progress of an evaluation."""

Means = dict[str, tuple[float, float]]
"""Σ value, and the number of values, by the name of the metric."""


class Evaluator:
    """The evaluations of one worker, one after the other.

    Args:
        evaluation: the value to carry out.
        make_source: returns the source of the completions of a set, given its `make_env` and number of prompts.
        tokenizer: decodes completions, for the majority and for samples; None for neither.
        context: of the running source.
        schedule: of the sources of a set.
    """

    def __init__(
        self,
        evaluation: Evaluation,
        make_source: Callable[[Callable[[], Any], int], Source[TrajectoryGroup]],
        tokenizer: Tokenizer | None,
        *,
        context: Context,
        schedule: Schedule,
        weights_arrived: Callable[[], Awaitable[None]] = checkpoint,
    ) -> None:
        self._evaluation = evaluation
        self._weights_arrived = weights_arrived
        """Waits until the published weights are on this host."""
        self._make_source = make_source
        self._tokenizer = tokenizer
        self._context = context
        self._schedule = schedule
        self._prompts: dict[str, int] = {}
        """The number of prompts of each set."""
        self._next = 0
        """The next step that is evaluated."""
        self._evaluating = anyio.Lock()
        self._reported = 0.0
        """Time of the last report of progress."""

    async def begin(self) -> None:
        """Open every set once, and evaluate the weights that the run begins with if they are due.

        A restarted worker evaluates the last step that was due, unless that evaluation is complete: it may have died
        in it.

        Raises:
            InvalidConfig: a set has no length.
            Exception: raised by a set's `make_env`.
        """
        for name, make_env in self._evaluation.sets.items():
            self._prompts[name] = await anyio.to_thread.run_sync(call_user, length_of, name, make_env)
        worker, step = self._context.worker, self._context.ledger.step
        first = self._evaluation.newest_due(step) if worker.restart else step
        self._next = self._evaluation.next_due(max(first, worker.evaluates_from))
        await self.catch_up()

    async def catch_up(self) -> None:
        """Evaluate the newest step that is due, if there is one; wait for an evaluation that goes on."""
        async with self._evaluating:
            due = self._evaluation.newest_due(self._context.ledger.step)
            if due >= self._next:
                self._next = self._evaluation.next_due(due + 1)
                await self._evaluate(due)

    async def follow(self) -> None:
        """Evaluate every step that is due, until cancelled; of several that are due at once the newest."""
        while True:
            await self._context.ledger.reached(self._next)
            await self.catch_up()

    async def _evaluate(self, step: int) -> None:
        """Evaluate this worker's share of every set, and pass its part on."""
        await self._weights_arrived()
        means: Means = {}
        totals: dict[str, float] = {}
        failed: list[str] = []
        worker, deadline = self._context.worker, anyio.current_time() + self._evaluation.timeout_s
        shares = {name: len(range(worker.index, count, worker.count)) for name, count in self._prompts.items()}
        whole = EvaluationPart(step, worker.index, worker.count, prompts=sum(shares.values()))
        self._reported, left, candidates = 0.0, whole.prompts, Candidates(step, self._tokenizer)
        for name, expected in shares.items():
            on_prompt = partial(self._report, whole, left)
            on_prompt(0)
            scored = _Scored(self._evaluation, name, self._tokenizer, means, on_prompt, candidates)
            ledger = Ledger()
            if failure := await self._failure(name, scored, ledger, deadline):
                failed.append(f"eval/{name}/")
            left -= expected
            totals[f"eval/{name}/missing"] = missing = expected - scored.prompts
            if missing:
                _warn(ledger, set=name, step=step, missing=missing, prompts=expected, failure=failure)
        samples = await candidates.samples()
        self._context.metrics.evaluated(
            replace(whole, means=means, totals=totals, failed=tuple(failed), samples=samples)
        )

    def _report(self, whole: EvaluationPart, left: int, done: int) -> None:
        """Report the progress, now and then: of the prompts that were `left` when this set was begun, `done` are."""
        now = time.monotonic()
        if left > done and now >= self._reported + PROGRESS_S:
            self._reported = now
            self._context.metrics.evaluated(replace(whole, left=left - done))

    async def _failure(self, name: str, scored: _Scored, ledger: Ledger, deadline: float) -> str:
        """Evaluate the share of a set; return why it could not be finished, or an empty text.

        Neither a reward nor an environment of an evaluation may end a run that trains.
        """
        with anyio.CancelScope(deadline=deadline):
            try:
                await self._run(name, scored, ledger)
            except PenstockError as error:
                return str(error)
            return ""
        return f"the evaluation took longer than timeout_s={self._evaluation.timeout_s:g}"

    async def _run(self, name: str, scored: _Scored, ledger: Ledger) -> None:
        """Complete and score the share of a set.

        Raises:
            StageFailed: the engine, the environment or a reward raised.
            RolloutsFailed: too many rollouts failed in a row.
            NothingTrained: too many completions in a row have no reward, or no prompt may be sampled.
        """
        rollouts = source(self._make_source(self._evaluation.sets[name], self._prompts[name]))
        if self._evaluation.rewards is not None:
            rollouts = rollouts.then(self._evaluation.rewards)
        run = Run(
            rollouts.sink(scored).nodes, Context(ledger, Metrics(), self._context.worker, schedule=self._schedule)
        )
        with ledger.on_end(run.check_progress):
            await run.run()


@dataclass(eq=False, slots=True)
class _Scored:
    """The sink of an evaluation: adds each prompt with a reward for all its completions to the means."""

    evaluation: Evaluation
    name: str
    tokenizer: Tokenizer | None
    means: Means
    on_prompt: Callable[[int], None]
    """Called with the number of prompts that were added."""
    candidates: Candidates
    prompts: int = field(default=0)
    """Prompts that were added."""

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup]) -> None:
        ledger = current().ledger
        async for group in inbox:
            if group.rollouts == self.evaluation.samples:
                self._add(group, await self._answers(group))
                self.candidates.add(self.name, group)
                self.prompts += 1
                self.on_prompt(self.prompts)
            ledger.end(group, "trained")

    async def _answers(self, group: TrajectoryGroup) -> list[Any]:
        """Return the answers of the completions; empty without a majority."""
        if self.tokenizer is None or group.rollouts == 1:
            return []
        turns = await anyio.to_thread.run_sync(call_user, turns_of, group, self.tokenizer)
        return [self.evaluation.answer("\n".join(texts)) for texts in turns]

    def _add(self, group: TrajectoryGroup, answers: Sequence[Any]) -> None:
        config = None if self.evaluation.rewards is None else self.evaluation.rewards.config
        starts = group.rollout_starts()
        rewards = group.rewards[starts]
        right = (rewards >= right_from(config)).tolist()
        n = len(right)
        self._observe(f"mean@{n}", mean_at_n(right))
        for k in ks(n):
            self._observe(f"pass@{k}", pass_at_k(right, k))
        if answers:
            self._observe(f"maj@{n}", maj_at_n(right, answers))
        self._observe("reward", *rewards.tolist())
        self._observe("response_length", *np.add.reduceat(group.completion_lengths(), starts).tolist())

    def _observe(self, name: str, *values: float) -> None:
        value, count = self.means.get(f"eval/{self.name}/{name}", (0.0, 0.0))
        self.means[f"eval/{self.name}/{name}"] = value + float(np.sum(values)), count + len(values)


@dataclass(frozen=True, slots=True)
class OpenedPolicy:
    """A policy with an engine that is open already, and stays open."""

    engine: Engine

    @asynccontextmanager
    async def open(self, worker: Worker) -> AsyncGenerator[Engine]:  # noqa: ARG002 (the protocol's)
        """Yield the engine."""
        yield self.engine


def _warn(ledger: Ledger, **fields: object) -> None:
    reasons = {reason: count for ended in ledger.balance().reasons.values() for reason, count in ended.items()}
    reasons.pop("", None)  # of those that were scored
    log.warning("evaluation_incomplete", **fields, reasons=first_reasons(reasons))


def length_of(name: str, make_env: Callable[[], Any]) -> int:
    """Return the number of prompts of a set.

    Raises:
        InvalidConfig: it has no length.
    """
    env = make_env()
    try:
        return len(env)
    except TypeError as error:
        raise InvalidConfig(
            f"Evaluation.sets[{name!r}]: expected an environment with a length, which says how many prompts are "
            f"evaluated, got {type(env).__name__}: {error}: give it a method __len__"
        ) from error
