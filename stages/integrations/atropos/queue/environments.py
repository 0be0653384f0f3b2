"""Environments: who registered, who is still heard of, and what each holds back to make up whole groups."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ..contract import EnvRegistration
from .exact_sums import first_summing_to, fitting
from .records import EnvStatistics, InvalidRegistration, Receipt, Submission, UnknownEnvironment, UnpackableGroupSize

__all__ = ["DEFAULT_HEARTBEAT_TIMEOUT_S", "Buffer", "Environment", "Environments"]

G = TypeVar("G")

MOST_BUFFERED = 16
"""So many whole groups' sequences may wait for others that would complete a group. What has not added up by then, with
sizes of less than a group each, is of sizes that do not."""


DEFAULT_HEARTBEAT_TIMEOUT_S = 60.0
"""An environment asks for its status every 0.1 to 1 s, unless its event loop is held up."""

MOST_SAID = 1e12
"""No environment says a larger number of itself: those of all have to have a sum."""


@dataclass(slots=True)
class Buffer(Generic[G]):
    """Groups of other sizes than their environment's, until some of them make up its size."""

    group_size: int
    """Sequences of a whole group."""
    groups: list[Submission[G]] = field(default_factory=list)
    """In order of arrival."""

    @property
    def sequences(self) -> int:
        """All that wait."""
        return sum(group.sequences for group in self.groups)

    def is_whole(self, group: Submission[G]) -> bool:
        """Whether a group has to wait for no others."""
        return group.sequences >= self.group_size

    def add(self, group: Submission[G]) -> list[Submission[G]]:
        """A group arrived; returns those that make up a whole one with it, in order of arrival."""
        self.groups.append(group)
        whole = self._whole()
        released = [group for index, group in enumerate(self.groups) if index in whole]
        self.groups = [group for index, group in enumerate(self.groups) if index not in whole]
        return released

    def _whole(self) -> set[int]:
        """Where groups are that make up a whole one: those that fit from the front, or else the newest that will do."""
        sizes = [group.sequences for group in self.groups]
        chosen = fitting(sizes, self.group_size)
        if sum(sizes[index] for index in chosen) == self.group_size:
            return set(chosen)
        newest = first_summing_to(sizes[::-1], self.group_size) or []
        return {len(sizes) - 1 - index for index in newest}

    def check(self) -> None:
        """Whether what waits is still likely to be completed.

        Raises:
            UnpackableGroupSize: it is too much for that.
        """
        if self.sequences > MOST_BUFFERED * self.group_size:
            sizes = sorted({group.sequences for group in self.groups})
            raise UnpackableGroupSize(
                f"expected groups that add up to the group_size of {self.group_size}, got {self.sequences} sequences "
                f"in groups of {sizes} that do not: register with the group_size that is submitted"
            )


@dataclass(slots=True)
class Environment(Generic[G]):
    """One registered environment."""

    env_id: int
    """Its place among all that registered."""
    name: str
    """The desired one, numbered."""
    max_token_length: int
    """Tokens of its longest sequence."""
    weight: float
    """As it registered."""
    minimum: float | None
    """The least part of a batch, if it asked for one."""
    buffer: Buffer[G]
    """What it submitted in other sizes."""
    heard: float
    """When it last asked or submitted anything."""
    connected: bool = True
    """It did not say goodbye."""
    silent: bool = False
    """Nothing was heard of it for too long."""
    submitted: int = 0
    """Sequences that were accepted."""
    taken: int = 0
    """Sequences that were handed out."""
    rejected: int = 0
    """Submissions for which there was no room."""
    crowded_out: bool = False
    """There was no room for its last one."""

    def statistics(self, now: float, queued: int) -> EnvStatistics:
        """For metrics; `queued` sequences of it wait."""
        return EnvStatistics(
            env_id=self.env_id,
            name=self.name,
            connected=self.connected,
            silent_s=now - self.heard,
            queued=queued,
            buffered=self.buffer.sequences,
            submitted=self.submitted,
            taken=self.taken,
            rejected=self.rejected,
        )


