from __future__ import annotations

import math
import pickle
import random
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
import msgspec
import numpy as np
import pytest
import torch
from tests.tiny_model import TinyModel
from torch import Tensor, nn

from penstock import AdvantageNormalizer, GroupId, TrainBatch
from penstock.errors import InvalidConfig, InvalidRecord, TokenizersDiffer, WeightsMismatch
from penstock.losses import CISPO, GSPO, KL, AdvantageWeighted, Entropy, ImportanceWeight, Loss, Mean, PPOClip, Scored
from penstock.policies import tokenizer_identity
from penstock.testing import batch, drive, group
from penstock.torch import Attention, KVCache, TorchTrainer
from penstock.training import Checkpointed, WeightedTrainer, write_checkpoint

VOCABULARY = 11
ADAM = partial(torch.optim.AdamW, lr=0.01)
SGD = partial(torch.optim.SGD, lr=1.0)


pytestmark = pytest.mark.usefixtures("one_thread")


def made(seed: int = 0, **columns: Any) -> TrainBatch:
    """Return two groups of sequences of different lengths, with advantages; log-probabilities are random."""
    numbers = np.random.default_rng(seed)
    packed = batch(groups=2, **({"completion_lengths": [3, 7, 5]} | columns))
    return msgspec.structs.replace(
        packed,
        tokens=numbers.integers(0, VOCABULARY, len(packed.tokens)).astype(np.int32),
        advantages=numbers.standard_normal(len(packed.tokens)).astype(np.float32),
    )


def trainer(model: nn.Module | None = None, **options: Any) -> TorchTrainer:
    given: dict[str, Any] = {"optimizer": ADAM, "loss": AdvantageWeighted()} | options
    return TorchTrainer(model or TinyModel(vocabulary=VOCABULARY), **given)  # type: ignore[arg-type]


