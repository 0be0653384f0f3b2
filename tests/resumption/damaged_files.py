"""Kinds of damage to the files of a folder, for tests that resume a run from it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path


def empty(path: Path) -> None:
    path.write_bytes(b"")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def one_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0b100
    path.write_bytes(content)


def absent(path: Path) -> None:
    path.unlink()


DAMAGE = {"empty": empty, "cut": cut, "one bit": one_bit, "absent": absent}


def damaged_copies(folder: Path, kind: str, into: Path) -> Iterator[tuple[Path, Path]]:
    """Yield copies of `folder`, in each of which another file is damaged, and that file's path in it."""
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    for number, file in enumerate(files):
        copy = into / f"{number}"
        shutil.copytree(folder, copy, symlinks=True)
        if kind == "one bit" and not (copy / file).stat().st_size:
            continue
        DAMAGE[kind](copy / file)
        yield copy, file
