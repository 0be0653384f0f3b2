"""Teacher: requests the likeliest tokens of a teacher at every token that trains, and adds them to the groups.

A `TeacherPolicy` describes the teacher; `losses.Distillation` trains on its candidates. Every group leaves with columns
of the same width, however many candidates the teacher returned, so that all groups fit into one batch.
"""

from __future__ import annotations

import time
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import anyio
import anyio.to_thread
import msgspec
import numpy as np
from anyio.abc import TaskGroup
from numpy.typing import NDArray

from ..._pipeline.accounting.telemetry import get_logger
from ..._pipeline.channels.channel import ReceiveChannel, SendChannel
from ..._pipeline.errors import EngineFailed, EngineTimedOut, PenstockError
from ..._pipeline.graph.context import Worker, current, drop
from ..._pipeline.graph.stage_info import StageInfo, tokenizer_of
from ..._pipeline.util.exception_groups import unwrap_single
from ..._pipeline.util.user_code import await_user, open_user
from ..._schemas import TrajectoryGroup
from ..._schemas.choices import check_choice
from ..._schemas.columns import freeze
from ..._schemas.numbers import normalize_counts, normalize_numbers
from ..contracts.candidates import TeacherCandidates
from ..http.retry import Backoff, jitter

log = get_logger("penstock.teacher")

OnFailure: TypeAlias = Literal["drop", "pass"]
"""The rule for a group with a sequence that the teacher failed at: drop it, or send it without candidates there."""


MAX_INITIAL_FAILURES = 8
"""Groups in which a sequence may fail before the first success: one or two may be too long for the teacher."""


class TeacherEngine(Protocol):
    """An opened teacher."""

    async def candidates(self, tokens: NDArray[np.int32], wanted: NDArray[np.bool_], top_k: int) -> TeacherCandidates:
        """Return the likeliest tokens at each of the tokens [T] of a sequence; many tasks may call it at once.

        Args:
            tokens: prompt and completion.
            wanted: [T] true on the tokens that need candidates; the first does not.
            top_k: number of likeliest tokens. The token itself is added if it is not among them and the teacher knows
                its log-probability.

        Raises:
            EngineFailed: a temporary failure.
            OSError: likewise.
            PenstockError: any other one is final.
        """
        ...


class TeacherPolicy(Protocol):
    """A description of a teacher; picklable, for a stage in a process of its own."""

    @property
    def tokenizer(self) -> Any:
        """Return the teacher's tokenizer, or its `TokenizerIdentity`."""
        ...

    def open(self, worker: Worker, /) -> AbstractAsyncContextManager[TeacherEngine]:
        """Load the teacher, or connect to it, until the body ends."""
        ...


@dataclass(frozen=True, slots=True)
class Teacher:
    """Fill `teacher_ids` and `teacher_logprobs` of groups that have none, on the tokens that train.

    Args:
        policy: the teacher.
        top_k: number of requested candidates; the columns are one wider, for the token itself.
        concurrency: bound on concurrent requests, one for each sequence. No more groups than that are held.
        teacher_timeout_s: bound on the time of one request, the time in a queue of the teacher included.
        backoff: number of attempts for a sequence, and the pauses between them.
        on_failure: the rule for a group with a sequence whose attempts all failed.

    Raises:
        InvalidConfig: a number out of range, or an unknown `on_failure`.
    """

    policy: TeacherPolicy
    top_k: int
    concurrency: int = 32
    teacher_timeout_s: float = 60.0
    backoff: Backoff = field(default_factory=lambda: Backoff(attempts=3))
    on_failure: OnFailure = "drop"

    def __post_init__(self) -> None:
        normalize_counts(self, "top_k", "concurrency")
        normalize_numbers(self, "teacher_timeout_s")
        check_choice("on_failure", self.on_failure, OnFailure)

    def stage_info(self) -> StageInfo:
        """State the tokenizer of the teacher (it must be that of the tokens) and the columns."""
        columns = ("teacher_ids", "teacher_logprobs")
        return StageInfo(tokenizers=tokenizer_of(self.policy), needs_tokenizer=True, fills_columns=columns)

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        """Run the stage; see `Stage`. Groups leave as soon as they are ready, in any order.

        Raises:
            EngineFailed: the teacher failed in the first 8 groups, without any success; `__cause__` is the last
                failure.
            Exception: raised by the policy when it is opened.
        """
        async with open_user(self.policy.open, current().worker) as engine:
            with unwrap_single(), current().watch_loop(self.teacher_timeout_s):
                async with anyio.create_task_group() as tasks:
                    requests = _TeacherRequests(self, engine, outbox, tasks)
                    async for group in inbox:
                        await requests.begin(group)
                        del group  # it may occupy a producer's slots until the next one arrives


