"""Workers that join a pipeline over tcp: real processes of the command, on loopback."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import Process
from structlog.testing import capture_logs
from tests.failsafe import FAILSAFE_S
from tests.fixed_limits import set_limits
from tests.namespaces import ahead
from tests.pages import program
from tests.pipeline.flow_stages import Pack, Train
from tests.ports import free_port
from tests.processes import script_of_joined_workers as script
from tests.processes.worker_sinks import Commit
from tests.processes.worker_stages import Sample

from penstock import (
    Pipeline,
    ReceiveChannel,
    Report,
    SendChannel,
    StageInfo,
    TrainBatch,
    TrajectoryGroup,
    TrajectoryId,
    current,
    joining,
    source,
)
from penstock.channels import ChannelKey, connect
from penstock.errors import InvalidPipeline, WorkerFailed, WorkersAbsent
from penstock.testing import group

pytestmark = pytest.mark.anyio

SCRIPT = Path(script.__file__)
DIGEST = hashlib.sha256(SCRIPT.read_bytes()).hexdigest()
COMMAND = "from penstock._cli.app import main; main()"


@pytest.fixture
def url() -> str:
    """A free port: workers must know it before the pipeline listens."""
    return f"tcp://127.0.0.1:{free_port()}"


@dataclass
class Workers:
    """Starts workers, and stops them at the end."""

    url: str
    folder: Path
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def start(self, function: str, *options: str, within: Sequence[str] = ()) -> Process:
        command = [*within, sys.executable, "-c", COMMAND, "worker", "--join", self.url, f"{SCRIPT}:{function}"]
        environment = {**os.environ, "JOINED_FOLDER": str(self.folder), "PYTHONPATH": ":".join(sys.path)}
        process = await anyio.open_process([*command, *options], env=environment, stdout=None, stderr=None)
        self.stack.push_async_callback(_ended, process)
        return process

    async def seen(self, pattern: str, count: int = 1) -> list[Path]:
        """Wait until the workers have written so many files."""
        with anyio.fail_after(FAILSAFE_S):
            while len(found := sorted(self.folder.glob(pattern))) < count:  # noqa: ASYNC110 (files tell of it)
                await anyio.sleep(0.01)
        return found

    async def until(self, condition: Callable[[], bool]) -> None:
        with anyio.fail_after(FAILSAFE_S):
            while not condition():  # noqa: ASYNC110 (no event tells of it)
                await anyio.sleep(0.01)

    def go(self) -> None:
        (self.folder / "go").touch()


async def _ended(process: Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.aclose()


@pytest.fixture
async def workers(url: str, tmp_path: Path) -> AsyncIterator[Workers]:
    started = Workers(url, tmp_path)
    async with started.stack:
        yield started


class Names:
    """Trains on everything, and notes the names of the workers that are there."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.pipeline: Pipeline

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup]) -> None:
        async for each in inbox:
            current().ledger.end(each, "trained")
            self.names.update(worker.name for worker in self.pipeline.statistics().stages[0].workers)


@asynccontextmanager
async def running(pipeline: Pipeline) -> AsyncIterator[None]:
    """Run `pipeline` beside the body, and wait for its end."""
    with anyio.fail_after(FAILSAFE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pipeline.run)
            yield


def report_of(pipeline: Pipeline) -> Any:
    assert pipeline.report is not None
    return pipeline.report


# -- work ------------------------------------------------------------------------------------------------------------


async def test_prompts_are_assigned_to_the_workers_that_are_there_each_once(url: str, workers: Workers) -> None:
    sink = Commit()
    pipeline = source(script.held(), on=joining(expected=2, url=url, digest=DIGEST)).sink(sink)

    async with running(pipeline):
        ended = [await workers.start("held") for _ in range(3)]
        await workers.seen("prompt *", 3 + 3 * 2)  # each has begun as many as it may
        workers.go()
        codes = [await each.wait() for each in ended]

    assert codes == [0, 0, 0]
    assert sorted(map(int, sink.received)) == list(range(20))
    balance = report_of(pipeline).balance
    assert balance.admitted == balance.ended["trained"] == 20 * script.GROUP_SIZE
    assert report_of(pipeline).stop_reason == "end of stream"


