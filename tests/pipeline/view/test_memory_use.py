from __future__ import annotations

import os
import subprocess
import sys

from penstock._pipeline.view.memory_use import memory_use


def test_the_memory_of_this_process_and_of_its_workers_is_measured() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as worker:
        use = memory_use([worker.pid])

    assert use.here_bytes > 2**20
    assert 0 < use.workers_bytes < use.here_bytes


def test_a_worker_that_has_ended_uses_none() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as worker:
        pass

    assert memory_use([worker.pid]).workers_bytes == 0


def test_a_look_does_not_begin_to_use_cuda() -> None:
    assert memory_use([os.getpid()]).devices == ()
