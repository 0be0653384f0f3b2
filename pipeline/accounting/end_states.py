"""The states in which a trajectory may end."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

EndState: TypeAlias = Literal["trained", "filtered", "stale", "rejected", "failed", "lost", "unfinished"]
"""The end states of a trajectory.

trained: the optimizer step that used it is done · filtered: dropped by choice (zero variance, a length limit) ·
stale: older than the lag bound · rejected: refused as invalid · failed: its environment or reward raised or ran out of
time · lost: the process that held it died, or a failure ended the run · unfinished: the run ended, as it should, before
it was needed.
"""

END_STATES: tuple[EndState, ...] = get_args(EndState)

OTHER_REASONS = "other reasons"
"""The reason of those that are not distinguished, because there are too many."""