async def test_the_clock_of_a_worker_may_differ_from_that_of_the_pipeline(url: str, workers: Workers) -> None:
    sink = Commit()
    pipeline = source(script.held(), on=joining(expected=2, url=url, digest=DIGEST)).sink(sink)
    ten_days = ahead(10 * 24 * 3600)

    async with running(pipeline):
        ended = [await workers.start("held", within=within) for within in (ten_days, [])]
        await workers.seen("prompt *", 2 * 3)
        workers.go()
        codes = [await each.wait() for each in ended]

    assert codes == [0, 0]
    assert sorted(map(int, sink.received)) == list(range(20))
    assert report_of(pipeline).balance.ended["trained"] == 20 * script.GROUP_SIZE


async def test_both_sides_say_what_they_wait_for(url: str, workers: Workers) -> None:
    pipeline = source(script.waiting, on=joining(expected=1, url=url, digest=DIGEST)).sink(Commit())
    command = [sys.executable, "-c", COMMAND, "worker", "--join", url, "--name", "first", f"{SCRIPT}:waiting"]
    environment = {**os.environ, "JOINED_FOLDER": str(workers.folder), "PYTHONPATH": ":".join(sys.path)}
    worker = await anyio.open_process(command, env=environment)
    workers.stack.push_async_callback(_ended, worker)
    assert worker.stderr is not None
    printed = await worker.stderr.receive()

    async with running(pipeline):
        expected = f"workers to join at {url}"
        await workers.until(lambda: expected in {each.waiting_for for each in pipeline.statistics().stages})
        await workers.seen("place *")
        workers.go()
        printed += b"".join([part async for part in worker.stderr])

    waiting, joined, done = printed.decode().splitlines()
    assert waiting.startswith(f"penstock: waiting for the pipeline: expected a receiver at {url}, got")
    assert joined == f"penstock: joined {url} as WaitForGo first"
    assert done == "penstock: nothing is left to do"


async def test_workers_have_the_names_that_they_were_given_and_two_of_one_name_are_told_apart(
    url: str, workers: Workers
) -> None:
    sink = Names()
    sink.pipeline = pipeline = source(script.waiting, on=joining(expected=3, url=url, digest=DIGEST)).sink(sink)

    async with running(pipeline):
        for name in ("single", "twin", "twin"):
            await workers.start("waiting", "--name", name)
        await workers.seen("place *", 3)
        workers.go()

    assert sink.names == {"WaitForGo single", "WaitForGo twin", "WaitForGo twin, restart 1"}


async def test_a_sender_that_has_no_place_is_not_taken_for_a_worker_and_keeps_no_run_open(
    url: str, workers: Workers
) -> None:
    sink = Commit()
    pipeline = source(script.waiting, on=joining(expected=1, url=url, digest=DIGEST)).sink(sink)

    async with AsyncExitStack() as idle, running(pipeline):
        await workers.start("waiting", "--name", "true")
        await workers.seen("place *")
        await idle.enter_async_context(connect(url, TrajectoryGroup))
        async with connect(url, TrajectoryGroup, name="WaitForGo true") as stranger:
            await stranger.send(group(instance_id="forged"))
            await stranger.wait_failed()
        workers.go()

    assert sorted(sink.received) == sorted(f"{number}.0" for number in range(20))


async def test_a_source_that_cannot_assign_prompts_is_shared_by_those_expected_and_more_wait(
    url: str, workers: Workers
) -> None:
    sink = Commit()
    pipeline = source(script.waiting, on=joining(expected=2, url=url, digest=DIGEST)).sink(sink)

    async with running(pipeline):
        first = [await workers.start("waiting") for _ in range(3)]
        places = await workers.seen("place *", 2)
        await workers.until(lambda: pipeline.statistics().edges[0].channel.senders == 3)
        workers.go()
        codes = [await each.wait() for each in first]

    assert [place.name for place in places] == ["place 0 of 2", "place 1 of 2"]
    assert codes == [0, 0, 0]
    assert sorted(sink.received) == sorted(f"{number}.0" for number in range(20))


async def test_a_worker_that_joins_later_gets_its_part(url: str, workers: Workers) -> None:
    sink = Commit()
    pipeline = source(script.held(), on=joining(expected=1, url=url, digest=DIGEST)).sink(sink)

    async with running(pipeline):
        await workers.start("held")
        await workers.seen("prompt 3 in *")
        await workers.start("held")
        begun = await workers.seen("prompt *", 6)
        workers.go()

    assert len({path.name.rpartition(" ")[2] for path in begun}) == 2
    assert sorted(map(int, sink.received)) == list(range(20))


