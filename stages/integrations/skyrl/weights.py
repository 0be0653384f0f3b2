"""`Weights`: new weights of SkyRL's policy to a publisher of penstock.

SkyRL has one interface by which an engine that is not its own gets whole weights: its workers write the model as a
folder of transformers (`save_hf_model`). The publisher is open from the start of training to its end, on an event loop
in a thread.
"""

from __future__ import annotations

import shutil
from contextlib import AbstractAsyncContextManager, ExitStack
from pathlib import Path
from typing import Any

from anyio.from_thread import BlockingPortal, start_blocking_portal

from ...._pipeline.errors import WeightsDamaged
from ...._pipeline.util.extras import extra
from ...sink_trainer import WeightSink
from ..flow_thread.weight_transfer import with_ties


class Weights:
    """Publishes what SkyRL's workers write."""

    def __init__(self, publisher: AbstractAsyncContextManager[WeightSink]) -> None:
        self._opening = publisher
        self._stack = ExitStack()
        self._open: tuple[BlockingPortal, WeightSink] | None = None

    def open(self) -> None:
        """Open the publisher, once.

        Raises:
            Exception: raised by the publisher.
        """
        if self._open is None:
            with ExitStack() as stack:
                portal = stack.enter_context(start_blocking_portal(name="penstock-skyrl-weights"))
                self._open = portal, stack.enter_context(portal.wrap_async_context_manager(self._opening))
                self._stack = stack.pop_all()

    def publish(self, dispatch: Any, tokenizer: Any, folder: Path, version: int) -> None:
        """Have the workers of `dispatch` write the model into `folder`, publish it, and remove the folder. Blocks.

        Raises:
            WeightsDamaged: what they wrote cannot be read.
            WeightsMismatch: the tensors are not those that the publisher was made for.
        """
        if self._open is None:
            raise RuntimeError("expected open before publish")
        portal, publisher = self._open
        dispatch.save_hf_model("policy", str(folder), tokenizer)
        try:
            portal.call(publisher.publish, with_ties(_tensors_in(folder), publisher), version)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Close the publisher, and end its thread."""
        self._open = None
        self._stack.close()


def _tensors_in(folder: Path) -> dict[str, Any]:
    with extra("torch", "PenstockGenerator(publisher=…)"):
        from safetensors import SafetensorError  # noqa: PLC0415 (only where weights are published)
        from safetensors.torch import load_file  # noqa: PLC0415 (as above)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightsDamaged(f"expected safetensors of SkyRL's policy in {folder}, got {sorted(folder.glob('*'))}")
    tensors: dict[str, Any] = {}
    for path in files:
        try:
            tensors |= load_file(path)
        except SafetensorError as error:
            raise WeightsDamaged(f"expected weights that can be read, got {path}: {error}") from error
    return tensors
