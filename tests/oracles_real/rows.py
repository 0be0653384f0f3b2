"""Tables of losses: a loss of penstock beside that of a peer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest
from tests.oracles_real.batches import BATCHES, Peer

from penstock.losses import Loss, PPOClip

__all__ = ["BY_SEQUENCE", "NEAR", "OF_SKYRL", "OF_TRL", "OF_VERL", "PPO", "Row", "cells"]

NEAR = ("near", "apart", "one advantage", "no advantage")
"""Batches without extremes: log-ratios within the bounds of every peer."""

BY_SEQUENCE = ("one advantage", "no advantage")
"""Batches with one advantage for all tokens of a sequence: the gradient of the peer's ratio is that of the sequence."""

PPO = PPOClip(0.2, 0.3, old="proximal")

OF_VERL: dict[str, Any] = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_c": 1e30}
"""The bounds of `PPO` for verl, with a dual clip that no value reaches: it has always one."""

OF_SKYRL: dict[str, Any] = {"eps_clip_low": 0.2, "eps_clip_high": 0.3, "policy_loss_type": "regular"}

OF_TRL: dict[str, Any] = {"epsilon_low": 0.2, "epsilon_high": 0.3}


class Row(NamedTuple):
    name: str
    """Name of the function of the peer, and of what is special."""
    ours: Loss
    peer: Peer
    batches: tuple[str, ...] = tuple(BATCHES)
    gradient_only: bool = False
    """True if the peer has another value with the same gradient."""
    tolerance: float = 1e-6


def cells(table: Mapping[str, Sequence[Row]]) -> list[Any]:
    """Return a case of each row and batch, named after the release and the function."""
    return [
        pytest.param(row, batch, id=f"{release}: {row.name}: {batch}")
        for release, rows in table.items()
        for row in rows
        for batch in row.batches
    ]
