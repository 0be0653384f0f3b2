"""penstock as an engine of verl: no servers of verl's, and weights to a publisher of penstock.

verl finds engines by name in three registries: the part in the actor's process (workers/rollout/base.py:84), the
servers (workers/rollout/replica.py:276) and the transfer of weights between the two (checkpoint_engine/base.py:51). The
classes here have the methods that verl calls, without its base classes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Mapping
from typing import Any, TypeAlias

from ...._pipeline.errors import InvalidPipeline
from ...._pipeline.util.named_objects import import_object
from ..flow_thread.weight_transfer import WeightTransfer
from ..interface import object_in

NAME = "penstock"
"""The name in `actor_rollout_ref.rollout.name`, and in `checkpoint_engine.backend`."""

PUBLISHER = f"actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.{NAME}.publisher"

Weights: TypeAlias = Iterable[tuple[str, Any]] | AsyncIterable[tuple[str, Any]]


def register() -> None:
    """Name penstock to verl, in this process; twice is no error.

    Raises:
        MissingExtra: verl is not installed.
        MissingInterface: verl lacks a registry.
    """
    rollouts = object_in("verl", "verl.workers.rollout.base", "_ROLLOUT_REGISTRY")  # it has no function
    rollouts[NAME, "async"] = f"{PenstockRollout.__module__}.{PenstockRollout.__name__}"
    object_in("verl", "verl.workers.rollout.replica", "RolloutReplicaRegistry").register(NAME, lambda: PenstockReplica)
    object_in("verl", "verl.checkpoint_engine.base", "CheckpointEngineRegistry").register(NAME)(
        PenstockCheckpointEngine
    )


class Publishing:
    """Publishes the weights that one process of the actor sends; the others only take part in gathering them."""

    def __init__(self, publisher: str | None, arguments: Mapping[str, Any], *, publishes: bool) -> None:
        """Prepare; the publisher is opened with the first weights.

        Args:
            publisher: `module:function` of a function that returns it.
            arguments: of that function, by name.
            publishes: whether this process has rank 0.

        Raises:
            InvalidPipeline: there is no publisher.
            InvalidConfig: there is no function of that name.
        """
        if publisher is None:
            raise InvalidPipeline(
                f"verl: expected +{PUBLISHER}=module:function, a function that returns a WeightFolder or another "
                f"publisher, got none"
            )
        opening = import_object(publisher, PUBLISHER)
        self._transfer = WeightTransfer(opening(**arguments), "penstock-verl-weights") if publishes else None

    async def send(self, weights: Weights, version: int) -> None:
        """Gather all tensors, and publish them as `version`, verl's step; return when samplers can load them.

        Raises:
            WeightsMismatch: the tensors are not those that the publisher was made for.
        """
        tensors: dict[str, Any] = {}
        async for name, tensor in _asynchronously(weights):
            if self._transfer is not None:
                tensors[name] = tensor.detach().cpu()  # one after the other: the device has no room for all
        if self._transfer is not None:
            await asyncio.to_thread(self._publish, self._transfer, tensors, version)

    def _publish(self, transfer: WeightTransfer, tensors: Mapping[str, Any], version: int) -> None:
        if not transfer.is_open:
            transfer.open()
        transfer.send(tensors, version)


async def _asynchronously(weights: Weights) -> AsyncGenerator[tuple[str, Any]]:
    if isinstance(weights, AsyncIterable):
        async for each in weights:
            yield each
    else:
        for each in weights:
            yield each


class PenstockRollout:
    """The part of the engine in each process of verl's actor, for trainers that share their devices with sampling."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, **_: Any) -> None:  # noqa: ARG002 (of the interface)
        """Prepare; see `BaseRollout` of verl.

        Raises:
            InvalidPipeline: there is no publisher.
            InvalidConfig: there is no function of that name.
        """
        given = dict(config.checkpoint_engine.engine_kwargs.get(NAME, {}))
        rank = object_in("verl", "torch.distributed", "get_rank")()
        self._publishing = Publishing(given.pop("publisher", None), given, publishes=rank == 0)
        self.sleep_level: int = 2
        """Set by verl for adapters."""

    async def resume(self, tags: list[str]) -> None:
        """Do nothing: this process has no copy of the weights and no cache."""

    async def release(self) -> None:
        """Do nothing; see `resume`."""

    async def update_weights(self, weights: Weights, *, global_steps: int, peft_config: Any = None, **_: Any) -> None:
        """Publish the weights of step `global_steps`.

        Raises:
            InvalidPipeline: the weights are those of an adapter.
            WeightsMismatch: the tensors are not those that the publisher was made for.
        """
        if peft_config is not None:
            raise InvalidPipeline(
                "verl: expected the weights of the whole model, got those of an adapter: set "
                "actor_rollout_ref.model.lora.merge=True"
            )
        await self._publishing.send(weights, global_steps)


