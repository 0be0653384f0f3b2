"""Rate of trajectories from producer processes into packed batches, beside the copy limit of the machine.

    python -m benchmarks.transport --contestants penstock --producers 4 --group 8 --tokens 1024

The limit and every contestant are measured in turn in the same run, several times, and medians are reported with
minimum and maximum: machines are shared, and the host changes speed, so only ratios within one run are meaningful. A
peer that is not installed is skipped with the command that installs it. Exits with 1 if penstock itself failed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from .chart import draw, picture
from .contestants import CONTESTANTS, Absent, Case, Outcome, leaving_nothing
from .limit import copy_limit, spin_limit
from .records import trajectory_bytes
from .report import command_line, count, print_table, short, write_json

__all__ = ["Results", "main", "measure"]

OURS, OURS_TCP = "penstock", "penstock-tcp"

LIMIT_S = 0.5
"""Duration of each measurement of the limit."""


@dataclass(frozen=True)
class Round:
    """One contestant's throughput, measured once."""

    trajectories_per_s: float
    limit: float
    """The copy limit, measured just before."""


@dataclass
class Results:
    """The results of one case."""

    case: Case
    limits: list[float] = field(default_factory=list)
    spin_limits: list[float] = field(default_factory=list)
    rounds: dict[str, list[Round]] = field(default_factory=dict)
    pings: dict[str, Outcome] = field(default_factory=dict)
    """Latency of a group of each contestant, one in flight; measured in the first repeat."""
    skipped: dict[str, str] = field(default_factory=dict)
    """The reason for which a contestant was not measured, or failed."""

    @property
    def limit(self) -> float:
        """Return the median of the limits."""
        return statistics.median(self.limits)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each contestant, fastest first."""
        rows = [self._row(name, rounds) for name, rounds in self.rounds.items()]
        return sorted(rows, key=lambda row: -row["trajectories_per_s"])

    def _row(self, name: str, rounds: list[Round]) -> dict[str, Any]:
        rates = [one.trajectories_per_s for one in rounds]
        ratios = [one.trajectories_per_s / one.limit for one in rounds]
        return {
            "contestant": name,
            "producers": self.case.producers,
            "group": self.case.group,
            "tokens": self.case.tokens,
            "trajectories_per_s": round(statistics.median(rates)),
            "trajectories_per_s_range": [round(min(rates)), round(max(rates))],
            "ratio_to_limit": round(statistics.median(ratios), 4),
            "ratio_to_limit_range": [round(min(ratios), 4), round(max(ratios), 4)],
            "limit": round(self.limit),
            "limit_range": [round(min(self.limits)), round(max(self.limits))],
            "spin_limit": round(statistics.median(self.spin_limits)),
            "p50_us": round(self.pings[name].p50_us, 1),
            "p99_us": round(self.pings[name].p99_us, 1),
            "repeats": len(rounds),
        }

    def comparisons(self) -> Iterator[str]:
        """Yield ratios of penstock to the fastest peer, and over TCP to plain sockets, pair by pair."""
        peers = [row["contestant"] for row in self.rows() if not row["contestant"].startswith(OURS)]
        for ours, theirs in [(OURS, name) for name in peers[:1]] + [(OURS_TCP, "zmq-tcp")]:
            if ours in self.rounds and theirs in self.rounds:
                pairs = zip(self.rounds[ours], self.rounds[theirs], strict=False)
                ratios = [one.trajectories_per_s / other.trajectories_per_s for one, other in pairs]
                yield f"{ours} / {theirs}: {statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"


def measure(contestants: list[str], case: Case, repeats: int, console: Console) -> Results:
    """Measure the limits and every contestant in turn, `repeats` times."""
    results = Results(case)
    nbytes = trajectory_bytes(case.tokens)
    for repeat in range(repeats):
        for name in contestants:
            if name in results.skipped:
                continue
            with console.status(f"{name}, {repeat + 1} of {repeats}"):
                _measure_one(name, copy_limit(nbytes, LIMIT_S / 2), results)
        results.spin_limits.append(spin_limit(nbytes, LIMIT_S))
    return results


def _measure_one(name: str, limit: float, results: Results) -> None:
    """Measure one contestant once, or record the reason of a failure, which must not stop the others."""
    run, case = CONTESTANTS[name], results.case
    try:
        if name not in results.pings:
            results.pings[name] = run(case.pinging())
        measured = Round(run(case).trajectories_per_s, limit)
    except Absent as absent:
        results.skipped[name] = f"skipped: {absent}"
    except Exception as error:  # noqa: BLE001
        results.skipped[name] = f"failed: {type(error).__name__}: {error}"
    else:
        results.limits.append(limit)
        results.rounds.setdefault(name, []).append(measured)


def _print(results: Results, console: Console) -> None:
    case, rows = results.case, results.rows()
    if rows:
        title = f"{case.producers} producers, groups of {case.group}, {case.tokens:,} tokens"
        head = ("contestant", "traj/s", "min–max", "of limit", "p50 µs", "p99 µs")
        print_table(console, title, head, map(_cells, rows))
        console.print(
            f"limit: {short(results.limit)} copied ({short(min(results.limits))}–{short(max(results.limits))}), "
            f"{short(statistics.median(results.spin_limits))} with a spinning hand-over"
        )
    for comparison in results.comparisons():
        console.print(comparison)
    for name, reason in results.skipped.items():
        console.print(f"{name} {reason}", style="dim", highlight=False, markup=False)


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["contestant"],
        short(row["trajectories_per_s"]),
        "–".join(map(short, row["trajectories_per_s_range"])),
        f"{row['ratio_to_limit']:.3f}",
        f"{row['p50_us']:,.0f}",
        f"{row['p99_us']:,.0f}",
    ]


def _arguments() -> argparse.Namespace:
    parser = command_line(__doc__, seconds=2.0, repeats=5)
    parser.add_argument("--contestants", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS))
    parser.add_argument("--producers", type=count, nargs="+", default=[4], help="producer processes")
    parser.add_argument("--group", type=count, nargs="+", default=[8], help="trajectories of a group")
    parser.add_argument("--tokens", type=count, nargs="+", default=[1024], help="tokens of a trajectory")
    parser.add_argument("--png", type=picture, help="draw the results here")
    return parser.parse_args()


@leaving_nothing()
def main() -> None:
    """Parse the command line and run."""
    arguments, console = _arguments(), Console()
    done: list[Results] = []
    for tokens in arguments.tokens:
        for group in arguments.group:
            for producers in arguments.producers:
                case = Case(producers, group, tokens, arguments.seconds)
                done.append(measure(arguments.contestants, case, arguments.repeats, console))
                _print(done[-1], console)
    rows = [row for results in done for row in results.rows()]
    limit = round(done[0].limit) if done[0].limits else None
    skipped = {name: reason for results in done for name, reason in results.skipped.items()}
    write_json(arguments.json, {"limit": limit, "rows": rows, "skipped": skipped})
    if arguments.png and rows:
        draw(rows, arguments.png)
    if skipped.get(OURS, "").startswith("failed"):
        sys.exit(1)


if __name__ == "__main__":
    main()
