"""Parquet files and folders of `datasets`, as their libraries write them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.data import PromptDataset
from penstock.errors import InvalidData, MissingExtra

datasets = pytest.importorskip("datasets")

ROWS: list[dict[str, Any]] = [
    {"prompt": f"{n}+1=", "answer": n + 1, "steps": [n, 1], "info": {"hard": n > 5, "note": None}} for n in range(10)
]


def parquet(path: Path, rows: list[dict[str, Any]], group_rows: int = 3) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=group_rows)
    return path


def folder(path: Path, rows: list[dict[str, Any]]) -> Path:
    datasets.Dataset.from_list(rows).save_to_disk(path)
    return path


@pytest.mark.parametrize("write", [parquet, folder])
def test_a_set_gives_the_rows_that_were_written(tmp_path: Path, write: Any) -> None:
    prompts = PromptDataset(write(tmp_path / "sums.parquet", ROWS), shuffle=False)()

    assert [prompts.row(n) for n in (*range(10), 0)] == [*ROWS, ROWS[0]]
    assert prompts.prompt(9).meta["data_source"] == "sums"


@pytest.mark.parametrize("write", [parquet, folder])
def test_dates_and_decimals_become_text(tmp_path: Path, write: Any) -> None:
    row = {"prompt": "?", "at": datetime(2026, 11, 23, 21, 0, tzinfo=UTC), "price": Decimal("1.50")}

    read = PromptDataset(write(tmp_path / "dates.parquet", [row]))().row(0)

    assert read == {"prompt": "?", "at": "2026-11-23T21:00:00+00:00", "price": "1.50"}


class Named:
    """A chat format that reads which keys a message has."""

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return [len(message) for message in messages]


@pytest.mark.parametrize("write", [parquet, folder])
def test_a_message_has_no_keys_that_only_others_have(tmp_path: Path, write: Any) -> None:
    messages = [{"role": "system", "content": "short"}, {"role": "user", "content": "?", "name": "Ada"}]

    prompt = PromptDataset(write(tmp_path / "chats.parquet", [{"prompt": messages}]), chat=Named())().prompt(0)

    assert prompt.content == [2, 3]
    assert prompt.meta["messages"] == messages


@pytest.mark.parametrize("write", [parquet, folder])
def test_bytes_are_refused_by_their_column(tmp_path: Path, write: Any) -> None:
    with pytest.raises(InvalidData, match="column 'image': expected text, numbers"):
        PromptDataset(write(tmp_path / "images.parquet", [{"prompt": "?", "image": b"png"}]))()


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.table([["1+1"], [2], [3]], names=["prompt", "answer", "answer"])
    pq.write_table(table, tmp_path / "data.parquet")

    for source in (tmp_path / "data.parquet", table, table.to_pandas()):
        with pytest.raises(InvalidData, match="expected columns with different names, got 'answer' twice"):
            PromptDataset(source)()


def test_row_groups_are_kept_up_to_a_number_of_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock._stages.data.arrow_rows.KEPT_BYTES", 300)
    prompts = PromptDataset(parquet(tmp_path / "rows.parquet", ROWS), shuffle=False)()

    assert [prompts.row(n) for n in (0, 9, 1, 5, 8, 2)] == [ROWS[n] for n in (0, 9, 1, 5, 8, 2)]


def test_a_dataset_in_memory_is_used_as_rows() -> None:
    prompts = PromptDataset(datasets.Dataset.from_list(ROWS), shuffle=False)()

    assert [prompts.row(n) for n in range(10)] == ROWS


def test_a_folder_of_several_sets_is_refused_with_their_paths(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict(train=rows, test=rows).save_to_disk(tmp_path)

    with pytest.raises(InvalidData, match=rf"got one of 2: take one of {tmp_path}/train, {tmp_path}/test"):
        PromptDataset(tmp_path)()
    assert len(PromptDataset(tmp_path / "test")()) == 10


def test_another_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="expected a folder that save_to_disk of `datasets` wrote, got another one"):
        PromptDataset(tmp_path)()


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_text('{"prompt": "x"}\n')

    with pytest.raises(InvalidData, match="expected a Parquet file, got one that cannot be read"):
        PromptDataset(tmp_path / "rows.parquet")()


def test_a_damaged_page_is_an_error_of_its_rows(tmp_path: Path) -> None:
    path = parquet(tmp_path / "rows.parquet", [{"prompt": str(n)} for n in range(2000)], group_rows=1000)
    begin = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    whole = path.read_bytes()
    path.write_bytes(whole[:begin] + b"\xff" * 100 + whole[begin + 100 :])

    prompts = PromptDataset(path, shuffle=False)()

    assert prompts.row(999) == {"prompt": "999"}
    with pytest.raises(InvalidData, match=r"rows\.parquet: expected row group 1 to be readable, got "):
        prompts.row(1000)


@pytest.mark.parametrize(("name", "missing"), [("rows.parquet", "pyarrow"), ("", "datasets")])
def test_a_missing_library_is_named_with_the_command_that_installs_it(
    name: str, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    path.touch()
    monkeypatch.setitem(sys.modules, missing, None)

    with pytest.raises(MissingExtra, match=rf"needs {missing}, which is not installed: pip install .*\[train\]'"):
        PromptDataset(path)()
