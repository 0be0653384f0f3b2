"""Versions on a device, with a driver that hands out memory of the host: everything above the driver's own calls."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager, nullcontext
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from anyio.abc import TaskStatus
from torch import nn

from penstock._pipeline.weights import device_memory as module
from penstock._pipeline.weights.device_memory import HANDLE_BYTES, DeviceMemory
from penstock._schemas.control import DeviceHandle
from penstock.errors import NoDevice, OutOfSharedMemory, PeerLost, StaleHandle, WeightsMismatch
from penstock.weights import WeightPublisher, WeightSubscriber


class HostDriver:
    """Two devices whose memory is this host's; a handle is the name of a memfd, padded."""

    def __init__(self) -> None:
        self.mapped: dict[int, tuple[mmap.mmap, int]] = {}
        """By address: the mapping, and its descriptor where it is the owner's."""
        self.room = 2**30

    def uuid(self, index: int) -> str:
        return f"GPU-{index}"

    def indices(self) -> range:
        return range(2)

    def allocate(self, index: int, nbytes: int) -> int:  # noqa: ARG002 (the protocol's)
        if nbytes > self.room:
            raise OSError("cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY")
        fd = os.memfd_create("device")
        os.truncate(fd, nbytes)
        return self._map(fd, nbytes)

    def export(self, index: int, address: int) -> bytes:  # noqa: ARG002 (the protocol's)
        return f"/proc/{os.getpid()}/fd/{self.mapped[address][1]}".encode().ljust(HANDLE_BYTES, b"\0")

    def open(self, index: int, handle: bytes) -> int:  # noqa: ARG002 (the protocol's)
        fd = os.open(handle.rstrip(b"\0"), os.O_RDWR)
        return self._map(fd, os.fstat(fd).st_size)

    def _map(self, fd: int, nbytes: int) -> int:
        mapping = mmap.mmap(fd, nbytes)
        address = int(np.frombuffer(mapping, np.uint8).ctypes.data)
        self.mapped[address] = (mapping, fd)
        return address

    def release(self, index: int, address: int, *, own: bool) -> None:  # noqa: ARG002 (the protocol's)
        os.close(self.mapped.pop(address)[1])

    def tensor(self, index: int, memory: Any) -> torch.Tensor:  # noqa: ARG002 (the protocol's)
        return torch.from_numpy(np.asarray(_AsArray(memory)))

    def synchronize(self, index: int) -> None:
        """Do nothing: every call is synchronous."""


