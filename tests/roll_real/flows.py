"""Flows that ROLL's worker makes; named in its configuration."""

from __future__ import annotations

from typing import Any

import numpy as np
from tests.roll_real.given import Given
from tests.trl_real.letters import COMPLETION, Prompts

from penstock import Flow, SourceEnv, TrajectoryGroup, processes, source
from penstock.integrations.roll import RollJob


def letters(job: RollJob) -> Flow[TrajectoryGroup]:
    """Return a flow of three letters that ask for the letter e, sampled by ROLL's inference workers."""
    return source(SourceEnv(Prompts, job.policy, job.tokenizer, sampling=job.sampling, **job.pace))


def in_processes(job: RollJob) -> Flow[TrajectoryGroup]:
    """Return a flow of given groups, sent by as many processes as the tag's resources say."""
    return source(Given(9, count=10**6), on=processes(job.cpus, restarts=2))


class Letters:
    """The same prompts and scores as a step-wise environment, for ROLL's own env manager."""

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        draw = np.random.default_rng(seed)
        return "".join(chr(97 + letter) for letter in draw.integers(0, 26, 3)), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", action.count("e") / COMPLETION, True, False, {}
