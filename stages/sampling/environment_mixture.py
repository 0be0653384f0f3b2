"""`EnvironmentMixture`: several environments by weight, as one; of any kinds.

A prompt belongs to an environment by its number alone, so that any number of workers, and a resumed run, draw the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from ..._pipeline.errors import InvalidConfig
from ..._schemas.tokenizer import check_tokenizers
from ..contracts.prompts import identity_of
from ..data.weighted_places import WeightedPlaces


@dataclass(frozen=True)
class EnvironmentMixture:
    """Environments by name, each with its share; the `make_env` of a source.

    Groups have the name as `data_source` in `meta`, so that the trainer's metrics have `reward/<name>`; numbers of an
    environment are `env/<name>/…`.

    >>> class Coin:
    ...     async def drive(self, task, client): ...
    >>> EnvironmentMixture({"coin": (Coin, 3), "other": (Coin, 1)}).places.at(2)
    (1, 0)

    Raises:
        InvalidConfig: there are none, or a weight is not above 0 or less than a thousandth of all.
        TokenizersDiffer: the chat formats of two data sets have different tokenizers.
    """

    environments: Mapping[str, tuple[Callable[[], Any], float]]
    """What makes an environment, see `SourceEnv.make_env`, and the share of its prompts, in any unit."""

    def __post_init__(self) -> None:
        """Check the environments."""
        for name, each in self.environments.items():
            match each:
                case (make_env, _) if callable(make_env):
                    continue
            raise InvalidConfig(f"EnvironmentMixture.environments[{name!r}]: expected (make_env, weight), got {each!r}")
        _ = self.places  # checks the weights
        check_tokenizers({name: found for name, found in self._tokenizers.items() if found is not None})

    @property
    def places(self) -> WeightedPlaces:
        """Return the environment of each number."""
        weights = {name: weight for name, (_, weight) in self.environments.items()}
        return WeightedPlaces.of("EnvironmentMixture.environments", weights)

    @property
    def _tokenizers(self) -> dict[str, Any]:
        return {name: getattr(make_env, "tokenizer", None) for name, (make_env, _) in self.environments.items()}

    @property
    def tokenizer(self) -> Any:
        """Return the tokenizer of the first data set with a chat format; None without one."""
        return next((found for found in self._tokenizers.values() if found is not None), None)

    def identity(self) -> dict[str, Any]:
        """Return the identity of the data sets, and of the places of all environments in a block."""
        found = {name: identity_of(make_env) for name, (make_env, _) in self.environments.items()}
        return {"kind": "environments", "environments": found, "places": self.places.counts}

    def __call__(self) -> Self:
        """Return it: the environments are made one by one."""
        return self
