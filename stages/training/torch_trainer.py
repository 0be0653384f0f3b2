"""TorchTrainer: one optimizer step on a batch, in micro-batches, and checkpoints that resume a run bit for bit.

Knows a model (`CausalModel`), an optimizer and a loss. Knows no channel and no event loop: `step` blocks, SinkTrainer
runs it in a thread. No loaded data is unpickled into code.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..._pipeline.accounting.committed_prompts import CommittedPrompts, CommittedState
from ..._pipeline.durability.resumption import Stateful
from ..._pipeline.durability.run_changes import StageFacts, text_of
from ..._pipeline.graph.stage_info import NeedsColumns
from ..._pipeline.util.checkpoint import WEIGHTS, verify_checkpoint, write_checkpoint
from ..._pipeline.weights.weight_specs import check_weights, specs_of
from ..._schemas import (
    Array,
    GroupId,
    InvalidConfig,
    InvalidRecord,
    TokenizerIdentity,
    TrainBatch,
    check_tokenizers,
    tokenizer_identity,
)
from ..._schemas.conversion import decode_json
from ..._schemas.group import check_support
from ..._schemas.numbers import finite_number, whole_number
from ..contracts.autocast import computing_in
from ..contracts.causal_model import CausalModel, IdentifiedModel, SavedModel, check_packing, packs
from ..contracts.routed_experts import RouterReplay
from ..contracts.support import SUPPORT
from ..losses.adaptive import adaptive_terms_of
from ..losses.choices import TokenChoice
from ..losses.diagnostics import diagnostics
from ..losses.distillation import TOKENS_USED
from ..losses.distributions import Distributions, entropy_of, logprobs_of
from ..losses.metrics import Mean, Metric, merge
from ..losses.policy import PPOClip
from ..losses.products import check_backward_dtype
from ..losses.scored import Scored
from ..losses.terms import Aggregated, Loss, LossTerm, LossValue
from ..models.micro_batches import MicroBatch, Packed, empty_micro_batch, micro_batches
from ..models.scoring import (
    TEMPERATURE,
    check_sequences,
    check_temperature,
    own_temperatures,
    read_distributions,
    reads,
)
from ..models.torch_sharding import Trainable, bare, is_shared, load_weights
from ..models.torch_weights_file import stored_weights
from ..tokenizers.pretrained_tokenizer import PretrainedTokenizer, copy_tokenizer
from .activation_memory import suitable_tokens
from .optimizers import OptimizerRecipe, ReferenceUpdates, ScheduleRecipe
from .step_clock import StepClock
from .torch_changed_weights import ChangedWeights
from .torch_critic import Critic, TrainedCritic
from .torch_ranks import Ranks
from .torch_routing import PLACES, RoutingReplay
from .torch_saved_tensors import Address, Gather
from .torch_token_choices import KEYS, choose_tokens, chosen_of, measurements_of, token_keys
from .torch_trained_model import TrainedModel

R = TypeVar("R")

OPTIMIZER, MOMENTS, STATE = "optimizer.pt", "optimizer.tensors", "state.json"
"""The files of a checkpoint besides weights, the model's own, and the tokenizer's.

The moments have the format of safetensors, and another name: vLLM takes every file of that for weights of the model."""

SCORED_COLUMNS = ("advantages", "behavior_logprobs", "ref_logprobs", "teacher_ids", "teacher_logprobs")
"""Columns of a batch that a loss receives, where present."""

SCORED_FIELDS = {*SCORED_COLUMNS, "group_tokens", "rollout_tokens", "proximal_logprobs"}
"""Those, and the columns that the trainer fills."""


class _State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a checkpoint besides tensors."""

    step: int
    committed: CommittedState
    """The trained trajectories."""
    state: dict[str, dict[str, Any]]
    """State of each Stateful, by name."""
    random: tuple[int, tuple[int, ...], float | None]
    """State of Python's generator."""
    numpy: tuple[list[int], int, int, float]
    """State of numpy's global generator: MT19937's key and position, and the cached normal deviate."""
    tokenizer: TokenizerIdentity | None = None
    """Tokenizer of the run, if it was known."""


