"""`Listeners`: what is called at each event of one kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, ParamSpec

P = ParamSpec("P")


class Listeners(Generic[P]):
    """Those that are called at each event, in the order in which they came.

    >>> saved = Listeners[[str]]()
    >>> with saved(print):
    ...     saved.notify("step 3")
    step 3
    """

    __slots__ = ("_calls",)

    def __init__(self) -> None:
        self._calls: list[Callable[P, object]] = []

    def __bool__(self) -> bool:
        return bool(self._calls)

    @contextmanager
    def __call__(self, call: Callable[P, object]) -> Iterator[None]:
        """Call `call` within the body."""
        self._calls.append(call)
        try:
            yield
        finally:
            self._calls.remove(call)

    def notify(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Call them."""
        for call in self._calls:
            call(*args, **kwargs)
