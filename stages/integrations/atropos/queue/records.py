"""What goes into the gateway's queue and comes out: submissions, batches, and what is said of the queue.

Names of fields are those of the Atropos contract wherever it has them, so that these values are its JSON.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from http import HTTPStatus
from typing import ClassVar, Generic, TypeVar

from .....pipeline.errors import PenstockError

__all__ = [
    "Batch",
    "EnvAdmitted",
    "EnvStatistics",
    "EnvStatus",
    "Info",
    "InvalidRegistration",
    "NoTrainer",
    "QueueFull",
    "Receipt",
    "RequestRejected",
    "Status",
    "Submission",
    "SubmissionTooLarge",
    "UnknownEnvironment",
    "UnknownLease",
    "UnpackableGroupSize",
    "WandbInfo",
]

G = TypeVar("G")


@dataclass(frozen=True, slots=True)
class Submission(Generic[G]):
    """One group as an environment submits it."""

    payload: G
    """The group; the queue never look inside."""
    sequences: int
    """How many completions it holds."""
    nbytes: int
    """What it takes of the queue's bytes."""
    env_id: int | None = None
    """Whose it is; an id that nobody has counts as None."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of accepted submissions."""

    groups: int
    """How many were accepted: all that were submitted."""
    buffered: int
    """How many of those are of another size than their environment's, and were held back to make up whole groups."""
    buffer_size: int | None
    """Sequences that the environment of the last buffered group has in its buffer now; None if none was buffered."""
    duplicate: bool = field(default=False, compare=False)
    """Whether they were accepted before, when nobody could be told so."""


@dataclass(frozen=True, slots=True)
class Batch(Generic[G]):
    """Groups that sum to exactly `batch_size` sequences."""

    groups: tuple[Submission[G], ...]
    """In the order in which the trainer gets them."""
    lease: int | None
    """What the trainer acknowledges; None where it did not ask for that, and then it is gone when it is lost."""
    batch_id: str
    """The same however often it is handed out, and that of no other batch."""


@dataclass(frozen=True, slots=True)
class EnvAdmitted:
    """What a registered environment is told."""

    env_id: int
    """Its id from now on."""
    wandb_name: str
    """Its name, with the number of earlier environments of that name."""
    checkpoint_dir: str
    """The trainer's."""
    starting_step: int
    """The step that is now."""
    checkpoint_interval: int
    """The trainer's."""
    num_steps: int
    """The trainer's."""


@dataclass(frozen=True, slots=True)
class Info:
    """What environments ask before they begin; −1 where no trainer registered."""

    batch_size: int
    """Sequences of a batch."""
    max_token_len: int
    """Tokens of the longest sequence."""


@dataclass(frozen=True, slots=True)
class WandbInfo:
    """Where environments log; None where no trainer registered."""

    group: str | None
    """As the trainer said."""
    project: str | None
    """As the trainer said."""


@dataclass(frozen=True, slots=True)
class Status:
    """Where the run is."""

    current_step: int
    """Batches that were handed out, from the trainer's `starting_step` on."""
    queue_size: int
    """Groups that wait."""


@dataclass(frozen=True, slots=True)
class EnvStatus:
    """What an environment controls its own flow with. Groups are counted in groups of its own size."""

    current_step: int
    """As in `Status`."""
    queue_size: int
    """Groups that wait, of itself and, where there are groups of more than one, of others beyond their minimum."""
    unallocated_fraction: float
    """Part of a batch that no environment has as its minimum."""
    self_queue_size: int
    """Its own groups that wait."""
    max_group_size: int
    """Sequences of the largest group that waits, at least 1."""
    env_weight: float
    """Its part of the weights, by tokens; at least 0.01."""


@dataclass(frozen=True, slots=True)
class EnvStatistics:
    """One environment, for metrics and for those who wonder what is waited for."""

    env_id: int
    """Its id."""
    name: str
    """Its name, numbered."""
    connected: bool
    """Whether it has not said goodbye."""
    silent_s: float
    """How long nothing was heard of it."""
    queued: int
    """Sequences that wait."""
    buffered: int
    """Sequences that wait for others to make up whole groups."""
    submitted: int
    """Sequences that were accepted so far."""
    taken: int
    """Sequences that were handed out so far."""
    rejected: int
    """Submissions for which there was no room."""


class RequestRejected(PenstockError):
    """The gateway does not do what it was asked to do; nothing changed."""

    status: ClassVar[HTTPStatus] = HTTPStatus.BAD_REQUEST
    """How HTTP says so. A client of Atropos tries again at 500 and above, and gives up below."""


class NoTrainer(RequestRejected):
    """No trainer registered, and what was asked for depends on what it says."""

    status = HTTPStatus.CONFLICT


class UnknownEnvironment(RequestRejected):
    """No environment has this id: it did not register since the gateway was started, or reset."""

    status = HTTPStatus.NOT_FOUND


class UnknownLease(RequestRejected):
    """A batch is acknowledged that is not out: its lease expired, or it was acknowledged before."""

    status = HTTPStatus.NOT_FOUND


class InvalidRegistration(RequestRejected):
    """A trainer or an environment says a number of itself that none has, and that would be in everybody's way."""

    status = HTTPStatus.UNPROCESSABLE_ENTITY


class UnpackableGroupSize(RequestRejected):
    """Groups of this size can never be part of a batch, or never add up to what their environment said."""

    status = HTTPStatus.UNPROCESSABLE_ENTITY


class SubmissionTooLarge(RequestRejected):
    """More groups or bytes at once than the queue may ever hold."""

    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE


class QueueFull(RequestRejected):
    """The queue has no room now. Nothing of the submission was accepted: all of it may be sent again."""

    status = HTTPStatus.SERVICE_UNAVAILABLE

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """When there may be room."""
