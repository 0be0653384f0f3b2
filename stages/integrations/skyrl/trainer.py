"""Trainers of SkyRL that report what they train, and send their weights where the report goes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ...._pipeline.errors import MissingInterface
from ..interface import TRIED, object_in

LEDGER = "penstock.json"
"""The file with the ledger, in the folder of a checkpoint of SkyRL."""

HOOKS = ("train", "init_weight_sync_state", "convert_to_training_input", "save_checkpoints", "load_checkpoints")
"""Methods of both of SkyRL's trainers that are extended."""

ASYNC_HOOKS = ("_collect_generation_mini_batch", "convert_generation_group_mini_batch_to_training_input")
"""Those of its fully asynchronous trainer."""


class TrainedBySkyRL(Protocol):
    """Receives the reports of a trainer. Methods that block run in a thread, or where SkyRL blocks too."""

    def begin(self, *, fully_async: bool) -> None:
        """Note that the trainer begins, before it loads a checkpoint. Blocks."""
        ...

    def resume(self, saved: Mapping[str, Any] | None) -> None:
        """Note the state of the checkpoint that the trainer resumes."""
        ...

    def batch(self, generator_output: Mapping[str, Any]) -> None:
        """Note the rows that are trained next."""
        ...

    def dropped(self, generator_outputs: Sequence[Mapping[str, Any]]) -> None:
        """Note groups that were dropped."""
        ...

    def weights_wanted(self, dispatch: Any, version: int) -> None:
        """Note that samplers are to have the weights of the workers of `dispatch`: the step is done. Blocks."""
        ...

    def commit(self, version: int) -> None:
        """Note that the step is done that made the weights of `version`. Blocks."""
        ...

    async def unless_failed(self, collecting: Any) -> Any:
        """Return what `collecting` returns, or raise the error of the generation if that comes first."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        ...

    def end(self) -> None:
        """Note that the trainer ends. Blocks."""
        ...


class Dispatch:
    """SkyRL's dispatch to its workers, but for the weights, which go to the publisher instead of inference engines."""

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


def bound(base: Any, generator: TrainedBySkyRL) -> type:
    """Return `base` with methods that report to `generator`.

    Raises:
        MissingExtra: SkyRL is not installed.
        MissingInterface: `base` lacks a method.
    """
    is_async = check_trainer(base)
    found = _with_checkpoints(_committing(base, generator, is_async=is_async), generator)
    return _asynchronous(found, generator) if is_async else found


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


def _committing(base: Any, generator: TrainedBySkyRL, *, is_async: bool) -> Any:
    class Committing(base):  # type: ignore[misc,unused-ignore]  # untyped where absent
        """A trainer of SkyRL that starts the flow, reports what it trains, and sends its weights to the publisher."""

        dispatch: Any
        global_step: int

        async def train(self) -> None:
            await asyncio.to_thread(generator.begin, fully_async=is_async)
            try:
                await super().train()
            finally:
                await asyncio.to_thread(generator.end)

        def init_weight_sync_state(self) -> None:
            if self.dispatch is None:
                super().init_weight_sync_state()  # a simulated trainer makes it here
            if not isinstance(self.dispatch, Dispatch):
                workers = self.dispatch
                self.dispatch = Dispatch(workers, lambda: generator.weights_wanted(workers, self.global_step))

        def convert_to_training_input(self, generator_output: Any, uids: Any) -> Any:
            generator.batch(generator_output)
            return super().convert_to_training_input(generator_output, uids)

    return Committing


def _with_checkpoints(base: Any, generator: TrainedBySkyRL) -> Any:
    io = object_in("skyrl", "skyrl.backends.skyrl_train.utils.io", "io")

    def ledger_in(folder: object) -> str:
        return f"{folder}/{LEDGER}"  # the folder may be a URL

    class WithCheckpoints(base):  # type: ignore[misc,unused-ignore]  # untyped where absent
        """One whose checkpoints have the ledger."""

        def save_checkpoints(self) -> Any:
            generator.commit(self.global_step)  # the synchronous trainer saves before it wants the weights sent
            folder = f"{self.cfg.trainer.ckpt_path}/global_step_{self.global_step}"
            io.makedirs(folder, exist_ok=True)
            with io.open_file(ledger_in(folder), "w") as file:  # before SkyRL writes that the checkpoint is whole
                json.dump(generator.state_dict(), file)
            return super().save_checkpoints()

        def load_checkpoints(self) -> Any:
            loaded = super().load_checkpoints()
            if loaded[0]:
                saved = None
                if io.exists(ledger_in(loaded[1])):
                    with io.open_file(ledger_in(loaded[1]), "r") as file:
                        saved = json.load(file)
                generator.resume(saved)
            return loaded

    return WithCheckpoints


def _asynchronous(base: Any, generator: TrainedBySkyRL) -> type:
    class Asynchronous(base):  # type: ignore[misc,unused-ignore]  # untyped where absent
        """A fully asynchronous one: its loop raises the errors of the generator."""

        async def _collect_generation_mini_batch(self, *args: Any, **kwargs: Any) -> Any:
            return await generator.unless_failed(super()._collect_generation_mini_batch(*args, **kwargs))

        def convert_generation_group_mini_batch_to_training_input(
            self, cur_generation_group_mini_batch: Any, dropped_groups: Any = None
        ) -> Any:
            generator.dropped([group.generator_output for group in dropped_groups or ()])
            return super().convert_generation_group_mini_batch_to_training_input(
                cur_generation_group_mini_batch, dropped_groups
            )

    return Asynchronous
