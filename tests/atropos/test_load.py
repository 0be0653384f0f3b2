"""The load test of the gateway, small: coroutines are the environments, and a trainer that dies just hangs up."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from benchmarks.atropos_load import Contested, Found, accepted_in, asked, expected, judged, parts_of, received_by
from benchmarks.atropos_load_actors import GROUP_SIZE, Numbered, Trainer, config_of, waiting_groups
from tests.atropos.gateways import Client, client, process

BATCH_SIZE, ENVIRONMENTS, GROUPS = 64, 8, 6

LEASE_S, HEARTBEAT_TIMEOUT_S = 0.2, 0.3


def taken_by(dying: Client) -> list[dict[str, Any]]:
    """Return a batch under a lease."""
    while (batch := dying.get(f"/batch?lease_s={LEASE_S}")["batch"]) is None:
        time.sleep(0.01)
    groups: list[dict[str, Any]] = batch
    return groups


async def test_accepted_groups_arrive_also_if_a_trainer_dies_with_a_batch(tmp_path: Path) -> None:
    found, ended = Found(), threading.Event()
    held: list[dict[str, Any]] = []
    with process("--heartbeat-timeout-s", str(HEARTBEAT_TIMEOUT_S)) as (_, url):
        environments = [
            Numbered(config_of(index, url, 0.05), GROUPS, index=index, accepted=tmp_path / f"accepted-{index}")
            for index in range(ENVIRONMENTS)
        ]
        survivor = Trainer(url, tmp_path / "notes", leased=False, batch_size=BATCH_SIZE, step_s=0)
        async with anyio.create_task_group() as trainers:
            async with anyio.create_task_group() as tasks:
                with client(url) as dying:
                    dying.started(batch_size=BATCH_SIZE)
                    for environment in environments:
                        tasks.start_soon(environment.env_manager)
                    held += await anyio.to_thread.run_sync(taken_by, dying)
                trainers.start_soon(anyio.to_thread.run_sync, survivor.run, lambda _: ended.is_set())
            ended.set()
        await anyio.to_thread.run_sync(survivor.run, lambda quiet_s: quiet_s > LEASE_S + HEARTBEAT_TIMEOUT_S)
        survivor.connection.close()
        found.left = json.loads(asked(url, "/status"))["queue_size"]
    received_by(tmp_path / "notes", leased=False, found=found)
    found.accepted = accepted_in(tmp_path)

    assert {tuple(group["tokens"][0][:2]) for group in held} <= found.received.keys()
    assert found.received.total() == len(found.received)
    assert len(found.accepted) >= ENVIRONMENTS * GROUPS
    assert len(found.accepted - found.received.keys()) <= found.left < BATCH_SIZE / GROUP_SIZE


def fair(*, batches: int = 200) -> Found:
    """Return a run in which every environment had its share, and nothing was lost."""
    lanes = [*[0] * 28, *[1] * 12, *[2] * 24, *[3] * 48]  # parts of 1/4, and of 3/4 by weights of 1, 2 and 4
    groups = [(index, serial) for serial, index in enumerate(lanes)]
    contested = [Contested(lanes, [(index, 99) for index in range(4)])] * batches
    found = Found(accepted=set(groups), contested=contested, memory=[100, 120, 110])
    found.received.update(groups)
    return found


def test_a_fair_run_has_no_faults() -> None:
    assert judged(fair(), environments=64, batch_size=256) == []
    assert fair().expected_shares(64) == pytest.approx(fair().shares(), rel=0.01)


def test_an_unused_share_goes_to_the_others_by_weight() -> None:
    parts = parts_of(4)
    assert parts == pytest.approx([1 / 64, 9 / 64, 18 / 64, 36 / 64])
    assert expected({0: 9, 1: 99, 2: 99, 3: 99}, parts, 64) == pytest.approx({0: 1, 1: 9, 2: 18, 3: 36})
    assert expected({1: 99, 2: 99, 3: 16}, parts, 64) == pytest.approx({1: 16, 2: 32, 3: 16})
    assert expected({0: 9, 1: 3}, parts, 4) == pytest.approx({0: 1, 1: 3})


def test_a_batch_is_contested_where_twice_as_much_waits_unless_it_is_the_first_of_a_trainer(tmp_path: Path) -> None:
    notes, found = tmp_path / "notes", Found()
    waits, few = {"waiting": [[1, 2], [2, 2]]}, {"waiting": [[1, 1], [2, 2]]}
    lines = [{"groups": [[1, 1], [2, serial]]} | waiting for serial, waiting in enumerate((waits, waits, few))]
    notes.write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    received_by(notes, leased=True, found=found)

    (contested,) = found.contested
    assert (contested.had, [*map(list, contested.waiting)]) == ([1, 2], waits["waiting"])
    assert waiting_groups('{"environments": [{"name": "load-7_1", "queued": 12}]}') == {7: 3}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"accepted": {(9, number) for number in range(65)}, "deaths": 1},
            "65 groups were accepted and did not arrive",
        ),
        ({"memory": [100, 2**30, 100]}, "the gateway began with 100 bytes and had 1,073,741,824"),
        ({"contested": fair().contested[:29]}, "29 batches were contested: too few"),
        (
            {"contested": [Contested([0, 1, 2, 3] * 16, [(index, 99) for index in range(4)])] * 30},
            "expected 0.107 of contested batches, got 0.250",
        ),
    ],
)
def test_faults_of_a_run_are_reported(wrong: dict[str, object], message: str) -> None:
    found = fair()
    for name, value in wrong.items():
        setattr(found, name, value)

    assert message in "\n".join(judged(found, environments=64, batch_size=256))


def test_a_trainer_that_died_while_it_waited_may_have_cost_a_batch(tmp_path: Path) -> None:
    notes, found = tmp_path / "notes", Found()
    lines = [{"groups": [[1, 1], [2, 1]], "waiting": []}, "asking"]
    notes.write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    received_by(notes, leased=False, found=found)
    received_by(notes, leased=True, found=found)
    received_by(tmp_path / "none", leased=False, found=found)

    assert (found.deaths, found.received[1, 1]) == (1, 2)
