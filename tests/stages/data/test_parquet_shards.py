"""A folder of Parquet files is one set if their names say so; a set whose shard is absent is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.data import PromptDataset
from penstock.errors import InvalidData

SPARK = "part-0000{}-0a1b2c3d-1234-5678-9abc-0a1b2c3d4e5f-c000.snappy.parquet"


def rows_of(number: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{number}+{n}=", "answer": number + n} for n in range(5)]


def written(folder: Path, names: Sequence[str]) -> Path:
    """Write a file of five rows for each name."""
    for number, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows_of(number)), path, row_group_size=2)
    return folder


@pytest.mark.parametrize(
    "names",
    [
        ["train-00000-of-00003.parquet", "train-00001-of-00003.parquet", "train-00002-of-00003.parquet"],
        ["0000.parquet", "0001.parquet", "0002.parquet"],
        ["part_1.PARQUET", "part_2.PARQUET", "part_3.PARQUET"],
        [SPARK.format(0), SPARK.format(3), SPARK.format(7)],
    ],
)
def test_a_folder_of_shards_is_one_set_in_the_order_of_their_names(names: list[str], tmp_path: Path) -> None:
    written(tmp_path, names)
    for other in ("README.md", "_SUCCESS", ".train.parquet", "_metadata.parquet"):
        (tmp_path / other).write_text("x")

    prompts = PromptDataset(tmp_path, shuffle=False)()

    assert [prompts.row(n) for n in range(len(prompts))] == [row for number in range(3) for row in rows_of(number)]


def test_a_set_beside_others_is_named_by_the_path_of_the_folder_and_its_name(tmp_path: Path) -> None:
    names = [f"{split}-0000{n}-of-00002.parquet" for split in ("test", "train") for n in (0, 1)]
    written(tmp_path, names)

    with pytest.raises(InvalidData, match=rf"got one of 2: take one of {tmp_path}/test, {tmp_path}/train"):
        PromptDataset(tmp_path)()
    train = PromptDataset(tmp_path / "train", shuffle=False)

    assert [train().row(n)["prompt"] for n in (0, 9)] == ["2+0=", "3+4="]
    assert train().prompt(0).meta["data_source"] == "train"


@pytest.mark.parametrize("names", [["train.parquet", "test.parquet"], ["aime24.parquet", "aime25.parquet"]])
def test_files_of_several_names_are_several_sets(names: list[str], tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="expected a folder of one set, got one of 2: take one of"):
        PromptDataset(written(tmp_path, names))()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["train-00000-of-00003.parquet", "train-00002-of-00003.parquet"], "all 3 shards, got 2, without number 1"),
        (["train-00000-of-00002.parquet"], "all 2 shards, got 1, without number 1"),
        (["a-00000-of-00002.parquet", "a-00001-of-00003.parquet"], "one number after -of-, got 2, 3"),
        (["part-0.parquet", "part-2.parquet"], "numbers from 0 or 1 on without a gap, got none with 1"),
        (["2.parquet", "3.parquet"], "numbers from 0 or 1 on without a gap, got none with 1"),
    ],
)
@pytest.mark.parametrize("by_name", [False, True])
def test_a_set_without_one_of_its_shards_is_refused(
    names: list[str], message: str, *, by_name: bool, tmp_path: Path
) -> None:
    folder = written(tmp_path, names)
    name = names[0].partition("-")[0]

    with pytest.raises(InvalidData, match=message):
        PromptDataset(folder / name if by_name and name != "2.parquet" else folder)()


def test_a_shard_with_other_columns_is_refused(tmp_path: Path) -> None:
    written(tmp_path, ["0.parquet"])
    pq.write_table(pa.Table.from_pylist([{"question": "?"}]), tmp_path / "1.parquet")

    with pytest.raises(InvalidData, match=r"1\.parquet: expected the columns of 0\.parquet \(prompt, answer\), got"):
        PromptDataset(tmp_path)()


def test_a_shard_that_is_a_pointer_of_git_lfs_is_refused_by_its_path(tmp_path: Path) -> None:
    written(tmp_path, ["0.parquet"])
    (tmp_path / "1.parquet").write_text("version https://git-lfs.github.com/spec/v1\n")

    with pytest.raises(InvalidData, match=r"1\.parquet: expected JSON lines or Parquet, got a pointer of Git LFS"):
        PromptDataset(tmp_path)()


def test_a_shard_that_was_changed_under_the_run_is_refused(tmp_path: Path) -> None:
    prompts = PromptDataset(written(tmp_path, ["0.parquet", "1.parquet"]), shuffle=False)()
    prompts.row(0)

    pq.write_table(pa.Table.from_pylist(rows_of(7) * 2), tmp_path / "1.parquet")

    with pytest.raises(InvalidData, match=r"1\.parquet: expected the file as it was when the run began"):
        prompts.row(9)


def test_a_folder_whose_sets_are_further_down_is_refused_with_their_paths(tmp_path: Path) -> None:
    written(tmp_path, ["main/train-00000-of-00001.parquet", "socratic/train-00000-of-00001.parquet"])

    with pytest.raises(InvalidData, match=rf"take one of {tmp_path}/main, {tmp_path}/socratic"):
        PromptDataset(tmp_path)()


def test_the_digest_is_that_of_all_shards(tmp_path: Path) -> None:
    folder = written(tmp_path, ["0.parquet", "1.parquet"])
    before = PromptDataset(folder).identity()

    pq.write_table(pa.Table.from_pylist([*rows_of(1)[:4], {"prompt": "?", "answer": 0}]), folder / "1.parquet")

    after = PromptDataset(folder).identity()
    assert before["rows"] == after["rows"] == 10
    assert before["digest"] != after["digest"]
