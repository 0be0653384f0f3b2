"""The entry point of SkyRL with penstock as its generator, for `trainer.override_entrypoint`."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from ...._pipeline.errors import InvalidConfig
from ...._pipeline.util.named_objects import import_object
from ..interface import object_in
from .engines import no_engines
from .generator import PenstockGenerator

GENERATOR = "penstock.generator"
"""The argument with the name of the function that returns the generator."""

ENTRY = "trainer.override_entrypoint"
"""The argument that makes SkyRL's entry point call `main` (main_base.py:346-358); not a key of its configuration."""


def main() -> None:
    """Train by the arguments of the command line: SkyRL's, and `penstock.generator=module:function`.

    The function is called with SkyRL's configuration and its tokenizer, and returns a `PenstockGenerator`.

    Raises:
        InvalidConfig: there is no such argument, or no such function.
        MissingExtra: SkyRL is not installed.
        MissingInterface: it lacks an interface.
    """
    named, arguments = split(sys.argv[1:])
    cfg = object_in("skyrl", "skyrl.train.config", "SkyRLTrainConfig").from_cli_overrides(arguments)
    object_in("skyrl", "skyrl.train.utils", "validate_cfg")(cfg)
    import_object(named, GENERATOR)  # here rather than in a worker of Ray, where an error would come late
    object_in("skyrl", "skyrl.train.utils.utils", "initialize_ray")(cfg)
    ray = importlib.import_module("ray")  # SkyRL's
    ray.get(ray.remote(num_cpus=1)(run).remote(cfg, named, sys.path[:]))


def split(arguments: list[str]) -> tuple[str, list[str]]:
    """Return the name of the function, and SkyRL's own arguments.

    Raises:
        InvalidConfig: no argument names a function.
    """
    names = [value for name, _, value in (each.partition("=") for each in arguments) if name == GENERATOR]
    if len(names) != 1:
        raise InvalidConfig(f"expected one argument {GENERATOR}=module:function, got {len(names)}")
    return names[0], [each for each in arguments if each.partition("=")[0] not in {GENERATOR, ENTRY}]


def run(cfg: Any, named: str, path: list[str]) -> None:
    """Train, in a process of Ray: SkyRL does not train in that of the command."""
    sys.path += [each for each in path if each not in sys.path]
    experiment(named)(cfg).run()


def experiment(named: str) -> Any:
    """Return SkyRL's `BasePPOExp` with the generator that the function `named` returns."""
    base: Any = object_in("skyrl", "skyrl.train.entrypoints.main_base", "BasePPOExp")

    class PenstockExp(base):  # type: ignore[misc,unused-ignore]  # untyped where absent
        """An experiment of SkyRL without inference engines."""

        def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> Any:  # noqa: ARG002
            return import_object(named, GENERATOR)(cfg, tokenizer)

        def get_inference_client(self) -> Any:
            return no_engines(self.cfg.trainer.policy.model.path)

        def get_trainer(self, *, cfg: Any, generator: Any, **kwargs: Any) -> Any:
            if not isinstance(generator, PenstockGenerator):
                raise InvalidConfig(
                    f"{GENERATOR}={named}: expected it to return a PenstockGenerator, got {generator!r}"
                )
            return generator.trainer(trainer_of(cfg))(cfg=cfg, generator=generator, **kwargs)

    return PenstockExp


def trainer_of(cfg: Any) -> type:
    """Return the trainer of SkyRL that the configuration asks for."""
    asynchronous = cfg.trainer.fully_async
    if asynchronous.simulate_training:
        return object_in("skyrl", "skyrl.train.fully_async_trainer_sim", "FullyAsyncTrainerSim")  # type: ignore[no-any-return]
    if asynchronous.enabled:
        return object_in("skyrl", "skyrl.train.fully_async_trainer", "FullyAsyncRayPPOTrainer")  # type: ignore[no-any-return]
    return object_in("skyrl", "skyrl.train.trainer", "RayPPOTrainer")  # type: ignore[no-any-return]
