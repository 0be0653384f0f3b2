"""`SamplingParams`: how the tokens of a completion are drawn, and where it ends.

Truncation (`top_k`, `top_p`, `min_p`) and `repetition_penalty` change the draw only. Log-probabilities are those of the
tempered distribution without them, because the trainer computes its own of that distribution: on policy every ratio is
1. With `keep_support` both are of the truncated distribution, over the tokens that it kept. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from ..._schemas.config import Config
from ..._schemas.errors import InvalidConfig
from ..._schemas.numbers import finite_number, whole_number

TEMPERATURES = "temperatures"
"""Key of a group's `meta` with the temperature of each sequence, or of each part of one, where they differ."""

COUNTS = {"max_completion_tokens": 1, "top_k": 1, "seed": 0}
"""The least value of each whole number."""

OFF = (-1, 0)
"""Values of `top_k` that mean all tokens, as vLLM and transformers have them."""

ZERO = {"min_p", "temperature"}
"""Numbers that may be 0."""


class SamplingParams(Config, frozen=True):
    """The parameters of sampling one completion."""

    max_completion_tokens: int = 512
    """Bound on a completion, its last token included."""
    temperature: float = 1.0
    """Divides the logits; 0 is `greedy`."""
    top_p: float = 1.0
    """Only the most probable tokens are drawn whose probabilities sum to this or just above; 1 for all."""
    top_k: int | None = None
    """Only so many of the most probable tokens are drawn; None for all, as -1 and 0."""
    min_p: float = 0.0
    """Only tokens are drawn with at least this share of the highest probability; 0 for all."""
    keep_support: bool = False
    """True to record the tokens that each token was drawn from, `top_k` at most, and to report log-probabilities of
    that distribution; `TorchTrainer` computes its own over the same tokens."""
    repetition_penalty: float = 1.0
    """Divides positive logits, and multiplies negative ones, of tokens that the prompt or the completion contains."""
    stop: tuple[str, ...] = ()
    """A completion ends after the token that completes one of these in its text."""
    stop_ids: tuple[int, ...] = ()
    """A completion ends after one of these tokens too. `SourceEnv` adds the `end_ids` of its tokenizer; a token that is
    none of these stays in the text that rewards read, as a stop string does."""
    greedy: bool = False
    """Take the most probable token, and ignore temperature and truncation; log-probabilities are at temperature 1."""
    seed: int | None = None
    """Makes a completion independent of other requests: the same prompt, weights and seed give the same tokens, as far
    as the model computes the same logits. Without it the engine's generator is used. `SourceEnv` derives a seed for
    each turn of each rollout from it; an engine, for each prompt of a call."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            InvalidConfig: naming the field.
        """
        if self.top_k in OFF and not isinstance(self.top_k, bool):
            self._set("top_k", None)
        for name, least in COUNTS.items():  # `normalize_counts` takes 0.2 ms, and a turn may have parameters of its own
            if (count := getattr(self, name)) is not None or name == "max_completion_tokens":
                self._set(name, whole_number(f"SamplingParams.{name}", count, least=least))
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            number = finite_number(f"SamplingParams.{name}", getattr(self, name), zero=name in ZERO)
            if number > 1 and name in {"top_p", "min_p"}:
                raise InvalidConfig(f"SamplingParams.{name}: expected at most 1, got {number}")
            self._set(name, number)
        if self.keep_support and self.top_k is None and not self.greedy:
            raise InvalidConfig(
                "SamplingParams.keep_support: expected top_k beside it, the tokens of a support at most, got none: set "
                "top_k, 64 for example, beside top_p or min_p"
            )
        if not self.temperature:
            self._set("greedy", True)
            self._set("temperature", 1.0)
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            raise InvalidConfig(
                f"SamplingParams.stop: expected a tuple of strings that are not empty, got {self.stop!r}"
            )
        self._set("stop", tuple(self.stop))
        self._set("stop_ids", _as_ids(self.stop_ids))

    def _set(self, name: str, value: object) -> None:
        msgspec.structs.force_setattr(self, name, value)

    @property
    def truncates(self) -> bool:
        """Return whether some tokens cannot be drawn."""
        return not self.greedy and (self.top_k is not None or self.top_p < 1 or self.min_p > 0)

    @property
    def support(self) -> int:
        """Return the tokens of a support that is kept at most, 0 for none."""
        return self.top_k if self.keep_support and not self.greedy and self.top_k is not None else 0

    @property
    def logprob_temperature(self) -> float:
        """Return the temperature of the returned log-probabilities: 1 for greedy."""
        return 1.0 if self.greedy else self.temperature

    def ending_at(self, ids: Iterable[int]) -> SamplingParams:
        """Return these parameters with `ids` among the tokens that end a completion."""
        ended = {*self.stop_ids, *ids}  # a copy is checked anew, which a call of an agent would do four times
        return self if len(ended) == len(self.stop_ids) else msgspec.structs.replace(self, stop_ids=sorted(ended))

    def bounded(self, tokens: int) -> SamplingParams:
        """Return these parameters with at most `tokens` tokens in a completion."""
        if tokens >= self.max_completion_tokens:
            return self
        return msgspec.structs.replace(self, max_completion_tokens=tokens)

    def seeded_by(self, seed: int | None) -> SamplingParams:
        """Return these parameters with `seed` where they have none."""
        return self if seed is None or self.seed is not None else msgspec.structs.replace(self, seed=seed)

    def seeded_for(self, *numbers: int) -> SamplingParams:
        """Return these parameters with a seed that depends on the seed and `numbers`; unchanged without a seed."""
        if self.seed is None:
            return self
        return msgspec.structs.replace(self, seed=as_seed([self.seed, *numbers]))


def _as_ids(ids: object) -> tuple[int, ...]:
    if isinstance(ids, Iterable) and not isinstance(ids, str):
        found = tuple(ids)
        if all(isinstance(each, int | np.integer) and not isinstance(each, bool) and each >= 0 for each in found):
            return tuple(map(int, found))
    raise InvalidConfig(f"SamplingParams.stop_ids: expected token ids, whole numbers of 0 or more, got {ids!r}")


def as_seed(numbers: list[int]) -> int:
    """Return a seed below 2**63 that depends on all of `numbers`."""
    (state,) = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    return int(state >> np.uint64(1))
