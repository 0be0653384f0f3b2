"""Memory of a GPU that two processes of a host share: the driver gives out a handle for it (CUDA IPC).

The memory is asked of the driver itself, not of torch's allocator: a handle of torch's comes with a named file that
counts who uses it, and SIGKILL leaves that behind. This has no name, and is freed with its owner; the first page says
whose it is, so that a handle which outlived its owner is not taken for one of another.

What is below `Driver` has never run: it was written without a GPU at hand. All above it is tested.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from ...schemas.control import DeviceHandle
from ..errors import NoDevice, OutOfSharedMemory, StaleHandle
from .weight_specs import Tensor, TensorSpec

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceMemory", "Driver", "driver"]

HANDLE_BYTES = 64
"""CU_IPC_HANDLE_SIZE."""


class Driver(Protocol):
    """What is asked of a GPU's driver. Addresses are the device's; devices have the numbers that torch gives them."""

    def uuid(self, index: int) -> str:
        """Which device has this number."""
        ...

    def indices(self) -> range:
        """Numbers of the devices that this process may use."""
        ...

    def allocate(self, index: int, nbytes: int) -> int:
        """Memory of a device. Raises OSError."""
        ...

    def export(self, index: int, address: int) -> bytes:
        """A handle for memory of this process. Raises OSError."""
        ...

    def open(self, index: int, handle: bytes) -> int:
        """The memory of another process. Raises OSError."""
        ...

    def let_go(self, index: int, address: int, *, own: bool) -> None:
        """Free memory of this process (`own`), or unmap another's."""
        ...

    def tensor(self, index: int, memory: _Mapped) -> torch.Tensor:
        """Mapped memory as bytes; the tensor keeps `memory` alive."""
        ...

    def synchronize(self, index: int) -> None:
        """Return when the device has done what it was told."""
        ...


class _Mapped:
    """Memory of a device that this process sees; it is let go with the last tensor on it."""

    def __init__(self, index: int, address: int, nbytes: int, *, own: bool) -> None:
        self.index, self.address, self.nbytes, self._own = index, address, nbytes, own
        self._driver = driver()

    def __del__(self) -> None:
        with suppress(OSError):  # the driver may have gone before
            self._driver.let_go(self.index, self.address, own=self._own)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"data": (self.address, False), "shape": (self.nbytes,), "typestr": "|u1", "version": 3}


_own: dict[bytes, torch.Tensor] = {}
"""What this process gave out, by handle: no driver lets a process open its own."""


class DeviceMemory:
    """Memory of one device; it has the methods of `weight_memory.HostMemory`."""

    stays = False

    def __init__(self, index: int, whole: torch.Tensor, handle: DeviceHandle) -> None:
        self._index = index
        self._whole = whole
        self.handle = handle

    @classmethod
    def allocate(cls, device: str, nbytes: int) -> DeviceMemory:
        """New memory on `device` ("cuda:0"), and a handle for it.

        Raises:
            NoDevice: there is no driver, or no such device.
            OutOfSharedMemory: the device has no room, or gives out no handles.
        """
        index = _index_of(device)
        try:
            address = driver().allocate(index, nbytes)
            mapped = _Mapped(index, address, nbytes, own=True)
            handle = driver().export(index, address)
        except OSError as error:
            raise OutOfSharedMemory(f"expected {nbytes} bytes of {device} to share, got none: {error}") from error
        whole = driver().tensor(index, mapped)
        _own[handle] = whole
        return cls(index, whole, DeviceHandle(driver().uuid(index), nbytes, handle))

    @classmethod
    def open(cls, handle: DeviceHandle) -> DeviceMemory:
        """The memory that `handle` speaks of.

        Raises:
            NoDevice: there is no driver, or this process may not use that device.
            StaleHandle: the driver knows no such memory: its owner died, say.
        """
        known = {driver().uuid(index): index for index in driver().indices()}
        if handle.device not in known:
            raise NoDevice(f"expected device {handle.device}, got {sorted(known)}: set CUDA_VISIBLE_DEVICES")
        index = known[handle.device]
        if handle.handle in _own:
            return cls(index, _own[handle.handle], handle)
        try:
            if len(handle.handle) != HANDLE_BYTES or handle.nbytes < 1:
                raise OSError(f"{len(handle.handle)} bytes of handle for {handle.nbytes} bytes of memory")  # noqa: TRY301
            address = driver().open(index, handle.handle)
        except OSError as error:
            raise StaleHandle(f"expected memory of a living publisher on {handle.device}, got none: {error}") from error
        return cls(index, driver().tensor(index, _Mapped(index, address, handle.nbytes, own=False)), handle)

    @property
    def device(self) -> str:
        """As `HostMemory.device`."""
        return str(self._whole.device)

    def store(self, start: int, tensor: Tensor, spec: TensorSpec) -> None:
        """As `HostMemory.store`."""
        import torch  # noqa: PLC0415 (only whoever has a GPU gets here)

        target = self.tensor(start, spec.nbytes).view(getattr(torch, spec.dtype)).view(spec.shape)
        target.copy_(torch.as_tensor(tensor).detach())

    def flush(self) -> None:
        """As `HostMemory.flush`."""
        driver().synchronize(self._index)

    def tensor(self, start: int, nbytes: int) -> torch.Tensor:
        """As `HostMemory.tensor`."""
        return self._whole[start : start + nbytes]

    def mark(self, generation: int) -> None:
        """Write whose it is into the first page."""
        import torch  # noqa: PLC0415 (only whoever has a GPU gets here)

        self.tensor(0, 8).view(torch.int64).fill_(generation)
        self.flush()

    def marked(self) -> int:
        """What `mark` wrote."""
        import torch  # noqa: PLC0415 (only whoever has a GPU gets here)

        return int(self.tensor(0, 8).view(torch.int64).item())

    def close(self) -> None:
        """Give out no more; the memory goes with the last tensor on it."""
        _own.pop(self.handle.handle, None)


