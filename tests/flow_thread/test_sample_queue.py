"""The queue of samples is bounded, and does not let a trainer wait for a flow that has ended."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from tests.failsafe import FAILSAFE_S

from penstock import TrajectoryId
from penstock._stages.integrations.flow_thread.sample_queue import SampleQueue, Trajectories

FIRST, SECOND = (TrajectoryId("env", "0", 0),), (TrajectoryId("env", "0", 1),)


@pytest.fixture
def got() -> list[Trajectories]:
    return []


@pytest.fixture
def samples(got: list[Trajectories]) -> SampleQueue:
    return SampleQueue(1, lambda _, trajectories: got.append(trajectories))


def sample() -> Any:
    return SimpleNamespace(number=1)


def test_a_full_queue_takes_no_sample_until_one_is_taken(samples: SampleQueue, got: list[Trajectories]) -> None:
    assert samples.offer(sample(), FIRST)
    assert not samples.offer(sample(), SECOND)

    assert samples.get(timeout=0).number == 1
    assert got == [FIRST]
    assert samples.offer(sample(), SECOND)


def test_a_closed_queue_gives_what_it_holds_and_then_is_empty_at_once(samples: SampleQueue) -> None:
    samples.offer(sample(), FIRST)
    samples.close()

    samples.get(timeout=FAILSAFE_S)
    with pytest.raises(queue.Empty):
        samples.get()


def test_a_waiting_trainer_is_woken_when_the_queue_is_closed(samples: SampleQueue) -> None:
    woken = threading.Event()

    def wait() -> None:
        with pytest.raises(queue.Empty):
            samples.get()
        woken.set()

    thread = threading.Thread(target=wait)
    thread.start()
    samples.close()

    assert woken.wait(FAILSAFE_S)
    thread.join()


def test_an_empty_queue_raises_when_it_is_not_waited_for(samples: SampleQueue) -> None:
    with pytest.raises(queue.Empty):
        samples.get_nowait()
    with pytest.raises(queue.Empty):
        samples.get(timeout=0)
