"""One HTML page of some runs, which opens without a network.

Texts of models, data and metrics are untrusted. They reach the page as JSON in a data block, whose characters cannot
end it, and our script shows them as text alone. The policy of the page (CSP) runs the scripts that this file embeds, by
their hashes, and loads nothing.
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

from ..errors import MissingExtra
from ..util.extras import extra
from ..util.installation import install_command
from .collected import Collected

SCRIPTS = (
    *("dom.js", "tables.js", "charts.js", "curves.js", "findings.js", "ledger.js", "waits.js"),
    *("sequence.js", "samples.js", "settings.js", "main.js"),
)
"""Our own scripts, in the order in which they run."""

ESCAPES = {"<": b"\\u003c", ">": b"\\u003e", "&": b"\\u0026", "\u2028": b"\\u2028", "\u2029": b"\\u2029"}
"""Characters that mean something in HTML, or end a line in some scripts; in JSON they occur in strings alone."""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page; `main.js` fills the element with its id."""

    id: str
    title: str
    about: str
    """One sentence, shown below the title."""


SECTIONS = (
    Section("overview", "Overview", "The runs on this page, and their main curves."),
    Section("findings", "Findings", "What may keep a run from learning, by the rules of penstock diagnose."),
    Section(
        "evaluation", "Evaluation", "Sets of prompts that were kept apart, by the step whose weights were evaluated."
    ),
    Section(
        "samples",
        "Samples",
        "The best and the worst completions of some steps, by reward. Arrow keys: up and down for another sample, left "
        "and right for another step.",
    ),
    Section("ledger", "Ledger", "Every trajectory that was begun, and how it ended."),
    Section(
        "waits", "Waits and lag", "The stage that waits least limits the run. The lag is the age of trained weights."
    ),
    Section("settings", "Configuration", "The values of each run and of its parts; those that differ come first."),
    Section("curves", "Curves", "Every metric of metrics.jsonl, by group. Drag to zoom, double-click to see all."),
)


def page(collected: Collected, *, follows: bool = False) -> bytes:
    """Return the page as UTF-8. Blocks.

    Args:
        collected: the runs.
        follows: True for a page that asks the server it came from for newer data.

    Raises:
        MissingExtra: jinja2, plotly or itables is not installed.
    """
    with extra("report", "penstock report"):
        import jinja2  # noqa: PLC0415 (of an extra)

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    shown = environment.from_string(asset("page.html")).render(
        title=", ".join(run.name for run in collected.runs),
        written=collected.written,
        policy=policy_of_page(follows=follows),
        style=Trusted(asset("page.css")),
        sections=SECTIONS,
        data=Trusted(escaped(collected).decode()),
        scripts=[Trusted(script) for script in _scripts()],
        follows=follows,
    )
    return shown.encode()


class Trusted(str):
    """Text that is part of the page as it is: our own files, those of plotly and DataTables, and escaped JSON."""

    __slots__ = ()

    def __html__(self) -> str:
        return str(self)


def escaped(collected: Collected) -> bytes:
    """Return what is shown as JSON that can stand in a data block of HTML."""
    encoded = msgspec.json.encode(collected)
    for character, written in ESCAPES.items():
        encoded = encoded.replace(character.encode(), written)
    return encoded


def policy_of_page(*, follows: bool) -> str:
    """Return the Content-Security-Policy: three scripts, and no other; no network, but for a page that follows runs.

    plotly adds a style sheet, and draws heat maps and pictures to save as `data:` and `blob:`.

    Raises:
        MissingExtra: plotly or itables is not installed.
    """
    hashes = " ".join(f"'sha256-{_hash(script)}'" for script in _scripts())
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {hashes}",
            "style-src 'unsafe-inline'",
            "img-src data: blob:",
            "connect-src 'self'" if follows else "connect-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _scripts() -> tuple[str, ...]:
    """Return the scripts of the page in the order in which they run."""
    return plotly_js(), datatables_js(), our_script()


@cache
def plotly_js() -> str:
    """Return plotly's script, 5 MB.

    Raises:
        MissingExtra: plotly is not installed.
    """
    with extra("report", "penstock report"):
        from plotly.offline import get_plotlyjs  # noqa: PLC0415 (of an extra)

    return str(get_plotlyjs())


@cache
def datatables_js() -> str:
    """Return the script of DataTables, 0.6 MB, which defines `DataTable`.

    itables has it as a module; the page cannot import one, for its policy loads nothing.

    Raises:
        MissingExtra: itables is not installed, or has another module.
    """
    with extra("report", "penstock report"):
        import itables  # noqa: PLC0415 (of an extra)

    module = (Path(itables.__file__).parent / "html" / "dt_bundle.js").read_text(encoding="utf-8")
    exported = re.search(r"export\{[^}]*?(\w+) as default[^}]*\};?", module)
    if exported is None:
        raise MissingExtra(
            f"penstock report needs another itables than {itables.__version__}: {install_command('report')}"
        )
    body = f"{module[: exported.start()]}\nreturn {exported[1]};\n{module[exported.end() :]}"
    return f"window.DataTable = (() => {{\n{body}\n}})();"


@cache
def our_script() -> str:
    """Return our own scripts as one."""
    return "\n".join(["(() => {", '"use strict";', *map(asset, SCRIPTS), "})();"])


def asset(name: str) -> str:
    """Return the text of a file in `assets/`."""
    return (Path(__file__).parent / "assets" / name).read_text(encoding="utf-8")