async def test_the_records_of_a_middle_stage_go_to_the_worker_that_joins(url: str, workers: Workers) -> None:
    sink = Commit()
    pipeline = source(Sample(50)).then(script.doubling(), on=joining(expected=1, url=url, digest=DIGEST)).sink(sink)

    async with running(pipeline):
        code = await (await workers.start("doubling")).wait()

    assert code == 0
    assert sorted(sink.received) == sorted(f"{number}.0" for number in range(50))
    assert report_of(pipeline).balance.ended["trained"] == 100


async def test_the_limit_of_the_lag_is_that_of_the_run_however_many_workers_there_are(
    url: str, workers: Workers
) -> None:
    most = 0

    class Measure:
        """Trains on six groups at a time, and measures what is in flight."""

        def stage_info(self) -> StageInfo:
            return StageInfo(waits_for=6 * script.GROUP_SIZE)

        async def run(self, inbox: ReceiveChannel[TrajectoryGroup]) -> None:
            nonlocal most
            groups: list[TrajectoryGroup] = []
            ledger, step = current().ledger, 0
            async for each in inbox:
                groups.append(each)
                most = max(most, ledger.in_flight)
                if len(groups) == 6:
                    step += 1
                    ids = [TrajectoryId(*taken.id, number) for taken in groups for number in range(len(taken))]
                    ledger.commit_ids(ids, step)
                    groups.clear()

    pipeline = source(script.eighteen(), on=joining(expected=4, url=url, digest=DIGEST), max_lag=0).sink(Measure())

    async with running(pipeline):
        for _ in range(2):
            await workers.start("eighteen")

    assert most == 6 * script.GROUP_SIZE
    assert report_of(pipeline).balance.ended["trained"] == 18 * script.GROUP_SIZE


async def test_batches_are_trained_of_what_joined_workers_sample(url: str, workers: Workers) -> None:
    pipeline = source(script.numbered(), on=joining(expected=1, url=url, digest=DIGEST)).then(Pack()).sink(Train())

    async with running(pipeline):
        await workers.start("numbered")

    assert report_of(pipeline).balance.ended["trained"] == 20 * script.GROUP_SIZE


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(program(Path(__file__).parents[2] / "docs" / "several-hosts.md"))
    return path


async def test_the_script_of_the_page_runs(page: Path, url: str) -> None:
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    worker = [sys.executable, "-c", COMMAND, "worker", "--join", url, f"{page}:sampler"]
    async with (
        await anyio.open_process([sys.executable, page, url], env=environment, stderr=None) as pipeline,
        await anyio.open_process(worker, env=environment, stderr=None) as sampler,
    ):
        assert pipeline.stdout is not None
        printed = b"".join([part async for part in pipeline.stdout])
        codes = await pipeline.wait(), await sampler.wait()

    assert codes == (0, 0)
    assert b"trained       40" in printed


# -- leaving and coming back -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "signals",
    [
        pytest.param([signal.SIGTERM], id="SIGTERM", marks=pytest.mark.long),
        pytest.param([signal.SIGHUP, signal.SIGHUP], id="SIGHUP twice"),
    ],
)
async def test_a_worker_that_is_asked_to_stop_completes_what_it_has_begun(
    url: str, workers: Workers, signals: list[signal.Signals]
) -> None:
    sink = Commit()
    pipeline = source(script.held(), on=joining(expected=1, url=url, digest=DIGEST)).sink(sink)

    async with running(pipeline):
        leaving = await workers.start("held")
        await workers.seen("prompt 4 in *")
        for number in signals:
            leaving.send_signal(number)
        workers.go()
        code = await leaving.wait()
        await workers.start("held")

    assert code == 0
    balance = report_of(pipeline).balance
    assert balance.ended["lost"] == 0
    assert balance.ended["trained"] == 20 * script.GROUP_SIZE
    assert sorted(map(int, sink.received)) == list(range(20))


