"""`GivenRows`: the rows that SkyRL was given, until the flow's ledger has committed or ended them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...._pipeline.errors import InvalidPipeline
from ...batching.batcher import NOTHING_TO_TRAIN
from ..flow_thread.deliveries import Deliveries
from ..flow_thread.flow_run import Drop
from ..flow_thread.flow_thread import FlowThread
from ..flow_thread.sample_queue import Trajectories
from .input_rows import Key, keys_of
from .samples import Asked

EVALUATED = Drop("filtered", "evaluation by SkyRL", evaluated=True)

DROPPED = Drop("filtered", "dropped by SkyRL")

UNTRAINED = Drop("filtered", NOTHING_TO_TRAIN)


class GivenRows:
    """The rows that SkyRL was given, by its names of them. All methods are called in the trainer's thread."""

    def __init__(self, thread: FlowThread) -> None:
        """Prepare; `thread` runs the flow with the ledger."""
        self._thread = thread
        self._deliveries: Deliveries[Key, None] = Deliveries()

    def __repr__(self) -> str:
        return repr(self._deliveries)

    def give(self, asked: Sequence[Asked]) -> None:
        """Note rows that SkyRL may train; drop those that it was given under the same names before."""
        for each in (sampled for sampled in asked if sampled.ids):
            self._end(self._deliveries.give((each.request.instance_id, each.repetition), each.ids, None), DROPPED)

    def evaluate(self, asked: Sequence[Asked]) -> None:
        """End rows that SkyRL evaluates."""
        self._end(tuple(trajectory for each in asked for trajectory in each.ids), EVALUATED)

    def batch(self, generator_output: Mapping[str, Any]) -> None:
        """Note the rows that SkyRL trains next.

        Raises:
            InvalidPipeline: they have no names.
        """
        if (ids := generator_output.get("trajectory_ids")) is None:
            raise InvalidPipeline(
                "SkyRL: expected trajectory_ids with what it trains, got none: nothing can be committed"
            )
        keys, masks = keys_of(ids), generator_output["loss_masks"]
        masked = [key for key, mask in zip(keys, masks, strict=True) if not any(mask)]
        self._end(self._deliveries.drop(masked), UNTRAINED)
        self._deliveries.batch(keys)

    def drop(self, generator_outputs: Sequence[Mapping[str, Any]]) -> None:
        """End groups that SkyRL has dropped."""
        keys = [key for each in generator_outputs for key in keys_of(each.get("trajectory_ids") or ())]
        self._end(self._deliveries.drop(keys), DROPPED)

    def commit(self, version: int, *, keep_rest: bool) -> None:
        """Commit all batches at `version`; end the rows in none, unless SkyRL may `keep_rest` for a later one. Blocks.

        Rows end only if SkyRL has trained since the last call.
        """
        self._deliveries.step_all()
        if trained := self._deliveries.stepped():
            if not keep_rest:
                self._end(self._deliveries.drop([*self._deliveries.given]), DROPPED)
            self._thread.commit(trained, version)

    def _end(self, trajectories: Trajectories, drop: Drop) -> None:
        if trajectories:
            run = self._thread.run
            run.post(lambda: run.end(trajectories, drop))
