"""The callback of TRL's trainers that reports what was trained, and keeps the ledger in checkpoints.

transformers saves the state of such a callback in `trainer_state.json`, the file of a checkpoint that has the step: the
two cannot disagree, and a checkpoint that is moved keeps both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ...._pipeline.errors import MissingInterface
from ...._pipeline.util.extras import extra

STATE = "PenstockLedger"
"""The name of the state in `trainer_state.json`, and of the callback's class."""


class TrainedByTRL(Protocol):
    """Receives the reports of the callback, in the trainer's first process."""

    def train_begins(self, args: Any, loader: Any, *, saved: Mapping[str, Any] | None, resumed: bool) -> None:
        """Note TRL's arguments and data loader, and the state of the checkpoint that it resumes."""
        ...

    def trained_microbatch(self) -> None:
        """Note that the earliest micro-batch was trained."""
        ...

    def stepped(self) -> None:
        """Note that an optimizer step is done."""
        ...

    def step_ends(self, step: int, args: Any) -> None:
        """Note the end of step `step`, by TRL's count."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
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
            saved = state.stateful_callbacks.get(STATE) if state.global_step else None
            reported.train_begins(
                args,
                kwargs.get("train_dataloader"),
                saved=None if saved is None else saved["attributes"]["saved"],
                resumed=state.global_step > 0,
            )
            state.stateful_callbacks.setdefault(STATE, self.state())

        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            if state.is_world_process_zero:
                reported.trained_microbatch()

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            if state.is_world_process_zero:
                reported.trained_microbatch()
                reported.stepped()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            if state.is_world_process_zero:
                reported.step_ends(state.global_step, args)

        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"saved": reported.state_dict()}}

    return PenstockLedger()


def samples_per_version(args: Any) -> int | None:
    """Return the samples that TRL trains between two versions of its weights; None where it packs them by tokens."""
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
