"""`CommittedPrompts`: the repetitions of each prompt that were trained, in few bytes for a run of any length.

Prompts whose names end in a number are stored by that number, and those with the same name before it are stored as
ranges (`number_masks.py`); any other prompt is an entry. Exact: every name is restored as it was. Knows no ledger.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import accumulate, pairwise
from typing import Annotated, Any, TypeAlias

import msgspec

from ..._schemas import GroupId
from ..._schemas.conversion import convert
from .number_masks import Interval, LoneNumber, Masks, NumberMasks, merged

DIGITS = "0123456789"

MAX_DIGITS = 18
"""The most digits of a number; digits before these belong to the name, so that a number fits in 64 bits."""

Hex: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[1-9a-f][0-9a-f]*$")]
"""A bit mask above 0."""

Length: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=10**MAX_DIGITS)]


class PromptRanges(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prompts of one environment, with one name before their numbers and the same trained repetitions."""

    env: str
    name: str
    """The part before the number; leading zeros belong to it."""
    mask: Hex
    """The repetitions."""
    numbers: list[Length]
    """The lengths of a gap and of a range in turn, from 0 on: [5, 2, 1, 1] are 5, 6 and 8."""


class CommittedState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The form of `CommittedPrompts` in a checkpoint."""

    ranges: list[PromptRanges]
    prompts: list[tuple[str, str, Hex]]
    """Every other prompt: (env, instance id, repetitions)."""


class CommittedPrompts(Mapping[GroupId, int]):
    """The repetitions of each prompt that were trained, as a bit mask.

    >>> committed = CommittedPrompts({GroupId("chain_sum", str(number)): 0b11 for number in range(1000)})
    >>> committed[GroupId("chain_sum", "17")]
    3
    >>> committed.state_dict()["ranges"]
    [{'env': 'chain_sum', 'name': '', 'mask': '3', 'numbers': [0, 1000]}]

    Args:
        committed: the repetitions that were trained before.
    """

    __slots__ = ("_others", "_series")

    def __init__(self, committed: Mapping[GroupId, int] | None = None) -> None:
        self._series: dict[tuple[str, str], Masks] = {}
        """By environment and the part of the name before the number."""
        self._others: dict[GroupId, int] = {}
        """Prompts whose names do not end in a number."""
        if isinstance(committed, CommittedPrompts):
            self._series = {series: masks.copy() for series, masks in committed._series.items()}  # noqa: SLF001 (its own)
            self._others = committed._others.copy()  # noqa: SLF001 (its own)
        elif committed is not None:
            for group, mask in committed.items():
                self.add(group, mask)

    def mask(self, group: GroupId) -> int:
        """Return the repetitions of `group` that were trained, as a bit mask."""
        if not self._series and not self._others:  # always so in a worker
            return 0
        env, instance_id = group
        name, number = _split(instance_id)
        if number is None:
            return self._others.get(group, 0)
        masks = self._series.get((env, name))
        return 0 if masks is None else masks.get(number)

    def add(self, group: GroupId, mask: int) -> None:
        """Add repetitions of `group`, as a bit mask, to those that were trained."""
        if not mask:
            return
        env, instance_id = group
        name, number = _split(instance_id)
        if number is None:
            self._others[GroupId(*group)] = self._others.get(group, 0) | mask
            return
        masks = self._series.get((env, name))
        added = LoneNumber(number, mask) if masks is None else masks.add(number, mask)
        if added is not masks:
            self._series[env, name] = added

    def __getitem__(self, group: GroupId) -> int:
        if mask := self.mask(group):
            return mask
        raise KeyError(group)

    def get(self, group: GroupId, default: Any = None, /) -> Any:
        """Return the repetitions of `group` that were trained, as a bit mask; `default` without any."""
        return self.mask(group) or default

    def __iter__(self) -> Iterator[GroupId]:
        for (env, name), masks in self._series.items():
            for first, stop, _ in merged(masks.runs()):
                for number in range(first, stop):
                    yield GroupId(env, f"{name}{number}")
        yield from self._others

    def __len__(self) -> int:
        return len(self._others) + sum(masks.count() for masks in self._series.values())

    def __repr__(self) -> str:
        return f"<CommittedPrompts: {len(self)} prompts>"

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @property
    def state(self) -> CommittedState:
        """The value for a checkpoint."""
        ranges: list[PromptRanges] = []
        prompts = [(env, instance_id, f"{mask:x}") for (env, instance_id), mask in self._others.items()]
        for (env, name), masks in self._series.items():
            if isinstance(masks, LoneNumber):
                prompts.append((env, f"{name}{masks.number}", f"{masks.mask:x}"))
            else:
                ranges += _ranges_of(env, name, merged(masks.runs()))
        return CommittedState(ranges, prompts)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON values."""
        state: dict[str, Any] = msgspec.to_builtins(self.state)
        return state

    @classmethod
    def of_state(cls, state: Any) -> CommittedPrompts:
        """Return the prompts of `state`: a `state` or a `state_dict()`.

        Raises:
            ValueError: it is no such state, or has a prompt twice.
        """
        typed = state if isinstance(state, CommittedState) else convert(state, CommittedState)
        committed = cls()
        series: defaultdict[tuple[str, str], list[Interval]] = defaultdict(list)
        for ranges in typed.ranges:
            series[ranges.env, ranges.name] += _runs_of(ranges)
        for (env, name), runs in series.items():
            committed._series[env, name] = _filled(env, name, runs)
        for env, instance_id, mask in typed.prompts:
            group = GroupId(env, instance_id)
            if group in committed:
                raise ValueError(f"expected every committed prompt once, got {env}/{instance_id} twice")
            committed.add(group, int(mask, 16))
        return committed


