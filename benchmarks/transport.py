"""How fast trajectories get from producer processes into packed batches, beside the machine's own copy limit.

    python -m benchmarks.transport --contestants penstock --producers 4 --group 8 --tokens 1024

The limit and every contestant are measured in turn in the same run, several times over, and medians are reported:
machines are shared, and the host itself changes speed, so only ratios within one run mean anything.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .contestants import CONTESTANTS, Case, Measured
from .limit import copy_limit
from .records import trajectory_bytes

__all__ = ["main", "measure"]


def measure(contestants: list[str], case: Case, repeats: int) -> tuple[float, list[dict[str, Any]]]:
    """The copy limit (trajectories a second), and one row a contestant."""
    limits: list[float] = []
    measured: dict[str, list[tuple[Measured, float]]] = {name: [] for name in contestants}
    for _ in range(repeats):
        limits.append(copy_limit(trajectory_bytes(case.tokens), case.seconds / 2))
        for name in contestants:
            result = CONTESTANTS[name](case)
            measured[name].append((result, result.trajectories_per_s / limits[-1]))
    return statistics.median(limits), [_row(name, case, results) for name, results in measured.items()]


def _row(name: str, case: Case, results: list[tuple[Measured, float]]) -> dict[str, Any]:
    rates = [result.trajectories_per_s for result, _ in results]
    return {
        "contestant": name,
        "producers": case.producers,
        "group": case.group,
        "tokens": case.tokens,
        "trajectories_per_s": round(statistics.median(rates)),
        "trajectories_per_s_range": [round(min(rates)), round(max(rates))],
        "ratio_to_limit": round(statistics.median(ratio for _, ratio in results), 4),
        "p50_us": round(statistics.median(result.p50_us for result, _ in results), 1),
        "p99_us": round(statistics.median(result.p99_us for result, _ in results), 1),
    }


def _print(limit: float, rows: list[dict[str, Any]]) -> None:
    table = Table(title=f"copy limit of this machine: {limit:,.0f} trajectories/s")
    for column in (
        "contestant",
        "producers",
        "group",
        "tokens",
        "trajectories/s",
        "range",
        "of limit",
        "p50 µs",
        "p99 µs",
    ):
        table.add_column(column, justify="left" if column == "contestant" else "right")
    for row in rows:
        low, high = row["trajectories_per_s_range"]
        table.add_row(
            row["contestant"],
            *(f"{row[key]:,}" for key in ("producers", "group", "tokens", "trajectories_per_s")),
            f"{low:,}–{high:,}",
            f"{row['ratio_to_limit']:.2f}",
            f"{row['p50_us']:,.0f}",
            f"{row['p99_us']:,.0f}",
        )
    Console().print(table)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--contestants", nargs="+", choices=sorted(CONTESTANTS), default=sorted(CONTESTANTS))
    parser.add_argument("--producers", type=int, nargs="+", default=[4], help="producer processes")
    parser.add_argument("--group", type=int, nargs="+", default=[8], help="trajectories a group")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024], help="tokens a trajectory")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long each measurement counts")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of which the median is taken")
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    limit, rows = 0.0, []
    for tokens in arguments.tokens:
        for group in arguments.group:
            for producers in arguments.producers:
                case = Case(producers, group, tokens, arguments.seconds)
                limit, measured = measure(arguments.contestants, case, arguments.repeats)
                _print(limit, measured)
                rows += measured
    if arguments.json:
        arguments.json.write_text(json.dumps({"limit": round(limit), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
