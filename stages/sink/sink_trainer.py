"""SinkTrainer: the end of a pipeline. Feeds batches to a trainer, publishes its weights, commits trajectories.

In this order for each batch: the optimizer step, off the event loop; publishing the new weights; the commit to the
ledger; the metrics; samples and a checkpoint if they are due. A trainer is any object with `step(batch) -> metrics`.
Does not import torch.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import anyio
import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from ..._pipeline.accounting.committed_prompts import CommittedPrompts
from ..._pipeline.accounting.end_values import values_of
from ..._pipeline.accounting.ledger import Ledger
from ..._pipeline.accounting.sample import Sample
from ..._pipeline.accounting.telemetry import get_logger
from ..._pipeline.channels.channel import ReceiveChannel
from ..._pipeline.durability.recording import begin_recording, record_batch
from ..._pipeline.durability.resumption import ResumePoint, StageSnapshot, Stateful
from ..._pipeline.durability.run_changes import StageFacts, StatesFacts
from ..._pipeline.errors import InvalidConfig
from ..._pipeline.graph.context import current
from ..._pipeline.graph.flush import FlushableInbox
from ..._pipeline.graph.stage_info import NeedsColumns, StageInfo, tokenizer_of
from ..._pipeline.util.checkpoint import checkpoint_of, latest_checkpoint, remove_old_checkpoints
from ..._pipeline.util.exception_groups import unwrap_first, unwrap_single
from ..._pipeline.util.user_code import await_user, call_user, open_user
from ..._pipeline.weights.shielded import limit_once_cancelled
from ..._schemas import GroupId, StopReason, TrainBatch
from ..._schemas.choices import check_choice
from ..._schemas.numbers import normalize_counts, normalize_numbers
from ..sampling.evaluation import Evaluation
from ..sampling.samples import Samples
from ..training.learning_signal import LearningSignal
from .evaluated_steps import EvaluatedSteps

T = TypeVar("T")

log = get_logger("penstock.sink_trainer")

CANCEL_TIMEOUT_S = 4.0
"""Bound on waiting for the running step when the run is cancelled: an interrupted run ends within five seconds."""


@runtime_checkable
class Trainer(Protocol):
    """Any object with an optimizer step."""

    def step(self, batch: TrainBatch, /) -> Mapping[str, float]:
        """Train on `batch` once and return metrics. May block; always called from one thread at a time."""
        ...


@runtime_checkable
class WeightedTrainer(Trainer, Protocol):
    """A trainer with weights that can be published."""

    def weights(self) -> Mapping[str, Any]:
        """Return the tensors by name, as of the last step. May block. No step runs while they are published."""
        ...


@runtime_checkable
class Checkpointed(Trainer, Protocol):
    """A trainer with checkpoints."""

    @property
    def steps(self) -> int:
        """Return the optimizer steps done, those before a resumption included."""
        ...

    @property
    def committed(self) -> Mapping[GroupId, int]:
        """Return the trajectories that were trained before it resumed, as `Ledger.committed`."""
        ...

    def save(self, folder: Path, committed: CommittedPrompts, /) -> Path:
        """Write a checkpoint with `committed.state_dict()` into `folder`, and return its path. May block."""
        ...


@runtime_checkable
class Resumable(Checkpointed, Protocol):
    """A trainer that a run in a folder resumes by itself."""

    def keep(self, state: Mapping[str, Stateful], /) -> None:
        """Include the state of these objects in checkpoints, by name."""
        ...

    def resume(self, checkpoint: Path, /) -> None:
        """Resume from a checkpoint that `save` wrote, and restore the objects given to `keep`. May block."""
        ...


@runtime_checkable
class ResumesVerified(Resumable, Protocol):
    """A trainer whose `resume` verifies the checkpoint first, as a run in a folder has done already."""

    def resume_verified(self, checkpoint: Path, /) -> None:
        """Resume from a checkpoint with verified files. May block."""
        ...


@runtime_checkable
class KeepsState(Protocol):
    """A trainer whose checkpoints contain the state of other objects."""

    @property
    def state(self) -> Mapping[str, Stateful]:
        """Return those objects, by name."""
        ...


@runtime_checkable
class KeepsLogprobs(Protocol):
    """A trainer that keeps the log-probabilities that it computes, for the samples of a step."""

    keeps_logprobs: bool
    """Set before a step."""

    @property
    def logprobs(self) -> NDArray[np.float32] | None:
        """Return [N] that of the last batch's tokens that train, before the first update on it; None if not kept."""
        ...


