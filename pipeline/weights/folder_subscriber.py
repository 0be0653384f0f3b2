"""FolderSubscriber: loads the newest version in a folder of weights into a model.

Like `WeightSubscriber`, for a publisher without shared memory or connection: the folder is polled.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, TypeAlias, TypeVar

import anyio
import anyio.to_thread
import numpy as np
import xxhash
from numpy.typing import NDArray
from torch import nn

from ..errors import (
    FileDamaged,
    InvalidConfig,
    NobodyListens,
    PeerClosed,
    PeerLost,
    PenstockError,
    StaleHandle,
    WeightsDamaged,
)
from ..util.checkpoint import FOLDER_SCHEME, latest_checkpoint, step_of
from ..util.json_file import read_json
from ..util.manifest import MANIFEST, Manifest
from .tensor_layout import TensorLayout
from .weight_address import WeightAddress
from .weight_copies import CopiedModel, attached
from .weight_folder import OWNER, VERSION, WEIGHTS, Owner, Version, is_published_into
from .weight_memory import HostMemory, TensorBuffer
from .weight_specs import FusedTensor, Tensor
from .weight_subscriber import WeightSubscriber
from .weight_views import MappedModel
from .weights import NO_VERSION

S = TypeVar("S", Manifest, Owner, Version)

CHUNK_BYTES = 4 * 2**20
"""Number of bytes that are read and hashed at once."""

POLL_S = 0.25
"""Interval at which the folder is polled: a file system that hosts share sends no notifications."""


class FolderSubscriber:
    """Loads the newest weights of a `WeightFolder` into a model."""

    def __init__(self, url: str) -> None:
        """Prepare to subscribe at `url`, that of a `WeightFolder`.

        Raises:
            InvalidConfig: it is not one.
        """
        if not url.startswith(FOLDER_SCHEME):
            raise InvalidConfig(f"url: expected one that begins with {FOLDER_SCHEME}, got {url!r}")
        self.url = url
        self._folder = Path(url.removeprefix(FOLDER_SCHEME))
        self._owner: Owner | None = None
        self._layout: TensorLayout
        """Layout of every version."""
        self._target: CopiedModel | MappedModel | None = None
        self._version = NO_VERSION
        self._latest = NO_VERSION
        self._newest = self._folder
        """Path of the newest version, once there is one."""
        self._polled = float("-inf")
        """Time of the last poll."""

    def __repr__(self) -> str:
        return f"<FolderSubscriber {self.url}: version {self._version} of {self._latest}>"

    async def __aenter__(self) -> Self:
        """Read the publisher of the folder.

        Raises:
            NobodyListens: the folder has had no publisher.
        """
        try:
            owner = await anyio.to_thread.run_sync(_decoded, self._folder / OWNER, Owner)
            self._layout, self._owner = TensorLayout.parse(bytes(owner.header)), owner
        except (WeightsDamaged, ValueError) as error:
            raise NobodyListens(f"expected a publisher at {self.url}, got none: {error}") from None
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Do nothing: the model keeps its weights."""

    device = "cpu"
    """See `WeightSubscriber.device`."""

    paused = False
    """A folder has no pauses."""

    intact = True
    """Weights that were read are copies of this process, and never overwritten."""

    @property
    def latest(self) -> int:
        """Return the newest version at the last poll; −1 before the first."""
        return self._latest

    @property
    def version(self) -> int:
        """Return the version that the attached tensors hold; −1 before the first `refresh`."""
        return self._version

    def attach(
        self, model: nn.Module | Mapping[str, Tensor], *, fused: Iterable[FusedTensor] = (), copied: bool = False
    ) -> None:
        """Attach a model; see `WeightSubscriber.attach`. A module's tensors become views of this process' copy.

        Raises:
            WeightsMismatch: the published tensors differ; lists every difference.
            InvalidConfig: a value is no tensor.
        """
        owner, manifest = self._opened(), self._layout.manifest
        what = f"weights of {owner.name} do not fit the model"
        self._target = attached(model, manifest, fused, what, device=self.device, copied=copied)
        self._version = NO_VERSION

    def detach(self) -> None:
        """Detach the model."""
        self._target = None

    def refresh(self) -> int:
        """Load the newest version from the disk; see `WeightSubscriber.refresh`.

        Raises:
            WeightsDamaged: the newest version is torn, absent or altered; the tensors stay as they were.
            StaleHandle: another publisher has taken the folder.
            PeerLost: the publisher died, and the tensors hold its last version.
            RuntimeError: nothing is attached.
        """
        if self._target is None:
            raise RuntimeError("expected tensors to refresh, got none: call attach(model) first")
        if time.monotonic() - self._polled > POLL_S:
            self._poll()
        while self._latest > self._version:
            try:
                version, tensors = self._read(self._newest)
            except WeightsDamaged:
                damaged = self._latest
                self._poll()
                if self._latest == damaged:  # else it was deleted, because there are newer ones
                    raise
            else:
                self._target.load(tensors)
                self._version = version
        return self._version

    @property
    def stale(self) -> bool:
        """Return whether `refresh` would load a newer version, or raise. May block: it polls the folder."""
        if time.monotonic() - self._polled > POLL_S:
            try:
                self._poll()
            except PenstockError:
                self._polled = float("-inf")  # so that `refresh` raises it
                return True
        return self._latest > self._version

    def _poll(self) -> None:
        """Find the newest version.

        Raises:
            StaleHandle: another publisher has taken the folder.
            PeerLost: the publisher died, and there is no newer version.
        """
        self._polled = time.monotonic()
        alive = is_published_into(self._folder)
        owner = _decoded(self._folder / OWNER, Owner)
        if owner.generation != self._opened().generation:
            raise StaleHandle(f"expected weights of {self._opened().name}, got those of {owner.name}: subscribe again")
        self._owner = owner
        newest = latest_checkpoint(self._folder)
        if newest is not None:
            self._newest = newest
        self._latest = NO_VERSION if newest is None else step_of(newest)
        if not (alive or owner.closed or self._latest > self._version):
            raise PeerLost(f"{owner.name} died: its lock on {self._folder} is released")

    async def newer(self, than: int | None = None) -> int:
        """Wait for a newer version and return it; see `WeightSubscriber.newer`.

        Raises:
            PeerLost: the publisher died.
            PeerClosed: the publisher closed; its last version is not newer.
            StaleHandle: another publisher has taken the folder.
        """
        bound = self._version if than is None else than
        while True:
            await anyio.to_thread.run_sync(self._poll)
            if self._latest > bound:
                return self._latest
            owner = self._opened()
            if owner.closed:
                raise PeerClosed(f"{owner.name} closed at version {self._latest}: no version above {bound} will follow")
            await anyio.sleep(POLL_S)

    @asynccontextmanager
    async def sampling(self) -> AsyncIterator[None]:
        """Enter the body at once: the publisher does not wait for samplers."""
        yield

    def _read(self, folder: Path) -> tuple[int, TensorBuffer]:
        """Read and check a version.

        Raises:
            WeightsDamaged: it is torn, absent or altered.
            StaleHandle: it is another publisher's.
        """
        found, owner = _decoded(folder / VERSION, Version), self._opened()
        if found.generation != owner.generation:
            raise StaleHandle(f"expected {folder} of {owner.name}, got another publisher's: subscribe again")
        written = _decoded(folder / MANIFEST, Manifest).files[WEIGHTS]
        path, start = folder / WEIGHTS, len(self._layout.header)
        expected = start + self._layout.nbytes
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                memory = np.empty(min(size, expected), np.uint8)
                read = _read_into(memory, file)
        except OSError as error:
            raise WeightsDamaged(f"expected {path}, got none: {error.strerror}") from error
        if size != expected:
            raise WeightsDamaged(f"{path}: expected {expected} bytes, got {size}: it is torn")
        if read != written.xxh3:
            raise WeightsDamaged(f"{path}: expected xxh3 {written.xxh3}, got {read}: it was altered")
        return found.version, TensorBuffer(self._layout, HostMemory(memory.data), start)

    def _opened(self) -> Owner:
        if self._owner is None:
            raise RuntimeError(f"expected an open subscriber, got {self!r}: use it within `async with`")
        return self._owner


def _read_into(memory: NDArray[np.uint8], file: BinaryIO) -> str:
    """Fill `memory` as far as the file goes, and return the hash of the bytes that were read."""
    digest, view, at = xxhash.xxh3_128(), memory.data, 0
    while count := file.readinto(view[at : at + CHUNK_BYTES]):  # type: ignore[attr-defined]
        digest.update(view[at : at + count])
        at += count
    return digest.hexdigest()


def _decoded(path: Path, kind: type[S]) -> S:
    try:
        return read_json(path, kind, remedy="let the publisher begin again")
    except FileDamaged as error:
        raise WeightsDamaged(str(error)) from error
    except OSError as error:
        raise WeightsDamaged(f"expected {path}, got none: {error.strerror}") from error


Subscriber: TypeAlias = WeightSubscriber | FolderSubscriber
"""A subscriber to published weights."""


def subscriber(url: str | WeightAddress) -> Subscriber:
    """Return a subscriber to the weights at `url`, of a WeightPublisher or a WeightFolder."""
    if isinstance(url, str) and url.startswith(FOLDER_SCHEME):
        return FolderSubscriber(url)
    return WeightSubscriber(url)