def untimed(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics without timings, and without the share of changed weights, which rounding of zeros moves."""
    return {name: value for name, value in metrics.items() if not name.startswith(("timing_s/", "weights/"))}


def alone(model: nn.Module, packed: TrainBatch, temperature: float = 1.0) -> list[Tensor]:
    """Return the log-probabilities of the tokens of each sequence, one sequence at a time, label by label."""
    rows: list[Tensor] = []
    for first, last in zip(packed.cu_seqlens, packed.cu_seqlens[1:], strict=False):
        tokens = torch.from_numpy(packed.tokens[first:last]).long()[None]
        length = tokens.shape[1]
        attend = Attention.packed(torch.zeros(1, length, dtype=torch.int64))
        logits = model(tokens, positions=torch.arange(length)[None], attend=attend)[0]
        predicted = [torch.log_softmax(logits[t - 1] / temperature, -1)[tokens[0, t]] for t in range(1, length)]
        rows.append(torch.stack([torch.zeros(()), *predicted]))
    return rows


def reference_logprobs(model: nn.Module, packed: TrainBatch, temperature: float = 1.0) -> np.ndarray[Any, Any]:
    """Return [N] the log-probability of each token under the reference."""
    with torch.no_grad():
        return torch.cat(alone(model, packed, temperature)).numpy()


def on_policy(model: TinyModel, packed: TrainBatch) -> TrainBatch:
    """Return the batch with the log-probabilities of its tokens under `model`."""
    logprobs = np.where(packed.loss_mask, reference_logprobs(model, packed), 0)
    return msgspec.structs.replace(packed, behavior_logprobs=logprobs.astype(np.float32))


# -- one step ----------------------------------------------------------------------------------------------------------


def test_the_loss_is_that_of_every_sequence_evaluated_alone() -> None:
    model, packed = TinyModel(vocabulary=VOCABULARY), made()
    kept = packed.loss_mask
    assert packed.advantages is not None
    expected = -(packed.advantages[kept] * reference_logprobs(model, packed)[kept]).mean()

    metrics = trainer(model).step(packed)

    assert metrics["loss"] == pytest.approx(float(expected), abs=1e-6)


@pytest.mark.parametrize(
    "loss",
    [
        AdvantageWeighted(),
        AdvantageWeighted() * ImportanceWeight(high=1.01),
        PPOClip().aggregated("seq-mean-token-mean"),
        PPOClip().aggregated("prompt-mean"),
        (PPOClip(old="proximal") * ImportanceWeight(level="sequence")).aggregated("seq-mean-token-sum"),
        GSPO(old="behavior").aggregated("seq-mean-token-mean"),
        GSPO().aggregated("seq-mean-token-mean", counted="all"),
        CISPO().aggregated("seq-mean-token-sum-norm", longest=7),
        PPOClip(dual_clip=3.0) + 0.1 * KL() - 0.01 * Entropy(),
    ],
    ids=repr,
)
def test_micro_batches_change_neither_gradient_nor_metrics(loss: Loss) -> None:
    def stepped(micro_batch_tokens: int | None) -> tuple[dict[str, float], dict[str, Tensor]]:
        model = TinyModel(vocabulary=VOCABULARY)
        options = {"optimizer": SGD, "loss": loss, "max_grad_norm": None, "micro_batch_tokens": micro_batch_tokens}
        options["reference"] = TinyModel(vocabulary=VOCABULARY, seed=9)
        return untimed(trainer(model, **options).step(sampled)), model.state_dict()

    sampled = on_policy(TinyModel(vocabulary=VOCABULARY, seed=5), made())
    metrics, weights = stepped(None)

    for tokens in (1, 24, 36):  # 6 micro-batches, 3 and 2
        other_metrics, other_weights = stepped(tokens)
        assert other_metrics == pytest.approx(metrics, abs=1e-6)
        for name, tensor in weights.items():
            torch.testing.assert_close(other_weights[name], tensor, atol=1e-6, rtol=0)


@pytest.mark.parametrize("options", [{}, {"micro_batch_tokens": 9}, {"updates": 3}])
def test_the_log_probabilities_before_a_step_are_kept_for_the_steps_that_ask_for_them(options: dict[str, Any]) -> None:
    model, packed = TinyModel(vocabulary=VOCABULARY), made()
    trained = trainer(model, **options)
    expected = np.where(packed.loss_mask, reference_logprobs(model, packed), 0)

    trained.keeps_logprobs = True
    trained.step(packed)
    kept = trained.logprobs
    trained.keeps_logprobs = False
    trained.step(packed)

    assert kept == pytest.approx(expected, abs=1e-5)
    assert trained.logprobs is None


@pytest.mark.parametrize("updates", [1, 2])
def test_log_probabilities_that_are_kept_change_no_step(updates: int) -> None:
    with_them, without = (trainer(TinyModel(vocabulary=VOCABULARY), updates=updates) for _ in range(2))
    with_them.keeps_logprobs = True

    assert untimed(with_them.step(made())) == untimed(without.step(made()))


def test_sequences_that_share_a_row_are_trained_as_each_alone() -> None:
    packed = made(completion_lengths=[12, 3, 2, 7, 1])
    packed_model, model = TinyModel(vocabulary=VOCABULARY), TinyModel(vocabulary=VOCABULARY)
    assert packed.advantages is not None
    weights = torch.from_numpy(np.where(packed.loss_mask, packed.advantages, 0))

    loss = -(weights * torch.cat(alone(model, packed))).sum() / packed.loss_tokens
    torch.autograd.backward(loss)
    metrics = trainer(packed_model, optimizer=SGD, max_grad_norm=None).step(packed)

    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-6)
    for moved, parameter in zip(packed_model.parameters(), model.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(moved, parameter - parameter.grad, atol=1e-6, rtol=0)


def test_good_tokens_become_likelier_and_bad_ones_less_likely() -> None:
    model = TinyModel(vocabulary=VOCABULARY)
    packed = on_policy(model, made())
    before = reference_logprobs(model, packed)

    trainer(model, optimizer=partial(torch.optim.SGD, lr=0.1), loss=PPOClip()).step(packed)

    assert packed.advantages is not None
    change = reference_logprobs(model, packed) - before
    assert (change * packed.advantages)[packed.loss_mask].sum() > 0


def test_prompt_tokens_do_not_train() -> None:
    packed, model = made(), TinyModel(vocabulary=VOCABULARY)
    assert packed.advantages is not None
    shouted = msgspec.structs.replace(packed, advantages=np.where(packed.loss_mask, packed.advantages, 1e6))

    expected, got = (untimed(trainer(TinyModel(vocabulary=VOCABULARY)).step(each)) for each in (packed, shouted))

    assert got == expected
    assert trainer(model).step(shouted)["grad_norm"] == expected["grad_norm"]


def test_on_policy_the_divergence_is_zero_and_nothing_is_clipped() -> None:
    model = TinyModel(vocabulary=VOCABULARY)

    metrics = trainer(model, loss=PPOClip()).step(on_policy(model, made()))

    assert metrics["kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["pg_clipfrac"] == 0


def test_off_policy_the_divergence_is_positive() -> None:
    packed = on_policy(TinyModel(vocabulary=VOCABULARY, seed=5), made())

    assert trainer().step(packed)["kl"] > 1e-4


def test_a_reference_policy_gets_a_divergence_of_its_own() -> None:
    model, packed = TinyModel(vocabulary=VOCABULARY), made()
    own = on_policy(model, packed).behavior_logprobs
    assert own is not None

    same = trainer(model).step(msgspec.structs.replace(packed, ref_logprobs=own))
    other = trainer().step(msgspec.structs.replace(packed, ref_logprobs=own - 0.5))

    assert same["ref_kl"] == pytest.approx(0, abs=1e-6)
    assert other["ref_kl"] == pytest.approx(math.exp(-0.5) - 1 + 0.5, abs=1e-5)


def test_an_untrained_policy_has_nearly_the_entropy_of_a_fair_draw() -> None:
    model = TinyModel(vocabulary=VOCABULARY)
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)

    assert trainer(model).step(made())["entropy"] == pytest.approx(math.log(VOCABULARY))


def test_the_temperature_of_the_sampler_belongs_into_the_ratio() -> None:
    class Tempered(TinyModel):
        def forward(
            self, tokens: Tensor, *, positions: Tensor, attend: Attention, cache: KVCache | None = None
        ) -> Tensor:
            return super().forward(tokens, positions=positions, attend=attend, cache=cache) / 0.5

    sampled = on_policy(Tempered(vocabulary=VOCABULARY), made())

    assert trainer(temperature=0.5).step(sampled)["kl"] == pytest.approx(0, abs=1e-6)
    assert trainer(temperature=1.0).step(sampled)["kl"] > 1e-4


@pytest.mark.parametrize("micro_batch_tokens", [None, 1])
def test_sequences_are_scored_at_temperatures_of_their_own_where_their_groups_say_some(
    micro_batch_tokens: int | None,
) -> None:
    plain, model = made(), TinyModel(vocabulary=VOCABULARY)
    silent, recorded = plain.groups
    recorded = recorded._replace(meta={"temperatures": [0.5, 2.0, 0.7]})
    own = [0.6, 0.6, 0.6, 0.5, 2.0, 0.7]
    rows = [alone(model, plain, temperature)[row] for row, temperature in enumerate(own)]
    logprobs = np.where(plain.loss_mask, torch.cat(rows).detach().numpy(), 0)
    packed = msgspec.structs.replace(plain, groups=(silent, recorded), behavior_logprobs=logprobs)
    options: dict[str, Any] = {"temperature": 0.6, "micro_batch_tokens": micro_batch_tokens, "loss": PPOClip() + KL()}

    metrics = trainer(model, reference=TinyModel(vocabulary=VOCABULARY), **options).step(packed)

    assert metrics["kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["ref_kl"] == pytest.approx(0, abs=1e-6)
    assert (
        trainer(**options).step(msgspec.structs.replace(packed, groups=plain.groups, ref_logprobs=logprobs))["kl"]
        > 1e-4
    )


def test_parts_of_a_sequence_are_scored_at_temperatures_of_their_own() -> None:
    plain, model = made(), TinyModel(vocabulary=VOCABULARY)
    silent, recorded = plain.groups
    lengths = plain.lengths()[-3:].tolist()
    recorded = recorded._replace(meta={"temperatures": [[[2, 0.5], [length - 2, 2.0]] for length in lengths]})
    early, late = (torch.cat([alone(model, plain, t)[row] for row in range(6)]).detach().numpy() for t in (0.5, 2.0))
    default = torch.cat([alone(model, plain, 0.6)[row] for row in range(6)]).detach().numpy()
    places = np.concatenate([np.arange(length) for length in plain.lengths()])
    of_recorded = np.arange(len(places)) >= plain.cu_seqlens[3]
    logprobs = np.where(of_recorded, np.where(places < 2, early, late), default)
    packed = msgspec.structs.replace(
        plain, groups=(silent, recorded), behavior_logprobs=np.where(plain.loss_mask, logprobs, 0).astype(np.float32)
    )

    assert trainer(model, temperature=0.6).step(packed)["kl"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    "value",
    [
        [1.0],
        [1.0, 0.0],
        [1.0, -1],
        [1.0, math.inf],
        [1.0, None],
        0.5,
        [1.0, []],
        [1.0, [[1, 1.0]]],
        [1.0, [[-1, 1.0], [4, 1.0]]],
        [1.0, [1, 0.5]],
    ],
)
def test_a_temperature_that_is_none_is_refused_with_its_group(value: object) -> None:
    packed = TrainBatch.pack([group(rewards=[0, 1], meta={"temperatures": value})])

    with pytest.raises(InvalidRecord, match="test/0: temperatures: expected a positive number for repetition"):
        trainer().step(packed)


def test_long_gradients_are_scaled_down_to_the_bound() -> None:
    bound = 0.001
    model, before = TinyModel(vocabulary=VOCABULARY), TinyModel(vocabulary=VOCABULARY)

    norm = trainer(model, optimizer=SGD, max_grad_norm=bound).step(made())["grad_norm"]

    moved = torch.cat([(new - old).flatten() for new, old in zip(model.parameters(), before.parameters(), strict=True)])
    assert norm > bound
    assert moved.norm().item() == pytest.approx(bound, rel=1e-3)


def test_a_gradient_that_is_not_finite_is_an_error_and_leaves_the_model_as_it_was() -> None:
    model = TinyModel(vocabulary=VOCABULARY)
    packed = made()
    broken = msgspec.structs.replace(packed, advantages=np.full(len(packed.tokens), np.inf, np.float32))

    with pytest.raises(FloatingPointError, match="expected a finite gradient in step 1, got norm nan"):
        trainer(model).step(broken)

    for parameter, other in zip(model.parameters(), TinyModel(vocabulary=VOCABULARY).parameters(), strict=True):
        assert torch.equal(parameter, other)


def test_without_a_bound_gradients_stay_as_long_as_they_are() -> None:
    model, before, packed = TinyModel(vocabulary=VOCABULARY), TinyModel(vocabulary=VOCABULARY), made()
    assert packed.advantages is not None
    steep = msgspec.structs.replace(packed, advantages=100 * packed.advantages)

    norm = trainer(model, optimizer=SGD, max_grad_norm=None).step(steep)["grad_norm"]

    moved = torch.cat([(new - old).flatten() for new, old in zip(model.parameters(), before.parameters(), strict=True)])
    assert moved.norm().item() == pytest.approx(norm, rel=1e-3)
    assert norm > 1


def test_a_batch_that_trains_nothing_is_refused_and_moves_nothing() -> None:
    """Momentum and weight decay would, and it would count as a version of the weights."""
    model, packed = TinyModel(vocabulary=VOCABULARY), made()
    each = trainer(model)
    each.step(packed)
    before = {name: tensor.clone() for name, tensor in each.weights().items()}
    masked = np.zeros_like(packed.loss_mask)
    nothing = msgspec.structs.replace(packed, loss_mask=masked, loss_tokens=0, loss_rollouts=0)

    with pytest.raises(InvalidRecord, match="loss_mask: expected tokens that train, got a batch without"):
        each.step(nothing)

    assert_same(each.weights(), before)
    assert each.steps == 1


def test_a_batch_that_was_sampled_at_another_temperature_is_refused() -> None:
    def sampled_at(temperature: float) -> TrainBatch:
        groups = [group(instance_id=str(i), meta={"temperature": t}) for i, t in enumerate((0.5, temperature))]
        return TrainBatch.pack([each.with_advantages(np.ones(len(each))) for each in groups])

    with pytest.raises(InvalidRecord, match=r"/1: temperature: expected 0.5, which this TorchTrainer.*, got 1.0"):
        trainer(temperature=0.5).step(sampled_at(1.0))
    assert trainer(TinyModel(vocabulary=2000), temperature=0.5).step(sampled_at(0.5))["grad_norm"] > 0


def test_a_batch_without_advantages_is_an_error_with_the_remedy() -> None:
    with pytest.raises(InvalidRecord, match="put an AdvantageNormalizer before the trainer"):
        trainer().step(msgspec.structs.replace(made(), advantages=None))


def test_without_behavior_log_probabilities_the_advantage_weighted_loss_trains_and_ppo_raises() -> None:
    packed = made(behavior_logprobs=None)

    metrics = trainer().step(packed)

    assert metrics["grad_norm"] > 0
    assert not [name for name in metrics if name.startswith(("kl", "ratio"))]
    with pytest.raises(InvalidRecord, match="behavior_logprobs: expected a column, got none: have the sampler record"):
        trainer(loss=PPOClip()).step(packed)


def test_tokens_have_advantages_of_their_own() -> None:
    packed = made()
    assert packed.advantages is not None
    evened = msgspec.structs.replace(packed, advantages=np.full_like(packed.advantages, packed.advantages.mean()))

    assert trainer().step(packed)["loss"] != pytest.approx(trainer().step(evened)["loss"], rel=0.01)


def test_steps_are_counted_and_the_learning_rate_reported() -> None:
    each = trainer()

    metrics = [each.step(made(seed)) for seed in range(3)]

    assert each.steps == 3
    assert metrics[-1]["lr"] == 0.01


def test_frozen_parameters_stay() -> None:
    model = TinyModel(vocabulary=VOCABULARY)
    model.token.weight.requires_grad_(False)
    before = model.token.weight.clone()

    trainer(model).step(made())

    assert torch.equal(model.token.weight, before)


def test_the_optimizer_is_given_what_trains_and_nothing_else() -> None:
    model = TinyModel(vocabulary=VOCABULARY)
    model.token.weight.requires_grad_(False)

    def recipe(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        given.extend(parameters)
        return SGD(given)

    given: list[nn.Parameter] = []
    trainer(model, optimizer=recipe)

    assert {id(parameter) for parameter in given} == {id(p) for p in model.parameters()} - {id(model.token.weight)}


def test_a_trainer_can_be_published_and_saved() -> None:
    assert isinstance(trainer(), WeightedTrainer)
    assert isinstance(trainer(), Checkpointed)


# -- several updates, other policies -----------------------------------------------------------------------------------


def moved(updates: int = 1, steps: int = 1, **options: Any) -> tuple[list[dict[str, float]], Mapping[str, Tensor]]:
    """Train so many steps on one batch of the model's own samples; return the metrics and the weights."""
    model = TinyModel(vocabulary=VOCABULARY)
    sampled = on_policy(model, made())
    each = trainer(model, optimizer=SGD, updates=updates, **options)
    return [untimed(each.step(sampled)) for _ in range(steps)], each.weights()


def assert_same(weights: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> None:
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, others[name], atol=1e-6, rtol=0)


@pytest.mark.parametrize("micro_batch_tokens", [None, 24])
def test_the_proximal_policy_is_the_one_before_the_first_update(micro_batch_tokens: int | None) -> None:
    options: dict[str, Any] = {"micro_batch_tokens": micro_batch_tokens}

    (several,), weights = moved(updates=3, loss=PPOClip(0.01, 0.01, old="proximal"), **options)
    steps, expected = moved(steps=3, loss=PPOClip(0.01, 0.01), **options)  # against the sampling policy: itself

    assert_same(weights, expected)
    assert several["pg_clipfrac"] > 0
    for name in ("loss", "pg_clipfrac", "grad_norm", "kl", "ratio/mean"):
        assert several[name] == pytest.approx(np.mean([step[name] for step in steps]), abs=1e-6)
    assert several["ratio/max"] == pytest.approx(max(step["ratio/max"] for step in steps), abs=1e-6)
    assert several["ratio/min"] == pytest.approx(min(step["ratio/min"] for step in steps), abs=1e-6)


def test_several_updates_are_one_step() -> None:
    each = trainer(updates=2)

    each.step(made())

    assert each.steps == 1


def test_with_one_update_decoupled_ppo_is_the_weighted_policy_gradient() -> None:
    sampled = on_policy(TinyModel(vocabulary=VOCABULARY, seed=5), made())
    weight = ImportanceWeight(high=1.05)
    one, other = TinyModel(vocabulary=VOCABULARY), TinyModel(vocabulary=VOCABULARY)

    trainer(one, optimizer=SGD, loss=PPOClip(old="proximal") * weight).step(sampled)
    trainer(other, optimizer=SGD, loss=AdvantageWeighted() * weight).step(sampled)

    assert_same(one.state_dict(), other.state_dict())


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_reference_model_scores_what_comes_without_reference_log_probabilities(temperature: float) -> None:
    reference, packed = TinyModel(vocabulary=VOCABULARY, seed=7), made()
    scored = np.where(packed.loss_mask, reference_logprobs(reference, packed, temperature), 0).astype(np.float32)
    options: dict[str, Any] = {"loss": KL(), "temperature": temperature}

    given = trainer(**options).step(msgspec.structs.replace(packed, ref_logprobs=scored))
    computed = trainer(reference=reference, **options).step(packed)

    assert given["loss"] == pytest.approx(given["ref_kl"], rel=1e-6)  # summed in another order
    assert given["loss"] > 1e-4
    assert untimed(computed) == pytest.approx(untimed(given), abs=1e-6)
    assert not reference.training
    assert all(parameter.grad is None for parameter in reference.parameters())


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_a_divergence_in_the_loss_draws_the_policy_to_the_reference(estimator: Any) -> None:
    each = trainer(loss=KL(estimator), reference=TinyModel(vocabulary=VOCABULARY, seed=7))

    divergences = [each.step(made())["ref_kl"] for _ in range(10)]

    assert divergences[-1] < divergences[0] / 2


def test_an_entropy_bonus_keeps_the_entropy_up() -> None:
    without, bonus = trainer(), trainer(loss=AdvantageWeighted() - 1.0 * Entropy())

    ends = [[each.step(made())["entropy"] for _ in range(10)][-1] for each in (without, bonus)]

    assert ends[0] < ends[1]


# -- speed -------------------------------------------------------------------------------------------------------------


class Watched(TinyModel):
    """Notes in which dtype its layers compute."""

    dtypes: set[torch.dtype]

    def forward(self, tokens: Tensor, *, positions: Tensor, attend: Attention, cache: KVCache | None = None) -> Tensor:
        logits = super().forward(tokens, positions=positions, attend=attend, cache=cache)
        self.dtypes = {logits.dtype}
        return logits


def in_bfloat16(loss: Loss | None = None) -> tuple[Watched, TorchTrainer]:
    model = Watched(vocabulary=VOCABULARY)
    return model, trainer(model, loss=loss or AdvantageWeighted(), autocast=torch.bfloat16)


def test_mixed_precision_trains_with_weights_and_log_probabilities_in_float32() -> None:
    seen: set[torch.dtype] = set()

    def watching(scored: Scored) -> Any:
        seen.update((scored.logprobs.dtype, scored.entropy.dtype))
        return AdvantageWeighted()(scored)

    model, each = in_bfloat16(watching)
    packed = msgspec.structs.replace(made(), advantages=np.ones(len(made().tokens), np.float32))

    losses = [each.step(packed)["loss"] for _ in range(20)]

    assert losses[-1] < losses[0] - 0.5
    assert (model.dtypes, seen) == ({torch.bfloat16}, {torch.float32})
    assert {tensor.dtype for tensor in each.weights().values()} == {torch.float32}


def test_mixed_precision_computes_about_the_same() -> None:
    _, each = in_bfloat16()

    assert each.step(made())["loss"] == pytest.approx(trainer().step(made())["loss"], rel=0.02)


def test_checkpoints_of_mixed_precision_go_on_bit_for_bit(tmp_path: Path) -> None:
    (_, whole), (_, resumed) = in_bfloat16(), in_bfloat16()
    whole.step(made())
    checkpoint = whole.save(tmp_path, {})
    expected = untimed(whole.step(made(1)))

    resumed.resume(checkpoint)

    assert untimed(resumed.step(made(1))) == expected
    for name, tensor in whole.weights().items():
        assert torch.equal(tensor, resumed.weights()[name])


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_in_which_small_updates_are_lost_are_refused(
    dtype: torch.dtype, autocast: torch.dtype | None
) -> None:
    model = TinyModel(vocabulary=VOCABULARY).to(dtype)

    with pytest.raises(InvalidConfig, match=rf"parameters that train in float32.*got {dtype}: .*\(autocast=torch.bf"):
        trainer(model, autocast=autocast)


def test_parameters_that_do_not_train_may_be_in_any_dtype() -> None:
    model = TinyModel(vocabulary=VOCABULARY).bfloat16()
    model.head.float()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.startswith("head")

    assert trainer(model, autocast=torch.bfloat16).steps == 0


@pytest.mark.long
def test_a_compiled_model_trains_as_it_does_uncompiled_under_its_own_names() -> None:
    compiled = trainer(optimizer=SGD, compile=partial(torch.compile, backend="eager", dynamic=True))
    plain = trainer(optimizer=SGD)

    metrics = [untimed(each.step(made())) for each in (compiled, plain)]

    assert metrics[0] == pytest.approx(metrics[1], abs=1e-6)
    assert_same(compiled.weights(), plain.weights())


def test_a_step_reports_its_timings() -> None:
    each, packed = trainer(micro_batch_tokens=24), made()
    began = time.perf_counter()
    metrics = each.step(packed)
    took_s = time.perf_counter() - began

    parts = [metrics[f"timing_s/{part}"] for part in ("prepare", "forward", "backward", "optimizer")]
    assert all(seconds > 0 for seconds in parts)
    assert sum(parts) <= took_s


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"updates": 0}, "updates: expected a whole number of at least 1, got 0"),
        ({"micro_batch_tokens": 0}, "micro_batch_tokens: expected a whole number of at least 1, got 0"),
        ({"max_grad_norm": -1.0}, "max_grad_norm: expected a finite number above 0, got -1.0"),
        ({"max_grad_norm": 0.0}, "max_grad_norm: expected a finite number above 0, got 0.0"),
        ({"temperature": 0.0}, "temperature: expected a finite number above 0, got 0.0"),
        ({"temperature": -0.7}, "temperature: expected a finite number above 0, got -0.7"),
        ({"temperature": math.nan}, "temperature: expected a finite number above 0, got nan"),
        (
            {"autocast": torch.float64},
            r"autocast: expected torch.bfloat16, torch.float16, or None .* got torch.float64",
        ),
        (
            {"head_backward_dtype": torch.float16},
            r"TorchTrainer.head_backward_dtype: expected torch.bfloat16, or None .* got torch.float16",
        ),
    ],
)
def test_options_that_would_train_backwards_or_not_at_all_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(**options)