@runtime_checkable
class KeepsTokenizer(Protocol):
    """A trainer whose checkpoints contain the tokenizer."""

    def keep_tokenizer(self, tokenizer: object, /) -> None:
        """Include the tokenizer of the run, its `TokenizerIdentity` or None, in checkpoints. May block."""
        ...


@runtime_checkable
class FailsBetweenSteps(Protocol):
    """A trainer or publisher that can fail between two steps: of other processes, or while it writes the weights."""

    async def watch(self) -> None:
        """Wait until no further step is possible, and raise the reason."""
        ...


class WeightSink(Protocol):
    """The receiver of new weights, for example a WeightPublisher."""

    @property
    def version(self) -> int:
        """Return the newest version that was published; −1 before the first."""
        ...

    async def publish(self, tensors: Mapping[str, Any], version: int) -> None:
        """Make `tensors` the newest weights."""
        ...

    def paused(self) -> AbstractAsyncContextManager[None]:
        """Pause all sampling within the body."""
        ...


@dataclass(frozen=True, slots=True)
class SinkTrainer:
    """Train on every batch until the stream ends.

    If the source evaluates, the run ends when the evaluation of `max_steps` is done, if that is due. With checkpoints,
    one is written at each step that is evaluated, and the best is kept and linked as `best`.

    Args:
        trainer: any object with `step(batch) -> metrics`; see `TorchTrainer`.
        publisher: receives the weights after every step, and the initial ones; None publishes no weights.
        external_generation: an external system samples: `publisher` and `sampling` have no effect.
        sampling: `overlap` continues it while a step trains; `pause` pauses it from before the step until the new
            weights are published, for samplers that share the trainer's processor or memory.
        max_steps: the run ends when this optimizer step is done, steps before a resumption included.
        checkpoints: folder for checkpoints; one is also written when the run ends. None writes none, except in a run
            that is kept in a folder (`Pipeline.run(folder=…)`).
        checkpoint_every: optimizer steps between checkpoints; None writes only the last.
        keep_checkpoints: number of checkpoints to keep; older ones are removed when a new one is on the disk. None
            keeps all.
        cancel_timeout_s: bound on waiting for the running step after cancellation.
        samples: choice of trajectories of batches and evaluations to show and write as text. None for no samples.
        record: folder to keep each batch in before its step, for a `Recording` to train again. None keeps none.

    Raises:
        TypeError: the trainer lacks a method that `publisher` or `checkpoints` need.
        InvalidConfig: a count below 1.
    """

    trainer: Trainer
    publisher: WeightSink | None = None
    external_generation: bool = False
    sampling: Literal["overlap", "pause"] = "overlap"
    max_steps: int | None = None
    checkpoints: str | Path | None = None
    checkpoint_every: int | None = None
    keep_checkpoints: int | None = None
    cancel_timeout_s: float = CANCEL_TIMEOUT_S
    samples: Samples | None = None
    record: str | Path | None = None
    _signal: LearningSignal = field(default_factory=LearningSignal, init=False, repr=False, compare=False)
    """Warns of steps in a row without a gradient from rewards."""
    _gathered: tuple[StageSnapshot, ...] = field(default=(), repr=False)
    """Snapshots of the stages with statistics in checkpoints."""

    def __post_init__(self) -> None:
        _require(self.trainer, Trainer, "a trainer", "step(batch) -> metrics")
        if self._weight_sink is not None:
            _require(self.trainer, WeightedTrainer, "publishing", "weights() -> tensors by name")
        if self.checkpoints is not None:
            _require(self.trainer, Checkpointed, "checkpoints", "steps, committed and save(folder, committed)")
        check_choice("sampling", self.sampling, ("overlap", "pause"))
        normalize_counts(self, "max_steps", "checkpoint_every", "keep_checkpoints")
        normalize_numbers(self, "cancel_timeout_s", zero=True)

    def stage_info(self) -> StageInfo:
        """State the last step, the trainer's tokenizer and columns, and the other objects in its checkpoints."""
        saved = self.trainer.state if isinstance(self.trainer, KeepsState) else {}
        return StageInfo(
            max_steps=self.max_steps,
            tokenizers=tokenizer_of(self.trainer) or (None if isinstance(self.trainer, KeepsTokenizer) else ()),
            needs_tokenizer=self.samples is not None,
            saved=saved,
            saves_at_end=self.checkpoints is not None,
            commits=True,
            needs_columns=self.trainer.needs_columns if isinstance(self.trainer, NeedsColumns) else (),
        )

    def facts(self) -> StageFacts:
        """Return the facts that the trainer states; see `StatesFacts`."""
        return self.trainer.facts() if isinstance(self.trainer, StatesFacts) else StageFacts()

    def with_checkpoints(self, folder: Path, gathering: Mapping[str, Stateful]) -> tuple[SinkTrainer, ResumePoint]:
        """Return the same sink with checkpoints in `folder`, resumed from the last one, and its ResumePoint.

        Raises:
            InvalidConfig: the trainer is not `Resumable`, or the sink has a folder for checkpoints.
        """
        if self.checkpoints is not None:
            raise InvalidConfig(f"checkpoints: expected none in a run that is kept in a folder, got {self.checkpoints}")
        trainer = self.trainer
        if not isinstance(trainer, Resumable):
            raise InvalidConfig(
                f"trainer: expected steps, committed, save(folder, committed), keep(state) and resume(checkpoint) for "
                f"a run that is kept in a folder, got {type(trainer).__name__}"
            )
        gathered = {name: StageSnapshot(stage) for name, stage in gathering.items()}
        trainer.keep(gathered)
        if (latest := latest_checkpoint(folder)) is not None:
            resume = trainer.resume_verified if isinstance(trainer, ResumesVerified) else trainer.resume
            resume(latest)
        resumed = replace(self, checkpoints=folder, _gathered=tuple(gathered.values()))
        return resumed, ResumePoint(trainer.steps, trainer.committed)

    @property
    def _evaluated(self) -> EvaluatedSteps:
        """The steps that the source evaluates; to be called within the run."""
        evaluation = current().evaluation
        assert evaluation is None or isinstance(evaluation, Evaluation)  # noqa: S101 (see `StageInfo.evaluation`)
        return EvaluatedSteps(evaluation, None if self.checkpoints is None else Path(self.checkpoints))

    @property
    def _weight_sink(self) -> WeightSink | None:
        return None if self.external_generation else self.publisher

    async def run(self, inbox: ReceiveChannel[TrainBatch]) -> None:
        """Run the sink; see `Sink`. A batch is committed when its step is done, or not at all.

        When cancelled, it finishes the running step, publishes and commits it, unless that takes longer than
        `cancel_timeout_s`.

        Raises:
            InvalidConfig: `checkpoint_every` or `keep_checkpoints` without a folder for checkpoints.
            Exception: raised by the trainer's `step`, unchanged; that batch is not committed. Or raised by its `watch`,
                or the publisher's.
        """
        self._check_folder()
        async with _watching(self.trainer), _watching(self._weight_sink):
            await self._run(inbox, current().ledger)

    async def _run(self, inbox: ReceiveChannel[TrainBatch], ledger: Ledger) -> None:
        thread = anyio.CapacityLimiter(1)
        self._restore(ledger)
        if isinstance(self.trainer, KeepsTokenizer):
            await _in_thread(partial(self.trainer.keep_tokenizer, current().tokenizer), thread)
        if self.record is not None:
            await _in_thread(partial(begin_recording, Path(self.record), ledger.step), thread)
        resumed_at = ledger.step
        await _in_thread(partial(self._evaluated.resume_at, ledger.step), thread)
        await self._publish(ledger.step, thread)
        if ledger.step != self.max_steps:
            await self._evaluated.finished(ledger.step)
        saved = await self._train_all(inbox, ledger, thread)
        if ledger.step == self.max_steps:
            await self._emit_last_evaluation(ledger.step, thread)
        is_saved = self._saves_at(ledger.step) or ledger.step == resumed_at > 0
        if not is_saved or _ended(ledger) != saved:
            await self._save(ledger, thread)
        # Again, for the evaluation of the last step is known now.
        await _in_thread(partial(self._remove_old_checkpoints, ledger.step), thread)

    def _check_folder(self) -> None:
        for name in ("checkpoint_every", "keep_checkpoints"):
            if getattr(self, name) is not None and self.checkpoints is None:
                raise InvalidConfig(f"{name}: expected with a folder for checkpoints, got none")

    async def _train_all(self, inbox: ReceiveChannel[TrainBatch], ledger: Ledger, thread: anyio.CapacityLimiter) -> int:
        """Train until the stream ends; return the number of ended trajectories at the last checkpoint.

        When a flush is due, senders wait for a checkpoint, also if records were only dropped.
        """
        ended, saved = time.monotonic(), _ended(ledger)

        def unsaved() -> bool:
            return self.checkpoints is not None and _ended(ledger) != saved

        batches = FlushableInbox(inbox, unsaved)
        while ledger.step != self.max_steps:
            try:
                batch = await batches.receive()
            except anyio.EndOfStream:
                break
            if batch is None:
                saved = _ended(ledger)
                await self._save(ledger, thread)
                continue
            step, waited_s = ledger.step + 1, time.monotonic() - ended
            await _uninterrupted(partial(self._train, batch, step, waited_s, thread), self.cancel_timeout_s, step)
            ended = time.monotonic()
            del batch  # its memory must not wait for the next one
            if self._saves_at(step):
                saved = _ended(ledger)
        return saved

    async def _emit_last_evaluation(self, step: int, thread: anyio.CapacityLimiter) -> None:
        """Emit the evaluation of the last step, if it is due, in a line of its own."""
        if await _in_thread(partial(self._evaluated.is_recorded, step), thread):
            return  # the run had ended, and was started again
        if await self._evaluated.finished(step):
            await _uninterrupted(partial(self._emit_evaluation, step, thread), self.cancel_timeout_s, step)

    async def _emit_evaluation(self, step: int, thread: anyio.CapacityLimiter) -> None:
        metrics = current().metrics
        await _in_thread(partial(self._evaluated.record, metrics.evaluations.found), thread)
        metrics.emit(step)  # afterwards: no line is written twice
        await self._pass_on_samples(None, metrics.evaluations.take_samples(), step, thread)

    def _restore(self, ledger: Ledger) -> None:
        """Restore the ledger if the trainer resumed from a checkpoint."""
        if isinstance(self.trainer, Checkpointed) and self.trainer.steps > ledger.step:
            ledger.restore(self.trainer.committed, self.trainer.steps)

    async def _train(self, batch: TrainBatch, step: int, waited_s: float, thread: anyio.CapacityLimiter) -> None:
        """Do step `step`: train, publish, commit, emit metrics."""
        context, began = current(), time.monotonic()
        async with self._sampling():
            trained = await _in_thread(partial(self._step, batch, step), thread)
            stepped = time.monotonic()
            await self._publish(step, thread)
        published = time.monotonic()
        context.ledger.commit(batch, step)
        context.metrics.ended(values_of("trained", batch, step - 1))
        seconds = waited_s + published - began
        timing = {
            "perf/throughput": len(batch.tokens) / seconds,
            "timing_s/wait_batch": waited_s,
            "timing_s/train": stepped - began,
            "timing_s/sync_weights": published - stepped,
        }
        emitted = context.metrics.emit(step, trained | timing)  # at once: later samples count for the next step
        found = context.metrics.evaluations.take_samples()
        if context.evaluation is not None:
            await _in_thread(partial(self._evaluated.record, emitted), thread)
        await self._pass_on_samples(batch, found, step, thread)
        if self._saves_at(step):  # afterwards: a checkpoint without the metrics of its step would leave a gap
            await self._save(context.ledger, thread)

    def _step(self, batch: TrainBatch, step: int) -> dict[str, float]:
        current().ledger.constant_steps = self._signal.observe(batch, step)
        if self.record is not None:
            record_batch(Path(self.record), step, batch)  # before the step: one that fails can be trained again
        if isinstance(self.trainer, KeepsLogprobs):
            self.trainer.keeps_logprobs = self.samples is not None and self.samples.due(step)
        metrics = self.trainer.step(batch)
        if not isinstance(metrics, Mapping):
            raise TypeError(
                f"expected {type(self.trainer).__name__}.step to return metrics, a mapping from names to numbers, got "
                f"{metrics!r}: end it with `return {{...}}`, or with `return {{}}` if there are none"
            )
        signal = {"batch/steps_without_signal": float(self._signal.steps_without)}
        return batch_metrics(batch, step - 1) | signal | dict(metrics)

    async def _pass_on_samples(
        self, batch: TrainBatch | None, found: Sequence[Sample], step: int, thread: anyio.CapacityLimiter
    ) -> None:
        """Pass on samples of the batch that `step` has trained, if they are due, and of an evaluation."""
        sinks = current().sample_sinks
        if self.samples is None or not sinks:
            return
        trained = None
        if batch is not None and self.samples.due(step):
            logprobs = self.trainer.logprobs if isinstance(self.trainer, KeepsLogprobs) else None
            trained = partial(self.samples.of, batch, step, current().tokenizer, logprobs)
        if trained is None and not found:
            return
        samples = await _in_thread(partial(_samples_of, self.samples, trained, found, step), thread)
        for sink in sinks if samples else ():
            await _in_thread(partial(sink, samples, step), thread)

    def _sampling(self) -> AbstractAsyncContextManager[None]:
        sink = self._weight_sink
        return nullcontext() if sink is None or self.sampling == "overlap" else open_user(sink.paused)

    async def _publish(self, version: int, thread: anyio.CapacityLimiter) -> None:
        sink = self._weight_sink
        if sink is not None and sink.version < version and isinstance(self.trainer, WeightedTrainer):
            await await_user(sink.publish, await _in_thread(self.trainer.weights, thread), version)
        if sink is not None:
            current().ledger.note_published(sink.version)

    def _saves_at(self, step: int) -> bool:
        """Return whether a checkpoint is due after `step`; of an evaluated step, because it may be the best."""
        if self.checkpoints is not None and self._evaluated.due(step):
            return True
        return self.checkpoint_every is not None and step % self.checkpoint_every == 0

    async def _save(self, ledger: Ledger, thread: anyio.CapacityLimiter) -> None:
        if self.checkpoints is not None and isinstance(self.trainer, Checkpointed):
            committed, began = ledger.committed, time.monotonic()
            for each in self._gathered:
                each.take()  # all at the same moment
            folder = Path(self.checkpoints)
            path = await _in_thread(partial(self.trainer.save, folder, committed), thread)
            ledger.announce_checkpoint(committed, path)
            await _in_thread(self._evaluated.link_best, thread)
            await _in_thread(partial(self._remove_old_checkpoints, ledger.step), thread)
            current().metrics.total("timing_s/checkpoint", time.monotonic() - began)
            log.info("checkpoint_written", path=str(path), step=ledger.step)

    def _remove_old_checkpoints(self, newest: int) -> None:
        """Remove all checkpoints but those to keep, that of step `newest`, the best, and those that may become it."""
        if self.checkpoints is None or self.keep_checkpoints is None:
            return
        folder = Path(self.checkpoints)
        if (path := checkpoint_of(folder, newest)) is not None:
            remove_old_checkpoints(folder, path, self.keep_checkpoints, self._evaluated.spares)


