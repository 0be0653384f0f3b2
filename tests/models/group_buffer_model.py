"""The assembly of a few groups, small enough for an exhaustive search: every order of pieces, copies and deadlines.

Pieces of some prompts come one by one, each up to twice, while time passes in steps between them. Beside the real
`GroupBuffer` only numbers are kept: how often each trajectory has come, has left and was refused. A rule is checked in
every state; RULES lists them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

from tests.models.explore import Moments, Step, explore, hold

from penstock import TrajectoryGroup
from penstock._pipeline.accounting.repetition_sets import iter_bits
from penstock._stages.sampling.group_buffer import Flush, GroupBuffer
from penstock.testing import group

__all__ = ["RULES", "PendingGroup", "states"]

SIZE = 2
"""Repetitions of a whole group."""
DEADLINE_S = 2

CONSERVED = "a trajectory waits, has left and was refused as often as it was received"
ONCE = "no trajectory of a remembered group leaves twice"
WHOLE = "a whole group does not wait, and no other leaves as whole"
DUE = "no group waits beyond its deadline, and none leaves as overdue before it"
BOUNDED = "waiting and remembered groups are never above their bounds"
CLOSED = "a group that is remembered to have left does not wait"
REST = "at the end no group waits"

RULES = (CONSERVED, ONCE, WHOLE, DUE, BOUNDED, CLOSED, REST)


@cache
def _piece(prompt: int, repetitions: tuple[int, ...]) -> TrajectoryGroup:
    lengths = [1] * len(repetitions)
    return group(completion_lengths=lengths, prompt_length=1, instance_id=str(prompt), rollout_ids=repetitions)


class PendingGroup:
    """The assembly, its deliveries, and their outcomes."""

    def __init__(
        self, prompts: int, *, most: int, ticks: int, max_groups: int, max_closed: int, assembly: type[GroupBuffer]
    ) -> None:
        self.real = assembly(
            SIZE, deadline_s=DEADLINE_S, max_groups=max_groups, max_bytes=10_000, max_closed=max_closed
        )
        self.prompts = prompts
        self.most = most
        """The number of deliveries of each piece, at most."""
        self.ticks = ticks
        self.max_groups = max_groups
        self.max_closed = max_closed
        self.now_s = 0
        self.ended = False
        self.received = [[0] * SIZE for _ in range(prompts)]
        self.left = [[0] * SIZE for _ in range(prompts)]
        self.refused = [[0] * SIZE for _ in range(prompts)]

    # -- what may happen ---------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[Step]:
        """Yield the steps that are possible next."""
        if self.ended:
            return
        for prompt in range(self.prompts):
            for repetition in range(SIZE):
                if self.received[prompt][repetition] < self.most:
                    yield "deliver", prompt, (repetition,)
            if max(self.received[prompt]) < self.most:
                yield "deliver", prompt, (0, 1)
        if self.now_s < self.ticks:
            yield ("tick",)
        yield ("end",)

    def deliver(self, prompt: int, repetitions: tuple[int, ...]) -> None:
        """Deliver a piece."""
        for repetition in repetitions:
            self.received[prompt][repetition] += 1
        self._note(self.real.take(_piece(prompt, repetitions), self.now_s))

    def tick(self) -> None:
        """Let a second pass."""
        self.now_s += 1
        self._note(self.real.expire(self.now_s))

    def end(self) -> None:
        """End the stream."""
        self.ended = True
        self._note(self.real.finish())

    # -- what must hold ----------------------------------------------------------------------------------------------

    def _note(self, parted: Sequence[Flush]) -> None:
        for group_id, mask, why, pieces in parted:
            where = self.left if pieces else self.refused
            for repetition in iter_bits(mask):
                where[int(group_id.instance_id)][repetition] += 1
            hold(WHOLE, (why == "whole") == (bool(pieces) and mask.bit_count() == SIZE), f"{mask:b} of {why}")
            hold(DUE, why != "overdue" or self.now_s >= DEADLINE_S, why)

    def check(self) -> None:
        """Check the rules that hold in every state."""
        real = self.real
        waiting = {int(name.instance_id): each for name, each in real._waiting.items()}
        for prompt in range(self.prompts):
            there = waiting[prompt].mask if prompt in waiting else 0
            for repetition in range(SIZE):
                received, left, refused = (
                    each[prompt][repetition] for each in (self.received, self.left, self.refused)
                )
                description = (
                    f"{prompt}/{repetition} came {received} times, left {left}, was refused {refused}: {real!r}"
                )
                hold(CONSERVED, received == left + refused + (there >> repetition & 1), description)
                hold(ONCE, left <= 1 or self.max_closed < self.prompts, description)
        hold(DUE, all(each.due_s > self.now_s for each in waiting.values()), real)
        hold(WHOLE, all(each.mask.bit_count() < SIZE for each in waiting.values()), real)
        hold(BOUNDED, real.groups <= self.max_groups and real.closed <= self.max_closed, real)
        hold(CLOSED, real._closed.keys().isdisjoint(real._waiting), real)
        hold(REST, not self.ended or real.groups == real.nbytes == 0, real)


def states(
    prompts: int, *, most: int, ticks: int, max_groups: int, max_closed: int, assembly: type[GroupBuffer] = GroupBuffer
) -> int:
    """Check every state; return their number.

    Raises:
        Broken: a rule does not hold in one of them.
    """
    moments: Moments[PendingGroup] = Moments()

    def made() -> PendingGroup:
        return PendingGroup(
            prompts, most=most, ticks=ticks, max_groups=max_groups, max_closed=max_closed, assembly=assembly
        )

    def after(moment: int) -> Iterator[tuple[object, int]]:
        for step in moments[moment].steps():
            yield step, moments.after(moment, step)[0]

    return len(explore(moments.first(made), after, lambda moment: moments[moment].check()))
