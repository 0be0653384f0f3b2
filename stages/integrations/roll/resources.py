"""Amounts of CPUs and GPUs, under the keys of Ray's nodes (`CPU`, `GPU`) or of its options (`num_cpus`, `num_gpus`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from ...._pipeline.errors import InvalidConfig

Kind: TypeAlias = Literal["CPU", "GPU"]

KEYS: dict[Kind, tuple[str, str]] = {"CPU": ("CPU", "num_cpus"), "GPU": ("GPU", "num_gpus")}


def amount_of(resources: Mapping[str, Any], kind: Kind, root: str = "resources") -> float:
    """Return the amount of `kind`; 0 if there is none.

    >>> amount_of({"num_cpus": 4}, "CPU"), amount_of({"CPU": 4.0}, "GPU")
    (4.0, 0.0)

    Raises:
        InvalidConfig: an amount is no number of at least 0, or both keys are there and differ.
    """
    found = {key: resources[key] for key in KEYS[kind] if key in resources}
    for key, amount in found.items():
        if isinstance(amount, bool) or not isinstance(amount, int | float) or not amount >= 0:
            raise InvalidConfig(f"{root}.{key}: expected a number of at least 0, got {amount!r}")
    if len(set(found.values())) > 1:
        raise InvalidConfig(f"{root}: expected one of {' and '.join(KEYS[kind])}, or the same amount, got {found}")
    return float(next(iter(found.values()), 0))


def check_fit(wanted: Mapping[str, Any], node: Mapping[str, Any], root: str) -> None:
    """Check that a node of Ray has the resources that a flow wants.

    Raises:
        InvalidConfig: it has less, or `wanted` is invalid.
    """
    for kind, keys in KEYS.items():
        if (amount := amount_of(wanted, kind, root)) > (there := amount_of(node, kind, "node")):
            named = next(key for key in keys if key in wanted)
            raise InvalidConfig(
                f"{root}.{named}: expected at most {there:g}, the {kind}s of Ray's node, got {amount:g}: what a flow "
                f"starts runs on the node of its worker"
            )
