from __future__ import annotations

import pytest

from penstock._pipeline.accounting.shared_counters import COUNTERS_BYTES, ReportedCounters, SharedCounters
from penstock.errors import ProtocolMismatch


def test_reported_counts_are_those_of_the_worker() -> None:
    own, reported = SharedCounters(bytearray(COUNTERS_BYTES)), ReportedCounters()
    own.admit(5)
    own.end("failed", 2)
    own.step = 7

    reported.report(own.counts(), {})

    assert (reported.admitted, reported.ended("failed"), reported.step) == (5, 2, 0)


def test_what_arrived_before_its_report_counts_as_admitted() -> None:
    reported = ReportedCounters()

    reported.taken_over += 3

    assert reported.admitted == 3


def test_a_report_of_another_version_is_refused() -> None:
    with pytest.raises(ProtocolMismatch, match=r"expected a report of \d+ counts, got 1"):
        ReportedCounters().report([1], {})
