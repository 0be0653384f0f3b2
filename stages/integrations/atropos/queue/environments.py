"""Registered environments: allocation, weights, timeouts, disconnection, and the depth that /status-env reports."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ..contract import EnvRegistration
from .batches import exact_subset
from .records import InvalidRegistration, Submission, UnknownEnvironment, UnpackableGroupSize
from .scheduling import MIN_SHARE

G = TypeVar("G")

MAX_BUFFERED = 16
"""Bound on the sequences that are buffered, in whole groups. Sizes that have not added up to a whole group by then do
not."""

MAX_NUMBER = 1e12
"""The largest number an environment may register: those of all environments must have a finite sum."""


@dataclass(slots=True)
class EnvBuffer(Generic[G]):
    """Groups smaller than their environment's group_size, until some of them make up a whole group."""

    group_size: int
    """Sequences of a whole group."""
    groups: list[Submission[G]] = field(default_factory=list)
    """In order of arrival."""
    sequences: int = 0
    """Of all groups."""

    def add(self, group: Submission[G]) -> None:
        """Add a group."""
        self.groups.append(group)
        self.sequences += group.sequences

    def pop_whole(self) -> list[Submission[G]]:
        """Remove and return groups that make up a whole one, in order of arrival; [] if there are too few."""
        if self.sequences < self.group_size:
            return []
        return self._pop(exact_subset((group.sequences for group in self.groups), self.group_size) or [])

    def pop_all(self) -> list[Submission[G]]:
        """Remove and return all groups."""
        return self._pop([*range(len(self.groups))])

    def _pop(self, indices: list[int]) -> list[Submission[G]]:
        popped = [self.groups.pop(index) for index in reversed(indices)][::-1]
        self.sequences -= sum(group.sequences for group in popped)
        return popped

    def check(self, sequences: int) -> None:
        """Check that it may hold `sequences` more.

        Raises:
            UnpackableGroupSize: with so many, its groups are unlikely to add up.
        """
        if self.sequences + sequences > MAX_BUFFERED * self.group_size:
            sizes = sorted({group.sequences for group in self.groups})
            raise UnpackableGroupSize(
                f"expected groups that add up to the group_size of {self.group_size}, got {self.sequences} sequences "
                f"in groups of {sizes} that do not: register with the group_size that is submitted"
            )


@dataclass(slots=True)
class Environment(Generic[G]):
    """One registered environment."""

    env_id: int
    """Its number in the order of registration."""
    name: str
    """The desired one, numbered."""
    max_token_length: int
    """Tokens of its longest sequence."""
    weight: float
    """As registered."""
    minimum: float | None
    """The smallest part of a batch, if it asked for one."""
    buffer: EnvBuffer[G]
    """Its groups that wait for others to make up a whole one."""
    last_request: float
    """The time of its last request."""
    connected: bool = True
    """False once it disconnected."""
    active: bool = True
    """Connected, with a request within the heartbeat timeout: others must share with it."""
    submitted: int = 0
    """Sequences accepted."""
    taken: int = 0
    """Sequences in batches, or taken by a pipeline."""
    queued: int = 0
    """Sequences that wait."""
    found_queue_full: bool = False
    """True if there was no room for its last submission."""

    @property
    def buffered(self) -> int:
        """Return the number of sequences that wait for others to make up a whole group."""
        return self.buffer.sequences

    def counters(self) -> dict[str, Any]:
        """Return its counters by name, as JSON has them."""
        names = "env_id", "name", "active", "submitted", "taken", "queued", "buffered"
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class Allocation:
    """The shares and minima of the active environments. Others have neither."""

    shares: Mapping[int, float]
    """Of the sequences that leave the queue, by lane; they sum to 1."""
    minima: Mapping[int, int]
    """Smallest number of sequences of a batch, by lane of those that asked for a minimum."""
    unallocated: float
    """The part of a batch that no environment has as its minimum."""
    group_sizes: frozenset[int]
    """Sequences of the groups that they registered with."""
    tokens_by_weight: float
    """The sum of longest sequence times weight."""

    @classmethod
    def of(cls, envs: Sequence[Environment[Any]], batch_size: int) -> Allocation:
        """Return the allocation among these."""
        minima = {env.env_id: max(0.0, env.minimum) for env in envs if env.minimum is not None}
        return cls(
            shares=shares({env.env_id: env.weight for env in envs}, minima),
            minima={lane: int(batch_size * minimum) for lane, minimum in minima.items()},
            unallocated=1.0 - min(1.0, sum(minima.values())),
            group_sizes=frozenset(env.buffer.group_size for env in envs),
            tokens_by_weight=sum(env.max_token_length * max(0.0, env.weight) for env in envs),
        )

    def weight(self, env: Environment[Any]) -> float:
        """Return the part of one environment among all, by tokens, as /status-env gives it."""
        if not self.tokens_by_weight:
            return MIN_SHARE
        return max(MIN_SHARE, env.max_token_length * env.weight / self.tokens_by_weight)