def _index_of(device: str) -> int:
    kind, _, number = device.partition(":")
    index = int(number or 0) if kind == "cuda" else -1
    if index not in driver().indices():
        raise NoDevice(f"expected cpu, or cuda:N for N in {list(driver().indices())}, got {device!r}")
    return index


@cache
def driver() -> Driver:
    """The driver of this machine's GPUs.

    Raises:
        NoDevice: there is none.
    """
    try:
        return _Cuda(ctypes.CDLL("libcuda.so.1"))
    except OSError as error:
        raise NoDevice(f"expected a CUDA driver, got none: {error}: publish with device='cpu'") from error


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class _Cuda:
    """libcuda. Torch has made the device's context by the time that anything is asked."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def _call(self, name: str, *arguments: object) -> None:
        result = getattr(self._library, name)(*arguments)
        if result:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(result, ctypes.byref(text))
            raise OSError(f"{name}: {(text.value or str(result).encode()).decode()}")

    @staticmethod
    def _enter(index: int) -> None:
        """Make the device's context this thread's."""
        import torch  # noqa: PLC0415 (only whoever has a GPU gets here)

        torch.cuda.set_device(index)
        torch.cuda.current_stream(index).synchronize()

    def uuid(self, index: int) -> str:
        import torch  # noqa: PLC0415 (only whoever has a GPU gets here)

        return str(torch.cuda.get_device_properties(index).uuid)

    def indices(self) -> range:
        import torch  # noqa: PLC0415 (only whoever has a GPU gets here)

        return range(torch.cuda.device_count())

    def allocate(self, index: int, nbytes: int) -> int:
        self._enter(index)
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return address.value

    def export(self, index: int, address: int) -> bytes:
        self._enter(index)
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle)

    def open(self, index: int, handle: bytes) -> int:
        self._enter(index)
        address = ctypes.c_uint64()
        lazily_with_peers = ctypes.c_uint(1)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), lazily_with_peers)
        return address.value

    def let_go(self, index: int, address: int, *, own: bool) -> None:
        self._enter(index)
        self._call("cuMemFree_v2" if own else "cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def tensor(self, index: int, memory: _Mapped) -> torch.Tensor:
        import torch  # noqa: PLC0415 (only whoever has a GPU gets here)

        return torch.as_tensor(memory, device=f"cuda:{index}")

    def synchronize(self, index: int) -> None:
        import torch  # noqa: PLC0415 (only whoever has a GPU gets here)

        torch.cuda.synchronize(index)
