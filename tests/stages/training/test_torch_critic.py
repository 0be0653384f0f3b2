"""A critic makes the advantages of a batch from its rewards, and trains on the returns. Formulas as in verl."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.stages.training.no_tensor_of import NoTensorOf
from tests.tiny_model import ReadModel, TinyModel
from torch import Tensor, nn

from penstock import TrainBatch, TrajectoryGroup
from penstock.errors import InvalidConfig, InvalidRecord, WeightsMismatch
from penstock.losses import AdvantageWeighted, LossValue, PPOClip, Scored
from penstock.testing import batch
from penstock.torch import Attention, Critic, TorchTrainer

VOCABULARY = 11
ADAM = partial(torch.optim.AdamW, lr=0.01)
SGD = partial(torch.optim.SGD, lr=1.0)

pytestmark = pytest.mark.usefixtures("one_thread")

Floats = NDArray[np.float64]


def value_model(seed: int = 3, kind: type[TinyModel] = ReadModel, **sizes: int) -> TinyModel:
    """Return a model with one output."""
    model = kind(vocabulary=VOCABULARY, seed=seed, **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model.head = nn.Linear(model.head.in_features, 1)
    return model


def critic(**options: Any) -> Critic:
    given: dict[str, Any] = {"model": value_model(), "optimizer": ADAM} | options
    return Critic(**given)


def trainer(judge: Critic | None, **options: Any) -> TorchTrainer:
    given: dict[str, Any] = {"optimizer": ADAM, "loss": AdvantageWeighted()} | options
    return TorchTrainer(ReadModel(vocabulary=VOCABULARY), critic=judge, **given)


def made(seed: int = 0, lengths: tuple[int, ...] = (12, 9, 7, 4), kept: float = 0.7, **columns: Any) -> TrainBatch:
    """Return a group of sequences of descending lengths and random rewards; a share `kept` of the tokens trains."""
    numbers = np.random.default_rng(seed)
    packed = batch(groups=1, completion_lengths=list(lengths))
    mask = packed.loss_mask & (numbers.random(len(packed.tokens)) < kept)
    mask[packed.cu_seqlens[1:] - 2] = True
    given: dict[str, Any] = {
        "tokens": numbers.integers(0, VOCABULARY, len(mask)).astype(np.int32),
        "rewards": numbers.standard_normal(len(packed)).astype(np.float32),
        "loss_mask": mask,
        "loss_tokens": int(mask.sum()),
        "advantages": None,
    }
    return msgspec.structs.replace(packed, **(given | columns))


class Recorded:
    """A loss that keeps the advantages that it is given."""

    def __init__(self) -> None:
        self.advantages: list[Tensor] = []

    def __call__(self, scored: Scored) -> LossValue:
        self.advantages.append(scored.advantage())
        return AdvantageWeighted()(scored)


def advantages_of(packed: TrainBatch, judge: Critic) -> Floats:
    """Return the advantages of the tokens that train, by a step; each sequence is a micro-batch, the longest first."""
    loss = Recorded()
    trainer(judge, loss=loss, micro_batch_tokens=1).step(packed)
    return torch.cat(loss.advantages).double().numpy()


def values_of(packed: TrainBatch, model: TinyModel) -> list[Floats]:
    """Return the values of the tokens that train of each sequence: those of the states before them."""
    found = []
    for first, last in zip(packed.cu_seqlens, packed.cu_seqlens[1:], strict=False):
        tokens = torch.tensor(packed.tokens[first:last], dtype=torch.int64)[None]
        attend = Attention.packed(torch.zeros_like(tokens))
        with torch.no_grad():
            values = model(tokens, positions=torch.arange(tokens.shape[1])[None], attend=attend)[0, :, 0]
        places = np.flatnonzero(packed.loss_mask[first:last])
        found.append(values[places - 1].double().numpy())
    return found


def gae(rewards: Floats, values: Floats, gamma: float, gae_lambda: float) -> Floats:
    """Return the advantage of each token of a rollout, from the last to the first."""
    advantages, later, value = np.zeros(len(values)), 0.0, 0.0
    for t in reversed(range(len(values))):
        later = rewards[t] + gamma * value - values[t] + gamma * gae_lambda * later
        advantages[t], value = later, values[t]
    return advantages


def whitened(advantages: Floats) -> Floats:
    scaled: Floats = (advantages - advantages.mean()) / np.sqrt(advantages.var(ddof=1) + 1e-8)
    return scaled


def at_the_end(reward: float, count: int) -> Floats:
    return np.append(np.zeros(count - 1), reward)


def targets(packed: TrainBatch, gamma: float = 1.0, gae_lambda: float = 1.0) -> tuple[Floats, Floats, Floats]:
    """Return values, advantages before whitening, and returns of the tokens that train."""
    values = values_of(packed, value_model())
    rewarded = zip(packed.rewards, values, strict=True)
    advantages = np.concatenate([gae(at_the_end(float(r), len(v)), v, gamma, gae_lambda) for r, v in rewarded])
    return np.concatenate(values), advantages, advantages + np.concatenate(values)


def untimed(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith(("timing_s/", "weights/"))}


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


# -- advantages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 1.0), (0.9, 1.0), (1.0, 0.8), (0.95, 0.5), (1.0, 0.0)])
def test_advantages_are_those_of_gae_over_the_tokens_that_train_whitened_over_the_batch(
    gamma: float, gae_lambda: float
) -> None:
    packed = made()
    _, expected, _ = targets(packed, gamma, gae_lambda)

    found = advantages_of(packed, critic(gamma=gamma, gae_lambda=gae_lambda))

    np.testing.assert_allclose(found, whitened(expected), atol=1e-6)


@pytest.mark.parametrize("kind", [ReadModel, TinyModel])
def test_a_value_is_that_of_the_state_before_its_token(kind: type[TinyModel]) -> None:
    packed = made()

    metrics = trainer(critic(model=value_model(kind=kind))).step(packed)

    values, advantages, returns = targets(packed)
    assert metrics["critic/value"] == pytest.approx(values.mean(), abs=1e-6)
    assert metrics["critic/return"] == pytest.approx(returns.mean(), abs=1e-6)
    explained = 1 - advantages.var(ddof=1) / (returns.var(ddof=1) + 1e-5)
    assert metrics["critic/explained_variance"] == pytest.approx(explained, abs=1e-5)


def test_rewards_of_tokens_count_alone_or_beside_those_of_rollouts() -> None:
    numbers = np.random.default_rng(1)
    of_tokens = numbers.standard_normal(len(made().tokens)).astype(np.float32)
    packed = made(token_rewards=of_tokens)
    values = values_of(packed, value_model())
    bounds = packed.cu_seqlens[1:-1]
    pairs = zip(np.split(of_tokens, bounds), np.split(packed.loss_mask, bounds), strict=True)
    alone = [rewards[mask].astype(np.float64) for rewards, mask in pairs]
    both = [each + at_the_end(float(r), len(each)) for each, r in zip(alone, packed.rewards, strict=True)]

    for level, rewards in (("token", alone), ("both", both)):
        advantages = [gae(r, v, 0.9, 0.8) for r, v in zip(rewards, values, strict=True)]
        found = advantages_of(packed, critic(rewards=level, gamma=0.9, gae_lambda=0.8))
        np.testing.assert_allclose(found, whitened(np.concatenate(advantages)), atol=1e-6)


def test_a_rollout_that_was_cut_is_treated_as_one_that_ended() -> None:
    packed = made()
    cut = msgspec.structs.replace(packed, stop_reasons=1 - packed.stop_reasons)

    np.testing.assert_array_equal(advantages_of(cut, critic()), advantages_of(packed, critic()))


def test_the_branches_of_a_rollout_follow_each_other_and_its_reward_is_on_the_last_token() -> None:
    group = TrajectoryGroup.build(
        env="tree",
        instance_id="0",
        sequences=[[1, 2, 3, 4, 5, 6, 7], [1, 8, 9, 3, 2], [2, 3, 4]],
        loss_mask=[[0, 0, 1, 1, 0, 1, 1], [0, 0, 0, 1, 1], [0, 1, 1]],
        rewards=[2.0, 2.0, -1.0],
        rollout_ids=[0, 0, 1],
        behavior_logprobs=[-np.ones(7), -np.ones(5), -np.ones(3)],
    )
    packed = TrainBatch.pack([group])
    first, second, alone = values_of(packed, value_model())
    joined = gae(at_the_end(2.0, 6), np.concatenate([first, second]), 0.9, 0.8)
    expected = np.concatenate([joined, gae(at_the_end(-1.0, 2), alone, 0.9, 0.8)])

    found = advantages_of(packed, critic(gamma=0.9, gae_lambda=0.8))

    np.testing.assert_allclose(found, whitened(expected), atol=1e-6)


def test_equal_rewards_of_groups_of_one_train_critic_and_policy() -> None:
    packed = TrainBatch.pack([group for seed in range(3) for group in single(seed)])
    model = value_model()
    training = trainer(critic(model=model))
    before = state_of(model)["head.weight"], training.weights()["head.weight"].clone()

    training.step(packed)

    assert not torch.equal(model.head.weight, before[0])
    assert not torch.equal(training.weights()["head.weight"], before[1])


def single(seed: int) -> list[TrajectoryGroup]:
    tokens = np.random.default_rng(seed).integers(0, VOCABULARY, 6).tolist()
    return [
        TrajectoryGroup.build(
            env="single",
            instance_id=str(seed),
            sequences=[tokens],
            loss_mask=[[0, 0, 1, 1, 1, 1]],
            rewards=[1.0],
            behavior_logprobs=[-np.ones(6)],
        )
    ]


# -- the value loss ----------------------------------------------------------------------------------------------------


def test_the_first_gradient_is_that_of_half_the_squared_error_of_every_token() -> None:
    packed, model = made(), value_model()
    _, _, returns = targets(packed, 0.9, 0.8)
    expected = value_model()
    rows = []
    for first, last in zip(packed.cu_seqlens, packed.cu_seqlens[1:], strict=False):
        tokens = torch.tensor(packed.tokens[first:last], dtype=torch.int64)[None]
        attend = Attention.packed(torch.zeros_like(tokens))
        values = expected(tokens, positions=torch.arange(tokens.shape[1])[None], attend=attend)[0, :, 0]
        rows.append(values[np.flatnonzero(packed.loss_mask[first:last]) - 1])
    loss = 0.5 * ((torch.cat(rows) - torch.from_numpy(returns).float()) ** 2).mean()
    torch.autograd.backward(loss)

    judge = critic(model=model, optimizer=SGD, gamma=0.9, gae_lambda=0.8)
    metrics = trainer(judge, max_grad_norm=None).step(packed)

    assert metrics["critic/loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert metrics["critic/clip_fraction"] == 0
    for name, parameter in expected.named_parameters():
        assert parameter.grad is not None
        moved = value_model().state_dict()[name] - model.state_dict()[name]
        torch.testing.assert_close(moved, parameter.grad, atol=1e-6, rtol=0)


def test_a_value_that_moved_beyond_the_bound_has_the_loss_of_the_bound_and_no_gradient() -> None:
    packed, bound = made(), 0.05
    values, _, returns = targets(packed)
    judge = critic(optimizer=partial(torch.optim.SGD, lr=0.5), clip=bound)
    once = critic(optimizer=partial(torch.optim.SGD, lr=0.5), clip=bound)

    both = trainer(judge, updates=2, max_grad_norm=None).step(packed)
    first = trainer(once, max_grad_norm=None).step(packed)

    moved = np.concatenate(values_of(packed, once.model))  # type: ignore[arg-type]
    free, clipped = (moved - returns) ** 2, (np.clip(moved, values - bound, values + bound) - returns) ** 2
    second = 0.5 * np.maximum(free, clipped).mean()
    assert (clipped > free).any()
    assert both["critic/loss"] == pytest.approx((first["critic/loss"] + second) / 2, abs=1e-6)
    assert both["critic/clip_fraction"] == pytest.approx((clipped > free).mean() / 2, abs=1e-6)


def test_micro_batches_change_neither_critic_nor_policy_nor_metrics() -> None:
    def stepped(micro_batch_tokens: int | None) -> tuple[dict[str, float], list[dict[str, Tensor]]]:
        judge = critic(optimizer=SGD, gamma=0.9, gae_lambda=0.8)
        training = trainer(judge, optimizer=SGD, max_grad_norm=None, micro_batch_tokens=micro_batch_tokens, updates=2)
        metrics = untimed(training.step(made()))
        return metrics, [state_of(judge.model), dict(training.weights())]  # type: ignore[arg-type]

    metrics, weights = stepped(None)

    for tokens in (1, 16, 30):
        other, moved = stepped(tokens)
        assert other == pytest.approx(metrics, abs=1e-5)
        for one, another in zip(weights, moved, strict=True):
            for name, tensor in one.items():
                torch.testing.assert_close(another[name], tensor, atol=1e-5, rtol=0)


def test_no_tensor_has_a_number_for_each_token_of_the_vocabulary_and_of_the_batch() -> None:
    packed = made(lengths=(40, 30, 20))
    judge = critic(model=value_model(layers=1, context=64), warmup_steps=1)  # the policy makes logits by chunks

    with NoTensorOf(VOCABULARY * len(packed.tokens) * 30):
        trainer(judge).step(packed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_values_are_those_of_float32_up_to_rounding(dtype: torch.dtype) -> None:
    exact = trainer(critic()).step(made())

    rounded = trainer(critic(), autocast=dtype).step(made())

    assert ("critic/loss_scale" in rounded) == (dtype == torch.float16)
    for name in ("loss", "value", "return", "grad_norm"):
        assert rounded[f"critic/{name}"] == pytest.approx(exact[f"critic/{name}"], rel=0.02, abs=0.01)


# -- warm-up -----------------------------------------------------------------------------------------------------------


def halved(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def test_in_the_warm_up_the_critic_alone_trains_and_the_schedule_of_the_policy_begins_after_it() -> None:
    judge = critic(warmup_steps=2)
    training = trainer(judge, schedule=halved)
    begin = {name: tensor.clone() for name, tensor in training.weights().items()}

    for seed in range(2):
        before = state_of(judge.model)  # type: ignore[arg-type]
        metrics = training.step(made(seed))
        assert {name.partition("/")[0] for name in metrics} == {"critic", "timing_s"}
        assert not torch.equal(before["head.weight"], judge.model.state_dict()["head.weight"])
    for name, tensor in training.weights().items():
        assert torch.equal(tensor, begin[name])

    rates = [training.step(made(seed))["lr"] for seed in range(2, 4)]
    assert rates == [0.01, 0.005]
    assert training.steps == 4
    assert not torch.equal(training.weights()["head.weight"], begin["head.weight"])


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved_after", [1, 3])
def test_a_resumed_run_is_that_without_interruption_bit_for_bit(saved_after: int, tmp_path: Path) -> None:
    def begun() -> tuple[TorchTrainer, Critic]:
        judge = critic(warmup_steps=2, gamma=0.9)
        return trainer(judge, schedule=halved, updates=2), judge

    whole, whole_critic = begun()
    for seed in range(saved_after):
        whole.step(made(seed))
    checkpoint = whole.save(tmp_path, {})
    expected = [untimed(whole.step(made(seed))) for seed in range(saved_after, 6)]

    resumed, resumed_critic = begun()
    resumed.step(made(99))
    resumed.resume(checkpoint)
    found = [untimed(resumed.step(made(seed))) for seed in range(saved_after, 6)]

    assert found == expected
    for name, tensor in whole_critic.model.state_dict().items():
        assert torch.equal(resumed_critic.model.state_dict()[name], tensor)
    for name, tensor in whole.weights().items():
        assert torch.equal(resumed.weights()[name], tensor)


def test_a_checkpoint_with_a_critic_is_no_checkpoint_without_one(tmp_path: Path) -> None:
    judged, bare = trainer(critic()), trainer(None, loss=PPOClip())
    with_critic, without = judged.save(tmp_path / "a", {}), bare.save(tmp_path / "b", {})

    with pytest.raises(ValueError, match="expected a checkpoint with a critic, got one without"):
        judged.resume(without)
    with pytest.raises(ValueError, match="expected a checkpoint without a critic, got one with"):
        bare.resume(with_critic)


def test_a_critic_with_other_tensors_is_refused_and_nothing_is_loaded(tmp_path: Path) -> None:
    checkpoint = trainer(critic()).save(tmp_path, {})
    other = trainer(critic(model=value_model(layers=1)))
    other.step(made())
    before = {name: tensor.clone() for name, tensor in other.weights().items()}

    with pytest.raises(WeightsMismatch, match="the critic in"):
        other.resume(checkpoint)
    for name, tensor in other.weights().items():
        assert torch.equal(tensor, before[name])


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ReadModel, TinyModel])
def test_a_model_whose_head_has_several_outputs_is_refused(kind: type[TinyModel]) -> None:
    with pytest.raises(InvalidConfig, match="critic: expected a model whose head has one output, the value, got 11"):
        trainer(critic(model=kind(vocabulary=VOCABULARY))).step(made())


def test_a_batch_with_advantages_is_refused() -> None:
    packed = made(advantages=np.zeros(len(made().tokens), np.float32))

    with pytest.raises(InvalidRecord, match="advantages: expected a batch without"):
        trainer(critic()).step(packed)


def test_a_reward_that_is_not_finite_is_refused_with_its_trajectory() -> None:
    packed = made()
    rewards = packed.rewards.copy()
    rewards[2] = np.nan

    with pytest.raises(InvalidRecord, match=r"repetition 2: rewards: expected finite values, got nan"):
        trainer(critic()).step(msgspec.structs.replace(packed, rewards=rewards))


def test_rewards_of_tokens_that_are_missing_are_refused() -> None:
    with pytest.raises(InvalidRecord, match="token_rewards: expected a column"):
        trainer(critic(rewards="both")).step(made())


def test_a_trainer_with_a_critic_needs_no_advantages_and_the_rewards_that_the_critic_counts() -> None:
    assert trainer(critic(), loss=PPOClip()).needs_columns == ("behavior_logprobs",)
    assert trainer(critic(rewards="both"), loss=PPOClip()).needs_columns == ("behavior_logprobs", "token_rewards")
    assert trainer(None, loss=PPOClip()).needs_columns == ("advantages", "behavior_logprobs")


@pytest.mark.parametrize(
    "options",
    [
        {"clip": 0.0},
        {"clip": -1.0},
        {"warmup_steps": -1},
        {"warmup_steps": 0.5},
        {"gamma": 1.1},
        {"gamma": -0.1},
        {"gae_lambda": 2.0},
        {"gae_lambda": float("nan")},
        {"rewards": "turn"},
    ],
    ids=repr,
)
def test_an_option_out_of_range_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match=f"{next(iter(options))}: expected"):
        critic(**options)