def shares(weights: Mapping[int, float], minima: Mapping[int, float]) -> dict[int, float]:
    """Return the share of each: by its weight, at least its minimum, and above 0. They sum to 1.

    >>> shares({0: 1.0, 1: 1.0, 2: 1.0}, {0: 0.5})
    {0: 0.5, 1: 0.25, 2: 0.25}

    Minima that sum to more than `1 - MIN_SHARE` are scaled down to that.
    """
    least = MIN_SHARE / max(1, len(weights))
    total = sum(minima.values())
    scale = min(1.0, (1 - MIN_SHARE) / total) if total else 1.0
    floors = {lane: max(least, minima.get(lane, 0.0) * scale) for lane in weights}
    fixed: dict[int, float] = {}
    while True:
        free = {lane: max(0.0, weight) for lane, weight in weights.items() if lane not in fixed}
        left, together = 1 - sum(fixed.values()), sum(free.values())
        by_weight = {lane: left * (w / together if together else 1 / len(free)) for lane, w in free.items()}
        below = {lane: floors[lane] for lane, share in by_weight.items() if share < floors[lane]}
        if not below:
            return {lane: fixed.get(lane) or by_weight[lane] for lane in weights}
        fixed |= below


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """Sequences that wait, by lane, as /status-env reports them for flow control."""

    largest: int
    """Sequences of the largest group, at least 1."""
    own: Mapping[int, int]
    """All that wait."""
    beyond: Mapping[int, int]
    """Those that are reported to others: in whole groups of the largest size, beyond the lane's minimum.

    Empty where every group has one sequence: then no group waits for others to be packed with."""

    @classmethod
    def of(
        cls, sizes: Mapping[int, Mapping[int, int]], unpackable: frozenset[int], minima: Mapping[int, int]
    ) -> QueueDepth:
        """Return the depth of lanes with groups by size; `unpackable` sizes count for their own lane alone."""
        own = {lane: sum(size * n for size, n in groups.items()) for lane, groups in sizes.items()}
        largest = max((size for groups in sizes.values() for size in groups if size not in unpackable), default=1)
        beyond: dict[int, int] = {}
        for lane, groups in sizes.items() if largest > 1 else ():
            sequences = own[lane] - sum(size * groups[size] for size in unpackable & groups.keys())
            beyond[lane] = max(0, -(-sequences // largest) * largest - minima.get(lane, 0))
        return cls(largest, own, beyond)


class Environments(Generic[G]):
    """All environments that registered. Ids are never reused: one that registers again gets a new id.

    The active ones are those that did not disconnect and sent a request within the heartbeat timeout. Only these
    restrict others: they have shares and minima, and need room.
    """

    def __init__(self, heartbeat_timeout_s: float) -> None:
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._all: list[Environment[G]] = []
        self._named: Counter[str] = Counter()
        self._active: OrderedDict[int, Environment[G]] = OrderedDict()
        """By id; the one with the latest request is last."""

    def __iter__(self) -> Iterator[Environment[G]]:
        return iter(self._all)

    def active(self) -> list[Environment[G]]:
        """Return the active ones, by id."""
        return [self._active[env_id] for env_id in sorted(self._active)]

    def others_active(self, env_id: int) -> bool:
        """Return whether any environment except this one is active."""
        return len(self._active) > (env_id in self._active)

    def find(self, env_id: int | None) -> Environment[G] | None:
        """Return the one with this id, if there is one."""
        return self._all[env_id] if env_id is not None and 0 <= env_id < len(self._all) else None

    def get(self, env_id: int) -> Environment[G]:
        """Return the one with this id.

        Raises:
            UnknownEnvironment: there is none.
        """
        found = self.find(env_id)
        if found is None:
            raise UnknownEnvironment(
                f"expected the env_id of one of the {len(self._all)} environments that registered, got {env_id}: the "
                f"gateway was restarted or reset, or this environment never registered; make it register"
            )
        return found

    def admit(self, now: float, registration: EnvRegistration) -> Environment[G]:
        """Add a new one.

        Raises:
            InvalidRegistration: a number is outside the supported range.
        """
        numbers = registration.max_token_length, registration.weight, registration.min_batch_allocation or 0.0
        if not all(-MAX_NUMBER <= number <= MAX_NUMBER for number in numbers):
            raise InvalidRegistration(
                f"expected max_token_length, weight and min_batch_allocation from {-MAX_NUMBER:g} to {MAX_NUMBER:g}, "
                f"got {numbers}"
            )
        env = Environment[G](
            env_id=len(self._all),
            name=f"{registration.desired_name}_{self._named[registration.desired_name]}",
            max_token_length=registration.max_token_length,
            weight=registration.weight,
            minimum=registration.min_batch_allocation,
            buffer=EnvBuffer(registration.group_size),
            last_request=now,
        )
        self._named[registration.desired_name] += 1
        self._all.append(env)
        self._active[env.env_id] = env
        return env

    def record_request(self, now: float, env: Environment[G]) -> bool:
        """Note a request of an environment; return whether this made it active."""
        env.last_request = now
        if not env.connected:
            return False
        returned, env.active = not env.active, True
        self._active[env.env_id] = env
        self._active.move_to_end(env.env_id)
        return returned

    def disconnect(self, env: Environment[G]) -> None:
        """Note that an environment disconnected."""
        env.connected = env.active = False
        self._active.pop(env.env_id, None)

    def expire(self, now: float) -> list[Environment[G]]:
        """Return those whose heartbeat timed out; they are no longer active."""
        expired = []
        while self._active:
            env = next(iter(self._active.values()))
            if now - env.last_request < self._heartbeat_timeout_s:
                break
            del self._active[env.env_id]
            env.active = False
            expired.append(env)
        return expired

    def buffer(self, submission: Submission[G]) -> EnvBuffer[G] | None:
        """Return the buffer of a group; None if it is not buffered.

        Groups of at least their environment's group_size are not, nor those of an environment that disconnected.
        """
        env = self.find(submission.env_id)
        if env is None or not env.connected or submission.sequences >= env.buffer.group_size:
            return None
        return env.buffer
