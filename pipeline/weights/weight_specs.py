"""Descriptions of tensors (names, dtypes, shapes, ties), fused tensors, and the comparison of a model with weights.

The comparison reports every different name, dtype, shape and tie at once. This module reads no elements of tensors, and
does not import torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from ..._schemas import Array
from ..errors import InvalidConfig, WeightsMismatch

if TYPE_CHECKING:
    import torch

Tensor: TypeAlias = "Array | torch.Tensor"
"""Weights are numpy arrays or torch tensors, on any device."""


class Dtype(NamedTuple):
    """A dtype that can be published."""

    code: str
    """Its name in a safetensors file."""
    nbytes: int
    """Bytes of an element."""


DTYPES = {
    "bool": Dtype("BOOL", 1),
    "uint8": Dtype("U8", 1),
    "int8": Dtype("I8", 1),
    "int16": Dtype("I16", 2),
    "int32": Dtype("I32", 4),
    "int64": Dtype("I64", 8),
    "float8_e4m3fn": Dtype("F8_E4M3", 1),
    "float8_e5m2": Dtype("F8_E5M2", 1),
    "float16": Dtype("F16", 2),
    "bfloat16": Dtype("BF16", 2),
    "float32": Dtype("F32", 4),
    "float64": Dtype("F64", 8),
}
"""The dtypes that can be published, by the name that numpy and torch give them."""


class TensorSpec(NamedTuple):
    """The description of a tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    tied: str = ""
    """The earlier tensor with the same memory; empty if it has memory of its own."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return DTYPES[self.dtype].nbytes * math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class TableSpec(NamedTuple):
    """The description of a table: a tensor that is not in a state_dict."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    xxh3: str
    """Hash of its bytes (128 bits, hexadecimal); empty on the meta device."""

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)} {f'of xxh3 {self.xxh3}' if self.xxh3 else 'of the meta device'}"


class TensorManifest(NamedTuple):
    """The description of published weights."""

    tensors: tuple[TensorSpec, ...]
    """The published tensors."""
    tables: tuple[TableSpec, ...] | None = None
    """Tables that must be equal in the model of a sampler; None if the publisher was given tensors without a module."""


