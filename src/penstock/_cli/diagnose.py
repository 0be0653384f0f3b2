"""`penstock diagnose`: the reasons, by rule, for which a run may not learn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from .._pipeline.diagnosis.finding import RunFinding
    from .._pipeline.diagnosis.seen_run import SeenRun


def diagnose(run: Annotated[Path, typer.Argument(help="Folder of a run.")]) -> None:
    """Say what keeps a run from learning, the gravest thing first. Only reads, while the run goes on or afterwards.

    Exits with status 1 if it finds something, and with 0 if not.
    """
    from rich.console import Console  # noqa: PLC0415 (not needed for --help)

    from .._pipeline.diagnosis.folder import read_run  # noqa: PLC0415 (as above)
    from .._pipeline.diagnosis.rules import findings_in  # noqa: PLC0415 (as above)
    from .._pipeline.util.readable import Readable  # noqa: PLC0415 (as above)

    seen = read_run(run)
    found = findings_in(seen)
    console = Console(highlight=False, markup=False)
    for line in [*_described(found), *_conclusion(seen, found)]:
        console.print(Readable(line), soft_wrap=True)
    raise typer.Exit(1 if found else 0)


def _described(found: list[RunFinding]) -> list[str]:
    """Return the lines of all findings."""
    from .._pipeline.diagnosis.rules import rule_named  # noqa: PLC0415 (as above)

    lines = []
    for finding in found:
        lines += [f"{finding.rule}: {rule_named(finding.rule).means}", f"  seen: {finding.numbers}"]
        lines += [f"  {'causes:' if not number else '       '} {cause}" for number, cause in enumerate(finding.causes)]
        lines += [f"  {'try:' if not number else '    '} {value}" for number, value in enumerate(finding.change)]
        lines.append("")
    return lines


def _conclusion(seen: SeenRun, found: list[RunFinding]) -> list[str]:
    """Return what was looked at, and what was not."""
    from .._pipeline.diagnosis.rules import RULES, looked_at  # noqa: PLC0415 (as above)

    looked = looked_at(seen)
    unseen = [rule.name for rule in RULES if rule.name not in looked]
    count = f"{len(found)} findings" if len(found) > 1 else "1 finding" if found else "no finding"
    lines = [f"{count} in {seen.step} steps, by {len(looked)} of {len(RULES)} rules: {', '.join(looked)}"]
    if unseen:
        lines.append(f"not looked at, for want of metrics: {', '.join(unseen)}")
    if seen.damaged:
        lines.append(f"not read: {'; '.join(seen.damaged)}")
    return lines