async def test_a_worker_whose_event_loop_is_blocked_ends_and_its_place_is_named(url: str, workers: Workers) -> None:
    pipeline = source(script.blocking(), on=joining(expected=1, url=url, digest=DIGEST)).sink(Commit())

    with capture_logs() as log:
        async with running(pipeline):
            codes = [await (await workers.start("blocking")).wait() for _ in range(2)]

    balance = report_of(pipeline).balance
    (died,) = [entry["how"] for entry in log if entry["event"] == "worker_died"]
    assert re.search(r"run its event loop for 11 s, it was at .*:\d+ in wait_for_the_kernel", died)
    assert codes == [1, 0]
    assert balance.ended["trained"] == balance.admitted


async def test_a_worker_that_closes_its_file_descriptors_ends_and_is_replaced(url: str, workers: Workers) -> None:
    pipeline = source(script.closing(), on=joining(expected=1, url=url, digest=DIGEST)).sink(Commit())

    async with running(pipeline):
        codes = [await (await workers.start("closing")).wait() for _ in range(2)]

    balance = report_of(pipeline).balance
    assert codes[0] != 0
    assert codes[1] == 0
    assert balance.ended["trained"] >= 20 - 2
    assert balance.balanced


async def test_a_run_ends_when_the_last_worker_leaves_with_the_last_prompts(url: str, workers: Workers) -> None:
    pipeline = source(script.two(), on=joining(expected=1, url=url, digest=DIGEST)).sink(Commit())

    async with running(pipeline):
        leaving = await workers.start("two")
        await workers.seen("prompt *", 2)
        leaving.send_signal(signal.SIGTERM)
        workers.go()

    assert report_of(pipeline).balance.ended["trained"] == 2 * script.GROUP_SIZE


async def test_a_run_ends_when_no_worker_is_there_to_see_the_end_of_the_records(url: str, workers: Workers) -> None:
    class Five:
        """Sends five groups, and returns when it is told to."""

        def __init__(self) -> None:
            self.may_return = anyio.Event()

        async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
            for number in range(5):
                await outbox.send(group(instance_id=str(number)))
            await self.may_return.wait()

    five, sink = Five(), Commit()
    pipeline = source(five).then(script.doubling(), on=joining(expected=1, url=url, digest=DIGEST)).sink(sink)

    async with running(pipeline):
        leaving = await workers.start("doubling")
        await workers.until(lambda: len(sink.received) == 5)
        leaving.send_signal(signal.SIGTERM)
        await leaving.wait()
        five.may_return.set()

    assert report_of(pipeline).balance.ended["trained"] == 10


def assert_trained_once(report: Report, sink: Commit) -> None:
    """Assert that every prompt was trained once, also those that a worker held when it ended."""
    assert sorted(map(int, sink.received)) == list(range(20))
    assert report.balance.admitted == report.balance.ended["trained"] == 20 * script.GROUP_SIZE


async def test_what_a_worker_does_not_complete_by_the_deadline_another_one_samples(url: str, workers: Workers) -> None:
    sink = Commit()
    pipeline = source(script.held(), on=joining(expected=1, url=url, digest=DIGEST)).sink(sink)

    async with running(pipeline):
        leaving = await workers.start("held", "--name", "spot", "--drain-timeout-s", "0")
        await workers.seen("prompt 4 in *")
        leaving.send_signal(signal.SIGTERM)
        code = await leaving.wait()
        workers.go()
        await workers.start("held")

    assert code == 0
    assert_trained_once(report_of(pipeline), sink)


async def test_what_a_killed_worker_held_another_one_samples(url: str, workers: Workers) -> None:
    sink = Commit()
    pipeline = source(script.held(), on=joining(expected=1, url=url, digest=DIGEST)).sink(sink)

    async with running(pipeline):
        killed = await workers.start("held", "--name", "spot")
        await workers.seen("prompt 4 in *")
        killed.kill()
        await killed.wait()
        workers.go()
        await workers.start("held")

    assert_trained_once(report_of(pipeline), sink)


async def test_a_prompt_with_which_two_workers_died_is_lost_by_the_name_of_the_second(
    url: str, workers: Workers
) -> None:
    sink = Commit()
    pipeline = source(script.held(), on=joining(expected=1, url=url, digest=DIGEST)).sink(sink)

    async with running(pipeline):
        for name in ("spot", "other"):
            killed = await workers.start("held", "--name", name)
            await workers.seen(f"prompt 4 in {killed.pid}")
            killed.kill()
            await killed.wait()
        workers.go()
        await workers.start("held")

    balance = report_of(pipeline).balance
    ((reason, count),) = balance.reasons["lost"].items()
    assert reason.startswith("SourceEnv other (pid ")
    assert "without a word" in reason
    assert balance.ended["trained"] + count == balance.admitted == 20 * script.GROUP_SIZE


