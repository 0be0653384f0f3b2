"""WeightFolder: weights for samplers that share no memory with the trainer, as versions in a folder on a shared disk.

A version is a directory that is written atomically: a safetensors file, the changes since the version before, its
publisher, and a manifest with hashes (`folder_files`). `publish` copies the tensors into memory and returns; a worker
thread writes the copy meanwhile. The publisher holds a lock while it lives, so that a reader can check that. One
process of each host, the mirror (`folder_mirror`), reads a version into shared memory, and serves the
`WeightSubscriber`s of that host.

    async with WeightFolder("/shared/weights", model) as publisher:
        await publisher.publish(model.state_dict(), version=0)
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

import anyio
import anyio.to_thread
import msgspec
import numpy as np
from numpy.typing import NDArray

from ..accounting.telemetry import get_logger
from ..errors import InvalidConfig, WeightsInUse
from ..util.atomic_file import UNFINISHED, remove_unfinished, sync_to_disk
from ..util.background_write import BackgroundWrite
from ..util.checkpoint import FOLDER_SCHEME, remove_old_checkpoints, write_checkpoint
from ..util.json_file import write_json
from ..util.lock_file import LockFile
from ..util.manifest import MANIFEST
from ..util.os_errors import explaining_os_errors
from .engine_sync import Syncable, synced
from .folder_delta import write_changes
from .folder_files import CHANGES, LOCK, OWNER, VERSION, WEIGHTS, Owner, Version
from .tensor_layout import LENGTH, WritePlan
from .tensor_manifest import manifest_of
from .weight_specs import FusedTensor, Tensor
from .weights import NO_VERSION, WeightWriter

if TYPE_CHECKING:
    from torch import nn

log = get_logger("penstock.weights")

E = TypeVar("E", bound=Syncable)

KEPT = 2
"""Versions that are kept: the newest, and one that a sampler may be reading."""


class WeightFolder:
    """Publishes versions of one set of tensors into a folder; like `WeightPublisher`, for samplers on other hosts."""

    def __init__(
        self,
        folder: str | Path,
        model: nn.Module | Mapping[str, Tensor],
        *,
        fused: Iterable[FusedTensor] = (),
        cast: Mapping[str, str] = MappingProxyType({}),
        name: str | None = None,
    ) -> None:
        """Prepare for tensors like these, without publishing. The arguments are those of `WeightPublisher`.

        Raises:
            InvalidConfig: a value is no tensor, or has an unsupported dtype; or a buffer is on the meta device.
            WeightsMismatch: `fused` does not fit the tensors.
            InvalidConfig: `cast` names an unsupported dtype.
        """
        self.folder: Path = Path(folder).absolute()
        self.name: str = name or f"publisher in process {os.getpid()} of {socket.gethostname()}"
        self._plan = WritePlan(manifest_of(model), fused, cast)
        self._owner = Owner(self.name, secrets.randbits(63), msgspec.Raw(self._plan.layout.header[LENGTH.size :]))
        self._lock: LockFile | None = None
        self._version = NO_VERSION
        self._copies: WeightWriter | None = None
        """The copy that is written, and the one before; allocated by the first `publish`."""
        self._base = NO_VERSION
        """The version before in `_copies`."""
        self._writing = BackgroundWrite()
        self._publishing = anyio.Lock()
        self._stack = AsyncExitStack()

    def __repr__(self) -> str:
        state = "closed" if self._lock is None else "open"
        return f"<WeightFolder {self.folder} {state}: version {self._version}>"

    async def __aenter__(self) -> Self:
        """Lock the folder, created if need be. The versions of an earlier publisher are removed.

        Raises:
            WeightsInUse: another publisher has locked it.
            InvalidConfig: it contains other files than published weights.
            DiskFull, NotWritable, OutOfFileDescriptors: it cannot be used.
        """
        async with AsyncExitStack() as stack:
            await anyio.to_thread.run_sync(self._take)
            stack.push_async_callback(self._close)
            await stack.enter_async_context(self._writing)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait until the last version is written, and mark the folder as closed. The last versions stay in it.

        Raises:
            DiskFull, NotWritable, OutOfFileDescriptors: the last version could not be written. It is logged where the
                body raised.
        """
        try:
            with anyio.CancelScope(shield=True):
                await self.written()
        except Exception as error:
            if value is None:
                raise
            log.warning("weights_not_written", folder=str(self.folder), reason=str(error))
        finally:
            await self._stack.aclose()

    @property
    def url(self) -> str:
        """Return the URL for samplers on hosts that have the folder under this path."""
        return f"{FOLDER_SCHEME}{self.folder}"

    @property
    def ties(self) -> Mapping[str, str]:
        """Names of tied tensors, each with that of the earlier tensor with the same memory."""
        return self._plan.ties

    @property
    def version(self) -> int:
        """Return the newest version that was published; −1 before the first."""
        return self._version

    async def publish(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Make `tensors` the newest weights: copy them, and return. The copy is written meanwhile; see `written`.

        Waits until the version before is written. The arguments are those of `WeightPublisher.publish`.

        Raises:
            WeightsMismatch: the tensors differ from those at construction; lists every difference.
            InvalidConfig: `version` is not newer than the last.
            anyio.ClosedResourceError: the folder is not locked.
            OutOfSharedMemory: this host has no room for the weights, twice.
            DiskFull, NotWritable, OutOfFileDescriptors: the version before could not be written, so this one was not
                begun; the versions before them stay.
        """
        async with self._publishing:
            if self._lock is None:
                raise anyio.ClosedResourceError
            await self.written()
            self._plan.check(tensors, version, newest=self._version)
            await anyio.to_thread.run_sync(self._copy, tensors, version)
            self._writing.begin(partial(self._write, version, self._version))
            self._version = version

    async def written(self) -> None:
        """Wait until samplers and servers can load the newest version.

        Raises:
            DiskFull, NotWritable, OutOfFileDescriptors: it could not be written; the versions before it stay. Raised
                once, by this, `publish`, `watch` or the end of the body.
        """
        await self._writing.finished()

    async def watch(self) -> None:
        """Wait until a version cannot be written, and raise the reason; for a trainer that waits for samples of it.

        Raises:
            DiskFull, NotWritable, OutOfFileDescriptors: see `written`.
        """
        await self._writing.watch()

    def sync(self, engine: E) -> AbstractAsyncContextManager[E]:
        """Keep `engine` awake within the body, with the newest version; see `WeightPublisher.sync`."""
        return synced(self, engine)

    def paused(self) -> AbstractAsyncContextManager[None]:
        """Raise RuntimeError: samplers that read a folder cannot be paused.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"expected samplers that can be paused, got those that read {self.folder}: use "
            f"SinkTrainer(sampling='overlap')"
        )

    def _take(self) -> None:
        with explaining_os_errors("weights to publish", self.folder):
            self._lock = self._locked()

    def _locked(self) -> LockFile:
        self.folder.mkdir(parents=True, exist_ok=True)
        foreign = sorted(path.name for path in self.folder.iterdir() if not _ours(path))
        if foreign:
            raise InvalidConfig(
                f"folder: expected {self.folder} to be empty, or of published weights, got {foreign} in it"
            )
        lock = LockFile(self.folder / LOCK)
        try:
            self._take_over(lock)
        except BaseException:
            lock.close()
            raise
        return lock

    def _take_over(self, lock: LockFile) -> None:
        if not lock.take():
            raise WeightsInUse(f"expected {self.folder} without a publisher, but {lock.holder} publishes into it")
        remove_unfinished(self.folder)
        for left in self.folder.glob("*/"):
            shutil.rmtree(left)
        self._write_owner(self._owner)

    def _write_owner(self, owner: Owner) -> None:
        write_json(self.folder / OWNER, owner)

    async def _close(self) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._release)

    def _release(self) -> None:
        if self._lock is None:
            return
        try:
            self._write_owner(msgspec.structs.replace(self._owner, closed=True))
        except OSError as error:  # samplers see it by the lock
            log.warning("weights_not_closed", folder=str(self.folder), reason=str(error))
        finally:
            self._lock.close()
            self._lock = None
            if self._copies is not None:
                self._copies.close()
                self._copies = None

    def _copy(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Copy the tensors beside those of the version before."""
        self._copies = self._copies or WeightWriter(self._plan)
        self._base = self._copies.latest
        self._copies.write(tensors, version)

    def _write(self, version: int, before: int) -> None:
        """Write the copied version; if that fails, version `before` is the newest again."""
        try:
            newest = write_checkpoint(self.folder, version, self._fill)
        except BaseException:
            self._version = before
            raise
        remove_old_checkpoints(self.folder, newest, KEPT)

    def _fill(self, into: Path) -> None:
        """Write the files of the copied version; its changes are searched for while the disk takes the whole of it."""
        copies, nbytes = self._copies, self._plan.layout.nbytes
        if copies is None:
            raise anyio.ClosedResourceError
        with ThreadPoolExecutor(1) as threads:
            changes = None
            if self._base != NO_VERSION:
                changes = threads.submit(write_changes, into / CHANGES, copies, nbytes)
            self._write_whole(into / WEIGHTS, copies.spans(0, nbytes)[0])
            spans = () if changes is None else changes.result()
        write_json(into / VERSION, Version(copies.latest, self._owner.generation, self._base, spans))

    def _write_whole(self, path: Path, content: NDArray[np.uint8]) -> None:
        with path.open("wb") as file:
            file.write(self._plan.layout.header)
            file.write(content.data)
        sync_to_disk(path)


def _ours(path: Path) -> bool:
    """Return whether a publisher created `path`; an unfinished version has no manifest yet."""
    if path.is_dir():
        return path.name.startswith(".unfinished-") or (path / MANIFEST).exists()
    return path.name in {LOCK, OWNER} or (path.name.startswith(f".{OWNER}.") and path.suffix == UNFINISHED)
