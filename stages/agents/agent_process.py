"""The main module of a process that calls the `drive` of an environment that blocks, one rollout at a time."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import msgspec

from ..._pipeline.util.user_code import call_user, raised_text
from ..._pipeline.workers.reply_loop import reply_to
from ..._pipeline.workers.worker import load_payload
from ..._schemas.conversion import decode_json
from ..contracts.rollouts import RolloutFiltered
from .agent_client import Outcome, outcome_of
from .blocking_client import BlockingAgentClient

LONGEST_ERROR = 10_000
"""Characters."""


class DriveRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout."""

    payload: str
    """Path of the pickled function that makes the environment; see `worker_payload`."""
    task: int
    client: BlockingAgentClient


class RolloutReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The end of a rollout."""

    outcome: Outcome | None = None
    """None if nothing was returned."""
    error: str = ""
    """The error that was raised instead."""


def main(parent: str) -> None:
    """Drive until `parent`, the process that started this one, closes the pipe."""
    reply_to(parent, lambda: None, _reply)


def _reply(line: bytes) -> RolloutReply:
    try:
        (request,) = decode_json(line, tuple[str])
        given = decode_json(request, DriveRequest)
        env = _environment(given.payload)
        return RolloutReply(outcome=outcome_of(call_user(env.drive, given.task, given.client)))
    except RolloutFiltered as error:
        return RolloutReply(outcome=Outcome(drop=str(error) or type(error).__name__))
    except Exception as error:  # noqa: BLE001 (raised in the parent)
        return RolloutReply(error=raised_text(error)[:LONGEST_ERROR])


@cache
def _environment(payload: str) -> Any:
    return call_user(load_payload(os.open(payload, os.O_RDONLY)))
