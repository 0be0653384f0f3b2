"""The flow of a tag: a bounded queue, the ledger in ROLL's steps, drops by reason, a clean end, resumption."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.failsafe import FAILSAFE_S

from penstock import Flow, SendChannel, TrajectoryGroup, source
from penstock._stages.integrations.roll.group_queue import Put, QueuePlace
from penstock._stages.integrations.roll.step_files import StepFiles
from penstock._stages.integrations.roll.tag_flow import Bounds, Sampled, TagFlow
from penstock.errors import FlowEnded, FlowStalled

SIZE = 2
RATIO = 1


class Groups:
    """Sends groups of two, numbered from `first` on; then waits for ever, or ends, or fails."""

    def __init__(self, count: int, *, sizes: tuple[int, ...] = (SIZE,), then: str = "ends") -> None:
        self.count = count
        self.sizes = sizes
        self.then = then

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        for number in range(self.count):
            size = self.sizes[number % len(self.sizes)]
            await outbox.send(
                TrajectoryGroup.build(
                    env="sums",
                    instance_id=str(number),
                    sequences=[[1, 2, 3]] * size,
                    loss_mask=[[0, 0, 1]] * size,
                    rewards=[1.0] * size,
                )
            )
        if self.then == "fails":
            raise RuntimeError("the environment is gone")


class Roll:
    """ROLL's queue: takes groups, and hands them over when a batch is made."""

    def __init__(self) -> None:
        self.queued: dict[QueuePlace, int] = {}
        self.number = 0

    def held(self) -> set[QueuePlace]:
        return set(self.queued)

    def put(self, flow: TagFlow, sampled: Sampled, answer: Any = "taken", created: int = 0) -> Put:
        episode = QueuePlace(0, self.number)
        self.number += 1
        if answer == "taken":
            self.queued[episode] = created
        return flow.put(episode, sampled, lambda step, metrics: Put(answer, created))  # noqa: ARG005 (as ROLL's)

    def make_batch(self, groups: int) -> None:
        for episode in sorted(self.queued)[:groups]:
            del self.queued[episode]


Make = Callable[..., TagFlow]


@pytest.fixture
def roll() -> Roll:
    return Roll()


@pytest.fixture
def make(roll: Roll, tmp_path: Path) -> Iterator[Make]:
    made: list[TagFlow] = []

    def flow_of(groups: Groups, hung_timeout: float = FAILSAFE_S) -> TagFlow:
        flow: Flow[TrajectoryGroup] = source(groups)
        bounds = Bounds(SIZE, 8, RATIO, hung_timeout)
        made.append(TagFlow("sums", lambda: flow, bounds, StepFiles(tmp_path, 1), roll.held))
        return made[-1]

    yield flow_of
    for flow in made:
        flow.stop()


def taken(flow: TagFlow) -> Sampled:
    sampled = flow.next(lambda: True)
    assert sampled is not None
    return sampled


def ended(flow: TagFlow) -> dict[str, dict[str, int]]:
    flow.stop()
    assert flow.report is not None
    balance = flow.report.balance
    assert balance.balanced
    assert balance.in_flight == 0
    return {state: dict(reasons) for state, reasons in balance.reasons.items() if reasons}


def test_what_rolls_batch_has_taken_is_committed_when_the_next_step_begins(make: Make, roll: Roll) -> None:
    flow = make(Groups(3))
    flow.begin_step(0)
    for _ in range(3):
        roll.put(flow, taken(flow))
    roll.make_batch(2)

    flow.begin_step(1)

    assert sum(ended(flow)["trained"].values()) == 2 * SIZE
    assert flow.report is not None
    assert flow.report.steps == 2  # the step that begins, and the one at whose end ROLL stops


def test_the_last_batch_is_committed_when_roll_stops(make: Make, roll: Roll) -> None:
    flow = make(Groups(1))
    flow.begin_step(0)
    roll.put(flow, taken(flow))
    roll.make_batch(1)

    assert sum(ended(flow)["trained"].values()) == SIZE


def test_a_step_begins_once_though_every_environment_is_told(make: Make, roll: Roll) -> None:
    flow = make(Groups(1))
    for _ in range(SIZE):
        flow.begin_step(0)
    roll.put(flow, taken(flow))
    roll.make_batch(1)
    for _ in range(SIZE):
        flow.begin_step(1)

    assert flow.step == 1
    assert sum(ended(flow)["trained"].values()) == SIZE


