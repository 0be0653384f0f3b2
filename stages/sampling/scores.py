"""The metrics of an evaluation, of the n completions of each prompt: mean@n, pass@k and maj@n.

mean@n is the share of right completions. pass@k is the probability that at least one of k completions is right, by the
unbiased estimator of Chen et al. (2021, "Evaluating Large Language Models Trained on Code"), of n >= k completions.
maj@n is the share of prompts whose most frequent answer is right; of equally frequent ones it is their mean.
Knows no engine and no reward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from math import comb


def mean_at_n(right: Sequence[bool]) -> float:
    """Return the share of right completions.

    >>> mean_at_n([True, False])
    0.5
    """
    return sum(right) / len(right)


def pass_at_k(right: Sequence[bool], k: int) -> float:
    """Return the probability that at least one of `k` completions is right: 1 − C(n − c, k) / C(n, k).

    >>> pass_at_k([True, False, False], k=2)
    0.6666666666666667
    """
    n = len(right)
    return 1 - comb(n - sum(right), k) / comb(n, k)


def maj_at_n(right: Sequence[bool], answers: Sequence[Hashable | None]) -> float:
    """Return the probability that an answer drawn among the most frequent ones is right.

    It does not depend on the order of the completions. None is no answer; if all are None, the result is the share of
    right completions.

    >>> maj_at_n([True, False, False], ["4", "5", "5"])
    0.0
    >>> maj_at_n([True, False], ["4", "5"])
    0.5
    """
    votes = Counter(answer for answer in answers if answer is not None)
    most = max(votes.values(), default=0)
    return mean_at_n([each for each, answer in zip(right, answers, strict=True) if votes[answer] == most])


def ks(n: int) -> list[int]:
    """Return the k of pass@k that are reported for `n` completions: powers of two, and `n`, from 2 on.

    >>> ks(1), ks(4), ks(6)
    ([], [2, 4], [2, 4, 6])
    """
    powers = (2**power for power in range(1, n.bit_length()))
    return sorted({*powers, n} - {1})
