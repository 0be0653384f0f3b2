"""MemoryFolder: versions as files in memory, for inference servers of this host that load files; no disk is written to.

A version is a safetensors file without a name (memfd). Its folder has a link to it, under the publisher's /proc/PID/fd,
so a server loads it as it does any other. The memory is freed with the publisher, also if that is killed, or with the
last server that has mapped it.
"""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Self

import anyio
import anyio.to_thread

from ..channels.shared_memory import allocate
from ..util.checkpoint import FOLDER_SCHEME
from ..util.os_errors import explaining_os_errors
from .folder_files import WEIGHTS
from .tensor_layout import WritePlan
from .tensor_manifest import manifest_of
from .weight_memory import HostMemory
from .weight_specs import FusedTensor, Tensor
from .weights import NO_VERSION

if TYPE_CHECKING:
    from torch import nn

PREFIX = "version-"


class MemoryFolder:
    """Publishes versions of one set of tensors to servers of this host and user, as `WeightFolder` does, in memory."""

    def __init__(
        self,
        folder: str | Path,
        model: nn.Module | Mapping[str, Tensor],
        *,
        fused: Iterable[FusedTensor] = (),
        cast: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Prepare for tensors like these, without publishing.

        Args:
            folder: where the links are placed; no other publisher may use it meanwhile.
            model: see `WeightPublisher`.
            fused: likewise.
            cast: likewise.

        Raises: see `WeightFolder`.
        """
        self.folder: Path = Path(folder).absolute()
        self._plan = WritePlan(manifest_of(model), fused, cast)
        self._files: list[_MemoryFile] = []
        """One for the first version, two from the second on."""
        self._version = NO_VERSION
        self._open = False
        self._publishing = anyio.Lock()

    def __repr__(self) -> str:
        return f"<MemoryFolder {self.folder} {'open' if self._open else 'closed'}: version {self._version}>"

    async def __aenter__(self) -> Self:
        """Create the folder if need be. The links of an earlier publisher are removed.

        Raises:
            DiskFull, NotWritable: it cannot be created.
        """
        await anyio.to_thread.run_sync(self._take)
        self._open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Remove the links, and free the memory that no server has mapped."""
        self._open = False
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._release)

    @property
    def url(self) -> str:
        """Return the URL of the newest version, for servers of this host."""
        return f"{FOLDER_SCHEME}{self._path(self._version)}"

    @property
    def ties(self) -> Mapping[str, str]:
        """Names of tied tensors, each with that of the earlier tensor with the same memory."""
        return self._plan.ties

    @property
    def version(self) -> int:
        """Return the newest version that was published; −1 before the first."""
        return self._version

    async def publish(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Make `tensors` the newest weights, in place of those before the last: no server may load those any more.

        Args:
            tensors: see `WeightPublisher.publish`.
            version: likewise.

        Raises:
            WeightsMismatch: the tensors differ from those at construction; lists every difference.
            InvalidConfig: `version` is not newer than the last.
            anyio.ClosedResourceError: the folder is not open.
            OutOfSharedMemory: this host has no room for the weights, twice.
            DiskFull, NotWritable: a link cannot be created.
        """
        async with self._publishing:
            if not self._open:
                raise anyio.ClosedResourceError
            self._plan.check(tensors, version, newest=self._version)
            await anyio.to_thread.run_sync(self._write, tensors, version)

    def _take(self) -> None:
        with explaining_os_errors("weights to publish", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            for left in self.folder.glob(f"{PREFIX}*"):
                shutil.rmtree(left)

    def _release(self) -> None:
        for left in self.folder.glob(f"{PREFIX}*"):
            shutil.rmtree(left, ignore_errors=True)
        while self._files:
            self._files.pop().close()

    def _path(self, version: int) -> Path:
        return self.folder / f"{PREFIX}{version}"

    def _write(self, tensors: Mapping[str, Tensor], version: int) -> None:
        file = self._unused()
        shutil.rmtree(self._path(file.version), ignore_errors=True)
        file.version = version
        file.fill(tensors)
        path = self._path(version)
        with explaining_os_errors("a version of the weights", path):
            path.mkdir()
            (path / WEIGHTS).symlink_to(file.link)
        self._version = version

    def _unused(self) -> _MemoryFile:
        """Return the file that does not have the newest version."""
        for file in self._files:
            if file.version != self._version:
                return file
        self._files.append(_MemoryFile(self._plan))
        return self._files[-1]


class _MemoryFile:
    """A safetensors file without a name."""

    def __init__(self, plan: WritePlan) -> None:
        self.version = NO_VERSION
        """The version in it, or that is being written to it."""
        self._plan = plan
        header = plan.layout.header
        self._first = len(header)
        nbytes = len(header) + plan.layout.nbytes
        purpose = f"{len(plan.layout.manifest.tensors)} tensors, for inference servers"
        self._fd = allocate(nbytes, purpose, "free memory, or publish a smaller model")
        try:
            self._memory = HostMemory(memoryview(mmap.mmap(self._fd, nbytes)))
        except BaseException:
            os.close(self._fd)
            raise
        self._memory.bytes[: self._first] = memoryview(header)

    @property
    def link(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        for offset, tensor, spec in self._plan.pieces(tensors):
            self._memory.store(self._first + offset, tensor, spec)
        self._memory.flush()

    def close(self) -> None:
        self._memory.close()
        os.close(self._fd)