def _ended(ledger: Ledger) -> int:
    """Return the number of trajectories that have ended in this run."""
    return sum(ledger.balance().ended.values())


def _require(trainer: object, protocol: type, purpose: str, methods: str) -> None:
    if not isinstance(trainer, protocol):
        raise InvalidConfig(f"trainer: expected {methods} for {purpose}, got {type(trainer).__name__}")


def _samples_of(
    samples: Samples, trained: Callable[[], list[Sample]] | None, found: Sequence[Sample], step: int
) -> list[Sample]:
    """Return samples of a batch, if they are due, and of an evaluation. Blocks."""
    chosen: list[Sample] = []
    if trained is not None:
        try:
            chosen = call_user(trained)
        except Exception:  # a tokenizer that cannot decode the batch must not end the run
            log.exception("samples_failed", step=step)
    return [*chosen, *samples.of_evaluation(found, step)]


async def _in_thread(work: Callable[[], T], thread: anyio.CapacityLimiter) -> T:
    """Return the result of `work` in a worker thread; abandon the thread if the wait is cancelled."""
    return await anyio.to_thread.run_sync(call_user, work, limiter=thread, abandon_on_cancel=True)


@asynccontextmanager
async def _watching(watched: Trainer | WeightSink | None) -> AsyncIterator[None]:
    """Cancel the body, and raise the reason, if the trainer or the publisher fails between two steps."""
    if not isinstance(watched, FailsBetweenSteps):
        yield
        return
    with unwrap_first():  # a step may fail of the same cause
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(await_user, watched.watch)
            yield
            tasks.cancel_scope.cancel()


