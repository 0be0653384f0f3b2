"""Where versions of weights lie, byte by byte, and how tensors get in and out of there.

`HostMemory` is shared memory that was mapped. Its likeness on a GPU is in `device_memory`. Torch is imported by the
functions that meet a torch tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...schemas import Array
from .weight_specs import Tensor, TensorSpec

if TYPE_CHECKING:
    import torch

__all__ = ["HostMemory", "VersionMemory", "bytes_of", "fill"]


class VersionMemory(Protocol):
    """Memory that holds versions of weights."""

    @property
    def device(self) -> str:
        """Where it is, in torch's words: "cpu", "cuda:0"."""
        ...

    @property
    def stays(self) -> bool:
        """Whether it is still there when whoever made it has closed it."""
        ...

    def store(self, start: int, tensor: Tensor, spec: TensorSpec) -> None:
        """Copy `tensor` there, as `spec` says it is to be: in C order, of that dtype."""
        ...

    def flush(self) -> None:
        """Return when everything that was stored is there for other processes to see."""
        ...

    def tensor(self, start: int, nbytes: int) -> torch.Tensor:
        """Bytes of it, not a copy; the tensor keeps the memory alive."""
        ...


class HostMemory:
    """Memory of the host that is mapped in this process; every view keeps the mapping."""

    device = "cpu"
    stays = True

    def __init__(self, memory: memoryview) -> None:
        self.bytes: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
        """[nbytes] read-only where the mapping is."""

    def store(self, start: int, tensor: Tensor, spec: TensorSpec) -> None:
        """As `VersionMemory.store`."""
        self.bytes[start : start + spec.nbytes] = bytes_of(tensor, spec.dtype)

    def flush(self) -> None:
        """There is nothing to wait for."""

    def tensor(self, start: int, nbytes: int) -> torch.Tensor:
        """As `VersionMemory.tensor`. Nothing may write to it: the kernel would kill this process."""
        import torch  # noqa: PLC0415 (only whoever holds a torch model pays for torch)

        return torch.from_numpy(np.asarray(_Writable(self.bytes)))[start : start + nbytes]


class _Writable:
    """Bytes that say they can be written to: torch has no tensors that cannot, and warns where it makes one."""

    def __init__(self, kept: NDArray[np.uint8]) -> None:
        self.kept = kept
        self.__array_interface__: dict[str, Any] = kept.__array_interface__ | {
            "data": (kept.__array_interface__["data"][0], False)
        }


def bytes_of(tensor: Tensor, dtype: str) -> NDArray[np.uint8]:
    """The tensor's elements in C order as bytes; a view where it has that dtype, and is contiguous and in memory."""
    if isinstance(tensor, np.ndarray) and tensor.dtype == dtype:
        flat: Array = np.ascontiguousarray(tensor).reshape(-1)
        return flat.view(np.uint8)
    return _torch_bytes(tensor, dtype)


def _torch_bytes(tensor: Tensor, dtype: str) -> NDArray[np.uint8]:
    import torch  # noqa: PLC0415 (only whoever holds a torch tensor, or casts, pays for torch)

    given = torch.tensor(tensor) if isinstance(tensor, np.ndarray) else tensor.detach()
    plain = given.to(getattr(torch, dtype)).contiguous().reshape(-1)
    return np.asarray(plain.view(torch.uint8).cpu().numpy(), np.uint8)


def fill(tensor: Tensor, elements: NDArray[np.uint8], spec: TensorSpec) -> None:
    """Copy `elements`, those of a tensor like `spec`, into `tensor`, wherever that is."""
    if not spec.nbytes:
        return
    if isinstance(tensor, np.ndarray):
        tensor[...] = elements.view(tensor.dtype).reshape(tensor.shape)
    else:
        _torch_fill(tensor, elements, spec)


def _torch_fill(tensor: torch.Tensor, elements: NDArray[np.uint8], spec: TensorSpec) -> None:
    import torch  # noqa: PLC0415 (only whoever holds a torch tensor pays for torch)

    dtype: Any = getattr(torch, spec.dtype)
    with torch.no_grad():
        tensor.copy_(torch.frombuffer(elements, dtype=dtype).reshape(spec.shape))
