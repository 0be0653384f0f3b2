"""Too few file descriptors are an error when something is opened: never a hang, and never the end of the process.

ZeroMQ ends the process that it cannot open its own descriptors in, so every number from none to enough is tried.
"""

from __future__ import annotations

import re

import pytest
from tests.namespaces import printed_by

NUMBERS = range(36)

pytestmark = pytest.mark.timeout(300)  # each number takes a process, and the machine may be busy


@pytest.mark.parametrize(
    ("what", "purpose"),
    [
        ("serve shm", "the receiving end of a channel"),
        pytest.param("serve tcp", "the receiving end of a channel", marks=pytest.mark.long),
        pytest.param("connect shm", "the sending end of a channel", marks=pytest.mark.long),
        ("connect tcp", "the sending end of a channel"),
        ("publish", "a publisher of weights"),
        ("serve weights", "weights over tcp"),
        ("mirror", "(a subscriber to weights|weights of another host)"),
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
