"""Completions sampled from a torch model: many requests as one batch, a cache of keys and values, log-probabilities.

Equal prompts, as those of a group, are read once. The weights may change between two tokens; the caller passes their
version. Knows the model only by `CausalModel`, and nothing about the source of the weights.

Axes: B rows of a batch, b rows still being sampled, P tokens of the longest prompt, A of the largest bound,
M of the longest completion, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..training.attention import Attention
from ..training.causal_model import Cache, CausalModel, positions_of

FINISHED_SHARE = 0.25
"""Share of finished rows above which a batch drops them: dropping copies the cache, keeping computes for nothing."""


class SamplingRequest(NamedTuple):
    """One row to sample."""

    prompt: NDArray[np.int32]
    """Token ids, at least one."""
    max_completion_tokens: int
    temperature: float = 1.0
    greedy: bool = False


class SampledTokens(NamedTuple):
    """Completions of a batch of requests; B rows, M tokens of the longest completion."""

    tokens: NDArray[np.int32]
    """[B, M]; row b is valid up to lengths[b]."""
    logprobs: NDArray[np.float32]
    """[B, M] under the tempered distribution, or the model's own where greedy."""
    lengths: NDArray[np.int64]
    """[B] length of each completion, its end-of-sequence token included."""
    ended: NDArray[np.bool_]
    """[B] true if the last token is the end-of-sequence token."""
    versions: NDArray[np.int64]
    """[M] version of the weights that sampled the tokens of each position."""


class SamplingBatch:
    """Completions that are being sampled, one pass of the model after the other; the weights may change in between."""

    def __init__(
        self, model: CausalModel, requests: Sequence[SamplingRequest], *, eos_id: int, generator: torch.Generator
    ) -> None:
        """Prepare a batch, without any computation.

        Args:
            model: on any device, in evaluation mode.
            requests: at least one.
            eos_id: the token that ends a completion.
            generator: on the model's device.
        """
        self._model = model
        self._requests = requests
        self._eos_id = eos_id
        self._generator = generator
        self._rows: _Rows | None = None
        """None before the first pass."""
        self._chosen = torch.empty(0)
        """[b] the tokens drawn last."""
        self._drawn: list[tuple[Tensor, Tensor, Tensor]] = []
        """For each position [b]: rows, tokens, log-probabilities."""
        self._versions: list[int] = []

    @torch.inference_mode()
    def step(self, version: int) -> SampledTokens | None:
        """Draw a token for each row, with weights of `version`; return all completions once the last has ended."""
        if self._rows is None:
            rows = self._rows = _Rows.of(self._requests, self._generator.device)
            logits = rows.read_prompts(self._model, [request.prompt for request in self._requests])
        else:
            rows = self._rows
            logits = rows.step(self._model, self._chosen)
        self._versions.append(version)
        chosen, logprob = rows.draw(logits, self._generator)
        self._drawn.append((rows.live, chosen, logprob))
        self._chosen = rows.drop_finished(chosen, (chosen == self._eos_id) | (rows.limits == len(self._versions)))
        return None if len(self._chosen) else self._sampled()

    def _sampled(self) -> SampledTokens:
        shape = len(self._requests), len(self._versions)
        tokens = torch.full(shape, self._eos_id, device=self._generator.device)
        logprobs = torch.zeros(shape, device=self._generator.device)
        for t, (rows, chosen, logprob) in enumerate(self._drawn):
            tokens[rows, t], logprobs[rows, t] = chosen, logprob
        limits = np.array([request.max_completion_tokens for request in self._requests])
        return _cut(tokens.to(torch.int32).cpu().numpy(), logprobs.cpu().numpy(), self._versions, limits, self._eos_id)


def _cut(
    tokens: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    versions: Sequence[int],
    limits: NDArray[np.int64],
    eos_id: int,
) -> SampledTokens:
    """Cut each row after its first end-of-sequence token, or at its limit."""
    ends = tokens == eos_id
    first = np.where(ends.any(axis=1), ends.argmax(axis=1), limits)
    return SampledTokens(tokens, logprobs, np.minimum(first + 1, limits), first < limits, np.array(versions, np.int64))


