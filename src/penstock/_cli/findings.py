"""The result of one check of `penstock doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Verdict: TypeAlias = Literal["ok", "note", "fails", "exact", "differs", "unknown"]
"""note: something optional does not work · fails: something that every run needs does not · exact, differs, unknown: of
an inference server, compared with the folder of its model."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the table."""

    name: str
    found: str
    verdict: Verdict = "ok"
    affects: str = ""
    """The consequence, as a sentence without a full stop; empty if everything works."""
    remedy: str = ""
    """The thing to do."""
