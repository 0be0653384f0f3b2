"""Memory of a GPU that two processes of a host share, by a handle of the driver (CUDA IPC).

The driver itself allocates the memory, not torch: a handle of torch's allocator comes with a named file that counts its
users, and SIGKILL leaves that behind. This memory has no name and is freed with its owner. Its first page holds the
publisher's generation, so that a handle that outlived its owner is not mistaken for one of another publisher.

The suite tests the code above `CudaDriver` with another driver; `make test-gpu` runs it on a GPU.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache
from typing import Any

import torch

from ..._schemas.control import DeviceHandle
from ..errors import NoDevice, OutOfSharedMemory, StaleHandle
from .weight_specs import Tensor, TensorSpec

HANDLE_BYTES = 64
"""CU_IPC_HANDLE_SIZE."""


class _Mapped:
    """Memory of a device that this process sees; it is freed or unmapped with the last tensor on it."""

    def __init__(self, index: int, address: int, nbytes: int, *, own: bool) -> None:
        self.index, self.address, self.nbytes, self._own = index, address, nbytes, own
        self._driver = driver()

    def __del__(self) -> None:
        with suppress(OSError):  # at exit, the driver may be unloaded
            self._driver.release(self.index, self.address, own=self._own)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"data": (self.address, False), "shape": (self.nbytes,), "typestr": "|u1", "version": 3}


_own: dict[bytes, torch.Tensor] = {}
"""Memory of this process, by handle: a driver does not let a process open its own."""


class DeviceMemory:
    """Memory of one device; it has the methods of `weight_memory.HostMemory`."""

    stays = False

    def __init__(self, index: int, whole: torch.Tensor, handle: DeviceHandle) -> None:
        self._index = index
        self._whole = whole
        self.handle = handle

    @classmethod
    def allocate(cls, device: str, nbytes: int) -> DeviceMemory:
        """Allocate memory on `device` ("cuda:0"), with a handle for it.

        Raises:
            NoDevice: there is no driver, or no such device.
            OutOfSharedMemory: the device has no room, or does not export its memory.
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
        """Open the memory of `handle`.

        Raises:
            NoDevice: there is no driver, or this process may not use that device.
            StaleHandle: the driver does not know it: its owner died, for example.
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
        """See `HostMemory.device`."""
        return str(self._whole.device)

    def store(self, start: int, tensor: Tensor, spec: TensorSpec) -> None:
        """See `HostMemory.store`."""
        target = self.tensor(start, spec.nbytes).view(getattr(torch, spec.dtype)).view(spec.shape)
        target.copy_(torch.as_tensor(tensor).detach())

    def flush(self) -> None:
        """See `HostMemory.flush`."""
        driver().synchronize(self._index)

    def tensor(self, start: int, nbytes: int) -> torch.Tensor:
        """See `HostMemory.tensor`."""
        return self._whole[start : start + nbytes]

    def mark(self, generation: int) -> None:
        """Write the publisher's generation into the first page."""
        self.tensor(0, 8).view(torch.int64).fill_(generation)
        self.flush()

    def marked(self) -> int:
        """Return the generation that `mark` wrote."""
        return int(self.tensor(0, 8).view(torch.int64).item())

    def close(self) -> None:
        """Stop sharing; the memory is freed with the last tensor on it."""
        _own.pop(self.handle.handle, None)


def _index_of(device: str) -> int:
    kind, _, number = device.partition(":")
    index = int(number or 0) if kind == "cuda" else -1
    if index not in driver().indices():
        raise NoDevice(f"expected cpu, or cuda:N for N in {list(driver().indices())}, got {device!r}")
    return index


@cache
def driver() -> CudaDriver:
    """Return the driver of this machine's GPUs.

    Raises:
        NoDevice: it has no driver.
    """
    try:
        return CudaDriver(ctypes.CDLL("libcuda.so.1"))
    except OSError as error:
        raise NoDevice(f"expected a CUDA driver, got none: {error}: publish with device='cpu'") from error


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class CudaDriver:
    """libcuda. Addresses are the device's; devices have the numbers that torch gives them.

    A call that the library refuses raises OSError.
    """

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
        """Make the device's context, created by torch, the current one of this thread."""
        torch.cuda.set_device(index)
        torch.cuda.current_stream(index).synchronize()

    def uuid(self, index: int) -> str:
        """Return the identity of device `index`, the same in every process."""
        return str(torch.cuda.get_device_properties(index).uuid)

    def indices(self) -> range:
        """Return the numbers of the devices that this process may use."""
        return range(torch.cuda.device_count())

    def allocate(self, index: int, nbytes: int) -> int:
        """Allocate memory and return its address."""
        self._enter(index)
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return address.value

    def export(self, index: int, address: int) -> bytes:
        """Return a handle for memory of this process."""
        self._enter(index)
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle)

    def open(self, index: int, handle: bytes) -> int:
        """Map memory of another process and return its address."""
        self._enter(index)
        address = ctypes.c_uint64()
        lazily_with_peers = ctypes.c_uint(1)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), lazily_with_peers)
        return address.value

    def release(self, index: int, address: int, *, own: bool) -> None:
        """Free memory of this process (`own`), or unmap memory of another one."""
        self._enter(index)
        self._call("cuMemFree_v2" if own else "cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def tensor(self, index: int, memory: _Mapped) -> torch.Tensor:
        """Return mapped memory as bytes; the tensor keeps `memory` alive."""
        return torch.as_tensor(memory, device=f"cuda:{index}")

    def synchronize(self, index: int) -> None:
        """Return when the device has finished all work that was submitted."""
        torch.cuda.synchronize(index)
