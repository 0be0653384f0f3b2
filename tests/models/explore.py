"""An exhaustive search: every state that is reachable by any order of a model's steps, each checked once.

A model is made of real objects. They are not copied, which would have to know their insides, but made again: a moment
of one is the steps that led there, replayed, and two moments are one if what the objects hold is equal. Knows nothing
of what is modelled.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Generic, TypeAlias, TypeVar

__all__ = ["Broken", "Moments", "Step", "explore", "hold", "picture"]

S = TypeVar("S", bound=Hashable)
T = TypeVar("T")

Step: TypeAlias = tuple[Any, ...]
"""A method of a modelled object, and its arguments."""


class Broken(AssertionError):
    """A rule is broken."""

    def __init__(self, rule: str, what: object) -> None:
        self.rule = rule
        """The rule, as a sentence."""
        self.story: list[str] = []
        """The shortest sequence of steps to it."""
        super().__init__(f"{rule}: {what}")

    def __str__(self) -> str:
        return "\n  ".join([super().__str__(), *self.story])


def hold(rule: str, holds: object, what: object = "") -> None:
    """Raise `Broken` for `rule` unless it `holds`."""
    if not holds:
        raise Broken(rule, what)


def explore(
    start: S, steps: Callable[[S], Iterable[tuple[object, S]]], check: Callable[[S], None]
) -> dict[S, tuple[S, object] | None]:
    """Yield every reachable state, breadth first, each with its predecessor and the step.

    Raises:
        Broken: a step broke a rule, or the check of a state did; with the shortest story that leads there.
    """
    reached: dict[S, tuple[S, object] | None] = {start: None}
    ahead = deque([start])
    with _without_collection():
        while ahead:
            state = ahead.popleft()
            try:
                check(state)
                for label, after in steps(state):
                    if after not in reached:
                        reached[after] = (state, label)
                        ahead.append(after)
            except Broken as broken:
                broken.story = _story(reached, state)
                raise
    return reached


@contextmanager
def _without_collection() -> Iterator[None]:
    """Disable garbage collection: all objects are kept, and collections would take half of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _story(reached: dict[S, tuple[S, object] | None], state: S) -> list[str]:
    story: list[str] = []
    while (before := reached[state]) is not None:
        state, label = before
        story.append(str(label))
    return story[::-1]


class Moments(Generic[T]):
    """The states of objects of one kind, each with a number."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._origins: list[tuple[Callable[[], T], tuple[Step, ...]]] = []
        """A factory of the object of each state, and the steps that lead there."""
        self._objects: list[T] = []
        self._after: dict[tuple[int, Step], tuple[int, Any]] = {}

    def __len__(self) -> int:
        return len(self._objects)

    def __getitem__(self, moment: int) -> T:
        """Return the object in that state; do not change it."""
        return self._objects[moment]

    def first(self, make: Callable[[], T]) -> int:
        """Return the state of a new object."""
        return self._number(make(), make, ())

    def after(self, moment: int, step: Step) -> tuple[int, Any]:
        """Return the state after `step`, and the result of the step."""
        known = self._after.get((moment, step))
        if known is None:
            make, steps = self._origins[moment]
            again = make()
            for name, *arguments in steps:
                getattr(again, name)(*arguments)
            name, *arguments = step
            returned = getattr(again, name)(*arguments)
            known = self._after[moment, step] = self._number(again, make, (*steps, step)), returned
        return known

    def _number(self, thing: T, make: Callable[[], T], steps: tuple[Step, ...]) -> int:
        number = self._numbers.setdefault(picture(thing), len(self._objects))
        if number == len(self._objects):
            self._objects.append(thing)
            self._origins.append((make, steps))
        return number


STORIES = {"_histories", "story"}
"""Attributes for messages only: they change no behaviour, and would make every path to a state a state of its own."""


PLAIN = {bool, bytes, float, int, str, type(None)}


def picture(thing: Any) -> Hashable:
    """Return the contents of `thing`, comparable: objects with equal contents behave alike."""
    seen: Hashable
    kind: type = type(thing)
    if kind in PLAIN or (isinstance(thing, tuple) and PLAIN.issuperset(map(type, thing))):
        seen = thing
    elif isinstance(thing, dict):
        seen = frozenset([(picture(key), picture(value)) for key, value in thing.items()])
    elif isinstance(thing, tuple | list | deque):
        seen = tuple([picture(each) for each in thing])
    elif isinstance(thing, set | frozenset):
        seen = frozenset(map(picture, thing))
    elif isinstance(thing, bytearray | memoryview):
        seen = bytes(thing)
    elif callable(thing):
        seen = getattr(thing, "__qualname__", kind.__qualname__)
    else:
        names = [name for name in _slots(kind) if hasattr(thing, name)] + list(getattr(thing, "__dict__", ()))
        held = [(name, picture(getattr(thing, name))) for name in names if name not in STORIES]
        seen = kind.__qualname__, *held
    return seen


@cache
def _slots(kind: type) -> tuple[str, ...]:
    declared = [each.__dict__.get("__slots__", ()) for each in kind.__mro__]
    names = {name for slots in declared for name in ((slots,) if isinstance(slots, str) else slots)}
    return tuple(sorted(names - {"__dict__", "__weakref__"}))
