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
from typing import BinaryIO, NamedTuple, Self, TypeAlias, TypeVar

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import nn

from ...pipeline.errors import NobodyListens, PeerClosed, PeerLost, StaleHandle, WeightsDamaged
from ...pipeline.policy.weight_copies import Targets
from ...pipeline.policy.weight_memory import fill
from ...pipeline.policy.weight_specs import FusedTensor, Part, Tensor
from ...pipeline.policy.weight_subscriber import WeightSubscriber
from ...pipeline.policy.weight_views import Views
from ...pipeline.policy.weights import NO_VERSION
from ..training.checkpoint import FOLDER_SCHEME, latest_checkpoint, step_of
from .torch_weight_folder import CHUNK_BYTES, MANIFEST, OWNER, WEIGHTS, Manifest, Owner, is_published_into

__all__ = ["FolderSubscriber", "Subscriber", "subscriber"]

S = TypeVar("S", Manifest, Owner)

LOOK_S = 0.25
"""How often the folder is looked at: a file system that hosts share tells nobody what others do in it."""


class FolderSubscriber:
    """The weights of a `WeightFolder`, and a model that is brought to the newest."""

    def __init__(self, url: str) -> None:
        """Prepare to subscribe at `url`."""
        self.url = url
        self._folder = Path(url.removeprefix(FOLDER_SCHEME))
        self._owner: Owner | None = None
        self._target: _Copies | _Views | None = None
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
            self._owner = await anyio.to_thread.run_sync(_decoded, self._folder / OWNER, Owner)
        except WeightsDamaged as error:
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
        owner, whose = self._opened(), f"weights of {self._opened().name} do not fit the model"
        if copied or isinstance(model, Mapping):
            self._target = _Copies(Targets(model, owner.inventory, fused, whose))
        else:
            self._target = _Views(Views(model, owner.inventory, fused, whose, "cpu"))
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
                content = _read(self._newest, self._opened())
            except WeightsDamaged:
                damaged = self._latest
                self._look()
                if self._latest == damaged:  # else it was deleted, for there are newer ones
                    raise
            else:
                self._target.bring(content)
                self._version = content.version
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

    def _opened(self) -> Owner:
        if self._owner is None:
            raise RuntimeError(f"expected an open subscriber, got {self!r}: use it within `async with`")
        return self._owner


class _Content(NamedTuple):
    """A version that was read."""

    version: int
    memory: NDArray[np.uint8]
    starts: Mapping[str, int]
    """Where each tensor begins in it."""

    def elements(self, part: Part) -> NDArray[np.uint8]:
        start = self.starts[part.whole] + part.offset
        return self.memory[start : start + part.spec.nbytes]


class _Views:
    """A model whose tensors are views of the version that was read last."""

    def __init__(self, model: Views) -> None:
        self._model = model

    def bring(self, content: _Content) -> None:
        self._model.point_to(self._model.views(lambda part: torch.from_numpy(content.elements(part))))


class _Copies:
    """Tensors by name, that are filled."""

    def __init__(self, targets: Targets) -> None:
        self._targets = targets

    def bring(self, content: _Content) -> None:
        for part in self._targets.parts:
            fill(self._targets.tensors[part.spec.name], content.elements(part), part.spec)


def _read(folder: Path, owner: Owner) -> _Content:
    """A version, whole.

    Raises:
        WeightsDamaged: it is torn, absent or altered.
        StaleHandle: it is another publisher's.
    """
    manifest = _decoded(folder / MANIFEST, Manifest)
    if manifest.generation != owner.generation:
        raise StaleHandle(f"expected {folder} of {owner.name}, got another publisher's: subscribe anew")
    path = folder / WEIGHTS
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            memory = np.empty(min(size, manifest.nbytes), np.uint8)
            found = _read_into(memory, file)
    except OSError as error:
        raise WeightsDamaged(f"expected {path}, got none: {error.strerror}") from error
    if size != manifest.nbytes:
        raise WeightsDamaged(f"{path}: expected {manifest.nbytes} bytes, got {size}: it is torn")
    if found != manifest.xxh3:
        raise WeightsDamaged(f"{path}: expected xxh3 {manifest.xxh3}, got {found}: it was altered")
    return _Content(manifest.version, memory, _starts(memory, manifest))


def _read_into(memory: NDArray[np.uint8], file: BinaryIO) -> str:
    """Fill `memory` as far as the file goes, and return the hash of what was read."""
    digest, view, at = xxhash.xxh3_128(), memory.data, 0
    while count := file.readinto(view[at : at + CHUNK_BYTES]):  # type: ignore[attr-defined]
        digest.update(view[at : at + count])
        at += count
    return digest.hexdigest()


class _Entry(msgspec.Struct, frozen=True):
    """A tensor, in the head of a safetensors file."""

    data_offsets: tuple[int, int]


def _starts(memory: NDArray[np.uint8], manifest: Manifest) -> dict[str, int]:
    """Where each tensor begins in a safetensors file, tied ones where they are one."""
    first = 8 + int.from_bytes(memory[:8].tobytes(), "little")
    head = msgspec.json.decode(memory[8:first].tobytes(), type=dict[str, _Entry])
    return {spec.name: first + head[spec.tied or spec.name].data_offsets[0] for spec in manifest.tensors}


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