def test_what_a_term_says_is_not_mixed_with_what_the_trainer_says() -> None:
    def loss(scored: Scored) -> Any:
        value = AdvantageWeighted()(scored)
        return type(value)(value.loss, {"entropy": Mean(torch.tensor(0.25))})

    assert trainer(loss=loss).step(made())["entropy"] == 0.25


# -- checkpoints -------------------------------------------------------------------------------------------------------


class Noisy(TinyModel):
    """Drops out, so that every step depends on torch's generator."""

    def forward(self, tokens: Tensor, *, positions: Tensor, attend: Attention, cache: KVCache | None = None) -> Tensor:
        logits = super().forward(tokens, positions=positions, attend=attend, cache=cache)
        return nn.functional.dropout(logits, 0.2, training=self.training)


def fresh(seed: int = 0, state: Mapping[str, Any] | None = None) -> TorchTrainer:
    return trainer(Noisy(vocabulary=VOCABULARY, seed=seed), loss=PPOClip(), micro_batch_tokens=12, state=state)


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    torch.manual_seed(1)
    whole = fresh()
    for seed in range(3):
        whole.step(made(seed))
    checkpoint = whole.save(tmp_path, {})
    expected = [untimed(whole.step(made(seed))) for seed in range(3, 6)]

    torch.manual_seed(99)
    resumed = fresh(seed=7)
    resumed.resume(checkpoint)
    got = [untimed(resumed.step(made(seed))) for seed in range(3, 6)]

    assert got == expected
    assert resumed.steps == whole.steps == 6
    for name, tensor in whole.weights().items():
        assert torch.equal(tensor, resumed.weights()[name])


