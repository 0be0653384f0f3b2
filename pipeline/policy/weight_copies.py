"""Tensors that have memory of their own, on any device: a published version is copied into them.

For models on a device that cannot see the publisher's memory, and for tensors that are no model's. A version is first
copied into private memory, a few megabytes at a time, with a look after each piece at whether the publisher began to
write over it. The tensors are touched only when a version was read whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..errors import WeightsMismatch
from .weight_memory import HostMemory, fill
from .weight_specs import FusedTensor, Part, Tensor, TensorManifest, differing, fit, specs_of
from .weights import Publication, WeightReader

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Copies", "Targets"]

CHUNK_BYTES = 4 * 2**20
"""What is copied before the next look."""

ATTEMPTS = 32
"""How often a copy starts over. It starts over at the moment a new version is complete and then has as long as the
publisher needs for the next two, so the second attempt succeeds unless the machine stalls the reader."""


class Targets:
    """Tensors that are filled, and where each lies among those that are published."""

    def __init__(
        self,
        model: nn.Module | Mapping[str, Tensor],
        published: TensorManifest,
        fused: Iterable[FusedTensor],
        whose: str,
    ) -> None:
        """Hold a module, or tensors by name, to what is published; a module also to the tables, which are not filled.

        Raises:
            WeightsMismatch: listing every difference.
            TypeError: a value is no tensor.
        """
        self.tensors = dict(model if isinstance(model, Mapping) else model.state_dict())
        parts, lines = fit(specs_of(self.tensors), published.tensors, fused)
        if not isinstance(model, Mapping):
            from .weight_tables import table_differences  # noqa: PLC0415 (only whoever holds a torch model has torch)

            lines += table_differences(published.tables, model, {})
        if lines:
            raise WeightsMismatch(differing(lines, whose))
        self.parts: tuple[Part, ...] = parts


class Copies:
    """Tensors by name, and how they are brought to a version."""

    holds = False
    """The publisher may write over what was copied."""

    def __init__(
        self, reader: WeightReader, model: nn.Module | Mapping[str, Tensor], fused: Iterable[FusedTensor], whose: str
    ) -> None:
        """As `Targets`.

        Raises:
            WeightsMismatch: listing every difference; or the versions lie on a device.
            TypeError: a value is no tensor.
        """
        self._targets = Targets(model, reader.inventory, fused, whose)
        if not isinstance(reader.memory, HostMemory):
            raise WeightsMismatch(
                f"{whose}: expected versions in memory of the host, found them on {reader.memory.device}: attach the "
                f"model itself, on that device"
            )
        self._bytes = reader.memory.bytes
        self._reader = reader
        self._version: NDArray[np.uint8] = np.zeros(reader.buffer_bytes, np.uint8)
        """One version, private."""

    def bring(self) -> Publication | None:
        """Copy the newest version into the tensors, and say which it was.

        None, and they stay as they were, if there is none yet or the publisher never let a copy finish.
        """
        for _ in range(ATTEMPTS):
            newest = self._reader.newest()
            if newest is None:
                break
            if self._copied(newest.sequence):
                self._fill()
                return newest
        return None

    def _copied(self, sequence: int) -> bool:
        first = self._reader.start(sequence)
        for start in range(0, len(self._version), CHUNK_BYTES):
            end = min(start + CHUNK_BYTES, len(self._version))
            self._version[start:end] = self._bytes[first + start : first + end]
            if not self._reader.intact(sequence):
                return False
        return True

    def _fill(self) -> None:
        for part in self._targets.parts:
            start = self._reader.start(0, part) - self._reader.start(0)
            fill(self._targets.tensors[part.spec.name], self._version[start : start + part.spec.nbytes], part.spec)
