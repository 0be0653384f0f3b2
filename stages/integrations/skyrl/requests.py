"""`Requests`: the prompts that SkyRL waits for, as the source of a flow, and the trajectories that answer them.

SkyRL asks for `repetition_id`s of a prompt by its `instance_id`, many prompts at once, and waits for all of a call.
Every request goes through the flow as a group of its own: one row for each repetition, with the prompt alone. The rows
come back in any order and in parts, and are kept until their request is complete, so that never more rows are kept than
SkyRL has asked for. Those that ended on the way, by the ledger, are sampled again, under a new id.

Belongs to the event loop of the flow, and knows no SkyRL.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...._pipeline.accounting.ledger import Ledger
from ...._pipeline.accounting.progress_guard import FAILURE_LIMIT
from ...._pipeline.accounting.telemetry import get_logger
from ...._pipeline.channels.channel import SendChannel
from ...._pipeline.errors import RolloutsFailed
from ...._pipeline.graph.context import current
from ...._pipeline.graph.stage_info import StageInfo
from ...._pipeline.util.waiting import Waiters
from ...._schemas import GroupId, Trajectory, TrajectoryGroup, TrajectoryId
from ...contracts.sampling_params import SamplingParams
from ..flow_thread.flow_run import Decode
from ..flow_thread.sample_queue import Trajectories
from ..flow_thread.sampling import check_sampling

log = get_logger("penstock.skyrl")

ENV = "skyrl"
"""The environment's name in the ids of all trajectories."""

INSTANCE_ID, SAMPLING = "instance_id", "sampling"
"""The keys of SkyRL's name of the prompt, and of its sampling parameters, in the `meta` of a request."""

ATTEMPTS = 3
"""Times that a repetition is sampled until one succeeds; then SkyRL gets a row that does not train."""


class SampledRepetition(NamedTuple):
    """One repetition that was sampled."""

    trajectory: Trajectory
    parts: Mapping[str, float]
    """The parts of its reward."""


@dataclass(slots=True, eq=False)
class PromptRequest:
    """Repetitions of one prompt that a call of SkyRL waits for."""

    instance_id: str
    """SkyRL's name of the prompt, not unique: it asks for the same one in every epoch, and when it evaluates."""
    prompt: NDArray[np.int32]
    """[T] tokens; empty if the prompts are those of the groups that arrive."""
    repetitions: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    meta: dict[str, Any] = field(default_factory=dict)
    """Input of rewards: the `meta` of its group."""
    rows: dict[int, SampledRepetition | None] = field(default_factory=dict)
    """The repetitions that have arrived, and None for those that were given up."""
    resampled: int = 0
    """Repetitions that were sampled again."""
    answered: Future[None] = field(default_factory=Future)
    """Done when all repetitions are in `rows`."""

    @property
    def ids(self) -> list[TrajectoryId]:
        """Return the ids of the trajectories that have arrived."""
        return [row.trajectory.id for row in self.rows.values() if row is not None]


@dataclass(slots=True, eq=False)
class _Part:
    """Repetitions of a request that go through the flow as one group."""

    request: PromptRequest
    left: set[int]
    """Those that have not come back."""
    attempt: int = 1


