"""The counts of the ledger among the metrics of each step."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.pipeline.flow_stages import Groups, Pack
from tests.pipeline.view.watched import STEPS, Trainer, small_run

from penstock import ReceiveChannel, SendChannel, SinkTrainer, TrajectoryGroup, drop, source
from penstock.trackers import Jsonl


def written(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


async def test_the_metrics_of_all_steps_add_up_to_the_ledger_and_each_has_those_in_flight(tmp_path: Path) -> None:
    await small_run().run(trackers=[Jsonl(tmp_path)])

    lines = written(tmp_path)
    so_far: Counter[str] = Counter()
    for line in lines:
        counts = {name: value for name, value in line.items() if name.startswith("ledger/")}
        in_flight = counts.pop("ledger/in_flight")
        so_far.update(counts)
        assert so_far["ledger/begun"] == in_flight + sum(so_far.values()) - so_far["ledger/begun"]
    assert len(lines) == STEPS
    assert all(line["ledger/trained"] == line["batch/trajectories"] for line in lines)
    assert so_far["ledger/filtered"] > 0
    assert so_far["ledger/lost"] == 0


async def test_the_metrics_of_reasons_add_up_to_those_of_their_state(tmp_path: Path) -> None:
    await small_run().run(trackers=[Jsonl(tmp_path)])

    for line in written(tmp_path):
        assert line.get("ended/filtered/odd", 0) == line["ledger/filtered"]
        assert not any(name.startswith("ended/trained") for name in line)  # there is one way to be trained


class DropEach:
    """Drops every second group, each for a reason of its own of any length, or all for `reason`."""

    def __init__(self, reason: str | None = None) -> None:
        self._reason = reason

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        async for record in inbox:
            number = int(record.instance_id)
            if number % 2:
                drop(record, "filtered", f"{number}\n" + "long " * 100 if self._reason is None else self._reason)
            else:
                await outbox.send(record)


async def test_few_reasons_have_metrics_of_their_own_and_the_others_share_one(tmp_path: Path) -> None:
    pipeline = source(Groups(80)).then(DropEach()).then(Pack()).sink(SinkTrainer(Trainer(), max_steps=20))
    await pipeline.run(trackers=[Jsonl(tmp_path)])

    lines = written(tmp_path)
    reasons = {name.removeprefix("ended/filtered/") for line in lines for name in line if name.startswith("ended/")}
    assert len(reasons) == 9
    assert "other reasons" in reasons
    assert all(len(reason) <= 80 and "\n" not in reason for reason in reasons)
    for line in lines:
        assert sum(value for name, value in line.items() if name.startswith("ended/")) == line["ledger/filtered"]


@pytest.mark.parametrize(
    ("reason", "name"),
    [
        ("\udcff in a path", "\ufffd in a path"),
        ("\x1b[2J\x07\u202eof a terminal", "\ufffd[2J\ufffd\ufffdof a terminal"),
        ("a/b/../c", "a/b/../c"),
        (" \n\t ", "other reasons"),
        ("x" * 79 + " y", "x" * 79),
    ],
)
async def test_a_reason_of_any_text_has_a_metric_that_can_be_written(reason: str, name: str, tmp_path: Path) -> None:
    pipeline = source(Groups(8)).then(DropEach(reason)).then(Pack()).sink(SinkTrainer(Trainer(), max_steps=2))
    await pipeline.run(trackers=[Jsonl(tmp_path)])

    assert {key for line in written(tmp_path) for key in line if key.startswith("ended/filtered")} == {
        f"ended/filtered/{name}"
    }
