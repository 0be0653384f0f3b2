"""Completions sampled from a torch model: many rows as one batch; rows join and leave between two tokens.

Equal prompts, as those of a group, are read once. Each row draws with random numbers of its own, unchanged by its
neighbours. Rows that are done leave the cache together, because leaving copies it. The weights may change between two
tokens; the caller passes their version. Knows the model only by `CausalModel`, and not the source of the weights.

Axes: b rows of the cache, U different prompts, P tokens of the longest one, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..._pipeline.errors import LogitsNotFinite
from ..._schemas import Array
from ..contracts.attention import Attention
from ..contracts.autocast import computing_in
from ..contracts.causal_model import Cache, CausalModel, JoinableCache, packs, positions_of
from ..contracts.support import restricted
from .torch_draw import InverseDraw, draw_by_noise
from .torch_routes import RouteRecorder
from .torch_rows import SampledRow
from .torch_truncation import Restrictions

DONE_SHARE = 0.25
"""Rows that are done leave the cache above this share: leaving copies it, staying wastes computation."""


class SampledRows(NamedTuple):
    """Rows that are sampled, or that will join those that are."""

    rows: list[SampledRow]
    """[b] in the order of the cache."""
    cache: Any
    chosen: Tensor
    """[b] int64, the tokens drawn last, not in the cache yet."""

    def live(self) -> SampledRows:
        """Return those that are not done; the cache keeps no others."""
        places = [place for place, row in enumerate(self.rows) if not row.done]
        if len(places) == len(self.rows):
            return self
        kept = torch.tensor(places, dtype=torch.int64, device=self.chosen.device)
        if places:
            self.cache.keep(kept)
        return SampledRows([self.rows[place] for place in places], self.cache, self.chosen[kept])


class SamplingBatch:
    """Rows that are being sampled, one pass of the model after the other."""

    def __init__(
        self,
        model: CausalModel,
        *,
        end_ids: frozenset[int],
        device: torch.device,
        autocast: torch.dtype | None = None,
        recorder: RouteRecorder | None = None,
    ) -> None:
        """Begin without rows.

        Args:
            model: on `device`, in evaluation mode.
            end_ids: the tokens that end a completion, beside those of a request.
            device: where it computes.
            autocast: the dtype of the model's safe operations; None for that of its parameters.
            recorder: records the experts of each token; None for a model without, or without a record.
        """
        self._model = model
        self._end_ids = end_ids
        self._device = device
        self._autocast = autocast
        self._recorder = recorder
        self._inverse = InverseDraw()
        self._sampled = SampledRows([], None, torch.empty(0, dtype=torch.int64, device=device))
        """Also rows that are done and did not leave yet."""
        self._columns: _Columns
        """Of these rows."""
        self._done: list[SampledRow] = []
        """Rows that `take_done` did not return yet."""

    @property
    def live(self) -> list[SampledRow]:
        """Return the rows that are not done."""
        return [row for row in self._sampled.rows if not row.done]

    @property
    def joinable(self) -> bool:
        """Return whether rows may join now."""
        return isinstance(self._sampled.cache, JoinableCache) or not self.live

    @property
    def has_done(self) -> bool:
        """Return whether `take_done` returns any row."""
        return bool(self._done)

    def take_done(self) -> list[SampledRow]:
        """Return the rows that are done, each once, in the order of their ends."""
        done, self._done = self._done, []
        return done

    @torch.inference_mode()
    def read(self, rows: list[SampledRow], version: int) -> SampledRows:
        """Read each different prompt of `rows` once, and draw the first token of each, with weights of `version`."""
        prompts, owner = _different([row.request.prompt for row in rows])
        longest = max(row.request.sampling.max_completion_tokens for row in rows)
        parts, order = [np.arange(len(prompts))], np.arange(len(prompts))
        if not packs(self._model):  # padding on the left would reach the states
            parts = _by_length(prompts)
            order = np.argsort(np.concatenate(parts))
        caches, logits, routes = zip(
            *[self._prompts([prompts[at] for at in part], longest) for part in parts], strict=True
        )
        cache = caches[0]
        for other in caches[1:]:
            cache.join(other)
        read = list(itertools.chain.from_iterable(routes))
        for row, prompt in zip(rows, order[owner].tolist(), strict=True):
            row.routes += read[prompt]
        chosen = torch.from_numpy(order[owner]).to(self._device)
        cache.keep(chosen)
        columns = _Columns(rows, cache.length, self._device)
        return SampledRows(rows, cache, self._draw(rows, columns, torch.cat(logits)[chosen], version))

    def _prompts(self, prompts: Sequence[NDArray[np.int32]], room: int) -> tuple[Any, Tensor, list[list[Array]]]:
        """Return the cache of prompts, with room for more tokens, the logits [U, V] behind each, and its routes."""
        tokens, mask = (torch.from_numpy(array).to(self._device) for array in _left_padded(prompts))
        cache: Cache = self._model.new_cache(len(tokens), mask.shape[1] + room)
        logits = self._logits(tokens, positions_of(mask), Attention.causal(mask), cache)
        routes = [[] for _ in prompts] if self._recorder is None else self._recorder.of_prompts(mask)
        return cache, logits, routes

    @torch.inference_mode()
    def join(self, read: SampledRows) -> None:
        """Add rows that were `read` to those that are being sampled; rows that are done leave."""
        self._done += [row for row in read.rows if row.done]
        joining = read.live()
        if not joining.rows:
            return
        staying = self._sampled.live()
        if staying.rows:
            staying.cache.join(joining.cache)
            chosen = torch.cat([staying.chosen, joining.chosen])
            joining = SampledRows([*staying.rows, *joining.rows], staying.cache, chosen)
        self._align(joining)

    @torch.inference_mode()
    def step(self, version: int) -> None:
        """Draw the next token of each row, with weights of `version`."""
        (rows, cache, chosen), columns, live = self._sampled, self._columns, self.live
        seen = torch.arange(cache.length + 1, device=chosen.device) >= columns.padding
        attend = Attention.causal(seen, tokens=1)
        logits = self._logits(chosen[:, None], columns.position, attend, cache)
        if self._recorder is not None:
            self._recorder.keep_tokens(rows, [row.done for row in rows])
        columns.position = columns.position + columns.moves
        self._sampled = SampledRows(rows, cache, self._draw(rows, columns, logits, version))
        self._done += [row for row in live if row.done]
        done = [place for place, row in enumerate(rows) if row.done]
        if len(done) > DONE_SHARE * len(rows):
            self._align(self._sampled.live())
        elif done:
            columns.moves[done] = 0

    def _logits(self, tokens: Tensor, positions: Tensor, attend: Attention, cache: Cache) -> Tensor:
        """Return the logits [b, V] of the token that follows the last of `tokens` in each row."""
        recording = nullcontext() if self._recorder is None else self._recorder.recording()
        with computing_in(self._autocast, tokens.device), recording:
            return self._model(tokens, positions=positions, attend=attend, cache=cache)[:, -1]

    def _align(self, live: SampledRows) -> None:
        """Sample `live` from now on; cut the padding that all of them share."""
        self._sampled = live
        if not live.rows:
            return
        padding = live.cache.length - max(row.cached for row in live.rows)
        if padding > 0 and isinstance(live.cache, JoinableCache):
            live.cache.cut(padding)
        self._columns = _Columns(live.rows, live.cache.length, live.chosen.device)

    # -- draws ---------------------------------------------------------------------------------------------------------

    def _draw(self, rows: Sequence[SampledRow], columns: _Columns, logits: Tensor, version: int) -> Tensor:
        """Draw a token of each row [b] from `logits` [b, V], and add it to the row with its log-probability.

        Raises:
            LogitsNotFinite: some of them are NaN, +inf, or -inf for every token.
        """
        logits = logits.float()
        tempered = logits * columns.inverse_temperature
        support = None
        if (restrictions := columns.restrictions) is None:
            chosen, normalizer = self._drawn(rows, columns, tempered)
        else:
            contents = (row.content for row in rows)
            scores = restrictions.scores(logits, columns.inverse_temperature, contents)
            support = restrictions.supports(scores)
            chosen, _ = self._drawn(rows, columns, scores)
            normalizer = (tempered if support is None else restricted(tempered.clone(), support)).logsumexp(dim=-1)
            restrictions.add(chosen)
        logprobs = (tempered.gather(1, chosen[:, None])[:, 0] - normalizer).float()
        # One copy from the device; float64 holds every token id, and every float32, exactly.
        drawn = torch.stack((chosen.double(), logprobs.double())).tolist()
        for row, token, logprob in zip(rows, *drawn, strict=True):
            if not math.isfinite(logprob) and not row.done:
                raise LogitsNotFinite(
                    f"expected finite logits of the model, got a token with log-probability {logprob} after "
                    f"{len(row.request.prompt)} tokens of a prompt and {len(row.tokens)} of a completion, with weights "
                    f"of version {version}: the weights are damaged, training diverged, or the model overflows in its "
                    f"dtype (float16 does beyond 65504)"
                )
            row.add(int(token), logprob, version, self._end_ids)
        if support is not None:
            _keep(rows, support)
        return chosen

    def _drawn(self, rows: Sequence[SampledRow], columns: _Columns, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens [b], and the logarithm of the sum of exp(scores), [b]."""
        if columns.all_greedy:
            return scores.argmax(dim=-1), scores.logsumexp(dim=-1)
        if scores.device.type == "cpu":
            uniform = [next(row.random) for row in rows]
            chosen, normalizer = self._inverse(scores, torch.tensor(uniform, dtype=torch.float64))
        else:
            normalizer = scores.logsumexp(dim=-1)
            chosen = draw_by_noise(scores, _exponential(rows, scores))
        if columns.any_greedy:
            chosen = torch.where(columns.greedy, scores.argmax(dim=-1), chosen)
        return chosen, normalizer


