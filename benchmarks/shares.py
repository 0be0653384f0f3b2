"""The work of ranks, by the size of a batch: tokens of the rank with the most, over the mean of all.

    python -m benchmarks.shares [--groups 32 64 128 256] [--ranks 2 4 8 16]

Groups of eight completions, of lognormal lengths with a mean of a thousand tokens and at most 8192: half of the
variance is that between prompts, because a hard prompt has eight long completions. Whole groups, which ranks are
given, are compared with single sequences. Each number is the mean of `--repeats` batches, beside the worst of them.
"""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from penstock._stages.training.shares import owners_of

from .report import command_line, print_table, write_json

__all__ = ["Unevenness", "completion_lengths", "measure", "unevenness"]

GROUP, LONGEST = 8, 8192

MEAN, SIGMA = 1000, 0.9
"""Mean of the lengths, and standard deviation of their logarithm."""


class Unevenness(NamedTuple):
    """Tokens of the rank with the most, over the mean of all, in several batches."""

    mean: float
    worst: float


def completion_lengths(groups: int, seed: int) -> NDArray[np.int64]:
    """Return [G, 8] lengths in tokens."""
    random = np.random.default_rng(seed)
    spread = SIGMA / np.sqrt(2)
    logarithms = random.normal(0, spread, (groups, 1)) + random.normal(0, spread, (groups, GROUP))
    lengths: NDArray[np.float64] = MEAN * np.exp(logarithms - SIGMA**2 / 2)
    return lengths.clip(1, LONGEST).astype(np.int64)


def unevenness(tokens: NDArray[np.int64], ranks: int) -> float:
    """Return the tokens of the rank with the most, over the mean of all; `tokens` are those of what is not divided."""
    loads = np.bincount(owners_of(tokens, ranks), weights=tokens, minlength=ranks)
    return float(loads.max() / loads.mean())


def measure(groups: int, ranks: int, repeats: int) -> tuple[Unevenness, Unevenness]:
    """Return the unevenness with whole groups, and with single sequences."""
    batches = [completion_lengths(groups, seed) for seed in range(repeats)]
    whole = [unevenness(lengths.sum(axis=1), ranks) for lengths in batches]
    single = [unevenness(lengths.ravel(), ranks) for lengths in batches]
    return Unevenness(float(np.mean(whole)), max(whole)), Unevenness(float(np.mean(single)), max(single))


def main() -> None:
    """Parse the command line, measure, and print the results."""
    parser = command_line(__doc__, seconds=None, repeats=100)
    parser.add_argument("--groups", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    options = parser.parse_args()
    found: dict[tuple[int, int], Any] = {
        (groups, ranks): measure(groups, ranks, options.repeats)
        for groups, ranks in product(options.groups, options.ranks)
    }
    rows = [
        [str(groups), str(ranks), *(f"{number:.3f}" for each in measured for number in each)]
        for (groups, ranks), measured in found.items()
    ]
    header = ("groups", "ranks", "whole groups", "worst", "sequences", "worst")
    print_table(Console(width=80), "tokens of the rank with the most, over the mean", header, rows)
    write_json(options.json, {"rows": [[*key, *measured] for key, measured in found.items()]})


if __name__ == "__main__":
    main()