class _AsArray:
    """numpy asks for `__array_interface__`, a GPU's libraries for `__cuda_array_interface__`; they look alike."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.__array_interface__ = memory.__cuda_array_interface__


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostDriver]:
    fake = HostDriver()
    monkeypatch.setattr(module, "driver", lambda: fake)
    yield fake
    if fake.mapped:
        gc.collect()  # a raised exception may hold references
    assert not fake.mapped, "expected all that was mapped to be released"


@contextmanager
def elsewhere() -> Iterator[None]:
    """Act as another process than the one that exported the handles."""
    given_out = dict(module._own)
    module._own.clear()
    yield
    module._own.update(given_out)


@pytest.mark.parametrize(
    ("place", "mapped"), [(nullcontext, 1), (elsewhere, 2)], ids=["in the owner's process", "in another"]
)
async def test_a_model_is_views_of_versions_on_a_device(
    driver: HostDriver, place: Callable[[], AbstractContextManager[None]], mapped: int
) -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    weights = {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}

    async with WeightPublisher(weights, device="cuda:1") as publisher:
        async with AsyncExitStack() as stack:
            with place():
                subscriber = await stack.enter_async_context(WeightSubscriber(publisher.url))
            with pytest.raises(WeightsMismatch, match="expected versions in memory of the host"):
                subscriber.attach(model.state_dict())
            subscriber.attach(model)
            for version in (1, 2, 3):
                await publisher.publish({name: tensor + version for name, tensor in weights.items()}, version)
                subscriber.refresh()
                assert subscriber.intact
                assert {*model.weight.flatten().tolist(), *model.bias.tolist()} == {1 + version, version}
        assert len(driver.mapped) == mapped
        assert publisher._opened().nbytes < 3 * mmap.PAGESIZE, "the versions are not in the segment"
        del subscriber, model
    del publisher


async def test_a_device_without_room_or_of_another_name_is_refused_when_the_publisher_opens(driver: HostDriver) -> None:
    driver.room = 0

    with pytest.raises(OutOfSharedMemory, match="of cuda:0 to share, got none: cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEM"):
        async with WeightPublisher({"x": torch.ones(2)}, device="cuda:0"):
            pass
    for name in ("cuda:2", "tpu"):
        with pytest.raises(NoDevice, match=rf"expected cpu, or cuda:N for N in \[0, 1\], got '{name}'"):
            async with WeightPublisher({"x": torch.ones(2)}, device=name):
                pass


@pytest.mark.parametrize(
    ("handle", "error", "message"),
    [
        (
            DeviceHandle("GPU-7", 4096, bytes(HANDLE_BYTES)),
            NoDevice,
            r"expected device GPU-7, got \['GPU-0', 'GPU-1'\]",
        ),
        (DeviceHandle("GPU-0", 4096, b"short"), StaleHandle, "5 bytes of handle"),
        (DeviceHandle("GPU-0", 4096, b"/proc/0/fd/9".ljust(HANDLE_BYTES, b"\0")), StaleHandle, "of a living publisher"),
    ],
    ids=["device", "length", "owner died"],
)
def test_a_handle_that_leads_nowhere_is_refused(
    driver: HostDriver, handle: DeviceHandle, error: type[Exception], message: str
) -> None:
    assert driver.indices()

    with pytest.raises(error, match=message):
        DeviceMemory.open(handle)


async def test_memory_that_was_given_to_another_publisher_is_stale(driver: HostDriver) -> None:
    assert driver.indices()
    async with WeightPublisher({"x": torch.ones(2)}, device="cuda:0") as publisher:
        memory = publisher._opened()._memory
        assert isinstance(memory, DeviceMemory)
        memory.mark(99)
        with elsewhere(), pytest.raises(StaleHandle, match="got those of 63: subscribe anew"):
            async with WeightSubscriber(publisher.url):
                pass
        del memory
    del publisher


async def serve(closing: anyio.Event, *, task_status: TaskStatus[str]) -> None:
    async with WeightPublisher({"weight": torch.ones(2, 3)}, device="cuda:0") as publisher:
        await publisher.publish({"weight": torch.ones(2, 3)}, 1)
        task_status.started(publisher.url)
        await closing.wait()


async def test_when_a_publisher_closes_its_memory_on_a_device_is_sampled_from_no_more(driver: HostDriver) -> None:
    assert driver.indices()
    closing = anyio.Event()
    with torch.device("meta"):
        model = nn.Linear(3, 2, bias=False)

    async with anyio.create_task_group() as tasks, WeightSubscriber(await tasks.start(serve, closing)) as subscriber:
        subscriber.attach(model)
        subscriber.refresh()
        before = subscriber.intact
        closing.set()
        with pytest.raises(PeerLost, match="closed, and its memory on"):
            await subscriber.newer()
        assert (before, subscriber.intact) == (True, False)
        with pytest.raises(PeerLost, match="closed, and its memory on"):
            async with subscriber.sampling():
                pass
        with pytest.raises(PeerLost, match="closed, and its memory on"):
            subscriber.refresh()


def test_a_machine_without_a_driver_is_an_error() -> None:
    if os.path.exists("/dev/nvidiactl"):  # noqa: PTH110 (a device node)
        pytest.skip("this machine has one")

    with pytest.raises(NoDevice, match="expected a CUDA driver, got none: libcuda"):
        module.driver()


class Library:
    """libcuda, as far as it is called: notes the calls and answers each with a code."""

    def __init__(self, code: int = 0) -> None:
        self.calls: list[tuple[str, tuple[object, ...]]] = []
        self.code = code

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.calls.append((name, arguments))
            if name == "cuGetErrorName":
                arguments[1]._obj.value = b"CUDA_ERROR_INVALID_VALUE"
                return 0
            return self.code

        return call


def test_a_call_that_the_driver_refuses_is_an_error_by_its_name() -> None:
    cuda = module.CudaDriver(Library(code=1))  # type: ignore[arg-type]

    with pytest.raises(OSError, match="cuMemAlloc_v2: CUDA_ERROR_INVALID_VALUE"):
        cuda._call("cuMemAlloc_v2", ctypes.c_size_t(1))
