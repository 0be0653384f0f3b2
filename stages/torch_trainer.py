"""TorchTrainer: one optimizer step on a batch, in micro-batches, and checkpoints from which a run goes on bit for bit.

Knows a model (`CausalModel`), an optimizer and a loss. Knows no channel and no event loop: `step` blocks, SinkTrainer
runs it elsewhere. Nothing that is loaded is ever unpickled into code.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..pipeline.weights import check_weights, specs_of
from ..schemas import Array, GroupId, InvalidRecord, TrainBatch
from .causal_model import CausalModel, causal_attend, positions_of
from .checkpoint import write_checkpoint
from .losses import Loss, PPOClip, Scored, kl_k3, score_tokens

__all__ = ["OptimizerRecipe", "Stateful", "TorchTrainer"]

OptimizerRecipe: TypeAlias = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
"""Makes an optimizer of a model's parameters: `partial(torch.optim.AdamW, lr=1e-5)`."""

WEIGHTS, OPTIMIZER, STATE = "weights.safetensors", "optimizer.pt", "state.json"
"""The files of a checkpoint."""


class Stateful(Protocol):
    """Something beside the model that a run needs to go on: an AdvantageNormalizer's running statistics."""

    def state_dict(self) -> Mapping[str, Any]:
        """What to keep, as JSON values; floats come back bit for bit."""
        ...

    def load_state_dict(self, state: Any, /) -> None:
        """Go on from what `state_dict` gave."""
        ...


class _State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint holds besides tensors."""

    step: int
    committed: list[tuple[str, str, str]]
    """(env, instance id, repetitions as a bit mask in hexadecimal) of everything that was trained."""
    state: dict[str, dict[str, Any]]
    """Of each Stateful, by name."""
    random: tuple[int, tuple[int, ...], float | None]
    """Of Python's own generator."""
    numpy: tuple[list[int], int, int, float]
    """Of numpy's global generator: MT19937's key and position, and the normal deviate in store."""


