"""The rules of the original server, slowly: plain lists, read from the front each time, one rule a function.

What the gateway's queue do with all habits of the original is held against this. It was itself held against the
original, by the same random requests to both.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

__all__ = ["Env", "Group", "Original", "newest_first", "total"]


@dataclass(frozen=True)
class Group:
    """A group: its number, how many sequences it has, and whose it is."""

    number: int
    size: int
    env_id: int | None = None


@dataclass
class Env:
    max_token_length: int
    weight: float
    group_size: int
    minimum: float | None = None
    connected: bool = True
    buffer: list[Group] = field(default_factory=list)


@dataclass
class Original:
    """The original's state, after a trainer registered and asked for its first batch."""

    batch_size: int
    step: int = 0
    envs: list[Env] = field(default_factory=list)
    queue: list[Group] = field(default_factory=list)
    ready: list[list[Group]] = field(default_factory=list)

    def submit(self, group: Group) -> int | None:
        """What is left in the buffer it went to, or None where it went to the queue."""
        if group.env_id is None or group.env_id >= len(self.envs) or group.size == self.envs[group.env_id].group_size:
            self.queue.append(group)
            return None
        env = self.envs[group.env_id]
        env.buffer.append(group)
        released = first_fit(env.buffer, env.group_size) or newest_first(env.buffer, env.group_size)
        self.queue += released
        env.buffer = [group for group in env.buffer if group not in released]
        return total(env.buffer)

    def batch(self) -> list[Group] | None:
        while not self.ready and (formed := self.formed()):
            self.ready.append(formed)
            while formed := self.formed():
                self.ready.append(formed)
            self.step += len(self.ready)
        return self.ready.pop() if self.ready else None

    def formed(self) -> list[Group] | None:
        batch = self.packed_beside_minima() if self.minima() else self.packed()
        if batch is not None:
            self.queue = [group for group in self.queue if group not in batch]
        return batch

    def largest(self) -> int:
        return max((group.size for group in self.queue), default=1)

    def minima(self) -> dict[int | None, float]:
        return {
            env_id: env.minimum for env_id, env in enumerate(self.envs) if env.connected and env.minimum is not None
        }

    def packed(self) -> list[Group] | None:
        packs = packs_of(self.queue, self.largest(), lambda group: group.size)
        taken: list[Group] = []
        for group in [group for pack in packs for group in pack]:
            taken.append(group)
            if total(taken) >= self.batch_size:
                return taken if total(taken) == self.batch_size else None
        return None

    def packable(self) -> list[Group]:
        known = [group for group in self.queue if group.env_id is not None]
        packs = packs_of(known, self.largest(), lambda group: (group.env_id, group.size))
        return [group for group in self.queue if any(group in pack for pack in packs)]

    def packed_beside_minima(self) -> list[Group] | None:
        packable = self.packable()
        own: dict[int | None, list[Group]] = {
            env_id: [group for group in packable if group.env_id == env_id] for env_id in range(len(self.envs))
        }
        least = {env_id: int(self.batch_size * minimum) for env_id, minimum in self.minima().items()}
        if any(wanted > 0 and not own[env_id] for env_id, wanted in least.items()):
            return None
        together = sum(least.values())
        if together > self.batch_size:
            least = {
                env_id: max(
                    min((group.size for group in own[env_id]), default=0), int(wanted * self.batch_size / together)
                )
                for env_id, wanted in least.items()
                if wanted > 0
            }
        taken: list[Group] = []
        for env_id, wanted in least.items():
            got = 0
            for group in own[env_id]:
                if got >= wanted:
                    break
                if self._fits(taken, group):
                    taken.append(group)
                    got += group.size
        for group in packable:
            if group not in taken and self._fits(taken, group):
                taken.append(group)
        return taken if total(taken) == self.batch_size else None

    def _fits(self, taken: list[Group], group: Group) -> bool:
        return total(taken) + group.size <= self.batch_size

    def env_status(self, env_id: int) -> dict[str, float]:
        env = self.envs[env_id]
        connected = [other for other in self.envs if other.connected]
        by_weight = sum(other.max_token_length * max(0.0, other.weight) for other in connected)
        largest = self.largest()
        queued = Counter[int | None]()
        for group in self.queue:
            queued[group.env_id] += group.size
        others = 0
        for other_id, sequences in queued.items():
            if other_id != env_id and largest > 1:
                least = int(self.batch_size * self.minima().get(other_id, 0.0))
                others += max(0, math.ceil(sequences / largest) * largest - least)
        size = max([env.group_size, *(group.size for group in self.queue if group.env_id == env_id)])
        return {
            "current_step": self.step,
            "queue_size": (queued[env_id] + others) // size,
            "unallocated_fraction": 1 - min(1.0, sum(other.minimum or 0.0 for other in connected)),
            "self_queue_size": queued[env_id] // size,
            "max_group_size": largest,
            "env_weight": max(0.01, env.max_token_length * env.weight / by_weight),
        }


def packs_of(groups: list[Group], full: int, key: Callable[[Group], object]) -> list[list[Group]]:
    """Groups of the same key, as many as make `full` sequences; in the order in which they are complete."""
    unfinished: dict[object, list[Group]] = {}
    packs: list[list[Group]] = []
    for group in groups:
        pack = unfinished.setdefault(key(group), [])
        pack.append(group)
        if total(pack) == full:
            packs.append(unfinished.pop(key(group)))
    return packs


def first_fit(groups: list[Group], wanted: int) -> list[Group]:
    """From the front, whatever still fits; nothing unless that is `wanted`."""
    fitting: list[Group] = []
    for group in groups:
        if total(fitting) + group.size <= wanted:
            fitting.append(group)
    return fitting if total(fitting) == wanted else []


def newest_first(groups: list[Group], wanted: int) -> list[Group]:
    """Of all that sum to `wanted`, those with the newest group, of these those with the newest next to that, …"""

    @cache
    def found(among: int, wanted: int) -> list[Group] | None:
        """Of the first so many."""
        if wanted == 0:
            return []
        for index in reversed(range(among)):
            group = groups[index]
            if group.size <= wanted and (rest := found(index, wanted - group.size)) is not None:
                return [*rest, group]
        return None

    return found(len(groups), wanted) or []


def total(groups: list[Group]) -> int:
    return sum(group.size for group in groups)