class Environments(Generic[G]):
    """All that registered. Ids are never used again: one that comes back is another one."""

    def __init__(self, heartbeat_timeout_s: float) -> None:
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._all: list[Environment[G]] = []
        self._named: Counter[str] = Counter()
        self._by_silence: OrderedDict[int, None] = OrderedDict()
        """Those that count, the one that was heard last at the end."""

    def __iter__(self) -> Iterator[Environment[G]]:
        return iter(self._all)

    def counted(self) -> list[Environment[G]]:
        """Those that others have to reckon with, by id."""
        return [self._all[env_id] for env_id in sorted(self._by_silence)]

    def others(self, env_id: int) -> int:
        """How many count besides this one."""
        return len(self._by_silence) - (env_id in self._by_silence)

    def find(self, env_id: int | None) -> Environment[G] | None:
        """The one with this id, if there is one."""
        return self._all[env_id] if env_id is not None and 0 <= env_id < len(self._all) else None

    def get(self, env_id: int) -> Environment[G]:
        """The one with this id.

        Raises:
            UnknownEnvironment: there is none.
        """
        found = self.find(env_id)
        if found is None:
            raise UnknownEnvironment(
                f"expected the env_id of one of the {len(self._all)} environments that registered, got {env_id}: the "
                f"gateway was restarted or reset, or this environment never registered; have it register"
            )
        return found

    def admit(self, now: float, said: EnvRegistration) -> Environment[G]:
        """A new one.

        Raises:
            InvalidRegistration: it says numbers of itself that cannot be reckoned with.
        """
        numbers = said.max_token_length, said.weight, said.min_batch_allocation or 0.0
        if not all(-MOST_SAID <= number <= MOST_SAID for number in numbers):
            raise InvalidRegistration(
                f"expected max_token_length, weight and min_batch_allocation from {-MOST_SAID:g} to {MOST_SAID:g}, "
                f"got {numbers}"
            )
        env = Environment[G](
            env_id=len(self._all),
            name=f"{said.desired_name}_{self._named[said.desired_name]}",
            max_token_length=said.max_token_length,
            weight=said.weight,
            minimum=said.min_batch_allocation,
            buffer=Buffer(max(1, said.group_size)),
            heard=now,
        )
        self._named[said.desired_name] += 1
        self._all.append(env)
        self._by_silence[env.env_id] = None
        return env

    def hear(self, now: float, env: Environment[G]) -> bool:
        """It is there; returns whether it counts now and did not before."""
        env.heard = now
        if not env.connected:
            return False
        returned, env.silent = env.silent, False
        self._by_silence[env.env_id] = None
        self._by_silence.move_to_end(env.env_id)
        return returned

    def disconnect(self, env: Environment[G]) -> None:
        """It left."""
        env.connected = False
        self._by_silence.pop(env.env_id, None)

    def planned(
        self, submissions: Sequence[Submission[G]]
    ) -> tuple[dict[int, Buffer[G]], list[Submission[G]], Receipt]:
        """What buffers would hold, what would be queued, and what would be said of it. Nothing is changed.

        A group that is larger than its environment's waits for no others, nor does any of one that left: they would
        wait in vain.

        Raises:
            UnpackableGroupSize: a buffer would hold too much.
        """
        buffers: dict[int, Buffer[G]] = {}
        queued: list[Submission[G]] = []
        held_back, buffer_size = 0, None
        for submission in submissions:
            env = self.find(submission.env_id)
            if env is None or env.buffer.is_whole(submission) or not env.connected:
                queued.append(submission)
                continue
            buffer = buffers.setdefault(env.env_id, Buffer(env.buffer.group_size, list(env.buffer.groups)))
            queued += buffer.add(submission)
            held_back, buffer_size = held_back + 1, buffer.sequences
        for buffer in buffers.values():
            buffer.check()
        return buffers, queued, Receipt(len(submissions), held_back, buffer_size)

    def expire(self, now: float) -> list[Environment[G]]:
        """Those that fall silent now."""
        fallen = []
        while self._by_silence:
            env = self._all[next(iter(self._by_silence))]
            if now - env.heard < self._heartbeat_timeout_s:
                break
            env.silent = True
            del self._by_silence[env.env_id]
            fallen.append(env)
        return fallen
