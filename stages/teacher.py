"""Teacher: asks a teacher which tokens it finds likeliest, wherever a token trains, and adds them to the groups.

What a teacher is, a `TeacherPolicy` says; what is learned from it, `losses.Distillation`. Every group that is asked
about leaves with columns of one width, whatever was answered, so that all of them fit into one batch.
"""

from __future__ import annotations

import time
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, get_args

import anyio
import anyio.to_thread
import msgspec
import numpy as np
from anyio.abc import TaskGroup
from numpy.typing import NDArray

from .._pipeline.channels.channel import ReceiveChannel, SendChannel
from .._pipeline.context import Worker, current, drop
from .._pipeline.errors import EngineFailed, EngineTimedOut, PenstockError
from .._pipeline.exception_groups import unwrap_single
from .._pipeline.stage_info import StageInfo, tokenizer_of
from .._pipeline.telemetry import get_logger
from .._schemas import TrajectoryGroup
from .._schemas.columns import freeze
from .._schemas.numbers import normalize_counts, normalize_numbers
from .._schemas.tokenizer import check_tokenizers
from .engines.backoff import Backoff, jitter
from .teachers.candidates import TeacherCandidates

__all__ = ["OnFailure", "Teacher", "TeacherEngine", "TeacherPolicy"]

log = get_logger("penstock.teacher")

OnFailure: TypeAlias = Literal["drop", "pass"]
"""What becomes of a group where the teacher failed at a sequence: it is dropped, or sent without candidates there."""


FIRST_ANSWERS = 8
"""Groups in which a sequence may fail before the first is answered: one or two may be too long for the teacher."""


class TeacherEngine(Protocol):
    """An opened teacher."""

    async def candidates(self, tokens: NDArray[np.int32], wanted: NDArray[np.bool_], top_k: int) -> TeacherCandidates:
        """What the teacher expects at the tokens [T] of a sequence; many tasks may ask at once.

        Args:
            tokens: prompt and completion.
            wanted: [T] true on the tokens that need candidates; the first does not.
            top_k: the likeliest so many. The token itself comes besides, where it is not among them and the teacher
                can tell.

        Raises:
            EngineFailed: it could not, and may another time.
            OSError: likewise.
            PenstockError: any other one says that it will not.
        """
        ...


class TeacherPolicy(Protocol):
    """A recipe for a teacher. It is pickled where the stage runs in a process of its own."""

    @property
    def tokenizer(self) -> Any:
        """The teacher's tokenizer, or its `TokenizerIdentity`."""
        ...

    def open(self, worker: Worker, /) -> AbstractAsyncContextManager[TeacherEngine]:
        """Load or connect to the teacher, until the body ends."""
        ...


@dataclass(frozen=True, slots=True)
class Teacher:
    """Fill `teacher_ids` and `teacher_logprobs` of groups that have none, on the tokens that train.

    Args:
        policy: the teacher.
        tokenizer: the tokenizer that the tokens were made with, or its `TokenizerIdentity`.
        top_k: candidates that are asked for; the columns are one wider, for the token itself.
        concurrency: sequences that the teacher is asked about at once. No more groups than that are held.
        teacher_timeout_s: how long one answer may take, from the question on: where the teacher answers one question
            after the other, the time in line included.
        backoff: how often a sequence is asked about in all, and how long is waited in between.
        on_failure: what becomes of a group where all that was in vain.

    Raises:
        ValueError: a number that makes no sense, or an unknown `on_failure`.
    """

    policy: TeacherPolicy
    tokenizer: Any
    top_k: int
    concurrency: int = 32
    teacher_timeout_s: float = 60.0
    backoff: Backoff = field(default_factory=lambda: Backoff(attempts=3))
    on_failure: OnFailure = "drop"

    def __post_init__(self) -> None:
        normalize_counts(self, "top_k", "concurrency")
        normalize_numbers(self, "teacher_timeout_s")
        if self.on_failure not in get_args(OnFailure):
            raise ValueError(f"on_failure: expected one of {', '.join(get_args(OnFailure))}, got {self.on_failure!r}")

    def stage_info(self) -> StageInfo:
        """State its tokenizers."""
        return StageInfo(tokenizers=tokenizer_of(self, self.policy))

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        """See `Stage`. Groups leave in the order in which they are ready.

        Raises:
            TokenizersDiffer: the teacher's ids mean something else.
            EngineFailed: the teacher failed in the first 8 groups, and has never answered; `__cause__` is the last
                failure.
            Exception: whatever the policy raises as it is opened.
        """
        parts = {"policy": self.tokenizer, "teacher": self.policy.tokenizer}
        await anyio.to_thread.run_sync(check_tokenizers, parts)  # it may read files
        async with self.policy.open(current().worker) as engine:
            with unwrap_single():
                async with anyio.create_task_group() as tasks:
                    lessons = _TeacherRequests(self, engine, outbox, tasks)
                    async for group in inbox:
                        await lessons.begin(group)
                        del group  # it may lie in a producer's slots, and the next one may be long in coming