@dataclass(slots=True)
class _Rows:
    """The rows still being sampled, and those that finished and were not dropped yet."""

    max_limit: int
    """A: the largest of `limits`."""
    live: Tensor
    """[b] int64 index of the request of each row."""
    limits: Tensor
    """[b] int64 bound on the tokens of each row."""
    inverse_temperature: Tensor
    """[b, 1]."""
    noise: Tensor
    """[b, 1] 1 where a row is drawn, 0 where it is greedy."""
    finished: Tensor
    """[b] bool."""
    visible: Tensor = field(init=False)
    """[b, P + A] bool: keys that a row may see, without its left padding."""
    position: Tensor = field(init=False)
    """[b, 1] int64 position of the next token."""
    cache: Cache = field(init=False)

    @classmethod
    def of(cls, requests: Sequence[SamplingRequest], device: torch.device) -> _Rows:
        greedy = torch.tensor([request.greedy for request in requests], device=device)[:, None]
        temperature = torch.tensor([request.temperature for request in requests], device=device)[:, None]
        return cls(
            max_limit=max(request.max_completion_tokens for request in requests),
            live=torch.arange(len(requests), device=device),
            limits=torch.tensor([request.max_completion_tokens for request in requests], device=device),
            inverse_temperature=torch.where(greedy, 1.0, 1.0 / temperature),
            noise=(~greedy).float(),
            finished=torch.zeros(len(requests), dtype=torch.bool, device=device),
        )

    def read_prompts(self, model: CausalModel, prompts: Sequence[NDArray[np.int32]]) -> Tensor:
        """Read each different prompt once, then copy the cache for every row. Return logits [b, V]."""
        tokens, mask, owner = (torch.from_numpy(array).to(self.live.device) for array in _left_padded(prompts))
        self.cache = model.new_cache(len(tokens), mask.shape[1] + self.max_limit)
        logits = model(tokens, positions=positions_of(mask), attend=Attention.causal(mask), cache=self.cache)[:, -1]
        self.cache.keep(owner)
        self.position = mask.sum(dim=1, keepdim=True)[owner]
        self.visible = torch.nn.functional.pad(mask[owner], (0, self.max_limit), value=True)
        return logits[owner]

    def draw(self, logits: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return one token for each row and its log-probability, [b] each, drawn by the Gumbel trick."""
        logprobs = torch.log_softmax(logits.float() * self.inverse_temperature, dim=-1)
        gumbel = -torch.empty_like(logprobs).exponential_(generator=generator).log_()
        chosen = (logprobs + gumbel * self.noise).argmax(dim=-1, keepdim=True)
        return chosen[:, 0], logprobs.gather(1, chosen)[:, 0]

    def drop_finished(self, chosen: Tensor, ended: Tensor) -> Tensor:
        """Mark rows that `ended` [b]; drop them once there are enough. Return `chosen` of the rows that stay."""
        self.finished |= ended
        count = int(self.finished.sum())
        if count == len(self.finished):
            return chosen[:0]
        if count <= FINISHED_SHARE * len(self.finished):
            return chosen
        stay = (~self.finished).nonzero()[:, 0]
        self.cache.keep(stay)
        for name in ("live", "limits", "inverse_temperature", "noise", "finished", "visible", "position"):
            setattr(self, name, getattr(self, name)[stay])
        return chosen[stay]

    def step(self, model: CausalModel, chosen: Tensor) -> Tensor:
        """Feed one token for each row. Return logits [b, V]."""
        attend = Attention.causal(self.visible[:, : self.cache.length + 1], tokens=1)
        logits = model(chosen[:, None], positions=self.position, attend=attend, cache=self.cache)[:, 0]
        self.position = self.position + 1
        return logits


def _left_padded(
    prompts: Sequence[NDArray[np.int32]],
) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64]]:
    """Return tokens and mask [U, P] of the different prompts, left-padded, and the index of each prompt in them [B]."""
    first: dict[bytes, int] = {}
    owner = [first.setdefault(prompt.tobytes(), len(first)) for prompt in prompts]
    unique = [np.frombuffer(key, np.int32) for key in first]
    lengths = np.array([len(prompt) for prompt in unique])
    mask = np.arange(lengths.max()) >= (lengths.max() - lengths)[:, None]
    tokens = np.zeros(mask.shape, np.int64)
    tokens[mask] = np.concatenate(unique)
    return tokens, mask, np.array(owner)