@dataclass(frozen=True)
class Words:
    """A tokenizer, as far as its identity goes."""

    words: tuple[str, ...]
    eos_id: int = 0

    def get_vocab(self) -> dict[str, int]:
        return {word: index for index, word in enumerate(self.words)}


def test_a_run_with_another_tokenizer_than_that_of_its_checkpoint_is_refused(tmp_path: Path) -> None:
    words = Words((".", "yes", "no"))
    before, resumed = trainer(), trainer()
    before.keep_tokenizer(words)
    resumed.resume(before.save(tmp_path, {}))

    assert resumed.tokenizer == tokenizer_identity(words)
    with pytest.raises(TokenizersDiffer, match="the checkpoint and the run have tokenizers of different vocabulary"):
        resumed.keep_tokenizer(Words((".", "no", "yes")))
    for same_or_unknown in (words, tokenizer_identity(words), object(), None):
        resumed.keep_tokenizer(same_or_unknown)
        assert resumed.tokenizer == tokenizer_identity(words)


def test_every_random_generator_goes_on_where_it_was(tmp_path: Path) -> None:
    def drawn() -> tuple[float, float, float, float]:
        return random.random(), np.random.random(), np.random.standard_normal(), torch.rand(()).item()  # noqa: NPY002, S311

    np.random.standard_normal()  # noqa: NPY002 (leaves a second deviate in store)
    checkpoint = fresh().save(tmp_path, {})
    expected = drawn()
    drawn()

    fresh().resume(checkpoint)

    assert drawn() == expected


