from __future__ import annotations

import threading
from pathlib import Path

from tests.failsafe import FAILSAFE_S
from tests.processes.children import child

from penstock._pipeline.util.host_lock import host_lock

HOLDER = """
    import sys
    from pathlib import Path
    from penstock._pipeline.util.host_lock import host_lock

    with host_lock("files of a test"):
        print("held", flush=True)
        sys.stdin.read()
        Path(sys.argv[1]).touch()
"""


def test_one_process_of_a_host_holds_a_lock_at_a_time(tmp_path: Path) -> None:
    made, seen = tmp_path / "made", []

    def take() -> None:
        with host_lock("files of a test"):
            seen.append(made.exists())

    with child(HOLDER, str(made)) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        waiting = threading.Thread(target=take)
        waiting.start()
        holder.stdin.close()
        waiting.join(FAILSAFE_S)

    assert seen == [True]


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    with child(HOLDER, str(tmp_path / "made")) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        holder.kill()

        with host_lock("files of a test"):
            assert not list(tmp_path.iterdir())
