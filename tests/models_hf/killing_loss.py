"""A loss that kills its process, by SIGKILL, in the call that the environment names."""

from __future__ import annotations

import itertools
import os
import signal
from dataclasses import dataclass
from typing import ClassVar

from penstock.losses import PerToken, Scored, Term

KILL_AT_CALL = "PENSTOCK_TEST_KILL_AT_CALL"

calls = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Killing(Term):
    """−A log π."""

    name: ClassVar[str] = "killing"

    def per_token(self, scored: Scored) -> PerToken:
        if next(calls) == int(os.environ.get(KILL_AT_CALL, "0")):
            os.kill(os.getpid(), signal.SIGKILL)
        return PerToken(-scored.advantage() * scored.logprobs, {})
