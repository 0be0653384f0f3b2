"""`TRLTransfer`: new weights of TRL's trainer to a publisher of penstock; TRL's `WeightTransferProtocol`.

The publisher is open from the start of training to its end, on an event loop in a thread. Versions are TRL's: it sends
the weights before it names their version, the first time before the first step, and counts from 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

from ...sink.sink_trainer import WeightSink
from ..flow_thread.weight_transfer import WeightTransfer


class TRLTransfer:
    """Publishes the weights of TRL's trainer; for `AsyncGRPOTrainer(weight_transfer=…)`."""

    def __init__(self, publisher: AbstractAsyncContextManager[WeightSink]) -> None:
        """Publish by `publisher`.

        Args:
            publisher: a WeightPublisher or a WeightFolder, not open yet; or any other async context manager that yields
                one, such as a function with `@asynccontextmanager` that opens engines and yields an EnginePublisher.
        """
        self._transfer = WeightTransfer(publisher, "penstock-trl-weights")
        self._version = 0

    def __repr__(self) -> str:
        return f"<TRLTransfer by {self._transfer!r}: version {self._version}>"

    @property
    def version(self) -> int:
        """The last version that was sent, as TRL counts; 0 before the first."""
        return self._version

    def init_weight_transfer(self) -> None:
        """Open the publisher. Called by TRL when training begins.

        Raises:
            Exception: raised by the publisher when it is opened.
        """
        self._version = 0
        self._transfer.open()

    def pause(self) -> None:
        """Do nothing: the publisher never mixes two versions, and sampling goes on while it copies the next one."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Publish all tensors of `iterator`, by name, as the next version; return when samplers can load it.

        Raises:
            WeightsMismatch: the tensors are not those that the publisher was made for.
            RuntimeError: TRL has not begun to train.
        """
        if not self._transfer.is_open:
            raise RuntimeError("expected init_weight_transfer before send_weights, as TRL calls them")
        self._transfer.send(dict(iterator), self._version + 1)
        self._version += 1

    def resume(self) -> None:
        """Do nothing; see `pause`."""

    def destroy(self) -> None:
        """Close the publisher, and end its thread. Called by TRL when training has ended."""
        self._transfer.close()
