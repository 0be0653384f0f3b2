"""A rollout with several sequences, its branches, counts once: it has one reward, one advantage and one weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import anyio
import numpy as np
import pytest
import torch
from tests.cells import cells
from tests.tiny_model import TinyModel
from torch import Tensor

from penstock import (
    AdvantageNormalizer,
    Batcher,
    RewardBridge,
    TrainBatch,
    TrajectoryGroup,
    TruncationMask,
)
from penstock.channels import connect, serve
from penstock.errors import InvalidRecord
from penstock.losses import AdvantageWeighted
from penstock.rewards import RewardFunction, RewardInput
from penstock.testing import drive, group
from penstock.torch import TorchTrainer

STOP, LENGTH = 0, 1


class Turn(NamedTuple):
    """The words of an environment, and the answer of the policy."""

    read: list[int]
    sampled: list[int]


def rollout(random: np.random.Generator) -> list[Turn]:
    """Return one to five turns."""
    lengths = random.integers(1, 5, size=(random.integers(1, 6), 2))
    return [Turn(*(random.integers(11, size=length).tolist() for length in pair)) for pair in lengths]


def rows_of(turns: Sequence[Turn], ends: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Return the tokens and the mask of a sequence for each of `ends`: its last turn. Each turn trains once."""
    rows, begin = [], 0
    for end in ends:
        tokens, mask = list[int](), list[int]()
        for number, turn in enumerate(turns[:end]):
            tokens += turn.read + turn.sampled
            mask += [0] * len(turn.read) + [int(number >= begin)] * len(turn.sampled)
        rows.append((tokens, mask))
        begin = end
    return rows


def built(
    rollouts: Sequence[list[tuple[list[int], list[int]]]], rewards: Sequence[float], **more: Any
) -> TrajectoryGroup:
    counts = [len(rows) for rows in rollouts]
    rows = [row for rows in rollouts for row in rows]
    values = [np.array(tokens) / 7 for tokens, _ in rows]
    return TrajectoryGroup.build(
        env="tree",
        sequences=[tokens for tokens, _ in rows],
        loss_mask=[mask for _, mask in rows],
        rewards=np.repeat(rewards, counts),
        rollout_ids=np.arange(len(counts)).repeat(counts),
        behavior_logprobs=[-np.ones(len(tokens)) for tokens, _ in rows],
        values=[np.where(mask, value, 0) for (_, mask), value in zip(rows, values, strict=True)],
        **more,
    )


def trees(seed: int, groups: int = 25) -> tuple[list[TrajectoryGroup], list[TrajectoryGroup]]:
    """Return groups of four rollouts, each as one sequence, and the same ones with branches."""
    random = np.random.default_rng(seed)
    whole, branched = list[TrajectoryGroup](), list[TrajectoryGroup]()
    for number in range(groups):
        rollouts, rewards = [rollout(random) for _ in range(4)], random.integers(3, size=4).tolist()
        cuts = [(np.flatnonzero(random.random(len(turns) - 1) < 0.5) + 1).tolist() for turns in rollouts]
        name = {"instance_id": str(number)}
        whole.append(built([rows_of(turns, [len(turns)]) for turns in rollouts], rewards, **name))
        pairs = zip(rollouts, cuts, strict=True)
        branched.append(built([rows_of(turns, [*cut, len(turns)]) for turns, cut in pairs], rewards, **name))
    assert sum(map(len, branched)) > 1.2 * sum(map(len, whole))
    return whole, branched


def advantages(filled: Sequence[TrajectoryGroup]) -> list[float]:
    """Return those of all tokens that train; they lie in the order in which they were sampled."""
    columns = [(each.advantages, each.loss_mask) for each in filled]
    return [value for column, mask in columns if column is not None for value in column[mask].tolist()]


async def test_grpo_compares_rollouts_however_many_branches_they_have() -> None:
    sequences = [[1, 2]] * 8
    given = TrajectoryGroup.build(
        env="e",
        instance_id="0",
        sequences=sequences,
        loss_mask=[[0, 1]] * 8,
        rewards=[1] * 5 + [0] * 3,
        rollout_ids=[0] * 5 + [1, 2, 3],
    )

    (filled,) = await drive(AdvantageNormalizer("grpo"), [given])

    assert advantages([filled]) == pytest.approx([1.5] * 5 + [-0.5] * 3, abs=1e-3)


MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "grpo": {},
    "dr_grpo": {},
    "rloo": {},
    "maxrl": {},
    "opo": {},
    "global": {},
    "batch": {"batch_groups": 5},
    "gdpo": {"batch_groups": 5, "components": {"score": 1.0}},
    "reinforce++": {"batch_groups": 5, "gamma": 0.9},
    "reinforce++-baseline": {"batch_groups": 5},
    "gae": {"batch_groups": 5, "gamma": 0.9, "gae_lambda": 0.8},
}


@pytest.mark.parametrize("mode", cells(MODES, run=["grpo", "rloo", "reinforce++", "gae"]))
async def test_branches_change_no_advantage(mode: Any) -> None:
    for seed in range(3):
        whole, branched = trees(seed)

        expected = advantages(await drive(AdvantageNormalizer(mode, **MODES[mode]), whole))
        found = advantages(await drive(AdvantageNormalizer(mode, **MODES[mode]), branched))

        assert found == pytest.approx(expected, abs=1e-6)