class TorchTrainer:
    """Trains `model` on batches: `step(batch)` makes the next version of the weights. One thread at a time.

    Args:
        model: see `CausalModel`; trained in place, on the device its parameters are on. One that several ranks share,
            by DistributedDataParallel or `fully_shard`, is trained by a `RankedTrainer`.
        optimizer: makes the optimizer of the model's parameters; `adamw` decays only the matrices.
        schedule: makes the schedule of its learning rate, a function of the number of steps; None for a constant rate.
        loss: the loss; see `losses`.
        max_grad_norm: bound on the norm of the gradient: it is scaled down to that; None for no bound.
        micro_batch_tokens: tokens of a micro-batch, padding included; a longer sequence is in one of one row. `auto`
            for 3,072 on a CPU, and on a CUDA device 16,384, or less if its memory holds less before the first step.
            None for the whole batch at once. Loss and gradients are the same up to rounding.
        temperature: temperature of the policy's sampling; logits are divided by it, so that ratios to
            behavior_logprobs are 1 on policy. A group may have its own for each sequence, `meta["temperatures"]`, by
            repetition id.
        updates: optimizer updates on every batch, each on all of it. The weights before the first are the proximal
            policy.
        reference: a frozen model with the same vocabulary; it scores batches without `ref_logprobs`.
        reference_updates: moves the reference, of the policy's shape, towards the policy; None keeps it as it is.
        router_replay: the experts that a mixture chooses: `R3`, those of the engine that sampled, by the column
            `routed_experts`; `R2`, those of the first pass over a batch, in all its updates. None for those of each
            pass.
        router_aux_loss: factor of the load balancing loss of the model's routers, as transformers computes it.
        autocast: the dtype of the model's safe operations, `torch.bfloat16`, or `torch.float16` with a scaled loss (see
            `LossScale`); its parameters, the loss and the optimizer stay float32. None computes everything in the dtype
            of the parameters. A head that computes in bfloat16 changes every ratio by percents: have the model compute
            it with autocast off.
        head_backward_dtype: dtype of the numbers that are multiplied for gradients of the output layer,
            `torch.bfloat16`, where the device has instructions for it: log-probabilities stay as they are. None for the
            dtype of the forward pass.
        compile: makes the function that is called in place of the model: `partial(torch.compile, dynamic=True)`.
        critic: makes the advantages, and trains beside the policy; batches have none then. In its `warmup_steps` the
            policy and its schedule stay as they are. `micro_batch_tokens`, `updates`, `max_grad_norm` and `autocast`
            are its own too.
        state: further state in checkpoints, by name: `{"normalizer": normalizer}`.

    Raises:
        InvalidConfig: parameters that train are in bfloat16 or float16, another `autocast`, a `head_backward_dtype`
            that the device computes no faster, a number out of range, updates of a reference that is absent, or of
            a model that ranks share in parts, a critic that ranks share otherwise than the model, or a router that is
            absent, unknown or compiled.
        WeightsMismatch: the reference is to be updated, and has other tensors than the model.
    """

    def __init__(
        self,
        model: Trainable,
        *,
        optimizer: OptimizerRecipe,
        schedule: ScheduleRecipe | None = None,
        loss: Loss = PPOClip(),  # noqa: B008 (a frozen value)
        max_grad_norm: float | None = 1.0,
        micro_batch_tokens: int | Literal["auto"] | None = "auto",
        temperature: float = 1.0,
        updates: int = 1,
        reference: CausalModel | None = None,
        reference_updates: ReferenceUpdates | None = None,
        router_replay: RouterReplay | None = None,
        router_aux_loss: float = 0.0,
        autocast: torch.dtype | None = None,
        head_backward_dtype: torch.dtype | None = None,
        compile: Callable[[Any], Callable[..., Tensor]] | None = None,  # noqa: A002 (torch's name for it)
        critic: Critic | None = None,
        state: Mapping[str, Stateful] | None = None,
    ) -> None:
        self.tokenizer: TokenizerIdentity | None = None
        """Identity of the tokenizer of the run, or of the checkpoint that it was resumed from, if known."""
        self._tokenizer_folder: Path | None = None
        """The folder of the tokenizer: its files are in each checkpoint too."""
        self._model = model
        self.ranks: Ranks | None = Ranks() if is_shared(model) else None
        """The ranks that train the model together; None for a single process."""
        self._forward = model if compile is None else compile(model)
        self._reference = None if reference is None else reference.train(mode=False)
        bound = math.inf if max_grad_norm is None else finite_number("max_grad_norm", max_grad_norm)
        shared: dict[str, Any] = {"max_grad_norm": bound, "autocast": autocast, "ranks": self.ranks}
        self._policy = TrainedModel("model", model, optimizer, schedule, **shared)
        self._critic = None if critic is None else TrainedCritic(critic, **shared)
        check_backward_dtype("TorchTrainer.head_backward_dtype", head_backward_dtype, self._policy.device)
        self._reference_updates = reference_updates
        if reference_updates is not None:
            _check_reference(reference, model)
        self._routing = RoutingReplay(bare(model), router_replay, router_aux_loss, compiled=compile is not None)
        self._loss = loss
        self._adaptive = adaptive_terms_of(loss)
        self._choices: tuple[TokenChoice, ...] = loss.choices if isinstance(loss, LossTerm | Aggregated) else ()
        """The rules by which the loss chooses among all tokens of a batch."""
        self._max_grad_norm = bound
        self._micro_batch_tokens: int | Literal["auto"] | None = (
            micro_batch_tokens
            if micro_batch_tokens is None or micro_batch_tokens == "auto"
            else whole_number("micro_batch_tokens", micro_batch_tokens)
        )
        self._temperature = finite_number("temperature", temperature)
        self._updates = whole_number("updates", updates)
        self._autocast = autocast
        self._head_backward_dtype = head_backward_dtype
        self._state = {**(state or {}), **self._adaptive}
        self._steps = 0
        self._committed = CommittedPrompts()
        self.keeps_logprobs = False
        """True for the next steps to keep `logprobs`; a sink sets it before a step whose samples are shown."""
        self.logprobs: NDArray[np.float32] | None = None
        """[N] the log-probability of each token that trains of the last batch, before the first update on it."""

    @property
    def steps(self) -> int:
        """Return the number of trained batches, those before a resumption included: the version of the weights."""
        return self._steps

    @property
    def committed(self) -> CommittedPrompts:
        """Return the trajectories that were trained before the resumption, as `Ledger.committed`."""
        return self._committed

    @property
    def state(self) -> Mapping[str, Stateful]:
        """Return the further state in checkpoints, by name; `pipeline.check()` checks the placement of its stages."""
        return self._state

    @property
    def needs_columns(self) -> tuple[str, ...]:
        """Return the columns that the loss needs and the trainer does not fill."""
        needed = self._loss.needs_columns if isinstance(self._loss, NeedsColumns) else ()
        filled = () if self._reference is None else ("ref_logprobs",)
        if self._critic is not None:
            needed, filled = (*needed, *self._critic.needs_columns), (*filled, "advantages")
        return tuple(name for name in (*needed, *self._routing.needs_columns) if name not in filled)

    def facts(self) -> StageFacts:
        """Return the identity of the model, if it has one, and the class of the optimizer as fixed facts."""
        model = bare(self._model)
        identity = {"model": model.identity()} if isinstance(model, IdentifiedModel) else {}
        options = {
            "optimizer": self._policy.optimizer.given,
            "loss": text_of(self._loss),
            "max_grad_norm": None if math.isinf(self._max_grad_norm) else self._max_grad_norm,
            "temperature": self._temperature,
            "updates": self._updates,
            "autocast": str(self._autocast),
            "head_backward_dtype": str(self._head_backward_dtype),
            "reference_updates": repr(self._reference_updates),
            **self._routing.options,
        }
        fixed, more = ({}, {}) if self._critic is None else self._critic.facts()
        fixed = {"optimizer": self._policy.optimizer.name, **identity, **fixed}
        return StageFacts(fixed=fixed, options=options | more)

    def weights(self, gather: Gather | None = None) -> Mapping[str, Tensor]:
        """Return the model's tensors by name, for publishing: not copies.

        Args:
            gather: returns a tensor that ranks share, which is then made whenever it is read; `gather` by default.
        """
        return self._policy.tensors.weights(gather or self.gather)

    def gather(self, address: Address) -> Tensor:
        """Return a tensor that ranks share, whole on rank 0, and on the meta device on others; all ranks call this."""
        trained = self._critic.trained if self._critic is not None and address.judges else self._policy
        return trained.tensors.gather(address)

    # -- training ------------------------------------------------------------------------------------------------------

    def step(self, batch: TrainBatch) -> dict[str, float]:
        """Train on `batch` and return metrics.

        `loss`, `grad_norm` before clipping, `lr`, `weights/changed` (the share of some weights that the step changed),
        the metrics of the loss, `losses.diagnostics`, and `timing_s/{prepare,forward,backward,optimizer}`. With several
        updates they are means or extremes over all. In float16 also `loss_scale`, and `skipped_updates`: their
        gradients overflowed and were computed again. With a critic also `timing_s/critic` and
        `critic/{loss,clip_fraction,explained_variance,value,return,grad_norm,lr}`, in its warm-up alone.

        Raises:
            InvalidConfig: the first batch, and sequences of one row see each other; the model is unchanged.
            InvalidRecord: the batch lacks a column that the loss needs, has no token that trains, was sampled at
                another temperature, has a sequence beyond the model's positions, or advantages beside a critic; the
                model is unchanged.
            FloatingPointError: the gradient is not finite; the update was not applied.
        """
        if not batch.loss_tokens:
            raise InvalidRecord(
                "loss_mask: expected tokens that train, got a batch without: a step on it would change the weights by "
                "momentum and decay alone. A Batcher drops such groups"
            )
        check_temperature(batch.groups, self._temperature, "TorchTrainer")
        check_sequences(bare(self._model), batch)
        check_sequences(self._reference, batch)
        if self._critic is not None:
            self._critic.check(batch)
        clock = StepClock(self._policy.device)
        self._check_packing()
        tokens = self._chosen_tokens(batch)
        critic, step, judged = self._critic, self._steps + 1, dict[str, float]()
        if critic is not None:
            clock.lap("prepare")
            batch, judged = critic.step(batch, micro_batch_tokens=tokens, updates=self._updates, step=step)
            clock.lap("critic")
        found = {} if critic is not None and critic.warms_up(self._steps) else self._train_policy(batch, tokens, clock)
        self._steps = step
        if self._reference is not None and self._reference_updates is not None:
            self._reference_updates.apply(self._reference, bare(self._model), self._steps)
        return found | judged | clock.seconds()

    def _chosen_tokens(self, batch: TrainBatch) -> int | None:
        """Return the tokens of a micro-batch, chosen with the first batch if they are `auto`."""
        if self._micro_batch_tokens == "auto":
            has_moments = bool(self._policy.optimizer.optimizer.state)
            forward, longest = partial(self._forward_of, batch), int(batch.lengths().max())
            judging = [] if self._critic is None else self._critic.trained.parameters
            self._micro_batch_tokens = suitable_tokens(
                self._policy.device, [*self._policy.parameters, *judging], forward, longest, has_moments=has_moments
            )
        return self._micro_batch_tokens

    def _train_policy(self, batch: TrainBatch, tokens: int | None, clock: StepClock) -> dict[str, float]:
        """Do all updates of the policy on `batch`, and advance its schedule; return metrics without timings."""
        self._model.train()
        columns = {**_columns(batch, self._temperature), **self._routing.begin(batch)}
        if self._choices:
            columns[KEYS] = token_keys(batch)
        if self.keeps_logprobs:
            columns[PLACES] = np.arange(len(batch.tokens))
        together = packs(bare(self._model)) and packs(self._reference)
        own = micro_batches(batch, columns, tokens, self._policy.device, packs=together)
        parts = [*own] if self.ranks is None else self.ranks.padded(own)
        before = ChangedWeights(self._policy.parameters)
        clock.lap("prepare")
        metrics: dict[str, Metric] = {}
        for update in range(self._updates):
            if self._choices:
                turn = self._steps * self._updates + update
                choose_tokens(self._choices, parts, partial(self._measured, batch), self.ranks, turn)
                clock.lap("forward")
            around, loss_of = partial(self._prepared, batch), partial(self._loss_of_part, batch)
            reported = self._policy.update(parts, loss_of, clock.lap, self._steps + 1, around)
            merge(metrics, {name: metric.over(self._updates) for name, metric in reported.items()})
        self.logprobs = _logprobs(own, len(batch.tokens)) if self.keeps_logprobs else None
        rate = self._policy.optimizer.rate
        self._policy.optimizer.advance()
        found = {name: metric.value() for name, metric in metrics.items()}
        for term in self._adaptive.values():
            found |= term.adapt(found, batch.total_rollouts)
        unused = {} if batch.teacher_ids is None else {TOKENS_USED: 0.0}  # shows that no loss uses the teacher
        applied = {"lr": rate, "weights/changed": before.share()}
        return unused | found | applied | self._policy.loss_scale.metrics()

    def _check_packing(self) -> None:
        """Check the model, the reference and the critic, in the dtype of their computations."""
        with computing_in(self._autocast, self._policy.device):
            check_packing(bare(self._model))
            check_packing(self._reference)
            check_packing(None if self._critic is None else bare(self._critic.given.model))

    def _forward_of(self, batch: TrainBatch, tokens: int) -> Tensor:
        """Return a result of the model for a row of `tokens` tokens of `batch`."""
        ids = np.resize(batch.tokens, tokens)
        row = Packed(ids, np.array([0, tokens]), np.arange(tokens) > 0)
        (part,) = micro_batches(row, {}, None, self._policy.device)
        return self._read(bare(self._model), part, lambda found: found.logprobs_of(part.targets))

    @contextmanager
    def _prepared(self, batch: TrainBatch, part: MicroBatch | None) -> Iterator[None]:
        """Score the reference on a micro-batch, then have the routers of the model choose within the body."""
        if part is None:
            yield
            return
        self._score_reference(part)
        with self._routing.choosing(part, batch):
            yield

    def _loss_of_part(self, batch: TrainBatch, part: MicroBatch | None) -> LossValue:
        """Return the loss of a micro-batch; None if only other ranks have one."""
        if part is None:
            empty = empty_micro_batch(batch, self._policy.device)
            none = self._read(self._forward, empty, lambda found: found.logprobs_of(empty.targets).sum())
            return LossValue(0 * none, {})
        found = self._read(self._forward, part, lambda found: self._loss_of(found, part, batch))
        return self._routing.balanced(found, part, batch)

    @torch.no_grad()
    def _measured(self, batch: TrainBatch, part: MicroBatch | None) -> list[Tensor]:
        """Return what the choices of the loss measure of `part`; the model also runs if only other ranks have one."""
        if part is None:
            empty = empty_micro_batch(batch, self._policy.device)
            return [self._read(self._forward, empty, lambda found: found.logprobs_of(empty.targets))]
        use = partial(measurements_of, self._choices)
        with self._routing.choosing(part, batch):
            return self._read(self._forward, part, lambda found: use(self._scored(found, part, batch)))

    def _loss_of(self, distributions: Distributions, part: MicroBatch, batch: TrainBatch) -> LossValue:
        """Return the loss of `part` with all its metrics; store the proximal policy's log-probabilities in it."""
        adds, dtype = self.ranks is None, self._head_backward_dtype
        scored = self._scored(replace(distributions, adds_to_grad=adds, backward_dtype=dtype), part, batch)
        part.columns.setdefault("proximal_logprobs", scored.logprobs.detach())
        value, reported = self._loss(scored)
        return LossValue(value, {**diagnostics(scored), **reported, "loss": Mean(value.detach())})

    @torch.no_grad()
    def _score_reference(self, part: MicroBatch) -> None:
        """Store the reference's log-probabilities in the columns of `part`, if there is one."""
        if self._reference is not None and "ref_logprobs" not in part.columns:
            found = self._read(self._reference, part, lambda found: found.logprobs_of(part.targets))
            part.columns["ref_logprobs"] = found

    def _scored(self, distributions: Distributions, part: MicroBatch, batch: TrainBatch) -> Scored:
        logprobs, entropy = distributions.over([logprobs_of, entropy_of], part.targets)
        known = {name: column for name, column in part.columns.items() if name in SCORED_FIELDS}
        return Scored(
            distributions=distributions,
            logprobs=logprobs,
            entropy=entropy,
            tokens=part.targets,
            lengths=part.lengths,
            loss_tokens=batch.loss_tokens,
            loss_rollouts=batch.loss_rollouts,
            loss_groups=batch.loss_groups,
            total_rollouts=batch.total_rollouts,
            chosen=chosen_of(self._choices, part.columns),
            **known,
        )

    def _read(self, model: Callable[..., Any], part: MicroBatch, use: Callable[[Distributions], R]) -> R:
        options: dict[str, Any] = {"temperature": self._temperature, "autocast": self._autocast}
        passes_hidden = reads(bare(self._model) if model is self._forward else model)
        return read_distributions(model, part, use, passes_hidden=passes_hidden, **options)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def keep(self, state: Mapping[str, Stateful]) -> None:
        """Include these in checkpoints too, by name, in addition to `state`."""
        self._state |= state

    def keep_tokenizer(self, tokenizer: object) -> None:
        """Include the identity of the tokenizer of the run in checkpoints, if it has one, and its files. Blocks.

        Raises:
            TokenizersDiffer: the trainer was resumed from a checkpoint of another one.
        """
        if isinstance(tokenizer, TokenizerIdentity) or hasattr(tokenizer, "get_vocab"):
            if self.tokenizer is not None:
                check_tokenizers({"the checkpoint": self.tokenizer, "the run": tokenizer})
            self.tokenizer = tokenizer_identity(tokenizer)
        if isinstance(tokenizer, PretrainedTokenizer):
            self._tokenizer_folder = Path(tokenizer.name_or_path)

    def save(self, folder: str | Path, committed: Mapping[GroupId, int]) -> Path:
        """Write a checkpoint into `folder` atomically, and return its path. Blocks.

        Args:
            folder: contains one directory for each checkpoint, named after its step.
            committed: the trained trajectories: `Ledger.committed`.

        Raises:
            ValueError: a `state` contains a number that is not finite.
            DiskFull, NotWritable, OutOfFileDescriptors: it cannot be written; earlier checkpoints are intact.
        """
        return self.write(folder, committed, self.gather)

    def write(self, folder: str | Path, committed: Mapping[GroupId, int], gather: Gather) -> Path:
        """Write a checkpoint, as `save` does, with the tensors that ranks share from `gather`."""
        return write_checkpoint(Path(folder), self._steps, lambda into: self._write(into, committed, gather))

    def _write(self, folder: Path, committed: Mapping[GroupId, int], gather: Gather) -> None:
        self._policy.write(folder / self._weights_file, folder / MOMENTS, gather)
        if self._critic is not None:
            self._critic.write(folder, gather)
        self._write_model_files(folder)
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        with (folder / OPTIMIZER).open("wb") as file:  # with a path, torch hides the reason of a failure
            random_states = {"torch": torch.get_rng_state(), "cuda": cuda}
            reference = None if self._moving_reference is None else self._moving_reference.state_dict()
            critic = None if self._critic is None else self._critic.trained.state()
            torch.save(self._policy.state() | {"reference": reference, "critic": critic} | random_states, file)
        state = _State(
            step=self._steps,
            committed=CommittedPrompts(committed).state,
            state={name: _checked(name, kept.state_dict()) for name, kept in self._state.items()},
            random=random.getstate(),
            numpy=_numpy_state(),
            tokenizer=self.tokenizer,
        )
        (folder / STATE).write_bytes(msgspec.json.encode(state))

    @property
    def _moving_reference(self) -> CausalModel | None:
        """Return the reference, if checkpoints must contain it."""
        return None if self._reference_updates is None else self._reference

    @property
    def _weights_file(self) -> str:
        model = bare(self._model)
        return model.weights_file if isinstance(model, SavedModel) else WEIGHTS

    def _write_model_files(self, folder: Path) -> None:
        """Write the files that other programs need beside the weights; the tokenizer is that of the run, if known."""
        model, tokenizer = bare(self._model), self._tokenizer_folder
        if isinstance(model, SavedModel):
            model.write_files(folder)
            tokenizer = tokenizer or model.folder
        if tokenizer is not None:
            copy_tokenizer(tokenizer, folder)

    def resume(self, checkpoint: str | Path) -> None:
        """Resume from a checkpoint: weights, optimizer, random generators, every Stateful, and the committed ids.

        A hyper-parameter of the optimizer has the value that the recipe of this trainer gives, and the learning rate is
        that of its schedule after as many steps. If all are those of the checkpoint's trainer, the next steps on the
        same batches are bit for bit those of an uninterrupted run, on the same machine with the same number of threads.

        Raises:
            CheckpointDamaged: a file is not as it was written; the trainer stays as it is.
            WeightsMismatch: the checkpoint is of another model; lists every difference.
            ValueError: it contains other state than this trainer, a critic or none otherwise than it, or a prompt
                twice.
            OSError: it cannot be read.
        """
        verify_checkpoint(checkpoint)
        self.resume_verified(checkpoint)

    def resume_verified(self, checkpoint: str | Path) -> None:
        """Resume from a checkpoint that `verify_checkpoint` has accepted; see `resume`."""
        folder, model = Path(checkpoint), bare(self._model)
        kept = decode_json((folder / STATE).read_bytes(), _State)
        committed = CommittedPrompts.of_state(kept.committed)
        leads = self.ranks is None or self.ranks.index == 0
        if leads and kept.state.keys() != self._state.keys():
            raise ValueError(f"expected a checkpoint with state {sorted(self._state)}, got {sorted(kept.state)}")
        tensors = torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True)
        weights = stored_weights(folder / self._weights_file)
        check_weights(specs_of(self.weights()), specs_of(weights), f"weights of {folder} do not fit the model")
        judged = tensors.get("critic")  # absent in older checkpoints
        if (judged is None) != (self._critic is None):
            expected, got = ("without", "one with") if self._critic is None else ("with", "one without")
            raise ValueError(f"expected a checkpoint {expected} a critic, got {got}: {folder}")
        if self._critic is not None:
            self._critic.check_fits(folder, self.gather)
        load_weights(model, weights)
        if isinstance(model, IdentifiedModel):
            model.compare(folder)
        warmup = 0 if self._critic is None else self._critic.given.warmup_steps
        self._policy.resume(tensors, folder / MOMENTS, max(0, kept.step - warmup))
        if self._critic is not None:
            self._critic.resume(folder, judged, kept.step)
        if self._moving_reference is not None and tensors["reference"] is not None:  # None if it did not move before
            self._moving_reference.load_state_dict(tensors["reference"])
        for name, stateful in self._state.items():
            stateful.load_state_dict(kept.state[name])
        self._steps = kept.step
        self.tokenizer = kept.tokenizer
        self._committed = committed
        torch.set_rng_state(tensors["torch"])
        if tensors["cuda"]:
            torch.cuda.set_rng_state_all(tensors["cuda"])
        random.setstate(kept.random)
        _set_numpy_state(kept.numpy)


