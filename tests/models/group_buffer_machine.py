"""`GroupBuffer` against a list of deliveries: those that wait, that left together, and that were refused.

Pieces come in any order, some twice, some of groups that have left, while time passes in steps of any length. Each
delivery of a trajectory is known by its reward, so that of two copies it is seen which one went on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.models.explore import hold
from tests.models.machine import is_broken

from penstock import TrajectoryGroup
from penstock._pipeline.accounting.repetition_sets import iter_bits
from penstock._stages.sampling.group_buffer import Flush, GroupBuffer, Why
from penstock.testing import group

__all__ = ["ASSEMBLY_RULES", "AssemblyMachine"]

WHOLE = "a group leaves when its last repetition is received, and not before"
DUE = "a group that is not whole leaves at its deadline, no sooner and no later"
ROOM = "the group that has waited longest is evicted, and none without need"
LEFT_OVER = "at the end all waiting groups leave"
COPIES = "a copy of a waiting trajectory is refused, and the first one kept"
LATE = "a piece of a group that has left is late, as long as that is remembered, and begins no group"
BEYOND = "a repetition that a group does not have is refused"
IN_ORDER = "groups leave in the order in which they became whole, due or evicted"
ONCE = "every received trajectory waits, has left or was refused, once, and with its own group"
BOUNDED = "waiting and remembered groups are never above their bounds"
COPIED = "a waiting piece is a copy"

ASSEMBLY_RULES = (WHOLE, DUE, ROOM, LEFT_OVER, COPIES, LATE, BEYOND, IN_ORDER, ONCE, BOUNDED, COPIED)

RULE_OF: dict[Why, str] = {
    "overdue": DUE,  # first: a piece of a group that should have left is refused for another reason
    "beyond": BEYOND,
    "duplicate": COPIES,
    "late": LATE,
    "whole": WHOLE,
    "evicted": ROOM,
    "left over": LEFT_OVER,
}

SIZE = 3
DEADLINE_S = 10
MAX_GROUPS = 3
MAX_BYTES = 496
"""Bytes of about six repetitions of two tokens; one of 50 tokens fills it, and one of 60 is too large."""
MAX_CLOSED = 2
NAMES = "abcdefg"
"""Names of prompts: more than may wait, besides those that are remembered to have left."""


class Expected(NamedTuple):
    """An expected result: the deliveries that leave, or the repetitions that are refused."""

    name: str
    why: Why
    what: tuple[int, ...]


@dataclass
class Waiting:
    """A group that waits: its deliveries by repetition."""

    since_s: int
    deliveries: dict[int, int] = field(default_factory=dict)
    nbytes: int = 0


class AssemblyMachine(RuleBasedStateMachine):
    """The buffer, and its deliveries."""

    assembly: type[GroupBuffer] = GroupBuffer

    def __init__(self) -> None:
        super().__init__()
        self.real = type(self).assembly(
            SIZE, deadline_s=DEADLINE_S, max_groups=MAX_GROUPS, max_bytes=MAX_BYTES, max_closed=MAX_CLOSED
        )
        self.now_s = 0
        self.waiting: dict[str, Waiting] = {}
        self.closed: list[str] = []
        self.received = 0
        self.places: Counter[str] = Counter()
        """The number of trajectories in each state, as the buffer reports them."""
        self.left: set[int] = set()
        """Deliveries that left."""

    # -- what happens ------------------------------------------------------------------------------------------------

    @rule(
        name=st.sampled_from(NAMES),
        repetitions=st.lists(st.integers(0, SIZE), min_size=1, max_size=SIZE + 1, unique=True),
        length=st.sampled_from([1, 2, 3, 4, 50, 60]),
        later_s=st.sampled_from([0, 1, 4]),
    )
    def deliver(self, name: str, repetitions: list[int], length: int, later_s: int) -> None:
        self.now_s += later_s
        numbers = range(self.received, self.received + len(repetitions))
        piece = group(
            completion_lengths=[length] * len(repetitions),
            prompt_length=1,
            instance_id=name,
            rollout_ids=repetitions,
            rewards=list(numbers),
        )
        self.received += len(repetitions)
        expected = [
            *self._expected_to_expire(),
            *self._expected_of(piece, dict(zip(repetitions, numbers, strict=True))),
        ]
        self._compare(self.real.take(piece, self.now_s), expected)
        self._check_copied(piece)

    @rule(names=st.permutations(NAMES), repetition=st.integers(0, SIZE - 1))
    def crowd(self, names: list[str], repetition: int) -> None:
        """Deliver one piece of each prompt: some groups have to be evicted."""
        for name in names:
            self.deliver(name, [repetition], 1, 0)

    @rule(later_s=st.sampled_from([1, 4, 10]))
    def time_passes(self, later_s: int) -> None:
        self.now_s += later_s
        self._compare(self.real.expire(self.now_s), self._expected_to_expire())

    @rule()
    def wake_at_its_deadline(self) -> None:
        due_s = min((each.since_s + DEADLINE_S for each in self.waiting.values()), default=None)
        hold(DUE, self.real.due_s == (np.inf if due_s is None else due_s), f"{self.real.due_s}, but {due_s}")
        if due_s is not None:
            self.now_s = max(self.now_s, due_s)
            self._compare(self.real.expire(self.now_s), self._expected_to_expire())

    def teardown(self) -> None:
        """End the stream."""
        if is_broken():
            return
        self._compare(self.real.finish(), [self._closes(name, "left over") for name in list(self.waiting)])
        hold(LEFT_OVER, self.real.groups == self.real.nbytes == 0, self.real)

    # -- what should -------------------------------------------------------------------------------------------------

    def _expected_of(self, piece: TrajectoryGroup, numbers: dict[int, int]) -> list[Expected]:
        name = piece.instance_id
        here = self.waiting[name].deliveries if name in self.waiting else {}
        why: dict[int, Why] = {}
        for repetition in numbers:
            if repetition >= SIZE:
                why[repetition] = "beyond"
            elif repetition in here:
                why[repetition] = "duplicate"
            elif name in self.closed:
                why[repetition] = "late"
        refused = [
            Expected(name, kind, tuple(sorted(repetition for repetition in why if why[repetition] == kind)))
            for kind in set(why.values())
        ]
        fresh = {repetition: number for repetition, number in numbers.items() if repetition not in why}
        return refused + (self._expected_to_gather(piece, fresh) if fresh else [])

    def _expected_to_gather(self, piece: TrajectoryGroup, fresh: dict[int, int]) -> list[Expected]:
        name = piece.instance_id
        grown = self.waiting.setdefault(name, Waiting(self.now_s))
        grown.deliveries |= fresh
        if len(grown.deliveries) == SIZE:
            return [self._closes(name, "whole")]
        grown.nbytes += piece.select(np.isin(piece.rollout_ids, list(fresh))).nbytes
        if grown.nbytes > MAX_BYTES:
            return [self._closes(name, "evicted")]
        evicted: list[Expected] = []
        while len(self.waiting) > MAX_GROUPS or sum(each.nbytes for each in self.waiting.values()) > MAX_BYTES:
            evicted.append(self._closes(next(iter(self.waiting)), "evicted"))
        return evicted

    def _expected_to_expire(self) -> list[Expected]:
        due = [name for name, each in self.waiting.items() if each.since_s + DEADLINE_S <= self.now_s]
        return [self._closes(name, "overdue") for name in due]

    def _closes(self, name: str, why: Why) -> Expected:
        self.closed = [*self.closed, name][-MAX_CLOSED:]
        return Expected(name, why, tuple(sorted(self.waiting.pop(name).deliveries.values())))

    # -- whether it did ----------------------------------------------------------------------------------------------

    def _compare(self, parted: Sequence[Flush], expected: Sequence[Expected]) -> None:
        reported = [self._reported(parting) for parting in parted]
        waiting = sum(gathering.mask.bit_count() for gathering in self.real._waiting.values())
        hold(
            ONCE, self.places.total() + waiting == self.received, f"{self.places}, {waiting} waiting of {self.received}"
        )
        for why, name in RULE_OF.items():
            of_kind = [sorted(each for each in some if each.why == why) for some in (reported, expected)]
            hold(name, of_kind[0] == of_kind[1], f"{of_kind[0]}, but {of_kind[1]}")
        leaving = [
            [each for each in some if each.why not in {"duplicate", "late", "beyond"}] for some in (reported, expected)
        ]
        hold(IN_ORDER, leaving[0] == leaving[1], f"{leaving[0]}, but {leaving[1]}")
        hold(ONCE, self.real.groups == len(self.waiting), f"{self.real!r}, but {self.waiting}")

    def _reported(self, parting: Flush) -> Expected:
        name, repetitions = parting.group.instance_id, list(iter_bits(parting.mask))
        self.places[parting.why] += len(repetitions)
        if not parting.pieces:
            return Expected(name, parting.why, tuple(repetitions))
        rows = [row for piece in parting.pieces for row in piece]
        hold(ONCE, sorted(row.id.repetition_id for row in rows) == repetitions, f"{rows} leave as {repetitions}")
        hold(ONCE, {row.id.group for row in rows} == {parting.group}, f"{rows} leave as {parting.group}")
        numbers = sorted(int(row.reward) for row in rows)
        hold(ONCE, self.left.isdisjoint(numbers), f"{numbers} leave again")
        self.left.update(numbers)
        return Expected(name, parting.why, tuple(numbers))

    def _check_copied(self, piece: TrajectoryGroup) -> None:
        gathering = self.real._waiting.get(piece.id)
        kept = gathering.pieces if gathering else []
        hold(COPIED, not any(np.shares_memory(piece.tokens, each.tokens) for each in kept), piece)

    @invariant()
    def bounds_hold(self) -> None:
        real = self.real
        hold(BOUNDED, real.groups <= MAX_GROUPS and real.nbytes <= MAX_BYTES and real.closed <= MAX_CLOSED, real)
        hold(BOUNDED, real.nbytes == sum(each.nbytes for each in self.waiting.values()), real)
        held = sum(piece.nbytes for gathering in real._waiting.values() for piece in gathering.pieces)
        hold(BOUNDED, held == real.nbytes, f"{held} bytes are held, and {real.nbytes} counted")