class Requests:
    """The source of the flow that answers SkyRL; see `PenstockGenerator`."""

    def __init__(self) -> None:
        self._number = 0
        """Of the next group: an id is never used twice, not even by a run that resumes another."""
        self._unsent: deque[_Part] = deque()
        self._sent: dict[GroupId, _Part] = {}
        self._given_up = 0
        """Repetitions in a row."""
        self._changed = Waiters()

    def __repr__(self) -> str:
        return f"<Requests: {len(self._unsent)} not sent, {len(self._sent)} not answered>"

    def stage_info(self) -> StageInfo:
        """State the name."""
        return StageInfo(name="SkyRL's requests")

    def state_dict(self) -> Mapping[str, Any]:
        """Return the number of the next group."""
        return {"number": self._number}

    def load_state_dict(self, state: Any) -> None:
        """Go on with the number of a checkpoint."""
        self._number = int(state["number"])

    # -- the source --------------------------------------------------------------------------------------------------

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        """Send every request as a group of prompts, until cancelled.

        Raises:
            RolloutsFailed: so many repetitions in a row were given up that the environment cannot work.
        """
        ledger = current().ledger
        with ledger.on_end(partial(self._replace_ended, ledger)):
            while True:
                self._check(ledger)
                if not self._unsent:
                    await self._changed.wait()
                elif not (part := self._unsent.popleft()).request.answered.cancelled():
                    group = self._group_of(part)
                    self._sent[group.id] = part
                    await outbox.send(group)

    def _group_of(self, part: _Part) -> TrajectoryGroup:
        repetitions, prompt = sorted(part.left), part.request.prompt
        number, self._number = self._number, self._number + 1
        return TrajectoryGroup.build(
            env=ENV,
            instance_id=str(number),
            tokens=np.tile(prompt, len(repetitions)),
            offsets=np.arange(len(repetitions) + 1) * len(prompt),
            loss_mask=np.zeros(len(prompt) * len(repetitions), np.bool_),
            rewards=np.zeros(len(repetitions)),
            rollout_ids=repetitions,
            meta={
                **part.request.meta,
                INSTANCE_ID: part.request.instance_id,
                SAMPLING: msgspec.to_builtins(part.request.sampling),
            },
        )

    def _check(self, ledger: Ledger) -> None:
        if self._given_up >= FAILURE_LIMIT:
            reasons = [
                f"{state}: {reason} ({count})"
                for state, counts in ledger.balance().reasons.items()
                for reason, count in counts.items()
            ]
            raise RolloutsFailed(
                f"SkyRL: expected rollouts that succeed, got {self._given_up} in a row that failed {ATTEMPTS} times "
                f"each; all ends so far: {'; '.join(reasons)}"
            )

    def _replace_ended(self, ledger: Ledger) -> None:
        """Sample rows again that have ended without coming back. Called by the ledger after every end."""
        for group, part in list(self._sent.items()):
            ended = {each for each in part.left if not ledger.trajectories.is_open(TrajectoryId(*group, each))}
            if ended:
                part.left -= ended
                self._forget_if_complete(group, part)
                self._again(_Part(part.request, ended, part.attempt + 1))

    def _again(self, part: _Part) -> None:
        request = part.request
        if request.answered.cancelled():
            return
        if part.attempt <= ATTEMPTS:
            request.resampled += len(part.left)
            self._unsent.append(part)
        else:
            log.warning("rollout_given_up", instance_id=request.instance_id, repetitions=sorted(part.left))
            self._given_up += len(part.left)
            request.rows |= dict.fromkeys(part.left)
            _answer_if_complete(request)
        self._changed.wake_all()

    def _forget_if_complete(self, group: GroupId, part: _Part) -> None:
        if not part.left:
            self._sent.pop(group, None)

    # -- SkyRL's side, called on the event loop of the flow ------------------------------------------------------------

    def ask(self, requests: Iterable[PromptRequest]) -> None:
        """Have the flow sample these."""
        self._unsent.extend(_Part(request, set(request.repetitions)) for request in requests)
        self._changed.wake_all()

    # -- the flow's other end, called by `FlowRun` -------------------------------------------------------------------

    def awaited(self, group: TrajectoryGroup, decode: Decode | None) -> Iterator[tuple[Trajectories, TrajectoryGroup]]:
        """Yield a copy of `group`, and the ids of its rows that SkyRL waits for.

        Raises:
            InvalidRecord: it was sampled at another temperature than SkyRL's.
        """
        del decode
        part = self._sent.get(group.id)
        if part is None or part.request.answered.cancelled():
            return
        check_sampling(group, part.request.sampling.logprob_temperature, "SkyRL")
        if wanted := [each for each in group.ids if each.repetition_id in part.left]:
            yield tuple(wanted), group.owned()

    def offer(self, group: TrajectoryGroup, trajectories: Trajectories) -> bool:
        """Give the rows to their request. There is always room: SkyRL has asked for them."""
        part = self._sent[group.id]
        wanted = {each.repetition_id for each in trajectories}
        part.left -= wanted
        self._given_up = 0
        self._forget_if_complete(group.id, part)
        places = {repetition: place for place, repetition in enumerate(group.rollout_ids.tolist())}
        give(part.request, {repetition: places[repetition] for repetition in wanted}, group)
        return True

    def close(self, error: BaseException) -> None:
        """Fail everything that is not answered."""
        for part in (*self._unsent, *self._sent.values()):
            fail(part.request, error)
        self._unsent.clear()
        self._sent.clear()


def give(request: PromptRequest, places: Mapping[int, int], group: TrajectoryGroup) -> None:
    """Give rows of `group` to a request, by repetition, from their places in the group."""
    for repetition, place in places.items():
        parts = {name: float(column[place]) for name, column in group.reward_parts.items()}
        request.rows[repetition] = SampledRepetition(group[place], parts)
    _answer_if_complete(request)


def withdraw(requests: Sequence[PromptRequest]) -> Trajectories:
    """Stop waiting for these, and return the trajectories that have arrived for them."""
    for request in requests:
        request.answered.cancel()
    return tuple(each for request in requests for each in request.ids)


def fail(request: PromptRequest, error: BaseException) -> None:
    """Have the call of SkyRL that waits for a request raise `error`, if it still waits."""
    if _begin_answer(request):
        request.answered.set_exception(error)


def _answer_if_complete(request: PromptRequest) -> None:
    if len(request.rows) == len(request.repetitions) and _begin_answer(request):
        request.answered.set_result(None)


def _begin_answer(request: PromptRequest) -> bool:
    """Return whether SkyRL still waits; from then on it cannot withdraw the request."""
    return not request.answered.done() and request.answered.set_running_or_notify_cancel()
