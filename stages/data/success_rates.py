"""`SuccessRates`: records the mean reward of each group for the `Curriculum` of its set. Groups pass as they are."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from ..._pipeline.channels.channel import ReceiveChannel, SendChannel
from ..._pipeline.durability.resumption import ResumePoint
from ..._pipeline.errors import InvalidConfig
from ..._pipeline.graph.stage_info import StageInfo
from ..._schemas import TrajectoryGroup
from ..._schemas.conversion import convert
from .curriculum import DTYPE, RateFile
from .mixture import MixedPrompts, Mixture
from .prompt_dataset import PromptDataset, PromptSet


@dataclass(slots=True)
class SuccessRates:
    """Record mean rewards, after the stage that computes them and before one that drops groups.

    Checkpoints contain them, so that a resumed run leaves out what it left out before.

    Raises:
        InvalidConfig: no set of `data` has a curriculum.
    """

    data: PromptDataset | Mixture
    """The prompts of the source."""
    _prompts: PromptSet | MixedPrompts | None = field(default=None, init=False, repr=False)
    _rates: dict[str, NDArray[np.float32]] = field(default_factory=dict, init=False, repr=False)
    """Memory of the file of each set with a curriculum, by its name."""
    _restored: dict[str, NDArray[np.float32]] = field(default_factory=dict, init=False, repr=False)
    """Those of the checkpoint that a run is continued from."""

    def __post_init__(self) -> None:
        if not self._sets():
            raise InvalidConfig("SuccessRates.data: expected a set with a curriculum, got none")

    def stage_info(self) -> StageInfo:
        """State that no column is added."""
        return StageInfo(fills_columns=())

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        """Run the stage; see `Stage`."""
        self._prompts, self._rates = await anyio.to_thread.run_sync(self._opened)
        async for group in inbox:
            self._record(group)
            await outbox.send(group)
            del group  # it may occupy a producer's slots until the next one arrives

    def _record(self, group: TrajectoryGroup) -> None:
        if self._prompts is None or not group.instance_id.isdecimal():
            return
        which, place = self._prompts.place_of(int(group.instance_id))
        if which in self._rates:
            self._rates[which][place] = np.mean(group.rewards, dtype=np.float64)

    def _sets(self) -> dict[str, PromptDataset]:
        sets = self.data.sets if isinstance(self.data, Mixture) else (self.data,)
        return {each.data_source: each for each in sets if each.curriculum is not None}

    def resume_from(self, _: ResumePoint, /) -> Self:
        """Write the files before a source reads them: those of a killed run are newer than its checkpoint. Blocks."""
        self._opened()
        return self

    def _opened(self) -> tuple[PromptSet | MixedPrompts, dict[str, NDArray[np.float32]]]:
        """Open the sets, and their files with the rewards of a checkpoint, or without any."""
        prompts, rates = self.data(), dict[str, NDArray[np.float32]]()
        for name, each in self._sets().items():
            if each.curriculum is not None:
                restored, rows = self._restored.get(name), prompts.rows_of(name)
                if restored is not None and len(restored) != rows:
                    raise ValueError(f"{name}: expected {rows} numbers of rows, got {len(restored)}")
                rates[name] = RateFile(each.curriculum.path, rows).begin(restored)
        return prompts, rates

    def state_dict(self) -> dict[str, str]:
        """Return the mean rewards of each set for a checkpoint, by its place: its name may change."""
        rates = self._rates or self._restored
        return {
            place: base64.b64encode(rates[name].tobytes()).decode()
            for place, name in self._places().items()
            if name in rates
        }

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Restore the state that `state_dict` returned.

        Raises:
            ValueError: it has more sets, or a part of a number.
            msgspec.ValidationError: it is no mapping, or a text is no base64.
        """
        places, found = self._places(), convert(state, dict[str, bytes])
        if unknown := sorted(found.keys() - places.keys()):
            raise ValueError(f"expected the rewards of {len(places)} sets, got those of a set {unknown[0]!r}")
        self._restored = {places[place]: np.frombuffer(each, DTYPE) for place, each in found.items()}

    def _places(self) -> dict[str, str]:
        """Return the names of the sets with a curriculum by their places among them."""
        return {str(place): name for place, name in enumerate(self._sets())}