def test_committed_ids_come_back(tmp_path: Path) -> None:
    committed = {GroupId("env", "1"): 0b101, GroupId("env", "zwei/2"): 1 << 300}
    checkpoint = fresh().save(tmp_path, committed)
    resumed = fresh()

    resumed.resume(checkpoint)

    assert resumed.committed == committed


async def test_statistics_of_the_normalizer_come_back_bit_for_bit(tmp_path: Path) -> None:
    normalizer, restored = AdvantageNormalizer("global"), AdvantageNormalizer("global")
    await drive(normalizer, [group(rewards=[0.1, 1 / 3]), group(instance_id="1", rewards=[2 / 7, 1e-9])])

    saved = fresh(state={"normalizer": normalizer})
    checkpoint = await anyio.to_thread.run_sync(saved.save, tmp_path, {})
    await anyio.to_thread.run_sync(fresh(state={"normalizer": restored}).resume, checkpoint)

    assert restored.state_dict() == normalizer.state_dict()


@pytest.mark.parametrize("state", [{"best": math.inf}, {"deep": [{"down": math.nan}]}], ids=repr)
def test_what_a_checkpoint_cannot_hold_is_refused_when_it_is_written(state: dict[str, Any], tmp_path: Path) -> None:
    """JSON has no infinity: it would come back as nothing at all."""

    class Best:
        def state_dict(self) -> dict[str, Any]:
            return state

        def load_state_dict(self, state: Any) -> None:
            raise NotImplementedError

    with pytest.raises(ValueError, match="state 'best': expected finite numbers, which a checkpoint can contain, got"):
        fresh(state={"best": Best()}).save(tmp_path, {})
    assert not any(tmp_path.glob("step-*"))


