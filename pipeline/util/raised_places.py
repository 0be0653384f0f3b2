"""Places in a user's code for messages of one line: of an exception, and of a function."""

from __future__ import annotations

import traceback
from functools import partial
from pathlib import Path

from .user_code import raised_text

OWN = str(Path(__file__).resolve().parent.parent.parent)
"""The folder of penstock's code: its frames are not the user's."""


def located_text(error: BaseException) -> str:
    """Return type, text and place of an exception of a user's code, in one line.

    The place is the last frame in a file below the current folder, or else the last one that is not penstock's.

    >>> try:
    ...     {}["answer"]
    ... except KeyError as error:
    ...     located_text(error).partition(" (")[0]
    "KeyError: 'answer'"
    """
    text = " ".join(raised_text(error).split())
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{type(error).__name__}: {error.msg} ({_shown(error.filename)}, line {error.lineno})"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_of_user(frame.filename)]
    near = [frame for frame in frames if _is_near(frame.filename)] or frames
    return f"{text} ({_shown(near[-1].filename)}, line {near[-1].lineno})" if near else text


def name_and_place(function: object) -> str:
    """Return the name of a function, a class or an object that is called, and the place of its definition.

    >>> from textwrap import shorten
    >>> name_and_place(shorten).rpartition("/")[2].partition(",")[0]
    'textwrap.py'
    """
    while isinstance(function, partial):
        function = function.func
    kind = function if hasattr(function, "__qualname__") else type(function)
    code = getattr(kind, "__code__", None) or getattr(getattr(kind, "__call__", None), "__code__", None)  # noqa: B004 (its code)
    name = str(getattr(kind, "__qualname__"))  # noqa: B009 (of any callable)
    return name if code is None else f"{name} ({_shown(code.co_filename)}, line {code.co_firstlineno})"


def _is_of_user(filename: str) -> bool:
    return not filename.startswith(("<frozen", OWN)) and "/importlib/" not in filename


def _is_near(filename: str) -> bool:
    return "site-packages" not in filename and Path(filename).is_relative_to(Path.cwd())


def _shown(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename
