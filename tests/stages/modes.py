"""The modes, presets and levels that `AdvantageNormalizer` takes, read off its signature."""

from typing import Any, get_args, get_type_hints

from penstock import AdvantageNormalizer

__all__ = ["GATHERING", "LIBRARIES", "MODES", "MODES_OF_LIBRARIES", "MODES_OF_SUMS", "of_score"]

_HINTS = get_type_hints(AdvantageNormalizer.__init__)

MODES: list[Any] = list(get_args(_HINTS["mode"]))

MODES_OF_SUMS = [mode for mode in MODES if mode != "gdpo"]
"""The modes that compare rewards, and not the parts of rewards."""

GATHERING = ("batch", "gdpo", "reinforce++", "reinforce++-baseline")
"""The modes that need `batch_groups`."""

LIBRARIES: list[Any] = [name for choice in get_args(_HINTS["preset"]) for name in get_args(choice)]


def of_score(mode: str) -> dict[str, float] | None:
    """Return the components with which gdpo compares the reward itself; None in the other modes."""
    return {"score": 1.0} if mode == "gdpo" else None


def _is_accepted(library: str, mode: str) -> bool:
    for batch_groups in (None, 2):
        try:
            AdvantageNormalizer(mode, preset=library, batch_groups=batch_groups, components=of_score(mode))  # type: ignore[arg-type]
        except ValueError:
            continue
        return True
    return False


MODES_OF_LIBRARIES: list[tuple[Any, Any]] = [
    (library, mode) for library in LIBRARIES for mode in MODES if _is_accepted(library, mode)
]
