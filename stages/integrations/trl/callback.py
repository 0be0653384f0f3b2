"""The callback of TRL's trainers that reports trained steps, and keeps the ledger in checkpoints.

transformers saves the state of such a callback in `trainer_state.json`, the file of a checkpoint that has the step: the
two cannot disagree, and a checkpoint that is moved keeps both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ...._pipeline.accounting.telemetry import get_logger
from ...._pipeline.errors import MissingInterface
from ...._pipeline.util.extras import extra
from ..flow_thread.deliveries import Deliveries

log = get_logger("penstock.trl")

STATE = "PenstockLedger"
"""The name of the state in `trainer_state.json`, and of the callback's class."""


class TrainedByTRL(Protocol):
    """Receives the reports of the callback, in the trainer's first process."""

    deliveries: Deliveries[Any, Any]
    """The samples that TRL was given; its oldest batch is the next that is trained."""

    def train_begins(self, args: Any, loader: Any, saved: Mapping[str, Any] | None) -> None:
        """Note TRL's arguments and data loader, and the state of the checkpoint that it resumes."""
        ...

    def step_ends(self, step: int, args: Any) -> None:
        """Note the end of step `step`, by TRL's count."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        ...


def callback_of(reported: TrainedByTRL) -> Any:
    """Return a `transformers.TrainerCallback` for `reported`.

    Raises:
        MissingExtra: transformers is not installed.
    """
    with extra("trl", "penstock.integrations.trl"):
        from transformers import TrainerCallback  # noqa: PLC0415 (only where TRL trains)
        from transformers.trainer_callback import ExportableState  # noqa: PLC0415 (as above)

    class PenstockLedger(TrainerCallback, ExportableState):  # type: ignore[misc,unused-ignore]  # untyped where absent
        """Reports to one object; made without arguments, as transformers makes it again from a checkpoint."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            if not state.is_world_process_zero:
                return
            reported.train_begins(args, kwargs.get("train_dataloader"), _saved_in(state))
            state.stateful_callbacks.setdefault(STATE, self.state())

        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            if state.is_world_process_zero:
                reported.deliveries.train()

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            if state.is_world_process_zero:
                reported.deliveries.train()
                reported.deliveries.step()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            if state.is_world_process_zero:
                reported.step_ends(state.global_step, args)

        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"saved": reported.state_dict()}}

    return PenstockLedger()


def _saved_in(state: Any) -> Mapping[str, Any] | None:
    """Return the ledger of the checkpoint that TRL resumes; None at its first step, or if there is none."""
    if not state.global_step:
        return None
    if (saved := state.stateful_callbacks.get(STATE)) is None:
        log.warning("resumed_without_ledger", consequence="prompts that were trained may be trained again")
        return None
    found: Mapping[str, Any] = saved["attributes"]["saved"]
    return found


def samples_per_version(args: Any) -> int | None:
    """Return the samples that TRL trains between two versions of its weights; None if it packs them by tokens."""
    if (args.token_budget or 0) > 0:
        return None
    in_a_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    return int(in_a_step * args.weight_sync_steps)


def note_collated(loader: Any, collated: Callable[[list[Any]], None]) -> None:
    """Have `collated` called with the `input_ids` of every micro-batch that the loader's function collates.

    Raises:
        MissingInterface: the loader has no such function.
    """
    loader = getattr(loader, "base_dataloader", loader)  # accelerate's is around torch's
    collate = getattr(loader, "collate_fn", None)
    if collate is None:
        raise MissingInterface(
            f"expected a data loader with collate_fn in on_train_begin, found {type(loader).__name__}: what TRL trains "
            f"cannot be known"
        )

    def noting(rows: Any) -> Any:
        collated([example["input_ids"] for row in rows[0] for example in row.samples])
        return collate(rows)

    loader.collate_fn = noting