async def test_the_share_of_a_killed_worker_is_that_of_the_next(url: str, workers: Workers) -> None:
    sink = Commit()
    pipeline = source(script.dying(), on=joining(expected=1, url=url, digest=DIGEST)).sink(sink)

    async with running(pipeline):
        await (await workers.start("dying")).wait()
        await workers.start("dying")

    assert sorted(name for name in sink.received if name != "doomed") == sorted(f"{n}.1" for n in range(20))


async def test_a_worker_of_a_middle_stage_that_is_asked_to_stop_loses_nothing(url: str, workers: Workers) -> None:
    sink = Commit()
    pipeline = source(Sample(1000)).then(script.doubling(), on=joining(expected=1, url=url, digest=DIGEST)).sink(sink)

    async with running(pipeline):
        leaving = await workers.start("doubling")
        await workers.seen("doubled in *")
        await workers.start("doubling")
        leaving.send_signal(signal.SIGTERM)

    assert leaving.returncode == 0 or await leaving.wait() == 0
    assert len(sink.received) == 1000
    assert report_of(pipeline).balance.ended["lost"] == 0


async def test_a_worker_of_a_middle_stage_that_is_asked_to_stop_before_it_gets_records_leaves(
    url: str, workers: Workers, capfd: pytest.CaptureFixture[str]
) -> None:
    sink = Commit()
    pipeline = source(Sample(50)).then(script.doubling(), on=joining(expected=1, url=url, digest=DIGEST)).sink(sink)

    async with running(pipeline):
        await (await workers.start("interrupted")).wait()
        stopped = capfd.readouterr().err
        await workers.start("interrupted")

    assert stopped.endswith("penstock: stopped\n")  # not at its deadline
    assert len(sink.received) == 50
    assert report_of(pipeline).balance.ended["lost"] == 0


async def test_a_worker_joins_the_next_pipeline_when_the_first_one_dies(url: str, workers: Workers) -> None:
    first = [sys.executable, "-m", "tests.processes.script_of_a_pipeline", url, DIGEST]
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    sink = Commit(enough=10)
    async with await anyio.open_process(first, env=environment, stderr=None) as process:
        worker = await workers.start("endless")
        assert process.stdout is not None
        await process.stdout.receive()  # it has trained
        process.kill()
        await process.wait()

    pipeline = source(script.endless(), on=joining(expected=1, url=url, digest=DIGEST)).sink(sink)
    async with running(pipeline):
        pass

    assert await worker.wait() == 0
    assert len(sink.received) == 10
    assert report_of(pipeline).balance.balanced


async def test_a_worker_that_was_suspended_joins_again(
    url: str, workers: Workers, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    set_limits(monkeypatch, WORKER_HEARTBEAT_TIMEOUT_S=2.0)
    sink = Commit()
    pipeline = source(script.suspended(), on=joining(expected=1, url=url, digest=DIGEST)).sink(sink)

    async with running(pipeline):
        worker = await workers.start("suspended")
        await workers.seen("suspended")
        await workers.until(lambda: not pipeline.statistics().stages[0].workers)
        worker.send_signal(signal.SIGCONT)
        code = await worker.wait()

    assert code == 0
    assert {name for name in sink.received if name != "doomed"} == {f"{number}.1" for number in range(20)}
    assert "connecting again" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("forging", "violated the protocol and was disconnected"),
        pytest.param("cut_off", "this host does not reach what its stage needs", marks=pytest.mark.long),
        pytest.param("limited", "expected 17 more file descriptors, got 3", marks=pytest.mark.long),
    ],
)
async def test_a_worker_that_fails_alone_ends_with_status_1_and_the_run_goes_on(
    function: str, said: str, url: str, workers: Workers, capfd: pytest.CaptureFixture[str]
) -> None:
    sink = Commit()
    stage = getattr(script, function)()
    pipeline = source(stage, on=joining(expected=1, url=url, digest=DIGEST)).sink(sink)

    async with running(pipeline):
        code = await (await workers.start(function)).wait()
        await workers.start(function)

    assert code == 1
    assert said in capfd.readouterr().err
    assert sorted(sink.received) == sorted(f"{number}.1" for number in range(20))


# -- ends and errors ---------------------------------------------------------------------------------------------------


