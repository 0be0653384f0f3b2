"""`PenstockCheckpoint`: the ledger in verl's checkpoints; for `trainer.checkpoint_callback_class`."""

from __future__ import annotations

from typing import Any

from ...._pipeline.errors import InvalidPipeline
from .manager import PenstockLoopManager


class PenstockCheckpoint:
    """Writes the ledger of the flow, and the state of its stages, into each checkpoint of verl's trainer."""

    def __init__(self, config: Any = None) -> None:
        """Prepare.

        Args:
            config: of verl's trainer; not used.
        """

    def on_save(self, trainer: Any, global_step: int, checkpoint_dir: str, **_: Any) -> None:
        """Write into `checkpoint_dir`. Called by verl when it has saved a checkpoint.

        Raises:
            InvalidPipeline: the trainer's agent loop manager is no PenstockLoopManager.
            OSError: the file cannot be written.
        """
        manager = trainer.agent_loop_manager
        if not isinstance(manager, PenstockLoopManager):
            raise InvalidPipeline(
                f"trainer.checkpoint_callback_class: expected a trainer with PenstockLoopManager, got "
                f"{type(manager).__name__}: set actor_rollout_ref.rollout.agent.agent_loop_manager_class"
            )
        manager.save(checkpoint_dir, global_step)
