"""Two ranks train as one process does, with each way of sharing; when one dies, the other names it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.ranks.script_of_ranks import GROUPS, RAISED, STEPS

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the ranks, and return the folder of their files."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.ranks.script_of_ranks", str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    return folder


@pytest.fixture(params=["ddp", "fsdp", "offloaded", "critic-ddp", "critic-fsdp"])
def found(folder: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / f"{request.param}.json").read_text())
    return read


def test_loss_metrics_and_weights_are_those_of_a_single_process(found: dict[str, Any]) -> None:
    assert len(found["steps"]) == STEPS
    for alone, ranked in found["steps"]:
        assert ranked == pytest.approx(alone, abs=1e-5)
    alone, ranked = found["weights"]
    for name, tensor in alone.items():
        np.testing.assert_allclose(ranked[name], tensor, atol=1e-5)


def test_log_probabilities_are_kept_of_the_whole_batch_in_the_steps_that_ask_for_them(found: dict[str, Any]) -> None:
    (first, ranked), asked_for_none, (last, other) = found["logprobs"]

    assert asked_for_none == [None, None]
    assert ranked == pytest.approx(first, abs=1e-5)
    assert other == pytest.approx(last, abs=1e-5)
    assert any(first)
    assert any(last)


@pytest.mark.parametrize("kind", ["critic-ddp", "critic-fsdp"])
def test_the_critic_of_ranks_is_that_of_a_single_process(folder: Path, kind: str) -> None:
    alone, from_checkpoint = json.loads((folder / f"{kind}.json").read_text())["critics"]

    assert alone.keys() == from_checkpoint.keys()
    assert "head.weight" in alone
    for name, tensor in alone.items():
        np.testing.assert_allclose(from_checkpoint[name], tensor, atol=1e-5)


def test_every_rank_runs_the_same_number_of_micro_batches(found: dict[str, Any]) -> None:
    first, second = found["runs"]

    assert first == second > STEPS + 2


def test_a_single_process_and_the_ranks_themselves_go_on_from_the_checkpoint(found: dict[str, Any]) -> None:
    later, ranked_again, alone = found["later"]

    assert found["from_checkpoint"] == found["weights"][1]
    assert ranked_again == later
    assert alone == pytest.approx(later, abs=1e-5)
    assert found["steps_done"] == [STEPS + 1, STEPS + 1]
    assert found["committed"]


def test_the_ranks_go_on_from_a_checkpoint_of_a_single_process(found: dict[str, Any]) -> None:
    weights, ranked_weights = found["from_one"]
    alone, ranked = found["of_one"]

    assert ranked_weights == weights
    assert ranked == pytest.approx(alone, abs=1e-5)


def test_each_group_is_whole_on_one_rank_and_the_largest_are_assigned_first(folder: Path) -> None:
    first, second = (json.loads((folder / f"divided-{rank}.json").read_text()) for rank in range(2))
    tokens = {name: sum(lengths) + 2 * len(lengths) for name, lengths in GROUPS.items()}

    assert [name for name, *_ in first[0]] == ["a", "b", "e"]
    assert [name for name, *_ in second[0]] == ["c", "d"]
    for name, sequences, count in first[0] + second[0]:
        assert (sequences, count) == (len(GROUPS[name]), tokens[name])


def test_a_rank_has_an_empty_share_of_a_batch_with_fewer_groups_than_ranks(folder: Path) -> None:
    first, second = (json.loads((folder / f"divided-{rank}.json").read_text()) for rank in range(2))

    assert [name for name, *_ in first[1]] == ["a"]
    assert second[1] == []


@pytest.mark.parametrize(("kind", "gone"), [("leader", 0), ("follower", 1)])
def test_when_a_rank_dies_the_other_ends_and_names_it(folder: Path, kind: str, gone: int) -> None:
    text = (folder / f"{kind}-left").read_text()

    assert text.startswith(f"PeerLost: rank {gone} of 2 died")


def test_when_a_rank_dies_while_the_leader_waits_for_a_batch_all_others_end_and_name_it(folder: Path) -> None:
    leader, follower = ((folder / f"third-{rank}").read_text() for rank in range(2))

    assert "rank 2 of 3 died" in leader
    assert follower.startswith("PeerLost: rank 2 of 3 died")


@pytest.mark.parametrize("name", RAISED)
def test_what_a_loss_raises_on_another_rank_is_an_error_there_and_the_leader_names_the_rank(
    folder: Path, name: str
) -> None:
    leader, follower = ((folder / f"{name}-{rank}").read_text() for rank in range(2))

    assert follower == (f"{name}: in a loss" if name == "RuntimeError" else f"UserCodeExited: {name}: in a loss")
    assert leader.startswith("PeerLost: rank 1 of 2 died")


def test_ranks_that_all_get_sigterm_finish_the_step_write_a_checkpoint_and_end(folder: Path) -> None:
    leader, follower = ((folder / f"stopped-{rank}").read_text() for rank in range(2))

    assert leader == "the run was stopped by SIGTERM"
    assert follower == "returned"
    assert [path.name for path in (folder / "stopped" / "checkpoints").iterdir()] == ["step-00000003"]
