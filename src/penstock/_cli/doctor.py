"""`penstock doctor`: the state of this machine, or of an inference server, with a remedy for each failure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from .findings import Finding

STYLES = {
    "ok": "green",
    "note": "yellow",
    "fails": "bold red",
    "exact": "green",
    "differs": "bold red",
    "unknown": "yellow",
}


def doctor(
    *,
    endpoint: Annotated[
        str,
        typer.Option(
            metavar="URL", help="Examine this inference server, with or without /v1, in place of the machine."
        ),
    ] = "",
    model: Annotated[
        str,
        typer.Option(
            metavar="FOLDER", help="Folder or name of the model that it serves, for its tokenizer and template."
        ),
    ] = "",
    key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="Key of the server.", show_envvar=True)] = "",
) -> None:
    """Check this machine and what is installed, by trying it; say what will not work, and what to do.

    With --endpoint: is that server, with its template and parsers, token-exact? Twenty programs ask it.
    """
    if bool(endpoint) != bool(model):
        raise typer.BadParameter("expected --endpoint and --model, or neither")
    if endpoint:
        from rich.console import Console  # noqa: PLC0415 (as below)

        from .endpoint_checks import endpoint_checks  # noqa: PLC0415 (the other commands need none of these)
        from .endpoint_programs import conclusion  # noqa: PLC0415 (as above)

        with Console().status("") as line:  # shown on a terminal alone
            findings = endpoint_checks(endpoint, model, key, line.update)
        _report(findings, conclusion(findings))
        return
    from .machine_checks import machine_checks  # noqa: PLC0415 (as above)
    from .trials import trials  # noqa: PLC0415 (as above)
    from .version_checks import version_checks  # noqa: PLC0415 (as above)

    findings = [*version_checks(), *machine_checks(), *trials()]
    _report(findings, _conclusion([finding.name for finding in findings if finding.verdict == "fails"]))


def _report(findings: Sequence[Finding], conclusion: str) -> None:
    """Print findings, and exit with 1 if one of them fails or differs."""
    from rich.console import Console  # noqa: PLC0415 (as above)

    from .._pipeline.util.readable import Readable  # noqa: PLC0415 (as above)

    console = Console(highlight=False, markup=False)
    console.print(Readable(table(findings)))
    for finding in findings:
        if finding.affects:
            console.print(
                Readable(f"\n{finding.name}: {finding.affects}"), style=STYLES[finding.verdict], soft_wrap=True
            )
            console.print(Readable(f"  to do: {finding.remedy}"), soft_wrap=True)
    console.print(Readable(f"\n{conclusion}"), soft_wrap=True)
    raise typer.Exit(any(finding.verdict in {"fails", "differs"} for finding in findings))


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
