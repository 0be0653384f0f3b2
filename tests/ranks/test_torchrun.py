"""Runs on the ranks of torchrun: when a rank or torchrun dies, every rank ends, and the run can go on."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos.network import NEAR
from tests.ranks.script_of_a_run import DIE
from tests.ranks.torchrun import PORT, Hosts, Torchrun, check_trained_once, pipe

UNHURRIED_S = 600
"""Timeout of a process group that is not to expire in a test."""


def restarting(endpoint: str) -> list[str]:
    """Return the options of a torchrun that restarts ranks once."""
    return ["--max-restarts=1", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=ranks"]


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.long
def test_torchrun_restarts_ranks_of_which_one_was_killed_and_nothing_is_trained_twice(
    tmp_path: Path, alone: Path, rank: int
) -> None:
    asked = pipe(tmp_path, rank)
    with Torchrun(tmp_path, UNHURRIED_S, options=restarting("localhost:0")) as torchrun:
        torchrun.read_until(f"rank {rank} waits")
        asked.write_text(DIE)

        assert torchrun.wait() == 0

    check_trained_once(tmp_path, alone)


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun_restarts_the_ranks_of_two_hosts(hosts: Hosts, tmp_path: Path, alone: Path, rank: int) -> None:
    asked = pipe(tmp_path, rank)
    options = [
        [*restarting(f"{NEAR}:{PORT}"), f"--rdzv-conf=is_host={is_host}", f"--local-addr={host.address}"]
        for host, is_host in ((hosts.first, 1), (hosts.second, 0))
    ]
    with (
        Torchrun(tmp_path, UNHURRIED_S, options=options[0], host=hosts.first) as first,
        Torchrun(tmp_path, UNHURRIED_S, options=options[1], host=hosts.second) as second,
    ):
        first.read_until("rank 0 waits" if rank == 0 else "rank 0 is process")
        second.read_until("rank 1 waits" if rank == 1 else "rank 1 is process")
        asked.write_text(DIE)

        assert first.wait() == second.wait() == 0

    check_trained_once(tmp_path, alone)


@pytest.mark.long
def test_ranks_that_wait_for_a_batch_end_when_their_torchrun_is_killed(tmp_path: Path) -> None:
    with Torchrun(tmp_path, UNHURRIED_S, "--waits") as torchrun:
        torchrun.read_until("step 2")

        torchrun.kill()

        torchrun.wait()


@pytest.mark.long
@pytest.mark.parametrize("killed", [0, 1])
def test_ranks_of_both_hosts_end_when_one_torchrun_is_killed_while_they_wait_for_a_batch(
    hosts: Hosts, tmp_path: Path, killed: int
) -> None:
    arguments = tmp_path, UNHURRIED_S, "--waits"
    with Torchrun(*arguments, host=hosts.first) as first, Torchrun(*arguments, host=hosts.second) as second:
        first.read_until("step 2")
        second.read_until("is process")
        gone, left = (first, second) if killed == 0 else (second, first)

        gone.kill()

        assert left.wait() == 1
        assert f"PeerLost: rank {killed} of 2 died" in left.output
        gone.wait()
