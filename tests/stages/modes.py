"""The modes, presets and levels that `AdvantageNormalizer` takes, read off its signature."""

from typing import Any, get_args, get_type_hints

from penstock import AdvantageNormalizer

__all__ = ["GATHERING", "LIBRARIES", "MODES", "MODES_OF_LIBRARIES"]

_HINTS = get_type_hints(AdvantageNormalizer.__init__)

MODES: list[Any] = list(get_args(_HINTS["mode"]))

GATHERING = ("batch", "reinforce++", "reinforce++-baseline")
"""The modes that need `batch_groups`."""

LIBRARIES: list[Any] = [name for choice in get_args(_HINTS["preset"]) for name in get_args(choice)]


def _is_accepted(library: str, mode: str) -> bool:
    for batch_groups in (None, 2):
        try:
            AdvantageNormalizer(mode, preset=library, batch_groups=batch_groups)  # type: ignore[arg-type]
        except ValueError:
            continue
        return True
    return False


MODES_OF_LIBRARIES: list[tuple[Any, Any]] = [
    (library, mode) for library in LIBRARIES for mode in MODES if _is_accepted(library, mode)
]
