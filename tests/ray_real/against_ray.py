"""Stages in actors of Ray itself, on clusters of several nodes. `make test-ray` runs this file."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch
from safetensors.torch import load_file
from structlog.testing import capture_logs
from tests import configured_run
from tests.failsafe import FAILSAFE_S
from tests.pages import program
from tests.processes.blocking_environments import WAYS, blocking
from tests.processes.worker_sinks import Attentive, Commit
from tests.processes.worker_stages import Double, ReadWhatOneMakes, Sample, SampleAndDie, attempts_in
from tests.ray_real import stages
from tests.ray_real.conftest import AddNode, OwnHead

from penstock import ReceiveChannel, Report, SourceEnv, TrajectoryGroup, current, ray, source
from penstock.accounting import WorkerStatistics
from penstock.errors import ClusterUnreachable, InvalidPipeline, PlacementTimedOut, WorkerFailed
from penstock.policies import NoOpPolicy
from penstock.runs import load_run_config, train

ray_itself: Any = import_module("ray")
import_module("ray.util.placement_group")

BLOCKED = r"did not run its event loop for 11 s, it was at .*/blocking_environments.py:\d+ in (\w+)"

pytestmark = pytest.mark.anyio


@pytest.fixture
def on(cluster: Any) -> Any:
    """`ray(...)` on the cluster of the tests, with half a CPU for each worker."""
    return partial(ray, address=cluster.address, num_cpus=0.5)


def workers_of(report: Report, stage: int = 0) -> tuple[WorkerStatistics, ...]:
    return report.statistics.stages[stage].workers


@contextmanager
def connected(cluster: Any) -> Iterator[None]:
    ray_itself.init(address=cluster.address, logging_level="ERROR")
    try:
        yield
    finally:
        ray_itself.shutdown()


async def left_over(cluster: Any) -> list[Any]:
    """Return the actors and placement groups that are not gone."""
    return await anyio.to_thread.run_sync(_left_over, cluster)


def _left_over(cluster: Any) -> list[Any]:
    with connected(cluster):
        groups = ray_itself.util.placement_group_table()
        actors = ray_itself._private.state.actors()  # the public list needs a dashboard
        alive = [actor for actor in actors.values() if actor["State"] != "DEAD"]
        return [*alive, *(group for group in groups.values() if group["state"] != "REMOVED")]


async def nothing_left_over(cluster: Any) -> None:
    """Wait until nothing is left over: Ray reports the end of an actor later than its process ends."""
    with anyio.fail_after(FAILSAFE_S):
        while await left_over(cluster):  # noqa: ASYNC110 (no event tells of it)
            await anyio.sleep(0.05)


# -- where workers run, and by what their records travel -------------------------------------------------------------


async def test_actors_of_this_host_send_over_shared_memory(cluster: Any, on: Any) -> None:
    sink = Commit()

    report = await source(Sample(40), on=on(workers=3)).sink(sink).run()

    assert len(sink.received) == 40
    assert report.balance.ended["trained"] == report.balance.admitted == 80
    assert [(worker.state, worker.transport, worker.node) for worker in workers_of(report)] == [
        ("finished", "shm", "")
    ] * 3
    await nothing_left_over(cluster)


async def test_actors_of_another_host_send_over_tcp(add_other_host: AddNode, on: Any) -> None:
    add_other_host("far")
    sink = Commit()

    report = await source(Sample(40), on=on(workers=1, resources={"far": 0.1})).sink(sink).run()

    (worker,) = workers_of(report)
    assert len(sink.received) == 40
    assert report.balance.ended["trained"] == 80
    assert worker.transport == "tcp"
    assert worker.node


async def test_one_stage_sends_by_both_at_once(add_other_host: AddNode, on: Any) -> None:
    add_other_host("both")
    sink = FromEach(5)

    placement = on(workers=5, num_cpus=1)
    report = await source(stages.SampleForever(), on=placement).sink(sink).run()

    assert {worker.transport for worker in workers_of(report)} == {"shm", "tcp"}
    assert "shm on this host, tcp elsewhere" in source(stages.SampleForever(), on=placement).sink(sink).describe()


@dataclass(frozen=True)
class FromEach:
    """Returns once it has a group of each of `workers`."""

    workers: int
    seen: set[str] = field(default_factory=set)

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup]) -> None:
        async for group in inbox:
            current().ledger.end(group, "trained")
            self.seen.add(group.instance_id.split(".")[1])
            if len(self.seen) == self.workers:
                return


@pytest.mark.parametrize("far", [False, True])
async def test_a_middle_stage_gets_records_and_sends_them_on(add_other_host: AddNode, on: Any, *, far: bool) -> None:
    if far:
        add_other_host("middle")
    sink = Rewards()
    placement = on(workers=2, resources={"middle": 0.1} if far else {})

    report = await source(Sample(30)).then(Double(), on=placement).sink(sink).run()

    assert sink.rewards == [2.0] * 60
    assert {worker.transport for worker in workers_of(report, 1)} == {"tcp" if far else "shm"}
    assert report.balance.ended["trained"] == 60


@dataclass(frozen=True)
class Rewards:
    rewards: list[float] = field(default_factory=list)

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup]) -> None:
        async for group in inbox:
            self.rewards.extend(group.rewards.tolist())
            current().ledger.end(group, "trained")


async def test_a_stage_runs_in_the_main_thread_where_signals_and_locks_work(on: Any) -> None:
    sink = Rewards()

    await source(stages.InTheMainThread(), on=on(workers=1, start_timeout_s=FAILSAFE_S)).sink(sink).run()

    assert sink.rewards == [1.0] * 4


# -- configured runs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("far", [False, True])
def test_a_configured_run_trains_what_actors_sample(
    add_other_host: AddNode, cluster: Any, tmp_path: Path, *, far: bool
) -> None:
    if far:
        add_other_host("sampling")
    resources = {"sampling": 0.1} if far else {}
    config = configured_run.write_run(
        tmp_path, {"ray": {"address": cluster.address, "num_cpus": 0.5, "resources": resources}}
    )

    summary = anyio.run(train, load_run_config(config))

    assert summary.steps == configured_run.STEPS
    assert summary.ledger["ended"]["trained"] == configured_run.STEPS * configured_run.TRAJECTORIES
    assert summary.ledger["in_flight"] == 0
    changed = load_file(Path(summary.checkpoint) / "model.safetensors")
    initial = load_file(tmp_path / "model" / "model.safetensors")
    assert any(not torch.equal(tensor, initial[name]) for name, tensor in changed.items())
    anyio.run(nothing_left_over, cluster)


def test_a_configured_run_is_a_job_of_the_cluster(job_server: str, tmp_path: Path) -> None:
    config = configured_run.write_run(tmp_path, {"ray": {"num_cpus": 0.5}})
    submit = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "job", "submit"]
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}

    done = subprocess.run(
        [
            *submit,
            "--address",
            job_server,
            "--",
            os.fspath(Path(sys.executable).with_name("penstock")),
            "run",
            os.fspath(config),
        ],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["ledger"]["ended"]["trained"] == configured_run.STEPS * configured_run.TRAJECTORIES


# -- death -----------------------------------------------------------------------------------------------------------


async def test_a_dead_actor_is_replaced_and_what_arrived_is_kept(on: Any) -> None:
    sink = Commit()

    report = await source(SampleAndDie(20), on=on(workers=2)).sink(sink).run()

    assert [name for name in sink.received if name.startswith("doomed")] == [f"doomed {n}.0" for n in range(3)]
    assert len(sink.received) == 23
    assert [worker.restarts for worker in workers_of(report)] == [1, 0]
    assert report.balance.balanced
    assert report.balance.in_flight == 0


async def test_an_actor_that_dies_too_often_ends_the_run_by_name(on: Any) -> None:
    pipeline = source(SampleAndDie(20, lives=9), on=on(workers=2, restarts=1)).sink(Commit())

    death = r"SampleAndDie 1/2, restart 1 \(pid \d+\) died: .*; it may be restarted 1 times within an hour"
    with pytest.raises(WorkerFailed, match=death):
        await pipeline.run()

    assert pipeline.report is not None
    assert pipeline.report.balance.balanced


@pytest.mark.parametrize("first_dies", [False, True])
async def test_one_actor_of_a_host_makes_a_file_and_another_one_if_it_dies(
    on: Any, tmp_path: Path, *, first_dies: bool
) -> None:
    sink = Commit()
    on_both_nodes = on(workers=4, num_cpus=1)  # each has two CPUs

    report = await source(ReadWhatOneMakes(str(tmp_path), first_dies=first_dies), on=on_both_nodes).sink(sink).run()

    assert sorted(sink.received) == [f"{index}: attempt {first_dies:d}" for index in range(4)]
    assert attempts_in(tmp_path) == 1 + first_dies
    assert sum(worker.restarts for worker in workers_of(report)) == first_dies


async def test_an_exception_in_an_actor_ends_the_run_with_its_traceback(on: Any) -> None:
    with pytest.raises(WorkerFailed, match="raised ValueError: expected water, got sand") as caught:
        await source(stages.Raises(), on=on(workers=1)).sink(Commit()).run()

    assert "in run\n" in str(caught.value)
    assert "worker_stage.py" not in str(caught.value)


async def test_workers_of_a_dead_node_are_replaced_on_another(add_other_host: AddNode, cluster: Any, on: Any) -> None:
    node = add_other_host("doomed")
    sink, far = Attentive(), set[str]()
    pipeline = source(stages.SampleForever(), on=on(workers=5, num_cpus=0.9, start_timeout_s=FAILSAFE_S)).sink(sink)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pipeline.run)
        await until(lambda: all(w.state == "running" for w in workers_now(pipeline)))
        far |= {worker.name for worker in workers_now(pipeline) if worker.node}
        node.kill()
        cluster.add_node(num_cpus=2)

        await until(lambda: all(w.restarts == (w.name in far) and w.state == "running" for w in workers_now(pipeline)))
        tasks.cancel_scope.cancel()

    assert far
    assert pipeline.report is not None
    assert pipeline.report.balance.balanced


def workers_now(pipeline: Any) -> tuple[WorkerStatistics, ...]:
    return tuple(worker for stage in pipeline.statistics().stages for worker in stage.workers) or (
        WorkerStatistics(name="", pid=None, state="starting", restarts=0),
    )


async def until(condition: Any) -> None:
    """Wait until `condition` holds."""
    with anyio.fail_after(FAILSAFE_S):
        while not condition():  # noqa: ASYNC110 (no event tells of it)
            await anyio.sleep(0.05)


async def test_an_actor_whose_event_loop_is_blocked_is_replaced_and_its_place_is_named(on: Any) -> None:
    make_env: Any = blocking
    env = SourceEnv(make_env, NoOpPolicy(), group_size=1, concurrency=1, groups=30, rollout_timeout_s=1)

    with capture_logs() as log:
        report = await source(env, on=on(workers=2)).sink(Commit()).run()

    places = [re.search(BLOCKED, entry["how"]) for entry in log if entry["event"] == "worker_died"]
    assert {place[1] for place in places if place} == {way.__name__ for way in WAYS[:2]}
    assert report.balance.admitted == report.balance.ended["trained"] == 30


@pytest.mark.parametrize("rounds", [1, 3])
async def test_an_actor_that_gets_sigterm_is_replaced_like_one_that_died(on: Any, rounds: int) -> None:
    sink = Attentive()
    pipeline = source(stages.SampleForever(), on=on(workers=1, restarts=rounds)).sink(sink)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pipeline.run)
        for restarts in range(rounds):
            await until(lambda: running_since(pipeline, restarts))  # noqa: B023 (called at once)
            os.kill(workers_now(pipeline)[0].pid or 0, signal.SIGTERM)
        await until(lambda: running_since(pipeline, rounds))
        tasks.cancel_scope.cancel()

    assert pipeline.report is not None
    assert pipeline.report.balance.balanced
    assert all("left: it was stopped by SIGTERM" in reason for reason in pipeline.report.balance.reasons["lost"])


def running_since(pipeline: Any, restarts: int) -> bool:
    """Return whether the worker runs that was started after so many others."""
    (worker,) = workers_now(pipeline)
    return worker.state == "running" and worker.restarts == restarts


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_loss_of_the_head_ends_the_run_with_a_checkpoint_and_a_report(
    own_head: OwnHead, tmp_path: Path, number: signal.Signals
) -> None:
    command = [sys.executable, "-m", "tests.ray_real.losing_its_head", own_head.address, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as script:
        assert script.stdout is not None
        assert script.stdout.readline() == "step 3\n"
        own_head.signal(number)
        lost = time.monotonic()
        report = script.stdout.readline()
        reported_s = time.monotonic() - lost
        _, errors = script.communicate()
        own_head.signal(signal.SIGKILL)

    assert report == (
        f"ClusterLost, step-00000003: expected an answer of the head of the Ray cluster at {own_head.address}\n"
    )
    assert reported_s < 40
    assert script.returncode == 1, errors


@pytest.mark.parametrize(
    ("after_s", "number"),
    [(0.0, signal.SIGTERM), (0.15, signal.SIGINT), (0.3, signal.SIGTERM), (0.45, signal.SIGHUP), (0.6, signal.SIGTERM)],
)
def test_a_signal_while_a_run_connects_to_ray_ends_it_in_order(
    cluster: Any, after_s: float, number: signal.Signals
) -> None:
    command = [sys.executable, "-m", "tests.ray_real.connecting", cluster.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as script:
        assert script.stdout is not None
        assert script.stdout.readline() == "connecting\n"
        time.sleep(after_s)  # a moment within the call, or soon after it
        script.send_signal(number)
        _, errors = script.communicate()

    assert script.returncode == 128 + number, errors
    assert f"the run was stopped by {number.name}" in errors
    assert "Traceback" not in errors


# -- places that do not exist ------------------------------------------------------------------------------------------


async def test_a_placement_that_does_not_fit_ends_with_a_table(cluster: Any, on: Any) -> None:
    placement = on(workers=3, resources={"slot": 1}, placement_timeout_s=1)

    with pytest.raises(PlacementTimedOut) as caught:
        await source(Sample(1), on=placement).sink(Commit()).run()

    message = str(caught.value)
    assert "the 3 workers of Sample" in message
    assert "each with 0.5 CPU, 1 slot (SPREAD)" in message
    assert "slot free" in message
    assert message.count("1 of 1") == 2
    await nothing_left_over(cluster)


async def test_an_address_without_a_cluster_is_refused_by_name() -> None:
    with pytest.raises(ClusterUnreachable, match=r"127\.0\.0\.1:1"):
        await source(Sample(1), on=ray(workers=1, address="127.0.0.1:1")).sink(Commit()).run()


def test_ray_without_parentheses_is_refused_with_the_line_to_write() -> None:
    with pytest.raises(InvalidPipeline, match=r"write on=ray\(workers=4\)"):
        source(Sample(1), on=ray)  # type: ignore[arg-type]


# -- ending ------------------------------------------------------------------------------------------------------------


async def test_the_end_of_the_sink_cancels_stages_and_leaves_nothing(cluster: Any, on: Any, tmp_path: Path) -> None:
    farewell = tmp_path / "farewell"
    said = [anyio.Path(f"{farewell}.{index}") for index in range(2)]

    report = await source(stages.SampleForever(str(farewell)), on=on(workers=2)).sink(FromEach(2)).run()

    assert [await file.read_text() for file in said] == ["cancelled"] * 2
    assert report.balance.balanced
    await nothing_left_over(cluster)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
async def test_a_signal_leaves_no_actor_and_no_process(cluster: Any, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "tests.ray_real.endless", cluster.address]
    async with await anyio.open_process(command, stderr=None) as process:
        assert process.stdout is not None
        pid = int(await process.stdout.receive())
        process.send_signal(number)
        alarms = [float(line) for line in b"".join([part async for part in process.stdout]).split()]
        await process.wait()

    expected = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -signal.SIGKILL}
    assert process.returncode == expected[number]
    assert alarms == ([] if number == signal.SIGKILL else [0])  # Ray's own handler of SIGTERM aborts after an alarm
    await until(lambda: not Path(f"/proc/{pid}").exists())
    await nothing_left_over(cluster)


async def test_a_cluster_that_the_user_has_connected_to_stays_connected(cluster: Any) -> None:
    with connected(cluster):
        await source(Sample(4), on=ray(workers=1)).sink(Commit()).run()

        assert ray_itself.is_initialized()


def test_a_run_starts_a_cluster_if_told(tmp_path: Path) -> None:
    script = tmp_path / "ray_page.py"
    script.write_text(program(Path(__file__).parents[2] / "docs" / "ray.md"))
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}

    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
