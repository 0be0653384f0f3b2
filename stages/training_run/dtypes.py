"""The dtype of frozen weights in a configured run: the base of adapters, the reference, and the torch engine.

If a run trains in bfloat16 on a CUDA device, it is bfloat16: half the memory and the fast products. Otherwise it is
float32: a sampler's log-probabilities are then those of the trainer. Imports no torch.
"""

from __future__ import annotations

from .run_config import BaseDtype, PlacementConfig, RunConfig


def base_dtype(config: RunConfig, kind: str) -> BaseDtype:
    """Return the dtype of weights that do not train on a device of type `kind`, `cuda` or `cpu`."""
    model = config.model
    if model.base_dtype is not None:
        return model.base_dtype
    return "bfloat16" if kind == "cuda" and model.precision == "bfloat16" else "float32"


def reference_dtype(config: RunConfig, kind: str) -> BaseDtype:
    """Return the dtype of a reference beside the model; one that moves in small steps is float32, to keep them."""
    return "float32" if config.algorithm.reference.share else base_dtype(config, kind)


def sampled_dtype(config: RunConfig, kind: str) -> BaseDtype:
    """Return the dtype of the torch engine's model, equal in all its processes; `kind` is the trainer's.

    The trainer publishes its weights in it.
    """
    return base_dtype(config, _sampling_kind(config.placement, kind))


def _sampling_kind(placement: PlacementConfig, trains: str) -> str:
    """Return the type of the devices that sample; that of hosts not known yet counts as `cpu`."""
    if placement.sampler_device:
        return placement.sampler_device.partition(":")[0]
    if placement.joining is not None:
        return "cpu"
    if placement.ray is not None:
        return "cuda" if placement.ray.num_gpus else "cpu"
    return trains