class NoReceiver:
    """A process in the place of those that receive weights; the publisher of the actor has its own receivers."""

    def execute_checkpoint_engine(self, method: str, **_: Any) -> None:
        """Do nothing. Called by verl before and after weights are sent."""

    async def update_weights(self, global_steps: int | None = None) -> None:
        """Do nothing. Called by verl while the actor sends weights."""


class PenstockReplica:
    """A stand-in for a server of verl: the flow samples, in processes and on servers of its own."""

    def __init__(self, replica_rank: int, **_: Any) -> None:
        """Prepare; see `RolloutReplica` of verl."""
        self.replica_rank: int = replica_rank
        self.workers: list[Any] = []
        """Processes of verl's that would receive weights."""
        self._server_address: str = f"{NAME}-{replica_rank}"
        self._server_handle: Any = None

    async def init_hybrid(self, worker_group: Any) -> None:
        """Do nothing: verl's servers would be started here."""

    async def init_standalone(self) -> None:
        """Start an idle process: verl wants one to send weights to. It takes no device."""
        remote = object_in("verl", "ray", "remote")
        self.workers = [remote(num_cpus=0)(NoReceiver).remote()]

    async def sleep(self) -> None:
        """Do nothing: sampling has no part of the trainer's devices."""

    async def wake_up(self) -> None:
        """Do nothing; see `sleep`."""

    async def abort_all_requests(self, *, reject_request: bool = False) -> None:
        """Do nothing: samplers load new weights by themselves, and tokens have the version that sampled them."""

    async def resume_generation(self) -> None:
        """Do nothing; see `abort_all_requests`."""

    async def release_kv_cache(self) -> None:
        """Do nothing; see `sleep`."""

    async def resume_kv_cache(self) -> None:
        """Do nothing; see `sleep`."""

    async def clear_kv_cache(self) -> None:
        """Do nothing; see `sleep`."""

    async def start_profile(self, **_: Any) -> None:
        """Do nothing: penstock has no profiler of verl's."""

    async def stop_profile(self) -> None:
        """Do nothing; see `start_profile`."""


class PenstockCheckpointEngine:
    """The transfer of weights for trainers with devices of their own: `checkpoint_engine.backend=penstock`."""

    wire_format = "named_tensors"

    def __init__(
        self,
        bucket_size: int,  # noqa: ARG002 (of the interface)
        *,
        is_master: bool = False,
        publisher: str | None = None,
        **arguments: Any,
    ) -> None:
        """Prepare; see `CheckpointEngine` of verl.

        Raises:
            InvalidPipeline: there is no publisher.
            InvalidConfig: there is no function of that name.
        """
        self._publishing = Publishing(publisher, arguments, publishes=is_master)

    def prepare(self) -> None:
        """Do nothing: the publisher has its memory."""

    @classmethod
    def build_topology(
        cls,
        actor_wg_world_size: int,
        rollout_world_size: int,
        metadata: list[Any],  # noqa: ARG003 (of the interface)
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the arguments of `init_process_group` for each side: their processes do not talk to each other."""
        return {"rank": list(range(actor_wg_world_size))}, {"rank": list(range(rollout_world_size))}

    def init_process_group(self, rank: int) -> None:
        """Do nothing; see `build_topology`."""

    def finalize(self) -> None:
        """Do nothing: the publisher stays open for the next weights."""

    async def send_weights(self, weights: Weights, global_steps: int) -> None:
        """Publish the weights of step `global_steps`. Called by verl in every process of the actor.

        Raises:
            WeightsMismatch: the tensors are not those that the publisher was made for.
        """
        await self._publishing.send(weights, global_steps)

    def receive_weights(self, global_steps: int | None = None) -> Any:
        """Raise: an engine of verl's would receive them.

        Raises:
            InvalidPipeline: always.
        """
        raise InvalidPipeline(
            f"verl: expected actor_rollout_ref.rollout.name={NAME} with checkpoint_engine.backend={NAME}, got an "
            f"engine of verl's for the weights of step {global_steps}"
        )
