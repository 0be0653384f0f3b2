"""Too few file descriptors are an error when something is opened: never a hang, and never the end of the process.

ZeroMQ ends the process that it cannot open its own descriptors in, so every number from none to enough is tried.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.failsafe import FAILSAFE_S
from tests.namespaces import printed_by
from tests.processes import script_of_joined_workers

NUMBERS = range(36)

pytestmark = pytest.mark.timeout(300)  # each number takes a process, and the machine may be busy


@pytest.mark.parametrize(
    ("what", "purpose"),
    [
        ("serve shm", "the receiving end of a channel"),
        pytest.param("serve tcp", "the receiving end of a channel", marks=pytest.mark.long),
        pytest.param("connect shm", "the sending end of a channel", marks=pytest.mark.long),
        pytest.param("connect tcp", "the sending end of a channel", marks=pytest.mark.long),
        pytest.param("publish", "a publisher of weights", marks=pytest.mark.long),
        pytest.param("serve weights", "weights over tcp", marks=pytest.mark.long),
        pytest.param("mirror", "(a subscriber to weights|the mirror of this host)", marks=pytest.mark.long),
        pytest.param("subscribe", "a subscriber to weights", marks=pytest.mark.long),
    ],
)
def test_with_any_number_of_free_descriptors_it_opens_or_reports_too_few(what: str, purpose: str) -> None:
    printed = printed_by([], "-m", "tests.limits.script_of_descriptors", what, *map(str, NUMBERS))

    outcomes = [printed[str(left)] for left in NUMBERS]
    first = outcomes.index("opened")
    assert set(outcomes[first:]) == {"opened"}
    assert all(
        re.search(f" more file descriptors for {purpose}, got ", outcome)
        and outcome.endswith("(Too many open files): raise the limit of open files (ulimit -n)")
        for outcome in outcomes[:first]
    )
    assert first > 0


@pytest.mark.parametrize("most", [8, 16])
def test_a_worker_of_another_host_with_too_few_descriptors_says_so_and_ends(most: int) -> None:
    script = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({most}, {most})); import sys\n"
        "from penstock._cli.app import main; main()"
    )
    stage = Path(script_of_joined_workers.__file__)
    command = [sys.executable, "-c", script, "worker", "--join", "tcp://127.0.0.1:1", f"{stage}:held"]

    ended = subprocess.run(command, capture_output=True, text=True, timeout=FAILSAFE_S, check=False)

    assert ended.returncode == 1
    assert re.search(
        r"^penstock: expected 17 more file descriptors for the sending end of a channel, got \d+ .*: "
        r"raise the limit of open files \(ulimit -n\)$",
        ended.stderr,
    )


def test_a_receiver_and_its_sender_have_room_in_a_process_of_40_descriptors() -> None:
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40)); import anyio\n"
        "from penstock import TrajectoryGroup\nfrom penstock.channels import connect, serve\n"
        "from penstock.testing import group\n"
        "async def main():\n"
        "    async with serve('shm://', TrajectoryGroup) as inbox, connect(inbox.url, TrajectoryGroup) as outbox:\n"
        "        await outbox.send(group(instance_id='7'))\n"
        "        print('received:', (await inbox.receive()).instance_id)\n"
        "anyio.run(main)"
    )

    assert printed_by([], "-c", script) == {"received": "7"}