async def test_a_sink_that_returns_ends_the_workers(url: str, workers: Workers) -> None:
    pipeline = source(script.endless(), on=joining(expected=2, url=url, digest=DIGEST)).sink(Commit(enough=10))

    async with running(pipeline):
        code = await (await workers.start("endless")).wait()

    assert code == 0
    assert report_of(pipeline).balance.balanced


async def test_an_exception_in_a_worker_ends_the_run_with_its_traceback(url: str, workers: Workers) -> None:
    pipeline = source(script.raising(), on=joining(expected=1, url=url, digest=DIGEST)).sink(Commit())
    worker = await workers.start("raising")

    with (
        anyio.fail_after(FAILSAFE_S),
        pytest.raises(WorkerFailed, match="ValueError: expected water, got sand") as caught,
    ):
        await pipeline.run()

    assert "in run\n" in str(caught.value)
    assert await worker.wait() == 1


@pytest.fixture
def other(tmp_path: Path) -> Path:
    path = tmp_path / "other.py"
    path.write_text(SCRIPT.read_text() + "\n# another one\n")
    return path


async def test_an_error_of_a_stage_that_looks_like_one_of_a_connection_ends_run_and_worker(
    url: str, workers: Workers
) -> None:
    pipeline = source(script.reading_nothing(), on=joining(expected=1, url=url, digest=DIGEST)).sink(Commit())
    worker = await workers.start("reading_nothing")

    with pytest.raises(WorkerFailed, match="FileNotFoundError: expected a file of prompts, got none"):
        await pipeline.run()

    assert await worker.wait() == 1


async def test_a_worker_that_makes_another_stage_leaves_and_the_run_goes_on(url: str, workers: Workers) -> None:
    sink = Commit()
    pipeline = source(script.shared(), on=joining(expected=1, url=url, digest=DIGEST)).sink(sink)

    async with running(pipeline):
        code = await (await workers.start("raising")).wait()
        await workers.start("shared")

    assert code == 1
    assert len(sink.received) == 20


async def test_a_worker_of_another_script_is_refused(url: str, workers: Workers, other: Path, tmp_path: Path) -> None:
    pipeline = source(script.numbered(), on=joining(expected=1, url=url, digest=DIGEST)).sink(Commit())
    command = [sys.executable, "-c", COMMAND, "worker", "--join", url, f"{other}:numbered"]
    environment = {**os.environ, "JOINED_FOLDER": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}

    async with running(pipeline):
        refused = await anyio.run_process(command, env=environment, check=False)
        await workers.start("numbered")

    assert refused.returncode == 1
    assert b"has no place for this worker: it makes its stage of other content" in refused.stderr


@pytest.fixture
def own_key(tmp_path: Path) -> Path:
    path = tmp_path / "own.key"
    ChannelKey.create(path)
    return path


async def test_a_worker_with_another_key_does_not_join(
    url: str, workers: Workers, own_key: Path, tmp_path: Path
) -> None:
    on = joining(expected=1, url=url, digest=DIGEST, key=str(tmp_path / "run.key"))
    pipeline = source(script.numbered(), on=on).sink(Commit())

    async with running(pipeline):
        stranger = await workers.start("numbered", "--key", str(own_key), "--name", "stranger")
        await workers.start("numbered", "--key", str(tmp_path / "run.key"))

    assert stranger.returncode is None  # it tries again
    assert report_of(pipeline).balance.ended["trained"] == 20 * script.GROUP_SIZE


async def test_a_run_that_no_worker_joins_ends(url: str) -> None:
    on = joining(expected=1, url=url, digest=DIGEST, absence_timeout_s=0.05)

    with pytest.raises(WorkersAbsent, match=r"expected a worker of SourceEnv to join at .* within 0.05 s, got none"):
        await source(script.numbered(), on=on).sink(Commit()).run()


def test_a_stage_that_sends_batches_cannot_run_in_workers_that_join(url: str) -> None:
    class Batches:
        async def run(self, outbox: SendChannel[TrainBatch]) -> None: ...

    class Whatever:
        async def run(self, inbox: ReceiveChannel[TrainBatch]) -> None: ...

    with pytest.raises(InvalidPipeline, match="expected a stage that sends TrajectoryGroup"):
        source(Batches(), on=joining(expected=1, url=url)).sink(Whatever()).check()
