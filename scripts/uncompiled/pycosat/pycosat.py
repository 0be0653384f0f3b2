"""Stands in for pycosat where there is no C compiler to build it: it can be imported, and says so when it is called.

reasoning-gym imports pycosat whatever data set is asked for, but calls it only to generate zebra puzzles.
"""

from __future__ import annotations

from typing import NoReturn

__all__ = ["itersolve", "solve"]


def solve(*_: object, **__: object) -> NoReturn:
    """Refuse.

    Raises:
        RuntimeError: always; the message says how to get the solver.
    """
    raise RuntimeError(
        "pycosat: expected the compiled SAT solver, got the stand-in for machines without a C compiler; "
        "run: apt-get install gcc python3-dev, then pip install --force-reinstall pycosat==0.6.6"
    )


itersolve = solve