def _columns(batch: TrainBatch, temperature: float) -> dict[str, Array]:
    """Return the columns that a loss receives, tokens of each group and rollout, and temperatures and supports."""
    columns: dict[str, Array] = {
        name: column for name in SCORED_COLUMNS if (column := getattr(batch, name)) is not None
    }
    trained = np.array([group.loss_tokens for group in batch.groups], np.int64)[batch.group_of_sequence()]
    columns["group_tokens"] = trained.repeat(batch.lengths())
    starts = batch.rollout_starts()
    if len(starts) < len(batch):
        branches, trained = np.diff(starts, append=len(batch)), np.add.reduceat(batch.completion_lengths(), starts)
        columns["rollout_tokens"] = trained.repeat(branches).repeat(batch.lengths())
    ends = np.cumsum([group.sequences for group in batch.groups])
    own = own_temperatures(batch.groups, np.split(batch.rollout_ids, ends[:-1]), batch.lengths(), temperature)
    if batch.support_ids is not None:
        check_support(batch.tokens, batch.loss_mask, batch.support_ids)
        columns[SUPPORT] = batch.support_ids
    return columns if own is None else columns | {TEMPERATURE: own}


def _logprobs(parts: Sequence[MicroBatch], tokens: int) -> NDArray[np.float32]:
    """Return [N] the log-probability of each token that trains, and 0 elsewhere, from the micro-batches of a batch."""
    found = np.zeros(tokens, np.float32)
    for part in parts:
        found[part.columns[PLACES].cpu().numpy()] = part.columns["proximal_logprobs"].float().cpu().numpy()
    return found


