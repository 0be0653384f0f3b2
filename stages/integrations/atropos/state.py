"""Books: what the gateway knows. Trainers, environments, groups that wait, batches that are out.

It decides and counts; it knows nothing about HTTP, clocks or event loops, nor about what is in a group. Whatever is
accepted is handed out exactly once, unless a lease on it expires: then it is handed out again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from .habits import Habits
from .records import (
    Batch,
    EnvAdmitted,
    EnvRegistration,
    EnvStatistics,
    EnvStatus,
    Info,
    Receipt,
    Status,
    Submission,
    TrainerRegistration,
    WandbInfo,
)

__all__ = ["Books", "Habits"]

G = TypeVar("G")

DEFAULT_CAPACITY = 4_096
DEFAULT_CAPACITY_BYTES = 2**30
DEFAULT_SILENCE_S = 60.0


class Books(Generic[G]):
    """The gateway's books.

    `now` is a clock's reading in seconds that never goes back: the caller's `time.monotonic()`.

    Args:
        habits: which habits of the original are kept.
        capacity: groups that may wait, be formed into batches, or be out on a lease; None for any number.
        capacity_bytes: bytes of those; None for any number.
        silence_s: an environment that is not heard of for so long does not count until it is.
    """

    def __init__(
        self,
        habits: Habits | None = None,
        *,
        capacity: int | None = DEFAULT_CAPACITY,
        capacity_bytes: int | None = DEFAULT_CAPACITY_BYTES,
        silence_s: float = DEFAULT_SILENCE_S,
    ) -> None:
        self.latest: Submission[G] | None = None
        """The group that was queued last."""
        self.step = 0
        """The trainer's step: `batch` counts it; whoever takes groups for a pipeline sets it."""

    def register_trainer(self, registration: TrainerRegistration) -> int:
        """A trainer is there; returns the number it is known by."""
        raise NotImplementedError

    def register_env(self, now: float, registration: EnvRegistration) -> EnvAdmitted | None:
        """An environment is there; None while no trainer asked for a batch yet: it is to ask again.

        Raises:
            NeverPacked: groups of its size can never be in a batch.
        """
        raise NotImplementedError

    def disconnect_env(self, env_id: int) -> None:
        """An environment leaves; what it submitted stays.

        Raises:
            UnknownEnvironment: there is no such environment.
        """
        raise NotImplementedError

    def wandb_info(self) -> WandbInfo:
        """Where environments log."""
        raise NotImplementedError

    def info(self) -> Info:
        """What environments ask before they begin."""
        raise NotImplementedError

    def status(self, *, downstream: int = 0) -> Status:
        """Where the run is; `downstream` as in `env_status`."""
        raise NotImplementedError

    def env_status(self, now: float, env_id: int, *, downstream: int = 0) -> EnvStatus:
        """What an environment controls its flow with.

        `downstream` is how many groups that `take` returned still wait in the pipeline's channel, first in, first out:
        the last so many that were taken are counted as if they waited here.

        Raises:
            NoTrainer: no trainer registered.
            UnknownEnvironment: there is no such environment.
        """
        raise NotImplementedError

    def submit(self, now: float, submissions: Sequence[Submission[G]], *, digest: bytes | None = None) -> Receipt:
        """Accept all submissions, or none.

        `digest` is of the bytes that brought them, as `undelivered` is told it.

        Raises:
            QueueFull: there is no room now; the original client tries again.
            SubmissionTooLarge: there will never be room for all of them at once.
            NeverPacked: one of them can never be part of a batch.
        """
        raise NotImplementedError

    def undelivered(self, now: float, digest: bytes, receipt: Receipt) -> None:
        """Who submitted the body of `digest` went away before it could be told `receipt`: it will submit it again.

        The same body is answered with `receipt` once then, and is not accepted twice. Bodies whose answers were
        delivered are never remembered: two equal ones are two submissions.
        """
        raise NotImplementedError

    def batch(self, now: float, *, lease_s: float | None = None) -> Batch[G] | None:
        """The next batch, or None while there is none.

        With `lease_s` it has to be acknowledged within that time, or it is handed out again, before any other.

        Raises:
            NoTrainer: no trainer registered.
        """
        raise NotImplementedError

    def acknowledge(self, now: float, lease: int) -> None:
        """The batch of this lease has arrived.

        Raises:
            UnknownLease: it is not out: it was acknowledged before, or is to be handed out again.
        """
        raise NotImplementedError

    def expire(self, now: float) -> None:
        """What was due until `now` happens: leases end, environments fall silent. All that is told `now` does this too."""
        raise NotImplementedError

    def take(self, now: float) -> Submission[G] | None:
        """The next group for a pipeline, or None while there is none.

        Environments have their parts by weight, and at least their minimum, in sequences: batches, group sizes and
        minima are counted in sequences, and an environment whose sequences are long is not to have fewer for that.
        Whoever has groups waiting gets its part, however many others have; what it did not use it does not save up.
        As `batch` does, it lets environments in.
        """
        raise NotImplementedError

    def reset(self) -> None:
        """Be as new: no trainer, no environments, no groups."""
        raise NotImplementedError

    def stuck(self) -> list[str]:
        """What will not move by itself: one sentence for each group size that nothing can be made of."""
        raise NotImplementedError

    def statistics(self, now: float) -> list[EnvStatistics]:
        """Every environment, by id."""
        raise NotImplementedError
