from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.failsafe import FAILSAFE_S

from penstock import Teacher, TrainBatch, TrajectoryGroup, Worker
from penstock.channels import memory_channel
from penstock.errors import EngineFailed, EngineRefused, NobodyListens
from penstock.policies import Backoff
from penstock.teachers import TeacherCandidates
from penstock.testing import Driven, VirtualClock, drive, group


@dataclass(frozen=True)
class Letters:
    """A tokenizer, as far as its identity goes."""

    letters: str = "abc"
    eos_id: int = 0

    def get_vocab(self) -> dict[str, int]:
        return {letter: index for index, letter in enumerate(self.letters)}


RewardInput = Callable[[NDArray[np.int32]], TeacherCandidates]


def next_of_each(tokens: NDArray[np.int32]) -> TeacherCandidates:
    """Return two candidates for every token but the first: itself, and the number after it."""
    return TeacherCandidates.of([None, *({int(token): -0.5, int(token) + 1: -1.0} for token in tokens[1:])])


@dataclass
class Scripted:
    """A teacher that follows a script, one entry for each request, and repeats the last one."""

    script: Sequence[RewardInput | Exception | float] = (next_of_each,)
    tokenizer: Any = Letters()
    questions: list[list[int]] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0

    @asynccontextmanager
    async def open(self, worker: Worker) -> AsyncGenerator[Scripted]:
        del worker
        yield self

    async def candidates(self, tokens: NDArray[np.int32], wanted: NDArray[np.bool_], top_k: int) -> TeacherCandidates:
        assert len(wanted) == len(tokens)
        assert top_k == 2
        self.questions.append(tokens.tolist())
        act = self.script[min(len(self.questions), len(self.script)) - 1]
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await anyio.sleep(act if isinstance(act, float) else 1)
        finally:
            self.at_once -= 1
        if isinstance(act, Exception):
            raise act
        return act(tokens) if callable(act) else next_of_each(tokens)


def asked(teacher: Scripted, groups: Sequence[TrajectoryGroup], **options: Any) -> Driven[TrajectoryGroup]:
    stage = Teacher(teacher, top_k=2, **options)
    return VirtualClock().run(lambda: drive(stage, groups))


def two() -> TrajectoryGroup:
    """Return two sequences; the first token of the second completion does not train."""
    return group(
        completion_lengths=[2, 3],
        prompt_length=1,
        tokens=[10, 11, 12, 20, 21, 22, 23],
        loss_mask=[0, 1, 1, 0, 0, 1, 1],
    )


def ids(of: TrajectoryGroup) -> list[list[int]]:
    assert of.teacher_ids is not None
    assert of.teacher_logprobs is not None
    of.validate()
    assert of.teacher_logprobs.shape == of.teacher_ids.shape
    assert (of.teacher_logprobs[of.teacher_ids < 0] == 0).all()
    assert not of.teacher_ids.flags.writeable
    found: list[list[int]] = of.teacher_ids.tolist()
    return found


NONE = [-1, -1, -1]


# -- candidates --------------------------------------------------------------------------------------------------------


def test_every_trained_token_gets_the_candidates_of_the_teacher() -> None:
    (out,) = asked(Scripted(), [two()])

    assert ids(out) == [NONE, [11, 12, -1], [12, 13, -1], NONE, NONE, [22, 23, -1], [23, 24, -1]]
    assert out.teacher_logprobs is not None
    assert out.teacher_logprobs[1].tolist() == [-0.5, -1.0, 0.0]


def test_given_candidates_are_kept_and_untrained_sequences_are_not_requested() -> None:
    given = group(teacher_ids=np.full((14, 1), 3), teacher_logprobs=np.zeros((14, 1)))
    idle = group(completion_lengths=[2], loss_mask=np.zeros(4, bool))
    teacher = Scripted()

    out = asked(teacher, [given, idle])

    assert [ids(each)[2] for each in out] == [[3], NONE]
    assert teacher.questions == []


def test_groups_with_and_without_answers_fit_into_one_batch() -> None:
    refused = Scripted([next_of_each, EngineRefused("too long"), next_of_each])

    out = asked(
        refused,
        [two(), group(instance_id="1"), group(instance_id="2", loss_mask=np.zeros(14, bool))],
        on_failure="pass",
        concurrency=1,
    )

    batch = TrainBatch.pack(out)
    assert batch.teacher_ids is not None
    assert batch.teacher_ids.shape == (7 + 14 + 14, 3)


# -- how it is asked ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("concurrency", [1, 3, 8])
def test_so_many_sequences_are_asked_about_at_once_and_no_more(concurrency: int) -> None:
    teacher = Scripted()

    out = asked(teacher, [group(instance_id=str(i)) for i in range(6)], concurrency=concurrency)

    assert len(out) == 6
    assert len(teacher.questions) == 12
    assert teacher.most_at_once == concurrency


async def test_while_answers_are_not_received_no_more_requests_are_made() -> None:
    teacher = Scripted([0.0])
    outbox, answered = memory_channel[TrajectoryGroup](1)
    sender, inbox = memory_channel[TrajectoryGroup](10)
    for number in range(10):
        sender.send_nowait(group(instance_id=str(number), completion_lengths=[1]))

    async with sender, inbox, outbox, answered, anyio.create_task_group() as tasks:
        tasks.start_soon(Teacher(teacher, top_k=2, concurrency=2).run, inbox, outbox)
        with anyio.fail_after(FAILSAFE_S):
            while len(teacher.questions) < 3:
                await anyio.lowlevel.checkpoint()
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()

        assert len(teacher.questions) == 3  # one is in the outbox, two wait for credit
        assert inbox.statistics().items >= 6


