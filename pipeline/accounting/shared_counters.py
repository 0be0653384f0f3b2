"""The counters of a worker: trajectories that it admitted and ended, in a page of memory that outlives it."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, TypeAlias, get_args

import numpy as np

from ..._schemas.errors import ProtocolMismatch

EndState: TypeAlias = Literal["trained", "filtered", "stale", "rejected", "failed", "lost", "unfinished"]
"""The end states of a trajectory.

trained: the optimizer step that used it is done · filtered: dropped by choice (zero variance, a length limit) ·
stale: older than the lag bound · rejected: refused as invalid · failed: its environment or reward raised or ran out of
time · lost: the process that held it died, or a failure ended the run · unfinished: the run ended, as it should, before
it was needed.
"""

END_STATES: tuple[EndState, ...] = get_args(EndState)

OTHER_REASONS = "other reasons"
"""The reason of those that are not distinguished, because there are too many."""

UNREPORTED = "reason not reported"
"""The reason of trajectories that ended in a worker which has not reported their reason, or was killed before."""

COUNTS = 2 + len(END_STATES)
"""Counts of a worker: of what it admitted, of rollouts that succeeded, and of each end state."""

MOST_ADMITTED = 2**20
"""Trajectories that a worker admits between two reports, which are half a second apart; no worker admits so many."""

COUNTERS_BYTES = 8 * (COUNTS + 1)


class SharedCounters:
    """A worker's counters in a page of shared memory: one writer, the worker; readable after it was killed.

    Words, each a signed 64-bit integer: admitted, succeeded, then one for each end state that the worker itself
    established. The last is written by the reader, for a worker that begins: the last optimizer step of the run.
    """

    __slots__ = ("_words", "reasons", "taken_over")

    def __init__(self, page: mmap.mmap | memoryview | bytearray) -> None:
        self._words = memoryview(page)[:COUNTERS_BYTES].cast("q")
        self.taken_over: int = 0
        """Trajectories that the reader's ledger has taken over; counted by the reader."""
        self.reasons: Mapping[str, Mapping[str, int]] = {}
        """The reasons of ends within the worker, by state, as far as it has reported them; set by the reader."""

    @property
    def admitted(self) -> int:
        """Trajectories that the worker admitted."""
        return self._words[0]

    @property
    def succeeded(self) -> int:
        """Rollouts that succeeded in the worker."""
        return self._words[1]

    def ended(self, state: EndState) -> int:
        """Return the number of trajectories that ended in `state` within the worker."""
        return self._words[2 + END_STATES.index(state)]

    @staticmethod
    def added_up(all_counters: Sequence[SharedCounters]) -> list[int]:
        """Return the successful rollouts of all workers, and the trajectories that ended in them by END_STATES."""
        pages = b"".join([counters._words for counters in all_counters])  # noqa: SLF001 (of its own class)
        added: list[int] = np.frombuffer(pages, np.int64).reshape(-1, COUNTS + 1)[:, 1:COUNTS].sum(axis=0).tolist()
        return added

    @property
    def step(self) -> int:
        """The last optimizer step of the run."""
        return self._words[2 + len(END_STATES)]

    @step.setter
    def step(self, step: int) -> None:
        self._words[2 + len(END_STATES)] = step

    @property
    def in_flight(self) -> int:
        """Trajectories that the worker holds, or that are on their way to the reader.

        The ends are read before the admissions, so that the result is never too low while the worker counts.
        """
        ended = sum(self.ended(state) for state in END_STATES)
        return self.admitted - ended - self.taken_over

    def ends(self) -> Iterator[tuple[EndState, str, int]]:
        """Yield counts of ends within the worker, by state and reason: a reported one, or `UNREPORTED`."""
        for state in END_STATES:
            reported = self.reasons.get(state, {})
            unreported = self.ended(state) - sum(reported.values())
            for reason, count in reported.items():
                yield state, reason, count
            if unreported:
                yield state, UNREPORTED, unreported

    def admit(self, count: int) -> None:
        """Count `count` admissions."""
        self._words[0] += count

    def succeed(self, count: int) -> None:
        """Count `count` rollouts that succeeded."""
        self._words[1] += count

    def end(self, state: EndState, count: int) -> None:
        """Count `count` ends."""
        self._words[2 + END_STATES.index(state)] += count

    def counts(self) -> list[int]:
        """Return all words but the step, for a reader that has no access to the page."""
        return list(self._words[:-1])

    def report(self, counts: list[int], reasons: Mapping[str, Mapping[str, int]]) -> None:
        """Take in the reasons of a report; the `counts` are read where they are.

        Raises:
            ProtocolMismatch: the reasons count more trajectories than have ended in the worker.
        """
        del counts
        _check_reasons(reasons, self.counts())
        self.reasons = reasons

    def close(self) -> None:
        """Release the page, so that it can be unmapped."""
        self._words.release()


class ReportedCounters(SharedCounters):
    """The counters of a worker whose page cannot be read here, as of its last report.

    Records may arrive before the report that counts them; what has arrived was admitted.
    """

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(bytearray(COUNTERS_BYTES))

    @property
    def admitted(self) -> int:
        """Trajectories that the worker admitted: those that it reported, or those that arrived or ended, if more."""
        return max(self._words[0], self.taken_over + sum(self.ended(state) for state in END_STATES))

    def report(self, counts: list[int], reasons: Mapping[str, Mapping[str, int]]) -> None:
        """Take in a report.

        Raises:
            ProtocolMismatch: no worker counts so.
        """
        _check_counts(counts, self.counts())
        _check_reasons(reasons, counts)
        for index, count in enumerate(counts):
            self._words[index] = count
        self.reasons = reasons


def _check_counts(counts: list[int], before: list[int]) -> None:
    if len(counts) != len(before):
        raise ProtocolMismatch(f"expected a report of {len(before)} counts, got {len(counts)}")
    # A worker has counts that never fall; it trains nothing; it ends no more than it has admitted, and a rollout that
    # succeeds counts twice at most, when it ends and when it is sent. No worker admits so many between two reports.
    admitted, succeeded, *ended = counts
    plausible = (
        all(count >= earlier for count, earlier in zip(counts, before, strict=True))
        and not ended[END_STATES.index("trained")]
        and succeeded <= 2 * admitted
        and sum(ended) <= admitted <= before[0] + MOST_ADMITTED
    )
    if not plausible:
        raise ProtocolMismatch(f"expected counts that a worker may have after {before}, got {counts}")


def _check_reasons(reasons: Mapping[str, Mapping[str, int]], counts: list[int]) -> None:
    for state, ended in zip(END_STATES, counts[2:], strict=True):
        count = sum(reasons.get(state, {}).values())
        if count > ended:
            raise ProtocolMismatch(f"expected reasons of {ended} trajectories that are {state}, got {count}")