class _Columns:
    """The parameters of the rows of a batch as tensors; none of the rows is done."""

    def __init__(self, rows: Sequence[SampledRow], length: int, device: torch.device) -> None:
        """Compute them for rows of a cache of `length` tokens."""
        samplings = [row.request.sampling for row in rows]
        greedy = [sampling.greedy for sampling in samplings]
        self.all_greedy, self.any_greedy = all(greedy), any(greedy)
        self.greedy = torch.tensor(greedy, device=device)
        """[b] bool, of rows that take the most probable token."""
        temperature = torch.tensor([sampling.logprob_temperature for sampling in samplings], device=device)
        self.inverse_temperature = 1.0 / temperature[:, None]
        """[b, 1]."""
        self.restrictions = Restrictions.of(samplings, device)
        """None if every row draws from the whole distribution."""
        self.position = torch.tensor([[row.cached] for row in rows], device=device)
        """[b, 1] int64 position of the next token."""
        self.padding = length - self.position
        """[b, 1] int64 number of keys at the left of the cache that the row must not see."""
        self.moves = torch.ones_like(self.position)
        """[b, 1] int64; 0 once the row is done, so that its position stays within the model's."""


def _keep(rows: Sequence[SampledRow], support: Tensor) -> None:
    """Store the support [b, W] of the tokens drawn last in the rows that keep theirs."""
    found = support.to(torch.int32).cpu().numpy()
    for row, ids in zip(rows, found, strict=True):
        width = row.request.sampling.support
        if width and len(row.supports) < len(row.tokens):
            own = np.full(width, -1, np.int32)
            own[: len(ids)] = ids[:width]
            row.supports.append(own)