def _check_reference(reference: CausalModel | None, model: Trainable) -> None:
    """Check that the reference can be updated with the weights of the model."""
    if reference is None:
        raise InvalidConfig("reference_updates: expected with a reference, got none")
    if is_shared(bare(model)):
        raise InvalidConfig("reference_updates: expected a model that every rank has whole, got one in parts (FSDP2)")
    problem = "the reference, which is to be updated, does not fit the model"
    check_weights(specs_of(bare(model).state_dict()), specs_of(reference.state_dict()), problem)


def _checked(name: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return `state` as a dict, after checking that JSON can represent its numbers."""
    try:
        json.dumps(msgspec.to_builtins(state), allow_nan=False)  # msgspec would write null
    except ValueError:
        raise ValueError(
            f"state {name!r}: expected finite numbers, which a checkpoint can contain, got {state}"
        ) from None
    return dict(state)


def _numpy_state() -> tuple[list[int], int, int, float]:
    state: dict[str, Any] = np.random.get_state(legacy=False)  # noqa: NPY002 (users' code may draw from it)
    key: Array = state["state"]["key"]
    return key.tolist(), int(state["state"]["pos"]), int(state["has_gauss"]), float(state["gauss"])


def _set_numpy_state(kept: tuple[list[int], int, int, float]) -> None:
    key, position, has_gauss, gauss = kept
    np.random.set_state(("MT19937", np.array(key, np.uint32), position, has_gauss, gauss))  # noqa: NPY002 (as above)
