"""Values that enter and leave the queue, the receipts that it remembers, and the errors that it raises.

Fields have the names of the Atropos contract where it has them, so that these values are its JSON.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import ClassVar, Generic, TypeVar

from ....._pipeline.errors import PenstockError

G = TypeVar("G")

REMEMBERED_S = 600.0
"""Time that a repeated submission is recognised: longer than `submit` and the original client retry."""

MAX_REMEMBERED = 65_536
"""Receipts that are remembered; the oldest are forgotten first."""


@dataclass(frozen=True, slots=True)
class Submission(Generic[G]):
    """One group as an environment submits it."""

    payload: G
    """The group; the queue never looks inside."""
    sequences: int
    """Number of completions."""
    nbytes: int
    """Bytes that count towards the queue's capacity."""
    env_id: int | None = None
    """The sender; an id that is not registered counts as None."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """The answer to an accepted submission."""

    buffered: int
    """Groups that were smaller than their environment's group_size, and were buffered to make up whole groups."""
    buffer_size: int | None
    """Sequences now in the buffer of the last buffered group's environment; None if none was buffered."""
    duplicate: bool = field(default=False, compare=False)
    """True if the same body was accepted before, and its answer could not be delivered."""


class IdempotencyCache:
    """Receipts of submissions that may be repeated, each given once to the next sender of the same digest.

    The digest is of the submission's idempotency key. Of one without a key it is of the body, and only a body whose
    sender disconnected before the answer is remembered: a sender that was answered may submit equal bytes on purpose;
    one that was not has seen no submission of these bytes succeed, so the next one that is answered is the first to
    succeed. The env_id is part of the body, so no other environment gets the receipt.
    """

    def __init__(self) -> None:
        self._receipts: OrderedDict[Hashable, tuple[Receipt, float]] = OrderedDict()
        """By digest, each with its expiry, the earliest first."""

    def remember(self, now: float, digest: Hashable, receipt: Receipt) -> None:
        """Keep a receipt."""
        self._receipts[digest] = receipt, now + REMEMBERED_S
        self._receipts.move_to_end(digest)
        if len(self._receipts) > MAX_REMEMBERED:
            self._receipts.popitem(last=False)

    def pop(self, now: float, digest: Hashable) -> Receipt | None:
        """Return the receipt of this digest, if there is one, and forget it."""
        receipt, until = self._receipts.pop(digest, (None, 0.0))
        return receipt if now < until else None


@dataclass(frozen=True, slots=True)
class Batch(Generic[G]):
    """Groups that sum to exactly `batch_size` sequences."""

    groups: tuple[Submission[G], ...]
    """In the order in which the trainer gets them."""
    lease: int
    """The number that acknowledges or returns the batch."""
    batch_id: str
    """The same each time this batch is leased; unique among all batches."""


@dataclass(frozen=True, slots=True)
class EnvAdmitted:
    """The answer to an environment that registered."""

    env_id: int
    """Its id from now on."""
    wandb_name: str
    """Its desired name, with the number of earlier environments of that name."""
    checkpoint_dir: str
    """The trainer's."""
    starting_step: int
    """The current step."""
    checkpoint_interval: int
    """The trainer's."""
    num_steps: int
    """The trainer's."""


@dataclass(frozen=True, slots=True)
class Info:
    """The trainer's limits; −1 before a trainer registered."""

    batch_size: int
    """Sequences of a batch."""
    max_token_len: int
    """Tokens of the longest sequence."""


@dataclass(frozen=True, slots=True)
class WandbInfo:
    """Group and project of the environments' logs; None before a trainer registered."""

    group: str | None
    """As the trainer registered it."""
    project: str | None
    """As the trainer registered it."""


@dataclass(frozen=True, slots=True)
class Status:
    """Step and queue size of the run."""

    current_step: int
    """Batches that were formed, counted from the trainer's `starting_step`."""
    queue_size: int
    """Groups that wait."""


@dataclass(frozen=True, slots=True)
class EnvStatus:
    """The numbers that an environment controls its flow by. Groups are counted in groups of its own size."""

    current_step: int
    """As in `Status`."""
    queue_size: int
    """Groups that wait: its own and, where there are groups of more than one, those of others beyond their minimum."""
    unallocated_fraction: float
    """Part of a batch that no environment has as its minimum."""
    self_queue_size: int
    """Its own groups that wait."""
    max_group_size: int
    """Sequences of the largest group that waits, at least 1."""
    env_weight: float
    """Its part of the weights, by tokens; at least 0.01."""


class RequestRejected(PenstockError):
    """The gateway rejects a request; its state is unchanged."""

    status: ClassVar[HTTPStatus] = HTTPStatus.BAD_REQUEST
    """The HTTP status. A client of Atropos tries again at 500 and above, and gives up below."""


class NoTrainer(RequestRejected):
    """No trainer registered, and the answer depends on its registration."""

    status = HTTPStatus.CONFLICT


class UnknownEnvironment(RequestRejected):
    """No environment has this id: none registered with it since the gateway was started, or reset."""

    status = HTTPStatus.NOT_FOUND


class UnknownLease(RequestRejected):
    """The lease to acknowledge does not exist: it expired and the batch was leased again, or it was acknowledged."""

    status = HTTPStatus.NOT_FOUND


class InvalidRegistration(RequestRejected):
    """A trainer or an environment registers with a number outside the supported range."""

    status = HTTPStatus.UNPROCESSABLE_ENTITY


class UnpackableGroupSize(RequestRejected):
    """Groups of this size can never be part of a batch, or never add up to the registered group_size."""

    status = HTTPStatus.UNPROCESSABLE_ENTITY


class SubmissionTooLarge(RequestRejected):
    """A submission has more groups or bytes than the queue may ever hold."""

    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE


class QueueFull(RequestRejected):
    """The queue has no room now. No group of the submission was accepted: all may be sent again."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    retry_after_s: ClassVar[float] = 1.0
    """Time to wait before the next submission."""
