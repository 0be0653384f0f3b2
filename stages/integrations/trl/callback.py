"""The callback of TRL's trainer that reports to a `TRLWorker` what was trained, and keeps its ledger in checkpoints.

transformers saves the state of such a callback in `trainer_state.json`, the file of a checkpoint that has the step: the
two cannot disagree, and a checkpoint that is moved keeps both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...._pipeline.errors import MissingInterface
from ...._pipeline.util.extras import extra
from .deliveries import Limits
from .interface import NEEDED_BY

if TYPE_CHECKING:
    from .rollout_func import Rollouts
    from .worker import TRLWorker

STATE = "PenstockLedger"
"""The name of the state in `trainer_state.json`, and of the callback's class."""


def callback_of(worker: TRLWorker) -> Any:
    """Return a `transformers.TrainerCallback` for `worker`.

    Raises:
        MissingExtra: transformers is not installed.
    """
    with extra("trl", NEEDED_BY):
        from transformers import TrainerCallback  # noqa: PLC0415 (only where TRL trains)
        from transformers.trainer_callback import ExportableState  # noqa: PLC0415 (as above)

    class PenstockLedger(TrainerCallback, ExportableState):  # type: ignore[misc,unused-ignore]  # untyped where absent
        """Reports to one worker; made without arguments, as transformers makes it again from a checkpoint."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            if not state.is_world_process_zero:
                return
            saved = state.stateful_callbacks.get(STATE) if state.global_step else None
            worker.begin(
                Limits(args.max_staleness, args.token_budget or 0),
                temperature=args.temperature,
                per_version=samples_per_version(args),
                saved=None if saved is None else saved["attributes"]["saved"],
                resumed=state.global_step > 0,
            )
            note_collated(kwargs.get("train_dataloader"), worker.collated)
            state.stateful_callbacks.setdefault(STATE, self.state())

        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            if state.is_world_process_zero:
                worker.trained_microbatch()

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            if state.is_world_process_zero:
                worker.trained_microbatch()
                worker.stepped()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            if state.is_world_process_zero and state.global_step % args.weight_sync_steps:
                worker.commit()  # else when TRL names the version that it has sent

        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"saved": worker.state_dict()}}

    return PenstockLedger()


def synchronous_callback_of(rollouts: Rollouts) -> Any:
    """Return a `transformers.TrainerCallback` for `rollouts`.

    Raises:
        MissingExtra: transformers is not installed.
    """
    with extra("trl", NEEDED_BY):
        from transformers import TrainerCallback  # noqa: PLC0415 (only where TRL trains)
        from transformers.trainer_callback import ExportableState  # noqa: PLC0415 (as above)

    class PenstockLedger(TrainerCallback, ExportableState):  # type: ignore[misc,unused-ignore]  # untyped where absent
        """Reports to one object; made without arguments, as transformers makes it again from a checkpoint."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            saved = state.stateful_callbacks.get(STATE) if state.global_step else None
            rollouts.begin(None if saved is None else saved["attributes"]["saved"], resumed=state.global_step > 0)
            state.stateful_callbacks.setdefault(STATE, self.state())

        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            rollouts.trained_microbatch()

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            rollouts.trained_microbatch()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            rollouts.commit()

        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"saved": rollouts.state_dict()}}

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
