"""The samplers' end of a folder of weights: a model is brought to the newest version that lies in it.

As `WeightSubscriber`, where there is no memory to share and nobody to be asked: the folder is looked at.
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
import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray
from torch import nn

from ..._pipeline.errors import NobodyListens, PeerClosed, PeerLost, StaleHandle, WeightsDamaged
from ..._pipeline.policy.tensor_layout import TensorLayout
from ..._pipeline.policy.weight_copies import CopiedModel, attached
from ..._pipeline.policy.weight_memory import HostMemory, TensorBuffer
from ..._pipeline.policy.weight_specs import FusedTensor, Tensor
from ..._pipeline.policy.weight_subscriber import WeightSubscriber
from ..._pipeline.policy.weight_views import MappedModel
from ..._pipeline.policy.weights import NO_VERSION
from ..training.checkpoint import FOLDER_SCHEME, latest_checkpoint, step_of
from .torch_weight_folder import MANIFEST, OWNER, WEIGHTS, Manifest, Owner, is_published_into

__all__ = ["FolderSubscriber", "Subscriber", "subscriber"]

S = TypeVar("S", Manifest, Owner)

CHUNK_BYTES = 4 * 2**20
"""Bytes that are read before they are hashed."""

LOOK_S = 0.25
"""How often the folder is looked at: a file system that hosts share tells nobody what others do in it."""


class FolderSubscriber:
    """The weights of a `WeightFolder`, and a model that is brought to the newest."""

    def __init__(self, url: str) -> None:
        """Prepare to subscribe at `url`."""
        self.url = url
        self._folder = Path(url.removeprefix(FOLDER_SCHEME))
        self._owner: Owner | None = None
        self._layout: TensorLayout
        """Of every version."""
        self._target: CopiedModel | MappedModel | None = None
        self._version = NO_VERSION
        self._latest = NO_VERSION
        self._newest = self._folder
        """Where the newest version lies, once there is one."""
        self._looked = float("-inf")
        """When the folder was looked at."""

    def __repr__(self) -> str:
        return f"<FolderSubscriber {self.url}: version {self._version} of {self._latest}>"

    async def __aenter__(self) -> Self:
        """See who publishes there.

        Raises:
            NobodyListens: nobody ever did.
        """
        try:
            owner = await anyio.to_thread.run_sync(_decoded, self._folder / OWNER, Owner)
            self._layout, self._owner = owner.layout(), owner
        except (WeightsDamaged, ValueError) as error:
            raise NobodyListens(f"expected a publisher at {self.url}, got none: {error}") from None
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave. The model keeps its weights."""

    device = "cpu"
    """As `WeightSubscriber.device`."""

    paused = False
    """Nobody can pause those who read a folder."""

    intact = True
    """What was read is this process' own: nobody writes over it."""

    @property
    def latest(self) -> int:
        """The newest version at the last look; −1 before the first."""
        return self._latest

    @property
    def version(self) -> int:
        """The version that the attached tensors hold; −1 before the first `refresh`."""
        return self._version

    def attach(
        self, model: nn.Module | Mapping[str, Tensor], *, fused: Iterable[FusedTensor] = (), copied: bool = False
    ) -> None:
        """As `WeightSubscriber.attach`: a module's tensors become views of this process' one copy.

        Raises:
            WeightsMismatch: what is published differs; lists every difference.
            TypeError: a value is no tensor.
        """
        owner, manifest = self._opened(), self._layout.manifest
        whose = f"weights of {owner.name} do not fit the model"
        self._target = attached(model, manifest, fused, whose, device=self.device, copied=copied)
        self._version = NO_VERSION

    def detach(self) -> None:
        """Let go of what was attached."""
        self._target = None

    def refresh(self) -> int:
        """As `WeightSubscriber.refresh`; reads the disk.

        Raises:
            WeightsDamaged: the newest version is torn, absent or altered; the tensors stay as they were.
            StaleHandle: another publisher has taken the folder.
            PeerLost: the publisher died, and the tensors hold its last version.
            RuntimeError: nothing is attached.
        """
        if self._target is None:
            raise RuntimeError("expected tensors to refresh, got none: call attach(model) first")
        if time.monotonic() - self._looked > LOOK_S:
            self._look()
        while self._latest > self._version:
            try:
                version, tensors = self._read(self._newest)
            except WeightsDamaged:
                damaged = self._latest
                self._look()
                if self._latest == damaged:  # else it was deleted, for there are newer ones
                    raise
            else:
                self._target.load(tensors)
                self._version = version
        return self._version

    def _look(self) -> None:
        """See what is newest.

        Raises:
            StaleHandle: another publisher has taken the folder.
            PeerLost: the publisher died, and nothing newer is there.
        """
        self._looked = time.monotonic()
        alive = is_published_into(self._folder)
        owner = _decoded(self._folder / OWNER, Owner)
        if owner.generation != self._opened().generation:
            raise StaleHandle(f"expected weights of {self._opened().name}, got those of {owner.name}: subscribe anew")
        self._owner = owner
        newest = latest_checkpoint(self._folder)
        if newest is not None:
            self._newest = newest
        self._latest = NO_VERSION if newest is None else step_of(newest)
        if not (alive or owner.closed or self._latest > self._version):
            raise PeerLost(f"{owner.name} died: {self._folder} is locked by nobody")

    async def newer(self, than: int | None = None) -> int:
        """As `WeightSubscriber.newer`.

        Raises:
            PeerLost: the publisher died.
            PeerClosed: the publisher closed; its last version is not newer.
            StaleHandle: another publisher has taken the folder.
        """
        bound = self._version if than is None else than
        while True:
            await anyio.to_thread.run_sync(self._look)
            if self._latest > bound:
                return self._latest
            owner = self._opened()
            if owner.closed:
                raise PeerClosed(f"{owner.name} closed at version {self._latest}: nothing above {bound} will come")
            await anyio.sleep(LOOK_S)

    @asynccontextmanager
    async def sampling(self) -> AsyncIterator[None]:
        """Sample within the body; it is never waited for."""
        yield

    def _read(self, folder: Path) -> tuple[int, TensorBuffer]:
        """Read a version, whole.

        Raises:
            WeightsDamaged: it is torn, absent or altered.
            StaleHandle: it is another publisher's.
        """
        manifest, owner = _decoded(folder / MANIFEST, Manifest), self._opened()
        if manifest.generation != owner.generation:
            raise StaleHandle(f"expected {folder} of {owner.name}, got another publisher's: subscribe anew")
        path, start = folder / WEIGHTS, len(self._layout.header)
        expected = start + self._layout.nbytes
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                memory = np.empty(min(size, expected), np.uint8)
                found = _read_into(memory, file)
        except OSError as error:
            raise WeightsDamaged(f"expected {path}, got none: {error.strerror}") from error
        if size != expected:
            raise WeightsDamaged(f"{path}: expected {expected} bytes, got {size}: it is torn")
        if found != manifest.xxh3:
            raise WeightsDamaged(f"{path}: expected xxh3 {manifest.xxh3}, got {found}: it was altered")
        return manifest.version, TensorBuffer(self._layout, HostMemory(memory.data), start)

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
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise WeightsDamaged(f"expected {path}, got none: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise WeightsDamaged(f"{path}: expected a {kind.__name__.lower()}, got {error}: it is torn") from error


Subscriber: TypeAlias = WeightSubscriber | FolderSubscriber
"""Whoever brings a model to the newest weights."""


def subscriber(url: str) -> Subscriber:
    """Who brings the weights that are published at `url`, by a WeightPublisher or into a WeightFolder."""
    return FolderSubscriber(url) if url.startswith(FOLDER_SCHEME) else WeightSubscriber(url)
