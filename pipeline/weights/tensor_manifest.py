"""The description of tensors to publish, by name, or of a module with its tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .weight_specs import Tensor, TensorManifest, specs_of

if TYPE_CHECKING:
    from torch import nn


def manifest_of(given: Mapping[str, Tensor] | nn.Module) -> TensorManifest:
    """Return the description of a module, or of tensors by name.

    Raises:
        InvalidConfig: a value is no tensor, or has a dtype that cannot be published, or is a table on the meta device.
    """
    if isinstance(given, Mapping):
        return TensorManifest(specs_of(given))
    from .weight_tables import published_tables  # noqa: PLC0415 (only a process with a torch model imports torch)

    return TensorManifest(specs_of(given.state_dict()), published_tables(given))
