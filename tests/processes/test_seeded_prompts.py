"""Prompts whose completions are the same whichever process samples them, also after one was killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.resumption.script_of_a_run import Tokens
from tests.tiny_model import TinyModel

from penstock import ReceiveChannel, SourceEnv, Trajectory, TrajectoryGroup, current, here, processes, source
from penstock.policies import SamplingParams
from penstock.torch import TorchPolicy

EOS = 10
GROUP_SIZE = 4
PROMPTS = 12


class Digits:
    """One digit a prompt; the sampler that first scores prompt `deadly` is killed."""

    def __init__(self, deadly: int | None, folder: Path) -> None:
        self._deadly = deadly
        self._mark = folder / "killed"

    def __len__(self) -> int:
        return PROMPTS

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"question": str(index), "number": index}

    def score_answer(self, answer: str, entry: Mapping[str, Any]) -> float:
        if entry["number"] == self._deadly and not self._mark.exists():
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return float(len(answer))


class Collect:
    """Keeps the completions of each prompt, by its number."""

    def __init__(self) -> None:
        self.received: dict[int, list[list[list[Any]]]] = {}

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup]) -> None:
        async for group in inbox:
            sampled = [[each.tokens.tolist(), logprobs_of(each)] for each in group]
            self.received.setdefault(group.meta["task"], []).append(sampled)
            current().ledger.end(group, "trained")


def logprobs_of(trajectory: Trajectory) -> list[float]:
    assert trajectory.behavior_logprobs is not None
    return [float(logprob) for logprob in trajectory.behavior_logprobs]


async def sampled(folder: Path, workers: int, *, seed: int = 3, deadly: int | None = None) -> Collect:
    policy = TorchPolicy(partial(TinyModel, vocabulary=11), EOS, seed=seed)
    env = SourceEnv(
        partial(Digits, deadly, folder),
        policy,
        Tokens(),
        group_size=GROUP_SIZE,
        concurrency=GROUP_SIZE,  # so that the rows beside a row are always the same
        sampling=SamplingParams(max_completion_tokens=6),
        groups=PROMPTS,
    )
    collect = Collect()
    report = await source(env, on=processes(workers) if workers else here()).sink(collect).run()
    assert report.balance.balanced
    return collect


@pytest.mark.usefixtures("one_thread")
async def test_a_prompt_draws_the_same_completions_in_any_worker_also_after_its_sampler_was_killed(
    tmp_path: Path,
) -> None:
    alone = await sampled(tmp_path, 0)
    assert (await sampled(tmp_path, 0, seed=4)).received != alone.received

    killed = await sampled(tmp_path, 2, deadly=4)

    assert (tmp_path / "killed").exists()
    assert sorted(killed.received) == sorted(alone.received) == list(range(PROMPTS))
    assert all(each == alone.received[number][0] for number, several in killed.received.items() for each in several)


def test_the_repetitions_of_a_prompt_differ() -> None:
    drawn = [SamplingParams(seed=3).seeded_for(7, repetition, 0).seed for repetition in range(1000)]

    assert len(set(drawn)) == len(drawn)
