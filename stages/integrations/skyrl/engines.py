"""A client without inference engines, for SkyRL's trainers: to pause, put to sleep or send weights has no effect."""

from __future__ import annotations

from typing import Any

from ...contracts.policies import GenerationIsOutside
from ..interface import object_in

NOTHING_TO_DO = (
    *("wake_up", "sleep", "sleep_for_weight_sync", "wake_for_weight_sync", "pause_generation", "resume_generation"),
    *("reset_prefix_cache", "finish_session", "teardown", "aclose", "update_named_weights", "load_lora_adapter"),
)
"""Coroutine methods that act on engines."""


def no_engines(model_name: str) -> Any:
    """Return an `InferenceEngineInterface` without engines. Methods that would generate raise `GenerationIsOutside`.

    Raises:
        MissingExtra: SkyRL is not installed.
        MissingInterface: it has no such interface.
    """
    interface = object_in("skyrl", "skyrl.backends.skyrl_train.inference_servers.base", "InferenceEngineInterface")
    methods: dict[str, Any] = dict.fromkeys(interface.__abstractmethods__, _generates)  # also those of later versions
    methods |= dict.fromkeys(NOTHING_TO_DO, _does_nothing)
    methods |= {
        "model_name": property(lambda _: model_name),
        "get_world_size": _has_no_ranks,
        "is_sleeping": _is_awake,
        "increment_weight_version": lambda _: None,
        "__repr__": lambda _: "<no inference engines: penstock generates>",
    }
    return type("NoEngines", (interface,), methods)()


async def _does_nothing(*_: object, **__: object) -> None:
    pass


async def _is_awake(_: object) -> bool:
    return False


async def _has_no_ranks(_: object) -> tuple[int, int]:
    return 0, 0


def _generates(*_: object, **__: object) -> None:
    raise GenerationIsOutside(
        "SkyRL asked an inference engine: expected its generator to be asked, for penstock generates"
    )
