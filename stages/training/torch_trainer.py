"""TorchTrainer: one optimizer step on a batch, in micro-batches, and checkpoints from which a run goes on bit for bit.

Knows a model (`CausalModel`), an optimizer and a loss. Knows no channel and no event loop: `step` blocks, SinkTrainer
runs it elsewhere. Nothing that is loaded is ever unpickled into code.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..._pipeline.committed_prompts import CommittedPrompts, CommittedState
from ..._pipeline.policy.weight_specs import check_weights, specs_of
from ..._pipeline.resumption import Stateful
from ..._schemas import (
    Array,
    GroupId,
    InvalidRecord,
    TokenizerIdentity,
    TrainBatch,
    check_tokenizers,
    tokenizer_identity,
)
from ..._schemas.numbers import finite_number, whole_number
from ..losses import TOKENS_USED, Loss, Mean, Metric, PPOClip, Scored, check_used, diagnostics, merge
from .causal_model import CausalModel
from .checkpoint import write_checkpoint
from .micro_batches import MicroBatch, micro_batches, nothing
from .scoring import TEMPERATURE, Likelihood, check_temperature, likelihood, own_temperatures
from .step_clock import StepClock
from .torch_ranks import Ranks
from .torch_sharding import Trainable, accumulating, bare, gathered, is_shared, spread, spread_optimizer

__all__ = ["OptimizerRecipe", "TorchTrainer"]

OptimizerRecipe: TypeAlias = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
"""Makes an optimizer of a model's parameters: `partial(torch.optim.AdamW, lr=1e-5)`."""

WEIGHTS, OPTIMIZER, STATE = "weights.safetensors", "optimizer.pt", "state.json"
"""The files of a checkpoint."""

SCORED_COLUMNS = ("advantages", "behavior_logprobs", "ref_logprobs", "teacher_ids", "teacher_logprobs")
"""What a loss is told of tokens where a batch has it."""


class _State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint holds besides tensors."""

    step: int
    committed: CommittedState
    """Everything that was trained."""
    state: dict[str, dict[str, Any]]
    """Of each Stateful, by name."""
    random: tuple[int, tuple[int, ...], float | None]
    """Of Python's own generator."""
    numpy: tuple[list[int], int, int, float]
    """Of numpy's global generator: MT19937's key and position, and the normal deviate in store."""
    tokenizer: TokenizerIdentity | None = None
    """The one that the weights belong to, where it was told."""


