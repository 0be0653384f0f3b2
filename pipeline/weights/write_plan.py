"""The plan by which every publisher writes: the position of each given tensor in the published layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from .tensor_layout import TensorLayout
from .weight_specs import FusedTensor, Tensor, TensorManifest, TensorSpec, cast_specs, fitted, packed, specs_of


class WritePlan:
    """The tensors that are given at every publication, and the position of each in the published layout."""

    def __init__(
        self,
        given: TensorManifest,
        fused: Iterable[FusedTensor] = (),
        cast: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Plan for tensors as in `given`.

        Raises:
            WeightsMismatch: `fused` names tensors that are absent or do not go together.
            ValueError: `cast` names a dtype that cannot be published.
        """
        self._given = given.tensors
        specs, parts = packed(cast_specs(given.tensors, cast), fused, "weights to publish")
        self.layout = TensorLayout(TensorManifest(specs, given.tables))
        self._parts = sorted((part for part in parts if not part.spec.tied), key=self.layout.offset)

    def check(self, tensors: Mapping[str, Tensor], version: int, *, newest: int) -> None:
        """Raise if `tensors` cannot be published as `version` after `newest`.

        Raises:
            WeightsMismatch: the tensors are not those that were planned for.
            ValueError: `version` is not above `newest`.
        """
        fitted(self._given, specs_of(tensors), (), "weights to publish")
        if version <= newest:
            raise ValueError(f"expected a version above {newest}, got {version}")

    def pieces(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[int, Tensor, TensorSpec]]:
        """Yield the offset of each tensor, the tensor, and its published dtype and shape: in order, without gaps."""
        for part in self._parts:
            yield self.layout.offset(part), tensors[part.spec.name], part.spec
