"""Inject random kills, stops, cuts, flips and floods for ten minutes; check that nothing is lost, doubled or left over.

    python -m chaos --minutes 10 --seed 0

Rounds of a few seconds follow one another: a pipeline with workers; senders that outlive their trainer, over shared
memory, over TCP, over TCP through a relay that flips bits while peers with the key flood the trainer and die, and over
TCP between two network namespaces whose link is set down. The trainer writes a journal and
checkpoints, and is restarted in the same folder when it was killed, as its senders are. Every byte is compared with its
expected value, which is computed from the record's id. Only records that a worker held when it died may be missing, and
the run must report them as lost.

A round is determined by its seed: `--only SCENARIO --seed SEED --minutes 0` repeats it. The faults and their times
follow from the seed; the state of a process at that time does not.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count

import anyio

from .network import LinkNotPossible
from .rounds import SCENARIOS, Outcome, Scenario, run_round

ROUND_S = 8.0
"""Seconds of faults in one round."""

PR_SET_CHILD_SUBREAPER = 36


def rounds(seed: str, minutes: float, only: Scenario | None) -> Iterator[tuple[Scenario, str]]:
    """Yield scenarios and their seeds until the time is up: each scenario once at least, or the one of `only`."""
    until = time.monotonic() + 60 * minutes
    kinds: tuple[Scenario, ...] = (only,) if only else SCENARIOS
    for number in count():
        if number >= len(kinds) and time.monotonic() >= until:
            return
        yield kinds[number % len(kinds)], seed if minutes == 0 and only else f"{seed}-{number}"


def run_all(seed: str, minutes: float, only: Scenario | None, round_s: float) -> list[str]:
    """Run all rounds, print a line for each, and return all errors."""
    injected, trained, lost, skipped, wrong = Counter[str](), 0, 0, set[Scenario](), list[str]()
    for scenario, own in rounds(seed, minutes, only):
        if scenario in skipped:
            continue
        try:
            outcome = anyio.run(run_round, scenario, own, round_s)
        except LinkNotPossible as error:
            skipped.add(scenario)
            print(f"{scenario} skipped: {error}", flush=True)
            continue
        _show(scenario, own, outcome)
        injected, trained, lost = injected + outcome.injected, trained + outcome.trained, lost + outcome.lost
        wrong += [f"{scenario} {own}: {each}" for each in outcome.wrong]
    print(
        f"{trained:,} trajectories trained; {_counts(injected)}; {lost:,} reported lost with a worker that was killed"
    )
    return wrong


def _show(scenario: Scenario, seed: str, outcome: Outcome) -> None:
    print(
        f"{scenario} {seed}: {outcome.trained:,} trained, {outcome.lost} lost with workers; {_counts(outcome.injected)}"
    )
    for each in outcome.wrong:
        print(f"WRONG: {each}")
    if outcome.wrong:
        print(f"replay with: python -m chaos --only {scenario} --seed {seed} --minutes 0")
    sys.stdout.flush()


def _counts(injected: Counter[str]) -> str:
    return ", ".join(f"{number} × {fault}" for fault, number in sorted(injected.items())) or "no fault"


KINDS = {
    "lost": ("are missing", "lost as"),
    "doubled": ("times",),
    "hung": ("hangs",),
    "ended": ("ended with",),
    "left over": ("left behind",),
}
"""Parts of the descriptions of each kind of error."""


def verdict(wrong: list[str]) -> str:
    """Return the count of each kind of error, in a line; those of no kind are named others."""
    counts = Counter(_kind(each) for each in wrong)
    return ", ".join(f"{counts[kind]} {kind}" for kind in (*KINDS, "others"))


def _kind(wrong: str) -> str:
    return next((kind for kind, parts in KINDS.items() if any(part in wrong for part in parts)), "others")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m chaos", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="how long rounds are begun")
    parser.add_argument("--seed", default="0", help="determines the faults")
    parser.add_argument("--only", choices=SCENARIOS, help="one kind of round")
    parser.add_argument("--round-s", type=float, default=ROUND_S, help="seconds of faults in each round")
    arguments = parser.parse_args()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphaned processes become children of this one
    wrong = run_all(arguments.seed, arguments.minutes, arguments.only, arguments.round_s)
    print(verdict(wrong))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