class TorchTrainer:
    """Trains `model` on batches: `step(batch)` makes the next version of the weights. One thread at a time.

    Args:
        model: see `CausalModel`; trained in place, on the device its parameters are on. One that several ranks share,
            by DistributedDataParallel or `fully_shard`, is trained by a `RankedTrainer`.
        optimizer: makes the optimizer of the model's parameters.
        loss: what is minimised; see `losses`.
        max_grad_norm: gradients longer than this are scaled down to it; None leaves them.
        micro_batch_tokens: tokens of a micro-batch, padding included; a longer sequence stands in one of one row. None
            takes the batch whole. Loss and gradients are the same, but for rounding.
        temperature: at which the policy samples; logits are divided by it, so that ratios to behavior_logprobs are 1
            on policy. A group may say its own for each sequence, `meta["temperatures"]`, by repetition id.
        updates: optimizer updates on every batch, each on all of it. The weights before the first are the proximal
            policy.
        reference: a frozen model of the same vocabulary, which scores batches that bring no `ref_logprobs`.
        autocast: the dtype in which the model computes where that is safe, `torch.bfloat16`; its parameters, the loss
            and the optimizer stay float32. None computes everything in the model's own dtype. A head that computes in
            bfloat16 blurs every ratio by percents: have the model compute it with autocast off.
        compile: makes the function that is called in place of the model: `partial(torch.compile, dynamic=True)`.
        state: what else a checkpoint keeps, by name: `{"normalizer": normalizer}`.
        tokenizer: the model's, or its `TokenizerIdentity`: `pipeline.check()` holds it to those of sources and
            teachers, and a checkpoint keeps its identity.

    Raises:
        TypeError: nothing tells the vocabulary of `tokenizer`.
        ValueError: a number that makes no sense, another `autocast`, or parameters beside it that are not float32.
    """

    def __init__(
        self,
        model: Trainable,
        *,
        optimizer: OptimizerRecipe,
        loss: Loss = PPOClip(),  # noqa: B008 (a frozen value)
        max_grad_norm: float | None = 1.0,
        micro_batch_tokens: int | None = None,
        temperature: float = 1.0,
        updates: int = 1,
        reference: CausalModel | None = None,
        autocast: torch.dtype | None = None,
        compile: Callable[[Any], Callable[..., Tensor]] | None = None,  # noqa: A002 (torch's own word for it)
        state: Mapping[str, Stateful] | None = None,
        tokenizer: Any = None,
    ) -> None:
        self.tokenizer: TokenizerIdentity | None = None if tokenizer is None else tokenizer_identity(tokenizer)
        """Identity of the model's tokenizer, where it was told."""
        self._model = model
        self.ranks: Ranks | None = Ranks() if is_shared(model) else None
        """Those that train the model with this one."""
        self._forward = model if compile is None else compile(model)
        self._reference = None if reference is None else reference.train(mode=False)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if autocast is not None:
            _check_autocast(autocast, self._parameters)
        self._optimizer = optimizer(self._parameters)
        self._loss = loss
        self._max_grad_norm = math.inf if max_grad_norm is None else finite_number("max_grad_norm", max_grad_norm)
        self._micro_batch_tokens = (
            None if micro_batch_tokens is None else whole_number("micro_batch_tokens", micro_batch_tokens)
        )
        self._temperature = finite_number("temperature", temperature)
        self._updates = whole_number("updates", updates)
        self._autocast = autocast
        self._state = dict(state or {})
        self._steps = 0
        self._committed = CommittedPrompts()

    @property
    def steps(self) -> int:
        """Batches trained, those before a resumption included: the version of the weights."""
        return self._steps

    @property
    def committed(self) -> CommittedPrompts:
        """What the run that this one resumes had trained, as `Ledger.committed`."""
        return self._committed

    @property
    def state(self) -> Mapping[str, Stateful]:
        """What else a checkpoint keeps, by name; `pipeline.check()` looks at where it is gathered."""
        return self._state

    def weights(self) -> dict[str, Tensor]:
        """The model's tensors by name, as they are, not copies, unless they had to be gathered: what is published."""
        whole: dict[str, Tensor] = gathered(bare(self._model).state_dict())
        return whole

    # -- training ------------------------------------------------------------------------------------------------------

    def step(self, batch: TrainBatch) -> dict[str, float]:
        """Train on `batch`; returns metrics.

        `loss`, `grad_norm` before clipping, `lr`, what the loss reports, `losses.diagnostics`, and
        `timing_s/{prepare,forward,backward,optimizer}`. Of several updates they are means, or the extremes of all.

        Raises:
            InvalidRecord: the batch lacks what the loss needs, trains nothing, or was sampled at another temperature;
                the model is as it was before.
            FloatingPointError: the gradient is not finite; the model is as it was before the update.
        """
        if not batch.loss_tokens:
            raise InvalidRecord(
                "loss_mask: expected tokens that train, got a batch without: a step on it would move the weights by "
                "momentum and decay alone. A Batcher leaves such groups out"
            )
        check_temperature(batch.groups, self._temperature, "TorchTrainer")
        clock = StepClock(self._device)
        self._model.train()
        known = _known(batch, self._temperature)
        parts: list[MicroBatch | None] = [*micro_batches(batch, known, self._micro_batch_tokens, self._device)]
        if self.ranks is not None:
            parts += [None] * (self.ranks.most(len(parts)) - len(parts))
        clock.lap("prepare")
        metrics: dict[str, Metric] = {}
        for _ in range(self._updates):
            said = self._update(parts, batch, clock)
            merge(metrics, {name: metric.over(self._updates) for name, metric in said.items()})
        self._steps += 1
        rate = float(self._optimizer.param_groups[0]["lr"])
        found = {name: metric.value() for name, metric in metrics.items()}
        unused = {} if batch.teacher_ids is None else {TOKENS_USED: 0.0}  # a teacher whom no loss heeds is to be seen
        return unused | found | {"lr": rate} | clock.seconds()

    @property
    def _device(self) -> torch.device:
        return self._parameters[0].device

    def _update(self, parts: Sequence[MicroBatch | None], batch: TrainBatch, clock: StepClock) -> dict[str, Metric]:
        """One optimizer update on all of a batch; returns its metrics."""
        self._optimizer.zero_grad(set_to_none=True)
        metrics: dict[str, Metric] = {}
        for left, part in zip(reversed(range(len(parts))), parts, strict=True):
            with accumulating(self._model, last=not left):
                merge(metrics, self._accumulate(part, batch, clock))
        if self.ranks is not None:
            metrics = self.ranks.merged(metrics)
        check_used(metrics)
        norm: Tensor = gathered(torch.nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm))
        if not norm.isfinite():
            found = {name: metric.value() for name, metric in metrics.items()}
            raise FloatingPointError(
                f"expected a finite gradient in step {self._steps + 1}, got norm {norm.item()} with {found}"
            )
        self._optimizer.step()
        clock.lap("optimizer")
        return metrics | {"grad_norm": Mean(norm)}

    def _accumulate(self, part: MicroBatch | None, batch: TrainBatch, clock: StepClock) -> dict[str, Metric]:
        """Add the gradients of a micro-batch, of none where another rank has one more; returns its share of metrics."""
        if part is None:
            torch.autograd.backward(0 * likelihood(self._forward, nothing(self._device)).predicted.sum())
            return {}
        scored = self._scored(part, batch)
        value, said = self._loss(scored)
        clock.lap("forward")
        ranks = 1 if self.ranks is None else self.ranks.count
        torch.autograd.backward(ranks * value)  # they take the mean of their gradients, and the sum is wanted
        metrics = {**diagnostics(scored), **said, "loss": Mean(value.detach())}
        clock.lap("backward")
        return metrics

    def _scored(self, part: MicroBatch, batch: TrainBatch) -> Scored:
        """`part` as the policy scores it; what the reference and the proximal policy make of it is kept beside."""
        if self._reference is not None and "ref_logprobs" not in part.columns:
            with torch.no_grad():
                part.columns["ref_logprobs"] = self._likelihood(self._reference, part).logprobs
        predicted, logprobs = self._likelihood(self._forward, part)
        known = dict(part.columns)
        own = known.pop(TEMPERATURE, None)
        scored = Scored(
            predicted=predicted,
            logprobs=logprobs,
            tokens=part.targets,
            temperature=self._temperature if own is None else own[:, None],
            lengths=part.lengths,
            loss_tokens=batch.loss_tokens,
            loss_sequences=batch.loss_sequences,
            total_sequences=batch.total_sequences,
            **known,
        )
        part.columns.setdefault("proximal_logprobs", logprobs.detach())
        return scored

    def _likelihood(self, model: Callable[..., Tensor], part: MicroBatch) -> Likelihood:
        return likelihood(model, part, temperature=self._temperature, autocast=self._autocast)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def keep(self, state: Mapping[str, Stateful]) -> None:
        """Have checkpoints keep these too, by name, beside what was given as `state`."""
        self._state |= state

    def save(self, folder: str | Path, committed: Mapping[GroupId, int]) -> Path:
        """Write a checkpoint into `folder` and return its path: there whole or not at all. Blocks.

        Args:
            folder: holds one directory a checkpoint, named after its step.
            committed: what was trained so far: `Ledger.committed`.

        Raises:
            ValueError: something that is kept holds a number that is not finite.
            DiskFull, NotWritable, OutOfFileDescriptors: it cannot be written; the checkpoints before it are whole.
        """
        weights, optimizer = self.tensors()
        return write_checkpoint(
            Path(folder), self._steps, lambda into: self._write(into, committed, weights, optimizer)
        )

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Weights, and the optimizer's state, whole: what all ranks do together of `save`."""
        return self.weights(), gathered(self._optimizer.state_dict())

    def _write(
        self, folder: Path, committed: Mapping[GroupId, int], weights: dict[str, Tensor], optimizer: dict[str, Any]
    ) -> None:
        save_file(_unshared(weights), folder / WEIGHTS)
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        with (folder / OPTIMIZER).open("wb") as file:  # given a path, torch hides why it could not be written
            torch.save({"optimizer": optimizer, "torch": torch.get_rng_state(), "cuda": cuda}, file)
        state = _State(
            step=self._steps,
            committed=CommittedPrompts(committed).state,
            state={name: _checked(name, kept.state_dict()) for name, kept in self._state.items()},
            random=random.getstate(),
            numpy=_numpy_state(),
            tokenizer=self.tokenizer,
        )
        (folder / STATE).write_bytes(msgspec.json.encode(state))

    def resume(self, checkpoint: str | Path) -> None:
        """Go on from a checkpoint: weights, optimizer, random generators, every Stateful, and the committed ids.

        The next steps on the same batches are bit for bit those of a run that was never interrupted, on the same
        machine with as many threads.

        Raises:
            WeightsMismatch: the checkpoint is of another model; lists every difference.
            TokenizersDiffer: it is of a model with another tokenizer.
            ValueError: it keeps the state of other things than this trainer, or tells of a prompt twice.
            OSError: it cannot be read.
        """
        folder = Path(checkpoint)
        device = self._parameters[0].device
        kept = msgspec.json.decode((folder / STATE).read_bytes(), type=_State)
        committed = CommittedPrompts.of_state(kept.committed)
        leads = self.ranks is None or self.ranks.index == 0
        if leads and kept.state.keys() != self._state.keys():
            raise ValueError(f"expected a checkpoint with state {sorted(self._state)}, got {sorted(kept.state)}")
        if kept.tokenizer is not None and self.tokenizer is not None:
            check_tokenizers({str(folder): kept.tokenizer, "the trainer": self.tokenizer})
        weights = load_file(folder / WEIGHTS, device=str(device))
        check_weights(specs_of(self.weights()), specs_of(weights), f"weights of {folder} do not fit the model")
        tensors = torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True)
        model = bare(self._model)
        model.load_state_dict(spread(weights, model.state_dict()))
        self._optimizer.load_state_dict(spread_optimizer(tensors["optimizer"], self._parameters))
        for name, stateful in self._state.items():
            stateful.load_state_dict(kept.state[name])
        self._steps = kept.step
        self._committed = committed
        torch.set_rng_state(tensors["torch"])
        if tensors["cuda"]:
            torch.cuda.set_rng_state_all(tensors["cuda"])
        random.setstate(kept.random)
        _set_numpy_state(kept.numpy)


