"""The manifest of a folder: the size and the hash of each file, so that damage is found before a file is believed.

    manifest.json   {"files": {"model.safetensors": {"nbytes": 988097824, "xxh3": "…"}, …}, "checksum": "crc32:…"}

It is written last, so a folder without one was never completed. The hash is XXH3 (128 bits): it finds damage by disks
and people, and does not authenticate: a user who can write the folder can write a fitting manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import xxhash

from ..errors import FileDamaged
from .atomic_file import sync_to_disk
from .json_file import read_json, write_json
from .regular_file import open_regular

MANIFEST = "manifest.json"

CHUNK_BYTES = 2**22
"""Number of bytes that are read and hashed at once."""


class FileSum(msgspec.Struct, frozen=True):
    """Length and hash of a file's content."""

    nbytes: int
    xxh3: str
    """128 bits, hexadecimal."""


class Manifest(msgspec.Struct, frozen=True):
    """The files of a folder, by their paths in it."""

    files: dict[str, FileSum]


def write_manifest(folder: Path) -> None:
    """Write the manifest of all files in `folder`, after they are on the disk. Blocks.

    The files are hashed while another thread waits for the disk, so hashing takes no time of its own on most machines.

    Raises:
        OSError: a file cannot be read or written.
    """
    paths = sorted(folder.rglob("*"))
    files = {path.relative_to(folder).as_posix(): path for path in paths if path.is_file()}
    with ThreadPoolExecutor(1) as threads:
        synced = threads.submit(_sync, [*paths, folder])
        sums = {name: sum_of(path) for name, path in files.items()}
        synced.result()
    write_json(folder / MANIFEST, Manifest(sums))


def damage_of(folder: Path, needed: Callable[[str], bool] = lambda _: True) -> str | None:
    """Return the first damage to a file of `folder`, as text; None if all are as they were written. Blocks.

    Args:
        folder: has a manifest.
        needed: takes the name of a file; returns whether to verify it.
    """
    try:
        manifest = read_json(folder / MANIFEST, Manifest, remedy="")
    except FileNotFoundError:
        return f"no {MANIFEST}, which `write_checkpoint` writes last"
    except FileDamaged as error:
        return str(error).removeprefix(f"{folder}/").removesuffix(": ")
    except OSError as error:
        return f"{MANIFEST} cannot be read ({error.strerror})"
    found = (_difference(folder, name, written) for name, written in manifest.files.items() if needed(name))
    return next(filter(None, found), None)


def sum_of(path: Path) -> FileSum:
    """Return the sum of the file at `path`. Blocks.

    Raises:
        OSError: it cannot be read.
    """
    digest, nbytes, memory = xxhash.xxh3_128(), 0, memoryview(bytearray(CHUNK_BYTES))
    with open_regular(path) as file:
        while count := file.readinto(memory):
            digest.update(memory[:count])
            nbytes += count
    return FileSum(nbytes, digest.hexdigest())


def _difference(folder: Path, name: str, written: FileSum) -> str | None:
    path = folder / name
    try:
        if (nbytes := path.stat().st_size) != written.nbytes:
            return f"{name} has {nbytes:,} bytes instead of {written.nbytes:,}"
        found = sum_of(path)
    except FileNotFoundError:
        return f"{name} is absent"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None if found == written else f"{name} was altered: its hash is {found.xxh3} instead of {written.xxh3}"


def _sync(paths: Iterable[Path]) -> None:
    for path in paths:
        if not path.is_symlink():
            sync_to_disk(path)
