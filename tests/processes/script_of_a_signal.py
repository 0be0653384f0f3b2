"""A script that gets SIGTERM while its run installs its signal handlers, or while it restores those before.

    python -m tests.processes.script_of_a_signal MOMENT

MOMENT is `installing` or `restoring`. The signal arrives when the handler of SIGHUP changes: that of SIGTERM is
installed already, and not yet restored.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

import anyio
from tests.pipeline.flow_stages import Collect, Count

from penstock import source

moments = iter(["installing", "restoring"])
change: Any = signal.signal


def change_signalled(number: Any, handler: Any) -> Any:
    if number == signal.SIGHUP and next(moments) == sys.argv[1]:
        signal.raise_signal(signal.SIGTERM)
    return change(number, handler)


if __name__ == "__main__":
    setattr(signal, "signal", change_signalled)  # noqa: B010 (its type is that of one function)
    anyio.run(source(Count(3)).sink(Collect()).run)
