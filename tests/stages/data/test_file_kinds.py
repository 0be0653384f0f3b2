"""Files of a kind that is not read are refused with the name of the kind and with what to do; the content decides."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.data import PromptDataset
from penstock.errors import InvalidData

ROWS: list[dict[str, Any]] = [{"prompt": f"{n}+1=", "answer": n + 1} for n in range(12)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
CSV = "".join(["prompt,answer\n", *(f"{n}+1=,{n + 1}\n" for n in range(12))]).encode()
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab\nsize 12345\n"


def zipped() -> bytes:
    file = BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("rows.jsonl", LINES)
    return file.getvalue()


def arrow(make: Any) -> bytes:
    file, table = BytesIO(), pa.Table.from_pylist(ROWS)
    with make(file, table.schema) as writer:
        writer.write_table(table)
    return file.getvalue()


OTHERS: list[tuple[str, bytes, str]] = [
    ("rows.jsonl.gz", gzip.compress(LINES), "a file compressed by gzip: decompress it: gunzip"),
    ("rows.jsonl", gzip.compress(LINES), "a file compressed by gzip"),
    ("rows.JSONL.xz", lzma.compress(LINES), "a file compressed by xz: decompress it: unxz"),
    ("rows.bz2", bz2.compress(LINES), "a file compressed by bzip2"),
    ("rows.zst", b"\x28\xb5\x2f\xfd\x04\x00", "a file compressed by zstd"),
    ("rows.zip", zipped(), "a ZIP archive or an Excel sheet"),
    ("rows.csv", CSV, "a CSV file: convert it, with pandas: pandas.read_csv"),
    ("rows.CSV", b"\xef\xbb\xbf" + CSV, "a CSV file"),
    ("rows.tsv", CSV.replace(b",", b"\t"), "a CSV file"),
    ("rows.txt", CSV.replace(b",", b";"), "a CSV file"),
    ("rows.json", json.dumps(ROWS).encode(), r"a JSON array: write a line for each row: jq -c '.\[\]'"),
    ("rows.json", json.dumps(ROWS * 200).encode(), "a JSON array"),
    ("rows.json", b"\xef\xbb\xbf" + json.dumps(ROWS, indent=1).encode(), "a JSON array"),
    ("rows.json", json.dumps(ROWS[0], indent=2).encode(), "JSON over several lines"),
    ("rows.json", json.dumps({"data": ROWS}, indent=2).encode(), "JSON over several lines"),
    ("rows.jsonl", LINES.decode().encode("utf-16"), "text in UTF-16 or UTF-32: write it as UTF-8: iconv"),
    ("rows.jsonl", LINES.decode().encode("utf-16-le"), "text in UTF-16 or UTF-32"),
    ("rows.jsonl", LINES.decode().encode("utf-16-be"), "text in UTF-16 or UTF-32"),
    ("rows.jsonl", LINES.decode().encode("utf-32"), "text in UTF-16 or UTF-32"),
    ("rows.csv", CSV.decode().encode("utf-16"), "text in UTF-16 or UTF-32"),
    ("rows.parquet", LFS, "a pointer of Git LFS: get the file itself: git lfs pull"),
    ("rows.jsonl", LFS, "a pointer of Git LFS"),
    ("rows.jsonl", b"<!DOCTYPE html>\n<html>", "a web page or XML: download the file itself"),
    ("rows.parquet", b"<html>", "a web page or XML"),
    ("rows.arrow", arrow(pa.ipc.new_file), "an Arrow file"),
    ("rows.arrow", arrow(pa.ipc.new_stream), "an Arrow stream"),
    ("rows.db", b"SQLite format 3\x00\x10", "a SQLite database"),
    ("rows.pkl", b"\x80\x05\x95\x01\x00", "a pickled object"),
    ("rows.bin", b"abc\x00\x00\x00\x01", "a binary file of another kind"),
    ("rows.txt", b"What is 2+2?\n4\n", "text without a JSON object at the beginning of a line"),
    ("rows.yaml", b"- prompt: x\n", "text without a JSON object"),
]


@pytest.mark.parametrize(("name", "content", "kind"), OTHERS, ids=range(len(OTHERS)))
def test_a_file_of_another_kind_is_refused_by_its_name_with_what_to_do(
    name: str, content: bytes, kind: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)

    with pytest.raises(InvalidData, match=rf"{name}: expected JSON lines or Parquet, got {kind}") as refused:
        PromptDataset(tmp_path / name)()

    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["rows.PARQUET", "rows.Parquet", "rows.pq", "rows"])
def test_a_parquet_file_is_known_by_its_content(name: str, tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / name)

    prompts = PromptDataset(tmp_path / name, shuffle=False)()

    assert [prompts.row(n) for n in range(12)] == ROWS


@pytest.mark.parametrize("name", ["rows.json", "rows.ndjson", "rows.csv", "rows"])
@pytest.mark.parametrize("before", [b"", b"\n \n", b"\xef\xbb\xbf", b"# comment, with a comma\n"])
def test_lines_of_json_are_known_by_their_content(name: str, before: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(before + LINES)

    assert len(PromptDataset(tmp_path / name)()) in {12, 13}


def test_a_first_line_of_any_length_is_one_of_json(tmp_path: Path) -> None:
    row = {"prompt": "x, " * 5000, "answer": ["{", "["]}
    (tmp_path / "long.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row))

    assert PromptDataset(tmp_path / "long.jsonl")().row(1) == row


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")

    with pytest.raises(InvalidData, match="expected a file, got a pipe, a socket or a device"):
        PromptDataset(tmp_path / "rows.jsonl")()