def _split(instance_id: str) -> tuple[str, int | None]:
    """Return the part of a name before the number at its end, and the number; None without a digit at its end.

    Leading zeros, and digits before the last `MAX_DIGITS`, belong to the first part: both parts joined are the name.

    >>> _split("run-2.017"), _split("0"), _split("chess")
    (('run-2.0', 17), ('', 0), ('chess', None))
    """
    name = instance_id.rstrip(DIGITS)
    digits = instance_id[len(name) :]
    if not digits:
        return instance_id, None
    if digits[0] != "0" and len(digits) <= MAX_DIGITS:  # almost always
        return name, int(digits)
    digits = digits[-MAX_DIGITS:]
    written = digits.lstrip("0") or "0"
    return instance_id[: -len(written)], int(written)


def _ranges_of(env: str, name: str, runs: list[Interval]) -> Iterator[PromptRanges]:
    """Yield the ranges that a checkpoint stores for `runs`, given in order."""
    by_mask: defaultdict[int, list[int]] = defaultdict(list)
    for first, stop, mask in runs:
        by_mask[mask] += (first, stop)
    for mask, borders in by_mask.items():
        lengths = [behind - before for before, behind in pairwise([0, *borders])]
        yield PromptRanges(env, name, f"{mask:x}", lengths)


def _runs_of(ranges: PromptRanges) -> Iterator[Interval]:
    """Yield the runs that `_ranges_of` made into `ranges`.

    Raises:
        ValueError: a range is empty, or incomplete.
    """
    lengths = ranges.numbers
    if not lengths or len(lengths) % 2 or 0 in lengths[1:]:
        raise ValueError(f"expected gaps and ranges in turn, each above 0 but the first, got {lengths[:8]}…")
    borders = iter(accumulate(lengths))
    for first, stop in zip(borders, borders, strict=True):
        yield Interval(first, stop, int(ranges.mask, 16))


def _filled(env: str, name: str, runs: list[Interval]) -> NumberMasks:
    """Return the masks that have `runs`.

    Raises:
        ValueError: a number is in two of them, or no name of a prompt is written like this.
    """
    runs.sort()
    for before, behind in pairwise(runs):
        if behind.first < before.stop:
            raise ValueError(f"expected every committed prompt once, got {env}/{name}{behind.first} twice")
    lowest, highest = runs[0].first, runs[-1].stop - 1
    if any(_split(f"{name}{number}") != (name, number) for number in (lowest, highest)):
        raise ValueError(f"expected numbers from {lowest} to {highest} that can follow {name!r}, in {env}")
    masks = NumberMasks()
    for run in runs:
        masks.fill(run)
    return masks
