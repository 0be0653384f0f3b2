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
from .sampling_params import SamplingParams
from .stop_strings import StopStrings
from .torch_draw import InverseDraw, draw_by_noise
from .torch_truncation import Restrictions

FINISHED_SHARE = 0.25
"""Share of finished rows above which a batch drops them: dropping copies the cache, keeping computes for nothing."""


class SamplingRequest(NamedTuple):
    """One row to sample."""

    prompt: NDArray[np.int32]
    """Token ids, at least one."""
    sampling: SamplingParams
    stop: StopStrings | None = None
    """Ends the completion at a stop string, if there are any; of this row alone."""


class SampledTokens(NamedTuple):
    """Completions of a batch of requests; B rows, M tokens of the longest completion."""

    tokens: NDArray[np.int32]
    """[B, M]; row b is valid up to lengths[b]."""
    logprobs: NDArray[np.float32]
    """[B, M] under the tempered distribution before any restriction, or the model's own where greedy."""
    lengths: NDArray[np.int64]
    """[B] length of each completion, its end-of-sequence token included."""
    ended: NDArray[np.bool_]
    """[B] true if the last token is the end-of-sequence token, or completes a stop string."""
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
        self._stops = {row: request.stop for row, request in enumerate(requests) if request.stop is not None}
        """Of rows that no stop string has ended yet."""
        self._last = np.array([request.sampling.max_completion_tokens for request in requests])
        """[B] index of the token that completes a stop string; the bound of the row where none does."""

    @torch.inference_mode()
    def step(self, version: int) -> SampledTokens | None:
        """Draw a token for each row, with weights of `version`; return all completions once the last has ended."""
        if self._rows is None:
            rows = self._rows = _Rows.of(self._requests, self._generator.device)
            logits = rows.read_prompts(self._model)
        else:
            rows = self._rows
            logits = rows.step(self._model, self._chosen)
        self._versions.append(version)
        chosen, logprob = rows.draw(logits, self._generator)
        self._drawn.append((rows.live, chosen, logprob))
        ended = (chosen == self._eos_id) | (rows.limits == len(self._versions))
        if self._stops:
            ended |= self._stopped(rows.live, chosen)
        self._chosen = rows.drop_finished(chosen, ended)
        return None if len(self._chosen) else self._sampled()

    def _stopped(self, live: Tensor, chosen: Tensor) -> Tensor:
        """Return [b] bool: rows whose text contains a stop string now."""
        for row, token in zip(live.tolist(), chosen.tolist(), strict=True):
            if row in self._stops and self._stops[row].end_with(token):
                self._last[row] = len(self._versions) - 1
                del self._stops[row]
        return torch.from_numpy(self._last < len(self._versions)).to(live.device)[live]

    def _sampled(self) -> SampledTokens:
        shape = len(self._requests), len(self._versions)
        tokens = torch.full(shape, self._eos_id, device=self._generator.device)
        logprobs = torch.zeros(shape, device=self._generator.device)
        for t, (rows, chosen, logprob) in enumerate(self._drawn):
            tokens[rows, t], logprobs[rows, t] = chosen, logprob
        return self._cut(tokens.to(torch.int32).cpu().numpy(), logprobs.cpu().numpy())

    def _cut(self, tokens: NDArray[np.int32], logprobs: NDArray[np.float32]) -> SampledTokens:
        """Cut each row after its first end-of-sequence token, after a stop string, or at its limit."""
        limits = np.array([request.sampling.max_completion_tokens for request in self._requests])
        ends = tokens == self._eos_id
        last = np.minimum(np.where(ends.any(axis=1), ends.argmax(axis=1), limits), self._last)
        versions = np.array(self._versions, np.int64)
        return SampledTokens(tokens, logprobs, np.minimum(last + 1, limits), last < limits, versions)


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
    greedy: Tensor
    """[b] bool, of rows that take the most probable token."""
    finished: Tensor
    """[b] bool."""
    prompts: Sequence[NDArray[np.int32]]
    """Of all requests."""
    restrictions: Restrictions | None
    """None where every row draws from the whole distribution."""
    generators: dict[int, torch.Generator]
    """Those of requests with a seed, by index of the request."""
    shared: bool
    """Whether any row is drawn with the engine's generator: greedy and seeded requests take no number of it, so that an
    evaluation between two batches changes neither."""
    inverse: InverseDraw = field(default_factory=InverseDraw)
    visible: Tensor = field(init=False)
    """[b, P + A] bool: keys that a row may see, without its left padding."""
    position: Tensor = field(init=False)
    """[b, 1] int64 position of the next token."""
    cache: Cache = field(init=False)

    @classmethod
    def of(cls, requests: Sequence[SamplingRequest], device: torch.device) -> _Rows:
        samplings = [request.sampling for request in requests]
        temperature = torch.tensor([sampling.logprob_temperature for sampling in samplings], device=device)
        return cls(
            max_limit=max(sampling.max_completion_tokens for sampling in samplings),
            live=torch.arange(len(requests), device=device),
            limits=torch.tensor([sampling.max_completion_tokens for sampling in samplings], device=device),
            inverse_temperature=1.0 / temperature[:, None],
            greedy=torch.tensor([sampling.greedy for sampling in samplings], device=device),
            finished=torch.zeros(len(requests), dtype=torch.bool, device=device),
            prompts=[request.prompt for request in requests],
            restrictions=Restrictions.of(samplings, device),
            generators={
                row: torch.Generator(device).manual_seed(sampling.seed)
                for row, sampling in enumerate(samplings)
                if sampling.seed is not None
            },
            shared=any(not sampling.greedy and sampling.seed is None for sampling in samplings),
        )

    def read_prompts(self, model: CausalModel) -> Tensor:
        """Read each different prompt once, then copy the cache for every row. Return logits [b, V]."""
        tokens, mask, owner = (torch.from_numpy(array).to(self.live.device) for array in _left_padded(self.prompts))
        self.cache = model.new_cache(len(tokens), mask.shape[1] + self.max_limit)
        logits = model(tokens, positions=positions_of(mask), attend=Attention.causal(mask), cache=self.cache)[:, -1]
        self.cache.keep(owner)
        self.position = mask.sum(dim=1, keepdim=True)[owner]
        self.visible = torch.nn.functional.pad(mask[owner], (0, self.max_limit), value=True)
        return logits[owner]

    def draw(self, logits: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return one token for each row and its log-probability, [b] each."""
        logits = logits.float()
        tempered = logits * self.inverse_temperature
        if self.restrictions is None:
            chosen, normalizer = self._drawn(tempered, generator)
        else:
            chosen, _ = self._drawn(self.restrictions.scores(logits, self.inverse_temperature, self.prompts), generator)
            normalizer = tempered.logsumexp(dim=-1)
            self.restrictions.add(chosen)
        return chosen, (tempered.gather(1, chosen[:, None])[:, 0] - normalizer).float()

    def _drawn(self, scores: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return tokens [b], and the logarithm of the sum of exp(scores), [b]."""
        if bool(self.greedy.all()):
            return scores.argmax(dim=-1), scores.logsumexp(dim=-1)
        if scores.device.type == "cpu":
            chosen, normalizer = self.inverse(scores, self._uniform(generator))
        else:
            normalizer = scores.logsumexp(dim=-1)
            chosen = draw_by_noise(scores, self._exponential(scores, generator))
        if bool(self.greedy.any()):
            chosen = torch.where(self.greedy, scores.argmax(dim=-1), chosen)
        return chosen, normalizer

    def _uniform(self, generator: torch.Generator) -> Tensor:
        """Return random numbers [b], of a row's own generator where its request has a seed."""
        count, dtype = len(self.live), torch.float64
        uniform = (
            torch.rand(count, dtype=dtype, generator=generator) if self.shared else torch.zeros(count, dtype=dtype)
        )
        if self.generators:
            for place, row in enumerate(self.live.tolist()):
                if row in self.generators:
                    uniform[place] = torch.rand((), dtype=dtype, generator=self.generators[row])
        return uniform

    def _exponential(self, like: Tensor, generator: torch.Generator) -> Tensor:
        """Return noise [b, V], of a row's own generator where its request has a seed."""
        exponential = torch.empty_like(like).exponential_(generator=generator) if self.shared else torch.ones_like(like)
        if self.generators:
            for place, row in enumerate(self.live.tolist()):
                if row in self.generators:
                    exponential[place].exponential_(generator=self.generators[row])
        return exponential

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
        for name in ("live", "limits", "inverse_temperature", "greedy", "finished", "visible", "position"):
            setattr(self, name, getattr(self, name)[stay])
        if self.restrictions is not None:
            self.restrictions.keep(stay)
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
