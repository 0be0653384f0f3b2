from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from penstock._pipeline.util.atomic_file import create_atomically, write_atomically
from penstock._pipeline.util.json_file import read_json, read_json_or_set_aside, write_json
from penstock.errors import FileDamaged

VALUE = {"metric": "eval/mean@1", "value": 0.41, "steps": {"7": [1, None, True]}}
CONTENT = b'{"a": 1}'


def written(folder: Path) -> Path:
    write_json(folder / "best.json", VALUE)
    return folder / "best.json"


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def flipped(content: bytes, bit: int) -> bytes:
    altered = bytearray(content)
    altered[bit // 8] ^= 1 << bit % 8
    return bytes(altered)


def test_a_value_is_read_as_it_was_written_and_is_json_for_other_programs(tmp_path: Path) -> None:
    path = written(tmp_path)

    assert read_json(path, dict[str, Any], remedy="") == VALUE
    assert json.loads(path.read_text()).items() > VALUE.items()
    assert names_in(tmp_path) == ["best.json"]


def test_a_file_without_a_checksum_is_read(tmp_path: Path) -> None:
    (tmp_path / "best.json").write_text(json.dumps(VALUE))

    assert read_json(tmp_path / "best.json", dict[str, Any], remedy="") == VALUE


def test_every_flipped_bit_and_every_cut_is_found_or_changes_nothing(tmp_path: Path) -> None:
    path = written(tmp_path)
    content = path.read_bytes()
    damaged = [flipped(content, bit) for bit in range(8 * len(content))]
    damaged += [content[:length] for length in range(len(content))]

    for altered in damaged:
        path.write_bytes(altered)
        found: dict[str, Any] | str
        try:
            found = read_json(path, dict[str, Any], remedy="write it again")
        except FileDamaged as error:
            found = str(error)
        if isinstance(found, str):
            assert found.startswith(f"{path}: expected to read back what was written, got ")
            assert found.endswith(": write it again")
        else:
            assert found.items() >= VALUE.items()


def test_a_damaged_file_that_is_not_needed_is_set_aside_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path)
    path.write_bytes(path.read_bytes()[:20])

    found = read_json_or_set_aside(path, dict[str, Any], consequence="the best is chosen again")

    assert found is None
    assert names_in(tmp_path) == ["best.json.damaged"]
    assert "file_set_aside" in caplog.text
    assert str(path) in caplog.text
    assert "the best is chosen again" in caplog.text


def test_a_folder_in_the_place_of_a_file_is_damage(tmp_path: Path) -> None:
    (tmp_path / "best.json").mkdir()

    with pytest.raises(FileDamaged, match=r"best\.json: expected .* got Is a directory: remove it"):
        read_json(tmp_path / "best.json", dict[str, Any], remedy="remove it")


def test_an_absent_file_is_not_damaged(tmp_path: Path) -> None:
    assert read_json_or_set_aside(tmp_path / "best.json", dict[str, Any], consequence="") is None
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "best.json", dict[str, Any], remedy="")


def test_a_write_that_fails_leaves_the_file_before_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path)

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=r"No space left on device: '.*best\.json'"):
        write_json(path, {})
    monkeypatch.undo()

    assert read_json(path, dict[str, Any], remedy="") == VALUE
    assert names_in(tmp_path) == ["best.json"]


def test_a_file_that_is_created_replaces_none_and_is_its_owners_alone(tmp_path: Path) -> None:
    create_atomically(tmp_path / "key", CONTENT, mode=0o600)

    with pytest.raises(FileExistsError):
        create_atomically(tmp_path / "key", b"another")
    assert (tmp_path / "key").read_bytes() == CONTENT
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert names_in(tmp_path) == ["key"]


def test_a_link_is_not_followed_but_replaced(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("kept")
    (tmp_path / "file").symlink_to("elsewhere")

    write_atomically(tmp_path / "file", CONTENT)

    assert (tmp_path / "elsewhere").read_text() == "kept"
    assert (tmp_path / "file").read_bytes() == CONTENT