def _known(batch: TrainBatch, temperature: float) -> dict[str, Array]:
    """What the batch tells of its tokens: what a loss is told, and temperatures where it has some of its own."""
    known: dict[str, Array] = {name: column for name in SCORED_COLUMNS if (column := getattr(batch, name)) is not None}
    ends = np.cumsum([group.sequences for group in batch.groups])
    own = own_temperatures(batch.groups, np.split(batch.repetition_ids, ends[:-1]), temperature)
    return known if own is None else known | {TEMPERATURE: own.repeat(batch.lengths())}


def _check_autocast(autocast: torch.dtype, parameters: Iterable[torch.nn.Parameter]) -> None:
    if autocast != torch.bfloat16:
        raise ValueError(
            f"autocast: expected torch.bfloat16, got {autocast}: in float16 small gradients are 0, and float32 is None"
        )
    found = {parameter.dtype for parameter in parameters} - {torch.float32}
    if found:
        raise ValueError(
            f"expected parameters in float32 beside autocast, which casts a copy where that is safe, got "
            f"{', '.join(sorted(map(str, found)))}: make the model with model.float()"
        )


def _checked(name: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """`state` as JSON brings it back, which has no word for what is not finite."""
    if not _finite(state):
        raise ValueError(f"state {name!r}: expected finite numbers, which a checkpoint can hold, got {state}")
    return dict(state)


def _finite(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as safetensors takes them: contiguous, and each (tied ones too) in memory of its own."""
    seen: set[int] = set()
    unshared: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        unshared[name] = tensor.clone() if memory in seen else tensor.contiguous()
        seen.add(memory)
    return unshared


def _numpy_state() -> tuple[list[int], int, int, float]:
    state: dict[str, Any] = np.random.get_state(legacy=False)  # noqa: NPY002 (users' code may draw from it)
    key: Array = state["state"]["key"]
    return key.tolist(), int(state["state"]["pos"]), int(state["has_gauss"]), float(state["gauss"])


def _set_numpy_state(kept: tuple[list[int], int, int, float]) -> None:
    key, position, has_gauss, gauss = kept
    np.random.set_state(("MT19937", np.array(key, np.uint32), position, has_gauss, gauss))  # noqa: NPY002 (as above)
