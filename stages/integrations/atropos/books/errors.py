"""What the gateway's books refuse, one class a situation, with the status that HTTP has for it."""

from __future__ import annotations

from http import HTTPStatus
from typing import ClassVar

from .....pipeline.errors import PenstockError

__all__ = [
    "ImplausibleRegistration",
    "NeverPacked",
    "NoTrainer",
    "QueueFull",
    "RefusedByGateway",
    "SubmissionTooLarge",
    "UnknownEnvironment",
    "UnknownLease",
]


class RefusedByGateway(PenstockError):
    """The gateway does not do what it was asked to do; nothing changed."""

    status: ClassVar[HTTPStatus] = HTTPStatus.BAD_REQUEST
    """How HTTP says so. A client of Atropos tries again at 500 and above, and gives up below."""


class NoTrainer(RefusedByGateway):
    """No trainer registered, and what was asked for depends on what it says."""

    status = HTTPStatus.CONFLICT


class UnknownEnvironment(RefusedByGateway):
    """No environment has this id: it did not register since the gateway was started, or reset."""

    status = HTTPStatus.NOT_FOUND


class UnknownLease(RefusedByGateway):
    """A batch is acknowledged that is not out: its lease expired, or it was acknowledged before."""

    status = HTTPStatus.NOT_FOUND


class ImplausibleRegistration(RefusedByGateway):
    """A trainer or an environment says a number of itself that none has, and that would be in everybody's way."""

    status = HTTPStatus.UNPROCESSABLE_ENTITY


class NeverPacked(RefusedByGateway):
    """Groups of this size can never be part of a batch, or never add up to what their environment said."""

    status = HTTPStatus.UNPROCESSABLE_ENTITY


class SubmissionTooLarge(RefusedByGateway):
    """More groups or bytes at once than the queue may ever hold."""

    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE


class QueueFull(RefusedByGateway):
    """The queue has no room now. Nothing of the submission was accepted: all of it may be sent again."""

    status = HTTPStatus.SERVICE_UNAVAILABLE

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """When there may be room."""
