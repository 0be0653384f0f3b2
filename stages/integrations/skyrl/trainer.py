"""Trainers of SkyRL that report trained batches, and send their weights to the same place."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

from ...._pipeline.errors import MissingInterface
from ..interface import TRIED, object_in
from .training import SkyRLTraining

LEDGER = "penstock.json"
"""The file with the ledger, in the folder of a checkpoint of SkyRL."""

HOOKS = ("train", "init_weight_sync_state", "convert_to_training_input", "save_checkpoints", "load_checkpoints")
"""Methods of both of SkyRL's trainers that are extended."""

ASYNC_HOOKS = ("_collect_generation_mini_batch", "convert_generation_group_mini_batch_to_training_input")
"""Those of its fully asynchronous trainer."""


class Dispatch:
    """SkyRL's dispatch to its workers, but for the weights: these go to the publisher instead of inference engines."""

    def __init__(self, dispatch: Any, publish: Callable[[], None]) -> None:
        self._dispatch = dispatch
        self._publish = publish
        self._took_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dispatch, name)

    async def save_weights_for_sampler(self, model_id: str | None = None) -> None:  # noqa: ARG002 (SkyRL's signature)
        """Publish the weights of the last step, and commit it. Called by SkyRL before the first step and after each."""
        began = time.monotonic()
        await asyncio.to_thread(self._publish)
        self._took_s = time.monotonic() - began

    def get_timing_metrics(self) -> dict[str, float]:
        """Return the seconds that the last weights took."""
        return {"sync_weights_only_transfer": self._took_s}


def bound(base: Any, training: SkyRLTraining) -> type:
    """Return `base` with methods that report to `training`.

    Raises:
        MissingExtra: SkyRL is not installed.
        MissingInterface: `base` lacks a method.
    """
    is_async = check_trainer(base)
    found = _committing(base, training, is_async=is_async)
    return _asynchronous(found, training) if is_async else found


def check_trainer(trainer: type) -> bool:
    """Check that a class is a trainer of SkyRL with the methods that are extended; return whether it is asynchronous.

    Raises:
        MissingInterface: it lacks one.
    """
    is_async = issubclass(trainer, object_in("skyrl", "skyrl.train.fully_async_trainer", "FullyAsyncRayPPOTrainer"))
    for hook in (*HOOKS, *(ASYNC_HOOKS if is_async else ())):
        if not callable(getattr(trainer, hook, None)):
            raise MissingInterface(
                f"expected {trainer.__name__}.{hook}, found none: give a trainer of SkyRL, of skyrl=={TRIED['skyrl']}"
            )
    return is_async


def _committing(base: Any, training: SkyRLTraining, *, is_async: bool) -> Any:
    io = object_in("skyrl", "skyrl.backends.skyrl_train.utils.io", "io")

    class Committing(base):  # type: ignore[misc,unused-ignore]  # untyped where absent
        """A trainer of SkyRL that starts the flow, reports trained batches, and sends its weights to the publisher.

        Its checkpoints have the ledger.
        """

        dispatch: Any
        global_step: int

        async def train(self) -> None:
            await asyncio.to_thread(training.begin, fully_async=is_async)
            try:
                await super().train()
            finally:
                await asyncio.to_thread(training.end)

        def init_weight_sync_state(self) -> None:
            if self.dispatch is None:
                super().init_weight_sync_state()  # a simulated trainer makes it here
            if not isinstance(self.dispatch, Dispatch):
                workers = self.dispatch
                self.dispatch = Dispatch(workers, lambda: training.weights_wanted(workers, self.global_step))

        def convert_to_training_input(self, generator_output: Any, uids: Any) -> Any:
            training.rows.batch(generator_output)
            return super().convert_to_training_input(generator_output, uids)

        def save_checkpoints(self) -> Any:
            training.commit(self.global_step)  # the synchronous trainer saves before it wants the weights sent
            folder = f"{self.cfg.trainer.ckpt_path}/global_step_{self.global_step}"
            io.makedirs(folder, exist_ok=True)
            with io.open_file(f"{folder}/{LEDGER}", "w") as file:  # before SkyRL writes that the checkpoint is whole
                json.dump(training.thread.state_dict(), file)
            return super().save_checkpoints()

        def load_checkpoints(self) -> Any:
            loaded = super().load_checkpoints()
            if loaded[0]:
                saved, path = None, f"{loaded[1]}/{LEDGER}"  # the folder may be a URL
                if io.exists(path):
                    with io.open_file(path, "r") as file:
                        saved = json.load(file)
                training.resume(saved)
            return loaded

    return Committing


def _asynchronous(base: Any, training: SkyRLTraining) -> type:
    class Asynchronous(base):  # type: ignore[misc,unused-ignore]  # untyped where absent
        """A fully asynchronous one: its loop raises the errors of the generator."""

        async def _collect_generation_mini_batch(self, *args: Any, **kwargs: Any) -> Any:
            return await training.failure.unless_failed(super()._collect_generation_mini_batch(*args, **kwargs))

        def convert_generation_group_mini_batch_to_training_input(
            self, cur_generation_group_mini_batch: Any, dropped_groups: Any = None
        ) -> Any:
            training.rows.drop([group.generator_output for group in dropped_groups or ()])
            return super().convert_generation_group_mini_batch_to_training_input(
                cur_generation_group_mini_batch, dropped_groups
            )

    return Asynchronous
