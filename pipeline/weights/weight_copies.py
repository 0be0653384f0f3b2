"""Tensors that have memory of their own, on any device: a published version is copied into them.

For models on a device that cannot use the publisher's memory, and for tensors without a model. A version in shared
memory is first copied into private memory (`PrivateCopy`), so that the tensors change only when the copy is complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..errors import WeightsMismatch
from .weight_memory import HostMemory, TensorBuffer
from .weight_specs import FusedTensor, Tensor, TensorManifest, differing, fit, specs_of
from .weights import Publication, WeightReader

if TYPE_CHECKING:
    from torch import nn

    from .weight_views import MappedModel

CHUNK_BYTES = 4 * 2**20
"""Bytes that are copied between two checks for an overwrite."""

ATTEMPTS = 32
"""Attempts to copy a version. Each after the first begins when a version is complete, and has time until the publisher
begins the next but one; so the second attempt succeeds unless the machine stalls the reader."""


def attached(
    model: nn.Module | Mapping[str, Tensor],
    published: TensorManifest,
    fused: Iterable[FusedTensor],
    whose: str,
    *,
    device: str,
    copied: bool,
) -> CopiedModel | MappedModel:
    """Compare `model` with `published`, and return the object that loads versions into it, as views or as copies.

    Raises:
        WeightsMismatch: a list of every difference.
        InvalidConfig: a value is not a tensor.
    """
    if copied or isinstance(model, Mapping):
        return CopiedModel(model, published, fused, whose)
    from .weight_views import MappedModel  # noqa: PLC0415 (only a process with a torch model imports torch)

    return MappedModel(model, published, fused, whose, device)


class CopiedModel:
    """Tensors by name that are filled in place."""

    def __init__(
        self,
        model: nn.Module | Mapping[str, Tensor],
        published: TensorManifest,
        fused: Iterable[FusedTensor],
        whose: str,
    ) -> None:
        """Compare a module, or tensors by name, with `published`; of a module also its tables, which are not copied.

        Raises:
            WeightsMismatch: a list of every difference.
            InvalidConfig: a value is not a tensor.
        """
        self._tensors = dict(model if isinstance(model, Mapping) else model.state_dict())
        self._parts, lines = fit(specs_of(self._tensors), published.tensors, fused)
        if not isinstance(model, Mapping):
            from .weight_tables import table_differences  # noqa: PLC0415 (only a process with a torch model imports torch)

            lines += table_differences(published.tables, model, {})
        if lines:
            raise WeightsMismatch(differing(lines, whose))

    def load(self, version: TensorBuffer) -> None:
        """Copy `version`, in memory of the host, into the tensors, on any device."""
        for part in self._parts:
            tensor = self._tensors[part.spec.name]
            if isinstance(tensor, np.ndarray):
                tensor[...] = version.elements(part).view(tensor.dtype).reshape(tensor.shape)
            else:
                tensor.detach().copy_(version.tensor(part))


class PrivateCopy:
    """Private memory for a complete copy of a version in shared memory."""

    def __init__(self, reader: WeightReader, whose: str) -> None:
        """Allocate memory for one version.

        Raises:
            WeightsMismatch: the versions lie on a device.
        """
        if not isinstance(reader.memory, HostMemory):
            raise WeightsMismatch(
                f"{whose}: expected versions in memory of the host, found them on {reader.memory.device}: attach the "
                f"model itself, on that device"
            )
        self._shared = reader.memory.bytes
        self._reader = reader
        self._bytes: NDArray[np.uint8] = np.zeros(max(reader.layout.nbytes, 1), np.uint8)

    def read(self) -> tuple[Publication, TensorBuffer] | None:
        """Copy the newest version and return it; None if there is none yet, or if every copy was overtaken."""
        for _ in range(ATTEMPTS):
            newest = self._reader.newest()
            if newest is None:
                break
            if self._copied(newest.sequence):
                return newest, TensorBuffer(self._reader.layout, HostMemory(self._bytes.data), 0)
        return None

    def _copied(self, sequence: int) -> bool:
        """Copy in pieces, and check after each whether the publisher began to overwrite this version."""
        first = self._reader.tensors(sequence).start
        nbytes = self._reader.layout.nbytes
        for start in range(0, nbytes, CHUNK_BYTES):
            end = min(start + CHUNK_BYTES, nbytes)
            self._bytes[start:end] = self._shared[first + start : first + end]
            if not self._reader.intact(sequence):
                return False
        return True
