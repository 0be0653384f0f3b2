"""TopEntropyMask: only the tokens of the highest entropy train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from .choices import Flags, Floats, TokenChoice, check_share
from .masks import Mask
from .scored import Scored


@dataclass(frozen=True, slots=True)
class TopEntropyMask(Mask, TokenChoice):
    """Mask all tokens of the batch but the `share` of the highest entropy: `term * TopEntropyMask(0.2)`.

    Wang et al., "Beyond the 80/20 Rule" (arXiv:2506.01939): at few tokens an answer branches, and these have a high
    entropy. TRL's `top_entropy_quantile`: tokens from the quantile 1 − `share` on train. Masked tokens count in the
    denominator of a mean, as in TRL.

    Raises:
        InvalidConfig: a share outside (0, 1].
    """

    share: float = 0.2

    name: ClassVar[str] = "top_entropy"
    measurements: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_share(self.share)

    @property
    def choices(self) -> tuple[TokenChoice, ...]:
        """Return this rule; see `Mask`."""
        return (self,)

    def measured(self, scored: Scored, /) -> Tensor:
        """Return the entropy; see `TokenChoice`."""
        return scored.entropy[:, None]

    def choose(self, measured: Floats, /) -> Flags:
        """Return the tokens that train; see `TokenChoice`."""
        chosen: Flags = measured[:, 0] >= np.quantile(measured[:, 0], 1 - self.share)
        return chosen

    def masked(self, log_ratio: Tensor, scored: Scored, /) -> Tensor:  # noqa: ARG002 (it is of another policy)
        """Return the tokens that are left out; see `Mask`."""
        return ~scored.chosen_by(self)
