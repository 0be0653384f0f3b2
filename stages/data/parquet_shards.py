"""Sets of Parquet files by their names: the shards of a set have its name and a number, and all of them are needed.

    train-00000-of-00002.parquet   train-00001-of-00002.parquet   -> the set `train`
    0000.parquet   0001.parquet                                   -> a set without a name
    part-00000-<uuid>.snappy.parquet                              -> the set `part`; numbers may have gaps

Opens no file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePath, PurePosixPath

from ..._pipeline.errors import InvalidData

SUFFIX = ".parquet"

_COUNTED = re.compile(r"(?P<set>.*?)[-_.]?(?P<number>\d+)-of-(?P<count>\d+)")
_NUMBERED = re.compile(r"(?:(?P<set>.*)[-_.])?(?P<number>\d+)")
_WRITTEN_BY_SPARK = re.compile(r"(?P<set>part)-\d+-[0-9a-f]{8}-[0-9a-f-]{27}.*")


def parquet_sets(folder: Path) -> dict[str, list[Path]]:
    """Return the Parquet files of a folder by the name of their set, in the order of their names. Reads the folder."""
    sets: dict[str, list[Path]] = {}
    for path in sorted(path for path in folder.iterdir() if _is_shard(path)):
        sets.setdefault(_set_of(path.stem), []).append(path)
    return sets


def sets_among(paths: Iterable[PurePosixPath]) -> dict[str, list[PurePosixPath]]:
    """Return files of any folders by the path of their set: Parquet files, and each of JSON lines as its own."""
    sets: dict[str, list[PurePosixPath]] = {}
    for path in sorted(paths):
        if _is_shard(path):
            sets.setdefault(str(path.parent / _set_of(path.stem)), []).append(path)
        elif path.suffix.lower() == ".jsonl":
            sets[str(path)] = [path]
    return sets


def _is_shard(path: PurePath) -> bool:
    return path.suffix.lower() == SUFFIX and path.name[0] not in "._"


def check_shards(files: Iterable[Path]) -> None:
    """Check that no shard of a set is absent.

    Raises:
        InvalidData: one is, or the names of the files state different counts.
    """
    files = list(files)
    counted = [match for path in files if (match := _COUNTED.fullmatch(path.stem))]
    if counted:
        _check_counts(files, {int(match["number"]) for match in counted}, {int(match["count"]) for match in counted})
        return
    numbers = sorted(int(match["number"]) for path in files if (match := _NUMBERED.fullmatch(path.stem)))
    if numbers and numbers != (whole := list(range(min(numbers[0], 1), numbers[-1] + 1))):
        absent = next(number for number in whole if number not in numbers)
        raise InvalidData(_message(files, f"numbers from 0 or 1 on without a gap, got none with {absent}"))


def _check_counts(files: list[Path], numbers: set[int], counts: set[int]) -> None:
    if len(counts) > 1:
        raise InvalidData(_message(files, f"one number after -of-, got {', '.join(map(str, sorted(counts)))}"))
    (count,) = counts
    absent = sorted(set(range(count)) - numbers)
    if len(files) != count or absent:
        which = f", without number {absent[0]}" if absent else ""
        raise InvalidData(_message(files, f"all {count} shards, got {len(files)}{which}"))


def _message(files: list[Path], expected: str) -> str:
    return (
        f"{files[0].parent}: expected files like {files[0].name} with {expected}: download or move what is missing or "
        f"too much, or give the path of one file"
    )


def _set_of(stem: str) -> str:
    for form in (_COUNTED, _WRITTEN_BY_SPARK, _NUMBERED):
        if match := form.fullmatch(stem):
            return match["set"] or ""
    return stem
