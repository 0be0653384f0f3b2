"""The mirror of a folder of weights: one process of each host reads every version, once, and shares it.

It polls the folder, because file systems that hosts share do not report changes. Of a version whose predecessor it has
it reads the changes. A version is hashed while it is read into the segment, and no subscriber sees it before it has its
hashes. The publisher waits for no mirror, so the mirror waits for its samplers, however long a batch is: it overwrites
no version that one of them samples with.
"""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.from_thread
import anyio.to_thread
import numpy as np
import xxhash

from ..._schemas.control import Reject
from ..accounting.telemetry import get_logger
from ..errors import FileDamaged, NobodyListens, PeerLost, PenstockError, StaleHandle, WeightsDamaged
from ..util.checkpoint import FOLDER_SCHEME, latest_checkpoint, step_of
from ..util.json_file import read_json
from ..util.lock_file import is_locked
from ..util.manifest import MANIFEST, Manifest
from .folder_delta import ChangesReader
from .folder_files import CHANGES, LOCK, OWNER, VERSION, WEIGHTS, Owner, Version
from .tensor_layout import TensorLayout, WritePlan
from .weight_address import mirror_name
from .weight_subscriptions import Subscriptions
from .weights import WeightWriter

log = get_logger("penstock.weights")

S = TypeVar("S", Manifest, Owner, Version)

CHUNK_BYTES = 4 * 2**20
"""Number of bytes that are read and hashed at once."""

POLL_S = 0.25
"""Interval between two polls of the folder."""


class FolderReader:
    """The versions of one publisher in a folder; those of the next one are another reader's. Blocks."""

    def __init__(self, url: str) -> None:
        """Read the publisher of the folder at `url`.

        Raises:
            NobodyListens: the folder has had no publisher.
        """
        self._folder = Path(url.removeprefix(FOLDER_SCHEME))
        try:
            self.owner = _decoded(self._folder / OWNER, Owner)
            self.layout = TensorLayout.parse(bytes(self.owner.header))
        except (WeightsDamaged, ValueError) as error:
            raise NobodyListens(f"expected a publisher at {url}, got none: {error}") from None
        self.mirror = mirror_name(str(self._folder.resolve()), self.owner.generation)
        """See `WeightAddress.mirror`."""

    def poll(self, latest: int) -> Path | None:
        """Return the newest version if it is above `latest`, and update `owner`.

        Raises:
            StaleHandle: another publisher has taken the folder.
            PeerLost: the publisher died, and there is no newer version.
            WeightsDamaged: the file with the publisher is torn, absent or altered.
            OSError: the folder cannot be read.
        """
        alive = is_locked(self._folder / LOCK)  # before the versions: one that has died writes none any more
        owner = _decoded(self._folder / OWNER, Owner)
        self._check(owner.generation, owner.name)
        newest = latest_checkpoint(self._folder)
        if newest is not None and step_of(newest) > latest:
            return newest
        if not (alive or owner.closed):
            raise PeerLost(f"{owner.name} died: its lock on {self._folder} is released")
        self.owner = owner
        return None

    def read(self, version: Path, writer: WeightWriter) -> None:
        """Read `version` into the segment of `writer`, and make it the newest if it has its hashes.

        Only its changes are read if the segment has the version before; all of it if they are damaged.

        Raises:
            WeightsDamaged: it is torn, absent or altered.
            StaleHandle: it is another publisher's.
        """
        described = _decoded(version / VERSION, Version)
        self._check(described.generation, "another publisher")
        writer.begin()
        if not (described.spans and described.base == writer.latest):
            self._read_whole(version, writer)
        elif (damage := self._read_changes(version, described, writer)) is not None:
            self._read_whole(version, writer)
            log.warning("weight_changes_damaged", version=described.version, reason=damage)
        writer.complete(step_of(version))

    def _read_changes(self, version: Path, described: Version, writer: WeightWriter) -> str | None:
        """Read the changes of a version; return the damage if they cannot be used."""
        check = anyio.from_thread.check_cancelled
        changes = ChangesReader(writer, described.version, self.layout.nbytes, len(self.layout.header), check)
        try:
            changes.read(version / CHANGES, version / WEIGHTS, described.spans)
        except (WeightsDamaged, OSError) as error:
            return str(error)
        return None

    def _read_whole(self, version: Path, writer: WeightWriter) -> None:
        path, written = version / WEIGHTS, _decoded(version / MANIFEST, Manifest).files.get(WEIGHTS)
        if written is None:
            raise WeightsDamaged(f"{version / MANIFEST}: expected the hash of {WEIGHTS}, got none: it was altered")
        try:
            nbytes, digest = self._copied(path, writer)
        except OSError as error:
            raise WeightsDamaged(f"expected {path}, got none: {error.strerror}") from error
        if nbytes != (expected := len(self.layout.header) + self.layout.nbytes):
            raise WeightsDamaged(f"{path}: expected {expected} bytes, got {nbytes}: it is torn")
        if digest != written.xxh3:
            raise WeightsDamaged(f"{path}: expected xxh3 {written.xxh3}, got {digest}: it was altered")

    def _copied(self, path: Path, writer: WeightWriter) -> tuple[int, str]:
        """Copy the tensors of a file, and return its size and its hash; end early if the calling task is cancelled."""
        memory, start = np.empty(CHUNK_BYTES, np.uint8), 0
        with path.open("rb") as file:
            digest = xxhash.xxh3_128(file.read(len(self.layout.header)))
            while count := file.readinto(memory.data[: self.layout.nbytes - start]):
                anyio.from_thread.check_cancelled()
                digest.update(memory.data[:count])
                writer.store(start, memory[:count])
                start += count
            return os.fstat(file.fileno()).st_size, digest.hexdigest()

    def _check(self, generation: int, name: str) -> None:
        if generation != self.owner.generation:
            raise StaleHandle(
                f"expected weights of {self.owner.name} in {self._folder}, got those of {name}: subscribe again"
            )