class TorchTrainer:
    """Trains `model` on batches: `step(batch)` is one optimizer step. One thread at a time.

    Args:
        model: see `CausalModel`; trained in place, on the device its parameters are on.
        optimizer: makes the optimizer of the model's parameters.
        loss: see `losses`.
        max_grad_norm: gradients longer than this are scaled down to it; None leaves them.
        micro_batch_tokens: tokens of a micro-batch, before padding; a longer sequence stands alone. None takes the
            batch whole. Loss and gradients are the same, but for rounding.
        temperature: at which the policy samples; logits are divided by it, so that ratios to behavior_logprobs are 1
            on policy.
        state: what else a checkpoint keeps, by name: `{"normalizer": normalizer}`.
    """

    def __init__(
        self,
        model: CausalModel,
        *,
        optimizer: OptimizerRecipe,
        loss: Loss = PPOClip(),  # noqa: B008 (a frozen value)
        max_grad_norm: float | None = 1.0,
        micro_batch_tokens: int | None = None,
        temperature: float = 1.0,
        state: Mapping[str, Stateful] | None = None,
    ) -> None:
        self._model = model
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = optimizer(self._parameters)
        self._loss = loss
        self._max_grad_norm = math.inf if max_grad_norm is None else max_grad_norm
        self._micro_batch_tokens = micro_batch_tokens
        self._temperature = temperature
        self._state = dict(state or {})
        self._steps = 0
        self._committed: dict[GroupId, int] = {}

    @property
    def steps(self) -> int:
        """Optimizer steps done, those before a resumption included: the version of the weights."""
        return self._steps

    @property
    def committed(self) -> Mapping[GroupId, int]:
        """What the run that this one resumes had trained, as `Ledger.committed`."""
        return self._committed

    def weights(self) -> dict[str, Tensor]:
        """The model's tensors by name, as they are, not copies: what a publisher publishes."""
        return dict(self._model.state_dict())

    # -- training ------------------------------------------------------------------------------------------------------

    def step(self, batch: TrainBatch) -> dict[str, float]:
        """Train on `batch` once; returns metrics.

        `loss`, `entropy` (nats), `kl` (from the sampling policy to this one, k3), `ref_kl` (to the reference policy),
        `grad_norm` before clipping, `lr`, and what the loss reports. All are means over the tokens that train.

        Raises:
            InvalidRecord: the batch lacks a column that training needs.
            FloatingPointError: the gradient is not finite; the model is as it was.
        """
        if batch.advantages is None:
            raise InvalidRecord(
                "advantages: expected a column, got none: put an AdvantageNormalizer before the trainer"
            )
        self._model.train()
        self._optimizer.zero_grad(set_to_none=True)
        sums: dict[str, float] = {}
        for part in self._split(batch):
            for name, share in self._accumulate(part).items():
                sums[name] = sums.get(name, 0.0) + share
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm).item()
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"expected a finite gradient in step {self._steps + 1}, got norm {norm} with {sums}"
            )
        self._optimizer.step()
        self._steps += 1
        return sums | {"grad_norm": norm, "lr": float(self._optimizer.param_groups[0]["lr"])}

    def _split(self, batch: TrainBatch) -> list[TrainBatch]:
        return [batch] if self._micro_batch_tokens is None else batch.split(self._micro_batch_tokens)

    def _accumulate(self, part: TrainBatch) -> dict[str, float]:
        """Add the gradients of a micro-batch; returns its share of each metric."""
        columns = _columns_of(part, self._parameters[0].device)
        logits = self._model(
            columns.tokens, positions=positions_of(columns.present), attend=causal_attend(columns.present)
        )
        if self._temperature != 1:
            logits = logits / self._temperature
        logprobs, entropy = score_tokens(logits, columns.tokens)
        scored = Scored(
            logprobs,
            columns.mask,
            columns.advantages,
            columns.behavior_logprobs,
            part.loss_tokens,
            part.loss_sequences,
        )
        value, metrics = self._loss(scored)
        torch.autograd.backward(value)
        shares = {"loss": value, "entropy": scored.token_mean(entropy)} | dict(metrics)
        return {name: share.item() for name, share in (shares | _divergences(scored, columns.ref_logprobs)).items()}

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path, committed: Mapping[GroupId, int]) -> Path:
        """Write a checkpoint into `folder` and return its path: there whole or not at all. Blocks.

        Args:
            folder: holds one directory a checkpoint, named after its step.
            committed: what was trained so far: `Ledger.committed`.
        """
        return write_checkpoint(Path(folder), self._steps, lambda into: self._write(into, committed))

    def _write(self, folder: Path, committed: Mapping[GroupId, int]) -> None:
        save_file(_unshared(self.weights()), folder / WEIGHTS)
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        torch.save(
            {"optimizer": self._optimizer.state_dict(), "torch": torch.get_rng_state(), "cuda": cuda},
            folder / OPTIMIZER,
        )
        state = _State(
            step=self._steps,
            committed=[(env, instance_id, f"{mask:x}") for (env, instance_id), mask in committed.items()],
            state={name: dict(kept.state_dict()) for name, kept in self._state.items()},
            random=random.getstate(),
            numpy=_numpy_state(),
        )
        (folder / STATE).write_bytes(msgspec.json.encode(state))

    def resume(self, checkpoint: str | Path) -> None:
        """Go on from a checkpoint: weights, optimizer, random generators, every Stateful, and the committed ids.

        The next steps on the same batches are bit for bit those of a run that was never interrupted, on the same
        machine with as many threads.

        Raises:
            WeightsMismatch: the checkpoint is of another model; lists every difference.
            ValueError: it keeps the state of other things than this trainer.
            OSError: it cannot be read.
        """
        folder = Path(checkpoint)
        device = self._parameters[0].device
        kept = msgspec.json.decode((folder / STATE).read_bytes(), type=_State)
        if kept.state.keys() != self._state.keys():
            raise ValueError(f"expected a checkpoint with state {sorted(self._state)}, got {sorted(kept.state)}")
        weights = load_file(folder / WEIGHTS, device=str(device))
        check_weights(specs_of(self.weights()), specs_of(weights), f"weights of {folder} do not fit the model")
        tensors = torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True)
        self._model.load_state_dict(weights)
        self._optimizer.load_state_dict(tensors["optimizer"])
        for name, stateful in self._state.items():
            stateful.load_state_dict(kept.state[name])
        self._steps = kept.step
        self._committed = {GroupId(env, instance_id): int(mask, 16) for env, instance_id, mask in kept.committed}
        torch.set_rng_state(tensors["torch"])
        if tensors["cuda"]:
            torch.cuda.set_rng_state_all(tensors["cuda"])
        random.setstate(kept.random)
        _set_numpy_state(kept.numpy)


class _Columns(NamedTuple):
    """A micro-batch as tensors, right-padded."""

    tokens: Tensor
    """[B, L] int64."""
    present: Tensor
    """[B, L] bool, true on real tokens."""
    mask: Tensor
    """[B, L] bool, true on the tokens that train."""
    advantages: Tensor
    behavior_logprobs: Tensor | None
    ref_logprobs: Tensor | None


def _columns_of(part: TrainBatch, device: torch.device) -> _Columns:
    padded, present = part.padded()

    def column(name: str) -> Tensor:
        return torch.from_numpy(padded[name]).to(device)

    def optional(name: str) -> Tensor | None:
        return column(name) if name in padded else None

    return _Columns(
        tokens=column("tokens").long(),
        present=torch.from_numpy(present).to(device),
        mask=column("loss_mask"),
        advantages=column("advantages"),
        behavior_logprobs=optional("behavior_logprobs"),
        ref_logprobs=optional("ref_logprobs"),
    )


@torch.no_grad()
def _divergences(scored: Scored, ref_logprobs: Tensor | None) -> dict[str, Tensor]:
    """Shares of `kl`, estimated from samples of the sampling policy, and of `ref_kl`, of which they are too."""
    shares: dict[str, Tensor] = {}
    if scored.behavior_logprobs is not None:
        _, log_ratio = scored.ratio()
        shares["kl"] = scored.token_mean(kl_k3(log_ratio))
    if ref_logprobs is not None:
        difference = torch.where(scored.mask, ref_logprobs - scored.logprobs, 0.0)
        shares["ref_kl"] = scored.token_mean(kl_k3(difference))
    return shares


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