@dataclass(slots=True)
class _TeacherRequest:
    """A group whose teacher has been asked."""

    group: TrajectoryGroup
    ids: NDArray[np.int32]
    """[N, K]."""
    logprobs: NDArray[np.float32]
    """[N, K]."""
    outstanding: int
    """Sequences that are not answered yet."""
    failed: bool = False
    """Whether one never will be."""

    @classmethod
    def of(cls, group: TrajectoryGroup, width: int, outstanding: int) -> _TeacherRequest:
        shape = (len(group.tokens), width)
        return cls(group, np.full(shape, -1, np.int32), np.zeros(shape, np.float32), outstanding)

    def fill(self, span: slice, ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> None:
        """Note what was said of one sequence, where its tokens train."""
        wanted = self.group.loss_mask[span, None]
        np.copyto(self.ids[span], ids, where=wanted)
        np.copyto(self.logprobs[span], logprobs, where=wanted)

    def learned(self) -> TrajectoryGroup:
        """The group with its columns."""
        freeze([self.ids, self.logprobs])
        return msgspec.structs.replace(self.group, teacher_ids=self.ids, teacher_logprobs=self.logprobs)


class _TeacherRequests:
    """Everything that is asked at the moment."""

    def __init__(
        self, rules: Teacher, engine: TeacherEngine, outbox: SendChannel[TrajectoryGroup], tasks: TaskGroup
    ) -> None:
        self._rules = rules
        self._engine = engine
        self._outbox = outbox
        self._tasks = tasks
        self._places = anyio.Semaphore(rules.concurrency)
        """One is held for each sequence, until its group could be sent: so a slow reader is heard here."""
        self._random = jitter(current().worker)
        self._patience: int | None = FIRST_ANSWERS
        """In how many more groups a sequence may fail before the first is answered; None once one was."""

    async def begin(self, group: TrajectoryGroup) -> None:
        """Ask about every sequence of `group`; returns when all are being asked about."""
        if group.teacher_ids is not None:
            await self._outbox.send(group)
            return
        live = np.flatnonzero(group.completion_lengths()).tolist()
        lesson = _TeacherRequest.of(group, self._rules.top_k + 1, len(live))
        if not live:
            await self._outbox.send(lesson.learned())
        for row in live:
            await self._places.acquire()
            self._tasks.start_soon(self._ask, lesson, slice(*group.offsets[row : row + 2].tolist()))

    async def _ask(self, lesson: _TeacherRequest, span: slice) -> None:
        try:
            if not (lesson.failed and self._rules.on_failure == "drop"):
                await self._fill(lesson, span)
            lesson.outstanding -= 1
            if not lesson.outstanding:
                await self._end(lesson)
        finally:
            self._places.release()

    async def _end(self, lesson: _TeacherRequest) -> None:
        if lesson.failed and self._rules.on_failure == "drop":
            drop(lesson.group, "failed", "the teacher failed")
        else:
            await self._outbox.send(lesson.learned())

    async def _fill(self, lesson: _TeacherRequest, span: slice) -> None:
        """Ask about one sequence as often as it may be asked about."""
        group, metrics = lesson.group, current().metrics
        pauses = self._rules.backoff.pauses(self._random)
        while (failure := await self._attempt(lesson, span)) is not None:
            pause_s = next(pauses, None) if isinstance(failure, EngineFailed | OSError) else None
            if pause_s is None:
                first, lesson.failed = not lesson.failed, True
                metrics.total("teacher/failed")
                log.warning("teacher_failed", group=f"{group.env}/{group.instance_id}", reason=str(failure))
                if first:
                    self._bear(failure)
                return
            metrics.total("teacher/retries")
            await anyio.sleep(pause_s)

    def _bear(self, failure: Exception) -> None:
        """Note that a group has a sequence that failed for good.

        Raises:
            EngineFailed: so did all before it: a teacher that never answers would have every group dropped, for ever.
        """
        if self._patience is None:
            return
        self._patience -= 1
        if not self._patience:
            raise EngineFailed(
                f"expected a teacher that answers, got failures in {FIRST_ANSWERS} groups and no answer since the "
                f"start; the last one: {failure}"
            ) from failure

    async def _attempt(self, lesson: _TeacherRequest, span: slice) -> Exception | None:
        """Ask about one sequence; what went wrong, if anything."""
        tokens, began = lesson.group.tokens[span], time.monotonic()
        try:
            with anyio.fail_after(self._rules.teacher_timeout_s):
                told = await self._engine.candidates(tokens, lesson.group.loss_mask[span], self._rules.top_k)
            lesson.fill(span, *told.columns(tokens, self._rules.top_k + 1))
        except TimeoutError as error:
            return EngineTimedOut(f"expected an answer within {self._rules.teacher_timeout_s:g} s, got none ({error})")
        except (PenstockError, OSError) as error:
            return error
        self._patience = None
        current().metrics.mean("timing_s/teacher", time.monotonic() - began)
        return None