class FolderMirror:
    """Reads the versions in a folder into a segment of this host, and serves subscribers."""

    def __init__(self, reader: FolderReader, writer: WeightWriter, url: str) -> None:
        self.subscriptions = Subscriptions(reader.owner.name, math.inf)
        self.subscriptions.open(writer, url)
        self._reader = reader
        self._writer = writer

    async def follow(self) -> None:
        """Read versions until an error, and notify the subscribers of it; or until the publisher closes.

        The last version of a publisher that closed is served to further subscribers too, until this is cancelled.
        """
        try:
            await self.subscriptions.joined()  # or one that begins after the end would not be notified of it
            while (newest := await self._poll()) or not self._reader.owner.closed:
                if newest is None:
                    await anyio.sleep(POLL_S)
                else:
                    await self._read(newest)
        except (PenstockError, OSError) as error:
            log.warning("weights_lost", url=self.subscriptions.url, reason=str(error))
            await self.subscriptions.notify_end(Reject(type(error).__name__, str(error)))
        else:
            await self.subscriptions.notify_end()
            await anyio.sleep_forever()

    async def _poll(self) -> Path | None:
        return await anyio.to_thread.run_sync(self._reader.poll, self._writer.latest)

    async def _read(self, version: Path) -> None:
        """Read `version`, once no sampler uses the buffer for it."""
        await self.subscriptions.released(self._writer.sequence - 1)
        try:
            await anyio.to_thread.run_sync(self._reader.read, version, self._writer)
        except WeightsDamaged:
            if await self._poll() == version:  # else it was deleted, because there are newer ones
                raise
        self.subscriptions.wake_all()


@asynccontextmanager
async def folder_mirror(reader: FolderReader, url: str) -> AsyncIterator[FolderMirror]:
    """Allocate the segment of a mirror within the body.

    Raises:
        OutOfSharedMemory: this host has no room for the weights, twice.
    """
    with closing(await anyio.to_thread.run_sync(WeightWriter, WritePlan(reader.layout.manifest))) as writer:
        yield FolderMirror(reader, writer, url)


def _decoded(path: Path, kind: type[S]) -> S:
    try:
        return read_json(path, kind, remedy="let the publisher begin again")
    except FileDamaged as error:
        raise WeightsDamaged(str(error)) from error
    except OSError as error:
        raise WeightsDamaged(f"expected {path}, got none: {error.strerror}") from error