def test_what_roll_drops_is_counted_by_reason(make: Make, roll: Roll) -> None:
    flow = make(Groups(4))
    flow.begin_step(0)
    roll.put(flow, taken(flow), "filtered")
    roll.put(flow, taken(flow), "older")
    roll.put(flow, taken(flow))
    for step in (1, 2):
        flow.begin_step(step)
    roll.make_batch(1)  # its age is 2
    flow.begin_step(3)

    reasons = ended(flow)
    assert reasons["filtered"] == {"dropped by ROLL's group_filter_cls": SIZE}
    assert reasons["stale"] == {
        "sampled before ROLL created its group: older than async_generation_ratio": SIZE,
        "dropped by ROLL: older than async_generation_ratio=1": SIZE,
    }


def test_a_group_of_the_oldest_age_that_roll_takes_is_trained_once_it_has_left_the_queue(
    make: Make, roll: Roll
) -> None:
    flow = make(Groups(1))
    flow.begin_step(0)
    roll.put(flow, taken(flow))
    flow.begin_step(1)  # still in the queue
    assert "1 given" in repr(flow)
    roll.make_batch(1)
    flow.begin_step(2)

    assert sum(ended(flow)["trained"].values()) == SIZE


def test_a_group_that_came_too_late_for_its_episode_can_have_the_next(make: Make, roll: Roll) -> None:
    flow = make(Groups(1))
    flow.begin_step(0)
    sampled = taken(flow)

    assert roll.put(flow, sampled, "late").answer == "late"
    roll.put(flow, sampled)
    roll.make_batch(1)

    assert sum(ended(flow)["trained"].values()) == SIZE


def test_a_group_of_another_size_is_rejected(make: Make, roll: Roll) -> None:
    flow = make(Groups(2, sizes=(3, SIZE)))
    flow.begin_step(0)

    assert len(taken(flow).trajectories) == SIZE
    (reason,) = ended(flow)["rejected"].items()
    assert reason == ("ROLL: expected group_size=2 rollouts that train, of at most sequence_length=8 tokens", 3)
    del roll


def test_a_flow_that_ended_is_not_waited_for(make: Make) -> None:
    flow = make(Groups(1))
    flow.begin_step(0)
    taken(flow)

    with pytest.raises(FlowEnded, match="ROLL waits for more samples than the 1"):
        flow.next(lambda: True)


def test_an_error_of_the_flow_reaches_roll(make: Make) -> None:
    flow = make(Groups(0, then="fails"))
    flow.begin_step(0)

    with pytest.raises(Exception, match="the environment is gone"):
        flow.next(lambda: True)


def test_a_thread_that_roll_stops_does_not_wait_for_a_group(make: Make) -> None:
    flow = make(Groups(0))
    flow.begin_step(0)

    assert flow.next(lambda: False) is None


def test_nothing_is_left_of_a_flow_that_was_stopped(make: Make) -> None:
    flow = make(Groups(5))
    flow.begin_step(0)
    flow.stop()
    flow.stop()

    assert flow.next(lambda: True) is None
    assert "ended" in repr(flow)
    assert "penstock-roll-sums" not in {thread.name for thread in threading.enumerate()}


def test_a_flow_that_sends_nothing_for_rolls_bound_is_reported(make: Make) -> None:
    class Silent(Groups):
        async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
            import anyio  # noqa: PLC0415

            del outbox
            await anyio.sleep_forever()

    flow = make(Silent(0), hung_timeout=0)
    flow.begin_step(0)

    with pytest.raises(FlowStalled, match="expected a sample within 0 s"):
        flow.next(lambda: True)


def test_before_the_first_step_there_are_no_statistics(make: Make) -> None:
    with pytest.raises(RuntimeError, match="before training began"):
        make(Groups(0)).statistics()


def test_a_resumed_flow_knows_what_was_trained(make: Make, roll: Roll, tmp_path: Path) -> None:
    first = make(Groups(2))
    first.begin_step(0)
    roll.put(first, taken(first))
    roll.make_batch(1)
    first.stop()
    assert {path.name for path in tmp_path.iterdir()} == {"0.json", "balance.json"}
    assert json.loads((tmp_path / "balance.json").read_text())["ended"]["trained"] == SIZE

    second = make(Groups(2))
    second.begin_step(1)
    taken(second)  # the source of this test does not skip prompts, so the ledger refuses the first

    assert ended(second)["rejected"]


def test_a_run_killed_between_rolls_checkpoint_and_its_next_step_is_warned_of_what_it_trains_again(
    make: Make, roll: Roll
) -> None:
    killed = make(Groups(2))
    killed.begin_step(0)
    for step in (1, 2):
        roll.put(killed, taken(killed))
        roll.make_batch(1)
        if step == 1:
            killed.begin_step(step)
    resumed = make(Groups(2))

    with capture_logs() as logs:
        resumed.begin_step(2)  # from the checkpoint of step 1

    (warning,) = [log for log in logs if log["event"] == "resumed_without_ledger"]
    assert (warning["step"], warning["found"]) == (1, 0)
    assert [log["trained"] for log in logs if log["event"] == "flow_resumed"] == [1]  # of two
