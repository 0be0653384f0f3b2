"""`penstock doctor`: run on this machine, and on one that lacks something."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.namespaces import read_only

from penstock._cli import machine_checks, version_checks
from penstock._cli.trials import RECORDS, RecordsDiffer, compare, sent
from penstock._pipeline.workers import numa
from penstock.testing import group

DOCTOR = [sys.executable, "-c", "from penstock._cli import main; main()", "doctor"]
ROOT = Path(__file__).parent.parent.parent


def diagnosed(*prefix: str, status: int, **environment: str) -> dict[str, tuple[str, str]]:
    """Run the command behind `prefix`; return the verdict and the text of each row, by its name."""
    assignments = [f"{name}={value}" for name, value in {"COLUMNS": "400", **environment}.items()]
    ran = subprocess.run([*prefix, "env", *assignments, *DOCTOR], capture_output=True, text=True, check=False)
    assert ran.returncode == status, ran.stdout + ran.stderr
    rows = (re.fullmatch(r"(.+?) +(ok|note|fails) +(.*)", line.strip()) for line in ran.stdout.splitlines())
    return {row[1]: (row[2], row[3]) for row in rows if row} | {"all": ("", ran.stdout)}


def limited(descriptors: int) -> Sequence[str]:
    return ["sh", "-c", f'ulimit -n {descriptors} && exec "$@"', "sh"]


def test_on_this_machine_records_arrive_over_every_channel_as_they_were_sent() -> None:
    rows = diagnosed(status=0)

    for channel in ("memory", "shm", "tcp"):
        assert rows[f"run over {channel}" if channel != "memory" else "run in memory"][1].startswith(
            f"{RECORDS} records arrived as they were sent, "
        )
    for name in ("shared memory", "passing descriptors", "pidfd", "runtime folder", "encryption"):
        assert rows[name][0] == "ok"
    assert rows["all"][1].endswith("runs work on this machine\n")


@pytest.mark.long
def test_a_limit_of_open_files_that_is_too_low_fails_with_the_command_that_raises_it() -> None:
    rows = diagnosed(*limited(descriptors=20), status=1)

    assert rows["file descriptors"] == ("fails", "20 of at most 20: enough for 0 workers")
    assert rows["run over shm"][1].startswith("OutOfFileDescriptors: expected ")
    assert "to do: raise the limit of open files (ulimit -n) to 1024 or more" in rows["all"][1]
    assert "every run needs these, which fail: file descriptors, run over shm" in rows["all"][1]


def test_the_nodes_to_which_workers_are_bound_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    monkeypatch.setattr(numa, "NODES", tmp_path)
    none = machine_checks.numa()
    for node, processor in (("node0", first), ("node1", second)):
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(f"{processor}\n")
    two = machine_checks.numa()

    assert (none.verdict, none.found) == ("ok", "no nodes are named: there is nothing to bind workers to")
    assert (two.verdict, two.found) == ("ok", "2 nodes: a worker is bound to one, unless it can use more processors")


@pytest.mark.long
def test_a_runtime_folder_that_cannot_be_written_fails_with_the_variable_to_set(tmp_path: Path) -> None:
    rows = diagnosed(*read_only(tmp_path), status=1, XDG_RUNTIME_DIR=str(tmp_path))

    verdict, found = rows["runtime folder"]
    assert verdict == "fails"
    assert found.startswith(f"expected to write sockets in {tmp_path}, got no permission (Read-only file system)")
    assert "to do: set XDG_RUNTIME_DIR to a folder where this user may write" in rows["all"][1]
    assert rows["run over shm"][0] == "fails"
    assert rows["run in memory"][0] == "ok"


def test_an_extra_that_is_not_installed_is_a_note_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(version_checks.EXTRAS, "http", ("aiohttp", "penstock-absent"))

    found = version_checks.of_extra("http")

    assert found.verdict == "note"
    assert found.found.endswith(", penstock-absent not installed")
    assert re.fullmatch(r"pip install .*\[http\].*", found.remedy)


def test_a_torch_that_cannot_be_imported_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)

    (found,) = version_checks.gpu()

    assert found.verdict == "note"
    assert found.found.startswith("torch cannot be imported: ")


def test_the_extras_are_those_of_the_package() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {extra: [re.split(r"[>=\[]", line)[0] for line in lines] for extra, lines in declared.items()}

    for extra, packages in version_checks.EXTRAS.items():
        assert set(packages) == set(names.pop(extra)) - {"penstock"}
    assert set(names) == {"bench", "demo", "dev"}


@pytest.mark.parametrize("changed", [0, RECORDS - 1])
def test_a_record_that_arrives_changed_is_noticed(changed: int) -> None:
    received = [sent(number) for number in range(RECORDS)]
    compare(received)

    received[changed] = group(instance_id=str(changed), seed=changed + 1)

    with pytest.raises(RecordsDiffer, match=f"expected record {changed} as it was sent"):
        compare(received)


def test_a_record_that_does_not_arrive_is_noticed() -> None:
    with pytest.raises(RecordsDiffer, match=f"expected {RECORDS} records, got 1"):
        compare([sent(0)])


def test_the_list_of_commands_imports_nothing_heavy() -> None:
    heavy = {"torch", "transformers", "datasets", "starlette", "aiohttp", "rich.live", "yaml", "importlib.metadata"}
    script = f"import sys, penstock._cli; sys.exit(', '.join({heavy} & {{*sys.modules}}))"

    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)

    assert ran.stderr.strip() == ""
