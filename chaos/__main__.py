"""Ten minutes of random kills, stops and cuts, after which nothing is lost, doubled, hung or left over.

    python -m chaos --minutes 10 --seed 0

Rounds follow one another, each of a few seconds: a pipeline with workers; senders that outlive their trainer, over
shared memory, over TCP, and over TCP between two network namespaces whose line is cut. The trainer keeps a journal and
checkpoints, and is started again in the same folder when it was killed, as its senders are. Every byte is compared with
what follows from its id. Only what a worker held when it died may be missing, and the run has to report it lost.

A round is described by its seed: `--only SCENARIO --seed SEED --minutes 0` plays it again. Which blow falls when
follows from the seed; the moment in which it meets a process does not.
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

from .network import LineNotPossible
from .rounds import SCENARIOS, Outcome, Scenario, play

ROUND_S = 8.0
"""Seconds in which blows fall in one round."""

PR_SET_CHILD_SUBREAPER = 36


def rounds(seed: str, minutes: float, only: Scenario | None) -> Iterator[tuple[Scenario, str]]:
    """Yield scenarios and their seeds until the time is up: each scenario once at least, or the one of `only`."""
    until = time.monotonic() + 60 * minutes
    kinds: tuple[Scenario, ...] = (only,) if only else SCENARIOS
    for number in count():
        if number >= len(kinds) and time.monotonic() >= until:
            return
        yield kinds[number % len(kinds)], seed if minutes == 0 and only else f"{seed}-{number}"


def play_all(seed: str, minutes: float, only: Scenario | None, round_s: float) -> list[str]:
    """Play all rounds, print a line for each, and return everything that was wrong."""
    dealt, trained, lost, skipped, wrong = Counter[str](), 0, 0, set[Scenario](), list[str]()
    for scenario, own in rounds(seed, minutes, only):
        if scenario in skipped:
            continue
        try:
            outcome = anyio.run(play, scenario, own, round_s)
        except LineNotPossible as error:
            skipped.add(scenario)
            print(f"{scenario} skipped: {error}", flush=True)
            continue
        _show(scenario, own, outcome)
        dealt, trained, lost = dealt + outcome.dealt, trained + outcome.trained, lost + outcome.lost
        wrong += [f"{scenario} {own}: {each}" for each in outcome.wrong]
    print(f"{trained:,} trajectories trained; {_blows(dealt)}; {lost:,} reported lost with a worker that was struck")
    return wrong


def _show(scenario: Scenario, seed: str, outcome: Outcome) -> None:
    print(f"{scenario} {seed}: {outcome.trained:,} trained, {outcome.lost} lost with workers; {_blows(outcome.dealt)}")
    for each in outcome.wrong:
        print(f"WRONG: {each}")
    if outcome.wrong:
        print(f"replay with: python -m chaos --only {scenario} --seed {seed} --minutes 0")
    sys.stdout.flush()


def _blows(dealt: Counter[str]) -> str:
    return ", ".join(f"{number} × {blow}" for blow, number in sorted(dealt.items())) or "no blow"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m chaos", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="how long rounds are begun")
    parser.add_argument("--seed", default="0", help="which blows fall")
    parser.add_argument("--only", choices=SCENARIOS, help="one kind of round")
    parser.add_argument("--round-s", type=float, default=ROUND_S, help="seconds in which blows fall, in each round")
    arguments = parser.parse_args()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what is orphaned is found
    wrong = play_all(arguments.seed, arguments.minutes, arguments.only, arguments.round_s)
    print(f"WRONG in {len(wrong)} ways" if wrong else "nothing lost, doubled, hung or left over")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
