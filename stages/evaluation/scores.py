"""The metrics of an evaluation, of the n completions of each prompt: mean@n, pass@k and maj@n.

mean@n is the share of right completions. pass@k is the probability that at least one of k completions is right, by the
unbiased estimator of Chen et al. (2021, "Evaluating Large Language Models Trained on Code"), of n >= k completions.
maj@n is the share of prompts whose most frequent answer is right. Knows no engine and no reward.
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
    """Return 1 if the most frequent answer is right, else 0.

    It is right if the first completion with it is. Of answers that are equally frequent the first counts: completions
    have no order, so this is a draw among them. None is no answer; if there is no other, the first completion counts.

    >>> maj_at_n([True, False, False], ["4", "5", "5"])
    0.0
    """
    votes = Counter(answer for answer in answers if answer is not None)
    first = answers.index(max(votes, key=votes.__getitem__)) if votes else 0
    return float(right[first])


def ks(n: int) -> list[int]:
    """Return the k of pass@k that are reported for `n` completions: powers of two, and `n`; none below 2.

    >>> ks(1), ks(4), ks(6)
    ([], [2, 4], [2, 4, 6])
    """
    powers = (2**power for power in range(1, n.bit_length()))
    return sorted({*powers, n} - {1})