class LazyTensors(Mapping[str, Any]):
    """Tensors by name, each made whenever it is read: together they may need more memory than there is."""

    def __init__(self, specs: Iterable[TensorSpec], read: Callable[[str], Tensor]) -> None:
        """Describe the tensors by `specs`; `read` returns the one of a name."""
        self.specs = tuple(specs)
        """Their descriptions."""
        self._names = dict.fromkeys(spec.name for spec in self.specs)
        self._read = read

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def specs_of(tensors: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
    """Return the descriptions of `tensors`, for example a `state_dict`. Tied tensors are listed under all their names.

    >>> specs_of({"bias": np.zeros(3, np.float32)})
    (TensorSpec(name='bias', dtype='float32', shape=(3,), tied=''),)

    Raises:
        InvalidConfig: a value is not a tensor, or has a dtype that cannot be published.
    """
    if isinstance(tensors, LazyTensors):
        return tensors.specs
    first: dict[tuple[object, ...], str] = {}
    return tuple(_spec_of(name, tensor, first) for name, tensor in tensors.items())


def _spec_of(name: str, tensor: Tensor, first: dict[tuple[object, ...], str]) -> TensorSpec:
    dtype = str(getattr(tensor, "dtype", "")).removeprefix("torch.")
    if dtype not in DTYPES:
        raise InvalidConfig(f"{name}: expected a tensor of {', '.join(DTYPES)}, got {type(tensor).__name__} {dtype}")
    tied = first.setdefault((dtype, *memory_of(tensor)), name) if math.prod(tensor.shape) else name
    return TensorSpec(name, dtype, tuple(tensor.shape), "" if tied == name else tied)


def memory_of(tensor: Tensor) -> tuple[object, ...]:
    """Return a key that is equal for tensors that are the same elements of the same memory, also on the meta device."""
    if isinstance(tensor, np.ndarray):
        return (tensor.__array_interface__["data"][0], tensor.shape, tensor.strides)
    return (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride())  # noqa: SLF001


def cast_specs(specs: Iterable[TensorSpec], cast: Mapping[str, str]) -> tuple[TensorSpec, ...]:
    """Return `specs` with the dtypes that `cast` names replaced.

    Raises:
        InvalidConfig: `cast` names a dtype that cannot be published.
    """
    if unknown := {*cast, *cast.values()} - set(DTYPES):
        raise InvalidConfig(f"cast: expected dtypes among {', '.join(DTYPES)}, got {sorted(unknown)}")
    return tuple(spec._replace(dtype=cast.get(spec.dtype, spec.dtype)) for spec in specs)


def check_weights(expected: Iterable[TensorSpec], found: Iterable[TensorSpec], whose: str) -> None:
    """Raise if the tensors that were found differ from the expected ones in name, dtype or shape.

    Raises:
        WeightsMismatch: a list of every tensor that is missing, extra or different, with expected and found.
    """
    _refuse(_differences(expected, found), whose)


def differing(lines: Sequence[str], whose: str) -> str:
    """Return the message for tensors that differ, one line each."""
    return f"{whose}: {len(lines)} tensors differ\n  " + "\n  ".join(lines)


def _differences(expected: Iterable[TensorSpec], found: Iterable[TensorSpec]) -> list[str]:
    wanted, given = ({spec.name: spec for spec in specs} for specs in (expected, found))
    return [
        f"{name}: expected {wanted.get(name, 'no such tensor')}, found {given.get(name, 'none')}"
        for name in dict.fromkeys([*wanted, *given])
        if _bare(wanted.get(name)) != _bare(given.get(name))
    ]


def _bare(spec: TensorSpec | None) -> tuple[object, ...] | None:
    return None if spec is None else spec[:3]


def _refuse(lines: Sequence[str], whose: str) -> None:
    if lines:
        raise WeightsMismatch(differing(lines, whose))


@dataclass(frozen=True, slots=True)
class FusedTensor:
    """A tensor of one side that is several on the other: `whole` is the rows of all `parts`, concatenated.

    `*` stands for any piece of a name between dots, the same in all names: one `FusedTensor` describes every layer.

        FusedTensor("layers.*.gate_up.weight", ("layers.*.gate.weight", "layers.*.up.weight"))
    """

    whole: str
    parts: tuple[str, ...]

    def instances(self, names: Iterable[str]) -> list[FusedTensor]:
        """Return this without `*`, once for every set of parts with one in `names`."""
        patterns = [re.compile(re.escape(part).replace(r"\*", r"([^.]+)")) for part in self.parts]
        matches = [pattern.fullmatch(name) for name in names for pattern in patterns]
        return list(dict.fromkeys(self._filled(match.groups()) for match in matches if match))

    def _filled(self, pieces: Sequence[str]) -> FusedTensor:
        whole, *parts = (_filled(pattern, pieces) for pattern in (self.whole, *self.parts))
        return FusedTensor(whole, tuple(parts))


def _filled(pattern: str, pieces: Sequence[str]) -> str:
    left = iter(pieces)
    return re.sub(r"\*", lambda _: next(left, "*"), pattern)


class Part(NamedTuple):
    """A tensor of one side, and its position on the other."""

    spec: TensorSpec
    whole: str
    """The tensor whose rows it is; its own name if it is not fused."""
    offset: int
    """Bytes of `whole` before it."""


def packed(
    specs: Sequence[TensorSpec], fused: Iterable[FusedTensor], whose: str
) -> tuple[tuple[TensorSpec, ...], tuple[Part, ...]]:
    """Return `specs` with `fused` parts replaced by whole tensors, and the position of each of `specs` among those.

    Raises:
        WeightsMismatch: a list of all parts that are absent, tied, or differ in more than their rows.
    """
    wholes, parts, lines = _packed(specs, [(rule, rule.instances(_names(specs))) for rule in fused])
    _refuse(lines, whose)
    return wholes, parts


def fitted(
    model: Sequence[TensorSpec], published: Sequence[TensorSpec], fused: Iterable[FusedTensor], whose: str
) -> tuple[Part, ...]:
    """Return the position of each tensor of a model among the published ones.

    Raises:
        WeightsMismatch: a list of every tensor that is missing, extra, different, or tied in the model alone.
    """
    parts, lines = fit(model, published, fused)
    _refuse(lines, whose)
    return parts


def fit(
    model: Sequence[TensorSpec], published: Sequence[TensorSpec], fused: Iterable[FusedTensor]
) -> tuple[tuple[Part, ...], list[str]]:
    """Fit as `fitted` does, and return the differences, one line each; if there are any, the positions are invalid."""
    names, there = _names(model), _names(published)
    split = [(rule, [each for each in rule.instances(names) if each.whole in there]) for rule in fused]
    wholes, parts, lines = _packed(model, [(rule, each) for rule, each in split if each])
    lines += _differences(wholes, published)
    return parts, lines or _parted(model, parts, published)


def _names(specs: Iterable[TensorSpec]) -> list[str]:
    return [spec.name for spec in specs]


def _packed(
    specs: Sequence[TensorSpec], rules: Iterable[tuple[FusedTensor, Sequence[FusedTensor]]]
) -> tuple[tuple[TensorSpec, ...], tuple[Part, ...], list[str]]:
    """Pack as `packed` does, and return the errors, one line each; such parts are not fused."""
    known = {spec.name: spec for spec in specs}
    places: dict[str, tuple[TensorSpec, dict[str, Part]]] = {}
    lines: list[str] = []
    for rule, instances in rules:
        if not instances:
            lines.append(f"{rule.whole}: expected tensors named {', '.join(rule.parts)}, found none")
        for each in instances:
            members = [known.get(part) for part in each.parts]
            if each.whole in known:
                lines.append(f"{each.whole}: expected to be made of parts, found {known[each.whole]} already")
            elif (whole := _whole(each.whole, members)) is None:
                found = ", ".join(f"{part} {known.get(part, 'none')}" for part in each.parts)
                lines.append(f"{each.whole}: expected parts that differ in their rows alone, found {found}")
            else:
                places |= dict.fromkeys(each.parts, (whole, _placed(each.whole, members)))
    lines += [
        f"{spec.name}: expected no tie to a part, found one to {spec.tied}" for spec in specs if spec.tied in places
    ]
    wholes = dict.fromkeys(places[spec.name][0] if spec.name in places else spec for spec in specs)
    parts = [places[spec.name][1][spec.name] if spec.name in places else Part(spec, spec.name, 0) for spec in specs]
    return tuple(wholes), tuple(parts), lines


def _whole(name: str, parts: Sequence[TensorSpec | None]) -> TensorSpec | None:
    """Return the tensor that these parts make; None if they do not fit."""
    present = [part for part in parts if part is not None and part.shape and not part.tied]
    if len(present) < len(parts) or len({(part.dtype, part.shape[1:]) for part in present}) > 1:
        return None
    return TensorSpec(name, present[0].dtype, (sum(part.shape[0] for part in present), *present[0].shape[1:]))


def _placed(whole: str, parts: Iterable[TensorSpec | None]) -> dict[str, Part]:
    placed: dict[str, Part] = {}
    offset = 0
    for part in parts:
        if part is not None:
            placed[part.name] = Part(part, whole, offset)
            offset += part.nbytes
    return placed


def _parted(model: Iterable[TensorSpec], parts: Iterable[Part], published: Iterable[TensorSpec]) -> list[str]:
    """Return a line for each tie of the model that the published tensors do not have: one of the two would be lost."""
    owner = {spec.name: spec.tied or spec.name for spec in published}
    place = {part.spec.name: (owner[part.whole], part.offset) for part in parts}
    return [
        f"{spec.name}: expected one tensor with {spec.tied}, found another"
        for spec in model
        if spec.tied and place[spec.name] != place[spec.tied]
    ]
