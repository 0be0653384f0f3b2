from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from penstock.errors import OutOfSharedMemory
from penstock.pipeline import anonymous_memory
from penstock.pipeline.anonymous_memory import allocate, available_bytes


def test_memory_is_whole_and_cannot_shrink() -> None:
    fd = allocate(12_345, "a test")

    try:
        assert os.fstat(fd).st_size == 12_345
        assert os.fstat(fd).st_blocks * 512 >= 12_345
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        with pytest.raises(PermissionError):
            os.truncate(fd, 0)
    finally:
        os.close(fd)


def test_a_machine_without_room_is_an_error_before_a_page_is_taken() -> None:
    with pytest.raises(OutOfSharedMemory, match=r"expected \d+ bytes of shared memory for a test, got room for \d+"):
        allocate(1 << 60, "a test")


def test_there_is_some_room_here() -> None:
    assert 0 < available_bytes() < 1 << 50


@pytest.mark.parametrize(
    ("line", "folder", "files"),
    [
        ("0::/outer/inner", "outer", ("memory.max", "memory.current")),
        ("4:cpu,memory:/outer/inner", "memory/outer", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
    ],
)
def test_the_tightest_control_group_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, folder: str, files: tuple[str, str]
) -> None:
    limit, usage = files
    group = tmp_path / folder
    (group / "inner").mkdir(parents=True)
    (group / limit).write_text("5000\n")
    (group / usage).write_text("2000\n")
    (group / "inner" / limit).write_text("max\n")
    (group / "inner" / usage).write_text("1000\n")
    membership = tmp_path / "cgroup"
    membership.write_text(line + "\n")
    monkeypatch.setattr(anonymous_memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(anonymous_memory, "MEMBERSHIP", membership)

    assert available_bytes() == 3000
