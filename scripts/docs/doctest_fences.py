"""A griffe extension: the examples in docstrings, which are doctests, become blocks of code on the site."""

from __future__ import annotations

import re
from typing import Any

import griffe  # pyright: ignore[reportMissingImports] (only in the environment of `make docs`)

DOCTEST = re.compile(r"^>>> .+(?:\n.+)*", re.MULTILINE)


def fenced(docstring: str) -> str:
    """Return the docstring with a fence around each doctest, which ends at the first empty line."""
    return DOCTEST.sub(lambda found: f"```pycon\n{found[0]}\n```", docstring)


class DoctestFences(griffe.Extension):  # type: ignore[misc]
    """Applied to every object whose docstring is read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence the doctests of one object."""
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)
