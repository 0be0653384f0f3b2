"""`WeightTransfer`: a publisher that is open in a thread beside a trainer that is not penstock's."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, ExitStack
from typing import Any

from anyio.from_thread import BlockingPortal, start_blocking_portal

from ...._pipeline.weights.engine_sync import readable
from ...contracts.engine_publisher import KnowsTies
from ...sink.sink_trainer import WeightSink


class WeightTransfer:
    """Publishes the weights of a trainer. All methods are called in one other thread."""

    def __init__(self, publisher: AbstractAsyncContextManager[WeightSink], name: str) -> None:
        """Publish by `publisher`, not open yet, in a thread called `name`."""
        self._opening = publisher
        self._name = name
        self._stack = ExitStack()
        self._open: tuple[BlockingPortal, WeightSink] | None = None

    def __repr__(self) -> str:
        return repr(self._opening)

    @property
    def is_open(self) -> bool:
        """True if it was opened, and not closed."""
        return self._open is not None

    def open(self) -> None:
        """Open the publisher.

        Raises:
            Exception: raised by the publisher.
        """
        with ExitStack() as stack:
            portal = stack.enter_context(start_blocking_portal(name=self._name))
            self._open = portal, stack.enter_context(portal.wrap_async_context_manager(self._opening))
            self._stack = stack.pop_all()

    def send(self, tensors: Mapping[str, Any], version: int) -> None:
        """Publish tensors by name; return when samplers can load them.

        Raises:
            WeightsMismatch: the tensors are not those that the publisher was made for.
            DiskFull, NotWritable, OutOfFileDescriptors: a WeightFolder could not write them.
            RuntimeError: it is not open.
        """
        if self._open is None:
            raise RuntimeError("expected an open publisher, got one that was closed or not opened")
        portal, publisher = self._open
        portal.call(publisher.publish, with_ties(dict(tensors), publisher), version)
        portal.call(readable, publisher)

    def close(self) -> None:
        """Close the publisher, and end its thread."""
        self._open = None
        self._stack.close()


def with_ties(tensors: dict[str, Any], publisher: object) -> Mapping[str, Any]:
    """Return the tensors, with the tied ones under each of their names: some trainers send every parameter once."""
    ties = publisher.ties if isinstance(publisher, KnowsTies) else {}
    return tensors | {name: tensors[first] for name, first in ties.items() if first in tensors}