@dataclass(slots=True)
class _TeacherRequest:
    """A group with requests in flight."""

    group: TrajectoryGroup
    ids: NDArray[np.int32]
    """[N, K]."""
    logprobs: NDArray[np.float32]
    """[N, K]."""
    outstanding: int
    """Sequences without a response."""
    failed: bool = False
    """True if a sequence failed for good."""

    @classmethod
    def of(cls, group: TrajectoryGroup, width: int, outstanding: int) -> _TeacherRequest:
        shape = (len(group.tokens), width)
        return cls(group, np.full(shape, -1, np.int32), np.zeros(shape, np.float32), outstanding)

    def fill(self, span: slice, ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> None:
        """Store the candidates of one sequence, on its tokens that train."""
        wanted = self.group.loss_mask[span, None]
        np.copyto(self.ids[span], ids, where=wanted)
        np.copyto(self.logprobs[span], logprobs, where=wanted)

    def filled(self) -> TrajectoryGroup:
        """Return the group with its columns."""
        freeze([self.ids, self.logprobs])
        return msgspec.structs.replace(self.group, teacher_ids=self.ids, teacher_logprobs=self.logprobs)


class _TeacherRequests:
    """All requests in flight."""

    def __init__(
        self, rules: Teacher, engine: TeacherEngine, outbox: SendChannel[TrajectoryGroup], tasks: TaskGroup
    ) -> None:
        self._rules = rules
        self._engine = engine
        self._outbox = outbox
        self._tasks = tasks
        self._permits = anyio.Semaphore(rules.concurrency)
        """One is held for each sequence until its group was sent, so that a slow receiver limits the requests."""
        self._draw = jitter(current().worker)
        self._failures_left: int | None = MAX_INITIAL_FAILURES
        """Groups in which a sequence may still fail before the first success; None after it."""

    async def begin(self, group: TrajectoryGroup) -> None:
        """Start a request for every sequence of `group`; return when all have started."""
        if group.teacher_ids is not None:
            await self._outbox.send(group)
            return
        live = np.flatnonzero(group.completion_lengths()).tolist()
        request = _TeacherRequest.of(group, self._rules.top_k + 1, len(live))
        if not live:
            await self._outbox.send(request.filled())
        for row in live:
            await self._permits.acquire()
            self._tasks.start_soon(await_user, self._run, request, slice(*group.offsets[row : row + 2].tolist()))

    async def _run(self, request: _TeacherRequest, span: slice) -> None:
        try:
            if not (request.failed and self._rules.on_failure == "drop"):
                await self._fill(request, span)
            request.outstanding -= 1
            if not request.outstanding:
                await self._finish(request)
        finally:
            self._permits.release()

    async def _finish(self, request: _TeacherRequest) -> None:
        if request.failed and self._rules.on_failure == "drop":
            drop(request.group, "failed", "the teacher failed")
        else:
            await self._outbox.send(request.filled())

    async def _fill(self, request: _TeacherRequest, span: slice) -> None:
        """Request the candidates of one sequence, with retries."""
        group, metrics = request.group, current().metrics
        pauses = self._rules.backoff.pauses(self._draw)
        while (failure := await self._attempt(request, span)) is not None:
            pause_s = next(pauses, None) if isinstance(failure, EngineFailed | OSError) else None
            if pause_s is None:
                first, request.failed = not request.failed, True
                metrics.total("teacher/failed")
                log.warning("teacher_failed", group=f"{group.env}/{group.instance_id}", reason=str(failure))
                if first:
                    self._count_failure(failure)
                return
            metrics.total("teacher/retries")
            await anyio.sleep(pause_s)

    def _count_failure(self, failure: Exception) -> None:
        """Count a group with a sequence that failed for good.

        Raises:
            EngineFailed: every group so far failed: with such a teacher the run would drop every group.
        """
        if self._failures_left is None:
            return
        self._failures_left -= 1
        if not self._failures_left:
            raise EngineFailed(
                f"expected a teacher that responds, got failures in {MAX_INITIAL_FAILURES} groups and no response "
                f"since the start; the last one: {failure}"
            ) from failure

    async def _attempt(self, request: _TeacherRequest, span: slice) -> Exception | None:
        """Make one attempt for a sequence; return its error, if any."""
        tokens, began = request.group.tokens[span], time.monotonic()
        try:
            with anyio.fail_after(self._rules.teacher_timeout_s):
                wanted = request.group.loss_mask[span]
                found = await await_user(self._engine.candidates, tokens, wanted, self._rules.top_k)
            request.fill(span, *found.columns(tokens, self._rules.top_k + 1))
        except TimeoutError as error:
            return EngineTimedOut(f"expected a response within {self._rules.teacher_timeout_s:g} s, got none ({error})")
        except (PenstockError, OSError) as error:
            return error
        self._failures_left = None
        current().metrics.mean("timing_s/teacher", time.monotonic() - began)
        return None
