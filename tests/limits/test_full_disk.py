"""A full or read-only disk is an error with the path; earlier files stay whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.namespaces import printed_by, read_only, small_disk

pytestmark = pytest.mark.timeout(600)  # the first test waits for all that the script does

FULL = "got none (No space left on device): make room there"


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def printed(disk: Path) -> dict[str, str]:
    """Run the script, and return its output; it is one process for all tests, because importing torch takes seconds."""
    return printed_by(small_disk(disk, "16m"), "-m", "tests.limits.script_on_a_small_disk", str(disk))


@pytest.mark.parametrize("room", ["1048576", "65536", "0"], ids=["in the optimizer", "in the weights", "at once"])
@pytest.mark.long
def test_a_checkpoint_for_which_the_disk_has_no_room_ends_the_run_and_leaves_the_one_before(
    disk: Path, printed: dict[str, str], room: str
) -> None:
    assert (
        f"DiskFull: expected room for the files of step 2 in {disk}/run/checkpoints, {FULL}"
        in printed[f"checkpoint {room}"]
    )
    assert printed[f"left {room}"] == "step-00000001"


@pytest.mark.long
def test_a_run_goes_on_from_the_checkpoint_before_when_its_disk_has_room_again(printed: dict[str, str]) -> None:
    assert printed["resumed"] == "2"
    assert printed["steps"] == "[1, 2]"


@pytest.mark.long
def test_a_run_that_met_a_full_disk_at_any_moment_ends_with_the_weights_of_one_that_did_not(
    printed: dict[str, str],
) -> None:
    assert printed["outcomes"] == "['DiskFull', 'trained']"


@pytest.mark.long
def test_metrics_for_which_the_disk_has_no_room_end_the_run_so_that_no_step_is_absent(
    disk: Path, printed: dict[str, str]
) -> None:
    assert (
        f"DiskFull: expected room for a line of metrics in {disk}/metered/metrics.jsonl, {FULL}" in printed["metrics"]
    )
    assert printed["whole lines"] == "True"
    assert printed["each step once"] == "True"


@pytest.mark.parametrize("room", ["65536", "0"])
@pytest.mark.long
def test_weights_for_which_the_disk_has_no_room_leave_the_version_before_and_are_published_when_it_has(
    disk: Path, printed: dict[str, str], room: str
) -> None:
    assert printed[f"weights {room}"].startswith(f"expected room for the files of step 1 in {disk}/weights, {FULL}")
    assert printed[f"versions {room}"] == "lock publisher.json step-00000000"
    assert printed["published"] == "1"


@pytest.mark.long
def test_an_address_and_a_key_for_which_the_disk_has_no_room_are_errors_that_name_them_and_leave_no_file(
    disk: Path, printed: dict[str, str]
) -> None:
    assert f"DiskFull: expected room for the address of a channel in {disk}/small/address, {FULL}" in printed["address"]
    assert printed["key"].startswith(f"expected room for a key in {disk}/small/a.key, {FULL}")
    assert printed["left of them"] == ""


@pytest.mark.long
def test_a_journal_for_which_the_disk_has_no_room_stays_whole_and_goes_on_when_it_has(
    disk: Path, printed: dict[str, str]
) -> None:
    assert printed["journal"].startswith("expected room for ")
    assert f" bytes in {disk}/journal, {FULL}, or lower capacity_bytes" in printed["journal"]
    assert printed["journal whole"] == "True"


READ_ONLY = """
import sys
from functools import partial
from pathlib import Path
import anyio
import numpy as np
from penstock import Journal, TrajectoryGroup
from penstock.accounting import JsonlMetrics
from penstock.channels import ChannelKey, serve
from penstock.servers import OutsideServer, tcp_ready
from penstock.torch import WeightFolder
from penstock.weights import WeightPublisher
from penstock.errors import NotWritable
from penstock.testing import drive
from penstock.training import write_checkpoint

folder = Path(sys.argv[1])
model = {"weight": np.zeros(2, np.float32)}

async def enter(context):
    async with context():
        pass

attempts = {
    "checkpoint": partial(write_checkpoint, folder, 1, lambda into: None),
    "metrics": lambda: JsonlMetrics(folder / "metrics.jsonl")({}, 1),
    "journal": partial(anyio.run, drive, Journal(folder), []),
    "weights": partial(anyio.run, enter, partial(WeightFolder, folder, model)),
    "sockets": partial(anyio.run, enter, partial(serve, "shm://", TrajectoryGroup)),
    "key": lambda: ChannelKey.create(folder / "a.key"),
    "server": partial(anyio.run, enter, OutsideServer(command=["true"], ready=tcp_ready(1), logs=folder).open),
    "publisher": partial(anyio.run, enter, partial(WeightPublisher, model)),
}
for name, attempt in attempts.items():
    try:
        attempt()
    except NotWritable as error:
        print(f"{name}: {error}")
"""


SETTINGS = {
    "XDG_RUNTIME_DIR": "import os, sys; os.environ['XDG_RUNTIME_DIR'] = sys.argv[1]",
    "tempdir": "import sys, tempfile; tempfile.tempdir = sys.argv[1]",
}


@pytest.mark.parametrize("chosen_by", ["XDG_RUNTIME_DIR", pytest.param("tempdir", marks=pytest.mark.long)])
def test_a_read_only_folder_is_an_error_with_its_path_and_the_remedy(
    tmp_path: Path, chosen_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)

    printed = printed_by(read_only(tmp_path), "-c", f"{SETTINGS[chosen_by]}\n{READ_ONLY}", str(tmp_path))

    permitted = "got no permission (Read-only file system): let this user write there, or"
    elsewhere = f"{permitted} set logs to another folder"
    other = f"{permitted} choose another folder"
    assert printed == {
        "checkpoint": f"expected to write the files of step 1 in {tmp_path}, {other}",
        "metrics": f"expected to write a line of metrics in {tmp_path}/metrics.jsonl, {other}",
        "journal": f"expected to write the lock of a journal in {tmp_path}, {other}",
        "weights": f"expected to write weights to publish in {tmp_path}, {other}",
        "sockets": f"expected to write sockets in {tmp_path}, {permitted} set XDG_RUNTIME_DIR to one where it may",
        "key": f"expected to write a key in {tmp_path}/a.key, {other}",
        "server": f"expected to write the log of a server in {tmp_path}/true.log, {elsewhere}",
        "publisher": f"expected to write sockets in {tmp_path}, {permitted} set XDG_RUNTIME_DIR to one where it may",
    }