async def _uninterrupted(work: Callable[[], Awaitable[None]], cancel_timeout_s: float, step: int) -> None:
    """Finish `work` even if the caller is cancelled, but within `cancel_timeout_s` from then on."""
    shield = anyio.CancelScope(shield=True)
    with unwrap_single():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(limit_once_cancelled, shield, cancel_timeout_s)
            with shield:
                await work()
            if shield.cancelled_caught:
                log.warning("step_abandoned", step=step, waited_s=cancel_timeout_s)
            tasks.cancel_scope.cancel()


def batch_metrics(batch: TrainBatch, current_version: int) -> dict[str, float]:
    """Return metrics of a batch, under the names of TRL and verl. `current_version` is that of the weights.

    Means over rollouts: `reward`, also by data set, `rewards/<part>`, `response_length/…`, `prompt_length/mean`; over
    the tokens that train: `advantages/…`; in optimizer steps: `staleness/…`. `response_length/clip_ratio`: share of
    LENGTH.
    """
    firsts = batch.rollout_starts()
    by_sequence = batch.completion_lengths()
    lengths = np.add.reduceat(by_sequence, firsts)
    lags = np.maximum.reduceat(batch.lags(current_version), firsts)
    metrics: dict[str, float] = {
        "reward": _mean(batch.rewards[firsts]),
        "response_length/mean": _mean(lengths),
        "response_length/max": float(lengths.max()),
        "response_length/min": float(lengths.min()),
        "response_length/clip_ratio": _mean(batch.stop_reasons[batch.rollout_ends()] == StopReason.LENGTH),
        "prompt_length/mean": _mean((batch.lengths() - by_sequence)[firsts]),
        "staleness/mean": _mean(lags),
        "staleness/max": float(lags.max()),
        "batch/groups": float(len(batch.groups)),
        "batch/trajectories": float(len(firsts)),
        "perf/total_num_tokens": float(len(batch.tokens)),
    }
    metrics |= {f"rewards/{name}": _mean(part[firsts]) for name, part in batch.reward_parts.items()}
    metrics |= {f"reward/{source}": reward for source, reward in _reward_by_source(batch).items()}
    if batch.advantages is not None and batch.loss_mask.any():
        advantages = batch.advantages[batch.loss_mask]
        metrics["advantages/mean"] = _mean(advantages)
        metrics["advantages/max"] = float(advantages.max())
        metrics["advantages/min"] = float(advantages.min())
    return metrics


def _reward_by_source(batch: TrainBatch) -> dict[str, float]:
    """Return the mean reward of each data set of the batch: see `PromptDataset.data_source`."""
    sources = np.repeat(
        [str(group.meta.get("data_source", "")) for group in batch.groups], [group.sequences for group in batch.groups]
    )
    firsts = batch.rollout_starts()
    rewards, sources = batch.rewards[firsts], sources[firsts]
    return {str(source): _mean(rewards[sources == source]) for source in np.unique(sources) if source}


def _mean(values: Any) -> float:
    return float(np.mean(values, dtype=np.float64))
