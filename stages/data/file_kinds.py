"""The kind of a file by its first bytes: JSON lines, Parquet, or a kind refused by its name, with a remedy.

The content decides; the name of the file only if the content leaves the kind open. Opens no file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import msgspec

HEAD_BYTES = 4096
"""Bytes at the beginning of a file that tell its kind."""

PARQUET = b"PAR1"


class OtherKind(NamedTuple):
    """A kind of file that is not read."""

    kind: str
    """Its name, after "got"."""
    remedy: str
    """The thing to do; `{path}` and `{stem}` stand for the file's."""


SIGNATURES = {
    b"version https://git-lfs": OtherKind("a pointer of Git LFS", "get the file itself: git lfs pull"),
    b"/annex/objects/": OtherKind("a pointer of git-annex", "get the file itself: git annex get {path}"),
    b"\x1f\x8b": OtherKind("a file compressed by gzip", "decompress it: gunzip {path}"),
    b"\x28\xb5\x2f\xfd": OtherKind("a file compressed by zstd", "decompress it: unzstd {path}"),
    b"\xfd7zXZ\x00": OtherKind("a file compressed by xz", "decompress it: unxz {path}"),
    b"BZh": OtherKind("a file compressed by bzip2", "decompress it: bunzip2 {path}"),
    b"\x04\x22\x4d\x18": OtherKind("a file compressed by lz4", "decompress it: unlz4 {path}"),
    b"7z\xbc\xaf\x27\x1c": OtherKind("a 7z archive", "unpack it"),
    b"PK\x03\x04": OtherKind(
        "a ZIP archive or an Excel sheet", "unpack it, or save the sheet as JSON lines or Parquet"
    ),
    b"PARE": OtherKind("a Parquet file that is encrypted", "decrypt it"),
    b"ARROW1": OtherKind("an Arrow file", "write it as Parquet: pyarrow.parquet.write_table"),
    b"\xff\xff\xff\xff": OtherKind("an Arrow stream", "give the folder that save_to_disk of `datasets` wrote"),
    b"ORC": OtherKind("an ORC file", "write it as Parquet: pyarrow.parquet.write_table"),
    b"Obj\x01": OtherKind("an Avro file", "write it as JSON lines or Parquet"),
    b"SQLite format 3": OtherKind("a SQLite database", "write its table as JSON lines or Parquet"),
    b"\x80": OtherKind("a pickled object", "write its rows as JSON lines or Parquet"),
    b"\x93NUMPY": OtherKind("an array of numpy", "write its rows as JSON lines or Parquet"),
}
"""Kinds by the first bytes of their files."""

UTF_16 = OtherKind("text in UTF-16 or UTF-32", "write it as UTF-8: iconv -f UTF-16 -t UTF-8 {path} > {stem}.utf8.jsonl")
WEB_PAGE = OtherKind("a web page or XML", "download the file itself")
BINARY = OtherKind("a binary file of another kind", "write its rows as JSON lines or Parquet")
ARRAY = OtherKind("a JSON array", "write a line for each row: jq -c '.[]' {path} > {stem}.jsonl")
SPREAD = OtherKind("JSON over several lines", "write a line for each row: jq -c . {path} > {stem}.jsonl")
CSV = OtherKind(
    "a CSV file",
    "convert it, with pandas: pandas.read_csv('{path}').to_json('{stem}.jsonl', orient='records', lines=True)",
)
TEXT = OtherKind("text without a JSON object at the beginning of a line", "write a JSON object in each line")


def is_parquet(head: bytes, path: Path) -> bool:
    """Return whether a file that begins with `head` is read as Parquet."""
    return head.startswith(PARQUET) or (path.suffix.lower() == ".parquet" and other_kind(head) is None)


def other_kind(head: bytes) -> OtherKind | None:
    """Return the kind of a file that begins with `head`; None for JSON lines, for Parquet, and for an empty file.

    >>> other_kind(b"question,answer")
    OtherKind(kind='a CSV file', remedy=...)
    """
    for signature, kind in SIGNATURES.items():
        if head.startswith(signature):
            return kind
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) or re.match(rb"[\t\n\r -~]\x00|\x00+[\t\n\r -~]", head):
        return UTF_16
    if b"\x00" in head:
        return None if head.startswith(PARQUET) else BINARY
    return _kind_of_text(head.removeprefix(b"\xef\xbb\xbf"))


def _kind_of_text(head: bytes) -> OtherKind | None:
    lines = [line for line in head.splitlines() if line.strip()]
    if not lines:
        return None
    first, is_whole = lines[0].strip(), b"\n" in head.lstrip()
    if first.startswith(b"<"):
        return WEB_PAGE
    if first.startswith(b"[") and (len(lines) == 1 or not _is_json(first)):
        return ARRAY
    if is_whole and first.startswith(b"{") and first.endswith((b"{", b"[", b",")):
        return SPREAD
    if any(line.lstrip().startswith(b"{") for line in lines):
        return None
    return CSV if any(delimiter in first for delimiter in b",;\t") else TEXT


def _is_json(line: bytes) -> bool:
    try:
        msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return False
    return True