def moved(groups: Sequence[TrajectoryGroup], aggregation: Any) -> Mapping[str, Tensor]:
    """Return the weights behind a step of plain gradient descent in float64."""
    trainer = TorchTrainer(
        TinyModel().double(),
        optimizer=partial(torch.optim.SGD, lr=1.0),
        loss=AdvantageWeighted().aggregated(aggregation),
        max_grad_norm=None,
        micro_batch_tokens=64,
    )
    trainer.step(TrainBatch.pack(groups))
    return trainer.weights()


@pytest.mark.long
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "prompt-mean"])
async def test_branches_change_no_gradient(aggregation: str) -> None:
    for seed in range(3):
        whole, branched = [await drive(AdvantageNormalizer("grpo"), groups) for groups in trees(seed)]

        expected, found = moved(whole, aggregation), moved(branched, aggregation)

        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, atol=1e-7, rtol=0)


async def test_equal_sequences_of_a_rollout_have_the_gradient_of_one() -> None:
    (one,) = await drive(AdvantageNormalizer("grpo"), trees(0, groups=1)[0])
    assert one.advantages is not None
    rows = [(row.tokens.tolist(), row.loss_mask.tolist()) for row in one]
    many = built([[row] * 3 for row in rows], one.rewards.tolist(), instance_id="0")
    (many,) = await drive(AdvantageNormalizer("grpo"), [many])

    expected, found = moved([one], "seq-mean-token-mean"), moved([many], "seq-mean-token-mean")

    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-7, rtol=0)


async def test_batches_and_the_ledger_count_rollouts() -> None:
    _, branched = trees(1, groups=6)

    batches = await drive(Batcher(max_tokens=100_000, sequences=8), branched)
    for step, batch in enumerate(batches, 1):
        batches.ledger.commit(batch, step)

    assert [(batch.rollouts, batch.total_rollouts, batch.loss_rollouts) for batch in batches] == [(8, 8, 8)] * 3
    assert (batches.ledger.balance().admitted, batches.ledger.balance().ended["trained"]) == (24, 24)


async def test_a_reward_function_sees_a_rollout_once_and_its_reward_is_that_of_all_branches() -> None:
    _, (branched,) = trees(2, groups=1)
    seen = list[RewardInput]()

    async def judge(given: RewardInput) -> float:
        seen.append(given)
        return float(given.trajectory.id.repetition_id)

    (shaped,) = await drive(RewardBridge(functions=[RewardFunction(judge, reads_text=False)]), [branched])

    assert len(seen) == 4
    assert (shaped.rewards - branched.rewards).tolist() == shaped.rollout_ids.tolist()


async def test_a_rollout_is_cut_if_its_last_branch_is() -> None:
    reasons = [LENGTH, STOP, STOP, LENGTH]
    given = group(completion_lengths=[2] * 4, stop_reasons=reasons, rollout_ids=[0, 0, 1, 1])

    (masked,) = await drive(TruncationMask(), [given])

    assert masked.completion_lengths().tolist() == [2, 2, 0, 0]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"rewards": [1, 0, 0]}, "rewards: expected one value for all sequences of a rollout"),
        ({"reward_parts": {"style": [1, 0, 0]}}, "reward_parts.style: expected one value"),
        ({"rollout_ids": [0, 1, 0]}, "rollout_ids: expected the sequences of a rollout one after another"),
    ],
    ids=["rewards", "parts", "order"],
)
def test_sequences_that_cannot_be_one_rollout_are_refused(columns: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"completion_lengths": [2] * 3, "rewards": [0, 0, 0], "rollout_ids": [0, 0, 1]}
    with pytest.raises(InvalidRecord, match=message):
        group(**(given | columns))


async def test_rewards_of_turns_may_differ_between_branches() -> None:
    rewards = [[0, 0, 1, 0], [0, 0, 0, 2], [0, 0, 1, 1]]
    given = group(completion_lengths=[2] * 3, rewards=[0] * 3, rollout_ids=[0, 0, 1], token_rewards=rewards)

    (filled,) = await drive(AdvantageNormalizer("dr_grpo", rewards="token"), [given])

    assert advantages([filled]) == pytest.approx([0.5] * 4 + [-0.5] * 2)


# -- between processes and hosts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["shm://", "tcp://127.0.0.1:0"])
async def test_branches_arrive_as_they_were_sent(url: str) -> None:
    _, sent = trees(0, groups=4)
    received: list[TrajectoryGroup] = []

    async def send(to: str) -> None:
        async with connect(to, TrajectoryGroup) as outbox:
            for each in sent:
                await outbox.send(each)

    async with serve(url, TrajectoryGroup) as inbox, anyio.create_task_group() as tasks:
        tasks.start_soon(send, inbox.url)
        received += [each.owned() async for each in inbox]

    assert any(len(each) > each.rollouts for each in sent)
    for before, after in zip(sent, received, strict=True):
        assert after.rollout_ids.tolist() == before.rollout_ids.tolist()
        assert {name: column.tobytes() for name, column in after.columns().items()} == {
            name: column.tobytes() for name, column in before.columns().items()
        }
