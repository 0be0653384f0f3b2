import pytest

from penstock._pipeline.accounting.failure_streak import FAILURE_LIMIT, FailureStreak
from penstock._pipeline.accounting.shared_counters import COUNTERS_BYTES, SharedCounters
from penstock.accounting import Ledger
from penstock.errors import RolloutsFailed


def test_a_success_by_any_worker_ends_a_row_of_failures() -> None:
    ledger, streak = Ledger(), FailureStreak()
    pages = bytearray(COUNTERS_BYTES), bytearray(COUNTERS_BYTES)
    for page in pages:
        ledger.attach_counters(SharedCounters(page))
    failing, succeeding = map(SharedCounters, pages)

    for _ in range(100):
        failing.end("failed", FAILURE_LIMIT - 1)
        succeeding.succeed(1)
        streak.check(*ledger.failures(), dict)

    failing.end("failed", FAILURE_LIMIT)
    with pytest.raises(RolloutsFailed):
        streak.check(*ledger.failures(), dict)


UNREPORTED = {
    "reason not reported": 129,
    "other reasons": 64,
    "no simulator for task 0": 1,
    "no simulator for task 1": 2,
}


@pytest.mark.parametrize(
    ("reasons", "message"),
    [
        ({"a": 60, "b": 3, "c": 2, "d": 1, "e": 1}, r"in all\): 60 × a, 3 × b, 2 × c, 2 more reasons\. Fix"),
        (UNREPORTED, r"2 × no simulator for task 1, 1 × no simulator for task 0, 129 × reason"),
    ],
    ids=["by frequency", "causes first"],
)
def test_the_message_lists_the_most_frequent_reasons_those_with_a_cause_first(
    reasons: dict[str, int], message: str
) -> None:
    with pytest.raises(RolloutsFailed, match=message):
        FailureStreak().check(sum(reasons.values()), 0, lambda: reasons)
