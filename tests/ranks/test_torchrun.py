"""Runs on the ranks of torchrun: when a rank, a host or torchrun dies, every rank ends, and the run can go on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from chaos.network import NEAR, LinkNotPossible
from tests.ranks.script_of_a_run import DIE, GO, GROUPS, STEPS, train, trainer_of
from tests.ranks.torchrun import PORT, Hosts, Torchrun, two_hosts
from tests.tiny_model import ReadModel

from penstock import GroupId

TIMEOUT_S = 15
"""Timeout of the process group where a connection is to break without a sign. A rank must not be behind by more."""

UNHURRIED_S = 600
"""Timeout of a process group that is not to expire in a test."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Make two hosts, which share the folders of this one."""
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(two_hosts())
        except LinkNotPossible as error:
            pytest.skip(str(error))
        yield hosts


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train as a single process, and return the folder of the run."""
    folder = tmp_path_factory.mktemp("alone")
    train(trainer_of(ReadModel()), folder)
    return folder


def pipe(folder: Path, rank: int) -> Path:
    """Make the pipe for which `rank` waits in its last step."""
    path = folder / f"go-{rank}"
    os.mkfifo(path)
    return path


def restarting(endpoint: str) -> list[str]:
    """Return the options of a torchrun that restarts ranks once."""
    return ["--max-restarts=1", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=ranks"]


def check_trained_once(folder: Path, alone: Path) -> None:
    """Check that the run has trained every group once, each step once, and to the weights of a single process."""
    checkpoint = trainer_of(ReadModel())
    checkpoint.resume(folder / "checkpoints" / f"step-{STEPS:08}")
    assert checkpoint.committed == {GroupId("test", str(number)): 0b111 for number in range(GROUPS)}
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, STEPS + 1))
    weights, expected = (json.loads((each / "weights.json").read_text()) for each in (folder, alone))
    for name, tensor in expected.items():
        np.testing.assert_allclose(weights[name], tensor, atol=1e-5)


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.long)])
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


def test_ranks_that_wait_for_a_batch_end_when_their_torchrun_is_killed(tmp_path: Path) -> None:
    with Torchrun(tmp_path, UNHURRIED_S, "--waits") as torchrun:
        torchrun.read_until("step 2")

        torchrun.kill()

        torchrun.wait()


@pytest.mark.parametrize("killed", [pytest.param(0, marks=pytest.mark.long), 1])
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


def test_ranks_that_wait_for_a_batch_end_when_no_packet_passes_between_their_hosts(
    hosts: Hosts, tmp_path: Path
) -> None:
    arguments = tmp_path, TIMEOUT_S, "--waits"
    with Torchrun(*arguments, host=hosts.first) as first, Torchrun(*arguments, host=hosts.second) as second:
        first.read_until("step 2")
        second.read_until("is process")

        with hosts.cut():
            assert first.wait() == second.wait() == 1

    assert "PeerLost: rank 1 of 2 died" in first.output
    assert "PeerLost: rank 0 of 2 died" in second.output


def test_a_run_on_two_hosts_goes_on_by_the_same_commands_after_a_step_in_which_they_lost_each_other(
    hosts: Hosts, tmp_path: Path, alone: Path
) -> None:
    pipes = [pipe(tmp_path, rank) for rank in range(2)]
    arguments = tmp_path, TIMEOUT_S
    with Torchrun(*arguments, host=hosts.first) as first, Torchrun(*arguments, host=hosts.second) as second:
        first.read_until("rank 0 waits")
        second.read_until("rank 1 waits")

        with hosts.cut():
            for each in pipes:
                each.write_text(GO)
            assert first.wait() == second.wait() == 1

    assert "PeerLost: rank 1 of 2 died" in first.output
    assert "PeerLost: rank 0 of 2 died" in second.output

    with Torchrun(*arguments, host=hosts.first) as first, Torchrun(*arguments, host=hosts.second) as second:
        assert first.wait() == second.wait() == 0

    check_trained_once(tmp_path, alone)
