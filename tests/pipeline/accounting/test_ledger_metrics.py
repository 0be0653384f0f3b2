"""The counts of the ledger among the metrics of each step."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from tests.pipeline.view.watched import STEPS, small_run

from penstock.trackers import Jsonl


async def test_the_metrics_of_all_steps_add_up_to_the_ledger_and_each_has_those_in_flight(tmp_path: Path) -> None:
    await small_run().run(trackers=[Jsonl(tmp_path)])

    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
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
