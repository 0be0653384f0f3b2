from pathlib import Path

import pytest

from penstock._pipeline.channels import machine_memory


def test_the_tightest_limit_of_machine_and_control_groups_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:       5000 kB\n")
    (tmp_path / "cgroup").write_text("1:name=old:/x\n0::/pod/run\n")
    group = tmp_path / "fs" / "pod" / "run"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group.parent / "memory.max").write_text("3000000\n")
    (group.parent / "memory.current").write_text("1000000\n")
    monkeypatch.setattr(machine_memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine_memory, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine_memory, "CGROUP_ROOT", tmp_path / "fs")

    assert machine_memory.available_bytes() == 2_000_000
    assert machine_memory.total_bytes() == 3_000_000

    (group.parent / "memory.max").write_text("max\n")
    assert machine_memory.available_bytes() == 5_120_000
    assert machine_memory.total_bytes() == 9_216_000


def test_limits_of_older_control_groups_count_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemAvailable:       5000 kB\n")
    (tmp_path / "cgroup").write_text("9:cpu,cpuacct:/pod\n4:memory:/pod\n0::/\n")
    group = tmp_path / "fs" / "memory" / "pod"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text("1500000\n")
    (group / "memory.usage_in_bytes").write_text("500000\n")
    monkeypatch.setattr(machine_memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine_memory, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine_memory, "CGROUP_ROOT", tmp_path / "fs")

    assert machine_memory.available_bytes() == 1_000_000


def test_this_machine_has_memory() -> None:
    assert machine_memory.available_bytes() > 2**20
