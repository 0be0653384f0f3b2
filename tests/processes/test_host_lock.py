"""Workers of one host that all need a file which does not exist yet."""

from __future__ import annotations

from pathlib import Path

from tests.processes.worker_sinks import Commit
from tests.processes.worker_stages import ReadWhatOneMakes, attempts_in

from penstock import processes, source


async def test_one_worker_of_a_host_makes_a_file_and_all_read_it(tmp_path: Path) -> None:
    sink = Commit()

    await source(ReadWhatOneMakes(str(tmp_path)), on=processes(2)).sink(sink).run()

    assert sorted(sink.received) == [f"{index}: attempt 0" for index in range(2)]
    assert attempts_in(tmp_path) == 1


async def test_a_worker_that_is_killed_while_it_makes_the_file_leaves_that_to_another(tmp_path: Path) -> None:
    sink = Commit()

    report = await source(ReadWhatOneMakes(str(tmp_path), first_dies=True), on=processes(2)).sink(sink).run()

    assert sorted(sink.received) == [f"{index}: attempt 1" for index in range(2)]
    assert attempts_in(tmp_path) == 2
    assert sorted(worker.restarts for worker in report.statistics.stages[0].workers) == [0, 1]
