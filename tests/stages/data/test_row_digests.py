"""Rows have a digest that depends on all of them, whatever holds them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.data import PromptDataset

ROWS = [{"prompt": f"{n}+{n}=", "answer": n + n} for n in range(3000)]


def other_row(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [*rows[:1500], {"prompt": "1500+1500=", "answer": 0}, *rows[1501:]]


def jsonl(rows: list[dict[str, Any]], folder: Path) -> Any:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet(rows: list[dict[str, Any]], folder: Path) -> Any:
    path = folder / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def saved(rows: list[dict[str, Any]], folder: Path) -> Any:
    datasets.Dataset.from_list(rows).save_to_disk(folder / "saved")
    return folder / "saved"


def dataset(rows: list[dict[str, Any]], _: Path) -> Any:
    return datasets.Dataset.from_list(rows)


def a_list(rows: list[dict[str, Any]], _: Path) -> Any:
    return rows


KINDS = [jsonl, parquet, saved, dataset, a_list]


@pytest.mark.parametrize("make", KINDS)
def test_the_digest_is_that_of_all_rows(make: Callable[..., Any], tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "same", "other", "more")]
    for folder in folders:
        folder.mkdir()
    contents = (ROWS, ROWS, other_row(ROWS), [*ROWS, {"prompt": "?", "answer": 0}])

    one, same, other, more = (
        PromptDataset(make(rows, folder)).identity() for rows, folder in zip(contents, folders, strict=True)
    )

    assert one == same
    assert one["rows"] == 3000
    assert len({each["digest"] for each in (one, other, more)}) == 3


def test_a_file_that_was_changed_and_has_its_old_time_has_another_digest(tmp_path: Path) -> None:
    path: Path = jsonl(ROWS, tmp_path)
    before, times = PromptDataset(path).identity(), path.stat()
    with path.open("r+b") as file:
        file.seek(len(json.dumps(ROWS[0])) // 2)
        file.write(b"7")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    assert PromptDataset(path).identity()["digest"] != before["digest"]


def test_of_rows_of_another_class_so_many_are_read_as_are_quick() -> None:
    class Slow:
        read = 0

        def __len__(self) -> int:
            return 10**9

        def __getitem__(self, index: int) -> dict[str, Any]:
            Slow.read += 1
            return {"prompt": str(index)}

    assert PromptDataset(Slow()).identity()["rows"] == 10**9
    assert Slow.read == 10_000
