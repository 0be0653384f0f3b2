"""What this process is among the ranks of a run, by the variables that torchrun gives each. Imports no torch."""

from __future__ import annotations

import os

from .run_config import RunConfig

SERVER_DIED = 75
"""The exit status of a rank whose server died: EX_TEMPFAIL of sysexits.h."""


def is_rank() -> bool:
    """Return whether torchrun, or `start_ranks`, has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def follows(config: RunConfig) -> bool:
    """Return whether another process runs the pipeline of this one's run."""
    return config.placement.trainers > 1 and is_rank() and os.environ["RANK"] != "0"
