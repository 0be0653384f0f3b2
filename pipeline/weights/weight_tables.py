"""Tables: non-persistent buffers that a module computes when it is constructed. Mainly rotary frequencies.

They are not published: the model of a sampler computes its own, from its own configuration. Their descriptions and the
hashes of their bytes are published, so that configurations with other numbers are detected. Tensors that are plain
attributes of a module have no names that two sides could compare.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import xxhash
from torch import Tensor, nn

from ..errors import InvalidConfig
from .weight_memory import bytes_of
from .weight_specs import TableSpec


def tables_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield the name of every table of `model`, its module, and its name there; a shared one under all its names."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():  # noqa: SLF001 (torch has no public function for it)
            if buffer is not None and name in module._non_persistent_buffers_set:  # noqa: SLF001 (as above)
                yield f"{prefix}.{name}" if prefix else name, module, name


def published_tables(model: nn.Module) -> tuple[TableSpec, ...]:
    """Return the descriptions of the tables of `model`, with their current values.

    >>> import torch
    >>> class Rotary(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.register_buffer("inv_freq", torch.ones(2), persistent=False)
    >>> print(*published_tables(Rotary()))
    float32 [2] of xxh3 8574b1eb820552229b6204a3f4c0dfc5

    Raises:
        InvalidConfig: one is on the meta device, without values.
    """
    specs = [_spec_of(name, module.get_buffer(own)) for name, module, own in tables_of(model)]
    if empty := [spec.name for spec in specs if not spec.xxh3]:
        raise InvalidConfig(f"model: expected one whose tables are computed, got {empty} on the meta device")
    return tuple(specs)


def table_differences(
    published: Sequence[TableSpec] | None, model: nn.Module, made: Mapping[tuple[nn.Module, str], Tensor | None]
) -> list[str]:
    """Return a line for each table of `model` that is missing, extra or different from the published one.

    Args:
        published: None for no comparison.
        model: the model of a sampler.
        made: by module and name there, the computed values of tables on the meta device; None for one that cannot be
            computed, and is not compared.
    """
    if published is None:
        return []
    tables = [(name, made.get((module, own), module.get_buffer(own))) for name, module, own in tables_of(model)]
    unknown = {name for name, table in tables if table is None}
    expected = {name: _spec_of(name, table) for name, table in tables if table is not None}
    return list(_lines(expected, {spec.name: spec for spec in published if spec.name not in unknown}))


def _lines(expected: Mapping[str, TableSpec], found: Mapping[str, TableSpec]) -> Iterable[str]:
    for name in dict.fromkeys([*expected, *found]):
        wanted, had = expected.get(name), found.get(name)
        if wanted != had:
            numbers = wanted and had and had.xxh3 and wanted[:3] == had[:3]
            why = ": from another configuration or dtype, or changed since" if numbers else ""
            yield f"{name}: expected {wanted or 'no such table'}, found {had or 'none'}{why}"


def _spec_of(name: str, table: Tensor) -> TableSpec:
    dtype = str(table.dtype).removeprefix("torch.")
    digest = "" if table.is_meta else xxhash.xxh3_128_hexdigest(bytes_of(table, dtype).data)
    return TableSpec(name, dtype, tuple(table.shape), digest)
