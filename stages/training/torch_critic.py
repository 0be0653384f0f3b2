"""Critic: a model of values that trains beside the policy. It makes the advantages of a batch from its rewards.

1. Before the first update of a step the critic predicts the value of each token that trains.
2. GAE makes advantages and returns of them (`critic_targets`); advantages are whitened over the whole batch.
3. The critic is trained on the returns, as often as the policy is on the advantages.

Knows no policy. Axes: N tokens of a batch, T of a micro-batch that train.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from ..._pipeline.errors import InvalidConfig
from ..._pipeline.weights.weight_specs import check_weights, specs_of
from ..._schemas import InvalidRecord, TrainBatch
from ..._schemas.choices import check_choice
from ..._schemas.columns import freeze
from ..._schemas.numbers import normalize_numbers, number_or_nan, whole_number
from ..advantages.critic_targets import Spread, targets_of
from ..advantages.estimator import RewardLevel
from ..contracts.causal_model import IdentifiedModel, packs
from ..losses.metrics import Metric, merge
from ..losses.terms import LossValue
from ..losses.value import value_loss
from ..models.micro_batches import MicroBatch, empty_micro_batch, micro_batches
from ..models.scoring import check_sequences, read_values
from ..models.torch_sharding import Trainable, bare, is_shared, load_weights
from ..models.torch_weights_file import stored_weights
from .optimizers import OptimizerRecipe
from .torch_ranks import Ranks
from .torch_saved_tensors import Gather
from .torch_trained_model import Parts, TrainedModel

WEIGHTS, MOMENTS = "critic.tensors", "critic.moments.tensors"
"""The files of a critic in a checkpoint. They have the format of safetensors, and other names: see `torch_trainer`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Critic:
    """The model of values of a `TorchTrainer`, and how its values make advantages.

    Args:
        model: a `CausalModel` whose head has one output, the value, as `ValueModel`; it trains on the device of the
            policy, and ranks share it in the same way.
        optimizer: makes the optimizer of its parameters: a critic has a learning rate of its own.
        clip: bound on the change of a value in the updates on a batch; beyond it the loss gives no gradient.
        warmup_steps: first steps of a run, in which the critic alone trains.
        gamma: discount from one token that trains to the next.
        gae_lambda: λ of GAE (arXiv:1506.02438); 1 for returns less values.
        rewards: `sequence` for the column `rewards`, `token` for `token_rewards`, `both` for their sum.

    Raises:
        InvalidConfig: a number out of range, or unknown `rewards`.
    """

    model: Trainable
    optimizer: OptimizerRecipe
    clip: float = 0.5
    warmup_steps: int = 0
    gamma: float = 1.0
    gae_lambda: float = 1.0
    rewards: RewardLevel = "sequence"

    def __post_init__(self) -> None:
        normalize_numbers(self, "clip")
        object.__setattr__(self, "warmup_steps", whole_number("warmup_steps", self.warmup_steps, least=0))
        check_choice("rewards", self.rewards, RewardLevel)
        for name in ("gamma", "gae_lambda"):
            if not 0 <= number_or_nan(getattr(self, name)) <= 1:
                raise InvalidConfig(f"{name}: expected a number from 0 to 1, got {getattr(self, name)}")


