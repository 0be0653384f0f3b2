"""The memory of published versions: tensors are copied into it and read from it.

`HostMemory` is memory of this host, `device_memory.DeviceMemory` of a GPU. Functions that receive a torch tensor import
torch; the others do not need it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from ..._schemas import Array
from .tensor_layout import TensorLayout
from .weight_specs import Part, Tensor, TensorSpec

if TYPE_CHECKING:
    import torch

    from .device_memory import DeviceMemory
    from .pinned_memory import PinnedMemory


class HostMemory:
    """Memory of the host that this process has mapped or allocated; every view keeps it."""

    device = "cpu"
    """Its device, as torch names it."""
    stays = True
    """True: it can still be read when its publisher has closed it."""

    def __init__(self, memory: memoryview) -> None:
        self.bytes: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
        """[nbytes] read-only where the mapping is."""
        self._pinned: PinnedMemory | None = None
        """The same memory for copies from a GPU, from the first of them on."""

    def store(self, start: int, tensor: Tensor, spec: TensorSpec) -> None:
        """Copy `tensor` to byte `start`, with the dtype of `spec`, in C order; one on a GPU is there after `flush`."""
        if isinstance(tensor, np.ndarray) or not tensor.is_cuda:
            self.bytes[start : start + spec.nbytes] = bytes_of(tensor, spec.dtype)
        else:
            self._pinned = self._pinned or self._pin()
            self._pinned.store(self.tensor(start, spec.nbytes), tensor, spec)

    def flush(self) -> None:
        """Return when other processes can see everything that was stored."""
        if self._pinned is not None:
            self._pinned.flush()

    def close(self) -> None:
        """Stop sharing: unpin the memory. The publisher closes the descriptor."""
        if self._pinned is not None:
            self._pinned.close()

    def _pin(self) -> PinnedMemory:
        from .pinned_memory import PinnedMemory  # noqa: PLC0415 (it needs torch, and only a publisher on a GPU needs it)

        return PinnedMemory(self._whole)

    def tensor(self, start: int, nbytes: int) -> torch.Tensor:
        """Return bytes as a tensor, not a copy; it keeps the memory alive.

        You must not write to it where the mapping is read-only: the kernel would kill this process.
        """
        return self._whole[start : start + nbytes]

    @cached_property
    def _whole(self) -> torch.Tensor:
        import torch  # noqa: PLC0415 (only a process that holds a torch model imports torch)

        return torch.from_numpy(np.asarray(_Writable(self.bytes)))


VersionMemory: TypeAlias = "HostMemory | DeviceMemory"
"""Memory that holds versions of weights."""


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class TensorBuffer:
    """The tensors of one version: a layout, and the memory of its bytes."""

    layout: TensorLayout
    memory: VersionMemory
    start: int
    """Bytes of `memory` before the first tensor."""

    def elements(self, part: Part) -> NDArray[np.uint8]:
        """Return the bytes of a tensor in memory of the host; not a copy."""
        start = self.start + self.layout.offset(part)
        return cast("HostMemory", self.memory).bytes[start : start + part.spec.nbytes]

    def span(self, start: int, end: int) -> NDArray[np.uint8]:
        """Return bytes `start` to `end` of the version in memory of the host; not a copy."""
        return cast("HostMemory", self.memory).bytes[self.start + start : self.start + end]

    def tensor(self, part: Part) -> torch.Tensor:
        """Return a tensor; not a copy."""
        import torch  # noqa: PLC0415 (only a process that holds a torch model imports torch)

        elements = self.memory.tensor(self.start + self.layout.offset(part), part.spec.nbytes)
        return elements.view(getattr(torch, part.spec.dtype)).view(part.spec.shape)


class _Writable:
    """Bytes declared as writable: torch has no read-only tensors, and warns if it makes one of read-only memory."""

    def __init__(self, kept: NDArray[np.uint8]) -> None:
        self.kept = kept
        self.__array_interface__: dict[str, Any] = kept.__array_interface__ | {
            "data": (kept.__array_interface__["data"][0], False)
        }


def bytes_of(tensor: Tensor, dtype: str) -> NDArray[np.uint8]:
    """Return the tensor's elements as bytes, in C order; a view if it has that dtype, is contiguous and on the host."""
    if isinstance(tensor, np.ndarray) and tensor.dtype == dtype:
        flat: Array = np.ascontiguousarray(tensor).reshape(-1)
        return flat.view(np.uint8)
    return _torch_bytes(tensor, dtype)


def _torch_bytes(tensor: Tensor, dtype: str) -> NDArray[np.uint8]:
    import torch  # noqa: PLC0415 (only a process that holds a torch tensor, or casts, imports torch)

    given = torch.tensor(tensor) if isinstance(tensor, np.ndarray) else tensor.detach()
    plain = given.to(getattr(torch, dtype)).contiguous().reshape(-1)
    return np.asarray(plain.view(torch.uint8).cpu().numpy(), np.uint8)
