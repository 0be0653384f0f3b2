"""Rows of a batch: the request of each, and its completion so far. Knows no model and no other row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..._schemas import Array
from ..contracts.sampling_params import SamplingParams
from ..tokenizers.stop_strings import StopStrings
from .torch_draw import uniforms


def _never() -> bool:
    return False


class SamplingRequest(NamedTuple):
    """One row to sample."""

    prompt: NDArray[np.int32]
    """Token ids, at least one."""
    sampling: SamplingParams
    stop: Callable[[], StopStrings] | None = None
    """Makes the search for the stop strings, if there are any; once for each time that the row is sampled."""
    cancelled: Callable[[], bool] = _never
    """Returns whether no caller waits for the row any more."""


@dataclass(slots=True, eq=False)
class SampledRow:
    """A row while it is sampled, then its completion."""

    request: SamplingRequest
    seed: int = 0
    """Of the row's own random numbers."""
    stop: StopStrings | None = field(init=False)
    random: Iterator[float] = field(init=False)
    """The random numbers of draws on a CPU."""
    _noise: torch.Generator | None = field(default=None, init=False)
    tokens: list[int] = field(default_factory=list, init=False)
    logprobs: list[float] = field(default_factory=list, init=False)
    """Under the tempered distribution before any restriction, or the model's own where greedy."""
    versions: list[int] = field(default_factory=list, init=False)
    """Of the weights that sampled each token."""
    routes: list[Array] = field(default_factory=list, init=False)
    """Parts [n, L, E] of the experts of its tokens, if they are recorded; see `torch_routes`."""
    supports: list[Array] = field(default_factory=list, init=False)
    """[W] the tokens that each token was drawn from, if they are kept."""
    ended: bool = field(default=False, init=False)
    """True if the last token ends a completion, or completes a stop string."""
    done: bool = field(default=False, init=False)
    """True if no token follows."""

    def __post_init__(self) -> None:
        self.stop = None if self.request.stop is None else self.request.stop()
        self.random = uniforms(self.seed)

    def add(self, token: int, logprob: float, version: int, end_ids: frozenset[int]) -> None:
        """Add a token that was drawn, unless the row is done already; those of `end_ids` end it."""
        if self.done:
            return
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        ends = token in end_ids or token in self.request.sampling.stop_ids
        self.ended = ends or (self.stop is not None and self.stop.end_with(token))
        full = len(self.tokens) == self.request.sampling.max_completion_tokens
        self.done = self.ended or full or self.request.cancelled()

    def noise(self, device: torch.device) -> torch.Generator:
        """Return the generator of the row's noise, for draws on a device that is no CPU."""
        if self._noise is None:
            self._noise = torch.Generator(device).manual_seed(self.seed)
        return self._noise

    @property
    def cached(self) -> int:
        """Return the number of tokens with keys in the cache: all but the one drawn last."""
        return len(self.request.prompt) + len(self.tokens) - 1

    @property
    def content(self) -> NDArray[np.int32]:
        """Return the tokens of the prompt and of the completion so far."""
        return np.concatenate([self.request.prompt, np.array(self.tokens, np.int32)])