class TrainedCritic:
    """A critic in training: of one trainer, on one rank.

    Args:
        critic: the critic.
        max_grad_norm: see `TrainedModel`.
        autocast: see `TrainedModel`; the head of a value model computes in float32.
        ranks: see `TrainedModel`.

    Raises:
        InvalidConfig: ranks share the policy alone, or the critic alone; see `TrainedModel`.
    """

    def __init__(
        self, critic: Critic, *, max_grad_norm: float, autocast: torch.dtype | None, ranks: Ranks | None
    ) -> None:
        if is_shared(critic.model) != (ranks is not None):
            raise InvalidConfig(
                "TorchTrainer.critic: expected a model that ranks share if, and only if, they share the policy: wrap "
                "both in DistributedDataParallel, or call fully_shard for both"
            )
        self.given = critic
        self.trained = TrainedModel(
            "critic.model",
            critic.model,
            critic.optimizer,
            None,
            max_grad_norm=max_grad_norm,
            autocast=autocast,
            ranks=ranks,
            judges=True,
        )
        self._autocast = autocast
        self._ranks = ranks

    @property
    def needs_columns(self) -> tuple[str, ...]:
        """Return the columns that its rewards need."""
        return () if self.given.rewards == "sequence" else ("token_rewards",)

    def facts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the fixed facts and the options of the critic; see `StageFacts`."""
        model = bare(self.given.model)
        identity = {"critic_model": model.identity()} if isinstance(model, IdentifiedModel) else {}
        names = ("clip", "warmup_steps", "gamma", "gae_lambda", "rewards")
        options = {name: getattr(self.given, name) for name in names}
        fixed = {"critic_optimizer": self.trained.optimizer.name, **identity}
        return fixed, {"critic": options | {"optimizer": self.trained.optimizer.given}}

    def warms_up(self, steps: int) -> bool:
        """Return whether the critic alone trains in the step after `steps` steps."""
        return steps < self.given.warmup_steps

    def check(self, batch: TrainBatch) -> None:
        """Check that the batch has what the critic needs, and no advantages.

        Raises:
            InvalidRecord: it has not.
        """
        if batch.advantages is not None:
            raise InvalidRecord(
                "advantages: expected a batch without, whose advantages the critic makes, got a column: leave out the "
                "AdvantageNormalizer, or the critic"
            )
        check_sequences(bare(self.given.model), batch)

    # -- training ------------------------------------------------------------------------------------------------------

    def step(
        self, batch: TrainBatch, *, micro_batch_tokens: int | None, updates: int, step: int
    ) -> tuple[TrainBatch, dict[str, float]]:
        """Train the critic on `batch`; return the batch with advantages by the values before, and metrics.

        Raises:
            InvalidRecord: a reward or a value is not finite, or the batch lacks the rewards of tokens.
            FloatingPointError: see `TrainedModel.update`.
        """
        values = self._values(batch, micro_batch_tokens)
        given = self.given
        found = targets_of(batch, values, gamma=given.gamma, gae_lambda=given.gae_lambda, rewards=given.rewards)
        spread = self._over_ranks(Spread.of(found, batch.loss_mask))
        columns = {"values": values.astype(np.float32), "returns": found.returns.astype(np.float32)}
        metrics = self._fit(batch, self._parts(batch, columns, micro_batch_tokens), updates, step)
        advantages = np.where(batch.loss_mask, spread.whitened(found.advantages), 0.0).astype(np.float32)
        freeze([advantages])
        reported = {name: metric.value() for name, metric in metrics.items()} | self.trained.loss_scale.metrics()
        reported |= {
            "lr": self.trained.optimizer.rate,
            "explained_variance": spread.explained_variance,
            "value": spread.mean_value,
            "return": spread.returns.mean,
        }
        judged = msgspec.structs.replace(batch, advantages=advantages)
        return judged, {f"critic/{name}": value for name, value in reported.items()}

    def _values(self, batch: TrainBatch, micro_batch_tokens: int | None) -> NDArray[np.float64]:
        """Return [N] the values of the tokens that train, 0 elsewhere."""
        values = np.zeros(len(batch.tokens))
        model = self.given.model.train(mode=False)
        with torch.no_grad():
            for part in self._parts(batch, {"place": np.arange(len(values))}, micro_batch_tokens):
                of_part = empty_micro_batch(batch, self.trained.device) if part is None else part
                found = read_values(model, of_part, self._autocast)
                if part is not None:
                    values[part.columns["place"].cpu().numpy()] = found.cpu().numpy()
        model.train()
        return values

    def _parts(
        self, batch: TrainBatch, columns: Mapping[str, NDArray[Any]], micro_batch_tokens: int | None
    ) -> list[MicroBatch | None]:
        together = packs(bare(self.given.model))
        parts = micro_batches(batch, columns, micro_batch_tokens, self.trained.device, packs=together)
        return [*parts] if self._ranks is None else self._ranks.padded(parts)

    def _over_ranks(self, spread: Spread) -> Spread:
        """Return the statistics of the whole batch; the same on every rank."""
        if self._ranks is None:
            return spread
        every = map(_decode_spread, self._ranks.gathered(msgspec.msgpack.encode(spread)))
        return reduce(Spread.merged, every)

    def _fit(self, batch: TrainBatch, parts: Parts, updates: int, step: int) -> dict[str, Metric]:
        """Do all updates on the batch; return their metrics."""
        metrics: dict[str, Metric] = {}
        for _ in range(updates):
            reported = self.trained.update(parts, partial(self._loss_of, batch), lambda _: None, step)
            merge(metrics, {name: metric.over(updates) for name, metric in reported.items()})
        return metrics

    def _loss_of(self, batch: TrainBatch, part: MicroBatch | None) -> LossValue:
        if part is None:
            none = read_values(self.given.model, empty_micro_batch(batch, self.trained.device), self._autocast)
            return LossValue(0 * none.sum(), {})
        found = read_values(self.given.model, part, self._autocast)
        old, returns = part.columns["values"], part.columns["returns"]
        return value_loss(found, old, returns, clip=self.given.clip, loss_tokens=batch.loss_tokens)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def write(self, folder: Path, gather: Gather) -> None:
        """Write the files of the critic into a checkpoint."""
        self.trained.write(folder / WEIGHTS, folder / MOMENTS, gather)

    def check_fits(self, folder: Path, gather: Gather) -> None:
        """Check that the critic of a checkpoint has the tensors of this one.

        Raises:
            WeightsMismatch: it has others; lists every difference.
        """
        own, stored = specs_of(self.trained.tensors.weights(gather)), specs_of(stored_weights(folder / WEIGHTS))
        check_weights(own, stored, f"the critic in {folder} does not fit the model")

    def resume(self, folder: Path, state: Mapping[str, Any], steps: int) -> None:
        """Restore the critic of a checkpoint with the state that `TrainedModel.state` returned."""
        load_weights(bare(self.given.model), stored_weights(folder / WEIGHTS))
        self.trained.resume(state, folder / MOMENTS, steps)


_decode_spread = msgspec.msgpack.Decoder(Spread).decode