@pytest.mark.parametrize("passing", [EngineFailed("busy"), NobodyListens("restarting"), 100.0], ids=repr)
def test_temporary_failures_are_retried(passing: Exception | float) -> None:
    teacher = Scripted([passing, next_of_each])

    out = asked(teacher, [group(completion_lengths=[2])], teacher_timeout_s=10, backoff=Backoff(attempts=2))

    assert ids(out[0])[2] != NONE
    assert len(teacher.questions) == 2


def test_pauses_between_attempts_grow() -> None:
    clock, teacher = VirtualClock(), Scripted([EngineFailed("busy")])
    stage = Teacher(teacher, top_k=2, backoff=Backoff(attempts=8, first_s=100, longest_s=10_000))

    clock.run(lambda: drive(stage, [group(completion_lengths=[2])]))

    assert len(teacher.questions) == 8
    assert 8 + 7 * 100 < clock.now_s < 8 + 100 * (2**7 - 1)  # no seven pauses of at most 100 s are so long


# -- when it fails -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failure", "attempts"),
    [
        (EngineFailed("busy"), 3),
        (100.0, 3),
        (EngineRefused("longer than what it was trained for"), 1),
        (lambda _: TeacherCandidates.of([None]), 1),
    ],
    ids=["busy", "slow", "refused", "nonsense"],
)
def test_a_group_at_one_of_whose_sequences_the_teacher_failed_is_dropped_with_the_reason(
    failure: Exception | float | RewardInput, attempts: int
) -> None:
    teacher = Scripted([next_of_each] + [failure] * attempts + [next_of_each])

    out = asked(teacher, [group(instance_id="0"), group(instance_id="1")], concurrency=1, teacher_timeout_s=10)

    assert [each.instance_id for each in out] == ["1"]
    assert out.ledger.balance().reasons["failed"] == {"the teacher failed": 2}
    assert len(teacher.questions) == 2 + attempts - 1 + 2


def test_passed_through_it_has_no_candidates_where_the_teacher_failed() -> None:
    (out,) = asked(Scripted([EngineRefused("no"), next_of_each]), [two()], on_failure="pass", concurrency=1)

    assert ids(out) == [NONE, NONE, NONE, NONE, NONE, [22, 23, -1], [23, 24, -1]]
    assert out.rewards.tolist() == [1, 1]


def test_of_a_group_that_is_dropped_nothing_more_is_asked() -> None:
    teacher = Scripted([EngineRefused("no"), next_of_each])

    asked(teacher, [group(completion_lengths=[2] * 8)], concurrency=1)

    assert len(teacher.questions) == 1


def test_failures_and_retries_are_counted() -> None:
    out = asked(
        Scripted([EngineFailed("busy"), EngineFailed("busy"), next_of_each]),
        [group(instance_id="0", completion_lengths=[2]), group(instance_id="1", completion_lengths=[2])],
        backoff=Backoff(attempts=2),
        concurrency=1,
    )
    emitted: dict[str, float] = {}
    out.metrics.sinks.append(lambda metrics, _: emitted.update(metrics))

    out.metrics.emit(1)

    assert (emitted["teacher/retries"], emitted["teacher/failed"]) == (1, 1)
    assert emitted["timing_s/teacher"] >= 0


@pytest.mark.parametrize("on_failure", ["drop", "pass"])
@pytest.mark.parametrize("concurrency", [1, 8, 12])
def test_a_teacher_that_never_answered_ends_the_run_with_its_failure(concurrency: int, on_failure: str) -> None:
    """Dropped or passed through, its groups would come to nothing for as long as there are any."""
    failure = EngineRefused("no such model")
    teacher = Scripted([failure])
    endless = [group(instance_id=str(number), completion_lengths=[2]) for number in range(100)]

    with pytest.raises(EngineFailed, match=r"failures in 8 groups and no response .*: no such model") as raised:
        asked(teacher, endless, concurrency=concurrency, on_failure=on_failure)

    assert raised.value.__cause__ is failure
    assert len(teacher.questions) <= 8 + concurrency


@pytest.mark.parametrize("concurrency", [1, 8, 32])
def test_a_first_group_that_is_too_long_in_all_its_sequences_is_dropped_alone(concurrency: int) -> None:
    def refuse_the_long(tokens: NDArray[np.int32]) -> TeacherCandidates:
        if len(tokens) > 8:
            raise EngineRefused("too long")
        return next_of_each(tokens)

    first, second = group(instance_id="0", completion_lengths=[9] * 32), group(instance_id="1", completion_lengths=[2])

    out = asked(Scripted([refuse_the_long]), [first, second], concurrency=concurrency)

    assert [each.instance_id for each in out] == ["1"]


def test_a_teacher_that_answered_once_may_fail_for_as_long_as_it_likes() -> None:
    teacher = Scripted([*[EngineRefused("too long")] * 7, next_of_each, EngineRefused("too long")])

    out = asked(
        teacher, [group(instance_id=str(number), completion_lengths=[2]) for number in range(100)], concurrency=1
    )

    assert [each.instance_id for each in out] == ["7"]
    assert len(teacher.questions) == 100


def test_a_mistake_of_the_teacher_s_code_is_no_failure_but_ends_the_stage() -> None:
    with pytest.raises(ZeroDivisionError):
        asked(Scripted([ZeroDivisionError("a mistake")]), [two()], concurrency=1)


@pytest.mark.parametrize(
    "options",
    [{"top_k": 0}, {"concurrency": 0}, {"teacher_timeout_s": 0}, {"on_failure": "skip"}],
    ids=repr,
)
def test_invalid_arguments_are_refused(options: dict[str, Any]) -> None:
    given: dict[str, Any] = {"top_k": 2} | options

    with pytest.raises(ValueError, match="expected"):
        Teacher(Scripted(), **given)
