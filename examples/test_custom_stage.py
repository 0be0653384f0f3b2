"""Test custom_stage.py alone: `drive` runs one stage on records and returns the records that it sent."""

from __future__ import annotations

from custom_stage import LengthPenalty
from penstock.testing import drive, group


async def test_only_tokens_past_the_allowance_cost_reward() -> None:
    out = await drive(LengthPenalty(per_token=0.5, free_tokens=4), [group(completion_lengths=[4, 6])])

    assert out[0].rewards.tolist() == [1.0, 0.0]


async def test_a_penalty_drops_nothing() -> None:
    out = await drive(LengthPenalty(per_token=0.5), [group(instance_id="0"), group(instance_id="1")])

    assert [sent.instance_id for sent in out] == ["0", "1"]
    assert out.ledger.in_flight == 4
