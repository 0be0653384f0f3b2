"""`penstock doctor`: the state of this machine, with a remedy for each failure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from .findings import Finding

STYLES = {"ok": "green", "note": "yellow", "fails": "bold red"}


def doctor() -> None:
    """Check this machine and what is installed, by trying it; say what will not work, and what to do."""
    from rich.console import Console  # noqa: PLC0415 (the other commands need none of these)

    from .machine_checks import machine_checks  # noqa: PLC0415 (as above)
    from .trials import trials  # noqa: PLC0415 (as above)
    from .version_checks import version_checks  # noqa: PLC0415 (as above)

    console = Console(highlight=False, markup=False)
    findings = [*version_checks(), *machine_checks(), *trials()]
    console.print(table(findings))
    for finding in findings:
        if finding.affects:
            console.print(f"\n{finding.name}: {finding.affects}", style=STYLES[finding.verdict], soft_wrap=True)
            console.print(f"  to do: {finding.remedy}", soft_wrap=True)
    failed = [finding.name for finding in findings if finding.verdict == "fails"]
    console.print(f"\n{_conclusion(failed)}")
    raise typer.Exit(1 if failed else 0)


def _conclusion(failed: Sequence[str]) -> str:
    return f"every run needs these, which fail: {', '.join(failed)}" if failed else "runs work on this machine"


def table(findings: Sequence[Finding]) -> Table:
    """Return a row for each finding."""
    from rich.table import Table  # noqa: PLC0415 (as above)
    from rich.text import Text  # noqa: PLC0415 (as above)

    rows = Table("check", "", "found", box=None, padding=(0, 1), pad_edge=False)
    for finding in findings:
        rows.add_row(finding.name, Text(finding.verdict, style=STYLES[finding.verdict]), Text(finding.found))
    return rows
