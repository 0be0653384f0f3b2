"""Flows that ROLL's worker makes; named in its configuration."""

from __future__ import annotations

import tests.roll_real.on_a_cpu  # noqa: F401 (registers the proxy)
from tests.trl_real.letters import Prompts

from penstock import Flow, SourceEnv, TrajectoryGroup, source
from penstock.integrations.roll import RollJob


def letters(job: RollJob) -> Flow[TrajectoryGroup]:
    """Return a flow of three letters that ask for the letter e, sampled by ROLL's inference workers."""
    return source(SourceEnv(Prompts, job.policy, job.tokenizer, sampling=job.sampling, **job.pace))
