"""Ranks on two hosts between which no packet passes any more: every rank ends, and the run can go on."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.ranks.script_of_a_run import GO
from tests.ranks.torchrun import Hosts, Rank, check_trained_once, pipe

TIMEOUT_S = 15
"""Timeout of the process group where a connection is to break without a sign. A rank must not be behind by more."""


@pytest.mark.long
def test_ranks_that_wait_for_a_batch_end_when_no_packet_passes_between_their_hosts(
    hosts: Hosts, tmp_path: Path
) -> None:
    arguments = tmp_path, TIMEOUT_S, "--waits"
    with Rank(*arguments, host=hosts.first) as first, Rank(*arguments, host=hosts.second) as second:
        first.read_until("step 2")
        second.read_until("is process")

        with hosts.cut():
            assert first.wait() == second.wait() == 1

    assert "PeerLost: rank 1 of 2 died" in first.output
    assert "PeerLost: rank 0 of 2 died" in second.output


@pytest.mark.long
def test_a_run_on_two_hosts_goes_on_by_the_same_commands_after_a_step_in_which_they_lost_each_other(
    hosts: Hosts, tmp_path: Path, alone: Path
) -> None:
    pipes = [pipe(tmp_path, rank) for rank in range(2)]
    arguments = tmp_path, TIMEOUT_S
    with Rank(*arguments, host=hosts.first) as first, Rank(*arguments, host=hosts.second) as second:
        first.read_until("rank 0 waits")
        second.read_until("rank 1 waits")

        with hosts.cut():
            for each in pipes:
                each.write_text(GO)
            assert first.wait() == second.wait() == 1

    assert "PeerLost: rank 1 of 2 died" in first.output
    assert "PeerLost: rank 0 of 2 died" in second.output

    with Rank(*arguments, host=hosts.first) as first, Rank(*arguments, host=hosts.second) as second:
        assert first.wait() == second.wait() == 0

    check_trained_once(tmp_path, alone)