def _exponential(rows: Sequence[SampledRow], like: Tensor) -> Tensor:
    """Return noise [b, V], each row of its own generator; ones where it is greedy."""
    exponential = torch.ones_like(like)
    for noise, row in zip(exponential, rows, strict=True):
        if not row.request.sampling.greedy:
            noise.exponential_(generator=row.noise(like.device))
    return exponential


def _different(prompts: Sequence[NDArray[np.int32]]) -> tuple[list[NDArray[np.int32]], NDArray[np.int64]]:
    """Return the different prompts, U of them, and the index of each prompt in them [b]."""
    first: dict[bytes, int] = {}
    owner = [first.setdefault(prompt.tobytes(), len(first)) for prompt in prompts]
    return [np.frombuffer(key, np.int32) for key in first], np.array(owner)


def _by_length(prompts: Sequence[NDArray[np.int32]]) -> list[NDArray[np.int64]]:
    """Return the indices of the prompts of each length."""
    lengths = np.array([len(prompt) for prompt in prompts])
    return [np.flatnonzero(lengths == length) for length in np.unique(lengths)]


def _left_padded(prompts: Sequence[NDArray[np.int32]]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return tokens and mask [U, P] of prompts, left-padded.

    A prompt is padded with its own first token: token 0 may be the model's padding, with states that need not be
    finite.
    """
    lengths = np.array([len(prompt) for prompt in prompts])
    mask = np.arange(lengths.max()) >= (lengths.max() - lengths)[:, None]
    tokens = np.repeat([[prompt[0]] for prompt in prompts], mask.shape[1], axis=1).astype(np.int64)
    tokens[mask] = np.concatenate(prompts)
    return tokens, mask