def test_a_checkpoint_of_another_model_is_refused_with_every_difference(tmp_path: Path) -> None:
    checkpoint = fresh().save(tmp_path, {})
    other = trainer(TinyModel(vocabulary=VOCABULARY + 1))

    with pytest.raises(WeightsMismatch) as caught:
        other.resume(checkpoint)

    assert "head.bias: expected float32 [12], found float32 [11]" in str(caught.value)
    assert other.steps == 0


def test_a_checkpoint_with_other_state_is_refused(tmp_path: Path) -> None:
    checkpoint = fresh(state={"normalizer": AdvantageNormalizer("global")}).save(tmp_path, {})

    with pytest.raises(ValueError, match=r"expected a checkpoint with state \[\], got \['normalizer'\]"):
        fresh().resume(checkpoint)


def test_tied_weights_are_restored_under_each_of_their_names(tmp_path: Path) -> None:
    def tied() -> TinyModel:
        model = TinyModel(vocabulary=VOCABULARY)
        model.head.weight = model.token.weight
        return model

    first, second = trainer(tied()), trainer(tied())
    first.step(made())

    second.resume(first.save(tmp_path, {}))

    assert torch.equal(first.weights()["head.weight"], second.weights()["token.weight"])
    assert untimed(first.step(made(1))) == untimed(second.step(made(1)))


def test_nothing_in_a_checkpoint_runs_when_it_is_loaded(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (pytest.fail, ("code of the checkpoint ran",))

    def write(folder: Path) -> None:  # as someone who can write the folder can
        shutil.copytree(fresh().save(tmp_path / "whole", {}), folder, dirs_exist_ok=True)
        torch.save({"optimizer": Trap()}, folder / "optimizer.pt")
        (folder / "manifest.json").unlink()

    checkpoint = write_checkpoint(tmp_path, 0, write)

    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        fresh().resume(checkpoint)


def test_weights_can_be_read_by_anyone_who_reads_safetensors(tmp_path: Path) -> None:
    from safetensors.numpy import load_file  # noqa: PLC0415 (without torch)

    each = fresh()

    loaded = load_file(each.save(tmp_path, {}) / "model.safetensors")

    assert {name: array.tolist() for name, array in loaded.items()} == {
        name: tensor.tolist() for name, tensor in each.weights().items()
    }
