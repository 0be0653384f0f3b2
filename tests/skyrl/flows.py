"""A flow that answers requests, without SkyRL: what its generator does, on a thread beside the test's."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
from tests.failsafe import FAILSAFE_S
from tests.fake_policy import FakePolicy, Letters

from penstock import Flow, ReceiveChannel, SendChannel, SourceEnv, TrajectoryGroup, drop, source
from penstock._pipeline.accounting.repetition_sets import exclude
from penstock._stages.integrations.flow_thread.flow_run import Drop, FlowRun
from penstock._stages.integrations.flow_thread.flow_thread import FlowThread
from penstock._stages.integrations.skyrl.arrivals import Arrivals
from penstock._stages.integrations.skyrl.requests import PromptRequest, Requests, withdraw
from penstock._stages.integrations.skyrl.samples import Rules
from penstock.integrations.skyrl import SampleRequests, SkyRLPrompts
from penstock.policies import SamplingParams

MakeFlow = Callable[[Requests], Flow[TrajectoryGroup]]


def request(
    instance_id: str, *repetitions: int, prompt: str = "?", sampling: SamplingParams | None = None, **row: Any
) -> PromptRequest:
    """Return a request for repetitions of a prompt."""
    tokens = np.array(Letters().encode(prompt), np.int32)
    return PromptRequest(instance_id, tokens, repetitions, sampling or SamplingParams(), {"row": row})


def sampled(policy: Any = None, make_env: Any = SkyRLPrompts, **options: Any) -> SampleRequests:
    return SampleRequests(SourceEnv(make_env, policy or FakePolicy(), Letters(), **options))


def rewards_of(asked: PromptRequest) -> dict[int, float | None]:
    """Return the reward of each repetition; None for those that were given up. Waits for them."""
    asked.answered.result(FAILSAFE_S)
    return {repetition: None if row is None else row.trajectory.reward for repetition, row in asked.rows.items()}


class Running:
    """A flow that runs; `with running(…)`."""

    def __init__(self, requests: Requests | Arrivals, thread: FlowThread) -> None:
        self.requests = requests
        self.thread = thread

    def ask(self, *asked: PromptRequest) -> Sequence[PromptRequest]:
        self.thread.call(partial(self.requests.ask, asked))
        self.thread.run.wake()
        return asked

    def withdraw(self, *asked: PromptRequest) -> Any:
        return self.thread.call(partial(withdraw, asked))

    @property
    def balance(self) -> Any:
        """The balance of the ledger; once the flow was stopped, that of its end."""
        report = self.thread.run.pipeline.report
        return report.balance if report is not None else self.thread.call(self.thread.run._ledger.balance)


@contextmanager
def running(make: MakeFlow | SampleRequests, number: int = 0) -> Iterator[Running]:
    requests = Requests()
    requests.load_state_dict({"number": number})
    with _running(requests, source(requests).then(make) if isinstance(make, SampleRequests) else make(requests)) as run:
        yield run


@contextmanager
def arriving(
    flow: Flow[TrajectoryGroup] | Sequence[TrajectoryGroup], group_size: int = 2, **rules: bool
) -> Iterator[Running]:
    """Run a flow with a source of its own, or one that sends these groups."""
    sent = flow if isinstance(flow, Flow) else source(Sends(flow))
    with _running(Arrivals(group_size, 1.0, Rules(**rules)), sent) as run:
        yield run


@contextmanager
def _running(requests: Requests | Arrivals, flow: Flow[TrajectoryGroup]) -> Iterator[Running]:
    rest = Drop("rejected", "not awaited")
    run = FlowRun(flow, requests.awaited, requests, trainer="test", rest=rest, saved=None, version=0)
    thread = FlowThread("test-flow")
    thread.start(run)
    try:
        yield Running(requests, thread)
    finally:
        thread.stop()


@dataclass
class Sends:
    """A source that sends groups, and stays until it is cancelled."""

    groups: Sequence[TrajectoryGroup]
    sent: int = 0
    stays: bool = True

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        for group in self.groups:
            await outbox.send(group)
            self.sent += 1
        if self.stays:
            await anyio.sleep_forever()


@dataclass(frozen=True)
class InPieces:
    """A stage that holds back `held` groups, and sends them backwards, row by row."""

    held: int

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        groups: list[TrajectoryGroup] = []
        async for group in inbox:
            groups.append(group)
            if len(groups) == self.held:
                for each in reversed(groups):
                    for row in reversed(each.rollout_ids.tolist()):
                        others = sum(1 << other for other in each.rollout_ids.tolist() if other != row)
                        piece = exclude(each, others)
                        assert piece is not None
                        await outbox.send(piece)
                groups.clear()


@dataclass(frozen=True)
class RewardsTheRow:
    """A stage that gives the reward that the row of SkyRL's data set names, plus the repetition."""

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        async for group in inbox:
            await outbox.send(group.with_rewards(group.meta["row"]["reward"] + group.rollout_ids))


@dataclass
class DropsTheFirst:
    """A stage that drops the first `count` groups."""

    count: int

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        async for group in inbox:
            self.count -= 1
            if self.count < 0:
                await outbox.send(group)
            else:
                drop(group, "filtered", "the first")


@dataclass
class KilledOnce(FakePolicy):
    """A policy whose process is killed at its first request, in the first process that opens it."""

    mark: str = ""

    async def generate(self, prompts: Any, sampling: SamplingParams) -> Any:
        if self._is_first():
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().generate(prompts, sampling)

    def _is_first(self) -> bool:
        try:
            Path(self.mark).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True
